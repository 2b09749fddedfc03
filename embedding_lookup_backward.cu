/*
Gradients of the bags of embedding_lookup.cu. Bag g is out[g,:] = sum over its indices i of f[i] * table[idx[i],:]. f[i]
is the weight of the index (or 1), divided by the number of indices of the bag for a mean.

  dtable[r,:] += sum over the positions i with idx[i] = r of f[i] * dout[bag(i),:]
  dweights[i]  = dout[bag(i),:] . table[idx[i],:]                 (for a mean, divided by the number of indices)

For the maximum, an element of dout goes to the one row that the forward pass took it from (argmax).

The gradient of the table is dense, (rows, C), or sparse: the distinct indices in ascending order, and one gradient row
for each. A sparse gradient costs time and memory by the number of indices, not by the rows of the table. The fewest
bytes: dout once, the indices once, one row for each distinct index.

version 1  atomics: one block per bag, one atomic addition per element; dense only
version 2  groups: positions sorted by index; one block per distinct index adds its rows in order
version 3  tiles: one team of threads per 32 sorted positions; the sums of long groups meet in a second pass
version 4  x128: version 3 with 16 bytes per load

Measured on an NVIDIA H200, B8 T1024 C128 V10000000 fp16 zipf grad_dtype=fp32 hotness=32 sparse, cold:
  1  atomics         not measured yet
  2  groups             5.8049 ms    0.1% of copy
  3  tiles              0.1639 ms    5.3% of copy   35x the version before
  4  x128               0.1197 ms    7.3% of copy   1.37x the version before
  The kernels have changed since.

Includes common.h, parts/embedding_table.h, parts/group_sums.h (with parts/sorted_groups.h, rows.h, workspace.h).

Compile:  nvcc -O3 -arch=native embedding_lookup_backward.cu -o embedding_lookup_backward
Run:      ./embedding_lookup_backward              the default: deterministic, best over the measured shapes
          ./embedding_lookup_backward all --hotness 32 --sparse --tokens zipf
          ./embedding_lookup_backward all --bag mean --hotness 0..64 --weights --index int64
          ./embedding_lookup_backward --help
*/
#include "common.h"
#include "parts/embedding_table.h"
#include "parts/group_sums.h"

#include <cmath>

