/*
The LM head: from hidden states X (N, C) and weights W (V, C) to the loss of each row and all gradients.

  x_rj = X_r . W_j  (+ bias_j)           the logits (N, V), sums in float, rounded to floatX
  losses, lse, dlogits                   of each row of x, as in classifier_fused.cu, with all its options
  dX = dlogits W        dW += dlogits^T X        dbias_j += sum over r of dlogits_rj

The least work is three matrix products (GEMMs) of 2NCV operations each; cuBLASLt computes them. The logits need 0.8 to
4 GB at ordinary sizes. From version 3 on, a budget limits the scratch memory. Every version rounds logits to floatX
before the softmax, and dlogits before the GEMMs.

version 1  textbook: all logits; separate kernels for the probabilities, the loss and the gradient; three GEMMs
version 2  fused: all logits, with the fused classifier between the GEMMs
version 3  rows: one block of rows after the other, which bounds the scratch memory; each block adds to all of dW
version 4  vocabulary: tiles of the vocabulary; the first pass computes each row's softmax statistics and keeps no
           logits; the second pass computes a tile's logits again and completes its rows of dW
version 5  epilogue: version 4 with our own GEMM, which computes statistics and gradients from its accumulators, so
           that no kernel stores or reads logits. Requires compute capability 9.0 (or the CPU device), 16-bit types,
           C > 0, logit_scale > 0, and memory for 256 columns or all; otherwise version 4 runs. (If 8 does not divide C,
           or X or W is not at a multiple of 16 bytes, it loads single elements, which is slow)
version 6  planned: whichever of versions 3, 4 and 5 costs least within the budget

Measured on an NVIDIA H200, B8 T1024 C2048 V128256 bf16 uniform, cold:
  1  textbook          27.1510 ms   1.48x the bare products, scratch 302% of the logits
  2  fused             20.3488 ms   1.08x the bare products, scratch 102% of the logits   1.33x the version before
  3  rows              21.5500 ms   1.11x the bare products, scratch  25% of the logits   0.94x the version before
  4  vocabulary        32.3713 ms   1.74x the bare products, scratch   6% of the logits   0.67x the version before
  5  epilogue          28.2057 ms   1.43x the bare products, scratch  25% of the logits   1.15x the version before
  6  planned           21.0963 ms   1.09x the bare products, scratch  25% of the logits   1.34x the version before
  The kernels have changed since.

The limit is power (H200). 16-bit GEMMs draw the chip's maximum of 700 W, and its clock falls from 1980 to 1400 MHz; at
this clock cuBLASLt's GEMMs keep the tensor cores busy 90% of the time. So memory traffic during a GEMM costs nearly as
much time as traffic before it: only less traffic helps. Each block of rows adds to all of dW, 8VC bytes; fewer and
larger blocks gain more than anything else that was tried. Energy, by the chip's own meter (768 rows, C 768, V 50304):
0.070 J for the GEMM that writes dW in 16 bits, 0.100 J for the one that adds dW to floats, 0.030 J for a copy of those
floats.

Compile:  nvcc -O3 -arch=native lm_head.cu -o lm_head -lcublasLt
          (version 5's own GEMM needs -gencode arch=compute_90a,code=sm_90a, which -arch=native does not select)
Run:      ./lm_head                    the default: deterministic, best over the measured shapes; 25% of the logits
          ./lm_head all --memory 10%
          ./lm_head --sweep memory -c 4096 -v 128256
          ./lm_head --help
*/
#include "common.h"
#include "parts/classifier.h"
#include "parts/gemm.h"
#include "parts/launch.h"
#include "parts/lm_head_gemms.h"
#include "parts/lm_head_plan.h"
#include "parts/lm_head_product.h"

#ifdef BOOKENDS_NO_MAIN
#include "classifier_fused.cu"
#else
#define BOOKENDS_NO_MAIN
#include "classifier_fused.cu"
#undef BOOKENDS_NO_MAIN
#endif

