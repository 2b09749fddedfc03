/*
Token + position embedding, the first layer of a GPT:   out[b,t,:] = wte[inp[b,t],:] + wpe[t,:]

There is one addition per element, so memory bandwidth is the limit. The fewest bytes: each distinct row of wte that inp
names once, wpe once, inp once, out once. Models with rotary positions (Llama, Gemma, Qwen) have no wpe: wpe is then
null, and out holds rows of wte.

version 1  per token: one thread per position, which loops over C
version 2  parallel: one thread per element; neighbouring threads access neighbouring addresses
version 3  x128: one thread per 16 bytes; one load instruction instead of version 2's eight
version 4  rows in flight: each thread keeps 16 bytes of wpe[t] in registers and loads four rows of wte at once
version 5  slices: kernel 4 for one slice of the columns after the other, so that repeated rows are read from the L2

Measured on an NVIDIA H200, B64 T1024 C768 V50257 bf16 uniform, cold:
  1  per token          0.9078 ms    4.1% of copy
  2  parallel           0.2551 ms   14.6% of copy   3.56x the version before
  3  x128               0.0716 ms   52.1% of copy   3.56x the version before
  4  rows in flight     0.0478 ms   78.0% of copy   1.50x the version before
  5  slices             0.0460 ms   81.1% of copy   1.04x the version before

Compile:  nvcc -O3 -arch=native encoder_forward.cu -o encoder_forward
Run:      ./encoder_forward           the default: deterministic, best over the measured shapes
          ./encoder_forward 3         version 3 at every block size
          ./encoder_forward all -b 64 --tokens zipf
          ./encoder_forward --no-positions
          ./encoder_forward --help
*/
#include "common.h"

