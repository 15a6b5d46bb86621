/* Linux native AIO, by its system calls: no libaio to link, whose soname differs between distributions.
 *
 * Asynchronous for direct files only; on a buffered one io_submit does the transfer before it returns.
 * Completions are announced on an eventfd (IOCB_FLAG_RESFD), which the driver polls beside its own wake-up,
 * and fetched without waiting. The ring belongs to the address space, not to a descriptor: a forked child has
 * none, and nothing to give back.
 */
#define _GNU_SOURCE
#include "backend.h"

#include <errno.h>
#include <linux/aio_abi.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

struct ring {
    aio_context_t id;
    int event_fd;
    unsigned capacity;
    struct iocb **batch;     /* capacity pointers, scratch of submit */
    struct io_event *events; /* capacity, scratch of reap */
    struct aio_op *ended;    /* flushes done in place */
    struct iocb iocbs[];     /* by op index */
};

static void libaio_exit(struct aio_backend *backend, int forked)
{
    struct ring *ring = backend->state;
    if (!forked)
        syscall(SYS_io_destroy, ring->id);
    close(ring->event_fd);
    free(ring->batch);
    free(ring->events);
    free(ring);
}

static int libaio_init(struct aio_backend *backend, unsigned capacity)
{
    int error = -ENOMEM;
    struct ring *ring = calloc(1, sizeof *ring + capacity * sizeof ring->iocbs[0]);
    if (!ring)
        return error;
    ring->capacity = capacity;
    ring->batch = calloc(capacity, sizeof ring->batch[0]);
    ring->events = calloc(capacity, sizeof ring->events[0]);
    if (!ring->batch || !ring->events)
        goto no_memory;
    ring->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (ring->event_fd < 0) {
        error = -errno;
        goto no_memory;
    }
    if (syscall(SYS_io_setup, capacity, &ring->id) < 0) {
        error = -errno; /* EAGAIN: fs.aio-max-nr is used up; ENOSYS, EPERM: not here */
        close(ring->event_fd);
        goto no_memory;
    }
    backend->state = ring;
    backend->event_fd = ring->event_fd;
    return 0;

no_memory:
    free(ring->batch);
    free(ring->events);
    free(ring);
    return error;
}

static void fill(struct iocb *iocb, const struct ring *ring, struct aio_op *op)
{
    static const uint16_t opcodes[AIO_KINDS] = {IOCB_CMD_PREAD, IOCB_CMD_PWRITE, IOCB_CMD_FDSYNC};
    *iocb = (struct iocb){
        .aio_data = (uintptr_t)op,
        .aio_lio_opcode = opcodes[op->kind],
        .aio_fildes = (uint32_t)op->fd,
        .aio_flags = IOCB_FLAG_RESFD,
        .aio_resfd = (uint32_t)ring->event_fd,
    };
    if (op->kind != AIO_FLUSH) {
        iocb->aio_buf = (uintptr_t)op->data;
        iocb->aio_nbytes = op->nbytes;
        iocb->aio_offset = (int64_t)op->offset;
    }
}

static int libaio_submit(struct aio_backend *backend, struct aio_op **ops, unsigned n)
{
    struct ring *ring = backend->state;
    for (unsigned i = 0; i < n; i++) {
        ring->batch[i] = &ring->iocbs[ops[i]->index];
        fill(ring->batch[i], ring, ops[i]);
    }
    long accepted = syscall(SYS_io_submit, ring->id, (long)n, ring->batch);
    if (accepted > 0)
        return (int)accepted;
    if (accepted == 0)
        return -EAGAIN;
    if (errno == EINVAL && ops[0]->kind == AIO_FLUSH) { /* before Linux 4.18, or a file system without it */
        ops[0]->result = fdatasync(ops[0]->fd) < 0 ? -errno : 0;
        ops[0]->next = ring->ended;
        ring->ended = ops[0];
        eventfd_write(ring->event_fd, 1);
        return 1;
    }
    return errno == EINTR ? -EAGAIN : -errno;
}

static unsigned libaio_reap(struct aio_backend *backend, struct aio_op **ended, unsigned max)
{
    struct ring *ring = backend->state;
    eventfd_t count;
    struct timespec now = {0, 0};
    unsigned n = 0;
    eventfd_read(ring->event_fd, &count); /* first: what ends after this line sets it again */
    for (; ring->ended && n < max; ring->ended = ring->ended->next)
        ended[n++] = ring->ended;
    unsigned room = max - n < ring->capacity ? max - n : ring->capacity;
    long fetched = room ? syscall(SYS_io_getevents, ring->id, 0L, (long)room, ring->events, &now) : 0;
    for (long i = 0; i < fetched; i++) {
        ended[n] = (struct aio_op *)(uintptr_t)ring->events[i].data;
        ended[n++]->result = ring->events[i].res;
    }
    if (n == max || (fetched < 0 && errno == EINTR))
        eventfd_write(ring->event_fd, 1); /* there may be more, or a signal cut in: look again */
    return n;
}

const struct aio_backend_ops aio_backend_libaio = {
    .name = "libaio",
    .init = libaio_init,
    .submit = libaio_submit,
    .reap = libaio_reap,
    .exit = libaio_exit,
};
