// The CPU device's cuda_runtime.h: what the sources here use of CUDA C++, on top of C++17. The definitions that need no
// template are in device.cc. rewrite.sed turns k<<<...>>>(...) into k %cpu::config(...)(...), found under "Launches".
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <math.h>
#include <tuple>
#include <type_traits>

#define BOOKENDS_CPU_DEVICE 1
#define CUDART_VERSION 13000

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __forceinline__ inline __attribute__((always_inline))
#define __shared__ static thread_local // one OS thread runs a block from its first instruction to its last
#ifndef __clang__
#define __builtin_assume(x) ((void)0)
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Vector types, with CUDA's sizes and alignments. Kernels move elements of any type through them, 16 bytes at a time;
// may_alias tells the C++ compiler, which would take such accesses for unrelated ones.

#define CPU_VECTOR_TYPES(T, name, align2, align4)                                                                      \
    struct [[gnu::may_alias]] name##1 { T x; };                                                                        \
    struct alignas(align2) [[gnu::may_alias]] name##2 { T x, y; };                                                     \
    struct [[gnu::may_alias]] name##3 { T x, y, z; };                                                                  \
    struct alignas(align4) [[gnu::may_alias]] name##4 { T x, y, z, w; };                                               \
    inline name##1 make_##name##1(T x) { return {x}; }                                                                 \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                                         \
    inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                                                 \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
CPU_VECTOR_TYPES(signed char, char, 2, 4)
CPU_VECTOR_TYPES(unsigned char, uchar, 2, 4)
CPU_VECTOR_TYPES(short, short, 4, 8)
CPU_VECTOR_TYPES(unsigned short, ushort, 4, 8)
CPU_VECTOR_TYPES(int, int, 8, 16)
CPU_VECTOR_TYPES(unsigned, uint, 8, 16)
CPU_VECTOR_TYPES(float, float, 8, 16)
CPU_VECTOR_TYPES(long long, longlong, 16, 16)
CPU_VECTOR_TYPES(unsigned long long, ulonglong, 16, 16)
CPU_VECTOR_TYPES(double, double, 16, 16)
#undef CPU_VECTOR_TYPES

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned vx = 1, unsigned vy = 1, unsigned vz = 1) : x(vx), y(vy), z(vz) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
    constexpr operator uint3() const { return {x, y, z}; }
};

constexpr int warpSize = 32;
inline thread_local uint3 threadIdx, blockIdx, blockDim, gridDim;

// ---------------------------------------------------------------------------------------------------------------------
// Errors: CUDA's numbers and words. A kernel's error is cudaErrorLaunchFailure, sticky until cudaDeviceReset, and
// cudaGetErrorString then says which kernel and block, and what went wrong.

#define CPU_ERRORS(E)                                                                                                  \
    E(cudaSuccess, 0, "no error")                                                                                      \
    E(cudaErrorInvalidValue, 1, "invalid argument")                                                                    \
    E(cudaErrorMemoryAllocation, 2, "out of memory")                                                                   \
    E(cudaErrorInvalidConfiguration, 9, "invalid configuration argument")                                              \
    E(cudaErrorInvalidMemcpyDirection, 21, "invalid copy direction for memcpy")                                        \
    E(cudaErrorInvalidDeviceFunction, 98, "invalid device function")                                                   \
    E(cudaErrorNoDevice, 100, "no CUDA-capable device is detected")                                                    \
    E(cudaErrorInvalidDevice, 101, "invalid device ordinal")                                                           \
    E(cudaErrorInvalidResourceHandle, 400, "invalid resource handle")                                                  \
    E(cudaErrorIllegalState, 401, "the operation cannot be performed in the present state")                            \
    E(cudaErrorNotReady, 600, "device not ready")                                                                      \
    E(cudaErrorMisalignedAddress, 716, "misaligned address")                                                           \
    E(cudaErrorLaunchFailure, 719, "unspecified launch failure")                                                       \
    E(cudaErrorNotSupported, 801, "operation not supported")                                                           \
    E(cudaErrorStreamCaptureUnsupported, 900, "operation not permitted when stream is capturing")                      \
    E(cudaErrorStreamCaptureInvalidated, 901, "operation failed due to a previous error during capture")               \
    E(cudaErrorStreamCaptureMerge, 902, "operation would result in a merge of separate capture sequences")             \
    E(cudaErrorStreamCaptureUnmatched, 903, "capture was not ended in the same stream as it began")                    \
    E(cudaErrorStreamCaptureUnjoined, 904, "capturing stream has unjoined work")                                       \
    E(cudaErrorStreamCaptureImplicit, 906, "operation would make the legacy stream depend on a capture")          \
    E(cudaErrorCapturedEvent, 907, "operation not permitted on an event last recorded in a capturing stream")          \
    E(cudaErrorInvalidClusterSize, 912, "a kernel launch error has occurred due to cluster misconfiguration")          \
    E(cudaErrorUnknown, 999, "unknown error")

