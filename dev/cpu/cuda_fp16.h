// The CPU device's cuda_fp16.h: half, with CUDA's names and roundings.
#pragma once

#include "float16.h"

struct __half : cpu::float16<__half> {
    using float16::float16;

    static unsigned short round(float x) {
        uint32_t u = cpu::bit_cast<uint32_t>(x), sign = u >> 16 & 0x8000;
        u &= 0x7fffffff;
        if (u > 0x7f800000) return 0x7fff;         // NaN
        if (u >= 0x47800000) return sign | 0x7c00; // 2^16 and up; 65520 and up become infinity below, by the carry
        if (u < 0x38800000) {                      // subnormal: a float in [0.5, 1) has half's last place as its own
            float shifted = cpu::bit_cast<float>(u) + 0.5f;
            return sign | (cpu::bit_cast<uint32_t>(shifted) - cpu::bit_cast<uint32_t>(0.5f));
        }
        u += 0xfff + (u >> 13 & 1);
        return sign | (u - (112u << 23)) >> 13;
    }
    static float widen(unsigned short h) {
        uint32_t sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31, mantissa = h & 0x3ff;
        if (exponent == 0) { // zero and the subnormals, in units of 2^-24
            float x = (float)mantissa * 0x1p-24f;
            return sign ? -x : x;
        }
        return cpu::bit_cast<float>(sign | (exponent == 31 ? 255u : exponent + 112) << 23 | mantissa << 13);
    }
};
struct __half2 : cpu::float16x2<__half2, __half> {
    using float16x2::float16x2;
};
using half = __half;
using half2 = __half2;

inline __half __float2half(float x) { return __half(x); }
inline __half __float2half_rn(float x) { return __half(x); }
inline __half __float2half_rz(float x) { return cpu::round_directed<__half>(x, false); }
inline __half __float2half_ru(float x) { return cpu::round_directed<__half>(x, x > 0); }
inline __half __float2half_rd(float x) { return cpu::round_directed<__half>(x, x < 0); }
inline __half __double2half(double x) { return __half(x); }
inline float __half2float(__half x) { return x; }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }
inline __half __ushort_as_half(unsigned short bits) { return __half::from_bits(bits); }
inline __half2 make_half2(__half x, __half y) { return __half2(x, y); }
inline __half2 __halves2half2(__half x, __half y) { return __half2(x, y); }
inline __half2 __half2half2(__half x) { return __half2(x, x); }
inline __half2 __floats2half2_rn(float x, float y) { return __half2(x, y); }
inline __half2 __float22half2_rn(float2 v) { return __half2(v.x, v.y); }
inline float2 __half22float2(__half2 v) { return {v.x, v.y}; }
inline __half __low2half(__half2 v) { return v.x; }
inline __half __high2half(__half2 v) { return v.y; }

// As in CUDA, each half of the pair atomically, not the whole.
inline __half2 atomicAdd(__half2 *p, __half2 v) {
    return {atomicAdd(&p->x, v.x), atomicAdd(&p->y, v.y)};
}
