/* kernels.h - the arithmetic of the CPU optimizers: the public interface.
 *
 * A kernel is one pass over flat memory, independent of tensors, tiers and Python. Four rules hold for all:
 *
 * 1. Arithmetic is float32 in one written order. Each multiply, add, subtract, divide and square root rounds once, to
 *    nearest even; there is no fused multiply-add but in the product in bfloat16.
 *    Results are therefore bit-identical for every instruction set, thread count and tile boundary, and to a float32
 *    numpy transcription of the formulas below. This costs no time: the kernels are limited by memory bandwidth.
 * 2. A NaN that arithmetic produces is stored as the one quiet NaN 0x7FC00000 (bf16 0x7FC0, fp16 0x7E00). Hardware
 *    selects sign and payload by the order of the operands, and compilers swap operands; this rule extends rule 1 to
 *    NaN. Casts keep the sign and the upper payload bits, and make the NaN quiet.
 * 3. The caller's floating-point environment has no effect (flush-to-zero is per thread, and torch can set it) and is
 *    not changed: each thread sets its own environment for its tiles, and so does the derivation of scalars; both
 *    restore the previous one.
 * 4. Subnormals are numbers like others, except in a step of an optimizer: there, an operand below 2^-126 in magnitude
 *    (an element of memory or a scalar) counts as the zero of its sign, and a result is that zero if it is below 2^-126
 *    after rounding to 24 bits with an exponent without bounds. A step stores no subnormals, and takes those of older
 *    checkpoints for zeros. Divisions and square roots of subnormals take two to three times as long on many CPUs, and
 *    other operations do on some. The state of a parameter with zero gradients would become subnormal and stay it:
 *    instead, toward() leaves an average where it is as soon as |b - a| * (1-beta) is below 2^-126.
 *
 * Optimizers. For each element; t is the number of the step taken, from 1:
 *
 *     g = float32(grad) * scale        scale: unscale and clip factor in one number; negated to maximize
 *     g = g + weight_decay * p         L2 decay only
 *
 *     Adam      m = toward(m, g, beta1)
 *               v = toward(v, g * g, beta2)
 *               u = m / (sqrt(v) * (1 / (size * sqrt(1-beta2^t))) + (eps / size)), size being lr / (1-beta1^t);
 *               without bias correction, 1 takes the place of 1-beta1^t and 1-beta2^t
 *     Lion      u = lr * sign(toward(m, g, beta1))          the sign of zero is zero, that of NaN is NaN
 *               m = toward(m, g, beta2)
 *     Adagrad   s = s + g * g
 *               u = (lr / (1 + (t-1) * lr_decay)) * (g / (sqrt(s) + eps))
 *     SGD       b = b * momentum + g * (1-dampening)        b = b * 0 + g * 1 in step 1; no b without momentum
 *               d = b; Nesterov: g + b * momentum; without momentum: g
 *               u = lr * d
 *
 *     p = p - u                        L2 decay or none
 *     p = p - (u + (lr * weight_decay) * p)      decoupled decay
 *
 * where toward(a, b, beta) = a + (b - a) * (1-beta) if beta >= 0.5, else a * beta + b * (1-beta). Expressions of
 * hyperparameters only (the parentheses above without an element in them) are computed in double, with libm's pow, and
 * rounded to float32 once. These forms minimize the error: toward() does not multiply the large old value by a rounded
 * beta, and decay is added before the one rounding at the magnitude of p.
 *
 * Overflow and NaN. No element is skipped or clamped: to skip a step with non-finite gradients, call opt_sum_of_squares
 * first. A NaN gradient makes its element NaN at once. An infinite gradient does so too in Adam and Adagrad, and in
 * Lion at the next step; the parameter of SGD becomes infinite. A finite gradient whose square overflows makes the
 * second moment infinite: the element of Adam is NaN at the next step (for beta2 < 0.5 it does not change), that of
 * Adagrad does not change. An infinite parameter stays infinite without weight decay. If Adam's factor of sqrt(v)
 * overflows float32 (lr is 0, or nearly), the factor is 0 and the other term infinite: the step is zero, even for
 * v = 0. Only eps prevents u = m / 0; v stays 0 for gradients below 2^-63 / sqrt(1-beta2), 3.4e-18 for 0.999.
 *
 * Formats. A segment's parameter is float32 (`remainder` NULL), or split: `param` holds bfloat16 and `remainder` the
 * difference, so that  bits(float32) = (bits(bf16) << 16) + remainder,  remainder being a signed 16-bit integer. Both
 * together are exactly the float32, so a split parameter is stepped to the same bits as a float32 one.
 * `out`, and the upper half of a split, are the parameter rounded to nearest, ties away from zero (bf16): with ties to
 * even, 65537 float32 values would round to each even bf16, one more than 16 bits can distinguish. fp16 rounds ties
 * to even. State is float32, or bfloat16: widened, used, and rounded back like `out`, or stochastically. The
 * stochastic rounding adds 16 random bits below the bf16's last place and truncates; they come from a counter-based
 * hash
 *
 *     key = mix(mix(seed) + t), mix being splitmix64's finalizer; index = first_index + position in the segment
 *     key = mix(key + (index >> 32)); x = low32(index) ^ low32(key)
 *     x ^= x >> 16; x *= 0x21F0AAAD; x ^= x >> 15; x ^= high32(key); x *= 0xD35A2D97; x ^= x >> 15
 *
 * whose lower half rounds the first state and whose upper half rounds the second.
 *
 * Block formats. A matrix of frozen weights is stored as a code for each element and a scale for each block of elements
 * (32 to 4096 of them, a power of two, consecutive in a row). An element is decoded to  float32(value of the code * scale
 * of the block).
 *
 *     NF4    16 values of a codebook, absmax 1 (QLoRA); scale = absmax of the block. 4 bits: byte i of each 16 bytes has
 *            the codes of elements i (lower half) and i + 16 (upper half) of 32
 *     INT8   value q, -127 to 127; scale = absmax / 127. One byte, two's complement
 *     FP8    value of e4m3 (fn: no infinity), at most 448; scale = absmax / 448. One byte; that of NaN is never written
 *
 *     code = the nearest value to c = element / scale: NF4 the number of codebook midpoints m with m < c, a midpoint being
 *     float32((a + b) / 2) of neighbours; INT8 and FP8 to nearest even. A scale below 2^-126 is stored as 0,
 *     with codes of value 0. A block with an infinity or a NaN gets the quiet NaN as scale, and codes of value 0; a
 *     scale that is not finite decodes to NaN.
 *
 * Scales are float32, or quantised once more (QLoRA's double quantisation): offset = the mean of all scales, summed in
 * float64 in index order; d = scale - offset; for each 256 scales, group scale = max |d|, and the code of d / group scale
 * in the dynamic map of 256 values, nearest by midpoints as above:  scale = float32(float32(map[code] * group scale) +
 * offset). Value k = 1 to 127 above zero of the map is (2n + 18j + 9) / (20n) * 10^(i-6), where n = 2^i is the largest
 * power of two up to k, and j = k - n; negated below zero; the last is 1.
 *
 * The product y = x W^T of a few rows x with the decoded W is, for each output: element i of a row is multiplied, and
 * added to lane i % 32 in order; then the 32 lanes fold as l[i] += l[i+16], 8, 4, 2, 1. All float32. W is not stored.
 *
 * The product in bfloat16 rounds W to bfloat16, to nearest even, and has one lane for two elements. It is the exception
 * to rule 1: elements 2i + 1 and then 2i of each 32 are added to lane i by one fused multiply-add each,
 * lane = float32(x * w + lane), rounded once. So does a CPU's instruction for bfloat16 (VDPBF16PS). The 16 lanes, in
 * float32, fold as l[i] += l[i+8], 4, 2, 1, and the sum is rounded to bfloat16, to nearest even.
 *
 * The transposed product y = x W in bfloat16 has one lane for an output, which is a column of W: rows 2i + 1 and then 2i
 * are added to it as above, in order. A row of zeros follows an odd number of rows.
 *
 * Rules for callers. Addresses need element alignment only. Ranges must not overlap, with one exception: `out` may be
 * exactly `grad` if their dtypes have the same width. State starts as zeros. Memory is borrowed for the duration of a
 * call. Any thread may call any function at any time; calls on disjoint memory run concurrently. Functions return >= 0
 * or -errno; after -EINVAL, opt_invalid_argument() names the argument and the rule it broke. No function prints, exits
 * or asserts.
 *
 * Sources: Adam, Kingma and Ba 2015; AdamW, Loshchilov and Hutter 2019; Lion, Chen et al. 2023; Adagrad, Duchi et al.
 * 2011; SGD with momentum and dampening as torch.optim.SGD has it; NF4 and double quantisation, Dettmers et al. 2023
 * (QLoRA); the dynamic map, Dettmers 2015, with the signs of bitsandbytes; e4m3, Micikevicius et al. 2022. The hash's constants: github.com/skeeto/
 * hash-prospector, "lowbias32", issue 19.
 */
