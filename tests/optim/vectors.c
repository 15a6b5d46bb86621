/* vectors.c - every kernel over the same inputs: one line "kernel digest" for each, the same on every machine.
 *
 *     vectors [N [KIB]]       every N-th case of the step kernels (1; 0: the first line only), on a stack of KIB (64, or
 *                             the least there can be): a caller may have little
 *
 * Every case runs under every instruction set of the CPU, in the default floating-point environment and (each fourth)
 * in a hostile one: flush to zero, rounding upwards. All must leave the same bytes, and the hostile environment must be
 * there afterwards, its exception flags still clear. The first line names the instruction sets, the chosen one first.
 * Built for another CPU it runs under an emulator; test_emulated.py compares the lines. Exit code 1 names the case.
 */

#include <limits.h>
#include <math.h>
#include <pthread.h>

#include "batch.h"

/* The floating-point environment. */

#if defined(__x86_64__)
#include <xmmintrin.h>

static const uint64_t HOSTILE = 0x1F80 | 0x8000 | 0x0040 | 0x4000; /* FTZ, DAZ, upwards */
static const uint64_t DEFAULT = 0x1F80;
static void set_environment(uint64_t bits) { _mm_setcsr((unsigned)bits); }
static uint64_t environment(void) { return _mm_getcsr(); }

#elif defined(__aarch64__)

/* FZ16, RMode, FZ, DN, AHP. The flags are FPSR's; they ride in the upper half. */
static const uint64_t HOSTILE = 1 << 19 | 1 << 22 | 1 << 24 | 1 << 25 | 1 << 26;
static const uint64_t DEFAULT = 0;
static void set_environment(uint64_t bits)
{
    __asm__ volatile("msr fpcr, %0" : : "r"(bits & 0xFFFFFFFF) : "memory");
    __asm__ volatile("msr fpsr, %0" : : "r"(bits >> 32) : "memory");
}
static uint64_t environment(void)
{
    uint64_t control, status;
    __asm__ volatile("mrs %0, fpcr" : "=r"(control));
    __asm__ volatile("mrs %0, fpsr" : "=r"(status));
    return status << 32 | control;
}

#else
#error "set_environment() is to be written for this CPU"
#endif

static int hostile; /* in what environment CALL calls */

#define CALL(call)                                                                                           \
    do {                                                                                                     \
        set_environment(hostile ? HOSTILE : DEFAULT);                                                        \
        int failed_ = (call) != 0;                                                                           \
        uint64_t left_ = environment();                                                                      \
        set_environment(DEFAULT);                                                                            \
        REQUIRE(!failed_);                                                                                   \
        REQUIRE(left_ == (hostile ? HOSTILE : DEFAULT));                                                     \
    } while (0)

/* Cases. What the first setting left is what the others must leave. */

enum { MAX_CASES = 1 << 14 };

static uint64_t expected[MAX_CASES], all;
static int cases, every, first_setting;
static const char *kernel;

/* Whether the next case is one of this setting's; each that is ends in ran(). */
static int next_case(void)
{
    REQUIRE(cases < MAX_CASES);
    cases++;
    return !hostile || cases % 4 == 0;
}

static void ran(uint64_t left)
{
    if (first_setting) {
        expected[cases - 1] = left;
        all = digest(all, &left, sizeof left);
    } else if (left != expected[cases - 1]) {
        fprintf(stderr, "%s, case %d: %s%s differs from %s\n", kernel, cases, opt_instruction_set(),
                hostile ? ", in a hostile environment," : "", opt_available_instruction_set(0));
        _exit(1);
    }
}

static void free_array(struct array a) { free(a.block); }

/* Kernels. */

