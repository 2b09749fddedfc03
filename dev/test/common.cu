// Tests common.h and parts/launch.h on either device: exit status 0 if all is as it should be, else 1 and a line for each thing amiss.
#include "../../parts/launch.h"
#include "check.h"

using namespace bookends;

// Each thread's sum and maximum over the block, twice in a row: the second must not meet the first one's leftovers.
__global__ void reduce_kernel(const float *in, float *sums, float *maxima) {
    const float value = in[threadIdx.x];
    const float sum = block_reduce_sum(value), more = block_reduce_sum(value + 1.0f);
    const float maximum = block_reduce_max(value), less = block_reduce_max(-value);
    sums[threadIdx.x] = more - sum;  // the number of threads
    maxima[threadIdx.x] = maximum - less;
}

static void test_reductions() {
    for (int threads : {32, 64, 96, 480, 1024}) {
        std::vector<float> in(threads);
        for (int i = 0; i < threads; i++) in[i] = (float)((i * 37) % threads) - 7.0f;  // -7 to threads-8
        const Device<float> a(in), sums(in), maxima(in);
        reduce_kernel<<<1, threads>>>(a.pointer, sums.pointer, maxima.pointer);
        const std::vector<float> got_sums = sums.get(), got_maxima = maxima.get();
        for (int i = 0; i < threads; i++) {
            expect(got_sums[i] == (float)threads, "sum at %d of %d threads: %g", i, threads, got_sums[i]);
            const float maximum = got_maxima[i];
            expect(maximum == (float)threads - 15.0f, "maximum at %d of %d threads: %g", i, threads, maximum);
        }
    }
}

// Copies parts of `in` to `out`, by each kind of load and each kind of store.
template <typename T, int N>
__global__ void packed_kernel(T *out, const T *in) {
    typedef Packed<T, N> P;
    store_packed(out, load_packed<P>(in));
    store_packed_cs(out + N, load_packed_cg<P>(in + N));
    store_packed(out + 2 * N, load_packed_cs<P>(in + 2 * N));
    store_packed(out + 3 * N, add_packed(load_packed<P>(in), load_packed<P>(in + N)));
}

template <typename T>
__global__ void packed128_kernel(T *out, const T *in) {
    typedef Packed128<T> x128;
    store128(out, load128(in));
    store128cs(out + x128::size, load128(in + x128::size));
    store128(out + 2 * x128::size, load128cs(in + 2 * x128::size));
    x128 sum = load128(in), other = load128(in + x128::size);
    for (int k = 0; k < x128::size; k++) sum[k] = (T)((float)sum[k] + (float)other[k]);
    store128(out + 3 * x128::size, sum);
}

template <typename T>
static void expect_packed(const std::vector<T> &in, const std::vector<T> &got, int n, const char *what) {
    for (int i = 0; i < 4 * n; i++) {
        const float want = i < 3 * n ? (float)in[i] : (float)(T)((float)in[i - 3 * n] + (float)in[i - 2 * n]);
        expect((float)got[i] == want, "%s of %d: element %d is %g, not %g", what, n, i, (float)got[i], want);
    }
}

template <typename T, int N>
static void test_packed() {
    static_assert(sizeof(Packed<T, N>) == N * sizeof(T) && alignof(Packed<T, N>) == N * sizeof(T), "one access");
    std::vector<T> in(4 * N);
    for (int i = 0; i < 4 * N; i++) in[i] = (T)(1.0f / (float)(i + 3));
    const Device<T> a(in), out(std::vector<T>(4 * N, (T)0.0f));
    packed_kernel<T, N><<<1, 1>>>(out.pointer, a.pointer);
    expect_packed(in, out.get(), N, "Packed");
    if constexpr (N * sizeof(T) == 16) {
        packed128_kernel<T><<<1, 1>>>(out.pointer, a.pointer);
        expect_packed(in, out.get(), N, "Packed128");
    } else {
        test_packed<T, 2 * N>();
    }
}

__global__ void report_kernel(status_word *status, const int *ids, int V) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (!id_in_range(ids[i], V)) report_bad_id(status, i);
    if (!id_in_range(ids[i], V)) report_bad_id(nullptr, i);
}

static void test_status() {
    const Device<status_word> status({kStatusOk});
    expect((long long)kStatusOk == -1, "STATUS_OK is -1 as a signed number");
    std::vector<int> ids(512, 9);
    report_kernel<<<4, 128>>>(status.pointer, Device<int>(ids).pointer, 10);
    expect(status.get()[0] == kStatusOk, "all good: %llu", status.get()[0]);
    ids[500] = 10, ids[300] = -1, ids[301] = INT32_MIN;
    report_kernel<<<4, 128>>>(status.pointer, Device<int>(ids).pointer, 10);
    expect(status.get()[0] == 300, "the first of three: %llu", status.get()[0]);
    ids[300] = 0;
    report_kernel<<<4, 128>>>(status.pointer, Device<int>(ids).pointer, 10);
    expect(status.get()[0] == 300, "never raised: %llu", status.get()[0]);
}

