// Tests what the CPU device (dev/cpu) must do as a GPU does, on either: the file is plain CUDA.
//   cpu_device --list     prints the cases, one a line
//   cpu_device CASE       runs one; exit status 0: passed, 1: failed (a line says how), 77: skipped (a line says why)
// The cases at the end are about what only the CPU device promises: errors that name the kernel, and poisoned memory.

#include <cooperative_groups.h>
#include <cuda/ptx>
#include <cudaTypedefs.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "../../parts/hopper.h"

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <string>
#include <thread>
#include <vector>

namespace cg = cooperative_groups;
namespace ptx = cuda::ptx;

// Whether what came with compute capability 9.0 can be compiled.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define SM_90 1
#else
#define SM_90 0
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Helpers.

// Ends the case as failed unless `ok`.
__attribute__((format(printf, 2, 3))) void expect(bool ok, const char *format, ...) {
    if (ok) return;
    va_list arguments;
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    printf("\n");
    exit(1);
}

void check(cudaError_t error) {
    expect(error == cudaSuccess, "%s: %s", cudaGetErrorName(error), cudaGetErrorString(error));
}

void finish() {
    check(cudaGetLastError());
    check(cudaDeviceSynchronize());
}

[[noreturn]] void skip(const char *why) {
    printf("skipped: %s\n", why);
    exit(77);
}

// An array on the device, copied to and from vectors.
template <class T> struct array {
    T *p = nullptr;
    size_t n;
    explicit array(size_t count) : n(count) { check(cudaMalloc(&p, n * sizeof(T))); }
    array(size_t count, int byte) : array(count) { check(cudaMemset(p, byte, n * sizeof(T))); }
    array(const std::vector<T> &v) : array(v.size()) {
        check(cudaMemcpy(p, v.data(), n * sizeof(T), cudaMemcpyHostToDevice));
    }
    array(const array &) = delete;
    ~array() { cudaFree(p); }
    std::vector<T> get() const {
        finish();
        std::vector<T> v(n);
        check(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
        return v;
    }
};

template <class T> void expect_equal(const std::vector<T> &got, const std::vector<T> &want, const char *what) {
    for (size_t i = 0; i < want.size(); i++)
        expect(got[i] == want[i], "%s: element %zu is %g, not %g", what, i, (double)got[i], (double)want[i]);
}

// Whether the device has what came with compute capability 9.0. The CPU device has it, but no compute capability.
bool has_sm_90() {
    int major;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    return major == 0 || major >= 9;
}

// ---------------------------------------------------------------------------------------------------------------------
// The grid.

__global__ void count_visits(int *visits) {
    const size_t block = ((size_t)blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const size_t thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    visits[block * (blockDim.x * blockDim.y * blockDim.z) + thread] += 1 + (int)thread;
}

void case_grid() {
    const dim3 shapes[][2] = {{1, 1}, {7, 33}, {300, 1024}, {dim3(5, 3), dim3(7, 9)}, {dim3(2, 3, 4), dim3(3, 5, 7)}};
    for (const auto &shape : shapes) {
        const dim3 g = shape[0], b = shape[1];
        const size_t threads = b.x * b.y * b.z, blocks = g.x * g.y * g.z;
        array<int> visits(blocks * threads, 0);
        count_visits<<<g, b>>>(visits.p);
        std::vector<int> want(blocks * threads);
        for (size_t i = 0; i < want.size(); i++) want[i] = 1 + (int)(i % threads);
        expect_equal(visits.get(), want, "visits");
    }
}

template <int N> __global__ void add_one_each(int *p, const int n, const float scale) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) p[i] = (int)(i * scale) + N; // most threads of the last block return at once
}

void case_early_return() {
    array<int> a(1000, 0);
    add_one_each<3><<<8,
                      128>>>(a.p, 1000,
                             2.0f);
    std::vector<int> want(1000);
    for (int i = 0; i < 1000; i++) want[i] = 2 * i + 3;
    expect_equal(a.get(), want, "template launch");
}

void case_host_threads() {
    std::vector<std::thread> hosts;
    array<int> a(4 * 1000, 0);
    for (int h = 0; h < 4; h++)
        hosts.emplace_back([&, h] {
            for (int i = 0; i < 20; i++) add_one_each<1><<<8, 128>>>(a.p + 1000 * h, 1000, 1.0f);
            finish();
        });
    for (auto &h : hosts) h.join();
    std::vector<int> want(4000);
    for (int i = 0; i < 4000; i++) want[i] = i % 1000 + 1;
    expect_equal(a.get(), want, "four host threads");
}

// ---------------------------------------------------------------------------------------------------------------------
// Shared memory and barriers.

__global__ void reverse_static(const float *in, float *out) {
    __shared__ float tile[1024];
    const int i = threadIdx.x, n = blockDim.x;
    tile[i] = in[blockIdx.x * n + i];
    __syncthreads();
    out[blockIdx.x * n + i] = tile[n - 1 - i];
}

__global__ void reverse_dynamic(const float *in, float *out) {
    extern __shared__ __align__(16) float dynamic_tile[];
    const int i = threadIdx.x, n = blockDim.x;
    dynamic_tile[i] = in[blockIdx.x * n + i];
    __syncthreads();
    out[blockIdx.x * n + i] = dynamic_tile[n - 1 - i];
}

void case_shared_memory() {
    for (int n : {1, 31, 32, 33, 100, 1000, 1024}) {
        const int blocks = 5;
        std::vector<float> in(blocks * n), want(blocks * n);
        for (int i = 0; i < blocks * n; i++) in[i] = (float)i;
        for (int i = 0; i < blocks * n; i++) want[i] = in[i / n * n + n - 1 - i % n];
        array<float> a(in), b(in.size(), 0), c(in.size(), 0);
        reverse_static<<<blocks, n>>>(a.p, b.p);
        reverse_dynamic<<<blocks, n, n * sizeof(float)>>>(a.p, c.p);
        expect_equal(b.get(), want, "static");
        expect_equal(c.get(), want, "dynamic");
    }
}

__global__ void scan_block(int *data) { // Hillis and Steele's inclusive scan: two barriers a step
    __shared__ alignas(16) int sums[1024];
    const int i = threadIdx.x;
    sums[i] = data[blockIdx.x * blockDim.x + i];
    __syncthreads();
    for (int step = 1; step < (int)blockDim.x; step *= 2) {
        const int left = i >= step ? sums[i - step] : 0;
        __syncthreads();
        sums[i] += left;
        __syncthreads();
    }
    data[blockIdx.x * blockDim.x + i] = sums[i];
}

void case_barrier_loop() {
    for (int n : {1, 32, 77, 1024}) {
        std::vector<int> in(3 * n), want(3 * n);
        for (int i = 0; i < 3 * n; i++) in[i] = i % 7, want[i] = in[i] + (i % n ? want[i - 1] : 0);
        array<int> a(in);
        scan_block<<<3, n>>>(a.p);
        expect_equal(a.get(), want, "scan");
    }
}

__global__ void barrier_votes(int *out) {
    const int i = threadIdx.x;
    const int count = __syncthreads_count(i % 3 == 0), all = __syncthreads_and(i < 50), any = __syncthreads_or(i == 40);
    out[i] = count * 4 + (all != 0) * 2 + (any != 0);
}

void case_barrier_votes() {
    for (int n : {40, 41, 50, 51, 96}) {
        array<int> out(n, 0);
        barrier_votes<<<1, n>>>(out.p);
        const int want = (n + 2) / 3 * 4 + (n <= 50) * 2 + (n > 40);
        expect_equal(out.get(), std::vector<int>(n, want), "count, and, or");
    }
}

__global__ void block_sum(const float *in, float *out, int n) {
    __shared__ float partial[32];
    float sum = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += in[(size_t)blockIdx.x * n + i];
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffff, sum, offset);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = threadIdx.x % 32 < blockDim.x / 32 ? partial[threadIdx.x % 32] : 0;
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(0xffffffff, sum, offset);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

void case_block_sum() {
    const int blocks = 20, n = 3000;
    std::vector<float> in(blocks * n), want(blocks);
    for (int i = 0; i < blocks * n; i++) in[i] = (float)(i % 11), want[i / n] += in[i]; // exact in float
    array<float> a(in), out(blocks, 0);
    for (int threads : {32, 256, 1024}) {
        block_sum<<<blocks, threads>>>(a.p, out.p, n);
        expect_equal(out.get(), want, "sum");
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Warp operations.

template <class T> __global__ void shuffle_all(T *out, int operand, int width) {
    const int lane = threadIdx.x;
    const T value = (T)(float)(lane * 3 + 1);
    out[lane] = __shfl_sync(0xffffffff, value, operand, width);
    out[lane + 32] = __shfl_up_sync(0xffffffff, value, operand, width);
    out[lane + 64] = __shfl_down_sync(0xffffffff, value, operand, width);
    out[lane + 96] = __shfl_xor_sync(0xffffffff, value, operand, width);
}

template <class T> void test_shuffles(const char *type) {
    for (int width = 1; width <= 32; width *= 2)
        for (int operand = 0; operand < 32; operand++) {
            array<T> out(128, 0);
            shuffle_all<T><<<1, 32>>>(out.p, operand, width);
            const std::vector<T> got = out.get();
            for (int lane = 0; lane < 32; lane++) {
                const int first = lane / width * width, end = first + width;
                const int from[] = {first + operand % width, lane - operand >= first ? lane - operand : lane,
                                    lane + operand < end ? lane + operand : lane,
                                    (lane ^ operand) < end ? lane ^ operand : lane};
                for (int kind = 0; kind < 4; kind++)
                    expect((float)got[kind * 32 + lane] == (float)(from[kind] * 3 + 1),
                           "%s, shuffle %d, operand %d, width %d: lane %d has %g", type, kind, operand, width, lane,
                           (double)(float)got[kind * 32 + lane]);
            }
        }
}

// (The CPU device's launches take a kernel by its full name: template arguments are not deduced from the call.)
void case_shuffles() {
    test_shuffles<int>("int");
    test_shuffles<unsigned>("unsigned");
    test_shuffles<float>("float");
    test_shuffles<double>("double");
    test_shuffles<long long>("long long");
    test_shuffles<__half>("half");
    test_shuffles<__nv_bfloat16>("bfloat16");
}

__global__ void votes(unsigned *out) {
    const int lane = threadIdx.x % 32;
    unsigned *mine = out + threadIdx.x * 4;
    mine[0] = __ballot_sync(0xffffffff, lane % 3 == 0);
    mine[1] = __any_sync(0xffffffff, lane == 31) + 2 * __any_sync(0xffffffff, lane == 32);
    mine[2] = __all_sync(0xffffffff, lane < 32) + 2 * __all_sync(0xffffffff, lane < 31);
    __syncwarp();
    mine[3] = __activemask() >> lane & 1;
}

void case_votes() {
    array<unsigned> out(64 * 4, 0);
    votes<<<1, 64>>>(out.p);
    std::vector<unsigned> want;
    for (int i = 0; i < 64; i++) want.insert(want.end(), {0x49249249u, 1u, 1u, 1u});
    expect_equal(out.get(), want, "votes");
}

__global__ void match_and_reduce(unsigned *out) {
    const int lane = threadIdx.x;
    unsigned *mine = out + lane * 11;
    mine[0] = __match_any_sync(0xffffffff, lane % 5);
    mine[1] = __match_any_sync(0xffffffff, (unsigned long long)(lane / 16) << 40);
    mine[2] = __reduce_add_sync(0xffffffff, (unsigned)lane);
    mine[3] = (unsigned)__reduce_add_sync(0xffffffff, -lane);
    mine[4] = (unsigned)__reduce_min_sync(0xffffffff, lane - 16);
    mine[5] = __reduce_min_sync(0xffffffff, (unsigned)(lane - 16));
    mine[6] = (unsigned)__reduce_max_sync(0xffffffff, lane - 16);
    mine[7] = __reduce_max_sync(0xffffffff, (unsigned)(lane - 16));
    mine[8] = __reduce_and_sync(0xffffffff, ~(1u << lane % 4));
    mine[9] = __reduce_or_sync(0xffffffff, 1u << lane % 4);
    mine[10] = __reduce_xor_sync(0xffffffff, 1u << lane / 3);
}

void case_match_and_reduce() {
    array<unsigned> out(32 * 11, 0);
    match_and_reduce<<<1, 32>>>(out.p);
    std::vector<unsigned> want;
    for (int lane = 0; lane < 32; lane++) {
        unsigned same = 0;
        for (int other = lane % 5; other < 32; other += 5) same |= 1u << other;
        want.insert(want.end(), {same, lane < 16 ? 0xffffu : 0xffff0000u, 496u, (unsigned)-496, (unsigned)-16, 0u, 15u,
                                 0xffffffffu, 0xfffffff0u, 15u, 0x3ffu});
    }
    expect_equal(out.get(), want, "match and reduce");
}

__global__ void sub_warps(int *out) {
    const int lane = threadIdx.x % 32;
    int sum = 0;
    if (lane < 8) { // different numbers of operations in different parts of the warp
        sum = lane;
        for (int offset = 4; offset > 0; offset /= 2) sum += __shfl_xor_sync(0x000000ff, sum, offset, 8);
    } else if (lane % 2) {
        sum = (int)__ballot_sync(0xaaaaaa00, lane > 20);
    } else {
        if (lane == 30) return; // a lane that has returned is not waited for
        __syncwarp(0x55555500);
        sum = __shfl_sync(0x55555500, lane, 12);
    }
    out[threadIdx.x] = sum;
}

__global__ void partial_warp(int *out) { // 40 threads: the second warp has 8 lanes
    int sum = 1;
    if (threadIdx.x >= 32)
        for (int offset = 4; offset > 0; offset /= 2) sum += __shfl_down_sync(0xff, sum, offset, 8);
    out[threadIdx.x] = sum + (int)__ballot_sync(threadIdx.x < 32 ? 0xffffffff : 0xff, threadIdx.x >= 32);
}

void case_sub_warps() {
    array<int> out(96, 0);
    sub_warps<<<1, 96>>>(out.p);
    std::vector<int> want;
    for (int i = 0; i < 96; i++) {
        const int lane = i % 32;
        want.push_back(lane < 8 ? 28 : lane % 2 ? (int)0xaaa00000 : lane == 30 ? 0 : 12);
    }
    expect_equal(out.get(), want, "sub-warp masks");
    partial_warp<<<1, 40>>>(out.p);
    const std::vector<int> got = out.get();
    expect(got[0] == 1 && got[32] == 8 + 255 && got[39] > 255, "partial warp: %d %d", got[0], got[32]);
}

__global__ void half_warps(unsigned *out) { // the halves of a warp meet by themselves, one more often than the other
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, mask = lane < 16 ? 0x0000ffff : 0xffff0000;
    const int rounds = lane < 16 ? 3 + warp : 8 - warp;
    unsigned sum = 0;
    for (int i = 0; i < rounds; i++) {
        sum += __shfl_xor_sync(mask, lane + i, 5) + __shfl_sync(mask, lane * i, 15, 16);
        if (i % 2) __syncwarp(mask);
        sum += __popc(__ballot_sync(mask, lane % 3 == 0)) + __match_any_sync(mask, lane / 4) % 65535;
    }
    __syncthreads();
    out[threadIdx.x] = sum + __popc(__ballot_sync(0xffffffff, sum != 0));
}

void case_half_warps() {
    array<unsigned> out(128, 0);
    half_warps<<<1, 128>>>(out.p);
    std::vector<unsigned> want;
    for (unsigned t = 0; t < 128; t++) {
        const unsigned lane = t % 32, rounds = lane < 16 ? 3 + t / 32 : 8 - t / 32, threes = lane < 16 ? 6 : 5;
        unsigned sum = 32;
        for (unsigned i = 0; i < rounds; i++)
            sum += (lane ^ 5) + i + (lane < 16 ? 15 : 31) * i + threes + (0xfu << lane / 4 * 4) % 65535;
        want.push_back(sum);
    }
    expect_equal(out.get(), want, "half-warps");
}

// Sums the values of lanes that have the same key, the lanes whose key is odd only, in two ways.
__global__ void sum_by_key(const int *keys, const int *values, int *by_leader, int *by_match) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32, key = keys[i], value = values[i];
    unsigned rest = __ballot_sync(0xffffffff, key % 2);
    if (key % 2 == 0) return;
    const unsigned peers = __match_any_sync(rest, key);
    int sum = 0;
    for (unsigned from = peers; from; from &= from - 1) sum += __shfl_sync(peers, value, __ffs(from) - 1);
    by_match[i] = sum;
    while (true) { // a key a round; its lanes leave
        const int leader = __ffs(rest) - 1;
        const unsigned same = __ballot_sync(rest, key == __shfl_sync(rest, key, leader));
        if (!(same >> lane & 1)) {
            rest &= ~same;
            continue;
        }
        for (unsigned from = same; from; from &= from - 1) by_leader[i] += __shfl_sync(same, value, __ffs(from) - 1);
        break;
    }
    __syncwarp(peers);
}

void case_sum_by_key() {
    const int n = 7 * 160;
    std::vector<int> keys(n), values(n), want(n);
    for (int i = 0; i < n; i++) keys[i] = i * i % (3 + i / 32 * 2), values[i] = i;
    for (int i = 0; i < n; i++)
        for (int j = i / 32 * 32; j < i / 32 * 32 + 32; j++)
            if (keys[i] % 2 && keys[j] == keys[i]) want[i] += values[j];
    array<int> k(keys), v(values), by_leader(n, 0), by_match(n, 0);
    sum_by_key<<<7, 160>>>(k.p, v.p, by_leader.p, by_match.p);
    expect_equal(by_leader.get(), want, "sums by leader");
    expect_equal(by_match.get(), want, "sums by match");
}

// ---------------------------------------------------------------------------------------------------------------------
// Atomics.

__global__ void atomics(int *i, unsigned *u, unsigned long long *l, float *f, double *d) {
    const int t = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(&i[0], 1);
    atomicSub(&i[1], 2);
    atomicMin(&i[2], -t);
    atomicMax(&i[3], t);
    atomicAdd(&u[0], 3u);
    atomicAnd(&u[1], ~(1u << t % 8));
    atomicOr(&u[2], 1u << t % 32);
    atomicXor(&u[3], 1u << t % 32);
    atomicMin(&u[4], (unsigned)t + 5);
    atomicInc(&u[5], 99);
    atomicAdd(&l[0], 1ull << 33);
    atomicMax(&l[1], (unsigned long long)t << 33);
    atomicAdd(&f[0], 0.5f);
    atomicAdd(&d[0], 0.25);
    for (int seen = atomicAdd(&i[4], 0);;) { // the classical loop
        const int before = atomicCAS(&i[4], seen, seen + 3);
        if (before == seen) break;
        seen = before;
    }
    if (atomicExch(&i[5 + t % 2], 1) == 0) atomicAdd(&i[7], 1); // the first of each kind
}

void case_atomics() {
    const int n = 100 * 250; // 0.5 n and 0.25 n are exact
    array<int> i(8, 0);
    array<unsigned> u(std::vector<unsigned>{0, 0xffffffff, 0, 0, 0xffffffff, 0});
    array<unsigned long long> l(2, 0);
    array<float> f(1, 0);
    array<double> d(1, 0);
    atomics<<<100, 250>>>(i.p, u.p, l.p, f.p, d.p);
    expect_equal(i.get(), {n, -2 * n, -(n - 1), n - 1, 3 * n, 1, 1, 2}, "int");
    unsigned parity = 0;
    for (int t = 0; t < n; t++) parity ^= 1u << t % 32;
    expect_equal(u.get(), {3u * n, 0xffffff00, 0xffffffff, parity, 5u, (unsigned)n % 100}, "unsigned");
    expect_equal(l.get(), {(unsigned long long)n << 33, (unsigned long long)(n - 1) << 33}, "unsigned long long");
    expect_equal(f.get(), {0.5f * n}, "float");
    expect_equal(d.get(), {0.25 * n}, "double");
}

// Elements that all blocks add to at the same time. What was there before is added up too: each sum is seen once.
struct totals {
    __half h;
    __nv_bfloat16 b;
    __half2 h2;
    __nv_bfloat162 b2;
    float2 f2;
    float4 f4;
};

__global__ void atomics_floats(totals *all, int *before, int n, bool vectors) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        float seen = 0;
        if (vectors) {
#if SM_90
            const float2 a = atomicAdd(&all[i].f2, make_float2(1, -2));
            const float4 b = atomicAdd(&all[i].f4, make_float4(1, -2, 0.5f, 3));
            seen = a.x + a.y + b.x + b.y + b.z + b.w;
#endif
        } else {
            seen += __half2float(atomicAdd(&all[i].h, __float2half(1)));
            seen += __bfloat162float(atomicAdd(&all[i].b, __float2bfloat16(1)));
            const float2 a = __half22float2(atomicAdd(&all[i].h2, __floats2half2_rn(1, 2)));
            const float2 b = __bfloat1622float2(atomicAdd(&all[i].b2, __floats2bfloat162_rn(-1, 0.5f)));
            seen += a.x + a.y + b.x + b.y;
        }
        atomicAdd(&before[i], (int)(2 * seen));
    }
}

