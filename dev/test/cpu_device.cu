// Tests what the CPU device (dev/cpu) must do as a GPU does, on either: the file is plain CUDA.
//   cpu_device --list     prints the cases, one a line
//   cpu_device CASE       runs one; exit status 0: passed, 1: failed (a line says how), 77: skipped (a line says why)
// The cases at the end are about what only the CPU device promises: errors that name the kernel, and poisoned memory.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

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
    explicit array(size_t n) : n(n) { check(cudaMalloc(&p, n * sizeof(T))); }
    array(size_t n, int byte) : array(n) { check(cudaMemset(p, byte, n * sizeof(T))); }
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
    for (int seen = i[4];;) { // the classical loop
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

__global__ void atomics16(__half *h, __nv_bfloat16 *b, __half2 *h2, __nv_bfloat162 *b2) {
    atomicAdd(&h[threadIdx.x % 3], __float2half(1.0f));
    atomicAdd(&b[threadIdx.x % 3], __float2bfloat16(1.0f));
    atomicAdd(h2, __floats2half2_rn(1.0f, 2.0f));
    atomicAdd(b2, __floats2bfloat162_rn(1.0f, 0.5f));
}

void case_atomics16() {
    array<__half> h(3, 0);
    array<__nv_bfloat16> b(3, 0);
    array<__half2> h2(1, 0);
    array<__nv_bfloat162> b2(1, 0);
    atomics16<<<10, 24>>>(h.p, b.p, h2.p, b2.p);
    for (int i = 0; i < 3; i++)
        expect(__half2float(h.get()[i]) == 80 && __bfloat162float(b.get()[i]) == 80, "element %d", i);
    const float2 x = __half22float2(h2.get()[0]), y = __bfloat1622float2(b2.get()[0]);
    expect(x.x == 240 && x.y == 480 && y.x == 240 && y.y == 120, "pairs: %g %g %g %g", x.x, x.y, y.x, y.y);
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

__global__ void round_all(const float *x, unsigned short *h, unsigned short *b, size_t n) {
    const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i >= n) return;
    h[i] = __half_as_ushort(__float2half_rn(x[i]));
    b[i] = __bfloat16_as_ushort(__float2bfloat16_rn(x[i]));
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

// The bits nearest to x, by bisection over all of them; a tie goes to the even ones.
unsigned nearest_bits(float x, int mantissa_bits) {
    const unsigned infinity = ((1u << (15 - mantissa_bits)) - 1) << mantissa_bits;
    const double size = fabs((double)x);
    unsigned low = 0, high = infinity;
    if (size >= value_of(high, mantissa_bits)) low = high;
    while (high - low > 1) {
        const unsigned middle = (low + high) / 2;
        (value_of(middle, mantissa_bits) <= size ? low : high) = middle;
    }
    const double twice = value_of(low, mantissa_bits) + value_of(low + 1, mantissa_bits);
    const unsigned bits = low == infinity || 2 * size < twice || (2 * size == twice && low % 2 == 0) ? low : low + 1;
    return bits | (std::signbit(x) ? 0x8000 : 0);
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
                const float f = (float)v, sign = bits % 2 ? -1.0f : 1.0f;
                for (float near : {f, nextafterf(f, INFINITY), nextafterf(f, 0.0f)}) x.push_back(sign * near);
            }
        }
    array<float> in(x);
    array<unsigned short> h(x.size()), b(x.size());
    round_all<<<(unsigned)(x.size() + 255) / 256, 256>>>(in.p, h.p, b.p, x.size());
    const std::vector<unsigned short> got[] = {h.get(), b.get()};
    for (int kind = 0; kind < 2; kind++)
        for (size_t i = 0; i < x.size(); i++) {
            const unsigned bits = got[kind][i], infinity = kind ? 0x7f80 : 0x7c00;
            const bool ok = std::isnan(x[i]) ? (bits & 0x7fff) > infinity : bits == nearest_bits(x[i], kind ? 7 : 10);
            expect(ok, "%a as %s gives 0x%04x", x[i], kind ? "bfloat16" : "half", bits);
        }
}

template <class T> __global__ void arithmetic16(const T *a, const T *b, T *out) {
    const int i = threadIdx.x;
    out[i] = a[i] + b[i];
    out[i + 64] = a[i] - b[i];
    out[i + 128] = a[i] * b[i];
    out[i + 192] = a[i] < b[i] ? (T)0.1 : (T)7;
}

