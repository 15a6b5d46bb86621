/* isa.h - the interface of a unit per instruction set (isa_*.c) to kernels.c, and declarations that all units share.
 *
 * A unit defines the vector operations below and includes unit.inc, which includes all loop bodies (*.inc), so that
 * each formula is written once:
 *
 *     LANES                        float32 elements in a vector
 *     vf, vh, vi                   vector of LANES float32; of LANES 16-bit values; of LANES uint32_t
 *     v_set1 v_load v_store        float32, any alignment
 *     v_load_half v_store_half     16-bit, any alignment
 *     STREAMS                      1 if there are stores past the cache:
 *     v_stream_half v_fence        16-bit, address aligned to the vector; v_fence orders these stores
 *     v_add v_sub v_mul v_div v_sqrt    one rounding each
 *     FLUSHES                      1 if they flush subnormals in the environment of a step (fp_environment.h); else
 *     v_zero_below(x, y, least)    x, or the zero of its sign where the magnitude of y is below that of `least`
 *     v_fma(a, b, c)               a * b + c with one rounding, for numbers that a bfloat16 can hold as a and b
 *     v_total                      the sum of the lanes: l[i] += l[i + n], n being LANES / 2, .. 2, 1
 *     v_sign                       -1, 0, 1; NaN stays NaN
 *     v_canonical                  NaN -> the one quiet NaN
 *     v_from_bf16 v_to_bf16 v_from_fp16 v_to_fp16    nearest even, NaN stays NaN
 *     v_bits v_of_bits             the same bits as vi, as vf
 *     vi_set1 vi_add vi_mul vi_and vi_xor    modulo 2^32
 *     vi_srl vi_sll                shift right, left by a constant, zeros in
 *     vi_max                       of signed numbers
 *     vi_add_if_less(vi n, vf a, vf b)    n + 1 where a < b, n elsewhere
 *     vi_iota                      0, 1, .. LANES-1
 *     vi_to_half, vi_upper_half    the lower, the upper 16 bits of each lane
 *     vi_load_bytes                LANES bytes, zeros above
 *     vi_store_bytes               the lower 8 bits of each lane to memory
 *     v_from_int8                  from LANES signed bytes in memory
 *     v_from_e4m3                  from LANES bytes in memory, times 2^-8: an fp16 has the same bits, two places up
 *     vt, vt_load                  a table of 16 float32, from memory
 *     vt_scale(vt, vf)             every value times a vector of equal lanes
 *     vt_at(vt, vi)                the value at the lower 4 bits of each lane
 *     vht, vht_of(vt)              the same table, rounded to bfloat16
 *     vht_store(to, codes, vht)    32 values to memory: those at the lower 4 bits of 16 codes, then at the upper 4 bits
 *     TILE_ROWS                    rows and columns of the outputs whose sums are in registers
 *     v_any_nan(vf a, vf b)        whether a lane is NaN; a unit without a cheap test returns 1
 *
 * and, for 2 * LANES elements in two vectors a and b (a `pair`), whose lanes may have an order other than memory's:
 *
 *     pair_from_bf16               from 16-bit memory
 *     pair_join                    from a split's two halves in memory
 *     pair_store_upper, _lower     the upper, the lower 16 bits to memory
 *     GROUPED                      1 if that order is not the one in memory:
 *     pair_group, pair_ungroup     from memory's order to the unit's, and back
 *     pair_places                  the index in memory's order of each lane, as two vi
 *
 *     vd, DOUBLE_LANES             vector of float64, elements in it; LANES is a multiple
 *     v_add_squares(vd *acc, vf)   adds the squares of the LANES elements to LANES / DOUBLE_LANES accumulators
 *     vd_store                     float64, any alignment
 *
 * All units are built with the same compiler flags; each sets its target by pragma, after the shared headers and
 * before its first function. All functions of a unit are static, except its table: the linker could otherwise merge a
 * function of two units, and a CPU would run instructions that it does not support.
 */
