/*
Softmax, cross-entropy and their gradient, the last layer of a language model. For each of N rows of V logits x, t being
the row's target:

  z_j = logit_scale * x_j, or softcap * tanh(logit_scale * x_j / softcap)
  lse = log(sum_j exp(z_j))        p_j = exp(z_j - lse)
  loss = (1-eps) * (lse - z_t)  +  eps * (lse - mean_j z_j)  +  z_loss * lse^2        eps = label_smoothing
  dlogits_j = dloss * logit_scale * (1 - (z_j/softcap)^2) * ((1 + 2*z_loss*lse) * p_j - (1-eps)*[j=t] - eps/V)

The factor with the softcap is 1 without a softcap. One launch computes all outputs: the probabilities are stored only
if they are wanted, and the gradient may overwrite the logits. Each row is used twice, for the sum and for the gradient.
The fewest bytes are one read and one write of the logits, which requires that a row fits on the chip.

version 1  warp: one warp per row; maximum and sum in one read, then a second read and the write
version 2  block: one block per row; fewer rows are in progress at a time, and more of the second reads hit the L2
version 3  x128: each thread loads and stores 16 bytes at a time, from the row's first multiple of 16 bytes
version 4  reverse: the first read runs backwards, so that the second one begins with the latest lines in the L2
version 5  staged: each row is read once and kept on the chip until its gradient is written: a short row in the
           registers of a warp, a long row in the shared memory of a block or a cluster, where the next row is loaded
           meanwhile. Rows of medium length, for which version 4 is faster, use version 4

Measured on an NVIDIA H200, B8 T1024 V50257 P50304 bf16 uniform, cold:
  1  warp               2.8993 ms   13.4% of copy
  2  block              1.3193 ms   29.5% of copy   2.20x the version before
  3  x128               0.6083 ms   64.1% of copy   2.17x the version before
  4  reverse            0.5041 ms   77.3% of copy   1.21x the version before
  5  staged             0.4073 ms   95.7% of copy   1.24x the version before
  The kernels have changed since.

Includes common.h, parts/classifier.h, parts/hopper.h, parts/launch.h.

Compile:  nvcc -O3 -arch=native classifier_fused.cu -o classifier_fused
Run:      ./classifier_fused           the default: deterministic, best over the measured shapes
          ./classifier_fused 3         version 3 at every block size
          ./classifier_fused all -b 4 -v 128256 --label-smoothing 0.1
          ./classifier_fused --help
*/
#include "common.h"
#include "parts/classifier.h"
#include "parts/hopper.h"
#include "parts/launch.h"

#include <cooperative_groups.h>