namespace bookends {

// ---------------------------------------------------------------------------------------------------------------------
// CPU reference

// The number of indices of a bag that are not padding.
inline long long bag_size_cpu(const Bags &bags, long long g) {
    long long size = 0;
    for (long long i = bags.begin(g); i < bags.begin(g + 1); i++) size += !bags.is_padding(bags.idx[i]);
    return size;
}

// Adds the gradient from position i, in bag g, to its row of the table's gradient (C). magnitude (C): the sum of the
// terms' magnitudes, a scale for rounding errors. bag_size: bag_size_cpu(). dout: (bags, C), as embedding_lookup.cu's
// out. argmax: null but for a maximum.
template <typename Dout>
void embedding_bag_backward_cpu(double *gradient, double *magnitude, const Bags &bags, long long g, long long i,
                                long long bag_size, const Dout &dout, const long long *argmax, int C) {
    const double factor = bags.weight(i) / (bags.mode == kBagMean ? (double)bag_size : 1.0);
    for (int c = 0; c < C; c++) {
        const long long at = bags.value_row(g) * C + c;
        if (bags.mode == kBagMax && argmax[at] != i) continue;
        gradient[c] += factor * (double)dout[at];
        magnitude[c] += fabs(factor * (double)dout[at]);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// arguments

template <typename floatX, typename gradX>
struct BagBackwardArguments {
    gradX *dtable;           // dense: (rows, C); sparse: (count, C); null: not wanted
    long long *indices;      // sparse: (count), the distinct rows, ascending; null: dense
    long long *distinct;     // sparse: their number
    float *dweights;         // (count); null: not wanted
    const floatX *dout;      // (bags, C), or with several tables (batch, tables, C)
    const long long *argmax; // for a maximum: the same shape, of embedding_bag(); else null
    EmbeddingTable<const floatX> table;  // data: for dweights only
    Bags bags;
    int C;
    bool overwrite;  // dense: old values are not read, and rows without indices become 0; sparse: no effect
    status_word *status;
    char *workspace;  // embedding_bag_backward_workspace_bytes(); not for version 1 without dweights
};

// The arrays in the workspace. Sorted positions: see parts/sorted_groups.h.
struct BagBackwardScratch {
    SortedGroups groups;
    unsigned *bag_of = nullptr;  // (count) the bag of each position, kNoGroup outside all bags; null: fixed hotness
    float *scale = nullptr;      // (bags) 1 over the number of indices; null: 1
    unsigned *row_of = nullptr;  // (count) row of dout for each sorted position
    float *factor_of = nullptr;  // (count) its factor
    SumLevels levels;
    size_t bytes = 0;

    BagBackwardScratch(const Bags &bags, long long rows) : groups((unsigned)bags.count, rows) {}

    cudaError_t lay_out(char *workspace, const Bags &bags, int C) {
        char *end = workspace;
        const cudaError_t error = groups.lay_out(&end);
        if (error != cudaSuccess) return error;
        if (bags.offsets.data) take_array(&bag_of, &end, bags.count);
        if (bags.mode == kBagMean) take_array(&scale, &end, bags.bags);
        take_array(&row_of, &end, bags.count);
        take_array(&factor_of, &end, bags.count);
        levels.lay_out(&end, (unsigned)bags.count, C);
        bytes = end - workspace;
        return cudaSuccess;
    }
};

// The position of an index, resolved.
struct BagPosition {
    long long bag;  // -1: in no bag
    long long row;  // of all tables; -1: padding, a bad index, or in no bag
};

__device__ inline BagPosition resolve(const Bags &bags, const unsigned *bag_of, long long rows, long long i,
                                      status_word *status) {
    const long long g = bag_of ? (long long)bag_of[i] : i / bags.hotness;
    if (bag_of && bag_of[i] == kNoGroup) return {-1, -1};
    const long long index = bags.idx[i];
    if (bags.is_padding(index)) return {g, -1};
    const BagTable table = bag_table(bags, g, rows);
    if (row_in_table(index, table.rows)) return {g, table.first + index};
    report_bad_id(status, i);
    return {g, -1};
}

// ---------------------------------------------------------------------------------------------------------------------
// kernels

// The textbook: one block per bag, one thread per column. Each thread adds its element of dout to the row of every
// index of the bag. Needs no workspace. But the additions to a frequent row wait for each other, they come in any order
// (other bits each time), and a 16-bit gradient is rounded at each of them.
template <typename floatX, typename gradX>
__global__ void embedding_bag_backward_kernel1(BagBackwardArguments<floatX, gradX> args) {
    const Bags &bags = args.bags;
    for (long long g = blockIdx.x; g < bags.bags; g += gridDim.x) {
        const long long begin = bags.begin(g), end = bags.begin(g + 1), at = bags.value_row(g) * args.C;
        const BagTable table = bag_table(bags, g, args.table.rows);
        long long used = 0;
        for (long long i = begin; i < end && bags.mode == kBagMean; i++) used += !bags.is_padding(bags.idx[i]);
        const float scale = bags.mode == kBagMean ? 1.0f / (float)used : 1.0f;
        for (long long i = begin; i < end; i++) {
            const long long row = bags.idx[i];
            if (bags.is_padding(row)) continue;
            if (!row_in_table(row, table.rows)) {
                if (threadIdx.x == 0) report_bad_id(args.status, i);
                continue;
            }
            gradX *const gradient = args.dtable + (table.first + row) * args.C;
            const float factor = scale * bags.weight(i);
            for (int c = threadIdx.x; c < args.C; c += blockDim.x) {
                if (bags.mode == kBagMax && args.argmax[at + c] != i) continue;
                atomicAdd(gradient + c, (gradX)(factor * (float)args.dout[at + c]));
            }
        }
    }
}

// One warp per bag: the bag of each of its positions, and 1 over the number of its indices.
static __global__ void embedding_bag_positions_kernel(Bags bags, unsigned *bag_of, float *scale) {
    const long long g = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / kWarpSize;
    const unsigned lane = threadIdx.x % kWarpSize;
    if (g >= bags.bags) return;
    const long long end = bags.begin(g + 1);
    long long used = 0;
    for (long long first = bags.begin(g); first < end; first += kWarpSize) {
        const long long i = first + lane;
        if (bag_of && i < end) bag_of[i] = (unsigned)g;
        if (scale) used += __popc(__ballot_sync(0xffffffffu, i < end && !bags.is_padding(bags.idx[i])));
    }
    if (scale && lane == 0) scale[g] = used > 0 ? 1.0f / (float)used : 0.0f;
}

// The functors of sort_groups(): the row of a position, and what is stored for each sorted position.
struct RowOfPosition {
    Bags bags;
    const unsigned *bag_of;
    long long rows;
    status_word *status;
    __device__ long long operator()(unsigned i) const { return resolve(bags, bag_of, rows, i, status).row; }
};
struct StoreSortedRow {
    Bags bags;
    const unsigned *bag_of;
    const float *scale;
    unsigned *row_of;
    float *factor_of;
    __device__ void operator()(unsigned j, unsigned i) const {
        const long long g = bag_of ? (long long)bag_of[i] : i / bags.hotness;
        row_of[j] = (unsigned)bags.value_row(g);
        factor_of[j] = bags.weight(i) * (scale ? scale[g] : 1.0f);
    }
};

// The rows of dout in the order of the sorted positions: a source of group_sums().
template <typename floatX>
struct BagRows {
    const floatX *dout;
    const unsigned *groups, *row_of;
    const float *factor_of;
    unsigned C;

    template <int width>
    struct Loaded {
        Columns<floatX, width> row;
        float factor;
        __device__ void add_to(float (&sum)[width]) {
#pragma unroll
            for (int k = 0; k < width; k++) sum[k] += factor * (float)row[k];
        }
    };
    __device__ unsigned group(unsigned j) const { return groups[j]; }
    template <int width>
    __device__ Loaded<width> load(unsigned j, unsigned c) const {
        Loaded<width> loaded;
        loaded.row.load(dout + ((size_t)row_of[j] * C + c));
        loaded.factor = factor_of[j];
        return loaded;
    }
};

// The same for a maximum: only the elements whose maximum came from the position.
template <typename floatX>
struct BagMaxRows {
    const floatX *dout;
    const long long *argmax;
    const unsigned *groups, *row_of, *positions;
    unsigned C;

    template <int width>
    struct Loaded {
        Columns<floatX, width> row;
        bool taken[width];
        __device__ void add_to(float (&sum)[width]) {
#pragma unroll
            for (int k = 0; k < width; k++) {
                if (taken[k]) sum[k] += (float)row[k];
            }
        }
    };
    __device__ unsigned group(unsigned j) const { return groups[j]; }
    template <int width>
    __device__ Loaded<width> load(unsigned j, unsigned c) const {
        Loaded<width> loaded;
        const size_t at = (size_t)row_of[j] * C + c;
        loaded.row.load(dout + at);
#pragma unroll
        for (int k = 0; k < width; k++) loaded.taken[k] = argmax[at + k] == (long long)positions[j];
        return loaded;
    }
};

// Sinks: the gradient row of a group. Old values are added in float, and the result is rounded once.
template <typename gradX>
struct DenseRows {
    gradX *dtable;
    const long long *indices;
    unsigned C;
    bool overwrite;

    template <int width>
    __device__ void store(unsigned group, unsigned c, const float (&sum)[width]) const {
        gradX *const address = dtable + (indices[group] * C + c);
        Columns<gradX, width> row;
        if (!overwrite) row.load_gradient(address);
#pragma unroll
        for (int k = 0; k < width; k++) row[k] = (gradX)(overwrite ? sum[k] : (float)row[k] + sum[k]);
        row.store_gradient(address);
    }
};
template <typename gradX>
struct SparseRows {
    gradX *rows;
    unsigned C;

    template <int width>
    __device__ void store(unsigned group, unsigned c, const float (&sum)[width]) const {
        Columns<gradX, width> row;
#pragma unroll
        for (int k = 0; k < width; k++) row[k] = (gradX)sum[k];
        row.store_gradient(rows + ((size_t)group * C + c));
    }
};

// One block per group: each thread adds its columns of the group's rows in order. No atomics, one rounding, the same
// bits each time. Loses where one index is frequent: its block works alone, and each of its additions waits for a load.
template <typename Source, typename Sink>
__global__ void embedding_bag_backward_kernel2(Source source, Sink sink, SortedGroups groups, int C) {
    for (long long g = blockIdx.x; g < *groups.count; g += gridDim.x) {
        for (int c = threadIdx.x; c < C; c += blockDim.x) {
            float sum[1] = {};
            for (unsigned j = groups.begin[g]; j < groups.begin[g + 1]; j++) source.template load<1>(j, c).add_to(sum);
            sink.template store<1>((unsigned)g, c, sum);
        }
    }
}

// One warp per position: the product of its rows of dout and of the table. Lanes add in a fixed order.
template <typename floatX>
__global__ void embedding_bag_dweights_kernel(float *dweights, const floatX *dout, EmbeddingTable<const floatX> table,
                                              Bags bags, const unsigned *bag_of, const float *scale, int C) {
    const long long i = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / kWarpSize;
    const int lane = threadIdx.x % kWarpSize;
    if (i >= bags.count) return;
    const BagPosition position = resolve(bags, bag_of, table.rows, i, nullptr);
    float sum = 0.0f;
    if (position.row >= 0) {
        const floatX *const a = dout + bags.value_row(position.bag) * C;
        const floatX *const b = table.data + position.row * table.stride;
        for (int c = lane; c < C; c += kWarpSize) sum += (float)a[c] * (float)b[c];
        sum = warp_reduce_sum(sum) * (scale ? scale[position.bag] : 1.0f);
    }
    if (lane == 0) dweights[i] = sum;
}

// ---------------------------------------------------------------------------------------------------------------------
// launchers

// Bytes of the workspace of versions 2 to 4, and of dweights with any version. 0: too many indices or bags, or an error
// of CUDA.
inline size_t embedding_bag_backward_workspace_bytes(const Bags &bags, long long rows, int C) {
    if (bags.count > INT32_MAX || bags.bags > INT32_MAX) return 0;
    BagBackwardScratch scratch(bags, rows);
    return scratch.lay_out(nullptr, bags, C) == cudaSuccess ? scratch.bytes : 0;
}

// Every launcher: arrays in device memory, row-major, aligned to the element size, the workspace to 256 bytes. gradX:
// floatX, or float. Dense gradients are added to, or overwritten; a sparse one is written: rows beyond *distinct keep
// their values. A bad index adds nothing, and status holds the first position of one; nothing outside the arrays is
// accessed. Padding, and positions in no bag, add nothing, and their dweights are 0, as those of bad indices.
// Versions 2 to 4 add in float, in an order that depends on the indices only, and round once: the same bits each time.
// Returns cudaErrorInvalidValue for another block size than a multiple of 32 up to 1024, and for more than 2^31-1
// indices or bags; cudaErrorNotSupported for a sparse gradient from version 1; else the first error. Allocates nothing,
// does not synchronise. A pending CUDA error stays pending; versions 2 to 4 return it without doing anything (see
// sort_groups()).
template <typename floatX, typename gradX>
using EmbeddingBagBackward = cudaError_t (*)(const BagBackwardArguments<floatX, gradX> &args, int block_size,
                                             cudaStream_t stream);

// Rows of all tables that a dense gradient has are zeroed if it is overwritten.
template <typename floatX, typename gradX>
cudaError_t zero_dense(const BagBackwardArguments<floatX, gradX> &args, cudaStream_t stream) {
    if (!args.overwrite || args.indices || !args.dtable || args.table.rows == 0 || args.C == 0) return cudaSuccess;
    return cudaMemsetAsync(args.dtable, 0, args.table.rows * args.C * sizeof(gradX), stream);
}

// bag_of and scale, where the bags need them.
inline cudaError_t resolve_bags(const Bags &bags, const BagBackwardScratch &scratch, cudaStream_t stream) {
    if (scratch.bag_of) {
        const cudaError_t error = cudaMemsetAsync(scratch.bag_of, 0xff, bags.count * sizeof(unsigned), stream);
        if (error != cudaSuccess) return error;
    }
    if ((!scratch.bag_of && !scratch.scale) || bags.bags == 0) return cudaSuccess;
    int block_size = 256;
    const unsigned grid_size = grid_blocks(bags.bags * kWarpSize, &block_size);
    return launch_kernel(embedding_bag_positions_kernel, grid_size, block_size, 0, stream, bags, scratch.bag_of,
                         scratch.scale);
}

template <typename floatX, typename gradX>
cudaError_t launch_dweights(const BagBackwardArguments<floatX, gradX> &args, const BagBackwardScratch &scratch,
                            cudaStream_t stream) {
    if (!args.dweights || args.bags.count == 0) return cudaSuccess;
    int block_size = 256;
    const unsigned grid_size = grid_blocks(args.bags.count * kWarpSize, &block_size);
    return launch_kernel(embedding_bag_dweights_kernel<floatX>, grid_size, block_size, 0, stream, args.dweights,
                         args.dout, args.table, args.bags, scratch.bag_of, scratch.scale, args.C);
}

template <typename floatX, typename gradX>
cudaError_t embedding_bag_backward1(const BagBackwardArguments<floatX, gradX> &args, int block_size,
                                    cudaStream_t stream) {
    if (args.indices && args.dtable) return cudaErrorNotSupported;
    if (!valid_block_size(block_size) || args.bags.count > INT32_MAX || args.bags.bags > INT32_MAX) {
        return cudaErrorInvalidValue;
    }
    const KeepPendingError keep;
    cudaError_t error = zero_dense(args, stream);
    if (error == cudaSuccess && args.dweights) {
        BagBackwardScratch scratch(args.bags, args.table.rows);
        error = scratch.lay_out(args.workspace, args.bags, args.C);
        if (error == cudaSuccess) error = resolve_bags(args.bags, scratch, stream);
        if (error == cudaSuccess) error = launch_dweights(args, scratch, stream);
    }
    if (error != cudaSuccess || !args.dtable || args.bags.bags == 0) return error;
    return launch_kernel(embedding_bag_backward_kernel1<floatX, gradX>, (unsigned)args.bags.bags, block_size, 0, stream,
                         args);
}

// What versions 2 to 4 share: groups the positions, then calls sum(source, sink, scratch) for the gradient of the
// table.
template <typename floatX, typename gradX, typename Sum>
cudaError_t backward_by_groups(const BagBackwardArguments<floatX, gradX> &args, int block_size, cudaStream_t stream,
                               Sum sum) {
    const Bags &bags = args.bags;
    if (!valid_block_size(block_size) || bags.count > INT32_MAX || bags.bags > INT32_MAX) return cudaErrorInvalidValue;
    BagBackwardScratch scratch(bags, args.table.rows);
    cudaError_t error = scratch.lay_out(args.workspace, bags, args.C);
    if (error != cudaSuccess) return error;
    if (args.indices) scratch.groups.indices = args.indices, scratch.groups.count = args.distinct;
    error = zero_dense(args, stream);
    if (error == cudaSuccess) error = resolve_bags(bags, scratch, stream);
    if (error == cudaSuccess) error = launch_dweights(args, scratch, stream);
    if (error != cudaSuccess || !args.dtable) return error;
    const RowOfPosition row_of = {bags, scratch.bag_of, args.table.rows, args.status};
    const StoreSortedRow store = {bags, scratch.bag_of, scratch.scale, scratch.row_of, scratch.factor_of};
    error = sort_groups(scratch.groups, row_of, store, stream);
    if (error != cudaSuccess || bags.count == 0 || args.C == 0) return error;
    auto with_sink = [&](const auto &sink) {
        const unsigned C = args.C;
        const SortedGroups &groups = scratch.groups;
        if (bags.mode == kBagMax) {
            const BagMaxRows<floatX> rows = {args.dout, args.argmax, groups.group, scratch.row_of, groups.positions, C};
            return sum(rows, sink, scratch);
        }
        return sum(BagRows<floatX>{args.dout, groups.group, scratch.row_of, scratch.factor_of, C}, sink, scratch);
    };
    if (args.indices) return with_sink(SparseRows<gradX>{args.dtable, (unsigned)args.C});
    return with_sink(DenseRows<gradX>{args.dtable, scratch.groups.indices, (unsigned)args.C, args.overwrite});
}

template <typename floatX, typename gradX>
cudaError_t embedding_bag_backward2(const BagBackwardArguments<floatX, gradX> &args, int block_size,
                                    cudaStream_t stream) {
    return backward_by_groups(args, block_size, stream, [&](const auto &source, const auto &sink, auto &scratch) {
        typedef std::decay_t<decltype(source)> Source;
        typedef std::decay_t<decltype(sink)> Sink;
        return launch_kernel(embedding_bag_backward_kernel2<Source, Sink>, (unsigned)args.bags.count, block_size, 0,
                             stream, source, sink, scratch.groups, args.C);
    });
}

// Teams of threads with one column each: tiles of equal length take equally long, so a frequent index costs no more
// than others. The cost is a second pass over partial sums, one row for 32 positions at most.
template <typename floatX, typename gradX>
cudaError_t embedding_bag_backward3(const BagBackwardArguments<floatX, gradX> &args, int block_size,
                                    cudaStream_t stream) {
    return backward_by_groups(args, block_size, stream, [&](const auto &source, const auto &sink, auto &scratch) {
        return group_sums<1>(source, sink, scratch.levels, scratch.groups.N, args.C, block_size, stream);
    });
}

// Version 3 with vectors as wide as the alignment allows.
template <typename floatX, typename gradX>
cudaError_t embedding_bag_backward4(const BagBackwardArguments<floatX, gradX> &args, int block_size,
                                    cudaStream_t stream) {
    constexpr int most = Packed128<floatX>::size;
    const EmbeddingTable<const floatX> dout = {args.dout, args.bags.bags, args.C};
    const int widest = row_width(dout, args.dtable, args.C);
    return backward_by_groups(args, block_size, stream, [&](const auto &source, const auto &sink, auto &scratch) {
        return group_sums_of_width<most>(widest, source, sink, scratch.levels, scratch.groups.N, args.C, block_size,
                                         stream);
    });
}

// Properties that the check's error bounds depend on: whether 16-bit gradients are rounded at each addition, and how
// many additions follow each other before partial sums are added.
struct BagBackwardProperties {
    bool rounds_each_addition = false;
    int additions = kSumTile;
};
template <typename floatX, typename gradX>
constexpr Version<EmbeddingBagBackward<floatX, gradX>, BagBackwardProperties> embedding_bag_backward_versions[] = {
    {1, "atomics", "one block per bag, one atomic addition per element", embedding_bag_backward1<floatX, gradX>, 128,
     kNotReproducible, {true, INT32_MAX}},
    {2, "groups", "sorted positions; one block per distinct index", embedding_bag_backward2<floatX, gradX>, 128,
     kSameBits, {false, INT32_MAX}},
    {3, "tiles", "one team per 32 sorted positions", embedding_bag_backward3<floatX, gradX>, 256},
    {4, "x128", "tiles with 16 bytes per load", embedding_bag_backward4<floatX, gradX>, 256},
};

// ---------------------------------------------------------------------------------------------------------------------
// the transposition: positions by index

// Sorts the positions of idx (count) by index, as in the example of parts/sorted_groups.h.
//   CSR    indices (count), begin (count + 1), positions (count), *distinct: the positions with index indices[g] are
//          positions[begin[g]] to positions[begin[g+1]-1], in ascending order. Written: begin[0..*distinct].
//   COO    indices, group (count), positions: sorted position j has index indices[group[j]]
// Positions with bad indices come last, with group -1. Outputs must not be null. The workspace has the size of
// embedding_transpose_workspace_bytes() and is aligned to 256 bytes. Errors: as the launchers above.
inline size_t embedding_transpose_workspace_bytes(long long count, long long rows) {
    if (count > INT32_MAX) return 0;
    SortedGroups groups((unsigned)count, rows);
    char *end = nullptr;
    return groups.lay_out(&end) == cudaSuccess ? (size_t)end : 0;
}
inline cudaError_t embedding_transpose(long long *indices, int *begin, int *positions, int *group, long long *distinct,
                                       Indices idx, long long count, long long rows, status_word *status,
                                       char *workspace, cudaStream_t stream) {
    if (count > INT32_MAX) return cudaErrorInvalidValue;
    SortedGroups groups((unsigned)count, rows);
    const cudaError_t error = groups.lay_out(&workspace);
    if (error != cudaSuccess) return error;
    groups.indices = indices;
    groups.begin = (unsigned *)begin;
    groups.positions = (unsigned *)positions;
    groups.group = (unsigned *)group;
    groups.count = distinct;
    return sort_groups(groups, RowOfIndex{idx, rows, status}, VisitNothing(), stream);
}

}  // namespace bookends

// ---------------------------------------------------------------------------------------------------------------------
#ifndef BOOKENDS_NO_MAIN
#include "dev/harness/bags.h"
#include "dev/harness/harness.h"

namespace bookends {

// What the references share: the positions of each row, and the sizes of the bags.
struct BackwardReference {
    std::vector<long long> rows;    // distinct, ascending
    std::vector<int> begin, order;  // positions of rows[k]: order[begin[k]] to order[begin[k+1]-1]
    std::vector<int> bag_of;
    std::vector<long long> bag_size;

    void prepare(const BagInputs &inputs, const LookupProblem &p) {
        const Bags &bags = inputs.host;
        std::vector<long long> row_of(bags.count);
        for (long long g = 0; g < bags.bags; g++) {
            bag_size.push_back(bag_size_cpu(bags, g));
            for (long long i = inputs.offsets[g]; i < inputs.offsets[g + 1]; i++) {
                bag_of.push_back((int)g);
                row_of[i] = g / p.batch * p.V + inputs.ids[i];
                if (!bags.is_padding(inputs.ids[i])) order.push_back((int)i);
            }
        }
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return row_of[a] < row_of[b]; });
        for (size_t j = 0; j < order.size(); j++) {
            if (j > 0 && row_of[order[j]] == row_of[order[j - 1]]) continue;
            rows.push_back(row_of[order[j]]);
            begin.push_back((int)j);
        }
        begin.push_back((int)order.size());
    }
};

// For each element of dout a position of its bag, as if it were the maximum's; -1 for an empty bag.
inline std::vector<long long> make_argmax(const BagInputs &inputs, int C, uint64_t seed) {
    const Random choice(1011, seed);
    std::vector<long long> argmax(inputs.host.bags * C, -1);
    for (long long g = 0; g < inputs.host.bags; g++) {
        for (int c = 0; c < C && inputs.length(g) > 0; c++) {
            const long long at = inputs.host.value_row(g) * C + c;
            argmax[at] = inputs.offsets[g] + (long long)(choice.uniform(at) * inputs.length(g));
        }
    }
    return argmax;
}

template <typename floatX, typename gradX>
void embedding_bag_backward_race(Harness &h) {
    const LookupProblem p(h.options);
    const bool sparse = h.options.flag("--sparse"), overwrite = h.options.flag("--overwrite") || sparse;
    const bool wants_dweights = h.options.flag("--dweights");
    const auto inputs = make_bags(h, p);
    const Bags &bags = inputs->host;
    if (bags.count > INT32_MAX) refuse(EXIT_BAD_INPUT, "--hotness: %lld indices are more than 2^31-1", bags.count);
    if (wants_dweights && bags.mode == kBagMax) refuse(EXIT_BAD_INPUT, "--dweights: requires --bag sum or mean");
    if (sparse && h.options.flag("--overwrite")) refuse(EXIT_BAD_INPUT, "--overwrite: excludes --sparse");
    const Values<floatX> dout = {1, h.options.seed}, table = {4, h.options.seed};
    const Values<gradX> before = {3, h.options.seed};
    const auto argmax = std::make_shared<std::vector<long long>>();
    if (bags.mode == kBagMax) *argmax = make_argmax(*inputs, p.C, h.options.seed);

    BagBackwardArguments<floatX, gradX> args = {};
    args.bags = inputs->device;
    args.C = p.C;
    args.overwrite = overwrite;
    args.dout = h.input(dout, bags.bags * p.C);
    args.table = {wants_dweights ? h.input(table, p.rows() * p.C) : nullptr, p.rows(), p.C};
    if (bags.mode == kBagMax) args.argmax = h.upload(*argmax);
    args.status = h.status();
    const size_t bytes = embedding_bag_backward_workspace_bytes(args.bags, p.rows(), p.C);
    char *end = (char *)h.workspace((bytes + 255) / 256 * 256 + (sparse ? 8 * (bags.count + 4) : 0));
    args.workspace = end;
    end += (bytes + 255) / 256 * 256;
    if (sparse) {
        take_array(&args.indices, &end, bags.count);
        take_array(&args.distinct, &end, 1);
    }

    const auto shared = std::make_shared<BackwardReference>();
    h.job.prepare_references = [=] { shared->prepare(*inputs, p); };
    // Row r of the gradient: sparse, of the r-th distinct row; the rows after the last are not written.
    auto expect = [=, &h](Expected &row, long long r) {
        const auto found = std::lower_bound(shared->rows.begin(), shared->rows.end(), r) - shared->rows.begin();
        const size_t k = sparse ? (size_t)r : (size_t)found;
        const bool present = k < shared->rows.size() && (sparse || shared->rows[k] == r);
        const bool old = sparse ? !present : !overwrite;
        for (int c = 0; c < p.C; c++) row.value[c] = old ? (double)before[r * p.C + c] : 0.0;
        if (!present) return;
        std::vector<double> magnitude(p.C);
        for (int c = 0; c < p.C; c++) magnitude[c] = fabs(row.value[c]);
        const int first = shared->begin[k], last = shared->begin[k + 1];
        for (int j = first; j < last; j++) {
            const int i = shared->order[j], g = shared->bag_of[i];
            embedding_bag_backward_cpu(row.value.data(), magnitude.data(), inputs->host, g, i, shared->bag_size[g],
                                       dout, argmax->data(), p.C);
        }
        const auto *version = find_version(embedding_bag_backward_versions<floatX, gradX>, h.running);
        const BagBackwardProperties properties = version ? version->properties : BagBackwardProperties();
        const int count = last - first;
        // The roundings of the additions, and of each term: its factor, 1 / size and their product. Three levels of
        // partial sums suffice for 2^20 positions.
        double tolerance = (std::min((double)count, 3.0 * properties.additions) + 3.0) * kFloatRounding;
        if (properties.rounds_each_addition) tolerance += sum_tolerance<gradX>(count, true);
        for (int c = 0; c < p.C; c++) row.slack[c] = tolerance * magnitude[c];
    };
    args.dtable = h.output<gradX>("dtable", sparse ? bags.count : p.rows(), p.C, 0, expect,
                                  overwrite && !sparse ? nullptr : &before);
    if (wants_dweights) {
        args.dweights = h.output<float>("dweights", bags.count, 1, 0, [=](Expected &row, long long i) {
            const long long g = shared->bag_of[i], r = g / p.batch * p.V + inputs->ids[i];
            const bool mean = inputs->host.mode == kBagMean;
            double magnitude = 0;
            row.value[0] = 0;
            for (int c = 0; c < p.C && !inputs->host.is_padding(inputs->ids[i]); c++) {
                const double product = (double)dout[inputs->host.value_row(g) * p.C + c] * (double)table[r * p.C + c];
                row.value[0] += product;
                magnitude += fabs(product);
            }
            const double size = mean && shared->bag_size[g] > 0 ? (double)shared->bag_size[g] : 1.0;
            row.value[0] /= size;
            row.slack[0] = (p.C + 4) * kFloatRounding * magnitude / size;
        });
    }

    const double rows = (double)inputs->rows_of_indices(p).size();
    const double written = sparse ? rows : overwrite ? (double)p.rows() : 2 * rows;  // or read
    h.job.bytes = (double)bags.bags * p.C * sizeof(floatX) + written * p.C * sizeof(gradX) + inputs->bytes() +
                  (sparse ? 8 * rows : 0) + (wants_dweights ? rows * p.C * sizeof(floatX) + 4.0 * bags.count : 0);
    h.job.flops = 2.0 * bags.count * p.C;
    h.job.skip = [=](int version) { return version == 1 && sparse ? "it has no sparse gradient" : ""; };
    h.race(embedding_bag_backward_versions<floatX, gradX>,
           [=](EmbeddingBagBackward<floatX, gradX> launch, int block_size, cudaStream_t stream) {
               return launch(args, block_size, stream);
           });
}

template <typename floatX>
void embedding_bag_backward_race(Harness &h) {
    const bool same = h.options.choice("--grad-dtype") == "same" && sizeof(floatX) == 2;
    return same ? embedding_bag_backward_race<floatX, floatX>(h) : embedding_bag_backward_race<floatX, float>(h);
}

}  // namespace bookends

