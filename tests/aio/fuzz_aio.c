/* Wild arguments for every function of aio.h: whatever is asked, the answer is a documented one, and nothing breaks.
 *
 * One input is one context. Its first bytes choose the options, which may be out of range; the rest is read by two
 * threads as a list of calls whose arguments come from the input as well: indices, kinds, tickets, lengths near 2^63.
 * Pointers are valid, as a caller must see to, but what they point to may be less than the length says: each request
 * has memory of its own with nothing mapped behind it, so that a transfer that goes too far meets EFAULT, and requests
 * never share bytes, so that ThreadSanitizer sees the library's races and not a caller's.
 *
 *   gcc -std=gnu11 -O1 -g -fsanitize=address,undefined -pthread -Iaio_csrc aio_csrc/[a-z]*.c tests/aio/fuzz_aio.c -o F
 *   F [directory [seconds [seed]]]
 *
 * feeds pseudo-random inputs. With -DWITHOUT_MAIN the same file is a target for libFuzzer (clang -fsanitize=fuzzer).
 */
#define _GNU_SOURCE
#include "aio.h"
#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum {
    SLOT = 1 << 16,
    GUARD = 1 << 21,
    SLOTS = 128,
    TICKETS = 64,
    MAX_BLOCK = 1 << 16,
    MAX_DEPTH = 16,
    MAX_FAULTS = 4
};

static const char *directory = ".";
static char *memory; /* SLOTS times: SLOT bytes, then GUARD bytes of nothing */
static int fds[3];   /* direct, buffered, read-only */

static aio_context *context;
static int verifies;
static atomic_int n_slots, n_files;
static _Atomic int64_t tickets[TICKETS];

struct input {
    const uint8_t *at, *end;
};

static void expect_among(const char *call, int64_t answer, const int *errors)
{
    if (answer >= 0)
        return;
    for (; *errors; errors++)
        if (answer == -*errors)
            return;
    fprintf(stderr, "%s answered %lld, which aio.h does not name\n", call, (long long)answer);
    abort();
}
#define EXPECT(call, answer, ...) expect_among(call, answer, (const int[]){__VA_ARGS__, 0})

static uint64_t take(struct input *input, unsigned n)
{
    uint64_t value = 0;
    while (n-- && input->at < input->end)
        value = value << 8 | *input->at++;
    return value;
}

/* Any number, the odd ones more often than chance would have it. */
static uint64_t wild(struct input *input)
{
    uint64_t value = take(input, 8);
    switch (take(input, 1) % 6) {
    case 0:
        return value % 8;
    case 1:
        return UINT64_C(1) << value % 64;
    case 2:
        return (UINT64_C(1) << value % 64) - 1;
    case 3:
        return UINT64_MAX - value % 8192;
    case 4:
        return INT64_MAX - value % 8192;
    default:
        return value;
    }
}

static int64_t some_ticket(struct input *input)
{
    uint64_t which = take(input, 1);
    return which < 240 ? tickets[which % TICKETS] : (int64_t)wild(input);
}

static int some_file(struct input *input)
{
    uint64_t which = take(input, 1);
    return which < 240 ? (int)which % 4 : (int)wild(input);
}

/* What a submission stored: a ticket exactly if it was taken. */
static void keep(struct input *input, int answer, int64_t ticket)
{
    CHECK(answer <= 0 && (answer == 0) == (ticket > 0) && ticket >= 0);
    if (ticket)
        tickets[take(input, 1) % TICKETS] = ticket;
}

static void do_submit(struct input *input)
{
    int slot = atomic_fetch_add(&n_slots, 1);
    if (slot >= SLOTS)
        return;
    char *data = memory + (size_t)slot * (SLOT + GUARD);
    uint64_t selector = take(input, 1), shift = take(input, 2) % SLOT;
    int kind = selector % 16 ? (int)(selector % 3) : (int)wild(input);
    int priority = selector % 32 ? (int)(selector / 4 % 3) : (int)wild(input);
    uint64_t offset = selector & 64 ? wild(input) : take(input, 2) * 16,
             nbytes = take(input, 2) % (SLOT - shift + 1);
    if (selector & 128) {
        shift &= ~UINT64_C(4095);
        offset &= ~UINT64_C(4095);
    }
    /* Reading too much meets the end of the file or of the memory, in the kernel. So does writing too much, but only
     * the kernel may look: with verify, or in a tail, the library does. */
    if (take(input, 1) < 24 && !(kind == AIO_WRITE && verifies))
        nbytes = wild(input) | UINT64_C(1) << 40;
    int64_t after[8];
    size_t n_after = take(input, 1) % 9;
    for (size_t i = 0; i < n_after; i++)
        after[i] = some_ticket(input);
    int64_t ticket = 0;
    int answer = aio_submit(context, kind, some_file(input), take(input, 1) ? data + shift : NULL, offset,
                            nbytes, priority, n_after || shift % 2 ? after : NULL, n_after, &ticket);
    EXPECT("aio_submit", answer, EINVAL, ESHUTDOWN);
    keep(input, answer, ticket);
}

