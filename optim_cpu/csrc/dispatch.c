/* dispatch.c - selects the instruction set once, at first use; opt_set_instruction_set replaces the selection. */

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "isa.h"

#if defined(__x86_64__)
#include <cpuid.h>

static int has_all(unsigned bits, unsigned wanted) { return (bits & wanted) == wanted; }

/* Sets avx2, avx512 and bf16 to whether the CPU has what the units need and the operating system saves its registers.
 * __builtin_cpu_supports() would not do: in a program that Zig has linked it is false for every feature. */
static void detect_cpu(int *avx2, int *avx512, int *bf16)
{
    enum { SAVES_YMM = 0x06, SAVES_ZMM = 0xE6 }; /* of XCR0 */
    unsigned leaf1 = 0, leaf7 = 0, leaf7_1 = 0, last = 0, saves, unused;

    *avx2 = *avx512 = *bf16 = 0;
    __get_cpuid(1, &unused, &unused, &leaf1, &unused);
    if (!has_all(leaf1, bit_OSXSAVE | bit_FMA | bit_F16C))
        return;
    __asm__("xgetbv" : "=a"(saves), "=d"(unused) : "c"(0));
    __get_cpuid_count(7, 0, &last, &leaf7, &unused, &unused);
    if (last)
        __get_cpuid_count(7, 1, &leaf7_1, &unused, &unused, &unused);
    *avx2 = has_all(saves, SAVES_YMM) && has_all(leaf7, bit_AVX2);
    *avx512 =
        has_all(saves, SAVES_ZMM) && has_all(leaf7, bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL);
    *bf16 = *avx512 && has_all(leaf7_1, bit_AVX512BF16);
}

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
    int avx2, avx512, bf16;

    detect_cpu(&avx2, &avx512, &bf16);
    if (bf16) {
        avx512_bf16 = opt_avx512;
        avx512_bf16.name = "avx512_bf16";
        avx512_bf16.product_bf16 = opt_avx512_bf16_product;
        avx512_bf16.transposed_bf16 = opt_avx512_bf16_transposed;
        available[n++] = &avx512_bf16;
    }
    if (avx512)
        available[n++] = &opt_avx512;
    if (avx2)
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
