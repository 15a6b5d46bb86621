/* kernels.c - argument checks, and how a call is cut into tiles for the pool.
 *
 * A batch of AdamW segments is laid out in one element space: segment after segment, each start rounded up to
 * POSITION_GRAIN. Tiles are equal ranges of that space. One large tensor is thereby spread over all threads, a
 * thousand small ones share a tile, and cuts inside a segment fall on whole cache lines of each of its arrays.
 */

#include "kernels.h"

#include <errno.h>
#include <math.h>

#include "fp_environment.h"
#include "isa.h"
#include "pool.h"

enum {
    TILE = 1 << 15,      /* elements: 128 KiB per float32 array, a few microseconds of work */
    POSITION_GRAIN = 64, /* elements: two cache lines of 16-bit, four of float32; divides TILE */
    SUMS = 1 << 13,      /* block sums held at a time; 64 KiB of stack */
};

static _Thread_local const char *invalid_argument = "";

const char *opt_invalid_argument(void) { return invalid_argument; }

static int refuse(const char *argument_and_rule)
{
    invalid_argument = argument_and_rule;
    return -EINVAL;
}

static int is_dtype(int dtype) { return dtype == OPT_FP32 || dtype == OPT_BF16 || dtype == OPT_FP16; }

static int is_address(intptr_t address, int dtype)
{
    return address > 0 && address % (intptr_t)opt_element_size(dtype) == 0;
}

static int is_count(int64_t numel) { return numel >= 0 && numel <= INT64_MAX / 16; }

/* Also false for NaN. */
static int in_range(double x, double low, double below) { return x >= low && x < below; }

#define ADDRESS_RULE " must be the address of memory aligned to its element"
#define COUNT_RULE " must be a count of elements, 0 or more"
#define DTYPE_RULE " must be FP32, BF16 or FP16"

/* Not inlined: the compiler may move arithmetic over a change of the floating-point environment, but not a call. */
static __attribute__((noinline)) void derive_scalars(opt_adamw_segment *s, double lr, double beta1,
                                                     double beta2, double eps, double weight_decay,
                                                     int64_t step)
{
    s->decay = (float)(s->decoupled ? 1 - lr * weight_decay : weight_decay);
    s->beta1 = (float)beta1;
    s->one_minus_beta1 = (float)(1 - beta1);
    s->beta2 = (float)beta2;
    s->one_minus_beta2 = (float)(1 - beta2);
    s->bias_correction2_sqrt = (float)sqrt(1 - pow(beta2, (double)step));
    s->eps = (float)eps;
    s->step_size = (float)(lr / (1 - pow(beta1, (double)step)));
}

int opt_adamw_segment_init(opt_adamw_segment *segment, int64_t numel, intptr_t master, intptr_t exp_avg,
                           intptr_t exp_avg_sq, intptr_t grad, int grad_dtype, intptr_t out, int out_dtype,
                           double lr, double beta1, double beta2, double eps, double weight_decay,
                           int64_t step, int decoupled)
{
    if (!is_count(numel))
        return refuse("numel" COUNT_RULE);
    if (!is_dtype(grad_dtype))
        return refuse("grad_dtype" DTYPE_RULE);
    if (!is_dtype(out_dtype))
        return refuse("out_dtype" DTYPE_RULE);
    if (numel && !is_address(master, OPT_FP32))
        return refuse("master" ADDRESS_RULE);
    if (numel && !is_address(exp_avg, OPT_FP32))
        return refuse("exp_avg" ADDRESS_RULE);
    if (numel && !is_address(exp_avg_sq, OPT_FP32))
        return refuse("exp_avg_sq" ADDRESS_RULE);
    if (numel && !is_address(grad, grad_dtype))
        return refuse("grad" ADDRESS_RULE);
    if (out && !is_address(out, out_dtype))
        return refuse("out" ADDRESS_RULE ", or 0");
    if (!in_range(lr, 0, INFINITY))
        return refuse("lr must be finite and 0 or more");
    if (!in_range(beta1, 0, 1))
        return refuse("beta1 must be at least 0 and below 1");
    if (!in_range(beta2, 0, 1))
        return refuse("beta2 must be at least 0 and below 1");
    if (!in_range(eps, 0, INFINITY))
        return refuse("eps must be finite and 0 or more");
    if (!in_range(weight_decay, 0, INFINITY))
        return refuse("weight_decay must be finite and 0 or more");
    if (step < 1)
        return refuse("step must be 1 or more: it counts the step being taken");

    *segment = (opt_adamw_segment){
        .master = (float *)master,
        .exp_avg = (float *)exp_avg,
        .exp_avg_sq = (float *)exp_avg_sq,
        .grad = (const void *)grad,
        .out = (void *)out,
        .numel = (uint64_t)numel,
        .grad_dtype = grad_dtype,
        .out_dtype = out_dtype,
        .decoupled = decoupled != 0,
    };
    fp_environment saved = fp_enter_default();
    derive_scalars(segment, lr, beta1, beta2, eps, weight_decay, step);
    fp_restore(saved);
    return 0;
}

