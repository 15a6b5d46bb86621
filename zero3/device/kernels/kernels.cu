/* kernels.cu - the optimizers' kernels and the decoding of block formats on a GPU. The formulas, their order and the
 * formats are those of optim_cpu/csrc/kernels.h. Each function here processes one element; the function of the same name
 * there processes a vector.
 *
 * cuda_library.py compiles this file at run time, with the types in memory as template parameters. No header is
 * included, because the machine may have none. Floating-point arithmetic uses intrinsics that round once, to nearest
 * even, which no compiler contracts to a fused multiply-add. The file is compiled without flush-to-zero, because GPUs
 * need not flush like a step does (kernels.h, rule 4). With a few
 * definitions in front (tests/fakes/simt.h) a C++ compiler compiles it too, for tests without a GPU.
 *
 * The structures match those of fused.py, field by field. A launch takes a table of them by value, at most 4096 bytes
 * with all arguments. So nothing is copied to the device first, and no memory must live longer than the call.
 */

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

enum { ADAM, LION, ADAGRAD, SGD };              /* opt_rule.optimizer */
enum { DECAY_NONE, DECAY_L2, DECAY_DECOUPLED }; /* opt_rule.decay_kind */
enum { FP32, BF16, FP16 };                      /* types in memory */
enum { STATE_FP32, STATE_BF16, STATE_BF16_STOCHASTIC };
enum { NF4, INT8, FP8 }; /* block formats */

/* Threads of a block; elements of a thread; elements of a block. */
enum { THREADS = 256, EACH = 4, CHUNK = THREADS * EACH };
enum { LANES = 32, SQUARE_BLOCK = 4096, WARPS = THREADS / LANES };
enum { SCALE_GROUP = 256 }; /* scales that share a group scale */
enum { MOST_SEGMENTS = 40, MOST_FLATS = 128, MOST_SOURCES = 256 };

struct Rule {
    float scale, decay, step_size, beta1, one_minus_beta1, beta2, one_minus_beta2;
    float denominator_scale, denominator_eps, eps, momentum, carry, gain;
    int decay_kind, nesterov;
};

struct Segment {
    void *param, *remainder, *state0, *state1;
    const void *grad;
    void *out;                    /* or NULL */
    u64 numel, first;             /* block of threads of the launch */
    u32 index, key_low, key_high; /* of the random bits; index: the lower half of the first element's index */
    int out_dtype;
};

struct Segments {
    u64 count;
    Segment of[MOST_SEGMENTS];
};

struct Flat {
    const void *data;
    u64 numel, first; /* block of elements of the launch */
};

struct Flats {
    u64 count, blocks;
    Flat of[MOST_FLATS];
};

struct Sources {
    u64 count;
    const void *of[MOST_SOURCES];
};

/* A part of a matrix in a block format: `rows` rows of `columns` elements, whose element (0, 0) is `first` of all. Rows
 * are `stride` elements apart. Each row of the part takes `row_blocks` blocks of threads. */
struct Part {
    const unsigned char *codes;
    const float *scales; /* or NULL: scale_codes, group_scales and offset instead */
    const unsigned char *scale_codes;
    const float *group_scales, *offset;
    const float *values; /* of NF4: the 16 of the codebook */
    const float *map;    /* of scale_codes: 256 */
    u64 first, columns, stride;
    u32 row_blocks, block_shift; /* log2 of the elements that share a scale */
};

/* The position in a table of the entry with block `number`. */
template <class Table> __device__ int place_of(const Table &table, u64 number)
{
    int low = 0, high = (int)table.count;

    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (table.of[middle].first <= number)
            low = middle;
        else
            high = middle;
    }
    return low;
}

__device__ float from_fp16(u16 h)
{
    u32 sign = (u32)(h & 0x8000) << 16, magnitude = h & 0x7FFF;
    u32 normal = (magnitude << 13) + (112u << 23); /* exponent bias 15 -> 127 */
    u32 subnormal = __float_as_uint(__fmul_rn((float)magnitude, 5.9604644775390625e-8f)); /* 2^-24: exact */
    u32 special = (magnitude << 13) | 0x7F800000 | (magnitude > 0x7C00 ? 0x400000 : 0);

    return __uint_as_float(sign | (magnitude >= 0x7C00 ? special : magnitude >= 0x400 ? normal : subnormal));
}

__device__ u16 to_fp16(float x)
{
    u32 bits = __float_as_uint(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
    u32 normal = (magnitude - (112u << 23) + 0xFFF + (magnitude >> 13 & 1)) >> 13;
    /* The last place of 0.5f is one unit of a subnormal half, so the addition rounds. */
    u32 subnormal = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), 0.5f)) - 0x3F000000;
    u32 finite = magnitude < 0x38800000 ? subnormal : normal;
    u32 nan = 0x7E00 | (magnitude >> 13 & 0x3FF);

    return (u16)(sign | (magnitude > 0x7F800000 ? nan : magnitude >= 0x477FF000 ? 0x7C00 : finite));
}

