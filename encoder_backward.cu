/*
The gradient of the token + position embedding:   dwte[inp[b,t],:] += dout[b,t,:]    dwpe[t,:] += sum_b dout[b,t,:]

Ids repeat, so a row of dwte is the sum of many rows of dout. With atomics, the order of the additions, and so the
rounding, differs from run to run; the additions for a frequent id are executed one after the other; and 16-bit
gradients are rounded at every addition. From version 4 on, kernels first group the positions by id, then add up each
group in a fixed order: the same bits each time. The fewest bytes: dout and inp once; dwpe, and each row of dwte that
has a position, one read and one write. If the gradients are overwritten, they are only written, and all other rows of
dwte are zeroed.

version 1  atomics: one thread per element, which adds it to dwte and dwpe with atomics
version 2  no atomics: one thread per column, which loops over all positions
version 3  x128 atomics: one thread per 16 bytes, added by one instruction on compute capability 9.0
version 4  plain groups: positions are listed by id; one warp per id adds up its rows and writes the sum once
version 5  grouped: groups in bins in shared memory, without a count for each id; long groups are cut into pieces
version 6  slices: one slice of the columns after the other, so that dwte reads from the L2 what dwpe has read from DRAM
version 7  overlap: dwpe begins while the positions are being grouped

Measured on an NVIDIA H200, B64 T1024 C768 V50257 bf16 zipf, cold:
  1  atomics           33.9284 ms    0.1% of copy
  2  no atomics        49.9626 ms    0.1% of copy   0.68x the version before
  3  x128 atomics       0.1557 ms   20.9% of copy   321x the version before
  4  plain groups       6.4101 ms    0.5% of copy   0.02x the version before
  5  grouped            0.0956 ms   34.1% of copy   67x the version before
  6  slices             0.0821 ms   39.7% of copy   1.16x the version before
  7  overlap            0.0713 ms   45.7% of copy   1.15x the version before

Includes common.h, parts/group_positions.h (the grouping), parts/launch.h and parts/rows.h.

Compile:  nvcc -O3 -arch=native encoder_backward.cu -o encoder_backward
Run:      ./encoder_backward           the default: deterministic, best over the measured shapes
          ./encoder_backward 3         version 3 at every block size
          ./encoder_backward all -b 64 --tokens zipf
          ./encoder_backward --help
*/
#include "common.h"
#include "parts/group_positions.h"
#include "parts/launch.h"
#include "parts/rows.h"

#include <cmath>

namespace bookends {

// ---------------------------------------------------------------------------------------------------------------------
// CPU reference

// Adds rows of dout (N, C) to row (C), in double: those at `count` positions, which are the positions of one id for a
// row of dwte, and those of one t for a row of dwpe. dout: a pointer to any float type, or values computed on demand,
// indexed by an offset. size (C), or null: the magnitudes are added to it, a scale for rounding errors.
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
    bool overwrite;   // the sums replace the old values; rows of dwte without positions become zero
    bool stochastic;  // 16-bit results are rounded up or down at random, and are right on average
    uint64_t seed;    // of stochastic rounding
};

// ---------------------------------------------------------------------------------------------------------------------
// kernels

// One thread per element, which adds it to both gradients. Neighbouring threads add to neighbouring addresses. But each
// atomic on 2 bytes is a separate operation of the L2, and atomics on one address are executed one after the other:
// 0.56 ms with uniform ids, 34 ms with zipf ids (H200, bf16, B 64, C 768). The order of the additions differs from
// launch to launch, and with it the bits. 16-bit gradients are rounded at each addition.
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

// One thread per column, which loops over all positions. No other thread adds to the column, so that there are no
// atomics and the order is fixed: the same bits each time. But there are only C threads, and each waits for memory at
// every position. Without conflicts between atomics this is much slower than version 1: 119 times at B 8 with uniform
// ids (H200, bf16, C 768). With many conflicts it is faster: 42 ms instead of 220 at B 64 with equal ids. It is the
// simplest deterministic version.
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

// Kernel 1 with 16 bytes of dout per thread: one load, and one atomic on each gradient instead of kernel 1's eight (two
// with fp32 gradients of 16-bit dout). 5.6 times faster at B 64 with uniform ids (H200, bf16, C 768). Slower than
// version 1 in one measured case, by a tenth: fp32 gradients of bf16 dout. The order of the additions still differs
// from launch to launch, and atomics on one row still conflict: 0.66 ms with equal ids at B 64, 0.10 with uniform ids.
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

// ---- gradients, from version 4 on ----

// dwte or dwpe.
template <typename gradX>
struct Gradient {
    gradX *data;
    bool accumulate;
    uint64_t seed;  // of stochastic rounding
};

template <typename gradX>
Gradient<gradX> dwte_of(gradX *dwte, const GradientStore &store) {
    return {dwte, !store.overwrite, mix64(store.seed)};
}
template <typename gradX>
Gradient<gradX> dwpe_of(gradX *dwpe, const GradientStore &store) {
    return {dwpe, !store.overwrite, mix64(store.seed + 0x6a09e667f3bcc909ull)};
}