void test_atomics_floats(bool vectors) {
    const int n = 1000, blocks = vectors ? 2500 : 250; // bfloat16 holds integers up to 256
    array<totals> all(n, 0);
    array<int> before(n, 0);
    atomics_floats<<<blocks, 256>>>(all.p, before.p, n, vectors);
    const std::vector<totals> got = all.get();
    for (const totals &t : got) {
        const float2 h2 = __half22float2(t.h2), b2 = __bfloat1622float2(t.b2);
        const float of_16[] = {__half2float(t.h), __bfloat162float(t.b), h2.x, h2.y, b2.x, b2.y};
        const float of_32[] = {t.f2.x, t.f2.y, t.f4.x, t.f4.y, t.f4.z, t.f4.w};
        const float added_16[] = {1, 1, 1, 2, -1, 0.5f}, added_32[] = {1, -2, 1, -2, 0.5f, 3};
        for (int i = 0; i < 6; i++) {
            expect(of_16[i] == (vectors ? 0 : blocks * added_16[i]), "16 bits, number %d: %g", i, (double)of_16[i]);
            expect(of_32[i] == (vectors ? blocks * added_32[i] : 0), "32 bits, number %d: %g", i, (double)of_32[i]);
        }
    }
    const int each = vectors ? 3 : 9; // twice what all six numbers grow by
    expect_equal(before.get(), std::vector<int>(n, each * (blocks * (blocks - 1) / 2)), "what was there before");
}

void case_atomics16() { test_atomics_floats(false); }
void case_atomics_vector() {
    if (!has_sm_90()) skip("compute capability 9.0 adds float2 and float4 atomically");
    test_atomics_floats(true);
}

__global__ void last_block_sums(const int *in, int *partial, unsigned *arrived, int *out) {
    __shared__ bool last;
    __shared__ int sum;
    if (threadIdx.x == 0) sum = 0;
    __syncthreads();
    atomicAdd(&sum, in[blockIdx.x * blockDim.x + threadIdx.x]);
    __syncthreads();
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = sum;
        __threadfence();
        last = atomicAdd(arrived, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (last && threadIdx.x == 0) {
        __threadfence();
        int total = 0;
        for (unsigned i = 0; i < gridDim.x; i++) total += __ldcg(&partial[i]);
        *out = total;
    }
}

void case_last_block() {
    std::vector<int> in(64 * 128, 3);
    array<int> a(in), partial(64), out(1, 0);
    array<unsigned> arrived(1, 0);
    last_block_sums<<<64, 128>>>(a.p, partial.p, arrived.p, out.p);
    expect_equal(out.get(), {3 * 64 * 128}, "sum by the last block");
}

// ---------------------------------------------------------------------------------------------------------------------
// 16-bit floats.

__global__ void widen_all(float *h, float *b) {
    const unsigned bits = blockIdx.x * blockDim.x + threadIdx.x;
    h[bits] = __half2float(__ushort_as_half((unsigned short)bits));
    b[bits] = __bfloat162float(__ushort_as_bfloat16((unsigned short)bits));
}

struct roundings {
    unsigned short nearest, zero, up, down;
};

__global__ void round_all(const float *x, roundings *h, roundings *b, size_t n) {
    const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i >= n) return;
    h[i] = {__half_as_ushort(__float2half_rn(x[i])), __half_as_ushort(__float2half_rz(x[i])),
            __half_as_ushort(__float2half_ru(x[i])), __half_as_ushort(__float2half_rd(x[i]))};
    b[i] = {__bfloat16_as_ushort(__float2bfloat16_rn(x[i])), __bfloat16_as_ushort(__float2bfloat16_rz(x[i])),
            __bfloat16_as_ushort(__float2bfloat16_ru(x[i])), __bfloat16_as_ushort(__float2bfloat16_rd(x[i]))};
}

// The value of a 16-bit float with so many mantissa bits, by the definition; infinity as if the exponents went on.
double value_of(unsigned bits, int mantissa_bits) {
    const int exponent_bits = 15 - mantissa_bits, bias = (1 << (exponent_bits - 1)) - 1;
    const int exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1);
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    const double size = exponent == 0 ? ldexp(mantissa, 1 - bias - mantissa_bits)
                                      : ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
    return bits & 0x8000 ? -size : size;
}

// The bits on either side of x, by bisection over all of them: which are nearest (a tie goes to the even ones), not
// larger in size, not less, not greater.
roundings rounded(double x, int mantissa_bits) {
    const unsigned infinity = ((1u << (15 - mantissa_bits)) - 1) << mantissa_bits;
    const double size = fabs(x);
    unsigned low = 0, high = infinity;
    while (high - low > 1) {
        const unsigned middle = (low + high) / 2;
        (value_of(middle, mantissa_bits) <= size ? low : high) = middle;
    }
    const double below = value_of(low, mantissa_bits), above = value_of(high, mantissa_bits);
    if (size == below) high = low;
    if (std::isinf(x)) low = infinity;
    const bool negative = std::signbit(x), nearer_below = 2 * size < below + above;
    const unsigned nearest = nearer_below || (2 * size == below + above && low % 2 == 0) ? low : high;
    const unsigned sign = negative ? 0x8000 : 0;
    return {(unsigned short)(nearest | sign), (unsigned short)(low | sign),
            (unsigned short)((negative ? low : high) | sign), (unsigned short)((negative ? high : low) | sign)};
}

void case_widen16() {
    array<float> h(65536), b(65536);
    widen_all<<<256, 256>>>(h.p, b.p);
    const std::vector<float> got[] = {h.get(), b.get()};
    for (int kind = 0; kind < 2; kind++)
        for (unsigned bits = 0; bits < 65536; bits++) {
            const int mantissa_bits = kind ? 7 : 10;
            const float x = got[kind][bits];
            const unsigned infinity = ((1u << (15 - mantissa_bits)) - 1) << mantissa_bits, size = bits & 0x7fff;
            const bool ok = size > infinity    ? std::isnan(x)
                            : size == infinity ? std::isinf(x) && std::signbit(x) == (bits >> 15)
                                               : (double)x == value_of(bits, mantissa_bits) &&
                                                     std::signbit(x) == (bits >> 15);
            expect(ok, "%s 0x%04x gives %g", kind ? "bfloat16" : "half", bits, x);
        }
}

void case_round16() {
    std::vector<float> x = {INFINITY, -INFINITY, NAN, -NAN, 3e38f, -3e38f, 3.4028235e38f, 1e-45f, -1e-45f, 0.0f, -0.0f,
                            65504.0f, 65519.996f, 65520.0f, 65536.0f, 1e5f, 0x1p-25f, 0x1.000002p-25f, 0x1p-24f};
    for (int mantissa_bits : {7, 10}) // every value, every midpoint, and their neighbours among the floats
        for (unsigned bits = 0; bits < (mantissa_bits == 7 ? 0x7f80 : 0x7c00); bits++) {
            const double low = value_of(bits, mantissa_bits), high = value_of(bits + 1, mantissa_bits);
            for (double v : {low, low + (high - low) / 2}) {
                const float f = (float)v;
                for (float near : {f, nextafterf(f, INFINITY), nextafterf(f, 0.0f)}) x.insert(x.end(), {near, -near});
            }
        }
    array<float> in(x);
    array<roundings> h(x.size()), b(x.size());
    round_all<<<(unsigned)(x.size() + 255) / 256, 256>>>(in.p, h.p, b.p, x.size());
    const std::vector<roundings> got[] = {h.get(), b.get()};
    for (int kind = 0; kind < 2; kind++)
        for (size_t i = 0; i < x.size(); i++) {
            const roundings r = got[kind][i], want = rounded(x[i], kind ? 7 : 10);
            const int infinity = kind ? 0x7f80 : 0x7c00;
            bool ok = memcmp(&r, &want, sizeof r) == 0;
            if (std::isnan(x[i])) {
                ok = true;
                for (int bits : {r.nearest, r.zero, r.up, r.down}) ok &= (bits & 0x7fff) > infinity;
            }
            expect(ok, "%a as %s: nearest 0x%04x, toward zero 0x%04x, up 0x%04x, down 0x%04x", x[i],
                   kind ? "bfloat16" : "half", r.nearest, r.zero, r.up, r.down);
        }
}

template <class T> __global__ void arithmetic16(const T *a, const T *b, T *out) {
    const int i = threadIdx.x;
    out[i] = a[i] + b[i];
    out[i + 64] = a[i] - b[i];
    out[i + 128] = a[i] * b[i];
    out[i + 192] = a[i] < b[i] ? (T)0.1 : (T)7;
    out[i + 256] = a[i];
    atomicAdd(&out[i + 256], b[i]); // the sum is rounded once
}

template <class T> void test_arithmetic16() {
    std::vector<T> a, b;
    for (int i = 0; i < 64; i++) a.push_back((T)(1.0f + i * 0.37f)), b.push_back((T)(30.0f - i * 0.53f));
    array<T> x(a), y(b), out(320, 0);
    arithmetic16<T><<<1, 64>>>(x.p, y.p, out.p);
    const std::vector<T> got = out.get();
    for (int i = 0; i < 64; i++) {
        const double p = (float)a[i], q = (float)b[i];
        const T sum = (float)(p + q), want[] = {sum, (float)(p - q), (float)(p * q), p < q ? 0.1f : 7.0f, sum};
        for (int k = 0; k < 5; k++)
            expect((float)got[k * 64 + i] == (float)want[k], "operation %d of %g and %g: %g", k, p, q,
                   (float)got[k * 64 + i]);
    }
}

void case_arithmetic16() {
    test_arithmetic16<__half>();
    test_arithmetic16<__nv_bfloat16>();
}

// ---------------------------------------------------------------------------------------------------------------------
// Loads, stores, vectors, intrinsics.

template <class T> __global__ void hinted_copies(const T *in, T *out) {
    const int i = threadIdx.x;
    switch (i % 6) {
    case 0: __stcs(&out[i], __ldcs(&in[i])); break;
    case 1: __stcg(&out[i], __ldcg(&in[i])); break;
    case 2: __stwb(&out[i], __ldca(&in[i])); break;
    case 3: __stwt(&out[i], __ldg(&in[i])); break;
    case 4: out[i] = __ldlu(&in[i]); break;
    default: out[i] = __ldcv(&in[i]); break;
    }
}

template <class T> void test_hinted_copies(const char *type) {
    std::vector<T> in(64);
    for (size_t i = 0; i < 64 * sizeof(T); i++) ((unsigned char *)in.data())[i] = (unsigned char)(i * 7 % 120);
    array<T> a(in), b(64, 0);
    hinted_copies<T><<<1, 64>>>(a.p, b.p);
    expect(memcmp(b.get().data(), in.data(), 64 * sizeof(T)) == 0, "%s through hinted accesses", type);
}

void case_cache_hints() {
    test_hinted_copies<int>("int");
    test_hinted_copies<uint2>("uint2");
    test_hinted_copies<int4>("int4");
    test_hinted_copies<uint4>("uint4");
    test_hinted_copies<float4>("float4");
    test_hinted_copies<longlong2>("longlong2");
    test_hinted_copies<__half2>("half2");
    test_hinted_copies<__nv_bfloat162>("bfloat162");
}

struct alignas(16) eight {
    __nv_bfloat16 x[8];
};

__global__ void reverse_eights(const __nv_bfloat16 *in, __nv_bfloat16 *out, float *wide) {
    const eight from = *(const eight *)(in + 8 * threadIdx.x);
    eight to;
    alignas(16) float wide4[4];
    for (int k = 0; k < 8; k++) to.x[k] = from.x[7 - k];
    for (int k = 0; k < 4; k++) wide4[k] = (float)from.x[k] + 1;
    if (threadIdx.x % 2) *(eight *)(out + 8 * threadIdx.x) = to;
    else *(uint4 *)(out + 8 * threadIdx.x) = *(const uint4 *)&to; // whatever they hold
    *(uint4 *)(wide + 4 * threadIdx.x) = *(const uint4 *)wide4;
}