static void step_cases(int optimizer)
{
    static const int64_t firsts[] = {0, 3, 64, 129, 1023, 1111};

    for (int variant = 0; variant < variants[optimizer]; variant++) {
        for (int form = variant % every; form < FORMS; form += every) {
            if (!next_case())
                continue;
            int which = variant * FORMS + form;
            int64_t first =
                which % 97 == 0 ? 70001 : firsts[which % 6]; /* more than two tiles, now and then */
            struct batch *b = make_batch((uint64_t)which, optimizer, variant, form_of(form), first);
            for (int64_t step = 1; step <= 1000; step += 999) {
                set_environment(hostile ? HOSTILE : DEFAULT);
                make_rule(&b->rule, optimizer, variant, step);
                set_environment(DEFAULT);
                CALL(opt_run(b->segments, SEGMENTS, &b->rule,
                             step == 1 ? 0.75 : 3e-38)); /* many results near 2^-126 */
            }
            ran(digest_batch(b));
            free_batch(b);
        }
    }
}

/* Outputs so large that they are stored past the cache. */
static void streamed_cases(int out_dtype)
{
    if (!next_case())
        return;
    struct form form = {OPT_STATE_FP32, OPT_BF16, 0, out_dtype};
    struct batch *b = make_batch(5, LION, 0, form, ((int64_t)1 << 18) + 77);
    CALL(opt_run(b->segments, SEGMENTS, &b->rule, 1));
    ran(digest_batch(b));
    free_batch(b);
}

enum { PRODUCTS, QUOTIENTS, SQUARES };

/* Results within a few places of the least normal number, on both sides of where they become zero. */
static void least_cases(int which)
{
    enum { N = 4096 };
    static float param[N], grad[N], state[N], factors[] = {1, 1 - 0x1p-24f, 1 - 0x1p-23f, 1 - 0x3p-24f};
    const uint32_t exponent = which == SQUARES ? 63 : 126;

    for (size_t i = 0; i < sizeof factors / sizeof *factors; i++) {
        if (!next_case())
            continue;
        uint64_t seed = i;
        opt_rule rule;
        opt_segment segment;
        for (int j = 0; j < N; j++) {
            float about = which == QUOTIENTS ? 1 + (float)(draw(&seed) >> 41) * 0x1p-23f : 1;
            if (j % 4 == 0) /* only quotients by a power of 2 are so near to the middle of two subnormals */
                about = 2;
            uint32_t bits;
            memcpy(&bits, &about, sizeof bits);
            bits += (uint32_t)draw(&seed) % 8 - 4 - (exponent << 23);
            memcpy(&grad[j], &bits, sizeof bits);
            state[j] = which == SQUARES ? 0 : about * about;
            param[j] = 0;
        }
        CALL(which == PRODUCTS ? opt_sgd_rule(&rule, factors[i], 0, 0, 0, 0, (int)i % 2, 2, 0)
                               : opt_adagrad_rule(&rule, factors[i], 0, 0, 0, (int)i % 2, 2, 0));
        opt_segment_fields fields = {
            .numel = N, .param = (intptr_t)param, .state0 = (intptr_t)state, .grad = (intptr_t)grad};
        REQUIRE(opt_init_segments(&segment, &rule, &fields, 1) == 1);
        CALL(opt_run(&segment, 1, &rule, 1));
        int zeros = 0;
        for (int j = 0; j < N; j++)
            zeros += (which == SQUARES ? state : param)[j] == 0;
        REQUIRE(zeros > N / 8 && zeros < N);
        ran(digest(digest(0, param, sizeof param), state, sizeof state));
    }
}

