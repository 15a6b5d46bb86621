/* kernels.h - the CPU optimizer arithmetic, as the outside sees it.
 *
 * Every kernel is one pass over flat memory and knows nothing of tensors, tiers or Python. Three rules hold for all:
 *
 * 1. Arithmetic is float32 in one written order. Each multiply, add, subtract, divide and square root rounds once, to
 *    nearest even; there is no fused multiply-add, and subnormals count. Results are therefore the same to the bit for
 *    every instruction set, thread count and tile boundary, and for a float32 numpy transcription of the formulas
 *    below. The price is nothing: the kernels wait for memory.
 * 2. A NaN that arithmetic produces is stored as the one quiet NaN 0x7FC00000 (bf16 0x7FC0, fp16 0x7E00). Hardware
 *    lets the operand order pick sign and payload, and compilers swap operands; this keeps rule 1 true for NaN too.
 *    Pure casts keep sign and the upper payload bits, made quiet.
 * 3. The caller's floating-point environment does not leak in (flush-to-zero is per thread, and torch can set it),
 *    nor is it changed: the default is set around each thread's share and around the scalars' derivation, and what was
 *    there is restored.
 *
 * Optimizers. For each element; t is the number of the step taken, from 1:
 *
 *     g = float32(grad) * scale        scale: unscale and clip factor in one number; negated to maximize
 *     g = g + weight_decay * p         L2 decay only
 *
 *     Adam      m = toward(m, g, beta1)
 *               v = toward(v, g * g, beta2)
 *               u = m / (sqrt(v) * (1 / (size * sqrt(1-beta2^t))) + (eps / size)), size being lr / (1-beta1^t)
 *     Lion      u = lr * sign(toward(m, g, beta1))          zeros and NaN are their own sign
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
 * where toward(a, b, beta) = a + (b - a) * (1-beta) if beta >= 0.5, else a * beta + b * (1-beta). What depends on
 * hyperparameters alone (the parentheses above without an element in them) is computed in double, with libm's pow, and
 * rounded to float32 once. These forms were chosen for their error: toward() multiplies no rounded beta by the large
 * old value, and decay enters before the one rounding at the size of p.
 *
 * Where numbers end. Nothing is skipped or clamped: to skip a step with such gradients, look at opt_sum_of_squares
 * first. A NaN gradient makes its element NaN at once. An infinite one does so too in Adam and Adagrad, in Lion at the
 * next step; SGD's parameter becomes infinite. A finite gradient whose square overflows makes the second moment
 * infinite: Adam's element is NaN at the next step (for beta2 < 0.5 it stands still), Adagrad's stands still. An
 * infinite parameter stays infinite without weight decay. Where Adam's factor of sqrt(v) is beyond float32 (lr is 0,
 * or nearly) it is 0 and the other term infinite: no step, even where v is 0. Only eps keeps u from being m / 0.
 *
 * Formats. A segment's parameter is float32 (`remainder` NULL), or split: `param` holds bfloat16 and `remainder` the
 * rest, so that  bits(float32) = (bits(bf16) << 16) + remainder,  remainder being a signed 16-bit integer. Both
 * together are the float32, exactly, so a split parameter is stepped to the same bits as a float32 one.
 * `out`, and the upper half of a split, are the parameter rounded to nearest, ties away from zero (bf16), because with
 * ties to even 65537 float32 values round to each even bf16, one more than 16 bits can tell apart. fp16 rounds ties
 * to even. State is float32, or bfloat16: widened, used, and rounded back as `out` is, or stochastically. The
 * stochastic rounding adds 16 random bits below the bf16's last place and cuts; they come from a counter-based hash
 *
 *     key = mix(mix(seed) + t), mix being splitmix64's finalizer; index = first_index + position in the segment
 *     key = mix(key + (index >> 32)); x = low32(index) ^ low32(key)
 *     x ^= x >> 16; x *= 0x21F0AAAD; x ^= x >> 15; x ^= high32(key); x *= 0xD35A2D97; x ^= x >> 15
 *
 * whose lower half rounds the first state and whose upper half rounds the second.
 *
 * Rules of use. Addresses need element alignment only. Ranges must not overlap, with one exception: `out` may be
 * exactly `grad` if their dtypes are equally wide. State starts as zeros. Memory is only touched during the call. Any
 * thread may call anything at any time; calls on disjoint memory run side by side. Functions return >= 0 or -errno;
 * after -EINVAL, opt_invalid_argument() says which argument, and which rule it broke. Nothing prints, exits or asserts.
 *
 * Sources: Adam, Kingma and Ba 2015; AdamW, Loshchilov and Hutter 2019; Lion, Chen et al. 2023; Adagrad, Duchi et al.
 * 2011; SGD with momentum and dampening as torch.optim.SGD has it. The hash's constants: github.com/skeeto/
 * hash-prospector, "lowbias32", issue 19.
 */
#ifndef OPTIM_CPU_KERNELS_H
#define OPTIM_CPU_KERNELS_H