__device__ u16 to_bf16(float x)
{
    u32 bits = __float_as_uint(x), upper = bits >> 16;

    return (u16)(x != x ? upper | 0x40 : (bits + 0x7FFF + (upper & 1)) >> 16);
}

/* Rounds x: adds `below` under the last place, and cuts. HALF rounds ties away from zero. A NaN must be canonical. */
constexpr u32 HALF = 0x8000;
__device__ u16 to_bf16_by(float x, u32 below) { return (u16)((__float_as_uint(x) + below) >> 16); }

__device__ float canonical(float x) { return x != x ? __uint_as_float(0x7FC00000) : x; }

/* The index that a thread past the end reads. The loads of all elements of a thread follow each other without a branch,
 * so that they are in flight together and the thread waits for memory once. */
__device__ u64 within(u64 i, u64 numel) { return i < numel ? i : numel - 1; }

template <int DTYPE> __device__ float load(const void *from, u64 i)
{
    if (DTYPE == FP32)
        return ((const float *)from)[i];
    u16 half = ((const u16 *)from)[i];
    return DTYPE == BF16 ? __uint_as_float((u32)half << 16) : from_fp16(half);
}

template <int DTYPE> __device__ void store(void *to, u64 i, float x)
{
    if (DTYPE == FP32)
        ((float *)to)[i] = x;
    else
        ((u16 *)to)[i] = DTYPE == BF16 ? to_bf16(x) : to_fp16(x);
}

/* The operations of a step (numbers.inc). Their operands are flushed already. */
constexpr float SCALE = 18446744073709551616.0f; /* 2^64 */
constexpr u32 LEAST_NORMAL = 1u << 23,
              LEAST_SCALED = 65u << 23; /* the bits of 2^-126, and of SCALE times that */

__device__ u32 magnitude(float x) { return __float_as_uint(x) & 0x7FFFFFFF; }
__device__ float zero_of(float x) { return __uint_as_float(__float_as_uint(x) & 0x80000000); }
__device__ float flush(float x) { return magnitude(x) < LEAST_NORMAL ? zero_of(x) : x; }
__device__ float plus(float a, float b) { return flush(__fadd_rn(a, b)); }
__device__ float minus(float a, float b) { return flush(__fsub_rn(a, b)); }

/* Whether r is rounded to the least normal number or below, and is not zero. It has all 24 bits only if it is scaled. */
__device__ bool is_least(float r) { return magnitude(r) - 1 < LEAST_NORMAL; }
__device__ bool is_subnormal(float scaled) { return magnitude(scaled) < LEAST_SCALED; }

__device__ float times(float a, float b)
{
    float r = __fmul_rn(a, b);

    return is_least(r) && is_subnormal(__fmul_rn(__fmul_rn(a, SCALE), b)) ? zero_of(r) : r;
}

__device__ float over(float a, float b)
{
    float r = __fdiv_rn(a, b);

    return is_least(r) && is_subnormal(__fdiv_rn(__fmul_rn(a, SCALE), b)) ? zero_of(r) : r;
}

/* a + (b - a) * weight, in the form with the smaller error. beta is 1 - weight. */
__device__ float toward(float a, float b, float weight, float beta)
{
    if (beta >= 0.5f)
        return plus(a, times(minus(b, a), weight));
    return plus(times(a, beta), times(b, weight));
}

struct Element {
    float param, grad, state0, state1;
};

template <int OPTIMIZER, int STATES> __device__ float update(Element &e, float g, const Rule &rule)
{
    if (OPTIMIZER == ADAM) {
        e.state0 = toward(e.state0, g, rule.one_minus_beta1, rule.beta1);
        e.state1 = toward(e.state1, times(g, g), rule.one_minus_beta2, rule.beta2);
        float root = times(__fsqrt_rn(e.state1), rule.denominator_scale);
        return over(e.state0, plus(root, rule.denominator_eps));
    }
    if (OPTIMIZER == LION) {
        float x = toward(e.state0, g, rule.one_minus_beta1, rule.beta1);
        e.state0 = toward(e.state0, g, rule.one_minus_beta2, rule.beta2);
        return times(rule.step_size, x > 0 ? 1.0f : x < 0 ? -1.0f : x);
    }
    if (OPTIMIZER == ADAGRAD) {
        e.state0 = plus(e.state0, times(g, g));
        return times(rule.step_size, over(g, plus(__fsqrt_rn(e.state0), rule.eps)));
    }
    if (STATES) {
        e.state0 = plus(times(e.state0, rule.carry), times(g, rule.gain));
        g = rule.nesterov ? plus(g, times(e.state0, rule.momentum)) : e.state0;
    }
    return times(rule.step_size, g);
}

