/* Asynchronous file I/O for tensors: large transfers between memory and files, each with its own result.
 *
 * Rules for callers
 *
 *   Errors   Every function returns >= 0 or -errno. No function prints, exits, raises a signal or asserts for a
 *            caller's error.
 *   Threads  Any thread may call any function at any time, except aio_close (one thread, after the last
 *            submission) and aio_free (one thread, while no other call runs). One driver thread per context
 *            does the I/O.
 *   Buffers  A submission borrows its memory: it must stay mapped, and for a write unchanged, until the ticket
 *            is done. aio_close waits for everything in flight: after it, no buffer is borrowed.
 *   Files    A context borrows descriptors: they must stay open until aio_close returns.
 *   Fork     A context belongs to the process that opened it. In a child, every call returns -ECHILD at once;
 *            aio_close and aio_free close the child's copies of the context's descriptors, and do not free its
 *            memory.
 *
 * build_aio.py passes the text between the two CDEF markers to cffi, so that each signature is written once.
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
#define AIO_ANY 3      /* only in an aio_fault: each of the three kinds */
#define AIO_REGISTER 4 /* only in an aio_fault: the registration of a buffer */

#define AIO_ALIGNMENT 4096   /* of address and offset on a direct file, and of block_size */
#define AIO_MAX_DIRECT 65536 /* the largest block of a device whose files can be direct */
#define AIO_PRIORITIES 3     /* 0, 1, 2; a higher one is issued first */

/* Bucket i of a histogram counts operations that took [2^i, 2^(i+1)) ns; the last bucket has no upper limit. */
#define AIO_LATENCY_BUCKETS 40

/* A finer histogram, for percentiles: buckets of 1 ns below 2^AIO_FINE_BITS ns, then 2^AIO_FINE_BITS buckets of
 * equal width per octave. The width of a bucket is at most 1/32 (3 %) of its latencies; a disk's percentiles
 * differ by more between runs. A histogram takes 9 KB per direction. With n = 2^AIO_FINE_BITS, bucket i begins
 * at i ns for i < n, else at (n + i % n) << (i / n - 1) ns; the last bucket has no upper limit. */
#define AIO_FINE_BITS 5
#define AIO_FINE_BUCKETS 1152 /* (AIO_LATENCY_BUCKETS - AIO_FINE_BITS + 1) << AIO_FINE_BITS */

typedef struct aio_context aio_context;

/* An injected fault, for tests. It applies to the operations first .. first + count - 1 of its kind, counted
 * from 1 in the order in which the backend receives them. If several faults match an operation, the first one
 * applies. */
typedef struct {
    int kind;             /* AIO_READ, AIO_WRITE, AIO_FLUSH, AIO_ANY or AIO_REGISTER */
    int file;             /* index of the file; < 0: any file */
    int error;            /* errno to return instead of the operation; 0: do the operation */
    uint64_t first;       /* from 1 */
    uint64_t count;       /* 0: all operations from first on */
    uint64_t short_bytes; /* transfer at most this many bytes; 0: all */
    uint64_t delay_ns;    /* start the operation this much later */
    uint64_t rate;        /* bytes per second of all operations of this fault together; 0: no limit */
    uint32_t
        moves_none; /* succeed without moving a byte: a stand-in for a device, to measure the code above it */
} aio_fault;

typedef struct {
    const char *engine;      /* "auto", "io_uring", "libaio" or "threads" */
    uint64_t block_size;     /* bytes per operation, a multiple of AIO_ALIGNMENT, at most 1 GiB */
    uint32_t queue_depth;    /* operations in flight per file, 1 .. 512 */
    uint32_t registered;     /* register buffers and files with the kernel if it supports that */
    uint32_t verify;         /* store a CRC32C of every written page and check it when the page is read */
    uint32_t sum_threads;    /* threads that compute the checksums, of 1 .. 8 the nearest */
    uint32_t alignment;      /* 0 outside tests; else the blocks of direct files, enforced */
    uint32_t n_faults;       /* 0 outside tests */
    const aio_fault *faults; /* aio_open copies them */
} aio_options;

