/* The C context under the sanitizers, without an interpreter in between: threads that submit, wait, order, release and
 * close, over both engines, with and without faults. Prints one line per engine and ends with 0, or says what was wrong.
 *
 * From the root of the repository:
 *   gcc -std=gnu11 -O1 -g -fsanitize=address,undefined -pthread -Iaio_csrc aio_csrc/[a-z]*.c tests/aio/test_aio.c -o T && T
 * and the same with -fsanitize=thread. An optional argument is the directory for the anonymous file (default: .).
 */
#define _GNU_SOURCE
#include "aio.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { THREADS = 4, ROUNDS = 40, BLOCK = 16384, REGION = 4 * BLOCK };

#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);                        \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

static aio_context *context;
static int file;

static aio_context *open_on(const char *engine, const aio_fault *faults, unsigned n_faults)
{
    aio_context *opened;
    aio_options options = {.engine = engine,
                           .block_size = BLOCK,
                           .queue_depth = 4,
                           .registered = 1,
                           .verify = 1,
                           .n_faults = n_faults,
                           .faults = faults};
    CHECK(aio_open(&opened, &options) == 0);
    return opened;
}

static int64_t submit(int kind, char *data, uint64_t offset, uint64_t nbytes, int priority, int64_t after)
{
    int64_t ticket = aio_submit(context, kind, file, data, offset, nbytes, priority, &after, after ? 1 : 0);
    CHECK(ticket > 0);
    return ticket;
}

static int64_t finish(int64_t ticket)
{
    aio_result result;
    CHECK(aio_wait(context, ticket, -1, &result) == 0);
    CHECK(aio_release(context, ticket) == 0);
    return result.bytes;
}

static char *buffer_of(size_t nbytes, int fill)
{
    void *memory;
    CHECK(posix_memalign(&memory, AIO_ALIGNMENT, nbytes) == 0);
    memset(memory, fill, nbytes);
    return memory;
}

/* Write, read back in order, compare; lengths walk over tails of every kind. */
static void *work(void *argument)
{
    uint64_t rank = (uint64_t)(uintptr_t)argument;
    char *out = buffer_of(REGION, 0), *in = buffer_of(REGION, 0);
    aio_file_stats stats;
    for (int i = 0; i < ROUNDS; i++) {
        uint64_t nbytes = 1 + ((uint64_t)i * 1663 + rank * 4096) % (REGION - 1);
        memset(out, (int)(rank * ROUNDS) + i, nbytes);
        memset(in, 0, REGION);
        int64_t write = submit(AIO_WRITE, out, rank * REGION, nbytes, i % AIO_PRIORITIES, 0);
        int64_t flush = submit(AIO_FLUSH, NULL, 0, 0, 0, write);
        int64_t read = submit(AIO_READ, in, rank * REGION, nbytes, 2, i % 2 ? write : flush);
        CHECK(finish(read) == (int64_t)nbytes);
        CHECK(finish(write) == (int64_t)nbytes);
        CHECK(finish(flush) == 0);
        CHECK(memcmp(in, out, nbytes) == 0);
        CHECK(aio_stats(context, file, &stats) == 0);
    }
    free(in);
    free(out);
    return NULL;
}

static void run_threads(void)
{
    pthread_t threads[THREADS];
    for (uintptr_t rank = 0; rank < THREADS; rank++)
        CHECK(pthread_create(&threads[rank], NULL, work, (void *)rank) == 0);
    for (int rank = 0; rank < THREADS; rank++)
        CHECK(pthread_join(threads[rank], NULL) == 0);
}

static void check_round_trips(const char *engine, int fd)
{
    const aio_fault troubles[] = {
        {.file = -1, .kind = AIO_READ, .first = 3, .count = 40, .short_bytes = 4096},
        {.file = -1, .kind = AIO_WRITE, .first = 5, .count = 40, .short_bytes = 8192},
        {.file = -1, .kind = AIO_ANY, .first = 60, .count = 20, .error = EAGAIN},
        {.file = -1, .kind = AIO_ANY, .first = 100, .count = 30, .delay_ns = 2000000},
    };
    for (unsigned n_faults = 0; n_faults <= 4; n_faults += 4) {
        context = open_on(engine, troubles, n_faults);
        file = aio_add_file(context, fd, 1);
        CHECK(file >= 0);
        run_threads();
        aio_file_stats stats;
        CHECK(aio_stats(context, file, &stats) == 0);
        CHECK(stats.kind[AIO_READ].bytes == stats.kind[AIO_WRITE].bytes);
        CHECK(stats.kind[AIO_READ].in_flight == 0 && stats.kind[AIO_READ].errors == 0);
        CHECK((stats.kind[AIO_READ].retries > 0) == (n_faults > 0));
        CHECK(aio_close(context) == 0);
        aio_free(context);
    }
}