namespace bookends {

// ---------------------------------------------------------------------------------------------------------------------
// CPU reference

// The results of one row. `distance` is the mean of max - z_j weighted by the probabilities, the scale of the rounding
// errors of a sum of exponentials. `gap` is the mean of max - z_j over the vocabulary.
struct ClassifierRow {
    double loss, lse, max;
    bool correct;
    double distance, gap;
};

// One row, in double. logits: indexed by 0..V-1, a pointer to any float type or values computed on demand. dlogits and
// probs (V) may be null. z (V) is scratch.
template <typename Row>
ClassifierRow classifier_fused_cpu(double *dlogits, double *probs, double *z, const Row &logits, int target,
                                   double dloss, int V, const ClassifierOptions &options) {
    const double scale = options.logit_scale, cap = options.softcap, eps = options.label_smoothing;
    const bool ignored = target == options.ignore_index, good = !ignored && id_in_range(target, V);
    double max = -INFINITY, sum = 0, distance = 0, gap = 0;
    const double x_t = good ? scale * (double)logits[target] : NAN;
    bool largest = good;  // no logit is larger than the target's, and none before it is equal
    for (int j = 0; j < V; j++) {
        const double x = scale * (double)logits[j];
        largest = largest && (x < x_t || (x == x_t && j >= target));
        z[j] = cap > 0 ? cap * tanh(x / cap) : x;
        max = fmax(max, z[j]);
    }
    const double z_t = good ? z[target] : NAN;
    for (int j = 0; j < V; j++) {
        gap += (max - z[j]) / V;
        const double e = exp(z[j] - max);
        sum += e;
        if (e > 0) distance += e * (max - z[j]);
        if (probs) probs[j] = e;
        if (dlogits) dlogits[j] = e;
    }
    const double log_sum = V > 0 ? log(sum) : (double)NAN, lse = max + log_sum;
    for (int j = 0; probs && j < V; j++) probs[j] /= sum;
    for (int j = 0; dlogits && j < V; j++) {
        const double root = cap > 0 ? 1 / cosh(scale * (double)logits[j] / cap) : 1;  // its square is 1 - (z/cap)^2
        const double p = dlogits[j] / sum, wanted = (j == target ? 1 - eps : 0) + eps / V;
        dlogits[j] = dloss * scale * root * root * ((1 + 2 * options.z_loss * lse) * p - wanted);
        if (!good) dlogits[j] = ignored ? 0 : NAN;
    }
    double loss = (1 - eps) * (log_sum - (z_t - max)) + options.z_loss * lse * lse;
    if (eps > 0) loss += eps * (log_sum + gap);
    return {ignored ? 0 : loss, lse, max, largest, distance / sum, gap};
}

// ---------------------------------------------------------------------------------------------------------------------
// kernels

// Version 1: one warp per row. Each lane keeps a maximum and a sum, and rescales the sum when the maximum grows
// (Milakov and Gimelshein 2018), so that one read gives both. Shuffles merge the lanes. Then the row is read again and
// written. Loses on every row that the L2 does not keep: a large GPU has about 8000 rows in progress, far more than its
// L2 holds, so that DRAM moves 3 times the row's bytes instead of 2. It also needs a load or store for each element.
template <typename floatX, bool softcap, Extras extras>
__global__ void __launch_bounds__(1024, kResidentBlocks) classifier_fused_kernel1(ClassifierArguments<floatX> args) {
    typedef Packed<floatX, 1> one;
    const unsigned lane = threadIdx.x % kWarpSize;
    const long long row = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / kWarpSize;
    if (row >= args.N) return;
    const ClassifierTarget<floatX> target = find_target<softcap, extras>(args, row);
    RunningSoftmax running(args.power);
    for (unsigned j = lane; target.read && j < args.V; j += kWarpSize) {
        update_statistics<softcap, extras>(running, load_packed<one>(target.logits + j), j, target, args);
    }
    const OnlineSoftmax all = warp_merge<extras>(running.result(), args);
    const ClassifierGradient g = gradient_constants(args, target, all, dloss_of(args, row));
    if (lane == 0) write_scalars<extras>(args, row, target, all);
    __syncwarp();  // all lanes have read the target's logit
    for (unsigned j = lane; target.second_pass() && j < args.V; j += kWarpSize) {
        write_columns<softcap, extras, false>(load_packed<one>(target.logits + j), j, target, g, args);
    }
    zero_columns(target.dlogits, target.ignored ? 0 : args.V, args.P, lane, kWarpSize);
    zero_columns(target.probs, args.V, args.P, lane, kWarpSize);
}

// Version 2: one block per row. With 1024 threads per block, a multiprocessor has two rows in progress instead of 64.
// With rows of 100 KB and 132 multiprocessors these are 26 MB, which an L2 of 50 MB may still hold for the second read.
// The cost is a reduction over the block for each row. Loses on short rows, which leave threads idle. It still needs a
// load or store for each element.
template <typename floatX, bool softcap, Extras extras>
__global__ void __launch_bounds__(1024, kResidentBlocks) classifier_fused_kernel2(ClassifierArguments<floatX> args) {
    typedef Packed<floatX, 1> one;
    const long long row = blockIdx.x;
    const ClassifierTarget<floatX> target = find_target<softcap, extras>(args, row);
    RunningSoftmax running(args.power);
    for (unsigned j = threadIdx.x; target.read && j < args.V; j += blockDim.x) {
        update_statistics<softcap, extras>(running, load_packed<one>(target.logits + j), j, target, args);
    }
    // After its barriers, all threads have read the target's logit.
    const OnlineSoftmax all = block_merge<extras>(running.result(), args);
    const ClassifierGradient g = gradient_constants(args, target, all, dloss_of(args, row));
    if (threadIdx.x == 0) write_scalars<extras>(args, row, target, all);
    for (unsigned j = threadIdx.x; target.second_pass() && j < args.V; j += blockDim.x) {
        write_columns<softcap, extras, false>(load_packed<one>(target.logits + j), j, target, g, args);
    }
    zero_columns(target.dlogits, target.ignored ? 0 : args.V, args.P, threadIdx.x, blockDim.x);
    zero_columns(target.probs, args.V, args.P, threadIdx.x, blockDim.x);
}

// Adds the number of targets that are not ignored to *rows, and the sum of the losses to *total; either may be null.
// One block adds in a fixed order, so that the same inputs give the same bits.
static __global__ void __launch_bounds__(1024) classifier_totals_kernel(float *rows, float *total, const int *targets,
                                                                        const float *losses, int N, int ignore_index) {
    __shared__ double sums[kWarpSize];
    auto add_up = [](auto value) {
        for (int offset = kWarpSize / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
        return value;
    };
    // Returns the sum over the rows to thread 0. The sum of the counts is exact in double.
    auto sum_rows = [&](auto value) {
        double sum = 0;
        for (long long row = threadIdx.x; row < N; row += blockDim.x) sum += value(row);
        sum = add_up(sum);
        __syncthreads();  // the previous sums have been read
        if (threadIdx.x % kWarpSize == 0) sums[threadIdx.x / kWarpSize] = sum;
        __syncthreads();
        return add_up(threadIdx.x < blockDim.x / kWarpSize ? sums[threadIdx.x] : 0.0);
    };
    if (rows) {
        const double sum = sum_rows([&](long long row) { return targets[row] != ignore_index ? 1.0 : 0.0; });
        if (threadIdx.x == 0) *rows = (float)(*rows + sum);
    }
    if (total) {
        const double sum = sum_rows([&](long long row) { return (double)losses[row]; });
        if (threadIdx.x == 0) *total = (float)(*total + sum);
    }
}

// Whether dlogits and probs have the same offset from a multiple of 16 bytes as the logits.
template <typename floatX>
__device__ bool same_alignment(const ClassifierTarget<floatX> &t) {
    const uintptr_t logits = (uintptr_t)t.logits;
    return (!t.dlogits || ((uintptr_t)t.dlogits - logits) % 16 == 0) &&
           (!t.probs || ((uintptr_t)t.probs - logits) % 16 == 0);
}

// Version 3: version 2 with loads and stores of 16 bytes. In 16-bit types this is an eighth of the loads and stores,
// and one comparison with the running maximum for eight logits. The alignment of a row depends on P: single threads
// handle the elements before the row's first multiple of 16 bytes and behind its last one. Loses where dlogits or probs
// have another alignment than the logits: the second pass then accesses single elements. Like version 2 it depends on
// the L2 for the second read.
//
// Version 4, reverse: the first read runs from the end of the row to its beginning, the second one from the beginning
// to the end. So the second read begins with the lines that were read last, and a part of it hits the L2 even if the L2
// does not hold the whole row: an LRU cache of 60% of a row serves none of a second read in the same direction, and 60%
// of one in the opposite direction. The second read and the writes are streaming: their lines are not used again and
// leave space in the L2 for the rows of other blocks. It costs no instruction. Loses to version 5 where the rows in
// progress exceed the L2: part of each row is then read from DRAM twice. Both ideas are from llm.c's fused_classifier.
template <typename floatX, bool softcap, Extras extras, bool reverse>
__global__ void __launch_bounds__(1024, kResidentBlocks) classifier_fused_kernel3(ClassifierArguments<floatX> args) {
    typedef Packed128<floatX> x128;
    typedef Packed<floatX, 1> one;
    const long long row = blockIdx.x;
    const ClassifierTarget<floatX> target = find_target<softcap, extras>(args, row);
    const Cut cut(target.logits, args.V);
    RunningSoftmax running(args.power);
    auto read_one = [&](unsigned j) {
        update_statistics<softcap, extras>(running, load_packed<one>(target.logits + j), j, target, args);
    };
    if (target.read) {
        if (threadIdx.x < cut.head) read_one(threadIdx.x);
        for (unsigned n = threadIdx.x; n < cut.vectors; n += blockDim.x) {
            const unsigned j = cut.head + (reverse ? cut.vectors - 1 - n : n) * x128::size;
            update_statistics<softcap, extras>(running, load128(target.logits + j), j, target, args);
        }
        if (cut.tail + threadIdx.x < args.V) read_one(cut.tail + threadIdx.x);
    }
    const OnlineSoftmax all = block_merge<extras>(running.result(), args);
    const ClassifierGradient g = gradient_constants(args, target, all, dloss_of(args, row));
    if (threadIdx.x == 0) write_scalars<extras>(args, row, target, all);
    auto write_one = [&](unsigned j) {
        write_columns<softcap, extras, reverse>(load_packed<one>(target.logits + j), j, target, g, args);
    };
    if (target.second_pass()) {
        if (same_alignment(target)) {
            if (threadIdx.x < cut.head) write_one(threadIdx.x);
            for (unsigned n = threadIdx.x; n < cut.vectors; n += blockDim.x) {
                const unsigned j = cut.head + n * x128::size;
                const x128 x = reverse ? load128cs(target.logits + j) : load128(target.logits + j);
                write_columns<softcap, extras, reverse>(x, j, target, g, args);
            }
            if (cut.tail + threadIdx.x < args.V) write_one(cut.tail + threadIdx.x);
        } else {
            for (unsigned j = threadIdx.x; j < args.V; j += blockDim.x) write_one(j);
        }
    }
    if (target.ignored && target.probs) __syncthreads();  // all logits have been read before zeros replace them
    zero_columns128(target.dlogits, target.ignored ? 0 : args.V, args.P);
    zero_columns128(target.probs, args.V, args.P);
}

// The column of a thread's element before or behind the row's vectors (at most 14 elements); V if it has none.
__device__ inline unsigned edge_column(const Cut &cut, unsigned thread, unsigned V) {
    return thread < cut.head ? thread : min(cut.tail + thread - cut.head, V);
}

constexpr unsigned kHeldVectors = 8;       // per thread, at most, if a warp keeps a row in registers
constexpr unsigned kStagedVectors = 2048;  // per row, at least, for rows in shared memory: 32 KB

// Version 5 for short rows. Each row is read once: a warp keeps it in registers, `held` vectors per thread, from the
// read to the write. This saves the second read, and the rescaling of the sums, since the maximum is computed first.
// Each thread issues all of its loads before it uses the first. The cost is registers. Loses on longer rows: blocks
// that keep a row in registers in the same way were slower than version 4 (V = 4096: 80% of the copy rate instead of
// 84%, V = 8192: 81% instead of 84%, H200).
template <typename floatX, bool softcap, Extras extras, unsigned held>
__global__ void __launch_bounds__(256) classifier_fused_kernel5_short(ClassifierArguments<floatX> args) {
    typedef Packed128<floatX> x128;
    typedef Packed<floatX, 1> one;
    constexpr unsigned threads = kWarpSize;
    const unsigned thread = threadIdx.x % threads;
    const long long row = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / threads;
    if (row >= args.N) return;
    ClassifierTarget<floatX> target = describe_target(args, row, args.targets[row]);
    const Cut cut(target.logits, args.V);
    const unsigned edge = edge_column(cut, thread, args.V);
    auto has = [&](unsigned u) { return thread + u * threads < cut.vectors; };
    auto column = [&](unsigned u) { return cut.head + (thread + u * threads) * x128::size; };

    x128 x[held];
    one x_edge = {{(floatX)0.0f}};
    OnlineSoftmax all;
    if (target.read) {
#pragma unroll
        for (unsigned u = 0; u < held; u++) {
            if (has(u)) x[u] = load128(target.logits + column(u));
        }
        if (edge < args.V) x_edge = load_packed<one>(target.logits + edge);
        if (target.index < args.V) set_logit<softcap, extras>(target, args, (float)target.logits[target.index]);
        RunningSoftmax running(args.power);
        auto each = [&](auto what) {  // what(vectors, column of the first element)
#pragma unroll
            for (unsigned u = 0; u < held; u++) {
                const x128 vector[1] = {x[u]};
                if (has(u)) what(vector, column(u));
            }
            const one element[1] = {x_edge};
            if (edge < args.V) what(element, edge);
        };
        each([&](const auto &some, unsigned j) { update_max<softcap, extras>(running, some, j, 0, target, args); });
        each([&](const auto &some, unsigned) { update_sums<softcap, extras>(running, some, args); });
        all = warp_merge<extras>(running.result(), args);
    }
    __syncwarp();  // all lanes have read the target's logit
    const ClassifierGradient g = gradient_constants(args, target, all, dloss_of(args, row));
    if (thread == 0) write_scalars<extras>(args, row, target, all);
    if (!target.read && !target.ignored) {  // a bad target
        fill_columns(target.dlogits, 0, args.V, (float)NAN, thread, threads);
    } else if (target.read && target.second_pass()) {
        const bool alike = same_alignment(target);
#pragma unroll
        for (unsigned u = 0; u < held; u++) {
            if (!has(u)) continue;
            if (alike) {
                write_columns<softcap, extras, true>(x[u], column(u), target, g, args);
            } else {
#pragma unroll
                for (int k = 0; k < x128::size; k++) {
                    write_columns<softcap, extras, true>(one{{x[u][k]}}, column(u) + k, target, g, args);
                }
            }
        }
        if (edge < args.V) write_columns<softcap, extras, true>(x_edge, edge, target, g, args);
    }
    zero_columns128(target.dlogits, target.ignored ? 0 : args.V, args.P, thread, threads);
    zero_columns128(target.probs, args.V, args.P, thread, threads);
}

// Version 5 for long rows. Each row is read once: it stays in shared memory, in a ring of chunks, from its arrival
// until its gradient has been stored. Version 4 moves 3 times the row's bytes (two reads and a write), of which the L2
// saves a part; this version moves 2 times the row's bytes. Loses on rows of less than 32 KB, where the fixed costs per
// chunk and row exceed the second read, and with a softcap, where the arithmetic needs more threads: version 4 is used
// for both.
//
// The warps have four roles, one function each, which work on different rows at the same time:
//   move_chunks  the mover, one thread: issues the bulk copies of chunks into the ring and out of it
//   read_rows    the readers, half of the warps: compute the statistics of the chunks that have arrived
//   merge_rows   the clerk, one warp: merges the readers' statistics, writes the row's scalars, and sends the constants
//                of the gradient to the writers. It also handles the elements before and behind the row's 16-byte
//                multiples
//   write_rows   the writers, the other warps: write the gradient over the logits in the ring
// While one row is written, the next one is read, and the one after it is loaded. No role waits for a reduction over
// the block. A row that is too long for one block is divided among the blocks of a cluster, whose clerks exchange their
// statistics through distributed shared memory. Blocks are persistent: each processes one row after the other.
//
// The limit for long rows is DRAM: a version without any arithmetic was no faster (H200). Therefore:
// - If the gradient overwrites the logits, loaded lines are kept in the L2 (evict_last) until they are written: a write
//   that hits the L2 delays the reads less. This gains 3 to 5%; evict_first loses 5%.
// - Gradients are stored by bulk copies of 18 KB. Stores of 16 bytes per thread by the writers cost 3%.
// - The clerks' messages are st.async, whose bytes are counted by the receiver's barrier. A plain store and an arrival
//   with release at cluster scope took 2 us per row: such a fence waits for all stores to global memory.
// - The ring has room for 2.2 rows. With 1.4, a block waited for the sums of a row without a further row to load.
//   Clusters of 4 leave 12 of the 132 multiprocessors idle, but were faster where two blocks had room for 1.8 rows.
// The limit for short rows is the fixed cost per chunk and row. V = 32000 reached 80% of the copy rate when each of the
// 24 warps merged the statistics, and 94% with a clerk. More warps are no faster, since each has the fixed cost.
struct Staging {
    unsigned readers, writers;  // warps
    unsigned chunk;             // vectors, a multiple of 32
    unsigned stages;            // chunks in the ring
};
constexpr unsigned kStagedThreads = 832;   // at most: 12 warps of readers, 12 of writers; 72 registers per thread
constexpr unsigned kReadingThreads = 768;  // at most, if only scalars are written
constexpr unsigned kVectors = 3;           // per thread and chunk, at most
constexpr unsigned kSharedVectors = 6144;  // per row, at least, for two blocks to share it where rows are few
constexpr unsigned kFewRows = 16;          // per multiprocessor, at most
constexpr unsigned kLeaving = 2;           // bulk stores that may still be reading the ring when a chunk is loaded
constexpr unsigned kRowSlots = 2;          // rows whose messages between the roles are in memory

// The destination of a chunk of gradients. 0 bytes: the chunk is not stored.
struct ChunkDestination {
    void *to = nullptr;
    unsigned bytes = 0;
};

// A clerk's message to other clerks: an OnlineSoftmax without `beaten`, which version 5 does not need. One st.async.
struct alignas(16) ClerkMessage {
    float max, sum, gaps;
    unsigned count;
};

// The dynamic shared memory of a block, with the barriers by which the roles synchronise.
//
// A barrier (mbarrier) in shared memory completes a phase when the expected number of arrivals and the announced number
// of bytes have been counted; then the next phase begins. A wait names the parity of a phase: 0 in the first round of a
// ring, 1 in the second, and so on. In the first round, a wait for the previous phase returns at once.
//   full[i]              The mover arrives and announces the bytes of the chunk's bulk copy. Readers and writers wait.
//   done[i]              A lane of each writing warp arrives when its part of the gradient is in the ring, or its part
//                        of the chunk has been read if the gradient is not stored in bulk. Without writers, a lane of
//                        each reading warp. The mover waits.
//   readers_reported[i]  A lane of each reading warp arrives after it stored the warp's statistics. The clerk waits.
//   reports_read[i]      The clerk arrives when it has read them. The readers wait, for the previous phase.
//   blocks_reported[i]   The clerk arrives and announces the bytes of the messages from all clerks of the cluster,
//                        which st.async brings. (A message may arrive before the announcement.) The clerk waits. A
//                        message overwrites that of two rows before. Its receiver has read that one, since it has
//                        sent its own message for the row between.
//   gradient_known[i]    The clerk arrives when it has stored the constants of the row's gradient. The writers wait.
//   gradient_read[i]     A lane of each writing warp arrives when it has read them. The clerk waits, for the previous
//                        phase.
struct StagedMemory {
    uint4 *ring;                                                  // (stages, chunk)
    ClerkMessage *messages;                                       // (kRowSlots, ranks): from all clerks
    ChunkDestination *destinations;                               // (stages): the mover's own
    uint64_t *full, *done;                                        // (stages)
    uint64_t *readers_reported, *reports_read, *blocks_reported;  // (kRowSlots)
    uint64_t *gradient_known, *gradient_read;                     // (kRowSlots)
    ClassifierGradient *gradient;                                 // (kRowSlots)
    float *target_logit;                                          // (kRowSlots): from the first block's clerk
    OnlineSoftmax *reports;                                       // (kRowSlots, readers)

    __host__ __device__ StagedMemory(void *shared, const Staging &plan, unsigned ranks) {
        ring = (uint4 *)shared;
        messages = (ClerkMessage *)(ring + (size_t)plan.stages * plan.chunk);
        destinations = (ChunkDestination *)(messages + kRowSlots * ranks);
        full = (uint64_t *)(destinations + plan.stages);
        done = full + plan.stages;
        readers_reported = done + plan.stages;
        reports_read = readers_reported + kRowSlots;
        blocks_reported = reports_read + kRowSlots;
        gradient_known = blocks_reported + kRowSlots;
        gradient_read = gradient_known + kRowSlots;
        gradient = (ClassifierGradient *)(gradient_read + kRowSlots);
        target_logit = (float *)(gradient + kRowSlots);
        reports = (OnlineSoftmax *)(target_logit + kRowSlots);
    }
    static size_t bytes(const Staging &plan, unsigned ranks) {
        char *const begin = (char *)1024;  // any aligned address
        return (char *)(StagedMemory(begin, plan, ranks).reports + kRowSlots * plan.readers) - begin;
    }
    // Called by a warp.
    __device__ void make_barriers(const Staging &plan, bool writes) const {
        namespace ptx = cuda::ptx;
        const unsigned lane = threadIdx.x % kWarpSize;
        for (unsigned i = lane; i < plan.stages; i += kWarpSize) {
            ptx::mbarrier_init(&full[i], 1);
            ptx::mbarrier_init(&done[i], writes ? plan.writers : plan.readers);
        }
        if (lane < kRowSlots) {
            ptx::mbarrier_init(&readers_reported[lane], plan.readers);
            ptx::mbarrier_init(&reports_read[lane], 1);
            ptx::mbarrier_init(&blocks_reported[lane], 1);
            ptx::mbarrier_init(&gradient_known[lane], 1);
            if (writes) ptx::mbarrier_init(&gradient_read[lane], plan.writers);
        }
        ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
        __syncwarp();
    }
};

// The data that all roles of a block use.
struct StagedBlock {
    const Staging &plan;
    const StagedMemory memory;
    unsigned rank, ranks;    // of the block in its cluster
    long long first, step;   // the cluster's rows
    unsigned begin, stride;  // the first vectors of the block's chunks in a row
    bool writes;             // dlogits or probs
};

// The warp arrives at the barrier once all of its lanes have reached this call.
__device__ inline void warp_arrive(uint64_t *barrier) {
    namespace ptx = cuda::ptx;
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0)
        ptx::mbarrier_arrive(ptx::sem_release, ptx::scope_cta, ptx::space_shared, barrier);
}

// The number of vectors of each lane in a chunk of `count` vectors, if each warp has every warps-th group of 32.
__device__ inline unsigned vectors_of_warp(unsigned count, unsigned warp, unsigned warps) {
    const unsigned groups = count / kWarpSize;
    return groups > warp ? (groups - warp - 1) / warps + 1 : 0;
}

// Calls what(n) with n as an integral constant from 1 to kVectors; does nothing for 0.
template <unsigned most = kVectors, typename What>
__device__ void with_vectors(unsigned n, What what) {
    if (n == most) {
        what(std::integral_constant<unsigned, most>());
    } else if constexpr (most > 1) {
        with_vectors<most - 1>(n, what);
    }
}

// The target of a row, or 0 past the last row. Each role loads it one row ahead.
template <typename floatX>
__device__ int target_at(const ClassifierArguments<floatX> &args, long long row) {
    return row < args.N ? args.targets[row] : 0;
}

// The mover. It keeps the ring full: it loads a chunk as soon as the gradient of the previous chunk in the same place
// has left the ring.
template <typename floatX>
__device__ void move_chunks(const ClassifierArguments<floatX> &args, const StagedBlock &block) {
    namespace ptx = cuda::ptx;
    const StagedMemory &memory = block.memory;
    const unsigned chunk_size = block.plan.chunk, stages = block.plan.stages;
    Ring in, out;
    unsigned loaded = 0;
    auto store_next = [&] {
        wait_for_phase(&memory.done[out.slot], out.phase);
        const ChunkDestination destination = memory.destinations[out.slot];
        if (destination.bytes > 0) {
            ptx::cp_async_bulk(ptx::space_global, ptx::space_shared, destination.to,
                               memory.ring + out.slot * chunk_size, destination.bytes);
        }
        ptx::cp_async_bulk_commit_group();
        out.next(stages);
    };
    int next_id = target_at(args, block.first);
    for (long long row = block.first; row < args.N; row += block.step) {
        const ClassifierTarget<floatX> target = describe_target(args, row, next_id);
        next_id = target_at(args, row + block.step);
        const Cut cut(target.logits, args.V);
        const bool stored = target.dlogits && same_alignment(target);
        for (unsigned v = block.begin; target.read && v < cut.vectors; v += block.stride) {
            if (loaded + kLeaving >= stages) store_next();
            if (loaded >= stages) ptx::cp_async_bulk_wait_group_read(ptx::n32_t<kLeaving>());
            uint64_t *const full = &memory.full[in.slot];
            const unsigned bytes = min(chunk_size, cut.vectors - v) * 16;
            const size_t column = cut.head + (size_t)v * Packed128<floatX>::size;
            memory.destinations[in.slot] =
                stored ? ChunkDestination{target.dlogits + column, bytes} : ChunkDestination{};
            ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, full, bytes);
            load_bulk(memory.ring + in.slot * chunk_size, target.logits + column, bytes, full,
                      args.dlogits == args.logits);
            in.next(stages);
            loaded++;
        }
    }
    for (unsigned left = min(loaded, stages - kLeaving); left > 0; left--) store_next();
    ptx::cp_async_bulk_wait_group(ptx::n32_t<0>());
}

