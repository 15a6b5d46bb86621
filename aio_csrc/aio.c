/* Opening and closing a context, and its entry points. The header says what they promise; context.h how it is
 * held.
 *
 * The entry points are thin: check the process and the arguments, take the lock, change the request table,
 * wake the driver. All I/O happens in the driver thread, all waiting on one condition variable.
 */
#define _GNU_SOURCE
#include "context.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum {
    MAX_QUEUE_DEPTH = 512,
    FULL_DEPTH_FILES = 8, /* so many files reach their depth at the same time; more share what that makes */
};
static const uint64_t MAX_BLOCK_SIZE = UINT64_C(1) << 30; /* one kernel transfer ends at 2 GiB - 4 KiB */

int aio_thread_start(pthread_t *thread, void *(*run)(void *), void *argument)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(thread, NULL, run, argument);
    if (!error)
        pthread_setname_np(*thread, "tiering-aio");
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return -error;
}

static int start_backend(aio_context *context, const char *engine)
{
    static const struct aio_backend_ops *const known[] = {&aio_backend_libaio, &aio_backend_threads};
    int probing = strcmp(engine, "auto") == 0;
    int error = -EINVAL;
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (!probing && strcmp(engine, known[i]->name) != 0)
            continue;
        context->backend.ops = known[i];
        context->engine = known[i]->name;
        error = known[i]->init(&context->backend, context->capacity);
        if (error == 0)
            return 0;
    }
    context->backend.ops = NULL;
    return error;
}

static int allocate_blocks(aio_context *context)
{
    unsigned n = context->capacity;
    context->blocks = calloc(n, sizeof context->blocks[0]);
    context->free_blocks = calloc(n, sizeof(void *));
    context->batch = calloc(n, sizeof(void *));
    context->ended = calloc(n, sizeof(void *));
    void *bounces = NULL; /* costs no memory until a tail touches it */
    if (!context->blocks || !context->free_blocks || !context->batch || !context->ended ||
        posix_memalign(&bounces, AIO_ALIGNMENT, (size_t)n * AIO_ALIGNMENT))
        return -ENOMEM;
    context->bounces = bounces;
    for (unsigned i = 0; i < n; i++) {
        context->blocks[i].op.index = i;
        context->blocks[i].bounce = context->bounces + (size_t)i * AIO_ALIGNMENT;
        context->free_blocks[n - 1 - i] = &context->blocks[i];
    }
    context->n_free_blocks = n;
    return 0;
}

static void free_context(aio_context *context)
{
    aio_requests_free(context);
    for (unsigned i = 0; i < context->n_files; i++)
        free(context->files[i]);
    free(context->files);
    free(context->blocks);
    free(context->free_blocks);
    free(context->batch);
    free(context->ended);
    free(context->bounces);
    free(context);
}

