/* What the files behind aio.h share: one context, its files, its requests. Not for callers.
 *
 *   aio.c       opening and closing, and the entry points
 *   requests.c  tickets and what waits for what
 *   driver.c    the driver thread: splitting, judging, counting
 *   verify.c    checksums of pages, when asked for
 *   system.c    the clock, and threads without signals
 *
 * withheld.c stands alone: memory that forked children do not get.
 *
 * Fields marked (lock) are guarded by context->lock; (driver) belong to the driver thread; the others are
 * constant after aio_open. The lock is never held across a system call that may block, nor while bytes are
 * copied or summed.
 */
#ifndef TIERING_AIO_CONTEXT_H
#define TIERING_AIO_CONTEXT_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "backend.h"
#include "verify.h"

enum request_state {
    REQUEST_FREE,    /* on the free list; id is the last ticket's, which holds nobody up */
    REQUEST_BLOCKED, /* waits for the requests it was ordered after */
    REQUEST_QUEUED,  /* in its file's queue, with blocks still to be issued */
    REQUEST_ISSUED,  /* every block is with the backend */
    REQUEST_DONE,    /* result is final; waits to be released */
};

/* `dependent` waits for `earlier`. In two lists: what earlier holds up, and what dependent waits for; from the
 * second one it must be taken out of the middle. */
struct edge {
    struct request *earlier, *dependent;
    struct edge *next_dependent;
    struct edge *next_earlier, **link;
};

enum watched { WATCHED_ALONE = 1, WATCHED_AMONG_OTHERS = 2 };

struct request { /* (lock) */
    int64_t id;
    enum request_state state;
    int kind, priority;
    bool poisoned;    /* something before it failed, or the context closes: it must not be issued */
    bool canceled;    /* by aio_cancel */
    unsigned watched; /* somebody sleeps until it is done */
    struct file *file;
    char *data;
    uint64_t offset, nbytes;
    uint64_t *pieces; /* if scattered: offsets in the file, one per piece_nbytes of data; NULL once done */
    uint64_t piece_nbytes;
    uint64_t carved;    /* bytes cut into blocks so far; a flush has none */
    unsigned in_flight; /* blocks with the backend or on their way there */
    unsigned n_pending; /* requests it still waits for */
    int64_t result;     /* first error, or 0 until done */
    uint64_t failed_at; /* offset of the block whose error that is */
    uint64_t issued_ns; /* when its first block was; 0: none was */
    uint64_t done_ns;   /* when its last block was over */
    struct edge *dependents, *earlier;
    struct request *next, *previous; /* in a file's queue; next alone: on the free list or a work list */
};

struct queue {
    struct request *head, *tail;
};

/* Kept fine alone: whoever asks for octaves adds them up, not the driver. */
struct latencies {
    uint64_t counts[AIO_FINE_BUCKETS];
    uint64_t max_ns;
};

struct file {
    int fd, index;
    bool direct;
    struct checksums checksums;             /* (driver) */
    unsigned in_flight;                     /* (lock) blocks */
    struct queue queues[AIO_PRIORITIES][2]; /* (lock) what reads, and what writes or flushes */
    int turn;                               /* (lock) which of the two goes first */
    aio_file_stats stats;                   /* (lock) times without the stretch that runs now, no latencies */
    struct latencies latencies[AIO_KINDS];  /* (lock) */
    uint64_t busy_since[AIO_KINDS];         /* (lock) */
    uint64_t full_since;                    /* (lock) 0: it is not */
};

/* One block of a request on its way: what is left to transfer, and where its bytes belong. */
struct block {
    struct aio_op op;
    struct request *request;
    struct file *file;
    char *data;              /* the caller's memory, nbytes of it */
    uint64_t offset, nbytes; /* op.nbytes may be more (padding) or less (the rest of it) */
    char *bounce;            /* AIO_ALIGNMENT bytes of its own, for a padded tail */
    bool padded;             /* the bytes go through bounce */
    uint64_t issued_ns;
    unsigned stalls; /* submissions in a row that moved nothing */
    uint64_t due_ns; /* not to be handed over before; 0: at once */
    int verdict;
    bool landed; /* no longer among file->in_flight, though not yet over */
};

/* Memory registered with the backend; its place in context->regions is its number there. */
struct region {
    char *address;
    uint64_t nbytes;
    enum { REGION_PENDING, REGION_READY, REGION_REFUSED } state; /* (lock) */
    int error;                                                   /* (lock) */
};

enum { REQUESTS_PER_CHUNK = 256, WAIT_SHARDS = 16 };

struct aio_context {
    unsigned forks; /* how many this process had behind it */
    uint64_t block_size;
    unsigned queue_depth, capacity; /* blocks in flight: per file, together */
    bool registered, verify;
    struct aio_backend backend; /* (driver), but its ops and state are constant */
    pthread_t driver;

    pthread_mutex_t lock;
    pthread_cond_t done[WAIT_SHARDS]; /* a request watched alone is done: by slot */
    pthread_cond_t any;               /* one watched among others is */
    bool asleep;                      /* (lock) the driver will not look again before it is woken */
    bool closing;                     /* (lock) */
    bool closed;                      /* of the one thread that closes */
    aio_info info;                    /* (lock) */
    struct file **files;              /* (lock) the array; the files themselves do not move */
    unsigned n_files, next_file;      /* (lock) next_file: whose turn it is */
    struct request **chunks;          /* (lock) likewise */
    unsigned n_chunks;                /* (lock) */
    struct request *free_requests;    /* (lock) */
    uint64_t n_live;                  /* (lock) requests not yet done */
    struct region *regions;           /* (lock) AIO_MAX_BUFFERS of them, or NULL */
    unsigned n_regions, n_tried;      /* (lock) those below n_tried are no longer pending */
    struct region **ready;            /* (lock) those in use, by address */
    unsigned n_ready;                 /* (lock) */

    struct block *blocks;       /* capacity of them: on free_blocks (lock), or the driver's */
    struct block **free_blocks; /* (lock) */
    unsigned n_free_blocks;     /* (lock) */
    char *bounces;
    struct block **fresh;                /* (driver) new, to be prepared */
    struct aio_op **batch, **ended;      /* (driver) to be submitted; back from the backend, or refused */
    struct block **landed;               /* (driver) read, to be compared with their checksums */
    unsigned n_fresh, n_batch, n_landed; /* (driver) */
    unsigned n_begun;                    /* (driver) with the backend */
};

/* requests.c; all under the lock. */
int64_t aio_request_add(aio_context *context, const struct request *wanted, const int64_t *after,
                        size_t n_after);
struct request *aio_request_find(aio_context *context, int64_t ticket, int *error);
pthread_cond_t *aio_request_signal(aio_context *context, const struct request *request);
void aio_request_dequeue(struct request *request);
void aio_request_settle(aio_context *context, struct request *request, int64_t result);
int aio_request_cancel(aio_context *context, struct request *request);
void aio_request_release(aio_context *context, struct request *request);
void aio_requests_cancel(aio_context *context);
void aio_requests_free(aio_context *context);
void aio_wake_driver(aio_context *context);

/* driver.c; what the driver thread runs until the context is closing and no request is left. */
void aio_drive(aio_context *context);

#endif
