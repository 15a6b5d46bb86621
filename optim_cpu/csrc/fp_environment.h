/* fp_environment.h - sets the default floating-point environment (nearest even, no flushing of subnormals, no traps) or
 * that of a step, and restores the previous one, including its exception flags.
 *
 * In a step, subnormal operands and results are zero (kernels.h, rule 4). x86 computes so if it is told to. It looks at
 * a result after rounding; Arm does so before rounding, and would flush a product that rounds up to 2^-126. So elsewhere
 * a step runs in the default environment, and its functions flush (numbers.inc). */
#ifndef OPTIM_CPU_FP_ENVIRONMENT_H
#define OPTIM_CPU_FP_ENVIRONMENT_H

#if defined(__SSE_MATH__) /* x86 with SSE arithmetic; isa_portable.c refuses x87 arithmetic */

#include <xmmintrin.h>

#define STEP_FLUSHES 1

typedef unsigned fp_environment;

static inline fp_environment fp_enter_default(void)
{
    fp_environment saved = _mm_getcsr();

    _mm_setcsr(0x1F80); /* the power-on value: exceptions masked, no FTZ, no DAZ, nearest even */
    return saved;
}

static inline fp_environment fp_enter_step(void)
{
    fp_environment saved = _mm_getcsr();

    _mm_setcsr(0x9FC0); /* FTZ and DAZ as well */
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
    /* All zero: no flushing (FZ, FZ16, FIZ), IEEE fp16 (AHP), nearest even (RMode), no traps, and NaNs that keep their
     * payload (DN, AH), as rule 2 of kernels.h needs for casts. */
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

#if !defined(STEP_FLUSHES)
#define STEP_FLUSHES 0
static inline fp_environment fp_enter_step(void) { return fp_enter_default(); }
#endif
#endif