/* A failure poisons a long chain; close cancels what was not begun; the context is freed with results uncollected. */
static void check_failures(const char *engine, int fd)
{
    const aio_fault faults[] = {
        {.file = -1, .kind = AIO_WRITE, .error = EIO, .first = 1, .count = 1, .delay_ns = 20000000},
        {.file = -1, .kind = AIO_WRITE, .first = 2, .count = 4, .delay_ns = 50000000}};
    char *memory = buffer_of(REGION, 1);
    context = open_on(engine, faults, 2);
    file = aio_add_file(context, fd, 1);
    int64_t first = submit(AIO_WRITE, memory, 0, BLOCK, 0, 0), last = first;
    aio_result result;
    for (int i = 0; i < 2000; i++)
        last = submit(AIO_READ, memory, 0, 4096, i % AIO_PRIORITIES, last);
    CHECK(aio_wait(context, last, 1000, &result) == -ETIMEDOUT);
    CHECK(aio_release(context, last) == -EBUSY);
    CHECK(finish(last) == -ECANCELED);
    CHECK(finish(first) == -EIO);
    CHECK(aio_wait(context, first, 0, &result) == -ESTALE);
    CHECK(finish(submit(AIO_READ, memory, 0, 4096, 0, first)) == -ECANCELED);
    CHECK(aio_submit(context, AIO_READ, file, memory + 1, 0, 4096, 0, NULL, 0) == -EINVAL);
    CHECK(aio_submit(context, AIO_READ, file, memory, UINT64_MAX - 4095, 4096, 0, NULL, 0) == -EINVAL);

    int64_t begun[4], queued;
    for (int i = 0; i < 4; i++)
        begun[i] = submit(AIO_WRITE, memory, (uint64_t)i * BLOCK, BLOCK, 0, 0);
    aio_file_stats stats;
    do
        CHECK(aio_stats(context, file, &stats) == 0);
    while (stats.kind[AIO_WRITE].in_flight < 4);
    queued = submit(AIO_WRITE, memory, 0, BLOCK, 2, 0);
    submit(AIO_FLUSH, NULL, 0, 0, 0, begun[0]);
    CHECK(aio_close(context) == 0);
    CHECK(aio_close(context) == 0);
    for (int i = 0; i < 4; i++)
        CHECK(finish(begun[i]) == BLOCK);
    CHECK(finish(queued) == -ECANCELED);
    CHECK(aio_submit(context, AIO_READ, file, memory, 0, 4096, 0, NULL, 0) == -ESHUTDOWN);
    aio_free(context);
    free(memory);
}

static void check_refusals(void)
{
    aio_context *opened;
    aio_options options = {.engine = "posix", .block_size = BLOCK, .queue_depth = 4};
    CHECK(aio_open(&opened, &options) == -EINVAL);
    options = (aio_options){.engine = "threads", .block_size = BLOCK + 1, .queue_depth = 4};
    CHECK(aio_open(&opened, &options) == -EINVAL);
    options = (aio_options){.engine = "threads", .block_size = BLOCK};
    CHECK(aio_open(&opened, &options) == -EINVAL);
    aio_free(NULL);
}

int main(int argc, char **argv)
{
    const char *const engines[] = {"io_uring", "libaio", "threads"};
    int fd = open(argc > 1 ? argv[1] : ".", O_RDWR | O_TMPFILE | O_DIRECT | O_CLOEXEC, 0600);
    if (fd < 0) {
        perror("no anonymous O_DIRECT file here: give another directory");
        return 1;
    }
    check_refusals();
    for (int i = 0; i < 3; i++) {
        check_round_trips(engines[i], fd);
        check_failures(engines[i], fd);
        printf("%s: sound\n", engines[i]);
    }
    close(fd);
    return 0;
}
