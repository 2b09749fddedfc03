// What half and bfloat16 share on the CPU device: arithmetic in float, rounded once to 16 bits. That is the correctly
// rounded result of + - * /, because a float has more than twice as many bits of precision and two to spare.
#pragma once

#include "cuda_runtime.h"

namespace cpu {

// The float next to x such that rounding it to 16 bits rounds x correctly: round to odd, which remembers inexactness.
inline float narrow(double x) {
    float f = (float)x;
    if ((double)f == x || x != x) return f;
    uint32_t bits = bit_cast<uint32_t>(f);
    if (fabs((double)f) > fabs(x)) bits--;
    return bit_cast<float>(bits | 1);
}

// A 16-bit float. `self` is the type itself and says how to convert: self::round(float) -> bits, self::widen(bits).
template <class self> struct float16 {
    unsigned short bits;

    float16() = default;
    template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>> float16(T x) {
        if constexpr (std::is_same_v<T, float>) bits = self::round(x);
        else bits = self::round(narrow((double)x));
    }
    operator float() const { return self::widen(bits); }
    static self from_bits(unsigned short bits) {
        self x;
        x.bits = bits;
        return x;
    }

    friend self operator+(self a, self b) { return (float)a + (float)b; }
    friend self operator-(self a, self b) { return (float)a - (float)b; }
    friend self operator*(self a, self b) { return (float)a * (float)b; }
    friend self operator/(self a, self b) { return (float)a / (float)b; }
    friend self operator-(self a) { return from_bits(a.bits ^ 0x8000); }
    friend self &operator+=(self &a, self b) { return a = a + b; }
    friend self &operator-=(self &a, self b) { return a = a - b; }
    friend self &operator*=(self &a, self b) { return a = a * b; }
    friend self &operator/=(self &a, self b) { return a = a / b; }
    friend bool operator==(self a, self b) { return (float)a == (float)b; }
    friend bool operator!=(self a, self b) { return (float)a != (float)b; }
    friend bool operator<(self a, self b) { return (float)a < (float)b; }
    friend bool operator>(self a, self b) { return (float)a > (float)b; }
    friend bool operator<=(self a, self b) { return (float)a <= (float)b; }
    friend bool operator>=(self a, self b) { return (float)a >= (float)b; }
};

// Two of them in one 32-bit word.
template <class self, class T> struct alignas(4) float16x2 {
    T x, y;
    float16x2() = default;
    float16x2(T first, T second) : x(first), y(second) {}
    friend self operator+(self a, self b) { return self(a.x + b.x, a.y + b.y); }
    friend self operator-(self a, self b) { return self(a.x - b.x, a.y - b.y); }
    friend self operator*(self a, self b) { return self(a.x * b.x, a.y * b.y); }
    friend bool operator==(self a, self b) { return a.x == b.x && a.y == b.y; }
};

// x rounded toward zero, or away from it: its nearest 16-bit value, or the neighbour of that if it lies on the wrong
// side of x. The bits of neighbours are neighbours, up to infinity.
template <class T> T round_directed(float x, bool away) {
    T nearest(x);
    const float size = fabsf(nearest);
    if (away && size < fabsf(x)) nearest.bits++;
    if (!away && size > fabsf(x)) nearest.bits--;
    return nearest;
}

template <class T> using if_float16 = std::enable_if_t<std::is_base_of_v<float16<T>, T>>;
template <class T> using if_float16x2 = std::enable_if_t<std::is_base_of_v<float16x2<T, decltype(T::x)>, T>>;

} // namespace cpu

// The intrinsics that have one name for both kinds.
template <class T, class = cpu::if_float16<T>> T __hadd(T a, T b) { return a + b; }
template <class T, class = cpu::if_float16<T>> T __hsub(T a, T b) { return a - b; }
template <class T, class = cpu::if_float16<T>> T __hmul(T a, T b) { return a * b; }
template <class T, class = cpu::if_float16<T>> T __hdiv(T a, T b) { return a / b; }
template <class T, class = cpu::if_float16<T>> T __hmax(T a, T b) { return fmaxf((float)a, (float)b); }
template <class T, class = cpu::if_float16<T>> T __hmin(T a, T b) { return fminf((float)a, (float)b); }
template <class T, class = cpu::if_float16<T>> T __habs(T a) { return T::from_bits(a.bits & 0x7fff); }
template <class T, class = cpu::if_float16<T>> bool __hisnan(T a) { return (float)a != (float)a; }
template <class T, class = cpu::if_float16x2<T>> T __hadd2(T a, T b) { return a + b; }
template <class T, class = cpu::if_float16x2<T>> T __hmax2(T a, T b) { // a NaN is none
    return T(fmaxf((float)a.x, (float)b.x), fmaxf((float)a.y, (float)b.y));
}
template <class T, class = cpu::if_float16x2<T>> T __hmul2(T a, T b) { return a * b; }
template <class T, class = cpu::if_float16x2<T>> float __low2float(T a) { return a.x; }
template <class T, class = cpu::if_float16x2<T>> float __high2float(T a) { return a.y; }
