/* isa_avx2.c - 8 lanes: AVX2 with F16C and FMA, which only the product in bfloat16 uses (kernels.h, rule 1). */

#if defined(__x86_64__)

#include <immintrin.h>

#include "isa.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c,fma")
#endif

enum { LANES = 8, DOUBLE_LANES = 4, STREAMS = 1, FLUSHES = 1, GROUPED = 1, TILE_ROWS = 2 };

typedef __m256 vf;
typedef __m128i vh;
typedef __m256d vd;
typedef __m256i vi;
typedef struct {
    vf a, b;
} pair;

INLINE vf v_set1(float x) { return _mm256_set1_ps(x); }
INLINE vf v_load(const void *address) { return _mm256_loadu_ps(address); }
INLINE void v_store(void *address, vf x) { _mm256_storeu_ps(address, x); }
INLINE vh v_load_half(const void *address) { return _mm_loadu_si128(address); }
INLINE void v_store_half(void *address, vh x) { _mm_storeu_si128(address, x); }
INLINE void v_stream_half(void *address, vh x) { _mm_stream_si128(address, x); }
INLINE void v_fence(void) { _mm_sfence(); }

INLINE vf v_add(vf a, vf b) { return _mm256_add_ps(a, b); }
INLINE vf v_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
INLINE vf v_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
INLINE vf v_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf v_div(vf a, vf b) { return _mm256_div_ps(a, b); }
INLINE vf v_sqrt(vf a) { return _mm256_sqrt_ps(a); }
INLINE vf v_zero_below(vf x, vf y, vf least) { return (void)y, (void)least, x; } /* never called */

INLINE float v_total(vf x)
{
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));

    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

INLINE vf v_canonical(vf x)
{
    vf nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FC00000));

    return _mm256_blendv_ps(x, nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

INLINE vf v_from_bf16(vh h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }

INLINE vh v_to_bf16(vf x)
{
    __m256i bits = _mm256_castps_si256(x), upper = _mm256_srli_epi32(bits, 16);
    __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
    __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    __m256i quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    __m256i halves = _mm256_blendv_epi8(rounded, quiet, is_nan);

    return _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
}

INLINE vf v_from_fp16(vh h) { return _mm256_cvtph_ps(h); }
INLINE vh v_to_fp16(vf x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }

INLINE vi v_bits(vf x) { return _mm256_castps_si256(x); }
INLINE vf v_of_bits(vi x) { return _mm256_castsi256_ps(x); }
INLINE vi vi_set1(uint32_t x) { return _mm256_set1_epi32((int)x); }
INLINE vi vi_add(vi a, vi b) { return _mm256_add_epi32(a, b); }
INLINE vi vi_and(vi a, vi b) { return _mm256_and_si256(a, b); }
INLINE vi vi_xor(vi a, vi b) { return _mm256_xor_si256(a, b); }
INLINE vi vi_mul(vi a, vi b) { return _mm256_mullo_epi32(a, b); }
INLINE vi vi_srl(vi x, const int by) { return _mm256_srli_epi32(x, by); }
INLINE vi vi_sll(vi x, const int by) { return _mm256_slli_epi32(x, by); }
INLINE vi vi_iota(void) { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
INLINE vi vi_max(vi a, vi b) { return _mm256_max_epi32(a, b); }
INLINE vi vi_add_if_less(vi n, vf a, vf b)
{
    return _mm256_sub_epi32(n, _mm256_castps_si256(_mm256_cmp_ps(a, b, _CMP_LT_OQ)));
}
INLINE vh pack(vi x) /* each lane at most 0xFFFF */
{
    return _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
}
INLINE vh vi_to_half(vi x) { return pack(_mm256_and_si256(x, _mm256_set1_epi32(0xFFFF))); }
INLINE vh vi_upper_half(vi x) { return pack(_mm256_srli_epi32(x, 16)); }

typedef struct {
    __m256 low, high; /* values 0-7 and 8-15 */
} vt;

INLINE vi vi_load_bytes(const void *address) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(address)); }
INLINE void vi_store_bytes(void *address, vi x)
{
    vh halves = pack(_mm256_and_si256(x, _mm256_set1_epi32(0xFF)));

    _mm_storel_epi64(address, _mm_packus_epi16(halves, halves));
}
INLINE vf v_from_int8(const void *address)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(address)));
}
INLINE vf v_from_e4m3(const void *address)
{
    __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64(address)), 7);

    return _mm256_cvtph_ps(_mm_and_si128(wide, _mm_set1_epi16((short)0xBF80)));
}
INLINE vt vt_load(const float *values) { return (vt){_mm256_loadu_ps(values), _mm256_loadu_ps(values + 8)}; }
INLINE vt vt_scale(vt table, vf by)
{
    return (vt){_mm256_mul_ps(table.low, by), _mm256_mul_ps(table.high, by)};
}
INLINE vf vt_at(vt table, vi index)
{
    __m256 is_high = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)); /* bit 3 becomes the sign */

    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, index),
                            _mm256_permutevar8x32_ps(table.high, index), is_high);
}

