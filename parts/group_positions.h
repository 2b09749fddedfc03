// Groups the positions of a list of ids on the GPU by their id. For encoder_backward.cu.
//
// Interface: Groups describes the result and its arrays; lay_out() places them in a workspace; group_positions()
// launches the two kernels that fill them. A group is all positions of one id, in ascending order: a sum over a group
// in that order has the same bits each time. Short groups are listed by bin (short_lists, short_groups). Long groups
// are cut into pieces of kPiece positions (long_pieces). Ids outside 0..V-1 are in no group. Time and memory are
// proportional to the number of positions. Only `present`, if it is wanted, depends on V: one bit for each id.
//
// The method resembles a radix sort, with 4 bytes for each position. For the ids 7 3 7 9 7 at the positions 0 to 4:
//
//   tile kernel   merges equal ids of a warp into a run: 7 at {0,2,4}, 3 at {1}, 9 at {3}; sorts runs into buckets
//   bin kernel    merges the runs of an id into a group: 3: {1}   7: {0,2,4}   9: {3}
//
// A tile is kTile neighbouring positions. A run is the positions of one id in one warp of a tile. A bin is a range of
// hashes of ids; a bucket is a number of neighbouring bins, a power of two.
#pragma once
#include "../common.h"
#include "launch.h"
#include "workspace.h"

namespace bookends {

// A group of 2*kPiece positions or more is cut into pieces, so that many teams share one frequent id. Each piece has
// kPiece positions, except the last one, which has up to 2*kPiece - 1.
constexpr int kPiece = 32;
static_assert(kPiece >= kWarpSize, "a run, which is a warp's at most, begins one piece at most");
__host__ __device__ inline int pieces_of(int length) { return length < 2 * kPiece ? 1 : length / kPiece; }

// A range of hashes.
struct HashRange {
    unsigned begin, size;
    __device__ bool contains(unsigned hash) const { return hash - begin < size; }
    __device__ bool is_above(unsigned hash) const { return hash < begin; }
};

// All arithmetic from ids to hashes, buckets, bins and ranges. A bin is the work of one block, in shared memory. The
// tile kernel sorts by bucket; the bin kernel selects the ids of its range from its bucket.
constexpr int kBinIds = 512;        // capacity: different ids of a bin at once
constexpr int kBinPositions = 512;  // of a bin, about
constexpr int kMaxBuckets = 512;
struct Bins {
    static constexpr int kHashBits = 31;  // as many as an id has
    int log2_buckets = 0, log2_count = 0;

    Bins(unsigned N, int V) {
        const unsigned ids = std::min(N, (unsigned)std::max(V, 1));  // different ones, at most
        auto too_few = [&] {
            return ids / count() > kBinIds - 5 * 22 ||  // a bin's share of random ids, and 5 standard deviations
                   (count() < kMaxBuckets && N / count() > kBinPositions) ||
                   (count() < 128 && ids / count() > 64);  // enough blocks for the multiprocessors
        };
        while (count() < (unsigned)std::max(V, 1) && too_few()) log2_count++;
        while (log2_buckets < log2_count && buckets() < kMaxBuckets) log2_buckets++;
    }
    __host__ __device__ unsigned count() const { return 1u << log2_count; }
    __host__ __device__ int buckets() const { return 1 << log2_buckets; }