// A reader: adds the vectors of its warp to the statistics.
template <typename floatX, Extras extras>
__device__ void read_rows(const ClassifierArguments<floatX> &args, const StagedBlock &block) {
    typedef Packed128<floatX> x128;
    static_assert(extras != kAllExtras, "readers do not know the target's logit");
    const StagedMemory &memory = block.memory;
    const unsigned chunk_size = block.plan.chunk, readers = block.plan.readers, warp = threadIdx.x / kWarpSize;
    const unsigned offset = threadIdx.x * x128::size, apart = readers * kWarpSize * x128::size;
    const unsigned vectors_of_chunk = vectors_of_warp(chunk_size, warp, readers);
    Ring ring, slots;
    int next_id = target_at(args, block.first);
    for (long long row = block.first; row < args.N; row += block.step) {
        const ClassifierTarget<floatX> target = describe_target(args, row, next_id);
        next_id = target_at(args, row + block.step);
        if (!target.read) continue;
        const Cut cut(target.logits, args.V);
        RunningSoftmax running(args.power);
        for (unsigned v = block.begin; v < cut.vectors; v += block.stride) {
            const unsigned count = min(chunk_size, cut.vectors - v), j = cut.head + v * x128::size + offset;
            const floatX *const chunk = (const floatX *)(memory.ring + ring.slot * chunk_size) + offset;
            const unsigned n = count == chunk_size ? vectors_of_chunk : vectors_of_warp(count, warp, readers);
            wait_for_phase(&memory.full[ring.slot], ring.phase);
            with_vectors(n, [&](auto vectors) {
                x128 x[vectors.value];
#pragma unroll
                for (unsigned u = 0; u < vectors.value; u++) x[u] = load128(chunk + u * apart);
                update_statistics<false, extras>(running, x, j, apart, target, args);
            });
            if (n * readers * kWarpSize + threadIdx.x < count) {  // the last vectors of the row, less than a warp has
                update_statistics<false, extras>(running, load128(chunk + n * apart), j + n * apart, target, args);
            }
            if (!block.writes) warp_arrive(&memory.done[ring.slot]);
            ring.next(block.plan.stages);
        }
        const OnlineSoftmax all = warp_merge<extras>(running.result(), args);
        wait_for_phase(&memory.reports_read[slots.slot], slots.phase ^ 1);
        if (threadIdx.x % kWarpSize == 0) memory.reports[slots.slot * readers + warp] = all;
        warp_arrive(&memory.readers_reported[slots.slot]);
        slots.next(kRowSlots);
    }
}