static void do_scatter(struct input *input)
{
    int slot = atomic_fetch_add(&n_slots, 1);
    if (slot >= SLOTS)
        return;
    char *data = memory + (size_t)slot * (SLOT + GUARD);
    uint64_t selector = take(input, 1), offsets[8];
    int kind = selector % 16 ? (int)(selector % 2) : (int)wild(input);
    size_t n = take(input, 1) % 9;
    for (size_t i = 0; i < n; i++)
        offsets[i] =
            take(input, 1) < 8 ? wild(input) : take(input, 2) * 16 & ~(selector & 64 ? UINT64_C(4095) : 0);
    uint64_t each =
        selector & 64 ? take(input, 1) % (SLOT / 8 / 4096 + 1) * 4096 : take(input, 2) % (SLOT / 8);
    if (take(input, 1) < 24 && !(kind == AIO_WRITE && verifies))
        each = wild(input);
    int64_t after = some_ticket(input);
    int64_t ticket = 0;
    int answer = aio_submit_scattered(context, kind, some_file(input), take(input, 1) ? data : NULL,
                                      take(input, 1) ? offsets : NULL, n, each, (int)(selector / 4 % 4),
                                      &after, selector & 128 ? 1 : 0, &ticket);
    EXPECT("aio_submit_scattered", answer, EINVAL, ESHUTDOWN);
    keep(input, answer, ticket);
}

static void do_vector(struct input *input)
{
    int slot = atomic_fetch_add(&n_slots, 1);
    if (slot >= SLOTS)
        return;
    char *data = memory + (size_t)slot * (SLOT + GUARD);
    uint64_t selector = take(input, 1);
    int kind = selector % 16 ? (int)(selector % 2) : (int)wild(input);
    size_t n = take(input, 1) % 9;
    aio_piece pieces[8];
    for (size_t i = 0; i < n; i++) {
        pieces[i] = (aio_piece){i * (SLOT / 8), take(input, 2) * 16, take(input, 2) % (SLOT / 8 + 1),
                                some_file(input)};
        if (selector & 64)
            pieces[i].offset &= ~UINT64_C(4095);
        if (take(input, 1) < 8)
            pieces[i].offset = wild(input);
        if (take(input, 1) < 8 && !(kind == AIO_WRITE && verifies))
            pieces[i].nbytes = wild(input);
    }
    int64_t after = some_ticket(input), ticket = 0;
    void *at = take(input, 1) < 8 ? NULL : data;
    int answer = aio_submit_vector(context, kind, at, take(input, 1) ? pieces : NULL, n,
                                   (int)(selector / 4 % 4), &after, selector & 128 ? 1 : 0, &ticket);
    EXPECT("aio_submit_vector", answer, EINVAL, ESHUTDOWN);
    keep(input, answer, ticket);
}

static void judge(const aio_result *result)
{
    /* The kernel's: no memory there, the file may not be as long, or not be written, or not have such an offset. */
    EXPECT("a request", result->bytes, EFAULT, EFBIG, EBADF, EINVAL, /* the faults' */ EIO, ENOSPC,
           /* its own */ ENODATA, EBADMSG, ECANCELED, ENOMEM);
    CHECK(result->issued_ns <= result->done_ns);
}

static void do_wait(struct input *input)
{
    aio_result result;
    int64_t timeout_ns = take(input, 1) % 8 ? (int64_t)take(input, 2) : (int64_t)wild(input);
    int answer = aio_wait(context, some_ticket(input), timeout_ns, &result);
    EXPECT("aio_wait", answer, ETIMEDOUT, ESTALE, EINVAL);
    CHECK(answer <= 0);
    if (answer == 0)
        judge(&result);
}

