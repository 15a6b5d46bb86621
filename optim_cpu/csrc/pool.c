/* pool.c - the threads of the kernels.
 *
 * OpenMP is not used: a second OpenMP runtime in addition to torch's slows both down, and libgomp hangs in forked
 * children.
 *
 * A run is a job on its caller's stack, published in a slot. Its elements are divided into slices, one per thread: a
 * thread processes its slice from the front, which suits memory and prefetchers (measured: interleaved tiles cost two
 * threads a tenth of the bandwidth), and then helps with the next slices. A thread claims each tile from the atomic
 * counter of the slice, so a preempted thread delays the end by one tile, not by its whole slice. Tiles are a quarter of
 * a slice, within bounds: with many threads, larger ones would leave threads without work, or with one tile more than
 * the others, and smaller ones cost more claims.
 * The caller always works. So a run finishes even if no worker can be started, and concurrent callers publish several
 * jobs without waiting for each other. After the first worker has left a job, no other joins it, because a worker leaves
 * when every tile is claimed. The caller returns, which ends the lifetime of the job, only when no worker is inside it.
 *
 * A slot is static, and its state is one word: how many workers may still join, how many are inside, and whether the
 * caller sleeps until they have left. A worker joins by one exchange of that word, and touches the job only between
 * joining and leaving. No mutex is taken: a hundred workers that a mutex admits one by one would put each other to sleep.
 *
 * Workers start at the first run that can use them, and are never joined. Between runs each sleeps on a futex. To wake a
 * worker costs microseconds, so a caller wakes at most two, and each worker that has joined a job wakes two more while
 * any job has room: the tree is shallow even on large machines, and a small job does not wake workers that it has no room
 * for. While a step is under way, which runs one batch after the other, idle workers look for the next job for
 * SPIN_NANOSECONDS before they sleep; but only if the threads leave a CPU free, because a spinning worker must not take
 * the time of the thread that prepares the next batch, or of the I/O driver.
 *
 * The kernel often wakes a thread on the CPU of the thread that wakes it, even if others are idle: in a virtual machine,
 * it takes a CPU that has halted for one that the host has given to others. A worker would then wait behind its caller
 * until a later tick of the scheduler, for milliseconds. So who wakes a worker takes its own CPU out of the worker's
 * affinity mask; a worker that begins a job on the CPU of the caller does the same, which moves it. The worker restores
 * the mask at once: where the other CPUs are busy, the scheduler may move it back. If somebody else changes the mask
 * meanwhile, that mask stays.
 *
 * Signals are blocked in workers, because the interpreter's threads handle them; except the signals of a thread's own
 * fault, which Python's faulthandler reports.
 *
 * fork: a child has no workers, and may inherit slots and a mutex in use by another thread of the parent. An at-fork
 * handler resets them while the child has a single thread; the child's first run starts its own workers. (A comparison
 * of the pid at each run would race between the threads of the child.)
 */

#define _GNU_SOURCE /* cpu_set_t, sched_getcpu, pthread_setname_np, syscall */

#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "cpus.h"
#include "fp_environment.h"
#include "kernels.h"
#include "refuse.h"

enum {
    CACHE_LINE = 64,
    FAN_OUT = 2,
    TILES = 4,       /* in a slice, if the bounds of tiles allow it */
    FEW_SLICES = 64, /* on the caller's stack, which may be small */
    SLOTS = 16,      /* jobs at the same time; the callers of more work alone */
    LOOKS = 64,      /* of a spinning thread between two looks at the clock */
    SPIN_NANOSECONDS = 50000,
};

/* The state of a slot, in bits: workers inside a job, workers that may still join it. */
enum {
    INSIDE = 1,
    ROOM = 1 << 13,
    ALL_INSIDE = ROOM - 1,
    ALL_ROOM = ALL_INSIDE << 13,
    WAITED_FOR = 1 << 26, /* the caller sleeps until no worker is inside */
    TAKEN = 1 << 27,      /* a caller has the slot */
};

_Static_assert(OPT_MAX_THREADS <= ROOM, "the counts of workers fit their bits");

struct slice {
    _Alignas(CACHE_LINE) atomic_uint_fast64_t next; /* first unclaimed tile */
    uint64_t end;
};

