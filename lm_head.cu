/*
The LM head: hidden states X (N, C) and weights W (V, C) to the loss of each row and every gradient.

  x_rj = X_r . W_j  (+ bias_j)           the logits (N, V), sums in float, rounded to floatX
  losses, lse, dlogits                   of each row of x, as in classifier_fused.cu, with all its options
  dX = dlogits W        dW += dlogits^T X        dbias_j += sum over r of dlogits_rj

Three matrix products of 2NCV operations each are the floor (versions 4 to 6 may make the logits twice, which is a
fourth); cuBLASLt does them. The logits are 0.8 to 4 GB at ordinary sizes, and need not exist whole: a budget says how
much scratch there may be. That logits are rounded to floatX before the softmax, and dlogits before the products, is
part of the definition, whatever the version.

version 1  textbook: all logits, a kernel for the probabilities, one for the loss, one for the gradient, three products
version 2  fused: all logits, the fused classifier between the products
version 3  rows: a block of rows after the other, so that scratch is bounded; dW is added to once a block
version 4  vocabulary: for small budgets: the first pass over tiles of the vocabulary makes each row's softmax
           statistics and keeps nothing; the second makes a tile's logits again and is done with its rows of dW at once
version 5  epilogue: the same by a product of our own, which has the statistics of the logits in its accumulators, and
           the gradients when it makes them again: the first pass stores nothing, and no kernel reads logits. It takes
           compute capability 9.0 (or the CPU device), 16-bit types, C > 0, a positive logit_scale and room for 256
           columns or all; elsewhere it is version 4. (Where 8 doesn't divide C, or X and W are not at multiples of 16
           bytes, it loads element by element, which is slow)
version 6  planned: the way and its sizes follow from the budget; of version 4's tiles, the classifier of one runs
           beside the products of another, and as many as there is room for are kept from the first pass

What limits it (H200): power. Products of 16 bits draw the 700 W that the chip may have, and its clock falls from 1980
to 1400 MHz, at which cuBLASLt's keep the tensor cores busy 9 tenths of the time. So bytes that move beside a product
slow it down, nearly as if they had moved before it: what helps is to move fewer. Each block of rows adds to all of dW,
8VC bytes; fewer and larger blocks are worth more than anything else that was tried. In energy, by the chip's own meter
(768 rows, C 768, V 50304): the product that writes dW in 16 bits takes 0.070 J, the one that adds it to floats 0.100 J,
a copy of those floats 0.030 J.

Compile:  nvcc -O3 -arch=native lm_head.cu -o lm_head -lcublasLt
          (for version 5's own product: -gencode arch=compute_90a,code=sm_90a, which -arch=native doesn't come to)
Run:      ./lm_head                    the default: deterministic, best over the measured shapes; 25% of the logits
          ./lm_head all --memory 10%
          ./lm_head --sweep memory -c 4096 -v 128256
          ./lm_head --help
*/
#include "common.h"
#include "parts/classifier.h"
#include "parts/hopper.h"
#include "parts/launch.h"

#ifdef BOOKENDS_NO_MAIN
#include "classifier_fused.cu"
#else
#define BOOKENDS_NO_MAIN
#include "classifier_fused.cu"
#undef BOOKENDS_NO_MAIN
#endif
#include "parts/lm_head_product.h"

#include <cublasLt.h>

#include <cstdarg>
#include <cstdio>
#include <vector>

namespace bookends {

// ---------------------------------------------------------------------------------------------------------------------
// CPU reference

// A row's logits (V), before they are rounded to floatX: sums in double. x (C), W (V, C) and bias (V; null: none).
// sizes (V; null: not wanted) gets the root of the sum of each sum's squared terms, which its rounding errors go by.
inline void lm_head_logits_cpu(double *logits, double *sizes, const float *x, const float *W, const float *bias, int C,
                               int V) {
    for (int j = 0; j < V; j++) {
        double sum = bias ? bias[j] : 0, squares = sum * sum;
        for (int c = 0; c < C; c++) {
            const double term = (double)x[c] * (double)W[(long long)j * C + c];
            sum += term;
            squares += term * term;
        }
        logits[j] = sum;
        if (sizes) sizes[j] = sqrt(squares);
    }
}

// Then classifier_fused_cpu() makes the loss and dlogits (V) of them, and the products are these. A row of dX (C) from
// its dlogits (V); a row of dW (C), to be added, from its column of dlogits (N).
inline void lm_head_product_cpu(double *out, const double *factors, const float *rows, int count, int C) {
    for (int c = 0; c < C; c++) out[c] = 0;
    for (int j = 0; j < count; j++) {
        for (int c = 0; c < C; c++) out[c] += factors[j] * (double)rows[(long long)j * C + c];
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// kernels

// Every other kernel sees a block of rows, whose numbers begin at 0: the status word is seen to here, by all rows.
static __global__ void lm_head_targets_kernel(status_word *status, const int *targets, int N, int V, int ignore_index) {
    const long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row < N && targets[row] != ignore_index && !id_in_range(targets[row], V)) report_bad_id(status, row);
}

// The logits of hidden states that have no channels.
template <typename floatX>
__global__ void lm_head_no_channels_kernel(floatX *logits, const floatX *bias, unsigned V, unsigned P) {
    floatX *const row = logits + (long long)blockIdx.x * P;
    for (unsigned j = threadIdx.x; j < V; j += blockDim.x) row[j] = bias ? bias[j] : (floatX)0.0f;
}

// The rows of X that dW's product reads: a copy in which rows that are ignored are 0, since 0 * NaN is NaN. A block a
// row.
template <typename floatX, int width>
__global__ void lm_head_counted_rows_kernel(floatX *out, const floatX *X, const int *targets, unsigned C,
                                            int ignore_index) {
    typedef Packed<floatX, width> some;
    const size_t row = blockIdx.x;
    const bool ignored = targets[row] == ignore_index;
    for (unsigned c = threadIdx.x * width; c < C; c += blockDim.x * width) {
        some values;
        for (int k = 0; k < width; k++) values[k] = (floatX)0.0f;
        if (!ignored) values = load_packed<some>(X + row * C + c);
        store_packed(out + row * C + c, values);
    }
}

// Where 8 doesn't divide the columns, what cuBLASLt's heuristic proposes takes matrices by single elements, and 6 times
// as long (V = 50257, H200). For dX and dW there may be better (see gemm_create()). For the logits, and else for these
// too, cuBLASLt's product has a multiple of 8 of a tile's columns, and a kernel here the rest, the tail: the kernels'
// logits, dlogits, W and dW begin there.
constexpr unsigned kMostTail = 7;
constexpr unsigned kTailThreads = kWarpSize * kWarpSize;  // of a block that makes dW

// A warp a row, and a lane `width` channels at a time. What takes time is the latency of few bytes: so the loads of
// four rounds go out together.
template <typename floatX, int width>
__global__ void lm_head_tail_logits_kernel(floatX *logits, const floatX *X, const floatX *W, const floatX *bias,
                                           unsigned rows, unsigned C, unsigned P, unsigned tail) {
    typedef Packed<floatX, width> some;
    const unsigned row = blockIdx.x * (blockDim.x / kWarpSize) + threadIdx.x / kWarpSize,
                   lane = threadIdx.x % kWarpSize;
    if (row >= rows) return;
    float sums[kMostTail] = {}, x[width], w[width];
#pragma unroll 4
    for (unsigned c = lane * width; c < C; c += kWarpSize * width) {
        to_floats(x, load_packed<some>(X + (size_t)row * C + c));
#pragma unroll
        for (unsigned j = 0; j < kMostTail; j++) {
            if (j >= tail) break;
            to_floats(w, load_packed<some>(W + (size_t)j * C + c));
#pragma unroll
            for (int k = 0; k < width; k++) sums[j] += x[k] * w[k];
        }
    }
#pragma unroll
    for (unsigned j = 0; j < kMostTail; j++) {
        const float sum = warp_reduce_sum(sums[j]) + (bias && j < tail ? (float)bias[j] : 0.0f);
        if (lane == 0 && j < tail) logits[(size_t)row * P + j] = (floatX)sum;
    }
}

// dX = sums + the tail's part; dX may be `sums`. Blocks of threads a row, and a thread a channel.
template <typename floatX, typename T>
__global__ void lm_head_tail_dX_kernel(T *dX, const float *sums, const floatX *dlogits, const floatX *W, unsigned C,
                                       unsigned P, unsigned tail) {
    const size_t row = blockIdx.x;
    for (unsigned c = blockIdx.y * blockDim.x + threadIdx.x; c < C; c += gridDim.y * blockDim.x) {
        float sum = sums[row * C + c];
        for (unsigned j = 0; j < tail; j++) sum += (float)dlogits[row * P + j] * (float)W[(size_t)j * C + c];
        dX[row * C + c] = (T)sum;
    }
}

// A row of dW, blockIdx.y, is added to, or written. 32 warps have 32 channels, each every 32nd row of X, of which a
// thread has 16 on their way.
template <typename floatX, typename T>
__global__ void __launch_bounds__(kTailThreads)
    lm_head_tail_dW_kernel(T *dW, const floatX *dlogits, const floatX *X, unsigned rows, unsigned C, unsigned P,
                           bool add) {
    constexpr unsigned most = 16;
    __shared__ float factors[kTailThreads], partial[kWarpSize][kWarpSize];
    const unsigned lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const unsigned c = blockIdx.x * kWarpSize + lane, j = blockIdx.y;
    T *const mine = dW + (size_t)j * C + c;
    const float before = add && warp == 0 && c < C ? (float)*mine : 0.0f;
    float sum = 0;
    for (unsigned first = 0; first < rows; first += kTailThreads) {
        const unsigned count = min(kTailThreads, rows - first);
        __syncthreads();  // the factors before have been used
        if (threadIdx.x < count) factors[threadIdx.x] = (float)dlogits[(size_t)(first + threadIdx.x) * P + j];
        __syncthreads();
        for (unsigned r = warp; r < count; r += most * kWarpSize) {
            float x[most];
#pragma unroll
            for (unsigned i = 0; i < most; i++) {
                const unsigned at = r + i * kWarpSize;
                x[i] = at < count && c < C ? (float)X[(size_t)(first + at) * C + c] : 0.0f;
            }
#pragma unroll
            for (unsigned i = 0; i < most; i++) {
                const unsigned at = r + i * kWarpSize;
                if (at < count) sum += factors[at] * x[i];
            }
        }
    }
    partial[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || c >= C) return;
    float total = before;
    for (unsigned w = 0; w < kWarpSize; w++) total += partial[w][lane];
    *mine = (T)total;
}

// Version 1: the softmax, a block a row: the largest logit and the sum, then the probabilities, in float, so that
// nothing is rounded to floatX but logits and dlogits.
template <typename floatX, bool softcap, Extras extras>
__global__ void __launch_bounds__(1024)
    lm_head_softmax_kernel(float *probs, OnlineSoftmax *statistics, ClassifierArguments<floatX> args) {
    typedef Packed<floatX, 1> one;
    const long long row = blockIdx.x;
    const ClassifierTarget<floatX> target = find_target<softcap, extras>(args, row);
    RunningSoftmax seen(args.power);
    for (unsigned j = threadIdx.x; j < args.V; j += blockDim.x) {
        update_statistics<softcap, extras>(seen, load_packed<one>(target.logits + j), j, target, args);
    }
    const OnlineSoftmax all = block_merge<extras>(seen.result(), args);
    const Exponent exponent(all.max, args.power);
    if (threadIdx.x == 0) statistics[row] = all;
    for (unsigned j = threadIdx.x; j < args.V; j += blockDim.x) {
        float slope;
        const float value = value_and_slope<softcap, extras>((float)target.logits[j], args, &slope);
        probs[row * args.V + j] = exponent.exp(value) / all.sum;
    }
}

// Version 1: the loss, a thread a row.
template <typename floatX, bool softcap, Extras extras>
__global__ void lm_head_loss_kernel(const OnlineSoftmax *statistics, ClassifierArguments<floatX> args) {
    const long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= args.N) return;
    write_scalars<extras>(args, row, find_target<softcap, extras>(args, row), statistics[row]);
}

// Version 1: the gradient, over the logits, a block a row.
template <typename floatX, bool softcap, Extras extras>
__global__ void __launch_bounds__(1024)
    lm_head_gradient_kernel(const float *probs, const OnlineSoftmax *statistics, ClassifierArguments<floatX> args) {
    const long long row = blockIdx.x;
    const ClassifierTarget<floatX> target = find_target<softcap, extras>(args, row);
    const ClassifierGradient g = gradient_constants(args, target, statistics[row], dloss_of(args, row));
    const float per_p = g.a / g.to_p;
    __syncthreads();  // all have read the target's logit
    for (unsigned j = threadIdx.x; j < args.V; j += blockDim.x) {
        float slope;
        value_and_slope<softcap, extras>((float)target.logits[j], args, &slope);
        const float d = j == target.index ? g.at_target : slope * fmaf(per_p, probs[row * args.V + j], -g.b);
        target.dlogits[j] = (floatX)(target.ignored ? 0.0f : d);
    }
}

constexpr unsigned kTileVectors = 4;  // of a row, that a thread has on their way at a time

// Calls several(vectors, column, stride) for kTileVectors vectors that are `stride` columns apart, one(vector, column)
// for what is left of them, and single(column) for what is behind them: a block's share of a row of a tile. The tile's
// rows begin at multiples of 16 bytes.
template <typename floatX, typename Several, typename One, typename Single>
__device__ void for_each_vector(const floatX *row, unsigned columns, Several several, One one, Single single) {
    typedef Packed128<floatX> x128;
    const unsigned vectors = columns / x128::size, stride = blockDim.x * x128::size;
    unsigned v = threadIdx.x;
    for (; v + (kTileVectors - 1) * blockDim.x < vectors; v += kTileVectors * blockDim.x) {
        x128 x[kTileVectors];
#pragma unroll
        for (unsigned u = 0; u < kTileVectors; u++) x[u] = load128(row + v * x128::size + u * stride);
        several(x, v * x128::size, stride);
    }
    for (; v < vectors; v += blockDim.x) one(load128(row + v * x128::size), v * x128::size);
    const unsigned behind = vectors * x128::size + threadIdx.x;
    if (behind < columns) single(behind);
}

// The statistics of a tile, columns begin..begin+columns-1 of the logits, put together with those of the tiles before
// it, as an online softmax does. A block a row. (Cut Cross-Entropy, Wijmans et al. 2024, makes a row's log-sum-exp from
// tiles of the logits in this way, and never stores them.)
template <typename floatX, bool softcap, Extras extras>
__global__ void __launch_bounds__(512)
    lm_head_statistics_kernel(TiledRow *rows, ClassifierArguments<floatX> args, unsigned begin, unsigned columns) {
    typedef Packed<floatX, 1> one;
    const long long row = blockIdx.x;
    const ClassifierTarget<floatX> target = describe_target(args, row, args.targets[row]);
    if (!target.read) return;
    const unsigned own = target.index - begin;  // the target's column in this tile; if not here, none of the columns
    RunningSoftmax seen(args.power);
    for_each_vector(
        target.logits, columns,
        [&](const auto &x, unsigned column, unsigned stride) {
            update_statistics<softcap, extras>(seen, x, column, stride, target, args);
        },
        [&](const auto &x, unsigned column) { update_statistics<softcap, extras>(seen, x, column, target, args); },
        [&](unsigned column) {
            update_statistics<softcap, extras>(seen, load_packed<one>(target.logits + column), column, target, args);
        });
    OnlineSoftmax all = block_merge<extras>(seen.result(), args);
    if (threadIdx.x != 0) return;
    all.count = columns;
    float target_logit = 0;
    if (begin > 0) {
        const TiledRow before = rows[row];
        all = merge<extras>(before.statistics(), all, args);
        target_logit = before.target_logit;
    }
    if (target.index < args.V && own < columns) target_logit = (float)target.logits[own];
    rows[row] = {all.max, all.sum, all.gaps, all.count, target_logit};
}

// All tiles have been seen: each row's scalars, and the constants of its gradient (null: not wanted). A thread a row.
// rows (runs, N): a run is so many columns.
template <typename floatX, bool softcap, Extras extras>
__global__ void lm_head_finish_kernel(ClassifierGradient *gradients, const TiledRow *rows, unsigned runs,
                                      unsigned run_columns, ClassifierArguments<floatX> args) {
    const long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= args.N) return;
    ClassifierTarget<floatX> target = describe_target(args, row, args.targets[row]);
    OnlineSoftmax seen;
    if (target.read) {
        if (target.index < args.V) {
            const unsigned run = target.index / run_columns;
            set_logit<softcap, extras>(target, args, rows[(size_t)run * args.N + row].target_logit);
        }
        for (unsigned run = 0; run < runs; run++) {
            seen = merge<extras>(seen, rows[(size_t)run * args.N + row].statistics(), args);
        }
    }
    write_scalars<extras>(args, row, target, seen);
    if (gradients) gradients[row] = gradient_constants(args, target, seen, dloss_of(args, row));
}

