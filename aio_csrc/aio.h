/* Asynchronous file I/O for tensors: many large transfers between memory and files, judged one by one.
 *
 * What a caller may rely on
 *
 *   Errors   Every function returns >= 0 or -errno. None prints, exits, raises a signal or asserts for a
 *            caller's error.
 *   Threads  Any thread may call anything at any time, except aio_close (one thread, once nobody submits any
 *            more) and aio_free (one thread, when no other call is running). One driver thread per context
 *            does the I/O.
 *   Buffers  Memory handed to a submission is borrowed: it must stay mapped, and for a write unchanged, until
 *            the ticket is done. aio_close waits for everything in flight: after it no buffer is borrowed.
 *   Files    Descriptors are borrowed as well and must stay open until aio_close.
 *   Fork     A context belongs to the process that opened it. In a child every call returns -ECHILD at once,
 *            aio_close and aio_free close the child's copies of the context's own descriptors; its memory stays.
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
#define AIO_KINDS 3
#define AIO_ANY 3      /* in a fault only: each of the three */
#define AIO_REGISTER 4 /* in a fault only: the registration of a buffer */

#define AIO_ALIGNMENT 4096 /* of address and offset on a direct file, and of block_size */
#define AIO_PRIORITIES 3   /* 0, 1, 2; a higher one is issued first */

/* Bucket i of a histogram counts operations that took [2^i, 2^(i+1)) ns; the last one is open. */
#define AIO_LATENCY_BUCKETS 40

/* The same, fine enough for percentiles: a nanosecond each below 2^AIO_FINE_BITS, then 2^AIO_FINE_BITS buckets
 * of equal width for every octave. None is wider than a thirty-second of the latencies in it, 3 %: a disk's
 * percentiles differ by more from one run to the next, and a direction costs 9 KB. With n = 2^AIO_FINE_BITS,
 * bucket i begins at i ns below n, else at (n + i % n) << (i / n - 1); the last one is open. */
#define AIO_FINE_BITS 5
#define AIO_FINE_BUCKETS 1152 /* (AIO_LATENCY_BUCKETS - AIO_FINE_BITS + 1) << AIO_FINE_BITS */

typedef struct aio_context aio_context;

/* One planned misfortune, for tests. It meets the operations first .. first + count - 1 (counted from 1, of
 * its kind, in the order the backend receives them; count 0: for ever). The first fault that matches an
 * operation decides. */
typedef struct {
    int kind;             /* AIO_READ, AIO_WRITE, AIO_FLUSH, AIO_ANY or AIO_REGISTER */
    int file;             /* index of the one file it meets; < 0: any */
    int error;            /* errno to answer instead of doing it; 0: do it */
    uint64_t first;       /* from 1 */
    uint64_t count;       /* 0: every one from first on */
    uint64_t short_bytes; /* transfer at most so many bytes; 0: all */
    uint64_t delay_ns;    /* begin so much later */
} aio_fault;

typedef struct {
    const char *engine;      /* "auto", "io_uring", "libaio" or "threads" */
    uint64_t block_size;     /* bytes per operation, a multiple of AIO_ALIGNMENT, at most 1 GiB */
    uint32_t queue_depth;    /* operations in flight per file, 1 .. 512 */
    uint32_t registered;     /* register buffers and files with the kernel where that is possible */
    uint32_t verify;         /* keep a CRC32C of every page written and check it when the page is read */
    uint32_t n_faults;       /* 0 outside tests */
    const aio_fault *faults; /* copied */
} aio_options;

/* What a context really uses. */
#define AIO_USES_REGISTERED_BUFFERS 1u
#define AIO_USES_REGISTERED_FILES 2u
#define AIO_USES_SINGLE_ISSUER                                                                               \
    4u /* io_uring: one task submits, so the kernel needs fewer locks (Linux 6.0) */
#define AIO_USES_DEFER_TASKRUN 8u /* io_uring: completions are processed when the driver asks (6.1) */
#define AIO_USES_COOP_TASKRUN 16u /* io_uring: and without interrupting it (5.19) */
#define AIO_USES_VERIFY 32u

