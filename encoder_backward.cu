/*
The gradient of the token + position embedding:   dwte[inp[b,t],:] += dout[b,t,:]    dwpe[t,:] += sum_b dout[b,t,:]

Ids repeat, so a row of dwte collects many rows of dout; how they meet is the whole problem. Atomics let them meet in
memory, in whatever order; the order changes the rounding, one hot id makes everybody wait, and in 16-bit types every
addition rounds. Versions 4 on find out first, on the GPU, which positions hold the same id, and add those up in an
order that depends on nothing else: the same bits each time. The fewest bytes: dout and inp once, each row of dwte that
is asked for and dwpe once each way (once only if they are overwritten: then rows that nobody asks for are zeroed).

version 1  atomics: a thread an element, which it adds with atomics to dwte and dwpe
version 2  no atomics: a thread a column, which loops over all positions
version 3  x128 atomics: a thread 16 bytes, added by one instruction where the hardware has it
version 4  grouped: positions are grouped by id; 16 threads add up a group and write its row once; the same for dwpe
version 5  slices: a slice of the columns at a time: the L2 still holds what dwpe has read when dwte reads it again
version 6  overlap: dwpe begins while the positions are being grouped

Compile:  nvcc -O3 -arch=native encoder_backward.cu -o encoder_backward
Run:      ./encoder_backward           the default: deterministic, best over the measured shapes
          ./encoder_backward 3         version 3 at every block size
          ./encoder_backward all -b 64 --tokens zipf
          ./encoder_backward --help
*/
#include "common.h"
#include "parts/launch.h"

#include <cmath>

namespace bookends {

// ---------------------------------------------------------------------------------------------------------------------
// CPU reference

// Adds to row (C), in double, the rows of dout (N, C) at `count` positions: those that hold one id for a row of dwte,
// those with one t for a row of dwpe. dout is anything that an offset indexes: a pointer to any float type, or values
// made on demand. size (C), unless null, collects the magnitudes: what the rounding errors of a sum are measured by.
template <typename Table>
void encoder_backward_cpu(double *row, double *size, const Table &dout, const int *positions, long long count, int C) {
    for (long long k = 0; k < count; k++) {
        for (long long c = 0; c < C; c++) {
            const double d = (double)dout[positions[k] * (long long)C + c];
            row[c] += d;
            if (size) size[c] += fabs(d);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// how results are stored

// Default: += , rounded to nearest.
struct GradientStore {
    bool overwrite;   // the sums replace what is there, and rows that nobody asks for become zero
    bool stochastic;  // 16-bit results are rounded up or down at random, so that they are right on average
    uint64_t seed;    // of that
};

// 16 random bits for element i, the same whatever the kernel. SplitMix64 (Steele, Lea, Flood 2014), a word for four.
__device__ inline unsigned rounding_bits(uint64_t seed, size_t i) {
    return (unsigned)(mix64(seed + (i / 4 + 1) * 0x9e3779b97f4a7c15ull) >> (i % 4 * 16)) & 0xffff;
}

__device__ inline half round_toward_zero(float x, half) { return __float2half_rz(x); }
__device__ inline __nv_bfloat16 round_toward_zero(float x, __nv_bfloat16) { return __float2bfloat16_rz(x); }

// x rounded to a neighbour in floatX: to the one further from zero with a probability that is the way to it from the
// other one, in steps of 2^-16. What nearest rounding makes an infinity becomes one, so that an overflow still shows.
template <typename floatX>
__device__ floatX round_stochastic(float x, unsigned random) {
    const floatX nearest = (floatX)x, inner = round_toward_zero(x, floatX());
    if ((float)nearest == x || isnan(x) || isinf((float)nearest)) return nearest;
    unsigned short bits;
    memcpy(&bits, &inner, sizeof(bits));
    bits++;
    floatX outer;
    memcpy(&outer, &bits, sizeof(bits));
    const float way = fabsf(x - (float)inner), step = fabsf((float)outer - (float)inner);
    return way / step * 65536.0f > (float)random ? outer : inner;  // step is a power of two, or infinite
}

// ---------------------------------------------------------------------------------------------------------------------
// kernels

// An element a thread, and its row is wherever the id says. Neighbouring threads add to neighbouring addresses, but an
// atomic of 2 bytes is a whole trip to the L2, and on one hot id they queue there. The order of the additions is that
// of arrival, and 16-bit gradients are rounded at each.
template <typename floatX, typename gradX>
__global__ void encoder_backward_kernel1(gradX *dwte, gradX *dwpe, const floatX *dout, const int *inp,
                                         status_word *status, long long N, int T, int C, int V) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= N * C) return;
    const long long bt = i / C, c = i % C, t = bt % T;
    const int id = inp[bt];
    if (!id_in_range(id, V)) {
        if (c == 0) report_bad_id(status, bt);
        return;
    }
    const gradX d = (gradX)(float)dout[i];
    if (dwte) atomicAdd(dwte + (long long)id * C + c, d);
    if (dwpe) atomicAdd(dwpe + t * C + c, d);
}

// The textbook's other end: a thread has a column to itself and walks through all positions, so nobody else adds there.
// No atomics and one order, but C threads are few, and each waits for memory at every step.
template <typename floatX, typename gradX>
__global__ void encoder_backward_kernel2(gradX *dwte, gradX *dwpe, const floatX *dout, const int *inp,
                                         status_word *status, long long N, int T, int C, int V) {
    const long long c = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= C) return;
    for (long long bt = 0; bt < N; bt++) {
        const int id = inp[bt];
        if (!id_in_range(id, V)) {
            if (c == 0) report_bad_id(status, bt);
            continue;
        }
        const float d = (float)dout[bt * C + c];
        const long long to_dwte = (long long)id * C + c, to_dwpe = bt % T * C + c;
        if (dwte) dwte[to_dwte] = (gradX)((float)dwte[to_dwte] + d);
        if (dwpe) dwpe[to_dwpe] = (gradX)((float)dwpe[to_dwpe] + d);
    }
}

// Kernel 1 with 16 bytes of dout a thread: one load, and one or two atomics where kernel 1 needs eight of each.
template <typename floatX, typename gradX>
__global__ void encoder_backward_kernel3(gradX *dwte, gradX *dwpe, const floatX *dout, const int *inp,
                                         status_word *status, long long N, int T, int C, int V) {
    typedef Packed128<floatX> x128;
    const long long i = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * x128::size;
    if (i >= N * C) return;
    const long long bt = i / C, c = i % C, t = bt % T;
    const int id = inp[bt];
    if (!id_in_range(id, V)) {
        if (c == 0) report_bad_id(status, bt);
        return;
    }
    const x128 packed_dout = load128cs(dout + i);
    constexpr int size = x128::size < Packed128<gradX>::size ? x128::size : Packed128<gradX>::size;
    for (int part = 0; part < x128::size; part += size) {
        Packed<gradX, size> d;
        for (int k = 0; k < size; k++) d[k] = (gradX)(float)packed_dout[part + k];
        if (dwte) atomic_add_packed(dwte + (long long)id * C + c + part, d);
        if (dwpe) atomic_add_packed(dwpe + t * C + c + part, d);
    }
}

// ---- grouping the positions by id ----

// Kernel 3 sends N*C elements to the L2 as atomics, twice. If it is known which positions hold an id, their rows of
// dout can be added up in registers: dwte then sees each of its rows once each way, as plain loads and stores, and the
// order is fixed. To know it takes two small kernels over the ids (4 bytes a position, where dout has 2*C), much like a
// radix sort. For the ids 7 3 7 9 7 at the positions 0 to 4:
//
//   tile kernel   equal ids of a warp become runs:  7 at {0,2,4}, 3 at {1}, 9 at {3}; dealt out to bins by their id
//   bin kernel    runs of an id become its group:   3: {1}   7: {0,2,4}   9: {3}
//   kernel 4      a team of 16 lanes takes a group: dwte[7] += dout[0] + dout[2] + dout[4]
//
// A tile is kTile neighbouring positions, a bin up to kBinIds ids; a run is one id's positions in a warp of a tile, a
// group all of its positions. A short group is one team's work; a long one is cut into pieces.

// A group is the positions that hold one id, in ascending order. Groups of 2*kPiece and more are cut, so that one hot id
// is work for many: every piece but the last has kPiece positions, and the last one up to 2*kPiece - 1.
constexpr int kPiece = 32;
static_assert(kPiece >= kWarpSize, "a run, which is a warp's at most, begins one piece at most");
__host__ __device__ inline int pieces_of(int length) { return length < 2 * kPiece ? 1 : length / kPiece; }

// dwpe's sums over b are cut in the same way, in longer pieces: rows of dout that lie T apart are found without a list.
constexpr int kBatchPiece = 64;
__host__ __device__ inline int batch_pieces(int B) { return B < 2 * kBatchPiece ? 1 : B / kBatchPiece; }

// Ids are dealt out to bins, each of which fits into the shared memory of a block: first by their remainder by the
// number of buckets, a power of two, so that neighbouring (often similarly frequent) ids go to different ones; then, in
// vocabularies beyond kMaxBuckets * kBinIds, by ranges of the quotient. There are as many buckets as it takes for a bin
// to have no more than kBinIds ids, and about kBinPositions positions.
constexpr int kBinIds = 512, kBinPositions = 512, kMaxBuckets = 512;
struct Bins {
    int log2_buckets;
    int per_bucket;
    int count;  // per_bucket << log2_buckets