// The old values at `at`; zeros if the gradient is overwritten, or for a thread without a column (not `active`).
template <typename gradX, int width>
__device__ void load_old(Columns<gradX, width> &old, const Gradient<gradX> &gradient, size_t at, bool active) {
    if (gradient.accumulate && active) {
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

// ---- plain groups ----

// Kernel 4 adds up the rows of each id in registers. There are no atomics on the gradients: each row of dwte is read
// and written once, the order of the additions is fixed, and the sum is rounded once. This requires a list of each id's
// positions. Four small kernels over the ids make the lists, as a counting sort. For the ids 7 3 7 9 7 at positions 0
// to 4:
//
//   count   the number of positions of each id     3: 1     7: 3        9: 1
//   begin   where each id's list begins            3: 0     7: 1        9: 4     a prefix sum over the V counts
//   place   writes positions to the lists          3: {1}   7: {4,0,2}  9: {3}   in any order within a list
//   order   sorts each list                        3: {1}   7: {0,2,4}  9: {3}
//
// Then one warp per id adds up the rows of its list, and one thread per vector of dwpe adds up over the batch.
//
// Determinism: `begin` and `place` use atomics, so that the place of a list, and its first order, may differ from run
// to run. `order` sorts the list, and no sum depends on its place. A position's rank in its list is the number of
// smaller positions there. This is the simplest way to sort a list; its time grows with the square of the length.
//
// Cost: 7 launches, one of them a memset. dout is read twice, for dwte and for dwpe; the ids are read four times. Each
// id of the vocabulary costs 16 bytes of traffic and a warp, even without positions. A frequent id is slow: one warp
// adds up its whole list, long after the others have finished. Against version 3 (H200, bf16): 41 times slower at B 64,
// C 768 with zipf ids and 1.4 times with uniform ids; 1.25 times faster at B 16, T 4096, C 4096 with uniform ids.
struct IdLists {
    int *counts;          // V + 1: the length of each id's list; counts[V]: of all lists together
    unsigned *ends;       // V: the index of the id's next position; after `place`, the end of the id's list
    unsigned *unordered;  // N: the lists after `place`
    unsigned *positions;  // N: the lists, each in ascending order
};

static __global__ void encoder_backward_kernel4_count(IdLists lists, const int *inp, status_word *status,
                                                      unsigned N, int V) {
    const unsigned bt = blockIdx.x * blockDim.x + threadIdx.x;
    if (bt >= N) return;
    const int id = inp[bt];
    if (id_in_range(id, V)) {
        atomicAdd(&lists.counts[id], 1);
    } else {
        report_bad_id(status, bt);
    }
}

// A prefix sum over the ids of a block. One atomic per block reserves the range for the lists of its ids.
static __global__ void encoder_backward_kernel4_begin(IdLists lists, int V) {
    __shared__ int block_begin;
    const unsigned id = blockIdx.x * blockDim.x + threadIdx.x;
    int all;
    const int before = block_exclusive_sum(id < (unsigned)V ? lists.counts[id] : 0, &all);
    if (threadIdx.x == 0) block_begin = atomicAdd(&lists.counts[V], all);
    __syncthreads();
    if (id < (unsigned)V) lists.ends[id] = block_begin + before;
}

static __global__ void encoder_backward_kernel4_place(IdLists lists, const int *inp, unsigned N, int V) {
    const unsigned bt = blockIdx.x * blockDim.x + threadIdx.x;
    if (bt < N && id_in_range(inp[bt], V)) lists.unordered[atomicAdd(&lists.ends[inp[bt]], 1u)] = bt;
}

static __global__ void encoder_backward_kernel4_order(IdLists lists, const int *inp, int V) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (unsigned)lists.counts[V]) return;
    const unsigned bt = lists.unordered[i], id = inp[bt], end = lists.ends[id], begin = end - lists.counts[id];
    unsigned rank = 0;
    for (unsigned k = begin; k < end; k++) rank += lists.unordered[k] < bt;
    lists.positions[begin + rank] = bt;
}

// sum = row(0) + ... + row(count-1), in that order. row(k): the address of `width` columns, or null for a row to skip.
// Each 32 rows are added up in float, and these sums in double, which keeps the error of a long sum at a few ulps.
template <typename floatX, int width, typename Row>
__device__ void sum_rows(float (&sum)[width], unsigned count, Row row) {
    double total[width] = {};
    for (unsigned first = 0; first < count; first += 32) {
        float part[width] = {};
#pragma unroll 4
        for (unsigned k = first; k < min(first + 32, count); k++) {
            const floatX *const address = row(k);
            if (!address) continue;
            Columns<floatX, width> columns;
            columns.load(address);
#pragma unroll
            for (int j = 0; j < width; j++) part[j] += (float)columns[j];
        }
#pragma unroll
        for (int j = 0; j < width; j++) total[j] += part[j];
    }
#pragma unroll
    for (int j = 0; j < width; j++) sum[j] = (float)total[j];
}

// One warp per id, which handles 32 vectors of the columns at a time.
template <typename floatX, typename gradX, int width, bool stochastic>
__global__ void encoder_backward_kernel4_dwte(Gradient<gradX> dwte, const floatX *dout, IdLists lists, int C, int V) {
    const long long id = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / kWarpSize;
    if (id >= V) return;
    const unsigned count = lists.counts[id];
    if (count == 0 && dwte.accumulate) return;
    const unsigned *positions = lists.positions + (lists.ends[id] - count);
    for (long long c = threadIdx.x % kWarpSize * width; c < C; c += kWarpSize * width) {
        float sum[width];
        sum_rows<floatX>(sum, count, [&](unsigned k) { return dout + (size_t)positions[k] * C + c; });
        Columns<gradX, width> old;
        load_old(old, dwte, id * C + c, true);
        store_new<stochastic>(dwte, id * C + c, sum, old);
    }
}

// One thread per vector of dwpe.
template <typename floatX, typename gradX, int width, bool stochastic>
__global__ void encoder_backward_kernel4_dwpe(Gradient<gradX> dwpe, const floatX *dout, const int *inp,
                                              status_word *status, int B, int T, int C, int V) {
    const long long i = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * width;
    if (i >= (long long)T * C) return;
    const long long t = i / C, c = i % C;
    float sum[width];
    sum_rows<floatX>(sum, B, [&](unsigned b) -> const floatX * {
        const long long bt = (long long)b * T + t;
        if (id_in_range(inp[bt], V)) return dout + bt * C + c;
        if (c == 0) report_bad_id(status, bt);
        return nullptr;
    });
    Columns<gradX, width> old;
    load_old(old, dwpe, i, true);
    store_new<stochastic>(dwpe, i, sum, old);
}

// ---- grouped: the sums over the groups of parts/group_positions.h ----

// Kernel 4 has one warp for a group of any length, and work for each id of the vocabulary. Here:
// - Two kernels group the positions, in bins that fit into shared memory. Their cost depends on N, not on V.
// - A team of 16 lanes adds up a short group. For the ids 7 3 7 9 7: dwte[7] += dout[0] + dout[2] + dout[4].
// - A group of 64 positions or more is cut into pieces of 32, one for each team, and the sums of the pieces are added
//   up in a tree. So many teams share a frequent id, and the order of the additions depends on the group's length
//   alone.
// - dwpe is computed by the same launch as dwte.
//
// Cost: 3 launches; dout is read twice. Against version 3 on an H200, in bf16 with C 768: 7.4 times faster at B 64 with
// equal ids, 1.6 times with zipf ids. Slower where atomics rarely conflict: by 4% at B 64 with uniform ids, and 1.6
// times at B 8, where the grouping (about 12 us) takes longer than it saves. Kept because its bits are the same each
// time, and as the base of versions 6 and 7.