// The gradient of a tile, over its logits. A block a row; nobody waits for anybody, so this is a read and a write.
template <typename floatX, bool softcap, Extras extras>
__global__ void __launch_bounds__(512)
    lm_head_tile_kernel(const ClassifierGradient *gradients, ClassifierArguments<floatX> args, unsigned begin,
                        unsigned columns) {
    typedef Packed<floatX, 1> one;
    const long long row = blockIdx.x;
    ClassifierTarget<floatX> target = describe_target(args, row, args.targets[row]);
    target.index -= begin;  // of this tile, or none of its columns
    if (target.ignored) return zero_columns128(target.dlogits, 0, columns);
    const ClassifierGradient g = gradients[row];
    auto write = [&](const auto &x, unsigned column) {
        write_columns<softcap, extras, false>(x, column, target, g, args);
    };
    for_each_vector(
        target.logits, columns,
        [&](const auto &x, unsigned column, unsigned stride) {
#pragma unroll
            for (unsigned u = 0; u < kTileVectors; u++) write(x[u], column + u * stride);
        },
        write, [&](unsigned column) { write(load_packed<one>(target.logits + column), column); });
}

// The sum of each column of dlogits over a slice of the rows, in float: sums (slices, columns). A block has a slice and
// as many columns as the lanes of a warp have with 16 bytes each; its warps take every warps-th row. The order of the
// additions is always the same.
template <typename floatX>
__global__ void __launch_bounds__(1024)
    lm_head_columns_kernel(float *sums, const floatX *dlogits, unsigned rows, unsigned columns, unsigned P) {
    typedef Packed128<floatX> x128;
    __shared__ float partial[kWarpSize * kWarpSize * x128::size];
    const unsigned lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
    const unsigned across = kWarpSize * x128::size, column = blockIdx.x * across + lane * x128::size;
    const unsigned slice = ceil_div(rows, gridDim.y), first = blockIdx.y * slice, last = min(first + slice, rows);
    float sum[x128::size] = {}, values[x128::size];
    if (column + x128::size <= columns) {
#pragma unroll 4
        for (unsigned r = first + warp; r < last; r += warps) {
            to_floats(values, load128(dlogits + (size_t)r * P + column));
            for (int k = 0; k < x128::size; k++) sum[k] += values[k];
        }
    } else {  // nobody has written what is behind the last column
        for (unsigned r = first + warp; r < last; r += warps) {
            for (unsigned k = 0; column + k < columns; k++) sum[k] += (float)dlogits[(size_t)r * P + column + k];
        }
    }
    for (int k = 0; k < x128::size; k++) partial[warp * across + lane * x128::size + k] = sum[k];
    __syncthreads();
    for (unsigned i = threadIdx.x; i < across; i += blockDim.x) {
        const unsigned j = blockIdx.x * across + i;
        float total = 0;
        for (unsigned w = 0; w < warps; w++) total += partial[w * across + i];
        if (j < columns) sums[(size_t)blockIdx.y * columns + j] = total;
    }
}

// out = the sums of all slices, or out += that, rounded once. A thread a column.
template <typename T>
__global__ void lm_head_slices_kernel(T *out, const float *sums, unsigned columns, unsigned slices, bool add) {
    const unsigned j = blockIdx.x * blockDim.x + threadIdx.x;
    if (j >= columns) return;
    float total = 0;
    for (unsigned i = 0; i < slices; i++) total += sums[(size_t)i * columns + j];
    out[j] = (T)(add ? (float)out[j] + total : total);
}

// out = sums, or out += sums, rounded once.
template <typename T, int width>
__global__ void lm_head_round_kernel(T *out, const float *sums, long long vectors, bool add) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= vectors) return;
    const auto more = load_packed<Packed<float, width>>(sums + i * width);
    float values[width] = {};
    if (add) to_floats(values, load_packed<Packed<T, width>>(out + i * width));
#pragma unroll
    for (int k = 0; k < width; k++) values[k] += more[k];
    store_packed(out + i * width, from_floats<T>(values));
}

// ---------------------------------------------------------------------------------------------------------------------
// plans: what is decided before anything runs

// How the logits are cut.
enum LmHeadWay {
    kLmHeadTextbook,    // not at all, and the probabilities beside them
    kLmHeadRows,        // in blocks of rows, perhaps a single one
    kLmHeadVocabulary,  // in tiles of the vocabulary; in blocks of rows too where a float dX of all doesn't fit
    kLmHeadEpilogue     // the same, by a product of our own; the first pass has no logits at all
};

// What plans go by. With --way and --overlap, version 6 can be made to do otherwise, to see what its choice is worth.
struct LmHeadTuning {
    bool overlap = true;      // of tiles, the classifier of one beside the products of others, on a second stream
    int way = -1;             // an LmHeadWay; -1: whichever costs less
    int columns = 0;          // of a tile at most; 0: from the L2 or the budget
    double operations = 167;  // floating-point operations of a product in the time that a byte of DRAM takes (H200)
    double launch = 20e6;     // bytes of DRAM in the time that a product loses at its beginning and end
    double l2_share = 0.5;    // of the L2, for the tiles that are in use
    size_t most_gemm_bytes = 32 << 20;  // what cuBLASLt may have; no more than an eighth of the budget
};

// What a plan depends on besides.
struct LmHeadDevice {
    int l2 = 0, multiprocessors = 1;
    bool has_product = false;  // of our own
    bool tensor_cores = true;  // the CPU device has none
    bool ragged = false;       // cuBLASLt makes dX and dW of any number of columns: lm_head_create() tries
};