// Sends the statistics of the block's part of a row, and from the first block the target's logit, to the clerks of all
// blocks of the cluster. Returns the merged statistics of the row. Called by the clerk.
template <Extras extras, typename floatX>
__device__ OnlineSoftmax merge_blocks(const OnlineSoftmax &own, float logit, const Ring &slots,
                                      const ClassifierArguments<floatX> &args, const StagedBlock &block) {
    namespace ptx = cuda::ptx;
    const auto cluster = cooperative_groups::this_cluster();
    const unsigned lane = threadIdx.x % kWarpSize, ranks = block.ranks;
    uint64_t *const blocks_reported = &block.memory.blocks_reported[slots.slot];
    ClerkMessage *const messages = block.memory.messages + slots.slot * ranks;
    if (lane == 0) {
        const unsigned bytes = ranks * sizeof(ClerkMessage) + sizeof(logit);
        ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, blocks_reported, bytes);
    }
    if (lane < ranks) {  // a lane for each receiver
        const ClerkMessage message = {own.max, own.sum, own.gaps, own.count};
        int words[4];
        static_assert(sizeof(message) == sizeof(words), "a message is one st.async");
        memcpy(words, &message, sizeof(words));
        uint64_t *const barrier = cluster.map_shared_rank(blocks_reported, lane);
        ptx::st_async((int *)cluster.map_shared_rank(messages + block.rank, lane), words, barrier);
        float *const target_logit = &block.memory.target_logit[slots.slot];
        if (block.rank == 0) ptx::st_async(cluster.map_shared_rank(target_logit, lane), logit, barrier);
    }
    while (!ptx::mbarrier_try_wait_parity(ptx::sem_acquire, ptx::scope_cluster, blocks_reported, slots.phase)) {
    }
    OnlineSoftmax all;
    if (lane < ranks) {
        const ClerkMessage &message = messages[lane];
        all = {message.max, message.sum, message.gaps, message.count};
    }
    return warp_merge<extras>(all, args);
}