// The sums of dwpe over b are cut in the same way, in longer pieces, since they need no list of positions.
constexpr int kBatchPiece = 64;
__host__ __device__ inline int batch_pieces(int B) { return B < 2 * kBatchPiece ? 1 : B / kBatchPiece; }

// The arrays in the workspace.
struct Scratch {
    Groups groups;
    unsigned *arrived;  // (partial_rows, slices): number of teams that have reached a node of the tree: add_pieces()
    float *partials;    // (partial_rows, C): a row for each place in long_pieces, then for each of dwpe's pieces
};

// sum += row(first) + ... + row(count-1), in that order. at(k) returns the address of row(k)'s columns, and is called
// in that order too. `in_flight` rows are loaded at once; the remaining rows in batches of half that size, and so on.
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

// A team of 16 lanes adds up rows in one slice of the columns: 16 vectors, in bf16 256 bytes of a row.
constexpr int kLanes = 16;
__device__ inline unsigned team_mask() { return 0xffffu << (threadIdx.y % 2 * kLanes); }

// Counts the team's arrival. Returns true to the last of `expected` teams, which then sees everything that the other
// teams stored before they arrived: lane 0's fences cover the lanes that are already synchronised with it.
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

// A thread's columns.
struct Slice {
    unsigned number, count;  // which slice of how many
    unsigned c;              // the thread's first column
    bool active;             // false: past the last column; the thread reads the slice's first columns, stores nothing
};

// The piece of a sum that a team has added up.
struct Piece {
    unsigned row;        // of the gradient
    int number, pieces;  // which piece of how many
    size_t place;        // row of the partial sums for the first piece; the others follow
};

// Adds up the pieces of a sum in a tree. Of each kFan neighbouring pieces, the last team to arrive adds up the sums in
// order, stores the result in the place of the first, and continues on the next level; on the last level it adds to the
// gradient. No team waits, no other kernel is needed, and the order depends on the number of pieces alone.
constexpr int kFan = 16;

template <bool stochastic, typename gradX, int width>
__device__ void add_pieces(float (&sum)[width], Gradient<gradX> gradient, Piece piece, const Scratch &scratch,
                           Slice slice, size_t C) {
    float *const partials = scratch.partials + slice.c;
    size_t stride = 1, mine = piece.place + piece.number;  // stride: between the places of neighbours on a level
#pragma unroll 1
    for (int level = 0;; level++) {
        Columns<float, width> partial;
#pragma unroll
        for (int k = 0; k < width; k++) partial[k] = sum[k];
        if (slice.active) partial.store(partials + mine * C);
        // A node with one child already has its sum. Any other node spans more places than there are levels, so that
        // node + level is a unique index of its counter.
        const int first = piece.number / kFan * kFan, children = min(kFan, piece.pieces - first);
        const size_t node = piece.place + first * stride;
        if (children > 1) {
            if (!arrive_last(&scratch.arrived[(node + level) * slice.count + slice.number], children)) return;
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
    if (!slice.active) return;
    Columns<gradX, width> old;
    load_old(old, gradient, piece.row * C + slice.c, true);
    store_new<stochastic>(gradient, piece.row * C + slice.c, sum, old);
}

// The order of the blocks in the grid: for each slice the blocks of dwpe, of the long pieces and of the short groups.
// The last blocks of the grid zero the rows of dwte without positions.
//
// If a slice of dout is larger than the L2 (Groups::ordered), the blocks of dwpe and of the long pieces alternate in
// kRanges turns, both in order of the positions, so that rows of frequent ids are still in the L2 for the second read.
struct Blocks {
    unsigned dwpe, long_pieces;  // in each turn
    unsigned turns;              // 1 or kRanges
    unsigned short_groups;
    unsigned zeros;
    unsigned ahead;       // number of slices by which dwpe is ahead of dwte
    bool slice_by_slice;  // false: all slices of one piece or group are neighbouring blocks
};
constexpr int kPositionsPerTeam = 16;                  // of short groups, about
constexpr unsigned kMostUnordered = (48 << 20) / 256;  // rows of a slice of 256 bytes that the L2 of an H200 holds

// The parameters of kernel 5.
template <typename floatX, typename gradX>
struct Sums {
    Gradient<gradX> dwte, dwpe;
    const floatX *dout;
    const int *inp;
    status_word *status;
    Scratch scratch;
    int B, T;
    unsigned C;
    Blocks blocks;
};

// Role dwpe: adds up piece i of dwpe's sums. Returns false if nothing remains to be done: there is no piece i, or it is
// the only piece of its row and has been stored. Does not use the groups.
template <bool stochastic, typename floatX, typename gradX, int width>
__device__ bool sum_dwpe_piece(float (&sum)[width], Piece &piece, const Sums<floatX, gradX> &job, Slice slice,
                               unsigned i) {
    const unsigned T = job.T, t = i % T, number = i / T, pieces = batch_pieces(job.B);
    if (number >= pieces) return false;
    piece = {t, (int)number, (int)pieces, job.scratch.groups.long_places() + (size_t)t * pieces};
    const unsigned b = number * kBatchPiece, count = number == pieces - 1 ? job.B - b : kBatchPiece;
    const size_t at = (size_t)t * job.C + slice.c;
    Columns<gradX, width> old;
    if (pieces == 1) load_old(old, job.dwpe, at, slice.active);
    auto good = [&](unsigned k) { return id_in_range(job.inp[(size_t)(b + k) * T + t], job.scratch.groups.V); };
    bool bad = false;
#pragma unroll 4
    for (unsigned k = threadIdx.x; k < count; k += kLanes) bad = bad || !good(k);
    const floatX *next = job.dout + slice.c + ((size_t)b * T + t) * job.C;
    auto next_row = [&](int) {
        const floatX *row = next;
        next += (size_t)T * job.C;
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
                if (slice.number == 0 && threadIdx.x == 0) report_bad_id(job.status, (long long)(b + k) * T + t);
            }
        }
    }
    if (pieces == 1 && slice.active) store_new<stochastic>(job.dwpe, at, sum, old);
    return pieces > 1;
}

