/*
Updates of table rows in place: overwrite, accumulate, and steps of sparse optimizers.

  overwrite   table[idx[i],:] = values[i,:]            of equal indices, the last one wins
  accumulate  table[idx[i],:] += scale * values[i,:]   equal indices add up
  optimizer   one step of SGD, row-wise Adagrad, Adam or row-wise Adam for each row that has a gradient

The table is a vocabulary, or a recommender table with hundreds of millions of rows: time and memory depend on the
number of indices, not on the rows of the table. There are few operations per element, so memory bandwidth is the limit.
The fewest bytes: the values once, the indices once, each distinct row of the table once (overwrite) or once each way.

Versions of overwrite. "Distinct" indices (a promise of the caller) need no search for the last one:

version 1  scan: one block per position looks for its index at all later positions
version 2  hash table: the last position of each index, in a table that stays in the L2
version 3  x128: one thread per 16 bytes
version 4  rows in flight: each thread loads 16 bytes of four rows while it searches the hash table
version 5  overlap: the loads of version 4 begin while the hash table is being filled

Measured on an NVIDIA H200, B64 T1024 C256 V10000000 fp32 uniform, cold:
  1  scan               2.2785 ms    1.4% of copy
  2  hash table         0.0832 ms   37.9% of copy   27x the version before
  3  x128               0.0681 ms   46.3% of copy   1.22x the version before
  4  rows in flight     0.0695 ms   45.4% of copy   0.98x the version before
  5  overlap            0.0680 ms   46.4% of copy   1.02x the version before
  The kernels have changed since.

Versions of accumulate (--op accumulate):

version 1  scan: one block per distinct index adds its values in order
version 2  atomics: one block per position, one atomic addition per element
version 3  x128 atomics: 16 bytes per atomic addition; several rows in flight
version 4  groups: positions sorted by index, float sums in a fixed order, one rounding

Measured on an NVIDIA H200, B64 T1024 C256 V100000 fp32 zipf op=accumulate, cold:
  1  scan               5.4193 ms    0.4% of copy
  2  atomics            0.1149 ms   19.1% of copy   47x the version before
  3  x128 atomics       0.1116 ms   19.7% of copy   1.03x the version before
  4  groups             0.1320 ms   16.6% of copy   0.85x the version before
  The kernels have changed since.

Versions of the optimizers (--op sgd, rowwise-adagrad, adam or rowwise-adam):

version 1  scalar: one block per row, one thread per element
version 2  x128: a team of 1 to 32 lanes per row, 16 bytes per access
version 3  rows in flight: each team loads several rows before its first store

Measured on an NVIDIA H200, B64 T1024 C256 V10000000 fp32 uniform op=rowwise-adagrad, cold:
  1  scalar             0.0796 ms   59.6% of copy
  2  x128               0.0643 ms   73.8% of copy   1.24x the version before
  3  rows in flight     0.0641 ms   74.0% of copy   1.00x the version before
  The kernels have changed since.

Includes common.h, parts/embedding_table.h, parts/group_sums.h (with parts/sorted_groups.h, rows.h, workspace.h),
parts/last_positions.h (the hash table), parts/launch.h and parts/sparse_optimizers.h (formulas).

Compile:  nvcc -O3 -arch=native embedding_update.cu -o embedding_update
Run:      ./embedding_update                       overwrite, the default version
          ./embedding_update all --distinct -c 256 -v 10000000 --dtype fp32
          ./embedding_update all --op accumulate --tokens zipf --value-dtype fp32 --rounding stochastic
          ./embedding_update all --op adam --index int64
          ./embedding_update --help
*/
#include "common.h"
#include "parts/embedding_table.h"
#include "parts/group_sums.h"
#include "parts/last_positions.h"
#include "parts/launch.h"
#include "parts/sparse_optimizers.h"

#include <cmath>
#include <vector>

