/* isa_avx512_bf16.c - the products in bfloat16 with AVX512-BF16; dispatch.c takes all other kernels from isa_avx512.c.
 *
 * Rows of W are decoded in registers, where a tile of outputs has its sums: enough of them to hide an instruction's
 * latency, and for more rows of x than of W, because to decode takes longer than to load. */

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
#include "transposed_bf16.inc"

/* A tile in registers is W_ROWS rows of W with up to X_FEW rows of x, or one row less with up to X_TILE. */
enum {
    W_ROWS = 4,
    X_FEW = 4,
    X_TILE = 8,
    DIRECT = 16, /* rows of x: more share a decoded panel, except with NF4, which is only looked up */
};

/* Rows of W with their scales in up to SCALES blocks, and their sums with all rows of x. */
struct strip {
    uint64_t rows[W_ROWS];
    float scales[W_ROWS][SCALES];
    vht tables[W_ROWS][SCALES]; /* NF4, for more than one tile */
    vf sums[X_ROWS][W_ROWS];
};

INLINE vf upper_half(vf x) { return _mm512_castps256_ps512(_mm512_extractf32x8_ps(x, 1)); }
INLINE vf join_halves(vf low, vf high) { return _mm512_insertf32x8(low, _mm512_castps512_ps256(high), 1); }

/* sum + the products of the pairs of w and x, in the lower half of the lanes. */
INLINE vf add_half(vf sum, __m256i w, const uint16_t *x)
{
    const __m256bh pairs = (__m256bh)_mm256_loadu_si256((const void *)x);

    return _mm512_castps256_ps512(_mm256_dpbf16_ps(_mm512_castps512_ps256(sum), (__m256bh)w, pairs));
}

/* NF4: the products of a group with rows of x, to the lower and upper halves of their sums. */
INLINE void add_halves(const uint8_t *codes, vht table, const uint16_t *x, uint64_t columns, const int x_rows,
                       vf *low, vf *high)
{
    const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)codes));
    const __m256i lower = _mm256_permutexvar_epi16(words, table);
    const __m256i upper = _mm256_permutexvar_epi16(_mm256_srli_epi16(words, 4), table);

    for (int r = 0; r < x_rows; r++, x += columns) {
        low[r] = add_half(low[r], lower, x);
        high[r] = add_half(high[r], upper, x + GROUP / 2);
    }
}

/* 32 elements in their order. */
INLINE vi decode_to_register(const int format, const uint8_t *codes, const struct block_scale *scale,
                             vht table)
{
    vf w[2 * HALF];

    if (format == OPT_NF4) {
        const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)codes));
        const vi shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
        return _mm512_permutexvar_epi16(_mm512_srlv_epi16(_mm512_cvtepu8_epi16(twice), shifts),
                                        _mm512_broadcast_i64x4(table));
    }
    decode_group(format, codes, scale, w);
    return (vi)_mm512_cvtne2ps_pbh(w[1], w[0]);
}

/* Adds the products of blocks [first, first + blocks) of w_rows rows of W with x_rows rows of x, from `row` on. With one
 * or two of these, to put halves of NF4 together takes longer than it saves: then `rest` has the upper half of a sum. */
INLINE void add_tile(const opt_matrix *m, const int format, struct strip *strip, const int w_rows,
                     uint64_t first, uint64_t blocks, const uint16_t *x, uint64_t row, const int x_rows)
{
    const int halves = format == OPT_NF4 && x_rows <= 2;
    const uint64_t block = m->block, columns = m->columns;
    const uint64_t ahead = opt_code_bytes(format, (uint64_t)w_rows * columns); /* of the next rows */
    const vt nf4 = vt_load(opt_nf4);
    const uint8_t *codes[W_ROWS];
    vf(*sums)[W_ROWS] = strip->sums + row, sum[W_ROWS][X_TILE], rest[W_ROWS][X_TILE];

    for (int i = 0; i < w_rows; i++) {
        codes[i] = m->codes + opt_code_bytes(format, strip->rows[i] * columns + first * block);
        for (int r = 0; r < x_rows; r++) {
            sum[i][r] = sums[r][i];
            rest[i][r] = upper_half(sum[i][r]);
        }
    }
    x += row * columns + first * block;
    for (uint64_t b = 0; b < blocks; b++) {
        struct block_scale scale[W_ROWS];
        vht table[W_ROWS];
        for (int i = 0; i < w_rows; i++) {
            scale[i] = spread_scale(format, nf4, strip->scales[i][b]);
            table[i] = w_rows < W_ROWS ? strip->tables[i][b] : vht_of_normal(scale[i].table);
        }
        for (uint64_t left = block; left; left -= GROUP, x += GROUP) {
            vi w[W_ROWS];
            for (int i = 0; i < w_rows; i++) {
                if (halves)
                    add_halves(codes[i], table[i], x, columns, x_rows, sum[i], rest[i]);
                else
                    w[i] = decode_to_register(format, codes[i], &scale[i], table[i]);
                __builtin_prefetch(codes[i] + ahead);
                codes[i] += opt_code_bytes(format, GROUP);
            }
            for (int r = 0; !halves && r < x_rows; r++) {
                const vi at = _mm512_loadu_si512(x + (uint64_t)r * columns);
                for (int i = 0; i < w_rows; i++)
                    sum[i][r] = v_add_pairs(sum[i][r], w[i], at);
            }
        }
    }
    for (int i = 0; i < w_rows; i++)
        for (int r = 0; r < x_rows; r++)
            sums[r][i] = halves ? join_halves(sum[i][r], rest[i][r]) : sum[i][r];
}

