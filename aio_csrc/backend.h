/* The seam between the driver thread and the ways a kernel offers to move bytes.
 *
 * A backend is told one thing at a time: begin these operations, or hand back those that ended. It keeps no
 * queue of its own beyond what it accepted, retries nothing and judges nothing: result is what the kernel
 * said. Only the driver thread calls it (wake excepted), so it needs no lock towards its caller.
 */
#ifndef TIERING_AIO_BACKEND_H
#define TIERING_AIO_BACKEND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "aio.h"

/* One operation for the kernel. The driver owns it and leaves it alone from submit until reap returns it. */
struct aio_op {
    int kind; /* AIO_READ, AIO_WRITE, AIO_FLUSH */
    int file; /* index of the file */
    int fd;
    int buffer; /* number of the registered buffer that holds all of data, or -1 */
    void *data;
    uint64_t offset;
    size_t nbytes;
    unsigned index;      /* constant, unique, below capacity: where a backend keeps its own record of it */
    int64_t result;      /* set by the backend: bytes moved, perhaps fewer than nbytes, or -errno */
    struct aio_op *next; /* for the backend's lists, while it holds the operation */
};

enum { AIO_MAX_BUFFERS = 1 << 14 }; /* io_uring's limit */

/* The kernel plugs the block layer while it takes more than two operations in one call, and then joins those
 * that follow each other on disk. Small ones gain by it. Blocks of a useful size lose: sixteen of 1 MiB become
 * four of 4 MiB, and the disk has four things to do at once instead of sixteen. Those that lie apart lose, too: there
 * is nothing to join, and the disk has nothing to do until the last of them is ready. So both go by twos. */
enum { AIO_UNPLUGGED = 2, AIO_LARGE = 256 << 10 };

static inline bool aio_joins(const struct aio_op *before, const struct aio_op *op)
{
    return op->nbytes < AIO_LARGE && before->file == op->file && before->kind == op->kind &&
           before->offset + before->nbytes == op->offset;
}

struct aio_backend;

struct aio_backend_ops {
    const char *name; /* fio's */

    /* Set state, max_in_flight and flags; at most capacity operations will be in flight. 0 or -errno with
     * nothing left behind. Runs in the thread that opens the context, all else in the driver. */
    int (*init)(struct aio_backend *backend, unsigned capacity, int registered);

    /* Take ops[0 .. k) and return k >= 1; what was taken is begun by the next await at the latest. -EAGAIN:
     * nothing now, ask again after a completion or a moment. Another -errno is the result of ops[0], which
     * was not taken. */
    int (*submit)(struct aio_backend *backend, struct aio_op **ops, unsigned n);

    /* Begin what was taken, then sleep until reap has something to return, wake was called since the last
     * await, or timeout_ns is over (0: do not sleep; < 0: for ever). May return early. */
    void (*await)(struct aio_backend *backend, int64_t timeout_ns);

    /* Store up to max ended operations and return how many; never blocks. */
    unsigned (*reap)(struct aio_backend *backend, struct aio_op **ended, unsigned max);

    /* End the await that runs, or else the next one. From any thread, also at the same time as any other. */
    void (*wake)(struct aio_backend *backend);

    /* Make memory known to the kernel as buffer `number`, below AIO_MAX_BUFFERS and not used before. 0 or
     * -errno: then no operation names it. NULL where there is no such thing. */
    int (*register_buffer)(struct aio_backend *backend, unsigned number, void *address, size_t nbytes);

    /* Nothing is in flight. In a forked child only close descriptors and free memory: the threads and what
     * the kernel holds are the parent's. */
    void (*exit)(struct aio_backend *backend, int forked);
};

struct aio_backend {
    const struct aio_backend_ops *ops;
    void *state;
    unsigned max_in_flight; /* operations that it really does at once, shared by the files; 0: capacity */
    unsigned flags;         /* AIO_USES_*, what is in use; grows */
    int files_error;        /* why files could not be registered, -errno */
};

extern const struct aio_backend_ops aio_backend_uring;
extern const struct aio_backend_ops aio_backend_libaio;
extern const struct aio_backend_ops aio_backend_threads;

/* Put the faults between the driver and an initialised backend, which from then on belongs to the wrapper.
 * The engine keeps its name. On error the backend is as before. */
int aio_backend_add_faults(struct aio_backend *backend, const aio_fault *faults, unsigned n_faults,
                           unsigned capacity);

#endif