#ifndef OPTIM_CPU_KERNELS_H
#define OPTIM_CPU_KERNELS_H

#include <stdint.h>

/* CDEF BEGIN: build_optim.py passes the text up to CDEF END to cffi */

enum { OPT_FP32, OPT_BF16, OPT_FP16 };
enum { OPT_STATE_FP32, OPT_STATE_BF16, OPT_STATE_BF16_STOCHASTIC };
enum { OPT_NF4, OPT_INT8, OPT_FP8 };

#define OPT_SQUARE_BLOCK 4096
#define OPT_SUM_LIMBS 22
#define OPT_MAX_THREADS 4096
#define OPT_MIN_BLOCK 32
#define OPT_MAX_BLOCK 4096
#define OPT_SCALE_GROUP 256

/* An optimizer with its hyperparameters at one step. Filled by opt_<optimizer>_rule; owns nothing. */
typedef struct {
    int optimizer, decay_kind, nesterov;
    float scale;     /* 1, or -1 to maximize */
    float decay;     /* L2: weight_decay; decoupled: lr * weight_decay */
    float step_size; /* lr, including the bias correction of the first moment or Adagrad's lr_decay */
    float beta1, one_minus_beta1, beta2, one_minus_beta2;
    float denominator_scale, denominator_eps; /* Adam: divided by the step size */
    float eps;                                /* Adagrad */
    float momentum, carry, gain;              /* SGD: b = b * carry + g * gain */
    uint64_t key;                             /* of the stochastic rounding */
} opt_rule;

