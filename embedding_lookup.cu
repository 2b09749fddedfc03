/*
Embedding lookup: rows of a table by index, and bags (the sum, mean or maximum of several rows).

  gather   out[i,:] = table[idx[i],:]
  bag      out[g,:] = sum (mean, max) over the indices k of bag g of weights[k] * table[idx[k],:]

The table is a vocabulary, or a recommender table with hundreds of millions of rows: row numbers and offsets have 64
bits. The row stride may exceed C, and out may have a wider type than the table (float from 16 bits). There is at most
one addition per element, so memory bandwidth is the limit. The fewest bytes: each distinct row once, the indices once,
out once.

Versions of the gather:

version 1  scalar: one block per row, one thread per element
version 2  unrolled: each thread copies the neighbouring elements of 16 bytes one by one; instructive, slow on purpose
version 3  x128: each thread copies 16 bytes with one load and one store
version 4  rows in flight: each thread loads 16 bytes of four rows before its first store
version 5  slices: kernel 4 for one slice of the columns after the other, so that repeated rows are read from the L2

Measured on an NVIDIA H200, B64 T1024 C768 V50257 bf16 uniform, cold:
  1  scalar             0.1045 ms   35.4% of copy
  2  unrolled           0.2309 ms   16.0% of copy   0.45x the version before
  3  x128               0.0573 ms   64.5% of copy   4.03x the version before
  4  rows in flight     0.0471 ms   78.4% of copy   1.22x the version before
  5  slices             0.0454 ms   81.3% of copy   1.04x the version before
  The kernels have changed since.

Versions of the bags (--bag sum, mean or max):

version 1  scalar: one block per bag, one thread per element
version 2  x128: one thread per 16 bytes; several bags of short rows share a block
version 3  rows in flight: each thread loads 16 bytes of eight rows before its first addition
version 4  shared indices: each lane loads and checks one index of its bag, and shuffles distribute it
version 5  long bags: version 4, but a whole block works on each bag of more than 512 indices

Measured on an NVIDIA H200, B64 T1024 C128 V1000000 fp16 uniform bag=sum hotness=32, cold:
  1  scalar             0.6253 ms    9.4% of copy
  2  x128               0.1519 ms   38.7% of copy   4.12x the version before
  3  rows in flight     0.1400 ms   42.0% of copy   1.09x the version before
  4  shared indices     0.1340 ms   43.9% of copy   1.04x the version before
  5  long bags          0.1341 ms   43.8% of copy   1.00x the version before
  The kernels have changed since.

Includes common.h, parts/embedding_table.h.

Compile:  nvcc -O3 -arch=native embedding_lookup.cu -o embedding_lookup
Run:      ./embedding_lookup                    the default: deterministic, best over the measured shapes
          ./embedding_lookup all --tokens zipf --index int64
          ./embedding_lookup all --bag sum --hotness 32 -c 128 -v 1000000 --dtype fp16
          ./embedding_lookup 5 --bag mean --hotness 0..64 --weights
          ./embedding_lookup --help
*/
#include "common.h"
#include "parts/embedding_table.h"

#include <cmath>