enum cudaError {
#define E(name, number, words) name = number,
    CPU_ERRORS(E)
#undef E
};
using cudaError_t = cudaError;

const char *cudaGetErrorString(cudaError_t error);
const char *cudaGetErrorName(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();

// ---------------------------------------------------------------------------------------------------------------------
// Memory. Fresh memory is 0xFF all over (NaN as floats, -1 as ints), so that a read of what nobody wrote shows.

enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};
using cudaStream_t = struct CUstream_st *;
using cudaEvent_t = struct CUevent_st *;
using cudaGraph_t = struct CUgraph_st *;
using cudaGraphExec_t = struct CUgraphExec_st *;
constexpr unsigned cudaHostAllocDefault = 0, cudaHostAllocPortable = 1, cudaHostAllocMapped = 2;

cudaError_t cudaMalloc(void **p, size_t bytes);
cudaError_t cudaFree(void *p);
cudaError_t cudaMallocHost(void **p, size_t bytes, unsigned flags = 0);
cudaError_t cudaFreeHost(void *p);
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream = 0);
cudaError_t cudaMemset(void *p, int value, size_t bytes);
cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t stream = 0);
cudaError_t cudaMemGetInfo(size_t *available, size_t *total);

template <class T> cudaError_t cudaMalloc(T **p, size_t bytes) { return cudaMalloc((void **)p, bytes); }
template <class T> cudaError_t cudaMallocHost(T **p, size_t bytes, unsigned flags = 0) {
    return cudaMallocHost((void **)p, bytes, flags);
}
template <class T> cudaError_t cudaHostAlloc(T **p, size_t bytes, unsigned flags) {
    return cudaMallocHost((void **)p, bytes, flags);
}

// ---------------------------------------------------------------------------------------------------------------------
// Streams, events and graphs. Every call is done when it returns, so a stream is always idle (except in adversary mode,
// adversary.h).
// A capturing stream keeps what it is asked to do and the graph does it again at each launch, in the same order.

constexpr unsigned cudaStreamDefault = 0, cudaStreamNonBlocking = 1;
constexpr unsigned cudaEventDefault = 0, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2;
enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal,
    cudaStreamCaptureModeThreadLocal,
    cudaStreamCaptureModeRelaxed
};
enum cudaStreamCaptureStatus {
    cudaStreamCaptureStatusNone,
    cudaStreamCaptureStatusActive,
    cudaStreamCaptureStatusInvalidated
};

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags);
inline cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithFlags(stream, 0); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority);
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest); // 0 and 0: there is but one
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
inline cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = 0);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t stop);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags = 0);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);

// ---------------------------------------------------------------------------------------------------------------------
// The device.

struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin, sharedMemPerMultiprocessor;
    int major, minor, multiProcessorCount, warpSize, maxThreadsPerBlock, maxThreadsPerMultiProcessor, l2CacheSize;
    int maxThreadsDim[3], maxGridSize[3];
};
enum cudaDeviceAttr {
    cudaDevAttrMaxThreadsPerBlock = 1,
    cudaDevAttrMaxSharedMemoryPerBlock = 8,
    cudaDevAttrWarpSize = 10,
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrL2CacheSize = 38,
    cudaDevAttrMaxThreadsPerMultiProcessor = 39,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
    cudaDevAttrCooperativeLaunch = 95,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
    cudaDevAttrClusterLaunch = 120
};
enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributePreferredSharedMemoryCarveout = 9,
    cudaFuncAttributeNonPortableClusterSizeAllowed = 14
};
struct cudaFuncAttributes { // what no CPU knows is 0; ptxVersion is 90: kernels find what compute capability 9.0 has
    size_t sharedSizeBytes, constSizeBytes, localSizeBytes;
    int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion, cacheModeCA, maxDynamicSharedSizeBytes;
    int preferredShmemCarveout, clusterDimMustBeSet, requiredClusterWidth, requiredClusterHeight, requiredClusterDepth;
    int clusterSchedulingPolicyPreference, nonPortableClusterSizeAllowed;
};

cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device);
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDeviceSynchronize();
inline cudaError_t cudaCtxResetPersistingL2Cache() { return cudaSuccess; } // there is no L2 to keep lines in
cudaError_t cudaDeviceReset(); // forgets a sticky error and kernels' attributes; memory, streams and events stay
cudaError_t cudaRuntimeGetVersion(int *version);
cudaError_t cudaDriverGetVersion(int *version);

// The driver's functions by name; here there is cuTensorMapEncodeTiled (cudaTypedefs.h).
enum cudaDriverEntryPointQueryResult {
    cudaDriverEntryPointSuccess = 0,
    cudaDriverEntryPointSymbolNotFound = 1,
    cudaDriverEntryPointVersionNotSufficent = 2 // CUDA's spelling
};
enum cudaGetDriverEntryPointFlags {
    cudaEnableDefault = 0,
    cudaEnableLegacyStream = 1,
    cudaEnablePerThreadDefaultStream = 2
};
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                             unsigned long long flags,
                                             cudaDriverEntryPointQueryResult *found = nullptr);

cudaError_t cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute attribute, int value);
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *kernel);

template <class T> cudaError_t cudaFuncSetAttribute(T *kernel, cudaFuncAttribute attribute, int value) {
    return cudaFuncSetAttribute((const void *)kernel, attribute, value);
}
template <class T> cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, T *kernel) {
    return cudaFuncGetAttributes(attributes, (const void *)kernel);
}
template <class T>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, T, int /*block size*/, size_t /*shared*/) {
    *blocks = 1;
    return cudaSuccess;
}

// ---------------------------------------------------------------------------------------------------------------------
// Launches: kernel %cpu::config(grid, block, shared, stream)(arguments...), and cudaLaunchKernelEx. Grids run one after
// the other, so that a programmatic launch finds its predecessors done (except in adversary mode, adversary.h). The
// blocks of a cluster run at the same time, each on its own OS thread.

enum cudaLaunchAttributeID {
    cudaLaunchAttributeIgnore = 0,
    cudaLaunchAttributeClusterDimension = 4,
    cudaLaunchAttributeProgrammaticStreamSerialization = 6
};
union cudaLaunchAttributeValue {
    char pad[64];
    struct { unsigned x, y, z; } clusterDim;
    int programmaticStreamSerializationAllowed;
};
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    char pad[8 - sizeof(cudaLaunchAttributeID)];
    cudaLaunchAttributeValue val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    unsigned numAttrs;
};

cudaError_t cudaOccupancyMaxActiveClusters(int *clusters, const void *kernel, const cudaLaunchConfig_t *config);
template <class T>
cudaError_t cudaOccupancyMaxActiveClusters(int *clusters, T *kernel, const cudaLaunchConfig_t *config) {
    return cudaOccupancyMaxActiveClusters(clusters, (const void *)kernel, config);
}

