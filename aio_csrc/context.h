/* What the files behind aio.h share: one context, its files, its requests. Not for callers.
 *
 *   aio.c       opening and closing, and the entry points
 *   requests.c  tickets and what waits for what
 *   driver.c    the driver thread: splitting, judging, counting
 *
 * Fields marked (lock) are guarded by context->lock; (driver) belong to the driver thread; the others are
 * constant after aio_open. The lock is never held across a system call that may block.
 */
#ifndef TIERING_AIO_CONTEXT_H
#define TIERING_AIO_CONTEXT_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "backend.h"

enum request_state {
    REQUEST_FREE,    /* on the free list; id is the last ticket's, which succeeded */
    REQUEST_BLOCKED, /* waits for the requests it was ordered after */
    REQUEST_QUEUED,  /* in its file's queue, with blocks still to be issued */
    REQUEST_ISSUED,  /* every block is with the backend */
    REQUEST_DONE,    /* result is final; waits to be released */
    REQUEST_RETIRED, /* failed and released: never used again, so that its ticket goes on failing its
                        successors */
};

struct edge { /* `dependent` waits for the request whose list this edge is in */
    struct edge *next;
    struct request *dependent;
};

struct request { /* (lock) */
    int64_t id;
    enum request_state state;
    int kind, priority;
    bool poisoned; /* something before it failed, or the context closes: it must not be issued */
    bool watched;  /* somebody sleeps until it is done */
    struct file *file;
    char *data;
    uint64_t offset, nbytes;
    uint64_t carved;    /* bytes cut into blocks so far; a flush has none */
    unsigned in_flight; /* blocks with the backend or on their way there */
    unsigned n_pending; /* requests it still waits for */
    int64_t result;     /* first error, or 0 until done */
    struct edge *dependents;
    struct request *next; /* in a file's queue, on the free list, or on a work list */
};

struct queue {
    struct request *head, *tail;
};

struct file {
    int fd;
    bool direct;
    unsigned in_flight;                  /* (lock) blocks */
    struct queue queues[AIO_PRIORITIES]; /* (lock) */
    aio_file_stats stats;                /* (lock) busy_ns without the stretch that runs now */
    uint64_t busy_since[AIO_KINDS];      /* (lock) */
};

/* One block of a request on its way: what is left to transfer, and where its bytes belong. */
struct block {
    struct aio_op op;
    struct request *request; /* NULL: free */
    uint64_t nbytes; /* of the request's bytes; op.nbytes may be more (padding) or less (the rest of it) */
    char *bounce;    /* AIO_ALIGNMENT bytes of its own, for a padded tail */
    char *tail;      /* where a padded read's bytes go; NULL: op.data is the caller's memory */
    uint64_t issued_ns;
    unsigned stalls; /* submissions in a row that moved nothing */
};

enum { REQUESTS_PER_CHUNK = 256 };

struct aio_context {
    pid_t pid;
    uint64_t block_size;
    unsigned queue_depth, capacity; /* blocks in flight: per file, together */
    const char *engine;
    struct aio_backend backend; /* (driver) */
    int wake_fd;
    pthread_t driver;

    pthread_mutex_t lock;
    pthread_cond_t done;           /* a watched request is done */
    bool asleep;                   /* (lock) the driver will not look again before wake_fd is written */
    bool closing;                  /* (lock) */
    bool closed;                   /* of the one thread that closes */
    struct file **files;           /* (lock) the array; the files themselves do not move */
    unsigned n_files, next_file;   /* (lock) next_file: whose turn it is */
    struct request **chunks;       /* (lock) likewise */
    unsigned n_chunks;             /* (lock) */
    struct request *free_requests; /* (lock) */
    uint64_t n_live;               /* (lock) requests not yet done */

    struct block *blocks;       /* (lock) capacity of them */
    struct block **free_blocks; /* (lock) */
    unsigned n_free_blocks;     /* (lock) */
    char *bounces;
    struct aio_op **batch, **ended; /* (driver) to be submitted; to be judged */
    unsigned n_batch;               /* (driver) */
    unsigned n_begun;               /* (driver) with the backend */
};

/* requests.c; all under the lock. */
int64_t aio_request_add(aio_context *context, const struct request *wanted, const int64_t *after,
                        size_t n_after);
struct request *aio_request_find(aio_context *context, int64_t ticket, int *error);
void aio_request_settle(aio_context *context, struct request *request, int64_t result);
void aio_request_release(aio_context *context, struct request *request);
void aio_requests_cancel(aio_context *context);
void aio_requests_free(aio_context *context);
void aio_wake_driver(aio_context *context);

/* driver.c */
void *aio_drive(void *context);
uint64_t aio_now_ns(void);

#endif
