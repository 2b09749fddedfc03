// The CPU device's cuda_bf16.h: bfloat16 (the upper half of a float), with CUDA's names and roundings.
#pragma once

#include "float16.h"

struct __nv_bfloat16 : cpu::float16<__nv_bfloat16> {
    using float16::float16;

    static unsigned short round(float x) {
        uint32_t u = cpu::bit_cast<uint32_t>(x);
        if ((u & 0x7fffffff) > 0x7f800000) return 0x7fff; // NaN
        return (u + 0x7fff + (u >> 16 & 1)) >> 16;
    }
    static float widen(unsigned short b) { return cpu::bit_cast<float>((uint32_t)b << 16); }
};
struct __nv_bfloat162 : cpu::float16x2<__nv_bfloat162, __nv_bfloat16> {
    using float16x2::float16x2;
};
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

inline __nv_bfloat16 __float2bfloat16(float x) { return __nv_bfloat16(x); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
inline __nv_bfloat16 __float2bfloat16_rz(float x) { return cpu::round_directed<__nv_bfloat16>(x, false); }
inline __nv_bfloat16 __float2bfloat16_ru(float x) { return cpu::round_directed<__nv_bfloat16>(x, x > 0); }
inline __nv_bfloat16 __float2bfloat16_rd(float x) { return cpu::round_directed<__nv_bfloat16>(x, x < 0); }
inline __nv_bfloat16 __double2bfloat16(double x) { return __nv_bfloat16(x); }
inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return __nv_bfloat16::from_bits(bits); }
inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return __nv_bfloat162(x, y); }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return __nv_bfloat162(x, y); }
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 x) { return __nv_bfloat162(x, x); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return __nv_bfloat162(x, y); }
inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return __nv_bfloat162(v.x, v.y); }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {v.x, v.y}; }
inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 v) { return v.x; }
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 v) { return v.y; }

// As in CUDA, each half of the pair atomically, not the whole.
inline __nv_bfloat162 atomicAdd(__nv_bfloat162 *p, __nv_bfloat162 v) {
    return {atomicAdd(&p->x, v.x), atomicAdd(&p->y, v.y)};
}