static void init_lock(aio_context *context)
{
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&context->lock, NULL);
    pthread_cond_init(&context->done, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

int aio_open(aio_context **out, const aio_options *options)
{
    if (!options->engine || (options->n_faults && !options->faults) || options->block_size == 0 ||
        options->block_size % AIO_ALIGNMENT || options->block_size > MAX_BLOCK_SIZE ||
        options->queue_depth == 0 || options->queue_depth > MAX_QUEUE_DEPTH)
        return -EINVAL;
    aio_context *context = calloc(1, sizeof *context);
    if (!context)
        return -ENOMEM;
    context->pid = getpid();
    context->block_size = options->block_size;
    context->queue_depth = options->queue_depth;
    context->capacity = options->queue_depth * FULL_DEPTH_FILES;
    context->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int error = context->wake_fd < 0 ? -errno : allocate_blocks(context);
    if (!error)
        error = start_backend(context, options->engine);
    if (!error && options->n_faults)
        error =
            aio_backend_add_faults(&context->backend, options->faults, options->n_faults, context->capacity);
    if (!error) {
        init_lock(context);
        error = aio_thread_start(&context->driver, aio_drive, context);
    }
    if (error) {
        if (context->backend.ops)
            context->backend.ops->exit(&context->backend, 0);
        if (context->wake_fd >= 0)
            close(context->wake_fd);
        free_context(context);
        return error;
    }
    *out = context;
    return 0;
}

const char *aio_engine_name(const aio_context *context) { return context->engine; }

static bool is_foreign(const aio_context *context) { return context->pid != getpid(); }

int aio_add_file(aio_context *context, int fd, int direct)
{
    if (is_foreign(context))
        return -ECHILD;
    if (fcntl(fd, F_GETFD) < 0)
        return -errno;
    struct file *file = calloc(1, sizeof *file);
    if (!file)
        return -ENOMEM;
    file->fd = fd;
    file->direct = direct != 0;

    int index = -ENOMEM;
    pthread_mutex_lock(&context->lock);
    struct file **files = realloc(context->files, (context->n_files + 1) * sizeof *files);
    if (files) {
        context->files = files;
        index = (int)context->n_files++;
        files[index] = file;
    }
    pthread_mutex_unlock(&context->lock);
    if (index < 0)
        free(file);
    return index;
}

static bool is_valid(const struct request *request)
{
    if (request->kind == AIO_FLUSH)
        return true;
    if (request->nbytes > INT64_MAX || request->offset > INT64_MAX - request->nbytes)
        return false;
    if (!request->data && request->nbytes)
        return false;
    return !request->file->direct || ((uintptr_t)request->data | request->offset) % AIO_ALIGNMENT == 0;
}

int64_t aio_submit(aio_context *context, int kind, int file, void *data, uint64_t offset, uint64_t nbytes,
                   int priority, const int64_t *after, size_t n_after)
{
    if (is_foreign(context))
        return -ECHILD;
    if (kind < 0 || kind >= AIO_KINDS || priority < 0 || priority >= AIO_PRIORITIES || (n_after && !after))
        return -EINVAL;
    struct request wanted = {.kind = kind, .priority = priority};
    if (kind != AIO_FLUSH) {
        wanted.data = data;
        wanted.offset = offset;
        wanted.nbytes = nbytes;
    }
    int64_t ticket = -EINVAL;
    pthread_mutex_lock(&context->lock);
    if (context->closing) {
        ticket = -ESHUTDOWN;
    } else if (file >= 0 && (unsigned)file < context->n_files) {
        wanted.file = context->files[file];
        if (is_valid(&wanted))
            ticket = aio_request_add(context, &wanted, after, n_after);
    }
    pthread_mutex_unlock(&context->lock);
    return ticket;
}

static struct timespec deadline_after(int64_t timeout_ns)
{
    uint64_t at = aio_now_ns() + (uint64_t)timeout_ns;
    return (struct timespec){.tv_sec = (time_t)(at / 1000000000u), .tv_nsec = (long)(at % 1000000000u)};
}

int aio_wait(aio_context *context, int64_t ticket, int64_t timeout_ns, int64_t *result)
{
    if (is_foreign(context))
        return -ECHILD;
    struct timespec deadline = {0};
    if (timeout_ns > 0)
        deadline = deadline_after(timeout_ns);
    int error, waited = 0;
    struct request *request;
    pthread_mutex_lock(&context->lock);
    /* Looked up anew after every sleep: another thread may have released it, and its slot may serve another
     * ticket. */
    while ((request = aio_request_find(context, ticket, &error)) && !error &&
           request->state != REQUEST_DONE) {
        if (timeout_ns == 0 || waited == ETIMEDOUT) {
            error = -ETIMEDOUT;
            break;
        }
        request->watched = true;
        waited = timeout_ns < 0 ? pthread_cond_wait(&context->done, &context->lock)
                                : pthread_cond_timedwait(&context->done, &context->lock, &deadline);
    }
    if (!error)
        *result = request->result;
    pthread_mutex_unlock(&context->lock);
    return error;
}

int aio_release(aio_context *context, int64_t ticket)
{
    if (is_foreign(context))
        return -ECHILD;
    int error;
    pthread_mutex_lock(&context->lock);
    struct request *request = aio_request_find(context, ticket, &error);
    if (!error && request->state != REQUEST_DONE)
        error = -EBUSY;
    if (!error)
        aio_request_release(context, request);
    pthread_mutex_unlock(&context->lock);
    return error;
}

int aio_stats(aio_context *context, int file, aio_file_stats *out)
{
    if (is_foreign(context))
        return -ECHILD;
    int error = -EINVAL;
    pthread_mutex_lock(&context->lock);
    if (file >= 0 && (unsigned)file < context->n_files) {
        const struct file *counted = context->files[file];
        uint64_t now = aio_now_ns();
        *out = counted->stats;
        for (int kind = 0; kind < AIO_KINDS; kind++)
            if (out->kind[kind].in_flight && now > counted->busy_since[kind])
                out->kind[kind].busy_ns += now - counted->busy_since[kind];
        error = 0;
    }
    pthread_mutex_unlock(&context->lock);
    return error;
}

int aio_close(aio_context *context)
{
    int forked = is_foreign(context);
    if (context->closed)
        return 0;
    context->closed = true;
    if (!forked) {
        pthread_mutex_lock(&context->lock);
        context->closing = true;
        aio_requests_cancel(context);
        aio_wake_driver(context);
        pthread_mutex_unlock(&context->lock);
        pthread_join(context->driver, NULL);
    }
    context->backend.ops->exit(&context->backend, forked);
    close(context->wake_fd);
    return 0;
}

void aio_free(aio_context *context)
{
    if (!context)
        return;
    aio_close(context);
    if (!is_foreign(context)) { /* in a child the lock may be held by a thread that does not exist here */
        pthread_cond_destroy(&context->done);
        pthread_mutex_destroy(&context->lock);
    }
    free_context(context);
}

int aio_lock_memory(void *address, size_t nbytes) { return mlock(address, nbytes) < 0 ? -errno : 0; }
