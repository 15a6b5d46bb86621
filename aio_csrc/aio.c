/* Opening and closing a context, and its files. aio.h documents the entry points; context.h has the locking rules.
 *
 * An entry point checks the process and the arguments, locks the context, changes the request table, and wakes the
 * driver. All I/O happens in the driver thread.
 */
#define _GNU_SOURCE
#include "context.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "system.h"

enum {
    MAX_QUEUE_DEPTH = 512,
    MAX_SUMMERS = 8,      /* a thread sums about 12 GB/s */
    FULL_DEPTH_FILES = 8, /* files that can reach their depth at once; more files share that many blocks */
};
static const uint64_t MAX_BLOCK_SIZE = UINT64_C(1) << 30; /* the kernel's limit is 2 GiB - 4 KiB */

static int start_backend(aio_context *context, const char *engine)
{
    static const struct aio_backend_ops *const engines[] = {&aio_backend_uring, &aio_backend_libaio,
                                                            &aio_backend_threads};
    int32_t *const passed_over[] = {&context->info.io_uring_error, &context->info.libaio_error, NULL};
    bool probing = strcmp(engine, "auto") == 0;
    int error = -EINVAL;
    for (size_t i = 0; i < sizeof engines / sizeof engines[0]; i++) {
        if (!probing && strcmp(engine, engines[i]->name) != 0)
            continue;
        /* No lock: the driver thread does not exist yet. */
        context->backend = (struct aio_backend){.ops = engines[i]};
        error = engines[i]->init(&context->backend, context->capacity, context->registered);
        if (error == 0) {
            context->info.engine = engines[i]->name;
            context->info.flags = context->backend.flags | (context->verify ? AIO_USES_VERIFY : 0);
            return 0;
        }
        if (probing && passed_over[i])
            *passed_over[i] = error;
    }
    context->backend.ops = NULL;
    return error;
}

/* Called by a worker that has summed a block. */
static void wake_for_sums(void *argument)
{
    aio_context *context = argument;
    context->backend.ops->wake(&context->backend);
}

/* Threads for checksums, but not more than a fast array of drives needs. Each starts when there is work. */
static int start_summers(aio_context *context, unsigned n)
{
    n = n < 1 ? 1 : n < MAX_SUMMERS ? n : MAX_SUMMERS;
    return aio_backend_start_threads(&context->summers, n, wake_for_sums, context);
}

static int allocate_blocks(aio_context *context)
{
    unsigned n = context->capacity;
    context->blocks = calloc(n, sizeof context->blocks[0]);
    context->free_blocks = calloc(n, sizeof(void *));
    context->batch = calloc(n, sizeof(void *));
    context->ended = calloc(n, sizeof(void *));
    context->fresh = calloc(n, sizeof(void *));
    context->landed = calloc(n, sizeof(void *));
    context->summed = calloc(n, sizeof(void *));
    context->compared = calloc(n, sizeof(void *));
    void *bounces = NULL; /* takes no memory until an edge touches its pages */
    if (!context->blocks || !context->free_blocks || !context->batch || !context->ended || !context->fresh ||
        !context->landed || !context->summed || !context->compared ||
        posix_memalign(&bounces, AIO_MAX_DIRECT, (size_t)n * AIO_MAX_DIRECT))
        return -ENOMEM;
    context->bounces = bounces;
    for (unsigned i = 0; i < n; i++) {
        context->blocks[i].op.index = i;
        context->blocks[i].bounce = context->bounces + (size_t)i * AIO_MAX_DIRECT;
        context->free_blocks[n - 1 - i] = &context->blocks[i];
    }
    context->n_free_blocks = n;
    return 0;
}

static void free_context(aio_context *context)
{
    aio_requests_free(context);
    for (unsigned i = 0; i < context->n_files; i++) {
        aio_checksums_free(&context->files[i]->checksums);
        free(context->files[i]);
    }
    free(context->regions);
    free(context->ready);
    free(context->files);
    free(context->blocks);
    free(context->free_blocks);
    free(context->batch);
    free(context->ended);
    free(context->fresh);
    free(context->landed);
    free(context->summed);
    free(context->compared);
    free(context->bounces);
    free(context);
}

static void init_lock(aio_context *context)
{
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&context->lock, NULL);
    pthread_cond_init(&context->any, &monotonic);
    for (int i = 0; i < WAIT_SHARDS; i++)
        pthread_cond_init(&context->done[i], &monotonic);
    pthread_condattr_destroy(&monotonic);
}

