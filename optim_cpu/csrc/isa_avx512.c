/* isa_avx512.c - 16 lanes: AVX-512 F, BW, DQ, VL. The bf16 instructions of newer CPUs are not used, because they flush
 * subnormals. */

#if defined(__x86_64__)

#include <immintrin.h>

#include "isa.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))),                  \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif

enum { LANES = 16, DOUBLE_LANES = 8, STREAMS = 1, GROUPED = 0 };

typedef __m512 vf;
typedef __m256i vh;
typedef __m512d vd;
typedef __m512i vi;

typedef struct {
    vf a, b;
} pair;

INLINE vf v_set1(float x) { return _mm512_set1_ps(x); }
INLINE vf v_load(const void *address) { return _mm512_loadu_ps(address); }
INLINE void v_store(void *address, vf x) { _mm512_storeu_ps(address, x); }
INLINE vh v_load_half(const void *address) { return _mm256_loadu_si256(address); }
INLINE void v_store_half(void *address, vh x) { _mm256_storeu_si256(address, x); }
INLINE void v_stream_half(void *address, vh x) { _mm256_stream_si256(address, x); }
INLINE void v_fence(void) { _mm_sfence(); }

INLINE vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf v_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf v_div(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf v_sqrt(vf a) { return _mm512_sqrt_ps(a); }

INLINE vf v_canonical(vf x)
{
    vf nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7FC00000));

    return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), nan);
}

INLINE vf v_from_bf16(vh h) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16)); }

INLINE vh v_to_bf16(vf x)
{
    __m512i bits = _mm512_castps_si512(x), upper = _mm512_srli_epi32(bits, 16);
    __m512i odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
    __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);

    return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(rounded, is_nan, upper, _mm512_set1_epi32(0x40)));
}

INLINE vf v_from_fp16(vh h) { return _mm512_cvtph_ps(h); }
INLINE vh v_to_fp16(vf x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }

INLINE vi v_bits(vf x) { return _mm512_castps_si512(x); }
INLINE vf v_of_bits(vi x) { return _mm512_castsi512_ps(x); }
INLINE vi vi_set1(uint32_t x) { return _mm512_set1_epi32((int)x); }
INLINE vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
INLINE vi vi_and(vi a, vi b) { return _mm512_and_si512(a, b); }
INLINE vi vi_xor(vi a, vi b) { return _mm512_xor_si512(a, b); }
INLINE vi vi_mul(vi a, vi b) { return _mm512_mullo_epi32(a, b); }
INLINE vi vi_srl(vi x, const int by) { return _mm512_srli_epi32(x, (unsigned)by); }
INLINE vi vi_iota(void) { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
INLINE vi vi_max(vi a, vi b) { return _mm512_max_epi32(a, b); }
INLINE vi vi_add_if_less(vi n, vf a, vf b)
{
    return _mm512_mask_add_epi32(n, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), n, _mm512_set1_epi32(1));
}
INLINE vh vi_to_half(vi x) { return _mm512_cvtepi32_epi16(x); }
INLINE vh vi_upper_half(vi x) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(x, 16)); }

typedef __m512 vt;

INLINE vi vi_load_bytes(const void *address) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(address)); }
INLINE void vi_store_bytes(void *address, vi x) { _mm_storeu_si128(address, _mm512_cvtepi32_epi8(x)); }
INLINE vf v_from_int8(const void *address)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(address)));
}
INLINE vf v_from_e4m3(const void *address)
{
    __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(address)), 7);

    return _mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16((short)0xBF80)));
}
INLINE vt vt_load(const float *values) { return _mm512_loadu_ps(values); }
INLINE vt vt_scale(vt table, vf by) { return _mm512_mul_ps(table, by); }
INLINE vf vt_at(vt table, vi index) { return _mm512_permutexvar_ps(index, table); }

typedef __m512i vht; /* twice: a word's fifth bit selects, too */