namespace bookends {

// ---------------------------------------------------------------------------------------------------------------------
// CPU reference

// One row of out (C), in double: row number `row` of the table, or NaN if the number is bad. Table: a pointer to any
// float type, or values computed on demand, indexed by a 64-bit offset.
template <typename Table>
void embedding_lookup_cpu(double *out, long long row, const Table &table, long long rows, long long stride, int C) {
    for (int c = 0; c < C; c++) out[c] = row_in_table(row, rows) ? (double)table[row * stride + c] : (double)NAN;
}

// Bag g (C), in double. size (C), or null: the sum of the terms' magnitudes, a scale for rounding errors. argmax (C),
// or null: the position in idx of the maximum. The first of equal values wins, and NaN is larger than any number. It is
// -1 for an empty bag and for a bag with a bad index.
template <typename Table>
void embedding_bag_cpu(double *out, double *size, long long *argmax, const Bags &bags, long long g, const Table &table,
                       long long rows, long long stride, int C) {
    for (int c = 0; c < C; c++) {
        double sum = 0, magnitudes = 0, largest = 0;
        long long used = 0, at = -1;
        bool bad = false;
        for (long long i = bags.begin(g); i < bags.begin(g + 1); i++) {
            const long long row = bags.idx[i];
            if (bags.is_padding(row)) continue;
            if (!row_in_table(row, rows)) {
                bad = true;
                continue;
            }
            const double value = (double)table[row * stride + c], term = value * bags.weight(i);
            if (at < 0 || value > largest || (std::isnan(value) && !std::isnan(largest))) largest = value, at = i;
            sum += term;
            magnitudes += fabs(term);
            used++;
        }
        const double divisor = bags.mode == kBagMean && used > 0 ? (double)used : 1;
        out[c] = bad ? (double)NAN : bags.mode == kBagMax ? largest : sum / divisor;
        if (size) size[c] = magnitudes / divisor;
        if (argmax) argmax[c] = bad ? -1 : at;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// kernels of the gather

// One block per row, one thread per element. Neighbouring threads access neighbouring elements: with 16-bit types, a
// warp's load moves 64 bytes, two sectors of 32. Loses where C is far below the block size, since threads are idle, and
// everywhere because each thread has only one element in flight.
template <typename floatX, typename outX>
__global__ void embedding_lookup_kernel1(outX *out, Indices idx, EmbeddingTable<const floatX> table,
                                         status_word *status, long long N, int C) {
    for (long long i = blockIdx.x; i < N; i += gridDim.x) {
        const long long row = idx[i];
        const bool good = row_in_table(row, table.rows);
        if (!good && threadIdx.x == 0) report_bad_id(status, i);
        for (int c = threadIdx.x; c < C; c += blockDim.x) {
            out[i * C + c] = good ? convert<outX>(table.data[row * table.stride + c]) : quiet_nan<outX>();
        }
    }
}

// Manual unrolling, after LeetCUDA's embedding kernels: each thread copies the neighbouring elements of 16 bytes one by
// one. With 16-bit types that is an eighth of kernel 1's threads, with the same number of loads and stores in total.
// But the lanes of a warp are now 16 bytes apart: each load of 64 bytes touches 512 bytes, 16 sectors, where kernel 1
// touches 2. The L1 serves seven of a thread's eight loads, so DRAM traffic is the same and the L1 is the limit. One
// access of 16 bytes is the remedy (kernel 3), not eight accesses in a row. (LeetCUDA's scalar fp16 kernel launches an
// eighth of the threads and copies an eighth of each row. Its time is not comparable.)
template <typename floatX, typename outX>
__global__ void embedding_lookup_kernel2(outX *out, Indices idx, EmbeddingTable<const floatX> table,
                                         status_word *status, long long N, int C) {
    constexpr int unroll = Packed128<floatX>::size;
    for (long long i = blockIdx.x; i < N; i += gridDim.x) {
        const long long row = idx[i];
        const bool good = row_in_table(row, table.rows);
        if (!good && threadIdx.x == 0) report_bad_id(status, i);
        for (long long first = (long long)threadIdx.x * unroll; first < C; first += (long long)blockDim.x * unroll) {
#pragma unroll
            for (int k = 0; k < unroll; k++) {
                const long long c = first + k;
                if (c >= C) break;
                out[i * C + c] = good ? convert<outX>(table.data[row * table.stride + c]) : quiet_nan<outX>();
            }
        }
    }
}

// One thread per 16 bytes of out, counted over all rows: with 16-bit types an eighth of kernel 1's loads and stores,
// and no idle threads at any C. Cost: each thread waits for its index first and for its 16 bytes afterwards. Needs rows
// that are multiples of 16 bytes.
template <typename floatX, typename outX>
__global__ void embedding_lookup_kernel3(outX *out, Indices idx, EmbeddingTable<const floatX> table,
                                         status_word *status, long long N, int C) {
    typedef Packed128<floatX> x128;
    const long long element = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * x128::size;
    if (element >= N * C) return;
    const long long i = element / C, c = element % C, row = idx[i];
    if (row_in_table(row, table.rows)) {
        store_row(out + element, load128cs(table.data + (row * table.stride + c)));
    } else {
        if (c == 0) report_bad_id(status, i);
        store_nan<outX, x128::size>(out + element);
    }
}

// Each thread copies one vector (`width` elements) of in_flight consecutive rows of out. It loads their indices, then
// their vectors, then stores them: in_flight * 16 bytes are in flight instead of kernel 3's 16, and the latency of an
// index is paid once for in_flight rows. Any C works: the vector is as wide as the alignment allows. Cost: registers.
//
// The loads are unconditional, since the compiler would move a conditional load behind the stores of other rows. Rows
// past the end repeat the last one: the same thread stores the same value again. A bad index reads row 0, and its NaN
// is stored at the end.
//
// A block has blockDim.y groups of rows; several short rows share a warp. blockIdx.y is the slice of the columns.
// Blocks start in order of x, then y, so almost all rows of a slice are copied before the next slice begins. (CUDA does
// not promise the order, and no result depends on it.)
template <typename floatX, typename outX, int width, int in_flight>
__global__ void __launch_bounds__(1024)
    embedding_lookup_kernel4(outX *out, Indices idx, EmbeddingTable<const floatX> table, status_word *status,
                             long long N, unsigned C) {
    const long long first = ((long long)blockIdx.x * blockDim.y + threadIdx.y) * in_flight;
    const unsigned c = (blockIdx.y * blockDim.x + threadIdx.x) * width;
    if (first >= N || c >= C) return;
    auto row_of_out = [&](int k) { return first + k < N ? first + k : N - 1; };

    long long row[in_flight];
#pragma unroll
    for (int k = 0; k < in_flight; k++) row[k] = idx[row_of_out(k)];
    Packed<floatX, width> values[in_flight];
    bool all_good = true;
#pragma unroll
    for (int k = 0; k < in_flight; k++) {
        const bool good = row_in_table(row[k], table.rows);
        all_good = all_good && good;
        values[k] = load_packed<Packed<floatX, width>>(table.data + ((good ? row[k] : 0) * table.stride + c));
    }
#pragma unroll
    for (int k = 0; k < in_flight; k++) store_row(out + (row_of_out(k) * C + c), values[k]);
    if (all_good) return;
#pragma unroll 1
    for (int k = 0; k < in_flight; k++) {
        const long long i = row_of_out(k);
        if (row_in_table(idx[i], table.rows)) continue;
        store_nan<outX, width>(out + (i * C + c));
        if (c == 0) report_bad_id(status, i);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// launchers of the gather

// Every launcher: writes out (N, C) from idx (N) and table (rows, C). Row-major, device memory, aligned to the element
// size. outX: floatX, or float. out must not overlap the inputs.
// status: one status word that the caller set to kStatusOk, or null. A bad index gives a row of NaN, and status holds
// the first position of a bad index. Nothing outside the table is read. block_size: a multiple of 32, at most 1024;
// else cudaErrorInvalidValue. Returns the launch's error, or cudaSuccess without a launch when there is no work.
// Allocates nothing, does not synchronise, keeps a pending CUDA error pending. Versions 2 to 5 need earlier versions
// for some shapes: scripts/extract.py copies them along.

template <typename floatX, typename outX>
using EmbeddingLookup = cudaError_t (*)(outX *out, Indices idx, EmbeddingTable<const floatX> table,
                                        status_word *status, long long N, int C, int block_size, cudaStream_t stream);

template <typename floatX, typename outX>
cudaError_t embedding_lookup1(outX *out, Indices idx, EmbeddingTable<const floatX> table, status_word *status,
                              long long N, int C, int block_size, cudaStream_t stream) {
    if (N == 0 || C == 0) return cudaSuccess;
    if (!valid_block_size(block_size)) return cudaErrorInvalidValue;
    const unsigned grid_size = (unsigned)std::min(N, (long long)INT32_MAX);
    return launch_kernel(embedding_lookup_kernel1<floatX, outX>, grid_size, block_size, 0, stream, out, idx, table,
                         status, N, C);
}

template <typename floatX, typename outX>
cudaError_t embedding_lookup2(outX *out, Indices idx, EmbeddingTable<const floatX> table, status_word *status,
                              long long N, int C, int block_size, cudaStream_t stream) {
    if (N == 0 || C == 0) return cudaSuccess;
    if (!valid_block_size(block_size)) return cudaErrorInvalidValue;
    const unsigned grid_size = (unsigned)std::min(N, (long long)INT32_MAX);
    return launch_kernel(embedding_lookup_kernel2<floatX, outX>, grid_size, block_size, 0, stream, out, idx, table,
                         status, N, C);
}

// Version 1 handles rows that are not multiples of 16 bytes or not aligned to 16.
template <typename floatX, typename outX>
cudaError_t embedding_lookup3(outX *out, Indices idx, EmbeddingTable<const floatX> table, status_word *status,
                              long long N, int C, int block_size, cudaStream_t stream) {
    const int x128_size = Packed128<floatX>::size;
    if (row_width(table, out, C) < x128_size) {
        return embedding_lookup1(out, idx, table, status, N, C, block_size, stream);
    }
    if (N == 0 || C == 0) return cudaSuccess;
    if (!valid_block_size(block_size)) return cudaErrorInvalidValue;
    const unsigned grid_size = grid_blocks(N * (C / x128_size), &block_size);
    return launch_kernel(embedding_lookup_kernel3<floatX, outX>, grid_size, block_size, 0, stream, out, idx, table,
                         status, N, C);
}

// Kernel 4 with the widest vector that the alignment allows, in slices of at most slice_bytes of a table row. The
// vector is 16 bytes of out: with 16 bytes of a 16-bit table and float out, each store instruction of a warp would
// write half of each sector, and the same sectors twice. Version 1 handles empty tables and grids beyond CUDA's limits.
template <typename floatX, typename outX, int width = Packed128<outX>::size>
cudaError_t embedding_lookup_slices(outX *out, Indices idx, EmbeddingTable<const floatX> table, status_word *status,
                                    long long N, int C, int slice_bytes, int block_size, cudaStream_t stream) {
    if constexpr (width > 1) {
        if (row_width(table, out, C) < width) {
            return embedding_lookup_slices<floatX, outX, width / 2>(out, idx, table, status, N, C, slice_bytes,
                                                                    block_size, stream);
        }
    }
    if (N == 0 || C == 0) return cudaSuccess;
    if (!valid_block_size(block_size)) return cudaErrorInvalidValue;
    constexpr int in_flight = 4;
    const TeamGrid shape(N, in_flight, C / width, block_size, slice_bytes / (width * (int)sizeof(floatX)));
    if (!shape.possible || table.rows <= 0) {
        return embedding_lookup1(out, idx, table, status, N, C, block_size, stream);
    }
    return launch_kernel(embedding_lookup_kernel4<floatX, outX, width, in_flight>, shape.grid, shape.block, 0, stream,
                         out, idx, table, status, N, C);
}

// Slices as wide as the block: whole rows in most cases.
template <typename floatX, typename outX>
cudaError_t embedding_lookup4(outX *out, Indices idx, EmbeddingTable<const floatX> table, status_word *status,
                              long long N, int C, int block_size, cudaStream_t stream) {
    return embedding_lookup_slices(out, idx, table, status, N, C, INT32_MAX, block_size, stream);
}

// Slices of 256 bytes. One slice of all distinct rows stays in the L2 while the kernel passes over all indices, so
// DRAM delivers each distinct row once, however often it is looked up. Cost: the indices are read once per slice. No
// gain where rows repeat rarely. (encoder_forward.cu, version 5, has the measurements of the slice width, and a list of
// attempts without gain: bulk copies through shared memory, streaming stores, persistent blocks.)
template <typename floatX, typename outX>
cudaError_t embedding_lookup5(outX *out, Indices idx, EmbeddingTable<const floatX> table, status_word *status,
                              long long N, int C, int block_size, cudaStream_t stream) {
    return embedding_lookup_slices(out, idx, table, status, N, C, 256, block_size, stream);
}

template <typename floatX, typename outX>
constexpr Version<EmbeddingLookup<floatX, outX>> embedding_lookup_versions[] = {
    {1, "scalar", "one block per row, one thread per element", embedding_lookup1<floatX, outX>, 256},
    {2, "unrolled", "each thread copies 16 bytes, element by element", embedding_lookup2<floatX, outX>, 128},
    {3, "x128", "each thread copies 16 bytes with one load and one store", embedding_lookup3<floatX, outX>, 128},
    {4, "rows in flight", "each thread loads four rows at once", embedding_lookup4<floatX, outX>, 128},
    {5, "slices", "one slice of the columns at a time: repeated rows are read from the L2",
     embedding_lookup5<floatX, outX>, 256},
};

// ---------------------------------------------------------------------------------------------------------------------
// kernels of the bags

template <typename floatX, typename outX>
struct BagArguments {
    outX *out;          // (bags, C), or for several tables (batch, tables, C); written
    long long *argmax;  // the same shape: the position in idx of the maximum, -1 if there is none; or null
    status_word *status;
    EmbeddingTable<const floatX> table;
    Bags bags;
    int C;
};

// One bag of the launch, and its table.
template <typename floatX>
struct Bag {
    long long begin, end;  // of its indices
    long long out_row;     // its row of out (bags, C)
    EmbeddingTable<const floatX> table;
};

template <typename floatX, typename outX>
__device__ Bag<floatX> bag_of(const BagArguments<floatX, outX> &args, long long g) {
    const BagTable rows = bag_table(args.bags, g, args.table.rows);
    const EmbeddingTable<const floatX> table = {args.table.data + rows.first * args.table.stride, rows.rows,
                                                args.table.stride};
    return {args.bags.begin(g), args.bags.begin(g + 1), args.bags.value_row(g), table};
}

// The sum or mean of `width` columns of a bag: a float sum in the order of the indices.
template <typename outX, int width>
struct BagSum {
    float sum[width] = {};
    long long used = 0;  // indices that are not padding

    __device__ void count(int indices) { used += indices; }
    template <typename floatX>
    __device__ void add(const Packed<floatX, width> &row, float weight, long long) {
        float values[width];
        to_floats(values, row);
#pragma unroll
        for (int k = 0; k < width; k++) sum[k] += weight * values[k];
    }
    __device__ void add(const BagSum &other) {
#pragma unroll
        for (int k = 0; k < width; k++) sum[k] += other.sum[k];
        used += other.used;
    }
    __device__ void store(outX *out, long long *, BagMode mode) const {
        Packed<float, width> result;
        const float divisor = mode == kBagMean && used > 0 ? (float)used : 1.0f;
#pragma unroll
        for (int k = 0; k < width; k++) result[k] = mode == kBagMean ? sum[k] / divisor : sum[k];
        store_row(out, result);
    }
};

// The maximum of `width` columns of a bag, and its position in idx. The first of equal values wins, and NaN is larger
// than any number.
template <typename outX, int width>
struct BagMax {
    float largest[width] = {};
    long long at[width];
    __device__ BagMax() {
        for (int k = 0; k < width; k++) at[k] = -1;
    }
    __device__ void take(int k, float value, long long i) {
        if (at[k] < 0 || value > largest[k] || (isnan(value) && !isnan(largest[k]))) largest[k] = value, at[k] = i;
    }
    __device__ void count(int) {}
    template <typename floatX>
    __device__ void add(const Packed<floatX, width> &row, float, long long i) {
        float values[width];
        to_floats(values, row);
#pragma unroll
        for (int k = 0; k < width; k++) take(k, values[k], i);
    }
    __device__ void add(const BagMax &later) {
#pragma unroll
        for (int k = 0; k < width; k++) {
            if (later.at[k] >= 0) take(k, later.largest[k], later.at[k]);
        }
    }
    __device__ void store(outX *out, long long *argmax, BagMode) const {
        Packed<float, width> result;
#pragma unroll
        for (int k = 0; k < width; k++) result[k] = largest[k];
        store_row(out, result);
        if (!argmax) return;
        for (int k = 0; k < width; k++) argmax[k] = at[k];
    }
};

template <BagMode mode, typename outX, int width>
using BagResult = std::conditional_t<mode == kBagMax, BagMax<outX, width>, BagSum<outX, width>>;

// Stores the columns c to c + width - 1 of a bag: NaN if the bag has a bad index.
template <int width, typename floatX, typename outX, typename Result>
__device__ void store_bag(const BagArguments<floatX, outX> &args, const Bag<floatX> &bag, unsigned c,
                          const Result &result, bool good) {
    const long long at = bag.out_row * args.C + c;
    if (good) {
        result.store(args.out + at, args.argmax ? args.argmax + at : nullptr, args.bags.mode);
        return;
    }
    store_nan<outX, width>(args.out + at);
    for (int k = 0; args.argmax && k < width; k++) args.argmax[at + k] = -1;
}

// One block per bag, one thread per element, with a loop over the bag's indices. Each iteration waits for an index,
// then for one element of the row.
template <BagMode mode, typename floatX, typename outX>
__global__ void embedding_bag_kernel1(BagArguments<floatX, outX> args) {
    for (long long g = blockIdx.x; g < args.bags.bags; g += gridDim.x) {
        const Bag<floatX> bag = bag_of(args, g);
        for (int c = threadIdx.x; c < args.C; c += blockDim.x) {
            BagResult<mode, outX, 1> result;
            bool good = true;
            for (long long i = bag.begin; i < bag.end; i++) {
                const long long row = args.bags.idx[i];
                if (args.bags.is_padding(row)) continue;
                if (row_in_table(row, bag.table.rows)) {
                    const Packed<floatX, 1> value = {{bag.table.data[row * bag.table.stride + c]}};
                    result.add(value, args.bags.weight(i), i);
                    result.count(1);
                } else {
                    good = false;
                    if (c == 0) report_bad_id(args.status, i);
                }
            }
            store_bag<1>(args, bag, c, result, good);
        }
    }
}

// Adds the rows of the indices first..last-1 of a bag, in the columns c to c + width - 1: loads in_flight indices, then
// their vectors, then adds the vectors in order. The loads are unconditional (see embedding_lookup_kernel4): past the
// end the last index is loaded again, a bad index reads the first row of all tables (its own table may be empty), and
// neither is added. Returns whether all indices are good.
template <int in_flight, int width, typename floatX, typename outX, typename Result>
__device__ bool add_bag_rows(Result &result, const BagArguments<floatX, outX> &args,
                             const EmbeddingTable<const floatX> &table, long long first, long long last, unsigned c) {
    bool all_good = true;
#pragma unroll 1
    for (; first < last; first += in_flight) {
        long long row[in_flight];
        float weight[in_flight];
        bool used[in_flight];
#pragma unroll
        for (int k = 0; k < in_flight; k++) {
            const long long i = first + k < last ? first + k : last - 1;
            row[k] = args.bags.idx[i];
            weight[k] = args.bags.weight(i);
        }
        Packed<floatX, width> values[in_flight];
#pragma unroll
        for (int k = 0; k < in_flight; k++) {
            const bool good = row_in_table(row[k], table.rows), padding = args.bags.is_padding(row[k]);
            used[k] = good && !padding && first + k < last;
            if (!good && !padding && first + k < last) {
                all_good = false;
                if (c == 0) report_bad_id(args.status, first + k);
            }
            const floatX *const address = good ? table.data + row[k] * table.stride : args.table.data;
            values[k] = load_packed<Packed<floatX, width>>(address + c);
        }
#pragma unroll
        for (int k = 0; k < in_flight; k++) {
            if (used[k]) result.add(values[k], weight[k], first + k);
            result.count(used[k]);
        }
    }
    return all_good;
}

// The largest number of threads per block in kernels 2 to 5. Eight rows in flight need more than the 64 registers that
// blocks of 1024 threads leave to each. 512 threads with 128 bytes in flight each keep the memory of a multiprocessor
// busy.
constexpr int kBagThreads = 512;
constexpr long long kAnyLength = INT64_MAX;

// A team is the threads of one threadIdx.y. It computes one bag, each thread `width` columns: 16 bytes if the alignment
// allows. Several bags of short rows share a warp. blockIdx.y is the slice of the columns. Bags of more than `longest`
// indices are left to kernel 5.
//
// Version 2 has in_flight = 1: one load moves as much as eight of kernel 1 (16-bit types), but the thread still waits
// for each row before the next. Version 3 has in_flight = 8: 128 bytes per thread are in flight. Cost: registers, and
// wasted loads where the number of indices is not a multiple of 8. Both lose where one bag is much longer than the
// others: only the threads of one team work on it.
template <BagMode mode, typename floatX, typename outX, int width, int in_flight>
__global__ void __launch_bounds__(kBagThreads)
    embedding_bag_kernel2(BagArguments<floatX, outX> args, long long longest) {
    const long long g = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    const unsigned c = (blockIdx.y * blockDim.x + threadIdx.x) * width;
    if (g >= args.bags.bags || c >= (unsigned)args.C) return;
    const Bag<floatX> bag = bag_of(args, g);
    if (bag.end - bag.begin > longest) return;
    BagResult<mode, outX, width> result;
    const bool good = add_bag_rows<in_flight, width>(result, args, bag.table, bag.begin, bag.end, c);
    store_bag<width>(args, bag, c, result, good);
}

// add_bag_rows() by teams whose lanes share the indices: each lane loads and checks one index and computes its row's
// offset, and the lanes of a team exchange the offsets by shuffles. A team has warp_team_lanes() lanes, in_flight or
// more. All lanes of the warp call, and all make as many passes as the longest bag of the warp needs: the shuffles of
// teams that took different branches would run one after the other.
template <int in_flight, int width, typename floatX, typename outX, typename Result>
__device__ bool add_bag_rows_shared(Result &result, const BagArguments<floatX, outX> &args,
                                    const EmbeddingTable<const floatX> &table, long long first, long long last,
                                    unsigned c) {
    constexpr unsigned whole_warp = 0xffffffffu;
    const int lanes = (int)min(blockDim.x, 32u), lane = (int)threadIdx.x % lanes;
    const unsigned team = lanes == 32 ? whole_warp : ((1u << lanes) - 1) << (threadIdx.y * lanes % 32);
    bool bad = false;
#pragma unroll 1
    for (; __any_sync(whole_warp, first < last); first += lanes) {
        const long long i = first + lane;
        long long offset = -1;  // of the row in the table; -1: no row
        float weight = 0.0f;
        if (i < last) {
            const long long row = args.bags.idx[i];
            weight = args.bags.weight(i);
            if (!args.bags.is_padding(row)) {
                if (row_in_table(row, table.rows)) {
                    offset = row * table.stride;
                } else {
                    bad = true;
                    report_bad_id(args.status, i);
                }
            }
        }
        const unsigned with_row = __ballot_sync(whole_warp, offset >= 0) & team;
        result.count(__popc(with_row));
#pragma unroll 1
        for (int begin = 0; begin < lanes && __any_sync(whole_warp, first + begin < last); begin += in_flight) {
            Packed<floatX, width> values[in_flight];
            float weights[in_flight];
            bool used[in_flight];
#pragma unroll
            for (int k = 0; k < in_flight; k++) {
                const long long at = __shfl_sync(whole_warp, offset, begin + k, lanes);
                weights[k] = args.bags.weights ? __shfl_sync(whole_warp, weight, begin + k, lanes) : 1.0f;
                used[k] = at >= 0;
                values[k] = load_packed<Packed<floatX, width>>((used[k] ? table.data + at : args.table.data) + c);
            }
#pragma unroll
            for (int k = 0; k < in_flight; k++) {
                if (used[k]) result.add(values[k], weights[k], first + begin + k);
            }
        }
    }
    return (__ballot_sync(whole_warp, bad) & team) == 0;
}

// The first column of the thread's vector. Lanes past the last column repeat the last vector: they take part in the
// shuffles, load what another lane loads, and store nothing.
template <int width>
__device__ unsigned column_of_lane(unsigned C, bool *has_column) {
    const unsigned vector = blockIdx.y * blockDim.x + threadIdx.x, vectors = C / width;
    *has_column = vector < vectors;
    return (*has_column ? vector : vectors - 1) * width;
}

// Kernel 2 whose lanes share the indices. In kernel 2 every lane loads and checks every index of its bag, about as many
// instructions as the additions of a row take. Here these instructions are spent once for each index of a team, and one
// load brings as many indices as the team has lanes. With fewer instructions per row, four rows in flight suffice.
// Cost: two or three shuffles per row, idle lanes where the vectors of a row are neither a power of two nor a multiple
// of 32, and waits for the longest bag of each warp.
constexpr int kSharedInFlight = 4;
template <BagMode mode, typename floatX, typename outX, int width>
__global__ void __launch_bounds__(kBagThreads)
    embedding_bag_kernel4(BagArguments<floatX, outX> args, long long longest) {
    const long long g = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    Bag<floatX> bag = bag_of(args, min(g, args.bags.bags - 1));
    const bool wanted = g < args.bags.bags && bag.end - bag.begin <= longest;
    if (!wanted) bag.end = bag.begin;  // the lanes take part in the shuffles
    bool has_column;
    const unsigned c = column_of_lane<width>(args.C, &has_column);
    BagResult<mode, outX, width> result;
    const bool good = add_bag_rows_shared<kSharedInFlight, width>(result, args, bag.table, bag.begin, bag.end, c);
    if (wanted && has_column) store_bag<width>(args, bag, c, result, good);
}

constexpr int kLongBag = 512;  // indices

// One block for each bag of more than kLongBag indices: each team adds an equal part of the indices, and the first team
// adds the parts in order. A bag of 100,000 indices has all the block's loads in flight, where version 4 has those of
// one team. The block finds the long bags among the bags blockIdx.x, blockIdx.x + gridDim.x, ...
template <BagMode mode, typename floatX, typename outX, int width>
__global__ void __launch_bounds__(kBagThreads) embedding_bag_kernel5(BagArguments<floatX, outX> args) {
    typedef BagResult<mode, outX, width> Result;
    extern __shared__ __align__(16) char shared_bytes[];
    Result *const parts = reinterpret_cast<Result *>(shared_bytes);  // (teams, lanes)
    const unsigned teams = blockDim.y, team = threadIdx.y, threads = blockDim.x * teams;
    const unsigned thread = team * blockDim.x + threadIdx.x;
    bool has_column;
    const unsigned c = column_of_lane<width>(args.C, &has_column);
    auto is_long = [&](long long g) {
        return g < args.bags.bags && args.bags.begin(g + 1) - args.bags.begin(g) > kLongBag;
    };
    for (long long first = blockIdx.x; first < args.bags.bags; first += (long long)gridDim.x * threads) {
        if (!__syncthreads_or(is_long(first + (long long)thread * gridDim.x))) continue;
#pragma unroll 1
        for (unsigned t = 0; t < threads; t++) {
            const long long g = first + (long long)t * gridDim.x;
            if (!is_long(g)) continue;
            const Bag<floatX> bag = bag_of(args, g);
            const long long piece = ceil_div(bag.end - bag.begin, (long long)teams);
            const long long begin = min(bag.begin + team * piece, bag.end), end = min(begin + piece, bag.end);
            Result result;
            const bool good = add_bag_rows_shared<kSharedInFlight, width>(result, args, bag.table, begin, end, c);
            if (team > 0) parts[thread] = result;
            const bool bad = __syncthreads_or(!good);
            if (team == 0) {
                for (unsigned next = 1; next < teams; next++) result.add(parts[next * blockDim.x + threadIdx.x]);
                if (has_column) store_bag<width>(args, bag, c, result, !bad);
            }
            __syncthreads();
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// launchers of the bags

// Every launcher: arrays in device memory, row-major, aligned to the element size. outX: floatX, or float. Sums are
// float in an order that depends only on the bag's length and C, so results are deterministic. out is rounded once. An
// empty bag, or a bag of padding only, is 0 in every mode. The mean divides by the number of indices that are not
// padding. A bag with a bad index is NaN, and status holds the first position in idx of a bad index. Nothing outside
// the tables is read. block_size: a multiple of 32, at most 1024; else cudaErrorInvalidValue. Returns the launch's
// error, or cudaSuccess without a launch when there is no work. Allocates nothing, does not synchronise, keeps a
// pending CUDA error pending.
template <typename floatX, typename outX>
using EmbeddingBag = cudaError_t (*)(const BagArguments<floatX, outX> &args, int block_size, cudaStream_t stream);

template <typename floatX, typename outX>
cudaError_t embedding_bag1(const BagArguments<floatX, outX> &args, int block_size, cudaStream_t stream) {
    if (args.bags.bags == 0 || args.C == 0) return cudaSuccess;
    if (!valid_block_size(block_size)) return cudaErrorInvalidValue;
    const unsigned grid_size = (unsigned)std::min(args.bags.bags, (long long)INT32_MAX);
    const auto kernel = args.bags.mode == kBagMax ? embedding_bag_kernel1<kBagMax, floatX, outX>
                                                  : embedding_bag_kernel1<kBagSum, floatX, outX>;
    return launch_kernel(kernel, grid_size, block_size, 0, stream, args);
}

// Kernel 2 with the widest vector that the alignment allows. Version 1 handles empty tables and grids beyond CUDA's
// limits.
template <int in_flight, typename floatX, typename outX, int width = Packed128<floatX>::size>
cudaError_t embedding_bag_vectors(const BagArguments<floatX, outX> &args, long long longest, int block_size,
                                  cudaStream_t stream) {
    if constexpr (width > 1) {
        if (row_width(args.table, args.out, args.C) < width) {
            return embedding_bag_vectors<in_flight, floatX, outX, width / 2>(args, longest, block_size, stream);
        }
    }
    if (args.bags.bags == 0 || args.C == 0) return cudaSuccess;
    if (!valid_block_size(block_size)) return cudaErrorInvalidValue;
    const TeamGrid shape(args.bags.bags, 1, args.C / width, std::min(block_size, kBagThreads));
    if (!shape.possible || args.table.rows <= 0) return embedding_bag1(args, block_size, stream);
    const auto kernel = args.bags.mode == kBagMax ? embedding_bag_kernel2<kBagMax, floatX, outX, width, in_flight>
                                                  : embedding_bag_kernel2<kBagSum, floatX, outX, width, in_flight>;
    return launch_kernel(kernel, shape.grid, shape.block, 0, stream, args, longest);
}

template <typename floatX, typename outX>
cudaError_t embedding_bag2(const BagArguments<floatX, outX> &args, int block_size, cudaStream_t stream) {
    return embedding_bag_vectors<1>(args, kAnyLength, block_size, stream);
}

template <typename floatX, typename outX>
cudaError_t embedding_bag3(const BagArguments<floatX, outX> &args, int block_size, cudaStream_t stream) {
    return embedding_bag_vectors<8>(args, kAnyLength, block_size, stream);
}

// Kernel 4 with the widest vector that the alignment allows, or kernel 2 (eight rows in flight) where a row has one or
// two vectors. Version 1 handles empty tables and grids beyond CUDA's limits.
template <typename floatX, typename outX, int width = Packed128<floatX>::size>
cudaError_t embedding_bag_shared(const BagArguments<floatX, outX> &args, long long longest, int block_size,
                                 cudaStream_t stream) {
    if constexpr (width > 1) {
        if (row_width(args.table, args.out, args.C) < width) {
            return embedding_bag_shared<floatX, outX, width / 2>(args, longest, block_size, stream);
        }
    }
    const int lanes = warp_team_lanes(args.C / width);
    if (lanes < kSharedInFlight) return embedding_bag_vectors<8>(args, longest, block_size, stream);
    if (args.bags.bags == 0) return cudaSuccess;
    if (!valid_block_size(block_size)) return cudaErrorInvalidValue;
    const TeamGrid shape(args.bags.bags, 1, lanes, std::min(block_size, kBagThreads));
    if (!shape.possible || args.table.rows <= 0) return embedding_bag1(args, block_size, stream);
    const auto kernel = args.bags.mode == kBagMax ? embedding_bag_kernel4<kBagMax, floatX, outX, width>
                                                  : embedding_bag_kernel4<kBagSum, floatX, outX, width>;
    return launch_kernel(kernel, shape.grid, shape.block, 0, stream, args, longest);
}

template <typename floatX, typename outX>
cudaError_t embedding_bag4(const BagArguments<floatX, outX> &args, int block_size, cudaStream_t stream) {
    return embedding_bag_shared(args, kAnyLength, block_size, stream);
}

// Kernel 5 with the widest vector that the alignment allows.
template <typename floatX, typename outX, int width = Packed128<floatX>::size>
cudaError_t embedding_bag_long(const BagArguments<floatX, outX> &args, cudaStream_t stream) {
    if constexpr (width > 1) {
        if (row_width(args.table, args.out, args.C) < width) {
            return embedding_bag_long<floatX, outX, width / 2>(args, stream);
        }
    }
    const bool max = args.bags.mode == kBagMax;
    const auto kernel =
        max ? embedding_bag_kernel5<kBagMax, floatX, outX, width> : embedding_bag_kernel5<kBagSum, floatX, outX, width>;
    // One result per thread: at most 48 KB.
    const size_t result_size = max ? sizeof(BagMax<outX, width>) : sizeof(BagSum<outX, width>);
    TeamGrid shape(1, 1, std::max(kSharedInFlight, warp_team_lanes(args.C / width)), kBagThreads);
    shape.grid.x = (unsigned)std::min(args.bags.bags, 1024LL);
    return launch_kernel(kernel, shape.grid, shape.block, kBagThreads * result_size, stream, args);
}

// Version 4 for the bags of at most kLongBag indices, and kernel 5 for the others. Without offsets all bags have the
// same length, and one of the two launches suffices. Cost: with offsets, the second launch and one look at each bag's
// length. Loses, by that, where no bag is long.
template <typename floatX, typename outX>
cudaError_t embedding_bag5(const BagArguments<floatX, outX> &args, int block_size, cudaStream_t stream) {
    const long long most = args.bags.offsets.data ? args.bags.count : args.bags.hotness;  // indices of a bag
    if (most <= kLongBag || args.C == 0 || args.table.rows <= 0 || args.C / kBagThreads > 65535) {
        return embedding_bag4(args, block_size, stream);
    }
    if (args.bags.bags == 0) return cudaSuccess;
    if (!valid_block_size(block_size)) return cudaErrorInvalidValue;
    if (args.bags.offsets.data) {
        const cudaError_t error = embedding_bag_shared(args, kLongBag, block_size, stream);
        if (error != cudaSuccess) return error;
    }
    return embedding_bag_long(args, stream);
}

template <typename floatX, typename outX>
constexpr Version<EmbeddingBag<floatX, outX>> embedding_bag_versions[] = {
    {1, "scalar", "one block per bag, one thread per element", embedding_bag1<floatX, outX>, 128},
    {2, "x128", "one thread per 16 bytes; bags of short rows share a block", embedding_bag2<floatX, outX>, 64},
    {3, "rows in flight", "each thread loads eight rows at once", embedding_bag3<floatX, outX>, 64},
    {4, "shared indices", "each lane loads one index; shuffles distribute it", embedding_bag4<floatX, outX>, 64},
    {5, "long bags", "a whole block works on each long bag", embedding_bag5<floatX, outX>, 64},
};

}  // namespace bookends

// ---------------------------------------------------------------------------------------------------------------------
#ifndef BOOKENDS_NO_MAIN
#include "dev/harness/bags.h"
#include "dev/harness/harness.h"

namespace bookends {

// One table of a table-batched lookup: the values from element `first` on.
template <typename Table>
struct Part {
    Table whole;
    long long first;
    auto operator[](long long i) const { return whole[first + i]; }
};

template <typename floatX, typename outX>
void embedding_lookup_race(Harness &h) {
    const LookupProblem p(h.options);
    const long long stride = table_stride(h.options);
    if (p.least != p.most) refuse(EXIT_BAD_INPUT, "--hotness: a range requires --bag sum, mean or max");
    const long long N = p.batch * p.least;
    const Values<floatX> values = {1, h.options.seed};
    const Indices idx = make_indices(h, h.tokens(N, p.V), N);
    const EmbeddingTable<const floatX> table = {h.input(values, p.V * stride), p.V, stride};
    status_word *status = h.status();
    const int *ids = h.host_tokens.data();
    outX *out = h.output<outX>("out", N, p.C, 0, [=](Expected &row, long long i) {
        embedding_lookup_cpu(row.value.data(), ids[i], values, p.V, stride, p.C);
    });
    h.job.bytes = (double)h.distinct_tokens() * p.C * sizeof(floatX) + (double)N * p.C * sizeof(outX) +
                  (double)N * (idx.wide ? 8 : 4);
    h.race(embedding_lookup_versions<floatX, outX>,
           [=](EmbeddingLookup<floatX, outX> launch, int block_size, cudaStream_t stream) {
               return launch(out, idx, table, status, N, p.C, block_size, stream);
           });
}

template <typename floatX, typename outX>
void embedding_bag_race(Harness &h) {
    const LookupProblem p(h.options);
    const long long stride = table_stride(h.options);
    const Values<floatX> values = {1, h.options.seed};
    const auto inputs = make_bags(h, p);
    const Bags &bags = inputs->host;
    BagArguments<floatX, outX> args = {};
    args.bags = inputs->device;
    args.table = {h.input(values, p.rows() * stride), p.rows(), stride};
    args.C = p.C;
    args.status = h.status();
    args.out = h.output<outX>("out", bags.bags, p.C, 0, [=](Expected &row, long long r) {
        const long long t = r % p.tables, g = t * p.batch + r / p.tables;
        const Part<Values<floatX>> table = {values, t * p.V * stride};
        embedding_bag_cpu(row.value.data(), row.slack.data(), nullptr, inputs->host, g, table, p.V, stride, p.C);
        // A float sum rounds once for each term, and for the mean; a maximum does not round.
        const double roundings = inputs->host.mode == kBagMax ? 0 : inputs->length(g) + 2.0;
        for (int c = 0; c < p.C; c++) row.slack[c] *= ldexp(roundings, -24);
    });
    h.job.bytes = (double)inputs->rows_of_indices(p).size() * p.C * sizeof(floatX) +
                  (double)bags.bags * p.C * sizeof(outX) + inputs->bytes();
    h.job.flops = (bags.weights ? 2.0 : 1.0) * bags.count * p.C;
    h.race(embedding_bag_versions<floatX, outX>,
           [=](EmbeddingBag<floatX, outX> launch, int block_size, cudaStream_t stream) {
               return launch(args, block_size, stream);
           });
}

template <typename floatX>
void embedding_lookup_race(Harness &h) {
    const bool same = h.options.choice("--out-dtype") == "same" && sizeof(floatX) == 2;
    const bool bags = h.options.choice("--bag") != "concat";
    if (bags) return same ? embedding_bag_race<floatX, floatX>(h) : embedding_bag_race<floatX, float>(h);
    if (h.options.flag("--weights")) refuse(EXIT_BAD_INPUT, "--weights: requires --bag sum or mean");
    if (h.options.number("--tables") != 1) refuse(EXIT_BAD_INPUT, "--tables: requires --bag sum, mean or max");
    if (h.options.number("--padding-idx") >= 0) {
        refuse(EXIT_BAD_INPUT, "--padding-idx: requires --bag sum, mean or max");
    }
    return same ? embedding_lookup_race<floatX, floatX>(h) : embedding_lookup_race<floatX, float>(h);
}

}  // namespace bookends

int main(int argc, char **argv) {
    using namespace bookends;
    const bool bags = early_value(argc, argv, "--bag", "concat") != "concat";
    Harness h("embedding_lookup", bags ? "sum, mean or maximum of bags of table rows" : "table rows by index",
              {{'b', "B", 64, 4}, {'t', "T", 1024, 512}, {'c', "C", 768, 768}, {'v', "V", 50257, 50257}},
              {{"--bag", {"concat", "sum", "mean", "max"}, "how the rows of a bag are combined (concat: plain gather)"},
               {"--out-dtype", {"same", "fp32"}, "type of out"},
               {"--index", {"int32", "int64"}, "type of the indices"},
               {"--weights", {}, "one factor per index, for sums and means"}},
              {{"--stride", 0, 0, INT32_MAX, "elements from row to row of the table (0: C)", true},
               {"--padding-idx", -1, -1, INT32_MAX, "an index that bags skip (-1: none)", true},
               {"--tables", 1, 1, 4096, "tables of V rows in one launch, with B*T bags each", true}},
              {{"--hotness", "1", "indices per bag: a number, or a range MIN..MAX (CSR offsets)"}});
    if (bags) {
        return h.main(argc, argv, embedding_bag_versions<float, float>, embedding_lookup_race<float>,
                      embedding_lookup_race<half>, embedding_lookup_race<__nv_bfloat16>);
    }
    return h.main(argc, argv, embedding_lookup_versions<float, float>, embedding_lookup_race<float>,
                  embedding_lookup_race<half>, embedding_lookup_race<__nv_bfloat16>);
}
#endif