int main(int argc, char **argv) {
    using namespace bookends;
    Harness h("embedding_lookup_backward", "gradients of bags of table rows",
              {{'b', "B", 8, 1}, {'t', "T", 1024, 64}, {'c', "C", 128, 128}, {'v', "V", 50257, 50257}},
              {{"--bag", {"sum", "mean", "max"}, "how the rows of a bag were combined"},
               {"--grad-dtype", {"same", "fp32"}, "type of the table's gradient"},
               {"--index", {"int32", "int64"}, "type of the indices"},
               {"--sparse", {}, "one gradient row for each distinct index"},
               {"--overwrite", {}, "overwrite the dense gradient instead of adding to it"},
               {"--weights", {}, "one factor per index, for sums and means"},
               {"--dweights", {}, "also compute the gradient of the weights"}},
              {{"--padding-idx", -1, -1, INT32_MAX, "an index that bags skip (-1: none)", true},
               {"--tables", 1, 1, 4096, "tables of V rows in one launch, with B*T bags each", true}},
              {{"--hotness", "32", "indices per bag: a number, or a range MIN..MAX (CSR offsets)"}});
    return h.main(argc, argv, embedding_bag_backward_versions<float, float>, embedding_bag_backward_race<float>,
                  embedding_bag_backward_race<half>, embedding_bag_backward_race<__nv_bfloat16>);
}
#endif
