/*
Softmax, cross-entropy and their gradient, the last layer of a language model. For each of N rows of V logits x, t being
the row's target:

  z_j = logit_scale * x_j, or softcap * tanh(logit_scale * x_j / softcap)
  lse = log(sum_j exp(z_j))        p_j = exp(z_j - lse)
  loss = (1-eps) * (lse - z_t)  +  eps * (lse - mean_j z_j)  +  z_loss * lse^2        eps = label_smoothing
  dlogits_j = dloss * logit_scale * (1 - (z_j/softcap)^2) * ((1 + 2*z_loss*lse) * p_j - (1-eps)*[j=t] - eps/V)

(without a softcap the factor with it is 1), in one launch, so that the probabilities are never stored unless somebody
wants them, and the gradient may replace the logits. A row is needed twice, for the sum and for the gradient; the fewest
bytes are one read and one write of it, which takes a place on the chip for what was read.

version 1  warp: a warp a row: the largest logit and the sum in one read, then a second read and the write
version 2  block: a block a row, so that fewer rows are on their way and more of the second reads meet the L2
version 3  x128: a thread 16 bytes, from the first multiple of 16 in the row on
version 4  reverse: the first read runs backwards, so that the second one begins with what came last

Compile:  nvcc -O3 -arch=native classifier_fused.cu -o classifier_fused
Run:      ./classifier_fused           the fastest version
          ./classifier_fused 3         version 3 at every block size
          ./classifier_fused all -b 4 -v 128256 --label-smoothing 0.1
          ./classifier_fused --help
*/
#include "common.h"

#include <cfloat>
#include <cmath>

struct ClassifierOptions {
    float dloss = 1;  // the gradient of each row's loss: 1/N for that of the mean
    float logit_scale = 1;
    float softcap = 0;  // 0: none
    float label_smoothing = 0;
    float z_loss = 0;
    int ignore_index = -100;  // rows with this target have loss 0 and gradient 0
};

// Finite, in their ranges, and none so large or small that a constant formed of them is no longer finite.
inline bool valid_options(const ClassifierOptions &o) {
    const bool finite = std::isfinite(o.dloss) && std::isfinite(2 * o.logit_scale) && std::isfinite(2 * o.softcap) &&
                        std::isfinite(o.label_smoothing) && std::isfinite(o.z_loss);
    return finite && o.softcap >= 0 && (o.softcap == 0 || std::isfinite(4 * (o.logit_scale / o.softcap))) &&
           o.label_smoothing >= 0 && o.label_smoothing <= 1;
}

// ---------------------------------------------------------------------------------------------------------------------
// CPU reference

// What one row comes to. `distance` is the mean of |z_j - max| over the probabilities, which the rounding errors of a
// sum of exponentials are measured by, and `spread` that of |z_j - z_t| over the vocabulary.
struct ClassifierRow {
    double loss, lse, max;
    bool correct;
    double distance, spread;
};

