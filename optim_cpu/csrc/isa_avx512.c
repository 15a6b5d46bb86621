/* isa_avx512.c - 16 lanes: AVX-512 F, BW, DQ, VL. isa_avx512_bf16.c adds the bf16 instructions of
 * newer CPUs. */

#if defined(__x86_64__)

#include <immintrin.h>

#include "isa.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))),                  \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif

#include "avx512.inc"

#include "unit.inc"

#if defined(__clang__)
#pragma clang attribute pop
#endif

const struct opt_kernels opt_avx512 = OPT_TABLE("avx512");

#endif