#include <stdint.h>

/* CDEF BEGIN: build_optim.py hands everything up to CDEF END to cffi */

enum { OPT_FP32, OPT_BF16, OPT_FP16 };
enum { OPT_STATE_FP32, OPT_STATE_BF16, OPT_STATE_BF16_STOCHASTIC };

#define OPT_SQUARE_BLOCK 4096
#define OPT_MAX_THREADS 4096

/* An optimizer with its hyperparameters at one step. Filled by opt_<optimizer>_rule; owns nothing. */
typedef struct {
    int optimizer, decay_kind, nesterov;
    float scale;     /* 1, or -1 to maximize */
    float decay;     /* L2: weight_decay; decoupled: lr * weight_decay */
    float step_size; /* lr, with the bias correction of the first moment or Adagrad's lr_decay in it */
    float beta1, one_minus_beta1, beta2, one_minus_beta2;
    float denominator_scale, denominator_eps; /* Adam's, over the step size */
    float eps;                                /* Adagrad's */
    float momentum, carry, gain;              /* b = b * carry + g * gain */
    uint64_t key;                             /* of the stochastic rounding */
} opt_rule;

/* Elements stepped by one rule. Filled by opt_segment_init; holds addresses, owns nothing. */
typedef struct {
    void *param;
    int16_t *remainder; /* NULL: param is float32 */
    void *state[2];     /* as many as the optimizer has: Adam m, v; Lion m; Adagrad s; SGD b, or none */
    const void *grad;
    void *out; /* NULL: no copy-out */
    uint64_t numel;
    uint64_t first_index; /* of the first element, for stochastic rounding */
    uint64_t position;    /* in the batch's element space; set by opt_run */
    uint32_t rule;        /* index into the rules given to opt_run */
    int grad_dtype, state_format, out_dtype;
} opt_segment;

/* Each checks its arguments and derives the float32 scalars. `step` counts from 1. */
int opt_adam_rule(opt_rule *rule, double lr, double beta1, double beta2, double eps, double weight_decay,
                  int decoupled, int maximize, int64_t step, uint64_t seed);
int opt_lion_rule(opt_rule *rule, double lr, double beta1, double beta2, double weight_decay, int maximize,
                  int64_t step, uint64_t seed);
int opt_adagrad_rule(opt_rule *rule, double lr, double lr_decay, double eps, double weight_decay,
                     int maximize, int64_t step, uint64_t seed);
int opt_sgd_rule(opt_rule *rule, double lr, double momentum, double dampening, int nesterov,
                 double weight_decay, int maximize, int64_t step, uint64_t seed);

/* How many state arrays the rule's optimizer has: 0, 1 or 2. */
int opt_state_count(const opt_rule *rule);

/* Checks the arguments against rules[rule]. numel may be 0; remainder and out may be 0; state arrays that the optimizer
 * does not have are ignored. */
int opt_segment_init(opt_segment *segment, const opt_rule *rules, uint32_t rule, int64_t numel,
                     intptr_t param, intptr_t remainder, intptr_t state0, intptr_t state1, int state_format,
                     intptr_t grad, int grad_dtype, intptr_t out, int out_dtype, uint64_t first_index);

/* The gradient of segments[i], of `count`, is at another address now. */
int opt_segment_set_grad(opt_segment *segments, uint64_t count, uint64_t i, intptr_t grad);

/* Steps every segment, in one run of the pool. grad_scale is rounded to float32. */
int opt_run(opt_segment *segments, uint64_t count, const opt_rule *rules, double grad_scale);

/* param = master rounded as an optimizer's `out`, in bf16; remainder (0: not wanted) the signed rest. A NaN becomes
 * the one quiet NaN; every other value comes back from opt_join to the bit. */
int opt_split(intptr_t param, intptr_t remainder, intptr_t master, int64_t numel);
int opt_join(intptr_t master, intptr_t param, intptr_t remainder, int64_t numel);

/* dst = src (overwrite), or dst += src with the sum formed in float32 and rounded once to dst_dtype, to nearest even.
 */
int opt_accumulate(intptr_t dst, int dst_dtype, intptr_t src, int src_dtype, int64_t numel, int overwrite);

/* target = v (overwrite), or target += v, where v = (sources[0] + sources[1] + ...) * factor for each element: added in
 * that order and scaled in float32, rounded once to target_dtype, to nearest even. One pass over the memory. Of the
 * `count` sources, 1 or more, none overlaps the target. `factor` is rounded to float32. Every NaN is stored as the one
 * quiet NaN: scaling is arithmetic, by 1 too. */
int opt_reduce(intptr_t target, int target_dtype, const intptr_t *sources, int64_t count, int source_dtype,
               int64_t numel, double factor, int overwrite);

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

enum { OPT_ADAM, OPT_LION, OPT_ADAGRAD, OPT_SGD };
enum { OPT_DECAY_NONE, OPT_DECAY_L2, OPT_DECAY_DECOUPLED };

#endif
