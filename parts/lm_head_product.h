// The GEMM of lm_head.cu's version 5 (compute capability 9.0): X W^T, with the classifier's statistics or gradients
// computed from the accumulators.
#pragma once
#include "../common.h"
#include "classifier.h"
#include "hopper.h"

#include <cudaTypedefs.h>

namespace bookends {

// What has been seen of a row in the tiles, or the run, so far: an OnlineSoftmax but `beaten`, and the target's logit,
// if its tile has come by.
struct TiledRow {
    float max, sum, gaps;
    unsigned count;
    float target_logit;

    __device__ OnlineSoftmax statistics() const { return {max, sum, gaps, count}; }
};

// Tiles that the accumulators have room for (a tile of the vocabulary is several): 128 rows of X by 256 of W. Two
// groups of 4 warps have 64 of the rows each, as 128 sums a thread; a third one loads. The inputs arrive in slices of
// 64 channels, which is 128 bytes a row.
constexpr unsigned kProductRows = 128, kProductColumns = 256, kProductDepth = 64, kProductStages = 4,
                   kGroup = 4 * kWarpSize;
constexpr unsigned kProductThreads = 3 * kGroup;
constexpr unsigned kXBytes = kProductRows * kProductDepth * 2, kWBytes = kProductColumns * kProductDepth * 2;
constexpr unsigned kBoxRows = 16, kBoxColumns = 64, kBoxBytes = kBoxRows * kBoxColumns * 2;  // leave at a time
constexpr unsigned kWarpBoxes = 2;                                                           // that a warp has room for
constexpr size_t kProductShared =
    kProductStages * (kXBytes + kWBytes) + 2 * kGroup / kWarpSize * kWarpBoxes * kBoxBytes;

// Rows of a matrix of 16 bits, for bulk copies of `box_rows` by 64 columns to and from swizzled shared memory. What is
// behind the last column or row is 0, and not written but for the rest of a row's last 16 bytes. The address and the
// stride are multiples of 16 bytes.
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
    const CUresult made =
        encode(map, type, 2, (void *)begin, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return made == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// What the product is of, and what becomes of it. The rows' statistics: without gradients, run by run. Or their
// gradients, which leave by out.
template <typename floatX>
struct ProductArguments {
    CUtensorMap X, W, out;                 // of these rows and columns
    bool mapped;                           // whether those of X and W hold; else elements are loaded one by one
    const floatX *X_rows, *W_rows, *bias;  // null: no bias
    unsigned rows, columns, C;
    unsigned begin;                       // how many columns of the logits are in front
    unsigned runs;                        // of tiles, that a row's columns are cut into
    TiledRow *statistics;                 // (runs, rows)
    const ClassifierGradient *gradients;  // (rows)

    __host__ __device__ unsigned tiles_of_run() const { return ceil_div(ceil_div(columns, kProductColumns), runs); }
};

// A thread's 64 logits of a row, as 8 vectors: the column, in the tile, of the i-th.
__device__ inline unsigned column_of(unsigned i) { return i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2; }

// update_statistics() for the last tile, of which not all columns are there.
template <bool softcap, Extras extras, typename floatX>
__device__ void update_partial(RunningSoftmax &seen, const Packed<floatX, 8> (&x)[8], unsigned columns,
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
    seen.raise<extras>(largest, args);
    for_each([&](float value) {
        seen.sum += seen.exponent.exp(value);
        if (extras != kNoExtras) seen.add_gaps(scaled_gap(seen.max, value, args.gap_scale), 1);
    });
}

// Version 5. Blocks stay, and take tile after tile along a run of columns of the same rows, so that a row's statistics
// are carried on in registers; the blocks of a column of tiles go side by side, and meet its rows of W in the L2. A
// slice of inputs is in one of four stages:
//   full[i]   the loader announces the bytes and bulk copies bring them, or all threads of its group have stored them.
//             The other groups wait.
//   empty[i]  a lane of each of their 8 warps arrives when the products that read the stage are done; the loader waits
// The loader does not stop between tiles: it is up to four slices ahead, in the next tile too. And each group goes its
// own way: while one is busy with its logits, the other has the tensor cores to itself, as far as the stages reach. (To
// keep one ahead of the other by two or three slices was no faster.)
//
// Code for other devices than sm_90a has an empty kernel with smaller launch bounds, by which lm_head_device() knows
// it. How it is put together: CUTLASS's warp-specialised kernels for Hopper, and "Outperforming cuBLAS on H100",
// Pranjal Shankhdhar 2024.
//
// What it is worth (H200, bf16, N 8192, C 768, V 50304): cuBLASLt takes 0.80 ms for the logits, and storing them is in
// that. This product takes 0.75 ms without anything behind it.
template <typename floatX, bool writes, bool softcap, Extras extras>
__global__ void __launch_bounds__(kHasWgmma ? kProductThreads : kWarpSize, 1)
    lm_head_product_kernel(const __grid_constant__ ProductArguments<floatX> product, ClassifierArguments<floatX> args) {
    if constexpr (kHasWgmma) {
        namespace ptx = cuda::ptx;
        typedef Packed<floatX, 8> x8;
        extern __shared__ __align__(kSwizzleBytes) char inputs[];
        __shared__ uint64_t full[kProductStages], empty[kProductStages];
        char *const outputs = inputs + kProductStages * (kXBytes + kWBytes);
        const unsigned group = threadIdx.x / kGroup, warp = threadIdx.x / kWarpSize % 4, lane = threadIdx.x % kWarpSize;
        const unsigned across = ceil_div(product.columns, kProductColumns), down = ceil_div(product.rows, kProductRows);
        const unsigned slices = ceil_div(product.C, kProductDepth), run_tiles = product.tiles_of_run();
        if (threadIdx.x == 0) {
            for (unsigned i = 0; i < kProductStages; i++) {
                ptx::mbarrier_init(&full[i], product.mapped ? 1 : kGroup);
                ptx::mbarrier_init(&empty[i], 2 * kGroup / kWarpSize);
            }
            ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
        }
        __syncthreads();
        Ring ring;
        // For each of this block's pieces of work, a run of 128 rows: begin(first row), tile(first row, first column)
        // for each of its tiles, end(first row, run).
        auto for_each_tile = [&](auto begin, auto tile, auto end) {
            for (unsigned unit = blockIdx.x; unit < down * product.runs; unit += gridDim.x) {
                const unsigned row = unit % down * kProductRows, run = unit / down, first = run * run_tiles;
                begin(row);
                for (unsigned t = first; t < min(first + run_tiles, across); t++) tile(row, t * kProductColumns);
                end(row, run);
            }
        };
        auto nothing = [](auto...) {};
        if (group == 0) {
            set_registers<40, false>();  // of three times 168, which leaves the others 232 each
            auto load = [&](unsigned row, unsigned column) {
                for (unsigned slice = 0; slice < slices; slice++) {
                    char *const X = inputs + ring.slot * (kXBytes + kWBytes), *const W = X + kXBytes;
                    const int channel = slice * kProductDepth;
                    uint64_t *const here = &full[ring.slot];
                    wait_for_phase(&empty[ring.slot], ring.phase ^ 1);
                    if (product.mapped) {
                        const int X_at[] = {channel, (int)row}, W_at[] = {channel, (int)column};
                        ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, here,
                                                       kXBytes + kWBytes);
                        ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, X, &product.X, X_at, here);
                        ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, W, &product.W, W_at, here);
                    } else {
                        for (unsigned i = threadIdx.x; i < (kProductRows + kProductColumns) * kProductDepth;
                             i += kGroup) {
                            const bool of_X = i < kProductRows * kProductDepth;
                            const unsigned r = i / kProductDepth - (of_X ? 0 : kProductRows), c = i % kProductDepth;
                            const unsigned from = r + (of_X ? row : column),
                                           rows = of_X ? product.rows : product.columns;
                            const floatX *const matrix = of_X ? product.X_rows : product.W_rows;
                            const bool there = from < rows && channel + c < product.C;
                            const floatX value = there ? matrix[(size_t)from * product.C + channel + c] : (floatX)0.0f;
                            *(floatX *)((of_X ? X : W) + swizzled(r, c / 8) + c % 8 * 2) = value;
                        }
                        ptx::fence_proxy_async(ptx::space_shared);
                        ptx::mbarrier_arrive(ptx::sem_release, ptx::scope_cta, ptx::space_shared, here);
                    }
                    ring.next(kProductStages);
                }
            };
            if (threadIdx.x == 0 || !product.mapped) for_each_tile(nothing, load, nothing);
            return;
        }
        set_registers<232, true>();
        float sums[128];
        const unsigned own_row = (group - 1) * 64 + warp * kBoxRows + lane / 4;  // and the one 8 further on
        auto release = [&](unsigned slot) {
            if (lane == 0) ptx::mbarrier_arrive(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &empty[slot]);
        };
        auto add_bias = [&](unsigned column) {
#pragma unroll
            for (unsigned i = 0; i < 64; i++) {
                const unsigned at = i / 2 * 4 + i % 2, j = column + column_of(i);
                const float bias = j < product.columns ? (float)product.bias[j] : 0.0f;
                sums[at] += bias;
                sums[at + 2] += bias;
            }
        };
        auto multiply = [&](unsigned column) {
            unsigned before = 0;
            for (unsigned slice = 0; slice < slices; slice++) {
                wait_for_phase(&full[ring.slot], ring.phase);
                char *const stage = inputs + ring.slot * (kXBytes + kWBytes);
                const uint64_t X = describe_rows(stage + (group - 1) * (kXBytes / 2)),
                               W = describe_rows(stage + kXBytes);
                wgmma_begin();
#pragma unroll
                for (unsigned k = 0; k < kProductDepth / 16; k++) {
                    wgmma_64x256x16<floatX>(sums, X + k * kDescribedStep, W + k * kDescribedStep, slice + k > 0);
                }
                wgmma_end();
                if (slice > 0) {
                    wgmma_wait<1>();
                    release(before);
                }
                before = ring.slot;
                ring.next(kProductStages);
            }
            wgmma_wait<0>();
            release(before);
            if (product.bias) add_bias(column);
        };
        // Vector u of the logits in row h of the thread's two, rounded.
        auto logits = [&](unsigned h, unsigned u) {
            float values[8];
#pragma unroll
            for (unsigned k = 0; k < 8; k++) values[k] = sums[(4 * u + k / 2) * 4 + 2 * h + k % 2];
            return from_floats<floatX>(values);
        };
        unsigned targets[2];
        bool ignored[2];
        auto read_targets = [&](unsigned row) {
            for (unsigned h = 0; h < 2; h++) {
                const unsigned r = row + own_row + 8 * h;
                const int id = r < product.rows ? args.targets[r] : 0;
                targets[h] = id_in_range(id, args.V) ? id - product.begin : UINT32_MAX;
                ignored[h] = id == args.options.ignore_index;
            }
        };
        if constexpr (writes) {
            char *const boxes = outputs + (threadIdx.x / kWarpSize - 4) * kWarpBoxes * kBoxBytes;  // the warp's
            ClassifierGradient g[2] = {product.gradients[0], product.gradients[0]};  // there is no empty one
            for_each_tile(
                [&](unsigned row) {
                    read_targets(row);
                    for (unsigned h = 0; h < 2; h++) {
                        g[h] = product.gradients[min(row + own_row + 8 * h, product.rows - 1)];
                    }
                },
                [&](unsigned row, unsigned column) {
                    multiply(column);
#pragma unroll
                    for (unsigned b = 0; b < kProductColumns / kBoxColumns; b++) {
                        char *const box = boxes + b % 2 * kBoxBytes;
                        if (lane == 0) ptx::cp_async_bulk_wait_group_read(ptx::n32_t<1>());
                        __syncwarp();
#pragma unroll
                        for (unsigned i = 0; i < 4; i++) {
                            const unsigned h = i / 2, u = 2 * b + i % 2;
                            char *const place = box + lane % 4 * 4;
                            uint4 words = to_bits(gradient_of<softcap, extras>(logits(h, u), g[h], args));
                            if (ignored[h]) words = {};
                            const unsigned r = lane / 4 + 8 * h, chunk = u % 2 * 4;
                            *(unsigned *)(place + swizzled(r, chunk)) = words.x;
                            *(unsigned *)(place + swizzled(r, chunk + 1)) = words.y;
                            *(unsigned *)(place + swizzled(r, chunk + 2)) = words.z;
                            *(unsigned *)(place + swizzled(r, chunk + 3)) = words.w;
                        }
                        for (unsigned h = 0; h < 2; h++) {
                            const unsigned at = targets[h] - column - b * kBoxColumns;  // in this box, if so
                            if (at < kBoxColumns && at % 8 / 2 == lane % 4 && !ignored[h]) {
                                *(floatX *)(box + swizzled(lane / 4 + 8 * h, at / 8) + at % 8 * 2) =
                                    (floatX)g[h].at_target;
                            }
                        }
                        ptx::fence_proxy_async(ptx::space_shared);
                        __syncwarp();
                        if (lane == 0) {
                            const int to[] = {(int)(column + b * kBoxColumns), (int)(row + own_row)};
                            ptx::cp_async_bulk_tensor(ptx::space_global, ptx::space_shared, &product.out, to, box);
                            ptx::cp_async_bulk_commit_group();
                        }
                    }
                },
                nothing);
            if (lane == 0) ptx::cp_async_bulk_wait_group(ptx::n32_t<0>());
        } else {
            RunningSoftmax seen[2] = {RunningSoftmax(args.power), RunningSoftmax(args.power)};
            float target_logit[2];
            const ClassifierTarget<floatX> unused = {};  // of no extras but the sum
            for_each_tile(
                [&](unsigned row) {
                    read_targets(row);
                    for (unsigned h = 0; h < 2; h++) {
                        seen[h] = RunningSoftmax(args.power);
                        target_logit[h] = 0;
                    }
                },
                [&](unsigned, unsigned column) {
                    multiply(column);
                    x8 x[2][8];  // all of them before anything else, since then the sums' registers are free
#pragma unroll
                    for (unsigned i = 0; i < 16; i++) x[i / 8][i % 8] = logits(i / 8, i % 8);
#pragma unroll
                    for (unsigned h = 0; h < 2; h++) {
                        const unsigned at = targets[h] - column;
                        if (at < kProductColumns && at % 8 / 2 == lane % 4) {  // here, and mine
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
#pragma unroll
                        for (unsigned h = 0; h < 2; h++) {
                            update_max<softcap, extras>(seen[h], x[h], 0, 0, unused, args);
                        }
#pragma unroll
                        for (unsigned h = 0; h < 2; h++) update_sums<softcap, extras>(seen[h], x[h], args);
                    } else {
#pragma unroll
                        for (unsigned h = 0; h < 2; h++) {
                            update_partial<softcap, extras>(seen[h], x[h], product.columns - column, args);
                        }
                    }
                },
                [&](unsigned row, unsigned run) {
                    for (unsigned h = 0; h < 2; h++) {
                        OnlineSoftmax all = seen[h].result();
                        for (unsigned apart = 1; apart < 4; apart *= 2) {
                            auto other = [&](auto value) { return __shfl_xor_sync(0xffffffffu, value, apart); };
                            const OnlineSoftmax others = {other(all.max), other(all.sum), other(all.gaps),
                                                          other(all.count)};
                            all = merge<extras>(all, others, args);
                            target_logit[h] += other(target_logit[h]);
                        }
                        const unsigned r = row + own_row + 8 * h;
                        if (lane % 4 == 0 && r < product.rows) {
                            product.statistics[(size_t)run * product.rows + r] = {all.max, all.sum, all.gaps, all.count,
                                                                            target_logit[h]};
                        }
                    }
                });
        }
    }
}

}  // namespace bookends
