/* kernels.c - checks arguments, and divides a call into tiles for the pool.
 *
 * A batch of segments is laid out in one element space: segment after segment, each start rounded up to
 * POSITION_GRAIN. Tiles are ranges of that space, each a multiple of OPT_SQUARE_BLOCK. So a large tensor is spread over
 * all threads, many small tensors share a tile, and tile edges inside a segment are at whole cache lines of each of its
 * arrays.
 */

#include "kernels.h"

#include <errno.h>
#include <stdlib.h>

#include "fp_environment.h"
#include "isa.h"
#include "pool.h"
#include "refuse.h"

enum {
    LARGEST_TILE = 1 << 15, /* elements: 128 KiB per float32 array, tens of microseconds of work */
    POSITION_GRAIN = 64, /* elements: two cache lines of 16-bit, four of float32; divides OPT_SQUARE_BLOCK */
    FEW_SUMS = 1 << 7,   /* block sums per run on the stack, which may be small */
    SUMS = 1 << 13,      /* block sums per run on the heap */
};

static int is_dtype(int dtype) { return dtype == OPT_FP32 || dtype == OPT_BF16 || dtype == OPT_FP16; }

static int is_address(intptr_t address, int dtype)
{
    return address > 0 && address % (intptr_t)opt_element_size(dtype) == 0;
}

static int is_count(int64_t numel) { return numel >= 0 && numel <= INT64_MAX / 16; }

#define ADDRESS_RULE " must be the address of memory aligned to its element"
#define COUNT_RULE " must be a count of elements, 0 or more"
#define DTYPE_RULE " must be FP32, BF16 or FP16"

static int init_segment(opt_segment *segment, const opt_rule *rules, const opt_segment_fields *f)
{
    int states = opt_state_count(&rules[f->rule]);
    int state_dtype = f->state_format == OPT_STATE_FP32 ? OPT_FP32 : OPT_BF16;

    if (!is_count(f->numel))
        return opt_refuse("numel" COUNT_RULE);
    if (!is_dtype(f->grad_dtype))
        return opt_refuse("grad_dtype" DTYPE_RULE);
    if (!is_dtype(f->out_dtype))
        return opt_refuse("out_dtype" DTYPE_RULE);
    if (f->state_format < OPT_STATE_FP32 || f->state_format > OPT_STATE_BF16_STOCHASTIC)
        return opt_refuse("state_format must be FP32, BF16 or BF16_STOCHASTIC");
    if (f->numel && !is_address(f->param, f->remainder ? OPT_BF16 : OPT_FP32))
        return opt_refuse("param" ADDRESS_RULE);
    if (f->remainder && !is_address(f->remainder, OPT_BF16))
        return opt_refuse("remainder" ADDRESS_RULE ", or 0");
    if (f->numel && states > 0 && !is_address(f->state0, state_dtype))
        return opt_refuse("state0" ADDRESS_RULE);
    if (f->numel && states > 1 && !is_address(f->state1, state_dtype))
        return opt_refuse("state1" ADDRESS_RULE);
    if (f->numel && !is_address(f->grad, f->grad_dtype))
        return opt_refuse("grad" ADDRESS_RULE);
    if (f->out && !is_address(f->out, f->out_dtype))
        return opt_refuse("out" ADDRESS_RULE ", or 0");
    if (f->out && f->remainder)
        return opt_refuse("out must be 0 with a remainder: param is the 16-bit parameter");

    *segment = (opt_segment){
        .param = (void *)f->param,
        .remainder = (int16_t *)f->remainder,
        .state = {states > 0 ? (void *)f->state0 : NULL, states > 1 ? (void *)f->state1 : NULL},
        .grad = (const void *)f->grad,
        .out = (void *)f->out,
        .numel = (uint64_t)f->numel,
        .first_index = f->first_index,
        .rule = f->rule,
        .grad_dtype = f->grad_dtype,
        .state_format = f->state_format,
        .out_dtype = f->out_dtype,
    };
    return 0;
}

int64_t opt_init_segments(opt_segment *segments, const opt_rule *rules, const opt_segment_fields *fields,
                          int64_t count)
{
    int64_t filled = 0;

    while (filled < count && !init_segment(&segments[filled], rules, &fields[filled]))
        filled++;
    return filled;
}