namespace bookends {

// ---------------------------------------------------------------------------------------------------------------------
// CPU reference

// Overwrite and accumulate, in double, for one row (C) of the table: `positions` are the positions of its index, in
// ascending order. Values: a pointer, or values computed on demand. magnitude (C), or null: the magnitudes of the terms
// are added to it, a scale for rounding errors.
template <typename Values>
void embedding_overwrite_cpu(double *row, const Values &values, const int *positions, long long count, int C) {
    for (int c = 0; c < C && count > 0; c++) row[c] = (double)values[positions[count - 1] * (long long)C + c];
}
template <typename Values>
void embedding_accumulate_cpu(double *row, double *magnitude, double scale, const Values &values, const int *positions,
                              long long count, int C) {
    for (long long k = 0; k < count; k++) {
        for (int c = 0; c < C; c++) {
            const double term = scale * (double)values[positions[k] * (long long)C + c];
            row[c] += term;
            if (magnitude) magnitude[c] += fabs(term);
        }
    }
}

// One step of an optimizer for one row, in double: w (C), and what the optimizer has of m (C) and v (C, or 1 if it is
// row-wise). The gradient is (C) values from gradients[first] on.
template <typename Values>
void embedding_optimizer_cpu(double *w, double *m, double *v, const SparseOptimizer &o, const Values &gradients,
                             long long first, int C) {
    std::vector<double> g(C);
    double mean_square = 0;
    for (int c = 0; c < C; c++) {
        g[c] = (double)gradients[first + c];
        if (!is_adam(o.kind)) g[c] += o.decay * w[c];
        mean_square += g[c] * g[c] / C;
    }
    if (o.kind == kRowwiseAdagrad) v[0] += mean_square;
    if (o.kind == kRowwiseAdam) v[0] = o.beta2.value * v[0] + (1 - o.beta2.value) * mean_square;
    for (int c = 0; c < C; c++) {
        if (o.kind == kSgd) w[c] -= o.rate * g[c];
        if (o.kind == kRowwiseAdagrad) w[c] -= o.rate * g[c] / (sqrt(v[0]) + o.eps);
        if (!is_adam(o.kind)) continue;
        m[c] = o.beta1.value * m[c] + (1 - o.beta1.value) * g[c];
        if (o.kind == kAdam) v[c] = o.beta2.value * v[c] + (1 - o.beta2.value) * g[c] * g[c];
        const double m_hat = m[c] / (1 - pow(o.beta1.value, (double)o.step));
        const double v_hat = v[o.kind == kAdam ? c : 0] / (1 - pow(o.beta2.value, (double)o.step));
        w[c] -= o.rate * (m_hat / (sqrt(v_hat) + o.eps) + o.decay * w[c]);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// arguments of overwrite and accumulate

template <typename floatX, typename valueX>
struct UpdateArguments {
    EmbeddingTable<floatX> table;  // updated
    Indices idx;                   // (count)
    const valueX *values;          // (count, C)
    long long count;
    int C;
    bool distinct;    // the caller promises that all good indices differ
    float scale;      // of accumulate
    bool stochastic;  // accumulate: 16-bit results are rounded up or down at random, and are right on average
    uint64_t seed;    // of stochastic rounding
    status_word *status;
    char *workspace;
};

// The row of position i, or -1 if its index is bad, which is reported if `report` is set.
template <typename floatX, typename valueX>
__device__ long long row_of_position(const UpdateArguments<floatX, valueX> &args, long long i, bool report) {
    const long long row = args.idx[i];
    if (row_in_table(row, args.table.rows)) return row;
    if (report) report_bad_id(args.status, i);
    return -1;
}

// The value rounded to floatX, once: to nearest, or at random by the bits for element `at`.
template <typename floatX>
__device__ floatX rounded(float value, bool stochastic, uint64_t seed, size_t at) {
    if constexpr (sizeof(floatX) == 2) {
        if (stochastic) return round_stochastic<floatX>(value, rounding_bits(seed, at));
    }
    return (floatX)value;
}

// ---------------------------------------------------------------------------------------------------------------------
// kernels of overwrite

// Whether one of the positions first..last-1 has the index `row`. All threads of the block call, with the same
// arguments, and get the same answer.
__device__ inline bool block_finds(const Indices &idx, long long row, long long first, long long last) {
    for (; first < last; first += blockDim.x) {
        const long long i = first + threadIdx.x;
        if (__syncthreads_or(i < last && idx[i] == row)) return true;
    }
    return false;
}

// One block per position: the block reads all later indices, and writes its row if none is equal. Right by definition,
// and needs no memory. But N positions read N^2/2 indices: at N = 65,536 that is 8.6 GB from the caches.
template <typename floatX, typename valueX>
__global__ void embedding_overwrite_kernel1(UpdateArguments<floatX, valueX> args) {
    for (long long i = blockIdx.x; i < args.count; i += gridDim.x) {
        const long long row = row_of_position(args, i, threadIdx.x == 0);
        if (row < 0 || (!args.distinct && block_finds(args.idx, row, i + 1, args.count))) continue;
        for (long long c = threadIdx.x; c < args.C; c += blockDim.x) {
            args.table.data[row * args.table.stride + c] = convert<floatX>(args.values[i * args.C + c]);
        }
    }
}

// Kernel 1 with the hash table in place of the scan: one or two reads per position instead of N/2. Cost: a memset and a
// kernel before this one. Their time depends on the number of positions only.
template <typename floatX, typename valueX>
__global__ void embedding_overwrite_kernel2(UpdateArguments<floatX, valueX> args, LastPositions last) {
    for (long long i = blockIdx.x; i < args.count; i += gridDim.x) {
        const long long row = row_of_position(args, i, threadIdx.x == 0);
        if (row < 0 || !last.is_last(args.idx, row, (unsigned)i)) continue;
        for (long long c = threadIdx.x; c < args.C; c += blockDim.x) {
            args.table.data[row * args.table.stride + c] = convert<floatX>(args.values[i * args.C + c]);
        }
    }
}

// `width` elements of a row of values, converted and stored to a row of the table.
template <typename floatX, typename valueX, int width>
__device__ void store_values(floatX *address, Columns<valueX, width> &values) {
    Columns<floatX, width> row;
#pragma unroll
    for (int k = 0; k < width; k++) row[k] = convert<floatX>(values[k]);
    row.store(address);
}

// One thread per `width` elements of the values (16 bytes of the table), counted over all rows: no idle threads at any
// C, and an eighth of kernel 2's accesses with 16-bit types. Cost: each thread waits for its index, then for its slot,
// then for its values.
template <typename floatX, typename valueX, int width>
__global__ void embedding_overwrite_kernel3(UpdateArguments<floatX, valueX> args, LastPositions last) {
    const long long element = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * width;
    if (element >= args.count * args.C) return;
    const long long i = element / args.C, c = element % args.C, row = row_of_position(args, i, c == 0);
    if (row < 0 || !last.is_last(args.idx, row, (unsigned)i)) return;
    Columns<valueX, width> values;
    values.load_gradient(args.values + element);
    store_values(args.table.data + (row * args.table.stride + c), values);
}

// The largest number of threads per block in kernels with several rows in flight: 1024 would leave 64 registers to each
// thread, fewer than some need.
constexpr int kUpdateThreads = 512;

// Each thread handles one vector (`width` elements) of in_flight consecutive rows of values. It loads their indices and
// their values, and only then searches the hash table and stores: in_flight * 16 bytes are in flight during the search,
// and the latencies of kernel 3 are paid once for in_flight rows. Any C works: the vector is as wide as the alignment
// allows. Cost: registers, and loads of values that lose against a later position. Loses where most positions do.
//
// A block has blockDim.y groups of rows; several short rows share a warp. blockIdx.y is the slice of the columns.
//
// wait_for_previous_kernel() stands before the first access to the hash table and to the table: the indices and the
// values do not depend on the kernel in front.
template <typename floatX, typename valueX, int width, int in_flight>
__global__ void __launch_bounds__(kUpdateThreads)
    embedding_overwrite_kernel4(UpdateArguments<floatX, valueX> args, LastPositions last) {
    const long long first = ((long long)blockIdx.x * blockDim.y + threadIdx.y) * in_flight;
    const unsigned c = (blockIdx.y * blockDim.x + threadIdx.x) * width;
    if (first >= args.count || c >= (unsigned)args.C) return;
    long long row[in_flight];
    Columns<valueX, width> values[in_flight];
#pragma unroll
    for (int k = 0; k < in_flight; k++) {
        const long long i = first + k < args.count ? first + k : args.count - 1;
        row[k] = row_of_position(args, i, c == 0);
        values[k].load_gradient(args.values + (i * args.C + c));
    }
    wait_for_previous_kernel();
    bool wins[in_flight];
#pragma unroll
    for (int k = 0; k < in_flight; k++) {
        wins[k] = first + k < args.count && row[k] >= 0 && last.is_last(args.idx, row[k], (unsigned)(first + k));
    }
#pragma unroll
    for (int k = 0; k < in_flight; k++) {
        if (wins[k]) store_values(args.table.data + (row[k] * args.table.stride + c), values[k]);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// launchers of overwrite

// Every launcher of overwrite: table (rows, C) is updated from idx (count) and values (count, C). Row-major, device
// memory, aligned to the element size. valueX: floatX or float; for a float table also a 16-bit type. A conversion
// rounds to nearest; within one type all bits are kept. Of equal indices the last one wins. With `distinct`, the caller
// promises that all good indices differ; otherwise rows with equal indices hold a mixture of their values. Rows without
// an index are not accessed. A bad index writes nothing, and status (a status word that the caller set to kStatusOk, or
// null) holds the first position of one. workspace: embedding_overwrite_workspace_bytes(), aligned to 4 bytes; not
// needed by version 1 or with `distinct`. scale, stochastic and seed are not used.
// The arrays must not overlap. Returns cudaErrorInvalidValue for another block size than a multiple of 32 up to 1024,
// and for more than 2^31-1 indices; else the first error, or cudaSuccess without a launch when there is no work.
// Allocates nothing, does not synchronise, keeps a pending CUDA error pending.
template <typename floatX, typename valueX>
using EmbeddingOverwrite = cudaError_t (*)(const UpdateArguments<floatX, valueX> &args, int block_size,
                                           cudaStream_t stream);

inline bool valid_update(long long count, int block_size) {
    return valid_block_size(block_size) && count <= INT32_MAX;
}

// 8 to 16 bytes per index. 0: too many indices.
inline size_t embedding_overwrite_workspace_bytes(long long count) {
    return count > 0 && count <= INT32_MAX ? last_positions_slots(count) * sizeof(unsigned) : 0;
}

// Fills the hash table, unless the indices are distinct.
template <typename floatX, typename valueX>
cudaError_t find_last_positions(LastPositions *last, const UpdateArguments<floatX, valueX> &args, cudaStream_t stream) {
    *last = {};
    if (args.distinct) return cudaSuccess;
    *last = {(unsigned *)args.workspace, (unsigned)(last_positions_slots(args.count) - 1)};
    return insert_positions(*last, args.idx, args.count, args.table.rows, stream);
}

template <typename floatX, typename valueX>
cudaError_t embedding_overwrite1(const UpdateArguments<floatX, valueX> &args, int block_size, cudaStream_t stream) {
    if (!valid_update(args.count, block_size)) return cudaErrorInvalidValue;
    if (args.count == 0 || args.C == 0) return cudaSuccess;
    return launch_kernel(embedding_overwrite_kernel1<floatX, valueX>, (unsigned)args.count, block_size, 0, stream,
                         args);
}

template <typename floatX, typename valueX>
cudaError_t embedding_overwrite2(const UpdateArguments<floatX, valueX> &args, int block_size, cudaStream_t stream) {
    if (!valid_update(args.count, block_size)) return cudaErrorInvalidValue;
    if (args.count == 0 || args.C == 0) return cudaSuccess;
    LastPositions last;
    const cudaError_t error = find_last_positions(&last, args, stream);
    if (error != cudaSuccess) return error;
    return launch_kernel(embedding_overwrite_kernel2<floatX, valueX>, (unsigned)args.count, block_size, 0, stream, args,
                         last);
}

// 16 bytes of the table per thread, or one element where rows are not so aligned.
template <typename floatX, typename valueX, int width = Packed128<floatX>::size>
cudaError_t embedding_overwrite3(const UpdateArguments<floatX, valueX> &args, int block_size, cudaStream_t stream) {
    if constexpr (width > 1) {
        if (row_width(args.table, args.values, args.C) < width) {
            return embedding_overwrite3<floatX, valueX, 1>(args, block_size, stream);
        }
    }
    if (!valid_update(args.count, block_size)) return cudaErrorInvalidValue;
    if (args.count == 0 || args.C == 0) return cudaSuccess;
    LastPositions last;
    const cudaError_t error = find_last_positions(&last, args, stream);
    if (error != cudaSuccess) return error;
    const unsigned grid_size = grid_blocks(args.count * (args.C / width), &block_size);
    return launch_kernel(embedding_overwrite_kernel3<floatX, valueX, width>, grid_size, block_size, 0, stream, args,
                         last);
}

constexpr int kUpdateRowsInFlight = 4;

// Kernel 4 with the widest vector that the alignment allows. Version 2 handles rows beyond the limits of a grid.
// overlap: kernel 4 starts while the hash table is being filled (programmatic dependent launch, compute capability
// 9.0).
template <typename floatX, typename valueX, int width = Packed128<floatX>::size>
cudaError_t embedding_overwrite_rows(const UpdateArguments<floatX, valueX> &args, bool overlap, int block_size,
                                     cudaStream_t stream) {
    if constexpr (width > 1) {
        if (row_width(args.table, args.values, args.C) < width) {
            return embedding_overwrite_rows<floatX, valueX, width / 2>(args, overlap, block_size, stream);
        }
    }
    if (!valid_update(args.count, block_size)) return cudaErrorInvalidValue;
    if (args.count == 0 || args.C == 0) return cudaSuccess;
    const TeamGrid shape(args.count, kUpdateRowsInFlight, args.C / width, std::min(block_size, kUpdateThreads));
    if (!shape.possible) return embedding_overwrite2(args, block_size, stream);
    KernelFacts facts;
    cudaError_t error = overlap ? kernel_facts(&facts, last_positions_kernel) : cudaSuccess;
    if (error != cudaSuccess) return error;
    LastPositions last;
    error = find_last_positions(&last, args, stream);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = shape.grid;
    config.blockDim = shape.block;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = last.slots && facts.sm_90_code ? 1 : 0;
    return launch_kernel(config, embedding_overwrite_kernel4<floatX, valueX, width, kUpdateRowsInFlight>, args, last);
}

template <typename floatX, typename valueX>
cudaError_t embedding_overwrite4(const UpdateArguments<floatX, valueX> &args, int block_size, cudaStream_t stream) {
    return embedding_overwrite_rows(args, false, block_size, stream);
}

// Version 4 with overlap: the start of kernel 4, its indices and its values come from DRAM while the insert kernel
// waits for its atomics. Without gain where the values do not fit into the registers of the running threads many times
// over: then the insert kernel's time is a small part. Below compute capability 9.0, and with distinct indices, it is
// version 4.
template <typename floatX, typename valueX>
cudaError_t embedding_overwrite5(const UpdateArguments<floatX, valueX> &args, int block_size, cudaStream_t stream) {
    return embedding_overwrite_rows(args, true, block_size, stream);
}

template <typename floatX, typename valueX>
constexpr Version<EmbeddingOverwrite<floatX, valueX>> embedding_overwrite_versions[] = {
    {1, "scan", "one block per position looks for its index at all later positions",
     embedding_overwrite1<floatX, valueX>, 128},
    {2, "hash table", "the last position of each index is found in a hash table", embedding_overwrite2<floatX, valueX>,
     128},
    {3, "x128", "one thread per 16 bytes", embedding_overwrite3<floatX, valueX>, 128},
    {4, "rows in flight", "each thread loads four rows while it searches the hash table",
     embedding_overwrite4<floatX, valueX>, 128},
    {5, "overlap", "loads begin while the hash table is being filled", embedding_overwrite5<floatX, valueX>, 128},
};

// ---------------------------------------------------------------------------------------------------------------------
// kernels of accumulate

// table[row, c] += sum, in float, rounded once.
template <typename floatX, typename valueX>
__device__ void add_to_table(const UpdateArguments<floatX, valueX> &args, long long row, long long c, float sum) {
    floatX *const address = args.table.data + (row * args.table.stride + c);
    *address = rounded<floatX>((float)*address + sum, args.stochastic, args.seed, row * args.C + c);
}

// One block per position. The block returns if an earlier position has its index. Else it adds the values of all later
// positions with its index, in order: no atomics, and the same bits each time. Each position reads all indices, as in
// embedding_overwrite_kernel1.
template <typename floatX, typename valueX>
__global__ void embedding_accumulate_kernel1(UpdateArguments<floatX, valueX> args) {
    for (long long i = blockIdx.x; i < args.count; i += gridDim.x) {
        const long long row = row_of_position(args, i, threadIdx.x == 0);
        if (row < 0 || (!args.distinct && block_finds(args.idx, row, 0, i))) continue;
        for (long long first = 0; first < args.C; first += blockDim.x) {
            const long long c = first + threadIdx.x;
            float sum = c < args.C ? args.scale * (float)args.values[i * args.C + c] : 0.0f;
            for (long long tile = i + 1; !args.distinct && tile < args.count; tile += blockDim.x) {
                const long long end = min(tile + blockDim.x, args.count), own = tile + threadIdx.x;
                if (!__syncthreads_or(own < end && args.idx[own] == row) || c >= args.C) continue;
                for (long long j = tile; j < end; j++) {
                    if (args.idx[j] == row) sum += args.scale * (float)args.values[j * args.C + c];
                }
            }
            if (c < args.C) add_to_table(args, row, c, sum);
        }
    }
}

// One block per position, one thread per element, which it adds to the table by an atomic. The additions to a frequent
// row wait for each other. They come in any order, so the bits differ from run to run, and a 16-bit table is rounded at
// each of them. Distinct indices need no atomics.
template <typename floatX, typename valueX>
__global__ void embedding_accumulate_kernel2(UpdateArguments<floatX, valueX> args) {
    for (long long i = blockIdx.x; i < args.count; i += gridDim.x) {
        const long long row = row_of_position(args, i, threadIdx.x == 0);
        if (row < 0) continue;
        for (long long c = threadIdx.x; c < args.C; c += blockDim.x) {
            const float term = args.scale * (float)args.values[i * args.C + c];
            if (args.distinct) {
                add_to_table(args, row, c, term);
            } else {
                atomicAdd(args.table.data + (row * args.table.stride + c), (floatX)term);
            }
        }
    }
}

// Kernel 2 with one vector (`width` elements) of in_flight rows per thread: the values of in_flight rows are loaded at
// once, and one instruction adds 16 bytes on compute capability 9.0 (before: 4). Equal indices still wait for each
// other, and the order is still any. With distinct indices, the rows of the table are loaded at once too.
template <typename floatX, typename valueX, int width, int in_flight>
__global__ void __launch_bounds__(kUpdateThreads) embedding_accumulate_kernel3(UpdateArguments<floatX, valueX> args) {
    const long long first = ((long long)blockIdx.x * blockDim.y + threadIdx.y) * in_flight;
    const unsigned c = (blockIdx.y * blockDim.x + threadIdx.x) * width;
    if (first >= args.count || c >= (unsigned)args.C) return;
    long long row[in_flight];
    Columns<valueX, width> values[in_flight];
#pragma unroll
    for (int k = 0; k < in_flight; k++) {
        const long long i = first + k < args.count ? first + k : args.count - 1;
        row[k] = row_of_position(args, i, c == 0);
        if (first + k >= args.count) row[k] = -1;
        values[k].load_gradient(args.values + (i * args.C + c));
    }
    auto address = [&](int k) { return args.table.data + (row[k] * args.table.stride + c); };
    if (args.distinct) {
        Columns<floatX, width> old[in_flight];
#pragma unroll
        for (int k = 0; k < in_flight; k++) {
            if (row[k] >= 0) old[k].load_gradient(address(k));
        }
#pragma unroll
        for (int k = 0; k < in_flight; k++) {
            if (row[k] < 0) continue;
#pragma unroll
            for (int j = 0; j < width; j++) {
                const float sum = (float)old[k][j] + args.scale * (float)values[k][j];
                old[k][j] = rounded<floatX>(sum, args.stochastic, args.seed, row[k] * args.C + c + j);
            }
            old[k].store_gradient(address(k));
        }
        return;
    }
#pragma unroll
    for (int k = 0; k < in_flight; k++) {
        if (row[k] < 0) continue;
        Packed<floatX, width> term;
#pragma unroll
        for (int j = 0; j < width; j++) term[j] = (floatX)(args.scale * (float)values[k][j]);
        atomic_add_packed(address(k), term);
    }
}

// The scaled values in the order of the sorted positions: a source of group_sums().
template <typename valueX>
struct ScaledValues {
    const valueX *values;
    const unsigned *groups, *positions;
    float scale;
    unsigned C;

    template <int width>
    struct Loaded {
        Columns<valueX, width> row;
        float scale;
        __device__ void add_to(float (&sum)[width]) {
#pragma unroll
            for (int k = 0; k < width; k++) sum[k] += scale * (float)row[k];
        }
    };
    __device__ unsigned group(unsigned j) const { return groups[j]; }
    template <int width>
    __device__ Loaded<width> load(unsigned j, unsigned c) const {
        Loaded<width> loaded;
        loaded.row.load_gradient(values + ((size_t)positions[j] * C + c));
        loaded.scale = scale;
        return loaded;
    }
};

// A sink of group_sums(): adds the sum of a group to its row of the table.
template <typename floatX>
struct AddToRows {
    EmbeddingTable<floatX> table;
    const long long *rows;  // of the groups
    unsigned C;
    bool stochastic;
    uint64_t seed;

    template <int width>
    __device__ void store(unsigned group, unsigned c, const float (&sum)[width]) const {
        const long long row = rows[group];
        floatX *const address = table.data + (row * table.stride + c);
        Columns<floatX, width> old;
        old.load_gradient(address);
#pragma unroll
        for (int k = 0; k < width; k++) {
            old[k] = rounded<floatX>((float)old[k] + sum[k], stochastic, seed, row * C + c + k);
        }
        old.store_gradient(address);
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// launchers of accumulate

// Every launcher of accumulate: as those of overwrite, with these differences. Versions 1 and 4, and all versions with
// distinct indices, form the sum in float and round old value + sum once: the same bits each time. Versions 2 and 3 add
// by atomics otherwise, in any order, with one rounding per addition; they take subnormal floats for zeros, and return
// cudaErrorNotSupported for stochastic rounding of a 16-bit table. workspace: of
// embedding_accumulate_workspace_bytes(), aligned to 256 bytes, for version 4 without `distinct`. This version returns
// a pending CUDA error without doing anything (see SortedGroups::lay_out).
template <typename floatX, typename valueX>
using EmbeddingAccumulate = cudaError_t (*)(const UpdateArguments<floatX, valueX> &args, int block_size,
                                            cudaStream_t stream);

// The arrays in the workspace of version 4.
struct AccumulateScratch {
    SortedGroups groups;
    SumLevels levels;
    size_t bytes = 0;

    AccumulateScratch(long long count, long long rows) : groups((unsigned)count, rows) {}
    cudaError_t lay_out(char *workspace, int C) {
        char *end = workspace;
        const cudaError_t error = groups.lay_out(&end);
        if (error == cudaSuccess) levels.lay_out(&end, groups.N, C);
        bytes = end - workspace;
        return error;
    }
};

// About 40 bytes per index (48 if rows is 2^32 or more), and 4*C for each 16 indices. 0: too many indices, or an error
// of CUDA.
inline size_t embedding_accumulate_workspace_bytes(long long count, long long rows, int C) {
    if (count <= 0 || count > INT32_MAX) return 0;
    AccumulateScratch scratch(count, rows);
    return scratch.lay_out(nullptr, C) == cudaSuccess ? scratch.bytes : 0;
}

// The arguments with the seed that rounding_bits() takes.
template <typename Arguments>
Arguments with_mixed_seed(Arguments args) {
    args.seed = mix64(args.seed);
    return args;
}

template <typename floatX, typename valueX>
cudaError_t embedding_accumulate1(const UpdateArguments<floatX, valueX> &args, int block_size, cudaStream_t stream) {
    if (!valid_update(args.count, block_size)) return cudaErrorInvalidValue;
    if (args.count == 0 || args.C == 0) return cudaSuccess;
    return launch_kernel(embedding_accumulate_kernel1<floatX, valueX>, (unsigned)args.count, block_size, 0, stream,
                         with_mixed_seed(args));
}

template <typename floatX, typename valueX>
cudaError_t embedding_accumulate2(const UpdateArguments<floatX, valueX> &args, int block_size, cudaStream_t stream) {
    if (!valid_update(args.count, block_size)) return cudaErrorInvalidValue;
    if (args.stochastic && sizeof(floatX) == 2 && !args.distinct) return cudaErrorNotSupported;
    if (args.count == 0 || args.C == 0) return cudaSuccess;
    return launch_kernel(embedding_accumulate_kernel2<floatX, valueX>, (unsigned)args.count, block_size, 0, stream,
                         with_mixed_seed(args));
}

// Kernel 3 with the widest vector that the alignment allows. Version 2 handles rows beyond the limits of a grid.
template <typename floatX, typename valueX, int width = Packed128<floatX>::size>
cudaError_t embedding_accumulate_rows(const UpdateArguments<floatX, valueX> &args, int block_size,
                                      cudaStream_t stream) {
    if constexpr (width > 1) {
        if (row_width(args.table, args.values, args.C) < width) {
            return embedding_accumulate_rows<floatX, valueX, width / 2>(args, block_size, stream);
        }
    }
    if (!valid_update(args.count, block_size)) return cudaErrorInvalidValue;
    if (args.stochastic && sizeof(floatX) == 2 && !args.distinct) return cudaErrorNotSupported;
    if (args.count == 0 || args.C == 0) return cudaSuccess;
    const TeamGrid shape(args.count, kUpdateRowsInFlight, args.C / width, std::min(block_size, kUpdateThreads));
    if (!shape.possible) return embedding_accumulate2(args, block_size, stream);
    return launch_kernel(embedding_accumulate_kernel3<floatX, valueX, width, kUpdateRowsInFlight>, shape.grid,
                         shape.block, 0, stream, with_mixed_seed(args));
}
template <typename floatX, typename valueX>
cudaError_t embedding_accumulate3(const UpdateArguments<floatX, valueX> &args, int block_size, cudaStream_t stream) {
    return embedding_accumulate_rows(args, block_size, stream);
}

// Sorts the positions by index, then adds up each group in a fixed order and rounds once (parts/sorted_groups.h,
// parts/group_sums.h). A frequent index is work for many teams of threads, where the atomics of version 3 wait for each
// other. Cost: the sort, which reads and writes the indices several times; so version 3 is faster where few indices are
// equal. With distinct indices, it is version 3.
template <typename floatX, typename valueX>
cudaError_t embedding_accumulate4(const UpdateArguments<floatX, valueX> &args, int block_size, cudaStream_t stream) {
    if (args.distinct) return embedding_accumulate3(args, block_size, stream);
    if (!valid_update(args.count, block_size)) return cudaErrorInvalidValue;
    if (args.count == 0 || args.C == 0) return cudaSuccess;
    AccumulateScratch scratch(args.count, args.table.rows);
    cudaError_t error = scratch.lay_out(args.workspace, args.C);
    if (error != cudaSuccess) return error;
    const SortedGroups &groups = scratch.groups;
    error = sort_groups(groups, RowOfIndex{args.idx, args.table.rows, args.status}, VisitNothing(), stream);
    if (error != cudaSuccess) return error;
    const ScaledValues<valueX> source = {args.values, groups.group, groups.positions, args.scale, (unsigned)args.C};
    const AddToRows<floatX> sink = {args.table, groups.indices, (unsigned)args.C, args.stochastic, mix64(args.seed)};
    const int widest = row_width(args.table, args.values, args.C);
    return group_sums_of_width<Packed128<floatX>::size>(widest, source, sink, scratch.levels, groups.N, args.C,
                                                        block_size, stream);
}

// A property that the check's error bounds depend on: whether a 16-bit table is rounded at each addition.
struct AccumulateProperties {
    bool rounds_each_addition = false;
};
template <typename floatX, typename valueX>
constexpr Version<EmbeddingAccumulate<floatX, valueX>, AccumulateProperties> embedding_accumulate_versions[] = {
    {1, "scan", "one block per distinct index adds its values in order", embedding_accumulate1<floatX, valueX>, 128},
    {2, "atomics", "one atomic addition per element", embedding_accumulate2<floatX, valueX>, 128, kNotReproducible,
     {true}},
    {3, "x128 atomics", "16 bytes per atomic addition, four rows in flight", embedding_accumulate3<floatX, valueX>, 128,
     kNotReproducible, {true}},
    {4, "groups", "sorted positions, float sums in a fixed order, one rounding", embedding_accumulate4<floatX, valueX>,
     128},
};

// ---------------------------------------------------------------------------------------------------------------------
// kernels of the optimizers (parts/sparse_optimizers.h has the formulas)

// A sparse gradient: distinct row numbers, and one gradient row for each.
template <typename floatX, typename gradX>
struct OptimizerArguments {
    SparseOptimizer optimizer;
    EmbeddingTable<floatX> table;   // updated
    Indices idx;                    // (count), distinct
    const gradX *gradients;         // (count, C)
    long long count;                // at most 2^31-1
    const long long *device_count;  // the count in device memory, at most `count`; or null
    int C;
    bool stochastic;
    uint64_t seed;
    status_word *status;

    __device__ long long rows_with_gradient() const {
        return device_count ? max(min(*device_count, count), 0ll) : count;
    }
    // The row of gradient row i, or -1 if its index is bad, which is reported if `report` is set.
    __device__ long long row(long long i, bool report) const {
        const long long number = idx[i];
        if (row_in_table(number, table.rows)) return number;
        if (report) report_bad_id(status, i);
        return -1;
    }
};

// One block per gradient row, one thread per element. A row-wise state needs the mean of the squares before the first
// element can be updated: a reduction over the block, and a second read of the gradient. The bits of that sum depend on
// the block size. Loses where C is below the block size, and because each thread has one element in flight.
template <OptimizerKind kind, typename floatX, typename gradX>
__global__ void embedding_optimizer_kernel1(OptimizerArguments<floatX, gradX> args) {
    const OptimizerStep<kind> step(args.optimizer);
    float *const first = args.optimizer.first, *const second = args.optimizer.second;
    const long long count = args.rows_with_gradient();
    const float over_C = 1.0f / (float)args.C;
    for (long long i = blockIdx.x; i < count; i += gridDim.x) {
        const long long row = args.row(i, threadIdx.x == 0);
        if (row < 0) continue;
        floatX *const weights = args.table.data + row * args.table.stride;
        const gradX *const gradients = args.gradients + i * args.C;
        float row_scale = step.scale(0.0f);
        if constexpr (is_row_wise(kind)) {
            float state = second[row], mean_square = 0.0f;
            for (long long c = threadIdx.x; c < args.C; c += blockDim.x) {
                const float g = step.squared_gradient((float)gradients[c], (float)weights[c]);
                mean_square += g * (g * over_C);
            }
            state = step.next_row_state(state, block_reduce_sum(mean_square));
            if (threadIdx.x == 0) second[row] = state;
            row_scale = step.scale(state);
        }
        for (long long c = threadIdx.x; c < args.C; c += blockDim.x) {
            const long long at = row * args.C + c;
            float m = is_adam(kind) ? first[at] : 0.0f, v = kind == kAdam ? second[at] : 0.0f;
            const float w = step.update((float)weights[c], (float)gradients[c], &m, &v, row_scale);
            weights[c] = rounded<floatX>(w, args.stochastic, args.seed, at);
            if (is_adam(kind)) first[at] = m;
            if (kind == kAdam) second[at] = v;
        }
    }
}

// The row-wise states of a team's rows: updates them, and returns the scale of each row. row[k] is -1 if there is none.
// All lanes of the warp call. The lanes of a team add their squares in a fixed order; the first one has the state.
template <int width, int in_flight, OptimizerKind kind, typename floatX, typename gradX>
__device__ void update_row_states(float (&row_scale)[in_flight], const OptimizerStep<kind> &step,
                                  const OptimizerArguments<floatX, gradX> &args, const long long (&row)[in_flight],
                                  long long first) {
    const unsigned lane = threadIdx.x, lanes = blockDim.x;
    const float over_C = 1.0f / (float)args.C;
    float *const states = args.optimizer.second;
    float state[in_flight], mean_square[in_flight] = {};
#pragma unroll
    for (int k = 0; k < in_flight; k++) state[k] = row[k] >= 0 && lane == 0 ? states[row[k]] : 0.0f;
#pragma unroll 1
    for (unsigned c = lane * width; c < (unsigned)args.C; c += lanes * width) {
        Columns<gradX, width> gradients[in_flight] = {};
#pragma unroll
        for (int k = 0; k < in_flight; k++) {
            if (row[k] >= 0) gradients[k].load(args.gradients + ((first + k) * args.C + c));
        }
#pragma unroll
        for (int k = 0; k < in_flight; k++) {
            if (row[k] < 0) continue;
            Columns<floatX, width> weights = {};
            if (kind == kRowwiseAdagrad && step.decay != 0.0f) {
                weights.load(args.table.data + (row[k] * args.table.stride + c));
            }
#pragma unroll
            for (int j = 0; j < width; j++) {
                const float g = step.squared_gradient((float)gradients[k][j], (float)weights[j]);
                mean_square[k] += g * (g * over_C);
            }
        }
    }
#pragma unroll
    for (int k = 0; k < in_flight; k++) {
        for (unsigned offset = lanes / 2; offset > 0; offset /= 2) {
            mean_square[k] += __shfl_xor_sync(0xffffffffu, mean_square[k], offset);
        }
        state[k] = step.next_row_state(__shfl_sync(0xffffffffu, state[k], 0, lanes), mean_square[k]);
        if (row[k] >= 0 && lane == 0) states[row[k]] = state[k];
        row_scale[k] = step.scale(state[k]);
    }
}

// A team of 1 to 32 lanes (a power of two, blockDim.x) handles in_flight consecutive gradient rows: several short rows
// share a warp, and a long row is a loop. Each access has `width` elements, 16 bytes of the table if the alignment
// allows. A row-wise state is reduced by shuffles within the team, without barriers.
//
// Version 2 has in_flight = 1: each lane waits for the vectors of one row (two for SGD and Adagrad, four for Adam)
// before the next. Version 3 loads those of several rows before its first store. Cost: registers.
constexpr int kOptimizerThreads = 256;
template <OptimizerKind kind, typename floatX, typename gradX, int width, int in_flight>
__global__ void __launch_bounds__(kOptimizerThreads)
    embedding_optimizer_kernel2(OptimizerArguments<floatX, gradX> args) {
    const long long count = args.rows_with_gradient();
    const long long block_first = (long long)blockIdx.x * blockDim.y * in_flight;
    if (block_first >= count) return;
    const long long first = block_first + threadIdx.y * in_flight;
    const OptimizerStep<kind> step(args.optimizer);
    long long row[in_flight];
    float row_scale[in_flight];
#pragma unroll
    for (int k = 0; k < in_flight; k++) {
        row[k] = first + k < count ? args.row(first + k, threadIdx.x == 0) : -1;
        row_scale[k] = step.scale(0.0f);
    }
    if constexpr (is_row_wise(kind)) update_row_states<width>(row_scale, step, args, row, first);
#pragma unroll 1
    for (unsigned c = threadIdx.x * width; c < (unsigned)args.C; c += blockDim.x * width) {
        Columns<floatX, width> weights[in_flight];
        Columns<gradX, width> gradients[in_flight];
        Columns<float, width> m[in_flight], v[in_flight];
#pragma unroll
        for (int k = 0; k < in_flight; k++) {
            if (row[k] < 0) continue;
            weights[k].load_gradient(args.table.data + (row[k] * args.table.stride + c));
            gradients[k].load_gradient(args.gradients + ((first + k) * args.C + c));
            if (is_adam(kind)) m[k].load_gradient(args.optimizer.first + (row[k] * args.C + c));
            if (kind == kAdam) v[k].load_gradient(args.optimizer.second + (row[k] * args.C + c));
        }
#pragma unroll
        for (int k = 0; k < in_flight; k++) {
            if (row[k] < 0) continue;
            const long long at = row[k] * args.C + c;
#pragma unroll
            for (int j = 0; j < width; j++) {
                const float w = step.update((float)weights[k][j], (float)gradients[k][j], &m[k][j], &v[k][j],
                                            row_scale[k]);
                weights[k][j] = rounded<floatX>(w, args.stochastic, args.seed, at + j);
            }
            weights[k].store_gradient(args.table.data + (row[k] * args.table.stride + c));
            if (is_adam(kind)) m[k].store_gradient(args.optimizer.first + at);
            if (kind == kAdam) v[k].store_gradient(args.optimizer.second + at);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// launchers of the optimizers

// Every launcher of the optimizers: one step for the rows of a sparse gradient: distinct row numbers idx (count) and
// gradients (count, C), such as embedding_lookup_backward.cu writes them. Row-major, device memory, aligned to the
// element size. gradX: floatX or float; for a float table also a 16-bit type. States are float. New weights are formed
// in float and rounded once. Rows without a gradient, and their states, are not accessed; with equal indices in idx,
// the results are undefined. A bad index updates nothing, and status holds the first position of one (or is null).
// The arrays must not overlap. The same bits each time; of version 1, at one block size. Returns cudaErrorInvalidValue
// for another block size than a multiple of 32 up to 1024, and for more than 2^31-1 rows of the gradient; else the
// launch's error, or cudaSuccess without a launch when there is no work. Allocates nothing, does not synchronise, keeps
// a pending CUDA error pending.
template <typename floatX, typename gradX>
using EmbeddingOptimizer = cudaError_t (*)(const OptimizerArguments<floatX, gradX> &args, int block_size,
                                           cudaStream_t stream);

// run() with the kind as a constant.
template <typename Run>
cudaError_t with_optimizer_kind(OptimizerKind kind, Run run) {
    switch (kind) {
        case kSgd:
            return run(std::integral_constant<OptimizerKind, kSgd>());
        case kRowwiseAdagrad:
            return run(std::integral_constant<OptimizerKind, kRowwiseAdagrad>());
        case kAdam:
            return run(std::integral_constant<OptimizerKind, kAdam>());
        case kRowwiseAdam:
            return run(std::integral_constant<OptimizerKind, kRowwiseAdam>());
    }
    return cudaErrorInvalidValue;
}

template <typename floatX, typename gradX>
cudaError_t embedding_optimizer1(const OptimizerArguments<floatX, gradX> &args, int block_size, cudaStream_t stream) {
    if (!valid_update(args.count, block_size)) return cudaErrorInvalidValue;
    if (args.count == 0 || args.C == 0) return cudaSuccess;
    return with_optimizer_kind(args.optimizer.kind, [&](auto kind) {
        return launch_kernel(embedding_optimizer_kernel1<kind(), floatX, gradX>, (unsigned)args.count, block_size, 0,
                             stream, with_mixed_seed(args));
    });
}

// Whether all rows allow accesses of 16 bytes, or of `width` elements.
template <int width, typename floatX, typename gradX>
bool optimizer_rows_allow(const OptimizerArguments<floatX, gradX> &args) {
    const SparseOptimizer &o = args.optimizer;
    const int of_states = std::min(width, Packed128<float>::size);
    return row_width(args.table, args.gradients, args.C) >= width &&
           (!is_adam(o.kind) || vector_width(of_states, args.C, o.first) == of_states) &&
           (o.kind != kAdam || vector_width(of_states, args.C, o.second) == of_states);
}

// Kernel 2 with 16 bytes of the table per access, or with one element where rows are not so aligned. rows: of SGD and
// Adagrad in flight; Adam, which loads twice as much per row, has half of them.
template <int rows, typename floatX, typename gradX, int width = Packed128<floatX>::size>
cudaError_t embedding_optimizer_teams(const OptimizerArguments<floatX, gradX> &args, int block_size,
                                      cudaStream_t stream) {
    if constexpr (width > 1) {
        if (!optimizer_rows_allow<width>(args)) {
            return embedding_optimizer_teams<rows, floatX, gradX, 1>(args, block_size, stream);
        }
    }
    if (!valid_update(args.count, block_size)) return cudaErrorInvalidValue;
    if (args.count == 0 || args.C == 0) return cudaSuccess;
    const unsigned lanes = std::min(kWarpSize, warp_team_lanes(args.C / width));
    const unsigned teams = std::min(block_size, kOptimizerThreads) / lanes;
    return with_optimizer_kind(args.optimizer.kind, [&](auto kind) {
        constexpr int in_flight = rows > 1 && is_adam(kind()) ? rows / 2 : rows;
        const unsigned grid_size = ceil_div((unsigned)args.count, teams * in_flight);
        return launch_kernel(embedding_optimizer_kernel2<kind(), floatX, gradX, width, in_flight>, grid_size,
                             dim3(lanes, teams), 0, stream, with_mixed_seed(args));
    });
}

template <typename floatX, typename gradX>
cudaError_t embedding_optimizer2(const OptimizerArguments<floatX, gradX> &args, int block_size, cudaStream_t stream) {
    return embedding_optimizer_teams<1>(args, block_size, stream);
}

template <typename floatX, typename gradX>
cudaError_t embedding_optimizer3(const OptimizerArguments<floatX, gradX> &args, int block_size, cudaStream_t stream) {
    return embedding_optimizer_teams<4>(args, block_size, stream);
}

template <typename floatX, typename gradX>
constexpr Version<EmbeddingOptimizer<floatX, gradX>> embedding_optimizer_versions[] = {
    {1, "scalar", "one block per row, one thread per element", embedding_optimizer1<floatX, gradX>, 128,
     kSameAtABlockSize},
    {2, "x128", "a team of 1 to 32 lanes per row, 16 bytes per access", embedding_optimizer2<floatX, gradX>, 128},
    {3, "rows in flight", "each team loads several rows before its first store", embedding_optimizer3<floatX, gradX>,
     128},
};

}  // namespace bookends

// ---------------------------------------------------------------------------------------------------------------------
#ifndef BOOKENDS_NO_MAIN
#include "dev/harness/harness.h"
#include "dev/harness/updates.h"

namespace bookends {

template <typename floatX, typename valueX>
UpdateArguments<floatX, valueX> update_arguments(Harness &h, const UpdateProblem &p, const Values<valueX> &values,
                                                 bool distinct) {
    UpdateArguments<floatX, valueX> args = {};
    args.table.rows = p.V;
    args.table.stride = p.stride;
    args.idx = p.idx;
    args.values = h.input(values, (long long)p.ids.size() * p.C);
    args.count = (long long)p.ids.size();
    args.C = p.C;
    args.distinct = distinct;
    args.scale = (float)h.options.number("--scale");
    args.stochastic = p.stochastic;
    args.seed = h.options.seed;
    args.status = p.status;
    return args;
}

template <typename floatX, typename valueX>
void embedding_overwrite_race(Harness &h) {
    if (h.options.number("--scale") != 1) refuse(EXIT_BAD_INPUT, "--scale: requires --op accumulate");
    if (h.options.choice("--rounding") != "nearest") {
        refuse(EXIT_BAD_INPUT, "--rounding: 'stochastic' requires another --op than overwrite");
    }
    const bool distinct = h.options.flag("--distinct");
    const UpdateProblem p(h, distinct, false);
    const Values<valueX> values = {1, h.options.seed};
    const Values<floatX> before = {2, h.options.seed};
    auto args = update_arguments<floatX>(h, p, values, distinct);
    args.table.data = h.output<floatX>("table", p.V, p.stride, 0, [=, &p](Expected &row, long long r) {
        for (long long c = 0; c < p.stride; c++) row.value[c] = (double)before[r * p.stride + c];
        embedding_overwrite_cpu(row.value.data(), values, p.positions->of(r), p.positions->count(r), p.C);
    }, &before);
    args.workspace = (char *)h.workspace(embedding_overwrite_workspace_bytes(args.count));
    h.job.bytes = (double)p.rows_updated * p.C * (sizeof(valueX) + sizeof(floatX)) + p.index_bytes();
    h.race(embedding_overwrite_versions<floatX, valueX>,
           [=](EmbeddingOverwrite<floatX, valueX> launch, int block_size, cudaStream_t stream) {
               return launch(args, block_size, stream);
           });
}

template <typename floatX, typename valueX>
void embedding_accumulate_race(Harness &h) {
    const bool distinct = h.options.flag("--distinct");
    const UpdateProblem p(h, distinct, false);
    const Values<valueX> values = {1, h.options.seed};
    const Values<floatX> before = {2, h.options.seed};
    auto args = update_arguments<floatX>(h, p, values, distinct);
    auto rounds_each_addition = [=](int version) {
        const auto *row = find_version(embedding_accumulate_versions<floatX, valueX>, version);
        return row->properties.rounds_each_addition && !distinct;
    };
    args.table.data = h.output<floatX>("table", p.V, p.stride, 0, [=, &p, &h](Expected &row, long long r) {
        const int count = p.positions->count(r);
        for (long long c = 0; c < p.stride; c++) {
            row.value[c] = (double)before[r * p.stride + c];
            row.slack[c] = fabs(row.value[c]);
        }
        embedding_accumulate_cpu(row.value.data(), row.slack.data(), args.scale, values, p.positions->of(r), count,
                                 p.C);
        const double tolerance = sum_tolerance<floatX>(count, rounds_each_addition(h.running));
        for (double &slack : row.slack) slack *= tolerance;
        row.either_neighbour = args.stochastic;
    }, &before);
    args.workspace = (char *)h.workspace(embedding_accumulate_workspace_bytes(args.count, p.V, p.C));
    h.job.bytes = p.count() * p.C * sizeof(valueX) + 2.0 * p.rows_updated * p.C * sizeof(floatX) + p.index_bytes();
    h.job.flops = 2 * p.count() * p.C;
    h.job.skip = [=](int version) {
        const bool refused = args.stochastic && rounds_each_addition(version);
        return refused ? "it rounds at each addition, and only to nearest" : "";
    };
    h.race(embedding_accumulate_versions<floatX, valueX>,
           [=](EmbeddingAccumulate<floatX, valueX> launch, int block_size, cudaStream_t stream) {
               return launch(args, block_size, stream);
           });
}

// Initial second states: positive numbers.
struct PositiveValues {
    Values<float> values;
    __host__ __device__ float operator[](long long i) const { return 0.501f + 0.5f * values[i]; }
};

// The reference of an optimizer: the row of the table and its states after the step.
template <typename floatX, typename gradX>
struct OptimizerReference {
    const UpdateProblem &p;
    SparseOptimizer optimizer;
    Values<floatX> weights;
    Values<float> first;
    PositiveValues second;
    Values<gradX> gradients;

    struct Row {
        std::vector<double> w, m, v;
        Row(const OptimizerReference &from, long long r) : w(from.p.C), m(from.p.C), v(from.p.C) {
            const int C = from.p.C;
            for (int c = 0; c < C; c++) {
                w[c] = (double)from.weights[r * from.p.stride + c];
                m[c] = from.first[r * C + c];
                v[c] = from.second[from.optimizer.kind == kAdam ? r * C + c : r];
            }
            if (from.p.positions->count(r) == 0) return;
            embedding_optimizer_cpu(w.data(), m.data(), v.data(), from.optimizer, from.gradients,
                                    *from.p.positions->of(r) * (long long)C, C);
        }
    };

    // A state has a few roundings, and a row's mean one for each addition of a lane.
    double roundings() const { return ldexp(32 + p.C / 16.0, -24); }
    void expect_weights(Expected &row, long long r) const {
        const Row after(*this, r);
        for (long long c = 0; c < p.stride; c++) {
            const double before = (double)weights[r * p.stride + c];
            row.value[c] = c < p.C ? after.w[c] : before;
            if (c >= p.C || p.positions->count(r) == 0) continue;
            const double by_decay = fabs(optimizer.rate * optimizer.decay * before);
            row.slack[c] = roundings() * (fabs(after.w[c] - before) + by_decay) + ldexp(fabs(before), -23);
        }
    }
    void expect_state(Expected &row, long long r, bool is_first) const {
        const Row after(*this, r);
        for (size_t c = 0; c < row.value.size(); c++) {
            row.value[c] = is_first ? after.m[c] : after.v[c];
            if (p.positions->count(r) > 0) row.slack[c] = roundings() * (is_first ? 1 : fabs(row.value[c]));
        }
    }
};

template <typename floatX, typename gradX>
void embedding_optimizer_race(Harness &h) {
    const std::string op = h.options.choice("--op");
    if (h.options.flag("--distinct")) refuse(EXIT_BAD_INPUT, "--distinct: requires --op overwrite or accumulate");
    if (h.options.number("--scale") != 1) refuse(EXIT_BAD_INPUT, "--scale: requires --op accumulate");
    const UpdateProblem p(h, true, true);
    OptimizerArguments<floatX, gradX> args = {};
    SparseOptimizer &optimizer = args.optimizer;
    optimizer.kind = op == "sgd"               ? kSgd
                     : op == "rowwise-adagrad" ? kRowwiseAdagrad
                     : op == "adam"            ? kAdam
                                               : kRowwiseAdam;
    optimizer.rate = 0.01f;
    optimizer.eps = 1e-8f;
    optimizer.decay = (float)h.options.number("--weight-decay");
    optimizer.beta1 = DecayRate(0.9);
    optimizer.beta2 = DecayRate(0.999);
    optimizer.step = 10;
    const uint64_t seed = h.options.seed;
    const OptimizerReference<floatX, gradX> reference = {p, optimizer, {1, seed}, {2, seed}, {{3, seed}}, {4, seed}};
    args.table = {nullptr, p.V, p.stride};
    args.idx = p.idx;
    args.gradients = h.input(reference.gradients, (long long)p.ids.size() * p.C);
    args.count = (long long)p.ids.size();
    args.device_count = h.upload(std::vector<long long>{args.count});
    args.C = p.C;
    args.stochastic = p.stochastic;
    args.seed = seed;
    args.status = p.status;
    args.table.data = h.output<floatX>("table", p.V, p.stride, 0, [=](Expected &row, long long r) {
        reference.expect_weights(row, r);
        row.either_neighbour = args.stochastic;
    }, &reference.weights);
    if (is_adam(optimizer.kind)) {
        optimizer.first = h.output<float>("first state", p.V, p.C, 0, [=](Expected &row, long long r) {
            reference.expect_state(row, r, true);
        }, &reference.first);
    }
    if (optimizer.kind != kSgd) {
        optimizer.second = h.output<float>("second state", p.V, optimizer.kind == kAdam ? p.C : 1, 0,
                                           [=](Expected &row, long long r) { reference.expect_state(row, r, false); },
                                           &reference.second);
    }
    const double states = (is_adam(optimizer.kind) ? 1 : 0) + (optimizer.kind == kAdam ? 1 : 0);  // floats per element
    h.job.bytes = p.count() * p.C * (sizeof(gradX) + 2 * sizeof(floatX) + states * 2 * sizeof(float)) +
                  p.index_bytes() + (is_row_wise(optimizer.kind) ? p.count() * 2 * sizeof(float) : 0);
    h.race(embedding_optimizer_versions<floatX, gradX>,
           [=](EmbeddingOptimizer<floatX, gradX> launch, int block_size, cudaStream_t stream) {
               return launch(args, block_size, stream);
           });
}

template <typename floatX, typename valueX>
void embedding_update_race(Harness &h) {
    const std::string op = h.options.choice("--op");
    const bool weights_only = op == "overwrite" || op == "accumulate";
    if (weights_only && h.options.number("--weight-decay") != 0) {
        refuse(EXIT_BAD_INPUT, "--weight-decay: requires --op sgd, rowwise-adagrad, adam or rowwise-adam");
    }
    if (op == "overwrite") return embedding_overwrite_race<floatX, valueX>(h);
    if (op == "accumulate") return embedding_accumulate_race<floatX, valueX>(h);
    embedding_optimizer_race<floatX, valueX>(h);
}

template <typename floatX>
void embedding_update_race(Harness &h) {
    const std::string type = h.options.choice("--value-dtype");
    if (type == "same" || type == h.options.dtype) return embedding_update_race<floatX, floatX>(h);
    if constexpr (sizeof(floatX) == 4) {
        return type == "fp16" ? embedding_update_race<float, half>(h) : embedding_update_race<float, __nv_bfloat16>(h);
    } else {
        if (type == "fp32") return embedding_update_race<floatX, float>(h);
        refuse(EXIT_BAD_INPUT, "--value-dtype: '%s' requires --dtype %s or fp32", type.c_str(), type.c_str());
    }
}

}  // namespace bookends

int main(int argc, char **argv) {
    using namespace bookends;
    const std::string operation = early_value(argc, argv, "--op", "overwrite");
    Harness h("embedding_update", "table rows overwritten, accumulated or optimized in place",
              {{'b', "B", 64, 4}, {'t', "T", 1024, 512}, {'c', "C", 256, 256}, {'v', "V", 50257, 50257}},
              {{"--op", {"overwrite", "accumulate", "sgd", "rowwise-adagrad", "adam", "rowwise-adam"},
                "the operation on each row"},
               {"--value-dtype", {"same", "fp32", "fp16", "bf16"}, "type of the values or gradients"},
               {"--index", {"int32", "int64"}, "type of the indices"},
               {"--distinct", {}, "each index once, and the kernel may rely on it"},
               {"--rounding", {"nearest", "stochastic"}, "rounding of 16-bit tables"}},
              {{"--stride", 0, 0, INT32_MAX, "elements from row to row of the table (0: C)", true},
               {"--scale", 1, -1e6, 1e6, "factor of the values that are accumulated", false},
               {"--weight-decay", 0, 0, 1, "weight decay of the optimizers", false}});
    auto race = [&](const auto &versions) {
        return h.main(argc, argv, versions, embedding_update_race<float>, embedding_update_race<half>,
                      embedding_update_race<__nv_bfloat16>);
    };
    if (operation == "overwrite") return race(embedding_overwrite_versions<float, float>);
    if (operation == "accumulate") return race(embedding_accumulate_versions<float, float>);
    return race(embedding_optimizer_versions<float, float>);
}
#endif