inline cudaError_t lm_head_device(LmHeadDevice *about) {
    int device = 0, shared = 0, major = 0;
    cudaError_t error = cudaGetDevice(&device);
    auto get = [&](int *value, cudaDeviceAttr attribute) {
        if (error == cudaSuccess) error = cudaDeviceGetAttribute(value, attribute, device);
    };
    get(&about->l2, cudaDevAttrL2CacheSize);
    get(&about->multiprocessors, cudaDevAttrMultiProcessorCount);
    get(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    get(&major, cudaDevAttrComputeCapabilityMajor);
    about->tensor_cores = major > 0;
    cudaFuncAttributes kernel = {};  // code for another device than sm_90a takes no such blocks
    if (error == cudaSuccess) {
        error = cudaFuncGetAttributes(&kernel, lm_head_product_kernel<__nv_bfloat16, false, false, kNoExtras>);
    }
    about->has_product = kernel.binaryVersion == 90 && kernel.maxThreadsPerBlock >= (int)kProductThreads &&
                         (size_t)shared >= kProductShared;
    return error;
}

// What a plan is made for. Types: CUDA_R_32F, CUDA_R_16F or CUDA_R_16BF; of the gradients the same, or CUDA_R_32F.
struct LmHeadProblem {
    int N = 0, C = 0, V = 0;
    cudaDataType_t type = CUDA_R_16BF, gradient_type = CUDA_R_32F;
    bool dX = true, dW = true, bias = false, dbias = false;  // what there is, and which gradients are wanted
    bool tf32 = false;                                       // fp32 products with inputs rounded to TF32
    bool bare = false;  // the products alone, for their time: dW is written, not added to
    // Rows of X that are ignored hold finite numbers, as the caller promises: dW's product reads X itself, and no copy.
    bool finite = false;
    ClassifierOptions options = {};
    size_t memory = 0;    // bytes of scratch at most: to be set for versions 3 on; 1 and 2 take what they need
    bool enough = false;  // or more, where that is too little for the version to make sense
    int version = 6;
    LmHeadTuning tuning = {};
};

// What cuBLASLt knows of the matrices of d = a b.
struct GemmMatrices {
    cublasLtMatrixLayout_t a = nullptr, b = nullptr, d = nullptr;

    void destroy() {
        for (cublasLtMatrixLayout_t layout : {a, b, d}) {
            if (layout) cublasLtMatrixLayoutDestroy(layout);
        }
    }
};

// A product, with the algorithm chosen for it.
enum GemmKind { kGemmLogits, kGemmDX, kGemmDW };
struct Gemm {
    GemmKind kind;
    int rows, columns;  // of the logits that it makes or reads
    bool aligned;       // whether the matrices begin at multiples of 16 bytes
    cublasLtMatmulDesc_t desc = nullptr;
    GemmMatrices matrices = {};
    std::vector<cublasLtMatmulHeuristicResult_t> candidates = {};
    size_t chosen = 0;
};

constexpr size_t kWorkspaceAlignment = 256;  // and of its parts

// A plan: made by lm_head_create(), run as often as one likes, by one thread at a time, and destroyed.
struct LmHead {
    LmHeadProblem problem;
    LmHeadWay way = kLmHeadRows;
    int rows = 0, columns = 0;  // of a block and of a tile
    int P = 0;                  // columns that a row of a block or tile has room for
    int buffers = 1;            // tiles that there is room for
    int runs = 1;               // of columns, that a row's statistics are made in by the product of our own
    bool overlap = false;
    LmHeadDevice device;

    // The workspace: where each part begins, and all of them together.
    size_t logits = 0, probs = 0, seen = 0, gradients = 0, X = 0, dX = 0, dW = 0, dbias = 0, slices = 0, gemm = 0;
    size_t statistics_bytes = 0, gemm_bytes = 0, bytes = 0;

    cublasLtHandle_t handle = nullptr;
    std::vector<Gemm> gemms;
    cudaStream_t side = nullptr;
    cudaEvent_t made[2] = {}, done[2] = {};  // of the two tiles that are under way
    cudaError_t error = cudaSuccess;         // what was wrong,
    char what[240] = "";                     // and in words
    size_t least = 0;                        // bytes that are enough, where the budget was too small

    // Of a tile's columns, those that cuBLASLt's product has: a multiple of 8, and the tail has the rest; or all.
    int columns_of(GemmKind kind, int tile_columns) const {
        const bool all = tile_columns < 128 || (kind != kGemmLogits && device.ragged);
        return all ? tile_columns : tile_columns / 8 * 8;
    }
    int blocks() const { return rows > 0 ? ceil_div(problem.N, rows) : 0; }
    int tiles() const { return columns > 0 ? ceil_div(problem.V, columns) : 0; }
    bool by_tiles() const { return way == kLmHeadVocabulary || way == kLmHeadEpilogue; }
    bool gradient() const { return problem.dX || problem.dW || problem.dbias; }
    bool can_use(const void *workspace) const { return bytes == 0 || (uintptr_t)workspace % kWorkspaceAlignment == 0; }
    // Where a dX is the sum of several tiles' parts, or of a tail's too, it is in float until it is complete.
    bool float_dX() const {
        const bool parts = by_tiles() || columns_of(kGemmDX, columns) < columns;
        return problem.dX && problem.type != CUDA_R_32F && parts;
    }
    // dW's product reads a copy of a block of X, in which ignored rows are 0, whatever X holds there. The copy has the
    // size of the block's dX and takes its place until dX is written, which is behind the last product that reads the
    // copy; but where tile after tile is added to dX itself, or none is wanted, it is a part of the workspace. By the
    // bytes that it moves, the copy takes 111/V of the time of the three products: 0.2% at V = 50304.
    bool copies_X() const { return problem.dW && problem.C > 0 && problem.V > 0 && !problem.bare && !problem.finite; }
    bool copy_in_dX() const { return problem.dX && (float_dX() || !by_tiles() || tiles() == 1); }
    // A dW of 16 bits too, since cuBLASLt's own addition to it may round twice: first the product, then the sum with
    // what was there (CUDA 13.0, H200). There is room for all of it, or for a tile's.
    bool float_dW() const { return problem.dW && problem.gradient_type != CUDA_R_32F && !problem.bare; }
    // And a dbias of 16 bits that several blocks of rows add to.
    bool float_dbias() const {
        return problem.dbias && problem.gradient_type != CUDA_R_32F && way == kLmHeadRows && blocks() > 1;
    }
    // Slices of the rows for dbias: some 256 blocks, each of 128 rows at least.
    unsigned row_slices() const {
        const unsigned vector = problem.type == CUDA_R_32F ? 4 : 8;
        const unsigned across = ceil_div((unsigned)std::max(columns, 1), kWarpSize * vector);
        return std::min(ceil_div(256u, across), ceil_div((unsigned)rows, 128u));
    }
};

inline size_t lm_head_size(cudaDataType_t type) { return type == CUDA_R_32F ? 4 : 2; }

// From 4096 columns on a multiple of 128, so that rows begin where the memory likes it, which costs 3% at most; else of
// 8, for 16 bytes.
inline long long lm_head_pad(long long columns) {
    const int unit = columns >= 4096 ? 128 : 8;
    return ceil_div(columns, (long long)unit) * unit;
}

// What all logits would take, as versions 1 and 2 have them, in bytes: budgets are shares of this.
inline double lm_head_logits_bytes(const LmHeadProblem &p) {
    return (double)p.N * lm_head_pad(p.V) * lm_head_size(p.type);
}

// The workspace of a plan whose sizes are known. False if it is larger than can be.
inline bool lm_head_layout(LmHead &plan) {
    const LmHeadProblem &p = plan.problem;
    const long long pad = lm_head_pad(plan.columns);
    if (pad > INT32_MAX) return false;
    plan.P = (int)pad;
    size_t next = 0;
    bool possible = true;
    auto part = [&](bool wanted, double bytes) {
        const size_t begin = next;
        possible = possible && (!wanted || next + bytes < 0x1p62);
        if (wanted && possible) next += ceil_div((size_t)bytes, kWorkspaceAlignment) * kWorkspaceAlignment;
        return begin;
    };
    const double rows = plan.rows, V = p.V, C = p.C;
    const double seen = plan.way == kLmHeadEpilogue ? (double)plan.runs * p.N : rows;
    // First what both passes need, then what the first leaves to lm_head_finish_kernel; in version 5's way, nothing of
    // what follows is there yet when that is done, so it takes the same place.
    plan.gradients = part(plan.by_tiles() && plan.gradient(), std::min(seen, (double)p.N) * sizeof(ClassifierGradient));
    plan.seen = part(plan.way != kLmHeadRows, seen * std::max(sizeof(TiledRow), sizeof(OnlineSoftmax)));
    plan.statistics_bytes = next;
    if (plan.way == kLmHeadEpilogue) next = plan.seen;
    plan.logits = part(true, plan.buffers * rows * plan.P * lm_head_size(p.type));
    plan.probs = part(plan.way == kLmHeadTextbook, rows * V * sizeof(float));
    plan.X = part(plan.copies_X() && !plan.copy_in_dX(), rows * C * lm_head_size(p.type));
    plan.dX = part(plan.float_dX(), rows * C * sizeof(float));
    plan.dW = part(plan.float_dW(), plan.columns * C * sizeof(float));
    plan.dbias = part(plan.float_dbias(), V * sizeof(float));
    plan.slices = part(p.dbias, plan.row_slices() * (double)plan.columns * sizeof(float));
    plan.gemm = part(true, (double)plan.gemm_bytes);
    plan.bytes = std::max(next, plan.statistics_bytes);
    return possible;
}

// The largest number from least to most that fits() likes, if it likes all below one that it likes; else least - 1.
template <typename Fits>
int largest_that_fits(int least, int most, Fits fits) {
    long long good = least - 1LL, bad = most + 1LL;
    while (bad - good > 1) {
        const long long middle = good + (bad - good) / 2;
        (fits((int)middle) ? good : bad) = middle;
    }
    return (int)good;
}

// So many pieces of `count`, about the same size each, in whole units; no larger than `most`, which is such a size.
inline int even_pieces(int count, int most, int unit) {
    const int even = ceil_div(count, ceil_div(count, most));
    return (int)std::min<long long>(count, ceil_div((long long)even, (long long)unit) * unit);
}

// Blocks of rows within the budget: 128 rows or a multiple of that, if so many fit. Each adds to all of dW, so they are
// as large as can be: of C 2048, V 128256, blocks of 2048 rows, in 25%, took 5% less time than blocks of 1664, in 24.9%
// (H200). (To classify a block in parts, beside the products of others, was slower: of C 768, V 50304 in 25% and 10%,
// two parts took 3% and 9% longer than one, of C 2048, V 128256 in 10%, 5%.)
inline bool plan_rows(LmHead &plan, size_t memory) {
    const LmHeadProblem &p = plan.problem;
    plan.way = kLmHeadRows;
    plan.columns = p.V;
    auto fits = [&](int rows) {
        plan.rows = rows;
        return lm_head_layout(plan) && plan.bytes <= memory;
    };
    // A single block needs no dbias in float: it may fit where one that is a little smaller doesn't.
    const int most = fits(p.N) ? p.N : largest_that_fits(1, p.N - 1, fits);
    if (most < 1) return false;
    const int unit = most >= 128 ? 128 : 1;
    return fits(most == p.N ? most : even_pieces(p.N, most / unit * unit, unit));
}

// Tiles within the budget. All rows at once, if they fit with their float dX, since each block of rows adds to all of
// dW, and to one in floatX it may add only once; else blocks of rows. Tiles that fit into the L2, but no narrower than
// 1024 columns, if the budget allows it; then as many of them as the budget has room for.
inline bool plan_vocabulary(LmHead &plan, size_t memory, bool overlap) {
    const LmHeadProblem &p = plan.problem;
    const LmHeadTuning &tuning = p.tuning;
    plan.way = kLmHeadVocabulary;
    plan.buffers = overlap ? 2 : 1;
    auto fits = [&](int rows, int columns, int buffers) {
        plan.rows = rows;
        plan.columns = columns;
        plan.buffers = buffers;
        return lm_head_layout(plan) && plan.bytes <= memory;
    };
    const bool one_block = (p.dW || p.dbias) && p.gradient_type != CUDA_R_32F;
    const double row = (double)p.N * plan.buffers * lm_head_size(p.type);
    const double in_l2 = std::min((double)p.V, std::max(1024.0, tuning.l2_share * plan.device.l2 / row));
    int columns = std::max(tuning.columns > 0 ? std::min(tuning.columns, p.V) : (int)in_l2, 1);
    for (;; columns = ceil_div(columns, 2)) {
        const int unit_columns = columns >= 128 ? 128 : columns >= 8 ? 8 : 1;
        if (columns < p.V) columns = columns / unit_columns * unit_columns;
        for (int buffers = overlap ? 2 : 1; buffers >= 1; buffers--) {
            const int most = largest_that_fits(1, p.N, [&](int rows) { return fits(rows, columns, buffers); });
            // If all rows don't fit: that many at least, or tiles are halved, whose float dX takes the room.
            const bool enough = columns <= 8 ? most >= 1 : columns <= 128 ? most >= 32 : columns <= 1024 && most >= 512;
            if (most < p.N && (one_block || !enough)) continue;
            const int unit = most >= 128 ? 128 : 1;
            const int rows = most == p.N ? most : even_pieces(p.N, most / unit * unit, unit);
            const int width = even_pieces(p.V, columns, columns < p.V ? unit_columns : 1), tiles = ceil_div(p.V, width);
            const int more =
                p.version == 6 && plan.gradient()
                    ? largest_that_fits(buffers, tiles, [&](int count) { return fits(rows, width, count); })
                    : buffers;
            plan.overlap = overlap && more > 1 && tiles > 1;
            // A narrower tile may have more slices for dbias.
            if (fits(rows, width, std::max(1, std::min(more, tiles)))) return true;
        }
        if (columns <= 1) return false;
    }
}

// About so many runs of tiles, none of them without any.
inline int full_runs(int tiles, int runs) { return ceil_div(tiles, ceil_div(tiles, runs)); }

// So many runs of the columns' tiles that the blocks of the product have about the same to do.
inline int even_runs(int rows, int columns, int multiprocessors) {
    const int down = ceil_div(rows, (int)kProductRows), across = ceil_div(columns, (int)kProductColumns);
    double least = INFINITY;
    int best = 1;
    for (int runs = 1; runs <= std::min(across, 2 * multiprocessors); runs++) {
        const double turns = ceil_div((long long)down * runs, (long long)multiprocessors);
        const double cost = turns * ceil_div(across, runs) * (1 + runs / 1000.0);  // few, if it is all the same
        if (cost < least) least = cost, best = runs;
    }
    return full_runs(across, best);
}

// Whether the product of our own will do: its kernels are for 16 bits, and know no signs.
inline bool has_epilogue(const LmHead &plan) {
    const LmHeadProblem &p = plan.problem;
    return plan.device.has_product && lm_head_size(p.type) == 2 && p.C > 0 && p.options.logit_scale > 0;
}

// Whether a plan can run with other options than it was made for. What it was chosen by must stay: whether there is a
// softcap, and the sign of logit_scale.
inline bool lm_head_takes(const LmHead &plan, const ClassifierOptions &options) {
    const ClassifierOptions &planned = plan.problem.options;
    auto sign = [](float scale) { return (scale > 0) - (scale < 0); };
    return (options.softcap > 0) == (planned.softcap > 0) && sign(options.logit_scale) == sign(planned.logit_scale);
}

inline double lm_head_cost(const LmHead &plan);

// Tiles for the product of our own: of the numbers of blocks of rows, the one that costs least, with tiles as wide as
// the budget allows. Without gradients there is nothing to keep but the statistics.
inline bool plan_epilogue(LmHead &plan, size_t memory) {
    const LmHeadProblem &p = plan.problem;
    if (!has_epilogue(plan)) return false;
    plan.way = kLmHeadEpilogue;
    plan.buffers = plan.gradient() ? 1 : 0;
    if (!p.dX && !p.dW) plan.gemm_bytes = 0;  // cuBLASLt has nothing to do
    const int unit = kProductColumns, last = ceil_div(p.N, 128);
    int most = p.tuning.columns > 0 ? std::min(p.tuning.columns, p.V) : p.V;
    if (most < p.V && most > unit) most = most / unit * unit;
    const bool one_block = (p.dW || p.dbias) && p.gradient_type != CUDA_R_32F;
    auto fits = [&](int rows, int columns) {
        plan.rows = rows;
        plan.columns = columns;
        return lm_head_layout(plan) && plan.bytes <= memory;
    };
    auto cut = [&] {
        if (!plan.gradient()) return fits(p.N, p.V);
        double least = INFINITY;
        int rows = 0, columns = 0;
        for (int blocks = 1;; blocks = std::min(last, blocks + ceil_div(blocks, 8))) {
            const int height = even_pieces(p.N, ceil_div(p.N, blocks), std::min(p.N, 128));
            auto width_of = [&](int units) { return (int)std::min<long long>((long long)units * unit, most); };
            const int units =
                largest_that_fits(1, ceil_div(most, unit), [&](int n) { return fits(height, width_of(n)); });
            // As wide as can be, or so that each multiprocessor has the same number of tiles.
            const long long down = ceil_div(height, (int)kProductRows), SMs = plan.device.multiprocessors;
            for (const int n : {units, (int)(units * down / SMs * SMs / down)}) {
                if (n < 1 || !fits(height, even_pieces(p.V, width_of(n), std::min(unit, most)))) continue;
                const double cost = lm_head_cost(plan);
                if (cost < least) least = cost, rows = plan.rows, columns = plan.columns;
            }
            if (blocks >= last || one_block) break;
        }
        return rows > 0 && fits(rows, columns);
    };
    const int tiles = ceil_div(p.V, unit);
    for (plan.runs = even_runs(p.N, p.V, plan.device.multiprocessors); !cut();
         plan.runs = full_runs(tiles, plan.runs / 2)) {
        if (plan.runs == 1) return false;  // their statistics take room too
    }
    return true;
}

// What a plan costs, as bytes of DRAM that would take as long. A product takes the time of its operations or of its
// memory traffic, and where the two are about as long, somewhat more than either; adding to sums in float takes 1.7
// times as long as copying as much; with one side as short as a tile's it is 12% slower. Then there is what a kernel
// takes to start and to end, and what the classifier moves; version 5's statistics take about as long as reading the
// logits would. (Its numbers, exponents among them, are fitted to what products and whole plans took on an H200, of 128
// to 8192 rows and C from 768 to 4096: most within 10%. They are ratios of times, and other GPUs' are much the same.)
// On the CPU device operations are nearly all that counts: one takes about as long as three bytes. There version 5's own
// product takes ten times as long as cuBLASLt's, since its instructions are emulated.
inline double lm_head_cost(const LmHead &plan) {
    const LmHeadProblem &p = plan.problem;
    const double N = p.N, C = std::max(p.C, 1), V = p.V, size = lm_head_size(p.type), launch = p.tuning.launch;
    const double SMs = plan.device.multiprocessors, emulated = plan.device.tensor_cores ? 1 : 10;
    const double rate = plan.device.tensor_cores ? p.tuning.operations : 1 / 3.0;
    const double slower = p.type != CUDA_R_32F ? 1 : p.tf32 ? 2 : 12;  // than products of 16 bits
    auto product = [&](double outputs, double terms, double bytes, bool of_tile) {
        const double operations = 2 * outputs * terms * slower / rate * (of_tile ? 1.12 : 1);
        return pow(pow(operations, 4) + pow(bytes, 4), 0.25) + launch;
    };
    const double rows = plan.rows, columns = plan.columns, blocks = N / rows, tiles = V / columns;
    const double full_rows = ceil(rows / 128) * 128, logits = rows * columns, W = columns * C * size;
    // Few tiles of dX leave multiprocessors idle, unless its sums are split, for which there has to be room. (cuBLASLt
    // splits none of floats.)
    const bool floats = p.type == CUDA_R_32F;
    const double dX_tiles = ceil(rows / (floats ? 128 : 64)) * ceil(C / 128);
    const double splits = floats ? 1 : std::max(1.0, floor(plan.gemm_bytes / (4 * rows * C)));
    const double idle = pow(std::max(1.0, SMs / (dX_tiles * splits)), floats ? 0.75 : 0.33);
    auto use = [&](double outputs, double terms, double bytes) {
        return product(outputs, terms, bytes, plan.by_tiles());
    };
    const double dX = p.dX ? use(full_rows * C, columns * idle, W + (plan.float_dX() ? 8 * rows * C : 0)) : 0;
    const double dW = p.dW ? use(columns * C, std::max(rows, 32.0), 1.7 * 8 * columns * C + size * logits) : 0;
    const double passes = plan.gradient() ? 2 : 1;
    const double make = use(full_rows * columns, C, W);
    double look = launch + passes * size * logits;
    if (plan.way == kLmHeadEpilogue) {
        const double first =
            product(ceil(N / 128) * 128 * V, C * emulated, V * C * size, false) + 2 * launch + size * N * V;
        // Rounds of the multiprocessors, each with a tile whose gradients take as long as four more slices.
        const double rounds = ceil(ceil(rows / kProductRows) * ceil(columns / kProductColumns) / SMs);
        const double outputs = rounds * SMs * kProductRows * kProductColumns;
        const double gradients = product(outputs, (C + 4 * kProductDepth) * emulated, W + size * logits, false);
        return first + (plan.gradient() ? blocks * tiles * (gradients + dX + dW) : 0);
    }
    double again = 1;
    if (plan.way == kLmHeadVocabulary) {
        look = 0.75 * look + (plan.gradient() ? launch + size * logits : 0);  // some of it is in the L2
        if (plan.overlap) look /= 2;
        if (plan.gradient()) again = 2 - std::min(1.0, plan.buffers / tiles);
    }
    return blocks * tiles * (again * make + look + dX + dW);
}

// Whether a plan makes sense: with blocks of 128 rows and tiles of 128 columns, or all there are, and version 5 with
// its own product if there is one.
inline bool lm_head_comfortable(const LmHead &plan) {
    const LmHeadProblem &p = plan.problem;
    const int most = p.tuning.columns > 0 ? std::min(p.tuning.columns, 128) : 128;
    const int unit = most >= 128 ? 128 : most >= 8 ? 8 : 1, columns = most / unit * unit;
    const int wanted_columns = columns < p.V ? even_pieces(p.V, columns, unit) : p.V;
    const bool as_such = p.version != 5 || plan.way == kLmHeadEpilogue || !has_epilogue(plan);
    return as_such && plan.rows >= std::min(p.N, 128) && plan.columns >= wanted_columns;
}

// The way, the sizes and the workspace. False if the budget is too small (comfortable: for a plan that makes sense).
inline bool lm_head_plan(LmHead &plan, size_t memory, bool comfortable = false) {
    const LmHeadProblem p = plan.problem;
    const bool bounded = p.version >= 3 && p.V > 0;
    const bool products = p.V > 0 && p.C > 0;
    auto at_most = [&](double bytes) {
        const double of_problem = std::max((double)p.N * p.V * lm_head_size(p.type) / 4, 0x1p20);
        return products ? (size_t)std::min({bytes, of_problem, (double)p.tuning.most_gemm_bytes}) : 0;
    };
    if (!bounded) {  // all at once
        plan.gemm_bytes = at_most(INFINITY);
        plan.way = p.version == 1 ? kLmHeadTextbook : kLmHeadRows;
        plan.rows = p.N;
        plan.columns = p.V;
        return lm_head_layout(plan);
    }
    // cuBLASLt's scratch: an eighth of the budget, less, or none: then 25% holds a quarter of the rows exactly.
    const double shares[] = {8, 32, INFINITY};
    double least = INFINITY;
    auto consider = [&](LmHeadWay way, double share, bool overlap) {  // of the budget, cuBLASLt's is a share
        LmHead other;
        other.problem = p;
        other.device = plan.device;
        other.gemm_bytes = at_most(memory / share);
        const bool fits = way == kLmHeadRows         ? plan_rows(other, memory)
                          : way == kLmHeadVocabulary ? plan_vocabulary(other, memory, overlap)
                                                     : plan_epilogue(other, memory);
        const double cost = fits && (!comfortable || lm_head_comfortable(other)) ? lm_head_cost(other) : INFINITY;
        if (cost < least) least = cost, plan = other;
    };
    const int only = p.version == 3   ? kLmHeadRows
                     : p.version == 4 ? kLmHeadVocabulary
                     : p.version == 5 ? kLmHeadEpilogue
                                      : p.tuning.way;
    auto wanted = [&](LmHeadWay way) {
        if (only >= 0) return way == only;
        return way != kLmHeadEpilogue || p.C % 8 == 0;  // else it loads element by element
    };
    for (double share : shares) {
        for (LmHeadWay way : {kLmHeadRows, kLmHeadVocabulary, kLmHeadEpilogue}) {
            if (!wanted(way)) continue;
            consider(way, share, false);
            if (p.version == 6 && p.tuning.overlap && way == kLmHeadVocabulary) consider(way, share, true);
        }
    }
    for (double share : shares) {  // no such product, or no room for it
        if (p.version == 5 && plan.way != kLmHeadEpilogue) consider(kLmHeadVocabulary, share, false);
    }
    return least < INFINITY;
}

// The least that the version can do with; comfortable: with a plan that makes sense.
inline size_t lm_head_least_bytes(const LmHeadProblem &problem, const LmHeadDevice &device, bool comfortable = false) {
    auto possible = [&](size_t memory) {
        LmHead plan;
        plan.problem = problem;
        plan.device = device;
        return lm_head_plan(plan, memory, comfortable);
    };
    size_t bad = 0, good = 4096;
    for (; good < SIZE_MAX / 4 && !possible(good); good *= 2) bad = good;
    if (comfortable && !possible(good)) return lm_head_least_bytes(problem, device);
    while (good - bad > 256) {
        const size_t middle = bad + (good - bad) / 2;
        (possible(middle) ? good : bad) = middle;
    }
    return good;
}

// ---------------------------------------------------------------------------------------------------------------------
// products

inline cudaError_t from_cublas(cublasStatus_t status) {
    switch (status) {
        case CUBLAS_STATUS_SUCCESS:
            return cudaSuccess;
        case CUBLAS_STATUS_ALLOC_FAILED:
        case CUBLAS_STATUS_NOT_INITIALIZED:
            return cudaErrorMemoryAllocation;
        case CUBLAS_STATUS_INVALID_VALUE:
            return cudaErrorInvalidValue;
        case CUBLAS_STATUS_NOT_SUPPORTED:
        case CUBLAS_STATUS_ARCH_MISMATCH:
            return cudaErrorNotSupported;
        default:
            return cudaErrorUnknown;
    }
}

constexpr int kGemmCandidates = 16;

// Into how many parts an algorithm splits a sum, and how it puts them together. False if it doesn't say.
inline bool splitting_of(const cublasLtMatmulAlgo_t &algo, int32_t *parts, uint32_t *scheme) {
    size_t written = 0;
    auto get = [&](cublasLtMatmulAlgoConfigAttributes_t attribute, auto *value) {
        return cublasLtMatmulAlgoConfigGetAttribute(&algo, attribute, value, sizeof(*value), &written) ==
               CUBLAS_STATUS_SUCCESS;
    };
    return get(CUBLASLT_ALGO_CONFIG_SPLITK_NUM, parts) && get(CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, scheme);
}

// Whether it does that in float. (That is asked of cuBLASLt too.)
inline bool sums_in_float(const cublasLtMatmulAlgo_t &algo) {
    int32_t parts = 0;
    uint32_t scheme = 0;
    return splitting_of(algo, &parts, &scheme) && ((parts <= 1 && scheme == CUBLASLT_REDUCTION_SCHEME_NONE) ||
                                                   scheme == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
}

inline bool splits_sum(const cublasLtMatmulAlgo_t &algo) {
    int32_t parts = 0;
    uint32_t scheme = 0;
    return splitting_of(algo, &parts, &scheme) && parts > 1;
}

// cuBLASLt's matrices are column-major: a row-major (R, S) is its (S, R). So with x = logits:
//   x^T (columns, rows) = W (columns, C) X^T (C, rows)      dX^T (C, rows) = W^T (C, columns) x^T (columns, rows)
//   dW^T (C, columns) = X^T (C, rows) x (rows, columns)
// Algorithms that add up parts of a sum do it in float and in a fixed order, not by atomics.
//
// The heuristic's choice goes by whether 8 or 128 divides the columns more than there is reason to: for 50257 columns
// it knows nothing that is fast, for 50256 other algorithms than for 50304, up to 10% slower (CUDA 13.0, H200). So it
// is asked about the next multiple of 128 too, as far as x has room for it, and cuBLASLt's own check says which of the
// algorithms for that take the columns there are: for dX and dW any number of them.
inline cublasStatus_t gemm_create(Gemm &gemm, const LmHead &plan) {
    const LmHeadProblem &p = plan.problem;
    const bool logits = gemm.kind == kGemmLogits, dW = gemm.kind == kGemmDW;
    const cudaDataType_t type_of_dX = plan.float_dX() ? CUDA_R_32F : p.type;
    const cudaDataType_t type_of_dW = plan.float_dW() ? CUDA_R_32F : p.gradient_type;
    const cudaDataType_t result = logits ? p.type : dW ? type_of_dW : type_of_dX;
    const int C = p.C, P = plan.P;
    const auto compute = p.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    cublasLtMatmulPreference_t preference = nullptr;
    cublasStatus_t status = cublasLtMatmulDescCreate(&gemm.desc, compute, CUDA_R_32F);
    auto then = [&](auto step) {
        if (status == CUBLAS_STATUS_SUCCESS) status = step();
    };
    auto describe = [&](cublasLtMatmulDescAttributes_t attribute, auto value) {
        then([&] { return cublasLtMatmulDescSetAttribute(gemm.desc, attribute, &value, sizeof(value)); });
    };
    auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
        then([&] { return cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)); });
    };
    describe(CUBLASLT_MATMUL_DESC_TRANSA, (int32_t)(logits ? CUBLAS_OP_T : CUBLAS_OP_N));
    describe(CUBLASLT_MATMUL_DESC_TRANSB, (int32_t)(dW ? CUBLAS_OP_T : CUBLAS_OP_N));
    if (logits && p.bias) {
        describe(CUBLASLT_MATMUL_DESC_EPILOGUE, (uint32_t)CUBLASLT_EPILOGUE_BIAS);
        // Until there is one, an address that is aligned as it will be.
        describe(CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                 (const void *)(uintptr_t)(gemm.aligned ? 16 : lm_head_size(p.type)));
    }
    then([&] { return cublasLtMatmulPreferenceCreate(&preference); });
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (uint64_t)plan.gemm_bytes);
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, (uint32_t)CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
    const uint32_t given = gemm.aligned ? 16 : lm_head_size(p.type), own = 16;
    const uint32_t of_result = gemm.aligned ? 16 : lm_head_size(result);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, given);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, logits ? given : own);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, logits ? own : of_result);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, logits ? own : of_result);
    auto describe_matrices = [&](int columns, GemmMatrices &m) {
        then([&] { return cublasLtMatrixLayoutCreate(&m.a, p.type, C, dW ? gemm.rows : columns, C); });
        then([&] {
            return logits ? cublasLtMatrixLayoutCreate(&m.b, p.type, C, gemm.rows, C)
                          : cublasLtMatrixLayoutCreate(&m.b, p.type, columns, gemm.rows, P);
        });
        then([&] {
            return logits ? cublasLtMatrixLayoutCreate(&m.d, result, columns, gemm.rows, P)
                          : cublasLtMatrixLayoutCreate(&m.d, result, C, dW ? columns : gemm.rows, C);
        });
    };
    // False if the check doesn't take the algorithm; else the scratch that it says.
    auto check = [&](const GemmMatrices &m, const cublasLtMatmulAlgo_t &algo, size_t *bytes) {
        cublasLtMatmulHeuristicResult_t checked = {};
        const cublasStatus_t fits =
            cublasLtMatmulAlgoCheck(plan.handle, gemm.desc, m.a, m.b, m.d, m.d, &algo, &checked);
        *bytes = checked.workspaceSize;
        return fits == CUBLAS_STATUS_SUCCESS;
    };
    // What the heuristic has for these matrices; if they are others, as far as the check takes it for ours, with no
    // more scratch than it says for these. (It can't be compared with what there is: of an algorithm that uses 4 bytes
    // if it has them, the check says 4, even where the heuristic was told that there are none, and proposes it.)
    auto propose = [&](const GemmMatrices &m) {
        if (status != CUBLAS_STATUS_SUCCESS) return;
        cublasLtMatmulHeuristicResult_t results[kGemmCandidates];
        int found = 0;
        const cublasStatus_t asked = cublasLtMatmulAlgoGetHeuristic(plan.handle, gemm.desc, m.a, m.b, m.d, m.d,
                                                                    preference, kGemmCandidates, results, &found);
        for (int i = 0; asked == CUBLAS_STATUS_SUCCESS && i < found; i++) {
            const cublasLtMatmulAlgo_t &algo = results[i].algo;
            if (results[i].state != CUBLAS_STATUS_SUCCESS || !sums_in_float(algo)) continue;
            auto same = [&](const cublasLtMatmulHeuristicResult_t &known) {
                return memcmp(&known.algo, &algo, sizeof(algo)) == 0;
            };
            if (std::any_of(gemm.candidates.begin(), gemm.candidates.end(), same)) continue;
            size_t theirs = 0, ours = 0;
            const bool fits = &m == &gemm.matrices ||
                              (check(m, algo, &theirs) && check(gemm.matrices, algo, &ours) && ours <= theirs);
            if (fits) gemm.candidates.push_back(results[i]);
        }
    };
    describe_matrices(gemm.columns, gemm.matrices);
    const int padded = std::min(P, ceil_div(gemm.columns, 128) * 128);
    const bool large = gemm.aligned && gemm.columns >= 128;
    if (large && padded > gemm.columns) {
        GemmMatrices wider;
        describe_matrices(padded, wider);
        propose(wider);
        wider.destroy();
    }
    if (!large || gemm.columns % 8 == 0) propose(gemm.matrices);  // else there are only slow ones
    // Those that split the sum round a logit of 16 bits twice where there is a bias, before they add it and after (CUDA
    // 13.0, H200): only if there are no others.
    if (logits && p.bias && p.type != CUDA_R_32F) {
        auto whole = [](const cublasLtMatmulHeuristicResult_t &found) { return !splits_sum(found.algo); };
        const auto split = std::stable_partition(gemm.candidates.begin(), gemm.candidates.end(), whole);
        if (split != gemm.candidates.begin()) gemm.candidates.erase(split, gemm.candidates.end());
    }
    if (preference) cublasLtMatmulPreferenceDestroy(preference);
    if (status == CUBLAS_STATUS_SUCCESS && gemm.candidates.empty()) status = CUBLAS_STATUS_NOT_SUPPORTED;
    return status;
}