// One row, in double. logits: anything that 0..V-1 index, a pointer to any float type or values made on demand.
// dlogits and probs (V), z (V), which is scratch; of these, dlogits and probs may be null.
template <typename Row>
ClassifierRow classifier_fused_cpu(double *dlogits, double *probs, double *z, const Row &logits, int target,
                                   double dloss, int V, const ClassifierOptions &options) {
    const double scale = options.logit_scale, cap = options.softcap, eps = options.label_smoothing;
    const bool ignored = target == options.ignore_index, good = !ignored && id_in_range(target, V);
    double max = -INFINITY, sum = 0, mean = 0, distance = 0, spread = 0;
    const double x_t = good ? scale * (double)logits[target] : NAN;
    bool largest = good;  // no other is larger, and none before it as large
    for (int j = 0; j < V; j++) {
        const double x = scale * (double)logits[j];
        largest = largest && (x < x_t || (x == x_t && j >= target));
        z[j] = cap > 0 ? cap * tanh(x / cap) : x;
        max = fmax(max, z[j]);
        mean += z[j] / V;
    }
    const double z_t = good ? z[target] : NAN;
    for (int j = 0; j < V; j++) {
        if (good) spread += fabs(z[j] - z_t) / V;
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
    if (eps > 0) loss += eps * (log_sum - (mean - max));
    return {ignored ? 0 : loss, lse, max, largest, distance / sum, spread};
}

// ---------------------------------------------------------------------------------------------------------------------
// what the kernels share

// Exponentials are powers of two here, as in the hardware: exp(z) = 2^(z * log2(e)).
constexpr float LOG2E = 1.44269504f;

// The launcher's arguments, and the constants that the options come to: z = value * size, where value is the logit, its
// sign turned if logit_scale is negative, or tanh of it. So the largest value is that of the largest z, and a scale
// costs nothing: exp(z - max) is the power of two of (value - max) * (size * log2(e)). The difference comes first,
// since it is exact where it matters: with a multiply-add it would be short of max's rounding, and that may be
// anything.
template <typename floatX>
struct ClassifierArguments {
    floatX *dlogits;
    float *losses, *lse;
    floatX *probs;
    int *correct;
    const floatX *logits;
    const int *targets;
    const float *dlosses;
    status_word *status;
    int N;
    unsigned V, P;
    ClassifierOptions options;
    float size, power;  // the latter is size * log2(e)
    float sign;         // of logit_scale: 1, -1 or 0
    float inner;        // with a softcap: exp(2u) = 2^(inner * x), where tanh(u) is wanted
};

// With a softcap, tanh(u) and its slope 1 - tanh(u)^2, from e = exp(-2|u|), which no u makes overflow. tanh is off by
// two roundings of a number near 1 whatever u is. The slope is 4e / (1+e)^2: no difference of numbers that are almost
// equal.
template <bool softcap, typename floatX>
__device__ float value_and_slope(float x, const ClassifierArguments<floatX> &args, float *slope) {
    if constexpr (softcap) {
        const float e = exp2f(-fabsf(args.inner * x)), r = __fdividef(1.0f, 1.0f + e);
        *slope = 4.0f * e * r * r;
        return copysignf((1.0f - e) * r, args.inner * x);
    } else {
        *slope = 1.0f;
        return args.sign * x;
    }
}

// A row and its target.
template <typename floatX>
struct ClassifierTarget {
    const floatX *logits;
    floatX *dlogits, *probs;  // null: not wanted
    unsigned index;           // of a good target; else none of the columns
    bool ignored, bad;
    bool read;              // whether anything is wanted that the logits decide
    float x, value, slope;  // of the target's logit: read here, before anybody can overwrite it
    float origin;           // its value, or 0 if that isn't finite: what the sum of all values counts from

    __device__ bool second_pass() const { return (dlogits && !ignored) || probs; }
};

template <bool softcap, typename floatX>
__device__ ClassifierTarget<floatX> find_target(const ClassifierArguments<floatX> &args, long long row) {
    ClassifierTarget<floatX> t = {};
    t.logits = args.logits + row * args.P;
    t.dlogits = args.dlogits ? args.dlogits + row * args.P : nullptr;
    t.probs = args.probs ? args.probs + row * args.P : nullptr;
    const int target = args.targets[row];
    t.ignored = target == args.options.ignore_index;
    t.bad = !t.ignored && (unsigned)target >= args.V;
    const bool good = !t.ignored && !t.bad;
    t.read = args.lse || args.probs || (good && (args.dlogits || args.losses || args.correct));
    t.index = good ? (unsigned)target : UINT32_MAX;
    if (good && t.read) {
        t.x = (float)t.logits[target];
        t.value = value_and_slope<softcap>(t.x, args, &t.slope);
        t.origin = isfinite(t.value) ? t.value : 0.0f;
    }
    return t;
}

// What has been seen of a row: the largest value, and the sum of exp(z - max). The maximum starts at the lowest finite
// number: with -inf, a row that begins with -inf would come to -inf - -inf. Extras: the sum of value - origin, and
// whether any logit beats the target's: is larger, or as large and comes before it. (Under a softcap too it is the
// logits that are compared: tanh keeps their order, until rounding makes them equal. A NaN beats everything.)
struct Seen {
    float max = -FLT_MAX, sum = 0, excess = 0;
    bool beaten = false;
};

template <bool softcap, bool extras, typename floatX, int width>
__device__ void see(Seen &seen, const Packed<floatX, width> &x, unsigned column, const ClassifierTarget<floatX> &target,
                    const ClassifierArguments<floatX> &args) {
    float value[width], slope, largest = -FLT_MAX, part = 0;
#pragma unroll
    for (int k = 0; k < width; k++) {
        value[k] = value_and_slope<softcap>((float)x[k], args, &slope);
        largest = fmaxf(largest, value[k]);
    }
    if (largest > seen.max) {
        seen.sum *= exp2f((seen.max - largest) * args.power);
        seen.max = largest;
    }
#pragma unroll
    for (int k = 0; k < width; k++) {
        part += exp2f((value[k] - seen.max) * args.power);
        if (extras) {
            seen.excess += value[k] - target.origin;
            const float mine = args.sign * (float)x[k], best = args.sign * target.x;
            if (!(mine < best || (mine == best && column + k >= target.index))) seen.beaten = true;
        }
    }
    seen.sum += part;
}

// What all lanes of a warp, or all threads of a block, have seen together; each gets the same bits.
template <bool extras>
__device__ Seen warp_merge(const Seen &seen, float power) {
    Seen all;
    all.max = warp_reduce_max(seen.max);
    all.sum = warp_reduce_sum(seen.sum * exp2f((seen.max - all.max) * power));
    if (extras) {
        all.excess = warp_reduce_sum(seen.excess);
        all.beaten = __any_sync(0xffffffffu, seen.beaten);
    }
    return all;
}
template <bool extras>
__device__ Seen block_merge(const Seen &seen, float power) {
    Seen all;
    all.max = block_reduce_max(seen.max);
    all.sum = block_reduce_sum(seen.sum * exp2f((seen.max - all.max) * power));
    if (extras) {
        all.excess = block_reduce_sum(seen.excess);
        all.beaten = __syncthreads_or(seen.beaten);
    }
    return all;
}

// What the second pass needs: e = exp(z - max), p = to_p * e, and the gradient slope * (a * e - b), save at the target.
struct ClassifierGradient {
    float max, to_p, a, b, at_target;
};

// The row's scalars, which the leader writes, and the constants of its gradient. All that is formed of max and another
// z is formed of their difference, so that what the row's logits have in common costs no precision.
template <bool extras, typename floatX>
__device__ ClassifierGradient finish_row(const ClassifierArguments<floatX> &args, long long row,
                                         const ClassifierTarget<floatX> &target, const Seen &seen, bool leader) {
    const ClassifierOptions &o = args.options;
    const float sum = seen.sum > 0 ? seen.sum : NAN;  // 0: no logit above -inf
    const float log_sum = logf(sum), lse = fmaf(seen.max, args.size, log_sum);
    if (leader) {
        if (target.bad) report_bad_id(args.status, row);
        float loss = log_sum - (target.value - seen.max) * args.size;
        if (extras && o.label_smoothing != 0) {
            const float mean = log_sum - (seen.excess / args.V - (seen.max - target.origin)) * args.size;
            loss = (1 - o.label_smoothing) * loss + o.label_smoothing * mean;
        }
        if (o.z_loss != 0) loss += o.z_loss * lse * lse;
        if (args.losses) args.losses[row] = target.ignored ? 0.0f : target.bad ? NAN : loss;
        if (args.lse) args.lse[row] = lse;
        if (args.correct) args.correct[row] = target.index < args.V && !seen.beaten;
    }
    const float unit = o.dloss * (args.dlosses ? args.dlosses[row] : 1.0f) * o.logit_scale;
    ClassifierGradient g;
    g.max = seen.max;
    g.to_p = 1.0f / sum;
    g.a = target.bad ? NAN : unit * (o.z_loss != 0 ? 1 + 2 * o.z_loss * lse : 1.0f) * g.to_p;
    g.b = unit * (o.label_smoothing / args.V);
    g.at_target = target.slope *
                  fmaf(g.a, exp2f((target.value - seen.max) * args.power), -(unit * (1 - o.label_smoothing) + g.b));
    return g;
}

// The second pass for `width` columns. An ignored row's dlogits are left to zero_columns().
template <bool softcap, bool streaming, typename floatX, int width>
__device__ void write_columns(const Packed<floatX, width> &x, unsigned column, const ClassifierTarget<floatX> &target,
                              const ClassifierGradient &g, const ClassifierArguments<floatX> &args) {
    Packed<floatX, width> d, p;
#pragma unroll
    for (int k = 0; k < width; k++) {
        float slope;
        const float value = value_and_slope<softcap>((float)x[k], args, &slope);
        const float e = exp2f((value - g.max) * args.power);
        p[k] = (floatX)(e * g.to_p);
        d[k] = (floatX)(slope * fmaf(g.a, e, -g.b));
    }
    if (target.index - column < width) {  // one vector of the row
#pragma unroll
        for (int k = 0; k < width; k++) {
            if (target.index == column + k) d[k] = (floatX)g.at_target;
        }
    }
    auto store = [](floatX *address, const Packed<floatX, width> &value) {
        streaming ? store_packed_cs(address, value) : store_packed(address, value);
    };
    if (target.dlogits && !target.ignored) store(target.dlogits + column, d);
    if (target.probs) store(target.probs + column, p);
}

// Columns begin..end-1 of a row, unless that is null, become 0: padding, and all of an ignored row's gradient.
template <typename floatX>
__device__ void zero_columns(floatX *row, unsigned begin, unsigned end, unsigned thread, unsigned threads) {
    for (unsigned j = begin + thread; row && j < end; j += threads) row[j] = (floatX)0.0f;
}

// ---------------------------------------------------------------------------------------------------------------------
// kernels

// A warp a row: its lanes keep a maximum and a sum each, scaled anew whenever the maximum grows (Milakov and Gimelshein
// 2018), so that one read does for both; shuffles put the lanes' together. Then the row is read again and written. Some
// 8000 rows are on their way at once on a large GPU, which is far more than its L2 holds: three times the row's bytes
// pass through DRAM, of the two that have to.
template <typename floatX, bool softcap, bool extras>
__global__ void __launch_bounds__(1024) classifier_fused_kernel1(ClassifierArguments<floatX> args) {
    typedef Packed<floatX, 1> one;
    const unsigned lane = threadIdx.x % WARP_SIZE;
    const long long row = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / WARP_SIZE;
    if (row >= args.N) return;
    const ClassifierTarget<floatX> target = find_target<softcap>(args, row);
    Seen seen;
    for (unsigned j = lane; target.read && j < args.V; j += WARP_SIZE) {
        see<softcap, extras>(seen, load_packed<one>(target.logits + j), j, target, args);
    }
    seen = warp_merge<extras>(seen, args.power);
    const ClassifierGradient g = finish_row<extras>(args, row, target, seen, lane == 0);
    __syncwarp();  // no lane overwrites the target's logit before all have read it
    for (unsigned j = lane; target.second_pass() && j < args.V; j += WARP_SIZE) {
        write_columns<softcap, false>(load_packed<one>(target.logits + j), j, target, g, args);
    }
    zero_columns(target.dlogits, target.ignored ? 0 : args.V, args.P, lane, WARP_SIZE);
    zero_columns(target.probs, args.V, args.P, lane, WARP_SIZE);
}

// A block a row. With 1024 threads a block, two rows a multiprocessor are on their way instead of 64: for rows of 100
// KB on a GPU with 132 of them 26 MB, which an L2 of 50 MB may still hold when they are read again. What is left is
// instructions: a load or store for every 2 bytes.
template <typename floatX, bool softcap, bool extras>
__global__ void __launch_bounds__(1024) classifier_fused_kernel2(ClassifierArguments<floatX> args) {
    typedef Packed<floatX, 1> one;
    const long long row = blockIdx.x;
    const ClassifierTarget<floatX> target = find_target<softcap>(args, row);
    Seen seen;
    for (unsigned j = threadIdx.x; target.read && j < args.V; j += blockDim.x) {
        see<softcap, extras>(seen, load_packed<one>(target.logits + j), j, target, args);
    }
    seen = block_merge<extras>(
        seen, args.power);  // its barriers: no thread overwrites the target's logit before all have read it
    const ClassifierGradient g = finish_row<extras>(args, row, target, seen, threadIdx.x == 0);
    for (unsigned j = threadIdx.x; target.second_pass() && j < args.V; j += blockDim.x) {
        write_columns<softcap, false>(load_packed<one>(target.logits + j), j, target, g, args);
    }
    zero_columns(target.dlogits, target.ignored ? 0 : args.V, args.P, threadIdx.x, blockDim.x);
    zero_columns(target.probs, args.V, args.P, threadIdx.x, blockDim.x);
}

// How `count` elements from an address on are cut: single ones up to the first multiple of 16 bytes, vectors, and
// single ones.
struct Cut {
    unsigned head, vectors, tail;  // where the vectors begin; how many they are; where they end

    template <typename floatX>
    __device__ Cut(const floatX *address, unsigned count) {
        constexpr unsigned size = Packed128<floatX>::size;
        head = min((unsigned)((-(uintptr_t)address % 16) / sizeof(floatX)), count);
        vectors = (count - head) / size;
        tail = head + vectors * size;
    }
};

// zero_columns by a block, 16 bytes a thread.
template <typename floatX>
__device__ void zero_columns128(floatX *row, unsigned begin, unsigned end) {
    typedef Packed128<floatX> x128;
    if (row == nullptr || begin == end) return;
    const Cut cut(row + begin, end - begin);
    x128 zeros;
    for (int k = 0; k < x128::size; k++) zeros[k] = (floatX)0.0f;
    for (unsigned i = threadIdx.x; i < cut.vectors; i += blockDim.x) {
        store128cs(row + begin + cut.head + (size_t)i * x128::size, zeros);
    }
    zero_columns(row, begin, begin + cut.head, threadIdx.x, blockDim.x);
    zero_columns(row, begin + cut.tail, end, threadIdx.x, blockDim.x);
}

// Kernel 2 with 16 bytes a thread: an eighth of the loads and stores (in 16-bit types), and one look at the running
// maximum for eight logits. A row begins wherever P puts it: the few elements on either side of its 16-byte multiples
// are left to single threads. Where dlogits or probs lie differently from the logits, the second pass goes by elements.
//
// reverse: kernel 4. A block reads its row from the end to the beginning, then goes over it from the beginning on: what
// it came by last, it needs first. So a part of the row is still in the cache even where all of it doesn't fit: one
// that drops what was used longest ago and holds 60% of the row has none of it when the second pass begins where the
// first one did, and 60% when it begins where that one ended. The second read and the writes are streaming: nobody
// needs them again here, so they don't drive out what others will read a second time. Both are ideas of llm.c's
// fused_classifier.
template <typename floatX, bool softcap, bool extras, bool reverse>
__global__ void __launch_bounds__(1024) classifier_fused_kernel3(ClassifierArguments<floatX> args) {
    typedef Packed128<floatX> x128;
    typedef Packed<floatX, 1> one;
    const long long row = blockIdx.x;
    const ClassifierTarget<floatX> target = find_target<softcap>(args, row);
    const Cut cut(target.logits, args.V);
    Seen seen;
    auto see_one = [&](unsigned j) {
        see<softcap, extras>(seen, load_packed<one>(target.logits + j), j, target, args);
    };
    if (target.read) {
        if (threadIdx.x < cut.head) see_one(threadIdx.x);
        for (unsigned n = threadIdx.x; n < cut.vectors; n += blockDim.x) {
            const unsigned j = cut.head + (reverse ? cut.vectors - 1 - n : n) * x128::size;
            see<softcap, extras>(seen, load128(target.logits + j), j, target, args);
        }
        if (cut.tail + threadIdx.x < args.V) see_one(cut.tail + threadIdx.x);
    }
    seen = block_merge<extras>(seen, args.power);
    const ClassifierGradient g = finish_row<extras>(args, row, target, seen, threadIdx.x == 0);
    auto write_one = [&](unsigned j) {
        write_columns<softcap, reverse>(load_packed<one>(target.logits + j), j, target, g, args);
    };
    if (target.second_pass()) {
        const bool alike = (!target.dlogits || ((uintptr_t)target.dlogits - (uintptr_t)target.logits) % 16 == 0) &&
                           (!target.probs || ((uintptr_t)target.probs - (uintptr_t)target.logits) % 16 == 0);
        if (alike) {
            if (threadIdx.x < cut.head) write_one(threadIdx.x);
            for (unsigned n = threadIdx.x; n < cut.vectors; n += blockDim.x) {
                const unsigned j = cut.head + n * x128::size;
                const x128 x = reverse ? load128cs(target.logits + j) : load128(target.logits + j);
                write_columns<softcap, reverse>(x, j, target, g, args);
            }
            if (cut.tail + threadIdx.x < args.V) write_one(cut.tail + threadIdx.x);
        } else {
            for (unsigned j = threadIdx.x; j < args.V; j += blockDim.x) write_one(j);
        }
    }
    if (target.ignored && target.probs) __syncthreads();  // all have read what others now make 0
    zero_columns128(target.dlogits, target.ignored ? 0 : args.V, args.P);
    zero_columns128(target.probs, args.V, args.P);
}

// ---------------------------------------------------------------------------------------------------------------------
// launchers

// Every launcher:  logits (N, P), of which each row's first V columns count; targets (N) int32; dlogits (N, P), losses
// (N), lse (N), probs (N, P), correct (N) int32, each of which may be null: not wanted; dlosses (N), a factor of each
// row's gradient beside options.dloss, or null: 1. Row-major, device memory, aligned to their element only. dlogits may
// be logits itself; otherwise nothing overlaps. Columns V..P-1 of the logits are never read, and become 0 in dlogits
// and probs. losses and lse are in nats; correct is 1 where the largest logit (the first among equals) is the target's.
//
// A target of options.ignore_index, whatever that is: loss 0, gradient 0, not correct; lse and probs as for any row,
// and if neither is wanted the row is not read. Any other target outside 0..V-1: loss NaN, gradient NaN in columns
// 0..V-1, not correct, and status (one status word that the caller set to STATUS_OK, or null) says which such row came
// first. A logit of -inf has probability 0. A row that holds a NaN, +inf or nothing but -inf (or V = 0): its lse, loss,
// probabilities and gradient are NaN; with a softcap infinities are +-softcap instead. Where one logit is NaN, none is
// the largest.
//
// block_size: a multiple of 32 up to 1024. Nothing is allocated or synchronised. Returns cudaErrorInvalidValue for
// P < V, a negative size or what valid_options() refuses; else the launch's error (cudaGetLastError's, so one that an
// earlier call left behind comes out here too); cudaSuccess without a launch when N = 0. dlogits and probs are formed
// in float and rounded once. The same inputs give the same bits at the same block size; version 1, at any.

template <typename floatX>
using ClassifierFused = cudaError_t (*)(floatX *dlogits, float *losses, float *lse, floatX *probs, int *correct,
                                        const floatX *logits, const int *targets, const float *dlosses,
                                        status_word *status, int N, int V, int P, ClassifierOptions options,
                                        int block_size, cudaStream_t stream);

// What the launchers share: launch(args, softcap, extras), the last two std::true_type or std::false_type, if the
// arguments are right and there is work.
template <typename floatX, typename Launch>
cudaError_t classifier_launch(floatX *dlogits, float *losses, float *lse, floatX *probs, int *correct,
                              const floatX *logits, const int *targets, const float *dlosses, status_word *status,
                              int N, int V, int P, const ClassifierOptions &options, Launch launch) {
    if (N < 0 || V < 0 || P < V || !valid_options(options)) return cudaErrorInvalidValue;
    if (N == 0) return cudaSuccess;
    const float scale = options.logit_scale, cap = options.softcap;
    const bool softcap = cap > 0, extras = options.label_smoothing > 0 || correct != nullptr;
    ClassifierArguments<floatX> args = {dlogits, losses, lse, probs,       correct,     logits,  targets,
                                        dlosses, status, N,   (unsigned)V, (unsigned)P, options, 0,
                                        0,       0,      0};
    args.size = softcap ? cap : fabsf(scale);
    args.power = args.size * LOG2E;
    args.sign = scale > 0 ? 1.0f : scale < 0 ? -1.0f : 0.0f;
    args.inner = softcap ? 2 * LOG2E * (scale / cap) : 0.0f;
    const std::true_type yes;
    const std::false_type no;
    softcap  ? extras ? launch(args, yes, yes) : launch(args, yes, no)
     : extras ? launch(args, no, yes)
             : launch(args, no, no);
    return cudaGetLastError();
}

template <typename floatX>
cudaError_t classifier_fused1(floatX *dlogits, float *losses, float *lse, floatX *probs, int *correct,
                              const floatX *logits, const int *targets, const float *dlosses, status_word *status,
                              int N, int V, int P, ClassifierOptions options, int block_size, cudaStream_t stream) {
    return classifier_launch(dlogits, losses, lse, probs, correct, logits, targets, dlosses, status, N, V, P, options,
                             [=](const ClassifierArguments<floatX> &args, auto softcap, auto extras) {
                                 int block = block_size;
                                 const unsigned grid_size = grid_blocks((long long)N * WARP_SIZE, &block);
                                 classifier_fused_kernel1<floatX, decltype(softcap)::value, decltype(extras)::value>
                                     <<<grid_size, block, 0, stream>>>(args);
                             });
}

template <typename floatX>
cudaError_t classifier_fused2(floatX *dlogits, float *losses, float *lse, floatX *probs, int *correct,
                              const floatX *logits, const int *targets, const float *dlosses, status_word *status,
                              int N, int V, int P, ClassifierOptions options, int block_size, cudaStream_t stream) {
    return classifier_launch(dlogits, losses, lse, probs, correct, logits, targets, dlosses, status, N, V, P, options,
                             [=](const ClassifierArguments<floatX> &args, auto softcap, auto extras) {
                                 classifier_fused_kernel2<floatX, decltype(softcap)::value, decltype(extras)::value>
                                     <<<N, block_size, 0, stream>>>(args);
                             });
}

template <typename floatX>
cudaError_t classifier_fused3(floatX *dlogits, float *losses, float *lse, floatX *probs, int *correct,
                              const floatX *logits, const int *targets, const float *dlosses, status_word *status,
                              int N, int V, int P, ClassifierOptions options, int block_size, cudaStream_t stream) {
    return classifier_launch(
        dlogits, losses, lse, probs, correct, logits, targets, dlosses, status, N, V, P, options,
        [=](const ClassifierArguments<floatX> &args, auto softcap, auto extras) {
            classifier_fused_kernel3<floatX, decltype(softcap)::value, decltype(extras)::value, false>
                <<<N, block_size, 0, stream>>>(args);
        });
}

template <typename floatX>
cudaError_t classifier_fused4(floatX *dlogits, float *losses, float *lse, floatX *probs, int *correct,
                              const floatX *logits, const int *targets, const float *dlosses, status_word *status,
                              int N, int V, int P, ClassifierOptions options, int block_size, cudaStream_t stream) {
    return classifier_launch(
        dlogits, losses, lse, probs, correct, logits, targets, dlosses, status, N, V, P, options,
        [=](const ClassifierArguments<floatX> &args, auto softcap, auto extras) {
            classifier_fused_kernel3<floatX, decltype(softcap)::value, decltype(extras)::value, true>
                <<<N, block_size, 0, stream>>>(args);
        });
}

template <typename floatX>
constexpr Version<ClassifierFused<floatX>> classifier_fused_versions[] = {
    {1, "warp", "a warp a row, maximum and sum in one read", classifier_fused1<floatX>, 256},
    {2, "block", "a block a row", classifier_fused2<floatX>, 512, SAME_AT_A_BLOCK_SIZE},
    {3, "x128", "a thread 16 bytes", classifier_fused3<floatX>, 512, SAME_AT_A_BLOCK_SIZE},
    {4, "reverse", "two passes in opposite order, so that the second meets the cache", classifier_fused4<floatX>, 512,
     SAME_AT_A_BLOCK_SIZE},
};

// ---------------------------------------------------------------------------------------------------------------------
#ifndef BOOKENDS_NO_MAIN
#include <memory>

#include "dev/harness.h"

enum LogitKind { GAUSSIAN, PEAKED, UNIFORM };

// Logits (N, P) that are made on demand, the same bits on host and device: of integers, scaled by powers of two. The
// padding holds NaN. Gaussian: the sum of four uniform numbers (Irwin-Hall), of standard deviation 2.3. Peaked:
// besides, some 4 in a row are larger by 14, among them the target's in every other row. Uniform: in [-1, 1).
template <typename floatX>
struct LogitValues {
    Random noise, peaks;
    LogitKind kind;
    int V, P;
    const int *targets;  // on the side where the values are made

    __host__ __device__ floatX at(long long row, int j) const {
        if (j >= V) return (floatX)NAN;
        const long long i = row * P + j;
        const uint64_t bits = noise.bits(i);
        if (kind == UNIFORM) return (floatX)((float)(bits >> 40) * 0x1p-23f - 1.0f);
        const int sum = (int)((bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48));
        float x = (float)(sum - 2 * 0xffff) * 0x1p-14f;
        if (kind == PEAKED) {
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

// The reference of all outputs. What it says of a row as a whole is kept, for all outputs, block sizes and versions.
template <typename floatX>
struct ClassifierReference {
    LogitValues<floatX> logits;
    ClassifierOptions options;
    std::vector<ClassifierRow> rows;
    std::vector<char> known;

    // Row r, its dlogits and probabilities (V), and its z, by which slack is measured.
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

// How far float arithmetic may be off, in units of U, a rounding of 1. A difference of two z is off by three roundings
// of itself and, under a softcap, by those of a tanh of about 1; a power of two by two ulps, which are 4 roundings at
// most. Of a sum each addition rounds once.
struct ClassifierSlack {
    static constexpr double U = 0x1p-24;
    double additions, capped;
    double exponential, sum;  // relative: of 2^y, and of the sum
    double lse;               // absolute

    ClassifierSlack(const ClassifierRow &row, const ClassifierOptions &options, double additions)
        : additions(additions), capped(6 * (double)options.softcap) {
        exponential = 6 + capped;
        sum = exponential + 3 * row.distance + additions;
        lse = sum + 4 * fabs(row.max) + 3 * fabs(row.lse - row.max) + fabs(row.lse);
    }
    // The last term is the smallest float.
    double of_p(double p, double z, const ClassifierRow &row) const {
        return U * p * (exponential + 3 * (row.max - z) + sum + 4) + 0x1p-148;
    }
    double of_loss(const ClassifierRow &row, double z_t, const ClassifierOptions &options) const {
        const double to_target = fabs(row.max - z_t), eps = options.label_smoothing;
        const double log_sum = sum + capped + 3 * fabs(row.lse - row.max);
        const double mean = log_sum + 8 * to_target + (additions + 4) * row.spread;
        const double z_loss = fabs((double)options.z_loss) * fabs(row.lse) * (2 * lse + 4 * fabs(row.lse));
        return U * ((1 - eps) * (log_sum + 8 * to_target) + eps * mean + z_loss + 4 * fabs(row.loss));
    }
};

template <typename floatX>
void classifier_fused_race(Harness &h) {
    const int B = h.dim('b'), T = h.dim('t'), V = h.dim('v');
    const int P = h.dim_or('p', (int)std::min(ceil_div(V, 128) * 128LL, (long long)INT32_MAX));
    const long long N = (long long)B * T;
    if (N > INT32_MAX) h.refuse(EXIT_BAD_INPUT, "B*T: %lld rows are more than %d (-b, -t)", N, INT32_MAX);
    if (P < V) h.refuse(EXIT_BAD_INPUT, "-p: '%d' is less than V, which is %d (-v)", P, V);
    ClassifierOptions options;
    options.logit_scale = (float)h.number("--logit-scale");
    options.softcap = (float)h.number("--softcap");
    options.label_smoothing = (float)h.number("--label-smoothing");
    options.z_loss = (float)h.number("--z-loss");
    if (!valid_options(options)) {
        h.refuse(EXIT_BAD_INPUT, "--softcap: '%g' is too small for a --logit-scale of %g", options.softcap,
                 options.logit_scale);
    }
    const std::string kind = h.choice("--logits"), output = h.choice("--output");
    const int ignore_every = (int)h.number("--ignore-every");
    const int *targets = h.targets(N, V, ignore_every, options.ignore_index);
    const int *host_targets = h.host_tokens.data();
    LogitValues<floatX> values = {
        {1, h.seed}, {2, h.seed}, kind == "gaussian" ? GAUSSIAN : kind == "peaked" ? PEAKED : UNIFORM, V, P, targets};
    auto reference =
        std::make_shared<ClassifierReference<floatX>>(ClassifierReference<floatX>{values, options, {}, {}});
    reference->logits.targets = host_targets;
    reference->rows.resize(h.host_tokens.size());  // there are no targets where memory has run out
    reference->known.resize(h.host_tokens.size());
    status_word *status = h.status();

    // The longest sum that there is: that of a lane where a warp has the row, and of what is put together then.
    auto slack_of = [=, &h](const ClassifierRow &row) {
        const int together = h.running > 2 ? Packed128<floatX>::size : 1;
        return ClassifierSlack(row, options, (double)V / WARP_SIZE / together + together + 16);
    };
    auto expect_dlogits = [=](Expected &expected, long long r) {
        std::vector<double> probs, z;
        const ClassifierRow row = reference->make(expected.value, probs, z, r);
        expected.value.resize(P, 0.0);
        if (host_targets[r] == options.ignore_index) return;
        const ClassifierSlack slack = slack_of(row);
        const double U = slack.U, scale = options.logit_scale, cap = options.softcap, eps = options.label_smoothing;
        const double unit = fabs(options.dloss * scale), a = fabs(1 + 2 * options.z_loss * row.lse);
        const double of_a = U * (2 * fabs((double)options.z_loss) * slack.lse + 4 * a);
        for (int j = 0; j < V; j++) {
            double off = a * slack.of_p(probs[j], z[j], row) + of_a * probs[j] + 4 * U * eps / V;
            if (j == host_targets[r]) off += 4 * U;
            double off_slope = 1;
            if (cap > 0) {  // the slope is off in proportion to the exponent of what it is made from
                off *= 1 - z[j] / cap * (z[j] / cap);
                off_slope += 16 + 8 * fabs(scale * (double)(float)reference->logits.at(r, j) / cap);
            }
            expected.slack[j] = unit * off + U * off_slope * fabs(expected.value[j]) + 0x1p-148;
        }
    };
    auto expect_probs = [=](Expected &expected, long long r) {
        std::vector<double> dlogits, z;
        const ClassifierRow row = reference->make(dlogits, expected.value, z, r);
        const ClassifierSlack slack = slack_of(row);
        for (int j = 0; j < V; j++) expected.slack[j] = slack.of_p(expected.value[j], z[j], row);
        expected.value.resize(P, 0.0);
    };
    auto expect_loss = [=](Expected &expected, long long r) {
        const ClassifierRow row = reference->find(r);
        expected.value[0] = row.loss;
        if (host_targets[r] == options.ignore_index) return;
        const double z = options.logit_scale * (double)(float)reference->logits.at(r, host_targets[r]);
        const double cap = options.softcap, z_t = cap > 0 ? cap * tanh(z / cap) : z;
        expected.slack[0] = slack_of(row).of_loss(row, z_t, options);
    };
    auto expect_lse = [=](Expected &expected, long long r) {
        const ClassifierRow row = reference->find(r);
        expected.value[0] = row.lse;
        expected.slack[0] = ClassifierSlack::U * slack_of(row).lse;
    };
    auto expect_correct = [=](Expected &expected, long long r) { expected.value[0] = reference->find(r).correct; };

    const bool in_place = output == "in-place", wants_probs = h.flag("--probs"), wants_lse = h.flag("--lse");
    const bool wants_correct = h.flag("--accuracy");
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
    h.bytes = (read * V + matrices * N * P) * sizeof(floatX) + vectors * N * sizeof(float);
    h.flops = read * V * (matrices > 0 ? 7 : 4);
    h.race(classifier_fused_versions<floatX>, [=](ClassifierFused<floatX> launch, int block_size, cudaStream_t stream) {
        return launch(dlogits, losses, lse, probs, correct, logits, targets, nullptr, status, (int)N, V, P, options,
                      block_size, stream);
    });
}

int main(int argc, char **argv) {
    Harness h("classifier_fused", "softmax, cross-entropy and their gradient",
              {{'b', "B", 8, 2},
               {'t', "T", 1024, 64},
               {'v', "V", 50257, 5003},
               {'p', "P", 0, 0, "V rounded up to a multiple of 128"}},
              {{"--logits", {"gaussian", "peaked", "uniform"}, "how they are distributed"},
               {"--output", {"in-place", "other", "none"}, "where the gradient goes: over the logits, elsewhere"},
               {"--probs", {}, "the probabilities too"},
               {"--lse", {}, "the logarithm of each row's sum too"},
               {"--accuracy", {}, "whether each row's largest logit is the target's, too"}},
              {{"--label-smoothing", 0, 0, 1, "the share of a target that goes to the whole vocabulary"},
               {"--z-loss", 0, 0, 1e6, "the factor of lse^2 in the loss"},
               {"--softcap", 0, 0, 1e6, "logits are squeezed between -NUMBER and NUMBER; 0: as they are"},
               {"--logit-scale", 1, -1e6, 1e6, "a factor of the logits"},
               {"--ignore-every", 0, 0, INT32_MAX, "every INTth target is one to ignore; 0: none", true}});
    return h.main(argc, argv, classifier_fused_versions<float>, classifier_fused_race<float>,
                  classifier_fused_race<half>, classifier_fused_race<__nv_bfloat16>);
}
#endif
