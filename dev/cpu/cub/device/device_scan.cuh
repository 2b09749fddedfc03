// The CPU device's CUB: cub::DeviceScan::InclusiveSum.
#pragma once
#include "../../cuda_runtime.h"

namespace cub {

struct DeviceScan {
    // As CUB's: with null storage, only sets `bytes` to the size of the storage. in and out may be the same.
    template <typename In, typename Out, typename Count>
    static cudaError_t InclusiveSum(void *storage, size_t &bytes, In in, Out out, Count count,
                                    cudaStream_t stream = nullptr) {
        const size_t needed = 256;
        if (cudaGetLastError() != cudaSuccess) return cudaErrorInvalidDevice;  // as CUB does with a pending error
        if (!storage) {
            bytes = needed;
            return cudaSuccess;
        }
        if (bytes < needed) return cudaErrorInvalidValue;
        const cudaLaunchConfig_t where = {dim3(1), dim3(1), 0, stream, nullptr, 0};
        return cpu::launch((const void *)InclusiveSum<In, Out, Count>, &where, [=] {
            std::decay_t<decltype(out[0])> sum = 0;
            for (Count i = 0; i < count; i++) out[i] = sum += in[i];
        });
    }
};

}  // namespace cub