// d = a b + beta d. A bias is the logits' own.
inline cudaError_t gemm_run(const LmHead &plan, const Gemm &gemm, void *d, const void *a, const void *b,
                            const void *bias, float beta, char *workspace, cudaStream_t stream) {
    const float one = 1;
    if (gemm.candidates.empty()) return cudaErrorNotSupported;
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    if (bias) {
        status = cublasLtMatmulDescSetAttribute(gemm.desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof(bias));
    }
    if (status == CUBLAS_STATUS_SUCCESS) {
        const GemmMatrices &m = gemm.matrices;
        status = cublasLtMatmul(plan.handle, gemm.desc, &one, a, m.a, b, m.b, &beta, d, m.d, d, m.d,
                                &gemm.candidates[gemm.chosen].algo, workspace + plan.gemm, plan.gemm_bytes, stream);
    }
    return from_cublas(status);
}

inline const Gemm *find_gemm(const LmHead &plan, GemmKind kind, int rows, int columns, bool aligned) {
    for (const Gemm &gemm : plan.gemms) {
        if (gemm.kind == kind && gemm.rows == rows && gemm.columns == columns && gemm.aligned == aligned) return &gemm;
    }
    return nullptr;
}

inline void lm_head_destroy(LmHead &plan) {
    for (Gemm &gemm : plan.gemms) {
        gemm.matrices.destroy();
        if (gemm.desc) cublasLtMatmulDescDestroy(gemm.desc);
    }
    plan.gemms.clear();
    for (cudaEvent_t *event : {&plan.made[0], &plan.made[1], &plan.done[0], &plan.done[1]}) {
        if (*event) cudaEventDestroy(*event);
        *event = nullptr;
    }
    if (plan.side) cudaStreamDestroy(plan.side);
    if (plan.handle) cublasLtDestroy(plan.handle);
    plan.handle = nullptr;
    plan.side = nullptr;
}

// The products that a plan needs, with their algorithms.
inline cublasStatus_t lm_head_find_gemms(LmHead &plan) {
    const LmHeadProblem &p = plan.problem;
    cublasStatus_t status = cublasLtCreate(&plan.handle);
    if (status != CUBLAS_STATUS_SUCCESS) {
        snprintf(plan.what, sizeof(plan.what), "cublasLtCreate: %s", cublasLtGetStatusName(status));
        return status;
    }
    // The first of several pieces, and the last.
    auto sizes = [](int count, int piece) {
        return count <= piece || count % piece == 0 ? std::vector<int>{std::min(count, piece)}
                                                    : std::vector<int>{piece, count % piece};
    };
    auto add = [&](bool wanted, GemmKind kind, int rows, int tile_columns, bool aligned) {
        const int columns = plan.columns_of(kind, tile_columns);
        if (!wanted || status != CUBLAS_STATUS_SUCCESS || find_gemm(plan, kind, rows, columns, aligned)) return;
        plan.gemms.push_back({kind, rows, columns, aligned});
        status = gemm_create(plan.gemms.back(), plan);
        if (status == CUBLAS_STATUS_SUCCESS) return;
        plan.gemms.back().candidates.clear();
        const char *const names[] = {"logits", "dX", "dW"};
        snprintf(plan.what, sizeof(plan.what), "cuBLASLt: %s: %d rows, %d columns, C %d, %zu bytes of scratch: %s",
                 names[kind], rows, columns, p.C, plan.gemm_bytes, cublasLtGetStatusName(status));
        if (!aligned) status = CUBLAS_STATUS_SUCCESS;  // runs that need it will be refused
    };
    const std::vector<int> widths = p.C > 0 && p.V > 0 ? sizes(p.V, plan.columns) : std::vector<int>();
    for (bool aligned : {true, false}) {
        for (int rows : sizes(p.N, plan.rows)) {
            for (int columns : widths) {
                add(plan.way != kLmHeadEpilogue, kGemmLogits, rows, columns, aligned);
                add(p.dX, kGemmDX, rows, columns, aligned);
                add(p.dW, kGemmDW, rows, columns, aligned);
            }
        }
    }
    return status;
}

// Puts an error and its words into the plan, and returns the error.
__attribute__((format(printf, 3, 4))) inline cudaError_t lm_head_fail(LmHead &plan, cudaError_t error,
                                                                      const char *format, ...) {
    va_list words;
    va_start(words, format);
    vsnprintf(plan.what, sizeof(plan.what), format, words);
    va_end(words);
    return plan.error = error;
}

