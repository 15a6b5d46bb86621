/* The C context under the sanitizers, without an interpreter in between: sixteen threads that submit, order, wait for
 * one or any, cancel and release, over every engine, with and without faults; closing, forking and freeing with work in
 * flight. Prints one line per engine and ends with 0, or says what was wrong.
 *
 * From the root of the repository:
 *   gcc -std=gnu11 -O1 -g -fsanitize=address,undefined -pthread -Iaio_csrc aio_csrc/[a-z]*.c tests/aio/test_[a-z]*.c -o T
 *   T
 * and the same with -fsanitize=thread. An optional argument is the directory for the anonymous file (default: .).
 */
#define _GNU_SOURCE
#include "test_aio.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { THREADS = 16, ROUNDS = 24, FLOCK = 12 };

aio_context *context;
int file;
uint32_t alignment;
static int other;  /* the same file; the checksums of each know only its own writes, to other places */
static char *pool; /* of the threads: out and in for each; what is registered stays mapped until aio_close */
static atomic_uint_fast64_t bytes_read, bytes_written;

aio_context *open_on(const char *engine, const aio_fault *faults, unsigned n_faults)
{
    aio_context *opened;
    aio_options options = {.engine = engine,
                           .block_size = BLOCK,
                           .queue_depth = 4,
                           .registered = 1,
                           .verify = n_faults == 0,
                           .sum_threads = 3,
                           .alignment = alignment,
                           .n_faults = n_faults,
                           .faults = faults};
    CHECK(aio_open(&opened, &options) == 0);
    return opened;
}

int64_t submit(int kind, char *data, uint64_t offset, uint64_t nbytes, int priority, int64_t after)
{
    int64_t ticket = 0;
    CHECK(aio_submit(context, kind, file, data, offset, nbytes, priority, &after, after ? 1 : 0, &ticket) ==
          0);
    CHECK(ticket > 0);
    return ticket;
}

int64_t submit_scattered(int kind, char *data, const uint64_t *offsets, size_t n, uint64_t each, int priority,
                         int64_t after)
{
    int64_t ticket = 0;
    CHECK(aio_submit_scattered(context, kind, file, data, offsets, n, each, priority, &after, after ? 1 : 0,
                               &ticket) == 0);
    CHECK(ticket > 0);
    return ticket;
}

int64_t finish(int64_t ticket)
{
    aio_result result;
    CHECK(aio_wait(context, ticket, -1, &result) == 0);
    CHECK(aio_release(context, ticket) == 0);
    CHECK(result.issued_ns <= result.done_ns);
    CHECK(result.issued_ns != 0 || result.bytes == -ECANCELED);
    return result.bytes;
}

char *buffer_of(size_t nbytes, int fill)
{
    void *memory;
    CHECK(posix_memalign(&memory, AIO_ALIGNMENT, nbytes) == 0);
    memset(memory, fill, nbytes);
    return memory;
}

/* Write, read back in order, compare; lengths walk over tails of every kind. */
static void round_trip(uint64_t rank, int i, char *out, char *in)
{
    aio_file_stats stats;
    uint64_t counts[AIO_FINE_BUCKETS], longest;
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
    CHECK(aio_latencies(context, file, AIO_WRITE, counts, &longest) == 0 && longest > 0);
    atomic_fetch_add(&bytes_read, nbytes);
    atomic_fetch_add(&bytes_written, nbytes);
}

/* Pages written in one order and read in another. */
static void scatter(uint64_t rank, char *out, char *in)
{
    enum { PIECES = REGION / 4096 };
    uint64_t offsets[PIECES];
    for (int k = 0; k < PIECES; k++)
        offsets[k] = rank * REGION + (uint64_t)(k * 7 % PIECES) * 4096;
    for (int k = 0; k < PIECES; k++)
        memset(out + k * 4096, (int)rank + k, 4096);
    int64_t write = submit_scattered(AIO_WRITE, out, offsets, PIECES, 4096, 1, 0);
    int64_t read = submit(AIO_READ, in, rank * REGION, REGION, 0, write);
    CHECK(finish(write) == REGION && finish(read) == REGION);
    for (int k = 0; k < PIECES; k++)
        CHECK(memcmp(in + k * 7 % PIECES * 4096, out + k * 4096, 4096) == 0);
    memset(in, 0, REGION);
    read = submit_scattered(AIO_READ, in, offsets, PIECES / 2, 4096, 2, 0);
    CHECK(finish(read) == REGION / 2 && memcmp(in, out, REGION / 2) == 0);
    atomic_fetch_add(&bytes_read, REGION + REGION / 2);
    atomic_fetch_add(&bytes_written, REGION);
}