static void do_results(struct input *input)
{
    aio_result results[8];
    size_t max = take(input, 1) % 9;
    int64_t ticket = some_ticket(input), moved = 0, failed = 0;
    int n = aio_vector_results(context, ticket, max ? results : NULL, max);
    EXPECT("aio_vector_results", n, EBUSY, ESTALE, EINVAL);
    for (int i = 0; i < n && (size_t)i < max; i++) {
        judge(&results[i]);
        failed += results[i].bytes < 0;
        moved += results[i].bytes;
    }
    aio_result whole;
    if (n > 0 && (size_t)n <= max && aio_wait(context, ticket, 0, &whole) == 0)
        CHECK(whole.bytes < 0 ? failed > 0 : !failed && moved == whole.bytes);
}

static int answer_call(void *argument) { return *(const int *)argument; }

static void do_run(struct input *input)
{
    enum { TASKS = 3 };
    int slot = atomic_fetch_add(&n_slots, 1);
    if (slot >= SLOTS)
        return;
    char *data = memory + (size_t)slot * (SLOT + GUARD);
    int64_t waited[TASKS], begun[TASKS] = {0}, *waits[TASKS], *after[TASKS];
    int answers[TASKS];
    aio_piece pieces[TASKS];
    aio_submission submissions[TASKS];
    aio_task tasks[TASKS] = {0};
    for (int i = 0; i < TASKS; i++) {
        waited[i] = some_ticket(input);
        /* Also what a task of this run begins, itself or one that is behind it. */
        waits[i] = take(input, 1) % 4 ? &waited[i] : &begun[take(input, 1) % TASKS];
        after[i] = take(input, 1) % 4 ? &waited[i] : &begun[take(input, 1) % TASKS];
        answers[i] = take(input, 1) % 8 ? 0 : -EDOM;
        pieces[i] = (aio_piece){(uint64_t)i * (SLOT / 8), take(input, 2) * 16, take(input, 2) % (SLOT / 8),
                                some_file(input)};
        submissions[i] = (aio_submission){(int)(take(input, 1) % 2),
                                          (int)(take(input, 1) % 4),
                                          data,
                                          &pieces[i],
                                          1,
                                          &after[i],
                                          take(input, 1) % 2,
                                          &begun[i],
                                          0};
        tasks[i] = (aio_task){.waits = &waits[i],
                              .n_waits = take(input, 1) % 2,
                              .call = answer_call,
                              .argument = &answers[i],
                              .submissions = &submissions[i],
                              .n_submissions = take(input, 1) % 2};
    }
    uint64_t idle_ns = 0;
    int answer = aio_run(context, tasks, take(input, 1) % (TASKS + 1), (int64_t)take(input, 2), &idle_ns);
    EXPECT("aio_run", answer, ETIMEDOUT, ECANCELED, EDOM, EINVAL, ESHUTDOWN);
    for (int i = 0; i < TASKS; i++)
        keep(input, begun[i] ? 0 : -EINVAL, begun[i]);
}

static void do_wait_any(struct input *input)
{
    int64_t some[8];
    size_t n = take(input, 1) % 9;
    for (size_t i = 0; i < n; i++)
        some[i] = some_ticket(input);
    int64_t timeout_ns = take(input, 1) % 8 ? (int64_t)take(input, 2) : (int64_t)wild(input);
    int64_t answer = aio_wait_any(context, some, n, timeout_ns);
    EXPECT("aio_wait_any", answer, ETIMEDOUT, ESTALE, EINVAL);
    CHECK(answer < 0 || (uint64_t)answer < n);
}

static void do_release_all(struct input *input)
{
    int64_t some[8];
    size_t n = take(input, 1) % 9;
    for (size_t i = 0; i < n; i++)
        some[i] = some_ticket(input);
    CHECK(aio_succeeded(context, some, n) == 0);
    for (size_t i = 0; i < n; i++) {
        aio_result result;
        /* Another thread may have released it. */
        if (some[i] && aio_wait(context, some[i], 0, &result) == 0)
            CHECK(result.bytes >= 0 && !result.passed);
    }
    CHECK(aio_release_all(context, some, n) == 0);
}

static void do_register(struct input *input)
{
    char *address = memory + (size_t)(take(input, 1) % SLOTS) * (SLOT + GUARD);
    uint64_t nbytes = take(input, 1) % 2 ? take(input, 2) : wild(input);
    int64_t answer = aio_register_buffer(context, take(input, 1) ? address : NULL, nbytes);
    EXPECT("aio_register_buffer", answer, EOPNOTSUPP, ENOMEM, EFAULT, EINVAL, ESHUTDOWN, ENOSPC,
           /* the faults' */ EIO, EINTR, EAGAIN);
    CHECK(answer != 0 && (answer < 0 || (uint64_t)answer <= nbytes));
}

