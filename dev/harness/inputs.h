// Inputs of a run: numbers from the seed, and arrays in device memory.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "../../common.h"
#include "base.h"

namespace bookends {

// Counter-based random numbers from the seed: number i is the same on host and device, in any order of use. Each stream
// has its own numbers.
struct Random {
    uint64_t key;
    Random(int stream, uint64_t seed) : key(mix64(seed * 0x9e3779b97f4a7c15ull + (uint64_t)stream)) {}
    __host__ __device__ uint64_t bits(long long i) const { return mix64(key + (uint64_t)i * 0x9e3779b97f4a7c15ull); }
    double uniform(long long i) const { return (double)(bits(i) >> 11) * 0x1p-53; }  // [0, 1)
};

// An array whose values are computed, not stored: uniform in [-1, 1), in steps of 2^-23, then rounded to floatX.
template <typename floatX>
struct Values {
    Random random;
    Values(int stream, uint64_t seed) : random(stream, seed) {}
    __host__ __device__ floatX operator[](long long i) const {
        return (floatX)((float)(random.bits(i) >> 40) * 0x1p-23f - 1.0f);
    }
};

template <typename floatX, typename Generator>
__global__ void fill_values_kernel(floatX *out, Generator values, long long count) {
    const long long stride = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) out[i] = values[i];
}

// The number of blocks of 256 threads for a grid-stride loop over `count` elements.
inline unsigned fill_grid(long long count) {
    return (unsigned)std::min(ceil_div(std::max(count, 1LL), 256LL), 65536LL);
}

// data[i] = values[i] for i in 0..count-1.
template <typename floatX, typename Generator>
void fill(floatX *data, const Generator &values, long long count) {
    fill_values_kernel<floatX, Generator><<<fill_grid(count), 256>>>(data, values, count);
    cuda_check(cudaGetLastError());
}

// The device memory of a run. Owns its arrays.
class DeviceMemory {
  public:
    DeviceMemory() = default;
    DeviceMemory(const DeviceMemory &) = delete;
    ~DeviceMemory() { release(); }

    // An array of `count` elements. If the memory is exhausted, it is null, as in all later calls. needed() counts
    // these arrays too, so that a refusal can name the total. The count is a double, since a shape may exceed 64 bits.
    template <typename T>
    T *allocate(double count) {
        const double size = std::max(count, 1.0) * sizeof(T);
        needed_bytes += size;
        void *memory = nullptr;
        if (failed || size > 0x1p62 || cudaMalloc(&memory, (size_t)size) != cudaSuccess) {
            cudaGetLastError();  // otherwise the next launch would report this error
            failed = true;
            return nullptr;
        }
        allocations.push_back(memory);
        return (T *)memory;
    }

    bool exhausted() const { return failed; }
    double needed() const { return needed_bytes; }

    void release() {
        for (void *memory : allocations) cudaFree(memory);
        allocations.clear();
    }

  private:
    std::vector<void *> allocations;
    double needed_bytes = 0;
    bool failed = false;
};

}  // namespace bookends
