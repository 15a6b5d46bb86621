/* io_uring by system calls, without liburing.
 *
 * Only the driver uses the ring, so no lock is needed, and the kernel can be told so (SINGLE_ISSUER). One system call
 * per iteration, io_uring_enter, submits the queued operations and waits for completions; if there are completions
 * and nothing to submit, there is no system call. A poll of an eventfd stays armed in the ring: wake writes to the
 * eventfd, and the completion of the poll ends the wait.
 *
 * Registered files save a reference count per operation, registered buffers the look-up and pinning of every page.
 * Both tables are created empty at init (for buffers, Linux 5.19) and filled when a file or buffer is first used; if
 * the kernel or RLIMIT_MEMLOCK refuses, operations work without registration.
 *
 * If the kernel can bind the ring to one task, the ring starts disabled, and the driver enables it: the ring is then
 * bound to the driver. From then on only the driver may enter it or register with it, so the driver also takes it
 * down: closing the descriptor alone would release files and pinned pages at some later time.
 *
 * A forked child inherits mappings and descriptor, and through the registered files a reference to the swap space: it
 * must call exit.
 */
#define _GNU_SOURCE
#include "backend.h"

#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "uring_abi.h"
#include "uring_abi_check.h"

enum {
    REGISTERED_FILES = 64, /* at most RLIMIT_NOFILE; files with a higher index are not registered */
    WAKE = 0,              /* user_data of the poll; for operations, user_data is their address */
};

struct ring {
    int fd, wake_fd;
    unsigned setup_flags;
    bool disabled; /* not enabled yet */
    bool armed;    /* the poll of wake_fd is submitted or queued */
    bool has_files, has_buffers;
    bool file_tried[REGISTERED_FILES], file_registered[REGISTERED_FILES];

    unsigned to_submit;     /* queued entries that the kernel has not consumed */
    struct aio_op *refused; /* operations that the kernel refused, for reap */
    unsigned sq_tail, sq_mask, cq_mask;
    /* Shared with the kernel. The driver writes sq_tail and cq_head, the kernel cq_tail. The writer of an index stores
     * it with release order after the entries before it; the reader loads it with acquire order before them. */
    unsigned *shared_sq_tail, *shared_cq_head, *shared_cq_tail;
    struct uring_sqe *sqes;
    struct uring_cqe *cqes;
    void *map;
    size_t map_bytes, sqes_bytes;
};

static int uring_register(int fd, unsigned opcode, const void *argument, unsigned n)
{
    long answer = syscall(URING_SYS_REGISTER, fd, opcode, argument, n);
    return answer < 0 ? -errno : (int)answer;
}

/* Create a ring with the best set of flags that this kernel supports. */
static int setup(struct ring *ring, unsigned entries, struct uring_params *params)
{
    static const unsigned flag_sets[] = {
        URING_SETUP_SINGLE_ISSUER | URING_SETUP_DEFER_TASKRUN | URING_SETUP_R_DISABLED |
            URING_SETUP_SUBMIT_ALL,
        URING_SETUP_COOP_TASKRUN | URING_SETUP_SUBMIT_ALL,
        0,
    };
    int error = -ENOSYS;
    for (unsigned i = 0; i < sizeof flag_sets / sizeof flag_sets[0]; i++) {
        *params = (struct uring_params){.flags = flag_sets[i] | URING_SETUP_CLAMP};
        ring->fd = (int)syscall(URING_SYS_SETUP, entries, params);
        ring->setup_flags = flag_sets[i];
        if (ring->fd >= 0)
            break;
        error = -errno;
        if (error != -EINVAL) /* EINVAL: the kernel does not support a flag */
            return error;
    }
    if (ring->fd < 0)
        return error;
    unsigned needed = URING_FEAT_SINGLE_MMAP | URING_FEAT_NODROP | URING_FEAT_EXT_ARG; /* Linux 5.11 */
    if ((params->features & needed) != needed || params->sq_entries < entries)
        return -EOPNOTSUPP;
    ring->disabled = ring->setup_flags & URING_SETUP_R_DISABLED;
    return 0;
}