// Makes a plan for a problem: an empty LmHead that lm_head_destroy() takes whatever this returns. It asks cuBLASLt for
// algorithms, and takes host memory and a stream, but no device memory of its own. cudaErrorInvalidValue: a negative
// size, a type or an option that there is not; cudaErrorMemoryAllocation: a budget that is too small (plan.rows is 0
// then); or what cuBLASLt says. plan.what has it in words.
inline cudaError_t lm_head_create(LmHead &plan, const LmHeadProblem &problem) {
    const LmHeadProblem &p = plan.problem = problem;
    auto known = [](cudaDataType_t type) { return type == CUDA_R_32F || type == CUDA_R_16F || type == CUDA_R_16BF; };
    if (p.N < 0 || p.C < 0 || p.V < 0) return lm_head_fail(plan, cudaErrorInvalidValue, "a size is negative");
    if (!known(p.type) || (p.gradient_type != p.type && p.gradient_type != CUDA_R_32F)) {
        return lm_head_fail(plan, cudaErrorInvalidValue, "no such type, or two that don't go together");
    }
    if (!valid_options(p.options))
        return lm_head_fail(plan, cudaErrorInvalidValue, "an option is not finite or out of its range");
    if (p.version < 1 || p.version > 6) return lm_head_fail(plan, cudaErrorInvalidValue, "no version %d", p.version);
    if (lm_head_pad(p.V) > INT32_MAX) return lm_head_fail(plan, cudaErrorInvalidValue, "V is too large");
    if (p.N == 0) return cudaSuccess;
    LmHeadDevice device;
    cudaError_t error = lm_head_device(&device);
    if (error != cudaSuccess) return lm_head_fail(plan, error, "%s", cudaGetErrorString(error));
    plan.device = device;
    if (p.version == 6 && p.tuning.way == kLmHeadEpilogue && !has_epilogue(plan)) {
        return lm_head_fail(
            plan, cudaErrorNotSupported,
            "no way 'epilogue' here: it takes fp16 or bf16, C > 0, a positive logit_scale, and code for "
            "sm_90a on such a device");
    }
    // With dX and dW of any number of columns; if there is no product like that, with tails.
    cublasStatus_t status = CUBLAS_STATUS_NOT_SUPPORTED;
    const bool comfortable = p.enough && p.version > 2;
    for (bool ragged : {true, false}) {
        if (status != CUBLAS_STATUS_NOT_SUPPORTED) break;
        lm_head_destroy(plan);
        plan = LmHead();
        plan.problem = problem;
        plan.device = device;
        plan.device.ragged = ragged;
        bool planned = lm_head_plan(plan, p.memory, comfortable);
        if (!planned && comfortable) {
            plan.problem.memory = std::max(p.memory, lm_head_least_bytes(p, plan.device, true));
            planned = lm_head_plan(plan, p.memory, true) || lm_head_plan(plan, p.memory);
        }
        if (!planned) {
            plan.rows = 0;
            if (p.version <= 2)
                return lm_head_fail(plan, cudaErrorMemoryAllocation, "it takes more scratch than there can be");
            plan.least = lm_head_least_bytes(p, device);  // with tails or without
            return lm_head_fail(plan, cudaErrorMemoryAllocation, "%zu bytes of scratch are too few: %zu are enough",
                                p.memory, plan.least);
        }
        status = lm_head_find_gemms(plan);
    }
    if (status != CUBLAS_STATUS_SUCCESS) return plan.error = from_cublas(status);
    if (!plan.overlap) return cudaSuccess;
    int least = 0, greatest = 0;
    error = cudaDeviceGetStreamPriorityRange(&least, &greatest);
    if (error == cudaSuccess) {
        error = cudaStreamCreateWithPriority(&plan.side, cudaStreamNonBlocking, greatest);
    }
    for (cudaEvent_t *event : {&plan.made[0], &plan.made[1], &plan.done[0], &plan.done[1]}) {
        if (error == cudaSuccess) error = cudaEventCreateWithFlags(event, cudaEventDisableTiming);
    }
    return error == cudaSuccess ? error
                                : lm_head_fail(plan, error, "a stream and its events: %s", cudaGetErrorString(error));
}

// ---------------------------------------------------------------------------------------------------------------------
// launchers

// A run:  dX (N, C) floatX, dW (V, C) and dbias (V) gradX, to which is added, losses (N) and lse (N) float, which are
// written (with options.add_losses, losses are added to); X (N, C), W (V, C) and bias (V) floatX, targets (N) int32,
// dlosses (N) float; status one status word; workspace plan.bytes, at a multiple of 256. Row-major, device memory, all
// others aligned to their element only, none overlapping another. Which of dX, dW, dbias and bias there are, the plan
// says: those are not null, the others are. losses, lse, dlosses (1) and status may be null. What the workspace holds
// does not matter, before or after. W may be the embedding's table: then dW is its gradient's first part, to which
// encoder_backward adds the other. options: of this run, if lm_head_takes() them; null: the plan's.
//
// Targets, options and rows that are not finite are as in classifier_fused.cu. Rows that are ignored have no part in
// any gradient, whatever X holds there (unless the problem says that it is finite: then it has to be). A bad target
// makes its row of dX and, as it is a term of each of their sums, all of dW and dbias NaN. V = 0: dX is 0. N = 0:
// nothing is done. C = 0: the logits are the bias, or 0.
//
// Sums over the vocabulary or the rows are made in float, in any order that cuBLASLt's algorithm has, and rounded once:
// in a dW or dbias of 16 bits, what was there plus the sum over all rows. The label smoothing term of a loss is rounded
// once more for each tile of the vocabulary. The same plan gives the same bits each time: its algorithms use no atomics.
//
// Nothing is allocated and nobody waited for: a run is launches, in the order of `stream` (those on the plan's own
// stream begin behind what is in `stream` and end before what follows), so that it can be captured in a CUDA graph.
// Returns cudaErrorInvalidValue for pointers or options that are not as the plan says, cudaErrorMisalignedAddress for
// such a workspace, or what a launch or cuBLASLt returned.
//
// Sources: chunks of rows with the gradient formed in place of the logits are Liger Kernel's fused linear cross
// entropy; statistics first, then tiles of the vocabulary whose logits are made again, are Cut Cross-Entropy's (Wijmans
// et al. 2024); the classifier between the products is llm.c's.
template <typename floatX, typename gradX>
struct LmHeadArguments {
    floatX *dX;
    gradX *dW, *dbias;
    float *losses, *lse;
    const floatX *X, *W, *bias;
    const int *targets;
    const float *dlosses;
    status_word *status;
    char *workspace;
    const ClassifierOptions *options = nullptr;  // null: the plan's
};

template <typename floatX, typename gradX>
using LmHeadLauncher = cudaError_t (*)(const LmHead &plan, const LmHeadArguments<floatX, gradX> &args,
                                       cudaStream_t stream);

// What all ways have in common, for a run: where things are, and the products.
template <typename floatX, typename gradX>
struct LmHeadRun {
    const LmHead &plan;
    LmHeadArguments<floatX, gradX> args;
    char *const workspace;
    ClassifierOptions options;
    bool aligned;

    LmHeadRun(const LmHead &made, const LmHeadArguments<floatX, gradX> &given)
        : plan(made),
          args(given),
          workspace(given.workspace),
          options(given.options ? *given.options : made.problem.options) {
        const size_t C = plan.problem.C;
        uintptr_t all = (uintptr_t)args.X | (uintptr_t)args.W | (uintptr_t)args.bias | (uintptr_t)args.dX;
        all |= (uintptr_t)args.dW;
        if (plan.blocks() > 1) all |= plan.rows * C * sizeof(floatX);
        if (plan.tiles() > 1) all |= plan.columns * C * sizeof(floatX) | plan.columns * sizeof(floatX);
        aligned = all % 16 == 0;
    }

    int rows_of(int block) const { return std::min(plan.rows, plan.problem.N - block * plan.rows); }
    int columns_of(int tile) const { return std::min(plan.columns, plan.problem.V - tile * plan.columns); }
    floatX *logits(int buffer) const {
        return (floatX *)(workspace + plan.logits) + (size_t)buffer * plan.rows * plan.P;
    }
    template <typename T>
    T *part(size_t begin) const {
        return (T *)(workspace + begin);
    }

    // Whether there is an algorithm for every product.
    bool possible() const {
        for (const Gemm &gemm : plan.gemms) {
            if (gemm.aligned == aligned && gemm.candidates.empty()) return false;
        }
        return true;
    }

    int whole_of(GemmKind kind, int tile) const { return plan.columns_of(kind, columns_of(tile)); }
    const floatX *W_of(int tile) const { return args.W + (size_t)tile * plan.columns * plan.problem.C; }

    // Of `count` rows from `row` on, and a tile.
    cudaError_t make_logits(floatX *logits, size_t row, int count, int tile, cudaStream_t stream) const {
        const size_t C = plan.problem.C;
        const int whole = whole_of(kGemmLogits, tile), tail = columns_of(tile) - whole;
        const floatX *const bias = args.bias ? args.bias + (size_t)tile * plan.columns : nullptr;
        if (columns_of(tile) == 0) return cudaSuccess;
        if (C == 0) {
            return launch_kernel(lm_head_no_channels_kernel<floatX>, count, 256, 0, stream, logits, bias,
                                 columns_of(tile), plan.P);
        }
        const cudaError_t error = gemm_run(plan, *find_gemm(plan, kGemmLogits, count, whole, aligned), logits,
                                           W_of(tile), args.X + row * C, bias, 0, workspace, stream);
        if (error != cudaSuccess || tail == 0) return error;
        auto make_tail = [&](auto kernel) {
            return launch_kernel(kernel, ceil_div(count, 8), 8 * kWarpSize, 0, stream, logits + whole, args.X + row * C,
                                 W_of(tile) + whole * C, bias ? bias + whole : nullptr, count, C, plan.P, tail);
        };
        constexpr int most = Packed128<floatX>::size;
        return aligned && C % most == 0 ? make_tail(lm_head_tail_logits_kernel<floatX, most>)
                                        : make_tail(lm_head_tail_logits_kernel<floatX, 1>);
    }

    // The rows of X that dW's product reads, from `row` on; and their copy, if that is one.
    const floatX *counted_X(size_t row) const {
        if (!plan.copies_X()) return args.X + row * plan.problem.C;
        return plan.copy_in_dX() ? args.dX + row * plan.problem.C : part<floatX>(plan.X);
    }
    cudaError_t copy_X(size_t row, int count, cudaStream_t stream) const {
        if (!plan.copies_X()) return cudaSuccess;
        constexpr int most = Packed128<floatX>::size;
        const unsigned C = plan.problem.C;
        const floatX *const X = args.X + row * C;
        floatX *const out = const_cast<floatX *>(counted_X(row));
        auto copy = [&](auto kernel, unsigned vectors) {
            const unsigned block_size = std::min(ceil_div(vectors, (unsigned)kWarpSize) * kWarpSize, 256u);
            return launch_kernel(kernel, count, block_size, 0, stream, out, X, args.targets + row, C,
                                 options.ignore_index);
        };
        return vector_width(most, C, X, out) == most ? copy(lm_head_counted_rows_kernel<floatX, most>, C / most)
                                                     : copy(lm_head_counted_rows_kernel<floatX, 1>, C);
    }

    // first: nothing of these rows' dX is there yet.
    cudaError_t make_dX(const floatX *dlogits, size_t row, int count, int tile, bool first, cudaStream_t stream) const {
        const size_t C = plan.problem.C;
        if (!args.dX || C == 0 || columns_of(tile) == 0) return cudaSuccess;
        const int whole = whole_of(kGemmDX, tile), tail = columns_of(tile) - whole;
        float *const sums = plan.float_dX() ? part<float>(plan.dX) : (float *)(args.dX + row * C);
        const cudaError_t error = gemm_run(plan, *find_gemm(plan, kGemmDX, count, whole, aligned), sums, W_of(tile),
                                           dlogits, nullptr, first ? 0 : 1, workspace, stream);
        if (error != cudaSuccess || tail == 0) return error;
        const dim3 grid(count, std::min(ceil_div((unsigned)C, 256u), 65535u));
        const floatX *const tail_dlogits = dlogits + whole, *const tail_W = W_of(tile) + whole * C;
        if (plan.by_tiles()) {
            return launch_kernel(lm_head_tail_dX_kernel<floatX, float>, grid, 256, 0, stream, sums, sums, tail_dlogits,
                                 tail_W, C, plan.P, tail);
        }
        return launch_kernel(lm_head_tail_dX_kernel<floatX, floatX>, grid, 256, 0, stream, args.dX + row * C, sums,
                             tail_dlogits, tail_W, C, plan.P, tail);
    }
    // Behind the last tile of these rows.
    cudaError_t finish_dX(size_t row, int count, cudaStream_t stream) const {
        const size_t C = plan.problem.C;
        if (!args.dX || !plan.float_dX()) return cudaSuccess;
        return round(args.dX + row * C, part<float>(plan.dX), (long long)count * C, false, stream);
    }

    // A dW in float is begun by the first block of rows, and added to dW behind the last. (Products of our own for it,
    // like lm_head_product_kernel(), were 12% to 33% slower than cuBLASLt's, of 768 and of 2048 rows: with the sums
    // added by bulk copies, atomics or loads and stores, with groups that share a tile or take turns; H200.)
    cudaError_t add_dW(const floatX *dlogits, size_t row, int count, int tile, cudaStream_t stream) const {
        const size_t C = plan.problem.C;
        if (!args.dW || C == 0 || columns_of(tile) == 0) return cudaSuccess;
        gradX *const tile_dW = args.dW + (size_t)tile * plan.columns * C;
        float *const sums = part<float>(plan.dW);
        const bool add = !(plan.problem.bare || (plan.float_dW() && row == 0));
        auto make = [&](auto *dW) {
            const int whole = whole_of(kGemmDW, tile), tail = columns_of(tile) - whole;
            const floatX *const X = counted_X(row);
            const cudaError_t error = gemm_run(plan, *find_gemm(plan, kGemmDW, count, whole, aligned), dW, X, dlogits,
                                               nullptr, add ? 1 : 0, workspace, stream);
            if (error != cudaSuccess || tail == 0) return error;
            const dim3 grid(ceil_div((unsigned)C, (unsigned)kWarpSize), tail);
            return launch_kernel(lm_head_tail_dW_kernel<floatX, std::remove_pointer_t<decltype(dW)>>, grid,
                                 kTailThreads, 0, stream, dW + whole * C, dlogits + whole, X, count, C, plan.P, add);
        };
        if (!plan.float_dW()) return make(tile_dW);
        const cudaError_t error = make(sums);
        if (error != cudaSuccess || row + count != (size_t)plan.problem.N) return error;
        return round(tile_dW, sums, columns_of(tile) * (long long)C, true, stream);
    }

    cudaError_t add_dbias(const floatX *dlogits, size_t row, int count, int tile, cudaStream_t stream) const {
        const unsigned columns = columns_of(tile), slices = plan.row_slices();
        if (!args.dbias || columns == 0) return cudaSuccess;
        float *const sums = part<float>(plan.slices);
        const dim3 grid(ceil_div(columns, kWarpSize * (unsigned)Packed128<floatX>::size), slices);
        cudaError_t error =
            launch_kernel(lm_head_columns_kernel<floatX>, grid, 1024, 0, stream, sums, dlogits, count, columns, plan.P);
        if (error != cudaSuccess) return error;
        const unsigned grid_size = ceil_div(columns, 256u);
        if (plan.float_dbias()) {
            float *const dbias = part<float>(plan.dbias);
            error = launch_kernel(lm_head_slices_kernel<float>, grid_size, 256, 0, stream, dbias, sums, columns, slices,
                                  row > 0);
            if (error != cudaSuccess || row + count != (size_t)plan.problem.N) return error;
            return round(args.dbias, dbias, columns, true, stream);
        }
        return launch_kernel(lm_head_slices_kernel<gradX>, grid_size, 256, 0, stream,
                             args.dbias + (size_t)tile * plan.columns, sums, columns, slices, true);
    }

    // out = sums, or out += sums.
    template <typename T>
    static cudaError_t round(T *out, const float *sums, long long count, bool add, cudaStream_t stream) {
        if (count == 0) return cudaSuccess;
        const bool wide = vector_width(4, count, out) == 4;
        int block_size = 256;
        const long long vectors = wide ? count / 4 : count;
        const unsigned grid_size = grid_blocks(vectors, &block_size);
        const auto kernel = wide ? lm_head_round_kernel<T, 4> : lm_head_round_kernel<T, 1>;
        return launch_kernel(kernel, grid_size, block_size, 0, stream, out, sums, vectors, add);
    }