// The place in long_pieces of piece i of this turn, or long_places() if there is none. Each turn has the same number
// of pieces, in the order of the ranges in which they begin.
__device__ inline unsigned ordered_place(const Groups &groups, unsigned turn, unsigned i) {
    const unsigned mine = threadIdx.x < kRanges ? groups.range_counts[threadIdx.x] : 0;
    unsigned through = mine;  // pieces in the ranges up to this lane's, inclusive
    for (int offset = 1; offset < kLanes; offset *= 2) {
        const unsigned before = __shfl_up_sync(team_mask(), through, offset, kLanes);
        if (threadIdx.x >= (unsigned)offset) through += before;
    }
    const unsigned all = __shfl_sync(team_mask(), through, kLanes - 1, kLanes);
    const unsigned per_turn = ceil_div(all, (unsigned)kRanges), k = turn * per_turn + i;
    if (i >= per_turn || k >= all) return groups.long_places();
    const unsigned ranges_before = __ballot_sync(team_mask(), through <= k) >> (threadIdx.y % 2 * kLanes);
    const unsigned range = __popc(ranges_before & 0xffff);
    const unsigned before = __shfl_sync(team_mask(), through - mine, range, kLanes);
    return groups.order[range * groups.range_size() + k - before];
}

// Role long pieces: adds up the piece in place i of long_pieces. Returns false if there is none.
template <typename floatX, typename gradX, int width>
__device__ bool sum_long_piece(float (&sum)[width], Piece &piece, const Sums<floatX, gradX> &job, Slice slice,
                               unsigned i) {
    const Groups &groups = job.scratch.groups;
    if (i >= groups.long_places()) return false;
    const LongPiece mine = groups.long_pieces[i];
    if (mine.length == 0) return false;
    const int pieces = pieces_of(mine.length);
    const int count = mine.number == pieces - 1 ? mine.length - mine.number * kPiece : kPiece;
    piece = {(unsigned)mine.id, mine.number, pieces, i - mine.number};
    const unsigned *positions = groups.positions + mine.first;
    const floatX *dout = job.dout + slice.c;
    add_rows<floatX, 8>(sum, 0, count, [&](int k) { return dout + (size_t)positions[k] * job.C; });
    return true;
}

// Role short groups: adds up block x's share of the short groups, and stores the sums. Block x works on bin x % bins.
// The teams of all blocks of a bin take turns with the entries of its list. A team loads its next entry before it adds
// up the rows of the present one.
template <bool stochastic, int width, typename floatX, typename gradX>
__device__ void sum_short_groups(const Sums<floatX, gradX> &job, Slice slice, unsigned x) {
    const Groups &groups = job.scratch.groups;
    const unsigned bins = groups.bins.count(), stride = job.blocks.short_groups / bins * blockDim.y;
    const ShortList bin = groups.short_lists[x % bins];
    const ShortGroup *list = groups.short_groups + bin.begin;
    const floatX *dout = job.dout + slice.c;
    unsigned i = x / bins * blockDim.y + threadIdx.y;
    if (i >= bin.count) return;
    ShortGroup next = list[i];
#pragma unroll 1
    do {
        const ShortGroup group = next;
        i += stride;
        if (i < bin.count) next = list[i];
        const size_t at = (size_t)group.id * job.C + slice.c;
        Columns<gradX, width> old;
        load_old(old, job.dwte, at, slice.active);
        float sum[width] = {};
        add_rows<floatX, 4>(sum, 0, group.length, [&](int k) {
            const unsigned p = group.length > 2 ? groups.positions[group.at0 + k] : k == 0 ? group.at0 : group.at1;
            return dout + (size_t)p * job.C;
        });
        if (slice.active) store_new<stochastic>(job.dwte, at, sum, old);
    } while (i < bin.count);
}

// Role zero rows: of the 32 ids from 32*word on, zeroes the rows of those without positions. A warp writes a whole row:
// DRAM writes long runs at the speed of a memset, but not pieces of 256 bytes between reads.
template <int width, typename floatX, typename gradX>
__device__ void zero_rows(const Sums<floatX, gradX> &job, unsigned word) {
    const unsigned V = job.scratch.groups.V, first = word * 32;
    const unsigned thread = threadIdx.y * kLanes + threadIdx.x, warps = blockDim.y * kLanes / kWarpSize;
    constexpr int size = width < Packed128<gradX>::size ? width : Packed128<gradX>::size;
    Packed<gradX, size> zeros;
    for (int k = 0; k < size; k++) zeros[k] = (gradX)0.0f;
    unsigned absent = ~job.scratch.groups.present[word];
    if (V - first < 32) absent &= (1u << (V - first)) - 1;
    for (unsigned turn = 0; absent != 0; absent &= absent - 1, turn++) {
        if (turn % warps != thread / kWarpSize) continue;
        gradX *row = job.dwte.data + (size_t)(first + __ffs(absent) - 1) * job.C;
        for (size_t c = thread % kWarpSize * size; c < job.C; c += kWarpSize * size) store_packed_cs(row + c, zeros);
    }
}