static int map_ring(struct ring *ring, const struct uring_params *params)
{
    size_t sq_bytes = params->sq_off.array + params->sq_entries * sizeof(unsigned);
    size_t cq_bytes = params->cq_off.cqes + params->cq_entries * sizeof(struct uring_cqe);
    ring->map_bytes = sq_bytes > cq_bytes ? sq_bytes : cq_bytes;
    ring->sqes_bytes = params->sq_entries * sizeof(struct uring_sqe);
    char *map = mmap(NULL, ring->map_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring->fd,
                     (off_t)URING_OFF_SQ_RING);
    if (map == MAP_FAILED)
        return -errno;
    ring->map = map;
    void *sqes = mmap(NULL, ring->sqes_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring->fd,
                      (off_t)URING_OFF_SQES);
    if (sqes == MAP_FAILED)
        return -errno;
    ring->sqes = sqes;
    ring->cqes = (struct uring_cqe *)(map + params->cq_off.cqes);
    ring->shared_sq_tail = (unsigned *)(map + params->sq_off.tail);
    ring->shared_cq_head = (unsigned *)(map + params->cq_off.head);
    ring->shared_cq_tail = (unsigned *)(map + params->cq_off.tail);
    ring->sq_mask = *(unsigned *)(map + params->sq_off.ring_mask);
    ring->cq_mask = *(unsigned *)(map + params->cq_off.ring_mask);
    ring->sq_tail = *ring->shared_sq_tail;
    unsigned *indices = (unsigned *)(map + params->sq_off.array);
    for (unsigned i = 0; i < params->sq_entries; i++)
        indices[i] = i; /* entries are used in order, so the indirection is not needed */
    return 0;
}

/* Register empty tables, to be filled later. Any thread may do this before the ring is enabled. */
static void make_tables(struct aio_backend *backend, struct ring *ring)
{
    int32_t empty[REGISTERED_FILES];
    memset(empty, -1, sizeof empty);
    backend->files_error = uring_register(ring->fd, URING_REGISTER_FILES, empty, REGISTERED_FILES);
    ring->has_files = backend->files_error == 0;
    struct uring_rsrc_register buffers = {.nr = AIO_MAX_BUFFERS, .flags = URING_RSRC_REGISTER_SPARSE};
    ring->has_buffers = uring_register(ring->fd, URING_REGISTER_BUFFERS2, &buffers, sizeof buffers) == 0;
}

static void uring_exit(struct aio_backend *backend, int forked)
{
    struct ring *ring = backend->state;
    /* Unregistered first: closing the descriptor would release pinned pages and files later, in the background. A
     * child must not do that: the ring is its parent's, too. */
    if (ring->has_buffers && !forked)
        uring_register(ring->fd, URING_UNREGISTER_BUFFERS, NULL, 0);
    if (ring->has_files && !forked)
        uring_register(ring->fd, URING_UNREGISTER_FILES, NULL, 0);
    if (ring->sqes)
        munmap(ring->sqes, ring->sqes_bytes);
    if (ring->map)
        munmap(ring->map, ring->map_bytes);
    if (ring->fd >= 0)
        close(ring->fd);
    if (ring->wake_fd >= 0)
        close(ring->wake_fd);
    free(ring);
}

static int uring_init(struct aio_backend *backend, unsigned capacity, int registered)
{
    struct ring *ring = calloc(1, sizeof *ring);
    if (!ring)
        return -ENOMEM;
    backend->state = ring;
    ring->fd = -1;
    ring->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    struct uring_params params;
    int error = ring->wake_fd < 0 ? -errno : setup(ring, capacity + 1, &params); /* + 1: the poll */
    if (!error)
        error = map_ring(ring, &params);
    /* Some sandboxes allow the creation of a ring but not io_uring_enter. EBADFD: the ring is not enabled yet. */
    if (!error && syscall(URING_SYS_ENTER, ring->fd, 0, 0, 0, NULL, 0) < 0 && errno != EBADFD)
        error = -errno;
    if (error) {
        uring_exit(backend, 0);
        return error;
    }
    if (registered)
        make_tables(backend, ring);
    if (ring->setup_flags & URING_SETUP_SINGLE_ISSUER)
        backend->flags |= AIO_USES_SINGLE_ISSUER | AIO_USES_DEFER_TASKRUN;
    if (ring->setup_flags & URING_SETUP_COOP_TASKRUN)
        backend->flags |= AIO_USES_COOP_TASKRUN;
    return 0;
}

