/* isa_portable.c - plain C, one element at a time: the reference for the other units; runs on every CPU. */

#include <float.h>
#include <math.h>

#include "fp_environment.h"
#include "isa.h"

/* kernels.h, rule 1. The x87 computes with more bits and rounds twice. */
#if FLT_EVAL_METHOD != 0
#error "float32 must round at each operation: for 32-bit x86, build with -msse2 -mfpmath=sse"
#endif
#if defined(__FAST_MATH__)
#error "-ffast-math makes results depend on the instruction set: build without it"
#endif

enum { LANES = 1, DOUBLE_LANES = 1, STREAMS = 0, FLUSHES = STEP_FLUSHES, GROUPED = 0, TILE_ROWS = 1 };

typedef float vf;
typedef uint16_t vh;
typedef double vd;
typedef uint32_t vi;
typedef struct {
    vf a, b;
} pair;

INLINE uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE vf v_set1(float x) { return x; }
INLINE vf v_load(const void *address)
{
    float x;
    memcpy(&x, address, sizeof x);
    return x;
}
INLINE void v_store(void *address, vf x) { memcpy(address, &x, sizeof x); }
INLINE vh v_load_half(const void *address)
{
    uint16_t x;
    memcpy(&x, address, sizeof x);
    return x;
}
INLINE void v_store_half(void *address, vh x) { memcpy(address, &x, sizeof x); }
INLINE void v_stream_half(void *address, vh x) { v_store_half(address, x); } /* never called */
INLINE void v_fence(void) {}

INLINE vf v_add(vf a, vf b) { return a + b; }
INLINE vf v_sub(vf a, vf b) { return a - b; }
INLINE vf v_mul(vf a, vf b) { return a * b; }
/* The product of a and b is exact in float64. The sum is rounded to odd; float64 has more than two places below float32's
 * last, so that rounding to float32 gives the same as a single rounding. */
INLINE vf v_fma(vf a, vf b, vf c)
{
    double product = (double)a * (double)b, sum = product + (double)c, other = sum - product;
    double rest = (product - (sum - other)) + ((double)c - other); /* exact, unless sum is infinite or NaN */
    uint64_t bits;

    memcpy(&bits, &sum, sizeof bits);
    if ((rest > 0 || rest < 0) && !(bits & 1))
        bits = (rest > 0) == (sum > 0) ? bits + 1 : bits - 1;
    memcpy(&sum, &bits, sizeof sum);
    return (float)sum;
}
INLINE vf v_div(vf a, vf b) { return a / b; }
INLINE vf v_sqrt(vf a) { return sqrtf(a); }
INLINE vf v_zero_below(vf x, vf y, vf least)
{
    uint32_t bits = bits_of(x);

    return float_of(fabsf(y) < fabsf(least) ? bits & 0x80000000 : bits);
}
INLINE float v_total(vf x) { return x; }
INLINE vf v_canonical(vf x) { return x != x ? float_of(0x7FC00000) : x; }

INLINE vf v_from_bf16(vh h) { return float_of((uint32_t)h << 16); }

INLINE vh v_to_bf16(vf x)
{
    uint32_t bits = bits_of(x), upper = bits >> 16;
    uint32_t rounded = (bits + 0x7FFF + (upper & 1)) >> 16;

    return (vh)(x != x ? upper | 0x40 : rounded);
}

INLINE vf v_from_fp16(vh h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = h & 0x7FFF;
    uint32_t normal = (magnitude << 13) + (112u << 23);                 /* exponent bias 15 -> 127 */
    uint32_t subnormal = bits_of((float)(int32_t)magnitude * 0x1p-24f); /* exact */
    uint32_t special = (magnitude << 13) | 0x7F800000 | (magnitude > 0x7C00 ? 0x400000 : 0);

    return float_of(sign | (magnitude >= 0x7C00 ? special : magnitude >= 0x400 ? normal : subnormal));
}

INLINE vh v_to_fp16(vf x)
{
    uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
    uint32_t normal = (magnitude - (112u << 23) + 0xFFF + (magnitude >> 13 & 1)) >> 13;
    /* One unit of 0.5f's last place is one unit of a subnormal half: the add does the rounding. */
    uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000;
    uint32_t finite = magnitude < 0x38800000 ? subnormal : normal;
    uint32_t nan = 0x7E00 | (magnitude >> 13 & 0x3FF);

    return (vh)(sign | (magnitude > 0x7F800000 ? nan : magnitude >= 0x477FF000 ? 0x7C00 : finite));
}

