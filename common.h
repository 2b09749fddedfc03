// Shared by all kernel files and copied along with them. Of the project, encoder_forward.cu includes this header alone;
// encoder_backward.cu also includes parts/launch.h and parts/group_positions.h; classifier_fused.cu and lm_head.cu
// include parts/launch.h, parts/hopper.h and parts/classifier.h, and lm_head.cu parts/lm_head_product.h.
//
// Sources: Packed128 and its loads and stores follow the idea of llm.c's dev/cuda/common.h (one struct that makes the
// compiler use 128-bit accesses whatever the element type).
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>

namespace bookends {

constexpr int kWarpSize = 32;

// ---------------------------------------------------------------------------------------------------------------------
// checks

// Ends the program on a CUDA error. For programs (main, training loops); launchers and the library return the error.
inline void cuda_check(cudaError_t error, const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
    if (error == cudaSuccess) return;
    fprintf(stderr, "%s:%d: CUDA error: %s\n", file, line, cudaGetErrorString(error));
    exit(EXIT_FAILURE);
}

// ---------------------------------------------------------------------------------------------------------------------
// arithmetic

// For dividend >= 0 and divisor > 0; no sum that could overflow.
template <typename T>
__host__ __device__ constexpr T ceil_div(T dividend, T divisor) {
    return dividend / divisor + (dividend % divisor != 0);
}

// The block sizes that launchers take: whole warps, at most 1024 threads.
inline bool valid_block_size(int block_size) {
    return block_size > 0 && block_size <= 1024 && block_size % kWarpSize == 0;
}

// The number of blocks for `threads` threads, of a valid block size. A grid holds 2^31-1 blocks: jobs beyond that get
// larger blocks, and the launch refuses what blocks of 1024 threads cannot hold either.
inline unsigned grid_blocks(long long threads, int *block_size) {
    if (ceil_div(threads, (long long)*block_size) > INT32_MAX) *block_size = 1024;
    const long long blocks = ceil_div(threads, (long long)*block_size);
    return blocks > UINT32_MAX ? UINT32_MAX : (unsigned)blocks;
}

// The quiet NaN in each element type: what a position with a bad id gets.
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

// Keeps the host thread's pending CUDA error (which cudaGetLastError() returns) as it is found: an error that occurs in
// this object's lifetime is not left pending. The exception: an error that replaces another one stays, as CUDA cannot
// restore the first.
struct KeepPendingError {
    const bool was_pending = cudaPeekAtLastError() != cudaSuccess;
    ~KeepPendingError() {
        if (!was_pending) cudaGetLastError();
    }
};

// kernel<<<grid, block, shared, stream>>>(arguments...). Returns the error of this launch: cudaGetLastError() would return
// an error that an earlier call left pending, and clear it. shared: bytes of dynamic shared memory, 48 KB at most
// (parts/launch.h takes more).
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
// Packed: N neighbouring elements that travel in one load or store instruction

// The address of a Packed must be a multiple of its size (1 to 16 bytes, a power of two).
template <typename T, int N>
struct alignas(sizeof(T) * N) Packed {
    static constexpr int size = N;
    T payload[N];
    __host__ __device__ T &operator[](int i) { return payload[i]; }
    __host__ __device__ const T &operator[](int i) const { return payload[i]; }
};

// 16 bytes, the widest access of a thread: 4 floats, 8 halves or 8 bfloat16s. Kernels call it x128.
template <typename T>
using Packed128 = Packed<T, 16 / (int)sizeof(T)>;

// The built-in type of as many bytes, which the cache-hinted intrinsics take.
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

// By value: from a reference into device memory the compiler would copy byte by byte, as memcpy promises no alignment.
template <typename P>
__device__ P from_bits(typename Bits<sizeof(P)>::type bits) {
    P value;
    memcpy(&value, &bits, sizeof(P));
    return value;
}

// Loads: plain; read-only for the whole kernel, so that L1 may keep it (nc); from the L2, past L1 (cg); streaming, read
// once (cs).
template <typename P, typename T>
__device__ P load_packed(const T *address) {
    return from_bits<P>(*reinterpret_cast<const typename Bits<sizeof(P)>::type *>(address));
}
template <typename P, typename T>
__device__ P load_packed_nc(const T *address) {
    return from_bits<P>(__ldg(reinterpret_cast<const typename Bits<sizeof(P)>::type *>(address)));
}
template <typename P, typename T>
__device__ P load_packed_cg(const T *address) {
    return from_bits<P>(__ldcg(reinterpret_cast<const typename Bits<sizeof(P)>::type *>(address)));
}
template <typename P, typename T>
__device__ P load_packed_cs(const T *address) {
    return from_bits<P>(__ldcs(reinterpret_cast<const typename Bits<sizeof(P)>::type *>(address)));
}

// Stores: plain; streaming, first out of the caches (cs); kept in L2 only (cg).
template <typename P, typename T>
__device__ void store_packed(T *address, const P &value) {
    *reinterpret_cast<typename Bits<sizeof(P)>::type *>(address) = to_bits(value);
}
template <typename P, typename T>
__device__ void store_packed_cs(T *address, const P &value) {
    __stcs(reinterpret_cast<typename Bits<sizeof(P)>::type *>(address), to_bits(value));
}
template <typename P, typename T>
__device__ void store_packed_cg(T *address, const P &value) {
    __stcg(reinterpret_cast<typename Bits<sizeof(P)>::type *>(address), to_bits(value));
}

// 2^x, off by two ulps at most; results below the normal numbers are 0. One instruction, where exp2f takes four.
__device__ inline float fast_exp2(float x) {
#ifdef __CUDA_ARCH__
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#else
    return exp2f(x);
#endif
}

// half2 for half, __nv_bfloat162 for __nv_bfloat16: declared only, to name the type.
half2 pair_type(half);
__nv_bfloat162 pair_type(__nv_bfloat16);

// To float and back, two elements an instruction where there is one for two; bfloat16 is the upper half of a float.
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

// a + b, each element's exact sum rounded once; 16-bit elements go two an instruction.
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

// *address += value, element by element, each addition rounded to T; others may add to the same elements meanwhile.
// From compute capability 9.0 on one instruction adds up to 16 bytes; before, it takes one for 2 halves or for 1 float.
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

// The same at 128 bits, under the names people know from llm.c.
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
template <typename T>
__device__ void store128cg(T *address, Packed128<T> value) {
    store_packed_cg(address, value);
}

// The most elements (a power of two, at most max_elements) that one access may hold when rows of C elements start at
// each of these pointers: what a launcher asks before it picks a vector width.
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

// By one instruction for integers, whose order is that of the floats once the negative ones are turned round. (Where
// there are NaNs, the result is one of the values.)
__device__ inline float warp_reduce_max(float value) {
    auto turned = [](int bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
    return __int_as_float(turned(__reduce_max_sync(0xffffffffu, turned(__float_as_int(value)))));
}

// Warps reduce by shuffles, then every warp reduces the warps' results. blockDim.x must be a multiple of 32, and all
// threads must call. `identity` is 0 for a sum, -INFINITY for a maximum. May be called again at once: a barrier stands
// at the end, so that the shared memory is free.
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

// The sum of the values of all threads before this one in the block, and of all in *total. As many threads as above.
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
    const T through_me = inclusive(value);
    if (lane == kWarpSize - 1) partial[warp] = through_me;
    __syncthreads();
    const T warp_sums = inclusive(lane < warps ? partial[lane] : T(0));
    *total = __shfl_sync(0xffffffffu, warp_sums, kWarpSize - 1);
    const T before = __shfl_sync(0xffffffffu, warp_sums, max(warp - 1, 0));
    __syncthreads();
    return (warp > 0 ? before : T(0)) + through_me - value;
}

// ---------------------------------------------------------------------------------------------------------------------
// the status word: which position held the first bad token id or target

// One 64-bit word in device memory, set to kStatusOk by its owner (cudaMemset with 0xff bytes does it). A kernel that
// meets an id outside 0..V-1 lowers it to that position (an index into the ids) if it is the smallest so far. A target
// is an id too, and its position that of its row. Nobody resets the word in between, so one look after many launches is
// enough. As a signed number: -1, or the first bad position.
typedef unsigned long long status_word;
constexpr status_word kStatusOk = ~0ull;

__host__ __device__ inline bool id_in_range(int id, int V) { return (unsigned)id < (unsigned)V; }

// status may be null: then nobody wants to know.
__device__ inline void report_bad_id(status_word *status, long long position) {
    if (status != nullptr) atomicMin(status, (status_word)position);
}

// ---------------------------------------------------------------------------------------------------------------------
// versions of a kernel

// What the same input gives, whatever the load of the GPU: the same bits at every block size; the same bits as long as
// the block size is the same (a float sum over more threads is rounded elsewhere); other bits each time.
enum Reproducible { kSameBits, kSameAtABlockSize, kNotReproducible };

// One row of a kernel file's table: the number people type, a short name, the one idea it adds, the launcher, the block
// size that was fastest when it was last tuned (what the library launches with), and what it promises.
template <typename Launcher>
struct Version {
    int number;
    const char *name;
    const char *idea;
    Launcher launch;
    int block_size;
    Reproducible reproducible = kSameBits;
};

// The row with that number; 0 asks for the last, which is the default: deterministic, best over the measured shapes.
// Null if there is none.
template <typename Launcher, size_t count>
const Version<Launcher> *find_version(const Version<Launcher> (&table)[count], int number) {
    for (const Version<Launcher> &row : table) {
        if (row.number == number) return &row;
    }
    return number == 0 ? &table[count - 1] : nullptr;
}

}  // namespace bookends
