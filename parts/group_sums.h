// Sums of rows by group: one float sum for each group of parts/sorted_groups.h. For embedding_lookup_backward.cu and
// embedding_update.cu.
//
// The method: a team of lanes walks through a tile of kSumTile sorted positions and adds the rows of equal groups. A
// group that lies in one tile is complete, and its sum goes to the sink. A group that continues in a neighbouring tile
// leaves a partial sum. A tile has at most two: of its first and of its last group. These entries, two for each tile,
// are the rows of the next level, which is summed in the same way, until one tile is left. So a frequent index is work
// for many teams, and the order of the additions depends only on the place of the group in the sorted list. For tiles
// of 4 positions:
//
//   groups     0 1 1 1 | 1 1 1 1 | 1 2 2 3 | 4
//   complete   0       |         |   2   3 | 4        group 3 ends with its tile
//   level 1    - 1     | 1 1*    | 1 -     | - -      * without a row: the tile has one partial sum; -: no entry
//   complete                       1
#pragma once
#include "rows.h"
#include "sorted_groups.h"

namespace bookends {

constexpr unsigned kSumTile = 32;

// A word for each entry: its group, kNoGroup, or a group with kNoRow, which only links its neighbours.
constexpr unsigned kNoRow = 1u << 31;
__device__ inline bool same_group(unsigned a, unsigned b) { return (a | kNoRow) == (b | kNoRow); }
__device__ inline bool in_group(unsigned word) { return (word | kNoRow) != kNoGroup; }
__device__ inline bool has_row(unsigned word) { return (word & kNoRow) == 0; }

// The entries of a level.
struct PartialSums {
    unsigned entries = 0;
    unsigned *group = nullptr;  // (entries)
    float *rows = nullptr;      // (entries, C)
};
inline unsigned partial_entries(unsigned entries) { return 2 * ceil_div(entries, kSumTile); }

// The levels above the sorted positions: 2^31 positions need 7.
struct SumLevels {
    static constexpr int kMost = 8;
    PartialSums level[kMost];
    int count = 0;

    // Advances *workspace to the end of the arrays.
    void lay_out(char **workspace, unsigned entries, int C) {
        for (count = 0; entries > kSumTile; count++) {
            PartialSums &sums = level[count];
            sums.entries = entries = partial_entries(entries);
            take_array(&sums.group, workspace, entries);
            take_array(&sums.rows, workspace, (size_t)entries * C);
        }
    }
};

// A source of rows: the partial sums of a level. Every source has group(j), and load<width>(j, c), which returns the
// columns c to c + width - 1 of entry j: an object with add_to(sum).
struct PartialRows {
    PartialSums sums;
    unsigned C;

