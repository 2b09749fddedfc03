// Tables of embedding rows, lists of indices and bags, and the accesses to rows, for embedding_lookup.cu,
// embedding_lookup_backward.cu and embedding_update.cu.
#pragma once
#include "../common.h"

namespace bookends {

// An embedding table. Row r has C elements, from data + r * stride on. stride is at least C, and the elements between
// two rows are never accessed.
template <typename floatX>
struct EmbeddingTable {
    floatX *data;  // floatX is const in a table that is only read
    long long rows, stride;
};

// int32 or int64 numbers in device memory (in host memory for the CPU reference). An index is bad if it is negative or
// not below the number of rows.
struct Indices {
    const void *data;
    bool wide;  // int64

    __host__ __device__ long long operator[](long long i) const {
        return wide ? ((const long long *)data)[i] : ((const int *)data)[i];
    }
};

// Whether the row number is in 0..rows-1. One comparison suffices: as unsigned numbers, negative ones are the largest.
__host__ __device__ inline bool row_in_table(long long row, long long rows) {
    return (unsigned long long)row < (unsigned long long)rows;
}

enum BagMode { kBagSum, kBagMean, kBagMax };

// Bags of indices. With offsets (CSR), bag g consists of the indices offsets[g] to offsets[g+1]-1. Offsets outside
// 0..count are clamped. Without offsets, it consists of the indices g * hotness to (g+1) * hotness - 1.
struct Bags {
    Indices idx;           // (count)
    long long count;       // number of indices
    long long bags;        // number of bags
    Indices offsets;       // (bags + 1), ascending; data is null without offsets
    long long hotness;     // indices per bag without offsets
    const float *weights;  // (count): one factor per index, for sums and means; or null
    long long padding;     // an index that bags skip; negative: none
    BagMode mode;
    // Several tables of one width, one after the other (as in FBGEMM's table-batched embedding). Table t consists of
    // the rows first_rows[t] to first_rows[t+1]-1, and its indices are relative to first_rows[t]. The bags t * batch to
    // (t+1) * batch - 1 look up table t, where batch = bags / tables. One table: first_rows is null.
    const long long *first_rows;
    int tables;

    __host__ __device__ long long begin(long long bag) const {
        if (!offsets.data) return bag * hotness;
        const long long offset = offsets[bag];
        return offset < 0 ? 0 : offset < count ? offset : count;
    }
    __host__ __device__ bool is_padding(long long row) const { return row == padding && row >= 0; }
    __host__ __device__ float weight(long long i) const { return weights ? weights[i] : 1.0f; }
    // The row of a bag in the bags' values: (bags, C), or with several tables (batch, tables, C).
    __host__ __device__ long long value_row(long long bag) const {
        if (!first_rows) return bag;
        const long long batch = bags / tables;
        return bag % batch * tables + bag / batch;
    }
};

// The rows of a bag's table: `rows` rows, the first of which is row `first` of all tables together.
struct BagTable {
    long long first, rows;
};
__host__ __device__ inline BagTable bag_table(const Bags &bags, long long bag, long long all_rows) {
    if (!bags.first_rows) return {0, all_rows};
    const long long *const first = bags.first_rows + bag / (bags.bags / bags.tables);
    return {first[0], first[1] - first[0]};
}

// The number of table elements per access: a power of two, at most 16 bytes of the table. Accesses to rows of the table
// and of `rows` (C elements apart) are aligned. If rowX is the wider type, its rows are accessed in parts of 16 bytes.
template <typename tableX, typename rowX>
int row_width(const EmbeddingTable<tableX> &table, const rowX *rows, long long C) {
    const int width = vector_width(Packed128<tableX>::size, C | table.stride, table.data);
    const int other = vector_width(Packed128<rowX>::size, C, rows);
    return other == Packed128<rowX>::size ? width : std::min(width, other);
}

// The launch shape of kernels with a team of threads for each `rows_per_team` rows: blockDim.x lanes, one for each
// vector of a row, and blockDim.y teams. blockIdx.y is the slice of the columns, of at most most_lanes vectors.
struct TeamGrid {
    dim3 grid, block;
    bool possible;  // within CUDA's limits
    TeamGrid(long long rows, int rows_per_team, int vectors, int threads, int most_lanes = INT32_MAX) {
        const int lanes = std::min({vectors, threads, most_lanes}), teams = threads / lanes;
        const long long blocks = ceil_div(rows, (long long)teams * rows_per_team), slices = ceil_div(vectors, lanes);
        possible = blocks <= INT32_MAX && slices <= 65535;
        grid = dim3((unsigned)blocks, (unsigned)slices);
        block = dim3(lanes, teams);
    }
};

// The number of lanes of a team for so many vectors of a row, if lanes exchange values by shuffles: a power of two, or
// a multiple of 32.
inline int warp_team_lanes(int vectors) {
    if (vectors > 16) return ceil_div(vectors, 32) * 32;
    int lanes = 1;
    while (lanes < vectors) lanes *= 2;
    return lanes;
}

// The value in type outX. Within one type all bits are kept, also those of a NaN.
template <typename outX, typename floatX>
__device__ outX convert(floatX value) {
    if constexpr (std::is_same_v<outX, floatX>) {
        return value;
    } else {
        return (outX)(float)value;
    }
}

// Stores `width` consecutive elements, in accesses of at most 16 bytes.
template <typename outX, typename floatX, int width>
__device__ void store_row(outX *address, const Packed<floatX, width> &values) {
    constexpr int part = width < Packed128<outX>::size ? width : Packed128<outX>::size;
#pragma unroll
    for (int first = 0; first < width; first += part) {
        Packed<outX, part> packed;
#pragma unroll
        for (int k = 0; k < part; k++) packed[k] = convert<outX>(values[first + k]);
        store_packed(address + first, packed);
    }
}

template <typename outX, int width>
__device__ void store_nan(outX *address) {
    for (int k = 0; k < width; k++) address[k] = quiet_nan<outX>();
}

}  // namespace bookends
