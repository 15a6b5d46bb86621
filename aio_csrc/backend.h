/* The interface between the driver thread and a backend: io_uring, libaio, or threads.
 *
 * A backend starts the operations that it accepts, and returns those that have ended. It has no queue beyond the
 * accepted operations, does not retry, and passes on the kernel's results unchanged. Only the driver thread calls
 * it (except wake), so it needs no lock against its caller.
 */
#ifndef TIERING_AIO_BACKEND_H
#define TIERING_AIO_BACKEND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "aio.h"

/* A further kind, for the threads backend only: store the checksum of each page of data in `sums`. */
enum { AIO_CHECKSUM = AIO_REGISTER + 1 };

/* One operation for the kernel. The driver owns it, and does not access it from submit until reap returns it. */
struct aio_op {
    int kind; /* AIO_READ, AIO_WRITE, AIO_FLUSH, AIO_CHECKSUM */
    int file; /* index of the file */
    int fd;
    bool direct; /* the file is open with O_DIRECT */
    int buffer;  /* number of the registered buffer that holds all of data, or -1 */
    void *data;
    uint64_t offset;
    size_t nbytes;
    uint32_t *sums; /* of AIO_CHECKSUM: one for each page */
    unsigned index; /* constant, unique, below capacity: index of the backend's record of the operation */
    int64_t result; /* set by the backend: bytes transferred, at most nbytes, or -errno */
    struct aio_op *next; /* for lists of the backend, from submit to reap */
};

enum { AIO_MAX_BUFFERS = 1 << 14 }; /* io_uring's limit */

/* The kernel plugs the block layer while it accepts more than two operations in one call, and then merges adjacent
 * ones. Small operations gain from that. Large blocks lose: sixteen blocks of 1 MiB become four of 4 MiB, and the
 * disk works on four requests at once instead of sixteen. Operations that are not adjacent lose, too: nothing is
 * merged, and the disk is idle until the last of them is prepared. So both are submitted in pairs. */
enum { AIO_UNPLUGGED = 2, AIO_LARGE = 256 << 10 };

/* Whether the kernel should merge `op` with the operation before it. */
static inline bool aio_joins(const struct aio_op *before, const struct aio_op *op)
{
    return op->nbytes < AIO_LARGE && before->file == op->file && before->kind == op->kind &&
           before->offset + before->nbytes == op->offset;
}

struct aio_backend;

struct aio_backend_ops {
    const char *name; /* as in fio */

    /* Set state, max_in_flight and flags; at most capacity operations will be in flight. Returns 0, or -errno
     * after it has freed everything. Runs in the thread that opens the context; the other functions run in the
     * driver thread. */
    int (*init)(struct aio_backend *backend, unsigned capacity, int registered);

    /* Accept ops[0 .. k) and return k >= 1; the next await starts them at the latest. -EAGAIN: none accepted, try
     * again after a completion or a pause. Another -errno is the result of ops[0], which is not accepted. */
    int (*submit)(struct aio_backend *backend, struct aio_op **ops, unsigned n);

    /* Start the accepted operations, then sleep until an operation has ended, wake was called since the last
     * await, or timeout_ns is over (0: do not sleep; < 0: no limit). May return early. */
    void (*await)(struct aio_backend *backend, int64_t timeout_ns);

    /* Store up to max ended operations and return how many; never blocks. */
    unsigned (*reap)(struct aio_backend *backend, struct aio_op **ended, unsigned max);

    /* End the running await, or the next one if none runs. Any thread may call it, also concurrently. */
    void (*wake)(struct aio_backend *backend);

    /* Register memory with the kernel as buffer `number`, which is below AIO_MAX_BUFFERS and unused. The memory
     * stays mapped until exit. Returns 0, or -errno, and then no operation names the buffer. NULL if the backend
     * has no registration. */
    int (*register_buffer)(struct aio_backend *backend, unsigned number, void *address, size_t nbytes);

    /* Free everything. No operation is in flight. In a forked child, only close descriptors and free memory: the
     * threads and the kernel's objects belong to the parent. */
    void (*exit)(struct aio_backend *backend, int forked);
};

struct aio_backend {
    const struct aio_backend_ops *ops;
    void *state;
    unsigned max_in_flight; /* operations that it runs at once, over all files; 0: capacity */
    bool only_buffered;     /* max_in_flight is for buffered files; direct files have the capacity */
    unsigned flags;         /* AIO_USES_* in effect; bits are only added */
    int files_error;        /* -errno of the last failed registration of a file */
};

extern const struct aio_backend_ops aio_backend_uring;
extern const struct aio_backend_ops aio_backend_libaio;
extern const struct aio_backend_ops aio_backend_threads;

/* Start the threads backend beside another one, for operations that the other one cannot do. Its await and wake are
 * not called: instead, a worker calls news(argument) when there are operations for reap. It starts at most `limit`
 * workers. Returns 0 or -errno, like init. */
int aio_backend_start_threads(struct aio_backend *backend, unsigned limit, void (*news)(void *),
                              void *argument);

/* Wrap an initialised backend in one that injects faults. The wrapper owns the inner backend. The name of the
 * engine stays. On error, the backend is unchanged. */
int aio_backend_add_faults(struct aio_backend *backend, const aio_options *options, unsigned capacity);

#endif