/* Number of forks between this process and its first ancestor with a context. Each entry point compares it with the
 * context's, because getpid() is a system call. Only the handler in the child writes it, before any other thread
 * exists. fork_lock is held during fork and take_down, so that a child never sees a backend that is half taken down:
 * it must know whether there are descriptors to close. */
static unsigned forks;
static pthread_mutex_t fork_lock = PTHREAD_MUTEX_INITIALIZER;

static void before_fork(void) { pthread_mutex_lock(&fork_lock); }

static void after_fork_in_parent(void) { pthread_mutex_unlock(&fork_lock); }

static void after_fork_in_child(void)
{
    forks++;
    pthread_mutex_unlock(&fork_lock); /* locked by before_fork in the thread that this one is a copy of */
}

static void watch_forks(void) { pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child); }

bool aio_is_foreign(const aio_context *context) { return context->forks != forks; }

/* End the backend, if it has not been ended. */
static void take_down(aio_context *context)
{
    pthread_mutex_lock(&fork_lock);
    struct aio_backend summers = context->summers;
    context->summers.ops = NULL;
    /* First: the workers wake the backend. */
    if (summers.ops)
        summers.ops->exit(&summers, aio_is_foreign(context));
    struct aio_backend backend = context->backend;
    /* Taken out under the lock, so that it is ended once: by the driver, by aio_open after an error, or in a
     * child by aio_close. */
    context->backend.ops = NULL;
    if (backend.ops)
        backend.ops->exit(&backend, aio_is_foreign(context));
    pthread_mutex_unlock(&fork_lock);
}

static void *drive(void *argument)
{
    aio_context *context = argument;
    aio_drive(context);
    take_down(context);
    return NULL;
}

/* Whether a direct file can have this alignment; 0: asked of the kernel. */
static bool is_alignment(uint32_t alignment)
{
    return alignment == 0 ||
           (alignment >= AIO_ALIGNMENT && alignment <= AIO_MAX_DIRECT && (alignment & (alignment - 1)) == 0);
}

int aio_open(aio_context **out, const aio_options *options)
{
    if (!options->engine || (options->n_faults && !options->faults) || options->block_size == 0 ||
        options->block_size % AIO_ALIGNMENT || options->block_size > MAX_BLOCK_SIZE ||
        options->queue_depth == 0 || options->queue_depth > MAX_QUEUE_DEPTH ||
        !is_alignment(options->alignment))
        return -EINVAL;
    aio_context *context = calloc(1, sizeof *context);
    if (!context)
        return -ENOMEM;
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    /* Before the counter is read: a fork from here on is counted, so that the child finds this context to be its
     * parent's. */
    pthread_once(&once, watch_forks);
    context->forks = forks;
    context->block_size = options->block_size;
    context->queue_depth = options->queue_depth;
    context->capacity = options->queue_depth * FULL_DEPTH_FILES;
    context->registered = options->registered != 0;
    context->verify = options->verify != 0;
    context->alignment = options->alignment;
    int error = allocate_blocks(context);
    if (!error)
        error = start_backend(context, options->engine);
    if (!error)
        error = aio_buffers_allocate(context);
    if (!error && context->verify)
        error = start_summers(context, options->sum_threads);
    if (!error && (options->n_faults || options->alignment))
        error = aio_backend_add_faults(&context->backend, options, context->capacity);
    if (!error) {
        /* Before the thread, which takes the lock first. */
        init_lock(context);
        error = aio_thread_start(&context->driver, "tiering-aio", drive, context);
    }
    if (error) {
        take_down(context);
        free_context(context);
        return error;
    }
    *out = context;
    return 0;
}

int aio_describe(aio_context *context, aio_info *out)
{
    if (aio_is_foreign(context))
        return -ECHILD;
    pthread_mutex_lock(&context->lock);
    *out = context->info;
    pthread_mutex_unlock(&context->lock);
    return 0;
}