void case_aligned_struct() {
    std::vector<__nv_bfloat16> in(512);
    for (int i = 0; i < 512; i++) in[i] = __float2bfloat16((float)(i % 256));
    array<__nv_bfloat16> a(in), b(512, 0);
    array<float> wide(256, 0);
    reverse_eights<<<1, 64>>>(a.p, b.p, wide.p);
    const std::vector<__nv_bfloat16> got = b.get();
    for (int i = 0; i < 512; i++)
        expect((float)got[i] == (float)in[i / 8 * 8 + 7 - i % 8], "element %d: %g", i, (double)(float)got[i]);
    std::vector<float> want;
    for (int i = 0; i < 256; i++) want.push_back((float)in[i / 4 * 8 + i % 4] + 1);
    expect_equal(wide.get(), want, "four floats as one word");
}

void case_vector_types() {
    static_assert(sizeof(float3) == 12 && alignof(float3) == 4 && alignof(float2) == 8 && alignof(float4) == 16, "");
    static_assert(sizeof(uint4) == 16 && alignof(uint4) == 16 && alignof(int2) == 8 && alignof(ushort4) == 8, "");
    static_assert(sizeof(longlong2) == 16 && alignof(longlong2) == 16 && alignof(double2) == 16, "");
    static_assert(sizeof(__half2) == 4 && alignof(__half2) == 4 && sizeof(__nv_bfloat162) == 4, "");
    static_assert(sizeof(half) == 2 && sizeof(nv_bfloat16) == 2 && alignof(half2) == 4, "");
    const dim3 d(3);
    const uint3 u = make_uint3(1, 2, 3);
    const dim3 e(u);
    expect(d.x == 3 && d.y == 1 && d.z == 1 && e.x == 1 && e.y == 2 && e.z == 3, "dim3");
    expect(make_uint4(1, 2, 3, 4).w == 4 && make_int2(5, 6).y == 6 && make_ushort4(1, 2, 3, 4).z == 3, "make_*");
    const int4 i = make_int4(-1, 2, -3, 4);
    expect(i.x == -1 && i.y == 2 && i.z == -3 && i.w == 4, "make_int4");
}

__global__ void intrinsics(unsigned *out) {
    out[0] = __popc(0xf0f0);
    out[1] = __ffs(0x80);
    out[2] = __clz(1);
    out[3] = __brev(0x00000012u);
    out[4] = __umulhi(0x80000000u, 6);
    out[5] = __float_as_uint(__uint_as_float(0x40490fdb));
    out[6] = (unsigned)max(3, 7u) + (unsigned)min(-2, 5) + 2;
    out[7] = (unsigned)(fmaxf(1.5f, -2.0f) * 2 + rsqrtf(4.0f) * 2);
    out[8] = (unsigned)lrintf(__expf(0.0f) + __logf(1.0f) + exp2f(3.0f) + __fdividef(8.0f, 2.0f));
    out[9] = __clz(0) + __ffs(0) + __popcll(~0ull) + __ffsll(1ll << 40);
    out[10] = clock64() != 0;
    out[11] = (unsigned)(max(1.0f, NAN) + min(2.0f, 3.0f));
    out[12] = (unsigned)(__umul64hi(1ull << 63, 10) + __popc((unsigned)warpSize));
}

void case_intrinsics() {
    array<unsigned> out(13, 0);
    intrinsics<<<1, 1>>>(out.p);
    expect_equal(out.get(), {8, 8, 31, 0x48000000, 3, 0x40490fdb, 7, 4, 13, 32 + 64 + 41, 1, 3, 6}, "intrinsics");
}

// ---------------------------------------------------------------------------------------------------------------------
// Streams, events, graphs, and errors of the host's.

__global__ void axpy(float a, const float *x, float *y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += a * x[i];
}

void case_streams() {
    cudaStream_t s, t;
    cudaEvent_t start, stop;
    check(cudaStreamCreate(&s));
    check(cudaStreamCreateWithFlags(&t, cudaStreamNonBlocking));
    check(cudaEventCreate(&start));
    check(cudaEventCreateWithFlags(&stop, cudaEventDefault));
    std::vector<float> ones(1000, 1.0f), got(1000);
    array<float> x(ones), y(1000, 0);
    check(cudaDeviceSynchronize());
    check(cudaEventRecord(start, s));
    check(cudaMemsetAsync(y.p, 0, 1000 * sizeof(float), s));
    axpy<<<4, 256, 0, s>>>(2.0f, x.p, y.p, 1000);
    check(cudaEventRecord(stop, s));
    check(cudaStreamWaitEvent(t, stop, 0));
    axpy<<<4, 256, 0, t>>>(3.0f, x.p, y.p, 1000);
    check(cudaMemcpyAsync(got.data(), y.p, 1000 * sizeof(float), cudaMemcpyDeviceToHost, t));
    check(cudaStreamSynchronize(t));
    check(cudaEventSynchronize(stop));
    float ms = -1;
    check(cudaEventElapsedTime(&ms, start, stop));
    expect(ms >= 0 && ms < 10000, "%g ms passed", ms);
    check(cudaEventQuery(stop));
    check(cudaStreamQuery(s));
    expect_equal(got, std::vector<float>(1000, 5.0f), "two streams");
    check(cudaEventDestroy(start));
    check(cudaEventDestroy(stop));
    check(cudaStreamDestroy(s));
    check(cudaStreamDestroy(t));
}

