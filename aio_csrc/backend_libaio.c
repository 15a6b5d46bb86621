/* Linux native AIO by system calls, without the library libaio, whose soname differs between distributions.
 *
 * It is asynchronous for direct files only: on a buffered file, io_submit would do the transfer before it returns, and
 * one such file would hold up all others. So workers of the threads backend do the operations of buffered files, and
 * the flushes that a file system does not do asynchronously.
 *
 * The driver sleeps in io_getevents. A poll of an eventfd stays armed in the same ring (Linux 4.18): wake and the
 * workers write to the eventfd, and the completion of the poll ends the sleep. The ring belongs to the address space,
 * not to a descriptor: a forked child has no ring, and nothing to destroy.
 */
#define _GNU_SOURCE
#include "backend.h"

#include <errno.h>
#include <linux/aio_abi.h>
#include <poll.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { CMD_POLL = 5 }; /* IOCB_CMD_POLL, which older headers lack */

struct ring {
    aio_context_t id;
    int wake_fd;
    bool armed; /* the poll of wake_fd is submitted */
    unsigned capacity;
    struct iocb wake;
    struct iocb **batch;     /* capacity + 1 pointers, scratch of submit */
    struct io_event *events; /* capacity + 1, fetched by await */
    unsigned n_events;
    struct aio_backend workers;
    struct iocb iocbs[]; /* by op index */
};

static void libaio_exit(struct aio_backend *backend, int forked)
{
    struct ring *ring = backend->state;
    /* First: until they have ended, workers write to wake_fd. */
    if (ring->workers.ops)
        ring->workers.ops->exit(&ring->workers, forked);
    /* Waits for all operations. A child has no ring: it belongs to the parent's address space. */
    if (ring->id && !forked)
        syscall(SYS_io_destroy, ring->id);
    if (ring->wake_fd >= 0)
        close(ring->wake_fd);
    free(ring->batch);
    free(ring->events);
    free(ring);
}

static int arm(struct ring *ring)
{
    if (ring->armed)
        return 0;
    struct iocb *wake = &ring->wake;
    if (syscall(SYS_io_submit, ring->id, 1L, &wake) != 1)
        return -errno;
    ring->armed = true;
    return 0;
}

static void end_sleep(void *wake_fd) { eventfd_write(*(const int *)wake_fd, 1); }

static int libaio_init(struct aio_backend *backend, unsigned capacity, int registered)
{
    (void)registered; /* Linux AIO has no registration */
    struct ring *ring = calloc(1, sizeof *ring + capacity * sizeof ring->iocbs[0]);
    if (!ring)
        return -ENOMEM;
    backend->state = ring;
    ring->capacity = capacity;
    ring->batch = calloc(capacity + 1, sizeof ring->batch[0]);
    ring->events = calloc(capacity + 1, sizeof ring->events[0]);
    ring->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    ring->wake =
        (struct iocb){.aio_lio_opcode = CMD_POLL, .aio_fildes = (uint32_t)ring->wake_fd, .aio_buf = POLLIN};
    int error = ring->wake_fd < 0 ? -errno : ring->batch && ring->events ? 0 : -ENOMEM;
    if (!error && syscall(SYS_io_setup, capacity + 1, &ring->id) < 0)
        error = -errno; /* EAGAIN: fs.aio-max-nr is used up; ENOSYS, EPERM: not supported or forbidden */
    if (!error)
        error = arm(ring); /* EINVAL: before Linux 4.18 */
    if (!error)
        error = aio_backend_start_threads(&ring->workers, capacity, end_sleep, &ring->wake_fd);
    if (error) {
        libaio_exit(backend, 0);
        return error;
    }
    backend->max_in_flight = ring->workers.max_in_flight;
    backend->only_buffered = true;
    return 0;
}

static void fill(struct iocb *iocb, struct aio_op *op)
{
    static const uint16_t opcodes[AIO_KINDS] = {IOCB_CMD_PREAD, IOCB_CMD_PWRITE, IOCB_CMD_FDSYNC};
    *iocb = (struct iocb){
        .aio_data = (uintptr_t)op,
        .aio_lio_opcode = opcodes[op->kind],
        .aio_fildes = (uint32_t)op->fd,
    };
    if (op->kind != AIO_FLUSH) {
        iocb->aio_buf = (uintptr_t)op->data;
        iocb->aio_nbytes = op->nbytes;
        iocb->aio_offset = (int64_t)op->offset;
    }
}