// The clerk. It loads targets two rows ahead, and the logits at these targets one row ahead. The first block's clerk
// handles the row's edges: the elements before and behind its 16-byte multiples.
template <typename floatX, Extras extras>
__device__ void merge_rows(const ClassifierArguments<floatX> &args, const StagedBlock &block) {
    typedef Packed<floatX, 1> one;
    const StagedMemory &memory = block.memory;
    const unsigned lane = threadIdx.x % kWarpSize, readers = block.plan.readers;
    Ring slots;
    int next_id = target_at(args, block.first), id_after = target_at(args, block.first + block.step);
    floatX next_logit = (floatX)0.0f, next_edge = (floatX)0.0f;  // a conversion to float would wait for the loads
    auto load_elements = [&](long long row, int id) {
        if (row >= args.N || block.rank > 0) return;
        const ClassifierTarget<floatX> target = describe_target(args, row, id);
        const unsigned column = edge_column(Cut(target.logits, args.V), lane, args.V);
        if (target.read && target.index < args.V) next_logit = target.logits[target.index];
        if (target.read && column < args.V) next_edge = target.logits[column];
    };
    load_elements(block.first, next_id);
    for (long long row = block.first; row < args.N; row += block.step) {
        ClassifierTarget<floatX> target = describe_target(args, row, next_id);
        const float logit = (float)next_logit;
        const one edge = {{next_edge}};
        next_id = id_after;
        id_after = target_at(args, row + 2 * block.step);
        load_elements(row + block.step, next_id);
        const float dloss = dloss_of(args, row);
        const unsigned column = block.rank > 0 ? args.V : edge_column(Cut(target.logits, args.V), lane, args.V);
        OnlineSoftmax all;
        if (target.read) {
            if (target.index < args.V) set_logit<false, extras>(target, args, logit);
            RunningSoftmax running(args.power);
            if (column < args.V) update_statistics<false, extras>(running, edge, column, target, args);
            wait_for_phase(&memory.readers_reported[slots.slot], slots.phase);
            all = running.result();
            if (lane < readers) all = merge<extras>(all, memory.reports[slots.slot * readers + lane], args);
            warp_arrive(&memory.reports_read[slots.slot]);
            all = warp_merge<extras>(all, args);
            if (block.ranks > 1) {
                all = merge_blocks<extras>(all, logit, slots, args, block);
                if (target.index < args.V) set_logit<false, extras>(target, args, memory.target_logit[slots.slot]);
            }
        }
        const ClassifierGradient g = gradient_constants(args, target, all, dloss);
        if (target.read && block.writes) {
            wait_for_phase(&memory.gradient_read[slots.slot], slots.phase ^ 1);
            if (lane == 0) memory.gradient[slots.slot] = g;
            warp_arrive(&memory.gradient_known[slots.slot]);
        }
        if (block.rank == 0 && lane == 0) write_scalars<extras>(args, row, target, all);
        if (!target.read) continue;
        if (column < args.V) {
            write_columns<false, extras, true>(edge, column, target, g, args);
            if (target.dlogits && target.ignored) target.dlogits[column] = (floatX)0.0f;
        }
        slots.next(kRowSlots);
    }
}

// The place of a writer among the writers of a block.
struct Writer {
    unsigned thread, threads, warp;
    unsigned vectors_of_chunk;  // vectors_of_warp() for a whole chunk
};

// Stores the target's gradient if it belongs to the vector at chunk[i]. `column` is the column of chunk[0]. This is a
// second store to the element, by the same thread, as in write_columns().
template <typename floatX>
__device__ void put_target(floatX *chunk, unsigned i, unsigned column, const ClassifierTarget<floatX> &target,
                           const ClassifierGradient &g) {
    const unsigned k = target.index - column - i;
    if (k < Packed128<floatX>::size) chunk[i + k] = (floatX)g.at_target;
}

// Writes a chunk if only the gradient is wanted and it is stored in bulk.
template <Extras extras, typename floatX>
__device__ void write_gradient_chunk(floatX *chunk, unsigned count, unsigned column, const Writer &writer,
                                     const ClassifierTarget<floatX> &target, const ClassifierGradient &g,
                                     const ClassifierArguments<floatX> &args, const Staging &plan) {
    typedef Packed128<floatX> x128;
    const unsigned offset = writer.thread * x128::size, apart = writer.threads * x128::size;
    const unsigned n =
        count == plan.chunk ? writer.vectors_of_chunk : vectors_of_warp(count, writer.warp, plan.writers);
    with_vectors(n, [&](auto vectors) {
        x128 x[vectors.value];
#pragma unroll
        for (unsigned u = 0; u < vectors.value; u++) x[u] = load128(chunk + offset + u * apart);
#pragma unroll
        for (unsigned u = 0; u < vectors.value; u++) x[u] = gradient_of<false, extras>(x[u], g, args);
#pragma unroll
        for (unsigned u = 0; u < vectors.value; u++) store128(chunk + offset + u * apart, x[u]);
#pragma unroll
        for (unsigned u = 0; u < vectors.value; u++) put_target(chunk, offset + u * apart, column, target, g);
    });
    if (n * writer.threads + writer.thread < count) {  // the last vectors of the row, less than a warp has
        const unsigned i = offset + n * apart;
        store128(chunk + i, gradient_of<false, extras>(load128(chunk + i), g, args));
        put_target(chunk, i, column, target, g);
    }
}

// Writes a chunk if probabilities are wanted or the row is ignored. `stored`: the chunk is then stored in bulk.
template <Extras extras, typename floatX>
__device__ void write_any_chunk(floatX *chunk, unsigned count, unsigned column, const Writer &writer, bool stored,
                                const ClassifierTarget<floatX> &target, const ClassifierGradient &g,
                                const ClassifierArguments<floatX> &args) {
    typedef Packed128<floatX> x128;
    const unsigned offset = writer.thread * x128::size, apart = writer.threads * x128::size;
    x128 zeros;
    for (int k = 0; k < x128::size; k++) zeros[k] = (floatX)0.0f;
#pragma unroll 2
    for (unsigned i = offset; i < count * x128::size; i += apart) {
        const x128 x = load128(chunk + i);
        if (target.probs) store128cs(target.probs + column + i, probabilities_of<false, extras>(x, g, args));
        if (stored) store128(chunk + i, target.ignored ? zeros : gradient_of<false, extras>(x, g, args));
        if (stored) put_target(chunk, i, column, target, g);
    }
}

// Writes a chunk by elements, if the logits and the results have different alignments.
template <Extras extras, typename floatX>
__device__ void write_chunk_by_element(floatX *chunk, unsigned count, unsigned column, const Writer &writer,
                                       const ClassifierTarget<floatX> &target, const ClassifierGradient &g,
                                       const ClassifierArguments<floatX> &args) {
    typedef Packed<floatX, 1> one;
    for (unsigned i = writer.thread; i < count * Packed128<floatX>::size; i += writer.threads) {
        write_columns<false, extras, true>(load_packed<one>(chunk + i), column + i, target, g, args);
        if (target.dlogits && target.ignored) target.dlogits[column + i] = (floatX)0.0f;
    }
}

// A writer. Rows with bad targets, and the padding, need no chunks.
template <typename floatX, Extras extras>
__device__ void write_rows(const ClassifierArguments<floatX> &args, const StagedBlock &block) {
    namespace ptx = cuda::ptx;
    const Staging &plan = block.plan;
    const StagedMemory &memory = block.memory;
    const unsigned thread = threadIdx.x - plan.readers * kWarpSize, warp = threadIdx.x / kWarpSize - plan.readers;
    const Writer writer = {thread, plan.writers * kWarpSize, warp, vectors_of_warp(plan.chunk, warp, plan.writers)};
    const unsigned fill_thread = block.rank * writer.threads + thread, fill_threads = block.ranks * writer.threads;
    Ring ring, slots;
    int next_id = target_at(args, block.first);
    for (long long row = block.first; row < args.N; row += block.step) {
        const ClassifierTarget<floatX> target = describe_target(args, row, next_id);
        next_id = target_at(args, row + block.step);
        const Cut cut(target.logits, args.V);
        if (!target.read) {
            fill_columns(target.dlogits, 0, args.V, target.ignored ? 0.0f : (float)NAN, fill_thread, fill_threads);
        } else {
            wait_for_phase(&memory.gradient_known[slots.slot], slots.phase);
            const ClassifierGradient g = memory.gradient[slots.slot];
            warp_arrive(&memory.gradient_read[slots.slot]);
            slots.next(kRowSlots);
            const bool aligned = same_alignment(target), stored = target.dlogits && aligned;
            auto for_each_chunk = [&](auto write) {  // write(chunk, number of vectors, column of the first element)
                for (unsigned v = block.begin; v < cut.vectors; v += block.stride) {
                    wait_for_phase(&memory.full[ring.slot], ring.phase);
                    write((floatX *)(memory.ring + ring.slot * plan.chunk), min(plan.chunk, cut.vectors - v),
                          cut.head + v * Packed128<floatX>::size);
                    if (stored) ptx::fence_proxy_async(ptx::space_shared);  // before the bulk copy reads the chunk
                    warp_arrive(&memory.done[ring.slot]);
                    ring.next(plan.stages);
                }
            };
            if (stored && !target.ignored && !target.probs) {
                for_each_chunk([&](floatX *chunk, unsigned count, unsigned column) {
                    write_gradient_chunk<extras>(chunk, count, column, writer, target, g, args, plan);
                });
            } else if (aligned) {
                for_each_chunk([&](floatX *chunk, unsigned count, unsigned column) {
                    write_any_chunk<extras>(chunk, count, column, writer, stored, target, g, args);
                });
            } else {
                for_each_chunk([&](floatX *chunk, unsigned count, unsigned column) {
                    write_chunk_by_element<extras>(chunk, count, column, writer, target, g, args);
                });
            }
        }
        zero_columns(target.dlogits, args.V, args.P, fill_thread, fill_threads);
        zero_columns(target.probs, args.V, args.P, fill_thread, fill_threads);
    }
}