template <int OPTIMIZER, int STATES> __device__ void step_element(Element &e, const Rule &rule)
{
    e = {flush(e.param), flush(e.grad), flush(e.state0), flush(e.state1)};
    float g = times(e.grad, rule.scale);

    if (rule.decay_kind == DECAY_L2)
        g = plus(g, times(rule.decay, e.param));
    float u = update<OPTIMIZER, STATES>(e, g, rule);
    if (rule.decay_kind == DECAY_DECOUPLED)
        u = plus(u, times(rule.decay, e.param));
    e.param = canonical(minus(e.param, u));
    e.state0 = canonical(e.state0);
    e.state1 = canonical(e.state1);
}

__device__ u32 random_bits(u32 index, const Segment &s)
{
    u32 x = index ^ s.key_low;

    x = (x ^ x >> 16) * 0x21F0AAADu;
    x = (x ^ x >> 15 ^ s.key_high) * 0xD35A2D97u;
    return x ^ x >> 15;
}

template <int STATES, int FORMAT, int SPLIT, int GRAD>
__device__ Element load_element(const Segment &s, u64 i)
{
    constexpr int STATE = FORMAT == STATE_FP32 ? FP32 : BF16;
    Element e = {};

    if (SPLIT)
        e.param = __uint_as_float(((u32)((u16 *)s.param)[i] << 16) + (u32)((short *)s.remainder)[i]);
    else
        e.param = load<FP32>(s.param, i);
    e.grad = load<GRAD>(s.grad, i);
    if (STATES > 0)
        e.state0 = load<STATE>(s.state0, i);
    if (STATES > 1)
        e.state1 = load<STATE>(s.state1, i);
    return e;
}

template <int FORMAT> __device__ void store_state(void *to, u64 i, float x, u32 below)
{
    if (FORMAT == STATE_FP32)
        ((float *)to)[i] = x;
    else
        ((u16 *)to)[i] = to_bf16_by(x, below);
}

/* Rounds to bfloat16, with ties away from zero, as for the upper half of a split. */
__device__ void store_out(const Segment &s, u64 i, float param)
{
    if (s.out_dtype == BF16)
        ((u16 *)s.out)[i] = to_bf16_by(param, HALF);
    else if (s.out_dtype == FP16)
        store<FP16>(s.out, i, param);
    else
        store<FP32>(s.out, i, param);
}

template <int STATES, int FORMAT, int SPLIT>
__device__ void store_element(const Segment &s, u64 i, const Element &e)
{
    const int by_chance = FORMAT == STATE_BF16_STOCHASTIC;
    u32 random = by_chance ? random_bits(s.index + (u32)i, s) : 0;

    if (STATES > 0)
        store_state<FORMAT>(s.state0, i, e.state0, by_chance ? random & 0xFFFF : HALF);
    if (STATES > 1)
        store_state<FORMAT>(s.state1, i, e.state1, by_chance ? random >> 16 : HALF);
    if (SPLIT) {
        ((u16 *)s.param)[i] = to_bf16_by(e.param, HALF);
        ((u16 *)s.remainder)[i] = (u16)__float_as_uint(e.param);
    } else {
        ((float *)s.param)[i] = e.param;
    }
    if (s.out)
        store_out(s, i, e.param);
}

/* One step of a table of segments. Each block of threads processes one chunk. `out` may be equal to `grad`, because
 * each element is read before it is written. */
template <int OPTIMIZER, int STATES, int FORMAT, int SPLIT, int GRAD>
__global__ void __launch_bounds__(THREADS) step(const Rule rule, const Segments segments)
{
    const Segment &s = segments.of[place_of(segments, blockIdx.x)];
    u64 first = (blockIdx.x - s.first) * CHUNK + threadIdx.x;
    Element e[EACH];

#pragma unroll
    for (int j = 0; j < EACH; j++)
        e[j] = load_element<STATES, FORMAT, SPLIT, GRAD>(s, within(first + j * THREADS, s.numel));
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        step_element<OPTIMIZER, STATES>(e[j], rule);
        if (first + j * THREADS < s.numel)
            store_element<STATES, FORMAT, SPLIT>(s, first + j * THREADS, e[j]);
    }
}