static void do_add_file(struct input *input)
{
    if (atomic_load(&n_files) >= 8)
        return;
    uint64_t which = take(input, 1);
    int known = which % 4 < 3; /* not just any number: it might be a descriptor of the context's own */
    int index = aio_add_file(context, known ? fds[which % 4] : -1 - (int)(take(input, 3)), which % 4 == 0);
    EXPECT("aio_add_file", index, EBADF, ESHUTDOWN);
    if (index >= 0)
        atomic_fetch_add(&n_files, 1);
}

static void *make_calls(void *argument)
{
    struct input *input = argument;
    while (input->at < input->end) {
        aio_file_stats stats;
        uint64_t counts[AIO_FINE_BUCKETS], longest;
        int64_t oldest;
        aio_info info;
        switch (take(input, 1) % 16) {
        case 0:
            do_add_file(input);
            break;
        case 1:
            EXPECT("aio_stats", aio_stats(context, some_file(input), &stats), EINVAL);
            EXPECT("aio_oldest", aio_oldest(context, some_file(input), &oldest, &longest), EINVAL);
            EXPECT("aio_latencies",
                   aio_latencies(context, some_file(input), (int)wild(input), counts, &longest), EINVAL);
            break;
        case 2:
            CHECK(aio_describe(context, &info) == 0 && info.engine);
            break;
        case 3:
            do_register(input);
            break;
        case 4:
        case 5:
            EXPECT("aio_cancel", aio_cancel(context, some_ticket(input)), EBUSY, EALREADY, ESTALE, EINVAL);
            break;
        case 6:
        case 7:
            EXPECT("aio_release", aio_release(context, some_ticket(input)), EBUSY, ESTALE, EINVAL);
            break;
        case 8:
            do_wait_any(input);
            do_release_all(input);
            break;
        case 9:
        case 10:
            do_wait(input);
            break;
        case 11:
            EXPECT("aio_reserve", aio_reserve(fds[take(input, 1) % 3], wild(input)), EFBIG, EINVAL, EBADF,
                   ENOSPC);
            EXPECT("aio_lock_memory", aio_lock_memory(memory, wild(input)), ENOMEM, EINVAL, EPERM, EAGAIN);
            break;
        case 12:
            do_scatter(input);
            break;
        case 13:
            do_vector(input);
            break;
        case 14:
            do_results(input);
            do_run(input);
            break;
        default:
            do_submit(input);
        }
    }
    return NULL;
}

static int open_context(struct input *input)
{
    static const char *const engines[] = {"io_uring", "threads", "auto",    "libaio",
                                          "posix",    "",        "threads", "io_uring"};
    static const int errors[] = {0, EIO, ENOSPC, EINTR, EAGAIN, EIO};
    aio_fault faults[MAX_FAULTS];
    uint64_t odd = take(input, 1); /* few are: an input that opens nothing tells little */
    aio_options options = {
        .engine = engines[take(input, 1) % 8],
        .block_size =
            odd == 1 ? wild(input) : (1 + take(input, 1) % (MAX_BLOCK / AIO_ALIGNMENT)) * AIO_ALIGNMENT,
        .queue_depth = odd == 2 ? (uint32_t)wild(input) : 1 + (uint32_t)take(input, 1) % MAX_DEPTH,
        .registered = (uint32_t)take(input, 1) % 2,
        .verify = (uint32_t)take(input, 1) % 2,
        .sum_threads = (uint32_t)take(input, 1),
        .alignment = odd == 3 ? (uint32_t)wild(input) : (take(input, 1) % 4 == 0) * 16384u,
        .n_faults = (uint32_t)take(input, 1) % (MAX_FAULTS + 1),
        .faults = faults,
    };
    if (options.block_size > MAX_BLOCK && options.block_size % AIO_ALIGNMENT == 0)
        options.block_size++; /* allowed, but a single block would reach over the guard */
    if (options.queue_depth > MAX_DEPTH && options.queue_depth <= 512)
        options.queue_depth += 512; /* likewise */
    for (unsigned i = 0; i < options.n_faults; i++) {
        uint64_t kind = take(input, 1);
        faults[i] = (aio_fault){
            .kind = kind < 240 ? (int)kind % 5 : (int)wild(input),
            .file = kind % 2 ? -1 : some_file(input),
            .error = errors[take(input, 1) % 6],
            .first = take(input, 1) % 16,
            .count = 1 + take(input, 1) % 3,
            .short_bytes = take(input, 1) % 3 ? 0 : take(input, 1) * 512,
            .delay_ns = take(input, 2) * 16,
        };
    }
    verifies = options.verify != 0;
    int answer = aio_open(&context, &options);
    EXPECT("aio_open", answer, EINVAL, /* io_uring and libaio, not here: */ EPERM, ENOSYS, ENOMEM, EAGAIN,
           EOPNOTSUPP);
    return answer == 0;
}

