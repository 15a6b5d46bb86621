/* Internal declarations: a context, its files, its requests.
 *
 *   aio.c       opening and closing, files
 *   submit.c    submissions: arguments, pieces, parts
 *   requests.c  tickets and the order between requests
 *   waits.c     waits for tickets, their results, cancellation and release
 *   tasks.c     calls between transfers, run from a completion to the next submissions
 *   driver.c    the driver thread: splits requests, acts on completions
 *   judge.c     what follows from the end of an operation
 *   counters.c  what is counted for each file
 *   buffers.c   memory that is registered with the kernel
 *   verify.c    checksums of pages (options.verify)
 *   system.c    the clock, and threads without signals
 *
 * withheld.c, memory that forked children do not get, uses none of this.
 *
 * Fields marked (lock) are guarded by context->lock; fields marked (driver) belong to the driver thread; all
 * others are constant after aio_open. The lock is never held across a system call that may block, nor while
 * bytes are copied or checksummed.
 */
#ifndef TIERING_AIO_CONTEXT_H
#define TIERING_AIO_CONTEXT_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "backend.h"
#include "verify.h"

enum request_state {
    REQUEST_FREE,    /* on the free list; id is the last, released ticket */
    REQUEST_BLOCKED, /* waits for the requests that it was ordered after */
    REQUEST_QUEUED,  /* in the queue of its file; has blocks that are not issued */
    REQUEST_DIVIDED, /* its parts are queued, issued or done */
    REQUEST_ISSUED,  /* all blocks are issued, or none will be any more */
    REQUEST_DONE,    /* result is final; the ticket is not released */
};

/* `dependent` waits for `earlier`. An edge is in two lists: the dependents of `earlier`, and the requests that
 * `dependent` waits for. The second is doubly linked, because edges are removed from its middle. */
struct edge {
    struct request *earlier, *dependent;
    struct edge *next_dependent;
    struct edge *next_earlier, **link;
};

/* Bits: threads wait for the request in aio_wait, in aio_wait_any. */
enum watched { WATCHED_ALONE = 1, WATCHED_AMONG_OTHERS = 2 };

/* Bytes of a request that are adjacent in memory and in the file. */
struct piece {
    char *data;
    uint64_t offset, nbytes;
};

/* A vector request consists of parts, one for each file, and has no blocks of its own. A part is a request without a
 * ticket, which is queued and settled like others; the last part that is settled settles its `whole`. */
struct request { /* (lock) */
    int64_t id;
    enum request_state state;
    int kind, priority;
    bool poisoned;    /* an earlier request failed, or the context closes: it must not be issued */
    bool canceled;    /* by aio_cancel */
    unsigned watched; /* enum watched: threads sleep until it is done */
    struct file *file;
    char *data;
    uint64_t offset, nbytes;
    struct piece *pieces;   /* if it has several; NULL when done */
    size_t piece;           /* index of the piece that is split next */
    uint64_t piece_carved;  /* bytes of this piece that are split into blocks */
    uint64_t carved;        /* bytes that are split into blocks; 0 for a flush */
    struct request *parts;  /* of a vector request, until its release; their pieces are in the same memory */
    size_t n_parts, n_open; /* parts that are not settled */
    struct request *whole;  /* of a part */
    unsigned in_flight;     /* blocks that are issued and have not ended */
    unsigned n_pending;     /* requests that it still waits for */
    int64_t result;         /* first error, or -ECANCELED if it is taken back; otherwise 0 until done */
    uint64_t failed_at;     /* offset of the block with that error */
    int64_t passed;         /* last error after which a block was read again; 0: none */
    uint64_t issued_ns;     /* issue of the first block; 0: none */
    uint64_t done_ns;       /* end of the last block so far */
    struct edge *dependents, *earlier;
    struct request *next, *previous; /* in a file's queue; only next: on the free list or a work list */
};

struct queue {
    struct request *head, *tail;
};

/* A fine histogram. aio_stats adds its buckets up to octaves, which saves the driver a second histogram. */
struct latencies {
    uint64_t counts[AIO_FINE_BUCKETS];
    uint64_t max_ns;
};

struct file {
    int fd, index;
    uint32_t alignment;                     /* bytes of a block of the device, if direct; 0: buffered */
    struct checksums checksums;             /* (driver) */
    unsigned in_flight;                     /* (lock) blocks that count towards the queue depth */
    struct queue queues[AIO_PRIORITIES][2]; /* (lock) reads; writes and flushes */
    int turn;                               /* (lock) index of the queue that is served next */
    aio_file_stats stats;                   /* (lock) without the current busy and full time, and latencies */
    struct latencies latencies[AIO_KINDS];  /* (lock) */
    uint64_t busy_since[AIO_KINDS];         /* (lock) start of the current busy time, while in_flight > 0 */
    uint64_t full_since;                    /* (lock) start of the current queue-full time; 0: not full */
};

/* What follows from the end of an operation of a block. With BLOCK_CONTINUE and those after it, the block is submitted
 * again. */
enum verdict {
    BLOCK_COMPLETE, /* all bytes have moved */
    BLOCK_GIVEN_UP, /* not submitted again, because the request has failed or is taken back */
    BLOCK_CONTINUE, /* what is left: the rest of a short transfer, or all of one that the kernel did not take */
    BLOCK_REREAD,   /* the same read, after an error that may pass */
    BLOCK_WRITE_BACK, /* the write of a merge, whose block of the device has been read */
};