/* One request over both files, written and read in other pieces; half of them is cancelled as soon as it is submitted.
 */
static void vector(uint64_t rank, int i, char *out, char *in)
{
    enum { PIECES = REGION / 4096 };
    aio_piece written[PIECES], read[PIECES + 1];
    aio_result result, parts[3];
    for (int k = 0; k < PIECES; k++) {
        memset(out + k * 4096, (int)rank + k, 4096);
        uint64_t region = k % 3 ? rank : THREADS + rank;
        written[k] = (aio_piece){(uint64_t)k * 4096, region * REGION + (uint64_t)(k * 7 % PIECES) * 4096,
                                 4096, k % 3 ? file : other};
        read[k] = written[k];
    }
    read[PIECES] = (aio_piece){0, 0, 0, other};
    int64_t write = 0, back = 0;
    CHECK(aio_submit_vector(context, AIO_WRITE, out, written, PIECES, 0, NULL, 0, &write) == 0);
    CHECK(aio_submit_vector(context, AIO_READ, in, read, PIECES + 1, 2, &write, 1, &back) == 0);
    int answer = i % 16 == 7 ? aio_cancel(context, back) : -EBUSY;
    CHECK(answer == 0 || answer == -EBUSY || answer == -EALREADY);
    CHECK(aio_wait(context, back, -1, &result) == 0);
    CHECK(aio_vector_results(context, back, parts, 1) == 2 &&
          aio_vector_results(context, back, parts, 3) == 2);
    CHECK(parts[0].file == other && parts[1].file == file);
    for (int k = 0; k < 2; k++)
        atomic_fetch_add(&bytes_read, parts[k].bytes > 0 ? (uint64_t)parts[k].bytes : 0);
    CHECK(finish(back) == (answer ? REGION : -ECANCELED));
    CHECK(answer == 0 || (parts[0].bytes + parts[1].bytes == REGION && memcmp(in, out, REGION) == 0));
    CHECK(finish(write) == REGION);
    CHECK(aio_vector_results(context, back, parts, 3) == -ESTALE);
    atomic_fetch_add(&bytes_written, REGION);
}

static int invert(void *page)
{
    for (char *byte = page; byte < (char *)page + 4096; byte++)
        *byte = (char)~*byte;
    return 0;
}

static int refuse(void *page)
{
    (void)page;
    return -EDOM;
}

/* Release writes that succeed, all at once. 0: no write. */
static void finish_all(const int64_t *writes, size_t n)
{
    int64_t succeeded[n];
    aio_result result;
    CHECK(aio_release_all(context, &(int64_t){INT64_MAX}, 1) == 0);
    for (size_t k = 0; k < n; k++)
        CHECK(!writes[k] || (aio_wait(context, writes[k], -1, &result) == 0 && result.bytes == 4096));
    memcpy(succeeded, writes, sizeof succeeded);
    CHECK(aio_succeeded(context, succeeded, n) == 0 && memcmp(succeeded, writes, sizeof succeeded) == 0);
    CHECK(aio_release_all(context, succeeded, n) == 0 && aio_succeeded(context, succeeded, n) == 0);
    for (size_t k = 0; k < n; k++)
        CHECK(succeeded[k] == 0 && (!writes[k] || aio_release(context, writes[k]) == -ESTALE));
}