void case_graphs() {
    cudaStream_t s, side;
    check(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    check(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
    cudaEvent_t fork, join;
    check(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
    check(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
    array<float> x(std::vector<float>(1000, 1.0f)), y(1000, 0), z(1000, 0);
    finish();

    check(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    cudaStreamCaptureStatus status;
    check(cudaStreamIsCapturing(s, &status));
    expect(status == cudaStreamCaptureStatusActive, "capture status %d", (int)status);
    check(cudaMemsetAsync(y.p, 0, 1000 * sizeof(float), s));
    check(cudaEventRecord(fork, s));
    check(cudaStreamWaitEvent(side, fork, 0));
    axpy<<<4, 256, 0, side>>>(1.0f, x.p, z.p, 1000);
    check(cudaEventRecord(join, side));
    float factor = 2.0f;
    axpy<<<4, 256, 0, s>>>(factor, x.p, y.p, 1000);
    factor = 100.0f; // arguments have been taken by value
    check(cudaStreamWaitEvent(s, join, 0));
    cudaGraph_t graph;
    check(cudaStreamEndCapture(s, &graph));
    cudaGraphExec_t exec;
    check(cudaGraphInstantiate(&exec, graph, 0));
    check(cudaGraphDestroy(graph));
    expect_equal(y.get(), std::vector<float>(1000, 0.0f), "nothing runs while it is captured");
    for (int i = 1; i <= 3; i++) { // changed inputs
        check(cudaMemcpy(x.p, std::vector<float>(1000, (float)i).data(), 1000 * sizeof(float), cudaMemcpyHostToDevice));
        check(cudaGraphLaunch(exec, s));
        check(cudaStreamSynchronize(s));
        expect_equal(y.get(), std::vector<float>(1000, 2.0f * i), "replay");
    }
    expect_equal(z.get(), std::vector<float>(1000, 6.0f), "the forked stream");
    check(cudaGraphExecDestroy(exec));

    // What a capture does not allow, each spoiling it.
    for (int what = 0; what < 4; what++) {
        check(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
        void *p;
        cudaError_t got = cudaSuccess, want = cudaErrorStreamCaptureUnsupported;
        cudaError_t then = cudaErrorStreamCaptureInvalidated;
        if (what == 0) got = cudaStreamSynchronize(s);
        if (what == 1) got = cudaDeviceSynchronize();
        if (what == 2) got = cudaMalloc(&p, 100);
        if (what == 3) { // a stream that is never joined
            check(cudaEventRecord(fork, s));
            check(cudaStreamWaitEvent(side, fork, 0));
            axpy<<<4, 256, 0, side>>>(1.0f, x.p, z.p, 1000);
            want = cudaSuccess, then = cudaErrorStreamCaptureUnjoined;
        }
        expect(got == want, "call %d in a capture: %s", what, cudaGetErrorName(got));
        got = cudaStreamEndCapture(s, &graph);
        expect(got == then, "end of capture %d: %s", what, cudaGetErrorName(got));
        cudaGetLastError();
    }
    check(cudaEventDestroy(fork));
    check(cudaEventDestroy(join));
    check(cudaStreamDestroy(s));
    check(cudaStreamDestroy(side));
}

__global__ void fill_shared(int *out, int n) {
    extern __shared__ int filled[];
    for (int i = threadIdx.x; i < n; i += blockDim.x) filled[i] = i;
    __syncthreads();
    if (threadIdx.x == 0) *out = filled[n - 1];
}

void expect_launch_error(std::initializer_list<cudaError_t> allowed, const char *what) {
    const cudaError_t peeked = cudaPeekAtLastError(), got = cudaGetLastError(), cleared = cudaGetLastError();
    const bool one_of_them = std::count(allowed.begin(), allowed.end(), got) == 1;
    expect(peeked == got && one_of_them, "%s: %s", what, cudaGetErrorName(got));
    expect(cleared == cudaSuccess, "%s: the error stays", what);
}

void case_launch_errors() {
    array<int> out(1, 0);
    const auto impossible = {cudaErrorInvalidConfiguration, cudaErrorInvalidValue}; // the latter from CUDA 13 on
    fill_shared<<<0, 32, 400>>>(out.p, 100), expect_launch_error(impossible, "no blocks");
    fill_shared<<<1, 0, 400>>>(out.p, 100), expect_launch_error(impossible, "no threads");
    fill_shared<<<1, 1025, 400>>>(out.p, 100), expect_launch_error(impossible, "1025 threads");
    fill_shared<<<1, dim3(32, 33), 400>>>(out.p, 100), expect_launch_error(impossible, "32 x 33 threads");
    fill_shared<<<dim3(1, 65536), 32, 400>>>(out.p, 100), expect_launch_error(impossible, "65536 blocks in y");
    fill_shared<<<1, 32, 49156>>>(out.p, 100), expect_launch_error({cudaErrorInvalidValue}, "over 48 KiB");
    expect_equal(out.get(), {0}, "what was refused does not run");
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, 0));
    expect(properties.multiProcessorCount > 0 && properties.warpSize == 32 && properties.name[0], "properties");
    const int most = (int)properties.sharedMemPerBlockOptin;
    check(cudaFuncSetAttribute(fill_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
    fill_shared<<<1, 32, most>>>(out.p, most / 4);
    expect_equal(out.get(), {most / 4 - 1}, "all the shared memory there is");
    fill_shared<<<1, 32, most + 4>>>(out.p, 100), expect_launch_error({cudaErrorInvalidValue}, "more than there is");
    float *p = nullptr;
    const cudaError_t huge = cudaMalloc(&p, (size_t)1 << 50);
    expect(huge == cudaErrorMemoryAllocation && !p, "a PiB: %s", cudaGetErrorName(huge));
    cudaGetLastError();
    check(cudaMalloc(&p, 0));
    check(cudaFree(p));
    check(cudaFree(nullptr));
    expect(cudaSetDevice(1 << 20) == cudaErrorInvalidDevice, "device 2^20");
    cudaGetLastError();
}

// ---------------------------------------------------------------------------------------------------------------------
// cudaLaunchKernelEx.

// A row of y from the one before, which another block wrote in the launch before: the rows become 1, 2, 3...
__global__ void step_on(float *y, const size_t step, float one) {
#if SM_90
    cudaTriggerProgrammaticLaunchCompletion();
    cudaGridDependencySynchronize(); // what was launched before is done, and its writes are seen
#endif
    const size_t i = step * blockDim.x + threadIdx.x;
    if (blockIdx.x == step % gridDim.x) y[i] = (step ? y[i - blockDim.x] : 0) + one;
}

template <class T, int n> __global__ void fill_with(T *out, const T value, dim3 seven) {
    if (seven.x == 7 && blockIdx.x == 0) out[threadIdx.x] = value + n;
}

void case_launch_ex() {
    const int steps = 50;
    std::vector<float> want(steps * 64);
    for (int i = 0; i < steps * 64; i++) want[i] = (float)(i / 64 + 1);
    cudaStream_t s;
    check(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    cudaLaunchAttribute attributes[3] = {};
    attributes[0].id = cudaLaunchAttributeIgnore;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    attributes[2].id = cudaLaunchAttributeClusterDimension;
    attributes[2].val.clusterDim.x = attributes[2].val.clusterDim.y = attributes[2].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = 3;
    config.blockDim = dim3(64);
    config.dynamicSmemBytes = 1000;
    config.stream = s;
    config.attrs = attributes;
    for (unsigned count : {0, 1, 2, 3}) {
        if (count > 1 && !has_sm_90()) break;
        config.numAttrs = count;
        for (bool captured : {false, true}) {
            array<float> y(steps * 64, 0);
            finish();
            cudaGraph_t graph;
            cudaGraphExec_t exec;
            if (captured) check(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
            for (int step = 0; step < steps; step++) check(cudaLaunchKernelEx(&config, step_on, y.p, step, 1.0));
            if (captured) {
                check(cudaStreamEndCapture(s, &graph));
                check(cudaGraphInstantiate(&exec, graph, 0));
                expect_equal(y.get(), std::vector<float>(steps * 64, 0.0f), "nothing runs while it is captured");
                check(cudaGraphLaunch(exec, s));
                check(cudaStreamSynchronize(s));
                check(cudaGraphExecDestroy(exec));
                check(cudaGraphDestroy(graph));
            }
            expect_equal(y.get(), want, captured ? "launches captured" : "launches");
        }
    }

    array<double> filled(64, 0);
    finish();
    config.numAttrs = 0;
    check(cudaLaunchKernelEx(&config, fill_with<double, 3>, filled.p, 4, 7)); // 4 becomes a double, 7 a dim3
    check(cudaStreamSynchronize(s));
    expect_equal(filled.get(), std::vector<double>(64, 7.0), "template kernel");

    // Errors come back at once, and stay until they are asked for.
    array<float> y(64, 0);
    for (int what = 0; what < 4; what++) {
        cudaLaunchConfig_t bad = config;
        if (what == 0) bad.gridDim = 0;
        if (what == 1) bad.gridDim = dim3(1, 65536);
        if (what == 2) bad.blockDim = 1025;
        if (what == 3) bad.dynamicSmemBytes = 49156;
        const cudaError_t error = cudaLaunchKernelEx(&bad, step_on, y.p, 0, 1.0f);
        expect(error == cudaErrorInvalidValue || (error == cudaErrorInvalidConfiguration && what < 3),
               "launch %d: %s", what, cudaGetErrorName(error));
        expect_launch_error({error}, "after cudaLaunchKernelEx");
    }
    expect_equal(y.get(), std::vector<float>(64, 0.0f), "what was refused does not run");
    check(cudaStreamDestroy(s));
}

// ---------------------------------------------------------------------------------------------------------------------
// Barriers in shared memory, bulk copies and clusters: what came with compute capability 9.0.

template <class... P, class... A>
cudaError_t launch_clusters(void (*kernel)(P...), dim3 grid, dim3 cluster, int threads, int shared, A... arguments) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    auto &dim = attribute.val.clusterDim;
    dim.x = cluster.x, dim.y = cluster.y, dim.z = cluster.z;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

#define SKIP_BEFORE_90()                                                                                               \
    if (!has_sm_90()) skip("needs compute capability 9.0")

__global__ void shared_forms(int *out, int n) {
    extern __shared__ __align__(128) char raw_bytes[];
    extern __shared__ uint4 raw_words[];
    const int i = threadIdx.x;
    if (i < n) ((int *)raw_bytes)[i] = i + 1;
    __syncthreads();
    if (i < n / 4) {
        const uint4 four = raw_words[i];
        out[i] = (int)(four.x + four.y + four.z + four.w) + ((uintptr_t)raw_bytes % 128 ? 1000000 : 0);
    }
}

void case_shared_forms() {
    const int n = 64;
    array<int> out(n / 4, 0);
    shared_forms<<<1, n, n * 4>>>(out.p, n);
    std::vector<int> want;
    for (int i = 0; i < n / 4; i++) want.push_back(16 * i + 10);
    expect_equal(out.get(), want, "sums of four");
}

// Threads take turns, a phase each, and then wait in every other way.
__global__ void take_turns(int *out, int rounds) {
#if SM_90
    __shared__ uint64_t turn;
    __shared__ uint64_t all;
    __shared__ unsigned sum;
    const int i = threadIdx.x, n = blockDim.x;
    if (i == 0) {
        ptx::mbarrier_init(&turn, n);
        ptx::mbarrier_init(&all, 2 * n + 3);
        ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
        sum = 0;
        out[0] = ptx::mbarrier_test_wait_parity(&turn, 0) + 2 * ptx::mbarrier_test_wait_parity(&turn, 1) +
                 4 * ptx::mbarrier_try_wait_parity(ptx::sem_acquire, ptx::scope_cta, &turn, 1);
    }
    __syncthreads();
    for (int phase = 0; phase < rounds * n; phase++) {
        if (phase % n == i) sum = sum * 3 + phase;
        ptx::mbarrier_arrive(&turn);
        while (!ptx::mbarrier_try_wait_parity(&turn, phase & 1, 1000)) {}
    }
    for (int k = 0; k < rounds; k++) { // all arrive, in several ways, and wait with the states they got
        uint64_t state = ptx::mbarrier_arrive(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &all);
        if (i == 0) {
            state = ptx::mbarrier_arrive(&all, 2u);
            ptx::mbarrier_arrive(ptx::sem_release, ptx::scope_cluster, ptx::space_cluster, &all);
        }
        state = ptx::mbarrier_arrive(ptx::sem_release, ptx::scope_cluster, ptx::space_shared, &all, 1u);
        if (k % 2) while (!ptx::mbarrier_try_wait(&all, state)) {}
        else while (!ptx::mbarrier_test_wait(ptx::sem_acquire, ptx::scope_cta, &all, state)) {}
        if (i == k % n) out[2 + k] = (int)(sum + k);
        __syncthreads();
    }
    if (i == 0) out[1] = (int)sum;
#endif
}

void case_mbarrier() {
    SKIP_BEFORE_90();
    for (int threads : {1, 2, 31, 64, 100}) {
        const int rounds = 5;
        array<int> out(2 + rounds, 0);
        take_turns<<<1, threads>>>(out.p, rounds);
        unsigned sum = 0;
        for (int i = 0; i < rounds * threads; i++) sum = sum * 3 + i;
        std::vector<int> want = {6, (int)sum};
        for (int k = 0; k < rounds; k++) want.push_back((int)(sum + k));
        expect_equal(out.get(), want, "sum by turns");
    }
}

// A warp fetches tiles of 128 ints a warp into a ring of `stages` in shared memory; the others add one to each and send
// them back, from two buffers each.
template <int stages> __global__ void bulk_ring(const int *in, int *out, int tiles) {
#if SM_90
    extern __shared__ __align__(128) char ring_memory[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, consumers = blockDim.x / 32 - 1, tile = consumers * 128;
    int *const stage_of = (int *)ring_memory, *const results = stage_of + stages * tile;
    uint64_t *const full = (uint64_t *)(results + 2 * tile), *const empty = full + stages;
    if (threadIdx.x == 0) {
        for (int s = 0; s < stages; s++) {
            ptx::mbarrier_init(&full[s], 1);
            ptx::mbarrier_init(&empty[s], consumers);
        }
        ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
        ptx::fence_proxy_async(ptx::space_shared);
    }
    __syncthreads();
    if (warp == consumers) {
        for (int k = 0, t = blockIdx.x; lane == 0 && t < tiles; k++, t += gridDim.x) {
            const int s = k % stages, piece = tile / 2;
            if (k >= stages)
                while (!ptx::mbarrier_try_wait_parity(&empty[s], (k / stages - 1) & 1)) {}
            const int *from = in + (size_t)t * tile;
            int *to = stage_of + s * tile;
            ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &full[s], tile * 4);
            ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, to, from, piece * 4, &full[s]);
            ptx::cp_async_bulk(ptx::space_shared, ptx::space_global, to + piece, from + piece, piece * 4, &full[s]);
        }
    } else {
        for (int k = 0, t = blockIdx.x; t < tiles; k++, t += gridDim.x) {
            const int s = k % stages;
            int *const mine = results + (warp * 2 + k % 2) * 128;
            if (lane == 0) ptx::cp_async_bulk_wait_group_read(ptx::n32_t<1>{}); // the copy before the last has left
            __syncwarp();
            while (!ptx::mbarrier_try_wait_parity(&full[s], (k / stages) & 1)) {}
            for (int i = lane; i < 128; i += 32) mine[i] = stage_of[s * tile + warp * 128 + i] + 1;
            ptx::fence_proxy_async(ptx::space_shared);
            __syncwarp();
            if (lane == 0) {
                ptx::mbarrier_arrive(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &empty[s]);
                int *to = out + (size_t)t * tile + warp * 128;
                ptx::cp_async_bulk(ptx::space_global, ptx::space_shared, to, mine, 512);
                ptx::cp_async_bulk_commit_group();
            }
        }
        if (lane == 0) ptx::cp_async_bulk_wait_group(ptx::n32_t<0>{});
    }
#endif
}

template <int stages> void test_bulk_ring() {
    for (int consumers : {1, 3, 8}) {
        const int tiles = 211, n = tiles * consumers * 128;
        std::vector<int> in(n), want(n);
        for (int i = 0; i < n; i++) in[i] = i * 7, want[i] = i * 7 + 1;
        array<int> a(in), b(n, 0);
        const int shared = (stages + 2) * consumers * 512 + stages * 16;
        bulk_ring<stages><<<3, 32 * (consumers + 1), shared>>>(a.p, b.p, tiles);
        expect_equal(b.get(), want, "through the ring");
    }
}

void case_bulk_ring() {
    SKIP_BEFORE_90();
    test_bulk_ring<1>();
    test_bulk_ring<2>();
    test_bulk_ring<5>();
}

// Tensor maps, and the bulk copies of their boxes.

PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
    void *encode = nullptr;
    cudaDriverEntryPointQueryResult found;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found));
    expect(found == cudaDriverEntryPointSuccess && encode, "cuTensorMapEncodeTiled: found %d", (int)found);
    return (PFN_cuTensorMapEncodeTiled_v12000)encode;
}

// What cuTensorMapEncodeTiled takes: a matrix of rows x columns of 16 or 32 bits, and its box.
struct tensor_spec {
    CUtensorMapDataType type;
    cuuint64_t dims[2], stride;
    cuuint32_t box[2];
    CUtensorMapSwizzle swizzle;
    cuuint32_t rank = 2, element_strides[2] = {1, 1};
    size_t offset = 0; // of the base

    CUresult encode(CUtensorMap *map, void *base) const {
        return tensor_map_encoder()(map, type, rank, (char *)base + offset, dims, &stride, box, element_strides,
                                    CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                                    CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    }
    CUtensorMap map(void *base) const {
        CUtensorMap map;
        const CUresult result = encode(&map, base);
        expect(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled: %d", (int)result);
        return map;
    }
    size_t size() const { return type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2; }
    size_t elements() const { return dims[1] * stride / size(); } // with what is between the rows
    int box_bytes() const { return (int)(box[0] * box[1] * size()); }
    size_t at(size_t row, size_t column) const { return row * stride / size() + column; }
    bool inside(long long row, long long column) const {
        return row >= 0 && row < (long long)dims[1] && column >= 0 && column < (long long)dims[0];
    }
    bool stored(long long row, long long column) const { // to: the last 16 bytes of a row are written as a whole
        return inside(row, column / (16 / size()) * (16 / size()));
    }
    size_t in_box(size_t row, size_t column) const { // where in shared memory, in elements
        size_t byte = (row * box[0] + column) * size();
        if (swizzle == CU_TENSOR_MAP_SWIZZLE_128B) byte ^= (byte >> 7 & 7) << 4;
        return byte / size();
    }
};

// Rows that are longer than their elements, and that end amid 16 bytes.
const tensor_spec tensor_specs[] = {
    {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, {101, 37}, 224, {64, 16}, CU_TENSOR_MAP_SWIZZLE_128B},
    {CU_TENSOR_MAP_DATA_TYPE_FLOAT16, {101, 37}, 208, {64, 11}, CU_TENSOR_MAP_SWIZZLE_NONE},
    {CU_TENSOR_MAP_DATA_TYPE_FLOAT32, {77, 19}, 320, {32, 9}, CU_TENSOR_MAP_SWIZZLE_128B},
    {CU_TENSOR_MAP_DATA_TYPE_FLOAT32, {77, 19}, 336, {20, 7}, CU_TENSOR_MAP_SWIZZLE_NONE},
    {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, {1000, 300}, 2000, {256, 200}, CU_TENSOR_MAP_SWIZZLE_NONE}};

// A box may begin anywhere in its tensor or outside, at multiples of 16 bytes from the row's beginning; but one that is
// stored, not in front of it.
const int corners[][2] = {{0, 0},   {8, 3},   {16, 5},   {-8, 2},   {8, -1},   {-16, -5}, {72, 6},   {8, 14},
                          {72, 15}, {88, 35}, {-24, -6}, {-304, 0}, {0, -300}, {1000, 2}, {8, 1000}, {-24, 18}};

// A number of its own for each element, nearly, which is finite in every type.
template <class T> std::vector<T> numbers(size_t n) {
    std::vector<T> v(n);
    for (size_t i = 0; i < n; i++) v[i] = (T)(1 + i % 29989);
    return v;
}

// Fetches the box at column x, row y and writes down how it lies in shared memory.
template <class T>
__global__ void load_box(const __grid_constant__ CUtensorMap map, T *out, int x, int y, int bytes, bool cluster) {
#if SM_90
    extern __shared__ __align__(1024) unsigned box_words[];
    __shared__ uint64_t full;
    for (int i = threadIdx.x; i < bytes / 4; i += blockDim.x) box_words[i] = ~0u;
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(&full, 1);
        ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
    }
    ptx::fence_proxy_async(ptx::space_shared);
    __syncthreads();
    if (threadIdx.x == 0) {
        ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &full, bytes);
        if (cluster)
            ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, box_words, &map, {x, y}, &full);
        else ptx::cp_async_bulk_tensor(ptx::space_shared, ptx::space_global, box_words, &map, {x, y}, &full);
    }
    while (!ptx::mbarrier_try_wait_parity(&full, 0)) {}
    for (int i = threadIdx.x; i < bytes / (int)sizeof(T); i += blockDim.x) out[i] = ((T *)box_words)[i];
#endif
}

template <class T> void test_tensor_load(const tensor_spec &spec) {
    const auto in = numbers<T>(spec.elements());
    array<T> a(in), b(spec.box_bytes() / sizeof(T));
    check(cudaFuncSetAttribute(load_box<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, spec.box_bytes()));
    for (const auto &corner : corners) {
        std::vector<T> want(b.n);
        for (unsigned r = 0; r < spec.box[1]; r++)
            for (unsigned c = 0; c < spec.box[0]; c++) {
                const int x = corner[0] + (int)c, y = corner[1] + (int)r;
                want[spec.in_box(r, c)] = spec.inside(y, x) ? in[spec.at(y, x)] : (T)0;
            }
        for (bool cluster : {false, true}) {
            load_box<T><<<1, 64, spec.box_bytes()>>>(spec.map(a.p), b.p, corner[0], corner[1], spec.box_bytes(),
                                                     cluster);
            const std::string what = "the box at " + std::to_string(corner[0]) + ", " + std::to_string(corner[1]);
            expect_equal(b.get(), want, what.c_str());
        }
    }
}

void case_tensor_load() {
    SKIP_BEFORE_90();
    for (const tensor_spec &spec : tensor_specs)
        spec.size() == 4 ? test_tensor_load<float>(spec) : test_tensor_load<unsigned short>(spec);
}

// Every block moves a box, from one tensor to a place in another.
__global__ void move_boxes(const __grid_constant__ CUtensorMap from, const __grid_constant__ CUtensorMap to, int2 at,
                           int2 to_at, int2 box, int bytes) {
#if SM_90
    extern __shared__ __align__(1024) unsigned box_words[];
    __shared__ uint64_t full;
    if (threadIdx.x == 0) {
        const int x = (int)blockIdx.x * box.x, y = (int)blockIdx.y * box.y;
        const int corner[2] = {at.x + x, at.y + y};
        ptx::mbarrier_init(&full, 1);
        ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
        ptx::fence_proxy_async(ptx::space_shared);
        ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &full, bytes);
        ptx::cp_async_bulk_tensor(ptx::space_shared, ptx::space_global, box_words, &from, corner, &full);
        while (!ptx::mbarrier_try_wait_parity(&full, 0)) {}
        ptx::cp_async_bulk_tensor(ptx::space_global, ptx::space_shared, &to, {to_at.x + x, to_at.y + y}, box_words);
        ptx::cp_async_bulk_commit_group();
        ptx::cp_async_bulk_wait_group(ptx::n32_t<0>{});
    }
#endif
}

// Moves a grid of boxes; `captured`: in a graph, when the host's maps have gone.
template <class T> void test_tensor_store(const tensor_spec &spec, dim3 grid, int2 at, int2 to_at, bool captured) {
    const auto in = numbers<T>(spec.elements());
    array<T> a(in), b(in.size(), 0);
    auto want = std::vector<T>(in.size());
    for (int r = 0; r < (int)(grid.y * spec.box[1]); r++)
        for (int c = 0; c < (int)(grid.x * spec.box[0]); c++) {
            if (!spec.stored(to_at.y + r, to_at.x + c)) continue;
            const bool there = spec.inside(at.y + r, at.x + c);
            want[spec.at(to_at.y + r, to_at.x + c)] = there ? in[spec.at(at.y + r, at.x + c)] : (T)0;
        }
    finish();
    const int bytes = spec.box_bytes();
    const int2 box = {(int)spec.box[0], (int)spec.box[1]};
    check(cudaFuncSetAttribute(move_boxes, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    CUtensorMap from = spec.map(a.p), to = spec.map(b.p);
    cudaStream_t s;
    check(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    if (captured) check(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    move_boxes<<<grid, 32, bytes, s>>>(from, to, at, to_at, box, bytes);
    check(cudaGetLastError());
    if (captured) {
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        check(cudaStreamEndCapture(s, &graph));
        memset((void *)&from, 0, sizeof from);
        memset((void *)&to, 0, sizeof to);
        check(cudaGraphInstantiate(&exec, graph, 0));
        check(cudaGraphLaunch(exec, s));
        check(cudaStreamSynchronize(s));
        check(cudaGraphExecDestroy(exec));
        check(cudaGraphDestroy(graph));
    }
    check(cudaStreamSynchronize(s));
    expect_equal(b.get(), want, captured ? "boxes moved in a graph" : "boxes moved");
    check(cudaStreamDestroy(s));
}

template <class T> void test_tensor_stores(const tensor_spec &spec) {
    for (const auto &corner : corners) {
        if (corner[0] >= 0 && corner[1] >= 0)
            test_tensor_store<T>(spec, 1, {8, 2}, {corner[0], corner[1]}, false);
        test_tensor_store<T>(spec, 1, {corner[0], corner[1]}, {8, 2}, false);
    }
    const dim3 all((unsigned)(spec.dims[0] + spec.box[0] - 1) / spec.box[0],
                   (unsigned)(spec.dims[1] + spec.box[1] - 1) / spec.box[1]);
    for (bool captured : {false, true}) test_tensor_store<T>(spec, all, {0, 0}, {0, 0}, captured);
}

void case_tensor_store() {
    SKIP_BEFORE_90();
    for (const tensor_spec &spec : tensor_specs)
        spec.size() == 4 ? test_tensor_stores<float>(spec) : test_tensor_stores<unsigned short>(spec);
}

// One dimension, whose length need be no multiple of anything.
__global__ void load_line(const __grid_constant__ CUtensorMap map, float *out, int x) {
#if SM_90
    __shared__ alignas(128) float line[32];
    __shared__ uint64_t full;
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(&full, 1);
        ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
        ptx::fence_proxy_async(ptx::space_shared);
        ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &full, 128);
        ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, line, &map, {x}, &full);
    }
    __syncthreads();
    while (!ptx::mbarrier_try_wait_parity(&full, 0)) {}
    out[threadIdx.x] = line[threadIdx.x];
#endif
}

void case_tensor_line() {
    SKIP_BEFORE_90();
    tensor_spec spec = {CU_TENSOR_MAP_DATA_TYPE_FLOAT32, {45, 0}, 0, {32, 0}, CU_TENSOR_MAP_SWIZZLE_NONE};
    spec.rank = 1;
    const auto in = numbers<float>(64);
    array<float> a(in), b(32);
    for (int x : {0, 8, -4, 32, 48}) {
        load_line<<<1, 32>>>(spec.map(a.p), b.p, x);
        std::vector<float> want(32);
        for (int i = 0; i < 32; i++) want[i] = x + i >= 0 && x + i < 45 ? in[x + i] : 0;
        expect_equal(b.get(), want, "a line");
    }
}

void case_tensor_map() {
    SKIP_BEFORE_90();
    array<char> memory(1 << 16);
    CUtensorMap map;
    static_assert(sizeof map == 128 && alignof(CUtensorMap) >= 64);
    const tensor_spec good = {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, {101, 37}, 224, {64, 16}, CU_TENSOR_MAP_SWIZZLE_128B};
    expect(good.encode(&map, memory.p) == CUDA_SUCCESS, "a good one");
    const auto refused = [&](const char *what, auto change) {
        tensor_spec bad = good;
        change(bad);
        const CUresult result = bad.encode(&map, memory.p);
        expect(result == CUDA_ERROR_INVALID_VALUE, "%s: %d", what, (int)result);
    };
    refused("no dimensions", [](tensor_spec &s) { s.rank = 0; });
    refused("a base at 8 of 16 bytes", [](tensor_spec &s) { s.offset = 8; });
    refused("no columns", [](tensor_spec &s) { s.dims[0] = 0; });
    refused("no rows", [](tensor_spec &s) { s.dims[1] = 0; });
    refused("more than 2^32 rows", [](tensor_spec &s) { s.dims[1] = (1ull << 32) + 1; });
    refused("a stride of 216 bytes", [](tensor_spec &s) { s.stride = 216; });
    refused("a stride of 2^40 bytes", [](tensor_spec &s) { s.stride = 1ull << 40; });
    refused("a box of no columns", [](tensor_spec &s) { s.box[0] = 0; });
    refused("a box of no rows", [](tensor_spec &s) { s.box[1] = 0; });
    refused("a box of 257 rows", [](tensor_spec &s) { s.box[1] = 257; });
    refused("a box of 264 columns", [](tensor_spec &s) {
        s.box[0] = 264;
        s.swizzle = CU_TENSOR_MAP_SWIZZLE_NONE;
    });
    refused("a box of 60 columns, 120 bytes", [](tensor_spec &s) { s.box[0] = 60; });
    refused("a box of 72 columns and a swizzle", [](tensor_spec &s) { s.box[0] = 72; });
    refused("an element stride of 0", [](tensor_spec &s) { s.element_strides[1] = 0; });

    void *function = &map;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSuccess;
    (void)cudaGetDriverEntryPointByVersion("cuTensorMapNoSuch", &function, 12000, cudaEnableDefault, &found);
    (void)cudaGetLastError();
    expect(found == cudaDriverEntryPointSymbolNotFound, "a function that is not there: %d", (int)found);
}

// Sums over the cluster, by reading every block's part.
__global__ void cluster_sums(const int *in, int *out) {
#if SM_90
    extern __shared__ int parts[];
    auto cluster = cg::this_cluster();
    auto block = cg::this_thread_block();
    const int i = (int)block.thread_rank(), n = (int)block.size();
    for (int round = 0; round < 5; round++) {
        parts[i] = in[blockIdx.x * n + i] * (round + 1);
        cluster.sync();
        int sum = 0;
        for (unsigned rank = 0; rank < cluster.num_blocks(); rank++) {
            const int *other = cluster.map_shared_rank(parts, (int)rank);
            if (cluster.query_shared_rank(other) != rank) sum += 1000000;
            for (int k = 0; k < n; k++) sum += other[k];
        }
        out[blockIdx.x * n + i] += sum;
        cluster.barrier_arrive(); // nobody reads any more...
        block.sync();
        cluster.barrier_wait(); // ...once all have said so
    }
#endif
}

void case_cluster_sums() {
    SKIP_BEFORE_90();
    check(cudaFuncSetAttribute(cluster_sums, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    for (int size : {1, 2, 3, 4, 8, 16}) {
        for (int clusters : {1, 2, 7}) {
            const int threads = 65, n = clusters * size * threads;
            std::vector<int> in(n), want(n), sums(clusters);
            for (int i = 0; i < n; i++) in[i] = i % 19, sums[i / (size * threads)] += 15 * in[i];
            for (int i = 0; i < n; i++) want[i] = sums[i / (size * threads)];
            array<int> a(in), b(n, 0);
            check(launch_clusters(cluster_sums, clusters * size, size, threads, threads * 4, a.p, b.p));
            expect_equal(b.get(), want, "sum over the cluster");
        }
    }
}

// Every block writes into every other's memory, and arrives at the barrier there: plainly, by counts, and by stores and
// bulk copies that count their bytes. The barriers are two, since a block may be a phase ahead of another.
__global__ void cluster_arrivals(int *out, int rounds) {
#if SM_90
    extern __shared__ __align__(16) int mail[];
    auto cluster = cg::this_cluster();
    const int blocks = (int)cluster.num_blocks(), me = (int)cluster.block_rank(), lane = threadIdx.x;
    uint64_t *const here = (uint64_t *)(mail + 2 * 16 * 8); // after two times 16 blocks' letters of 8 ints
    int *const letter = (int *)(here + 2);
    if (lane == 0) {
        ptx::mbarrier_init(&here[0], 4 * blocks);
        ptx::mbarrier_init(&here[1], 4 * blocks);
        ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
    }
    cluster.sync();
    int sum = 0;
    for (int k = 0; k < rounds; k++) {
        if (lane < 4) letter[lane] = 4 * k + lane;
        ptx::fence_proxy_async(ptx::space_shared);
        __syncwarp();
        if (lane < blocks) {
            int *const to = cluster.map_shared_rank(mail, lane) + (k % 2 * 16 + me) * 8;
            uint64_t *const there = cluster.map_shared_rank(&here[k % 2], lane);
            to[0] = 100 * k + me;
            ptx::mbarrier_arrive(ptx::sem_release, ptx::scope_cluster, ptx::space_cluster, there);
            ptx::mbarrier_arrive(ptx::sem_release, ptx::scope_cluster, ptx::space_cluster, there, 2u);
            ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cluster, ptx::space_cluster, there, 12 + 16);
            ptx::st_async(to + 1, 7 * k + me, there);
            const int two[2] = {k, me};
            ptx::st_async(to + 2, two, there);
            ptx::cp_async_bulk(ptx::space_cluster, ptx::space_shared, to + 4, letter, 16, there);
        }
        while (!ptx::mbarrier_try_wait_parity(ptx::sem_acquire, ptx::scope_cluster, &here[k % 2], k / 2 & 1)) {}
        if (lane < blocks)
            for (int i = 0; i < 8; i++) sum += mail[(k % 2 * 16 + lane) * 8 + i];
        // The letter may be written anew, since the copies of it are complete once all have got theirs.
        cluster.sync();
    }
    out[blockIdx.x * 32 + lane] = sum;
#endif
}

void case_cluster_arrivals() {
    SKIP_BEFORE_90();
    for (int size : {1, 2, 3, 4, 8}) {
        const int rounds = 20, blocks = 3 * size;
        array<int> out(blocks * 32, 0);
        check(launch_clusters(cluster_arrivals, blocks, size, 32, 2 * 16 * 32 + 16 + 16, out.p, rounds));
        std::vector<int> want(blocks * 32);
        for (int i = 0; i < blocks * 32; i++)
            for (int k = 0, from = i % 32; k < rounds && from < size; k++)
                want[i] += 100 * k + from + 7 * k + from + k + from + 16 * k + 6;
        expect_equal(out.get(), want, "letters");
    }
}

// Which blocks are a cluster, and that a cluster's shared memory is no other's.
__global__ void cluster_grid(unsigned *out) {
#if SM_90
    extern __shared__ unsigned whose[];
    auto cluster = cg::this_cluster();
    const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    if (threadIdx.x == 0) whose[0] = block;
    cluster.sync();
    if (threadIdx.x < cluster.num_blocks())
        out[block * 18 + threadIdx.x] = *cluster.map_shared_rank(&whose[0], (int)threadIdx.x);
    if (threadIdx.x == 0) out[block * 18 + 16] = cluster.block_rank(), out[block * 18 + 17] = cluster.num_blocks();
    cluster.sync();
#endif
}

void case_cluster_grid() {
    SKIP_BEFORE_90();
    const dim3 shapes[][2] = {{dim3(4, 4, 4), dim3(2, 2, 2)}, {dim3(6, 2, 2), dim3(3, 1, 1)},
                              {dim3(2, 4, 2), dim3(1, 2, 1)}, {dim3(2, 2, 8), dim3(1, 1, 4)},
                              {dim3(2, 6, 4), dim3(1, 3, 2)}, {dim3(5, 3, 2), dim3(1, 1, 1)}};
    for (const auto &shape : shapes) {
        const dim3 g = shape[0], c = shape[1];
        const unsigned blocks = g.x * g.y * g.z, size = c.x * c.y * c.z;
        array<unsigned> out(blocks * 18, 0);
        check(launch_clusters(cluster_grid, g, c, 32, 4, out.p));
        std::vector<unsigned> want(blocks * 18);
        for (unsigned b = 0; b < blocks; b++) {
            const unsigned x = b % g.x, y = b / g.x % g.y, z = b / g.x / g.y;
            want[b * 18 + 16] = (z % c.z * c.y + y % c.y) * c.x + x % c.x;
            want[b * 18 + 17] = size;
            for (unsigned r = 0; r < size; r++) {
                const unsigned rx = r % c.x, ry = r / c.x % c.y, rz = r / c.x / c.y;
                want[b * 18 + r] = ((z / c.z * c.z + rz) * g.y + y / c.y * c.y + ry) * g.x + x / c.x * c.x + rx;
            }
        }
        expect_equal(out.get(), want, "blocks of a cluster");
    }
}

__global__ void nothing(int *out) {
    if (out) atomicExch(out, 1);
}

void case_cluster_launch() {
    SKIP_BEFORE_90();
    int value;
    check(cudaDeviceGetAttribute(&value, cudaDevAttrClusterLaunch, 0));
    expect(value == 1, "cudaDevAttrClusterLaunch is %d", value);
    for (auto what : {cudaDevAttrMultiProcessorCount, cudaDevAttrMaxSharedMemoryPerBlockOptin}) {
        check(cudaDeviceGetAttribute(&value, what, 0));
        expect(value > 0, "attribute %d is %d", (int)what, value);
    }
    const int most = value;
    cudaFuncAttributes about;
    check(cudaFuncGetAttributes(&about, nothing));
    expect(about.binaryVersion >= 90 && about.ptxVersion >= 90 && about.numRegs > 0 && about.maxThreadsPerBlock == 1024,
           "kernel: binary %d, ptx %d, %d registers, %d threads", about.binaryVersion, about.ptxVersion, about.numRegs,
           about.maxThreadsPerBlock);
    expect(about.maxDynamicSharedSizeBytes == 48 << 10, "%d bytes dynamic", about.maxDynamicSharedSizeBytes);
    check(cudaFuncSetAttribute(nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
    check(cudaFuncGetAttributes(&about, nothing));
    expect(about.maxDynamicSharedSizeBytes == most, "%d of %d bytes dynamic", about.maxDynamicSharedSizeBytes, most);

    const struct {
        dim3 grid, cluster;
        bool fits, fits_large;
    } launches[] = {{4, 2, true, true},
                    {3, 2, false, false},
                    {6, 3, true, true},
                    {16, 8, true, true},
                    {9, 9, false, true},
                    {16, 16, false, true},
                    {34, 17, false, false},
                    {4, dim3(2, 0, 0), false, false},
                    {4, dim3(0, 0, 0), true, true},
                    {dim3(4, 2), dim3(2, 2), true, true},
                    {dim3(4, 3), dim3(2, 2), false, false},
                    {dim3(1, 8, 2), dim3(1, 8, 2), false, true}};
    for (bool large : {false, true}) {
        if (large) check(cudaFuncSetAttribute(nothing, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
        for (const auto &l : launches) {
            const bool fits = large ? l.fits_large : l.fits;
            array<int> out(1, 0);
            const cudaError_t error = launch_clusters(nothing, l.grid, l.cluster, 64, 0, out.p);
            expect(error == (fits ? cudaSuccess : cudaErrorInvalidClusterSize), "grid %u, %u, cluster %u, %u, %u: %s",
                   l.grid.x, l.grid.y, l.cluster.x, l.cluster.y, l.cluster.z, cudaGetErrorName(error));
            if (!fits) expect_launch_error({cudaErrorInvalidClusterSize}, "cluster");
            expect_equal(out.get(), {(int)fits}, "whether it ran");
        }
    }

    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = 2, attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = 4;
    config.blockDim = 64;
    config.dynamicSmemBytes = 1000;
    config.attrs = &attribute;
    config.numAttrs = 1;
    int clusters = 0;
    check(cudaOccupancyMaxActiveClusters(&clusters, nothing, &config));
    expect(clusters >= 1, "%d clusters at a time", clusters);
    config.gridDim = 3;
    const cudaError_t error = cudaOccupancyMaxActiveClusters(&clusters, nothing, &config);
    expect(error == cudaErrorInvalidClusterSize, "occupancy of what does not divide: %s", cudaGetErrorName(error));
    cudaGetLastError();
}

__global__ void cluster_of_one(int *out) { // without the attribute
#if SM_90
    extern __shared__ int alone[];
    auto cluster = cg::this_cluster();
    alone[threadIdx.x] = (int)(cluster.num_blocks() * 10 + cluster.block_rank());
    cluster.sync();
    const int other = (int)(blockDim.x - 1 - threadIdx.x);
    out[blockIdx.x * blockDim.x + threadIdx.x] = cluster.map_shared_rank(alone, 0)[other] + other;
    cluster.barrier_arrive(); // on a GPU nothing, here, and the wait is the block's barrier
    cluster.barrier_wait();
#endif
}

void case_cluster_alone() {
    SKIP_BEFORE_90();
    array<int> out(500, 0);
    cluster_of_one<<<5, 100, 400>>>(out.p);
    std::vector<int> want;
    for (int i = 0; i < 500; i++) want.push_back(10 + 99 - i % 100);
    expect_equal(out.get(), want, "clusters of one");
}

void case_host_threads_clusters() {
    SKIP_BEFORE_90();
    std::vector<std::thread> hosts;
    array<int> in(std::vector<int>(4 * 256, 1)), out(4 * 256, 0);
    for (int h = 0; h < 4; h++)
        hosts.emplace_back([&, h] {
            for (int i = 0; i < 10; i++) {
                add_one_each<1><<<4, 64>>>(out.p + 256 * h, 256, 0.0f); // which makes it 1
                check(launch_clusters(cluster_sums, 4, 1 << h % 3, 64, 256, in.p + 256 * h, out.p + 256 * h));
            }
            finish();
        });
    for (auto &h : hosts) h.join();
    std::vector<int> want(4 * 256);
    for (int i = 0; i < 4 * 256; i++) want[i] = 1 + 15 * 64 * (1 << i / 256 % 3);
    expect_equal(out.get(), want, "four host threads");
}

void case_error_words() {
    const struct {
        cudaError_t error;
        int number;
        const char *name, *words;
    } errors[] = {{cudaSuccess, 0, "cudaSuccess", "no error"},
                  {cudaErrorInvalidValue, 1, "cudaErrorInvalidValue", "invalid argument"},
                  {cudaErrorMemoryAllocation, 2, "cudaErrorMemoryAllocation", "out of memory"},
                  {cudaErrorInvalidConfiguration, 9, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
                  {cudaErrorNotSupported, 801, "cudaErrorNotSupported", "operation not supported"}};
    for (const auto &e : errors) {
        expect(e.error == e.number && !strcmp(cudaGetErrorName(e.error), e.name), "error %d is %d, %s", e.number,
               e.error, cudaGetErrorName(e.error));
        expect(!strcmp(cudaGetErrorString(e.error), e.words), "%s: %s", e.name, cudaGetErrorString(e.error));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// What only the CPU device promises.

#ifdef BOOKENDS_CPU_DEVICE

__global__ void barrier_missed(int *out) {
    if (threadIdx.x == 5) return;
    __syncthreads();
    out[threadIdx.x] = 1;
}

__global__ void barrier_divergent(int *out) {
    if (threadIdx.x / 32 == 1) __shfl_sync(threadIdx.x == 40 ? 0xffffffff : 0xfffffeff, 1, 0); // lane 8 stays behind
    __syncthreads();
    out[threadIdx.x] = 1;
}

__global__ void lane_missing(int *out) {
    if (threadIdx.x % 32 < 20) out[threadIdx.x] = __shfl_down_sync(0xffffffff, 1, 1);
    else __syncthreads();
}

__global__ void operations_mixed(int *out) {
    if (threadIdx.x % 2) out[threadIdx.x] = __shfl_xor_sync(0xffffffff, 1, 1);
    else out[threadIdx.x] = __any_sync(0xffffffff, 1);
}

__global__ void source_returned(int *out) {
    if (threadIdx.x % 32 == 9) return;
    out[threadIdx.x] = __shfl_sync(0xffffffff, 1, 9);
}

__global__ void source_beyond_block(int *out) { out[threadIdx.x] = __shfl_down_sync(0xffffffff, 1, 16); }

__global__ void outside_own_mask(int *out) { out[threadIdx.x] = __shfl_sync(0x0000ffff, 1, 0); }

__global__ void half_warp_short(int *out) { // lane 3 leaves the loop of its half before the others
    const int lane = threadIdx.x % 32;
    const unsigned mask = lane < 16 ? 0x0000ffff : 0xffff0000;
    int sum = 0;
    for (int i = 0; i < (lane == 3 ? 4 : 5); i++) sum += (int)__ballot_sync(mask, 1);
    __syncthreads();
    if (sum == 0) atomicExch(out, 1);
}

__global__ void mask_too_old(int *out) { // lane 2 has left, but lane 0 still asks for it
    const int lane = threadIdx.x % 32;
    const unsigned low = __ballot_sync(0xffffffff, lane < 3);
    if (lane < 2) out[threadIdx.x] = __shfl_sync(lane == 0 ? low : 0x00000003, lane, 0);
    __syncwarp();
}

__global__ void barriers_mixed(int *out) {
    if (threadIdx.x < 32) __syncthreads();
    else out[threadIdx.x] = __syncthreads_count(1);
}

__global__ void trap(int *out) {
    if (out[threadIdx.x] == 0 && blockIdx.x == 2 && threadIdx.x == 3) __trap();
}

// The launch must end in an error that names the kernel and says this, must stay, and go with the device's reset.
template <class K>
void expect_kernel_error(K kernel, const char *name, int threads, const char *words, int cluster = 1, int shared = 0) {
    array<int> out(64, 0);
    for (int round = 0; round < 3; round++) { // the device is as good as new after each
        launch_clusters(kernel, 4, cluster, threads, shared, out.p);
        const cudaError_t error = cudaDeviceSynchronize();
        const std::string text = cudaGetErrorString(error), head = std::string("kernel ") + name + "(int*), block (";
        expect(error == cudaErrorLaunchFailure, "%s gives %s", name, cudaGetErrorName(error));
        expect(text.compare(0, head.size(), head) == 0, "not named: %s", text.c_str());
        expect(text.find(words) != std::string::npos, "expected \"%s\" in: %s", words, text.c_str());
        if (round == 0) printf("%s\n", text.c_str());
        expect(cudaGetLastError() == error && cudaGetLastError() == error, "the error does not stay");
        expect(cudaMemset(out.p, 0, 4) == error, "work goes on after the error");
        check(cudaDeviceReset());
        check(cudaMemset(out.p, 0, 64 * sizeof(int)));
        scan_block<<<1, 64>>>(out.p);
        expect_equal(out.get(), std::vector<int>(64, 0), "after the reset");
    }
    finish();
}
#define KERNEL_ERROR(kernel, threads, words) expect_kernel_error(kernel, #kernel, threads, words)

void case_error_barrier() {
    KERNEL_ERROR(barrier_missed, 32, "__syncthreads reached by 31 of 32 threads (1 returned)");
    KERNEL_ERROR(barriers_mixed, 64, "threads wait at __syncthreads and at __syncthreads_count");
    KERNEL_ERROR(barrier_divergent, 64,
                 "__syncthreads reached by 63 of 64 threads (0 returned, 1 wait in their warp); "
                 "warp 1: lanes 0x00000100 wait at __shfl_sync (mask 0xffffffff)");
}

void case_error_warp() {
    KERNEL_ERROR(lane_missing, 32, "lanes 0x000fffff wait at __shfl_down_sync (mask 0xffffffff)");
    KERNEL_ERROR(operations_mixed, 64,
                 "lanes 0x55555555 wait at __any_sync (mask 0xffffffff), lanes 0xaaaaaaaa wait at __shfl_xor_sync");
    KERNEL_ERROR(source_returned, 64, "lane 0 reads lane 9, which is one that has returned");
    KERNEL_ERROR(source_beyond_block, 16, "lane 0 reads lane 16, which is beyond the block");
    KERNEL_ERROR(outside_own_mask, 32, "__shfl_sync (mask 0x0000ffff) called by lane 16 of warp 0");
}

void case_error_partial_masks() {
    KERNEL_ERROR(half_warp_short, 32,
                 "__syncthreads reached by 17 of 32 threads (0 returned, 15 wait in their warp); "
                 "warp 0: lanes 0x0000fff7 wait at __ballot_sync (mask 0x0000ffff)");
    KERNEL_ERROR(mask_too_old, 32,
                 "lanes 0xfffffffc wait at __syncwarp (mask 0xffffffff), "
                 "lanes 0x00000001 wait at __shfl_sync (mask 0x00000007), "
                 "lanes 0x00000002 wait at __shfl_sync (mask 0x00000003)");
}

void case_error_trap() { KERNEL_ERROR(trap, 32, "block (2,0,0): __trap in thread (3,0,0)"); }

__global__ void read_early(int *out) { // copies are done when a thread waits for them, not before
    __shared__ alignas(16) int tile[32];
    __shared__ uint64_t full;
    const int i = threadIdx.x;
    if (i == 0) {
        ptx::mbarrier_init(&full, 1);
        ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &full, 128);
        ptx::cp_async_bulk(ptx::space_shared, ptx::space_global, tile, out, 128, &full);
    }
    __syncthreads();
    const int early = tile[i];
    __syncthreads();
    while (!ptx::mbarrier_try_wait_parity(&full, 0)) {}
    const int late = tile[i];
    __syncthreads();
    tile[i] = early + 1 + late * 2;
    __syncthreads();
    if (i == 0) {
        ptx::cp_async_bulk(ptx::space_global, ptx::space_shared, out, tile, 128);
        ptx::cp_async_bulk_commit_group();
        out[0] = -1; // the copy will overwrite it
    }
    __syncthreads();
    if (i == 31) out[32] = out[31];
    __syncthreads();
    if (i == 0) ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>{});
}

void case_bulk_deferred() {
    std::vector<int> in(33), want(33);
    for (int i = 0; i < 32; i++) in[i] = i, want[i] = 2 * i;
    want[32] = 31;
    array<int> a(in);
    read_early<<<1, 32>>>(a.p);
    expect_equal(a.get(), want, "copies done when they are waited for");
}

__global__ void mbarrier_not_there(int *out) {
    extern __shared__ uint64_t barriers_raw[];
    if (threadIdx.x == 3) *out = ptx::mbarrier_try_wait_parity(&barriers_raw[2], 0);
}
__global__ void mbarrier_arrival_unready(int *) {
    __shared__ uint64_t barrier;
    ptx::mbarrier_arrive(&barrier);
}
__global__ void mbarrier_crowded(int *) {
    extern __shared__ uint64_t barriers_raw[];
    if (threadIdx.x == 0) ptx::mbarrier_init(&barriers_raw[1], 40);
    __syncthreads();
    if (threadIdx.x < 39) ptx::mbarrier_arrive(&barriers_raw[1]);
    __syncthreads();
    if (threadIdx.x == 0) ptx::mbarrier_arrive(&barriers_raw[1], 2u);
}
__global__ void mbarrier_too_many_bytes(int *) {
    __shared__ uint64_t barrier;
    ptx::mbarrier_init(&barrier, 1);
    ptx::mbarrier_expect_tx(ptx::sem_relaxed, ptx::scope_cta, ptx::space_shared, &barrier, (1 << 20) - 16);
    ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &barrier, 16);
}
__global__ void mbarrier_count_0(int *) {
    __shared__ uint64_t barrier;
    ptx::mbarrier_init(&barrier, 0);
}
__global__ void mbarrier_parity_2(int *) {
    __shared__ uint64_t barrier;
    ptx::mbarrier_init(&barrier, 1);
    ptx::mbarrier_try_wait_parity(&barrier, 2);
}

#define CLUSTER_ERROR(kernel, threads, cluster, shared, words)                                                         \
    expect_kernel_error(kernel, #kernel, threads, words, cluster, shared)

void case_error_mbarrier() {
    CLUSTER_ERROR(mbarrier_not_there, 32, 1, 32,
                  "mbarrier_try_wait_parity: the mbarrier at byte 16 of the dynamic shared memory has not been init");
    KERNEL_ERROR(mbarrier_arrival_unready, 32, " has not been initialised");
    CLUSTER_ERROR(mbarrier_crowded, 64, 1, 32,
                  "mbarrier_arrive: the mbarrier at byte 8 of the dynamic shared memory (parity now 0; to come: "
                  "1 of 40 arrivals, 0 bytes) gets more arrivals than its phase expects");
    KERNEL_ERROR(mbarrier_too_many_bytes, 1, "to come: 1 of 1 arrivals, 1048560 bytes) gets beyond 2^20-1 bytes");
    KERNEL_ERROR(mbarrier_count_0, 1, "mbarrier_init: a count of 0");
    KERNEL_ERROR(mbarrier_parity_2, 1, "mbarrier_try_wait_parity: a parity of 2");
}

__global__ void wait_for_nobody(int *) {
    extern __shared__ uint64_t barriers_raw[];
    if (threadIdx.x == 0) ptx::mbarrier_init(&barriers_raw[0], blockDim.x);
    __syncthreads();
    if (threadIdx.x == 0) return;
    ptx::mbarrier_arrive(&barriers_raw[0]);
    while (!ptx::mbarrier_try_wait_parity(&barriers_raw[0], 0)) {}
}
__global__ void wait_for_bytes(int *out) { // fewer come than were announced, and waiting threads sleep in between
    __shared__ alignas(16) int tile[8];
    __shared__ uint64_t full;
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(&full, 1);
        ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &full, 32);
        ptx::cp_async_bulk(ptx::space_shared, ptx::space_global, tile, out, 16, &full);
    }
    __syncthreads();
    if (threadIdx.x < 32) while (!ptx::mbarrier_test_wait_parity(&full, 0)) __nanosleep(20);
    __syncthreads();
}
__global__ void wait_for_each_other(int *) { // the blocks of a pair
    extern __shared__ uint64_t barriers_raw[];
    auto cluster = cg::this_cluster();
    if (threadIdx.x == 0) ptx::mbarrier_init(&barriers_raw[0], 1);
    cluster.sync();
    while (!ptx::mbarrier_try_wait_parity(ptx::sem_acquire, ptx::scope_cluster, &barriers_raw[0], 0)) {}
    if (threadIdx.x == 0)
        ptx::mbarrier_arrive(ptx::sem_release, ptx::scope_cluster, ptx::space_cluster,
                             cluster.map_shared_rank(&barriers_raw[0], (int)cluster.block_rank() ^ 1));
    cluster.sync();
}

void case_error_waits() {
    CLUSTER_ERROR(wait_for_nobody, 64, 1, 8,
                  "waits in mbarrier_try_wait_parity for parity 0 of the mbarrier at byte 0 of the dynamic shared "
                  "memory (parity now 0; to come: 1 of 64 arrivals, 0 bytes), and nothing happens any more");
    KERNEL_ERROR(wait_for_bytes, 64,
                 "to come: 0 of 1 arrivals, 16 bytes); __syncthreads reached by 32 of 64 threads (0 returned), and ");
    CLUSTER_ERROR(wait_for_each_other, 40, 2, 8, "arrivals, 0 bytes), and nothing happens any more");
}

__global__ void wait_for_slow(int *out) { // longer than it takes to call a cluster stuck
    extern __shared__ uint64_t barriers_raw[];
    auto cluster = cg::this_cluster();
    if (threadIdx.x == 0) ptx::mbarrier_init(&barriers_raw[0], 1);
    cluster.sync();
    if (cluster.block_rank() == 1 && threadIdx.x == 3) {
        for (const long long start = clock64(); clock64() - start < 1200000000;) {}
        ptx::mbarrier_arrive(ptx::sem_release, ptx::scope_cluster, ptx::space_cluster,
                             cluster.map_shared_rank(&barriers_raw[0], 0));
    }
    if (cluster.block_rank() == 0 && threadIdx.x < 16)
        while (!ptx::mbarrier_try_wait_parity(ptx::sem_acquire, ptx::scope_cluster, &barriers_raw[0], 0)) {}
    cluster.sync();
    if (threadIdx.x == 0) out[blockIdx.x] = 1;
}

void case_slow_peer() {
    array<int> out(4, 0);
    check(launch_clusters(wait_for_slow, 4, 4, 32, 8, out.p));
    expect_equal(out.get(), std::vector<int>(4, 1), "a slow peer");
}

template <int to, int from, int bytes> __global__ void bulk_crooked(int *out) {
    __shared__ alignas(16) int tile[32];
    __shared__ uint64_t full;
    ptx::mbarrier_init(&full, 1);
    ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, tile + to, out + from, bytes, &full);
}
__global__ void bulk_store_crooked(int *out) {
    __shared__ alignas(16) int tile[32];
    ptx::cp_async_bulk(ptx::space_global, ptx::space_shared, out + 1, tile, 16);
}
__global__ void bulk_beyond(int *out) {
    extern __shared__ __align__(16) char bulk_bytes[];
    __shared__ uint64_t full;
    ptx::mbarrier_init(&full, 1);
    ptx::cp_async_bulk(ptx::space_shared, ptx::space_global, bulk_bytes + 64, out, 64, &full);
}
__global__ void bulk_unready(int *out) {
    __shared__ alignas(16) int tile[32];
    __shared__ uint64_t full;
    ptx::cp_async_bulk(ptx::space_shared, ptx::space_global, tile, out, 64, &full);
}
__global__ void bulk_not_waited(int *out) {
    __shared__ alignas(16) int tile[32];
    __shared__ uint64_t full;
    ptx::mbarrier_init(&full, 1);
    ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &full, 64);
    ptx::cp_async_bulk(ptx::space_shared, ptx::space_global, tile, out, 64, &full);
}
__global__ void bulk_store_not_waited(int *out) {
    __shared__ alignas(16) int tile[32];
    for (int k = 0; k < 3; k++) {
        ptx::cp_async_bulk(ptx::space_global, ptx::space_shared, out + 4 * k, tile, 16 * k + 16);
        ptx::cp_async_bulk_commit_group();
    }
    ptx::cp_async_bulk_wait_group_read(ptx::n32_t<1>{});
}

void case_error_bulk() {
    expect_kernel_error(bulk_crooked<1, 0, 16>, "bulk_crooked<1, 0, 16>", 1, "all must be multiples of 16");
    expect_kernel_error(bulk_crooked<0, 2, 16>, "bulk_crooked<0, 2, 16>", 1, "all must be multiples of 16");
    expect_kernel_error(bulk_crooked<0, 0, 24>, "bulk_crooked<0, 0, 24>", 1, "cp_async_bulk of 24 bytes from ");
    KERNEL_ERROR(bulk_store_crooked, 1, "all must be multiples of 16");
    CLUSTER_ERROR(bulk_beyond, 1, 1, 112, ": beyond the dynamic shared memory");
    KERNEL_ERROR(bulk_unready, 1, " has not been initialised");
    KERNEL_ERROR(bulk_not_waited, 1, "it returned, and nobody had waited for the bulk copy of 64 bytes to ");
    KERNEL_ERROR(bulk_store_not_waited, 1, "thread 0 returned, and had not waited for its bulk copy of 48 bytes to ");
}

// Boxes of a tensor map, in memory of the test's own.
alignas(16) int box_memory[32 * 32];
CUtensorMap box_map, box_map_narrow;

template <int rank, int shift> __global__ void box_bad(int *) {
    __shared__ alignas(128) char tile[4096 + 128];
    __shared__ uint64_t full;
    ptx::mbarrier_init(&full, 1);
    const int at[rank] = {};
    ptx::cp_async_bulk_tensor(ptx::space_shared, ptx::space_global, tile + shift, &box_map, at, &full);
}
__global__ void box_store_bad(int *) {
    __shared__ alignas(128) char tile[4096 + 128];
    ptx::cp_async_bulk_tensor(ptx::space_global, ptx::space_shared, &box_map, {0, 0}, tile + 64);
}
template <int column> __global__ void box_amid(int *) {
    __shared__ alignas(128) char tile[4096];
    ptx::cp_async_bulk_tensor(ptx::space_global, ptx::space_shared, &box_map, {column, 0}, tile);
}
__global__ void box_in_front(int *) {
    __shared__ alignas(128) char tile[4096];
    ptx::cp_async_bulk_tensor(ptx::space_global, ptx::space_shared, &box_map, {0, -1}, tile);
}
__global__ void box_no_map(int *out) {
    __shared__ alignas(128) char tile[4096];
    ptx::cp_async_bulk_tensor(ptx::space_global, ptx::space_shared, out, {0, 0}, tile);
}
__global__ void box_map_crooked(int *out) {
    __shared__ alignas(128) char tile[4096];
    ptx::cp_async_bulk_tensor(ptx::space_global, ptx::space_shared, out + 1, {0, 0}, tile);
}
__global__ void box_narrow(int *) {
    __shared__ alignas(1024) char tile[4096];
    ptx::cp_async_bulk_tensor(ptx::space_global, ptx::space_shared, &box_map_narrow, {0, 0}, tile);
}
__global__ void box_beyond(int *) {
    extern __shared__ __align__(128) char bulk_bytes[];
    ptx::cp_async_bulk_tensor(ptx::space_global, ptx::space_shared, &box_map, {0, 0}, bulk_bytes + 128);
}
__global__ void box_unready(int *) {
    __shared__ alignas(128) char tile[4096];
    __shared__ uint64_t full;
    ptx::cp_async_bulk_tensor(ptx::space_shared, ptx::space_global, tile, &box_map, {0, 0}, &full);
}
__global__ void box_not_waited(int *) {
    __shared__ alignas(128) char tile[4096];
    __shared__ uint64_t full;
    ptx::mbarrier_init(&full, 1);
    ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &full, 4096);
    ptx::cp_async_bulk_tensor(ptx::space_shared, ptx::space_global, tile, &box_map, {-40, 0}, &full);
}
__global__ void box_store_not_waited(int *) {
    __shared__ alignas(128) char tile[4096];
    ptx::cp_async_bulk_tensor(ptx::space_global, ptx::space_shared, &box_map, {0, 40}, tile);
    ptx::cp_async_bulk_commit_group();
}
__global__ void box_bytes_short(int *) { // what is outside of the tensor counts as well
    __shared__ alignas(128) char tile[4096];
    __shared__ uint64_t full;
    ptx::mbarrier_init(&full, 1);
    ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &full, 2048);
    ptx::cp_async_bulk_tensor(ptx::space_shared, ptx::space_global, tile, &box_map, {0, 16}, &full);
    while (!ptx::mbarrier_try_wait_parity(&full, 0)) {}
}

void case_error_tensor() {
    tensor_spec spec = {CU_TENSOR_MAP_DATA_TYPE_FLOAT32, {32, 32}, 128, {32, 32}, CU_TENSOR_MAP_SWIZZLE_128B};
    box_map = spec.map(box_memory);
    spec.box[0] = 16;
    box_map_narrow = spec.map(box_memory);
    const char *crooked = ": not aligned to 128 bytes in shared memory";
    expect_kernel_error(box_bad<2, 64>, "box_bad<2, 64>", 1, crooked);
    expect_kernel_error(box_bad<1, 0>, "box_bad<1, 0>", 1, ": 1 coordinates in a tensor of 2 dimensions");
    KERNEL_ERROR(box_store_bad, 1, crooked);
    expect_kernel_error(box_amid<6>, "box_amid<6>", 1, ": column 6 is no multiple of 16 bytes");
    expect_kernel_error(box_amid<-4>, "box_amid<-4>", 1, " to -4, 0: a store begins inside or behind its tensor");
    KERNEL_ERROR(box_in_front, 1, " to 0, -1: a store begins inside or behind its tensor");
    KERNEL_ERROR(box_no_map, 1, "cp_async_bulk_tensor: there is no tensor map at ");
    KERNEL_ERROR(box_map_crooked, 1, " is not aligned to 64 bytes");
    KERNEL_ERROR(box_narrow, 1, "cp_async_bulk_tensor of rows of 64 bytes, with a swizzle of 128");
    CLUSTER_ERROR(box_beyond, 1, 1, 4096, ": beyond the dynamic shared memory");
    KERNEL_ERROR(box_unready, 1, " has not been initialised");
    KERNEL_ERROR(box_not_waited, 1, "it returned, and nobody had waited for the bulk copy of 4096 bytes to ");
    KERNEL_ERROR(box_store_not_waited, 1, "thread 0 returned, and had not waited for its bulk copy of 4096 bytes to ");
    KERNEL_ERROR(box_bytes_short, 1, ", -2048 bytes)");
}

__global__ void box_early(int *out) { // as bulk copies are, these are done when a thread waits for them
    __shared__ alignas(1024) int tile[1024];
    __shared__ uint64_t full;
    const int i = threadIdx.x;
    if (i == 0) {
        ptx::mbarrier_init(&full, 1);
        ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &full, 4096);
        ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, tile, &box_map, {0, 0}, &full);
    }
    __syncthreads();
    const int early = tile[i];
    __syncthreads();
    while (!ptx::mbarrier_try_wait_parity(&full, 0)) {}
    tile[i] += early; // one less
    __syncthreads();
    if (i == 0) {
        ptx::cp_async_bulk_tensor(ptx::space_global, ptx::space_shared, &box_map, {0, 0}, tile);
        ptx::cp_async_bulk_commit_group();
    }
    out[i] = box_memory[i];
    __syncthreads();
    if (i == 0) ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>{});
    __syncthreads();
    out[i] = out[i] * 10 + box_memory[i];
}