INLINE vi v_bits(vf x) { return bits_of(x); }
INLINE vf v_of_bits(vi x) { return float_of(x); }
INLINE vi vi_set1(uint32_t x) { return x; }
INLINE vi vi_add(vi a, vi b) { return a + b; }
INLINE vi vi_and(vi a, vi b) { return a & b; }
INLINE vi vi_xor(vi a, vi b) { return a ^ b; }
INLINE vi vi_mul(vi a, vi b) { return a * b; }
INLINE vi vi_srl(vi x, const int by) { return x >> by; }
INLINE vi vi_sll(vi x, const int by) { return x << by; }
INLINE vi vi_iota(void) { return 0; }
INLINE vi vi_max(vi a, vi b) { return (int32_t)a > (int32_t)b ? a : b; }
INLINE vi vi_add_if_less(vi n, vf a, vf b) { return n + (a < b); }
INLINE vh vi_to_half(vi x) { return (vh)x; }
INLINE vh vi_upper_half(vi x) { return (vh)(x >> 16); }

INLINE vf v_sign(vf x) { return x > 0 ? 1.0f : x < 0 ? -1.0f : x; }

typedef struct {
    float values[16];
} vt;

INLINE vi vi_load_bytes(const void *address) { return *(const uint8_t *)address; }
INLINE void vi_store_bytes(void *address, vi x) { *(uint8_t *)address = (uint8_t)x; }
INLINE vf v_from_int8(const void *address) { return *(const int8_t *)address; }
INLINE vf v_from_e4m3(const void *address)
{
    uint32_t byte = *(const uint8_t *)address;

    return v_from_fp16((vh)((byte & 0x80) << 8 | (byte & 0x7F) << 7));
}
INLINE vt vt_load(const float *values)
{
    vt table;
    memcpy(&table, values, sizeof table);
    return table;
}
INLINE vt vt_scale(vt table, vf by)
{
    for (int i = 0; i < 16; i++)
        table.values[i] *= by;
    return table;
}
INLINE vf vt_at(const vt table, vi index) { return table.values[index & 15]; }

typedef struct {
    vh values[16];
} vht;

INLINE vht vht_of(vt table)
{
    vht halves;
    for (int i = 0; i < 16; i++)
        halves.values[i] = v_to_bf16(table.values[i]);
    return halves;
}
INLINE void vht_store(void *address, const uint8_t *codes, vht table)
{
    vh *to = address;
    for (int i = 0; i < 16; i++) {
        v_store_half(to + i, table.values[codes[i] & 15]);
        v_store_half(to + 16 + i, table.values[codes[i] >> 4]);
    }
}

INLINE void v_add_squares(vd *acc, vf x) { acc[0] += (double)x * (double)x; }
INLINE void vd_store(double *address, vd x) { *address = x; }

INLINE int v_any_nan(vf a, vf b) /* a branch for each element would cost more than it saves */
{
    (void)a, (void)b;
    return 1;
}

INLINE pair pair_from_bf16(const void *address)
{
    return (pair){v_from_bf16(v_load_half(address)), v_from_bf16(v_load_half((const vh *)address + 1))};
}

INLINE vf join_one(vh p, vh r) { return float_of(((uint32_t)p << 16) + (r ^ 0x8000u) - 0x8000u); }

INLINE pair pair_join(const void *param, const void *remainder)
{
    const vh *p = param, *r = remainder;

    return (pair){join_one(v_load_half(p), v_load_half(r)), join_one(v_load_half(p + 1), v_load_half(r + 1))};
}

INLINE void pair_store_upper(void *address, vi a, vi b)
{
    v_store_half(address, vi_upper_half(a));
    v_store_half((vh *)address + 1, vi_upper_half(b));
}
INLINE void pair_store_lower(void *address, vi a, vi b)
{
    v_store_half(address, vi_to_half(a));
    v_store_half((vh *)address + 1, vi_to_half(b));
}
INLINE pair pair_group(pair x) { return x; }
INLINE pair pair_ungroup(pair x) { return x; }
INLINE void pair_places(vi *a, vi *b)
{
    *a = 0;
    *b = 1;
}

#include "unit.inc"

const struct opt_kernels opt_portable = OPT_TABLE("portable");