/* One block of a request in flight. It belongs to the driver from carve() to absorb(); request, file and issued_ns
 * change only there, under the lock. */
struct block {
    struct aio_op op;
    struct aio_op sum;       /* for the workers that compute checksums */
    struct request *request; /* NULL: not in flight */
    struct file *file;
    char *data;              /* the caller's memory, nbytes long */
    uint64_t offset, nbytes; /* op.nbytes may be larger (padding) or smaller (a continued transfer) */
    int kind;                /* of the request; op.kind is AIO_READ while a merge reads */
    char *bounce;            /* AIO_MAX_DIRECT bytes for an edge, owned by the block */
    bool edge;               /* the bytes pass through bounce, which begins at a block of the device */
    uint64_t start;          /* of the bytes in bounce */
    bool merges;             /* an edge that reads its block of the device before it writes */
    uint64_t issued_ns;
    unsigned stalls;  /* consecutive submissions without progress */
    unsigned rereads; /* attempts after an error that may pass */
    uint64_t due_ns;  /* earliest time of the next submission; 0: at once */
    int verdict;      /* enum verdict, or -errno */
    bool landed;      /* left file->in_flight before it is summed */
};

/* Memory that is registered with the backend. Its index in context->regions is the number of the buffer. */
struct region {
    char *address;
    uint64_t nbytes;
    enum { REGION_PENDING, REGION_READY, REGION_REFUSED } state; /* (lock) */
    int error;                                                   /* (lock) */
};

enum { REQUESTS_PER_CHUNK = 256, WAIT_SHARDS = 16 };

struct aio_context {
    unsigned forks; /* value of the fork counter (aio.c) at aio_open; differs in a child */
    uint64_t block_size;
    unsigned queue_depth, capacity; /* maximum of blocks in flight: per file, over all files */
    bool registered, verify;
    uint32_t alignment;         /* of direct files; 0: asked of the kernel */
    struct aio_backend backend; /* (driver), except ops and state, which are constant */
    struct aio_backend summers; /* (driver) workers that compute checksums; ops is NULL without verify */
    pthread_t driver;

    pthread_mutex_t lock;
    pthread_cond_t done[WAIT_SHARDS]; /* a request with WATCHED_ALONE is done; shard by slot */
    pthread_cond_t any;               /* a request with WATCHED_AMONG_OTHERS is done, or a region is tried */
    bool asleep;                      /* (lock) the driver sees new work only after backend.ops->wake */
    bool closing;                     /* (lock) no more submissions */
    bool closed;                      /* belongs to the thread that calls aio_close */
    aio_info info;                    /* (lock) */
    struct file **files;              /* (lock) the array moves when it grows; the files do not */
    unsigned n_files, n_buffered;     /* (lock) n_buffered: files without O_DIRECT */
    unsigned next_file;               /* (lock) the file that gather() serves first */
    struct request **chunks;          /* (lock) the array moves when it grows; the chunks do not */
    unsigned n_chunks;                /* (lock) */
    struct request *free_requests;    /* (lock) */
    uint64_t n_live;                  /* (lock) requests that are not done */
    struct region *regions;           /* (lock) AIO_MAX_BUFFERS regions, or NULL */
    unsigned n_regions, n_tried;      /* (lock) regions below n_tried are no longer pending */
    struct region **ready;            /* (lock) registered regions, sorted by address */
    unsigned n_ready;                 /* (lock) */

    struct block *blocks;       /* `capacity` blocks; each is on free_blocks (lock) or with the driver */
    struct block **free_blocks; /* (lock) */
    unsigned n_free_blocks;     /* (lock) */
    char *bounces;
    struct block **fresh;           /* (driver) new blocks, to be prepared */
    struct aio_op **batch, **ended; /* (driver) to be submitted; ended or refused by the backend */
    struct block **landed;          /* (driver) read in this turn, to be summed */
    struct aio_op **summed;         /* (driver) scratch of collect() */
    struct aio_op **compared;       /* (driver) blocks that were read, with the verdict of their sums */
    unsigned n_fresh, n_batch, n_landed, n_compared; /* (driver) */
    unsigned n_begun;                                /* (driver) operations with the backend */
};

/* aio.c */
bool aio_is_foreign(const aio_context *context);

/* requests.c. The caller holds the lock. */
int64_t aio_request_add(aio_context *context, const struct request *parameters, const int64_t *after,
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

/* Before another attempt of what the kernel has refused. */
enum { AIO_PAUSE_NS = 1000000 };

/* judge.c: the verdict of an operation that has ended. If it is to be submitted again, op describes what is left. */
int aio_judge(const aio_context *context, struct block *block);

/* counters.c. The caller holds the lock. */
void aio_count_block(const struct block *block, uint64_t now);

/* buffers.c. The driver calls the last two with the lock; aio_buffers_register releases it meanwhile. */
int aio_buffers_allocate(aio_context *context);
int aio_buffer_find(const aio_context *context, const char *data, uint64_t nbytes);
void aio_buffers_register(aio_context *context);

/* driver.c: the loop of the driver thread. Returns when the context is closing and no request is live. */
void aio_drive(aio_context *context);

#endif