struct adamw_run {
    const struct opt_kernels *kernels;
    const opt_adamw_segment *segments;
    uint64_t count;
    double grad_scale; /* rounded in the tile: the caller's environment might flush it */
};

/* The last segment that starts at or before `position`. */
static uint64_t find_segment(const struct adamw_run *run, uint64_t position)
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

static void adamw_tile(void *context, uint64_t tile)
{
    const struct adamw_run *run = context;
    uint64_t begin = tile * TILE, end = begin + TILE;

    for (uint64_t i = find_segment(run, begin); i < run->count && run->segments[i].position < end; i++) {
        const opt_adamw_segment *s = &run->segments[i];
        uint64_t from = begin > s->position ? begin - s->position : 0;
        uint64_t to = end - s->position < s->numel ? end - s->position : s->numel;
        if (from < to)
            run->kernels->adamw(s, (float)run->grad_scale, from, to);
    }
}

int opt_adamw_run(opt_adamw_segment *segments, uint64_t count, double grad_scale)
{
    struct adamw_run run = {opt_selected(), segments, count, grad_scale};
    uint64_t position = 0;

    if (!run.kernels)
        return -ENOTSUP;
    for (uint64_t i = 0; i < count; i++) {
        segments[i].position = position;
        position += (segments[i].numel + POSITION_GRAIN - 1) / POSITION_GRAIN * POSITION_GRAIN;
    }
    opt_pool_run(adamw_tile, &run, (position + TILE - 1) / TILE);
    return 0;
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
        return refuse("dst_dtype" DTYPE_RULE);
    if (!is_dtype(src_dtype))
        return refuse("src_dtype" DTYPE_RULE);
    if (!is_count(numel))
        return refuse("numel" COUNT_RULE);
    if (numel && !is_address(dst, dst_dtype))
        return refuse("dst" ADDRESS_RULE);
    if (numel && !is_address(src, src_dtype))
        return refuse("src" ADDRESS_RULE);

    struct accumulate_run run = {opt_selected(), (char *)dst,    (const char *)src, dst_dtype,
                                 src_dtype,      overwrite != 0, (uint64_t)numel};
    if (!run.kernels)
        return -ENOTSUP;
    opt_pool_run(accumulate_tile, &run, (run.numel + TILE - 1) / TILE);
    return 0;
}

struct squares_run {
    const struct opt_kernels *kernels;
    const char *src;
    int dtype;
    uint64_t numel;
    double *sums;
};

static void squares_tile(void *context, uint64_t tile)
{
    const struct squares_run *run = context;
    uint64_t begin = tile * TILE, numel = run->numel - begin < TILE ? run->numel - begin : TILE;

    run->kernels->block_squares(run->src + begin * opt_element_size(run->dtype), run->dtype, numel,
                                run->sums + begin / OPT_SQUARE_BLOCK);
}

int opt_sum_of_squares(intptr_t address, int dtype, int64_t numel, double initial, double *result)
{
    if (!is_dtype(dtype))
        return refuse("dtype" DTYPE_RULE);
    if (!is_count(numel))
        return refuse("numel" COUNT_RULE);
    if (numel && !is_address(address, dtype))
        return refuse("address" ADDRESS_RULE);

    const struct opt_kernels *kernels = opt_selected();
    double sums[SUMS], total = initial;
    uint64_t most = (uint64_t)SUMS * OPT_SQUARE_BLOCK;

    if (!kernels)
        return -ENOTSUP;
    for (uint64_t done = 0; done < (uint64_t)numel; done += most) {
        uint64_t rest = (uint64_t)numel - done, now = rest < most ? rest : most;
        struct squares_run run = {kernels, (const char *)address + done * opt_element_size(dtype), dtype, now,
                                  sums};
        opt_pool_run(squares_tile, &run, (now + TILE - 1) / TILE);
        for (uint64_t i = 0; i < (now + OPT_SQUARE_BLOCK - 1) / OPT_SQUARE_BLOCK; i++)
            total += sums[i];
    }
    *result = total;
    return 0;
}
