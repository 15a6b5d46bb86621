/* pool.c - the threads of the kernels.
 *
 * OpenMP is not used: a second OpenMP runtime in addition to torch's slows both down, and libgomp hangs in forked
 * children.
 *
 * A run is a job on its caller's stack, linked into a queue. Its tiles are divided into slices, one per thread: a thread
 * processes its slice from the front, which suits memory and prefetchers (measured: interleaved tiles cost two threads a
 * tenth of the bandwidth), and then helps with the next slices. A thread claims each tile from the atomic counter of the
 * slice, so a preempted thread delays the end by one tile, not by its whole slice.
 * The caller always works. So a run finishes even if no worker can be started, and concurrent callers put several jobs
 * into the queue without waiting for each other. Workers join the oldest job with room for them; after the first worker
 * has left a job, no other joins it, because a worker leaves when every tile is claimed. The caller returns, which ends
 * the lifetime of the job, only when no worker is inside it; the mutex guards that count.
 *
 * Workers start at the first run that can use them and then sleep on a condition variable; they are never joined. With a
 * smaller thread count, fewer workers join each job; the others sleep. To wake a worker costs microseconds, so a caller
 * wakes at most two, and each worker that has joined a job wakes two more while any job has room: the tree is shallow
 * even on large machines, and a small job does not wake workers that it has no room for.
 *
 * Some kernels wake a worker on the CPU of its caller, even if others are idle, and move it only at a later tick of the
 * scheduler, after milliseconds. Such a worker moves to another CPU itself: for the time of the job, the CPU is not in
 * its affinity mask. If somebody else changes the mask meanwhile, that mask stays.
 *
 * Signals are blocked in workers, because the interpreter's threads handle them; except the signals of a thread's own
 * fault, which Python's faulthandler reports.
 *
 * fork: a child has no workers, and may inherit a mutex that another thread of the parent held. An at-fork handler
 * resets both while the child has a single thread; the child's first run starts its own workers. (A comparison of the
 * pid at each run would race between the threads of the child.)
 */

#define _GNU_SOURCE /* sched_getaffinity, pthread_setname_np */

#include "pool.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "cpus.h"
#include "fp_environment.h"
#include "kernels.h"
#include "refuse.h"

enum { MAX_SLICES = 64, CACHE_LINE = 64, FAN_OUT = 2 }; /* more threads than slices share them */

struct slice {
    _Alignas(CACHE_LINE) atomic_uint_fast64_t next; /* first unclaimed tile */
    uint64_t end;
};

struct job {
    opt_tile_function function;
    void *context;
    int cpu; /* of the caller, as it queued the job */
    int slices;
    struct slice slice[MAX_SLICES];
    int joined;         /* threads so far, including caller -- pool.mutex */
    int room;           /* workers that may still join      -- pool.mutex */
    int inside;         /* workers that have not left       -- pool.mutex */
    struct job *behind; /*                                  -- pool.mutex */
};

static struct {
    pthread_mutex_t mutex;
    pthread_cond_t work; /* a job has room */
    pthread_cond_t left; /* a worker left a job */
    struct job *queue;   /* oldest first            -- mutex */
    int workers;         /* started in this process -- mutex */
    atomic_int threads;  /* per run, including the caller; 0: not set yet */
    pthread_once_t once; /* registers the at-fork handler */
} pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER, NULL, 0, 0,
          PTHREAD_ONCE_INIT};

static void reset_in_child(void)
{
    pool.mutex = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    pool.work = pool.left = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    pool.queue = NULL;
    pool.workers = 0;
}

static void register_at_fork(void) { pthread_atfork(NULL, NULL, reset_in_child); }

/* Claim the next tile of a slice. Returns 0 if all are claimed. The load first avoids a write to the cache line of an
 * exhausted slice, which helping threads also read. */
static int claim(struct slice *slice, uint64_t *tile)
{
    if (atomic_load(&slice->next) >= slice->end)
        return 0;
    *tile = atomic_fetch_add(&slice->next, 1);
    return *tile < slice->end;
}

/* Returns when every tile is claimed, by whomever. */
static void work_on(struct job *job, int thread)
{
    fp_environment saved = fp_enter_default();
    uint64_t tile;

    for (int i = 0; i < job->slices; i++)
        while (claim(&job->slice[(thread + i) % job->slices], &tile))
            job->function(job->context, tile);
    fp_restore(saved);
}

/* The oldest job with room for a worker. Call with the mutex held. */
static struct job *find_open_job(void)
{
    struct job *job = pool.queue;

    while (job && !job->room)
        job = job->behind;
    return job;
}

/* Release the mutex, and wake up to FAN_OUT workers if a job has room. Call it after a job was queued or joined. */
static void unlock_and_wake(void)
{
    /* Looked at under the mutex: after it is released, the job may have ended with its caller's stack. */
    const struct job *open = find_open_job();
    int sleepers = !open ? 0 : open->room < FAN_OUT ? open->room : FAN_OUT;

    pthread_mutex_unlock(&pool.mutex);
    while (sleepers--)
        pthread_cond_signal(&pool.work);
}

/* Leave a CPU, if the thread is on it and may be on another one. Stores its affinity mask in `before`, and returns 1,
 * if the mask has to be restored. */