static int submit_to_workers(struct aio_backend *backend, struct aio_op **ops, unsigned n)
{
    struct ring *ring = backend->state;
    backend->flags |= AIO_USES_WORKERS;
    return ring->workers.ops->submit(&ring->workers, ops, n);
}

static int libaio_submit(struct aio_backend *backend, struct aio_op **ops, unsigned n)
{
    struct ring *ring = backend->state;
    unsigned alike = 1; /* operations at the front that go the same way */
    while (alike < n && ops[alike]->direct == ops[0]->direct)
        alike++;
    n = alike;
    if (!ops[0]->direct)
        return submit_to_workers(backend, ops, n);
    bool apart = n >= AIO_UNPLUGGED && !aio_joins(ops[0], ops[1]);
    n = apart ? AIO_UNPLUGGED : n;
    bool with_wake = !ring->armed && !apart;
    for (unsigned i = 0; i < n; i++) {
        ring->batch[i] = &ring->iocbs[ops[i]->index];
        fill(ring->batch[i], ops[i]);
    }
    ring->batch[n] = &ring->wake; /* last, so that an error of io_submit is that of an operation */
    long accepted = syscall(SYS_io_submit, ring->id, (long)n + with_wake, ring->batch);
    if (accepted > (long)n) {
        ring->armed = true;
        return (int)n;
    }
    if (accepted > 0)
        return (int)accepted;
    if (accepted == 0)
        return -EAGAIN;
    if (errno == EINVAL && ops[0]->kind == AIO_FLUSH) /* a file system without asynchronous flush */
        return submit_to_workers(backend, ops, 1);
    return errno == EINTR ? -EAGAIN : -errno;
}

static void libaio_await(struct aio_backend *backend, int64_t timeout_ns)
{
    struct ring *ring = backend->state;
    struct timespec limit = {.tv_sec = (time_t)(timeout_ns / 1000000000),
                             .tv_nsec = (long)(timeout_ns % 1000000000)};
    if (arm(ring) && (timeout_ns < 0 || timeout_ns > 1000000))
        timeout_ns = limit.tv_nsec = 1000000, limit.tv_sec = 0; /* without the poll, wake has no effect */
    long at_least = ring->n_events || timeout_ns == 0 ? 0 : 1;
    if (ring->n_events == 0) {
        long fetched = syscall(SYS_io_getevents, ring->id, at_least, (long)ring->capacity + 1, ring->events,
                               at_least && timeout_ns < 0 ? NULL : &limit);
        ring->n_events = fetched > 0 ? (unsigned)fetched : 0;
    }
}

static unsigned libaio_reap(struct aio_backend *backend, struct aio_op **ended, unsigned max)
{
    struct ring *ring = backend->state;
    unsigned n = 0;
    for (; ring->n_events && n < max; ring->n_events--) {
        const struct io_event *event = &ring->events[ring->n_events - 1];
        if (event->obj == (uintptr_t)&ring->wake) {
            eventfd_t count;
            /* Before the next poll is armed. A wake that this swallows came after its request was queued, and
             * gather() follows; a worker's came after its operation was in the list that is taken below. */
            eventfd_read(ring->wake_fd, &count);
            ring->armed = false;
            continue;
        }
        ended[n] = (struct aio_op *)(uintptr_t)event->data;
        ended[n++]->result = event->res;
    }
    return n + ring->workers.ops->reap(&ring->workers, ended + n, max - n);
}

static void libaio_wake(struct aio_backend *backend)
{
    const struct ring *ring = backend->state;
    eventfd_write(ring->wake_fd, 1);
}

const struct aio_backend_ops aio_backend_libaio = {
    .name = "libaio",
    .init = libaio_init,
    .submit = libaio_submit,
    .await = libaio_await,
    .reap = libaio_reap,
    .wake = libaio_wake,
    .exit = libaio_exit,
};
