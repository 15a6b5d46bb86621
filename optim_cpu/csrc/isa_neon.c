/* isa_neon.c - 4 lanes: Advanced SIMD, which every 64-bit Arm CPU has. Big-endian ones run the portable unit: the zips
 * below take the first of two 16-bit halves for the lower one.
 *
 * The results depend on the control register, which fp_environment.h sets to zero: NaN operands keep sign and payload and
 * become quiet, as on x86 (with DN, casts of NaN would give the default NaN); fp16 is IEEE, with infinity (AHP); and
 * subnormals are not flushed (FZ). Conversions of fp16 never flush, also with FZ16. */

#include "isa.h"

#if defined(OPT_HAS_NEON)

#include <arm_neon.h>

enum { LANES = 4, DOUBLE_LANES = 2, STREAMS = 0, FLUSHES = 0, GROUPED = 0, TILE_ROWS = 2 };

typedef float32x4_t vf;
typedef uint16x4_t vh;
typedef float64x2_t vd;
typedef uint32x4_t vi;
typedef struct {
    vf a, b;
} pair;

INLINE vf v_set1(float x) { return vdupq_n_f32(x); }
INLINE vf v_load(const void *address) { return vld1q_f32(address); }
INLINE void v_store(void *address, vf x) { vst1q_f32(address, x); }
INLINE vh v_load_half(const void *address) { return vld1_u16(address); }
INLINE void v_store_half(void *address, vh x) { vst1_u16(address, x); }
INLINE void v_stream_half(void *address, vh x) { v_store_half(address, x); } /* never called */
INLINE void v_fence(void) {}

INLINE vf v_add(vf a, vf b) { return vaddq_f32(a, b); }
INLINE vf v_sub(vf a, vf b) { return vsubq_f32(a, b); }
INLINE vf v_mul(vf a, vf b) { return vmulq_f32(a, b); }
INLINE vf v_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
INLINE vf v_div(vf a, vf b) { return vdivq_f32(a, b); }
INLINE vf v_sqrt(vf a) { return vsqrtq_f32(a); }
INLINE vf v_zero_below(vf x, vf y, vf least)
{
    uint32x4_t below = vcaltq_f32(y, least); /* all bits of a lane, or none */

    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(x), vshrq_n_u32(below, 1)));
}