static int leave_cpu(int cpu, cpu_set_t *before)
{
    cpu_set_t others;

    /* With more CPUs than a cpu_set_t has, the thread stays. */
    if (cpu < 0 || sched_getcpu() != cpu || sched_getaffinity(0, sizeof *before, before))
        return 0;
    others = *before;
    CPU_CLR((size_t)cpu, &others);
    return CPU_COUNT(&others) && !sched_setaffinity(0, sizeof others, &others);
}

/* Restore the mask `before` if the present one is still that of leave_cpu(). Another one, as of taskset, stays. */
static void allow_cpu(int cpu, const cpu_set_t *before)
{
    cpu_set_t now, others = *before;

    CPU_CLR((size_t)cpu, &others);
    if (!sched_getaffinity(0, sizeof now, &now) && CPU_EQUAL(&now, &others))
        sched_setaffinity(0, sizeof *before, before);
}

static void *worker(void *unused)
{
    cpu_set_t before;

    (void)unused;
    pthread_mutex_lock(&pool.mutex);
    for (;;) {
        struct job *job = find_open_job();
        if (!job) {
            pthread_cond_wait(&pool.work, &pool.mutex);
            continue;
        }
        int thread = job->joined++;
        job->room--;
        /* Under the mutex: the caller cannot return, and end the life of the job, before this worker has left. */
        job->inside++;
        unlock_and_wake();
        int left = leave_cpu(job->cpu, &before);
        work_on(job, thread);
        if (left)
            allow_cpu(job->cpu, &before);
        pthread_mutex_lock(&pool.mutex);
        /* All tiles are claimed: another worker would join for nothing, and delay the caller. */
        job->room = 0;
        /* Under the mutex, which also orders what this worker has written before what the caller reads next. */
        if (--job->inside == 0)
            pthread_cond_broadcast(&pool.left);
    }
    return NULL;
}

static void block_signals(sigset_t *before)
{
    static const int own_faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
    sigset_t blocked;

    sigfillset(&blocked);
    for (size_t i = 0; i < sizeof own_faults / sizeof *own_faults; i++)
        sigdelset(&blocked, own_faults[i]);
    pthread_sigmask(SIG_SETMASK, &blocked, before);
}

/* Start workers until there are `count`. Call with the mutex held. A failure is not an error: the caller of the run
 * works, too. */
static void start_workers(int count)
{
    pthread_attr_t attributes;
    sigset_t before;

    if (pool.workers >= count || pthread_attr_init(&attributes))
        return;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    block_signals(&before);
    while (pool.workers < count) {
        pthread_t thread;
        if (pthread_create(&thread, &attributes, worker, NULL))
            break;
        pthread_setname_np(thread, "tiering-optim"); /* a detached worker never ends, so `thread` is valid */
        pool.workers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
}

static void enqueue(struct job *job)
{
    struct job **end = &pool.queue;

    pthread_mutex_lock(&pool.mutex);
    /* Before the job is in the queue, under the same mutex: a new worker waits for the mutex and then finds the
     * job. */
    start_workers(job->room);
    while (*end)
        end = &(*end)->behind;
    *end = job;
    unlock_and_wake();
}

static void dequeue(struct job *job)
{
    struct job **link = &pool.queue;

    pthread_mutex_lock(&pool.mutex);
    while (*link != job)
        link = &(*link)->behind;
    /* First off the queue: no worker can join from here on. */
    *link = job->behind;
    /* Tiles may be claimed and still be computed: the job, on this stack, lives until the last worker has left. */
    while (job->inside)
        pthread_cond_wait(&pool.left, &pool.mutex);
    pthread_mutex_unlock(&pool.mutex);
}

static void cut_into_slices(struct job *job, uint64_t tiles, uint64_t threads)
{
    uint64_t slices = threads < MAX_SLICES ? threads : MAX_SLICES, begin = 0;

    job->slices = (int)slices;
    for (uint64_t i = 0; i < slices; i++) {
        /* No other thread knows the job yet. */
        atomic_init(&job->slice[i].next, begin);
        begin += tiles / slices + (i < tiles % slices);
        job->slice[i].end = begin;
    }
}

void opt_pool_run(opt_tile_function function, void *context, uint64_t tiles)
{
    uint64_t threads = (uint64_t)opt_thread_count();
    struct job job;

    threads = tiles < threads ? tiles : threads;
    if (!threads)
        return;
    job.function = function;
    job.context = context;
    job.joined = 1;
    job.room = (int)threads - 1;
    job.inside = 0;
    job.behind = NULL;
    job.cpu = sched_getcpu();
    cut_into_slices(&job, tiles, threads);
    if (!job.room) {
        work_on(&job, 0);
        return;
    }
    /* Before the first worker exists: a child that is forked after this one resets the pool. */
    pthread_once(&pool.once, register_at_fork);
    enqueue(&job);
    work_on(&job, 0);
    dequeue(&job);
}

int opt_thread_count(void)
{
    int threads = atomic_load(&pool.threads), unset = 0;

    if (threads)
        return threads;
    threads = opt_usable_cpus();
    if (threads > OPT_MAX_THREADS)
        threads = OPT_MAX_THREADS;
    /* If another thread has set the number meanwhile, its number counts. */
    return atomic_compare_exchange_strong(&pool.threads, &unset, threads) ? threads : unset;
}

int opt_set_thread_count(int threads)
{
    if (threads < 1 || threads > OPT_MAX_THREADS)
        return opt_refuse("threads must be 1 to 4096");
    atomic_store(&pool.threads, threads);
    return 0;
}