    // Different ids have different hashes. Neighbouring ids, whose frequencies are often similar, have distant hashes:
    // Fibonacci hashing (Knuth, The Art of Computer Programming, volume 3, 6.4).
    __device__ static unsigned hash(int id) { return (unsigned)id * 0x9e3779b1u & ((1u << kHashBits) - 1); }
    __device__ int bucket_of_id(int id) const { return hash(id) >> (kHashBits - log2_buckets); }
    __device__ int bucket_of_bin(unsigned bin) const { return bin >> (log2_count - log2_buckets); }
    __device__ HashRange range(unsigned bin) const {
        const unsigned size = 1u << (kHashBits - log2_count);
        return {bin * size, size};
    }
};

// Equal ids among 32 neighbouring positions.
struct alignas(16) Run {
    int id;
    unsigned base, mask;  // positions base + k for each bit k
    unsigned unused;
};

// The part of a tile that belongs to a bucket.
struct alignas(8) TilePart {
    unsigned short first_run, runs;  // first index and number among the tile's runs, which lie bucket after bucket
    unsigned short lower;            // number of the tile's positions in lower buckets
    unsigned short unused;
};

// The short groups of a bin.
struct ShortList {
    unsigned begin;  // index of the first in short_groups
    unsigned count;
};

// A group of one piece.
struct alignas(16) ShortGroup {
    int id, length;
    unsigned at0, at1;  // length 1 or 2: its positions; longer: at0 is the index of the first in Groups::positions
};

// A piece of a long group.
struct alignas(16) LongPiece {
    int id, length;  // of the whole group; length 0: no piece here
    int first;       // index of the piece's first position in Groups::positions
    int number;      // of the piece in its group
};

// kRanges ranges divide the positions evenly. `order` lists the long pieces by the range of their first position.
constexpr int kRanges = 16;

constexpr int kTile = 1024, kTileWarps = kTile / kWarpSize;

// The arrays, in their order in the workspace.
struct Groups {
    unsigned N;  // positions
    int V;       // ids are 0..V-1
    Bins bins;
    Run *runs;                 // (tiles, kTile)
    TilePart *tile_parts;      // (buckets, tiles)
    ShortList *short_lists;    // bins.count()
    ShortGroup *short_groups;  // N
    unsigned *positions;       // N, bin after bin, group after group; those of groups of one or two are not stored
    LongPiece *long_pieces;    // long_places()
    unsigned *present;         // a bit for each id: whether any position holds it
    bool ordered;              // whether the following two exist
    unsigned *range_counts;    // kRanges: number of long pieces that begin in each range
    unsigned *order;           // (kRanges, range_size()): the places of a range's long pieces, in any order

    Groups(unsigned count, int vocabulary, bool with_order)
        : N(count), V(vocabulary), bins(count, vocabulary), ordered(with_order) {}
    char *lay_out(char *workspace);
    // The place in long_pieces of this bin's piece that begins at positions[first]. Long pieces have at least kPiece
    // positions, so the index is unique. The indices of a bin are contiguous, and so are those of a group.
    __device__ unsigned long_place(int first, unsigned bin) const { return first / kPiece + bin; }
    __host__ __device__ unsigned long_places() const { return N / kPiece + bins.count(); }
    // Pieces begin at different positions, so a range has at most as many pieces as positions. A tile is in one range.
    __host__ __device__ unsigned range_size() const {
        return ceil_div(ceil_div(N, (unsigned)kTile), (unsigned)kRanges) * kTile;
    }
};

// First kernel: one block per tile, one thread per position. Equal ids in a warp are merged into one run, so that a
// frequent id costs no more than others. The tile's runs are written bucket after bucket, in order of position within
// each. Also zeroes the counters of later kernels: `counters`, range_counts, and `present` if it is wanted.
inline size_t tile_shared_bytes(const Bins &bins) { return kTileWarps * bins.buckets() * sizeof(int); }

static __global__ void __launch_bounds__(kTile)
    group_tile_kernel(Groups groups, const int *inp, status_word *status, bool mark_present, unsigned *counters,
                      size_t counter_count) {
    start_next_kernel();
    extern __shared__ int shared[];  // (warps, buckets): number of a warp's runs in a bucket, then their first index
    const int buckets = groups.bins.buckets(), tile = blockIdx.x, tiles = gridDim.x;
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const unsigned p = (unsigned)tile * kTile + threadIdx.x;
    const int id = p < groups.N ? inp[p] : -1;
    const bool good = id_in_range(id, groups.V);
    if (!good && p < groups.N) report_bad_id(status, p);
    for (int i = threadIdx.x; i < kTileWarps * buckets; i += kTile) shared[i] = 0;
    for (size_t i = p; i < counter_count; i += (size_t)tiles * kTile) counters[i] = 0;
    const size_t words = mark_present ? ceil_div((unsigned)groups.V, 32u) : 0;
    for (size_t i = p; i < words; i += (size_t)tiles * kTile) groups.present[i] = 0;
    if (groups.ordered && p < kRanges) groups.range_counts[p] = 0;
    __syncthreads();

    const int bucket = good ? groups.bins.bucket_of_id(id) : -1;
    const unsigned below = (1u << lane) - 1;
    const unsigned same_id = __match_any_sync(0xffffffffu, good ? id : -1);
    const unsigned same_bucket = __match_any_sync(0xffffffffu, bucket);
    const bool leader = good && (same_id & below) == 0;
    const unsigned leaders = __ballot_sync(0xffffffffu, leader) & same_bucket;
    // The lower half of a word counts runs, the upper half positions: a tile has at most kTile of each.
    if (good && (same_bucket & below) == 0) {
        shared[warp * buckets + bucket] = __popc(leaders) | __popc(same_bucket) << 16;
    }
    __syncthreads();
    int total = 0, all;
    if ((int)threadIdx.x < buckets) {
#pragma unroll 8
        for (int w = 0; w < kTileWarps; w++) {
            const int count = shared[w * buckets + threadIdx.x];
            shared[w * buckets + threadIdx.x] = total;
            total += count;
        }
    }
    const int before = block_exclusive_sum(total, &all);
    if ((int)threadIdx.x < buckets) {
        groups.tile_parts[(size_t)threadIdx.x * tiles + tile] = {(unsigned short)before, (unsigned short)total,
                                                                 (unsigned short)(before >> 16), 0};
        shared[threadIdx.x] = before;  // warp 0 had zeros here
    }
    __syncthreads();
    if (leader) {
        const int at = (shared[bucket] + (warp > 0 ? shared[warp * buckets + bucket] : 0)) & 0xffff;
        groups.runs[(size_t)tile * kTile + at + __popc(leaders & below)] = {id, p - lane, same_id, 0};
    }
}

// ---- the steps of the bin kernel ----

// A block's shared memory. The index of an id in its bin is its slot in the hash table.
constexpr int kBinWarps = 16;
struct BinTable {
    int counts[kBinWarps][kBinIds];  // number of a warp's positions of each id; then the index of its next one
    int ids[kBinIds];                // the hash table; kFree: no id here
    int length[kBinIds];             // of each id's group
    int begin[kBinIds];              // index of the group's first position in positions
    int place[kBinIds];              // index of the group in short_groups, if it is short
    int lower;                       // number of positions in lower bins
    int full;                        // whether an id found no slot