struct job {
    opt_range_function function;
    void *context;
    uint64_t count, tile;
    int cpu; /* of the caller, as it published the job */
    int threads;
    int slices;
    struct slice *slice;
};

enum {
    AWAKE,
    ASLEEP,
    CLAIMED, /* by the thread that is about to wake it */
};

struct worker {
    _Alignas(CACHE_LINE) atomic_uint state; /* the futex on which it sleeps */
    pid_t thread;
    struct opt_forbidden_cpu forbidden; /* of the worker, or of the thread that has claimed it */
};

struct slot {
    _Alignas(CACHE_LINE) atomic_uint state;
    const struct job *job; /* set while TAKEN and not yet open; read between joining and leaving */
};

static struct {
    struct slot slots[SLOTS];
    _Alignas(CACHE_LINE) atomic_int sleepers;
    atomic_int steps;      /* under way */
    atomic_int threads;    /* per run, including the caller; 0: not set yet */
    atomic_int leaves_cpu; /* whether that is less than the CPUs */
    atomic_int workers;    /* started in this process; it grows under the mutex */
    struct worker worker[OPT_MAX_THREADS];
    pthread_mutex_t mutex;
    pthread_once_t once; /* registers the at-fork handler */
} pool = {.mutex = PTHREAD_MUTEX_INITIALIZER, .once = PTHREAD_ONCE_INIT};

static void reset_in_child(void)
{
    for (int i = 0; i < SLOTS; i++)
        atomic_store(&pool.slots[i].state, 0);
    atomic_store(&pool.sleepers, 0);
    atomic_store(&pool.workers, 0);
    pool.mutex = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}

static void register_at_fork(void) { pthread_atfork(NULL, NULL, reset_in_child); }

/* Sleep while the word has this value. May return early. */
static void sleep_on(atomic_uint *word, unsigned value)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake(atomic_uint *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0); }

static void pause_briefly(void)
{
#if defined __x86_64__
    __builtin_ia32_pause();
#elif defined __aarch64__
    __asm__ volatile("yield");
#endif
}

static int64_t nanoseconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

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
static void work_on(const struct job *job, int thread)
{
    fp_environment saved = fp_enter_default();
    uint64_t tile;

    for (int i = 0; i < job->slices; i++)
        while (claim(&job->slice[(thread + i) % job->slices], &tile)) {
            uint64_t begin = tile * job->tile, left = job->count - begin;
            job->function(job->context, begin, begin + (left < job->tile ? left : job->tile));
        }
    fp_restore(saved);
}

/* A slot with room for a worker, and how much, or NULL. */
static struct slot *find_open(int *room)
{
    for (int i = 0; i < SLOTS; i++) {
        *room = (int)((atomic_load(&pool.slots[i].state) & ALL_ROOM) / ROOM);
        if (*room)
            return &pool.slots[i];
    }
    return NULL;
}

/* Change the state of a sleeping worker. Only one thread succeeds. */
static int rouse(struct worker *worker, unsigned state)
{
    unsigned asleep = ASLEEP;

    if (atomic_load(&worker->state) != ASLEEP ||
        !atomic_compare_exchange_strong(&worker->state, &asleep, state))
        return 0;
    atomic_fetch_sub(&pool.sleepers, 1);
    return 1;
}

/* Wake up to FAN_OUT workers if a job has room. Call it after a job was opened or joined. */
static void wake_more(void)
{
    int room, woken = 0;

    /* After the change of the slot: a worker that is not asleep yet looks at the slots after it is. */
    if (!atomic_load(&pool.sleepers) || !find_open(&room))
        return;
    for (int i = 0, workers = atomic_load(&pool.workers); i < workers && woken < room && woken < FAN_OUT;
         i++) {
        struct worker *worker = &pool.worker[i];
        if (!rouse(worker, CLAIMED))
            continue;
        opt_forbid_cpu(worker->thread, sched_getcpu(), &worker->forbidden);
        atomic_store(&worker->state, AWAKE);
        wake(&worker->state);
        woken++;
    }
}

