/* stress_kernels.c - the kernels without Python, for the sanitizers: several callers share the pool while another thread
 * changes the thread count and the instruction set, and a child is forked. Whatever happens, every caller must be left
 * with the bytes that one thread of the portable unit makes. Exit code 0 and silence mean success.
 *
 * `make sanitize` builds and runs it for memory (each array is an allocation of its own, exactly as large as it must be)
 * and for races.
 */

#define _GNU_SOURCE /* CPU_SET, gettid */

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <time.h>

#include "batch.h"
#include "pool.h"

enum {
    CALLERS = 3,
    MANY = 70 * (1 << 15) + 7, /* elements for 70 threads: more than have slices on the stack */
};

static uint64_t step_batches(void)
{
    static const int64_t firsts[] = {1100, 70001, 31, 999, 64}; /* 70001: three tiles */
    uint64_t all = 0;

    for (int optimizer = ADAM; optimizer < OPTIMIZERS; optimizer++) {
        for (int form = 0; form < FORMS; form++) {
            int variant = form * 7 % variants[optimizer];
            struct batch *b = make_batch((uint64_t)form, optimizer, variant, form_of(form), firsts[form % 5]);
            REQUIRE(!opt_run(b->segments, SEGMENTS, &b->rule, 0.5));
            make_rule(&b->rule, optimizer, variant, 2);
            REQUIRE(!opt_run(b->segments, SEGMENTS, &b->rule, 2));
            all ^= digest_batch(b) * (uint64_t)(2 * form + 1);
            free_batch(b);
        }
    }
    return all;
}

static uint64_t split_and_join(int64_t numel)
{
    uint64_t seed = (uint64_t)numel, left;
    struct array master = make_array(&seed, OPT_FP32, numel, WILD, 0);
    struct array param = make_array(&seed, OPT_BF16, numel, TAME, 0);
    struct array rest = make_array(&seed, OPT_BF16, numel, TAME, 0);

    REQUIRE(!opt_split(address_of(param), address_of(rest), address_of(master), numel));
    REQUIRE(!opt_join(address_of(master), address_of(param), address_of(rest), numel));
    left = digest(digest(0, param.block, param.bytes), master.block, master.bytes);
    REQUIRE(!opt_split(address_of(param), 0, address_of(master), numel));
    left = digest(left, param.block, param.bytes);
    free(master.block);
    free(param.block);
    free(rest.block);
    return left;
}

/* pair: dst_dtype and src_dtype. */
static uint64_t accumulate_and_sum(int pair, int64_t numel)
{
    int dst_dtype = pair / 3, src_dtype = pair % 3;
    uint64_t seed = (uint64_t)pair, left;
    struct array dst = make_array(&seed, dst_dtype, numel, TAME, 0);
    struct array src = make_array(&seed, src_dtype, numel, TAME, 0);
    uint64_t sum[OPT_SUM_LIMBS] = {0};

    REQUIRE(!opt_accumulate(address_of(dst), dst_dtype, address_of(src), src_dtype, numel, 0));
    left = digest(0, dst.block, dst.bytes);
    REQUIRE(!opt_sum_of_squares(address_of(dst), dst_dtype, numel, sum));
    left = digest(left, sum, sizeof sum);
    REQUIRE(!opt_accumulate(address_of(dst), dst_dtype, address_of(src), src_dtype, numel, 1));
    left = digest(left, dst.block, dst.bytes);
    free(dst.block);
    free(src.block);
    return left;
}

/* pair: target_dtype and source_dtype. */
static uint64_t reduce_many(int pair, int64_t numel)
{
    enum { MOST = 4 };
    int target_dtype = pair / 3, source_dtype = pair % 3, count = 1 + pair % MOST;
    uint64_t seed = (uint64_t)pair, left;
    struct array target = make_array(&seed, target_dtype, numel, TAME, 0), sources[MOST];
    intptr_t addresses[MOST];

    for (int i = 0; i < count; i++) {
        sources[i] = make_array(&seed, source_dtype, numel, WILD, 0);
        addresses[i] = address_of(sources[i]);
    }
    REQUIRE(!opt_reduce(address_of(target), target_dtype, addresses, count, source_dtype, numel, 0.3, 0));
    left = digest(0, target.block, target.bytes);
    REQUIRE(!opt_reduce(address_of(target), target_dtype, addresses, count, source_dtype, numel, 0.3, 1));
    left = digest(left, target.block, target.bytes);
    free(target.block);
    for (int i = 0; i < count; i++)
        free(sources[i].block);
    return left;
}