int opt_segment_set_grad(opt_segment *segments, uint64_t count, uint64_t i, intptr_t grad)
{
    if (i >= count)
        return opt_refuse("segment must be the number of a segment of this batch");
    if (segments[i].numel && !is_address(grad, segments[i].grad_dtype))
        return opt_refuse("grad" ADDRESS_RULE);
    segments[i].grad = (const void *)grad;
    return 0;
}

struct step_run {
    const struct opt_kernels *kernels;
    const opt_segment *segments;
    const opt_rule *rules;
    uint64_t count;
    double
        grad_scale; /* rounded to float32 in a tile, because the caller's environment might flush subnormals */
};

/* The last segment that starts at or before `position`. */
static uint64_t find_segment(const struct step_run *run, uint64_t position)
{
    uint64_t low = 0, high = run->count;

    while (high - low > 1) {
        uint64_t middle = low + (high - low) / 2;
        if (run->segments[middle].position <= position)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Not inlined: the compiler may move the rounding of grad_scale into the environment of a step, but not across a call. */
static __attribute__((noinline)) void step_range(const struct step_run *run, float grad_scale, uint64_t begin,
                                                 uint64_t end)
{
    fp_environment saved = fp_enter_step();

    for (uint64_t i = find_segment(run, begin); i < run->count && run->segments[i].position < end; i++) {
        const opt_segment *s = &run->segments[i];
        uint64_t from = begin > s->position ? begin - s->position : 0;
        uint64_t to = end - s->position < s->numel ? end - s->position : s->numel;
        if (from < to)
            run->kernels->step(s, &run->rules[s->rule], grad_scale, from, to);
    }
    fp_restore(saved);
}

static void step_tile(void *context, uint64_t begin, uint64_t end)
{
    const struct step_run *run = context;

    step_range(run, (float)run->grad_scale, begin, end);
}

int opt_run(opt_segment *segments, uint64_t count, const opt_rule *rules, double grad_scale)
{
    struct step_run run = {opt_selected(), segments, rules, count, grad_scale};
    uint64_t position = 0;

    if (!run.kernels)
        return -ENOTSUP;
    for (uint64_t i = 0; i < count; i++) {
        segments[i].position = position;
        position += (segments[i].numel + POSITION_GRAIN - 1) / POSITION_GRAIN * POSITION_GRAIN;
    }
    opt_pool_run(step_tile, &run, position, OPT_SQUARE_BLOCK, LARGEST_TILE);
    return 0;
}

int opt_run_step(void *step)
{
    const opt_step *arguments = step;

    return opt_run(arguments->segments, arguments->count, arguments->rules, arguments->grad_scale);
}

struct split_run {
    const struct opt_kernels *kernels;
    uint16_t *param;
    int16_t *remainder;
    float *master;
    uint64_t numel;
};

static void split_tile(void *context, uint64_t begin, uint64_t end)
{
    const struct split_run *run = context;

    run->kernels->split(run->param + begin, run->remainder ? run->remainder + begin : NULL,
                        run->master + begin, end - begin);
}

static void join_tile(void *context, uint64_t begin, uint64_t end)
{
    const struct split_run *run = context;

    run->kernels->join(run->master + begin, run->param + begin, run->remainder + begin, end - begin);
}

static int split_or_join(opt_range_function tile, intptr_t param, intptr_t remainder, intptr_t master,
                         int64_t numel)
{
    if (!is_count(numel))
        return opt_refuse("numel" COUNT_RULE);
    if (numel && !is_address(param, OPT_BF16))
        return opt_refuse("param" ADDRESS_RULE);
    if (numel && !is_address(master, OPT_FP32))
        return opt_refuse("master" ADDRESS_RULE);

    struct split_run run = {opt_selected(), (uint16_t *)param, (int16_t *)remainder, (float *)master,
                            (uint64_t)numel};
    if (!run.kernels)
        return -ENOTSUP;
    opt_pool_run(tile, &run, run.numel, OPT_SQUARE_BLOCK, LARGEST_TILE);
    return 0;
}

int opt_split(intptr_t param, intptr_t remainder, intptr_t master, int64_t numel)
{
    if (remainder && !is_address(remainder, OPT_BF16))
        return opt_refuse("remainder" ADDRESS_RULE ", or 0");
    return split_or_join(split_tile, param, remainder, master, numel);
}

int opt_join(intptr_t master, intptr_t param, intptr_t remainder, int64_t numel)
{
    if (numel && !is_address(remainder, OPT_BF16))
        return opt_refuse("remainder" ADDRESS_RULE);
    return split_or_join(join_tile, param, remainder, master, numel);
}

struct accumulate_run {
    const struct opt_kernels *kernels;
    char *dst;
    const char *src;
    int dst_dtype, src_dtype, overwrite;
    uint64_t numel;
};

static void accumulate_tile(void *context, uint64_t begin, uint64_t end)
{
    const struct accumulate_run *run = context;

    run->kernels->accumulate(run->dst + begin * opt_element_size(run->dst_dtype), run->dst_dtype,
                             run->src + begin * opt_element_size(run->src_dtype), run->src_dtype, end - begin,
                             run->overwrite);
}

int opt_accumulate(intptr_t dst, int dst_dtype, intptr_t src, int src_dtype, int64_t numel, int overwrite)
{
    if (!is_dtype(dst_dtype))
        return opt_refuse("dst_dtype" DTYPE_RULE);
    if (!is_dtype(src_dtype))
        return opt_refuse("src_dtype" DTYPE_RULE);
    if (!is_count(numel))
        return opt_refuse("numel" COUNT_RULE);
    if (numel && !is_address(dst, dst_dtype))
        return opt_refuse("dst" ADDRESS_RULE);
    if (numel && !is_address(src, src_dtype))
        return opt_refuse("src" ADDRESS_RULE);

    struct accumulate_run run = {opt_selected(), (char *)dst,    (const char *)src, dst_dtype,
                                 src_dtype,      overwrite != 0, (uint64_t)numel};
    if (!run.kernels)
        return -ENOTSUP;
    opt_pool_run(accumulate_tile, &run, run.numel, OPT_SQUARE_BLOCK, LARGEST_TILE);
    return 0;
}

struct reduce_run {
    const struct opt_kernels *kernels;
    struct opt_reduction reduction;
};

static void reduce_tile(void *context, uint64_t begin, uint64_t end)
{
    const struct reduce_run *run = context;

    run->kernels->reduce(&run->reduction, begin, end);
}

int opt_reduce(intptr_t target, int target_dtype, const intptr_t *sources, int64_t count, int source_dtype,
               int64_t numel, double factor, int overwrite)
{
    if (!is_dtype(target_dtype))
        return opt_refuse("target_dtype" DTYPE_RULE);
    if (!is_dtype(source_dtype))
        return opt_refuse("source_dtype" DTYPE_RULE);
    if (!is_count(numel))
        return opt_refuse("numel" COUNT_RULE);
    if (numel && !is_address(target, target_dtype))
        return opt_refuse("target" ADDRESS_RULE);
    if (count < 1)
        return opt_refuse("sources must be 1 or more");
    for (int64_t i = 0; numel && i < count; i++)
        if (!is_address(sources[i], source_dtype))
            return opt_refuse("sources must each be the address of memory aligned to its element");

    struct reduce_run run = {
        opt_selected(),
        {
            .target = (char *)target,
            .sources = sources,
            .count = (uint64_t)count,
            .numel = (uint64_t)numel,
            .factor = factor,
            .target_dtype = target_dtype,
            .source_dtype = source_dtype,
            .overwrite = overwrite,
        },
    };
    if (!run.kernels)
        return -ENOTSUP;
    opt_pool_run(reduce_tile, &run, run.reduction.numel, OPT_SQUARE_BLOCK, LARGEST_TILE);
    return 0;
}

struct squares_run {
    const struct opt_kernels *kernels;
    const char *src;
    int dtype;
    uint64_t numel;
    double *sums;
};

static void squares_tile(void *context, uint64_t begin, uint64_t end)
{
    const struct squares_run *run = context;

    run->kernels->block_squares(run->src + begin * opt_element_size(run->dtype), run->dtype, end - begin,
                                run->sums + begin / OPT_SQUARE_BLOCK);
}

static uint64_t blocks(uint64_t numel) { return (numel + OPT_SQUARE_BLOCK - 1) / OPT_SQUARE_BLOCK; }

enum { IS_NAN = OPT_SUM_LIMBS - 1, IS_INFINITE = IS_NAN - 1, LIMB_BITS = 32, UNIT = 320, MANTISSA_BITS = 52 };

/* Block sums are at least 0 and multiples of 2^-298, the square of the smallest float32; their total is below 2^320.
 * Integer arithmetic: no floating-point environment matters. */
static void add_block_sum(uint64_t *sum, double block)
{
    const uint64_t low_half = UINT32_MAX, one = 1;
    uint64_t bits;

    memcpy(&bits, &block, sizeof bits);
    int exponent = (int)(bits >> MANTISSA_BITS & 0x7FF), place = exponent - 1023 - MANTISSA_BITS + UNIT;
    uint64_t mantissa = (bits & ((one << MANTISSA_BITS) - 1)) | one << MANTISSA_BITS;
    if (place < -MANTISSA_BITS) /* 0 */
        return;
    if (place < 0) {
        mantissa >>= -place;
        place = 0;
    }
    if (place / LIMB_BITS + 2 >= IS_INFINITE) {
        sum[block != block ? IS_NAN : IS_INFINITE]++;
        return;
    }
    uint64_t *limb = sum + place / LIMB_BITS;
    uint64_t low = (mantissa & low_half) << place % LIMB_BITS;
    uint64_t high = (mantissa >> LIMB_BITS) << place % LIMB_BITS;
    limb[0] += low & low_half;
    limb[1] += (low >> LIMB_BITS) + (high & low_half);
    limb[2] += high >> LIMB_BITS;
}

/* At most 2^30 at once, because a limb grows by less than 2^34 each time. */
static void add_block_sums(uint64_t *sum, const double *sums, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        add_block_sum(sum, sums[i]);
    for (int i = 0; i < IS_INFINITE - 1; i++) {
        sum[i + 1] += sum[i] >> LIMB_BITS;
        sum[i] &= UINT32_MAX;
    }
}

int opt_add_block_sums(intptr_t sums, int64_t count, uint64_t *sum)
{
    const uint64_t most = (uint64_t)1 << 30;

    if (!is_count(count))
        return opt_refuse("count" COUNT_RULE);
    if (count && (sums <= 0 || sums % (intptr_t)sizeof(double)))
        return opt_refuse("sums" ADDRESS_RULE);
    const double *next = (const double *)sums;
    for (uint64_t left = (uint64_t)count; left;) {
        uint64_t now = left < most ? left : most;
        add_block_sums(sum, next, now);
        next += now;
        left -= now;
    }
    return 0;
}

int opt_sum_of_squares(intptr_t address, int dtype, int64_t numel, uint64_t *sum)
{
    if (!is_dtype(dtype))
        return opt_refuse("dtype" DTYPE_RULE);
    if (!is_count(numel))
        return opt_refuse("numel" COUNT_RULE);
    if (numel && !is_address(address, dtype))
        return opt_refuse("address" ADDRESS_RULE);

    double few[FEW_SUMS], *many = blocks((uint64_t)numel) > FEW_SUMS ? malloc(SUMS * sizeof *many) : NULL;
    struct squares_run run = {opt_selected(), NULL, dtype, 0, many ? many : few};
    uint64_t max_numel = (uint64_t)(many ? SUMS : FEW_SUMS) * OPT_SQUARE_BLOCK;

    for (uint64_t begin = 0; run.kernels && begin < (uint64_t)numel; begin += run.numel) {
        uint64_t remaining = (uint64_t)numel - begin;
        run.src = (const char *)address + begin * opt_element_size(dtype);
        run.numel = remaining < max_numel ? remaining : max_numel;
        opt_pool_run(squares_tile, &run, run.numel, OPT_SQUARE_BLOCK, LARGEST_TILE);
        add_block_sums(sum, run.sums, blocks(run.numel));
    }
    free(many);
    return run.kernels ? 0 : -ENOTSUP;
}