static void rule_cases(int unused)
{
    static const double betas[] = {0,    0.1,  0.5,   0.8,    0.9,      0.95,
                                   0.98, 0.99, 0.999, 0.9999, 0.999999, 0x1.fffffffffffffp-1};

    (void)unused;
    for (size_t i = 0; i < sizeof betas / sizeof *betas; i++) {
        if (!next_case())
            continue;
        uint64_t left = 0;
        for (int64_t step = 1; step < 3000000; step += 1 + step / 40) {
            opt_rule rule;
            CALL(opt_adam_rule(&rule, 1e-3, betas[i], betas[i], 1e-8, 0.1, 1, 1, 0, step, 5));
            left = digest(left, &rule, sizeof rule);
            CALL(opt_adagrad_rule(&rule, 1e-42, 1e-3, 1e-42, 1e-42, 0, step, 5));
            left = digest(left, &rule, sizeof rule);
            CALL(opt_sgd_rule(&rule, 1e-3, 1e-42, 0, 1, 0, 0, step, 5));
            CALL(opt_state_count(&rule) != 1);
        }
        ran(left);
    }
}

static const int64_t sizes[] = {0, 1, 2, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 1000, 66000};

enum { SIZES = sizeof sizes / sizeof *sizes };

static void split_cases(int both)
{
    for (int i = 0; i < SIZES; i++) {
        if (!next_case())
            continue;
        uint64_t seed = (uint64_t)i, left;
        struct array master = make_array(&seed, OPT_FP32, sizes[i], WILD, 0);
        struct array param = make_array(&seed, OPT_BF16, sizes[i], TAME, 0);
        struct array rest = make_array(&seed, OPT_BF16, sizes[i], TAME, 0);
        struct array back = make_array(&seed, OPT_FP32, sizes[i], TAME, 0);
        CALL(opt_split(address_of(param), both ? address_of(rest) : 0, address_of(master), sizes[i]));
        if (both)
            CALL(opt_join(address_of(back), address_of(param), address_of(rest), sizes[i]));
        left = digest(digest(0, param.block, param.bytes), rest.block, rest.bytes);
        ran(digest(left, back.block, back.bytes));
        free_array(master), free_array(param), free_array(rest), free_array(back);
    }
}

/* Any bits as a split, which need not have come from a float32. */
static void join_cases(int unused)
{
    (void)unused;
    for (int i = 0; i < SIZES; i++) {
        if (!next_case())
            continue;
        uint64_t seed = (uint64_t)i;
        struct array param = make_array(&seed, OPT_BF16, sizes[i], WILD, 0);
        struct array rest = make_array(&seed, OPT_BF16, sizes[i], WILD, 0);
        struct array master = make_array(&seed, OPT_FP32, sizes[i], TAME, 0);
        CALL(opt_join(address_of(master), address_of(param), address_of(rest), sizes[i]));
        ran(digest(0, master.block, master.bytes));
        free_array(master), free_array(param), free_array(rest);
    }
}

/* pair: 3 * dst_dtype + src_dtype, 9 more to overwrite. */
static void accumulate_cases(int pair)
{
    int overwrite = pair >= 9, dst_dtype = pair % 9 / 3, src_dtype = pair % 3;

    for (int i = 0; i < 2 * SIZES; i++) {
        if (!next_case())
            continue;
        uint64_t seed = (uint64_t)(i * 18 + pair);
        int64_t numel = sizes[i / 2];
        struct array dst = make_array(&seed, dst_dtype, numel, i % 2 ? WILD : TAME, 0);
        struct array src = make_array(&seed, src_dtype, numel, i % 2 ? WILD : TAME, 0);
        CALL(opt_accumulate(address_of(dst), dst_dtype, address_of(src), src_dtype, numel, overwrite));
        ran(digest(0, dst.block, dst.bytes));
        free_array(dst), free_array(src);
    }
}