// Divides the block into its roles. The mover initialises the barriers and begins at once; the other roles begin when
// the barriers of all blocks of the cluster exist. No block exits while others may send it a message.
template <typename floatX, Extras extras>
__device__ void stage_rows(const ClassifierArguments<floatX> &args, const Staging &plan) {
    extern __shared__ uint4 staged[];
    const auto cluster = cooperative_groups::this_cluster();
    const unsigned rank = cluster.block_rank(), ranks = cluster.num_blocks();
    const StagedBlock block = {plan,
                               StagedMemory(staged, plan, ranks),
                               rank,
                               ranks,
                               blockIdx.x / ranks,
                               gridDim.x / ranks,
                               rank * plan.chunk,
                               ranks * plan.chunk,
                               args.dlogits || args.probs};
    const unsigned warp = threadIdx.x / kWarpSize, clerk = plan.readers + plan.writers, mover = clerk + 1;
    if (warp == mover) block.memory.make_barriers(plan, block.writes);
    auto barriers_made = cluster.barrier_arrive();
    if (warp == mover) {
        if (threadIdx.x % kWarpSize == 0) move_chunks(args, block);
        __syncwarp();
        cluster.barrier_wait(std::move(barriers_made));
    } else {
        cluster.barrier_wait(std::move(barriers_made));
        if (warp < plan.readers) {
            read_rows<floatX, extras>(args, block);
        } else if (warp == clerk) {
            merge_rows<floatX, extras>(args, block);
        } else {
            write_rows<floatX, extras>(args, block);
        }
    }
    cluster.sync();
}

template <typename floatX, Extras extras>
__global__ void __launch_bounds__(kStagedThreads, 1)
    classifier_fused_kernel5(ClassifierArguments<floatX> args, Staging plan) {
    if constexpr (kHasClusters) stage_rows<floatX, extras>(args, plan);
}

// ---------------------------------------------------------------------------------------------------------------------
// launchers

// Every launcher:  logits (N, P), of which columns 0..V-1 are used; targets (N) int32; dlogits (N, P), losses (N), lse
// (N), probs (N, P), correct (N) int32, each of which may be null: not computed; dlosses (N), a factor of each row's
// gradient beside options.dloss, or null: 1. Row-major, device memory, aligned to their element only. dlogits may be
// logits itself; otherwise nothing overlaps. Columns V..P-1 of the logits are never read, and become 0 in dlogits and
// probs. losses and lse are in nats. correct is 1 if the largest logit (the first among equals) is the target's.
//
// A row whose target is options.ignore_index (any value): loss 0, gradient 0, not correct; lse and probs as for any
// row. If neither is wanted, the row is not read. Any other target outside 0..V-1: loss NaN, gradient NaN in columns
// 0..V-1, not correct, and *status (a status word that the caller has set to kStatusOk; status may be null) becomes the
// first such row. A logit of -inf has probability 0. If a row holds a NaN or +inf, or only -inf (or V = 0), its lse,
// loss, probabilities and gradient are NaN; with a softcap, infinities become +-softcap instead. If a logit is NaN,
// correct is 0.
//
// losses are neither multiplied by dloss nor divided by the divisor. With options.add_losses they are added to the
// contents of `losses` (an ignored row adds 0); all other outputs are overwritten. For the gradient of the losses'
// mean, set options.dloss to 1 over the number of targets that are not ignored, or options.divisor to that number.
// block_size: a multiple of 32 up to 1024; the table of versions has the fastest. Version 5 limits it to 128..832, and
// to at most 768 if only scalars are written. Allocates nothing, does not synchronise. Returns cudaErrorInvalidValue
// for P < V, a negative size, another block size, or options that valid_options() refuses; otherwise the error of the
// launch. For N = 0 it returns cudaSuccess without a launch. A pending CUDA error stays pending.
//
// dlogits and probs are computed in float and rounded once. The same inputs give the same bits for the same outputs at
// the same block size, with version 1 at any block size. With a softcap, z is exact to softcap * 1e-7. Probabilities
// below 2^-126 are 0, or below 2^-63 where |z| is beyond 2^23. The label smoothing term is the mean of max_i z_i - z_j
// over the vocabulary: a sum in float, scaled so that no partial sum overflows, with compensated additions. Its
// relative error is at most 1e-6 for all finite logits, and a loss is infinite only if it is beyond float's range.

template <typename floatX>
using ClassifierFused = cudaError_t (*)(floatX *dlogits, float *losses, float *lse, floatX *probs, int *correct,
                                        const floatX *logits, const int *targets, const float *dlosses,
                                        status_word *status, int N, int V, int P, ClassifierOptions options,
                                        int block_size, cudaStream_t stream);

// Computes a mean over the rows that are not ignored without the host. Adds the number of these rows to *rows, and the
// sum of all N losses to *total; both are floats in device memory, and either may be null. Set both to 0 and call this
// with the targets of each micro-batch and losses = total = null: *rows is then the divisor of ClassifierOptions. Call
// it again with the losses: *total / *rows is their mean. Targets outside the vocabulary count, and their losses are
// NaN. A call rounds each of its sums once, so that *rows is exact up to 2^24. The same inputs give the same bits.
// Targets may be null without rows, losses without total.
inline cudaError_t classifier_totals(float *rows, float *total, const int *targets, const float *losses, int N,
                                     int ignore_index, cudaStream_t stream) {
    if (N < 0 || (N > 0 && ((rows && !targets) || (total && !losses)))) return cudaErrorInvalidValue;
    if (N == 0 || (!rows && !total)) return cudaSuccess;
    const int block_size = (int)std::min(ceil_div((long long)N, (long long)kWarpSize) * kWarpSize, 1024LL);
    return launch_kernel(classifier_totals_kernel, 1, block_size, 0, stream, rows, total, targets, losses, N,
                         ignore_index);
}

template <bool softcap, Extras extras, typename floatX>
cudaError_t launch_reverse(const ClassifierArguments<floatX> &args, int block_size, cudaStream_t stream) {
    return launch_kernel(classifier_fused_kernel3<floatX, softcap, extras, true>, args.N, block_size, 0, stream, args);
}

template <typename floatX>
cudaError_t classifier_fused1(floatX *dlogits, float *losses, float *lse, floatX *probs, int *correct,
                              const floatX *logits, const int *targets, const float *dlosses, status_word *status,
                              int N, int V, int P, ClassifierOptions options, int block_size, cudaStream_t stream) {
    return classifier_launch(dlogits, losses, lse, probs, correct, logits, targets, dlosses, status, N, V, P, options,
                             [=](const ClassifierArguments<floatX> &args, auto softcap, auto extras) {
                                 if (!valid_block_size(block_size)) return cudaErrorInvalidValue;
                                 int block = block_size;
                                 const unsigned grid_size = grid_blocks((long long)N * kWarpSize, &block);
                                 return launch_kernel(classifier_fused_kernel1<floatX, softcap.value, extras.value>,
                                                      grid_size, block, 0, stream, args);
                             });
}

template <typename floatX>
cudaError_t classifier_fused2(floatX *dlogits, float *losses, float *lse, floatX *probs, int *correct,
                              const floatX *logits, const int *targets, const float *dlosses, status_word *status,
                              int N, int V, int P, ClassifierOptions options, int block_size, cudaStream_t stream) {
    return classifier_launch(dlogits, losses, lse, probs, correct, logits, targets, dlosses, status, N, V, P, options,
                             [=](const ClassifierArguments<floatX> &args, auto softcap, auto extras) {
                                 if (!valid_block_size(block_size)) return cudaErrorInvalidValue;
                                 return launch_kernel(classifier_fused_kernel2<floatX, softcap.value, extras.value>, N,
                                                      block_size, 0, stream, args);
                             });
}

template <typename floatX>
cudaError_t classifier_fused3(floatX *dlogits, float *losses, float *lse, floatX *probs, int *correct,
                              const floatX *logits, const int *targets, const float *dlosses, status_word *status,
                              int N, int V, int P, ClassifierOptions options, int block_size, cudaStream_t stream) {
    return classifier_launch(dlogits, losses, lse, probs, correct, logits, targets, dlosses, status, N, V, P, options,
                             [=](const ClassifierArguments<floatX> &args, auto softcap, auto extras) {
                                 if (!valid_block_size(block_size)) return cudaErrorInvalidValue;
                                 return launch_kernel(
                                     classifier_fused_kernel3<floatX, softcap.value, extras.value, false>, N,
                                     block_size, 0, stream, args);
                             });
}

