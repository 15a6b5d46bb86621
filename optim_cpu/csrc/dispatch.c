/* dispatch.c - selects the instruction set once, at first use; opt_set_instruction_set replaces the selection. */

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "isa.h"

#if defined(__x86_64__)
#include <cpuid.h>

static int cpu_has_avx2(void)
{
    unsigned eax, ebx, ecx, edx;

    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}

static int cpu_has_avx512(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

static int cpu_has_avx512_bf16(void) { return cpu_has_avx512() && __builtin_cpu_supports("avx512bf16"); }

static struct opt_kernels avx512_bf16; /* as `available` */
#endif

enum { MAX_TABLES = 8 };

static pthread_once_t once = PTHREAD_ONCE_INIT;
/* Widest first, NULL-terminated. Only detect() writes it, under `once`; later it is constant. */
static const struct opt_kernels *available[MAX_TABLES];
/* NULL if TIERING_ISA names an instruction set that is unknown or not supported. */
static _Atomic(const struct opt_kernels *) selected;

static const struct opt_kernels *find(const char *name)
{
    for (int i = 0; available[i]; i++)
        if (!strcmp(available[i]->name, name))
            return available[i];
    return NULL;
}

static void detect(void)
{
    int n = 0;
    const char *name = getenv("TIERING_ISA");

#if defined(__x86_64__)
    __builtin_cpu_init();
    if (cpu_has_avx512_bf16()) {
        avx512_bf16 = opt_avx512;
        avx512_bf16.name = "avx512_bf16";
        avx512_bf16.product_bf16 = opt_avx512_bf16_product;
        available[n++] = &avx512_bf16;
    }
    if (cpu_has_avx512())
        available[n++] = &opt_avx512;
    if (cpu_has_avx2())
        available[n++] = &opt_avx2;
#elif defined(OPT_HAS_NEON)
    available[n++] = &opt_neon;
#endif
    available[n] = &opt_portable;
    atomic_store(&selected, name && *name ? find(name) : available[0]);
}

const struct opt_kernels *opt_selected(void)
{
    pthread_once(&once, detect);
    return atomic_load(&selected);
}

const char *opt_instruction_set(void)
{
    const struct opt_kernels *table = opt_selected();

    return table ? table->name : NULL;
}

int opt_set_instruction_set(const char *name)
{
    pthread_once(&once, detect);
    const struct opt_kernels *table = find(name);

    if (!table)
        return -ENOTSUP;
    /* Kernels that run keep the table that they have loaded; later ones take this one. */
    atomic_store(&selected, table);
    return 0;
}

const char *opt_available_instruction_set(int i)
{
    pthread_once(&once, detect);
    return i >= 0 && i < MAX_TABLES && available[i] ? available[i]->name : NULL;
}