typedef struct {
    __m256i lower, upper; /* bytes, in both halves of the vector */
} vht;

INLINE vht vht_of(vt table)
{
    __m128i low = v_to_bf16(table.low), high = v_to_bf16(table.high), byte = _mm_set1_epi16(0xFF);
    __m128i lower = _mm_packus_epi16(_mm_and_si128(low, byte), _mm_and_si128(high, byte));
    __m128i upper = _mm_packus_epi16(_mm_srli_epi16(low, 8), _mm_srli_epi16(high, 8));

    return (vht){_mm256_broadcastsi128_si256(lower), _mm256_broadcastsi128_si256(upper)};
}
INLINE void vht_store(void *address, const uint8_t *codes, vht table)
{
    __m128i bytes = _mm_loadu_si128((const void *)codes), *to = address;
    __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(bytes), _mm_srli_epi16(bytes, 4), 1);
    __m256i index = _mm256_and_si256(both, _mm256_set1_epi8(15));
    __m256i lower = _mm256_shuffle_epi8(table.lower, index), upper = _mm256_shuffle_epi8(table.upper, index);
    __m256i first = _mm256_unpacklo_epi8(lower, upper), second = _mm256_unpackhi_epi8(lower, upper);

    _mm256_storeu_si256((void *)to, _mm256_permute2x128_si256(first, second, 0x20));
    _mm256_storeu_si256((void *)(to + 2), _mm256_permute2x128_si256(first, second, 0x31));
}

INLINE vf v_sign(vf x)
{
    vf sign = _mm256_and_ps(x, _mm256_set1_ps(-0.0f)), one = _mm256_or_ps(sign, _mm256_set1_ps(1));

    /* Ordered and not equal; all other lanes are zero or NaN, and stay. */
    return _mm256_blendv_ps(x, one, _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_NEQ_OQ));
}

INLINE void v_add_squares(vd *acc, vf x)
{
    vd low = _mm256_cvtps_pd(_mm256_castps256_ps128(x)), high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));

    acc[0] = _mm256_add_pd(acc[0], _mm256_mul_pd(low, low));
    acc[1] = _mm256_add_pd(acc[1], _mm256_mul_pd(high, high));
}
INLINE void vd_store(double *address, vd x) { _mm256_storeu_pd(address, x); }

INLINE int v_any_nan(vf a, vf b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q)); }

/* Shuffles do not cross the halves of a vector, so a pair has the order: a holds elements 0-3 and 8-11, b the others. */
INLINE pair pair_from_bf16(const void *address)
{
    vi x = _mm256_loadu_si256(address), zero = _mm256_setzero_si256();

    return (pair){v_of_bits(_mm256_unpacklo_epi16(zero, x)), v_of_bits(_mm256_unpackhi_epi16(zero, x))};
}

INLINE pair pair_join(const void *param, const void *remainder)
{
    vi p = _mm256_loadu_si256(param), r = _mm256_loadu_si256(remainder);
    vi upper = _mm256_add_epi16(p, _mm256_srai_epi16(r, 15)); /* a negative remainder borrows */

    return (pair){v_of_bits(_mm256_unpacklo_epi16(r, upper)), v_of_bits(_mm256_unpackhi_epi16(r, upper))};
}

INLINE void pair_store_upper(void *address, vi a, vi b)
{
    _mm256_storeu_si256(address, _mm256_packus_epi32(_mm256_srli_epi32(a, 16), _mm256_srli_epi32(b, 16)));
}
INLINE void pair_store_lower(void *address, vi a, vi b)
{
    vi zero = _mm256_setzero_si256();

    _mm256_storeu_si256(
        address, _mm256_packus_epi32(_mm256_blend_epi16(a, zero, 0xAA), _mm256_blend_epi16(b, zero, 0xAA)));
}
INLINE pair pair_group(pair x)
{
    return (pair){_mm256_permute2f128_ps(x.a, x.b, 0x20), _mm256_permute2f128_ps(x.a, x.b, 0x31)};
}
INLINE pair pair_ungroup(pair x) { return pair_group(x); }
INLINE void pair_places(vi *a, vi *b)
{
    *a = _mm256_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11);
    *b = _mm256_setr_epi32(4, 5, 6, 7, 12, 13, 14, 15);
}

#include "unit.inc"

#if defined(__clang__)
#pragma clang attribute pop
#endif

const struct opt_kernels opt_avx2 = OPT_TABLE("avx2");

#endif