/* Elements stepped by one rule. Filled by opt_init_segments; it borrows the memory, which must live until the last
 * opt_run on the segment. */
typedef struct {
    void *param;
    int16_t *remainder; /* NULL: param is float32 */
    void *state[2];     /* Adam m, v; Lion m; Adagrad s; SGD b, or none */
    const void *grad;
    void *out; /* NULL: no copy of the parameter */
    uint64_t numel;
    uint64_t first_index; /* index of the first element, for stochastic rounding */
    uint64_t position;    /* in the batch's element space (kernels.c); set by opt_run */
    uint32_t rule;        /* index into the rules of opt_run */
    int grad_dtype, state_format, out_dtype;
} opt_segment;

/* Each function checks its arguments and derives the float32 scalars. `step` counts from 1. */
int opt_adam_rule(opt_rule *rule, double lr, double beta1, double beta2, double eps, double weight_decay,
                  int decoupled, int bias_correction, int maximize, int64_t step, uint64_t seed);
int opt_lion_rule(opt_rule *rule, double lr, double beta1, double beta2, double weight_decay, int maximize,
                  int64_t step, uint64_t seed);
int opt_adagrad_rule(opt_rule *rule, double lr, double lr_decay, double eps, double weight_decay,
                     int maximize, int64_t step, uint64_t seed);