/* pair: 3 * target_dtype + source_dtype. */
static void reduce_cases(int pair)
{
    enum { MOST = 9 };
    int target_dtype = pair / 3, source_dtype = pair % 3;

    for (int i = 0; i < 4 * SIZES; i++) {
        if (!next_case())
            continue;
        uint64_t seed = (uint64_t)(i * 9 + pair);
        int64_t numel = sizes[i / 4], count = 1 + (i * 5 + pair) % MOST;
        double factor = i % 5 ? 1.0 / (double)count : 3e-39;
        struct array target = make_array(&seed, target_dtype, numel, i % 2 ? WILD : TAME, 0), sources[MOST];
        intptr_t addresses[MOST];
        for (int j = 0; j < count; j++) {
            sources[j] = make_array(&seed, source_dtype, numel, i % 2 ? WILD : TAME, 0);
            addresses[j] = address_of(sources[j]);
        }
        CALL(opt_reduce(address_of(target), target_dtype, addresses, count, source_dtype, numel, factor,
                        i / 2 % 2));
        ran(digest(0, target.block, target.bytes));
        free_array(target);
        for (int j = 0; j < count; j++)
            free_array(sources[j]);
    }
}

/* All 65536 halves of a type, to another; and back all float32 beside them and beside the middles between them. */
static void cast_cases(int pair)
{
    enum { HALVES = 1 << 16, BESIDE = 6 };
    int from = pair / 3 ? OPT_FP16 : OPT_BF16, to = pair % 3;
    const uint32_t middle = from == OPT_BF16 ? 0x8000 : 0x1000;
    uint64_t left;

    if (!next_case())
        return;
    uint16_t *halves = malloc(HALVES * 2);
    uint32_t *wide = malloc(HALVES * 4), *near = malloc(HALVES * BESIDE * 4);
    uint16_t *rounded = malloc(HALVES * BESIDE * 2);
    REQUIRE(halves && wide && near && rounded);
    for (int i = 0; i < HALVES; i++)
        halves[i] = (uint16_t)i;
    memset(wide, 0, HALVES * 4);
    CALL(opt_accumulate((intptr_t)wide, to, (intptr_t)halves, from, HALVES, 1));
    left = digest(0, wide, HALVES * 4);
    if (to == OPT_FP32) {
        for (int i = 0; i < HALVES * BESIDE; i++)
            near[i] = wide[i / BESIDE] + (i % 2 ? middle : 0) + (uint32_t)(i % BESIDE / 2) - 1;
        CALL(opt_accumulate((intptr_t)rounded, from, (intptr_t)near, OPT_FP32, HALVES * BESIDE, 1));
        left = digest(left, rounded, HALVES * BESIDE * 2);
    }
    ran(left);
    free(halves), free(wide), free(near), free(rounded);
}

/* Ordinary numbers, then with one more of another kind; a sum that is NaN is any NaN. */
static void square_cases(int dtype)
{
    for (int i = 0; i < 4 * SIZES; i++) {
        if (!next_case())
            continue;
        uint64_t seed = (uint64_t)i;
        struct array x = make_array(&seed, dtype, sizes[i / 4], TAME, 0);
        for (int64_t j = 0; j < i % 4 && j < sizes[i / 4]; j++) {
            uint32_t bits = number(&seed, dtype, WILD, 0);
            memcpy(x.at + (draw(&seed) % (uint64_t)sizes[i / 4]) * dtypes[dtype].size, &bits,
                   dtypes[dtype].size);
        }
        uint64_t sum[OPT_SUM_LIMBS] = {0};
        CALL(opt_sum_of_squares(address_of(x), dtype, sizes[i / 4], sum));
        ran(digest(0, sum, sizeof sum));
        free_array(x);
    }
}