// All sums, after the positions are grouped. Each block chooses its role. A team of dwpe or of the long pieces adds up
// one piece, then continues in the tree. A team of the short groups adds up and stores one group after the other.
//
// Slice by slice: blocks start in order of x, then y, then z, so that almost all work on one slice of the columns is
// done before the next begins. (CUDA does not promise the order, and no result depends on it.) One slice of dout fits
// into the L2: dwpe reads it from DRAM in long runs, then dwte reads it from the L2, in the order of the ids. dwpe
// needs no groups, so it is `ahead` slices ahead.
//
// The choice of the role is part of the kernel: as a function that returns a struct, it costs 10 registers with fp32
// (nvcc 13). With single elements (width 1), the launch bound of two blocks of 1024 threads limits a thread to 32
// registers: without it, 42 registers leave room for two thirds of these threads. With stochastic rounding, 32
// registers would spill.
template <typename floatX, typename gradX, int width, bool stochastic>
__global__ void __launch_bounds__(1024, width == 1 && !stochastic ? kResidentBlocks : 0)
    encoder_backward_kernel5(Sums<floatX, gradX> job) {
    const Blocks &blocks = job.blocks;
    const unsigned slices = ceil_div(job.C, (unsigned)(kLanes * width)), yz = blockIdx.z * gridDim.y + blockIdx.y;
    const unsigned per_turn = blocks.dwpe + blocks.long_pieces, pieces = blocks.turns * per_turn;
    const unsigned sums = blocks.slice_by_slice ? slices + 1 : pieces + blocks.short_groups;
    if (yz >= sums) {
        const size_t word = (size_t)(yz - sums) * gridDim.x + blockIdx.x;
        if (word >= blocks.zeros) return;
        wait_for_previous_kernel();
        return zero_rows<width>(job, word);
    }
    const unsigned x = blocks.slice_by_slice ? blockIdx.x : yz, turn = x / per_turn;
    unsigned s = blocks.slice_by_slice ? yz : blockIdx.x, i = x % per_turn;
    const bool for_dwpe = x < pieces && i < blocks.dwpe;
    if (blocks.slice_by_slice) {  // 2 ahead: dwpe 0; dwpe 1, dwte 0; dwte 1; dwpe 2, dwte 2; dwpe 3, dwte 3; ...
        if (for_dwpe && s == blocks.ahead) return;
        if (!for_dwpe || s > blocks.ahead) s--;
    }
    if (s >= slices) return;
    const unsigned column = (s * kLanes + threadIdx.x) * width;
    const bool active = column < job.C;
    const Slice slice = {s, slices, active ? column : s * kLanes * width, active};

    Piece piece;
    float sum[width] = {};
    if (for_dwpe) {
        i = (turn * blocks.dwpe + i) * blockDim.y + threadIdx.y;
        if (!sum_dwpe_piece<stochastic>(sum, piece, job, slice, i)) return;
        wait_for_previous_kernel();  // for the counters of add_pieces(), which the tile kernel zeroes
    } else {
        wait_for_previous_kernel();
        if (x >= pieces) return sum_short_groups<stochastic, width>(job, slice, x - pieces);
        i = (i - blocks.dwpe) * blockDim.y + threadIdx.y;
        if (blocks.turns > 1) i = ordered_place(job.scratch.groups, turn, i);
        if (!sum_long_piece(sum, piece, job, slice, i)) return;
    }
    // Member by member: for a choice between two structs, the compiler makes copies in local memory.
    const Gradient<gradX> gradient = {for_dwpe ? job.dwpe.data : job.dwte.data, job.dwte.accumulate,
                                      for_dwpe ? job.dwpe.seed : job.dwte.seed};
    add_pieces<stochastic>(sum, gradient, piece, job.scratch, slice, job.C);
}

// ---------------------------------------------------------------------------------------------------------------------
// launchers

// Every launcher:  dwte (V, C) and dwpe (T, C), either of which may be null: not computed; dout (B, T, C); inp (B, T)
// int32. Row-major, device memory, aligned to their element only, no overlap. status: a status word that the caller set
// to kStatusOk, or null. A position with an id outside 0..V-1 adds nothing, and *status is lowered to the first such
// position. workspace: device memory with any contents and at any alignment; encoder_backward_workspace_bytes() from
// version 5 on, encoder_backward4_workspace_bytes() for version 4, none for versions 1 to 3. B*T is at most 2^31-1.
// block_size: a multiple of 32 up to 1024. Nothing is allocated or synchronised. If B*T is 0, gradients that are
// overwritten become zero. If both gradients are null, nothing is done and no id is checked. Version 3 falls back on
// version 1.
//
// Returns, before anything is launched, cudaErrorInvalidValue for too many positions or another block size, and, from
// versions 1 to 3, cudaErrorNotSupported for stochastic rounding to 16 bits; otherwise the first error of a launch or a
// memset. A pending CUDA error stays pending.
//
// From version 4 on, sums are float and are rounded once, and the bits are the same each time. Versions 1 to 3 round at
// each addition. The atomics of versions 1 and 3 add in any order, and treat subnormal floats as zeros.

template <typename floatX, typename gradX>
using EncoderBackward = cudaError_t (*)(gradX *dwte, gradX *dwpe, const floatX *dout, const int *inp,
                                        status_word *status, void *workspace, int B, int T, int C, int V,
                                        GradientStore store, int block_size, cudaStream_t stream);

// The error of a call that every version refuses.
inline cudaError_t encoder_backward_refusal(int B, int T, int block_size) {
    return valid_block_size(block_size) && (long long)B * T <= INT32_MAX ? cudaSuccess : cudaErrorInvalidValue;
}

// Zeroes the gradients that are overwritten.
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

// Whether rows are aligned for `width` columns of dout in a load, and of the gradients in accesses of 16 bytes at most.
template <int width, typename floatX, typename gradX>
bool rows_allow(int C, const floatX *dout, gradX *dwte, gradX *dwpe) {
    const int grad_width = std::min(width, Packed128<gradX>::size);
    return vector_width(width, C, dout) == width && vector_width(grad_width, C, dwte, dwpe) == grad_width;
}

// The first steps of versions 1 to 3.
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

// Falls back on version 1 if rows are not aligned to 16 bytes.
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

// Places the lists of version 4 in the workspace, one after the other. Returns the end of the last.
inline char *lay_out_id_lists(IdLists *lists, char *workspace, unsigned N, int V) {
    take_array(&lists->counts, &workspace, (size_t)V + 1);
    take_array(&lists->ends, &workspace, V);
    take_array(&lists->unordered, &workspace, N);
    take_array(&lists->positions, &workspace, N);
    return workspace;
}

// Bytes of workspace that version 4 needs, at any alignment: 8 for each position and 8 for each id of the vocabulary.
inline size_t encoder_backward4_workspace_bytes(int B, int T, int C, int V) {
    if ((long long)B * T * C == 0) return 0;
    IdLists lists;
    char *const begin = (char *)16;
    return lay_out_id_lists(&lists, begin, (unsigned)B * T, V) - begin + 15;
}