/* target = source, or += source with a float32 sum. Rounds once, to nearest even. */
template <int TARGET, int SOURCE, int OVERWRITE>
__global__ void __launch_bounds__(THREADS) accumulate(void *target, const void *source, u64 numel)
{
    u64 first = (u64)blockIdx.x * CHUNK + threadIdx.x;
    float x[EACH];

#pragma unroll
    for (int j = 0; j < EACH; j++) {
        u64 i = within(first + j * THREADS, numel);
        x[j] = load<SOURCE>(source, i);
        if (!OVERWRITE)
            x[j] = canonical(__fadd_rn(load<TARGET>(target, i), x[j]));
    }
#pragma unroll
    for (int j = 0; j < EACH; j++)
        if (first + j * THREADS < numel)
            store<TARGET>(target, first + j * THREADS, x[j]);
}

/* target = v, or += v, where v is (sources[0] + sources[1] + ...) * factor in float32. Rounds once, to nearest even. */
template <int TARGET, int SOURCE, int OVERWRITE>
__global__ void __launch_bounds__(THREADS)
    reduce(void *target, const Sources sources, float factor, u64 numel)
{
    u64 first = (u64)blockIdx.x * CHUNK + threadIdx.x;
    float x[EACH];

    for (int j = 0; j < EACH; j++)
        x[j] = -0.0f; /* the neutral element; 0 would turn a -0 into 0 */
#pragma unroll 4
    for (u32 source = 0; source < sources.count; source++)
#pragma unroll
        for (int j = 0; j < EACH; j++)
            x[j] = __fadd_rn(x[j], load<SOURCE>(sources.of[source], within(first + j * THREADS, numel)));
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        u64 i = first + j * THREADS;
        x[j] = __fmul_rn(x[j], factor);
        if (!OVERWRITE)
            x[j] = __fadd_rn(load<TARGET>(target, within(i, numel)), x[j]);
        if (i < numel)
            store<TARGET>(target, i, canonical(x[j]));
    }
}

/* The sums of squares of all blocks of a table of flat tensors. Each warp sums one block, with its threads as lanes. A
 * square is exact in double, so a fused multiply-add rounds like the addition. */
template <int DTYPE> __global__ void __launch_bounds__(THREADS) block_squares(const Flats flats, double *sums)
{
    u64 block = (u64)blockIdx.x * WARPS + threadIdx.x / LANES;
    u32 lane = threadIdx.x % LANES;

    if (block >= flats.blocks) /* the whole warp */
        return;
    const Flat &flat = flats.of[place_of(flats, block)];
    u64 begin = (block - flat.first) * SQUARE_BLOCK, rest = flat.numel - begin;
    u32 n = rest < SQUARE_BLOCK ? (u32)rest : (u32)SQUARE_BLOCK;
    double sum = 0;

#pragma unroll 8
    for (u32 i = lane; i < n; i += LANES) {
        double x = load<DTYPE>(flat.data, begin + i);
        sum = __fma_rn(x, x, sum);
    }
    for (int half = LANES / 2; half; half /= 2)
        sum = __dadd_rn(sum, __shfl_down_sync(0xFFFFFFFFu, sum, half));
    if (lane == 0)
        sums[block] = sum;
}

__device__ float scale_of(const Part &p, u64 block)
{
    if (p.scales)
        return p.scales[block];
    return __fadd_rn(__fmul_rn(p.map[p.scale_codes[block]], p.group_scales[block / SCALE_GROUP]), *p.offset);
}

/* The value of the code of element i. NF4: byte i of 16 has elements i and i + 16 of 32. */
template <int FORMAT> __device__ float value_of(const Part &p, u64 i)
{
    if (FORMAT == NF4) {
        u32 both = p.codes[i / 32 * 16 + i % 16];
        return p.values[i % 32 < 16 ? both & 15 : both >> 4];
    }
    u32 code = p.codes[i];
    if (FORMAT == INT8)
        return (float)(signed char)code;
    /* An fp16 has the same bits, two places up, times 2^-8. */
    return __fmul_rn(from_fp16((u16)((code & 0x80) << 8 | (code & 0x7F) << 7)), 256.0f);
}

/* to = the part, decoded, row by row. A block with a scale that is not finite is NaN. Rounds to nearest even. */
template <int FORMAT, int TARGET> __global__ void __launch_bounds__(THREADS) decode(void *to, const Part p)
{
    u64 row = blockIdx.x / p.row_blocks, first = (u64)(blockIdx.x % p.row_blocks) * CHUNK + threadIdx.x;
    float x[EACH];

#pragma unroll
    for (int j = 0; j < EACH; j++) {
        u64 i = p.first + row * p.stride + within(first + j * THREADS, p.columns);
        float scale = scale_of(p, i >> p.block_shift);
        x[j] = __fmul_rn(value_of<FORMAT>(p, i), scale);
        x[j] = scale - scale == 0 ? x[j] : __uint_as_float(0x7FC00000);
    }
#pragma unroll
    for (int j = 0; j < EACH; j++)
        if (first + j * THREADS < p.columns)
            store<TARGET>(to, row * p.columns + first + j * THREADS, x[j]);
}