void case_tensor_deferred() {
    std::fill(std::begin(box_memory), std::end(box_memory), 7);
    const tensor_spec spec = {CU_TENSOR_MAP_DATA_TYPE_FLOAT32, {32, 32}, 128, {32, 32}, CU_TENSOR_MAP_SWIZZLE_128B};
    box_map = spec.map(box_memory);
    array<int> out(32);
    box_early<<<1, 32>>>(out.p);
    expect_equal(out.get(), std::vector<int>(32, 76), "boxes moved when they are waited for");
}

__global__ void block_leaves(int *) {
    if (cg::this_cluster().block_rank() == 1) return;
    cg::this_cluster().sync();
}
__global__ void thread_leaves(int *) {
    if (cg::this_cluster().block_rank() == 1 && threadIdx.x == 7) return;
    cg::this_cluster().sync();
}
__global__ void thread_elsewhere(int *) {
    if (threadIdx.x == 7) __syncthreads();
    cg::this_cluster().sync();
}
__global__ void block_elsewhere(int *) {
    __shared__ uint64_t barrier;
    if (threadIdx.x == 0) ptx::mbarrier_init(&barrier, 1);
    __syncthreads();
    if (cg::this_cluster().block_rank() == 1) while (!ptx::mbarrier_try_wait_parity(&barrier, 0)) {}
    cg::this_cluster().sync();
}
__global__ void arrive_twice(int *) {
    cg::this_cluster().barrier_arrive();
    cg::this_cluster().barrier_arrive();
}
__global__ void wait_only(int *) { cg::this_cluster().barrier_wait(); }