/* Features in effect. */
#define AIO_USES_REGISTERED_BUFFERS 1u
#define AIO_USES_REGISTERED_FILES 2u
#define AIO_USES_SINGLE_ISSUER                                                                               \
    4u /* io_uring: one task submits, so the kernel needs fewer locks (Linux 6.0) */
#define AIO_USES_DEFER_TASKRUN 8u /* io_uring: the kernel processes completions when the driver waits (6.1) */
#define AIO_USES_COOP_TASKRUN 16u /* io_uring: completions do not interrupt the driver (5.19) */
#define AIO_USES_VERIFY 32u
#define AIO_USES_WORKERS 64u /* libaio: threads do the operations of buffered files */

typedef struct {
    const char *engine;                   /* the engine in use; valid as long as the context */
    uint32_t flags;                       /* AIO_USES_* */
    int32_t io_uring_error, libaio_error; /* "auto" only: -errno of the failed start; 0: it did not fail */
    int32_t buffers_error, files_error;   /* -errno of the last failed registration; 0: none failed */
    uint64_t registered_bytes;
} aio_info;

#define AIO_ERRNOS                                                                                           \
    8 /* entries per direction; the last one counts all errnos that have no entry of their own */

typedef struct {
    int32_t error; /* errno; 0: an unused entry or, in the last one, all other errnos */
    uint64_t count;
} aio_error_count;

typedef struct {
    uint64_t bytes;      /* requested and transferred, without padding */
    uint64_t ops;        /* operations (blocks of a request) that completed in full */
    uint64_t retries;    /* resubmissions: after a short transfer, EINTR or EAGAIN, and rereads */
    uint64_t rereads;    /* resubmissions of reads that had failed with EIO, ETIMEDOUT or ENOLINK */
    uint64_t errors;     /* operations that failed */
    uint64_t in_flight;  /* operations in flight now */
    uint64_t busy_ns;    /* time with at least one operation in flight: bytes / busy_ns is the bandwidth */
    uint64_t latency_ns; /* sum of the latencies of ops, from issue to the last continuation */
    uint64_t latency[AIO_LATENCY_BUCKETS]; /* histogram of these latencies */
    aio_error_count by_errno[AIO_ERRNOS];  /* errors by errno */
} aio_direction_stats;

typedef struct {
    aio_direction_stats kind[AIO_KINDS];
    uint64_t queue_full_ns; /* time in which requests waited because the queue was full */
} aio_file_stats;

/* The result of a request. Times are CLOCK_MONOTONIC; 0 if no block was issued. */
typedef struct {
    int64_t bytes;      /* bytes transferred, always the requested number; or -errno */
    uint64_t offset;    /* in the file: of the first block that failed, else of the request */
    int32_t file;       /* index of that file */
    int64_t passed;     /* -errno after which a block was read again, the last one; 0: none */
    uint64_t issued_ns; /* issue of the first block */
    uint64_t done_ns;   /* end of the last block, including the check of its checksums (options.verify) */
} aio_result;

/* Open a context. "auto" takes the first of io_uring, libaio and threads that starts: containers and sysctls may
 * forbid io_uring, fs.aio-max-nr limits libaio. If a named engine cannot start, returns the kernel's error. libaio
 * leaves buffered files to threads, because it is synchronous on them.
 * -EINVAL: an option out of range or an unknown engine. */
int aio_open(aio_context **out, const aio_options *options);

int aio_describe(aio_context *context, aio_info *out);

/* Add an open descriptor; returns its file index. direct: opened with O_DIRECT, so alignment is enforced and
 * tails are padded. -EBADF: not an open descriptor. */
int aio_add_file(aio_context *context, int fd, int direct);