namespace bookends {

// ---------------------------------------------------------------------------------------------------------------------
// CPU reference

// Rows first..last-1 of out, as a matrix (B*T, C), in double. wte (V, C) and wpe (T, C): pointers to any float type, or
// values computed on demand, indexed by an offset. Without `positions`, wpe is not read. A position with an id outside
// 0..V-1 gives a row of NaN.
template <typename Table>
void encoder_forward_cpu(double *out, const int *inp, const Table &wte, const Table &wpe, bool positions,
                         long long first, long long last, int T, int C, int V) {
    for (long long bt = first; bt < last; bt++) {
        const long long t = bt % T, id = inp[bt];
        for (long long c = 0; c < C; c++) {
            const double position = positions ? (double)wpe[t * C + c] : 0;
            out[(bt - first) * C + c] = id_in_range(inp[bt], V) ? (double)wte[id * C + c] + position : (double)NAN;
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// kernels

// An element of wpe. Without wpe: -0, because x + -0 is x for every x, including 0 and -0.
template <typename floatX>
__device__ float position_value(const floatX *wpe, long long i) {
    return wpe ? (float)wpe[i] : -0.0f;
}

// The textbook loop: one thread per position. The 32 threads of a warp read 32 different rows, so each load instruction
// touches 32 sectors (32 bytes each) and uses one element of each.
template <typename floatX>
__global__ void encoder_forward_kernel1(floatX *out, const int *inp, const floatX *wte, const floatX *wpe,
                                        status_word *status, long long N, int T, int C, int V) {
    const long long bt = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (bt >= N) return;
    const long long t = bt % T, id = inp[bt];
    const bool good = id_in_range(inp[bt], V);
    if (!good) report_bad_id(status, bt);
    for (int c = 0; c < C; c++) {
        out[bt * C + c] =
            good ? (floatX)((float)wte[id * C + c] + position_value(wpe, t * C + c)) : quiet_nan<floatX>();
    }
}

// One thread per element. It moves the same bytes as kernel 1, but accesses are coalesced: a warp's load of 16-bit
// elements touches 2 sectors. The limit is now the number of instructions: two divisions, three loads and a store for
// each element of out.
template <typename floatX>
__global__ void encoder_forward_kernel2(floatX *out, const int *inp, const floatX *wte, const floatX *wpe,
                                        status_word *status, long long N, int T, int C, int V) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= N * C) return;
    const long long bt = i / C, c = i % C, t = bt % T, id = inp[bt];
    const bool good = id_in_range(inp[bt], V);
    if (!good && c == 0) report_bad_id(status, bt);
    out[i] = good ? (floatX)((float)wte[id * C + c] + position_value(wpe, t * C + c)) : quiet_nan<floatX>();
}

// One thread per 16 bytes: with 16-bit types an eighth of kernel 2's threads, loads, stores and divisions. The limit is
// now latency: each thread waits for its id, then for one row, and exits. 16 bytes in flight per thread do not keep the
// memory busy. Requires C divisible by the vector and aligned tensors; otherwise the launcher uses version 2.
template <typename floatX>
__global__ void encoder_forward_kernel3(floatX *out, const int *inp, const floatX *wte, const floatX *wpe,
                                        status_word *status, long long N, int T, int C, int V) {
    typedef Packed128<floatX> x128;
    const long long i = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * x128::size;
    if (i >= N * C) return;
    const long long bt = i / C, c = i % C, t = bt % T, id = inp[bt];
    const bool good = id_in_range(inp[bt], V);
    if (!good && c == 0) report_bad_id(status, bt);
    x128 packed_out;
    if (good) {
        packed_out = load128cs(wte + id * C + c);
        if (wpe) {
            const x128 position = load128cs(wpe + t * C + c);
#pragma unroll
            for (int k = 0; k < x128::size; k++) packed_out[k] = (floatX)((float)packed_out[k] + (float)position[k]);
        }
    } else {
        for (int k = 0; k < x128::size; k++) packed_out[k] = quiet_nan<floatX>();
    }
    store128(out + i, packed_out);
}

// Each thread handles one vector of the columns in `rows` positions. These have the same t and neighbouring b, so that
// the vector of wpe is loaded once and kept in registers; if `rows` does not divide B, they have neighbouring t
// (along_t). A thread first loads all its ids, then its vectors of all rows: rows * 16 bytes are in flight per thread
// instead of 16, and it waits for ids once. Positions past the end repeat the last one: the same thread then stores the
// same value twice.
//
// Conditions for this speed (H200):
// - The loads are plain and unconditional. A bad id loads row 0, and the NaN row is written afterwards. With __ldg, or
//   inside an `if (good)`, the compiler saves registers by moving loads behind the stores of other rows, and only one
//   row is in flight.
// - No division: block and grid have one dimension each for columns, batch and t. In a cold run the machine code comes
//   from memory too, and at small sizes each 128 bytes of code in front of the first load delay the whole kernel.
// - The stores are plain. Streaming stores (st.cs) are no faster, and the next layer no longer finds `out` in the L2.
//
// blockIdx.z is the slice of the columns. Blocks start in order of x, then y, then z, so that all positions of one
// slice are done before the next slice begins. Unless along_t, `rows` divides B. positions: whether wpe exists.
template <typename floatX, int width, int rows, bool along_t, bool positions>
__global__ void __launch_bounds__(1024)
    encoder_forward_kernel4(floatX *out, const int *inp, const floatX *wte, const floatX *wpe, status_word *status,
                            unsigned B, unsigned T, unsigned C, int V) {
    typedef Packed<floatX, width> vec;
    const unsigned t0 = (blockIdx.x * blockDim.z + threadIdx.z) * (along_t ? rows : 1);
    const unsigned b0 = (blockIdx.y * blockDim.y + threadIdx.y) * (along_t ? 1 : rows);
    const unsigned c = (blockIdx.z * blockDim.x + threadIdx.x) * width;
    if (t0 >= T || b0 >= B || c >= C) return;
    auto t_of = [&](int k) { return along_t ? min(t0 + k, T - 1) : t0; };
    auto bt_of = [&](int k) { return (along_t ? b0 : b0 + k) * T + t_of(k); };

    int id[rows];
#pragma unroll
    for (int k = 0; k < rows; k++) id[k] = inp[bt_of(k)];
    constexpr int distinct_t = along_t ? rows : 1;
    vec position[distinct_t], token[rows];
    if constexpr (positions) {
#pragma unroll
        for (int k = 0; k < distinct_t; k++) position[k] = load_packed<vec>(wpe + ((size_t)t_of(k) * C + c));
    }
    bool all_good = true;
#pragma unroll
    for (int k = 0; k < rows; k++) {
        const bool good = id_in_range(id[k], V);
        all_good = all_good && good;
        token[k] = load_packed<vec>(wte + ((size_t)(good ? (unsigned)id[k] : 0) * C + c));
    }
#pragma unroll
    for (int k = 0; k < rows; k++) {
        if constexpr (positions) token[k] = add_packed(token[k], position[k % distinct_t]);
        store_packed(out + ((size_t)bt_of(k) * C + c), token[k]);
    }
    if (all_good) return;
#pragma unroll 1
    for (int k = 0; k < rows; k++) {
        const unsigned bt = bt_of(k);
        if (id_in_range(inp[bt], V)) continue;
        for (int j = 0; j < width; j++) out[(size_t)bt * C + c + j] = quiet_nan<floatX>();
        if (c == 0) report_bad_id(status, bt);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// launchers

// Every launcher:  out (B, T, C), overwritten; inp (B, T) int32; wte (V, C); wpe (T, C), or null: out holds rows of
// wte. Row-major, device memory, aligned to their element only. status: a status word that the caller set to kStatusOk,
// or null. out must not overlap the inputs. A position with an id outside 0..V-1 gives a row of NaN, and *status
// becomes the first such position; nothing outside the tables is read. block_size: a multiple of 32 up to 1024,
// otherwise cudaErrorInvalidValue. Nothing is allocated or synchronised. Returns the error of this launch; without work
// it returns cudaSuccess and launches nothing. A pending CUDA error stays pending. Each of versions 3 to 5 falls back
// on the version before for shapes that it does not support, so copy these too.

template <typename floatX>
using EncoderForward = cudaError_t (*)(floatX *out, const int *inp, const floatX *wte, const floatX *wpe,
                                       status_word *status, int B, int T, int C, int V, int block_size,
                                       cudaStream_t stream);

template <typename floatX>
cudaError_t encoder_forward1(floatX *out, const int *inp, const floatX *wte, const floatX *wpe, status_word *status,
                             int B, int T, int C, int V, int block_size, cudaStream_t stream) {
    const long long N = (long long)B * T;
    if (N * C == 0) return cudaSuccess;
    if (!valid_block_size(block_size)) return cudaErrorInvalidValue;
    const unsigned grid_size = grid_blocks(N, &block_size);
    return launch_kernel(encoder_forward_kernel1<floatX>, grid_size, block_size, 0, stream, out, inp, wte, wpe, status,
                         N, T, C, V);
}

template <typename floatX>
cudaError_t encoder_forward2(floatX *out, const int *inp, const floatX *wte, const floatX *wpe, status_word *status,
                             int B, int T, int C, int V, int block_size, cudaStream_t stream) {
    const long long N = (long long)B * T;
    if (N * C == 0) return cudaSuccess;
    if (!valid_block_size(block_size)) return cudaErrorInvalidValue;
    const unsigned grid_size = grid_blocks(N * C, &block_size);
    return launch_kernel(encoder_forward_kernel2<floatX>, grid_size, block_size, 0, stream, out, inp, wte, wpe, status,
                         N, T, C, V);
}

// Falls back on version 2 if rows are not aligned to 16 bytes.
template <typename floatX>
cudaError_t encoder_forward3(floatX *out, const int *inp, const floatX *wte, const floatX *wpe, status_word *status,
                             int B, int T, int C, int V, int block_size, cudaStream_t stream) {
    const int x128_size = Packed128<floatX>::size;
    if (vector_width(x128_size, C, out, wte, wpe) < x128_size) {
        return encoder_forward2(out, inp, wte, wpe, status, B, T, C, V, block_size, stream);
    }
    const long long N = (long long)B * T;
    if (N * C == 0) return cudaSuccess;
    if (!valid_block_size(block_size)) return cudaErrorInvalidValue;
    const unsigned grid_size = grid_blocks(N * C / x128_size, &block_size);
    return launch_kernel(encoder_forward_kernel3<floatX>, grid_size, block_size, 0, stream, out, inp, wte, wpe, status,
                         N, T, C, V);
}

// Kernel 4 in slices of at most slice_bytes, with the widest vector that the rows' alignment allows. Falls back on
// version 3 for more than 2^32-1 positions, for shapes beyond the limits of a grid, and without any row to read.
template <typename floatX, int width = Packed128<floatX>::size>
cudaError_t encoder_forward_slices(floatX *out, const int *inp, const floatX *wte, const floatX *wpe,
                                   status_word *status, int B, int T, int C, int V, int slice_bytes, int block_size,
                                   cudaStream_t stream) {
    if constexpr (width > 1) {
        if (vector_width(width, C, out, wte, wpe) < width) {
            return encoder_forward_slices<floatX, width / 2>(out, inp, wte, wpe, status, B, T, C, V, slice_bytes,
                                                             block_size, stream);
        }
    }
    const long long N = (long long)B * T;
    if (N * C == 0) return cudaSuccess;
    if (!valid_block_size(block_size)) return cudaErrorInvalidValue;
    const int rows = 4;
    const bool along_t = B % rows != 0;
    const int vectors = C / width, units_b = along_t ? B : B / rows, units_t = along_t ? ceil_div(T, rows) : T;
    // Every slice but the last is a multiple of 64 bytes. If two slices shared a 32-byte sector of out, the L2 would
    // have to read the half-written sector back from DRAM. The rest of the block is batch first, then t, so that
    // neighbouring threads read the same wpe.
    const int lanes = std::min({slice_bytes / (width * (int)sizeof(floatX)), block_size, vectors});
    const int block_b = std::min(units_b, block_size / lanes), block_t = std::min(64, block_size / lanes / block_b);
    const dim3 block(lanes, block_b, block_t);
    const dim3 grid(ceil_div(units_t, block_t), ceil_div(units_b, block_b), ceil_div(vectors, lanes));
    const floatX *const rows_of_wte = V > 0 ? wte : wpe;  // row 0 is read for a bad id: it has to exist
    if (N > UINT32_MAX || grid.y > 65535 || grid.z > 65535 || !rows_of_wte) {
        return encoder_forward3(out, inp, wte, wpe, status, B, T, C, V, block_size, stream);
    }
    const auto kernel = wpe       ? along_t ? encoder_forward_kernel4<floatX, width, rows, true, true>
                                            : encoder_forward_kernel4<floatX, width, rows, false, true>
                              : along_t ? encoder_forward_kernel4<floatX, width, rows, true, false>
                                  : encoder_forward_kernel4<floatX, width, rows, false, false>;
    return launch_kernel(kernel, grid, block, 0, stream, out, inp, rows_of_wte, wpe, status, B, T, C, V);
}

// One slice has the width of a block: whole rows if a block covers a row.
template <typename floatX>
cudaError_t encoder_forward4(floatX *out, const int *inp, const floatX *wte, const floatX *wpe, status_word *status,
                             int B, int T, int C, int V, int block_size, cudaStream_t stream) {
    return encoder_forward_slices(out, inp, wte, wpe, status, B, T, C, V, INT32_MAX, block_size, stream);
}

// Slices of 256 bytes. Of B*T = 65536 uniform ids, 37 to 51 thousand are distinct (V = 50257 to 128256). One slice of
// their rows is 9 to 13 MB and stays in the L2 until all positions are done; their whole rows are 56 to 420 MB. So each
// row is read from DRAM once, however often its id occurs. Nsight Compute, for this access pattern on an H200: DRAM
// reads 58 MB instead of 78 at C = 768, and 459 instead of 560 at C = 4096: the fewest bytes possible. No gain where
// all rows fit into the L2 (B 8), and 4% slower than version 4 at B 64, C 769. Slices of 128 bytes take more DRAM time
// than they save.
//
// The remaining limit: DRAM moves the fewest bytes, but at less than the rate of a copy. Scattered pieces of 256 bytes
// make it switch between reads and writes, and between pages, more often than the two streams of a copy do. Tried
// without gain: two and eight rows, other orders of b and t, streaming stores, prefetch hints, fewer threads, a
// persistent grid, one piece of the row for each multiprocessor, slices rotated by the id, bulk copies through shared
// memory. Holding wte in the L2 by evict_last is faster, but its effect outlives the launch: the next kernel has less
// cache, and cold measurements are no longer cold.
template <typename floatX>
cudaError_t encoder_forward5(floatX *out, const int *inp, const floatX *wte, const floatX *wpe, status_word *status,
                             int B, int T, int C, int V, int block_size, cudaStream_t stream) {
    return encoder_forward_slices(out, inp, wte, wpe, status, B, T, C, V, 256, block_size, stream);
}

template <typename floatX>
constexpr Version<EncoderForward<floatX>> encoder_forward_versions[] = {
    {1, "per token", "one thread per position, which loops over C", encoder_forward1<floatX>, 64},
    {2, "parallel", "one thread per element", encoder_forward2<floatX>, 256},
    {3, "x128", "one thread per 16 bytes", encoder_forward3<floatX>, 128},
    {4, "rows in flight", "wpe in registers, four rows of wte loaded at once", encoder_forward4<floatX>, 128},
    {5, "slices", "one slice of the columns after the other: repeated rows are read from the L2",
     encoder_forward5<floatX>, 256},
};

}  // namespace bookends

// ---------------------------------------------------------------------------------------------------------------------
#ifndef BOOKENDS_NO_MAIN
#include "dev/harness/harness.h"

namespace bookends {

template <typename floatX>
void encoder_forward_race(Harness &h) {
    const int B = h.options.dim('b'), T = h.options.dim('t'), C = h.options.dim('c'), V = h.options.dim('v');
    const long long N = (long long)B * T;
    const int *inp = h.tokens(N, V);
    const bool positions = !h.options.flag("--no-positions");
    const Values<floatX> wte_values = {1, h.options.seed}, wpe_values = {2, h.options.seed};
    const floatX *wte = h.input(wte_values, (long long)V * C);
    const floatX *wpe = positions ? h.input(wpe_values, (long long)T * C) : nullptr;
    status_word *status = h.status();
    const int *ids = h.host_tokens.data();
    floatX *out = h.output<floatX>("out", N, C, kEncoderForwardUlps, [=](Expected &row, long long bt) {
        encoder_forward_cpu(row.value.data(), ids, wte_values, wpe_values, positions, bt, bt + 1, T, C, V);
    });
    const double rows = (double)h.distinct_tokens() + (positions ? T : 0) + N;
    h.job.bytes = rows * C * sizeof(floatX) + (double)N * sizeof(int);
    h.job.flops = positions ? (double)N * C : 0;
    h.race(encoder_forward_versions<floatX>, [=](EncoderForward<floatX> launch, int block_size, cudaStream_t stream) {
        return launch(out, inp, wte, wpe, status, B, T, C, V, block_size, stream);
    });
}

}  // namespace bookends

int main(int argc, char **argv) {
    using namespace bookends;
    Harness h("encoder_forward", "token + position embedding",
              {{'b', "B", 8, 4}, {'t', "T", 1024, 512}, {'c', "C", 768, 768}, {'v', "V", 50257, 50257}},
              {{"--no-positions", {}, "no wpe: out holds rows of wte"}});
    return h.main(argc, argv, encoder_forward_versions<float>, encoder_forward_race<float>, encoder_forward_race<half>,
                  encoder_forward_race<__nv_bfloat16>);
}
#endif
