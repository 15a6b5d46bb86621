/* kernels.c - checks arguments, and divides a call into tiles for the pool.
 *
 * A batch of segments is laid out in one element space: segment after segment, each start rounded up to
 * POSITION_GRAIN. Tiles are equal ranges of that space. So a large tensor is spread over all threads, many small
 * tensors share a tile, and tile edges inside a segment are at whole cache lines of each of its arrays.
 */

#include "kernels.h"

#include <errno.h>
#include <stdlib.h>

#include "isa.h"
#include "pool.h"
#include "refuse.h"

enum {
    TILE = 1 << 15,      /* elements: 128 KiB per float32 array, a few microseconds of work */
    POSITION_GRAIN = 64, /* elements: two cache lines of 16-bit, four of float32; divides TILE */
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

int opt_segment_init(opt_segment *segment, const opt_rule *rules, uint32_t rule, int64_t numel,
                     intptr_t param, intptr_t remainder, intptr_t state0, intptr_t state1, int state_format,
                     intptr_t grad, int grad_dtype, intptr_t out, int out_dtype, uint64_t first_index)
{
    int states = opt_state_count(&rules[rule]);
    int state_dtype = state_format == OPT_STATE_FP32 ? OPT_FP32 : OPT_BF16;

    if (!is_count(numel))
        return opt_refuse("numel" COUNT_RULE);
    if (!is_dtype(grad_dtype))
        return opt_refuse("grad_dtype" DTYPE_RULE);
    if (!is_dtype(out_dtype))
        return opt_refuse("out_dtype" DTYPE_RULE);
    if (state_format < OPT_STATE_FP32 || state_format > OPT_STATE_BF16_STOCHASTIC)
        return opt_refuse("state_format must be FP32, BF16 or BF16_STOCHASTIC");
    if (numel && !is_address(param, remainder ? OPT_BF16 : OPT_FP32))
        return opt_refuse("param" ADDRESS_RULE);
    if (remainder && !is_address(remainder, OPT_BF16))
        return opt_refuse("remainder" ADDRESS_RULE ", or 0");
    if (numel && states > 0 && !is_address(state0, state_dtype))
        return opt_refuse("state0" ADDRESS_RULE);
    if (numel && states > 1 && !is_address(state1, state_dtype))
        return opt_refuse("state1" ADDRESS_RULE);
    if (numel && !is_address(grad, grad_dtype))
        return opt_refuse("grad" ADDRESS_RULE);
    if (out && !is_address(out, out_dtype))
        return opt_refuse("out" ADDRESS_RULE ", or 0");
    if (out && remainder)
        return opt_refuse("out must be 0 with a remainder: param is the 16-bit parameter");

    *segment = (opt_segment){
        .param = (void *)param,
        .remainder = (int16_t *)remainder,
        .state = {states > 0 ? (void *)state0 : NULL, states > 1 ? (void *)state1 : NULL},
        .grad = (const void *)grad,
        .out = (void *)out,
        .numel = (uint64_t)numel,
        .first_index = first_index,
        .rule = rule,
        .grad_dtype = grad_dtype,
        .state_format = state_format,
        .out_dtype = out_dtype,
    };
    return 0;
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

static void step_tile(void *context, uint64_t tile)
{
    const struct step_run *run = context;
    uint64_t begin = tile * TILE, end = begin + TILE;

    for (uint64_t i = find_segment(run, begin); i < run->count && run->segments[i].position < end; i++) {
        const opt_segment *s = &run->segments[i];
        uint64_t from = begin > s->position ? begin - s->position : 0;
        uint64_t to = end - s->position < s->numel ? end - s->position : s->numel;
        if (from < to)
            run->kernels->step(s, &run->rules[s->rule], (float)run->grad_scale, from, to);
    }
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
    opt_pool_run(step_tile, &run, (position + TILE - 1) / TILE);
    return 0;
}

struct split_run {
    const struct opt_kernels *kernels;
    uint16_t *param;
    int16_t *remainder;
    float *master;
    uint64_t numel;
};

static void split_tile(void *context, uint64_t tile)
{
    const struct split_run *run = context;
    uint64_t begin = tile * TILE, numel = run->numel - begin < TILE ? run->numel - begin : TILE;

    run->kernels->split(run->param + begin, run->remainder ? run->remainder + begin : NULL,
                        run->master + begin, numel);
}

static void join_tile(void *context, uint64_t tile)
{
    const struct split_run *run = context;
    uint64_t begin = tile * TILE, numel = run->numel - begin < TILE ? run->numel - begin : TILE;

    run->kernels->join(run->master + begin, run->param + begin, run->remainder + begin, numel);
}

static int split_or_join(opt_tile_function tile, intptr_t param, intptr_t remainder, intptr_t master,
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
    opt_pool_run(tile, &run, (run.numel + TILE - 1) / TILE);
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

static void accumulate_tile(void *context, uint64_t tile)
{
    const struct accumulate_run *run = context;
    uint64_t begin = tile * TILE, numel = run->numel - begin < TILE ? run->numel - begin : TILE;

    run->kernels->accumulate(run->dst + begin * opt_element_size(run->dst_dtype), run->dst_dtype,
                             run->src + begin * opt_element_size(run->src_dtype), run->src_dtype, numel,
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
    opt_pool_run(accumulate_tile, &run, (run.numel + TILE - 1) / TILE);
    return 0;
}

struct reduce_run {
    const struct opt_kernels *kernels;
    struct opt_reduction reduction;
};

static void reduce_tile(void *context, uint64_t tile)
{
    const struct reduce_run *run = context;
    uint64_t begin = tile * TILE, remaining = run->reduction.numel - begin;

    run->kernels->reduce(&run->reduction, begin, begin + (remaining < TILE ? remaining : TILE));
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
    opt_pool_run(reduce_tile, &run, (run.reduction.numel + TILE - 1) / TILE);
    return 0;
}

struct squares_run {
    const struct opt_kernels *kernels;
    const char *src;
    int dtype;
    uint64_t numel;
    double *sums, total;
};

static void squares_tile(void *context, uint64_t tile)
{
    const struct squares_run *run = context;
    uint64_t begin = tile * TILE, numel = run->numel - begin < TILE ? run->numel - begin : TILE;

    run->kernels->block_squares(run->src + begin * opt_element_size(run->dtype), run->dtype, numel,
                                run->sums + begin / OPT_SQUARE_BLOCK);
}

static uint64_t blocks(uint64_t numel) { return (numel + OPT_SQUARE_BLOCK - 1) / OPT_SQUARE_BLOCK; }

/* A run with a single tile, so that the sum is computed in the default floating-point environment. */
static void total_tile(void *context, uint64_t tile)
{
    struct squares_run *run = context;

    (void)tile;
    for (uint64_t i = 0; i < blocks(run->numel); i++)
        run->total += run->sums[i];
}

int opt_sum_of_squares(intptr_t address, int dtype, int64_t numel, double initial, double *result)
{
    if (!is_dtype(dtype))
        return opt_refuse("dtype" DTYPE_RULE);
    if (!is_count(numel))
        return opt_refuse("numel" COUNT_RULE);
    if (numel && !is_address(address, dtype))
        return opt_refuse("address" ADDRESS_RULE);

    double few[FEW_SUMS], *many = blocks((uint64_t)numel) > FEW_SUMS ? malloc(SUMS * sizeof *many) : NULL;
    struct squares_run run = {opt_selected(), NULL, dtype, 0, many ? many : few, initial};
    uint64_t max_numel = (uint64_t)(many ? SUMS : FEW_SUMS) * OPT_SQUARE_BLOCK;

    for (uint64_t begin = 0; run.kernels && begin < (uint64_t)numel; begin += run.numel) {
        uint64_t remaining = (uint64_t)numel - begin;
        run.src = (const char *)address + begin * opt_element_size(dtype);
        run.numel = remaining < max_numel ? remaining : max_numel;
        opt_pool_run(squares_tile, &run, (run.numel + TILE - 1) / TILE);
        opt_pool_run(total_tile, &run, 1);
    }
    free(many);
    *result = run.total;
    return run.kernels ? 0 : -ENOTSUP;
}