/* Register memory that many requests will use with the kernel, so that it does not look up and pin its pages for
 * each request. The memory must stay mapped until aio_close: the kernel continues to use these pages, even if
 * other memory is mapped at the address later. Waits for the registration, which touches every page. Requests
 * also work without registration.
 *
 * Returns the registered bytes, from the start of the memory: all, or as many as RLIMIT_MEMLOCK permits. -ENOMEM: it
 * does not permit a block. -EOPNOTSUPP: the engine does not support it, or options.registered is 0. -ENOSPC: more than
 * 16384 buffers; each GiB counts as one. -EFAULT: a part of the memory is not mapped. After an error, a part of the
 * memory may be registered. */
int64_t aio_register_buffer(aio_context *context, void *address, uint64_t nbytes);

/* Queue one request and store its ticket (> 0) in *ticket. A request may have any length: it is split into
 * blocks, and short transfers are continued. The memory at data is borrowed until the ticket is done.
 *
 * *ticket is stored before the first block is issued, and only if the request is accepted. So a caller that does
 * not see the return value (an interpreter whose signal handler raises) still knows that the request exists.
 *
 * On a direct file, data and offset must be multiples of AIO_ALIGNMENT (-EINVAL). nbytes need not be: the last
 * block then passes through an aligned buffer of the context. A write fills the remainder of that block with
 * zeros; a read drops the bytes after nbytes, and the file may end there.
 *
 * after: tickets that must be done before this request is issued. If one of them failed, this request fails with
 * -ECANCELED: a read ordered after a failed write never returns stale bytes. A write goes on after a read that
 * failed by itself, for which it only had to wait. A released ticket does not delay or fail the request, so keep a
 * failed ticket as long as a request may be ordered after it. A number that was never a ticket is -EINVAL.
 * Priorities do not change this order: requests that an urgent request waits for get its priority.
 *
 * AIO_FLUSH ignores data, offset and nbytes; it covers the writes that were done when it is issued, so name
 * other writes in after. -ESHUTDOWN: the context is closed. -ENOMEM, -EAGAIN: out of memory, or a million
 * unreleased tickets. */
int aio_submit(aio_context *context, int kind, int file, void *data, uint64_t offset, uint64_t nbytes,
               int priority, const int64_t *after, size_t n_after, int64_t *ticket);

/* One request of n pieces of nbytes_each bytes: piece i moves between data + i * nbytes_each and offsets[i]. For
 * many small transfers at once, because a ticket for each would cost more than the transfers. No block crosses
 * the edge of a piece; the result's offset is that of the first piece unless a block failed. On a direct file,
 * nbytes_each must also be a multiple of AIO_ALIGNMENT: pieces have no padded tails. Reads of pieces that overlap
 * in the file are correct; after overlapping writes, the overlap holds the data of either piece. offsets are
 * copied. -EINVAL also for AIO_FLUSH. All other rules are those of aio_submit. */
int aio_submit_scattered(aio_context *context, int kind, int file, void *data, const uint64_t *offsets,
                         size_t n, uint64_t nbytes_each, int priority, const int64_t *after, size_t n_after,
                         int64_t *ticket);

/* A part of a vector request: nbytes at `at` of its memory move to or from `offset` of the file, as in aio_submit. */
typedef struct {
    uint64_t at, offset, nbytes;
    int32_t file;
} aio_piece;

/* One request of n pieces of the memory at data, which may be in different files: one ticket, done when all its pieces
 * are. The queue depth of each file applies to its own pieces, so a slow file delays no other one. If pieces fail,
 * those of other files go on; the result has the error of the first failed block, and its place. No block crosses the
 * edge of a piece. pieces are copied. -EINVAL also for AIO_FLUSH. aio_cancel cancels what is queued for each file. All
 * other rules are those of aio_submit. */