// Launches the kernels that fill the lists.
inline cudaError_t list_positions(const IdLists &lists, const int *inp, status_word *status, unsigned N, int V,
                                  int block_size, cudaStream_t stream) {
    const unsigned position_blocks = ceil_div(N, (unsigned)block_size);
    const unsigned id_blocks = ceil_div((unsigned)V, (unsigned)block_size);
    cudaError_t error = cudaMemsetAsync(lists.counts, 0, ((size_t)V + 1) * sizeof(int), stream);
    if (error != cudaSuccess) return error;
    error = launch_kernel(encoder_backward_kernel4_count, position_blocks, block_size, 0, stream, lists, inp, status, N,
                          V);
    if (error != cudaSuccess || V == 0) return error;
    error = launch_kernel(encoder_backward_kernel4_begin, id_blocks, block_size, 0, stream, lists, V);
    if (error != cudaSuccess) return error;
    error = launch_kernel(encoder_backward_kernel4_place, position_blocks, block_size, 0, stream, lists, inp, N, V);
    if (error != cudaSuccess) return error;
    return launch_kernel(encoder_backward_kernel4_order, position_blocks, block_size, 0, stream, lists, inp, V);
}

// 16 bytes of dout per lane, or one element if rows are not aligned to 16 bytes.
template <typename floatX, typename gradX, int width = Packed128<floatX>::size>
cudaError_t encoder_backward4(gradX *dwte, gradX *dwpe, const floatX *dout, const int *inp, status_word *status,
                              void *workspace, int B, int T, int C, int V, GradientStore store, int block_size,
                              cudaStream_t stream) {
    if constexpr (width > 1) {
        if (!rows_allow<width>(C, dout, dwte, dwpe)) {
            return encoder_backward4<floatX, gradX, 1>(dwte, dwpe, dout, inp, status, workspace, B, T, C, V, store,
                                                       block_size, stream);
        }
    }
    cudaError_t error = encoder_backward_refusal(B, T, block_size);
    if (error != cudaSuccess) return error;
    const unsigned N = (unsigned)B * T;
    if (N == 0 || C == 0 || (!dwte && !dwpe)) return encoder_backward_zero(dwte, dwpe, T, C, V, store, stream);
    auto sum = [&](auto stochastic) {
        constexpr bool at_random = decltype(stochastic)::value;
        if (dwpe) {
            int block = block_size;
            const unsigned blocks = grid_blocks((long long)T * C / width, &block);
            error = launch_kernel(encoder_backward_kernel4_dwpe<floatX, gradX, width, at_random>, blocks, block, 0,
                                  stream, dwpe_of(dwpe, store), dout, inp, status, B, T, C, V);
        }
        if (error != cudaSuccess || !dwte) return error;
        IdLists lists;
        lay_out_id_lists(&lists, (char *)workspace, N, V);
        error = list_positions(lists, inp, status, N, V, block_size, stream);
        if (error != cudaSuccess || V == 0) return error;
        int block = block_size;
        const unsigned blocks = grid_blocks((long long)V * kWarpSize, &block);
        return launch_kernel(encoder_backward_kernel4_dwte<floatX, gradX, width, at_random>, blocks, block, 0, stream,
                             dwte_of(dwte, store), dout, lists, C, V);
    };
    if constexpr (sizeof(gradX) == 2) {
        if (store.stochastic) return sum(std::true_type());
    }
    return sum(std::false_type());
}

// The rows of Scratch::partials.
inline size_t partial_rows(const Groups &groups, int B, int T) {
    return groups.long_places() + (batch_pieces(B) > 1 ? (size_t)T * batch_pieces(B) : 0);
}

// Places the arrays in the workspace, one after the other. Returns the end of the last.
inline char *lay_out_scratch(Scratch *scratch, char *workspace, int B, int T, int C) {
    const size_t rows = partial_rows(scratch->groups, B, T);
    workspace = scratch->groups.lay_out(workspace);
    take_array(&scratch->arrived, &workspace, rows * ceil_div(C, kLanes));  // a slice has at least kLanes columns
    take_array(&scratch->partials, &workspace, rows * C);
    return workspace;
}

// Whether long pieces are read in order of position: useful where dwpe, too, reads dout in that order.
inline bool wants_order(unsigned N, int B) { return N > kMostUnordered && batch_pieces(B) > 1; }

// Bytes of workspace from version 5 on, at any alignment: about 50 for each position, 4*C for each 32 positions, and a
// bit for each id.
inline size_t encoder_backward_workspace_bytes(int B, int T, int C, int V) {
    if ((long long)B * T * C == 0) return 0;
    const unsigned N = (unsigned)B * T;
    Scratch scratch = {Groups(N, V, wants_order(N, B)), nullptr, nullptr};
    char *const begin = (char *)16;
    return lay_out_scratch(&scratch, begin, B, T, C) - begin + 15;
}

