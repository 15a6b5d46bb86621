/* The seam between the driver thread and the ways a kernel offers to move bytes.
 *
 * A backend is told one thing at a time: begin these operations, or hand back those that ended. It keeps no
 * queue of its own beyond what it accepted, retries nothing and judges nothing: result is what the kernel
 * said. Only the driver thread calls it, so it needs no lock towards its caller.
 */
#ifndef TIERING_AIO_BACKEND_H
#define TIERING_AIO_BACKEND_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "aio.h"

/* One operation for the kernel. The driver owns it and leaves it alone from submit until reap returns it. */
struct aio_op {
    int kind; /* AIO_READ, AIO_WRITE, AIO_FLUSH */
    int fd;
    void *data;
    uint64_t offset;
    size_t nbytes;
    unsigned index;      /* constant, unique, below capacity: where a backend keeps its own record of it */
    int64_t result;      /* set by the backend: bytes moved, perhaps fewer than nbytes, or -errno */
    struct aio_op *next; /* for the backend's lists, while it holds the operation */
};

struct aio_backend;

struct aio_backend_ops {
    const char *name; /* fio's */

    /* Set state and event_fd; at most capacity operations will be in flight. 0 or -errno with nothing left
     * behind. */
    int (*init)(struct aio_backend *backend, unsigned capacity);

    /* Begin ops[0 .. k) and return k >= 1. -EAGAIN: nothing now, ask again after a completion or a moment.
     * Another -errno is the result of ops[0], which was not begun. */
    int (*submit)(struct aio_backend *backend, struct aio_op **ops, unsigned n);

    /* Quiet event_fd, then store up to max ended operations and return how many; never blocks. */
    unsigned (*reap)(struct aio_backend *backend, struct aio_op **ended, unsigned max);

    /* Nothing is in flight. In a forked child only close descriptors and free memory: the threads are the
     * parent's. */
    void (*exit)(struct aio_backend *backend, int forked);
};

struct aio_backend {
    const struct aio_backend_ops *ops;
    void *state;
    int event_fd; /* polls readable while reap has something to return */
};

extern const struct aio_backend_ops aio_backend_libaio;
extern const struct aio_backend_ops aio_backend_threads;

/* Put the faults between the driver and an initialised backend, which from then on belongs to the wrapper.
 * The engine keeps its name. On error the backend is as before. */
int aio_backend_add_faults(struct aio_backend *backend, const aio_fault *faults, unsigned n_faults,
                           unsigned capacity);

/* A thread that receives no signal: SIGXFSZ (a write past RLIMIT_FSIZE) would otherwise end the process. */
int aio_thread_start(pthread_t *thread, void *(*run)(void *), void *argument);

#endif
