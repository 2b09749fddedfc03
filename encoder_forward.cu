/*
Token + position embedding, the first layer of a GPT:   out[b,t,:] = wte[inp[b,t],:] + wpe[t,:]

There is one addition for each element; all else is the movement of rows. The fewest bytes: each row of wte with a
position once, wpe once, inp once, out once. Models with rotary positions (Llama, Gemma, Qwen) have no wpe: it is null
then, and out holds rows of wte.

version 1  per token: a thread for each position loops over C
version 2  parallel: a thread for each element, so neighbouring threads read neighbouring addresses
version 3  x128: 16 bytes for each thread, one load instruction where version 2 needs eight
version 4  rows in flight: each thread keeps 16 bytes of wpe[t] and loads four rows of the batch at once
version 5  slices: all positions for one slice of the columns, then the next: repeated ids are found in the L2

Measured on an NVIDIA H200, B64 T1024 C768 V50257 bf16 uniform, cold:
  1  per token          0.9209 ms    4.1% of copy
  2  parallel           0.2596 ms   14.5% of copy   3.55x the version before
  3  x128               0.0676 ms   55.5% of copy   3.84x the version before
  4  rows in flight     0.0475 ms   79.1% of copy   1.42x the version before
  5  slices             0.0466 ms   80.6% of copy   1.02x the version before

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

// Rows first..last-1 of out, as (B*T, C), in double. wte (V, C) and wpe (T, C) are anything that an offset indexes: a
// pointer to any float type, or values made on demand; without `positions` wpe is not read. The row of an id outside
// 0..V-1 is NaN.
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

// An element of wpe; -0 without wpe: x + -0 is x for every x, 0 and -0 included.
template <typename floatX>
__device__ float position_value(const floatX *wpe, long long i) {
    return wpe ? (float)wpe[i] : -0.0f;
}

// The textbook loop: a thread for each position. The 32 threads of a warp read 32 rows, so each load instruction
// touches 32 sectors of memory, and uses 2 bytes of each (in 16-bit types).
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

// A thread for each element: a warp reads neighbouring addresses, so each sector is used whole. 3.5 times as fast as
// version 1 (H200, bf16, B 64, C 768, uniform ids). The cost: two divisions, three loads and a store for each element.
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

// 16 bytes for each thread: an eighth of the threads and of the instructions (in 16-bit types). 3.8 times as fast as
// version 2 (same shape). Each thread waits for its id, then for one row, and exits: 16 bytes in flight for each thread
// are too few to keep the memory busy. No gain where rows are not aligned to 16 bytes (C 769): that is version 2.
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

// Each thread has one vector of the columns in `rows` positions: neighbours in the batch with the same t, so that the
// vector of wpe is read once and kept in registers; or, where `rows` does not divide B, neighbours in t (along_t). The
// ids are loaded together, then the rows: rows x 16 bytes in flight for each thread, and one wait for ids. 1.4 times as
// fast as version 3 (H200, bf16, B 64, C 768, uniform ids), and faster at all measured shapes. Positions past the end
// repeat the last one: the same thread stores the same value twice.
//
// What the compiler and the memory need for that (H200):
// - The loads are plain, and none depends on a condition: a bad id reads row 0 and is corrected later. With __ldg, or
//   inside an `if (good)`, the compiler moves loads below the stores of other rows to save registers, and one row is in
//   flight.
// - No division: block and grid have one dimension each for columns, batch and t. The machine code of a kernel is cold
//   too: each 128 bytes of it fetched before the first load delay everything at small sizes.
// - The stores are plain. Streaming stores (st.cs) gain nothing, and the next layer no longer finds out in the L2.
//
// blockIdx.z is the slice of the columns. Blocks start in order of x, then y, then z, so all positions are done for one
// slice before the next begins. Unless along_t, `rows` divides B. positions: whether there is a wpe.
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

// Every launcher:  out (B, T, C), written; inp (B, T) int32; wte (V, C); wpe (T, C), or null: nothing is added to the
// rows of wte. Row-major, device memory, aligned to their element only. out must not overlap the inputs. status: a
// status word that the caller set to kStatusOk, or null. The row of an id outside 0..V-1 becomes NaN, *status is
// lowered to the first such position, and nothing outside the tables is read. block_size: a multiple of 32 up to 1024,
// else cudaErrorInvalidValue. Nothing is allocated or synchronised. Returns the error of the launch, and cudaSuccess
// without a launch when there is no work. A pending CUDA error stays pending. Versions 3 to 5 fall back on the version
// before for shapes that they do not cover: copy that along.

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

// Version 2 where rows are not aligned to 16 bytes.
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

// Kernel 4 in slices of at most slice_bytes, with the widest vector that the alignment of the rows allows. Version 3
// for more than 2^32 - 1 positions, and beyond the limits of a grid.
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
    // A slice is a power of two of vectors, the last may be shorter: two slices that share a 32-byte sector of out
    // would make the L2 read it back from DRAM before it is complete. The batch comes before t in a block, so that
    // neighbours read the same wpe.
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

// One slice as wide as the block: whole rows, where the block covers one.
template <typename floatX>
cudaError_t encoder_forward4(floatX *out, const int *inp, const floatX *wte, const floatX *wpe, status_word *status,
                             int B, int T, int C, int V, int block_size, cudaStream_t stream) {
    return encoder_forward_slices(out, inp, wte, wpe, status, B, T, C, V, INT32_MAX, block_size, stream);
}

// Kernel 4 in slices of 256 bytes. Of B*T = 65536 uniform ids, 37 to 51 thousand are distinct. One slice of their rows
// is 9 to 13 MB and stays in the L2 while all positions pass; whole rows are 56 to 420 MB. So a row comes from DRAM
// once, however often its id occurs. Nsight Compute, with this access pattern on an H200: 58 MB read in place of 78 at
// C = 768, and 459 in place of 560 at C = 4096, the fewest possible. Slices of 128 bytes cost more in DRAM than they
// save.
//
// The gain over version 4 is small: 0 to 4% over the measured shapes (H200), none at B 8. At C = 769 it is 4% slower:
// rows of odd length are read element by element, and the library's default is version 4 there.
//
// What is left: DRAM moves the fewest bytes, but slower than in a copy. Pieces of 256 bytes from everywhere switch it
// between reads and writes, and between pages, more often than two streams do. Tried without gain: two and eight rows,
// other orders of b and t, streaming stores, prefetch hints, fewer threads, a persistent grid, one piece of the row for
// each multiprocessor, slices rotated by the id, bulk copies through shared memory. Keeping wte in the L2 by evict_last
// gains, but persists after the launch: it takes the cache from the next kernel, and makes cold measurements look warm.
template <typename floatX>
cudaError_t encoder_forward5(floatX *out, const int *inp, const floatX *wte, const floatX *wpe, status_word *status,
                             int B, int T, int C, int V, int block_size, cudaStream_t stream) {
    return encoder_forward_slices(out, inp, wte, wpe, status, B, T, C, V, 256, block_size, stream);
}

template <typename floatX>
constexpr Version<EncoderForward<floatX>> encoder_forward_versions[] = {
    {1, "per token", "a thread for each position", encoder_forward1<floatX>, 64},
    {2, "parallel", "a thread for each element", encoder_forward2<floatX>, 256},
    {3, "x128", "16 bytes for each thread", encoder_forward3<floatX>, 128},
    {4, "rows in flight", "wpe in registers, four rows of the batch at once", encoder_forward4<floatX>, 128},
    {5, "slices", "a slice of the columns at a time, so that repeated ids meet the L2", encoder_forward5<floatX>, 256},
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
    floatX *out = h.output<floatX>("out", N, C, 1, [=](Expected &row, long long bt) {
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
              {{"--no-positions", {}, "no table of positions: out holds rows of wte"}});
    return h.main(argc, argv, encoder_forward_versions<float>, encoder_forward_race<float>, encoder_forward_race<half>,
                  encoder_forward_race<__nv_bfloat16>);
}
#endif
