/* isa_avx512.c - 16 lanes: AVX-512 F, BW, DQ, VL. The bf16 instructions of newer CPUs are no use here: they flush
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

enum { LANES = 16, DOUBLE_LANES = 8, STREAMS = 1 };

typedef __m512 vf;
typedef __m256i vh;
typedef __m512d vd;

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

INLINE void v_add_squares(vd *acc, vf x)
{
    vd low = _mm512_cvtps_pd(_mm512_castps512_ps256(x)), high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));

    acc[0] = _mm512_add_pd(acc[0], _mm512_mul_pd(low, low));
    acc[1] = _mm512_add_pd(acc[1], _mm512_mul_pd(high, high));
}
INLINE void vd_store(double *address, vd x) { _mm512_storeu_pd(address, x); }

#include "load_store.inc"

#include "accumulate.inc"
#include "adamw.inc"
#include "squares.inc"

#if defined(__clang__)
#pragma clang attribute pop
#endif

const struct opt_kernels opt_avx512 = {"avx512", adamw, accumulate, block_squares};

#endif
