// Functions that all kernel files use. To copy a kernel file, copy this header too, and the headers of parts/ that the
// file includes.
//
// Source of Packed128 and its loads and stores: llm.c's dev/cuda/common.h, where one struct makes the compiler use
// 128-bit accesses for every element type.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace bookends {

constexpr int kWarpSize = 32;

// Number of blocks of 1024 threads per multiprocessor, for launch bounds: two leave 32 registers per thread. Without
// the bound, the compiler uses 42 to 52 registers in some kernels, and half of the threads do not fit.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 800 || (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1100)
constexpr int kResidentBlocks = 2;
#else
constexpr int kResidentBlocks = 1;  // 1536 threads per multiprocessor
#endif

// ---------------------------------------------------------------------------------------------------------------------
// arithmetic

// The quotient, rounded up. Requires dividend >= 0 and divisor > 0. Does not overflow.
template <typename T>
__host__ __device__ constexpr T ceil_div(T dividend, T divisor) {
    return dividend / divisor + (dividend % divisor != 0);
}

// Whether launchers accept a block size: a multiple of 32, at most 1024.
inline bool valid_block_size(int block_size) {
    return block_size > 0 && block_size <= 1024 && block_size % kWarpSize == 0;
}

// The number of blocks for `threads` threads, given a valid block size. A grid holds 2^31-1 blocks: where it would need
// more, *block_size becomes 1024. The launch refuses a grid that is still too large.
inline unsigned grid_blocks(long long threads, int *block_size) {
    if (ceil_div(threads, (long long)*block_size) > INT32_MAX) *block_size = 1024;
    const long long blocks = ceil_div(threads, (long long)*block_size);
    return blocks > UINT32_MAX ? UINT32_MAX : (unsigned)blocks;
}

// The quiet NaN of an element type: the output of a position with a bad id.
template <typename floatX>
__device__ floatX quiet_nan() {
    return (floatX)__int_as_float(0x7fffffff);
}

