// The CPU device's cooperative_groups.h: the groups that kernels here use, the cluster and the block.
#pragma once

#include "cuda_runtime.h"

namespace cooperative_groups {

// The blocks of a cluster reach each other's dynamic shared memory, which map_shared_rank points into; a __shared__
// variable is its block's own. Every thread of the cluster must come to each barrier: those that have returned, for
// which a GPU does not wait, are an error here.
struct cluster_group {
    struct arrival_token {};
    static void sync() { barrier_arrive(), barrier_wait(); }
    static arrival_token barrier_arrive() {
        cpu::cluster_arrive();
        return {};
    }
    static void barrier_wait() { cpu::cluster_wait(); }
    static void barrier_wait(arrival_token &&) { cpu::cluster_wait(); }
    static unsigned block_rank() { return cpu::cluster_rank(); }
    static unsigned num_blocks() { return cpu::cluster_blocks(); }
    template <class T> static T *map_shared_rank(T *p, int rank) { return (T *)cpu::map_shared(p, (unsigned)rank); }
    static unsigned query_shared_rank(const void *p) { return cpu::shared_rank(p); }
};
inline cluster_group this_cluster() { return {}; }

struct thread_block {
    static void sync() { __syncthreads(); }
    static unsigned thread_rank() { return (unsigned)cpu::thread_index; }
    static unsigned size() { return blockDim.x * blockDim.y * blockDim.z; }
};
inline thread_block this_thread_block() { return {}; }

} // namespace cooperative_groups