/* Pages that are read, inverted and written back in one run, each slot used twice; then a run that a call stops. */
static void run_tasks(uint64_t rank, char *slots)
{
    enum { TASKS = 8, SLOTS = TASKS / 2 };
    aio_task tasks[TASKS] = {0};
    aio_piece pieces[TASKS];
    aio_submission begins[TASKS][2];
    int64_t reads[TASKS] = {0}, writes[TASKS] = {0}, *read_at[TASKS], *write_at[TASKS];
    for (int k = 0; k < TASKS; k++) {
        pieces[k] = (aio_piece){(uint64_t)(k % SLOTS) * 4096, rank * REGION + (uint64_t)k * 4096, 4096, file};
        read_at[k] = &reads[k];
        write_at[k] = &writes[k];
    }
    for (int k = 0; k < TASKS; k++) {
        begins[k][0] = (aio_submission){AIO_WRITE, 0, slots, &pieces[k], 1, NULL, 0, &writes[k], 0};
        if (k < SLOTS)
            begins[k][1] = (aio_submission){
                AIO_READ, 1, slots, &pieces[k + SLOTS], 1, &write_at[k], 1, &reads[k + SLOTS], 0};
        tasks[k] = (aio_task){.waits = &read_at[k],
                              .n_waits = 1,
                              .call = invert,
                              .argument = slots + k % SLOTS * 4096,
                              .submissions = begins[k],
                              .n_submissions = k < SLOTS ? 2 : 1};
    }
    for (int pass = 0; pass < 2; pass++) {
        uint64_t idle_ns = 0;
        for (int k = 0; k < TASKS; k++) {
            reads[k] = writes[k] = 0;
            tasks[k].idle_ns = tasks[k].began_ns = tasks[k].ended_ns = 0;
            if (k < SLOTS)
                CHECK(aio_submit_vector(context, AIO_READ, slots, &pieces[k], 1, 0, NULL, 0, &reads[k]) == 0);
        }
        tasks[TASKS - 1].call = pass ? refuse : invert;
        int answer;
        while ((answer = aio_run(context, tasks, TASKS, 1000000, &idle_ns)) == -ETIMEDOUT)
            ;
        CHECK(answer == (pass ? -EDOM : 0) && tasks[TASKS - 1].answer == answer);
        for (int k = 0; k < TASKS; k++) {
            CHECK(tasks[k].began_ns <= tasks[k].ended_ns && tasks[k].idle_ns <= tasks[k].began_ns);
            CHECK((writes[k] != 0) == (tasks[k].ended_ns && !tasks[k].answer));
            CHECK(!reads[k] || finish(reads[k]) == 4096);
            atomic_fetch_add(&bytes_read, reads[k] ? 4096 : 0);
            atomic_fetch_add(&bytes_written, writes[k] ? 4096 : 0);
        }
        finish_all(writes, TASKS);
    }
    CHECK(aio_run(context, tasks, 0, -1, &(uint64_t){0}) == 0);
}

/* Many reads at once, taken back or waited for in whatever order they end. */
static void gather_any(uint64_t rank, int i, char *in)
{
    int64_t flock[FLOCK];
    int cancelled[FLOCK] = {0};
    size_t n = FLOCK;
    for (size_t k = 0; k < n; k++)
        flock[k] = submit(AIO_READ, in + k * 4096, rank * REGION + k * 4096, 4096, (int)(k % AIO_PRIORITIES),
                          k % 3 == 2 ? flock[k - 1] : 0);
    for (size_t k = (size_t)i % 4; k < n; k += 4) {
        int answer = aio_cancel(context, flock[k]);
        CHECK(answer == 0 || answer == -EBUSY || answer == -EALREADY);
        cancelled[k] = answer == 0;
    }
    while (n) {
        int64_t place = aio_wait_any(context, flock, n, -1);
        CHECK(place >= 0 && (size_t)place < n);
        int64_t moved = finish(flock[place]);
        CHECK(moved == (cancelled[place] ? -ECANCELED : 4096));
        atomic_fetch_add(&bytes_read, cancelled[place] ? 0 : 4096);
        n--;
        flock[place] = flock[n];
        cancelled[place] = cancelled[n];
    }
}

