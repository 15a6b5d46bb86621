/* fp_environment.h - round to nearest even, subnormals kept, nothing trapped; and back to what was. */
#ifndef OPTIM_CPU_FP_ENVIRONMENT_H
#define OPTIM_CPU_FP_ENVIRONMENT_H

#if defined(__x86_64__)

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

typedef uint64_t fp_environment;

static inline fp_environment fp_enter_default(void)
{
    fp_environment saved;

    __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
    /* No flush to zero, no default NaN, nearest even. */
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0) : "memory");
    return saved;
}

static inline void fp_restore(fp_environment saved)
{
    __asm__ volatile("msr fpcr, %0" : : "r"(saved) : "memory");
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
