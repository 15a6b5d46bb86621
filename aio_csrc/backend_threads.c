/* Worker threads that call pread and pwrite: works on every kernel and file system, buffered or direct.
 *
 * A worker starts when an operation finds no idle worker, up to MAX_WORKERS, and runs until exit. Two lists share one
 * lock: `waiting` (driver to workers, first in, first out) and `ended` (workers to driver). The driver is signalled
 * only when `ended` becomes non-empty, because it then takes the whole list. Beside another backend, whose await the
 * driver sleeps in, a function of that backend signals it.
 */
#define _GNU_SOURCE
#include "backend.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "system.h"

enum { MAX_WORKERS = 64 };

struct pool {
    pthread_mutex_t lock; /* guards all fields below, except limit, tell and argument, which are constant */
    pthread_cond_t work;  /* workers wait for operations */
    pthread_cond_t news;  /* the driver waits for ended operations or wake */
    struct aio_op *waiting, **waiting_tail;
    struct aio_op *ended;
    unsigned n_idle, n_waiting, n_workers;
    bool stopping, woken;
    unsigned limit;
    void (*tell)(void *); /* called instead of the signal of `news`; NULL: none */
    void *argument;
    pthread_t workers[MAX_WORKERS];
};

static int64_t transfer(const struct aio_op *op)
{
    ssize_t moved;
    if (op->kind == AIO_CHECKSUM) {
        aio_checksum(op->data, op->nbytes / AIO_ALIGNMENT, op->sums);
        return (int64_t)op->nbytes;
    }
    if (op->kind == AIO_READ)
        moved = pread(op->fd, op->data, op->nbytes, (off_t)op->offset);
    else if (op->kind == AIO_WRITE)
        moved = pwrite(op->fd, op->data, op->nbytes, (off_t)op->offset);
    else
        moved = fdatasync(op->fd);
    return moved < 0 ? -errno : moved;
}

static void *work(void *argument)
{
    struct pool *pool = argument;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (!pool->waiting && !pool->stopping) {
            pool->n_idle++;
            pthread_cond_wait(&pool->work, &pool->lock);
            pool->n_idle--;
        }
        /* Also when it is time to stop: operations that were accepted are done first. */
        struct aio_op *op = pool->waiting;
        if (!op)
            break;
        pool->waiting = op->next;
        if (!pool->waiting)
            pool->waiting_tail = &pool->waiting;
        pool->n_waiting--;
        pthread_mutex_unlock(&pool->lock);

        /* Without the lock, which the driver and all other workers need. */
        op->result = transfer(op);

        pthread_mutex_lock(&pool->lock);
        bool first = !pool->ended;
        op->next = pool->ended;
        /* The result was stored before the lock was taken, under which the driver finds the operation. */
        pool->ended = op;
        if (first && pool->tell)
            pool->tell(pool->argument);
        else if (first)
            pthread_cond_signal(&pool->news);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

static void threads_exit(struct aio_backend *backend, int forked)
{
    struct pool *pool = backend->state;
    if (!forked) {
        pthread_mutex_lock(&pool->lock);
        pool->stopping = true;
        pthread_cond_broadcast(&pool->work);
        pthread_mutex_unlock(&pool->lock);
        /* Until they have ended, they use the lock and this memory. */
        for (unsigned i = 0; i < pool->n_workers; i++)
            pthread_join(pool->workers[i], NULL);
        pthread_cond_destroy(&pool->work);
        pthread_cond_destroy(&pool->news);
        pthread_mutex_destroy(&pool->lock);
    }
    free(pool);
}

static int add_worker(struct pool *pool)
{
    int error = aio_thread_start(&pool->workers[pool->n_workers], "tiering-aio-w", work, pool);
    if (!error)
        pool->n_workers++;
    return error;
}

int aio_backend_start_threads(struct aio_backend *backend, unsigned limit, void (*news)(void *),
                              void *argument)
{
    struct pool *pool = calloc(1, sizeof *pool);
    if (!pool)
        return -ENOMEM;
    pool->tell = news;
    pool->argument = argument;
    pool->limit = limit < MAX_WORKERS ? limit : MAX_WORKERS;
    pool->waiting_tail = &pool->waiting;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&pool->news, &monotonic);
    pthread_condattr_destroy(&monotonic);
    backend->state = pool;
    backend->max_in_flight = pool->limit;
    /* Start the first worker here, so that aio_open fails if the process cannot start a thread. */
    pthread_mutex_lock(&pool->lock);
    int error = add_worker(pool);
    pthread_mutex_unlock(&pool->lock);
    if (error)
        threads_exit(backend, 0);
    else
        backend->ops = &aio_backend_threads;
    return error;
}

static int threads_init(struct aio_backend *backend, unsigned capacity, int registered)
{
    (void)registered; /* system calls that block use no registration */
    return aio_backend_start_threads(backend, capacity, NULL, NULL);
}

static int threads_submit(struct aio_backend *backend, struct aio_op **ops, unsigned n)
{
    struct pool *pool = backend->state;
    pthread_mutex_lock(&pool->lock);
    for (unsigned i = 0; i < n; i++) {
        ops[i]->next = NULL;
        *pool->waiting_tail = ops[i];
        pool->waiting_tail = &ops[i]->next;
        pool->n_waiting++;
        pthread_cond_signal(&pool->work);
    }
    /* A signalled worker counts as idle until it runs, so compare n_idle with all waiting operations. */
    for (unsigned missing = pool->n_waiting > pool->n_idle ? pool->n_waiting - pool->n_idle : 0;
         missing > 0 && pool->n_workers < pool->limit; missing--)
        if (add_worker(pool))
            break; /* the running workers do the operations, only slower */
    pthread_mutex_unlock(&pool->lock);
    return (int)n;
}

static void threads_await(struct aio_backend *backend, int64_t timeout_ns)
{
    struct pool *pool = backend->state;
    uint64_t deadline_ns = aio_now_ns() + (uint64_t)(timeout_ns > 0 ? timeout_ns : 0);
    struct timespec deadline = {.tv_sec = (time_t)(deadline_ns / 1000000000u),
                                .tv_nsec = (long)(deadline_ns % 1000000000u)};
    int timed_out = timeout_ns == 0;
    pthread_mutex_lock(&pool->lock);
    while (!pool->ended && !pool->woken && !timed_out)
        timed_out = timeout_ns < 0 ? pthread_cond_wait(&pool->news, &pool->lock)
                                   : pthread_cond_timedwait(&pool->news, &pool->lock, &deadline);
    /* Under the lock: a wake after this one ends the next await. */
    pool->woken = false;
    pthread_mutex_unlock(&pool->lock);
}

static unsigned threads_reap(struct aio_backend *backend, struct aio_op **ended, unsigned max)
{
    struct pool *pool = backend->state;
    unsigned n = 0;
    pthread_mutex_lock(&pool->lock);
    for (; pool->ended && n < max; pool->ended = pool->ended->next)
        ended[n++] = pool->ended;
    pthread_mutex_unlock(&pool->lock);
    return n;
}

static void threads_wake(struct aio_backend *backend)
{
    struct pool *pool = backend->state;
    pthread_mutex_lock(&pool->lock);
    pool->woken = true;
    pthread_cond_signal(&pool->news);
    pthread_mutex_unlock(&pool->lock);
}

const struct aio_backend_ops aio_backend_threads = {
    .name = "threads",
    .init = threads_init,
    .submit = threads_submit,
    .await = threads_await,
    .reap = threads_reap,
    .wake = threads_wake,
    .exit = threads_exit,
};
