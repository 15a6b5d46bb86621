/* isa_avx512_bf16.c - the product in bfloat16 with AVX512-BF16; dispatch.c takes all other kernels from isa_avx512.c.
 *
 * A few rows of x are multiplied with several rows of W, which are decoded in registers. */

#if defined(__x86_64__)

#include <immintrin.h>

#include "isa.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"))),       \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#endif

#include "avx512.inc"

#define FLUSHES 1
/* These instructions read and write subnormals as 0, whatever the environment is. They round to nearest even. */
INLINE vf v_add_pairs(vf sum, vi a, vi b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
INLINE vh v_to_bf16_normal(vf x) { return (vh)_mm512_cvtneps_pbh(x); }
INLINE vht vht_of_normal(vt table) { return v_to_bf16_normal(table); }

#include "load_store.inc"

#include "decode.inc"
#include "fold.inc"
#include "product_bf16.inc"

enum {
    DIRECT = 8,   /* rows of x, at most: more share a decoded panel */
    TOGETHER = 4, /* rows of W, and of x at most, whose sums are in registers */
};

/* 32 elements in their order. */
struct halves {
    __m256i low, high;
};

INLINE struct halves decode_to_registers(const int format, const uint8_t *codes,
                                         const struct block_scale *scale, vht table)
{
    vf w[2 * HALF];

    if (format == OPT_NF4) {
        __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)codes));
        return (struct halves){_mm256_permutexvar_epi16(words, table),
                               _mm256_permutexvar_epi16(_mm256_srli_epi16(words, 4), table)};
    }
    decode_group(format, codes, scale, w);
    return (struct halves){v_to_bf16_normal(w[0]), v_to_bf16_normal(w[1])};
}

/* Half of the lanes. */
INLINE __m256 add_half(__m256 sum, __m256i w, const uint16_t *x)
{
    return _mm256_dpbf16_ps(sum, (__m256bh)w, (__m256bh)_mm256_loadu_si256((const void *)x));
}

/* Adds the products of blocks [first, first + blocks) of rows of W with rows of x. To put the halves together costs more
 * than it saves with few rows of x: then each half of a sum has a register. */
INLINE void add_blocks(const opt_matrix *m, const int format, const uint64_t *rows, uint64_t first,
                       uint64_t blocks, const uint16_t *x, const int x_rows, float (*scales)[SCALES],
                       vf (*sums)[TOGETHER])
{
    const int whole = x_rows > 2;
    const uint64_t block = m->block, columns = m->columns;
    const uint64_t ahead = opt_code_bytes(format, TOGETHER * columns); /* of the next rows */
    const vt nf4 = vt_load(opt_nf4);
    const uint8_t *codes[TOGETHER];
    vf sum[TOGETHER][TOGETHER];
    __m256 low[TOGETHER][TOGETHER], high[TOGETHER][TOGETHER];

    for (int i = 0; i < TOGETHER; i++) {
        codes[i] = m->codes + opt_code_bytes(format, rows[i] * columns + first * block);
        for (int r = 0; r < x_rows; r++) {
            sum[i][r] = sums[i][r];
            low[i][r] = _mm512_castps512_ps256(sum[i][r]);
            high[i][r] = _mm512_extractf32x8_ps(sum[i][r], 1);
        }
    }
    x += first * block;
    for (uint64_t b = 0; b < blocks; b++) {
        struct block_scale scale[TOGETHER];
        vht table[TOGETHER];
        for (int i = 0; i < TOGETHER; i++) {
            scale[i] = spread_scale(format, nf4, scales[i][b]);
            table[i] = vht_of_normal(scale[i].table);
        }
        for (uint64_t left = block; left; left -= GROUP, x += GROUP)
            for (int i = 0; i < TOGETHER; i++) {
                const struct halves w = decode_to_registers(format, codes[i], &scale[i], table[i]);
                const vi both = _mm512_inserti64x4(_mm512_castsi256_si512(w.low), w.high, 1);
                __builtin_prefetch(codes[i] + ahead);
                codes[i] += opt_code_bytes(format, GROUP);
                for (int r = 0; r < x_rows; r++) {
                    const uint16_t *at = x + (uint64_t)r * columns;
                    if (whole) {
                        sum[i][r] = v_add_pairs(sum[i][r], both, _mm512_loadu_si512(at));
                    } else {
                        low[i][r] = add_half(low[i][r], w.low, at);
                        high[i][r] = add_half(high[i][r], w.high, at + 2 * 8);
                    }
                }
            }
    }
    for (int i = 0; i < TOGETHER; i++)
        for (int r = 0; r < x_rows; r++)
            sums[i][r] =
                whole ? sum[i][r] : _mm512_insertf32x8(_mm512_castps256_ps512(low[i][r]), high[i][r], 1);
}