namespace cpu {

// `watched`: the device receives calls at atomics, fences and early starts, for ThreadSanitizer or the adversary mode.
// `hostile`: adversary mode.
extern const bool watched, hostile;
void before_atomic(const void *p), after_atomic(const void *p);
void at_fence(), at_proxy_fence(), at_dependency_wait(), at_dependency_trigger();

// The arguments of a launch, until the kernel's own parameter types are known.
template <class... A> struct call;

// What stands between <<< and >>>.
struct config : cudaLaunchConfig_t {
    config(dim3 grid, dim3 block, size_t shared = 0, cudaStream_t in = 0)
        : cudaLaunchConfig_t{grid, block, shared, in, nullptr, 0} {}
    template <class... A> call<A...> operator()(A &&...arguments) const {
        return {*this, std::forward_as_tuple(std::forward<A>(arguments)...)};
    }
};
template <class... A> struct call {
    config where;
    std::tuple<A &&...> arguments;
};

// Runs (or captures) `body` once for every thread of the grid; `kernel` is for names and attributes.
cudaError_t launch(const void *kernel, const cudaLaunchConfig_t *where, std::function<void()> body);

// The launch: arguments have become parameters, by value, here and now; every thread gets its own copy of them.
template <class... P>
cudaError_t launch(void (*kernel)(P...), const cudaLaunchConfig_t *where, const std::tuple<P...> &parameters) {
    return launch((const void *)kernel, where, [kernel, parameters] { std::apply(kernel, parameters); });
}
template <class... P, class... A> void operator%(void (*kernel)(P...), call<A...> &&c) {
    static_assert(sizeof...(P) == sizeof...(A), "a kernel is launched with all its arguments");
    launch(kernel, &c.where, std::tuple<P...>(std::move(c.arguments)));
}

// What threads can meet at. The order is that of the names in device.cc.
enum class op {
    syncthreads, syncthreads_count, syncthreads_and, syncthreads_or,
    syncwarp, shfl, shfl_up, shfl_down, shfl_xor, ballot, any, all, match_any,
    add, min_signed, max_signed, min_unsigned, max_unsigned, bits_and, bits_or, bits_xor
};

inline thread_local int thread_index;     // of the running thread, x fastest
inline thread_local void *dynamic_shared; // the block's dynamic shared memory

int barrier(op what, int predicate);
unsigned long long meet(op what, unsigned mask, unsigned long long value, int source);
int source_lane(op what, int operand, int width);
void poison(void *p, size_t bytes);
void yield();                                    // lets other threads of the block run
[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char *format, ...); // ends the launch with an error

// Clusters (what cooperative_groups.h asks for).
void cluster_arrive();
void cluster_wait();
unsigned cluster_rank(), cluster_blocks();
unsigned shared_rank(const void *p);           // whose dynamic shared memory p points into
void *map_shared(const void *p, unsigned rank); // what p is in the running block, in that one

template <class T> void poison(T &variable) { poison((void *)&variable, sizeof(T)); }

template <class T> T shuffle(op what, unsigned mask, T value, int operand, int width) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    unsigned long long bits = 0;
    memcpy(&bits, &value, sizeof(T));
    bits = meet(what, mask, bits, source_lane(what, operand, width));
    memcpy(&value, &bits, sizeof(T));
    return value;
}

template <class To, class From> To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From) && std::is_trivially_copyable_v<From>);
    To to;
    memcpy(&to, &from, sizeof(to));
    return to;
}

} // namespace cpu

template <class... P, class... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(P...), A &&...arguments) {
    static_assert(sizeof...(P) == sizeof...(A), "a kernel is launched with all its arguments");
    return cpu::launch(kernel, config, std::tuple<P...>(std::forward<A>(arguments)...));
}

inline void cudaGridDependencySynchronize() {
    if (cpu::watched) cpu::at_dependency_wait();
}
inline void cudaTriggerProgrammaticLaunchCompletion() {
    if (cpu::watched) cpu::at_dependency_trigger();
}

// ---------------------------------------------------------------------------------------------------------------------
// Barriers and warp operations.

inline void __syncthreads() { cpu::barrier(cpu::op::syncthreads, 0); }
inline int __syncthreads_count(int predicate) { return cpu::barrier(cpu::op::syncthreads_count, predicate); }
inline int __syncthreads_and(int predicate) { return cpu::barrier(cpu::op::syncthreads_and, predicate); }
inline int __syncthreads_or(int predicate) { return cpu::barrier(cpu::op::syncthreads_or, predicate); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { cpu::meet(cpu::op::syncwarp, mask, 0, 0); }

template <class T> T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
    return cpu::shuffle(cpu::op::shfl, mask, value, lane, width);
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    return cpu::shuffle(cpu::op::shfl_up, mask, value, (int)delta, width);
}
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    return cpu::shuffle(cpu::op::shfl_down, mask, value, (int)delta, width);
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
    return cpu::shuffle(cpu::op::shfl_xor, mask, value, lane_mask, width);
}