void case_error_cluster() {
    CLUSTER_ERROR(block_leaves, 32, 2, 0, "cluster.sync() reached by 1 of 2 blocks; block 1 of the cluster returned, ");
    CLUSTER_ERROR(block_leaves, 32, 4, 16, "cluster.sync() reached by 3 of 4 blocks; block 1 of the cluster returned,");
    CLUSTER_ERROR(thread_leaves, 32, 4, 0, "cluster.sync() reached by 31 of 32 threads of the block (1 returned)");
    CLUSTER_ERROR(thread_elsewhere, 32, 2, 0,
                  "__syncthreads reached by 1 of 32 threads (0 returned); "
                  "cluster.sync() reached by 31 of 32 threads of the block (0 returned)");
    CLUSTER_ERROR(block_elsewhere, 32, 2, 0, ", and nothing happens any more"); // whichever block says it
    CLUSTER_ERROR(arrive_twice, 32, 2, 0, "thread 0 arrives at the cluster barrier again without having waited there");
    CLUSTER_ERROR(wait_only, 32, 2, 0, "thread 0 waits at the cluster barrier and has not arrived");
}

__global__ void map_static(int *) {
    __shared__ int here;
    cg::this_cluster().map_shared_rank(&here, 0);
}
__global__ void map_global(int *out) { cg::this_cluster().map_shared_rank(out, 1); }
__global__ void map_too_far(int *) {
    extern __shared__ int mapped_raw[];
    cg::this_cluster().map_shared_rank(mapped_raw, 2);
}
__global__ void map_returned(int *out) {
    extern __shared__ int mapped_raw[];
    auto cluster = cg::this_cluster();
    if (cluster.block_rank() == 1) return;
    while (true) {
        out[blockIdx.x] = *cluster.map_shared_rank(&mapped_raw[3], 0);
        cluster.map_shared_rank(&mapped_raw[3], 1); // sooner or later it has returned
        __nanosleep(100);
    }
}
__global__ void wait_at_another(int *) {
    extern __shared__ uint64_t barriers_raw[];
    auto cluster = cg::this_cluster();
    if (threadIdx.x == 0) ptx::mbarrier_init(&barriers_raw[0], 1);
    cluster.sync();
    ptx::mbarrier_try_wait_parity(cluster.map_shared_rank(&barriers_raw[0], 1), 1);
    cluster.sync();
}