#ifndef OPTIM_CPU_ISA_H
#define OPTIM_CPU_ISA_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels.h"

/* unused: no unit uses all of these functions. */
#define INLINE static inline __attribute__((always_inline, unused))
#define UNLIKELY(condition) __builtin_expect((condition), 0)

/* Iterations access distinct elements, which the compiler cannot prove for six pointers. */
#if defined(__clang__)
#define INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety)")
#pragma clang diagnostic ignored "-Wpass-failed" /* only the portable unit's loops can be vectorised */
#else
#define INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#endif

#if defined(__aarch64__) && !defined(__AARCH64EB__)
#define OPT_HAS_NEON
#endif

/* One call of opt_reduce. */
struct opt_reduction {
    char *target;
    const intptr_t *sources;
    uint64_t count, numel; /* sources; elements of each */
    double factor; /* rounded to float32 in a tile, because the caller's environment might flush subnormals */
    int target_dtype, source_dtype, overwrite;
};

/* A part of a matrix that is decoded to dst. */
struct opt_part {
    const opt_matrix *matrix;
    uint64_t first_row, rows, first_column, columns;
    char *dst;
    int dst_dtype;
};

/* y = x W^T or, transposed, y = x W; x and y are both in float32, or both in bfloat16.
 *
 * `least_scale`, for bfloat16, bounds the scales that instructions which flush subnormals may use: with a larger one, or
 * 0, a product of a decoded weight with x is 0 or a multiple of the least normal float32, and so are sums. */
struct opt_product {
    const opt_matrix *matrix;
    const void *x;
    void *y;
    uint64_t x_rows;
    float least_scale;
};

/* Computes the outputs of rows [begin, end) of the matrix; transposed, of columns. */
typedef void opt_product_function(const struct opt_product *product, uint64_t begin, uint64_t end);

struct opt_kernels {
    const char *name;
    void (*step)(const opt_segment *segment, const opt_rule *rule, float grad_scale, uint64_t begin,
                 uint64_t end);
    void (*split)(uint16_t *param, int16_t *remainder, const float *master, uint64_t numel);
    void (*join)(float *master, const uint16_t *param, const int16_t *remainder, uint64_t numel);
    void (*accumulate)(void *dst, int dst_dtype, const void *src, int src_dtype, uint64_t numel,
                       int overwrite);
    void (*reduce)(const struct opt_reduction *reduction, uint64_t begin, uint64_t end);
    void (*block_squares)(const void *src, int dtype, uint64_t numel, double *block_sums);
    void (*quantize)(int format, uint8_t *codes, float *scales, const void *src, int src_dtype,
                     uint64_t numel, uint64_t block);
    void (*dequantize)(const struct opt_part *part, uint64_t begin, uint64_t end); /* rows of it */
    opt_product_function *product, *product_bf16, *transposed_bf16;
};

extern const struct opt_kernels opt_portable;
#if defined(__x86_64__)
extern const struct opt_kernels opt_avx2, opt_avx512;
extern opt_product_function *const opt_avx512_bf16_product, *const opt_avx512_bf16_transposed;
#elif defined(OPT_HAS_NEON)
extern const struct opt_kernels opt_neon;
#endif

/* The table in use, or NULL if TIERING_ISA names an instruction set that is unknown or not supported. */
const struct opt_kernels *opt_selected(void);

static inline size_t opt_element_size(int dtype) { return dtype == OPT_FP32 ? 4 : 2; }

/* Bytes of `numel` codes of a block format, a multiple of 32. */
static inline uint64_t opt_code_bytes(int format, uint64_t numel)
{
    return format == OPT_NF4 ? numel / 2 : numel;
}

/* NF4's codebook with its midpoints, and the dynamic map of scales; all ascending. */
extern const float opt_nf4[16], opt_nf4_midpoints[15];
const float *opt_dynamic_map(void);

/* The finalizer of splitmix64. */
static inline uint64_t opt_mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

#endif
