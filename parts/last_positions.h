// The last position of each index in a list of indices: a hash table in the L2. For embedding_update.cu.
//
// Interface: last_positions_slots() is the size of the table; insert_positions() fills it; LastPositions::is_last()
// asks whether a position is the last with its index. Time and memory depend on the number of positions only.
#pragma once
#include "embedding_table.h"
#include "launch.h"

namespace bookends {

constexpr unsigned kEmptySlot = 0xffffffffu;

// A hash table with open addressing and linear probing: the last position of each index. A slot holds a position only;
// its key is the index at that position, in all its bits. There are at least twice as many slots as positions, so a
// search ends after 1.5 slots on average (Knuth, The Art of Computer Programming, volume 3, 6.4). 65,536 positions need
// 512 KB, which stay in the L2.
struct LastPositions {
    unsigned *slots;  // (mask + 1); null: all indices are distinct
    unsigned mask;

    __host__ __device__ unsigned first_slot(long long row) const { return (unsigned)mix64((uint64_t)row) & mask; }

    // Whether i is the last position with the index `row`. The index must have been inserted.
    __device__ bool is_last(const Indices &idx, long long row, unsigned i) const {
        if (!slots) return true;
        for (unsigned slot = first_slot(row);; slot = (slot + 1) & mask) {
            const unsigned position = __ldcg(slots + slot);
            if (position == i) return true;
            if (position == kEmptySlot || idx[position] == row) return false;
        }
    }
};

// One thread per position. Of equal indices in a warp, only the last is inserted. A slot is claimed by a
// compare-and-swap. Once claimed, it keeps its key, and its position can only grow: the final positions do not depend
// on the order of the threads.
static __global__ void last_positions_kernel(LastPositions last, Indices idx, long long count, long long rows) {
    start_next_kernel();
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long row = i < count ? idx[i] : -1;
    const unsigned equal = __match_any_sync(0xffffffffu, row);
    if (!row_in_table(row, rows) || 31 - __clz((int)equal) != (int)(threadIdx.x % kWarpSize)) return;
    for (unsigned slot = last.first_slot(row);; slot = (slot + 1) & last.mask) {
        const unsigned before = atomicCAS(last.slots + slot, kEmptySlot, (unsigned)i);
        if (before == kEmptySlot) return;
        if (idx[before] != row) continue;
        if (before < i) atomicMax(last.slots + slot, (unsigned)i);
        return;
    }
}

// A power of two, at least twice the number of positions.
inline unsigned long long last_positions_slots(long long count) {
    unsigned long long slots = 32;
    while (slots < 2 * (unsigned long long)count) slots *= 2;
    return slots;
}

// Fills the table from idx (count, from 1 to 2^31-1). Bad indices are left out. last: memory of last_positions_slots()
// elements, and the mask. Two launches, one of them a memset. The kernel allows the next one in the stream to start
// early (parts/launch.h, programmatic dependent launch). Returns the first error.
inline cudaError_t insert_positions(const LastPositions &last, const Indices &idx, long long count, long long rows,
                                    cudaStream_t stream) {
    const KeepPendingError keep;
    const cudaError_t error = cudaMemsetAsync(last.slots, 0xff, ((size_t)last.mask + 1) * sizeof(unsigned), stream);
    if (error != cudaSuccess) return error;
    const unsigned block_size = 256, grid_size = (unsigned)ceil_div(count, (long long)block_size);
    return launch_kernel(last_positions_kernel, grid_size, block_size, 0, stream, last, idx, count, rows);
}

}  // namespace bookends