static void enable(struct ring *ring)
{
    if (!ring->disabled)
        return;
    ring->disabled = false;
    /* In the driver thread: with SINGLE_ISSUER, the kernel takes submissions only from the thread that has
     * enabled the ring. */
    uring_register(ring->fd, URING_REGISTER_ENABLE_RINGS, NULL, 0);
}

static struct uring_sqe *next_sqe(struct ring *ring)
{
    struct uring_sqe *sqe = &ring->sqes[ring->sq_tail++ & ring->sq_mask];
    ring->to_submit++;
    memset(sqe, 0, sizeof *sqe);
    return sqe;
}

/* Whether the file of the operation is registered. Registers it at its first use. */
static bool is_registered(struct aio_backend *backend, struct ring *ring, const struct aio_op *op)
{
    if (!ring->has_files || op->file >= REGISTERED_FILES)
        return false;
    if (!ring->file_tried[op->file]) {
        ring->file_tried[op->file] = true;
        int32_t fd = op->fd;
        struct uring_files_update update = {.offset = (uint32_t)op->file, .fds = (uintptr_t)&fd};
        int updated = uring_register(ring->fd, URING_REGISTER_FILES_UPDATE, &update, 1);
        ring->file_registered[op->file] = updated == 1;
        if (updated == 1)
            backend->flags |= AIO_USES_REGISTERED_FILES;
        else
            backend->files_error = updated;
    }
    return ring->file_registered[op->file];
}

/* The kernel refuses the queued entries (for example, after a new seccomp filter): make the error their result. */
static void refuse_queued(struct ring *ring, int error)
{
    /* From the tail back: the kernel has not consumed these entries, and reads the queue in io_uring_enter only. */
    for (; ring->to_submit; ring->to_submit--) {
        struct aio_op *op = (struct aio_op *)(uintptr_t)ring->sqes[--ring->sq_tail & ring->sq_mask].user_data;
        if (!op) {
            ring->armed = false;
            continue;
        }
        op->result = error;
        op->next = ring->refused;
        ring->refused = op;
    }
    __atomic_store_n(ring->shared_sq_tail, ring->sq_tail, __ATOMIC_RELEASE);
}