static void *work(void *argument)
{
    uint64_t rank = (uint64_t)(uintptr_t)argument;
    char *out = pool + rank * 2 * REGION, *in = out + REGION;
    aio_info info;
    if (rank % 2) {
        int64_t answer = aio_register_buffer(context, rank % 4 == 1 ? in : out, REGION);
        CHECK((answer > 0 && answer <= REGION) || answer == -EOPNOTSUPP || answer == -ENOMEM);
    }
    for (int i = 0; i < ROUNDS; i++) {
        round_trip(rank, i, out, in);
        if (i % 4 == 3)
            gather_any(rank, i, in);
        if (i % 8 == 5)
            scatter(rank, out, in);
        if (i % 8 == 7)
            vector(rank, i, out, in);
        if (i % 8 == 6)
            run_tasks(rank, in);
        CHECK(aio_describe(context, &info) == 0);
    }
    CHECK(aio_wait_any(context, NULL, 0, 0) == -EINVAL);
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
        {.kind = AIO_READ, .file = -1, .first = 3, .count = 40, .short_bytes = 4096},
        {.kind = AIO_WRITE, .file = -1, .first = 5, .count = 40, .short_bytes = 8192},
        {.kind = AIO_ANY, .file = -1, .first = 60, .count = 20, .error = EAGAIN},
        {.kind = AIO_ANY, .file = 0, .first = 100, .count = 30, .delay_ns = 2000000},
        {.kind = AIO_REGISTER, .file = -1, .first = 3, .count = 2, .error = ENOMEM},
        {.kind = AIO_READ, .file = -1, .first = 200, .count = 2, .error = EIO},
    };
    for (unsigned round = 0; round < 4; round++) {
        unsigned n_faults = round % 2 ? 6 : 0;
        alignment = round / 2 ? 65536 : 0;
        context = open_on(engine, troubles, n_faults);
        file = aio_add_file(context, fd, 1);
        other = aio_add_file(context, fd, 1);
        CHECK(file >= 0 && other == file + 1);
        bytes_read = bytes_written = 0;
        run_threads();
        aio_file_stats stats, others;
        aio_info info;
        CHECK(aio_stats(context, file, &stats) == 0 && aio_stats(context, other, &others) == 0);
        /* Of a read that was cancelled, some blocks may have been read. */
        CHECK(stats.kind[AIO_READ].bytes + others.kind[AIO_READ].bytes >= bytes_read);
        CHECK(stats.kind[AIO_WRITE].bytes + others.kind[AIO_WRITE].bytes == bytes_written);
        for (int kind = 0; kind < AIO_KINDS; kind++) {
            uint64_t counts[AIO_FINE_BUCKETS], longest, ops = 0;
            CHECK(stats.kind[kind].in_flight == 0 && stats.kind[kind].errors == 0);
            CHECK(aio_latencies(context, file, kind, counts, &longest) == 0);
            for (int bucket = 0; bucket < AIO_FINE_BUCKETS; bucket++)
                ops += counts[bucket];
            CHECK(ops == stats.kind[kind].ops);
            CHECK(longest <= stats.kind[kind].latency_ns && stats.kind[kind].latency_ns <= ops * longest);
        }
        /* With larger blocks, a read may find that the file has grown meanwhile, and is done again; and a write reads. */
        CHECK((stats.kind[AIO_READ].retries > 0) == (n_faults > 0) || alignment);
        CHECK(stats.kind[AIO_READ].rereads + stats.kind[AIO_WRITE].rereads == (n_faults > 0 ? 2 : 0));
        CHECK(stats.kind[AIO_WRITE].rereads == 0 || alignment);
        CHECK(aio_describe(context, &info) == 0 && strcmp(info.engine, engine) == 0);
        CHECK(((info.flags & AIO_USES_VERIFY) != 0) == (n_faults == 0));
        CHECK((info.registered_bytes == 0) == !(info.flags & AIO_USES_REGISTERED_BUFFERS));
        CHECK(aio_close(context) == 0);
        aio_free(context);
    }
    alignment = 0;
}