// Groups the positions, then adds up, with 16 bytes of dout per lane, or one element if rows are not aligned to 16
// bytes. overlap: each kernel starts while the one before it runs, and waits for it before it uses its results
// (programmatic dependent launch, compute capability 9.0; without it, the same as without overlap).
template <typename floatX, typename gradX, int width = Packed128<floatX>::size>
cudaError_t encoder_backward_grouped(gradX *dwte, gradX *dwpe, const floatX *dout, const int *inp, status_word *status,
                                     void *workspace, int B, int T, int C, int V, GradientStore store,
                                     bool slice_by_slice, bool overlap, int block_size, cudaStream_t stream) {
    if constexpr (width > 1) {
        if (!rows_allow<width>(C, dout, dwte, dwpe)) {
            return encoder_backward_grouped<floatX, gradX, 1>(dwte, dwpe, dout, inp, status, workspace, B, T, C, V,
                                                              store, slice_by_slice, overlap, block_size, stream);
        }
    }
    cudaError_t error = encoder_backward_refusal(B, T, block_size);
    if (error != cudaSuccess) return error;
    const unsigned N = (unsigned)B * T;
    if (N == 0 || C == 0 || (!dwte && !dwpe)) return encoder_backward_zero(dwte, dwpe, T, C, V, store, stream);
    Scratch scratch = {Groups(N, V, wants_order(N, B)), nullptr, nullptr};
    lay_out_scratch(&scratch, (char *)workspace, B, T, C);
    const Groups &groups = scratch.groups;
    const unsigned slices = ceil_div(C, kLanes * width);
    const size_t arrived_count = partial_rows(groups, B, T) * slices;
    KernelFacts facts;
    error = kernel_facts(&facts, group_bin_kernel);
    if (error != cudaSuccess) return error;
    const bool early = overlap && facts.sm_90_code;
    if (dwte) {
        error = group_positions(groups, inp, status, store.overwrite, scratch.arrived, arrived_count, early, stream);
    } else if (batch_pieces(B) > 1) {
        error = cudaMemsetAsync(scratch.arrived, 0, arrived_count * sizeof(unsigned), stream);
    }
    if (error != cudaSuccess) return error;

    const unsigned bins = groups.bins.count();
    const long long most_work = (long long)T * batch_pieces(B) + groups.long_places() + N;
    if (most_work * kLanes / block_size > INT32_MAX / 2) block_size = 1024;  // a grid holds 2^31-1 blocks
    const unsigned teams = block_size / kLanes;
    auto blocks_for = [&](unsigned work) { return ceil_div(work, teams); };
    Blocks blocks = {};
    blocks.slice_by_slice = slice_by_slice;
    blocks.turns = groups.ordered && dwpe && dwte ? kRanges : 1;
    blocks.ahead = blocks.turns > 1 ? 1 : 2;
    if (dwpe) blocks.dwpe = ceil_div(blocks_for(T * batch_pieces(B)), blocks.turns);
    if (dwte) {
        blocks.long_pieces = blocks_for(ceil_div(groups.long_places(), blocks.turns));
        blocks.short_groups = blocks_for(N / bins / kPositionsPerTeam + 1) * bins;
        if (store.overwrite) blocks.zeros = ceil_div((unsigned)V, 32u);
    }
    const unsigned sums = blocks.turns * (blocks.dwpe + blocks.long_pieces) + blocks.short_groups;
    const unsigned x = slice_by_slice ? sums : slices;
    const unsigned y = (slice_by_slice ? slices + 1 : sums) + ceil_div(blocks.zeros, x), grid_y = std::min(y, 65535u);
    const Sums<floatX, gradX> job = {dwte_of(dwte, store),
                                     dwpe_of(dwpe, store),
                                     dout,
                                     inp,
                                     status,
                                     scratch,
                                     B,
                                     T,
                                     (unsigned)C,
                                     blocks};
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = dwte && early ? 1 : 0;
    config.gridDim = dim3(x, grid_y, ceil_div(y, grid_y));
    config.blockDim = dim3(kLanes, teams);
    if constexpr (sizeof(gradX) == 2) {
        if (store.stochastic) {
            return launch_kernel(config, encoder_backward_kernel5<floatX, gradX, width, true>, job);
        }
    }
    return launch_kernel(config, encoder_backward_kernel5<floatX, gradX, width, false>, job);
}

// Neighbouring blocks handle the slices of one piece or group.
template <typename floatX, typename gradX>
cudaError_t encoder_backward5(gradX *dwte, gradX *dwpe, const floatX *dout, const int *inp, status_word *status,
                              void *workspace, int B, int T, int C, int V, GradientStore store, int block_size,
                              cudaStream_t stream) {
    return encoder_backward_grouped(dwte, dwpe, dout, inp, status, workspace, B, T, C, V, store, false, false,
                                    block_size, stream);
}

// Version 5 with another order of the blocks: slice by slice, 256 bytes of each row of dout in 16-bit types. One slice
// of dout stays in the L2 between its two reads. Nsight Compute, on an H200 at B = 64, T = 1024, C = 768: with uniform
// ids DRAM reads 170 MB, where dout and the rows of dwte are 157 MB; without slices it reads dout twice. The launches
// are those of version 5. 1.17 times as fast as version 5 at B 64 with uniform ids (bf16, C 768). No gain where all of
// dout fits into the L2 (B 8), and 2% slower there with zipf ids. Kept as the base of version 7.
//
// What helped:
// - Few teams, each with much work: with 4 positions per team instead of 16, most of the time is spent on the start of
//   blocks. But only few slices at once: so each team loops over the list of short groups, and loads its next entry
//   early.
// - Groups of one position behind the others: the two teams of a warp wait for each other where their loops differ.
// - Streaming accesses to the gradients only: with streaming loads of dout, dwte's reads of dout miss the L2.
// - Tiles and runs in the grouping. In its first version every bin read all ids. That saved the tile kernel and its
//   launch, but took more instructions, and one frequent id kept one block busy for 30 us.
// What did not help:
// - Rows of dout through shared memory with cp.async: twice as slow, since each row then needs its own loop.
// - One warp per group, 8 bytes per lane: no teams that wait for each other, but twice the instructions.
// - 32 lanes of 16 bytes: a slice is then 512 bytes wide and does not fit into the L2.
// The remaining limit: a scheduler has 6 of 16 possible warps, which wait for L2 and DRAM; both are half to three
// quarters busy.
template <typename floatX, typename gradX>
cudaError_t encoder_backward6(gradX *dwte, gradX *dwpe, const floatX *dout, const int *inp, status_word *status,
                              void *workspace, int B, int T, int C, int V, GradientStore store, int block_size,
                              cudaStream_t stream) {
    return encoder_backward_grouped(dwte, dwpe, dout, inp, status, workspace, B, T, C, V, store, true, false,
                                    block_size, stream);
}

// Version 6 with overlap. Grouping takes about 12 us, in which most of the GPU is idle. The first two slices of dwpe
// need no groups and use that time. On an H200, 1.01 to 1.25 times as fast as version 6 over all measured shapes, most
// at B 8. Below compute capability 9.0 it is version 6.
template <typename floatX, typename gradX>
cudaError_t encoder_backward7(gradX *dwte, gradX *dwpe, const floatX *dout, const int *inp, status_word *status,
                              void *workspace, int B, int T, int C, int V, GradientStore store, int block_size,
                              cudaStream_t stream) {
    return encoder_backward_grouped(dwte, dwpe, dout, inp, status, workspace, B, T, C, V, store, true, true, block_size,
                                    stream);
}