/* Encoded blocks of a type, decoded, and multiplied. which: 3 * format + src_dtype. */
static void quantize_cases(int which)
{
    static const int64_t shapes[][3] = {
        {3, 64, 32}, {7, 192, 64}, {1, 4096, 4096}, {67, 1024, 64}, {0, 64, 64}};
    int format = which / 3, dtype = which % 3;

    for (int i = 0; i < 20; i++) {
        if (!next_case())
            continue;
        int64_t rows = shapes[i / 4][0], columns = shapes[i / 4][1], block = shapes[i / 4][2];
        int64_t numel = rows * columns, scales = numel / block, groups = (scales + 255) / 256;
        uint64_t seed = (uint64_t)(i * 9 + which), left;
        struct array src = make_array(&seed, dtype, numel, i % 2 ? WILD : TAME, 0);
        struct array x = make_array(&seed, OPT_FP32, 7 * columns, TAME, 0);
        struct array x16 = make_array(&seed, OPT_BF16, 9 * columns, i % 2 ? WILD : TAME, 0);
        struct array y16 = make_array(&seed, OPT_BF16, 9 * rows, TAME, 0);
        struct array back16 = make_array(&seed, OPT_BF16, 9 * columns, TAME, 0);
        uint8_t *codes = calloc((size_t)numel + 1, 1), *few = calloc((size_t)scales + 1, 1);
        float *scale = calloc((size_t)scales + 1, 4), *group = calloc((size_t)groups + 1, 4), offset = 0;
        float *back = calloc((size_t)numel + 1, 4), *y = calloc((size_t)(7 * rows) + 1, 4);
        opt_matrix matrix;
        REQUIRE(codes && few && scale && group && back && y);
        CALL(opt_quantize(format, (intptr_t)codes, (intptr_t)scale, address_of(src), dtype, numel, block));
        left = digest(digest(0, codes, (size_t)numel), scale, (size_t)scales * 4);
        CALL(opt_quantize_scales((intptr_t)few, (intptr_t)group, (intptr_t)&offset, (intptr_t)scale, scales));
        left = digest(digest(digest(left, few, (size_t)scales), group, (size_t)groups * 4), &offset, 4);
        CALL(opt_matrix_init(&matrix, format, rows, columns, block, (intptr_t)codes,
                             i % 4 < 2 ? (intptr_t)scale : (intptr_t)few, i % 4 < 2 ? 0 : (intptr_t)group,
                             (intptr_t)&offset));
        CALL(opt_dequantize((intptr_t)back, i % 3, &matrix, 0, rows, 0, columns));
        left = digest(left, back, (size_t)numel * 4);
        CALL(opt_quantized_product((intptr_t)y, address_of(x), 7, &matrix));
        left = digest(left, y, (size_t)(7 * rows) * 4);
        for (int x_rows = 1; x_rows <= 9; x_rows += 2) {
            CALL(opt_quantized_product_bf16(address_of(y16), address_of(x16), x_rows, &matrix));
            left = digest(left, y16.block, y16.bytes);
            CALL(opt_quantized_transposed_product_bf16(address_of(back16), address_of(x16), x_rows, &matrix));
            left = digest(left, back16.block, back16.bytes);
        }
        ran(left);
        free_array(src), free_array(x), free_array(x16), free_array(y16), free_array(back16);
        free(codes), free(few), free(scale), free(group), free(back), free(y);
    }
}