void case_error_cluster_memory() {
    CLUSTER_ERROR(map_static, 1, 2, 16, "is not in the block's dynamic shared memory, and no other is mapped");
    CLUSTER_ERROR(map_global, 1, 2, 16, "is not in the block's dynamic shared memory, and no other is mapped");
    CLUSTER_ERROR(map_too_far, 1, 2, 16, "map_shared_rank: rank 2 of a cluster of 2");
    CLUSTER_ERROR(map_returned, 1, 2, 16, "map_shared_rank: block 1 of the cluster has returned");
    CLUSTER_ERROR(wait_at_another, 32, 2, 16,
                  "mbarrier_try_wait_parity: the mbarrier at byte 0 of the dynamic shared memory of block 1 of the "
                  "cluster is not the block's own");
}

void case_launch_refused() {
    array<float> y(64, 0);
    cudaLaunchAttribute cooperative = {};
    cooperative.id = (cudaLaunchAttributeID)2;
    cudaLaunchConfig_t config = {2, 64, 0, nullptr, &cooperative, 1};
    const cudaError_t error = cudaLaunchKernelEx(&config, step_on, y.p, 0, 1.0f);
    expect(error == cudaErrorNotSupported, "a cooperative launch: %s", cudaGetErrorName(error));
    expect_launch_error({error}, "a cooperative launch");
    expect(cudaLaunchKernelEx(nullptr, step_on, y.p, 0, 1.0f) == cudaErrorInvalidValue, "no configuration");
    expect_launch_error({cudaErrorInvalidValue}, "no configuration");
    config.attrs = nullptr;
    expect(cudaLaunchKernelEx(&config, step_on, y.p, 0, 1.0f) == cudaErrorInvalidValue, "no attributes, but one");
    expect_launch_error({cudaErrorInvalidValue}, "no attributes, but one");
    expect_equal(y.get(), std::vector<float>(64, 0.0f), "what was refused does not run");
}

__global__ void read_poison(int *out) {
    __shared__ float unwritten;
    __shared__ unsigned table[5][7];
    extern __shared__ unsigned dynamic_words[];
    if (threadIdx.x == 0) out[blockIdx.x] = isnan(unwritten) && table[4][6] == ~0u && dynamic_words[9] == ~0u;
    __syncthreads();
    if (threadIdx.x == 1) unwritten = 1, table[4][6] = 2, dynamic_words[9] = 3;
}

void case_poison() {
    array<float> fresh(1000);
    for (float x : fresh.get()) expect(std::isnan(x), "fresh memory holds %g", x);
    array<int> out(50, 0);
    read_poison<<<50, 33, 40>>>(out.p);
    expect_equal(out.get(), std::vector<int>(50, 1), "every block finds its shared memory poisoned");
}

__global__ void write_past(int *p, int n, bool shared) {
    extern __shared__ int block_memory[];
    (shared ? block_memory : p)[n] = 1;
}

// To be run under AddressSanitizer only, which ends the program.
void case_overrun_global() {
    array<int> a(101);
    write_past<<<1, 1>>>(a.p, 101, false);
    finish();
}
void case_overrun_shared() {
    write_past<<<1, 1, 44>>>(nullptr, 11, true);
    finish();
}

__global__ void write_past_bulk(const int *p, int n) { // asks for it before it waits
    __shared__ alignas(16) int block_memory[64];
    __shared__ uint64_t full;
    ptx::mbarrier_init(&full, 1);
    ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &full, n * 4);
    ptx::cp_async_bulk(ptx::space_shared, ptx::space_global, block_memory, p, n * 4, &full);
    while (!ptx::mbarrier_try_wait_parity(&full, 0)) {}
}
void case_overrun_bulk() {
    array<int> a(60);
    write_past_bulk<<<1, 1>>>(a.p, 64);
    finish();
}

__global__ void write_past_tensor(const __grid_constant__ CUtensorMap map) { // whose tensor has a row too many
    __shared__ alignas(128) int block_memory[64];
    __shared__ uint64_t full;
    ptx::mbarrier_init(&full, 1);
    ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &full, 256);
    ptx::cp_async_bulk_tensor(ptx::space_shared, ptx::space_global, block_memory, &map, {-4, 5}, &full);
    while (!ptx::mbarrier_try_wait_parity(&full, 0)) {}
}
void case_overrun_tensor() {
    array<int> a(8 * 8);
    write_past_tensor<<<1, 1>>>(
        tensor_spec{CU_TENSOR_MAP_DATA_TYPE_FLOAT32, {8, 9}, 32, {8, 8}, CU_TENSOR_MAP_SWIZZLE_NONE}.map(a.p));
    finish();
}

// Races for ThreadSanitizer to report: each kernel lacks a barrier, a fence, a wait or an event.

__global__ void race_block(int *out) {
    __shared__ int words[64];
    words[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = words[63 - threadIdx.x]; // of the other warp
}
void case_race_block() {
    array<int> out(64);
    race_block<<<1, 64>>>(out.p);
    finish();
}

__global__ void race_warp(int *out) {
    __shared__ int words[32];
    words[threadIdx.x] = threadIdx.x;
    __shfl_sync(0xffffffff, 0, 0); // orders no memory
    out[threadIdx.x] = words[31 - threadIdx.x];
}
void case_race_warp() {
    array<int> out(32);
    race_warp<<<1, 32>>>(out.p);
    finish();
}

__global__ void race_blocks(int *out) {
    if (threadIdx.x == 0) *out = blockIdx.x;
}
void case_race_blocks() {
    array<int> out(1);
    race_blocks<<<2, 32>>>(out.p);
    finish();
}

__global__ void race_fence(int *out, unsigned *count, bool fences) { // the last block adds up what all have written
    if (threadIdx.x > 0) return;
    out[blockIdx.x] = blockIdx.x;
    if (fences) __threadfence();
    if (atomicAdd(count, 1) + 1 < gridDim.x) return;
    if (fences) __threadfence();
    int sum = 0;
    for (unsigned i = 0; i < gridDim.x; i++) sum += out[i];
    out[gridDim.x] = sum;
}
void case_race_fence() {
    array<int> out(5);
    array<unsigned> count(2, 0);
    race_fence<<<4, 32>>>(out.p, count.p, true);
    expect(out.get()[4] == 6, "the sum with fences");
    race_fence<<<4, 32>>>(out.p, count.p + 1, false);
    finish();
}

template <bool load> __global__ void race_bulk(int *out) { // nobody waits: for what comes, or until it has been read
    __shared__ alignas(16) int words[32];
    __shared__ uint64_t full;
    if (threadIdx.x == 0) ptx::mbarrier_init(&full, 1);
    __syncwarp();
    if (threadIdx.x == 0 && load) {
        ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &full, 128);
        ptx::cp_async_bulk(ptx::space_shared, ptx::space_global, words, out, 128, &full);
    } else if (threadIdx.x == 0) {
        words[0] = 1;
        ptx::fence_proxy_async(ptx::space_shared);
        ptx::cp_async_bulk(ptx::space_global, ptx::space_shared, out, words, 128);
        ptx::cp_async_bulk_commit_group();
    }
    __syncwarp();
    words[threadIdx.x] = 2;
    if (load) while (!ptx::mbarrier_try_wait_parity(&full, 0)) {}
    else if (threadIdx.x == 0) ptx::cp_async_bulk_wait_group(ptx::n32_t<0>{});
}
void case_race_bulk_load() {
    array<int> out(32, 0);
    race_bulk<true><<<1, 32>>>(out.p);
    finish();
}
void case_race_bulk_store() {
    array<int> out(32, 0);
    race_bulk<false><<<1, 32>>>(out.p);
    finish();
}