    template <int width>
    struct Loaded {
        Columns<float, width> row;
        __device__ void add_to(float (&sum)[width]) {
#pragma unroll
            for (int k = 0; k < width; k++) sum[k] += row[k];
        }
    };
    __device__ unsigned group(unsigned j) const { return sums.group[j]; }
    template <int width>
    __device__ Loaded<width> load(unsigned j, unsigned c) const {
        Loaded<width> loaded;
        loaded.row.load(sums.rows + ((size_t)j * C + c));
        return loaded;
    }
};

// The largest number of threads per block: 1024 would leave 64 registers to each thread, fewer than it needs.
constexpr int kSumThreads = 512;

// One level. blockIdx.y is the slice of the columns; a block has blockDim.y teams. sink.store(group, c, sum): receives
// the columns c to c + width - 1 of a complete sum. next: the level above; without entries if this is the last one.
template <typename Source, typename Sink, int width>
__global__ void __launch_bounds__(kSumThreads)
    group_sums_kernel(Source source, Sink sink, PartialSums next, unsigned entries, unsigned C) {
    constexpr int in_flight = 4;
    const unsigned tile = blockIdx.x * blockDim.y + threadIdx.y, c = (blockIdx.y * blockDim.x + threadIdx.x) * width;
    const unsigned begin = tile * kSumTile, end = begin + min(kSumTile, entries - begin);
    if (tile >= ceil_div(entries, kSumTile) || c >= C) return;
    const unsigned before = begin > 0 ? source.group(begin - 1) : kNoGroup;
    const unsigned after = end < entries ? source.group(end) : kNoGroup;
    unsigned first = kNoGroup, last = kNoGroup;  // the words of the tile's entries in the next level
    unsigned current = before;                   // the group that is being summed
    bool continued = true;                       // whether its sum began in the tile before
    float sum[width] = {};

    auto store_partial = [&](unsigned entry) {
        Columns<float, width> row;
#pragma unroll
        for (int k = 0; k < width; k++) row[k] = sum[k];
        row.store(next.rows + ((size_t)entry * C + c));
    };
    auto finish = [&](bool continues) {  // of the current group
        if (!in_group(current)) return;
        const unsigned group = current & ~kNoRow;
        if (continued) {
            first = group;
            if (continues) last = group | kNoRow;
            store_partial(2 * tile);
        } else if (continues) {
            last = group;
            store_partial(2 * tile + 1);
        } else {
            sink.template store<width>(group, c, sum);
        }
    };

    if (!same_group(before, source.group(begin))) continued = false, current = kNoGroup;
#pragma unroll 1
    for (unsigned j = begin; j < end; j += in_flight) {
        unsigned word[in_flight];
        typename Source::template Loaded<width> loaded[in_flight];
#pragma unroll
        for (int k = 0; k < in_flight; k++) word[k] = j + k < end ? source.group(j + k) : kNoGroup;
#pragma unroll
        for (int k = 0; k < in_flight; k++) {
            if (has_row(word[k])) loaded[k] = source.template load<width>(j + k, c);
        }
#pragma unroll
        for (int k = 0; k < in_flight; k++) {
            if (j + k >= end) break;
            if (!same_group(word[k], current)) {
                finish(false);
                current = word[k];
                continued = false;
#pragma unroll
                for (int i = 0; i < width; i++) sum[i] = 0.0f;
            }
            if (has_row(word[k])) loaded[k].add_to(sum);
        }
    }
    finish(same_group(current, after));
    if (next.entries > 0 && c == 0) {
        next.group[2 * tile] = first;
        next.group[2 * tile + 1] = last;
    }
}

// All levels: one launch for the sorted positions, and one for each level above. entries: the sorted positions. Returns
// the first error of a launch.
template <int width, typename Source, typename Sink>
cudaError_t group_sums(const Source &source, const Sink &sink, const SumLevels &levels, unsigned entries, int C,
                       int block_size, cudaStream_t stream) {
    if (entries == 0 || C == 0) return cudaSuccess;
    auto launch = [&](const auto &rows, const PartialSums &next, unsigned count) {
        typedef std::decay_t<decltype(rows)> Rows;
        const TeamGrid shape(count, kSumTile, C / width, std::min(block_size, kSumThreads));
        return launch_kernel(group_sums_kernel<Rows, Sink, width>, shape.grid, shape.block, 0, stream, rows, sink, next,
                             count, (unsigned)C);
    };
    cudaError_t error = launch(source, levels.level[0], entries);
    for (int i = 0; i < levels.count && error == cudaSuccess; i++) {
        const PartialSums none;
        error = launch(PartialRows{levels.level[i], (unsigned)C}, i + 1 < levels.count ? levels.level[i + 1] : none,
                       levels.level[i].entries);
    }
    return error;
}

// group_sums() with vectors of `width` elements, or of fewer if `widest` (row_width()) is less: 16 bytes, 4 (of 16-bit
// elements), or one element. (8 bytes would be two more kernels for each pair of types, for rows that are seldom used.)
template <int width, typename Source, typename Sink>
cudaError_t group_sums_of_width(int widest, const Source &source, const Sink &sink, const SumLevels &levels,
                                unsigned entries, int C, int block_size, cudaStream_t stream) {
    if constexpr (width > 1) {
        if (widest < width) {
            constexpr int next = width > 4 ? width / 4 : 1;
            return group_sums_of_width<next>(widest, source, sink, levels, entries, C, block_size, stream);
        }
    }
    return group_sums<width>(source, sink, levels, entries, C, block_size, stream);
}

}  // namespace bookends