static const struct {
    const char *name;
    void (*run)(int which);
    int which;
} kernels[] = {
    {"adam", step_cases, ADAM},
    {"lion", step_cases, LION},
    {"adagrad", step_cases, ADAGRAD},
    {"sgd", step_cases, SGD},
    {"streamed bf16", streamed_cases, OPT_BF16},
    {"streamed fp16", streamed_cases, OPT_FP16},
    {"products near 2^-126", least_cases, PRODUCTS},
    {"quotients near 2^-126", least_cases, QUOTIENTS},
    {"squares near 2^-126", least_cases, SQUARES},
    {"rules", rule_cases, 0},
    {"split", split_cases, 1},
    {"split without rest", split_cases, 0},
    {"join", join_cases, 0},
    {"fp32 += fp32", accumulate_cases, 0},
    {"fp32 += bf16", accumulate_cases, 1},
    {"fp32 += fp16", accumulate_cases, 2},
    {"bf16 += fp32", accumulate_cases, 3},
    {"bf16 += bf16", accumulate_cases, 4},
    {"bf16 += fp16", accumulate_cases, 5},
    {"fp16 += fp32", accumulate_cases, 6},
    {"fp16 += bf16", accumulate_cases, 7},
    {"fp16 += fp16", accumulate_cases, 8},
    {"fp32 = fp32", accumulate_cases, 9},
    {"fp32 = bf16", accumulate_cases, 10},
    {"fp32 = fp16", accumulate_cases, 11},
    {"bf16 = fp32", accumulate_cases, 12},
    {"bf16 = bf16", accumulate_cases, 13},
    {"bf16 = fp16", accumulate_cases, 14},
    {"fp16 = fp32", accumulate_cases, 15},
    {"fp16 = bf16", accumulate_cases, 16},
    {"fp16 = fp16", accumulate_cases, 17},
    {"fp32 of many fp32", reduce_cases, 0},
    {"fp32 of many bf16", reduce_cases, 1},
    {"fp32 of many fp16", reduce_cases, 2},
    {"bf16 of many fp32", reduce_cases, 3},
    {"bf16 of many bf16", reduce_cases, 4},
    {"bf16 of many fp16", reduce_cases, 5},
    {"fp16 of many fp32", reduce_cases, 6},
    {"fp16 of many bf16", reduce_cases, 7},
    {"fp16 of many fp16", reduce_cases, 8},
    {"every bf16 to fp32 and back", cast_cases, OPT_FP32},
    {"every bf16 to bf16", cast_cases, OPT_BF16},
    {"every bf16 to fp16", cast_cases, OPT_FP16},
    {"every fp16 to fp32 and back", cast_cases, 3 + OPT_FP32},
    {"every fp16 to bf16", cast_cases, 3 + OPT_BF16},
    {"every fp16 to fp16", cast_cases, 3 + OPT_FP16},
    {"squares of fp32", square_cases, OPT_FP32},
    {"squares of bf16", square_cases, OPT_BF16},
    {"squares of fp16", square_cases, OPT_FP16},
    {"nf4 of fp32", quantize_cases, 0},
    {"nf4 of bf16", quantize_cases, 1},
    {"nf4 of fp16", quantize_cases, 2},
    {"int8 of fp32", quantize_cases, 3},
    {"int8 of bf16", quantize_cases, 4},
    {"int8 of fp16", quantize_cases, 5},
    {"fp8 of fp32", quantize_cases, 6},
    {"fp8 of bf16", quantize_cases, 7},
    {"fp8 of fp16", quantize_cases, 8},
};

static void *run_all(void *unused)
{
    const char *isa;

    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++) {
        kernel = kernels[i].name;
        all = 0;
        for (int j = 0; (isa = opt_available_instruction_set(j)); j++) {
            REQUIRE(!opt_set_instruction_set(isa) && !opt_set_thread_count(1 + j % 3));
            for (hostile = 0; hostile < 2; hostile++) {
                first_setting = j == 0 && !hostile;
                cases = 0;
                kernels[i].run(kernels[i].which);
            }
        }
        printf("%s %016llx\n", kernel, (unsigned long long)all);
    }
    return unused;
}

int main(int argc, char **argv)
{
    const char *isa;
    size_t stack = (argc > 2 ? strtoul(argv[2], NULL, 10) : 64) << 10, least = (size_t)PTHREAD_STACK_MIN;
    pthread_attr_t attributes;
    pthread_t thread;

    every = argc > 1 ? atoi(argv[1]) : 1;
    REQUIRE(every >= 0 && opt_instruction_set());
    printf("%s:", opt_instruction_set());
    for (int i = 0; (isa = opt_available_instruction_set(i)); i++)
        printf(" %s", isa);
    printf("\n");
    if (!every)
        return 0;
    stack = stack > least ? stack : least;
    REQUIRE(!pthread_attr_init(&attributes) && !pthread_attr_setstacksize(&attributes, stack));
    REQUIRE(!pthread_create(&thread, &attributes, run_all, NULL) && !pthread_join(thread, NULL));
    return 0;
}