// The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit.
__host__ __device__ inline uint64_t mix64(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// ---------------------------------------------------------------------------------------------------------------------
// launches

// Keeps the host thread's pending CUDA error (the one that cudaGetLastError() returns) unchanged: an error that occurs
// in this object's lifetime is not left pending. Exception: an error that replaces another one stays, since CUDA cannot
// restore the first.
struct KeepPendingError {
    const bool was_pending = cudaPeekAtLastError() != cudaSuccess;
    ~KeepPendingError() {
        if (!was_pending) cudaGetLastError();
    }
};

// kernel<<<grid, block, shared, stream>>>(arguments...). Returns the error of this launch: cudaGetLastError() would
// return an error that an earlier call left pending, and clear it. shared: bytes of dynamic shared memory, at most
// 48 KB (parts/launch.h allows more).
template <typename... Parameters, typename... Arguments>
cudaError_t launch_kernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared, cudaStream_t stream,
                          Arguments &&...arguments) {
    const KeepPendingError keep;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

// ---------------------------------------------------------------------------------------------------------------------
// Packed: N neighbouring elements, loaded or stored by one instruction

// The address of a Packed must be a multiple of its size (1 to 16 bytes, a power of two).
template <typename T, int N>
struct alignas(sizeof(T) * N) Packed {
    static constexpr int size = N;
    T payload[N];
    __host__ __device__ T &operator[](int i) { return payload[i]; }
    __host__ __device__ const T &operator[](int i) const { return payload[i]; }
};

// 16 bytes, the widest access of a thread: 4 floats, 8 halves or 8 bfloat16s. Kernels name the type x128.
template <typename T>
using Packed128 = Packed<T, 16 / (int)sizeof(T)>;

// The built-in type of `bytes` bytes. The intrinsics with cache hints require built-in types.
template <int bytes>
struct Bits;
template <>
struct Bits<2> {
    typedef unsigned short type;
};
template <>
struct Bits<4> {
    typedef unsigned int type;
};
template <>
struct Bits<8> {
    typedef uint2 type;
};
template <>
struct Bits<16> {
    typedef uint4 type;
};

template <typename P>
__device__ typename Bits<sizeof(P)>::type to_bits(const P &value) {
    typename Bits<sizeof(P)>::type bits;
    memcpy(&bits, &value, sizeof(P));
    return bits;
}

// The parameter is passed by value: for a reference into device memory the compiler would copy single bytes, since
// memcpy assumes no alignment.
template <typename P>
__device__ P from_bits(typename Bits<sizeof(P)>::type bits) {
    P value;
    memcpy(&value, &bits, sizeof(P));
    return value;
}

// Loads: plain; from the L2, without L1 (cg); streaming, for data that is read once (cs).
template <typename P, typename T>
__device__ P load_packed(const T *address) {
    return from_bits<P>(*reinterpret_cast<const typename Bits<sizeof(P)>::type *>(address));
}
template <typename P, typename T>
__device__ P load_packed_cg(const T *address) {
    return from_bits<P>(__ldcg(reinterpret_cast<const typename Bits<sizeof(P)>::type *>(address)));
}
template <typename P, typename T>
__device__ P load_packed_cs(const T *address) {
    return from_bits<P>(__ldcs(reinterpret_cast<const typename Bits<sizeof(P)>::type *>(address)));
}

// Stores: plain; streaming, for lines that the caches should evict first (cs).
template <typename P, typename T>
__device__ void store_packed(T *address, const P &value) {
    *reinterpret_cast<typename Bits<sizeof(P)>::type *>(address) = to_bits(value);
}
template <typename P, typename T>
__device__ void store_packed_cs(T *address, const P &value) {
    __stcs(reinterpret_cast<typename Bits<sizeof(P)>::type *>(address), to_bits(value));
}

// 2^x with an error of at most two ulps; subnormal results become 0. One instruction, where exp2f takes four.
__device__ inline float fast_exp2(float x) {
#ifdef __CUDA_ARCH__
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#else
    return exp2f(x);
#endif
}

// The return type is the type of two elements: half2 or __nv_bfloat162. These functions have no definitions.
half2 pair_type(half);
__nv_bfloat162 pair_type(__nv_bfloat16);

// Conversions to float and back. bfloat16 is the upper half of a float; two elements are converted by one instruction.
template <typename T, int N>
__device__ void to_floats(float (&values)[N], const Packed<T, N> &packed) {
    if constexpr (std::is_same_v<T, __nv_bfloat16> && N > 1) {
#pragma unroll
        for (int k = 0; k < N; k += 2) {
            unsigned two;
            memcpy(&two, &packed.payload[k], sizeof(two));
            values[k] = __uint_as_float(two << 16);
            values[k + 1] = __uint_as_float(two & 0xffff0000u);
        }
    } else {
#pragma unroll
        for (int k = 0; k < N; k++) values[k] = (float)packed[k];
    }
}
template <typename T, int N>
__device__ Packed<T, N> from_floats(const float (&values)[N]) {
    Packed<T, N> packed;
#pragma unroll
    for (int k = 0; k < N; k++) {
        if constexpr (std::is_same_v<T, __nv_bfloat16> && N > 1) {
            if (k % 2 == 0) {
                const __nv_bfloat162 two = __floats2bfloat162_rn(values[k], values[k + 1]);
                memcpy(&packed.payload[k], &two, sizeof(two));
            }
        } else {
            packed[k] = (T)values[k];
        }
    }
    return packed;
}

// a + b, each element rounded once. One instruction adds two 16-bit elements.
template <typename T, int N>
__device__ Packed<T, N> add_packed(Packed<T, N> a, const Packed<T, N> &b) {
    if constexpr (sizeof(T) == 2 && N > 1) {
        decltype(pair_type(T())) sum, other;
#pragma unroll
        for (int k = 0; k < N; k += 2) {
            memcpy(&sum, &a.payload[k], sizeof(sum));
            memcpy(&other, &b.payload[k], sizeof(other));
            sum = __hadd2(sum, other);
            memcpy(&a.payload[k], &sum, sizeof(sum));
        }
    } else {
        for (int k = 0; k < N; k++) a[k] = (T)((float)a[k] + (float)b[k]);
    }
    return a;
}

// *address += value, with atomic additions, each rounded to T. From compute capability 9.0 on, one instruction adds 16
// bytes; before, one instruction adds two 16-bit elements or one float.
template <typename T, int N>
__device__ void atomic_add_packed(T *address, const Packed<T, N> &value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if constexpr (sizeof(value) == 16) {
        const uint4 bits = to_bits(value);
        if constexpr (std::is_same_v<T, float>) {
            asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(__uint_as_float(bits.x)),
                         "f"(__uint_as_float(bits.y)), "f"(__uint_as_float(bits.z)), "f"(__uint_as_float(bits.w))
                         : "memory");
        } else if constexpr (std::is_same_v<T, half>) {
            asm volatile("red.global.add.noftz.v4.f16x2 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(bits.x),
                         "r"(bits.y), "r"(bits.z), "r"(bits.w)
                         : "memory");
        } else {
            asm volatile("red.global.add.noftz.v4.bf16x2 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(bits.x),
                         "r"(bits.y), "r"(bits.z), "r"(bits.w)
                         : "memory");
        }
        return;
    }
#endif
    if constexpr (sizeof(T) == 2 && N > 1) {
        typedef decltype(pair_type(T())) pair;
        for (int k = 0; k < N; k += 2) {
            pair two;
            memcpy(&two, &value.payload[k], sizeof(two));
            atomicAdd(reinterpret_cast<pair *>(address + k), two);
        }
    } else {
        for (int k = 0; k < N; k++) atomicAdd(address + k, value[k]);
    }
}

// Loads and stores of 128 bits, with llm.c's names.
template <typename T>
__device__ Packed128<T> load128(const T *address) {
    return load_packed<Packed128<T>>(address);
}
template <typename T>
__device__ Packed128<T> load128cs(const T *address) {
    return load_packed_cs<Packed128<T>>(address);
}
template <typename T>
__device__ void store128(T *address, Packed128<T> value) {
    store_packed(address, value);
}
template <typename T>
__device__ void store128cs(T *address, Packed128<T> value) {
    store_packed_cs(address, value);
}

