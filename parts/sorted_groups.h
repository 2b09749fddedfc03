// Groups the positions of a list of indices by sorting: which positions hold the same index. For tables of any number
// of rows and 64-bit indices: time and memory depend on the number of positions only. parts/group_positions.h is faster
// for a vocabulary. For embedding_lookup_backward.cu and embedding_update.cu.
//
// Interface: SortedGroups describes the result and its arrays; lay_out() places them in a workspace; sort_groups()
// fills them. A group is all positions of one index, in ascending order: a sum over a group in that order has the same
// bits each time. Groups are numbered in ascending order of their indices. For the indices 7 3 7 9 7 at the positions 0
// to 4:
//
//   positions   1 0 2 4 3       sorted by index
//   group       0 1 1 1 2       of each sorted position
//   begin       0 1 4 5         first sorted position of each group, and the end of the last
//   indices     3 7 9           of each group
//   count       3
//
// The sort is CUB's radix sort, which is stable. It sorts only the bits that the table's row numbers have.
#pragma once
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>

#include "../common.h"
#include "embedding_table.h"
#include "workspace.h"

namespace bookends {

constexpr unsigned kNoGroup = 0xffffffffu;

struct SortedGroups {
    unsigned N;      // positions, at most 2^31-1
    long long rows;  // of the table; indices are 0..rows-1

    unsigned *positions = nullptr;  // (N) those in groups come first
    unsigned *group = nullptr;      // (N) kNoGroup: the sorted position is in no group
    unsigned *begin = nullptr;      // (N + 1)
    long long *indices = nullptr;   // (N)
    long long *count = nullptr;     // number of groups

    // Scratch.
    void *keys = nullptr, *sorted_keys = nullptr;  // (N) unsigned or unsigned long long
    unsigned *unsorted = nullptr;                  // (N)
    char *storage = nullptr;                       // of CUB
    size_t storage_bytes = 0;