/* Join the job of a slot. Returns the number of the thread in it, or 0 if there is no room any more. The job lives until
 * the worker has left. The number is the worker's own, so that a tensor's slice is stepped by the same thread in each
 * step; if the job has fewer threads, it is the next one in the order of joining. */
static int join(struct slot *slot, int worker)
{
    unsigned state = atomic_load(&slot->state);

    do {
        if (!(state & ALL_ROOM))
            return 0;
    } while (!atomic_compare_exchange_weak(&slot->state, &state, state - ROOM + INSIDE));
    return worker < slot->job->threads ? worker : slot->job->threads - (int)((state & ALL_ROOM) / ROOM);
}

static void close_to_workers(struct slot *slot)
{
    if (atomic_load(&slot->state) & ALL_ROOM)
        atomic_fetch_and(&slot->state, ~(unsigned)ALL_ROOM);
}

static void leave(struct slot *slot)
{
    /* All tiles are claimed: another worker would join for nothing, and delay the caller. */
    close_to_workers(slot);
    unsigned before = atomic_fetch_sub(&slot->state, INSIDE);
    /* From here on, the slot may belong to another job, whose caller would wake up, look, and sleep again. */
    if (before & WAITED_FOR && (before & ALL_INSIDE) == INSIDE)
        wake(&slot->state);
}

static int may_spin(void) { return atomic_load(&pool.steps) > 0 && atomic_load(&pool.leaves_cpu); }

/* Look for a job for a while, if a step is under way. Returns whether there is one. */
static int spin_for_job(void)
{
    int room;

    for (int64_t end = may_spin() ? nanoseconds() + SPIN_NANOSECONDS : 0; may_spin() && nanoseconds() < end;)
        for (int i = 0; i < LOOKS; i++) {
            if (find_open(&room))
                return 1;
            pause_briefly();
        }
    return 0;
}

static void sleep_until_woken(struct worker *worker)
{
    unsigned state;
    int room;

    atomic_fetch_add(&pool.sleepers, 1);
    atomic_store(&worker->state, ASLEEP);
    /* Once more, now that callers see a sleeper: otherwise a job that was opened meanwhile would wake nobody. */
    if (find_open(&room) && rouse(worker, AWAKE))
        return;
    while ((state = atomic_load(&worker->state)) != AWAKE)
        sleep_on(&worker->state, state);
    opt_allow_cpu(&worker->forbidden);
}