INLINE float v_total(vf x)
{
    float32x2_t two = vadd_f32(vget_low_f32(x), vget_high_f32(x));

    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

INLINE vi v_bits(vf x) { return vreinterpretq_u32_f32(x); }
INLINE vf v_of_bits(vi x) { return vreinterpretq_f32_u32(x); }
INLINE vi vi_set1(uint32_t x) { return vdupq_n_u32(x); }
INLINE vi vi_add(vi a, vi b) { return vaddq_u32(a, b); }
INLINE vi vi_and(vi a, vi b) { return vandq_u32(a, b); }
INLINE vi vi_xor(vi a, vi b) { return veorq_u32(a, b); }
INLINE vi vi_mul(vi a, vi b) { return vmulq_u32(a, b); }
INLINE vi vi_srl(vi x, const int by)
{
    return vshlq_u32(x, vdupq_n_s32(-by));
} /* the compiler makes it ushr */
INLINE vi vi_sll(vi x, const int by) { return vshlq_u32(x, vdupq_n_s32(by)); }
INLINE vi vi_iota(void)
{
    static const uint32_t lanes[LANES] = {0, 1, 2, 3};
    return vld1q_u32(lanes);
}
INLINE vh vi_to_half(vi x) { return vmovn_u32(x); }
INLINE vh vi_upper_half(vi x) { return vshrn_n_u32(x, 16); }
INLINE vi vi_max(vi a, vi b)
{
    return vreinterpretq_u32_s32(vmaxq_s32(vreinterpretq_s32_u32(a), vreinterpretq_s32_u32(b)));
}
INLINE vi vi_add_if_less(vi n, vf a, vf b) { return vsubq_u32(n, vcltq_f32(a, b)); }

typedef struct {
    float32x4_t values[4];
} vt;

INLINE uint8x8_t load_bytes(const void *address)
{
    uint32_t bytes;
    memcpy(&bytes, address, sizeof bytes);
    return vcreate_u8(bytes);
}
INLINE vi vi_load_bytes(const void *address)
{
    return vmovl_u16(vget_low_u16(vmovl_u8(load_bytes(address))));
}
INLINE void vi_store_bytes(void *address, vi x)
{
    uint16x4_t halves = vmovn_u32(x);
    uint8x8_t bytes = vmovn_u16(vcombine_u16(halves, halves));
    uint32_t four = vget_lane_u32(vreinterpret_u32_u8(bytes), 0);
    memcpy(address, &four, sizeof four);
}
INLINE int16x4_t load_int8(const void *address)
{
    return vget_low_s16(vmovl_s8(vreinterpret_s8_u8(load_bytes(address))));
}
INLINE vf v_from_int8(const void *address) { return vcvtq_f32_s32(vmovl_s16(load_int8(address))); }
INLINE vf v_from_e4m3(const void *address)
{
    uint16x4_t wide = vshl_n_u16(vreinterpret_u16_s16(load_int8(address)), 7);

    return vcvt_f32_f16(vreinterpret_f16_u16(vand_u16(wide, vdup_n_u16(0xBF80))));
}
INLINE vt vt_load(const float *values)
{
    return (vt){{v_load(values), v_load(values + 4), v_load(values + 8), v_load(values + 12)}};
}
INLINE vt vt_scale(vt table, vf by)
{
    for (int i = 0; i < 4; i++)
        table.values[i] = vmulq_f32(table.values[i], by);
    return table;
}
INLINE vf vt_at(vt table, vi index)
{
    uint8x16x4_t bytes = {{vreinterpretq_u8_f32(table.values[0]), vreinterpretq_u8_f32(table.values[1]),
                           vreinterpretq_u8_f32(table.values[2]), vreinterpretq_u8_f32(table.values[3])}};
    /* The four bytes of value i are at 4i to 4i + 3. */
    vi at = vmlaq_u32(vi_set1(0x03020100), vi_and(index, vi_set1(15)), vi_set1(0x04040404));

    return vreinterpretq_f32_u8(vqtbl4q_u8(bytes, vreinterpretq_u8_u32(at)));
}

/* Comparisons with a NaN are false. */
INLINE vi is_number(vf x) { return vceqq_f32(x, x); }

INLINE vf v_canonical(vf x) { return vbslq_f32(is_number(x), x, v_of_bits(vi_set1(0x7FC00000))); }

INLINE vf v_sign(vf x)
{
    vf one = v_of_bits(vorrq_u32(vi_and(v_bits(x), vi_set1(0x80000000)), v_bits(v_set1(1))));
    vi not_zero = vorrq_u32(vcgtzq_f32(x), vcltzq_f32(x));

    return vbslq_f32(not_zero, one, x);
}

INLINE vf v_from_bf16(vh h) { return v_of_bits(vshll_n_u16(h, 16)); }

INLINE vh v_to_bf16(vf x)
{
    vi bits = v_bits(x), odd = vi_and(vshrq_n_u32(bits, 16), vi_set1(1));
    vi rounded = vi_add(bits, vi_add(odd, vi_set1(0x7FFF)));
    vi quiet = vorrq_u32(bits, vi_set1(0x400000));

    return vi_upper_half(vbslq_u32(is_number(x), rounded, quiet));
}

typedef struct {
    uint8x16_t lower, upper; /* bytes */
} vht;

INLINE vht vht_of(vt table)
{
    uint8x16_t low =
        vreinterpretq_u8_u16(vcombine_u16(v_to_bf16(table.values[0]), v_to_bf16(table.values[1])));
    uint8x16_t high =
        vreinterpretq_u8_u16(vcombine_u16(v_to_bf16(table.values[2]), v_to_bf16(table.values[3])));

    return (vht){vuzp1q_u8(low, high), vuzp2q_u8(low, high)};
}
INLINE void vht_store(void *address, const uint8_t *codes, vht table)
{
    uint8x16_t bytes = vld1q_u8(codes), low = vandq_u8(bytes, vdupq_n_u8(15)), high = vshrq_n_u8(bytes, 4);
    uint8_t *to = address;

    vst2q_u8(to, ((uint8x16x2_t){{vqtbl1q_u8(table.lower, low), vqtbl1q_u8(table.upper, low)}}));
    vst2q_u8(to + 32, ((uint8x16x2_t){{vqtbl1q_u8(table.lower, high), vqtbl1q_u8(table.upper, high)}}));
}

INLINE vf v_from_fp16(vh h) { return vcvt_f32_f16(vreinterpret_f16_u16(h)); }
INLINE vh v_to_fp16(vf x) { return vreinterpret_u16_f16(vcvt_f16_f32(x)); }

INLINE void v_add_squares(vd *acc, vf x)
{
    vd low = vcvt_f64_f32(vget_low_f32(x)), high = vcvt_high_f64_f32(x);

    acc[0] = vaddq_f64(acc[0], vmulq_f64(low, low));
    acc[1] = vaddq_f64(acc[1], vmulq_f64(high, high));
}
INLINE void vd_store(double *address, vd x) { vst1q_f64(address, x); }

INLINE int v_any_nan(vf a, vf b) { return vminvq_u32(vi_and(is_number(a), is_number(b))) == 0; }

INLINE pair pair_from_bf16(const void *address)
{
    uint16x8_t x = vld1q_u16(address);

    return (pair){v_from_bf16(vget_low_u16(x)), v_of_bits(vshll_high_n_u16(x, 16))};
}

INLINE pair pair_join(const void *param, const void *remainder)
{
    uint16x8_t p = vld1q_u16(param), r = vld1q_u16(remainder);
    /* A negative remainder borrows: subtract its sign bit. */
    uint16x8_t upper = vsubq_u16(p, vshrq_n_u16(r, 15));

    return (pair){vreinterpretq_f32_u16(vzip1q_u16(r, upper)), vreinterpretq_f32_u16(vzip2q_u16(r, upper))};
}

INLINE void pair_store_upper(void *address, vi a, vi b)
{
    vst1q_u16(address, vuzp2q_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b)));
}
INLINE void pair_store_lower(void *address, vi a, vi b)
{
    vst1q_u16(address, vuzp1q_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b)));
}
INLINE pair pair_group(pair x) { return x; }
INLINE pair pair_ungroup(pair x) { return x; }
INLINE void pair_places(vi *a, vi *b)
{
    *a = vi_iota();
    *b = vi_add(vi_iota(), vi_set1(LANES));
}

#include "unit.inc"

const struct opt_kernels opt_neon = OPT_TABLE("neon");

#endif