    Bins(unsigned N, int V) : log2_buckets(0) {
        auto bucket_ids = [&] { return ceil_div(V, buckets()); };
        while (buckets() < std::min(V, kMaxBuckets) && (bucket_ids() > kBinIds || N >> log2_buckets > kBinPositions)) {
            log2_buckets++;
        }
        per_bucket = std::max(1, ceil_div(bucket_ids(), kBinIds));
        count = per_bucket << log2_buckets;
    }
    __host__ __device__ int buckets() const { return 1 << log2_buckets; }
};

// Equal ids among 32 neighbouring positions.
struct alignas(16) Run {
    int id;
    unsigned base, mask;  // positions base + k for each bit k
    unsigned unused;
};

// What a tile has for a bucket.
struct alignas(8) TilePart {
    unsigned short first_run, runs;  // among the tile's runs, which lie bucket after bucket
    unsigned short lower;            // how many positions it has in lower buckets
    unsigned short unused;
};

struct Bin {
    unsigned begin;         // where its part of positions and of short_groups begins
    unsigned short_groups;  // how many it has
};

// A group of one piece.
struct alignas(16) ShortGroup {
    int id, length;
    unsigned at0, at1;  // its positions, if they are one or two; else at0 says where in Groups::positions they begin
};

// A piece of a group that is cut.
struct alignas(16) LongPiece {
    int id, length;  // of the whole group; length 0: no piece here
    int first;       // where in Groups::positions the piece begins
    int number;      // which piece of the group it is
};

// What lies in the workspace. A piece of a group that is cut is kPiece long at least: so first / kPiece + bin is a number
// of its own, and those of a bin are a range of their own. It is its place in long_pieces, arrived and partials.
struct Groups {
    Run *runs;                 // (tiles, kTile)
    TilePart *tile_parts;      // (buckets, tiles)
    Bin *bins;                 // Bins::count
    ShortGroup *short_groups;  // N places; a bin's, from its begin on
    unsigned *positions;       // N, group after group, bin after bin; but those of groups of one or two are not stored
    LongPiece *long_pieces;    // long_places
    unsigned *asked;           // for each bin a bit for each of its ids: whether any position holds it
    unsigned *arrived;         // partial_rows x slices, see meet
    float *partials;           // partial_rows x C
};
__host__ __device__ inline unsigned long_places(unsigned N, unsigned bins) { return N / kPiece + bins; }

// Rows of partials: the long pieces', then dwpe's.
inline size_t partial_rows(int B, int T, int bins) {
    return long_places((unsigned)B * T, bins) + (batch_pieces(B) > 1 ? (size_t)T * batch_pieces(B) : 0);
}

// First kernel of the grouping: a block a tile of the positions, a thread a position. Equal ids in a warp become one
// run, so that a hot id is no more work than others; the tile's runs are then written bucket after bucket, in ascending
// order within each.
constexpr int kTile = 1024, kTileWarps = kTile / kWarpSize;
inline size_t tile_shared_bytes(const Bins &bins) { return kTileWarps * bins.buckets() * sizeof(int); }

static __global__ void __launch_bounds__(kTile)
    encoder_backward_tile_kernel(Groups groups, const int *inp, status_word *status, unsigned N, int V, Bins bins,
                                 size_t arrived_count) {
    start_next_kernel();
    extern __shared__ int shared[];  // (warps, buckets): a warp's runs in a bucket, then where they go
    const int buckets = bins.buckets(), tile = blockIdx.x, tiles = gridDim.x;
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const unsigned p = (unsigned)tile * kTile + threadIdx.x;
    const int id = p < N ? inp[p] : -1;
    const bool good = id_in_range(id, V);
    if (!good && p < N) report_bad_id(status, p);
    for (int i = threadIdx.x; i < kTileWarps * buckets; i += kTile) shared[i] = 0;
    for (size_t i = p; i < arrived_count; i += (size_t)tiles * kTile) groups.arrived[i] = 0;
    __syncthreads();

    const int bucket = good ? id & (buckets - 1) : -1;
    const unsigned below = (1u << lane) - 1;
    const unsigned same_id = __match_any_sync(0xffffffffu, good ? id : -1);
    const unsigned same_bucket = __match_any_sync(0xffffffffu, bucket);
    const bool leader = good && (same_id & below) == 0;
    const unsigned leaders = __ballot_sync(0xffffffffu, leader) & same_bucket;
    // Runs in the lower half of a word, positions in the upper one: a tile has at most kTile of each.
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

// Second kernel: a block a bin. It gathers the runs of its ids, tile after tile, and counts each id; sums over the
// warps and the ids then say where each warp's positions of each id go, and a second round puts them there: in
// ascending order within a group, whatever ran first. Where its part of the arrays begins follows from how many
// positions the tiles have in lower buckets, so no block waits for another.
constexpr int kBinWarps = 32;
constexpr size_t bin_shared_bytes = ((kBinWarps + 3) * kBinIds + 1) * sizeof(int);

static __global__ void __launch_bounds__(kBinWarps *kWarpSize)
    encoder_backward_bin_kernel(Groups groups, int N, Bins bins, int tiles) {
    start_next_kernel();
    constexpr unsigned whole_warp = 0xffffffffu;
    extern __shared__ int shared[];
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const unsigned below = (1u << lane) - 1;
    const int bin = blockIdx.x, bucket = bin / bins.per_bucket, range = bin % bins.per_bucket;
    int *counts = shared + warp * kBinIds;       // how many of each id this warp has; then where the next one goes
    int *length = shared + kBinWarps * kBinIds;  // of each id's group
    int *begin = length + kBinIds;               // where it begins in positions
    int *place = begin + kBinIds;                // where it is in short_groups
    int *lower = place + kBinIds;                // how many positions lower bins have
    for (int i = threadIdx.x; i < (kBinWarps + 3) * kBinIds + 1; i += blockDim.x) shared[i] = 0;
    __syncthreads();
    wait_for_previous_kernel();

    // A warp has a stretch of the tiles, and goes through their runs in this bucket in ascending order, 32 at a time.
    // take(count, run, local): count positions of the id that is number `local` in this bin; count 0 if it is in
    // another one, or there is no such run.
    const int stretch = ceil_div(tiles, kBinWarps), first = min(warp * stretch, tiles),
              end = min(first + stretch, tiles);
    int my_lower = 0;  // of the first round
    auto for_each_run = [&](auto take) {
#pragma unroll 1
        for (int some = first; some < end; some += kWarpSize) {
            TilePart part = {0, 0, 0, 0};  // a tile a lane
            if (some + lane < end) part = groups.tile_parts[(size_t)bucket * tiles + some + lane];
            my_lower += part.lower;
            int through = part.runs;  // runs up to and with this lane's tile
            for (int offset = 1; offset < kWarpSize; offset *= 2) {
                const int before = __shfl_up_sync(whole_warp, through, offset);
                if (lane >= offset) through += before;
            }
            const int all = __shfl_sync(whole_warp, through, kWarpSize - 1);
            // run i lies at skip + i
            const unsigned skip = (unsigned)(some + lane) * kTile + part.first_run - (through - part.runs);
#pragma unroll 1
            for (int i = lane; i - lane < all; i += kWarpSize) {
                int owner = 0;  // the lane whose tile has run i: the first with i < through
                for (int step = kWarpSize / 2; step > 0; step /= 2) {
                    if (__shfl_sync(whole_warp, through, owner + step - 1) <= i) owner += step;
                }
                const unsigned at = __shfl_sync(whole_warp, skip, owner) + i;
                Run run = {0, 0, 0, 0};
                if (i < all) run = groups.runs[at];
                const int quotient = run.id >> bins.log2_buckets, count = __popc(run.mask);
                if (quotient < range * kBinIds) my_lower += count;
                take(quotient / kBinIds == range ? count : 0, run, quotient % kBinIds);
            }
        }
    };
    // The sum of the counts of some lanes; a count has 6 bits.
    auto sum_of_counts = [&](int count, unsigned lanes) {
        int sum = 0;
        for (int bit = 0; bit < 6; bit++) sum += __popc(__ballot_sync(whole_warp, count >> bit & 1) & lanes) << bit;
        return sum;
    };
    for_each_run([&](int count, const Run &, int local) {
        const unsigned same = __match_any_sync(whole_warp, count > 0 ? local : -1);
        const int all = sum_of_counts(count, same);
        if (count > 0 && (same & below) == 0) counts[local] += all;
        __syncwarp();
    });
    if (my_lower > 0) atomicAdd(lower, my_lower);
    __syncthreads();

    // A thread for each id: where its positions go, and its place among the short groups; those of one position come
    // behind the others, so that neighbours have as much to do.
    const int mine = threadIdx.x;
    int total = 0;
    if (mine < kBinIds) {
#pragma unroll 8
        for (int w = 0; w < kBinWarps; w++) total += shared[w * kBinIds + mine];
    }
    const bool single = total == 1, several = total > 1 && pieces_of(total) == 1;
    long long sums;  // positions; groups of one and of several, 10 bits each
    const long long before = block_exclusive_sum((long long)total << 20 | (long long)single << 10 | several, &sums);
    const int several_count = sums & 1023, single_count = sums >> 10 & 1023, list_begin = *lower;
    if (mine < kBinIds) {
        int at = list_begin + (int)(before >> 20);
        begin[mine] = at;
        length[mine] = total;
        place[mine] = list_begin + (int)(single ? several_count + (before >> 10 & 1023) : before & 1023);
        if (single || several) {
            ShortGroup &group = groups.short_groups[place[mine]];
            group.id = (range * kBinIds + mine) << bins.log2_buckets | bucket;
            group.length = total;
            if (total > 2) group.at0 = at;
        }
#pragma unroll 8
        for (int w = 0; w < kBinWarps; w++) {
            const int count = shared[w * kBinIds + mine];
            shared[w * kBinIds + mine] = at;
            at += count;
        }
        const unsigned asked = __ballot_sync(whole_warp, total > 0);
        if (lane == 0) groups.asked[bin * (kBinIds / kWarpSize) + warp] = asked;
    }
    if (mine == 0) groups.bins[bin] = {(unsigned)list_begin, (unsigned)(several_count + single_count)};
    // Bad ids are in no list: up to where the last one could end, there are no pieces.
    const int list_end = bin == (int)gridDim.x - 1 ? N : list_begin + (int)(sums >> 20);
    for (int i = list_begin / kPiece + bin + threadIdx.x; i <= list_end / kPiece + bin; i += blockDim.x) {
        groups.long_pieces[i] = {0, 0, 0, 0};
    }
    __syncthreads();

    for_each_run([&](int count, const Run &run, int local) {
        const unsigned same = __match_any_sync(whole_warp, count > 0 ? local : -1);
        const int earlier = sum_of_counts(count, same & below);
        int at = count > 0 ? counts[local] + earlier : 0;
        __syncwarp();
        if (count > 0 && same >> lane == 1) counts[local] = at + count;
        __syncwarp();
        const int total = count > 0 ? length[local] : 0, offset = count > 0 ? at - begin[local] : 0;
        if (count > 0 && total <= 2) {
            ShortGroup &group = groups.short_groups[place[local]];
            if (offset == 0) group.at0 = run.base + __ffs(run.mask) - 1;
            if (offset + count == 2) group.at1 = run.base + 31 - __clz(run.mask);
        }
        const int number = ceil_div(offset, kPiece), pieces = pieces_of(total);
        if (pieces > 1 && number < pieces && number * kPiece < offset + count) {  // a piece begins in this run
            const int piece = at + number * kPiece - offset;
            groups.long_pieces[piece / kPiece + bin] = {run.id, total, piece, number};
        }
        // A run's positions: the few of a short run one after the other, those of a long one all at once.
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

// ---- adding up ----

// `width` neighbouring elements of a row, in accesses of at most 16 bytes. Rows of dout and partial sums are loaded
// from the L2, past L1: each is read once here, and what other blocks have stored meanwhile must be seen. Rows of a
// gradient are done with when they have been here once, which the streaming accesses tell the L2: it should hold dout.
template <typename T, int width>
struct Columns {
    static constexpr int part = width < Packed128<T>::size ? width : Packed128<T>::size;
    Packed<T, part> parts[width / part];

    __device__ void load(const T *address) {
#pragma unroll
        for (int i = 0; i < width / part; i++) parts[i] = load_packed_cg<Packed<T, part>>(address + i * part);
    }
    __device__ void store(T *address) const {
#pragma unroll
        for (int i = 0; i < width / part; i++) store_packed(address + i * part, parts[i]);
    }
    __device__ void load_gradient(const T *address) {
#pragma unroll
        for (int i = 0; i < width / part; i++) parts[i] = load_packed_cs<Packed<T, part>>(address + i * part);
    }
    __device__ void store_gradient(T *address) const {
#pragma unroll
        for (int i = 0; i < width / part; i++) store_packed_cs(address + i * part, parts[i]);
    }
    __device__ T &operator[](int k) { return parts[k / part][k % part]; }
};

// sum += row(first) + ... + row(count-1), in that order; at(k) is where the columns of row(k) are, asked for in that
// order too. in_flight rows are on their way at once; of the rest half as many, and so on.
template <typename T, int in_flight, int width, typename At>
__device__ void add_rows(float (&sum)[width], int first, int count, At at) {
#pragma unroll 1
    for (; count - first >= in_flight; first += in_flight) {
        Columns<T, width> row[in_flight];
#pragma unroll
        for (int i = 0; i < in_flight; i++) row[i].load(at(first + i));
#pragma unroll
        for (int i = 0; i < in_flight; i++) {
#pragma unroll
            for (int k = 0; k < width; k++) sum[k] += (float)row[i][k];
        }
    }
    if constexpr (in_flight > 1) add_rows<T, in_flight / 2>(sum, first, count, at);
}

// dwte or dwpe.
template <typename gradX>
struct Gradient {
    gradX *data;
    bool accumulate;
    uint64_t seed;  // of stochastic rounding
};

// Zeros, if the gradient is overwritten.
template <typename gradX, int width>
__device__ void load_old(Columns<gradX, width> &old, const Gradient<gradX> &gradient, size_t at) {
    if (gradient.accumulate) {
        old.load_gradient(gradient.data + at);
    } else {
#pragma unroll
        for (int k = 0; k < width; k++) old[k] = (gradX)0.0f;
    }
}

// old + sum, in float, rounded once.
template <bool stochastic, typename gradX, int width>
__device__ void store_new(const Gradient<gradX> &gradient, size_t at, const float (&sum)[width],
                          Columns<gradX, width> old) {
#pragma unroll
    for (int k = 0; k < width; k++) {
        const float value = (float)old[k] + sum[k];
        if constexpr (stochastic) {
            old[k] = round_stochastic<gradX>(value, rounding_bits(gradient.seed, at + k));
        } else {
            old[k] = (gradX)value;
        }
    }
    old.store_gradient(gradient.data + at);
}

// A team of 16 lanes adds up rows for one slice of the columns: in bf16, 16 bytes of 16 lanes are 256 bytes of a row.
constexpr int kLanes = 16;
__device__ inline unsigned team_mask() { return 0xffffu << (threadIdx.y % 2 * kLanes); }

// Counts one more arrival; true for the last of `expected`. What the others stored before they arrived is then visible
// to the whole team: by way of lane 0, whose fences speak for the lanes that it has met.
__device__ inline bool arrive_last(unsigned *counter, unsigned expected) {
    unsigned before = 0;
    __syncwarp(team_mask());
    if (threadIdx.x == 0) {
        __threadfence();
        before = atomicAdd(counter, 1);
        __threadfence();
    }
    before = __shfl_sync(team_mask(), before, 0, kLanes);
    __syncwarp(team_mask());
    return before == expected - 1;
}

// Whose sum a team has.
struct Piece {
    unsigned row;        // of the gradient
    int number, pieces;  // which piece of how many
    size_t place;        // row of the partial sums for the group's first piece; the others follow
};

// The pieces of a long group meet in a tree: of every kFan neighbours, the last to arrive adds all their sums in order,
// stores that in the first one's place, and goes on to the level above; from the last level it goes to the gradient. So
// nobody waits, no further kernel is needed, and the order of the additions depends on the length of the group alone.
// c: the thread's first column; unless `active`, it only goes along.
constexpr int kFan = 16;

template <bool stochastic, typename gradX, int width>
__device__ void meet(float (&sum)[width], Gradient<gradX> gradient, Piece piece, const Groups &groups, unsigned slice,
                     unsigned slices, size_t C, unsigned c, bool active) {
    float *const partials = groups.partials + c;
    size_t stride = 1, mine = piece.place + piece.number;  // stride: between the places of neighbours on a level
#pragma unroll 1
    for (int level = 0;; level++) {
        Columns<float, width> partial;
#pragma unroll
        for (int k = 0; k < width; k++) partial[k] = sum[k];
        if (active) partial.store(partials + mine * C);
        // A node of one child has its sum already; the others span more places than there are levels: one to count in
        // for each level.
        const int first = piece.number / kFan * kFan, children = min(kFan, piece.pieces - first);
        const size_t node = piece.place + first * stride;
        if (children > 1) {
            if (!arrive_last(&groups.arrived[(node + level) * slices + slice], children)) return;
#pragma unroll
            for (int k = 0; k < width; k++) sum[k] = 0.0f;
            add_rows<float, 4>(sum, 0, children, [&](int k) { return partials + (node + k * stride) * C; });
        }
        if (piece.pieces <= kFan) break;
        mine = node;
        piece.number = first / kFan;
        piece.pieces = ceil_div(piece.pieces, kFan);
        stride *= kFan;
    }
    if (!active) return;
    Columns<gradX, width> old;
    load_old(old, gradient, piece.row * C + c);
    store_new<stochastic>(gradient, piece.row * C + c, sum, old);
}

// Who does what: of the blocks for one slice, the first are dwpe's, then come the pieces of long groups, the short
// groups, and the zeros for rows that nobody asked for.
struct Blocks {
    unsigned dwpe, long_pieces, short_groups, zeros;
    bool slice_by_slice;  // else all slices of a block's work are neighbours
};
constexpr int kPositionsPerTeam = 16;  // of the short groups, about

// All that is left once the positions are grouped. A team adds up the rows of a piece and stores the sum, or lets it
// meet those of the group's other pieces; a team of the short groups goes on to the next one, whose entry in the list
// it has loaded before.
//
// Slice by slice: blocks start in order of x, then y, then z (nothing promises it, and no result depends on it), so all
// work on one slice of the columns is done before the next begins. A slice of dout is small enough for the L2: what
// dwpe's blocks have read in long runs, dwte's read again from there, in whatever order the ids want. dwpe needs no
// groups, so its first two slices go ahead.
template <typename floatX, typename gradX, int width, bool stochastic>
__global__ void __launch_bounds__(1024)
    encoder_backward_kernel4(Gradient<gradX> dwte, Gradient<gradX> dwpe, const floatX *dout, const int *inp,
                             Groups groups, status_word *status, int B, int T, unsigned C, int V, Blocks blocks,
                             Bins bins) {
    const unsigned team = threadIdx.y, teams = blockDim.y, N = (unsigned)B * T,
                   slices = ceil_div(C, (unsigned)(kLanes * width));
    const unsigned yz = blockIdx.z * gridDim.y + blockIdx.y;
    unsigned x = blocks.slice_by_slice ? blockIdx.x : yz, s = blocks.slice_by_slice ? yz : blockIdx.x;
    const bool for_dwpe = x < blocks.dwpe;
    if (blocks.slice_by_slice) {  // dwpe 0; dwpe 1, dwte 0; dwte 1; dwpe 2, dwte 2; dwpe 3, dwte 3; ...
        if (for_dwpe && s == 2) return;
        if (!for_dwpe || s > 2) s--;
    }
    if (s >= slices) return;
    const unsigned column = (s * kLanes + threadIdx.x) * width;
    const bool active = column < C;  // the others read along in the slice's first columns
    const unsigned c = active ? column : s * kLanes * width;
    dout += c;

    Piece piece;
    float sum[width] = {};
    if (for_dwpe) {
        const unsigned i = x * teams + team, t = i % T, number = i / T, pieces = batch_pieces(B);
        if (number >= pieces) return;
        if (pieces > 1) wait_for_previous_kernel();  // it has waited for the tile kernel, which zeroes the counters
        piece = {t, (int)number, (int)pieces, long_places(N, bins.count) + (size_t)t * pieces};
        const unsigned b = number * kBatchPiece, count = number == pieces - 1 ? B - b : kBatchPiece;
        Columns<gradX, width> old;
        if (pieces == 1) load_old(old, dwpe, (size_t)t * C + c);
        auto good = [&](unsigned k) { return id_in_range(inp[(size_t)(b + k) * T + t], V); };
        bool bad = false;
#pragma unroll 4
        for (unsigned k = threadIdx.x; k < count; k += kLanes) bad = bad || !good(k);
        const floatX *next = dout + ((size_t)b * T + t) * C;
        auto next_row = [&](int) {
            const floatX *row = next;
            next += (size_t)T * C;
            return row;
        };
        if (!__any_sync(team_mask(), bad)) {
            add_rows<floatX, 8>(sum, 0, count, next_row);
        } else {
#pragma unroll 1
            for (unsigned k = 0; k < count; k++) {
                if (good(k)) {
                    add_rows<floatX, 1>(sum, k, k + 1, next_row);
                } else {
                    next_row(k);
                    if (s == 0 && threadIdx.x == 0) report_bad_id(status, (long long)(b + k) * T + t);
                }
            }
        }
        if (pieces == 1) {
            if (active) store_new<stochastic>(dwpe, (size_t)t * C + c, sum, old);
            return;
        }
    } else {
        x -= blocks.dwpe;
        wait_for_previous_kernel();
        if (x < blocks.long_pieces) {
            const unsigned i = x * teams + team;
            if (i >= long_places(N, bins.count)) return;
            const LongPiece mine = groups.long_pieces[i];
            if (mine.length == 0) return;
            const int pieces = pieces_of(mine.length);
            const int count = mine.number == pieces - 1 ? mine.length - mine.number * kPiece : kPiece;
            piece = {(unsigned)mine.id, mine.number, pieces, i - mine.number};
            const unsigned *positions = groups.positions + mine.first;
            add_rows<floatX, 8>(sum, 0, count, [&](int k) { return dout + (size_t)positions[k] * C; });
        } else if ((x -= blocks.long_pieces) < blocks.short_groups) {
            const Bin bin = groups.bins[x % bins.count];
            const ShortGroup *list = groups.short_groups + bin.begin;
            const unsigned stride = blocks.short_groups / bins.count * teams;
            unsigned i = x / bins.count * teams + team;
            if (i >= bin.short_groups) return;
            ShortGroup next = list[i];
#pragma unroll 1
            do {
                const ShortGroup group = next;
                i += stride;
                if (i < bin.short_groups) next = list[i];
                const size_t at = (size_t)group.id * C + c;
                Columns<gradX, width> old;
                load_old(old, dwte, at);
#pragma unroll
                for (int k = 0; k < width; k++) sum[k] = 0.0f;
                add_rows<floatX, 4>(sum, 0, group.length, [&](int k) {
                    const unsigned p = group.length > 2 ? groups.positions[group.at0 + k]
                                       : k == 0         ? group.at0
                                                        : group.at1;
                    return dout + (size_t)p * C;
                });
                if (active) store_new<stochastic>(dwte, at, sum, old);
            } while (i < bin.short_groups);
            return;
        } else {
            if ((x -= blocks.short_groups) >= blocks.zeros) return;  // a grid may be larger than its work
            const unsigned id = x * teams + team;
            if (id >= (unsigned)V || !active) return;
            const unsigned quotient = id >> bins.log2_buckets;
            const unsigned bin = (id & (bins.buckets() - 1)) * bins.per_bucket + quotient / kBinIds;
            const unsigned word = groups.asked[(bin * kBinIds + quotient % kBinIds) / kWarpSize];
            if (word >> (quotient % kWarpSize) & 1) return;
            Columns<gradX, width> zeros;
#pragma unroll
            for (int k = 0; k < width; k++) zeros[k] = (gradX)0.0f;
            zeros.store_gradient(dwte.data + ((size_t)id * C + c));
            return;
        }
    }
    // Member by member: of a choice between two structs, the compiler would make copies in local memory.
    const Gradient<gradX> gradient = {for_dwpe ? dwpe.data : dwte.data, dwte.accumulate,
                                      for_dwpe ? dwpe.seed : dwte.seed};
    meet<stochastic>(sum, gradient, piece, groups, s, slices, C, c, active);
}

// ---------------------------------------------------------------------------------------------------------------------
// launchers

// Every launcher:  dwte (V, C) and dwpe (T, C), either may be null: it is not wanted; dout (B, T, C); inp (B, T) int32;
// row-major, device memory, aligned to their element only, none overlapping another. status: one status word that the
// caller set to kStatusOk, or null. A position with an id outside 0..V-1 adds nothing, and status says which came
// first. workspace: encoder_backward_workspace_bytes() of device memory, whatever it holds and at any alignment;
// versions 1 to 3 need none. B*T is at most 2^31-1. block_size: a multiple of 32 up to 1024. Nothing is allocated or
// synchronised. Without positions there is no work; overwriting then zeroes. Where neither gradient is
// wanted, nothing is done and no id is looked at. Version 3 falls back on version 1.
//
// Returns, before anything is launched, cudaErrorInvalidValue for too many positions or another block size, and, of
// versions 1 to 3, cudaErrorNotSupported for stochastic rounding to 16 bits. Else the first error of a launch or a
// memset. A pending CUDA error stays pending.
//
// Versions 4 on round once, from a float sum, and give the same bits each time. Versions 1 to 3 round at each addition;
// the atomics of 1 and 3 do that in any order, and take subnormal floats for zeros.

template <typename floatX, typename gradX>
using EncoderBackward = cudaError_t (*)(gradX *dwte, gradX *dwpe, const floatX *dout, const int *inp,
                                        status_word *status, void *workspace, int B, int T, int C, int V,
                                        GradientStore store, int block_size, cudaStream_t stream);

// The calls that no version can serve.
inline cudaError_t encoder_backward_refusal(int B, int T, int block_size) {
    return valid_block_size(block_size) && (long long)B * T <= INT32_MAX ? cudaSuccess : cudaErrorInvalidValue;
}

// What the gradients are before anything is added: zeros where they are overwritten.
template <typename gradX>
cudaError_t encoder_backward_zero(gradX *dwte, gradX *dwpe, int T, int C, int V, GradientStore store,
                                  cudaStream_t stream) {
    cudaError_t error = cudaSuccess;
    if (store.overwrite && dwte) error = cudaMemsetAsync(dwte, 0, (size_t)V * C * sizeof(gradX), stream);
    if (store.overwrite && dwpe && error == cudaSuccess) {
        error = cudaMemsetAsync(dwpe, 0, (size_t)T * C * sizeof(gradX), stream);
    }
    return error;
}

// How versions 1 to 3 begin.
template <typename gradX>
cudaError_t encoder_backward_begin(gradX *dwte, gradX *dwpe, int B, int T, int C, int V, GradientStore store,
                                   int block_size, cudaStream_t stream) {
    const cudaError_t error = encoder_backward_refusal(B, T, block_size);
    if (error != cudaSuccess) return error;
    if (store.stochastic && sizeof(gradX) == 2) return cudaErrorNotSupported;
    return encoder_backward_zero(dwte, dwpe, T, C, V, store, stream);
}

template <typename floatX, typename gradX>
cudaError_t encoder_backward1(gradX *dwte, gradX *dwpe, const floatX *dout, const int *inp, status_word *status,
                              void * /*workspace*/, int B, int T, int C, int V, GradientStore store, int block_size,
                              cudaStream_t stream) {
    const cudaError_t error = encoder_backward_begin(dwte, dwpe, B, T, C, V, store, block_size, stream);
    const long long N = (long long)B * T;
    if (error != cudaSuccess || N * C == 0 || (!dwte && !dwpe)) return error;
    const unsigned grid_size = grid_blocks(N * C, &block_size);
    return launch_kernel(encoder_backward_kernel1<floatX, gradX>, grid_size, block_size, 0, stream, dwte, dwpe, dout,
                         inp, status, N, T, C, V);
}

template <typename floatX, typename gradX>
cudaError_t encoder_backward2(gradX *dwte, gradX *dwpe, const floatX *dout, const int *inp, status_word *status,
                              void * /*workspace*/, int B, int T, int C, int V, GradientStore store, int block_size,
                              cudaStream_t stream) {
    const cudaError_t error = encoder_backward_begin(dwte, dwpe, B, T, C, V, store, block_size, stream);
    const long long N = (long long)B * T;
    if (error != cudaSuccess || N * C == 0 || (!dwte && !dwpe)) return error;
    const unsigned grid_size = grid_blocks(C, &block_size);
    return launch_kernel(encoder_backward_kernel2<floatX, gradX>, grid_size, block_size, 0, stream, dwte, dwpe, dout,
                         inp, status, N, T, C, V);
}

// Rows that 16 bytes don't divide, or that start elsewhere, go to version 1.
template <typename floatX, typename gradX>
cudaError_t encoder_backward3(gradX *dwte, gradX *dwpe, const floatX *dout, const int *inp, status_word *status,
                              void *workspace, int B, int T, int C, int V, GradientStore store, int block_size,
                              cudaStream_t stream) {
    const int x128_size = Packed128<floatX>::size;
    const int grad_size = Packed128<gradX>::size;
    if (vector_width(x128_size, C, dout) < x128_size || vector_width(grad_size, C, dwte, dwpe) < grad_size) {
        return encoder_backward1(dwte, dwpe, dout, inp, status, workspace, B, T, C, V, store, block_size, stream);
    }
    const cudaError_t error = encoder_backward_begin(dwte, dwpe, B, T, C, V, store, block_size, stream);
    const long long N = (long long)B * T;
    if (error != cudaSuccess || N * C == 0 || (!dwte && !dwpe)) return error;
    const unsigned grid_size = grid_blocks(N * C / x128_size, &block_size);
    return launch_kernel(encoder_backward_kernel3<floatX, gradX>, grid_size, block_size, 0, stream, dwte, dwpe, dout,
                         inp, status, N, T, C, V);
}

// The arrays of Groups, one after the other, each at a multiple of 16 bytes. Returns what lies behind the last.
inline char *lay_out_groups(Groups *groups, char *workspace, int B, int T, int C, int V) {
    auto take = [&](auto **array, size_t count) {
        workspace = (char *)(((uintptr_t)workspace + 15) / 16 * 16);
        *array = (std::remove_reference_t<decltype(*array)>)workspace;
        workspace += count * sizeof(**array);
    };
    const Bins bins((unsigned)B * T, V);
    const size_t N = (size_t)B * T, rows = partial_rows(B, T, bins.count), tiles = ceil_div(N, (size_t)kTile);
    take(&groups->runs, tiles * kTile);
    take(&groups->tile_parts, tiles << bins.log2_buckets);
    take(&groups->bins, bins.count);
    take(&groups->short_groups, N);
    take(&groups->positions, N);
    take(&groups->long_pieces, long_places(N, bins.count));
    take(&groups->asked, (size_t)bins.count * (kBinIds / kWarpSize));
    take(&groups->arrived, rows * ceil_div(C, kLanes));  // a slice has kLanes columns at least
    take(&groups->partials, rows * C);
    return workspace;
}

// Bytes of workspace that versions 4 on need, at any alignment.
inline size_t encoder_backward_workspace_bytes(int B, int T, int C, int V) {
    Groups groups;
    if ((long long)B * T * C == 0) return 0;
    char *const begin = (char *)16;
    return lay_out_groups(&groups, begin, B, T, C, V) - begin + 15;
}

// Groups the positions, then adds up, 16 bytes of dout a lane, or an element where rows are not so aligned. overlap:
// each kernel starts as soon as the one before it has, and waits where it needs it (programmatic dependent launch,
// compute capability 9.0; without it, this is the same as without overlap).
template <typename floatX, typename gradX, int width = Packed128<floatX>::size>
cudaError_t encoder_backward_grouped(gradX *dwte, gradX *dwpe, const floatX *dout, const int *inp, status_word *status,
                                     void *workspace, int B, int T, int C, int V, GradientStore store,
                                     bool slice_by_slice, bool overlap, int block_size, cudaStream_t stream) {
    if constexpr (width > 1) {
        const int grad_width = std::min(width, Packed128<gradX>::size);
        if (vector_width(width, C, dout) < width || vector_width(grad_width, C, dwte, dwpe) < grad_width) {
            return encoder_backward_grouped<floatX, gradX, 1>(dwte, dwpe, dout, inp, status, workspace, B, T, C, V,
                                                              store, slice_by_slice, overlap, block_size, stream);
        }
    }
    cudaError_t error = encoder_backward_refusal(B, T, block_size);
    if (error != cudaSuccess) return error;
    const unsigned N = (unsigned)B * T;
    if (N == 0 || C == 0 || (!dwte && !dwpe)) return encoder_backward_zero(dwte, dwpe, T, C, V, store, stream);
    Groups groups;
    lay_out_groups(&groups, (char *)workspace, B, T, C, V);
    const Bins bins(N, V);
    const unsigned slices = ceil_div(C, kLanes * width), tiles = ceil_div(N, (unsigned)kTile);
    const size_t arrived_count = partial_rows(B, T, bins.count) * slices;

    cudaLaunchAttribute early;
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.stream = stream;
    config.attrs = &early;
    if (dwte) {
        KernelFacts facts;
        error = kernel_facts(&facts, encoder_backward_bin_kernel);
        if (error != cudaSuccess) return error;
        config.gridDim = tiles;
        config.blockDim = kTile;
        config.dynamicSmemBytes = tile_shared_bytes(bins);
        error = launch_kernel(config, encoder_backward_tile_kernel, groups, inp, status, N, V, bins, arrived_count);
        if (error != cudaSuccess) return error;

        config.numAttrs = overlap && facts.sm_90_code ? 1 : 0;  // for this kernel and the next
        config.gridDim = bins.count;
        config.blockDim = kBinWarps * kWarpSize;
        config.dynamicSmemBytes = bin_shared_bytes;
        error = launch_kernel(config, encoder_backward_bin_kernel, groups, (int)N, bins, (int)tiles);
    } else if (batch_pieces(B) > 1) {
        error = cudaMemsetAsync(groups.arrived, 0, arrived_count * sizeof(unsigned), stream);
    }
    if (error != cudaSuccess) return error;

    const long long most_work = (long long)T * batch_pieces(B) + long_places(N, bins.count) + N + V;
    if (most_work * kLanes / block_size > INT32_MAX / 2) block_size = 1024;  // a grid holds 2^31-1 blocks
    const unsigned teams = block_size / kLanes;
    auto blocks_for = [&](unsigned work) { return ceil_div(work, teams); };
    Blocks blocks = {};
    blocks.slice_by_slice = slice_by_slice;
    if (dwpe) blocks.dwpe = blocks_for(T * batch_pieces(B));
    if (dwte) {
        blocks.long_pieces = blocks_for(long_places(N, bins.count));
        blocks.short_groups = blocks_for(N / bins.count / kPositionsPerTeam + 1) * bins.count;
        if (store.overwrite) blocks.zeros = blocks_for(V);
    }
    const unsigned x = blocks.dwpe + blocks.long_pieces + blocks.short_groups + blocks.zeros;
    const unsigned y = slice_by_slice ? slices + 1 : x, grid_y = std::min(y, 65535u);
    config.gridDim = dim3(slice_by_slice ? x : slices, grid_y, ceil_div(y, grid_y));
    config.blockDim = dim3(kLanes, teams);
    config.dynamicSmemBytes = 0;
    const Gradient<gradX> to_dwte = {dwte, !store.overwrite, mix64(store.seed)};
    const Gradient<gradX> to_dwpe = {dwpe, !store.overwrite, mix64(store.seed + 0x6a09e667f3bcc909ull)};
    auto launch = [&](auto kernel) {
        return launch_kernel(config, kernel, to_dwte, to_dwpe, dout, inp, groups, status, B, T, (unsigned)C, V, blocks,
                             bins);
    };
    if constexpr (sizeof(gradX) == 2) {
        if (store.stochastic) return launch(encoder_backward_kernel4<floatX, gradX, width, true>);
    }
    return launch(encoder_backward_kernel4<floatX, gradX, width, false>);
}

// All slices of a row are neighbours.
template <typename floatX, typename gradX>
cudaError_t encoder_backward4(gradX *dwte, gradX *dwpe, const floatX *dout, const int *inp, status_word *status,
                              void *workspace, int B, int T, int C, int V, GradientStore store, int block_size,
                              cudaStream_t stream) {
    return encoder_backward_grouped(dwte, dwpe, dout, inp, status, workspace, B, T, C, V, store, false, false,
                                    block_size, stream);
}

// Slices of 256 bytes (of dout, in 16-bit types). Nsight Compute, on an H200 at B = 64, T = 1024, C = 768: with uniform
// ids DRAM reads 170 MB, where dout and the rows of dwte are 157; without slices it reads dout twice.
//
// What it took, and what did not help:
// - Few long-lived teams: with 4 positions a team instead of 16, it is the starting of blocks that takes the time. But
//   few slices at once: so the list of short groups is walked through by teams, and its next entry is loaded early.
// - Groups of one position behind the others: the two teams of a warp wait for each other where their loops differ.
// - Streaming accesses to the gradients only: on dout too they make dwte's second look at it a miss.
// - A first version of the grouping had every bin read all ids, to save the tile kernel and its launch: the
//   instructions that look at an id cost more than that, and one hot id kept one block busy for 30 us. Hence tiles and
//   runs.
// - Rows of dout through shared memory with cp.async, any number on their way: twice as slow, since each row then
//   passes a loop of its own with its own bookkeeping. A warp a group with 8 bytes a lane: no two teams that wait for
//   each other, but twice the instructions. 32 lanes of 16 bytes: a slice is 512 bytes then, and dout's outgrows the
//   L2.
// What is left: 6 of 16 warps a scheduler, waiting for L2 and DRAM, both of which are half to three quarters busy.
template <typename floatX, typename gradX>
cudaError_t encoder_backward5(gradX *dwte, gradX *dwpe, const floatX *dout, const int *inp, status_word *status,
                              void *workspace, int B, int T, int C, int V, GradientStore store, int block_size,
                              cudaStream_t stream) {
    return encoder_backward_grouped(dwte, dwpe, dout, inp, status, workspace, B, T, C, V, store, true, false,
                                    block_size, stream);
}

// The groups are ready after some 12 us, and until then most of the GPU has nothing to do: dwpe's first two slices fill
// that time.
template <typename floatX, typename gradX>
cudaError_t encoder_backward6(gradX *dwte, gradX *dwpe, const floatX *dout, const int *inp, status_word *status,
                              void *workspace, int B, int T, int C, int V, GradientStore store, int block_size,
                              cudaStream_t stream) {
    return encoder_backward_grouped(dwte, dwpe, dout, inp, status, workspace, B, T, C, V, store, true, true, block_size,
                                    stream);
}

template <typename floatX, typename gradX>
constexpr Version<EncoderBackward<floatX, gradX>> encoder_backward_versions[] = {
    {1, "atomics", "a thread an element, added with atomics", encoder_backward1<floatX, gradX>, 256, kNotReproducible},
    {2, "no atomics", "a thread a column, which loops over all positions", encoder_backward2<floatX, gradX>, 32},
    {3, "x128 atomics", "a thread 16 bytes", encoder_backward3<floatX, gradX>, 256, kNotReproducible},
    {4, "grouped", "positions grouped by id; a group's rows are added up and stored once",
     encoder_backward4<floatX, gradX>, 256},
    {5, "slices", "a slice of the columns at a time, so that dout is read from DRAM once",
     encoder_backward5<floatX, gradX>, 256},
    {6, "overlap", "dwpe begins while the positions are being grouped", encoder_backward6<floatX, gradX>, 256},
};

}  // namespace bookends

// ---------------------------------------------------------------------------------------------------------------------
#ifndef BOOKENDS_NO_MAIN
#include <memory>

#include "dev/harness.h"

namespace bookends {

template <typename floatX, typename gradX>
void encoder_backward_race(Harness &h, GradientStore store) {
    const int B = h.dim('b'), T = h.dim('t'), C = h.dim('c'), V = h.dim('v');
    const long long N = (long long)B * T;
    if (N > INT32_MAX) h.refuse(EXIT_BAD_INPUT, "B*T: %lld positions are more than %d (-b, -t)", N, INT32_MAX);
    const int *inp = h.tokens(N, V);
    const Values<floatX> dout_values = {1, h.seed};
    const Values<gradX> dwte_values = {2, h.seed}, dwpe_values = {3, h.seed};
    const floatX *dout = h.input(dout_values, N * C);
    status_word *status = h.status();

    // What the sum over some positions is expected to be, and how far float sums may be from it: 8 roundings of a float
    // of all terms' size. Versions 1 to 3 round at each addition, to the type of the gradient. Rows that nobody asks
    // for stay as they are.
    auto expect = [=, &h](Expected &row, const Values<gradX> &before, long long r, const int *positions, int count) {
        const double each = ldexp(1.0, -1 - FloatFormat<gradX>::mantissa);
        const double slack = count == 0 ? 0 : h.running > 3 ? ldexp(8, -24) : std::max(ldexp(8, -24), count * each);
        for (long long c = 0; c < C; c++) row.value[c] = store.overwrite ? 0.0 : (double)before[r * C + c];
        std::vector<double> size(C);
        for (long long c = 0; c < C; c++) size[c] = fabs(row.value[c]);
        encoder_backward_cpu(row.value.data(), size.data(), dout_values, positions, count, C);
        for (long long c = 0; c < C; c++) row.slack[c] = slack * size[c];
        row.either_neighbour = store.stochastic;
    };
    // positions[begin[id]..begin[id+1]-1] hold id
    auto begin = std::make_shared<std::vector<int>>(), positions = std::make_shared<std::vector<int>>();
    h.prepare_references = [=, &h] {
        begin->resize(V + 1LL);
        positions->resize(N);
        for (int id : h.host_tokens) (*begin)[id + 1LL]++;
        for (long long id = 0; id < V; id++) (*begin)[id + 1] += (*begin)[id];
        std::vector<int> next = *begin;
        for (long long bt = 0; bt < N; bt++) (*positions)[next[h.host_tokens[bt]]++] = (int)bt;
    };
    gradX *dwte = h.output<gradX>(
        "dwte", V, C, 0,
        [=](Expected &row, long long id) {
            const int first = (*begin)[id], count = (*begin)[id + 1] - first;
            expect(row, dwte_values, id, positions->data() + first, count);
        },
        store.overwrite ? nullptr : &dwte_values);
    gradX *dwpe = h.output<gradX>(
        "dwpe", T, C, 0,
        [=](Expected &row, long long t) {
            std::vector<int> batch(B);
            for (int b = 0; b < B; b++) batch[b] = b * T + (int)t;
            expect(row, dwpe_values, t, batch.data(), B);
        },
        store.overwrite ? nullptr : &dwpe_values);
    void *workspace = h.workspace(encoder_backward_workspace_bytes(B, T, C, V));

    const double distinct = h.distinct_tokens();
    const double gradients = store.overwrite ? (double)V + T : 2 * (distinct + T);  // rows, read or written
    h.bytes = (double)N * C * sizeof(floatX) + gradients * C * sizeof(gradX) + (double)N * sizeof(int);
    h.flops = 2.0 * N * C;
    h.skip = [=](int version) {
        return version <= 3 && store.stochastic ? "it rounds at each addition, and only to nearest" : "";
    };
    h.race(encoder_backward_versions<floatX, gradX>,
           [=](EncoderBackward<floatX, gradX> launch, int block_size, cudaStream_t stream) {
               return launch(dwte, dwpe, dout, inp, status, workspace, B, T, C, V, store, block_size, stream);
           });
}

template <typename floatX>
void encoder_backward_race(Harness &h) {
    const GradientStore store = {h.flag("--overwrite"), h.choice("--rounding") == "stochastic", h.seed};
    if (h.choice("--grad-dtype") == "same" && sizeof(floatX) == 2) {
        return encoder_backward_race<floatX, floatX>(h, store);
    }
    if (store.stochastic) h.refuse(EXIT_BAD_INPUT, "--rounding: 'stochastic' is for 16-bit gradients; these are fp32");
    encoder_backward_race<floatX, float>(h, store);
}

}  // namespace bookends

int main(int argc, char **argv) {
    using namespace bookends;
    Harness h("encoder_backward", "gradient of the token + position embedding",
              {{'b', "B", 8, 4}, {'t', "T", 1024, 512}, {'c', "C", 768, 768}, {'v', "V", 50257, 50257}},
              {{"--grad-dtype", {"same", "fp32"}, "type of the gradients"},
               {"--overwrite", {}, "replace what the gradients hold instead of adding to it"},
               {"--rounding", {"nearest", "stochastic"}, "of 16-bit gradients (stochastic: from version 4 on)"}});
    return h.main(argc, argv, encoder_backward_versions<float, float>, encoder_backward_race<float>,
                  encoder_backward_race<half>, encoder_backward_race<__nv_bfloat16>);
}
#endif
