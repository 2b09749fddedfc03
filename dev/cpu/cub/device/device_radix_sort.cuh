// The CPU device's CUB: cub::DeviceRadixSort::SortPairs, a stable sort by some bits of the keys.
#pragma once
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "../../cuda_runtime.h"

namespace cub {

struct DeviceRadixSort {
    // As CUB's: with null storage, only sets `bytes` to the size of the storage. Ascending, in unsigned integers.
    template <typename Key, typename Value, typename Count>
    static cudaError_t SortPairs(void *storage, size_t &bytes, const Key *keys, Key *sorted_keys, const Value *values,
                                 Value *sorted_values, Count count, int begin_bit = 0,
                                 int end_bit = (int)sizeof(Key) * 8, cudaStream_t stream = nullptr) {
        const size_t needed = (size_t)count * sizeof(uint32_t) + 256;
        if (cudaGetLastError() != cudaSuccess) return cudaErrorInvalidDevice;  // as CUB does with a pending error
        if (!storage) {
            bytes = needed;
            return cudaSuccess;
        }
        if (bytes < needed) return cudaErrorInvalidValue;
        const cudaLaunchConfig_t where = {dim3(1), dim3(1), 0, stream, nullptr, 0};
        return cpu::launch((const void *)SortPairs<Key, Value, Count>, &where, [=] {
            const int width = end_bit - begin_bit;
            const Key mask = width >= (int)sizeof(Key) * 8 ? ~Key(0) : (Key(1) << width) - 1;
            std::vector<size_t> order(count);
            std::iota(order.begin(), order.end(), size_t(0));
            std::stable_sort(order.begin(), order.end(), [=](size_t a, size_t b) {
                return (keys[a] >> begin_bit & mask) < (keys[b] >> begin_bit & mask);
            });
            for (size_t i = 0; i < order.size(); i++) {
                sorted_keys[i] = keys[order[i]];
                sorted_values[i] = values[order[i]];
            }
        });
    }
};

}  // namespace cub