int opt_sgd_rule(opt_rule *rule, double lr, double momentum, double dampening, int nesterov,
                 double weight_decay, int maximize, int64_t step, uint64_t seed);

/* Number of state arrays of the rule's optimizer: 0, 1 or 2. */
int opt_state_count(const opt_rule *rule);

/* What a segment is made of. numel may be 0; remainder and out may be 0; state arrays that the optimizer does not have
 * are ignored. */
typedef struct {
    uint32_t rule; /* index into the rules */
    int64_t numel;
    intptr_t param, remainder, state0, state1;
    int state_format;
    intptr_t grad;
    int grad_dtype;
    intptr_t out;
    int out_dtype;
    uint64_t first_index;
} opt_segment_fields;

/* Fill `count` segments, each after a check of its fields. One call for many: each call from Python releases the GIL,
 * and a busy thread may take it. Returns the number of filled segments; if it is less than count, the fields of the
 * next one were refused. */
int64_t opt_init_segments(opt_segment *segments, const opt_rule *rules, const opt_segment_fields *fields,
                          int64_t count);

/* Set the address of the gradient of segments[i], i < count. */
int opt_segment_set_grad(opt_segment *segments, uint64_t count, uint64_t i, intptr_t grad);

/* Step every segment, in one run of the pool. grad_scale is rounded to float32. Writes segments[].position: concurrent
 * calls must not share segments. */
int opt_run(opt_segment *segments, uint64_t count, const opt_rule *rules, double grad_scale);

/* The arguments of opt_run, and opt_run with them: for code that calls a function with one argument. */
typedef struct {
    opt_segment *segments;
    uint64_t count;
    const opt_rule *rules;
    double grad_scale;
} opt_step;
int opt_run_step(void *step);

/* param = master rounded to bf16 like `out`; remainder (0: none) = the signed difference. A NaN becomes the one quiet
 * NaN; opt_join restores every other value bit for bit. */
int opt_split(intptr_t param, intptr_t remainder, intptr_t master, int64_t numel);
int opt_join(intptr_t master, intptr_t param, intptr_t remainder, int64_t numel);

/* dst = src (overwrite), or dst += src, summed in float32 and rounded once to dst_dtype, to nearest even. */
int opt_accumulate(intptr_t dst, int dst_dtype, intptr_t src, int src_dtype, int64_t numel, int overwrite);

/* target = v (overwrite), or target += v, where v = (sources[0] + sources[1] + ...) * factor for each element: added in
 * that order and scaled in float32, rounded once to target_dtype, to nearest even. One pass over the memory. `count`
 * is 1 or more; no source overlaps the target. `factor` is rounded to float32. Every NaN is stored as the one quiet
 * NaN: scaling is arithmetic, also by 1. */
int opt_reduce(intptr_t target, int target_dtype, const intptr_t *sources, int64_t count, int source_dtype,
               int64_t numel, double factor, int overwrite);

/* Add the sum of squares to `sum`, which has OPT_SUM_LIMBS elements. Blocks of OPT_SQUARE_BLOCK elements start at
 * `address`; in a block, in float64, where the square of a float32 is exact, element i is added to lane i % 32 in
 * order, then the 32 lanes fold as l[i] += l[i+16], 8, 4, 2, 1. Block sums are added without rounding: so the sum does
 * not depend on their order, nor on where a tensor is cut between blocks. Limb i of `sum` counts 2^(32 i - 320) and is
 * below 2^32 afterwards. The last two limbs count the blocks whose sum is infinite, and NaN. */
int opt_sum_of_squares(intptr_t address, int dtype, int64_t numel, uint64_t *sum);