template <typename floatX>
cudaError_t classifier_fused4(floatX *dlogits, float *losses, float *lse, floatX *probs, int *correct,
                              const floatX *logits, const int *targets, const float *dlosses, status_word *status,
                              int N, int V, int P, ClassifierOptions options, int block_size, cudaStream_t stream) {
    return classifier_launch(dlogits, losses, lse, probs, correct, logits, targets, dlosses, status, N, V, P, options,
                             [=](const ClassifierArguments<floatX> &args, auto softcap, auto extras) {
                                 if (!valid_block_size(block_size)) return cudaErrorInvalidValue;
                                 return launch_reverse<softcap.value, extras.value>(args, block_size, stream);
                             });
}

// Plans version 5 for rows of `vectors` vectors on blocks with `shared` bytes of shared memory. Uses the fewest blocks
// per row (1, 2, 4 or 8) whose rings have room for 2.2 rows, at most 8; or 16, if most_ranks allows it and 8 have room
// for less than 1.5 rows. Not every device has clusters of 16, and they leave more multiprocessors idle. If only
// scalars are written, a chunk leaves the ring after it is read, and one block is enough. If the rows are few and long,
// two blocks share each row, so that the first row is read and the last one is written in half the time. (V = 50304,
// H200: this saves 4% of the time of 2048 rows, 5% of 640; V = 40960 lost 3%.) Returns false if there is no plan, and
// for rows of less than 32 KB.
inline bool plan_staging(Staging *plan, unsigned *ranks, unsigned vectors, bool writes, bool few, int block_size,
                         size_t shared, unsigned most_ranks) {
    if (vectors < kStagedVectors) return false;
    const unsigned most = writes ? kStagedThreads : kReadingThreads;
    const unsigned warps = std::clamp(block_size, 4 * kWarpSize, (int)most) / kWarpSize;
    plan->writers = writes ? (warps - 2) / 2 : 0;  // the clerk and the mover are 2 warps
    plan->readers = warps - 2 - plan->writers;
    const unsigned threads = (writes ? plan->writers : plan->readers) * kWarpSize;
    *ranks = few && writes && vectors >= kSharedVectors ? 2 : 1;
    const size_t row_bytes = (size_t)vectors * 16;
    while (writes && *ranks < 8 && row_bytes / *ranks > shared * 45 / 100) *ranks *= 2;
    if (writes && most_ranks == 16 && row_bytes / 8 > shared * 2 / 3) *ranks = 16;
    const unsigned chunks = ceil_div(vectors, *ranks * threads * kVectors);  // per row and block
    // Several blocks have equal shares. The chunks of a single block are a multiple of its threads.
    const unsigned round = *ranks > 1 ? kWarpSize : threads;
    plan->chunk = ceil_div(ceil_div(vectors, *ranks * chunks), round) * round;
    plan->stages = (unsigned)(shared / (plan->chunk * 16));
    while (plan->stages > 0 && StagedMemory::bytes(*plan, *ranks) > shared) plan->stages--;
    return plan->stages >= (writes ? chunks : 1) + kLeaving;
}

// Returns cudaErrorNotSupported if there is no plan, which depends only on the device and the arguments.
template <Extras extras, typename floatX>
cudaError_t launch_staged(const ClassifierArguments<floatX> &args, int block_size, cudaStream_t stream) {
    const auto kernel = classifier_fused_kernel5<floatX, extras>;
    const unsigned vectors = args.V / Packed128<floatX>::size;
    KernelFacts facts;
    cudaError_t error = kernel_facts(&facts, kernel);
    if (error != cudaSuccess) return error;
    const bool few = args.N <= kFewRows * (long long)facts.multiprocessors;
    Staging plan = {};
    unsigned ranks = 1, threads = 0;
    int clusters = 0;
    for (unsigned most_ranks = 16; clusters == 0; most_ranks /= 2) {
        if (most_ranks < 8 || !facts.sm_90_code ||
            !plan_staging(&plan, &ranks, vectors, args.dlogits || args.probs, few, block_size,
                          (size_t)facts.dynamic_shared, most_ranks)) {
            return cudaErrorNotSupported;
        }
        threads = (plan.readers + plan.writers + 2) * kWarpSize;
        error = active_clusters(&clusters, kernel, ranks, threads);
        if (error != cudaSuccess) return error;
    }
    cudaLaunchAttribute shape = {};
    shape.id = cudaLaunchAttributeClusterDimension;
    shape.val.clusterDim = {ranks, 1, 1};
    cudaLaunchConfig_t config = {};
    config.attrs = &shape;
    config.numAttrs = 1;
    config.stream = stream;
    config.dynamicSmemBytes = StagedMemory::bytes(plan, ranks);
    config.blockDim = threads;
    config.gridDim = std::min((unsigned)clusters, (unsigned)args.N) * ranks;
    return launch_kernel(config, kernel, args, plan);
}

// Returns cudaErrorNotSupported for rows that do not fit into the registers of a warp.
template <bool softcap, Extras extras, typename floatX>
cudaError_t launch_short(const ClassifierArguments<floatX> &args, int block_size, cudaStream_t stream) {
    const unsigned vectors = args.V / Packed128<floatX>::size;
    if (vectors > kHeldVectors * kWarpSize) return cudaErrorNotSupported;
    int block = std::min(block_size, 2 * kWarpSize);  // the warps of a small block end at about the same time
    const unsigned grid_size = grid_blocks((long long)args.N * kWarpSize, &block);
    const auto kernel = vectors <= kHeldVectors / 2 * kWarpSize
                            ? classifier_fused_kernel5_short<floatX, softcap, extras, kHeldVectors / 2>
                            : classifier_fused_kernel5_short<floatX, softcap, extras, kHeldVectors>;
    return launch_kernel(kernel, grid_size, block, 0, stream, args);
}

// Version 5 falls back on version 4 for a row that does not fit into the registers of a warp if the row is shorter than
// 32 KB, the device has no clusters (before compute capability 9.0), or the row is too long for a cluster; also with a
// softcap, for `correct`, and for logit_scale <= 0. The arithmetic then takes longer than the second read, and the more
// threads of version 4 are faster (H200, V = 50257, softcap: 0.70 ms instead of 0.84; or instead of 0.79 with a
// polynomial tanh for |u| at most 1, which replaces two of the three special functions).
template <typename floatX>
cudaError_t classifier_fused5(floatX *dlogits, float *losses, float *lse, floatX *probs, int *correct,
                              const floatX *logits, const int *targets, const float *dlosses, status_word *status,
                              int N, int V, int P, ClassifierOptions options, int block_size, cudaStream_t stream) {
    return classifier_launch(
        dlogits, losses, lse, probs, correct, logits, targets, dlosses, status, N, V, P, options,
        [=](const ClassifierArguments<floatX> &args, auto softcap, auto extras) {
            if (!valid_block_size(block_size)) return cudaErrorInvalidValue;
            cudaError_t error = launch_short<softcap.value, extras.value>(args, block_size, stream);
            if (error != cudaErrorNotSupported) return error;
            if constexpr (!softcap.value && extras.value != kAllExtras) {
                error = launch_staged<extras.value>(args, block_size, stream);
                if (error != cudaErrorNotSupported) return error;
            }
            // Version 4 is fastest with about eight vectors a thread.
            const int threads =
                std::clamp((int)(args.V / Packed128<floatX>::size) / 8 / kWarpSize * kWarpSize, 64, 512);
            return launch_reverse<softcap.value, extras.value>(args, std::min(block_size, threads), stream);
        });
}

// A property that the check's error bounds depend on: the number of elements whose sum a thread adds at a time.
struct ClassifierProperties {
    int elements_per_load = 1;
};

template <typename floatX>
constexpr Version<ClassifierFused<floatX>, ClassifierProperties> classifier_fused_versions[] = {
    {1, "warp", "one warp per row, maximum and sum in one read", classifier_fused1<floatX>, 256},
    {2, "block", "one block per row", classifier_fused2<floatX>, 512, kSameAtABlockSize},
    {3, "x128", "each thread loads and stores 16 bytes", classifier_fused3<floatX>, 512, kSameAtABlockSize,
     {Packed128<floatX>::size}},
    {4, "reverse", "two passes in opposite directions, so that the second one hits the L2", classifier_fused4<floatX>,
     512, kSameAtABlockSize, {Packed128<floatX>::size}},
    {5, "staged", "each row is read once and kept on the chip while the next one is loaded", classifier_fused5<floatX>,
     kStagedThreads, kSameAtABlockSize, {Packed128<floatX>::size}},
};

}  // namespace bookends

// ---------------------------------------------------------------------------------------------------------------------
#ifndef BOOKENDS_NO_MAIN
#include <memory>

#include "dev/harness/classifier_options.h"
#include "dev/harness/harness.h"