/* Sets the outputs of TOGETHER rows of W, fewer at the end, and x_rows rows of x. Returns 0 if a scale is small. */
INLINE int multiply_directly(const struct opt_product *p, const int format, uint64_t row, uint64_t end,
                             const int x_rows)
{
    const opt_matrix *m = p->matrix;
    const uint64_t blocks = m->columns >> block_shift(m);
    uint16_t *y = p->y;
    float scales[TOGETHER][SCALES];
    vf sum[TOGETHER][TOGETHER];
    uint64_t rows[TOGETHER];

    for (int i = 0; i < TOGETHER; i++) {
        rows[i] = row + (uint64_t)i < end ? row + (uint64_t)i : end - 1;
        for (int r = 0; r < x_rows; r++)
            sum[i][r] = v_set1(0);
    }
    for (uint64_t first = 0; first < blocks; first += SCALES) {
        const uint64_t n = blocks - first < SCALES ? blocks - first : SCALES;
        for (int i = 0; i < TOGETHER; i++) {
            load_scales(m, rows[i] * blocks + first, n, scales[i]);
            if (any_small(scales[i], n, p->least_scale))
                return 0;
        }
        add_blocks(m, format, rows, first, n, p->x, x_rows, scales, sum);
    }
    for (int r = 0; r < x_rows; r++)
        for (int i = 0; i < TOGETHER; i++)
            y[(uint64_t)r * m->rows + rows[i]] = to_bf16(fold(&sum[i][r], 1));
    return 1;
}

/* x has TOGETHER rows at most. */
INLINE void multiply_few(const struct opt_product *p, const int format, uint64_t begin, uint64_t end)
{
    for (uint64_t row = begin; row < end; row += TOGETHER) {
        const int done = p->x_rows == 1   ? multiply_directly(p, format, row, end, 1)
                         : p->x_rows == 2 ? multiply_directly(p, format, row, end, 2)
                         : p->x_rows == 3 ? multiply_directly(p, format, row, end, 3)
                                          : multiply_directly(p, format, row, end, 4);
        if (!done)
            product_bf16(p, row, row + TOGETHER < end ? row + TOGETHER : end);
    }
}

static void multiply_nf4(const struct opt_product *p, uint64_t begin, uint64_t end)
{
    multiply_few(p, OPT_NF4, begin, end);
}
static void multiply_int8(const struct opt_product *p, uint64_t begin, uint64_t end)
{
    multiply_few(p, OPT_INT8, begin, end);
}
static void multiply_fp8(const struct opt_product *p, uint64_t begin, uint64_t end)
{
    multiply_few(p, OPT_FP8, begin, end);
}

static void product_avx512_bf16(const struct opt_product *p, uint64_t begin, uint64_t end)
{
    const opt_matrix *m = p->matrix;

    if (p->x_rows > DIRECT) {
        product_bf16(p, begin, end);
        return;
    }
    for (uint64_t first = 0; first < p->x_rows; first += TOGETHER) {
        struct opt_product part = *p;
        part.x = (const uint16_t *)p->x + first * m->columns;
        part.y = (uint16_t *)p->y + first * m->rows;
        part.x_rows = p->x_rows - first < TOGETHER ? p->x_rows - first : TOGETHER;
        if (m->format == OPT_NF4)
            multiply_nf4(&part, begin, end);
        else if (m->format == OPT_INT8)
            multiply_int8(&part, begin, end);
        else
            multiply_fp8(&part, begin, end);
    }
}

#if defined(__clang__)
#pragma clang attribute pop
#endif

opt_product_function *const opt_avx512_bf16_product = product_avx512_bf16;

#endif