namespace bookends {

// ---------------------------------------------------------------------------------------------------------------------
// CPU reference

// A row's logits (V) before they are rounded to floatX; sums in double. x (C), W (V, C), bias (V) or null. sizes (V),
// or null: the root of the sum of each sum's squared terms, a scale for its rounding errors.
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

// A sum of rows: a row of dX (C) from its dlogits (V) and the rows of W; or a row of dW (C), to be added, from its
// column of dlogits (N) and the rows of X. classifier_fused_cpu() computes the loss and dlogits from the logits.
inline void lm_head_product_cpu(double *out, const double *factors, const float *rows, int count, int C) {
    for (int c = 0; c < C; c++) out[c] = 0;
    for (int j = 0; j < count; j++) {
        for (int c = 0; c < C; c++) out[c] += factors[j] * (double)rows[(long long)j * C + c];
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// version 1: textbook

// Softmax, loss and gradient each have a kernel. The probabilities (N, V) are in float, so that only logits and dlogits
// are rounded to floatX. The three kernels read and write 16 bytes for each 16-bit logit.

// The probabilities: one thread block per row, which first computes the largest logit and the sum.
template <typename floatX, bool softcap, Extras extras>
__global__ void __launch_bounds__(1024)
    lm_head_softmax_kernel(float *probs, OnlineSoftmax *statistics, ClassifierArguments<floatX> args) {
    typedef Packed<floatX, 1> one;
    const long long row = blockIdx.x;
    const ClassifierTarget<floatX> target = find_target<softcap, extras>(args, row);
    RunningSoftmax running(args.power);
    for (unsigned j = threadIdx.x; j < args.V; j += blockDim.x) {
        update_statistics<softcap, extras>(running, load_packed<one>(target.logits + j), j, target, args);
    }
    const OnlineSoftmax all = block_merge<extras>(running.result(), args);
    const Exponent exponent(all.max, args.power);
    if (threadIdx.x == 0) statistics[row] = all;
    for (unsigned j = threadIdx.x; j < args.V; j += blockDim.x) {
        float slope;
        const float value = value_and_slope<softcap, extras>((float)target.logits[j], args, &slope);
        probs[row * args.V + j] = exponent.exp(value) / all.sum;
    }
}

// The loss: one thread per row.
template <typename floatX, bool softcap, Extras extras>
__global__ void lm_head_loss_kernel(const OnlineSoftmax *statistics, ClassifierArguments<floatX> args) {
    const long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= args.N) return;
    write_scalars<extras>(args, row, find_target<softcap, extras>(args, row), statistics[row]);
}

// The gradient, written over the logits: one thread block per row.
template <typename floatX, bool softcap, Extras extras>
__global__ void __launch_bounds__(1024)
    lm_head_gradient_kernel(const float *probs, const OnlineSoftmax *statistics, ClassifierArguments<floatX> args) {
    const long long row = blockIdx.x;
    const ClassifierTarget<floatX> target = find_target<softcap, extras>(args, row);
    const ClassifierGradient g = gradient_constants(args, target, statistics[row], dloss_of(args, row));
    const float per_p = g.a / g.to_p;
    __syncthreads();  // the target's logit has been read by all threads
    for (unsigned j = threadIdx.x; j < args.V; j += blockDim.x) {
        float slope;
        value_and_slope<softcap, extras>((float)target.logits[j], args, &slope);
        const float d = j == target.index ? g.at_target : slope * fmaf(per_p, probs[row * args.V + j], -g.b);
        target.dlogits[j] = (floatX)(target.ignored ? 0.0f : d);
    }
}

// The launchers of this file. LmHeadArguments describes outputs, inputs and errors. `head`: the plan that
// lm_head_create() has made for the version.
template <typename floatX, typename gradX>
cudaError_t lm_head1(const LmHead &head, const LmHeadArguments<floatX, gradX> &args, cudaStream_t stream) {
    static_assert(kOnlineSoftmaxBytes == sizeof(OnlineSoftmax));
    LmHeadRun<floatX, gradX> run(head, args, stream);
    if (!run.begin(kLmHeadTextbook)) return run.error;
    const int N = run.problem.N, V = run.problem.V;
    const LmHeadTile all = {0, N, 0, V};
    floatX *const logits = run.logits();
    float *const probs = run.template part<float>(head.plan.probs);
    OnlineSoftmax *const statistics = run.template part<OnlineSoftmax>(head.plan.statistics);
    const unsigned loss_blocks = ceil_div((unsigned)N, 256u);
    if (const auto error = run.copy_X(all)) return error;
    if (const auto error = run.make_logits(logits, all)) return error;
    auto classify = [&](const ClassifierArguments<floatX> &classifier, auto softcap, auto extras) {
        const auto softmax = lm_head_softmax_kernel<floatX, softcap.value, extras.value>;
        const auto loss = lm_head_loss_kernel<floatX, softcap.value, extras.value>;
        const auto gradient = lm_head_gradient_kernel<floatX, softcap.value, extras.value>;
        if (const auto error = launch_kernel(softmax, N, 512, 0, stream, probs, statistics, classifier)) return error;
        if (const auto error = launch_kernel(loss, loss_blocks, 256, 0, stream, statistics, classifier)) return error;
        if (!classifier.dlogits) return cudaSuccess;
        return launch_kernel(gradient, N, 512, 0, stream, probs, statistics, classifier);
    };
    if (const auto error = run.classify(logits, all, classify)) return error;
    return run.make_gradients(logits, all, true);
}

// ---------------------------------------------------------------------------------------------------------------------
// version 2: fused

// The fused classifier reads each logit once and writes the gradient over it: 4 bytes for each 16-bit logit instead of
// 16, and no probabilities. Loses in memory: it still stores all logits.

template <typename floatX, typename gradX>
cudaError_t classify_fused(const LmHeadRun<floatX, gradX> &run, floatX *logits, const LmHeadTile &block) {
    const LmHeadArguments<floatX, gradX> &args = run.args;
    floatX *const dlogits = run.plan.has_gradients() ? logits : nullptr, *const probs = nullptr;
    const floatX *const x = logits;
    return classifier_fused5(dlogits, args.losses ? args.losses + block.row : nullptr,
                             args.lse ? args.lse + block.row : nullptr, probs, nullptr, x, args.targets + block.row,
                             args.dlosses ? args.dlosses + block.row : nullptr, nullptr, block.rows, run.problem.V,
                             run.plan.P, run.options, kStagedThreads, run.stream);
}

template <typename floatX, typename gradX>
cudaError_t lm_head2(const LmHead &head, const LmHeadArguments<floatX, gradX> &args, cudaStream_t stream) {
    LmHeadRun<floatX, gradX> run(head, args, stream);
    if (!run.begin(kLmHeadFused)) return run.error;
    const LmHeadTile all = {0, run.problem.N, 0, run.problem.V};
    if (const auto error = run.copy_X(all)) return error;
    if (const auto error = run.make_logits(run.logits(), all)) return error;
    if (const auto error = classify_fused(run, run.logits(), all)) return error;
    return run.make_gradients(run.logits(), all, true);
}

// ---------------------------------------------------------------------------------------------------------------------
// version 3: rows

// Version 2 for one block of rows after the other, so that scratch holds rows * V logits. Each block reads W twice and
// adds to all of dW in float, 8VC bytes: with small budgets these passes over dW cost more than a GEMM. (Liger Kernel's
// fused linear cross entropy cuts rows in the same way. Classifying a block in parts during the GEMMs of other parts
// was slower: with two parts by 3% and 9% at C 768, V 50304 in 25% and 10%, by 5% at C 2048, V 128256 in 10%; H200.)

template <typename floatX, typename gradX>
cudaError_t lm_head3(const LmHead &head, const LmHeadArguments<floatX, gradX> &args, cudaStream_t stream) {
    LmHeadRun<floatX, gradX> run(head, args, stream);
    if (!run.begin(kLmHeadRows)) return run.error;
    for (int i = 0; i < head.plan.blocks(); i++) {
        const LmHeadTile block = run.block_of(i);
        if (const auto error = run.copy_X(block)) return error;
        if (const auto error = run.make_logits(run.logits(), block)) return error;
        if (const auto error = classify_fused(run, run.logits(), block)) return error;
        if (const auto error = run.make_gradients(run.logits(), block, true)) return error;
    }
    return cudaSuccess;
}

// ---------------------------------------------------------------------------------------------------------------------
// version 4: vocabulary

// Two passes over tiles of the vocabulary, for small budgets. The first pass computes a tile's logits and merges them
// into each row's statistics. The second pass computes them again and completes the tile's rows of dW, so that dW is
// added to once for all rows. The cost: a fourth GEMM, two more passes over the logits, and 8C bytes per row and tile
// for dX, which is in float until the last tile. (Cut Cross-Entropy, Wijmans et al. 2024, also computes statistics
// before gradients and stores no logits.)

constexpr unsigned kTileVectors = 4;  // loads in flight per thread

// A thread block's loop over a row of a tile. Calls several(vectors, column, stride) for each kTileVectors vectors,
// which are `stride` columns apart; one(vector, column) for each remaining vector; single(column) for each column
// behind the last vector. The tile's rows begin at multiples of 16 bytes.
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
    const unsigned last = vectors * x128::size + threadIdx.x;
    if (last < columns) single(last);
}

// Merges the statistics of a tile (columns begin..begin+columns-1 of the logits) into those of the previous tiles, as
// an online softmax. One thread block per row.
template <typename floatX, bool softcap, Extras extras>
__global__ void __launch_bounds__(512)
    lm_head_statistics_kernel(TiledRow *rows, ClassifierArguments<floatX> args, unsigned begin, unsigned columns) {
    typedef Packed<floatX, 1> one;
    const long long row = blockIdx.x;
    const ClassifierTarget<floatX> target = describe_target(args, row, args.targets[row]);
    if (!target.read) return;
    const unsigned own = target.index - begin;  // the target's column here; at least `columns` if in another tile
    RunningSoftmax running(args.power);
    for_each_vector(
        target.logits, columns,
        [&](const auto &x, unsigned column, unsigned stride) {
            update_statistics<softcap, extras>(running, x, column, stride, target, args);
        },
        [&](const auto &x, unsigned column) { update_statistics<softcap, extras>(running, x, column, target, args); },
        [&](unsigned column) {
            update_statistics<softcap, extras>(running, load_packed<one>(target.logits + column), column, target, args);
        });
    OnlineSoftmax all = block_merge<extras>(running.result(), args);
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

// After the last tile: each row's scalars, and the constants of its gradient (`gradients`, or null). rows (runs, N):
// the statistics of each run of `run_columns` columns. One thread per row.
template <typename floatX, bool softcap, Extras extras>
__global__ void lm_head_finish_kernel(ClassifierGradient *gradients, const TiledRow *rows, unsigned runs,
                                      unsigned run_columns, ClassifierArguments<floatX> args) {
    const long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= args.N) return;
    ClassifierTarget<floatX> target = describe_target(args, row, args.targets[row]);
    OnlineSoftmax all;
    if (target.read) {
        if (target.index < args.V) {
            const unsigned run = target.index / run_columns;
            set_logit<softcap, extras>(target, args, rows[(size_t)run * args.N + row].target_logit);
        }
        for (unsigned run = 0; run < runs; run++) {
            all = merge<extras>(all, rows[(size_t)run * args.N + row].statistics(), args);
        }
    }
    write_scalars<extras>(args, row, target, all);
    if (gradients) gradients[row] = gradient_constants(args, target, all, dloss_of(args, row));
}

// The gradient of a tile, written over its logits: one read and one write, no barrier. One thread block per row.
template <typename floatX, bool softcap, Extras extras>
__global__ void __launch_bounds__(512)
    lm_head_tile_kernel(const ClassifierGradient *gradients, ClassifierArguments<floatX> args, unsigned begin,
                        unsigned columns) {
    typedef Packed<floatX, 1> one;
    const long long row = blockIdx.x;
    ClassifierTarget<floatX> target = describe_target(args, row, args.targets[row]);
    target.index -= begin;  // the target's column here; at least `columns` if in another tile
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

// The scalars of a block's rows and the constants of their gradients, from the statistics of `runs` runs of columns.
template <typename floatX, typename gradX>
cudaError_t finish_statistics(const LmHeadRun<floatX, gradX> &run, const LmHeadTile &block, unsigned runs,
                              unsigned run_columns) {
    static_assert(kTiledRowBytes == sizeof(TiledRow) && kClassifierGradientBytes == sizeof(ClassifierGradient));
    const LmHeadPlan &plan = run.plan;
    ClassifierGradient *const gradients =
        plan.has_gradients() ? run.template part<ClassifierGradient>(plan.gradients) : nullptr;
    const TiledRow *const statistics = run.template part<TiledRow>(plan.statistics);
    return run.classify(run.logits(), block, [&](const auto &classifier, auto softcap, auto extras) {
        return launch_kernel(lm_head_finish_kernel<floatX, softcap.value, extras.value>,
                             ceil_div((unsigned)block.rows, 128u), 128, 0, run.stream, gradients, statistics, runs,
                             run_columns, classifier);
    });
}

// Merges a tile's logits into the statistics; or, if `gradients` is not null, replaces them by dlogits.
template <typename floatX, typename gradX>
cudaError_t classify_tile(const LmHeadRun<floatX, gradX> &run, floatX *logits, const LmHeadTile &tile,
                          const ClassifierGradient *gradients) {
    TiledRow *const statistics = run.template part<TiledRow>(run.plan.statistics);
    const unsigned column = (unsigned)tile.column, columns = tile.columns;
    // About four vectors for each thread.
    const int vectors = ceil_div(run.plan.columns, (int)Packed128<floatX>::size);
    const int block_size = std::clamp(ceil_div(vectors, 4 * kWarpSize) * kWarpSize, kWarpSize, 512);
    return run.classify(logits, tile, [&](const auto &classifier, auto softcap, auto extras) {
        if (gradients) {
            return launch_kernel(lm_head_tile_kernel<floatX, softcap.value, extras.value>, tile.rows, block_size, 0,
                                 run.stream, gradients, classifier, column, columns);
        }
        return launch_kernel(lm_head_statistics_kernel<floatX, softcap.value, extras.value>, tile.rows, block_size, 0,
                             run.stream, statistics, classifier, column, columns);
    });
}

// The second pass processes the tiles in the opposite order, so that it need not compute the tiles again that the first
// pass has left in the buffers. (There is one buffer; in version 6 there may be more.)
template <typename floatX, typename gradX>
cudaError_t lm_head4(const LmHead &head, const LmHeadArguments<floatX, gradX> &args, cudaStream_t stream) {
    const LmHeadPlan &plan = head.plan;
    if (plan.problem.V == 0) return lm_head3(head, args, stream);
    LmHeadRun<floatX, gradX> run(head, args, stream);
    if (!run.begin(kLmHeadVocabulary)) return run.error;
    const ClassifierGradient *const gradients = run.template part<ClassifierGradient>(plan.gradients);
    const int tiles = plan.tiles();
    for (int i = 0; i < plan.blocks(); i++) {
        const LmHeadTile block = run.block_of(i);
        for (int t = 0; t < tiles; t++) {
            const LmHeadTile tile = run.tile_of(i, t);
            floatX *const logits = run.logits(t % plan.buffers);
            if (const auto error = run.make_logits(logits, tile)) return error;
            if (const auto error = classify_tile<floatX, gradX>(run, logits, tile, nullptr)) return error;
        }
        if (const auto error = finish_statistics(run, block, 1, plan.problem.V)) return error;
        if (!plan.has_gradients()) continue;
        if (const auto error = run.copy_X(block)) return error;
        for (int t = tiles - 1; t >= 0; t--) {
            const LmHeadTile tile = run.tile_of(i, t);
            floatX *const logits = run.logits(t % plan.buffers);
            if (t < tiles - plan.buffers) {
                if (const auto error = run.make_logits(logits, tile)) return error;
            }
            if (const auto error = classify_tile(run, logits, tile, gradients)) return error;
            if (const auto error = run.make_gradients(logits, tile, t == tiles - 1)) return error;
        }
        if (const auto error = run.finish_dX(block)) return error;
    }
    return cudaSuccess;
}

// ---------------------------------------------------------------------------------------------------------------------
// version 5: epilogue

// Version 4 with lm_head_product_kernel (parts/lm_head_product.h), whose epilogue has the logits in registers: the
// first pass writes statistics, 20 bytes per row and run of tiles, and the second pass dlogits, 2 bytes each. No kernel
// reads logits. The fourth GEMM and the tiles' passes over dX remain: where the budget allows few blocks of rows,
// version 3 is faster.

// Launches the GEMM for a tile's rows and columns. It computes statistics, or (writes) gradients into dlogits.
template <bool writes, typename floatX, typename gradX>
cudaError_t launch_product(const LmHeadRun<floatX, gradX> &run, ProductArguments<floatX> product, floatX *dlogits,
                           const LmHeadTile &tile) {
    static_assert(kLmHeadTileRows == kProductRows && kLmHeadTileColumns == kProductColumns);
    const size_t C = run.C;
    product.X_rows = run.args.X + tile.row * C;
    product.W_rows = run.args.W + tile.column * C;
    product.bias = run.args.bias ? run.args.bias + tile.column : nullptr;
    product.rows = tile.rows;
    product.columns = tile.columns;
    product.C = (unsigned)C;
    product.begin = (unsigned)tile.column;
    product.mapped = C % 8 == 0 && ((uintptr_t)run.args.X | (uintptr_t)run.args.W) % 16 == 0;
    if (product.mapped) {
        if (const auto error = map_rows(&product.X, product.X_rows, C, tile.rows, C, kProductRows)) return error;
        if (const auto error = map_rows(&product.W, product.W_rows, C, tile.columns, C, kProductColumns)) return error;
    }
    if (writes) {
        if (const auto error = map_rows(&product.out, dlogits, tile.columns, tile.rows, run.plan.P, kBoxRows)) {
            return error;
        }
    }
    const unsigned units = ceil_div((unsigned)tile.rows, kProductRows) * product.runs;
    return run.classify(dlogits, tile, [&](const auto &classifier, auto softcap, auto extras) {
        // The statistics need only the sum of a row's logits of the extras, and the gradients need none.
        constexpr Extras wanted = writes ? kNoExtras : std::min(extras.value, kSum);
        const auto kernel = lm_head_product_kernel<floatX, writes, softcap.value, wanted>;
        cudaLaunchConfig_t config = {};
        config.gridDim = std::min(units, (unsigned)run.plan.device.multiprocessors);
        config.blockDim = kProductThreads;
        config.dynamicSmemBytes = kProductShared;
        config.stream = run.stream;
        return launch_kernel(config, kernel, product, classifier);
    });
}

template <typename floatX, typename gradX>
cudaError_t make_statistics(const LmHeadRun<floatX, gradX> &run) {
    const LmHeadTile all = {0, run.problem.N, 0, run.problem.V};
    ProductArguments<floatX> product = {};
    product.columns = all.columns;
    product.runs = run.plan.runs;
    product.statistics = run.template part<TiledRow>(run.plan.statistics);
    if (const auto error = launch_product<false>(run, product, (floatX *)nullptr, all)) return error;
    return finish_statistics(run, all, product.runs, product.tiles_of_run() * kProductColumns);
}

template <typename floatX, typename gradX>
cudaError_t make_dlogits(const LmHeadRun<floatX, gradX> &run, floatX *dlogits, const LmHeadTile &tile) {
    ProductArguments<floatX> product = {};
    product.runs = even_runs(tile.rows, tile.columns, run.plan.device.multiprocessors);
    product.gradients = run.template part<ClassifierGradient>(run.plan.gradients) + tile.row;
    return launch_product<true>(run, product, dlogits, tile);
}

template <typename floatX, typename gradX>
cudaError_t lm_head5(const LmHead &head, const LmHeadArguments<floatX, gradX> &args, cudaStream_t stream) {
    const LmHeadPlan &plan = head.plan;
    if (plan.way != kLmHeadEpilogue) return lm_head4(head, args, stream);
    LmHeadRun<floatX, gradX> run(head, args, stream);
    if (!run.begin(kLmHeadEpilogue)) return run.error;
    if constexpr (sizeof(floatX) == 2) {
        floatX *const dlogits = run.logits();
        if (const auto error = make_statistics(run)) return error;
        for (int i = 0; plan.has_gradients() && i < plan.blocks(); i++) {
            const LmHeadTile block = run.block_of(i);
            if (const auto error = run.copy_X(block)) return error;
            for (int t = 0; t < plan.tiles(); t++) {
                const LmHeadTile tile = run.tile_of(i, t);
                if (const auto error = make_dlogits(run, dlogits, tile)) return error;
                if (const auto error = run.make_gradients(dlogits, tile, t == 0)) return error;
            }
            if (const auto error = run.finish_dX(block)) return error;
        }
    }
    return cudaSuccess;
}

// ---------------------------------------------------------------------------------------------------------------------
// version 6: planned

// Runs version 3, 4 or 5, whichever costs least within the budget by the rule at rows_cost_less()
// (parts/lm_head_plan.h). Version 4 then also keeps the logits of some tiles, where the budget allows it.
template <typename floatX, typename gradX>
cudaError_t lm_head6(const LmHead &head, const LmHeadArguments<floatX, gradX> &args, cudaStream_t stream) {
    switch (head.plan.way) {
        case kLmHeadEpilogue:
            return lm_head5(head, args, stream);
        case kLmHeadVocabulary:
            return lm_head4(head, args, stream);
        default:
            return lm_head3(head, args, stream);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// tuning, and the table of versions

// Chooses the fastest of cuBLASLt's algorithms for each GEMM, with the run's own memory. Unlike the other functions it
// waits for the stream, and overwrites dX, dW and the workspace with arbitrary values, so call it before the first run.
// A plan that is not tuned uses cuBLASLt's first suggestion.
template <typename floatX, typename gradX>
cudaError_t lm_head_tune(LmHead &head, const LmHeadArguments<floatX, gradX> &args, cudaStream_t stream) {
    const LmHeadPlan &plan = head.plan;
    if (!plan.can_use(args.workspace)) return cudaErrorMisalignedAddress;
    const LmHeadRun<floatX, gradX> run(head, args, stream);
    // Fills the logits with numbers: their own GEMM, which is tuned first, then overwrites them.
    const size_t bytes = (size_t)plan.buffers * plan.rows * plan.P * sizeof(floatX);
    if (const auto error = cudaMemsetAsync(run.logits(), 0x3c, bytes, stream)) return error;
    void *const dX = plan.float_dX() ? run.template part<void>(plan.dX) : args.dX;
    void *const dW = plan.float_dW() ? run.template part<void>(plan.dW) : args.dW;
    const bool adds_dX = plan.tiles() > 1, adds_dW = !plan.problem.bare && (!plan.float_dW() || plan.blocks() > 1);
    const GemmOperands operands[] = {{run.logits(), args.W, args.X, args.bias, 0},
                                     {dX, args.W, run.logits(), nullptr, adds_dX ? 1.0f : 0.0f},
                                     {dW, args.X, run.logits(), nullptr, adds_dW ? 1.0f : 0.0f}};
    for (LmHeadGemm &gemm : head.gemms) {
        if (gemm.aligned != run.aligned) continue;
        if (const auto error = gemm_tune(&gemm.gemm, operands[gemm.kind], run.context())) return error;
    }
    return cudaSuccess;
}

template <typename floatX, typename gradX>
using LmHeadLauncher = cudaError_t (*)(const LmHead &head, const LmHeadArguments<floatX, gradX> &args,
                                       cudaStream_t stream);

struct LmHeadProperties {
    LmHeadWay way;  // how the version's plans cut the logits
};

template <typename floatX, typename gradX>
constexpr Version<LmHeadLauncher<floatX, gradX>, LmHeadProperties> lm_head_versions[] = {
    {1, "textbook", "all logits; separate kernels for softmax, loss and gradient", lm_head1<floatX, gradX>, 512,
     kSameAtABlockSize, {kLmHeadTextbook}},
    {2, "fused", "all logits, with the fused classifier", lm_head2<floatX, gradX>, 512, kSameAtABlockSize,
     {kLmHeadFused}},
    {3, "rows", "one block of rows after the other, which bounds the scratch memory", lm_head3<floatX, gradX>, 512,
     kSameAtABlockSize, {kLmHeadRows}},
    {4, "vocabulary", "tiles of the vocabulary; logits are computed twice", lm_head4<floatX, gradX>, 512,
     kSameAtABlockSize, {kLmHeadVocabulary}},
    {5, "epilogue", "version 4 with our own GEMM: statistics and gradients from its accumulators",
     lm_head5<floatX, gradX>, 512, kSameAtABlockSize, {kLmHeadEpilogue}},
    {6, "planned", "whichever of versions 3, 4 and 5 costs least within the budget", lm_head6<floatX, gradX>, 512,
     kSameAtABlockSize, {kLmHeadPlanned}},
};

}  // namespace bookends

// ---------------------------------------------------------------------------------------------------------------------
#ifndef BOOKENDS_NO_MAIN
#include <memory>

#include "dev/harness/classifier_options.h"
#include "dev/harness/harness.h"

namespace bookends {

// ---------------------------------------------------------------------------------------------------------------------
// the reference of the check

template <typename T>
constexpr LmHeadType type_of() {
    return std::is_same_v<T, float> ? kFp32 : std::is_same_v<T, half> ? kFp16 : kBf16;
}

// Uniform in [-scale, scale), then rounded to floatX.
template <typename floatX>
struct ScaledValues {
    Values<float> values;
    float scale;
    __host__ __device__ floatX operator[](long long i) const { return (floatX)(values[i] * scale); }
};

// The check's dlosses: 0 except for every step-th row, so that dW is the sum over the rows that the reference computes.
// A reference of all rows would take hours at large shapes.
struct CheckedRows {
    long long step;
    __host__ __device__ bool known(long long r) const { return r % step == 0; }
    __host__ __device__ float operator[](long long r) const { return known(r) ? 0.5f * (float)(1 + r / step % 3) : 0; }
};

// A row of the reference, and the error that is allowed for each result. dlogits are rounded to floatX.
struct KnownRow {
    double loss = 0, lse = 0, loss_error = 0, lse_error = 0;
    std::vector<float> dlogits, dlogits_error;
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

    double tf32_error(double norm) const { return tf32 ? tf32_tolerance(norm) : 0; }

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

    // The largest change of the rounded value (in floatX) that an error of the exact value can cause.
    static double rounding_error(double exact, double error) {
        const double value = nearest<floatX>(exact);
        return std::max(nearest<floatX>(exact + error) - value, value - nearest<floatX>(exact - error));
    }

    void prepare_row(size_t k, int target) {
        KnownRow &row = known[k];
        float *const x = &X[k * C];
        for (int c = 0; c < C; c++) x[c] = (float)X_values[(k * rows.step) * C + c];
        std::vector<double> logits(V), z_error(V), dlogits(V), probs(V), z(V);
        lm_head_logits_cpu(logits.data(), z_error.data(), x, W.data(), has_bias ? bias.data() : nullptr, C, V);
        for (int j = 0; j < V; j++) {
            const double exact = logits[j], size = z_error[j];
            logits[j] = nearest<floatX>(exact);
            z_error[j] = fabs((double)options.logit_scale) *
                         rounding_error(exact, product_tolerance(C, size, INFINITY) + tf32_error(size));
        }
        const double dloss = options.dloss * rows[k * rows.step];
        const ClassifierRow r = classifier_fused_cpu(dlogits.data(), probs.data(), z.data(), logits.data(), target,
                                                     dloss, V, options);
        const bool ignored = target == options.ignore_index;
        const SoftmaxTolerance<ClassifierRow, ClassifierOptions> tolerance(r, options, dloss, V, V / 32.0 + 32,
                                                                           LogitErrors(z_error, probs));
        row.loss = r.loss;
        row.lse = r.lse;
        row.lse_error = tolerance.lse();
        if (!ignored) row.loss_error = tolerance.loss(z[target], z_error[target]);
        row.dlogits.resize(V);
        row.dlogits_error.resize(V);
        for (int j = 0; j < V; j++) {
            const double error = tolerance.gradient(dlogits[j], probs[j], z[j], logits[j], j == target, z_error[j]);
            row.dlogits[j] = (float)nearest<floatX>(dlogits[j]);
            row.dlogits_error[j] = ignored ? 0 : (float)rounding_error(dlogits[j], error);
        }
    }

    // Adds to `expected` the sum over `count` terms factor(i) * rows[i]. factor(i) returns a number and its error.
    template <typename Factor>
    void add_product(Expected &expected, const float *matrix, long long count, Factor factor) const {
        std::vector<double> sum(C), squares(C), all(C);
        for (long long i = 0; i < count; i++) {
            const std::pair<double, double> f = factor(i);
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
            const double before = fabs(expected.value[c]), size = sqrt(squares[c]);
            expected.slack[c] += tf32_error(size) + product_tolerance(count, size + before, all[c] + before);
            expected.value[c] += sum[c];
        }
    }

    // expect_dX: row r. expect_dW, expect_dbias: row j, added to `before`. expect_scalar: the loss or lse of row r.
    void expect_dX(Expected &expected, long long r) const {
        std::fill(expected.value.begin(), expected.value.end(), 0.0);
        if (!rows.known(r)) return;
        const KnownRow &row = known[r / rows.step];
        add_product(expected, W.data(), V,
                    [&](long long j) { return std::pair<double, double>(row.dlogits[j], row.dlogits_error[j]); });
    }
    template <typename Before>
    void expect_dW(Expected &expected, long long j, const Before &before) const {
        for (int c = 0; c < C; c++) expected.value[c] = (double)(float)before[j * C + c];
        add_product(expected, X.data(), known.size(), [&](long long k) {
            return std::pair<double, double>(known[k].dlogits[j], known[k].dlogits_error[j]);
        });
    }
    template <typename Before>
    void expect_dbias(Expected &expected, long long j, const Before &before) const {
        expected.value[0] = (double)(float)before[j];
        double all = fabs(expected.value[0]);
        for (const KnownRow &row : known) {
            expected.value[0] += row.dlogits[j];
            expected.slack[0] += row.dlogits_error[j];
            all += fabs((double)row.dlogits[j]);
        }
        expected.slack[0] += product_tolerance(8.0 * known.size(), all, all);
    }
    void expect_scalar(Expected &expected, long long r, bool lse) const {
        expected.unknown = !rows.known(r);
        if (expected.unknown) return;
        const KnownRow &row = known[r / rows.step];
        expected.value[0] = lse ? row.lse : row.loss;
        expected.slack[0] = lse ? row.lse_error : row.loss_error;
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// the command line, and a plan for each version and budget

// A number of MiB, or a share of the logits, in bytes; 0 if the text is neither.
inline double parse_memory(const std::string &text, double logits_bytes) {
    char *end = nullptr;
    const double value = strtod(text.c_str(), &end);
    const bool plain = !text.empty() && text[strspn(text.c_str(), "0123456789.")] == *end;
    if (!plain || !(value > 0) || value > 1e9) return 0;
    if (*end == '\0') return value * 0x1p20;
    return strcmp(end, "%") == 0 ? value / 100 * logits_bytes : 0;
}

inline LmHeadProblem lm_head_problem(const Options &o, LmHeadType type, LmHeadType gradient_type) {
    const long long rows = (long long)o.dim('b') * o.dim('t');
    if (rows > INT32_MAX) refuse(EXIT_BAD_INPUT, "B*T: %lld rows are more than %d (-b, -t)", rows, INT32_MAX);
    if (o.flag("--tf32") && type != kFp32) {
        refuse(EXIT_BAD_INPUT, "--tf32: has no effect on %s; it requires --dtype fp32",
                 o.dtype.c_str());
    }
    const std::string gradients = o.choice("--gradients");
    const bool forward = o.flag("--forward");
    if (forward && gradients != "both") refuse(EXIT_BAD_INPUT, "--gradients: cannot be combined with --forward");
    LmHeadProblem problem;
    problem.N = (int)rows;
    problem.C = o.dim('c');
    problem.V = o.dim('v');
    problem.type = type;
    problem.gradient_type = gradient_type;
    problem.dX = !forward && gradients != "dw";
    problem.dW = !forward && gradients != "dx";
    problem.bias = o.flag("--bias");
    problem.dbias = problem.bias && problem.dW;
    problem.tf32 = o.flag("--tf32");
    problem.finite = o.flag("--finite");
    return problem;
}

// The budgets at which each version is run: that of --memory, or those of --sweep memory.
inline std::vector<std::string> lm_head_budgets(const Options &o, double logits_bytes) {
    const std::string memory = o.text("--memory");
    if (parse_memory(memory, logits_bytes) == 0) {
        refuse(EXIT_BAD_INPUT, "--memory: '%s' is neither a number of MiB nor a share of the logits, like 64 or 10%%",
                 memory.c_str());
    }
    if (o.choice("--sweep") == "none") return {memory};
    if (memory != "25%") refuse(EXIT_BAD_INPUT, "--memory: cannot be combined with --sweep memory, which sets the budgets");
    return {"100%", "50%", "25%", "10%", "5%", "2%", "1%"};
}

typedef std::shared_ptr<LmHead> SharedHead;

inline SharedHead make_head(const LmHeadProblem &problem, const ClassifierOptions &options) {
    SharedHead head(new LmHead, [](LmHead *old) {
        lm_head_destroy(*old);
        delete old;
    });
    const cudaError_t error = lm_head_create(*head, problem, options);
    if (error != cudaSuccess && head->plan.rows > 0) refuse(EXIT_NO_DEVICE, "%s", head->what);
    return head;
}

// The plans of one run of the program.
struct LmHeadPlans {
    double logits_bytes;
    std::vector<std::string> budgets;
    std::vector<std::vector<SharedHead>> of_version;  // for each budget
    size_t most_bytes = 0;                            // of a workspace

    template <typename Table>
    LmHeadPlans(const Options &o, const Table &versions, LmHeadProblem problem, const ClassifierOptions &options)
        : logits_bytes(lm_head_logits_bytes(problem)), budgets(lm_head_budgets(o, logits_bytes)) {
        for (const auto &version : versions) {
            of_version.resize(version.number + 1);
            if (o.version != -1 && o.version != version.number) continue;
            problem.way = version.properties.way;
            for (const std::string &budget : budgets) {
                problem.memory = (size_t)std::min(parse_memory(budget, logits_bytes), 0x1p62);
                problem.may_exceed_memory = budget.back() == '%';
                of_version[version.number].push_back(make_head(problem, options));
                most_bytes = std::max(most_bytes, of_version[version.number].back()->plan.bytes);
            }
        }
    }

    // The reason why a version cannot run; empty if it can.
    std::string reason_to_skip(int version) const {
        const LmHead &head = *of_version[version][0];
        if (budgets.size() > 1 && head.plan.holds_all_logits()) {
            return "it holds all the logits, whatever the budget";
        }
        if (head.handle) return "";
        return (head.error == cudaErrorMemoryAllocation ? "--memory " + budgets[0] + ": " : "") + head.what;
    }

    // The memory and the sizes of a plan, for the report; zeros for the reference, which has no plan.
    std::vector<Figure> figures(int version, int budget, bool has_room) const {
        static const LmHeadPlan none;
        const bool known = version > 0 && !of_version[version].empty();
        const LmHeadPlan &plan = known ? of_version[version][budget]->plan : none;
        const double bytes = (double)plan.bytes, share = 100 * bytes / logits_bytes;
        return {{"scratch_bytes", bytes, ""},
                {"scratch_pct_of_logits", share, known ? words(plan, budget, share, has_room) : "",
                 "scratch, %"},
                {"memory_bytes", (double)plan.problem.memory, ""},
                {"block_rows", (double)plan.rows, ""},
                {"tile_columns", (double)plan.columns, ""},
                {"buffers", known ? (double)plan.buffers : 0, ""},
                {"gemm_bytes", (double)plan.gemm_bytes, ""}};
    }
    std::string words(const LmHeadPlan &plan, int budget, double share, bool has_room) const {
        const char *const ways[] = {"textbook", "rows", "rows", "vocabulary", "epilogue"};
        const bool more = plan.bytes > parse_memory(budgets[budget], logits_bytes);
        char text[240], reason[80] = "";
        if (plan.holds_all_logits()) {
            snprintf(reason, sizeof(reason), " (it holds all of them)");
        } else if (more) {
            char columns[30] = "";
            if (plan.has_tiles()) snprintf(columns, sizeof(columns), " and %d columns", std::min(plan.problem.V, 128));
            snprintf(reason, sizeof(reason), " (more than --memory: %d rows%s at least)", std::min(plan.problem.N, 128),
                     columns);
        }
        const char *const note = has_room ? "" : " | no room for the bare gemms";
        snprintf(text, sizeof(text), "scratch %.1f%% of the logits%s | %s: %d of %d x %d%s", share, reason,
                 ways[plan.way], plan.buffers, plan.rows, plan.columns, note);
        return text;
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// the race

// Launches captured as CUDA graphs: one for each plan, checked or timed.
struct LmHeadGraphs {
    std::vector<std::pair<std::pair<const LmHead *, bool>, cudaGraphExec_t>> graphs;

    ~LmHeadGraphs() {
        for (const auto &known : graphs) cudaGraphExecDestroy(known.second);
    }
    // Replays the graph of `key`. The first call captures it from launch().
    template <typename Launch>
    cudaError_t run(std::pair<const LmHead *, bool> key, cudaStream_t stream, Launch launch) {
        for (const auto &known : graphs) {
            if (known.first == key) return cudaGraphLaunch(known.second, stream);
        }
        cudaGraph_t graph;
        cudaGraphExec_t executable;
        if (const auto error = cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal)) return error;
        const cudaError_t launched = launch(), ended = cudaStreamEndCapture(stream, &graph);
        if (launched != cudaSuccess || ended != cudaSuccess) return launched != cudaSuccess ? launched : ended;
        if (const auto error = cudaGraphInstantiate(&executable, graph, 0)) return error;
        cudaGraphDestroy(graph);
        graphs.push_back({key, executable});
        return cudaGraphLaunch(executable, stream);
    }
};

// The bare GEMMs: results have the inputs' type and are not added to anything. The logits are used in place of dlogits.
template <typename floatX>
struct BareGemms {
    SharedHead head;
    LmHeadArguments<floatX, floatX> args = {};
    bool tuned = false;

    BareGemms(Harness &h, LmHeadProblem problem, const floatX *X, const floatX *W, const int *targets) {
        const long long N = problem.N, C = problem.C, V = problem.V;
        problem.way = kLmHeadFused;
        problem.bare = true;
        problem.bias = problem.dbias = false;
        problem.gradient_type = problem.type;
        head = make_head(problem, ClassifierOptions());
        args.X = X;
        args.W = W;
        args.targets = targets;
        if (problem.dX) args.dX = h.input(Values<floatX>(6, h.options.seed), N * C);
        if (problem.dW) args.dW = h.input(Values<floatX>(7, h.options.seed), V * C);
        args.workspace = (char *)h.input(Values<float>(8, h.options.seed), (long long)head->plan.bytes / 4 + 1);
    }
    void tune(cudaStream_t stream) {
        if (!tuned) cuda_check(lm_head_tune(*head, args, stream));
        tuned = true;
    }
    cudaError_t launch(cudaStream_t stream) const {
        const LmHeadRun<floatX, floatX> run(*head, args, stream);
        const LmHeadTile all = run.block_of(0);
        if (const auto error = run.make_logits(run.logits(), all)) return error;
        return run.make_gradients(run.logits(), all, true);
    }
};

template <typename floatX, typename gradX>
void lm_head_race(Harness &h) {
    const LmHeadProblem problem = lm_head_problem(h.options, type_of<floatX>(), type_of<gradX>());
    const ClassifierOptions options = classifier_options<ClassifierOptions>(h.options);
    const int N = problem.N, C = problem.C, V = problem.V;
    const auto plans = std::make_shared<LmHeadPlans>(h.options, lm_head_versions<floatX, gradX>, problem, options);
    h.job.sweep.option = "--memory";
    h.job.sweep.values = plans->budgets;
    h.job.skip = [=](int version) { return plans->reason_to_skip(version); };
    if (h.options.version > 0 && !h.job.skip(h.options.version).empty()) {  // before the inputs are made
        refuse(EXIT_BAD_INPUT, "version %d: %s", h.options.version, h.job.skip(h.options.version).c_str());
    }
    // The bare GEMMs need memory for all logits beside the other arrays.
    size_t free_bytes = 0, total_bytes = 0;
    cuda_check(cudaMemGetInfo(&free_bytes, &total_bytes));
    const bool has_room = plans->logits_bytes < free_bytes / 2.0;
    h.job.figures = [=](int version, int budget) { return plans->figures(version, budget, has_room); };

    const int *targets = h.targets(N, V, (int)h.options.number("--ignore-every"), options.ignore_index);
    const int *host_targets = h.host_tokens.data();
    // A product of two uniform numbers has 1/9 of the variance of the scale, and a logit is the sum of C of them.
    const float spread = (float)(h.options.number("--spread") * 3 / sqrt((double)C));
    const ScaledValues<floatX> X_values = {{1, h.options.seed}, 1}, W_values = {{2, h.options.seed}, spread};
    const ScaledValues<floatX> bias_values = {{3, h.options.seed}, 1};
    const Values<gradX> dW_values = {4, h.options.seed}, dbias_values = {5, h.options.seed};
    const long long rows_checked = std::max(32LL, (long long)std::min(4e9 / ((double)V * C), 2e7 / V));
    const CheckedRows checked = {std::max(1LL, ceil_div((long long)N, rows_checked))};
    const auto reference = std::make_shared<LmHeadReference<floatX>>(LmHeadReference<floatX>{
        C, V, problem.tf32, options, X_values, W_values, bias_values, problem.bias, checked, {}, {}, {}, {}});
    h.job.prepare_references = [=] { reference->prepare(N, host_targets); };

    LmHeadArguments<floatX, gradX> args = {};
    args.X = h.input(X_values, (long long)N * C);
    args.W = h.input(W_values, (long long)V * C);
    args.bias = problem.bias ? h.input(bias_values, V) : nullptr;
    args.targets = targets;
    args.status = h.status();
    const float *const check_dlosses = h.input(checked, N);
    auto expect_dX = [=](Expected &e, long long r) { reference->expect_dX(e, r); };
    auto expect_dW = [=](Expected &e, long long j) { reference->expect_dW(e, j, dW_values); };
    auto expect_dbias = [=](Expected &e, long long j) { reference->expect_dbias(e, j, dbias_values); };
    auto expect_loss = [=](Expected &e, long long r) { reference->expect_scalar(e, r, false); };
    auto expect_lse = [=](Expected &e, long long r) { reference->expect_scalar(e, r, true); };
    if (problem.dX) args.dX = h.output<floatX>("dX", N, C, 0, expect_dX);
    if (problem.dW) args.dW = h.output<gradX>("dW", V, C, 0, expect_dW, &dW_values);
    if (problem.dbias) args.dbias = h.output<gradX>("dbias", V, 1, 0, expect_dbias, &dbias_values);
    args.losses = h.output<float>("losses", N, 1, 0, expect_loss);
    if (h.options.flag("--lse")) args.lse = h.output<float>("lse", N, 1, 0, expect_lse);
    char *const workspace = (char *)h.workspace(plans->most_bytes);
    auto arguments_for = [=](const LmHead &head) {  // the guard zone follows the plan's workspace
        LmHeadArguments<floatX, gradX> here = args;
        here.workspace = workspace + (plans->most_bytes - head.plan.bytes);
        return here;
    };

    const double products = 1.0 + problem.dX + problem.dW, scalars = 2.0 + h.options.flag("--lse");
    h.job.bytes = ((double)N * C * (1 + problem.dX) + (double)V * C) * sizeof(floatX) +
              (problem.dW ? 2.0 * V * C * sizeof(gradX) : 0) + scalars * N * sizeof(float);
    h.job.flops = 2.0 * N * C * V * products;
    std::shared_ptr<BareGemms<floatX>> bare;
    if (h.options.do_bench && h.options.version != 0 && has_room) {
        bare = std::make_shared<BareGemms<floatX>>(h, problem, args.X, args.W, targets);
        h.job.baseline.name = products == 1 ? "gemm" : "gemms";
        h.job.baseline.launch = [=](cudaStream_t stream) { return bare->launch(stream); };
    }
    h.job.tune = [=, &h](int version, cudaStream_t stream) {
        // All algorithms of the CPU device take the same time: there, tuning is run as a test where it is quick.
        if (ON_CPU && h.job.flops > 1e9) return;
        for (const SharedHead &head : plans->of_version[version]) {
            cuda_check(lm_head_tune(*head, arguments_for(*head), stream));
            progress.done();
        }
        if (bare) bare->tune(stream);
    };
    LmHeadGraphs graphs;
    const bool use_graph = h.options.flag("--graph");
    h.race(lm_head_versions<floatX, gradX>,
           [&](LmHeadLauncher<floatX, gradX> launcher, int budget, cudaStream_t stream) -> cudaError_t {
               const LmHead &head = *plans->of_version[h.running][budget];
               LmHeadArguments<floatX, gradX> here = arguments_for(head);
               here.dlosses = h.checking ? check_dlosses : nullptr;
               cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;  // by the harness, for the hot time
               if (use_graph) cuda_check(cudaStreamIsCapturing(stream, &capturing));
               auto launch = [&] { return launcher(head, here, stream); };
               if (!use_graph || capturing != cudaStreamCaptureStatusNone) return launch();
               return graphs.run({&head, h.checking}, stream, launch);
           });
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
    const std::vector<Number> numbers =
        classifier_numbers({{"--spread", 2, 0, 100, "standard deviation of the logits, set by the scale of W"}});
    Harness h(
        "lm_head", "hidden states to losses and all gradients",
        {{'b', "B", 8, 2}, {'t', "T", 1024, 8}, {'c', "C", 768, 64}, {'v', "V", 50257, 50257}},
        {{"--grad-dtype", {"fp32", "same"}, "type of dW and dbias"},
         {"--gradients", {"both", "dx", "dw"}, "gradients to compute"},
         {"--forward", {}, "losses only, no gradients"},
         {"--lse", {}, "also compute each row's log-sum-exp"},
         {"--bias", {}, "add a bias, and compute its gradient with dW"},
         {"--tf32", {}, "fp32 products of inputs rounded to TF32"},
         {"--sweep", {"none", "memory"}, "time against memory, with budgets from 100% to 1%"},
         {"--finite", {}, "ignored rows hold finite numbers: X is not copied"},
         {"--graph", {}, "capture the launches once, as a CUDA graph"}},
        numbers,
        {{"--memory", "25%",
          "most scratch memory, from version 3 on: in MiB, or a share of the logits (like 10%; raised if too small)"}});
    h.options.has_block_size = false;
    return h.main(argc, argv, lm_head_versions<float, float>, lm_head_race<float>, lm_head_race<half>,
                  lm_head_race<__nv_bfloat16>);
}
#endif