    SortedGroups(unsigned count_of_positions, long long table_rows) : N(count_of_positions), rows(table_rows) {}
    // A position without a group has the key `rows`, which is larger than all indices.
    bool wide_keys() const { return rows > (long long)UINT32_MAX; }
    int key_bits() const {
        int bits = 1;
        while (bits < 64 && (unsigned long long)rows >> bits != 0) bits++;
        return bits;
    }
    cudaError_t lay_out(char **workspace);
};

// CUB's call for the sort; with null storage it sets *bytes only.
template <typename Key>
cudaError_t sort_keys(void *storage, size_t *bytes, const SortedGroups &groups, cudaStream_t stream) {
    return cub::DeviceRadixSort::SortPairs(storage, *bytes, (const Key *)groups.keys, (Key *)groups.sorted_keys,
                                           (const unsigned *)groups.unsorted, groups.positions, (int)groups.N, 0,
                                           groups.key_bits(), stream);
}
inline cudaError_t sum_heads(void *storage, size_t *bytes, const SortedGroups &groups, cudaStream_t stream) {
    return cub::DeviceScan::InclusiveSum(storage, *bytes, groups.group, groups.group, (int)groups.N, stream);
}

// Places the arrays one after the other and advances *workspace to their end. Null as a workspace is allowed: only the
// size is computed then. Returns an error of CUB's queries. CUB would take a pending CUDA error for its own, and clear
// it: such an error is returned before CUB is called, and stays pending.
inline cudaError_t SortedGroups::lay_out(char **workspace) {
    const cudaError_t pending = cudaPeekAtLastError();
    if (pending != cudaSuccess) return pending;
    const KeepPendingError keep;
    size_t sort_bytes = 0, scan_bytes = 0;
    cudaError_t error = wide_keys() ? sort_keys<unsigned long long>(nullptr, &sort_bytes, *this, 0)
                                    : sort_keys<unsigned>(nullptr, &sort_bytes, *this, 0);
    if (error == cudaSuccess) error = sum_heads(nullptr, &scan_bytes, *this, 0);
    if (error != cudaSuccess) return error;
    storage_bytes = std::max(sort_bytes, scan_bytes);
    const size_t key_bytes = (size_t)N * (wide_keys() ? 8 : 4);
    char *bytes;
    take_array(&positions, workspace, N);
    take_array(&group, workspace, N);
    take_array(&begin, workspace, (size_t)N + 1);
    take_array(&indices, workspace, N);
    take_array(&count, workspace, 1);
    take_array(&bytes, workspace, key_bytes);
    keys = bytes;
    take_array(&bytes, workspace, key_bytes);
    sorted_keys = bytes;
    take_array(&unsorted, workspace, N);
    *workspace = (char *)(((uintptr_t)*workspace + 255) / 256 * 256);
    take_array(&storage, workspace, storage_bytes);
    return cudaSuccess;
}

// Before the sort: the key of each position. row_of(position): its row, or -1 if it belongs to no group.
template <typename Key, typename RowOf>
__global__ void sorted_groups_keys_kernel(SortedGroups groups, RowOf row_of) {
    const unsigned p = blockIdx.x * blockDim.x + threadIdx.x;
    if (p >= groups.N) return;
    const long long row = row_of(p);
    ((Key *)groups.keys)[p] = (Key)(row < 0 ? groups.rows : row);
    groups.unsorted[p] = p;
}

// After the sort: 1 for the first sorted position of each key, else 0. The inclusive sum is the number of the group +
// 1.
template <typename Key>
__global__ void sorted_groups_heads_kernel(SortedGroups groups) {
    const unsigned j = blockIdx.x * blockDim.x + threadIdx.x;
    if (j >= groups.N) return;
    const Key *keys = (const Key *)groups.sorted_keys;
    groups.group[j] = j == 0 || keys[j] != keys[j - 1];
}

// After the sum: the remaining arrays. visit(j, position): called for each sorted position j in a group.
template <typename Key, typename Visit>
__global__ void sorted_groups_finish_kernel(SortedGroups groups, Visit visit) {
    const unsigned j = blockIdx.x * blockDim.x + threadIdx.x;
    if (j >= groups.N) return;
    const Key *keys = (const Key *)groups.sorted_keys;
    const Key key = keys[j];
    const unsigned number = groups.group[j] - 1;
    const bool grouped = key < (Key)groups.rows;
    if (j == 0 || key != keys[j - 1]) {
        groups.begin[number] = j;  // positions in no group begin where the last group ends
        if (grouped) groups.indices[number] = (long long)key;
    }
    if (j == groups.N - 1) {
        *groups.count = grouped ? number + 1 : number;
        if (grouped) groups.begin[number + 1] = groups.N;
    }
    groups.group[j] = grouped ? number : kNoGroup;
    if (grouped) visit(j, groups.positions[j]);
}

template <typename Key, typename RowOf, typename Visit>
cudaError_t sort_groups_by(const SortedGroups &groups, RowOf row_of, Visit visit, cudaStream_t stream) {
    const unsigned block_size = 256, grid_size = ceil_div(groups.N, block_size);
    cudaError_t error = launch_kernel(sorted_groups_keys_kernel<Key, RowOf>, grid_size, block_size, 0, stream, groups,
                                      row_of);
    if (error != cudaSuccess) return error;
    size_t bytes = groups.storage_bytes;
    error = sort_keys<Key>(groups.storage, &bytes, groups, stream);
    if (error != cudaSuccess) return error;
    error = launch_kernel(sorted_groups_heads_kernel<Key>, grid_size, block_size, 0, stream, groups);
    if (error != cudaSuccess) return error;
    error = sum_heads(groups.storage, &bytes, groups, stream);
    if (error != cudaSuccess) return error;
    return launch_kernel(sorted_groups_finish_kernel<Key, Visit>, grid_size, block_size, 0, stream, groups, visit);
}

// Fills the arrays of `groups`, which are laid out. row_of and visit are device functors (see the kernels). Returns the
// first error.
template <typename RowOf, typename Visit>
cudaError_t sort_groups(const SortedGroups &groups, RowOf row_of, Visit visit, cudaStream_t stream) {
    const KeepPendingError keep;
    if (groups.N == 0) {
        const cudaError_t error = cudaMemsetAsync(groups.count, 0, sizeof(*groups.count), stream);
        return error != cudaSuccess ? error : cudaMemsetAsync(groups.begin, 0, sizeof(*groups.begin), stream);
    }
    return groups.wide_keys() ? sort_groups_by<unsigned long long>(groups, row_of, visit, stream)
                              : sort_groups_by<unsigned>(groups, row_of, visit, stream);
}

// The functors for a plain list of indices: the row of a position (a bad index is reported), and no visit.
struct RowOfIndex {
    Indices idx;
    long long rows;
    status_word *status;
    __device__ long long operator()(unsigned i) const {
        const long long row = idx[i];
        if (row_in_table(row, rows)) return row;
        report_bad_id(status, i);
        return -1;
    }
};
struct VisitNothing {
    __device__ void operator()(unsigned, unsigned) const {}
};

}  // namespace bookends