INLINE vht vht_of(vt table) { return _mm512_broadcast_i64x4(v_to_bf16(table)); }
INLINE void vht_store(void *address, const uint8_t *codes, vht table)
{
    __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)codes));
    __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(words), _mm256_srli_epi16(words, 4), 1);

    _mm512_storeu_si512(address, _mm512_permutexvar_epi16(both, table));
}

INLINE vf v_sign(vf x)
{
    vf zero = _mm512_setzero_ps(), sign = _mm512_and_ps(x, _mm512_set1_ps(-0.0f));

    /* Ordered and not equal; all other lanes are zero or NaN, and stay. */
    return _mm512_mask_or_ps(x, _mm512_cmp_ps_mask(x, zero, _CMP_NEQ_OQ), sign, _mm512_set1_ps(1));
}

INLINE void v_add_squares(vd *acc, vf x)
{
    vd low = _mm512_cvtps_pd(_mm512_castps512_ps256(x)), high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));

    acc[0] = _mm512_add_pd(acc[0], _mm512_mul_pd(low, low));
    acc[1] = _mm512_add_pd(acc[1], _mm512_mul_pd(high, high));
}
INLINE void vd_store(double *address, vd x) { _mm512_storeu_pd(address, x); }

INLINE int v_any_nan(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q) != 0; }

/* Word permutations: which of the 64 words of two vectors becomes each word of the result. */
#define FOUR(word, i) word(i), word(i + 1), word(i + 2), word(i + 3)
#define WORDS(word)                                                                                          \
    {FOUR(word, 0),  FOUR(word, 4),  FOUR(word, 8),  FOUR(word, 12),                                         \
     FOUR(word, 16), FOUR(word, 20), FOUR(word, 24), FOUR(word, 28)}
#define ZIP_LOW(i) ((i) / 2 + (i) % 2 * 32)
#define ZIP_HIGH(i) ((i) / 2 + (i) % 2 * 32 + 16)
#define LOWER(i) (2 * (i))
#define UPPER(i) (2 * (i) + 1)

static const uint16_t zip_low[32] = WORDS(ZIP_LOW), zip_high[32] = WORDS(ZIP_HIGH);
static const uint16_t lower_words[32] = WORDS(LOWER), upper_words[32] = WORDS(UPPER);

INLINE vi pick(vi a, const uint16_t *words, vi b)
{
    return _mm512_permutex2var_epi16(a, _mm512_loadu_si512(words), b);
}

INLINE pair pair_from_bf16(const void *address)
{
    vi x = _mm512_loadu_si512(address);
    const __mmask32 odd = 0xAAAAAAAA; /* the even words are zero */

    return (pair){v_of_bits(_mm512_maskz_permutexvar_epi16(odd, _mm512_loadu_si512(zip_low), x)),
                  v_of_bits(_mm512_maskz_permutexvar_epi16(odd, _mm512_loadu_si512(zip_high), x))};
}

INLINE pair pair_join(const void *param, const void *remainder)
{
    vi p = _mm512_loadu_si512(param), r = _mm512_loadu_si512(remainder);
    vi upper = _mm512_add_epi16(p, _mm512_srai_epi16(r, 15)); /* a negative remainder borrows */

    return (pair){v_of_bits(pick(r, zip_low, upper)), v_of_bits(pick(r, zip_high, upper))};
}

INLINE void pair_store_upper(void *address, vi a, vi b)
{
    _mm512_storeu_si512(address, pick(a, upper_words, b));
}
INLINE void pair_store_lower(void *address, vi a, vi b)
{
    _mm512_storeu_si512(address, pick(a, lower_words, b));
}
INLINE pair pair_group(pair x) { return x; }
INLINE pair pair_ungroup(pair x) { return x; }
INLINE void pair_places(vi *a, vi *b)
{
    *a = vi_iota();
    *b = vi_add(vi_iota(), vi_set1(LANES));
}

#include "unit.inc"

#if defined(__clang__)
#pragma clang attribute pop
#endif

const struct opt_kernels opt_avx512 = OPT_TABLE("avx512");

#endif
