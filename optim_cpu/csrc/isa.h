/* isa.h - what one unit per instruction set (isa_*.c) provides to kernels.c, and what the loop bodies (*.inc) share.
 *
 * A unit defines a small vector vocabulary and includes the bodies, so that each formula is written once:
 *
 *     LANES                        float32 elements in a vector
 *     vf, vh                       vector of LANES float32; of LANES 16-bit values
 *     v_set1 v_load v_store        float32, any alignment
 *     v_load_half v_store_half     16-bit, any alignment
 *     STREAMS                      1 if there are stores past the cache:
 *     v_stream_half v_fence        16-bit, address aligned to the vector; orders those stores
 *     v_add v_sub v_mul v_div v_sqrt    one rounding each
 *     v_canonical                  NaN -> the one quiet NaN
 *     v_from_bf16 v_to_bf16 v_from_fp16 v_to_fp16    nearest even, NaN stays NaN
 *     vd, DOUBLE_LANES             vector of float64, elements in it; LANES is a multiple
 *     v_add_squares(vd *acc, vf)   adds the squares of the LANES elements to LANES / DOUBLE_LANES accumulators
 *     vd_store                     float64, any alignment
 *
 * All units are built with the same compiler flags; each raises its own target by pragma, after the shared headers and
 * before its first function. All that a unit defines is static, except its table: a CPU never meets instructions that
 * it lacks through a function that two units happen to share.
 */
#ifndef OPTIM_CPU_ISA_H
#define OPTIM_CPU_ISA_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels.h"

#define INLINE static inline __attribute__((always_inline))

/* Iterations touch distinct elements; the compiler cannot see that through six pointers. */
#if defined(__clang__)
#define INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#endif

struct opt_kernels {
    const char *name;
    void (*adamw)(const opt_adamw_segment *segment, float grad_scale, uint64_t begin, uint64_t end);
    void (*accumulate)(void *dst, int dst_dtype, const void *src, int src_dtype, uint64_t numel,
                       int overwrite);
    void (*block_squares)(const void *src, int dtype, uint64_t numel, double *block_sums);
};

extern const struct opt_kernels opt_portable;
#if defined(__x86_64__)
extern const struct opt_kernels opt_avx2, opt_avx512;
#endif

/* The table in use, or NULL when TIERING_ISA asks for what is not here. */
const struct opt_kernels *opt_selected(void);

static inline size_t opt_element_size(int dtype) { return dtype == OPT_FP32 ? 4 : 2; }

#endif