/* A matrix of `rows` rows, encoded, decoded in part and multiplied. */
static uint64_t quantize_and_multiply(int format, int64_t rows)
{
    enum { COLUMNS = 576, BLOCK = 64, X_ROWS = 3, MANY_X_ROWS = 41 };
    int64_t numel = rows * COLUMNS, scales = numel / BLOCK, groups = (scales + 255) / 256;
    uint64_t seed = (uint64_t)format, left;
    struct array src = make_array(&seed, OPT_BF16, numel, TAME, 0);
    struct array x = make_array(&seed, OPT_FP32, X_ROWS * COLUMNS, TAME, 0);
    struct array y = make_array(&seed, OPT_FP32, X_ROWS * rows, TAME, 0);
    struct array x16 = make_array(&seed, OPT_BF16, MANY_X_ROWS * COLUMNS, TAME, 0);
    struct array y16 = make_array(&seed, OPT_BF16, MANY_X_ROWS * rows, TAME, 0);
    struct array half = make_array(&seed, OPT_BF16, rows * BLOCK, TAME, 0);
    struct array scale = make_array(&seed, OPT_FP32, scales, TAME, 0);
    struct array group = make_array(&seed, OPT_FP32, groups, TAME, 0);
    size_t bytes = (size_t)(format == OPT_NF4 ? numel / 2 : numel);
    uint8_t *codes = malloc(bytes), *few = malloc((size_t)scales);
    float offset;
    opt_matrix matrix;

    REQUIRE(codes && few);
    REQUIRE(
        !opt_quantize(format, (intptr_t)codes, address_of(scale), address_of(src), OPT_BF16, numel, BLOCK));
    REQUIRE(
        !opt_quantize_scales((intptr_t)few, address_of(group), (intptr_t)&offset, address_of(scale), scales));
    REQUIRE(!opt_matrix_init(&matrix, format, rows, COLUMNS, BLOCK, (intptr_t)codes, (intptr_t)few,
                             address_of(group), (intptr_t)&offset));
    REQUIRE(!opt_dequantize(address_of(half), OPT_BF16, &matrix, 0, rows, BLOCK, BLOCK));
    REQUIRE(!opt_quantized_product(address_of(y), address_of(x), X_ROWS, &matrix));
    REQUIRE(!opt_quantized_product_bf16(address_of(y16), address_of(x16), X_ROWS, &matrix));
    left = digest(digest(0, codes, bytes), few, (size_t)scales);
    left = digest(left, y16.block, (size_t)(X_ROWS * rows) * 2);
    REQUIRE(!opt_quantized_product_bf16(address_of(y16), address_of(x16), MANY_X_ROWS, &matrix));
    left = digest(left, y16.block, y16.bytes);
    REQUIRE(!opt_quantized_transposed_product_bf16(address_of(x16), address_of(y16), MANY_X_ROWS, &matrix));
    left = digest(left, x16.block, x16.bytes);
    left = digest(digest(left, half.block, half.bytes), y.block, y.bytes);
    free(src.block), free(x.block), free(y.block), free(half.block), free(x16.block), free(y16.block),
        free(scale.block), free(group.block);
    free(codes), free(few);
    return left;
}

static void *work(void *result)
{
    uint64_t all = step_batches();

    for (int i = 0; i < 9; i++) {
        all = all * 31 + accumulate_and_sum(i, i == 4 ? MANY : 33333 + i);
        all = all * 31 + reduce_many(i, i == 5 ? 222222 : 3333 * i);
        all = all * 31 + split_and_join(i * i * i * 137 + i / 2);
        all = all * 31 + quantize_and_multiply(i % 3, 1 + i * 57);
    }
    *(uint64_t *)result = all;
    return NULL;
}

static atomic_int stop;

static void *meddle(void *unused)
{
    static const int counts[] = {2, 3, 1, 70, 5};
    const char *isa;

    for (int i = 0; !atomic_load(&stop); i++) {
        REQUIRE(!opt_set_thread_count(counts[i % 5]));
        if (!(isa = opt_available_instruction_set(i % 4)))
            isa = "portable";
        REQUIRE(!opt_set_instruction_set(isa));
        sched_yield();
    }
    return unused;
}

static void run_callers(uint64_t expected)
{
    pthread_t callers[CALLERS], meddler;
    uint64_t results[CALLERS];

    atomic_store(&stop, 0);
    REQUIRE(!pthread_create(&meddler, NULL, meddle, NULL));
    for (int i = 0; i < CALLERS; i++)
        REQUIRE(!pthread_create(&callers[i], NULL, work, &results[i]));
    for (int i = 0; i < CALLERS; i++)
        REQUIRE(!pthread_join(callers[i], NULL) && results[i] == expected);
    atomic_store(&stop, 1);
    REQUIRE(!pthread_join(meddler, NULL));
}