    // launch(args, softcap, extras) with the classifier's arguments for `count` rows from `row` on, whose logits these
    // are. Bad targets have been reported.
    template <typename Launch>
    cudaError_t classify(floatX *logits, size_t row, int count, Launch launch) const {
        const LmHeadProblem &p = plan.problem;
        return classifier_launch<floatX>(plan.gradient() ? logits : nullptr, args.losses ? args.losses + row : nullptr,
                                         args.lse ? args.lse + row : nullptr, nullptr, nullptr, logits,
                                         args.targets + row, args.dlosses ? args.dlosses + row : nullptr, nullptr,
                                         count, p.V, p.V, options,
                                         [&](ClassifierArguments<floatX> arguments, auto softcap, auto extras) {
                                             arguments.P = plan.P;
                                             return launch(arguments, softcap, extras);
                                         });
    }

    // The scalars of `count` rows from `row` on, and what their gradients are formed of.
    cudaError_t finish_rows(size_t row, int count, unsigned runs, unsigned run_columns, cudaStream_t stream) const {
        ClassifierGradient *const gradients = plan.gradient() ? part<ClassifierGradient>(plan.gradients) : nullptr;
        const TiledRow *const seen = part<TiledRow>(plan.seen);
        return classify(logits(0), row, count, [&](const auto &arguments, auto softcap, auto extras) {
            return launch_kernel(lm_head_finish_kernel<floatX, softcap.value, extras.value>,
                                 ceil_div((unsigned)count, 128u), 128, 0, stream, gradients, seen, runs, run_columns,
                                 arguments);
        });
    }

    // The product of our own, for `count` rows from `row` on and the columns from a tile's first on: their statistics,
    // or their gradients.
    template <bool writes>
    cudaError_t multiply(ProductArguments<floatX> product, floatX *logits, size_t row, int count, int tile,
                         cudaStream_t stream) const {
        const LmHeadProblem &p = plan.problem;
        const size_t C = p.C, first = (size_t)tile * plan.columns;
        product.X_rows = args.X + row * C;
        product.W_rows = args.W + first * C;
        product.bias = args.bias ? args.bias + first : nullptr;
        product.rows = count;
        product.C = p.C;
        product.begin = (unsigned)first;
        product.mapped = C % 8 == 0 && ((uintptr_t)args.X | (uintptr_t)args.W) % 16 == 0;
        cudaError_t error = cudaSuccess;
        auto map = [&](CUtensorMap *made, const floatX *begin, unsigned columns, unsigned rows, size_t stride,
                       unsigned box) {
            if (error == cudaSuccess) error = map_rows(made, begin, columns, rows, stride, box);
        };
        if (product.mapped) {
            map(&product.X, product.X_rows, p.C, count, C, kProductRows);
            map(&product.W, product.W_rows, p.C, product.columns, C, kProductColumns);
        }
        if (writes) map(&product.out, logits, product.columns, count, plan.P, kBoxRows);
        if (error != cudaSuccess) return error;
        const unsigned units = ceil_div((unsigned)count, kProductRows) * product.runs;
        const unsigned grid_size = std::min(units, (unsigned)plan.device.multiprocessors);
        return classify(logits, row, count, [&](const auto &arguments, auto softcap, auto extras) {
            // What is left of the extras here is the sum of a row's logits, for its statistics.
            constexpr Extras wanted = writes ? kNoExtras : std::min(extras.value, kSum);
            const auto kernel = lm_head_product_kernel<floatX, writes, softcap.value, wanted>;
            cudaLaunchConfig_t config = {};
            config.gridDim = grid_size;
            config.blockDim = kProductThreads;
            config.dynamicSmemBytes = kProductShared;
            config.stream = stream;
            return launch_kernel(config, kernel, product, arguments);
        });
    }

    // Of all rows: their scalars, and what their gradients are formed of.
    cudaError_t make_statistics(cudaStream_t stream) const {
        const LmHeadProblem &p = plan.problem;
        ProductArguments<floatX> product = {};
        product.columns = p.V;
        product.runs = plan.runs;
        product.statistics = part<TiledRow>(plan.seen);
        const cudaError_t error = multiply<false>(product, nullptr, 0, p.N, 0, stream);
        if (error != cudaSuccess) return error;
        return finish_rows(0, p.N, product.runs, product.tiles_of_run() * kProductColumns, stream);
    }

    cudaError_t make_dlogits(floatX *dlogits, size_t row, int count, int tile, cudaStream_t stream) const {
        ProductArguments<floatX> product = {};
        product.columns = columns_of(tile);
        product.runs = even_runs(count, columns_of(tile), plan.device.multiprocessors);
        product.gradients = part<ClassifierGradient>(plan.gradients) + row;
        return multiply<true>(product, dlogits, row, count, tile, stream);
    }

    // The fused classifier, in place.
    cudaError_t classify_fused(floatX *logits, size_t row, int count, cudaStream_t stream) const {
        const LmHeadProblem &p = plan.problem;
        return classifier_fused5(
            plan.gradient() ? logits : nullptr, args.losses ? args.losses + row : nullptr,
            args.lse ? args.lse + row : nullptr, (floatX *)nullptr, nullptr, (const floatX *)logits, args.targets + row,
            args.dlosses ? args.dlosses + row : nullptr, nullptr, count, p.V, plan.P, options, kStagedThreads, stream);
    }
};

// Does one step after the other, until one fails.
struct Steps {
    cudaError_t error = cudaSuccess;
    template <typename Step>
    void then(Step step) {
        if (error == cudaSuccess) error = step();
    }
};

// dbias, dW and dX of a block or tile of gradients; dX last, since it may overwrite the copy of X that dW is made of.
// One after the other: beside each other on two streams, they were no faster at any shape that was tried, and up to 4%
// slower (C 4096, V 128256 in 10%; H200).
template <typename floatX, typename gradX>
cudaError_t lm_head_gradients(const LmHeadRun<floatX, gradX> &run, const floatX *dlogits, size_t row, int rows,
                              int tile, cudaStream_t stream) {
    Steps steps;
    steps.then([&] { return run.add_dbias(dlogits, row, rows, tile, stream); });
    steps.then([&] { return run.add_dW(dlogits, row, rows, tile, stream); });
    steps.then([&] { return run.make_dX(dlogits, row, rows, tile, tile == 0, stream); });
    return steps.error;
}

// The classifier in three kernels.
template <typename floatX, typename gradX>
cudaError_t lm_head_textbook(const LmHeadRun<floatX, gradX> &run, cudaStream_t stream) {
    floatX *const logits = run.logits(0);
    float *const probs = run.template part<float>(run.plan.probs);
    OnlineSoftmax *const seen = run.template part<OnlineSoftmax>(run.plan.seen);
    const int N = run.plan.problem.N;
    const unsigned grid_size = ceil_div((unsigned)N, 256u);
    Steps steps;
    steps.then([&] { return run.copy_X(0, N, stream); });
    steps.then([&] { return run.make_logits(logits, 0, N, 0, stream); });
    steps.then([&] {
        return run.classify(logits, 0, N, [&](const ClassifierArguments<floatX> &args, auto softcap, auto extras) {
            Steps kernels;
            kernels.then([&] {
                return launch_kernel(lm_head_softmax_kernel<floatX, softcap.value, extras.value>, N, 512, 0, stream,
                                     probs, seen, args);
            });
            kernels.then([&] {
                return launch_kernel(lm_head_loss_kernel<floatX, softcap.value, extras.value>, grid_size, 256, 0,
                                     stream, seen, args);
            });
            if (!args.dlogits) return kernels.error;
            kernels.then([&] {
                return launch_kernel(lm_head_gradient_kernel<floatX, softcap.value, extras.value>, N, 512, 0, stream,
                                     probs, seen, args);
            });
            return kernels.error;
        });
    });
    steps.then([&] { return lm_head_gradients(run, logits, 0, N, 0, stream); });
    return steps.error;
}

// Blocks of rows, one or more.
template <typename floatX, typename gradX>
cudaError_t lm_head_by_rows(const LmHeadRun<floatX, gradX> &run, cudaStream_t stream) {
    const LmHead &plan = run.plan;
    floatX *const logits = run.logits(0);
    Steps steps;
    for (int block = 0; block < plan.blocks(); block++) {
        const size_t row = (size_t)block * plan.rows;
        const int rows = run.rows_of(block);
        steps.then([&] { return run.copy_X(row, rows, stream); });
        steps.then([&] { return run.make_logits(logits, row, rows, 0, stream); });
        steps.then([&] { return run.classify_fused(logits, row, rows, stream); });
        steps.then([&] { return lm_head_gradients(run, logits, row, rows, 0, stream); });
    }
    return steps.error;
}

// The statistics of all rows, of logits that nobody ever sees; then the gradients, tile by tile.
template <typename floatX, typename gradX>
cudaError_t lm_head_by_epilogue(const LmHeadRun<floatX, gradX> &run, cudaStream_t stream) {
    const LmHead &plan = run.plan;
    floatX *const dlogits = run.logits(0);
    Steps steps;
    steps.then([&] { return run.make_statistics(stream); });
    for (int block = 0; plan.gradient() && block < plan.blocks(); block++) {
        const size_t row = (size_t)block * plan.rows;
        const int rows = run.rows_of(block);
        steps.then([&] { return run.copy_X(row, rows, stream); });
        for (int tile = 0; tile < plan.tiles(); tile++) {
            steps.then([&] { return run.make_dlogits(dlogits, row, rows, tile, stream); });
            steps.then([&] { return lm_head_gradients(run, dlogits, row, rows, tile, stream); });
        }
        steps.then([&] { return run.finish_dX(row, rows, stream); });
    }
    return steps.error;
}

// Goes through steps 0..count-1: make(i, stream) a block or tile of logits, look(i, stream) at it, use(i, stream) it.
// Overlapping, look() is on the side: while it looks at step i, the products of step i-1 are used and those of step i+1
// made. So there have to be two buffers; what makes step i+1 comes behind all that looked at step i-1 or used it.
template <typename Make, typename Look, typename Use>
cudaError_t lm_head_steps(const LmHead &plan, int count, cudaStream_t stream, Make make, Look look, Use use) {
    Steps steps;
    for (int i = 0; i < count; i++) {
        if (!plan.overlap) {
            steps.then([&] { return make(i, stream); });
            steps.then([&] { return look(i, stream); });
            steps.then([&] { return use(i, stream); });
            continue;
        }
        for (int next = i == 0 ? 0 : i + 1; next <= i + 1 && next < count; next++) {
            const cudaEvent_t made = plan.made[next % 2], done = plan.done[next % 2];
            steps.then([&] { return make(next, stream); });
            steps.then([&] { return cudaEventRecord(made, stream); });
            steps.then([&] { return cudaStreamWaitEvent(plan.side, made, 0); });
            steps.then([&] { return look(next, plan.side); });
            steps.then([&] { return cudaEventRecord(done, plan.side); });
        }
        steps.then([&] { return cudaStreamWaitEvent(stream, plan.done[i % 2], 0); });
        steps.then([&] { return use(i, stream); });
    }
    return steps.error;
}

// Tiles of the vocabulary, twice; the second time in the opposite order, so that the tiles that the first pass left in
// the buffers are not made again.
template <typename floatX, typename gradX>
cudaError_t lm_head_by_vocabulary(const LmHeadRun<floatX, gradX> &run, cudaStream_t stream) {
    const LmHead &plan = run.plan;
    TiledRow *const seen = run.template part<TiledRow>(plan.seen);
    ClassifierGradient *const gradients = run.template part<ClassifierGradient>(plan.gradients);
    const int tiles = plan.tiles();
    auto logits = [&](int tile) { return run.logits(tile % plan.buffers); };
    // About four vectors a thread.
    const int vectors = ceil_div(plan.columns, (int)Packed128<floatX>::size);
    const int block_size = std::clamp(ceil_div(vectors, 4 * kWarpSize) * kWarpSize, kWarpSize, 512);
    Steps steps;
    for (int block = 0; block < plan.blocks(); block++) {
        const int rows = run.rows_of(block);
        const size_t row = (size_t)block * plan.rows;
        auto make = [&](int tile, cudaStream_t s) { return run.make_logits(logits(tile), row, rows, tile, s); };
        steps.then([&] {
            auto look = [&](int tile, cudaStream_t s) {
                return run.classify(logits(tile), row, rows, [&](const auto &args, auto softcap, auto extras) {
                    return launch_kernel(lm_head_statistics_kernel<floatX, softcap.value, extras.value>, rows,
                                         block_size, 0, s, seen, args, (unsigned)tile * plan.columns,
                                         run.columns_of(tile));
                });
            };
            return lm_head_steps(plan, tiles, stream, make, look, [](int, cudaStream_t) { return cudaSuccess; });
        });
        steps.then([&] { return run.finish_rows(row, rows, 1, plan.problem.V, stream); });
        if (!plan.gradient()) continue;
        steps.then([&] { return run.copy_X(row, rows, stream); });
        steps.then([&] {
            auto tile_of = [&](int step) { return tiles - 1 - step; };
            auto make_again = [&](int step, cudaStream_t s) {
                return step < plan.buffers ? cudaSuccess : make(tile_of(step), s);
            };
            auto look = [&](int step, cudaStream_t s) {
                const int tile = tile_of(step);
                floatX *const x = logits(tile);
                const cudaError_t error = run.classify(x, row, rows, [&](const auto &args, auto softcap, auto extras) {
                    return launch_kernel(lm_head_tile_kernel<floatX, softcap.value, extras.value>, rows, block_size, 0,
                                         s, gradients, args, (unsigned)tile * plan.columns, run.columns_of(tile));
                });
                return error == cudaSuccess ? run.add_dbias(x, row, rows, tile, s) : error;
            };
            auto use = [&](int step, cudaStream_t s) {
                const int tile = tile_of(step);
                const cudaError_t error = run.add_dW(logits(tile), row, rows, tile, s);
                return error == cudaSuccess ? run.make_dX(logits(tile), row, rows, tile, step == 0, s) : error;
            };
            return lm_head_steps(plan, tiles, stream, make_again, look, use);
        });
        steps.then([&] { return run.finish_dX(row, rows, stream); });
    }
    return steps.error;
}

// Runs a plan: any version's, since the plan knows its way.
template <typename floatX, typename gradX>
cudaError_t lm_head(const LmHead &plan, const LmHeadArguments<floatX, gradX> &args, cudaStream_t stream) {
    const LmHeadProblem &p = plan.problem;
    if (p.N == 0) return cudaSuccess;
    const bool as_planned = (args.dX != nullptr) == p.dX && (args.dW != nullptr) == p.dW &&
                            (args.dbias != nullptr) == p.dbias && (args.bias != nullptr) == p.bias;
    const bool has_inputs =
        (args.X || p.C == 0) && (args.W || p.C == 0 || p.V == 0) && args.targets && (args.workspace || plan.bytes == 0);
    if (!as_planned || !has_inputs || lm_head_size(p.type) != sizeof(floatX)) return cudaErrorInvalidValue;
    if (!plan.can_use(args.workspace)) return cudaErrorMisalignedAddress;
    const LmHeadRun<floatX, gradX> run(plan, args);
    if (!valid_options(run.options) || !lm_head_takes(plan, run.options)) return cudaErrorInvalidValue;
    if (!run.possible()) return cudaErrorNotSupported;
    if (args.status) {
        const cudaError_t error = launch_kernel(lm_head_targets_kernel, ceil_div((unsigned)p.N, 256u), 256, 0, stream,
                                                args.status, args.targets, p.N, p.V, run.options.ignore_index);
        if (error != cudaSuccess) return error;
    }
    if (args.dX && p.V == 0 && p.C > 0) {
        const cudaError_t error = cudaMemsetAsync(args.dX, 0, (size_t)p.N * p.C * sizeof(floatX), stream);
        if (error != cudaSuccess) return error;
    }
    switch (plan.way) {
        case kLmHeadTextbook:
            return lm_head_textbook(run, stream);
        case kLmHeadRows:
            return lm_head_by_rows(run, stream);
        case kLmHeadVocabulary:
            return lm_head_by_vocabulary(run, stream);
        default:
            if constexpr (sizeof(floatX) == 2) return lm_head_by_epilogue(run, stream);
            return cudaErrorInvalidValue;
    }
}