template <class T> void test_arithmetic16() {
    std::vector<T> a, b;
    for (int i = 0; i < 64; i++) a.push_back((T)(1.0f + i * 0.37f)), b.push_back((T)(30.0f - i * 0.53f));
    array<T> x(a), y(b), out(256, 0);
    arithmetic16<T><<<1, 64>>>(x.p, y.p, out.p);
    const std::vector<T> got = out.get();
    for (int i = 0; i < 64; i++) {
        const double p = (float)a[i], q = (float)b[i];
        const T want[] = {(T)(float)(p + q), (T)(float)(p - q), (T)(float)(p * q), p < q ? (T)0.1f : (T)7.0f};
        for (int k = 0; k < 4; k++)
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

__global__ void hinted_copies(const float4 *in, float4 *out, const int *in1, int *out1) {
    const int i = threadIdx.x;
    switch (i % 4) {
    case 0: __stcs(&out[i], __ldcs(&in[i])); break;
    case 1: __stcg(&out[i], __ldcg(&in[i])); break;
    case 2: __stwb(&out[i], __ldca(&in[i])); break;
    default: __stwt(&out[i], __ldg(&in[i])); break;
    }
    out1[i] = __ldg(&in1[i]) + __ldlu(&in1[i]) + __ldcv(&in1[i]);
}

void case_cache_hints() {
    std::vector<float4> in(64);
    std::vector<int> in1(64), want1(64);
    for (int i = 0; i < 64; i++) in[i] = make_float4(i, i + 0.25f, i + 0.5f, i + 0.75f), in1[i] = i, want1[i] = 3 * i;
    array<float4> a(in), b(64, 0);
    array<int> c(in1), d(64, 0);
    hinted_copies<<<1, 64>>>(a.p, b.p, c.p, d.p);
    const std::vector<float4> got = b.get();
    expect(memcmp(got.data(), in.data(), 64 * sizeof(float4)) == 0, "float4 through hinted accesses");
    expect_equal(d.get(), want1, "int through hinted loads");
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

__global__ void barriers_mixed(int *out) {
    if (threadIdx.x < 32) __syncthreads();
    else out[threadIdx.x] = __syncthreads_count(1);
}

__global__ void trap(int *out) {
    if (out[threadIdx.x] == 0 && blockIdx.x == 2 && threadIdx.x == 3) __trap();
}

// The launch must end in an error that names the kernel and says this, must stay, and go with the device's reset.
template <class K> void expect_kernel_error(K kernel, const char *name, int threads, const char *words) {
    array<int> out(64, 0);
    for (int round = 0; round < 3; round++) { // the device is as good as new after each
        kernel<<<4, threads>>>(out.p);
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

void case_error_trap() { KERNEL_ERROR(trap, 32, "block (2,0,0): __trap in thread (3,0,0)"); }

__global__ void read_poison(int *out) {
    __shared__ float unwritten;
    __shared__ unsigned table[5][7];
    extern __shared__ unsigned dynamic_words[];
    if (threadIdx.x == 0) out[blockIdx.x] = isnan(unwritten) && table[4][6] == ~0u && dynamic_words[9] == ~0u;
    __syncthreads();
    unwritten = 1, table[4][6] = 2, dynamic_words[9] = 3;
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

#else
void only_cpu() { skip("about the CPU device only"); }
constexpr auto case_error_barrier = only_cpu, case_error_warp = only_cpu, case_error_trap = only_cpu,
               case_poison = only_cpu, case_overrun_global = only_cpu, case_overrun_shared = only_cpu;
#endif

// ---------------------------------------------------------------------------------------------------------------------

const struct {
    const char *name;
    void (*run)();
} cases[] = {
#define CASE(name) {#name, case_##name}
    CASE(grid), CASE(early_return), CASE(host_threads), CASE(shared_memory), CASE(barrier_loop),
    CASE(barrier_votes), CASE(block_sum), CASE(shuffles), CASE(votes), CASE(match_and_reduce),
    CASE(sub_warps), CASE(atomics), CASE(atomics16), CASE(last_block), CASE(widen16), CASE(round16),
    CASE(arithmetic16), CASE(cache_hints), CASE(vector_types), CASE(intrinsics), CASE(streams), CASE(graphs),
    CASE(launch_errors), CASE(error_barrier), CASE(error_warp), CASE(error_trap), CASE(poison),
    CASE(overrun_global), CASE(overrun_shared),
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
