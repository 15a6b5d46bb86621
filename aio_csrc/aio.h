/* Asynchronous file I/O for tensors: many large transfers between memory and files, judged one by one.
 *
 * What a caller may rely on
 *
 *   Errors   Every function returns >= 0 or -errno. None prints, exits, raises a signal or asserts for a
 *            caller's error.
 *   Threads  Any thread may call anything at any time, except aio_close (one thread, once nobody submits any
 *            more) and aio_free (one thread, when no other call is running). One driver thread per context
 *            does the I/O.
 *   Buffers  Memory handed to aio_submit is borrowed: it must stay mapped, and for a write unchanged, until
 *            the ticket is done. aio_close waits for everything in flight: after it no buffer is borrowed.
 *   Files    Descriptors are borrowed as well and must stay open until aio_close.
 *   Fork     A context belongs to the process that opened it. In a child every call returns -ECHILD at once,
 *            aio_close gives back the child's copies of the context's own descriptors, aio_free its memory.
 *
 * The text between the two CDEF markers is the interface that build_aio.py hands to cffi: each signature is
 * written once.
 */
#ifndef TIERING_AIO_H
#define TIERING_AIO_H

#include <stddef.h>
#include <stdint.h>

/* CDEF begin */
#define AIO_READ 0
#define AIO_WRITE 1
#define AIO_FLUSH 2 /* fdatasync */
#define AIO_ANY 3   /* in a fault only */
#define AIO_KINDS 3

#define AIO_ALIGNMENT 4096 /* of address and offset on a direct file, and of block_size */
#define AIO_PRIORITIES 3   /* 0, 1, 2; a higher one is issued first */

/* Bucket i of a histogram counts operations that took [2^i, 2^(i+1)) ns; the last one is open. */
#define AIO_LATENCY_BUCKETS 40

typedef struct aio_context aio_context;

/* One planned misfortune, for tests. It meets the operations first .. first + count - 1 (counted from 1, of
 * its kind, in the order the backend receives them; count 0: for ever). The first fault that matches an
 * operation decides. */
typedef struct {
    int kind;             /* AIO_READ, AIO_WRITE, AIO_FLUSH or AIO_ANY */
    int error;            /* errno to answer instead of doing it; 0: do it */
    uint64_t first;       /* from 1 */
    uint64_t count;       /* 0: every one from first on */
    uint64_t short_bytes; /* transfer at most so many bytes; 0: all */
    uint64_t delay_ns;    /* begin so much later */
} aio_fault;

typedef struct {
    const char *engine;      /* "auto", "libaio" or "threads" */
    uint64_t block_size;     /* bytes per operation, a multiple of AIO_ALIGNMENT, at most 1 GiB */
    uint32_t queue_depth;    /* operations in flight per file, 1 .. 512 */
    uint32_t n_faults;       /* 0 outside tests */
    const aio_fault *faults; /* copied */
} aio_options;

typedef struct {
    uint64_t bytes;     /* asked for and moved; padding is not counted */
    uint64_t ops;       /* operations (blocks of a request) that completed in full */
    uint64_t retries;   /* resubmissions after a short transfer, EINTR or EAGAIN */
    uint64_t errors;    /* operations that failed */
    uint64_t in_flight; /* operations now */
    uint64_t busy_ns;   /* time with at least one operation in flight: bytes / busy_ns is the bandwidth */
    uint64_t latency[AIO_LATENCY_BUCKETS]; /* of ops, from issue to the last continuation */
} aio_direction_stats;

typedef struct {
    aio_direction_stats kind[AIO_KINDS];
} aio_file_stats;

/* Open a context. "auto" takes libaio, or threads where the kernel or its aio-max-nr limit says no; a named
 * engine that cannot start is an error, as the kernel gave it. -EINVAL: an option out of range or an unknown
 * engine. */
int aio_open(aio_context **out, const aio_options *options);

/* The name of the engine in use; it lives as long as the context. */
const char *aio_engine_name(const aio_context *context);

/* Add an open descriptor; returns its file index. direct: opened with O_DIRECT, so alignment is enforced and
 * tails are padded. -EBADF: not an open descriptor. */
int aio_add_file(aio_context *context, int fd, int direct);

/* Queue one request and return its ticket (> 0) at once. Any length is taken: it is split into blocks, and
 * what the kernel transfers short is continued.
 *
 * On a direct file data and offset must be multiples of AIO_ALIGNMENT (-EINVAL). nbytes need not be: the last
 * block then passes through an aligned buffer of ours. A write fills the rest of that block with zeros; a
 * read drops what lies behind nbytes and accepts that the file ends there.
 *
 * after: tickets that must be done before this one is issued. If one of them failed, this one fails with
 * -ECANCELED: a read ordered behind a failed write never returns stale bytes. That holds for a failed ticket
 * already released, too; a released ticket that succeeded is no obstacle. A number that was never a ticket is
 * -EINVAL.
 *
 * AIO_FLUSH ignores data, offset and nbytes; it covers the writes that were done when it was issued, so name
 * the others in after. -ESHUTDOWN: the context is closed. -ENOMEM, -EAGAIN: out of memory, or a million
 * tickets unreleased. */
int64_t aio_submit(aio_context *context, int kind, int file, void *data, uint64_t offset, uint64_t nbytes,
                   int priority, const int64_t *after, size_t n_after);

/* Wait until the ticket is done, at most timeout_ns (0: just look; < 0: for ever), and store its result: the
 * bytes it moved, always all of them, or -errno. -ENODATA is a read behind the end of the file (the block
 * layer answers it for a medium error as well), -EIO also a write that makes no progress, -ECANCELED a
 * request never issued. Returns 0 when done, -ETIMEDOUT when not, -ESTALE after release, -EINVAL for what was
 * never a ticket. The result stays until aio_release, for any number of waiters; a closed context still
 * answers. */
int aio_wait(aio_context *context, int64_t ticket, int64_t timeout_ns, int64_t *result);

/* Give a done ticket back; its result is forgotten, except that a failure goes on failing those that come
 * after it. -EBUSY: not done yet. -ESTALE: released before. */
int aio_release(aio_context *context, int64_t ticket);

int aio_stats(aio_context *context, int file, aio_file_stats *out);

/* Cancel what was not begun (-ECANCELED), wait for what was, end the threads. Results and statistics stay
 * readable. A second call does nothing. */
int aio_close(aio_context *context);

/* Free the memory, closing first if need be. */
void aio_free(aio_context *context);

/* Keep a range in RAM, best effort: 0, or -errno (RLIMIT_MEMLOCK). Unmapping it undoes it. */
int aio_lock_memory(void *address, size_t nbytes);
/* CDEF end */

#endif