// Tries the algorithms that cuBLASLt proposes for each product, on the run's own memory, and remembers the fastest:
// each once or twice, then the best three in turns, a millisecond's worth of runs behind each other at a time. The
// exception among these functions: it waits for the stream, and dX, dW and the workspace hold anything afterwards, so
// its place is before the first run. Without it, a plan takes what cuBLASLt proposes first.
//
// (Clusters of other shapes than cuBLASLt proposes were up to 8% faster here, by themselves, and made no run faster: a
// product that waits for memory runs at a higher clock by itself than between others that don't.)
template <typename floatX, typename gradX>
cudaError_t lm_head_tune(LmHead &plan, const LmHeadArguments<floatX, gradX> &args, cudaStream_t stream) {
    constexpr size_t finalists = 3;
    if (!plan.can_use(args.workspace)) return cudaErrorMisalignedAddress;
    const LmHeadRun<floatX, gradX> run(plan, args);
    cudaEvent_t start = nullptr, stop = nullptr;
    cudaError_t error = cudaEventCreate(&start);
    if (error == cudaSuccess) error = cudaEventCreate(&stop);
    if (error == cudaSuccess) {  // numbers to work on, until there are logits
        const size_t bytes = (size_t)plan.buffers * plan.rows * plan.P * sizeof(floatX);
        error = cudaMemsetAsync(run.logits(0), 0x3c, bytes, stream);
    }
    for (Gemm &gemm : plan.gemms) {  // the logits come first
        if (error != cudaSuccess) break;
        if (gemm.aligned != run.aligned || gemm.candidates.size() < 2) continue;
        const bool logits = gemm.kind == kGemmLogits;
        void *const dX = plan.float_dX() ? run.template part<void>(plan.dX) : args.dX;
        void *const dW = plan.float_dW() ? run.template part<void>(plan.dW) : args.dW;
        void *const d = logits ? run.logits(0) : gemm.kind == kGemmDX ? dX : dW;
        const void *const a = gemm.kind == kGemmDW ? args.X : args.W;
        const void *const b = logits ? (const void *)args.X : run.logits(0);
        const bool adds_dW = !plan.problem.bare && (!plan.float_dW() || plan.blocks() > 1);
        const bool adds = gemm.kind == kGemmDW ? adds_dW : gemm.kind == kGemmDX && plan.tiles() > 1;
        std::vector<std::pair<float, size_t>> results;  // a candidate's time, and which it is
        // Milliseconds of a run, of so many in a row that all take `least`.
        auto time = [&](size_t candidate, float least) {
            gemm.chosen = candidate;
            float all = 0;
            for (int count = 1;; count *= 2) {
                bool ran = true;
                const KeepPendingError keep;  // one that cannot run may leave an error behind
                if (error == cudaSuccess) error = cudaEventRecord(start, stream);
                for (int i = 0; i < count && ran; i++) {
                    ran = gemm_run(plan, gemm, d, a, b, logits ? args.bias : nullptr, adds ? 1 : 0, run.workspace,
                                   stream) == cudaSuccess;
                }
                if (error == cudaSuccess) error = cudaEventRecord(stop, stream);
                if (error == cudaSuccess) error = cudaEventSynchronize(stop);
                if (error == cudaSuccess) error = cudaEventElapsedTime(&all, start, stop);
                if (error != cudaSuccess || !ran) return INFINITY;
                if (all >= least) return all / count;
            }
        };
        for (size_t i = 0; i < gemm.candidates.size(); i++) {
            time(i, 0);  // the first run may have to load the kernel
            results.push_back({time(i, 0.1f), i});
        }
        std::sort(results.begin(), results.end());
        results.resize(std::min(results.size(), finalists));
        for (auto &result : results) result.first = INFINITY;
        for (int round = 0; round < 3; round++) {
            for (auto &[best, candidate] : results) best = std::min(best, time(candidate, 1));
        }
        gemm.chosen = std::min_element(results.begin(), results.end())->second;
    }
    if (start) cudaEventDestroy(start);
    if (stop) cudaEventDestroy(stop);
    return error;
}

template <typename floatX, typename gradX>
constexpr Version<LmHeadLauncher<floatX, gradX>> lm_head_versions[] = {
    {1, "textbook", "all logits; softmax, loss and gradient in kernels of their own", lm_head<floatX, gradX>, 512,
     kSameAtABlockSize},
    {2, "fused", "all logits, and the fused classifier", lm_head<floatX, gradX>, 512, kSameAtABlockSize},
    {3, "rows", "blocks of rows, so that scratch is bounded", lm_head<floatX, gradX>, 512, kSameAtABlockSize},
    {4, "vocabulary", "tiles of the vocabulary, whose logits are made twice", lm_head<floatX, gradX>, 512,
     kSameAtABlockSize},
    {5, "epilogue", "tiles, statistics and gradients in the accumulators of a product of our own",
     lm_head<floatX, gradX>, 512, kSameAtABlockSize},
    {6, "planned", "the way and its sizes from the budget", lm_head<floatX, gradX>, 512, kSameAtABlockSize},
};

}  // namespace bookends

// ---------------------------------------------------------------------------------------------------------------------
#ifndef BOOKENDS_NO_MAIN
#include <memory>

#include "dev/harness/classifier_options.h"
#include "dev/harness/harness.h"

namespace bookends {

template <typename T>
constexpr cudaDataType_t type_of() {
    return std::is_same_v<T, float> ? CUDA_R_32F : std::is_same_v<T, half> ? CUDA_R_16F : CUDA_R_16BF;
}

// Uniform in [-scale, scale), then rounded to floatX.
template <typename floatX>
struct ScaledValues {
    Values<float> values;
    float scale;
    __host__ __device__ floatX operator[](long long i) const { return (floatX)(values[i] * scale); }
};

// What the check has for dlosses: the gradients of rows that the reference doesn't know are 0, so that dW is the sum
// over those that it knows: every step-th. All of them would take it hours at large shapes.
struct CheckedRows {
    long long step;
    __host__ __device__ bool known(long long r) const { return r % step == 0; }
    __host__ __device__ float operator[](long long r) const { return known(r) ? 0.5f * (float)(1 + r / step % 3) : 0; }
};

// A row that the reference knows: its results, dlogits as they are rounded, and how far each may be off.
struct KnownRow {
    double loss = 0, lse = 0, of_loss = 0, of_lse = 0;
    std::vector<float> dlogits, slack;
};

template <typename floatX>
struct LmHeadReference {
    int C, V;
    bool tf32;
    ClassifierOptions options;
    ScaledValues<floatX> X_values, W_values, bias_values;
    bool has_bias;
    CheckedRows rows;
    std::vector<float> W, bias;
    std::vector<float> X;  // of the known rows
    std::vector<KnownRow> known;

    // Float arithmetic's own share of what results may be off, in roundings U, as in classifier_fused.cu; beside it a
    // logit's float sum may be on the other side of a rounding to floatX, or two of them.
    static constexpr double U = 0x1p-24;

    // A sum of `count` terms whose squares' root is `size` and whose sizes add up to `all`, in whatever order a product
    // adds: sums in order round once a term, with either sign; tensor cores cut off two roundings each 16 terms.
    static double of_sum(double count, double size, double all) {
        return U * (count / 8 + 8 * sqrt(count) + 16) * std::min(4 * size, all);
    }

    void prepare(long long N, const int *targets) {
        const long long count = ceil_div(N, rows.step);
        W.resize((size_t)V * C);
        X.resize(count * C);
        known.resize(count);
        in_pieces("weights", V, [&](size_t from, size_t to) {
            for (size_t i = from * C; i < to * C; i++) W[i] = (float)W_values[i];
        });
        for (int j = 0; has_bias && j < V; j++) bias.push_back((float)bias_values[j]);
        in_pieces("reference", count, [&](size_t from, size_t to) {
            for (size_t k = from; k < to; k++) prepare_row(k, targets[k * rows.step]);
        });
    }

    void prepare_row(size_t k, int target) {
        KnownRow &row = known[k];
        float *const x = &X[k * C];
        for (int c = 0; c < C; c++) x[c] = (float)X_values[(k * rows.step) * C + c];
        std::vector<double> logits(V), moved(V), dlogits(V), probs(V), z(V);
        lm_head_logits_cpu(logits.data(), moved.data(), x, W.data(), has_bias ? bias.data() : nullptr, C, V);
        const double scale = options.logit_scale, cap = options.softcap, eps = options.label_smoothing;
        for (int j = 0; j < V; j++) {  // moved: how far z may be off
            const double off = of_sum(C, moved[j], INFINITY) + (tf32 ? 8 * 0x1p-10 * moved[j] : 0);
            const double exact = logits[j];
            logits[j] = nearest<floatX>(exact);
            const double high = nearest<floatX>(exact + off), low = nearest<floatX>(exact - off);
            moved[j] = fabs(scale) * std::max(high - logits[j], logits[j] - low);
        }
        const ClassifierRow r = classifier_fused_cpu(dlogits.data(), probs.data(), z.data(), logits.data(), target,
                                                     options.dloss * rows[k * rows.step], V, options);
        row.loss = r.loss;
        row.lse = r.lse;
        double of_lse = 0, mean_moved = 0, most_moved = 0;
        for (int j = 0; j < V; j++) {
            of_lse += 1.2 * probs[j] * expm1(std::min(moved[j], 1.0));
            mean_moved += moved[j] / V;
            most_moved = std::max(most_moved, moved[j]);
        }
        // Where a rounding of a logit is a factor of e or more of its probability, that may be anything.
        const bool anything = most_moved > 1;
        if (anything) of_lse = most_moved;
        const double exponential = 6 + 6 * cap, sum = exponential + 3 * r.distance + V / 32.0 + 32;
        const double of_log = sum + 3 * fabs(r.lse - r.max);
        row.of_lse = U * (of_log + 4 * fabs(r.max) + fabs(r.lse)) + of_lse;
        const bool ignored = target == options.ignore_index;
        if (!ignored) {
            const double to_target = fabs(r.max - z[target]), of_mean = of_log + (V / 32.0 + 36) * r.gap;
            const double of_loss = (1 - eps) * (of_log + 6 * cap + 8 * to_target) + eps * of_mean + 4 * fabs(r.loss);
            const double z_loss = fabs((double)options.z_loss * r.lse);
            row.of_loss = U * (of_loss + 4 * z_loss * fabs(r.lse)) + 2 * z_loss * row.of_lse + of_lse;
            row.of_loss += (1 - eps) * moved[target] + eps * mean_moved;
        }
        row.dlogits.resize(V);
        row.slack.resize(V);
        const double unit = fabs(options.dloss * rows[k * rows.step] * scale);
        const double a = fabs(1 + 2 * options.z_loss * r.lse);
        const double of_a = 2 * fabs((double)options.z_loss) * row.of_lse + 4 * U * a;
        for (int j = 0; j < V; j++) {
            const double by_z = expm1(std::min(moved[j], 1.0)) + of_lse;
            const double of_p = anything ? 1 : probs[j] * (U * (exponential + 3 * (r.max - z[j]) + sum + 8) + by_z);
            const double slope = cap > 0 ? 1 - z[j] / cap * (z[j] / cap) : 1;
            double of_slope = U, off = a * (of_p + 0x1p-126) + of_a * probs[j] + 4 * U * (eps / V + (j == target));
            if (cap > 0) {
                const double steeper = expm1(std::min(2 * moved[j] / cap, 1.0));
                of_slope = U * (16 + 8 * fabs(scale * logits[j] / cap)) + steeper;
                off *= 1 + steeper;
            }
            off = unit * slope * off + of_slope * fabs(dlogits[j]) + unit * 0x1p-122;
            if (anything || (cap > 0 && 2 * moved[j] > cap)) off = unit * (a + 1);
            const double value = nearest<floatX>(dlogits[j]);
            const double high = nearest<floatX>(dlogits[j] + off), low = nearest<floatX>(dlogits[j] - off);
            row.dlogits[j] = (float)value;
            row.slack[j] = ignored ? 0 : (float)std::max(high - value, value - low);
        }
    }