static void test_host() {
    expect(ceil_div(7, 3) == 3 && ceil_div(6, 3) == 2 && ceil_div(0, 3) == 0, "ceil_div");
    expect(ceil_div(INT32_MAX, 4) == 536870912, "ceil_div near the end of int");
    int block_size = 32;
    expect(grid_blocks(100, &block_size) == 4 && block_size == 32, "grid_blocks");
    expect(grid_blocks((1ll << 36) + 1, &block_size) == (1u << 26) + 1 && block_size == 1024, "over 2^31 blocks");
    alignas(16) static float memory[8];
    expect(vector_width(4, 8, memory) == 4 && vector_width(4, 6, memory) == 2, "even C");
    expect(vector_width(4, 7, memory) == 1, "odd C");
    expect(vector_width(4, 8, memory, memory + 2) == 2 && vector_width(4, 8, memory + 1) == 1, "by address");
}

__global__ void shared_kernel(int *out, int count) {
    extern __shared__ int words[];
    __shared__ int last;
    for (int i = threadIdx.x; i < count; i += blockDim.x) words[i] = i;
    __syncthreads();
    if (threadIdx.x == 0) last = words[count - 1];
    __syncthreads();
    *out = last;
}

// A launch returns its own error only, and leaves a pending one.
static void test_pending_errors() {
    const Device<int> out({0});
    void *memory = nullptr;
    const cudaError_t pending = cudaMalloc(&memory, (size_t)1 << 60);
    expect(launch_kernel(shared_kernel, 1, 32, 400, nullptr, out.pointer, 100) == cudaSuccess, "an earlier error");
    expect(pending != cudaSuccess && cudaGetLastError() == pending, "the pending error does not survive");
    expect(launch_kernel(shared_kernel, 1, 2000, 400, nullptr, out.pointer, 100) != cudaSuccess, "2000 threads");
    expect(cudaPeekAtLastError() == cudaSuccess, "a refused launch leaves its error pending");
}

// A kernel's limit is the device's from the first launch on, and again after a reset, which lowers it.
static void test_limits() {
    int most = 0;
    cuda_check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    cudaFuncAttributes attributes;
    cuda_check(cudaFuncGetAttributes(&attributes, shared_kernel));
    most -= (int)attributes.sharedSizeBytes;
    cudaLaunchConfig_t config = {};
    config.gridDim = 1;
    config.blockDim = 64;
    for (bool reset : {false, true}) {
        if (reset) cuda_check(cudaDeviceReset());
        const Device<int> out({0});
        for (int bytes : {40 << 10, most, 60 << 10, 4}) {
            config.dynamicSmemBytes = bytes;
            const cudaError_t error = launch_kernel(config, shared_kernel, out.pointer, bytes / 4);
            expect(error == cudaSuccess, "%d bytes, reset %d: %s", bytes, reset, cudaGetErrorString(error));
            expect(cudaPeekAtLastError() == cudaSuccess, "%d bytes, reset %d: an error is pending", bytes, reset);
            expect(out.get()[0] == bytes / 4 - 1, "%d bytes, reset %d: %d", bytes, reset, out.get()[0]);
            cuda_check(cudaFuncGetAttributes(&attributes, shared_kernel));
            const int limit = attributes.maxDynamicSharedSizeBytes;
            if (bytes > 48 << 10 || !reset) expect(limit == most, "a limit of %d of %d bytes", limit, most);
        }
        config.dynamicSmemBytes = most + 16;
        expect(launch_kernel(config, shared_kernel, out.pointer, 1) != cudaSuccess, "more than there is");
        expect(cudaPeekAtLastError() == cudaSuccess, "a refused launch leaves its error pending");
    }
    KernelFacts facts;
    expect(kernel_facts(&facts, shared_kernel) == cudaSuccess && facts.dynamic_shared == most, "facts");
    expect(facts.multiprocessors > 0, "no multiprocessors");
    if (!facts.sm_90_code) return;
    int clusters = -1;
    expect(active_clusters(&clusters, shared_kernel, 1, 64) == cudaSuccess && clusters > 0, "clusters of 1");
    expect(active_clusters(&clusters, shared_kernel, 17, 64) == cudaSuccess && clusters == 0, "clusters of 17");
    expect(cudaPeekAtLastError() == cudaSuccess, "clusters of 17 leave an error");
}

int main() {
    test_reductions();
    test_packed<float, 1>();
    test_packed<half, 1>();
    test_packed<__nv_bfloat16, 1>();
    test_status();
    test_host();
    test_pending_errors();
    test_limits();
    return report_failures();
}