typedef struct {
    const char *engine;                   /* the one in use; lives as long as the context */
    uint32_t flags;                       /* AIO_USES_* */
    int32_t io_uring_error, libaio_error; /* "auto" only: why it was passed over, -errno; 0: it was not */
    int32_t buffers_error, files_error;   /* why the last registration that failed did, -errno; 0: none did */
    uint64_t registered_bytes;
} aio_info;

#define AIO_ERRNOS 8 /* different errnos told apart per direction; the last entry counts all further ones */

typedef struct {
    int32_t error; /* errno, 0: nothing here (or, in the last entry, any other) */
    uint64_t count;
} aio_error_count;

typedef struct {
    uint64_t bytes;      /* asked for and moved; padding is not counted */
    uint64_t ops;        /* operations (blocks of a request) that completed in full */
    uint64_t retries;    /* resubmissions after a short transfer, EINTR or EAGAIN */
    uint64_t errors;     /* operations that failed */
    uint64_t in_flight;  /* operations now */
    uint64_t busy_ns;    /* time with at least one operation in flight: bytes / busy_ns is the bandwidth */
    uint64_t latency_ns; /* of ops, from issue to the last continuation: their sum */
    uint64_t latency[AIO_LATENCY_BUCKETS]; /* and how many took how long */
    aio_error_count by_errno[AIO_ERRNOS];  /* of errors */
} aio_direction_stats;

typedef struct {
    aio_direction_stats kind[AIO_KINDS];
    uint64_t queue_full_ns; /* time in which requests waited because the queue was at its depth */
} aio_file_stats;

/* How a request ended, and when (CLOCK_MONOTONIC; 0: nothing of it was ever issued). */
typedef struct {
    int64_t bytes;      /* moved: always all that were asked for; or -errno */
    uint64_t offset;    /* in the file: of the block that failed first, else of the request */
    uint64_t issued_ns; /* when its first block was */
    uint64_t done_ns;   /* when its last block was over: judged, and compared if options.verify says so */
} aio_result;

/* Open a context. "auto" takes the first of io_uring, libaio and threads that starts here: containers and
 * sysctls forbid io_uring, fs.aio-max-nr limits libaio. A named engine that cannot start is an error, as the
 * kernel gave it. -EINVAL: an option out of range or an unknown engine. */
int aio_open(aio_context **out, const aio_options *options);

int aio_describe(aio_context *context, aio_info *out);

/* Add an open descriptor; returns its file index. direct: opened with O_DIRECT, so alignment is enforced and
 * tails are padded. -EBADF: not an open descriptor. */
int aio_add_file(aio_context *context, int fd, int direct);

/* Tell the kernel of memory that many requests will use, so that it need not look up and pin its pages for
 * each. It must stay mapped until aio_close: the kernel goes on using these pages, whatever is mapped at the
 * address later. Returns once that is done, which touches every page. All requests work without it, too.
 * -EOPNOTSUPP: this engine has no such thing, or options.registered is 0. -ENOMEM: RLIMIT_MEMLOCK. -ENOSPC:
 * more than 16384 buffers, counting each GiB as one. -EFAULT: not all of it is mapped. */
int aio_register_buffer(aio_context *context, void *address, uint64_t nbytes);

/* Queue one request and store its ticket (> 0) in *ticket. Any length is taken: it is split into blocks, and
 * what the kernel transfers short is continued.
 *
 * *ticket is stored before any of it is issued, and only if the request was taken: a caller that never gets to
 * see the return value (an interpreter whose signal handler raises) learns from it what is under way.
 *
 * On a direct file data and offset must be multiples of AIO_ALIGNMENT (-EINVAL). nbytes need not be: the last
 * block then passes through an aligned buffer of ours. A write fills the rest of that block with zeros; a
 * read drops what lies behind nbytes and accepts that the file ends there.
 *
 * after: tickets that must be done before this one is issued. If one of them failed, this one fails with
 * -ECANCELED: a read ordered behind a failed write never returns stale bytes. A released ticket is no obstacle,
 * so keep one that failed for as long as something may have to be ordered after it. A number that was never a
 * ticket is -EINVAL. A priority never overtakes an order: what an urgent request waits for becomes as urgent.
 *
 * AIO_FLUSH ignores data, offset and nbytes; it covers the writes that were done when it was issued, so name
 * the others in after. -ESHUTDOWN: the context is closed. -ENOMEM, -EAGAIN: out of memory, or a million
 * tickets unreleased. */