static void *work(void *own)
{
    struct worker *worker = own;
    int number = (int)(worker - pool.worker) + 1; /* that of the caller is 0 */
    int room;

    /* Nobody else looks at these before it sleeps for the first time. */
    worker->thread = (pid_t)syscall(SYS_gettid);
    worker->forbidden.cpu = NO_CPU;
    for (;;) {
        struct slot *slot = find_open(&room);
        if (!slot) {
            if (!spin_for_job())
                sleep_until_woken(worker);
            continue;
        }
        int thread = join(slot, number);
        if (!thread)
            continue;
        wake_more();
        if (sched_getcpu() == slot->job->cpu) {
            opt_forbid_cpu(worker->thread, slot->job->cpu, &worker->forbidden);
            opt_allow_cpu(&worker->forbidden);
        }
        work_on(slot->job, thread);
        leave(slot);
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

/* Start workers until there are `count`. A failure is not an error: the caller of the run works, too. */
static void start_workers(int count)
{
    pthread_attr_t attributes;
    sigset_t before;

    if (atomic_load(&pool.workers) >= count || pthread_attr_init(&attributes))
        return;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    block_signals(&before);
    pthread_mutex_lock(&pool.mutex);
    while (atomic_load(&pool.workers) < count) {
        pthread_t thread;
        struct worker *worker = &pool.worker[atomic_load(&pool.workers)];
        /* In a forked child, a worker of the parent may have left another state here. */
        atomic_store(&worker->state, AWAKE);
        if (pthread_create(&thread, &attributes, work, worker))
            break;
        pthread_setname_np(thread, "tiering-optim"); /* a detached worker never ends, so `thread` is valid */
        atomic_fetch_add(&pool.workers, 1);
    }
    pthread_mutex_unlock(&pool.mutex);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
}

/* Open a job to workers. Returns its slot, or NULL if there is none, or no worker. */
static struct slot *open_to_workers(const struct job *job)
{
    /* Before the first worker exists: a child that is forked after this one resets the pool. */
    pthread_once(&pool.once, register_at_fork);
    start_workers(job->threads - 1);
    for (int i = 0; i < SLOTS && atomic_load(&pool.workers); i++) {
        struct slot *slot = &pool.slots[i];
        unsigned unused = 0;
        if (!atomic_compare_exchange_strong(&slot->state, &unused, TAKEN))
            continue;
        slot->job = job;
        atomic_store(&slot->state, TAKEN | (unsigned)(job->threads - 1) * ROOM);
        wake_more();
        return slot;
    }
    return NULL;
}

/* Returns when no worker is inside; then none can join, and the slot is free. */
static void close_slot(struct slot *slot)
{
    close_to_workers(slot);
    /* Tiles may be claimed and still be computed: the job, on the caller's stack, lives until the last worker has left.
     * That is soon, unless the worker was preempted; a caller that sleeps may wake up after milliseconds. */
    for (int64_t end = nanoseconds() + SPIN_NANOSECONDS;
         atomic_load(&slot->state) & ALL_INSIDE && nanoseconds() < end;)
        for (int i = 0; i < LOOKS && atomic_load(&slot->state) & ALL_INSIDE; i++)
            pause_briefly();
    unsigned state = atomic_load(&slot->state);
    while (state & ALL_INSIDE) {
        if (state & WAITED_FOR || atomic_compare_exchange_weak(&slot->state, &state, state | WAITED_FOR)) {
            sleep_on(&slot->state, state | WAITED_FOR);
            state = atomic_load(&slot->state);
        }
    }
    atomic_store(&slot->state, 0);
}

static void cut_into_slices(struct job *job, uint64_t tiles)
{
    uint64_t slices = (uint64_t)job->slices, begin = 0;

    for (uint64_t i = 0; i < slices; i++) {
        /* No other thread knows the job yet. */
        atomic_init(&job->slice[i].next, begin);
        begin += tiles / slices + (i < tiles % slices);
        job->slice[i].end = begin;
    }
}

/* `numerator / denominator`, rounded up. */
static uint64_t quotient(uint64_t numerator, uint64_t denominator)
{
    return numerator / denominator + (numerator % denominator != 0);
}

/* Elements of a tile: a quarter of a thread's part, within bounds. */
static uint64_t tile_of(uint64_t count, uint64_t threads, uint64_t unit, uint64_t most)
{
    uint64_t tile = count / (TILES * threads) / unit * unit;

    return tile < unit ? unit : tile > most ? most : tile;
}

void opt_pool_run(opt_range_function function, void *context, uint64_t count, uint64_t unit, uint64_t most)
{
    /* A worker is woken for half of the largest tile at least, but none for a single one. */
    uint64_t threads = (uint64_t)opt_thread_count(),
             useful = count > most ? quotient(count, quotient(most, 2)) : 1;
    struct slice few[FEW_SLICES], *many = NULL;

    if (!count)
        return;
    threads = threads < useful ? threads : useful;
    struct job job = {
        .function = function,
        .context = context,
        .count = count,
        .tile = threads > 1 ? tile_of(count, threads, unit, most) : most,
        .cpu = sched_getcpu(),
    };
    uint64_t tiles = quotient(count, job.tile);
    threads = threads < tiles ? threads : tiles;
    if (threads > FEW_SLICES)
        many = aligned_alloc(CACHE_LINE, threads * sizeof *many);
    job.threads = (int)threads;
    job.slice = many ? many : few;
    /* Without memory for more, threads share slices. */
    job.slices = many || threads <= FEW_SLICES ? job.threads : FEW_SLICES;
    cut_into_slices(&job, tiles);
    struct slot *slot = threads > 1 ? open_to_workers(&job) : NULL;
    work_on(&job, 0);
    if (slot)
        close_slot(slot);
    free(many);
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
    atomic_store(&pool.leaves_cpu, threads < opt_usable_cpus());
    atomic_store(&pool.threads, threads);
    return 0;
}

void opt_begin_step(void) { atomic_fetch_add(&pool.steps, 1); }

void opt_end_step(void) { atomic_fetch_sub(&pool.steps, 1); }