/* A page that changed behind our back. */
static void check_verification(const char *engine, int fd)
{
    char *memory = buffer_of(REGION, 2);
    aio_result result;
    context = open_on(engine, NULL, 0);
    file = aio_add_file(context, fd, 1);
    CHECK(finish(submit(AIO_WRITE, memory, 0, REGION, 0, 0)) == REGION);
    memset(memory, 3, 4096);
    CHECK(pwrite(fd, memory, 4096, 2 * BLOCK + 4096) == 4096);
    int64_t ticket = submit(AIO_READ, memory, 0, REGION, 0, 0);
    CHECK(aio_wait(context, ticket, -1, &result) == 0);
    CHECK(result.bytes == -EBADMSG && result.offset == 2 * BLOCK + 4096);
    aio_free(context);
    free(memory);
}

/* A child is refused at once, gives back what it has, and the parent does not notice. */
static void check_fork(const char *engine, int fd)
{
    const aio_fault late = {.kind = AIO_ANY, .file = -1, .first = 1, .delay_ns = 20000000};
    char *memory = buffer_of(REGION, 4);
    context = open_on(engine, &late, 1);
    file = aio_add_file(context, fd, 1);
    int64_t ticket = submit(AIO_WRITE, memory, 0, REGION, 0, 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        aio_result result;
        aio_file_stats stats;
        uint64_t counts[AIO_FINE_BUCKETS], longest, offset = 0;
        int64_t none = 0;
        int refused =
            aio_submit(context, AIO_FLUSH, file, NULL, 0, 0, 0, NULL, 0, &none) == -ECHILD &&
            aio_submit_scattered(context, AIO_READ, file, memory, &offset, 1, BLOCK, 0, NULL, 0, &none) ==
                -ECHILD &&
            none == 0 && aio_wait(context, ticket, -1, &result) == -ECHILD &&
            aio_wait_any(context, &ticket, 1, -1) == -ECHILD && aio_cancel(context, ticket) == -ECHILD &&
            aio_release(context, ticket) == -ECHILD && aio_succeeded(context, &ticket, 1) == -ECHILD &&
            aio_release_all(context, &ticket, 1) == -ECHILD && aio_stats(context, file, &stats) == -ECHILD &&
            aio_latencies(context, file, AIO_READ, counts, &longest) == -ECHILD &&
            aio_oldest(context, file, &none, &longest) == -ECHILD &&
            aio_add_file(context, fd, 1) == -ECHILD &&
            aio_register_buffer(context, memory, REGION) == -ECHILD;
        aio_free(context);
        _exit(refused ? 0 : 1);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(finish(ticket) == REGION);
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
    options = (aio_options){.engine = "threads", .block_size = BLOCK, .queue_depth = 0};
    CHECK(aio_open(&opened, &options) == -EINVAL);
    aio_free(NULL);
}

static int starts(const char *engine)
{
    aio_context *opened;
    aio_options options = {.engine = engine, .block_size = BLOCK, .queue_depth = 4};
    int error = aio_open(&opened, &options);
    if (error)
        printf("%s: not here (%s)\n", engine, strerror(-error));
    else
        aio_free(opened);
    return !error;
}

int main(int argc, char **argv)
{
    const char *const engines[] = {"io_uring", "libaio", "threads"};
    int fd = open(argc > 1 ? argv[1] : ".", O_RDWR | O_TMPFILE | O_DIRECT | O_CLOEXEC, 0600);
    if (fd < 0) {
        perror("no anonymous O_DIRECT file here: give another directory");
        return 1;
    }
    /* No read passes the end of the file, also of a thread that runs before the others have written. */
    CHECK(ftruncate(fd, THREADS * REGION) == 0);
    pool = buffer_of(THREADS * 2 * REGION, 0);
    check_refusals();
    for (int i = 0; i < 3; i++) {
        if (!starts(engines[i]))
            continue;
        check_round_trips(engines[i], fd);
        check_failures(engines[i], fd);
        check_taking_back(engines[i], fd);
        check_verification(engines[i], fd);
        check_fork(engines[i], fd);
        printf("%s: sound\n", engines[i]);
    }
    free(pool);
    close(fd);
    return 0;
}