    static constexpr int kFree = -1, kProbes = 64;

    // Calls probe(slot) for one slot after the other until it returns true, and returns that slot, or -1 after kProbes
    // slots. The step is odd, so no slot is probed twice.
    template <typename Probe>
    __device__ static int search(int id, Probe probe) {
        const unsigned hash = Bins::hash(id), mixed = (hash ^ hash >> 16) * 0x85ebca6bu, step = mixed >> 12 | 1;
        unsigned slot = mixed >> 22;
        for (int i = 0; i < kProbes; i++) {
            slot = (slot + step) % kBinIds;
            if (probe(slot)) return slot;
        }
        return -1;
    }
    __device__ int insert(int id) {
        return search(id, [&](unsigned slot) {
            const int there = atomicCAS(ids + slot, kFree, id);
            return there == kFree || there == id;
        });
    }
    __device__ int find(int id) const {
        return search(id, [&](unsigned slot) { return ids[slot] == id; });
    }
    // Called by all threads of a block. Does not change `lower`.
    __device__ void clear() {
        for (int i = threadIdx.x; i < kBinWarps * kBinIds; i += blockDim.x) (&counts[0][0])[i] = 0;
        for (int i = threadIdx.x; i < kBinIds; i += blockDim.x) ids[i] = kFree;
        if (threadIdx.x == 0) full = 0;
    }
};

// Each warp reads the bucket's runs in its share of the tiles, in order of position, 32 runs at a time. Each lane calls
// take(run), with mask 0 if it has no run. The next 32 runs are loaded before the call. Returns the lane's part of the
// number of positions in lower buckets, in these tiles.
template <typename Take>
__device__ int for_each_run(const Groups &groups, int bucket, int tiles, Take take) {
    constexpr unsigned whole_warp = 0xffffffffu;
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const int stretch = ceil_div(tiles, kBinWarps), begin = min(warp * stretch, tiles);
    const int end = min(begin + stretch, tiles);
    int lower = 0;
#pragma unroll 1
    for (int some = begin; some < end; some += kWarpSize) {
        TilePart part = {0, 0, 0, 0};  // a tile for each lane
        if (some + lane < end) part = groups.tile_parts[(size_t)bucket * tiles + some + lane];
        lower += part.lower;
        int through = part.runs;  // runs in the tiles up to this lane's, inclusive
        for (int offset = 1; offset < kWarpSize; offset *= 2) {
            const int before = __shfl_up_sync(whole_warp, through, offset);
            if (lane >= offset) through += before;
        }
        const int all = __shfl_sync(whole_warp, through, kWarpSize - 1);
        // Run i is at index skip + i.
        const unsigned skip = (unsigned)(some + lane) * kTile + part.first_run - (through - part.runs);
        auto load = [&](int i) {
            int owner = 0;  // the lane whose tile has run i: the first with i < through
            for (int step = kWarpSize / 2; step > 0; step /= 2) {
                if (__shfl_sync(whole_warp, through, owner + step - 1) <= i) owner += step;
            }
            const unsigned at = __shfl_sync(whole_warp, skip, owner) + i;
            Run run = {0, 0, 0, 0};
            if (i < all) run = groups.runs[at];
            return run;
        };
        Run next = load(lane);
#pragma unroll 1
        for (int i = lane; i - lane < all; i += kWarpSize) {
            const Run run = next;
            if (i - lane + kWarpSize < all) next = load(i + kWarpSize);
            take(run);
        }
    }
    return lower;
}

// The sum of the counts of some lanes; a count has 6 bits.
__device__ inline int sum_of_counts(int count, unsigned lanes) {
    int sum = 0;
    for (int bit = 0; bit < 6; bit++) sum += __popc(__ballot_sync(0xffffffffu, count >> bit & 1) & lanes) << bit;
    return sum;
}

// First round: gives each id in the range a slot, and counts each warp's positions of each id. Returns the thread's
// part of the number of positions in lower bins.
__device__ inline int count_ids(BinTable &table, const Groups &groups, int tiles, HashRange range) {
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const unsigned below = (1u << lane) - 1;
    const HashRange bin = groups.bins.range(blockIdx.x);
    int lower = 0;
    const int in_lower_buckets =
        for_each_run(groups, groups.bins.bucket_of_bin(blockIdx.x), tiles, [&](const Run &run) {
            const unsigned hash = Bins::hash(run.id);
            int count = __popc(run.mask);
            if (bin.is_above(hash)) lower += count;
            if (!range.contains(hash)) count = 0;
            const unsigned same = __match_any_sync(0xffffffffu, count > 0 ? run.id : -1);
            const int all = sum_of_counts(count, same);
            if (count > 0 && (same & below) == 0) {
                const int slot = table.insert(run.id);
                if (slot >= 0) {
                    table.counts[warp][slot] += all;
                } else {
                    atomicOr(&table.full, 1);
                }
            }
            __syncwarp();
        });
    return lower + in_lower_buckets;
}

// Between the rounds: sums over warps and ids give the first index of each warp's positions of each id, and the group's
// place in short_groups. One thread per slot. Groups of one position are placed behind the others, so that neighbouring
// groups take equally long. begin, place: the first free index in positions and in short_groups. Returns the numbers of
// positions and of short groups.
struct Listed {
    int positions, short_groups;
};
__device__ inline Listed list_groups(BinTable &table, const Groups &groups, bool mark_present, int begin, int place) {
    const int mine = threadIdx.x;
    int total = 0;
    if (mine < kBinIds) {
#pragma unroll 8
        for (int w = 0; w < kBinWarps; w++) total += table.counts[w][mine];
    }
    const bool single = total == 1, several = total > 1 && pieces_of(total) == 1;
    long long sums;  // positions; groups of one and of several, 10 bits each
    const long long before = block_exclusive_sum((long long)total << 20 | (long long)single << 10 | several, &sums);
    const int several_count = sums & 1023, single_count = sums >> 10 & 1023;
    if (total > 0) {
        const int id = table.ids[mine];
        int at = begin + (int)(before >> 20);
        place += (int)(single ? several_count + (before >> 10 & 1023) : before & 1023);
        table.begin[mine] = at;
        table.length[mine] = total;
        table.place[mine] = place;
        if (single || several) {
            groups.short_groups[place] = {id, total, (unsigned)at, 0};  // of one or two: see place_positions()
        }
#pragma unroll 8
        for (int w = 0; w < kBinWarps; w++) {
            const int count = table.counts[w][mine];
            table.counts[w][mine] = at;
            at += count;
        }
        if (mark_present) atomicOr(&groups.present[id / 32], 1u << id % 32);
    }
    return {(int)(sums >> 20), several_count + single_count};
}

// Second round: writes the positions of the ids in the range into `positions`, or into short_groups for groups of one
// or two. Also lists the pieces of long groups.
__device__ inline void place_positions(BinTable &table, const Groups &groups, int tiles, HashRange range) {
    constexpr unsigned whole_warp = 0xffffffffu;
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const unsigned below = (1u << lane) - 1;
    for_each_run(groups, groups.bins.bucket_of_bin(blockIdx.x), tiles, [&](const Run &run) {
        const int count = range.contains(Bins::hash(run.id)) ? __popc(run.mask) : 0;
        const unsigned same = __match_any_sync(whole_warp, count > 0 ? run.id : -1);
        const int earlier = sum_of_counts(count, same & below), slot = count > 0 ? table.find(run.id) : 0;
        int at = count > 0 ? table.counts[warp][slot] + earlier : 0;
        __syncwarp();
        if (count > 0 && same >> lane == 1) table.counts[warp][slot] = at + count;
        __syncwarp();
        const int total = count > 0 ? table.length[slot] : 0, offset = count > 0 ? at - table.begin[slot] : 0;
        if (count > 0 && total <= 2) {
            ShortGroup &group = groups.short_groups[table.place[slot]];
            if (offset == 0) group.at0 = run.base + __ffs(run.mask) - 1;
            if (offset + count == 2) group.at1 = run.base + 31 - __clz(run.mask);
        }
        const int number = ceil_div(offset, kPiece), pieces = pieces_of(total);
        if (pieces > 1 && number < pieces && number * kPiece < offset + count) {  // a piece begins in this run
            const int piece = at + number * kPiece - offset;
            const unsigned place = groups.long_place(piece, blockIdx.x);
            groups.long_pieces[place] = {run.id, total, piece, number};
            if (groups.ordered) {
                const unsigned r = run.base / groups.range_size();
                groups.order[r * groups.range_size() + atomicAdd(&groups.range_counts[r], 1u)] = place;
            }
        }
        // Each lane writes the positions of a short run one by one; the whole warp writes those of a long run at once.
        constexpr int few = 8;
        if (total > 2 && count < few) {
            for (unsigned rest = run.mask; rest != 0; rest &= rest - 1)
                groups.positions[at++] = run.base + __ffs(rest) - 1;
        }
        for (unsigned rest = __ballot_sync(whole_warp, count >= few); rest != 0; rest &= rest - 1) {
            const int source = __ffs(rest) - 1;
            const unsigned mask = __shfl_sync(whole_warp, run.mask, source);
            const unsigned base = __shfl_sync(whole_warp, run.base, source);
            const int where = __shfl_sync(whole_warp, at, source);
            if (mask >> lane & 1) groups.positions[where + __popc(mask & below)] = base + lane;
        }
    });
}

// Second kernel: one block per bin.
//
//   position      0        1        2        3        4
//   id            7        3        7        9        7
//                 |        |        |        |        |     tile kernel: runs, in order of their bucket
//   runs          9:{3}         7:{0,2,4}        3:{1}
//                 |               |              |          Bins::hash
//   hashes  0 ....9........|......7.......|......3.......|..............| 2^31
//   bins        bin 0           bin 1          bin 2          bin 3          bucket 0: bins 0, 1; bucket 1: bins 2, 3
//                 |               |           |      |
//   ranges       all             all        half   half    a bin with more ids than its table holds: in parts
//                 |               |                  |
//   groups      9:{3}        7:{0,2,4}             3:{1}   in order of the bins; positions ascend within a group
//
// In each range there are two rounds over the runs of the bucket: the first counts each id, the second writes the
// positions. Neither depends on the order in which warps or blocks run. The bin's first index in the arrays is the
// number of positions in lower bins, which is computed from the tiles' counts, so that no block waits for another. If
// the hash table is full, the range is halved until its ids fit.
static __global__ void __launch_bounds__(kBinWarps *kWarpSize)
    group_bin_kernel(Groups groups, int tiles, bool mark_present) {
    start_next_kernel();
    extern __shared__ int shared[];
    BinTable &table = *reinterpret_cast<BinTable *>(shared);
    const unsigned bin = blockIdx.x;
    HashRange range = groups.bins.range(bin);
    const unsigned range_end = range.begin + range.size;
    int list_begin = 0, begin = 0, short_groups = 0;  // begin: index of the range's first position
    if (threadIdx.x == 0) table.lower = 0;
    for (bool first = true; range.begin != range_end; first = false) {
        table.clear();
        __syncthreads();
        if (first) wait_for_previous_kernel();
        const int lower = count_ids(table, groups, tiles, range);
        if (first && lower > 0) atomicAdd(&table.lower, lower);
        __syncthreads();
        if (first) list_begin = begin = table.lower;
        const bool full = table.full != 0;
        __syncthreads();
        if (full) {
            range.size /= 2;
            continue;
        }
        const Listed listed = list_groups(table, groups, mark_present, begin, list_begin + short_groups);
        // Positions with bad ids are in no group; the last bin clears the entries that remain.
        const int end = bin == gridDim.x - 1 ? groups.N : begin + listed.positions;
        for (int i = groups.long_place(begin, bin) + threadIdx.x; i <= (int)groups.long_place(end, bin);
             i += blockDim.x) {
            groups.long_pieces[i] = {0, 0, 0, 0};
        }
        __syncthreads();
        place_positions(table, groups, tiles, range);
        begin += listed.positions;
        short_groups += listed.short_groups;
        range.begin += range.size;
        __syncthreads();
    }
    if (threadIdx.x == 0) groups.short_lists[bin] = {(unsigned)list_begin, (unsigned)short_groups};
}

// ---- the interface ----

// Places the arrays in the workspace one after the other, each at a multiple of 16 bytes. Returns the end of the last.
inline char *Groups::lay_out(char *workspace) {
    const size_t tiles = ceil_div(N, (unsigned)kTile);
    take_array(&runs, &workspace, tiles * kTile);
    take_array(&tile_parts, &workspace, tiles << bins.log2_buckets);
    take_array(&short_lists, &workspace, bins.count());
    take_array(&short_groups, &workspace, N);
    take_array(&positions, &workspace, N);
    take_array(&long_pieces, &workspace, long_places());
    take_array(&present, &workspace, ceil_div((size_t)std::max(V, 0), (size_t)32));
    if (ordered) {
        take_array(&range_counts, &workspace, kRanges);
        take_array(&order, &workspace, (size_t)kRanges * range_size());
    }
    return workspace;
}

// Launches the kernels that fill the arrays of `groups`, for inp (groups.N > 0 ids). Lowers *status to the position of
// the first bad id. mark_present: `present` is wanted too. counters: counter_count counters of the caller, which are
// zeroed here to save a launch. early: the second kernel starts while the first one runs, and the caller's next kernel
// may start while the second one runs (programmatic dependent launch, compute capability 9.0). Returns the first error
// of a launch.
inline cudaError_t group_positions(const Groups &groups, const int *inp, status_word *status, bool mark_present,
                                   unsigned *counters, size_t counter_count, bool early, cudaStream_t stream) {
    const unsigned tiles = ceil_div(groups.N, (unsigned)kTile);
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.stream = stream;
    config.attrs = &attribute;
    config.gridDim = tiles;
    config.blockDim = kTile;
    config.dynamicSmemBytes = tile_shared_bytes(groups.bins);
    const cudaError_t error =
        launch_kernel(config, group_tile_kernel, groups, inp, status, mark_present, counters, counter_count);
    if (error != cudaSuccess) return error;
    config.numAttrs = early ? 1 : 0;
    config.gridDim = groups.bins.count();
    config.blockDim = kBinWarps * kWarpSize;
    config.dynamicSmemBytes = sizeof(BinTable);
    return launch_kernel(config, group_bin_kernel, groups, (int)tiles, mark_present);
}

}  // namespace bookends