    // A sum over `count` terms factors(i) * rows[i], which is added to what `expected` holds.
    template <typename Factor>
    void add_product(Expected &expected, const float *matrix, long long count, Factor factor) const {
        std::vector<double> sum(C), squares(C), all(C);
        for (long long i = 0; i < count; i++) {
            const std::pair<double, double> f = factor(i);  // and how far it may be off
            const float *const m = matrix + i * C;
            if (f.first == 0 && f.second == 0) continue;
            for (int c = 0; c < C; c++) {
                const double term = f.first * (double)m[c], size = fabs(term);
                sum[c] += term;
                squares[c] += term * term;
                all[c] += size;
                expected.slack[c] += f.second * fabs((double)m[c]);
            }
        }
        for (int c = 0; c < C; c++) {
            const double before = fabs(expected.value[c]);
            const double off = tf32 ? 8 * 0x1p-10 * sqrt(squares[c]) : 0;
            expected.slack[c] += off + of_sum(count, sqrt(squares[c]) + before, all[c] + before);
            expected.value[c] += sum[c];
        }
    }
};

// MiB, or a share of the logits, in bytes; 0 if the text is neither.
inline double parse_memory(const std::string &text, double logits_bytes) {
    char *end = nullptr;
    const double value = strtod(text.c_str(), &end);
    const bool plain = !text.empty() && text[strspn(text.c_str(), "0123456789.")] == *end;
    if (!plain || !(value > 0) || value > 1e9) return 0;
    if (*end == '\0') return value * 0x1p20;
    return strcmp(end, "%") == 0 ? value / 100 * logits_bytes : 0;
}

template <typename floatX, typename gradX>
void lm_head_race(Harness &h) {
    const int B = h.options.dim('b'), T = h.options.dim('t'), C = h.options.dim('c'), V = h.options.dim('v');
    const long long rows = (long long)B * T;
    if (rows > INT32_MAX) refuse(EXIT_BAD_INPUT, "B*T: %lld rows are more than %d (-b, -t)", rows, INT32_MAX);
    if (h.options.flag("--tf32") && h.options.dtype != "fp32") {
        refuse(EXIT_BAD_INPUT, "--tf32: the products of %s have no use for it; it goes with --dtype fp32",
                 h.options.dtype.c_str());
    }
    const int N = (int)rows;
    LmHeadProblem problem;
    problem.options = classifier_options<ClassifierOptions>(h.options);
    const ClassifierOptions &options = problem.options;
    const std::string gradients = h.options.choice("--gradients"), way = h.options.choice("--way");
    const bool forward = h.options.flag("--forward"), wants_lse = h.options.flag("--lse");
    problem.N = N;
    problem.C = C;
    problem.V = V;
    problem.type = type_of<floatX>();
    problem.gradient_type = type_of<gradX>();
    problem.dX = !forward && gradients != "dw";
    problem.dW = !forward && gradients != "dx";
    problem.bias = h.options.flag("--bias");
    problem.dbias = problem.bias && problem.dW;
    problem.tf32 = h.options.flag("--tf32");
    problem.finite = h.options.flag("--finite");
    problem.tuning.overlap = h.options.choice("--overlap") == "on";
    problem.tuning.way = way == "auto"         ? -1
                         : way == "rows"       ? kLmHeadRows
                         : way == "vocabulary" ? kLmHeadVocabulary
                                               : kLmHeadEpilogue;
    problem.tuning.columns = (int)h.options.number("--columns");
    if (h.options.version > 0 && h.options.version < 6 && (way != "auto" || !problem.tuning.overlap)) {
        refuse(EXIT_BAD_INPUT, "%s: version %d has only one; it goes with version 6",
                 way != "auto" ? "--way" : "--overlap", h.options.version);
    }
    if (h.options.version > 0 && h.options.version < 4 && problem.tuning.columns > 0) {
        refuse(EXIT_BAD_INPUT, "--columns: version %d has no tiles; it goes with versions 4 to 6", h.options.version);
    }
    if (way == "rows" && problem.tuning.columns > 0) refuse(EXIT_BAD_INPUT, "--columns: --way rows has no tiles");
    if (forward && gradients != "both") refuse(EXIT_BAD_INPUT, "--gradients: --forward has none");

    // The points: budgets. A share that is too small means the least that makes sense.
    const double logits_bytes = lm_head_logits_bytes(problem);
    const bool sweep = h.options.choice("--sweep") == "memory";
    std::vector<std::string> budgets = {h.options.text("--memory")};
    if (parse_memory(budgets[0], logits_bytes) == 0) {
        refuse(EXIT_BAD_INPUT, "--memory: '%s' is neither a number of MiB nor a share of the logits, like 64 or 10%%",
                 budgets[0].c_str());
    }
    if (sweep && budgets[0] != "25%") refuse(EXIT_BAD_INPUT, "--memory: --sweep memory has budgets of its own");
    if (sweep) budgets = {"100%", "50%", "25%", "10%", "5%", "2%", "1%"};
    h.job.sweep.option = "--memory";
    h.job.sweep.values = budgets;

    typedef std::shared_ptr<LmHead> Plan;
    auto make_plan = [&](const LmHeadProblem &wanted) {
        Plan plan(new LmHead, [](LmHead *old) {
            lm_head_destroy(*old);
            delete old;
        });
        const cudaError_t error = lm_head_create(*plan, wanted);
        if (error != cudaSuccess && plan->rows > 0) refuse(EXIT_NO_DEVICE, "%s", plan->what);
        return plan;
    };
    auto plans = std::make_shared<std::vector<std::vector<Plan>>>(7);
    size_t most_bytes = 0;
    for (int version = 1; version <= 6; version++) {
        if (h.options.version != -1 && h.options.version != version) continue;
        problem.version = version;
        for (const std::string &budget : budgets) {
            problem.memory = (size_t)std::min(parse_memory(budget, logits_bytes), 0x1p62);
            problem.enough = budget.back() == '%';
            (*plans)[version].push_back(make_plan(problem));
            most_bytes = std::max(most_bytes, (*plans)[version].back()->bytes);
        }
    }
    h.job.skip = [=](int version) -> std::string {
        if (sweep && version <= 2) return "it holds all the logits, whatever the budget";
        const Plan &plan = (*plans)[version][0];
        if (plan->handle) return "";
        return (plan->error == cudaErrorMemoryAllocation ? "--memory " + budgets[0] + ": " : "") + plan->what;
    };
    if (h.options.version > 0 && !h.job.skip(h.options.version).empty()) {  // before the inputs are made
        refuse(EXIT_BAD_INPUT, "version %d: %s", h.options.version, h.job.skip(h.options.version).c_str());
    }
    // For all the logits beside the rest, which the bare products want.
    size_t free_bytes = 0, total_bytes = 0;
    cuda_check(cudaMemGetInfo(&free_bytes, &total_bytes));
    const bool has_room = logits_bytes < free_bytes / 2.0;
    h.job.figures = [=](int version, int point) -> std::vector<Figure> {
        const bool known = version > 0 && !(*plans)[version].empty();
        const Plan plan = known ? (*plans)[version][point] : nullptr;
        const double bytes = plan ? plan->bytes : 0, share = 100 * bytes / logits_bytes;
        char words[240] = "", reason[80] = "";
        if (plan) {
            const char *const ways[] = {"textbook", "rows", "vocabulary", "epilogue"};
            const int least_rows = std::min(N, 128), least_columns = std::min(V, 128);
            const bool more = bytes > parse_memory(budgets[point], logits_bytes);
            if (version <= 2) {
                snprintf(reason, sizeof(reason), " (it holds all of them)");
            } else if (more && !plan->by_tiles()) {
                snprintf(reason, sizeof(reason), " (more than --memory: %d rows at least)", least_rows);
            } else if (more) {
                snprintf(reason, sizeof(reason), " (more than --memory: %d rows and %d columns at least)", least_rows,
                         least_columns);
            }
            snprintf(words, sizeof(words), "scratch %.1f%% of the logits%s | %s: %d of %d x %d%s", share, reason,
                     ways[plan->way], plan->buffers, plan->rows, plan->columns,
                     has_room ? "" : " | no room for the bare gemms");
        }
        return {{"scratch_bytes", bytes, ""},
                {"scratch_pct_of_logits", share, words, "scratch, % of the logits"},
                {"memory_bytes", plan ? (double)plan->problem.memory : 0, ""},
                {"block_rows", plan ? (double)plan->rows : 0, ""},
                {"tile_columns", plan ? (double)plan->columns : 0, ""},
                {"buffers", plan ? (double)plan->buffers : 0, ""},
                {"gemm_bytes", plan ? (double)plan->gemm_bytes : 0, ""}};
    };

    const int ignore_every = (int)h.options.number("--ignore-every");
    const int *targets = h.targets(N, V, ignore_every, options.ignore_index);
    const int *host_targets = h.host_tokens.data();
    // Products of two uniform numbers, C of them: a variance of C/9 times that of the scale.
    const float spread = (float)(h.options.number("--spread") * 3 / sqrt((double)C));
    const ScaledValues<floatX> X_values = {{1, h.options.seed}, 1}, W_values = {{2, h.options.seed}, spread};
    const ScaledValues<floatX> bias_values = {{3, h.options.seed}, 1};
    const Values<gradX> dW_values = {4, h.options.seed}, dbias_values = {5, h.options.seed};
    const double affordable = std::min(4e9 / ((double)V * C), 2e7 / V);
    const long long count = std::max(32LL, (long long)affordable);
    const CheckedRows checked = {std::max(1LL, ceil_div((long long)N, count))};
    auto reference = std::make_shared<LmHeadReference<floatX>>(LmHeadReference<floatX>{
        C, V, problem.tf32, options, X_values, W_values, bias_values, problem.bias, checked, {}, {}, {}, {}});
    h.job.prepare_references = [=] { reference->prepare(N, host_targets); };

    auto expect_dX = [=](Expected &expected, long long r) {
        std::fill(expected.value.begin(), expected.value.end(), 0.0);
        if (!checked.known(r)) return;
        const KnownRow &row = reference->known[r / checked.step];
        reference->add_product(expected, reference->W.data(), V,
                               [&](long long j) { return std::pair<double, double>(row.dlogits[j], row.slack[j]); });
    };
    auto expect_dW = [=](Expected &expected, long long j) {
        for (int c = 0; c < C; c++) expected.value[c] = (double)(float)dW_values[j * C + c];
        reference->add_product(expected, reference->X.data(), reference->known.size(), [&](long long k) {
            return std::pair<double, double>(reference->known[k].dlogits[j], reference->known[k].slack[j]);
        });
    };
    auto expect_dbias = [=](Expected &expected, long long j) {
        double before = (double)(float)dbias_values[j], all = fabs(before);
        expected.value[0] = before;
        for (const KnownRow &row : reference->known) {
            expected.value[0] += row.dlogits[j];
            expected.slack[0] += row.slack[j];
            all += fabs((double)row.dlogits[j]);
        }
        expected.slack[0] += reference->of_sum(8.0 * reference->known.size(), all, all);
    };
    auto expect_row = [=](Expected &expected, long long r, bool lse) {
        expected.unknown = !checked.known(r);
        if (expected.unknown) return;
        const KnownRow &row = reference->known[r / checked.step];
        expected.value[0] = lse ? row.lse : row.loss;
        expected.slack[0] = lse ? row.of_lse : row.of_loss;
    };

    LmHeadArguments<floatX, gradX> args = {};
    args.X = h.input(X_values, (long long)N * C);
    args.W = h.input(W_values, (long long)V * C);
    args.bias = problem.bias ? h.input(bias_values, V) : nullptr;
    args.targets = targets;
    args.status = h.status();
    const float *const check_dlosses = h.input(checked, N);
    if (problem.dX) args.dX = h.output<floatX>("dX", N, C, 0, expect_dX);
    if (problem.dW) args.dW = h.output<gradX>("dW", V, C, 0, expect_dW, &dW_values);
    if (problem.dbias) args.dbias = h.output<gradX>("dbias", V, 1, 0, expect_dbias, &dbias_values);
    args.losses = h.output<float>("losses", N, 1, 0, [=](Expected &e, long long r) { expect_row(e, r, false); });
    if (wants_lse)
        args.lse = h.output<float>("lse", N, 1, 0, [=](Expected &e, long long r) { expect_row(e, r, true); });
    char *const workspace = (char *)h.workspace(most_bytes);

    // The bare products, with results of the inputs' type (but a dX of several parts is a float) that are not added to
    // anything; the logits, whatever they are, stand in for their gradient.
    const double products = 1.0 + problem.dX + problem.dW;
    LmHeadProblem bare = problem;
    bare.version = 2;
    bare.tuning = {};
    bare.bare = true;
    bare.bias = bare.dbias = false;
    bare.gradient_type = problem.type;
    const Plan bare_plan = h.options.do_bench && h.options.version != 0 && has_room ? make_plan(bare) : nullptr;
    LmHeadArguments<floatX, floatX> bare_args = {};
    if (bare_plan) {
        bare_args.X = args.X;
        bare_args.W = args.W;
        bare_args.targets = targets;
        if (problem.dX) bare_args.dX = h.input(Values<floatX>(6, h.options.seed), (long long)N * C);
        if (problem.dW) bare_args.dW = h.input(Values<floatX>(7, h.options.seed), (long long)V * C);
        bare_args.workspace = (char *)h.input(Values<float>(8, h.options.seed), (long long)bare_plan->bytes / 4 + 1);
        h.job.baseline.name = products == 1 ? "gemm" : "gemms";
        h.job.baseline.launch = [=](cudaStream_t stream) {
            const LmHeadRun<floatX, floatX> run(*bare_plan, bare_args);
            floatX *const logits = run.logits(0);
            cudaError_t error = run.make_logits(logits, 0, N, 0, stream);
            if (error == cudaSuccess) error = run.make_dX(logits, 0, N, 0, true, stream);
            if (error == cudaSuccess) error = run.add_dW(logits, 0, N, 0, stream);
            return error;
        };
    }

    auto place = [=](const LmHead &plan) {  // so that what comes behind it is the guard zone
        LmHeadArguments<floatX, gradX> here = args;
        here.workspace = workspace + (most_bytes - plan.bytes);
        return here;
    };
    const auto bare_tuned = std::make_shared<bool>(false);
    h.job.tune = [=, &h](int version, cudaStream_t stream) {
        // All algorithms of the CPU device take the same time: there, tuning is run as a test where it is quick.
        if (ON_CPU && h.job.flops > 1e9) return;
        for (const Plan &plan : (*plans)[version]) {
            cuda_check(lm_head_tune(*plan, place(*plan), stream));
            progress.done();
        }
        if (bare_plan && !*bare_tuned) cuda_check(lm_head_tune(*bare_plan, bare_args, stream));
        *bare_tuned = true;
    };
    h.job.bytes = ((double)N * C * (1 + problem.dX) + (double)V * C) * sizeof(floatX) +
              (problem.dW ? 2.0 * V * C * sizeof(gradX) : 0) + (2.0 + wants_lse) * N * sizeof(float);
    h.job.flops = 2.0 * N * C * V * products;

    // A graph, once for each plan and whether it is checked, or launches.
    typedef std::pair<const LmHead *, bool> Key;
    auto graphs = std::make_shared<std::vector<std::pair<Key, cudaGraphExec_t>>>();
    const bool use_graph = h.options.flag("--graph");
    h.race(lm_head_versions<floatX, gradX>,
           [=, &h](LmHeadLauncher<floatX, gradX> launch, int point, cudaStream_t stream) -> cudaError_t {
               const LmHead &plan = *(*plans)[h.running][point];
               LmHeadArguments<floatX, gradX> here = place(plan);
               here.dlosses = h.checking ? check_dlosses : nullptr;
               cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;  // by the harness, for the hot time
               if (use_graph) cuda_check(cudaStreamIsCapturing(stream, &capturing));
               if (!use_graph || capturing != cudaStreamCaptureStatusNone) return launch(plan, here, stream);
               const Key key = {&plan, h.checking};
               for (const auto &known : *graphs) {
                   if (known.first == key) return cudaGraphLaunch(known.second, stream);
               }
               cudaGraph_t graph;
               cudaGraphExec_t executable;
               cudaError_t error = cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
               if (error == cudaSuccess) error = launch(plan, here, stream);
               const cudaError_t ended = cudaStreamEndCapture(stream, &graph);
               if (error == cudaSuccess) error = ended;
               if (error == cudaSuccess) error = cudaGraphInstantiate(&executable, graph, 0);
               if (error != cudaSuccess) return error;
               cudaGraphDestroy(graph);
               graphs->push_back({key, executable});
               return cudaGraphLaunch(executable, stream);
           });
    for (const auto &known : *graphs) cudaGraphExecDestroy(known.second);
    h.job.figures = nullptr;
}

template <typename floatX>
void lm_head_race(Harness &h) {
    if (h.options.choice("--grad-dtype") == "same") return lm_head_race<floatX, floatX>(h);
    lm_head_race<floatX, float>(h);
}

}  // namespace bookends

int main(int argc, char **argv) {
    using namespace bookends;
    const std::vector<Number> numbers = classifier_numbers(
        {{"--spread", 2, 0, 100, "the logits' standard deviation, by the scale of W"},
         {"--columns", 0, 0, INT32_MAX, "versions 4 to 6: of a tile at most; 0: from the L2 or the budget", true}});
    Harness h(
        "lm_head", "hidden states to losses and every gradient",
        {{'b', "B", 8, 2}, {'t', "T", 1024, 8}, {'c', "C", 768, 64}, {'v', "V", 50257, 50257}},
        {{"--grad-dtype", {"fp32", "same"}, "type of dW and dbias"},
         {"--gradients", {"both", "dx", "dw"}, "which are wanted"},
         {"--forward", {}, "no gradient, only the losses"},
         {"--lse", {}, "the logarithm of each row's sum too"},
         {"--bias", {}, "a bias, and its gradient with dW's"},
         {"--tf32", {}, "fp32 products from inputs that are rounded to TF32"},
         {"--sweep", {"none", "memory"}, "time against memory, at budgets from 100% to 1%"},
         {"--way", {"auto", "rows", "vocabulary", "epilogue"}, "version 6: which way to take"},
         {"--overlap", {"on", "off"}, "version 6: the classifier of a tile beside the products of others"},
         {"--finite", {}, "rows that are ignored hold finite numbers: no copy of X"},
         {"--graph", {}, "launches are captured once, as a CUDA graph"}},
        numbers,
        {{"--memory", "25%",
          "scratch at most, from version 3 on: in MiB, or a share of the logits (like 10%), or what makes sense"}});
    h.options.has_block_size = false;
    return h.main(argc, argv, lm_head_versions<float, float>, lm_head_race<float>, lm_head_race<half>,
                  lm_head_race<__nv_bfloat16>);
}
#endif