/* Add `count` block sums to `sum`: float64 numbers that were computed elsewhere, in the same order. */
int opt_add_block_sums(intptr_t sums, int64_t count, uint64_t *sum);

/* A matrix in a block format. Filled by opt_matrix_init; it borrows the memory, which must live while it is used. */
typedef struct {
    const uint8_t *codes;
    const float *scales; /* NULL: scale_codes, group_scales and offset instead */
    const uint8_t *scale_codes;
    const float *group_scales; /* one for each 256 scales */
    const float *offset;
    uint64_t rows, columns, block;
    int format;
} opt_matrix;

/* columns is a multiple of block. scales: float32 if group_scales is 0, else codes of one byte. */
int opt_matrix_init(opt_matrix *matrix, int format, int64_t rows, int64_t columns, int64_t block,
                    intptr_t codes, intptr_t scales, intptr_t group_scales, intptr_t offset);

/* Encode numel elements of src, a multiple of block, with scales in float32. */
int opt_quantize(int format, intptr_t codes, intptr_t scales, intptr_t src, int src_dtype, int64_t numel,
                 int64_t block);

/* Encode the `count` float32 scales of a tensor: codes of one byte, group scales, and the one offset. */
int opt_quantize_scales(intptr_t codes, intptr_t group_scales, intptr_t offset, intptr_t scales,
                        int64_t count);

/* dst = a part of the decoded matrix, row by row without gaps, rounded to dst_dtype, to nearest even. first_column and
 * columns are multiples of the block. */
int opt_dequantize(intptr_t dst, int dst_dtype, const opt_matrix *matrix, int64_t first_row, int64_t rows,
                   int64_t first_column, int64_t columns);

/* y = x W^T: x has `rows` rows of matrix->columns float32, y has as many rows of matrix->rows. */
int opt_quantized_product(intptr_t y, intptr_t x, int64_t rows, const opt_matrix *matrix);

/* The same with x and y in bfloat16, and W rounded to bfloat16 (see above). */
int opt_quantized_product_bf16(intptr_t y, intptr_t x, int64_t rows, const opt_matrix *matrix);

/* y = x W in bfloat16: x has `rows` rows of matrix->rows, y has as many rows of matrix->columns. */
int opt_quantized_transposed_product_bf16(intptr_t y, intptr_t x, int64_t rows, const opt_matrix *matrix);

/* The instruction set in use, chosen at first use: the widest that the CPU supports, or the one in the environment
 * variable TIERING_ISA. For an unknown or unsupported name, every kernel returns -ENOTSUP, and this function NULL. */
const char *opt_instruction_set(void);

/* Choose an instruction set by name for calls that start later. Returns 0 or -ENOTSUP. */
int opt_set_instruction_set(const char *name);

/* The i-th instruction set that this CPU supports, widest first, or NULL. */
const char *opt_available_instruction_set(int i);

/* The CPU time that the control groups of this process allow, in CPUs: the smallest quota of all groups above it;
 * infinity without one. `root` is the directory that has /proc and /sys: "" for this machine. */
double opt_cpu_quota(const char *root);

/* Threads per run, including the caller. The default, at first use, is the size of the affinity mask, or the quota,
 * rounded down, if it is smaller. */
int opt_thread_count(void);
int opt_set_thread_count(int threads); /* 1 to OPT_MAX_THREADS, or -EINVAL */

/* Between these calls, which may be nested and come from any thread, a run follows soon upon a run: threads that leave a
 * CPU free look for the next one for a while before they sleep. */
void opt_begin_step(void);
void opt_end_step(void);

/* The reason of this thread's last -EINVAL: "argument rule", a static string. */
const char *opt_invalid_argument(void);

/* CDEF END */

enum { OPT_ADAM, OPT_LION, OPT_ADAGRAD, OPT_SGD };
enum { OPT_DECAY_NONE, OPT_DECAY_L2, OPT_DECAY_DECOUPLED };

#endif
