/* kernels.h - the CPU optimizer arithmetic, as the outside sees it.
 *
 * Every kernel is one pass over flat memory and knows nothing of tensors, tiers or Python. Three rules hold for all:
 *
 * 1. Arithmetic is float32 in one written order. Each multiply, add, divide and square root rounds once, to nearest
 *    even; there is no fused multiply-add, and subnormals count. Results are therefore the same to the bit for every
 *    instruction set, thread count and tile boundary, and for a float32 numpy transcription of the formula below. The
 *    price is nothing: the kernels wait for memory.
 * 2. A NaN that arithmetic produces is stored as the one quiet NaN 0x7FC00000 (bf16 0x7FC0, fp16 0x7E00). Hardware
 *    lets the operand order pick sign and payload, and compilers swap operands; this keeps rule 1 true for NaN too.
 *    Pure casts keep sign and the upper payload bits, made quiet.
 * 3. The caller's floating-point environment does not leak in (flush-to-zero is per thread, and torch can set it),
 *    nor is it changed: the default is set around each thread's share and around the scalars' derivation, and what was
 *    there is restored.
 *
 * The AdamW formula, for each element; t is the step number, from 1:
 *
 *     g     = float32(grad) * grad_scale                  grad_scale: unscale and clip factor in one number
 *     p     = p * (1 - lr*weight_decay)                   decoupled (AdamW)
 *     g     = g + weight_decay * p                        not decoupled (L2, Adam)
 *     m     = m * beta1 + g * (1-beta1)
 *     v     = v * beta2 + (g*g) * (1-beta2)
 *     denom = sqrt(v) / sqrt(1-beta2^t) + eps
 *     p     = p - (lr / (1-beta1^t)) * (m / denom)
 *     out   = p, rounded once to out_dtype
 *
 * What depends on hyperparameters alone (1 - lr*weight_decay, 1-beta1, 1-beta2, the bias correction root and the step
 * size) is computed in double with libm's pow and rounded to float32 once.
 *
 * Rules of use. Addresses need element alignment only. Ranges must not overlap, with one exception: `out` may be
 * exactly `grad` if their dtypes are equally wide. Memory is only touched during the call. Any thread may call
 * anything at any time; calls on disjoint memory run side by side. Functions return >= 0 or -errno; after -EINVAL,
 * opt_invalid_argument() says which argument, and which rule it broke. Nothing prints, exits or asserts.
 */
#ifndef OPTIM_CPU_KERNELS_H
#define OPTIM_CPU_KERNELS_H

#include <stdint.h>

/* CDEF BEGIN: build_optim.py hands everything up to CDEF END to cffi */

enum { OPT_FP32, OPT_BF16, OPT_FP16 };

#define OPT_SQUARE_BLOCK 4096
#define OPT_MAX_THREADS 4096

/* Elements stepped with one set of hyperparameters. Filled by opt_adamw_segment_init; holds addresses, owns nothing. */
typedef struct {
    float *master, *exp_avg, *exp_avg_sq;
    const void *grad;
    void *out; /* NULL: no copy-out */
    uint64_t numel;
    uint64_t position; /* in the batch's element space; set by opt_adamw_run */
    int grad_dtype, out_dtype, decoupled;
    float decay; /* decoupled: 1 - lr*weight_decay, else weight_decay */
    float beta1, one_minus_beta1, beta2, one_minus_beta2;
    float bias_correction2_sqrt, eps, step_size;
} opt_adamw_segment;

/* Checks the arguments and derives the float32 scalars. numel may be 0; out may be 0. */
int opt_adamw_segment_init(opt_adamw_segment *segment, int64_t numel, intptr_t master, intptr_t exp_avg,
                           intptr_t exp_avg_sq, intptr_t grad, int grad_dtype, intptr_t out, int out_dtype,
                           double lr, double beta1, double beta2, double eps, double weight_decay,
                           int64_t step, int decoupled);

/* Steps every segment, in one run of the pool. grad_scale is rounded to float32. */
int opt_adamw_run(opt_adamw_segment *segments, uint64_t count, double grad_scale);

/* dst = src (overwrite), or dst += src with the sum formed in float32 and rounded once to dst_dtype. */
int opt_accumulate(intptr_t dst, int dst_dtype, intptr_t src, int src_dtype, int64_t numel, int overwrite);

/* *result = initial + the sum of squares, in float64, where the square of a float32 is exact. Blocks of
 * OPT_SQUARE_BLOCK elements start at `address`; in a block, element i is added to lane i % 32 in order, then the
 * 32 lanes fold as l[i] += l[i+16], 8, 4, 2, 1; block sums are added to `initial` in index order. Finite exactly
 * when `initial` and all elements are finite. */
int opt_sum_of_squares(intptr_t address, int dtype, int64_t numel, double initial, double *result);

/* The instruction set in use: chosen at first use, the widest the CPU has, or what the environment variable
 * TIERING_ISA names. A name that is unknown or that this CPU lacks is -ENOTSUP from every kernel, and NULL here. */
const char *opt_instruction_set(void);

/* Choose again, by name; 0 or -ENOTSUP. Takes effect for calls that start later. */
int opt_set_instruction_set(const char *name);

/* The i-th instruction set that this CPU can run, widest first, or NULL. */
const char *opt_available_instruction_set(int i);

/* Threads per run, the caller included. Unless set: the size of the affinity mask at first use. */
int opt_thread_count(void);
int opt_set_thread_count(int threads); /* 1 to OPT_MAX_THREADS, or -EINVAL */

/* What was wrong in this thread's last -EINVAL: "argument rule", a static string. */
const char *opt_invalid_argument(void);

/* CDEF END */

#endif