inline unsigned __ballot_sync(unsigned mask, int p) { return (unsigned)cpu::meet(cpu::op::ballot, mask, p != 0, 0); }
inline int __any_sync(unsigned mask, int p) { return (int)cpu::meet(cpu::op::any, mask, p != 0, 0); }
inline int __all_sync(unsigned mask, int p) { return (int)cpu::meet(cpu::op::all, mask, p != 0, 0); }
inline unsigned __activemask() { return 1u << (cpu::thread_index & 31); } // lanes run one by one: never more than this

template <class T> unsigned __match_any_sync(unsigned mask, T value) {
    static_assert(std::is_trivially_copyable_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
    unsigned long long bits = 0;
    memcpy(&bits, &value, sizeof(T));
    return (unsigned)cpu::meet(cpu::op::match_any, mask, bits, 0);
}

#define CPU_REDUCE(name, T, what)                                                                                      \
    inline T name(unsigned mask, T value) { return (T)cpu::meet(cpu::op::what, mask, (unsigned)value, 0); }
CPU_REDUCE(__reduce_add_sync, int, add)
CPU_REDUCE(__reduce_add_sync, unsigned, add)
CPU_REDUCE(__reduce_min_sync, int, min_signed)
CPU_REDUCE(__reduce_min_sync, unsigned, min_unsigned)
CPU_REDUCE(__reduce_max_sync, int, max_signed)
CPU_REDUCE(__reduce_max_sync, unsigned, max_unsigned)
CPU_REDUCE(__reduce_and_sync, unsigned, bits_and)
CPU_REDUCE(__reduce_or_sync, unsigned, bits_or)
CPU_REDUCE(__reduce_xor_sync, unsigned, bits_xor)
#undef CPU_REDUCE

// ---------------------------------------------------------------------------------------------------------------------
// Atomics: true ones, since blocks run on several OS threads. As on a GPU they order nothing else; fences do.

namespace cpu {

template <class T> struct same { using type = T; };
template <class T> using same_t = typename same<T>::type; // a parameter that takes no part in deduction

// Tells the device of an atomic operation, as long as it lives.
struct atomic_access {
    const void *p;
    explicit atomic_access(const void *address) : p(address) {
        if (watched) before_atomic(p);
    }
    ~atomic_access() {
        if (watched) after_atomic(p);
    }
};

// Replaces *p by f(*p) in one step, whatever T is, and returns what was there. CUDA has no atomics on long.
template <class T, class F> T atomic_update(T *p, F f) {
    static_assert(!std::is_same_v<T, long> && !std::is_same_v<T, unsigned long>, "CUDA wants long long here");
    static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8);
    using word = std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;
    atomic_access access(p);
    word *at = (word *)p, seen = __atomic_load_n(at, __ATOMIC_RELAXED);
    for (;;) {
        T old = bit_cast<T>(seen);
        word next = bit_cast<word>(static_cast<T>(f(old)));
        if (__atomic_compare_exchange_n(at, &seen, next, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return old;
    }
}

} // namespace cpu

template <class T> T atomicAdd(T *p, cpu::same_t<T> v) {
    if constexpr (std::is_integral_v<T> && sizeof(T) >= 4) {
        cpu::atomic_access access(p);
        return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
    } else return cpu::atomic_update(p, [=](T old) { return old + v; });
}
inline float2 atomicAdd(float2 *p, float2 v) { // as in CUDA, each element atomically, not the whole
    return {atomicAdd(&p->x, v.x), atomicAdd(&p->y, v.y)};
}
inline float4 atomicAdd(float4 *p, float4 v) {
    return {atomicAdd(&p->x, v.x), atomicAdd(&p->y, v.y), atomicAdd(&p->z, v.z), atomicAdd(&p->w, v.w)};
}
template <class T> T atomicSub(T *p, cpu::same_t<T> v) {
    return cpu::atomic_update(p, [=](T old) { return (T)((std::make_unsigned_t<T>)old - (std::make_unsigned_t<T>)v); });
}
template <class T> T atomicExch(T *p, cpu::same_t<T> v) { return cpu::atomic_update(p, [=](T) { return v; }); }
template <class T> T atomicMin(T *p, cpu::same_t<T> v) {
    return cpu::atomic_update(p, [=](T old) { return v < old ? v : old; });
}
template <class T> T atomicMax(T *p, cpu::same_t<T> v) {
    return cpu::atomic_update(p, [=](T old) { return old < v ? v : old; });
}
template <class T> T atomicAnd(T *p, cpu::same_t<T> v) { return cpu::atomic_update(p, [=](T old) { return old & v; }); }
template <class T> T atomicOr(T *p, cpu::same_t<T> v) { return cpu::atomic_update(p, [=](T old) { return old | v; }); }
template <class T> T atomicXor(T *p, cpu::same_t<T> v) { return cpu::atomic_update(p, [=](T old) { return old ^ v; }); }
template <class T> T atomicCAS(T *p, cpu::same_t<T> expected, cpu::same_t<T> v) {
    return cpu::atomic_update(p, [=](T old) { return old == expected ? v : old; });
}
inline unsigned atomicInc(unsigned *p, unsigned top) {
    return cpu::atomic_update(p, [=](unsigned old) { return old >= top ? 0 : old + 1; });
}

inline void __threadfence() {
#ifndef __SANITIZE_THREAD__ // which understands no fence, so that g++ warns; atomics are a CPU's strongest anyway
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
    if (cpu::watched) cpu::at_fence();
}
inline void __threadfence_block() { __threadfence(); }
inline void __threadfence_system() { __threadfence(); }

// ---------------------------------------------------------------------------------------------------------------------
// Intrinsics.

// Cache-hinted accesses: a CPU takes no hints.
#define CPU_LOAD(name) template <class T> T name(const T *p) { return *p; }
#define CPU_STORE(name) template <class T> void name(T *p, cpu::same_t<T> value) { *p = value; }
CPU_LOAD(__ldg)
CPU_LOAD(__ldca)
CPU_LOAD(__ldcg)
CPU_LOAD(__ldcs)
CPU_LOAD(__ldlu)
CPU_LOAD(__ldcv)
CPU_STORE(__stwb)
CPU_STORE(__stcg)
CPU_STORE(__stcs)
CPU_STORE(__stwt)
#undef CPU_LOAD
#undef CPU_STORE

inline int __float_as_int(float x) { return cpu::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return cpu::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return cpu::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return cpu::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return cpu::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return cpu::bit_cast<double>(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz((unsigned)x); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll((unsigned long long)x); }
inline unsigned __brev(unsigned x) {
    x = __builtin_bswap32(x);
    x = (x >> 4 & 0x0f0f0f0fu) | (x & 0x0f0f0f0fu) << 4;
    x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
    return (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
inline int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline long long __mul64hi(long long a, long long b) { return (long long)((__int128)a * b >> 64); }

// min and max of two numbers of the same or of mixed types; of a NaN and a number it is the number, as on a GPU.
template <class A, class B, class T = std::common_type_t<A, B>, class = std::enable_if_t<std::is_arithmetic_v<T>>>
T min(A a, B b) {
    if constexpr (std::is_floating_point_v<T>) return (T)fmin((T)a, (T)b);
    else return (T)b < (T)a ? (T)b : (T)a;
}
template <class A, class B, class T = std::common_type_t<A, B>, class = std::enable_if_t<std::is_arithmetic_v<T>>>
T max(A a, B b) {
    if constexpr (std::is_floating_point_v<T>) return (T)fmax((T)a, (T)b);
    else return (T)a < (T)b ? (T)b : (T)a;
}

#if !defined(__GLIBC_PREREQ) || !__GLIBC_PREREQ(2, 42) // where <math.h> has these already
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
#endif
inline float __fdividef(float a, float b) { // as CUDA says, 0 from 2^126 on
    return fabsf(b) > 0x1p126f && b - b == 0 ? 0 : a / b;
}
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
// Macros, since libraries declare some of these names for themselves.
#define __expf(x) expf(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __powf(x, y) powf(x, y)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)

inline long long clock64() { return std::chrono::steady_clock::now().time_since_epoch().count(); }
inline void __nanosleep(unsigned) { cpu::yield(); }
[[noreturn]] inline void __trap() { cpu::fail("__trap in thread (%u,%u,%u)", threadIdx.x, threadIdx.y, threadIdx.z); }