namespace bookends {

enum LogitKind { kGaussian, kPeaked, kUniform };

// Logits (N, P) that are computed on demand, with the same bits on host and device: integers, scaled by powers of two.
// The padding holds NaN. Gaussian: the sum of four uniform numbers (Irwin-Hall), with standard deviation 2.3. Peaked:
// the same, but about 4 logits of each row are larger by 14; in every second row the target's is one of them. Uniform:
// in [-1, 1).
template <typename floatX>
struct LogitValues {
    Random noise, peaks;
    LogitKind kind;
    int V, P;
    const int *targets;  // on the host or the device, where the values are computed

    __host__ __device__ floatX at(long long row, int j) const {
        if (j >= V) return (floatX)NAN;
        const long long i = row * P + j;
        const uint64_t bits = noise.bits(i);
        if (kind == kUniform) return (floatX)((float)(bits >> 40) * 0x1p-23f - 1.0f);
        const int sum = (int)((bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48));
        float x = (float)(sum - 2 * 0xffff) * 0x1p-14f;
        if (kind == kPeaked) {
            const bool own = j == targets[row] && row % 2 == 1;
            if (own || (peaks.bits(i) >> 32) * V >> 32 < 4) x += 14;
        }
        return (floatX)x;
    }
    __host__ __device__ floatX operator[](long long i) const { return at(i / P, (int)(i % P)); }
};

template <typename floatX>
struct LogitRow {
    const LogitValues<floatX> &values;
    long long row;
    float operator[](int j) const { return (float)values.at(row, j); }
};

// The reference of all outputs. It keeps the scalars of each row for all outputs, block sizes and versions.
template <typename floatX>
struct ClassifierReference {
    LogitValues<floatX> logits;
    ClassifierOptions options;
    std::vector<ClassifierRow> rows;
    std::vector<char> known;

    // Row r, its dlogits and probabilities (V), and its z, on which the error bounds depend.
    ClassifierRow make(std::vector<double> &dlogits, std::vector<double> &probs, std::vector<double> &z, long long r) {
        const LogitRow<floatX> row = {logits, r};
        for (std::vector<double> *some : {&dlogits, &probs, &z}) some->resize(logits.V);
        rows[r] = classifier_fused_cpu(dlogits.data(), probs.data(), z.data(), row, logits.targets[r], options.dloss,
                                       logits.V, options);
        known[r] = 1;
        return rows[r];
    }
    ClassifierRow find(long long r) {
        std::vector<double> dlogits, probs, z;
        return known[r] ? rows[r] : make(dlogits, probs, z, r);
    }
};

template <typename floatX>
void classifier_fused_race(Harness &h) {
    const int B = h.options.dim('b'), T = h.options.dim('t'), V = h.options.dim('v');
    const int P = h.options.dim_or('p', (int)std::min(ceil_div(V, 128) * 128LL, (long long)INT32_MAX));
    const long long N = (long long)B * T;
    if (N > INT32_MAX) refuse(EXIT_BAD_INPUT, "B*T: %lld rows are more than %d (-b, -t)", N, INT32_MAX);
    if (P < V) refuse(EXIT_BAD_INPUT, "-p: '%d' is less than V, which is %d (-v)", P, V);
    const auto options = classifier_options<ClassifierOptions>(h.options);
    const std::string kind = h.options.choice("--logits"), output = h.options.choice("--output");
    const int ignore_every = (int)h.options.number("--ignore-every");
    const int *targets = h.targets(N, V, ignore_every, options.ignore_index);
    const int *host_targets = h.host_tokens.data();
    LogitValues<floatX> values = {
        {1, h.options.seed},
        {2, h.options.seed},
        kind == "gaussian" ? kGaussian : kind == "peaked" ? kPeaked : kUniform,
        V,
        P,
        targets};
    auto reference =
        std::make_shared<ClassifierReference<floatX>>(ClassifierReference<floatX>{values, options, {}, {}});
    reference->logits.targets = host_targets;
    h.job.prepare_references = [=] {
        reference->rows.resize(N);
        reference->known.resize(N);
    };
    status_word *status = h.status();

    // The longest chain of additions: those of a lane of a warp that has the row, then the merge of all lanes.
    auto tolerance_of = [=, &h](const ClassifierRow &row) {
        const int per_load = find_version(classifier_fused_versions<floatX>, h.running)->properties.elements_per_load;
        const double additions = (double)V / kWarpSize / per_load + per_load + 16;
        return SoftmaxTolerance<ClassifierRow, ClassifierOptions>(row, options, options.dloss, V, additions);
    };
    auto expect_dlogits = [=](Expected &expected, long long r) {
        std::vector<double> probs, z;
        const ClassifierRow row = reference->make(expected.value, probs, z, r);
        expected.value.resize(P, 0.0);
        if (host_targets[r] == options.ignore_index) return;
        const auto tolerance = tolerance_of(row);
        for (int j = 0; j < V; j++) {
            const double logit = (double)(float)reference->logits.at(r, j);
            expected.slack[j] = tolerance.gradient(expected.value[j], probs[j], z[j], logit, j == host_targets[r]);
        }
    };
    auto expect_probs = [=](Expected &expected, long long r) {
        std::vector<double> dlogits, z;
        const ClassifierRow row = reference->make(dlogits, expected.value, z, r);
        const auto tolerance = tolerance_of(row);
        for (int j = 0; j < V; j++) expected.slack[j] = tolerance.probability(expected.value[j], z[j]);
        expected.value.resize(P, 0.0);
    };
    auto expect_loss = [=](Expected &expected, long long r) {
        const ClassifierRow row = reference->find(r);
        expected.value[0] = row.loss;
        if (host_targets[r] == options.ignore_index) return;
        const double z = options.logit_scale * (double)(float)reference->logits.at(r, host_targets[r]);
        const double cap = options.softcap, z_t = cap > 0 ? cap * tanh(z / cap) : z;
        expected.slack[0] = tolerance_of(row).loss(z_t);
    };
    auto expect_lse = [=](Expected &expected, long long r) {
        const ClassifierRow row = reference->find(r);
        expected.value[0] = row.lse;
        expected.slack[0] = tolerance_of(row).lse();
    };
    auto expect_correct = [=](Expected &expected, long long r) { expected.value[0] = reference->find(r).correct; };

    const bool in_place = output == "in-place", wants_probs = h.options.flag("--probs");
    const bool wants_lse = h.options.flag("--lse"), wants_correct = h.options.flag("--accuracy");
    floatX *dlogits = nullptr;
    if (in_place) dlogits = h.output<floatX>("dlogits", N, P, 0, expect_dlogits, &values, true);
    const floatX *logits = in_place ? dlogits : h.input(values, N * P);
    if (output == "other") dlogits = h.output<floatX>("dlogits", N, P, 0, expect_dlogits);
    floatX *probs = wants_probs ? h.output<floatX>("probs", N, P, 0, expect_probs) : nullptr;
    float *losses = h.output<float>("losses", N, 1, 0, expect_loss);
    float *lse = wants_lse ? h.output<float>("lse", N, 1, 0, expect_lse) : nullptr;
    int *correct = wants_correct ? h.output<int>("correct", N, 1, 0, expect_correct) : nullptr;

    // Padding is written but not read; an ignored row is read only for its lse or its probabilities.
    const double read = N - (ignore_every > 0 && !wants_lse && !wants_probs ? N / ignore_every : 0);
    const double matrices = (output != "none") + wants_probs, vectors = 2 + wants_lse + wants_correct;
    h.job.bytes = (read * V + matrices * N * P) * sizeof(floatX) + vectors * N * sizeof(float);
    h.job.flops = read * V * (matrices > 0 ? 7 : 4);
    h.race(classifier_fused_versions<floatX>, [=](ClassifierFused<floatX> launch, int block_size, cudaStream_t stream) {
        return launch(dlogits, losses, lse, probs, correct, logits, targets, nullptr, status, (int)N, V, P, options,
                      block_size, stream);
    });
}

}  // namespace bookends

int main(int argc, char **argv) {
    using namespace bookends;
    Harness h("classifier_fused", "softmax, cross-entropy and their gradient",
              {{'b', "B", 8, 2},
               {'t', "T", 1024, 8},
               {'v', "V", 50257, 50257},
               {'p', "P", 0, 0, "V rounded up to a multiple of 128"}},
              {{"--logits", {"gaussian", "peaked", "uniform"}, "distribution of the logits"},
               {"--output",
                {"in-place", "other", "none"},
                "dlogits: over the logits, in another buffer, or not computed"},
               {"--probs", {}, "also compute the probabilities"},
               {"--lse", {}, "also compute each row's log-sum-exp"},
               {"--accuracy", {}, "also compute whether each row's largest logit is the target's"}},
              classifier_numbers());
    return h.main(argc, argv, classifier_fused_versions<float>, classifier_fused_race<float>,
                  classifier_fused_race<half>, classifier_fused_race<__nv_bfloat16>);
}
#endif