/* Submit the queued entries, and with URING_ENTER_GETEVENTS wait for at_least completions. */
static void enter(struct ring *ring, unsigned at_least, unsigned flags, int64_t timeout_ns)
{
    struct uring_timespec limit = {.tv_sec = timeout_ns / 1000000000, .tv_nsec = timeout_ns % 1000000000};
    struct uring_getevents_arg argument = {.ts = timeout_ns > 0 ? (uintptr_t)&limit : 0};
    /* The entries first, then the tail: the kernel reads all entries before it. */
    __atomic_store_n(ring->shared_sq_tail, ring->sq_tail, __ATOMIC_RELEASE);
    long consumed = syscall(URING_SYS_ENTER, ring->fd, ring->to_submit, at_least, flags | URING_ENTER_EXT_ARG,
                            &argument, sizeof argument);
    if (consumed > 0)
        ring->to_submit -= (unsigned)consumed;
    if (consumed >= 0 || errno == EINTR || errno == ETIME)
        return;
    /* EAGAIN, EBUSY: the kernel has no memory for requests now, so the entries stay queued. */
    if (errno != EAGAIN && errno != EBUSY)
        refuse_queued(ring, -errno);
    nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

static int uring_submit(struct aio_backend *backend, struct aio_op **ops, unsigned n)
{
    static const uint8_t opcodes[AIO_KINDS] = {URING_OP_READ, URING_OP_WRITE, URING_OP_FSYNC};
    struct ring *ring = backend->state;
    enable(ring);
    /* The queue cannot overflow: the ring has an entry for each of `capacity` operations. */
    for (unsigned i = 0; i < n; i++) {
        struct aio_op *op = ops[i];
        bool registered = is_registered(backend, ring, op);
        if (ring->to_submit >= AIO_UNPLUGGED && !(i > 0 && aio_joins(ops[i - 1], op)))
            enter(ring, 0, 0, 0); /* await submits the last two */
        struct uring_sqe *sqe = next_sqe(ring);
        sqe->opcode = opcodes[op->kind];
        /* The driver does not touch the operation until reap returns it. */
        sqe->user_data = (uintptr_t)op;
        sqe->fd = registered ? op->file : op->fd;
        sqe->flags = registered ? URING_SQE_FIXED_FILE : 0;
        if (op->kind == AIO_FLUSH) {
            sqe->op_flags = URING_FSYNC_DATASYNC;
            continue;
        }
        if (op->buffer >= 0) {
            sqe->opcode = op->kind == AIO_READ ? URING_OP_READ_FIXED : URING_OP_WRITE_FIXED;
            sqe->buf_index = (uint16_t)op->buffer;
        }
        sqe->addr = (uintptr_t)op->data;
        sqe->len = (uint32_t)op->nbytes;
        sqe->off = op->offset;
    }
    return (int)n;
}

static void arm(struct ring *ring)
{
    if (ring->armed)
        return;
    ring->armed = true;
    struct uring_sqe *sqe = next_sqe(ring);
    sqe->opcode = URING_OP_POLL_ADD;
    sqe->fd = ring->wake_fd;
    sqe->op_flags = POLLIN; /* 32 bits; big-endian machines, which swap the halves, are not supported */
    sqe->user_data = WAKE;
}

static void uring_await(struct aio_backend *backend, int64_t timeout_ns)
{
    struct ring *ring = backend->state;
    enable(ring);
    arm(ring);
    /* The head is this thread's own; the tail is the kernel's, loaded before the entries that uring_reap reads. */
    bool ended =
        ring->refused || *ring->shared_cq_head != __atomic_load_n(ring->shared_cq_tail, __ATOMIC_ACQUIRE);
    if (ended && ring->to_submit == 0)
        return;
    enter(ring, ended || timeout_ns == 0 ? 0 : 1, URING_ENTER_GETEVENTS, timeout_ns);
}

static unsigned uring_reap(struct aio_backend *backend, struct aio_op **ended, unsigned max)
{
    struct ring *ring = backend->state;
    unsigned head = *ring->shared_cq_head, tail = __atomic_load_n(ring->shared_cq_tail, __ATOMIC_ACQUIRE);
    unsigned n = 0;
    for (; ring->refused && n < max; ring->refused = ring->refused->next)
        ended[n++] = ring->refused;
    for (; head != tail && n < max; head++) {
        const struct uring_cqe *cqe = &ring->cqes[head & ring->cq_mask];
        struct aio_op *op = (struct aio_op *)(uintptr_t)cqe->user_data;
        if (op) {
            op->result = cqe->res;
            ended[n++] = op;
        } else {
            eventfd_t count;
            /* Before the next poll is armed. A wake that this swallows came after its request was queued, and
             * gather() follows. */
            eventfd_read(ring->wake_fd, &count);
            ring->armed = false;
        }
    }
    /* Release order, after the entries are read: the kernel may overwrite them from here on. */
    __atomic_store_n(ring->shared_cq_head, head, __ATOMIC_RELEASE);
    return n;
}

static void uring_wake(struct aio_backend *backend)
{
    const struct ring *ring = backend->state;
    eventfd_write(ring->wake_fd, 1);
}

static int uring_register_buffer(struct aio_backend *backend, unsigned number, void *address, size_t nbytes)
{
    struct ring *ring = backend->state;
    if (!ring->has_buffers)
        return -EOPNOTSUPP; /* before Linux 5.19 */
    enable(ring);
    struct iovec memory = {.iov_base = address, .iov_len = nbytes};
    struct uring_rsrc_update2 update = {.offset = number, .data = (uintptr_t)&memory, .nr = 1};
    int updated = uring_register(ring->fd, URING_REGISTER_BUFFERS_UPDATE, &update, sizeof update);
    if (updated != 1)
        return updated < 0 ? updated : -ENOMEM;
    backend->flags |= AIO_USES_REGISTERED_BUFFERS;
    return 0;
}

const struct aio_backend_ops aio_backend_uring = {
    .name = "io_uring",
    .init = uring_init,
    .submit = uring_submit,
    .await = uring_await,
    .reap = uring_reap,
    .wake = uring_wake,
    .register_buffer = uring_register_buffer,
    .exit = uring_exit,
};
