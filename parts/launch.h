// Launches that need more than a grid, a block and 48 KB of shared memory: dynamic shared memory up to the device's
// maximum, clusters, programmatic dependent launch. For encoder_backward.cu, classifier_fused.cu and lm_head.cu.
#pragma once
#include "../common.h"

#include <map>
#include <mutex>
#include <tuple>

namespace bookends {

// ---------------------------------------------------------------------------------------------------------------------
// facts about the current device and a kernel, queried from the CUDA runtime once (a query takes 1 to 5 us)

// Sets *fact to the fact about `key` and the current device. If it is not in the table yet, ask(fact, device) queries
// the CUDA runtime; several threads may query at the same time, with the same result. An error is returned, not stored.
template <typename Key, typename Fact, typename Ask>
cudaError_t find_fact(Fact *fact, const Key &key, Ask ask) {
    static std::mutex lock;
    static auto &facts = *new std::map<std::pair<int, Key>, Fact>;  // never destroyed: exit handlers may launch kernels
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    {
        const std::lock_guard<std::mutex> guard(lock);
        const auto found = facts.find({device, key});
        if (found != facts.end()) {
            *fact = found->second;
            return cudaSuccess;
        }
    }
    const KeepPendingError keep;
    error = ask(fact, device);
    if (error != cudaSuccess) return error;
    const std::lock_guard<std::mutex> guard(lock);
    facts.insert({{device, key}, *fact});
    return cudaSuccess;
}

struct KernelFacts {
    int multiprocessors = 0;  // of the device
    int dynamic_shared = 0;   // bytes per block: the device's maximum less the kernel's static shared memory
    bool sm_90_code = false;  // compiled for compute capability 9.0 or later, not by the driver from older PTX
};

// Raises the kernel's limits to the device's: all of its dynamic shared memory, and clusters of more than 8 blocks.
// Both are attributes of the kernel in the whole process, so they are only ever set to these values, which suit every
// launch. A lower limit, set for one launch, would make the launches of other threads fail.
inline cudaError_t raise_limits(const void *kernel, const KernelFacts &facts) {
    const KeepPendingError keep;
    if (facts.sm_90_code) cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, facts.dynamic_shared);
}

// The first call for a kernel raises its limits.
inline cudaError_t kernel_facts(KernelFacts *facts, const void *kernel) {
    return find_fact(facts, kernel, [=](KernelFacts *found, int device) {
        cudaFuncAttributes attributes = {};
        cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
        auto get = [&](int *value, cudaDeviceAttr attribute) {
            if (error == cudaSuccess) error = cudaDeviceGetAttribute(value, attribute, device);
        };
        get(&found->multiprocessors, cudaDevAttrMultiProcessorCount);
        get(&found->dynamic_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin);
        found->dynamic_shared -= (int)attributes.sharedSizeBytes;
        found->sm_90_code = attributes.ptxVersion >= 90;
        return error == cudaSuccess ? raise_limits(kernel, *found) : error;
    });
}
template <typename... Parameters>
cudaError_t kernel_facts(KernelFacts *facts, void (*kernel)(Parameters...)) {
    return kernel_facts(facts, (const void *)kernel);
}

// The number of clusters of `blocks` blocks that run at the same time, each block with all the dynamic shared memory.
// 0 if the device has no such clusters.
template <typename... Parameters>
cudaError_t active_clusters(int *clusters, void (*kernel)(Parameters...), unsigned blocks, unsigned block_size) {
    const auto key = std::make_tuple((const void *)kernel, blocks, block_size);
    return find_fact(clusters, key, [=](int *found, int) {
        KernelFacts facts;
        cudaError_t error = kernel_facts(&facts, kernel);
        if (error != cudaSuccess) return error;
        cudaLaunchAttribute shape = {};
        shape.id = cudaLaunchAttributeClusterDimension;
        shape.val.clusterDim = {blocks, 1, 1};
        cudaLaunchConfig_t config = {};
        config.gridDim = blocks;
        config.blockDim = block_size;
        config.dynamicSmemBytes = facts.dynamic_shared;
        config.attrs = &shape;
        config.numAttrs = 1;
        error = cudaOccupancyMaxActiveClusters(found, (const void *)kernel, &config);
        const bool none = error == cudaErrorInvalidClusterSize || error == cudaErrorInvalidValue ||
                          error == cudaErrorInvalidConfiguration;
        if (none) *found = 0;
        return none ? cudaSuccess : error;
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// launches

// launch_kernel() with attributes and any amount of dynamic shared memory. cudaDeviceReset() lowers a kernel's limits
// again. So if a launch fails, the limits are raised again, and the launch is repeated once.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_kernel(const cudaLaunchConfig_t &config, void (*kernel)(Parameters...), Arguments &&...arguments) {
    const KeepPendingError keep;
    KernelFacts facts;
    if (config.dynamicSmemBytes > 0) {
        const cudaError_t error = kernel_facts(&facts, kernel);
        if (error != cudaSuccess) return error;
    }
    const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
    if (error == cudaSuccess || facts.dynamic_shared == 0) return error;
    if (raise_limits((const void *)kernel, facts) != cudaSuccess) return error;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// ---------------------------------------------------------------------------------------------------------------------
// programmatic dependent launch (compute capability 9.0): a kernel may start before the one in front of it has ended

// Lets the next kernel in the stream start, if it was launched with this attribute, when every block has called this.
__device__ inline void start_next_kernel() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// Returns when the previous kernel has ended and its writes are visible: at once, unless this one was launched early.
__device__ inline void wait_for_previous_kernel() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
}

}  // namespace bookends