int aio_submit(aio_context *context, int kind, int file, void *data, uint64_t offset, uint64_t nbytes,
               int priority, const int64_t *after, size_t n_after, int64_t *ticket);

/* One request of n pieces of nbytes_each bytes: piece i goes between data + i * nbytes_each and offsets[i]. For
 * many small transfers at once: a ticket each costs more than they do. No block crosses a piece's edge; the
 * result's offset is the first piece's unless a block failed; all else is as for aio_submit. On a direct file
 * nbytes_each is a multiple of AIO_ALIGNMENT, too, for there are no tails in the middle. Pieces that overlap in
 * the file are read well; written, either may be there in the end. offsets are copied. -EINVAL also for
 * AIO_FLUSH. */
int aio_submit_scattered(aio_context *context, int kind, int file, void *data, const uint64_t *offsets,
                         size_t n, uint64_t nbytes_each, int priority, const int64_t *after, size_t n_after,
                         int64_t *ticket);

/* Wait until the ticket is done, at most timeout_ns (0: just look; < 0: for ever), and store its result.
 * Errors are the kernel's; besides, -ENODATA is a read behind the end of the file (the block layer answers it
 * for a medium error as well), -EIO also a write that makes no progress, -ECANCELED a request never issued.
 * With options.verify, -EBADMSG is a page that is not what was written, or what a failed write should have
 * written; -ENOMEM and -EFBIG (behind 2^48 bytes) are writes whose checksums cannot be kept.
 *
 * Returns 0 when done, -ETIMEDOUT when not, -ESTALE after release, -EINVAL for what was never a ticket. The
 * result stays until aio_release, for any number of waiters; a closed context still answers. */
int aio_wait(aio_context *context, int64_t ticket, int64_t timeout_ns, aio_result *result);

/* Wait until one of n tickets is done and return its place among them, the first if several are. Errors as
 * aio_wait; -EINVAL also for n = 0. */
int64_t aio_wait_any(aio_context *context, const int64_t *tickets, size_t n, int64_t timeout_ns);

/* Take a request back of which nothing was issued yet: it will not be, and is done with -ECANCELED once what
 * it was ordered after is. What was ordered after it goes on if it was a read, and fails if it was a write or
 * a flush. -EBUSY: too late, the request goes on; -EALREADY: done. */
int aio_cancel(aio_context *context, int64_t ticket);

/* Give a done ticket back; its result is forgotten. -EBUSY: not done yet. -ESTALE: released before. */
int aio_release(aio_context *context, int64_t ticket);

int aio_stats(aio_context *context, int file, aio_file_stats *out);

/* The latencies that aio_stats counts in octaves, of one kind: counts[AIO_FINE_BUCKETS], and the longest of
 * them, exactly (0: there is none). -EINVAL: no such file or kind. */
int aio_latencies(aio_context *context, int file, int kind, uint64_t *counts, uint64_t *max_ns);

/* Cancel what was not begun (-ECANCELED), wait for the last block of what was, end the threads. Results and
 * statistics stay readable. A second call does nothing. */
int aio_close(aio_context *context);

/* Free the memory, closing first if need be. */
void aio_free(aio_context *context);

/* Keep a range in RAM, best effort: 0, or -errno (RLIMIT_MEMLOCK). Unmapping it undoes it. */
int aio_lock_memory(void *address, size_t nbytes);

/* Keep whole pages from forked children. There the range can be neither read nor written, and its addresses stay
 * taken: a child that unmaps it, as its copy of the owner may, unmaps nothing else. Forget it when the range is
 * unmapped, in any order; children may do so too. 0 and a handle, or -errno. */
typedef struct aio_withheld aio_withheld;
int aio_withhold(aio_withheld **out, void *address, size_t nbytes);
void aio_forget_withheld(aio_withheld *range);

/* Allocate the blocks of the file's first nbytes and make it that long, with the system call itself: where
 * the file system has none (-EOPNOTSUPP) nothing is written in its place. */
int aio_reserve(int fd, uint64_t nbytes);

/* CRC32C (Castagnoli) of each of n_pages pages of AIO_ALIGNMENT bytes. */
void aio_checksum(const void *pages, size_t n_pages, uint32_t *out);
/* CDEF end */

#endif