/* The same with n rows of x. */
INLINE void add_tiles(const opt_matrix *m, const int format, struct strip *strip, const int w_rows,
                      uint64_t first, uint64_t blocks, const uint16_t *x, uint64_t n)
{
    for (uint64_t r = 0, rows; r < n; r += rows) {
        rows = n - r >= X_TILE ? X_TILE : n - r >= 4 ? 4 : n - r;
        if (w_rows < W_ROWS && rows == X_TILE)
            add_tile(m, format, strip, w_rows, first, blocks, x, r, X_TILE);
        else if (rows == 4)
            add_tile(m, format, strip, w_rows, first, blocks, x, r, 4);
        else if (rows == 3)
            add_tile(m, format, strip, w_rows, first, blocks, x, r, 3);
        else if (rows == 2)
            add_tile(m, format, strip, w_rows, first, blocks, x, r, 2);
        else
            add_tile(m, format, strip, w_rows, first, blocks, x, r, 1);
    }
}

/* Decodes the scales of blocks [first, first + blocks). Returns 0 if one is small. */
INLINE int load_strip(const struct opt_product *p, const int format, struct strip *strip, const int w_rows,
                      uint64_t first, uint64_t blocks)
{
    const opt_matrix *m = p->matrix;
    const vt nf4 = vt_load(opt_nf4);

    for (int i = 0; i < w_rows; i++) {
        const float *scales = strip->scales[i];
        load_scales(m, strip->rows[i] * (m->columns >> block_shift(m)) + first, blocks, strip->scales[i]);
        if (any_small(scales, blocks, p->least_scale))
            return 0;
        for (uint64_t b = 0; format == OPT_NF4 && w_rows < W_ROWS && b < blocks; b++)
            strip->tables[i][b] = vht_of_normal(spread_scale(format, nf4, scales[b]).table);
    }
    return 1;
}

/* Sets the outputs of w_rows rows of W, fewer at the end, and X_ROWS rows of x at most. Returns 0 if a scale is small. */
INLINE int multiply_directly(const struct opt_product *p, const int format, uint64_t row, uint64_t end,
                             const int w_rows)
{
    const opt_matrix *m = p->matrix;
    const uint64_t blocks = m->columns >> block_shift(m);
    uint16_t *y = p->y;
    struct strip strip;

    for (int i = 0; i < w_rows; i++) {
        strip.rows[i] = row + (uint64_t)i < end ? row + (uint64_t)i : end - 1;
        for (uint64_t r = 0; r < p->x_rows; r++)
            strip.sums[r][i] = v_set1(0);
    }
    for (uint64_t first = 0; first < blocks; first += SCALES) {
        const uint64_t n = blocks - first < SCALES ? blocks - first : SCALES;
        if (!load_strip(p, format, &strip, w_rows, first, n))
            return 0;
        add_tiles(m, format, &strip, w_rows, first, n, p->x, p->x_rows);
    }
    for (uint64_t r = 0; r < p->x_rows; r++)
        for (int i = 0; i < w_rows; i++)
            y[r * m->rows + strip.rows[i]] = to_bf16(fold(&strip.sums[r][i], 1));
    return 1;
}

/* x has X_ROWS rows at most. */
INLINE void multiply_strips(const struct opt_product *p, const int format, uint64_t begin, uint64_t end)
{
    const uint64_t rows = p->x_rows <= X_FEW ? W_ROWS : W_ROWS - 1;

    for (uint64_t row = begin; row < end; row += rows) {
        const int done = p->x_rows <= X_FEW ? multiply_directly(p, format, row, end, W_ROWS)
                                            : multiply_directly(p, format, row, end, W_ROWS - 1);
        if (!done)
            product_bf16(p, row, row + rows < end ? row + rows : end);
    }
}

static void multiply_nf4(const struct opt_product *p, uint64_t begin, uint64_t end)
{
    multiply_strips(p, OPT_NF4, begin, end);
}
static void multiply_int8(const struct opt_product *p, uint64_t begin, uint64_t end)
{
    multiply_strips(p, OPT_INT8, begin, end);
}
static void multiply_fp8(const struct opt_product *p, uint64_t begin, uint64_t end)
{
    multiply_strips(p, OPT_FP8, begin, end);
}

static void product_avx512_bf16(const struct opt_product *p, uint64_t begin, uint64_t end)
{
    const opt_matrix *m = p->matrix;

    if (p->x_rows > DIRECT && m->format != OPT_NF4) {
        product_bf16(p, begin, end);
        return;
    }
    for (uint64_t first = 0; first < p->x_rows; first += X_ROWS) {
        struct opt_product part = *p;
        part.x = (const uint16_t *)p->x + first * m->columns;
        part.y = (uint16_t *)p->y + first * m->rows;
        part.x_rows = p->x_rows - first < X_ROWS ? p->x_rows - first : X_ROWS;
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

opt_product_function *const opt_avx512_bf16_product = product_avx512_bf16, *const opt_avx512_bf16_transposed =
                                                                               transposed_bf16;

#endif