__global__ void race_proxy(int *out) { // no fence between a store and the bulk copy that reads it
    __shared__ alignas(16) int words[32];
    words[threadIdx.x] = 1;
    __syncwarp();
    if (threadIdx.x > 0) return;
    ptx::cp_async_bulk(ptx::space_global, ptx::space_shared, out, words, 128);
    ptx::cp_async_bulk_commit_group();
    ptx::cp_async_bulk_wait_group(ptx::n32_t<0>{});
}
void case_race_proxy() {
    array<int> out(32, 0);
    race_proxy<<<1, 32>>>(out.p);
    finish();
}

// Two streams; the event that the second should wait for is only recorded.
void two_streams(bool waits) {
    array<int> a(1000, 0);
    cudaStream_t s[2];
    cudaEvent_t event;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    for (auto &stream : s) check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    finish();
    add_one_each<1><<<8, 128, 0, s[0]>>>(a.p, 1000, 1.0f);
    check(cudaEventRecord(event, s[0]));
    if (waits) check(cudaStreamWaitEvent(s[1], event));
    add_one_each<2><<<8, 128, 0, s[1]>>>(a.p, 1000, 1.0f);
    finish();
    for (auto &stream : s) check(cudaStreamDestroy(stream));
    check(cudaEventDestroy(event));
}
void case_two_streams() { two_streams(true); }
void case_race_streams() { two_streams(false); }

void case_race_hosts() { // two host threads, each with a stream
    array<int> a(1000, 0);
    finish();
    std::vector<std::thread> hosts;
    for (int h = 0; h < 2; h++)
        hosts.emplace_back([&] {
            cudaStream_t s;
            check(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
            add_one_each<1><<<8, 128, 0, s>>>(a.p, 1000, 1.0f);
            check(cudaStreamSynchronize(s));
            check(cudaStreamDestroy(s));
        });
    for (auto &h : hosts) h.join();
}

// The dependent kernel reads what the one in front of it writes, and does not wait for its end.
__global__ void start_early(float *y, bool waits) {
    cudaTriggerProgrammaticLaunchCompletion();
    if (waits) cudaGridDependencySynchronize();
    y[threadIdx.x] += 1;
}
void dependent_launches(bool waits) {
    array<float> y(32, 0);
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaStream_t s;
    check(cudaStreamCreate(&s));
    cudaLaunchConfig_t config = {1, 32, 0, s, &early, 1};
    for (int i = 0; i < 3; i++) check(cudaLaunchKernelEx(&config, start_early, y.p, waits));
    expect_equal(y.get(), std::vector<float>(32, 3.0f), waits ? "without the fault" : "with the fault");
    check(cudaStreamDestroy(s));
}
void case_dependent_launches() { dependent_launches(true); }
void case_race_dependent() { dependent_launches(false); }

// Faults that adversary mode finds: each case runs a kernel without the fault, then with it.

template <class T> void expect_luck(const std::vector<T> &got, const std::vector<T> &want, bool fault) {
    expect_equal(got, want, fault ? "with the fault" : "without the fault");
}

// Of two teams of 16 lanes, the last to arrive adds up what both have stored.
__global__ void last_team(int *out, int *words, unsigned *count, bool fault) {
    const unsigned team = threadIdx.x / 16, lane = threadIdx.x % 16, mask = 0xffffu << team * 16;
    out += blockIdx.x * 16, words += blockIdx.x * 32, count += blockIdx.x;
    words[threadIdx.x] = threadIdx.x;
    if (!fault) __syncwarp(mask);
    unsigned before = 0;
    if (lane == 0) {
        __threadfence();
        before = atomicAdd(count, 1);
        __threadfence();
    }
    before = __shfl_sync(mask, before, 0, 16);
    __syncwarp(mask);
    if (before == 1) out[lane] = words[lane] + words[16 + lane];
}
void case_fault_syncwarp() {
    const int blocks = 16;
    std::vector<int> want(blocks * 16);
    for (int i = 0; i < blocks * 16; i++) want[i] = 2 * (i % 16) + 16;
    for (bool fault : {false, true}) {
        array<int> out(blocks * 16, 0), words(blocks * 32, 0);
        array<unsigned> count(blocks, 0);
        last_team<<<blocks, 32>>>(out.p, words.p, count.p, fault);
        expect_luck(out.get(), want, fault);
    }
}

// Warp 0 sends messages to warp 1 through one word. It must not write a message before the previous one is read.
__global__ void messages(int *out, int count, bool fault) {
    __shared__ int message;
    __shared__ uint64_t sent;
    __shared__ uint64_t received;
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(&sent, 1);
        ptx::mbarrier_init(&received, 1);
        ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
    }
    __syncthreads();
    for (int i = 0; i < count; i++) {
        if (threadIdx.x == 0) {
            if (fault) __nanosleep(100), message = i; // usually read by now
            while (!ptx::mbarrier_try_wait_parity(&received, (i & 1) ^ 1)) {}
            message = i;
            ptx::mbarrier_arrive(&sent);
        } else if (threadIdx.x >= 32) {
            while (!ptx::mbarrier_try_wait_parity(&sent, i & 1)) {}
            out[i * 32 + threadIdx.x - 32] = message;
            __syncwarp();
            if (threadIdx.x == 32) ptx::mbarrier_arrive(&received);
        }
    }
}
void case_fault_message() {
    const int count = 8;
    std::vector<int> want(count * 32);
    for (int i = 0; i < count * 32; i++) want[i] = i / 32;
    for (bool fault : {false, true}) {
        array<int> out(count * 32, 0);
        messages<<<1, 64>>>(out.p, count, fault);
        expect_luck(out.get(), want, fault);
    }
}

// The inputs of a wgmma are overwritten with 2 after it.
__global__ void product_of_ones(float *out, bool fault) {
    extern __shared__ __align__(1024) __nv_bfloat16 inputs[];
    const int n = (64 + 256) * 64;
    for (int i = threadIdx.x; i < n; i += 128) inputs[i] = __nv_bfloat16(1.0f);
    ptx::fence_proxy_async(ptx::space_shared);
    __syncthreads();
    float sums[128];
    bookends::wgmma_begin();
    bookends::wgmma_64x256x16<__nv_bfloat16>(sums, bookends::describe_rows(inputs),
                                             bookends::describe_rows(inputs + 64 * 64), false);
    bookends::wgmma_end();
    if (!fault) bookends::wgmma_wait<0>();
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += 128) inputs[i] = __nv_bfloat16(2.0f);
    if (fault) bookends::wgmma_wait<0>();
    for (int i = 0; i < 128; i++) out[i * 128 + threadIdx.x] = sums[i];
}
void case_fault_wgmma() {
    for (bool fault : {false, true}) {
        array<float> out(128 * 128, 0);
        product_of_ones<<<1, 128, 40960>>>(out.p, fault);
        expect_luck(out.get(), std::vector<float>(128 * 128, 16), fault);
    }
}

// A bulk copy stores a tile; then the tile is overwritten.
__global__ void store_ones(int *out, bool fault) {
    __shared__ alignas(16) int words[32];
    for (int round = 1; round <= 2; round++) {
        words[threadIdx.x] = round;
        ptx::fence_proxy_async(ptx::space_shared);
        __syncwarp();
        if (threadIdx.x == 0) {
            ptx::cp_async_bulk(ptx::space_global, ptx::space_shared, out + round * 32 - 32, words, 128);
            ptx::cp_async_bulk_commit_group();
            if (!fault) ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>{});
        }
        __syncwarp();
    }
    if (threadIdx.x == 0) ptx::cp_async_bulk_wait_group(ptx::n32_t<0>{});
}
void case_fault_store() {
    std::vector<int> want(64, 1);
    std::fill(want.begin() + 32, want.end(), 2);
    for (bool fault : {false, true}) {
        array<int> out(64, 0);
        store_ones<<<1, 32>>>(out.p, fault);
        expect_luck(out.get(), want, fault);
    }
}

// A thread reads back what its bulk copy stored.
__global__ void read_back(int *out, bool fault) {
    __shared__ alignas(16) int words[4];
    for (int i = 0; i < 4; i++) words[i] = i;
    ptx::fence_proxy_async(ptx::space_shared);
    ptx::cp_async_bulk(ptx::space_global, ptx::space_shared, out, words, 16);
    ptx::cp_async_bulk_commit_group();
    if (fault) ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>{}); // waits for the source alone
    else ptx::cp_async_bulk_wait_group(ptx::n32_t<0>{});
    for (int i = 0; i < 4; i++) out[4 + i] = out[i];
}
void case_fault_read_back() {
    for (bool fault : {false, true}) {
        array<int> out(8, 0);
        read_back<<<1, 1>>>(out.p, fault);
        expect_luck(out.get(), {0, 1, 2, 3, 0, 1, 2, 3}, fault);
    }
}

// Bulk copies load tiles into one buffer. A copy must not start before all lanes have read the previous tile.
__global__ void load_tiles(const int *in, int *out, int tiles, bool fault) {
    __shared__ alignas(16) int words[32];
    __shared__ uint64_t full[8];
    if (threadIdx.x < 8) ptx::mbarrier_init(&full[threadIdx.x], 1);
    __syncwarp();
    for (int i = 0; i < tiles; i++) {
        if (!fault) __syncwarp();
        if (threadIdx.x == 0) {
            ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &full[i], 128);
            ptx::cp_async_bulk(ptx::space_shared, ptx::space_global, words, in + i * 32, 128, &full[i]);
        }
        while (!ptx::mbarrier_try_wait_parity(&full[i], 0)) {}
        out[i * 32 + threadIdx.x] = words[threadIdx.x];
    }
}
void case_fault_load() {
    const int tiles = 8;
    std::vector<int> in(tiles * 32);
    for (int i = 0; i < tiles * 32; i++) in[i] = i;
    array<int> a(in);
    for (bool fault : {false, true}) {
        array<int> out(tiles * 32, 0);
        load_tiles<<<1, 32>>>(a.p, out.p, tiles, fault);
        expect_luck(out.get(), in, fault);
    }
}

__global__ void times_and_plus(int *x, int factor, int more) { x[threadIdx.x] = x[threadIdx.x] * factor + more; }
void case_fault_event() { // 1, then 3 from another stream, then 4
    cudaStream_t s[2];
    cudaEvent_t event[2];
    for (int i = 0; i < 2; i++) check(cudaStreamCreateWithFlags(&s[i], cudaStreamNonBlocking));
    for (int i = 0; i < 2; i++) check(cudaEventCreateWithFlags(&event[i], cudaEventDisableTiming));
    for (int fault : {0, 1, 2}) {
        array<int> x(32, 0);
        finish();
        times_and_plus<<<1, 32, 0, s[0]>>>(x.p, 1, 1);
        check(cudaEventRecord(event[0], s[0]));
        if (fault != 1) check(cudaStreamWaitEvent(s[1], event[0]));
        times_and_plus<<<1, 32, 0, s[1]>>>(x.p, 3, 0);
        check(cudaEventRecord(event[1], s[1]));
        if (fault != 2) check(cudaStreamWaitEvent(s[0], event[1]));
        times_and_plus<<<1, 32, 0, s[0]>>>(x.p, 1, 1);
        expect_luck(x.get(), std::vector<int>(32, 4), fault != 0);
    }
    for (cudaStream_t stream : s) check(cudaStreamDestroy(stream));
    for (cudaEvent_t e : event) check(cudaEventDestroy(e));
}

void case_fault_dependent() {
    for (bool fault : {false, true}) dependent_launches(!fault);
}

#else
void only_cpu() { skip("about the CPU device only"); }
constexpr auto case_error_barrier = only_cpu, case_error_warp = only_cpu, case_error_partial_masks = only_cpu,
               case_error_trap = only_cpu, case_launch_refused = only_cpu, case_poison = only_cpu,
               case_overrun_global = only_cpu, case_overrun_shared = only_cpu, case_overrun_bulk = only_cpu,
               case_bulk_deferred = only_cpu, case_error_mbarrier = only_cpu, case_error_waits = only_cpu,
               case_error_bulk = only_cpu, case_error_cluster = only_cpu, case_error_cluster_memory = only_cpu,
               case_slow_peer = only_cpu, case_error_tensor = only_cpu, case_tensor_deferred = only_cpu,
               case_overrun_tensor = only_cpu, case_race_block = only_cpu, case_race_warp = only_cpu,
               case_race_blocks = only_cpu, case_race_fence = only_cpu, case_race_bulk_load = only_cpu,
               case_race_bulk_store = only_cpu, case_race_proxy = only_cpu, case_race_streams = only_cpu,
               case_race_hosts = only_cpu, case_race_dependent = only_cpu, case_two_streams = only_cpu,
               case_dependent_launches = only_cpu, case_fault_syncwarp = only_cpu, case_fault_message = only_cpu,
               case_fault_wgmma = only_cpu, case_fault_store = only_cpu, case_fault_read_back = only_cpu,
               case_fault_load = only_cpu, case_fault_event = only_cpu, case_fault_dependent = only_cpu;
#endif

// ---------------------------------------------------------------------------------------------------------------------

const struct {
    const char *name;
    void (*run)();
} cases[] = {
#define CASE(name) {#name, case_##name}
    CASE(grid), CASE(early_return), CASE(host_threads), CASE(shared_memory), CASE(barrier_loop),
    CASE(barrier_votes), CASE(block_sum), CASE(shuffles), CASE(votes), CASE(match_and_reduce),
    CASE(sub_warps), CASE(half_warps), CASE(sum_by_key), CASE(atomics), CASE(atomics16), CASE(atomics_vector),
    CASE(last_block), CASE(widen16), CASE(round16), CASE(arithmetic16), CASE(cache_hints), CASE(aligned_struct),
    CASE(vector_types), CASE(intrinsics), CASE(streams), CASE(graphs), CASE(launch_errors), CASE(launch_ex),
    CASE(shared_forms), CASE(mbarrier), CASE(bulk_ring), CASE(tensor_load), CASE(tensor_store), CASE(tensor_line),
    CASE(tensor_map), CASE(cluster_sums), CASE(cluster_arrivals), CASE(cluster_grid),
    CASE(cluster_launch), CASE(cluster_alone), CASE(host_threads_clusters), CASE(error_words), CASE(error_barrier),
    CASE(error_warp), CASE(error_partial_masks), CASE(error_trap), CASE(launch_refused), CASE(poison),
    CASE(overrun_global), CASE(overrun_shared), CASE(overrun_bulk), CASE(overrun_tensor),
    CASE(bulk_deferred), CASE(tensor_deferred), CASE(error_mbarrier), CASE(error_waits), CASE(error_bulk),
    CASE(two_streams), CASE(dependent_launches), CASE(race_block), CASE(race_warp), CASE(race_blocks),
    CASE(race_fence), CASE(race_bulk_load), CASE(race_bulk_store), CASE(race_proxy), CASE(race_streams),
    CASE(race_hosts), CASE(race_dependent), CASE(fault_syncwarp), CASE(fault_message), CASE(fault_wgmma),
    CASE(fault_store), CASE(fault_read_back), CASE(fault_load), CASE(fault_event), CASE(fault_dependent),
    CASE(error_tensor), CASE(error_cluster), CASE(error_cluster_memory), CASE(slow_peer),
};

int main(int argc, char **argv) {
    const std::string wanted = argc == 2 ? argv[1] : "";
    for (const auto &c : cases) {
        if (wanted == "--list") printf("%s\n", c.name);
        if (wanted != c.name) continue;
        c.run();
        return 0;
    }
    if (wanted == "--list") return 0;
    fprintf(stderr, "cpu_device: no case \"%s\"; try cpu_device --list\n", wanted.c_str());
    return 2;
}