int aio_submit_vector(aio_context *context, int kind, void *data, const aio_piece *pieces, size_t n,
                      int priority, const int64_t *after, size_t n_after, int64_t *ticket);

/* What a done vector request did in each of its files, in the order of their first pieces: stores up to max results, in
 * which a failure of one file does not show in the others, and returns the number of files. 0 for other requests.
 * -EBUSY: not done. -ESTALE, -EINVAL: as for aio_wait. */
int aio_vector_results(aio_context *context, int64_t ticket, aio_result *results, size_t max);

/* Wait until the ticket is done, at most timeout_ns (0: do not wait; < 0: no limit), and store its result.
 * A failed request has the kernel's error in result->bytes, or: -ENODATA for a read past the end of the file (the
 * block layer also returns it for a medium error), -EIO also for a write that makes no progress, -ECANCELED for
 * a request that was canceled or never issued. A read fails with -EIO, -ETIMEDOUT or -ENOLINK only after three
 * attempts. With options.verify: -EBADMSG for a page that differs from the data written, or that a failed write
 * should have written; -ENOMEM and -EFBIG (past 2^48 bytes) for writes whose checksums cannot be stored.
 *
 * Returns 0 if the ticket is done, -ETIMEDOUT if not, -ESTALE after its release, -EINVAL if it never was a
 * ticket. The result stays until aio_release, for any number of waiters, and also after aio_close. */
int aio_wait(aio_context *context, int64_t ticket, int64_t timeout_ns, aio_result *result);

/* Wait until one of n tickets is done and return its index, the lowest if several are done. Errors as for
 * aio_wait; -EINVAL also for n = 0. */
int64_t aio_wait_any(aio_context *context, const int64_t *tickets, size_t n, int64_t timeout_ns);

/* A vector request that a task submits. `after` and `ticket` are where tickets are stored: those of earlier
 * submissions of the same run are known only while it runs. A ticket of 0 in `after` is -EINVAL. */
typedef struct {
    int32_t kind, priority;
    void *data;
    const aio_piece *pieces;
    size_t n;
    int64_t *const *after;
    size_t n_after;
    int64_t *ticket;
    uint64_t submitted_ns; /* set by aio_run: the time before the submission; 0: not made */
} aio_submission;

/* A step of work between transfers: when the tickets that are stored at `waits` are done, call(argument), which returns
 * 0 or -errno, but not -ETIMEDOUT, then the submissions. A wait for a released ticket is over; one for 0 lasts until a
 * submission of this run stores a ticket there. */
typedef struct {
    int64_t *const *waits;
    size_t n_waits;
    int (*call)(void *argument);
    void *argument;
    aio_submission *submissions;
    size_t n_submissions;
    uint64_t idle_ns; /* set by aio_run: the beginning of the wait that this task ended; 0: there was none */
    uint64_t began_ns, ended_ns; /* set by aio_run: of the call; 0: not begun, not ended */
    int32_t answer;              /* set by aio_run: of the call */
} aio_task;

/* Run the tasks whose call has not begun, each when its waits are over; of several, the first in the array. The calls
 * run in this thread, one after the other. *idle_ns is 0 at first, and keeps the beginning of a wait between calls.
 *
 * Returns 0 when all tasks are done; -ETIMEDOUT after timeout_ns (< 0: no limit), between two tasks: call it again to
 * go on; -ECANCELED if a ticket that a task waits for has failed; or the error of a call or a submission. After an
 * error no task begins, and the submissions behind the one that failed are not made. */
int aio_run(aio_context *context, aio_task *tasks, size_t n, int64_t timeout_ns, uint64_t *idle_ns);

/* Cancel a request: no more of its blocks are issued. It is done with -ECANCELED when its blocks in flight have
 * ended and the requests that it was ordered after are done; the blocks before may have been transferred. A block of a
 * write is written as a whole or not at all, unless it fails.
 * Requests ordered after it continue if it was a read, and fail if it was a write or a flush. -EBUSY: all its
 * blocks have been issued, or one has failed, and the request goes on. -EALREADY: done. */