static void count_down(void *context, uint64_t begin, uint64_t end)
{
    atomic_int *missing = context;

    atomic_fetch_sub(missing, (int)(end - begin));
}

static void wait_for_all(void *context, uint64_t begin, uint64_t end)
{
    atomic_int *missing = context;

    REQUIRE(end == begin + 1);
    atomic_fetch_sub(missing, 1);
    for (int i = 0; atomic_load(missing); i++) {
        REQUIRE(i < 600000); /* a minute at least */
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    }
}

/* As many tiles as threads, each of which ends when all have begun: a thread that nobody wakes is missed. */
static void require_all_to_join(void)
{
    static const int counts[] = {2, 3, 4, 9, 70};

    for (int i = 0; i < 100; i++) {
        atomic_int missing = counts[i % 5];
        REQUIRE(!opt_set_thread_count(counts[i % 5]));
        opt_pool_run(wait_for_all, &missing, (uint64_t)counts[i % 5], 1, 1);
    }
}

enum { RUNS = 40, TINY = 5 };

static void *run_tiny(void *unused)
{
    for (int i = 0; i < RUNS * TINY; i++) {
        atomic_int missing = TINY;
        opt_pool_run(count_down, &missing, TINY, 1, 1);
        REQUIRE(!atomic_load(&missing));
    }
    return unused;
}

/* More callers at the same time than slots, each of which must have its own tiles done when it returns. */
static void run_more_callers_than_slots(void)
{
    pthread_t callers[RUNS];

    REQUIRE(!opt_set_thread_count(3));
    opt_begin_step();
    for (int i = 0; i < RUNS; i++)
        REQUIRE(!pthread_create(&callers[i], NULL, run_tiny, NULL));
    /* Of no use to a job, but it leaves a CPU free: workers then spin. */
    REQUIRE(!opt_set_thread_count(1));
    for (int i = 0; i < RUNS; i++) {
        REQUIRE(!pthread_join(callers[i], NULL));
        REQUIRE(!opt_set_thread_count(1 + 2 * (i % 2)));
    }
    opt_end_step();
}

enum { PINNED = 4 };

struct pinned {
    atomic_int missing;
    cpu_set_t mask;
    pid_t threads[PINNED];
};

/* Changes the affinity mask of its thread, as a user may at any time. */
static void pin_thread(void *context, uint64_t begin, uint64_t end)
{
    struct pinned *pinned = context;

    pinned->threads[begin] = gettid();
    REQUIRE(!sched_setaffinity(0, sizeof pinned->mask, &pinned->mask));
    wait_for_all(&pinned->missing, begin, end);
}

/* A worker that has left the CPU of its caller restores its mask, but not over one that was set meanwhile. */
static void require_masks_to_stay(void)
{
    cpu_set_t all, mask;

    REQUIRE(!sched_getaffinity(0, sizeof all, &all) && !opt_set_thread_count(PINNED));
    for (int i = 0; i < 200; i++) {
        struct pinned pinned = {.missing = PINNED};
        CPU_SET((size_t)sched_getcpu(), &pinned.mask);
        REQUIRE(!sched_setaffinity(0, sizeof pinned.mask, &pinned.mask));
        opt_pool_run(pin_thread, &pinned, PINNED, 1, 1);
        for (int j = 0; j < PINNED; j++) {
            REQUIRE(!sched_getaffinity(pinned.threads[j], sizeof mask, &mask));
            REQUIRE(CPU_EQUAL(&mask, &pinned.mask));
            REQUIRE(!sched_setaffinity(pinned.threads[j], sizeof all, &all));
        }
    }
}

/* A child has no workers at first, and starts its own. */
static void run_in_child(uint64_t expected)
{
    int status;
    pid_t child = fork();

    REQUIRE(child >= 0);
    if (child == 0) {
        uint64_t result;
        require_all_to_join();
        work(&result);
        REQUIRE(result == expected);
        _exit(0);
    }
    REQUIRE(waitpid(child, &status, 0) == child && status == 0);
}

int main(void)
{
    uint64_t expected;

    REQUIRE(!opt_set_instruction_set("portable") && !opt_set_thread_count(1));
    work(&expected);
    require_all_to_join();
    require_masks_to_stay();
    run_callers(expected);
    run_more_callers_than_slots();
    require_all_to_join();
#if !defined(__SANITIZE_THREAD__) /* which does not support threads started after a fork */
    REQUIRE(!opt_set_thread_count(3));
    run_in_child(expected);
#else
    (void)run_in_child;
#endif
    opt_begin_step();
    run_callers(expected);
    opt_end_step();
    return 0;
}