static void check_settled(void)
{
    aio_file_stats stats;
    aio_result result;
    CHECK(aio_close(context) == 0);
    for (int file = 0; file < atomic_load(&n_files); file++) {
        CHECK(aio_stats(context, file, &stats) == 0);
        for (int kind = 0; kind < AIO_KINDS; kind++)
            CHECK(stats.kind[kind].in_flight == 0);
    }
    for (int i = 0; i < TICKETS; i++) {
        int answer = tickets[i] ? aio_wait(context, tickets[i], 0, &result) : -ESTALE;
        CHECK(answer == 0 || answer == -ESTALE);
        if (answer == 0)
            judge(&result);
    }
    int64_t none = 0;
    CHECK(aio_submit(context, AIO_FLUSH, 0, NULL, 0, 0, 0, NULL, 0, &none) == -ESHUTDOWN && none == 0);
}

static void set_up(void)
{
    struct rlimit limit;
    CHECK(getrlimit(RLIMIT_FSIZE, &limit) == 0);
    limit.rlim_cur = 1 << 18; /* whatever the offset, the disk is not filled */
    signal(SIGXFSZ, SIG_IGN); /* for libaio, which may write in this thread's name; our threads block it */
    CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    fds[0] = open(directory, O_RDWR | O_TMPFILE | O_DIRECT | O_CLOEXEC, 0600);
    fds[1] = open(directory, O_RDWR | O_TMPFILE | O_CLOEXEC, 0600);
    if (fds[0] < 0 || fds[1] < 0) {
        perror("no anonymous O_DIRECT file here: give another directory");
        exit(1);
    }
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fds[1]);
    fds[2] = open(path, O_RDONLY | O_CLOEXEC);
    CHECK(fds[2] >= 0 && ftruncate(fds[0], 3 << 16) == 0 && ftruncate(fds[1], (3 << 16) + 1234) == 0);
    memory = mmap(NULL, (size_t)SLOTS * (SLOT + GUARD), PROT_NONE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(memory != MAP_FAILED);
    for (int i = 0; i < SLOTS; i++)
        CHECK(mprotect(memory + (size_t)i * (SLOT + GUARD), SLOT, PROT_READ | PROT_WRITE) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!memory)
        set_up();
    struct input input = {data, data + size}, other;
    if (!open_context(&input))
        return 0;
    memset(tickets, 0, sizeof tickets);
    atomic_store(&n_slots, 0);
    atomic_store(&n_files, 0);
    for (int i = 0; i < 2; i++)
        CHECK(aio_add_file(context, fds[i], i == 0) == atomic_fetch_add(&n_files, 1));
    other = input;
    input.end = other.at = input.at + (input.end - input.at) / 2;
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, make_calls, &other) == 0);
    make_calls(&input);
    CHECK(pthread_join(thread, NULL) == 0);
    if (size % 2)
        check_settled();
    aio_free(context); /* closes it, if need be */
    return 0;
}

#ifndef WITHOUT_MAIN
int main(int argc, char **argv)
{
    directory = argc > 1 ? argv[1] : directory;
    time_t until = time(NULL) + (argc > 2 ? atoi(argv[2]) : 10);
    uint64_t state = argc > 3 ? strtoull(argv[3], NULL, 0) : 1, inputs = 0;
    state = state ? state : 1; /* where xorshift would stay */
    for (uint8_t data[2048]; time(NULL) < until; inputs++) {
        for (size_t i = 0; i < sizeof data; i++) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            data[i] = (uint8_t)(state >> 32);
        }
        LLVMFuzzerTestOneInput(data, (size_t)(state % sizeof data));
    }
    printf("%llu inputs: every answer a documented one\n", (unsigned long long)inputs);
    return inputs == 0;
}
#endif