int aio_cancel(aio_context *context, int64_t ticket);

/* Release a done ticket and its result. -EBUSY: not done. -ESTALE: already released. */
int aio_release(aio_context *context, int64_t ticket);

/* For many tickets at once. aio_succeeded replaces those by 0 that are not done, have failed, were read again, or are
 * released; the others have moved all their bytes. aio_release_all releases tickets that are done, and ignores all
 * other numbers. */
int aio_succeeded(aio_context *context, int64_t *tickets, size_t n);
int aio_release_all(aio_context *context, const int64_t *tickets, size_t n);

int aio_stats(aio_context *context, int file, aio_file_stats *out);

/* The operation of a file that has been in flight the longest: the ticket of its request (0: no operation is in
 * flight), and when it was issued (CLOCK_MONOTONIC). -EINVAL: no such file. */
int aio_oldest(aio_context *context, int file, int64_t *ticket, uint64_t *issued_ns);

/* The fine histogram of the latencies of one kind, counts[AIO_FINE_BUCKETS], and the exact maximum (0: no
 * operation). -EINVAL: no such file or kind. */
int aio_latencies(aio_context *context, int file, int kind, uint64_t *counts, uint64_t *max_ns);

/* Cancel all requests as aio_cancel does, wait for the blocks in flight, end the threads. Results and statistics
 * stay readable. A second call does nothing. */
int aio_close(aio_context *context);

/* Close the context if necessary, and free its memory. */
void aio_free(aio_context *context);

/* Lock a range in RAM: 0, or -errno (RLIMIT_MEMLOCK). munmap of the range unlocks it. */
int aio_lock_memory(void *address, size_t nbytes);

/* Withhold whole pages from forked children. In a child the range can be neither read nor written, and its
 * addresses stay reserved: if the child's copy of the owner unmaps the range, it unmaps no other memory. Call
 * aio_forget_withheld before or after the owner unmaps the range; children may call it, too. Returns 0 and a
 * handle, or -errno. Any thread may call both. */
typedef struct aio_withheld aio_withheld;
int aio_withhold(aio_withheld **out, void *address, size_t nbytes);
void aio_forget_withheld(aio_withheld *range);

/* The bytes of which operations on a direct file transfer multiples, at least AIO_ALIGNMENT, as the kernel says
 * (STATX_DIOALIGN). A context takes requests of any multiple of AIO_ALIGNMENT nevertheless: where a request covers a
 * larger block of the device in part, the context reads it, and for a write merges and writes it. The file grows to
 * whole blocks. AIO_ALIGNMENT also if the kernel does not say it, or wants more than AIO_MAX_DIRECT; an operation then
 * shows whether it is possible. -EBADF: not an open descriptor. */
int aio_direct_alignment(int fd);

/* Allocate the blocks of the file's first nbytes and set its length, with the bare system call: if the file system
 * does not support it (-EOPNOTSUPP), nothing is written instead. */
int aio_reserve(int fd, uint64_t nbytes);

/* Store in `sums` the checksums of the n pages of a file from page `first` on, which options.verify compares when the
 * pages are read; 0: the page has none. aio_set_checksums sets them, of a file that another context has written. Without
 * options.verify: -EOPNOTSUPP. -EBUSY: a request is not done. -EINVAL: no such file. -ENOMEM, -EFBIG: as for aio_wait. */
int aio_get_checksums(aio_context *context, int file, uint64_t first, size_t n, uint32_t *sums);
int aio_set_checksums(aio_context *context, int file, uint64_t first, size_t n, const uint32_t *sums);

/* CRC32C (Castagnoli) of each of n_pages pages of AIO_ALIGNMENT bytes. */
void aio_checksum(const void *pages, size_t n_pages, uint32_t *out);
/* CDEF end */

#endif