// The number of elements per access (a power of two, at most max_elements) that the alignment allows, for matrices with
// rows of C elements that start at these pointers. Launchers choose their vector width by it.
template <typename T, typename... Pointers>
int vector_width(int max_elements, long long C, const T *first, Pointers... rest) {
    uintptr_t all = (uintptr_t)C * sizeof(T) | (uintptr_t)first;
    ((all |= (uintptr_t)rest), ...);
    int width = max_elements;
    while (width > 1 && all % (width * sizeof(T)) != 0) width /= 2;
    return width;
}

// ---------------------------------------------------------------------------------------------------------------------
// reductions: every thread of the warp (or block) gets the result

__device__ inline float warp_reduce_sum(float value) {
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
}

// Uses the integer instruction: floats are ordered like their bits as integers, if all bits of negative floats but the
// sign are inverted. With NaNs among the values, the result is any of the values.
__device__ inline float warp_reduce_max(float value) {
    auto ordered = [](int bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
    return __int_as_float(ordered(__reduce_max_sync(0xffffffffu, ordered(__float_as_int(value)))));
}

// Each warp reduces its values, then every warp reduces the results of all warps. Requires that blockDim.x is a
// multiple of 32 and that all threads call. `identity` is 0 for a sum, -INFINITY for a maximum. Ends with a barrier, so
// that the next call may use the shared memory.
template <float (*warp_reduce)(float)>
__device__ float block_reduce(float value, float identity) {
    __shared__ float partial[kWarpSize];
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
    value = warp_reduce(value);
    if (lane == 0) partial[warp] = value;
    __syncthreads();
    value = warp_reduce(lane < warps ? partial[lane] : identity);
    __syncthreads();
    return value;
}
__device__ inline float block_reduce_sum(float value) { return block_reduce<warp_reduce_sum>(value, 0.0f); }
__device__ inline float block_reduce_max(float value) { return block_reduce<warp_reduce_max>(value, -INFINITY); }

// The sum of the values of the threads before this one; *total is the sum of all. Same requirements as block_reduce.
template <typename T>
__device__ T block_exclusive_sum(T value, T *total) {
    __shared__ T partial[kWarpSize];
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
    auto inclusive = [&](T sum) {
        for (int offset = 1; offset < kWarpSize; offset *= 2) {
            const T below = __shfl_up_sync(0xffffffffu, sum, offset);
            if (lane >= offset) sum += below;
        }
        return sum;
    };
    const T in_warp = inclusive(value);
    if (lane == kWarpSize - 1) partial[warp] = in_warp;
    __syncthreads();
    const T warp_sums = inclusive(lane < warps ? partial[lane] : T(0));
    *total = __shfl_sync(0xffffffffu, warp_sums, kWarpSize - 1);
    const T before = __shfl_sync(0xffffffffu, warp_sums, max(warp - 1, 0));
    __syncthreads();
    return (warp > 0 ? before : T(0)) + in_warp - value;
}

// ---------------------------------------------------------------------------------------------------------------------
// the status word: the first position with a bad token id or target

// One 64-bit word in device memory. Its owner sets it to kStatusOk (cudaMemset with 0xff bytes). A kernel that reads an
// id or a target outside 0..V-1 lowers the word to the position (the index of the id; of a target, the row) if that is
// less. Kernels do not reset it: its owner may read it once after many launches. As a signed number it is -1 or the
// first bad position.
typedef unsigned long long status_word;
constexpr status_word kStatusOk = ~0ull;

__host__ __device__ inline bool id_in_range(int id, int V) { return (unsigned)id < (unsigned)V; }

// status may be null: nothing is reported.
__device__ inline void report_bad_id(status_word *status, long long position) {
    if (status != nullptr) atomicMin(status, (status_word)position);
}

// ---------------------------------------------------------------------------------------------------------------------
// versions of a kernel

// The bits of a version's results for the same input: the same at every block size; the same at one block size (float
// sums over another number of threads round differently); different in each launch.
enum Reproducible { kSameBits, kSameAtABlockSize, kNotReproducible };

struct NoProperties {};

// One row of a kernel file's table of versions.
template <typename Launcher, typename Properties = NoProperties>
struct Version {
    int number;
    const char *name;
    const char *idea;  // what it adds to the version before
    Launcher launch;
    int block_size;  // the fastest one when it was last tuned; the library uses it
    Reproducible reproducible = kSameBits;
    Properties properties = {};  // properties that the check of this kernel file depends on
};

// The row with a number; null if there is none. Number 0 means the last row, the default version: it is deterministic
// and the fastest over the measured shapes.
template <typename Row, size_t count>
const Row *find_version(const Row (&table)[count], int number) {
    for (const Row &row : table) {
        if (row.number == number) return &row;
    }
    return number == 0 ? &table[count - 1] : nullptr;
}

}  // namespace bookends
