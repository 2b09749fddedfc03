// Parts of rows in accesses of at most 16 bytes, and stochastic rounding. For encoder_backward.cu,
// embedding_lookup_backward.cu and embedding_update.cu.
#pragma once
#include "../common.h"

namespace bookends {

// `width` neighbouring elements of a row, in accesses of at most 16 bytes. load() bypasses the L1: for rows that a
// block reads once, and for partial sums that other blocks store during the same launch. load_gradient() and
// store_gradient() are streaming accesses: for rows that are read and written once, so that the L2 keeps other data.
template <typename T, int width>
struct Columns {
    static constexpr int part = width < Packed128<T>::size ? width : Packed128<T>::size;
    Packed<T, part> parts[width / part];

    __device__ void load(const T *address) {
#pragma unroll
        for (int i = 0; i < width / part; i++) parts[i] = load_packed_cg<Packed<T, part>>(address + i * part);
    }
    __device__ void store(T *address) const {
#pragma unroll
        for (int i = 0; i < width / part; i++) store_packed(address + i * part, parts[i]);
    }
    __device__ void load_gradient(const T *address) {
#pragma unroll
        for (int i = 0; i < width / part; i++) parts[i] = load_packed_cs<Packed<T, part>>(address + i * part);
    }
    __device__ void store_gradient(T *address) const {
#pragma unroll
        for (int i = 0; i < width / part; i++) store_packed_cs(address + i * part, parts[i]);
    }
    __device__ T &operator[](int k) { return parts[k / part][k % part]; }
};

// 16 random bits for element i, the same in every kernel. SplitMix64 (Steele, Lea, Flood 2014), a word for 4 elements.
__device__ inline unsigned rounding_bits(uint64_t seed, size_t i) {
    return (unsigned)(mix64(seed + (i / 4 + 1) * 0x9e3779b97f4a7c15ull) >> (i % 4 * 16)) & 0xffff;
}

__device__ inline half round_toward_zero(float x, half) { return __float2half_rz(x); }
__device__ inline __nv_bfloat16 round_toward_zero(float x, __nv_bfloat16) { return __float2bfloat16_rz(x); }

// x rounded to one of its two neighbours in floatX, inner and outer (further from zero). The probability of outer is
// (x - inner) / (outer - inner), in steps of 2^-16. If rounding to nearest gives an infinity, this does too, so that an
// overflow is visible.
template <typename floatX>
__device__ floatX round_stochastic(float x, unsigned random) {
    const floatX nearest = (floatX)x, inner = round_toward_zero(x, floatX());
    if ((float)nearest == x || isnan(x) || isinf((float)nearest)) return nearest;
    unsigned short bits;
    memcpy(&bits, &inner, sizeof(bits));
    bits++;
    floatX outer;
    memcpy(&outer, &bits, sizeof(bits));
    const float way = fabsf(x - (float)inner), step = fabsf((float)outer - (float)inner);
    return way / step * 65536.0f > (float)random ? outer : inner;  // step is a power of two, or infinite
}

}  // namespace bookends