// A property that the check's error bounds depend on: where a version rounds to the type of the gradient.
enum EncoderBackwardRounding { kRoundsSums, kRoundsEachAddition };
struct EncoderBackwardProperties {
    EncoderBackwardRounding rounding = kRoundsSums;
};

template <typename floatX, typename gradX>
constexpr Version<EncoderBackward<floatX, gradX>, EncoderBackwardProperties> encoder_backward_versions[] = {
    {1, "atomics", "one thread per element, added with atomics", encoder_backward1<floatX, gradX>, 256,
     kNotReproducible, {kRoundsEachAddition}},
    {2, "no atomics", "one thread per column, which loops over all positions", encoder_backward2<floatX, gradX>, 32,
     kSameBits, {kRoundsEachAddition}},
    {3, "x128 atomics", "one thread per 16 bytes, added with one atomic", encoder_backward3<floatX, gradX>, 256,
     kNotReproducible, {kRoundsEachAddition}},
    {4, "plain groups", "positions listed by id; one warp adds up an id's rows and stores the sum once",
     encoder_backward4<floatX, gradX>, 256},
    {5, "grouped", "grouping in shared memory; long groups are cut into pieces", encoder_backward5<floatX, gradX>, 256},
    {6, "slices", "one slice of the columns after the other: dwte reads dout from the L2",
     encoder_backward6<floatX, gradX>, 256},
    {7, "overlap", "dwpe begins while the positions are being grouped", encoder_backward7<floatX, gradX>, 256},
};

}  // namespace bookends

// ---------------------------------------------------------------------------------------------------------------------
#ifndef BOOKENDS_NO_MAIN
#include <memory>

#include "dev/harness/harness.h"

namespace bookends {

template <typename floatX, typename gradX>
void encoder_backward_race(Harness &h, GradientStore store) {
    const int B = h.options.dim('b'), T = h.options.dim('t'), C = h.options.dim('c'), V = h.options.dim('v');
    const long long N = (long long)B * T;
    if (N > INT32_MAX) refuse(EXIT_BAD_INPUT, "B*T: %lld positions are more than %d (-b, -t)", N, INT32_MAX);
    const int *inp = h.tokens(N, V);
    const Values<floatX> dout_values = {1, h.options.seed};
    const Values<gradX> dwte_values = {2, h.options.seed}, dwpe_values = {3, h.options.seed};
    const floatX *dout = h.input(dout_values, N * C);
    status_word *status = h.status();

    auto rounds_each_addition = [](int version) {
        return find_version(encoder_backward_versions<floatX, gradX>, version)->properties.rounding ==
               kRoundsEachAddition;
    };
    // Row r of a gradient: the sum over some positions. A row without positions keeps its initial values.
    auto expect = [=, &h](Expected &row, const Values<gradX> &before, long long r, const int *positions, int count) {
        const double tolerance = sum_tolerance<gradX>(count, rounds_each_addition(h.running));
        for (long long c = 0; c < C; c++) row.value[c] = store.overwrite ? 0.0 : (double)before[r * C + c];
        std::vector<double> size(C);
        for (long long c = 0; c < C; c++) size[c] = fabs(row.value[c]);
        encoder_backward_cpu(row.value.data(), size.data(), dout_values, positions, count, C);
        for (long long c = 0; c < C; c++) row.slack[c] = tolerance * size[c];
        row.either_neighbour = store.stochastic;
    };
    std::shared_ptr<PositionsOfRows> positions;  // set before the references are called
    h.job.prepare_references = [&] { positions = std::make_shared<PositionsOfRows>(h.host_tokens, V); };
    gradX *dwte = h.output<gradX>(
        "dwte", V, C, 0,
        [=, &positions](Expected &row, long long id) {
            expect(row, dwte_values, id, positions->of(id), positions->count(id));
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
    void *workspace = h.workspace(
        std::max(encoder_backward4_workspace_bytes(B, T, C, V), encoder_backward_workspace_bytes(B, T, C, V)));

    const double distinct = h.distinct_tokens();
    const double gradients = store.overwrite ? (double)V + T : 2 * (distinct + T);  // rows, read or written
    h.job.bytes = (double)N * C * sizeof(floatX) + gradients * C * sizeof(gradX) + (double)N * sizeof(int);
    h.job.flops = 2.0 * N * C;
    h.job.skip = [=](int version) {
        const bool refused = store.stochastic && rounds_each_addition(version);
        return refused ? "it rounds at each addition, and only to nearest" : "";
    };
    h.race(encoder_backward_versions<floatX, gradX>,
           [=](EncoderBackward<floatX, gradX> launch, int block_size, cudaStream_t stream) {
               return launch(dwte, dwpe, dout, inp, status, workspace, B, T, C, V, store, block_size, stream);
           });
}

template <typename floatX>
void encoder_backward_race(Harness &h) {
    const bool stochastic = h.options.choice("--rounding") == "stochastic";
    const GradientStore store = {h.options.flag("--overwrite"), stochastic, h.options.seed};
    if (h.options.choice("--grad-dtype") == "same" && sizeof(floatX) == 2) {
        return encoder_backward_race<floatX, floatX>(h, store);
    }
    if (store.stochastic) refuse(EXIT_BAD_INPUT, "--rounding: 'stochastic' is for 16-bit gradients; these are fp32");
    encoder_backward_race<floatX, float>(h, store);
}

}  // namespace bookends

int main(int argc, char **argv) {
    using namespace bookends;
    Harness h("encoder_backward", "gradient of the token + position embedding",
              {{'b', "B", 8, 4}, {'t', "T", 1024, 512}, {'c', "C", 768, 768}, {'v', "V", 50257, 50257}},
              {{"--grad-dtype", {"same", "fp32"}, "type of the gradients"},
               {"--overwrite", {}, "overwrite the gradients instead of adding to them"},
               {"--rounding",
                {"nearest", "stochastic"},
                "rounding of 16-bit gradients (stochastic: from version 4 on)"}});
    return h.main(argc, argv, encoder_backward_versions<float, float>, encoder_backward_race<float>,
                  encoder_backward_race<half>, encoder_backward_race<__nv_bfloat16>);
}
#endif
