// The GEMM of lm_head.cu's version 5 (compute capability 9.0): X W^T. Computes the classifier's statistics or gradients
// from the accumulators.
#pragma once
#include "../common.h"
#include "classifier.h"
#include "hopper.h"

#include <cudaTypedefs.h>

namespace bookends {

// The statistics of a row over a tile of the vocabulary or a run of columns: an OnlineSoftmax without `beaten`, and the
// target's logit, which is 0 until the target's column has been read.
struct TiledRow {
    float max, sum, gaps;
    unsigned count;
    float target_logit;

    __device__ OnlineSoftmax statistics() const { return {max, sum, gaps, count}; }
};

// ---------------------------------------------------------------------------------------------------------------------
// tiles and shared memory

// A tile of the product has 128 rows of X and 256 rows of W. A block has three groups of 4 warps: the first one loads,
// each of the other two computes 64 rows, 128 sums a thread. Inputs arrive in slices of 64 channels, 128 bytes a row.
constexpr unsigned kProductRows = 128, kProductColumns = 256, kProductDepth = 64, kProductStages = 4;
constexpr unsigned kGroupWarps = 4, kGroupThreads = kGroupWarps * kWarpSize, kMathWarps = 2 * kGroupWarps;
constexpr unsigned kProductThreads = 3 * kGroupThreads;
constexpr unsigned kXBytes = kProductRows * kProductDepth * 2, kWBytes = kProductColumns * kProductDepth * 2;
// Gradients are stored in boxes, one bulk copy each. A warp has two boxes: it fills one while the other is being
// stored.
constexpr unsigned kBoxRows = 16, kBoxColumns = 64, kBoxBytes = kBoxRows * kBoxColumns * 2, kWarpBoxes = 2;
constexpr size_t kProductShared = kProductStages * (kXBytes + kWBytes) + kMathWarps * kWarpBoxes * kBoxBytes;

// Describes a matrix of 16-bit elements for bulk copies of `box_rows` rows by 64 columns between global memory and
// shared memory with the 128-byte swizzle. Copies read 0 beyond the last column and row. Copies write nothing there,
// except the rest of a row's last 16 bytes. The address and the stride must be multiples of 16 bytes.
template <typename floatX>
cudaError_t map_rows(CUtensorMap *map, const floatX *begin, unsigned columns, unsigned rows, size_t stride,
                     unsigned box_rows) {
    static const PFN_cuTensorMapEncodeTiled_v12000 encode = [] {
        void *found = nullptr;
        cudaDriverEntryPointQueryResult result;
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
        return (PFN_cuTensorMapEncodeTiled_v12000)found;
    }();
    if (!encode) return cudaErrorNotSupported;
    const cuuint64_t sizes[] = {columns, rows}, strides[] = {stride * sizeof(floatX)};
    const cuuint32_t box[] = {64, box_rows}, steps[] = {1, 1};
    const CUtensorMapDataType type =
        std::is_same_v<floatX, half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    const CUresult result =
        encode(map, type, 2, (void *)begin, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// The arguments of the GEMM. It computes `statistics`, or reads `gradients` and writes dlogits through `out`.
template <typename floatX>
struct ProductArguments {
    CUtensorMap X, W, out;                 // (rows, C), (columns, C), (rows, columns)
    bool mapped;                           // X and W are valid; otherwise X_rows and W_rows are loaded by elements
    const floatX *X_rows, *W_rows, *bias;  // (rows, C), (columns, C), (columns); bias may be null
    unsigned rows, columns, C;
    unsigned begin;                       // the first column's id in the vocabulary
    unsigned runs;                        // each row's columns are divided into so many runs
    TiledRow *statistics;                 // (runs, rows)
    const ClassifierGradient *gradients;  // (rows)

    __host__ __device__ unsigned tiles_of_run() const { return ceil_div(ceil_div(columns, kProductColumns), runs); }
};

// The data that all roles of a block use: its shared memory, and the division of the product into units of work.
struct ProductBlock {
    char *inputs;            // (kProductStages), a slice of X and one of W each
    char *boxes;             // (kMathWarps, kWarpBoxes)
    uint64_t *full, *empty;  // (kProductStages), mbarriers
    unsigned across, down;   // tiles
    unsigned slices;         // of the channels
    unsigned run_tiles;      // tiles of a run

    __device__ char *X(unsigned stage) const { return inputs + stage * (kXBytes + kWBytes); }
    __device__ char *W(unsigned stage) const { return X(stage) + kXBytes; }
};

// A unit of work: a run of tiles, side by side, of the same 128 rows.
struct ProductRun {
    unsigned row, index;  // the first of its rows, and the run's index in these rows
    unsigned tile, end;   // its tiles are tile..end-1

    __device__ ProductRun(const ProductBlock &block, unsigned unit) {
        row = unit % block.down * kProductRows;
        index = unit / block.down;
        tile = index * block.run_tiles;
        end = min(tile + block.run_tiles, block.across);
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// the loader

// Copies a slice of X and one of W by single elements, with 0 beyond the matrices. All threads of the loading group
// take part, and arrive at `full`.
template <typename floatX>
__device__ void load_slice_by_element(const ProductArguments<floatX> &product, char *X, char *W, unsigned row,
                                      unsigned column, unsigned channel, uint64_t *full) {
    namespace ptx = cuda::ptx;
    for (unsigned i = threadIdx.x; i < (kProductRows + kProductColumns) * kProductDepth; i += kGroupThreads) {
        const bool of_X = i < kProductRows * kProductDepth;
        const unsigned r = i / kProductDepth - (of_X ? 0 : kProductRows), c = i % kProductDepth;
        const unsigned from = r + (of_X ? row : column), rows = of_X ? product.rows : product.columns;
        const floatX *const matrix = of_X ? product.X_rows : product.W_rows;
        const bool exists = from < rows && channel + c < product.C;
        const floatX value = exists ? matrix[(size_t)from * product.C + channel + c] : (floatX)0.0f;
        *(floatX *)((of_X ? X : W) + swizzled(r, c / 8) + c % 8 * 2) = value;
    }
    ptx::fence_proxy_async(ptx::space_shared);
    ptx::mbarrier_arrive(ptx::sem_release, ptx::scope_cta, ptx::space_shared, full);
}

// Loads the slices of all of the block's tiles, one after the other, up to four slices ahead of the multiplication,
// also across tiles. One thread issues bulk copies; without tensor maps, all 128 threads copy.
template <typename floatX>
__device__ void load_tiles(const ProductArguments<floatX> &product, const ProductBlock &block) {
    namespace ptx = cuda::ptx;
    if (threadIdx.x > 0 && product.mapped) return;
    Ring ring;
    for (unsigned unit = blockIdx.x; unit < block.down * product.runs; unit += gridDim.x) {
        const ProductRun run(block, unit);
        for (unsigned tile = run.tile; tile < run.end; tile++) {
            const unsigned column = tile * kProductColumns;
            for (unsigned slice = 0; slice < block.slices; slice++) {
                char *const X = block.X(ring.slot), *const W = block.W(ring.slot);
                uint64_t *const full = &block.full[ring.slot];
                const int channel = slice * kProductDepth;
                wait_for_phase(&block.empty[ring.slot], ring.phase ^ 1);
                if (product.mapped) {
                    const int X_at[] = {channel, (int)run.row}, W_at[] = {channel, (int)column};
                    ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, full,
                                                   kXBytes + kWBytes);
                    ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, X, &product.X, X_at, full);
                    ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, W, &product.W, W_at, full);
                } else {
                    load_slice_by_element(product, X, W, run.row, column, channel, full);
                }
                ring.next(kProductStages);
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// the multiplication

// A thread of a math group computes 64 sums in each of two rows, which are 8 rows apart. wgmma_64x256x16() defines the
// order of these 128 sums.

// The first of the thread's two rows, in the tile.
__device__ inline unsigned own_row() {
    return (threadIdx.x / kWarpSize - kGroupWarps) * kBoxRows + threadIdx.x % kWarpSize / 4;
}

// The column, in the tile, of the thread's i-th sum in a row.
__device__ inline unsigned column_of(unsigned i) { return i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2; }

// Logits 8u to 8u+7 of the thread's 64 in row h, rounded to floatX.
template <typename floatX>
__device__ Packed<floatX, 8> rounded_logits(const float (&sums)[128], unsigned h, unsigned u) {
    float values[8];
#pragma unroll
    for (unsigned k = 0; k < 8; k++) values[k] = sums[(4 * u + k / 2) * 4 + 2 * h + k % 2];
    return from_floats<floatX>(values);
}

// Computes the logits of the tile at `column`: the sums over all channels, plus the bias. A group releases a stage one
// slice late, so that its next wgmma is queued before it waits for the previous one.
template <typename floatX>
__device__ void multiply_tile(float (&sums)[128], Ring &ring, const ProductArguments<floatX> &product,
                              const ProductBlock &block, unsigned column) {
    namespace ptx = cuda::ptx;
    const unsigned group_bytes = (threadIdx.x / kGroupThreads - 1) * (kXBytes / 2);
    auto release = [&](unsigned slot) {
        if (threadIdx.x % kWarpSize == 0) {
            ptx::mbarrier_arrive(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &block.empty[slot]);
        }
    };
    unsigned previous = 0;
    for (unsigned slice = 0; slice < block.slices; slice++) {
        wait_for_phase(&block.full[ring.slot], ring.phase);
        const uint64_t X = describe_rows(block.X(ring.slot) + group_bytes), W = describe_rows(block.W(ring.slot));
        wgmma_begin();
#pragma unroll
        for (unsigned k = 0; k < kProductDepth / 16; k++) {
            wgmma_64x256x16<floatX>(sums, X + k * kDescribedStep, W + k * kDescribedStep, slice + k > 0);
        }
        wgmma_end();
        if (slice > 0) {
            wgmma_wait<1>();
            release(previous);
        }
        previous = ring.slot;
        ring.next(kProductStages);
    }
    wgmma_wait<0>();
    release(previous);
    if (!product.bias) return;
#pragma unroll
    for (unsigned i = 0; i < 64; i++) {
        const unsigned at = i / 2 * 4 + i % 2, j = column + column_of(i);
        const float bias = j < product.columns ? (float)product.bias[j] : 0.0f;
        sums[at] += bias;
        sums[at + 2] += bias;
    }
}

// The targets of a thread's two rows.
struct TargetColumns {
    unsigned column[2];  // UINT32_MAX for a bad target
    bool ignored[2];

    template <typename floatX>
    __device__ TargetColumns(const ProductArguments<floatX> &product, const ClassifierArguments<floatX> &args,
                             unsigned row) {
        for (unsigned h = 0; h < 2; h++) {
            const unsigned r = row + own_row() + 8 * h;
            const int id = r < product.rows ? args.targets[r] : 0;
            column[h] = id_in_range(id, args.V) ? id - product.begin : UINT32_MAX;
            ignored[h] = id == args.options.ignore_index;
        }
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// gradients

// Writes the gradients of the warp's 16 rows and of the 64 columns of box b of the tile to `box` in shared memory. The
// gradients of an ignored row are 0.
template <bool softcap, Extras extras, typename floatX>
__device__ void fill_box(char *box, const float (&sums)[128], unsigned b, unsigned column, const TargetColumns &targets,
                         const ClassifierGradient (&g)[2], const ClassifierArguments<floatX> &args) {
    const unsigned lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (unsigned i = 0; i < 4; i++) {
        const unsigned h = i / 2, u = 2 * b + i % 2;
        char *const place = box + lane % 4 * 4;
        uint4 words = to_bits(gradient_of<softcap, extras>(rounded_logits<floatX>(sums, h, u), g[h], args));
        if (targets.ignored[h]) words = {};
        const unsigned r = lane / 4 + 8 * h, chunk = u % 2 * 4;
        *(unsigned *)(place + swizzled(r, chunk)) = words.x;
        *(unsigned *)(place + swizzled(r, chunk + 1)) = words.y;
        *(unsigned *)(place + swizzled(r, chunk + 2)) = words.z;
        *(unsigned *)(place + swizzled(r, chunk + 3)) = words.w;
    }
    for (unsigned h = 0; h < 2; h++) {
        const unsigned at = targets.column[h] - column - b * kBoxColumns;  // below 64: the target is in this box
        if (at < kBoxColumns && at % 8 / 2 == lane % 4 && !targets.ignored[h]) {
            *(floatX *)(box + swizzled(lane / 4 + 8 * h, at / 8) + at % 8 * 2) = (floatX)g[h].at_target;
        }
    }
}

// The role of the math groups in pass 2: computes tiles and stores their gradients in boxes.
template <bool softcap, Extras extras, typename floatX>
__device__ void store_gradients(const ProductArguments<floatX> &product, const ClassifierArguments<floatX> &args,
                                const ProductBlock &block) {
    namespace ptx = cuda::ptx;
    const unsigned lane = threadIdx.x % kWarpSize, row_of_thread = own_row();
    char *const boxes = block.boxes + (threadIdx.x / kWarpSize - kGroupWarps) * kWarpBoxes * kBoxBytes;
    float sums[128];
    Ring ring;
    for (unsigned unit = blockIdx.x; unit < block.down * product.runs; unit += gridDim.x) {
        const ProductRun run(block, unit);
        const TargetColumns targets(product, args, run.row);
        const unsigned r = run.row + row_of_thread, last = product.rows - 1;
        const ClassifierGradient g[2] = {product.gradients[min(r, last)], product.gradients[min(r + 8, last)]};
        for (unsigned tile = run.tile; tile < run.end; tile++) {
            const unsigned column = tile * kProductColumns;
            multiply_tile(sums, ring, product, block, column);
#pragma unroll
            for (unsigned b = 0; b < kProductColumns / kBoxColumns; b++) {
                char *const box = boxes + b % kWarpBoxes * kBoxBytes;
                if (lane == 0) ptx::cp_async_bulk_wait_group_read(ptx::n32_t<kWarpBoxes - 1>());
                __syncwarp();
                fill_box<softcap, extras>(box, sums, b, column, targets, g, args);
                ptx::fence_proxy_async(ptx::space_shared);
                __syncwarp();
                if (lane == 0) {
                    const int to[] = {(int)(column + b * kBoxColumns), (int)(run.row + row_of_thread)};
                    ptx::cp_async_bulk_tensor(ptx::space_global, ptx::space_shared, &product.out, to, box);
                    ptx::cp_async_bulk_commit_group();
                }
            }
        }
    }
    if (lane == 0) ptx::cp_async_bulk_wait_group(ptx::n32_t<0>());
}

// ---------------------------------------------------------------------------------------------------------------------
// statistics

// update_statistics() for a row of the last tile, of which only the first `columns` columns exist.
template <bool softcap, Extras extras, typename floatX>
__device__ void update_partial(RunningSoftmax &running, const Packed<floatX, 8> (&x)[8], unsigned columns,
                               const ClassifierArguments<floatX> &args) {
    float largest = -FLT_MAX;
    auto for_each = [&](auto what) {
#pragma unroll
        for (unsigned u = 0; u < 8; u++) {
            float values[8], slope;
            to_floats(values, x[u]);
#pragma unroll
            for (unsigned k = 0; k < 8; k++) {
                const float value = value_and_slope<softcap, extras>(values[k], args, &slope);
                if (column_of(8 * u + k) < columns) what(value);
            }
        }
    };
    for_each([&](float value) { largest = fmaxf(largest, value); });
    running.raise<extras>(largest, args);
    for_each([&](float value) {
        running.sum += running.exponent.exp(value);
        if (extras != kNoExtras) running.add_gaps(scaled_gap(running.max, value, args.gap_scale), 1);
    });
}

// Adds the tile at `column` to the statistics of the thread's two rows. Sets target_logit if the thread holds the
// target's logit. All logits are rounded first, which frees the registers of the sums.
template <bool softcap, Extras extras, typename floatX>
__device__ void update_with_tile(RunningSoftmax (&running)[2], float (&target_logit)[2], const float (&sums)[128],
                                 const TargetColumns &targets, const ProductArguments<floatX> &product,
                                 const ClassifierArguments<floatX> &args, unsigned column) {
    Packed<floatX, 8> x[2][8];
#pragma unroll
    for (unsigned i = 0; i < 16; i++) x[i / 8][i % 8] = rounded_logits<floatX>(sums, i / 8, i % 8);
#pragma unroll
    for (unsigned h = 0; h < 2; h++) {
        const unsigned at = targets.column[h] - column;
        if (at < kProductColumns && at % 8 / 2 == threadIdx.x % 4) {  // in this tile, and held by this thread
#pragma unroll
            for (unsigned u = 0; u < 8; u++) {
                float values[8];
                to_floats(values, x[h][u]);
                for (unsigned k = 0; k < 8; k++) {
                    if (at / 8 * 2 + at % 2 == 8 * u + k) target_logit[h] = values[k];
                }
            }
        }
    }
    if (column + kProductColumns <= product.columns) {
        const ClassifierTarget<floatX> unused = {};  // read for kAllExtras only
#pragma unroll
        for (unsigned h = 0; h < 2; h++) update_max<softcap, extras>(running[h], x[h], 0, 0, unused, args);
#pragma unroll
        for (unsigned h = 0; h < 2; h++) update_sums<softcap, extras>(running[h], x[h], args);
    } else {
#pragma unroll
        for (unsigned h = 0; h < 2; h++) {
            update_partial<softcap, extras>(running[h], x[h], product.columns - column, args);
        }
    }
}

// The role of the math groups in pass 1: computes tiles, and keeps the statistics of two rows per thread in registers
// during a run. At the end of the run, the four threads of a row merge their statistics, and the first of them stores
// the result.
template <bool softcap, Extras extras, typename floatX>
__device__ void store_statistics(const ProductArguments<floatX> &product, const ClassifierArguments<floatX> &args,
                                 const ProductBlock &block) {
    float sums[128];
    Ring ring;
    for (unsigned unit = blockIdx.x; unit < block.down * product.runs; unit += gridDim.x) {
        const ProductRun run(block, unit);
        const TargetColumns targets(product, args, run.row);
        RunningSoftmax running[2] = {RunningSoftmax(args.power), RunningSoftmax(args.power)};
        float target_logit[2] = {};
        for (unsigned tile = run.tile; tile < run.end; tile++) {
            const unsigned column = tile * kProductColumns;
            multiply_tile(sums, ring, product, block, column);
            update_with_tile<softcap, extras>(running, target_logit, sums, targets, product, args, column);
        }
        for (unsigned h = 0; h < 2; h++) {
            OnlineSoftmax all = running[h].result();
            for (unsigned apart = 1; apart < 4; apart *= 2) {
                auto other = [&](auto value) { return __shfl_xor_sync(0xffffffffu, value, apart); };
                const OnlineSoftmax others = {other(all.max), other(all.sum), other(all.gaps), other(all.count)};
                all = merge<extras>(all, others, args);
                target_logit[h] += other(target_logit[h]);
            }
            const unsigned r = run.row + own_row() + 8 * h;
            if (threadIdx.x % 4 == 0 && r < product.rows) {
                product.statistics[(size_t)run.index * product.rows + r] = {all.max, all.sum, all.gaps, all.count,
                                                                            target_logit[h]};
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// the kernel

// Version 5: the epilogue of the GEMM computes the softmax statistics (pass 1) or the gradients (pass 2) from the
// accumulators, so that the logits are never stored. Each pass saves one write and one read of all logits, 4NV bytes
// with 16-bit types. Like version 4 it computes the logits twice, a fourth product of 2NCV operations: it loses where
// the budget holds all logits. It also loses if 8 does not divide C, or X or W is not at a multiple of 16 bytes: it
// then loads single elements.
//
// Blocks are persistent: each processes one run of tiles after the other. The tiles of a run have the same 128 rows, so
// that the rows' statistics stay in registers. Blocks that run at the same time have different rows and the same
// columns, so that they read the same rows of W from the L2.
//
// Roles, one function each:
//   load_tiles        group 0, 40 registers per thread: loads slices of X and W into the stages
//   store_statistics  groups 1 and 2, 232 registers per thread, pass 1: multiply_tile(), then the statistics
//   store_gradients   groups 1 and 2, 232 registers per thread, pass 2: multiply_tile(), then the gradients
// Barriers of stage i:
//   full[i]   One thread of the loader arrives and announces the bytes of its bulk copies; without tensor maps, all 128
//             threads of its group arrive after their stores. The math groups wait.
//   empty[i]  A lane of each of the 8 math warps arrives when the wgmmas that read the stage are complete. The loader
//             waits, for the previous phase.
// The two math groups share no other barrier. While one computes its epilogue, the other has the tensor cores to itself
// for up to four slices. (A fixed distance of two or three slices between the groups was no faster.)
//
// Code for devices other than sm_90a has an empty kernel, and lm_head_device() prevents its launch. Sources:
// CUTLASS's warp-specialised kernels for Hopper; "Outperforming cuBLAS on H100", Pranjal Shankhdhar 2024.
//
// H200, bf16, N 8192, C 768, V 50304: cuBLASLt takes 0.80 ms for the logits, including their store. This GEMM takes
// 0.75 ms without an epilogue.
template <typename floatX, bool writes, bool softcap, Extras extras>
__global__ void __launch_bounds__(kHasWgmma ? kProductThreads : kWarpSize, 1)
    lm_head_product_kernel(const __grid_constant__ ProductArguments<floatX> product, ClassifierArguments<floatX> args) {
    if constexpr (kHasWgmma) {
        namespace ptx = cuda::ptx;
        extern __shared__ __align__(kSwizzleBytes) char inputs[];
        __shared__ uint64_t full[kProductStages], empty[kProductStages];
        const ProductBlock block = {inputs,
                                    inputs + kProductStages * (kXBytes + kWBytes),
                                    full,
                                    empty,
                                    ceil_div(product.columns, kProductColumns),
                                    ceil_div(product.rows, kProductRows),
                                    ceil_div(product.C, kProductDepth),
                                    product.tiles_of_run()};
        if (threadIdx.x == 0) {
            for (unsigned i = 0; i < kProductStages; i++) {
                ptx::mbarrier_init(&full[i], product.mapped ? 1 : kGroupThreads);
                ptx::mbarrier_init(&empty[i], 2 * kGroupWarps);
            }
            ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
        }
        __syncthreads();
        if (threadIdx.x < kGroupThreads) {
            set_registers<40, false>();  // the launch gives 168 per thread; the rest is for the math groups
            load_tiles(product, block);
        } else {
            set_registers<232, true>();
            if constexpr (writes) {
                store_gradients<softcap, extras>(product, args, block);
            } else {
                store_statistics<softcap, extras>(product, args, block);
            }
        }
    }
}

}  // namespace bookends