int aio_add_file(aio_context *context, int fd, int direct)
{
    if (aio_is_foreign(context))
        return -ECHILD;
    if (fcntl(fd, F_GETFD) < 0)
        return -errno;
    int alignment = 0;
    if (direct)
        alignment = context->alignment ? (int)context->alignment : aio_direct_alignment(fd);
    if (alignment < 0)
        return alignment;
    struct file *file = calloc(1, sizeof *file);
    if (!file)
        return -ENOMEM;
    file->fd = fd;
    file->alignment = (uint32_t)alignment;

    int index = -ENOMEM;
    pthread_mutex_lock(&context->lock);
    /* Under the lock: the driver reads the array, which may move here. The files themselves stay where they are. */
    struct file **files = realloc(context->files, (context->n_files + 1) * sizeof *files);
    if (files) {
        context->files = files;
        file->index = index = (int)context->n_files++;
        files[index] = file;
        context->n_buffered += !file->alignment;
    }
    pthread_mutex_unlock(&context->lock);
    if (index < 0)
        free(file);
    return index;
}

/* Get or, with `to`, set checksums. */
static int move_checksums(aio_context *context, int file, uint64_t first, size_t n, uint32_t *from,
                          const uint32_t *to)
{
    if (aio_is_foreign(context))
        return -ECHILD;
    if (!context->verify)
        return -EOPNOTSUPP;
    int error = 0;
    pthread_mutex_lock(&context->lock);
    /* They are the driver's. It has none in use when all requests are done, and begins none while the lock is held. */
    if (file < 0 || (unsigned)file >= context->n_files)
        error = -EINVAL;
    else if (context->n_live)
        error = -EBUSY;
    else if (to)
        error = aio_checksums_set(&context->files[file]->checksums, first, n, to);
    else
        aio_checksums_get(&context->files[file]->checksums, first, n, from);
    pthread_mutex_unlock(&context->lock);
    return error;
}

int aio_get_checksums(aio_context *context, int file, uint64_t first, size_t n, uint32_t *sums)
{
    return move_checksums(context, file, first, n, sums, NULL);
}

int aio_set_checksums(aio_context *context, int file, uint64_t first, size_t n, const uint32_t *sums)
{
    return move_checksums(context, file, first, n, NULL, sums);
}

int aio_close(aio_context *context)
{
    if (aio_is_foreign(context)) {
        take_down(context);
        return 0;
    }
    if (context->closed)
        return 0;
    context->closed = true;
    pthread_mutex_lock(&context->lock);
    /* Under one lock with the cancellation: no request can be added behind those that it ends. */
    context->closing = true;
    aio_requests_cancel(context);
    /* The driver may be asleep with nothing in flight: it looks at `closing` only when it wakes. */
    aio_wake_driver(context);
    pthread_mutex_unlock(&context->lock);
    pthread_join(context->driver, NULL); /* the driver thread takes the backend down before it ends */
    return 0;
}

void aio_free(aio_context *context)
{
    if (!context)
        return;
    /* Ends the driver: afterwards no thread uses the memory. */
    aio_close(context);
    if (aio_is_foreign(context))
        return; /* at the fork, another thread may have been changing the context: its memory is inconsistent */
    pthread_cond_destroy(&context->any);
    for (int i = 0; i < WAIT_SHARDS; i++)
        pthread_cond_destroy(&context->done[i]);
    pthread_mutex_destroy(&context->lock);
    free_context(context);
}

int aio_lock_memory(void *address, size_t nbytes) { return mlock(address, nbytes) < 0 ? -errno : 0; }

int aio_direct_alignment(int fd)
{
    /* struct statx of <linux/stat.h>, which older headers lack: stx_mask is its first word. */
    enum { EMPTY_PATH = 0x1000, DIOALIGN = 0x2000, MEMORY = 0x98 / 4, OFFSET = 0x9c / 4 };
    uint32_t answer[64] = {0};
    if (syscall(SYS_statx, fd, "", EMPTY_PATH, DIOALIGN, answer) < 0)
        return errno == EBADF ? -EBADF : AIO_ALIGNMENT;
    /* Before Linux 6.1 there is no answer, and no device with larger blocks. Memory is aligned to pages only. */
    uint32_t alignment = answer[OFFSET];
    bool possible = answer[0] & DIOALIGN && alignment > AIO_ALIGNMENT && answer[MEMORY] <= AIO_ALIGNMENT;
    return possible && is_alignment(alignment) ? (int)alignment : AIO_ALIGNMENT;
}

int aio_reserve(int fd, uint64_t nbytes)
{
    if (nbytes == 0 || nbytes > INT64_MAX)
        return nbytes ? -EFBIG : 0;
    int failed;
    do
        failed = fallocate(fd, 0, 0, (off_t)nbytes); /* unlike posix_fallocate, the bare system call */
    while (failed && errno == EINTR);
    return failed ? -errno : 0;
}
