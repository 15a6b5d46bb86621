/* fp_environment.h - round to nearest even, subnormals kept, nothing trapped; and back to what was, the flags of
 * exceptions included. */
#ifndef OPTIM_CPU_FP_ENVIRONMENT_H
#define OPTIM_CPU_FP_ENVIRONMENT_H

#if defined(__SSE_MATH__) /* x86, unless its x87 computes, which isa_portable.c refuses */

#include <xmmintrin.h>

typedef unsigned fp_environment;

static inline fp_environment fp_enter_default(void)
{
    fp_environment saved = _mm_getcsr();

    _mm_setcsr(0x1F80); /* the power-on value: exceptions masked, no FTZ, no DAZ, nearest even */
    return saved;
}

static inline void fp_restore(fp_environment saved) { _mm_setcsr(saved); }

#elif defined(__aarch64__)

#include <stdint.h>

typedef struct {
    uint64_t control, status;
} fp_environment;

static inline fp_environment fp_enter_default(void)
{
    fp_environment saved;

    __asm__ volatile("mrs %0, fpcr" : "=r"(saved.control));
    __asm__ volatile("mrs %0, fpsr" : "=r"(saved.status));
    /* All zero: no flushing (FZ, FZ16, FIZ), IEEE's fp16 (AHP), nearest even (RMode), nothing trapped, and NaNs
     * that keep what they carry (DN, AH), as casts promise. */
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0) : "memory");
    return saved;
}

static inline void fp_restore(fp_environment saved)
{
    __asm__ volatile("msr fpcr, %0" : : "r"(saved.control) : "memory");
    __asm__ volatile("msr fpsr, %0" : : "r"(saved.status) : "memory");
}

#else

#include <fenv.h>

typedef fenv_t fp_environment;

static inline fp_environment fp_enter_default(void)
{
    fp_environment saved;

    fegetenv(&saved);
    fesetenv(FE_DFL_ENV);
    return saved;
}

static inline void fp_restore(fp_environment saved) { fesetenv(&saved); }

#endif
#endif
