/*
Token + position embedding, the first layer of a GPT:   out[b,t,:] = wte[inp[b,t],:] + wpe[t,:]

The arithmetic is one addition an element; the rest is moving rows. The fewest bytes: each distinct row of wte that
inp asks for once, wpe once, inp once, out once.

version 1  per token: a thread a position, which loops over C
version 2  parallel: a thread an element, so neighbouring threads touch neighbouring addresses
version 3  x128: a thread 16 bytes, one load instruction where version 2 needs eight
version 4  rows in flight: a thread keeps its 16 bytes of wpe[t] and reads four rows of the batch at once
version 5  slices: version 4, all positions for one slice of the columns, then the next: a repeated id finds its row in
L2

Compile:  nvcc -O3 -arch=native encoder_forward.cu -o encoder_forward
Run:      ./encoder_forward           the fastest version
          ./encoder_forward 3         version 3 at every block size
          ./encoder_forward all -b 64 --tokens zipf
          ./encoder_forward --help
*/
#include "common.h"

// ---------------------------------------------------------------------------------------------------------------------
// CPU reference

// Rows first..last-1 of out, seen as (B*T, C), in double. wte (V, C) and wpe (T, C) are anything that an offset
// indexes: a pointer to any float type, or values made on demand. A position whose id is outside 0..V-1 becomes NaN.
template <typename Table>
void encoder_forward_cpu(double *out, const int *inp, const Table &wte, const Table &wpe, long long first,
                         long long last, int T, int C, int V) {
    for (long long bt = first; bt < last; bt++) {
        const long long t = bt % T, id = inp[bt];
        for (long long c = 0; c < C; c++) {
            out[(bt - first) * C + c] =
                id_in_range(inp[bt], V) ? (double)wte[id * C + c] + (double)wpe[t * C + c] : (double)NAN;
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// kernels

// The textbook loop. A warp's 32 threads stand 32 rows apart: each load instruction touches 32 sectors of memory for
// 2 bytes out of each.
template <typename floatX>
__global__ void encoder_forward_kernel1(floatX *out, const int *inp, const floatX *wte, const floatX *wpe,
                                        status_word *status, long long N, int T, int C, int V) {
    const long long bt = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (bt >= N) return;
    const long long t = bt % T, id = inp[bt];
    const bool good = id_in_range(inp[bt], V);
    if (!good) report_bad_id(status, bt);
    for (int c = 0; c < C; c++) {
        out[bt * C + c] = good ? (floatX)((float)wte[id * C + c] + (float)wpe[t * C + c]) : quiet_nan<floatX>();
    }
}

// A thread an element: the same bytes, now coalesced. What is left is instructions: two divisions, three loads and a
// store for every 2 bytes of result.
template <typename floatX>
__global__ void encoder_forward_kernel2(floatX *out, const int *inp, const floatX *wte, const floatX *wpe,
                                        status_word *status, long long N, int T, int C, int V) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= N * C) return;
    const long long bt = i / C, c = i % C, t = bt % T, id = inp[bt];
    const bool good = id_in_range(inp[bt], V);
    if (!good && c == 0) report_bad_id(status, bt);
    out[i] = good ? (floatX)((float)wte[id * C + c] + (float)wpe[t * C + c]) : quiet_nan<floatX>();
}

// A thread 16 bytes: an eighth of the threads and of the instructions (in 16-bit types). Each thread still waits for
// its id, then for one row, and is gone: 16 bytes in flight a thread are too few to keep the memory busy.
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
        const x128 token = load128cs(wte + id * C + c), position = load128cs(wpe + t * C + c);
#pragma unroll
        for (int k = 0; k < x128::size; k++) packed_out[k] = (floatX)((float)token[k] + (float)position[k]);
    } else {
        for (int k = 0; k < x128::size; k++) packed_out[k] = quiet_nan<floatX>();
    }
    store128(out + i, packed_out);
}

// A thread owns (t, one vector of the columns, `rows` entries of the batch). Its vector of wpe is read once and stays
// in registers; the ids, then the rows, are loaded together, so that `rows` x 16 bytes a thread are on their way
// instead of 16, and the wait for an id is paid once for all of them. out is written with a streaming hint: nobody
// reads it here, and it would push rows of wte out of the L2.
//
// The columns are cut into slices of `slice` vectors. Slices are the slowest index of the grid: blocks start in order,
// so all positions are done for one slice before the next one begins. Version 4 has one slice, the whole row.
//
// width is the elements a vector: 16 bytes where the rows are aligned for it, fewer where C or a pointer is odd.
template <typename floatX, int width, int rows>
__global__ void __launch_bounds__(1024)
    encoder_forward_kernel4(floatX *out, const int *inp, const floatX *wte, const floatX *wpe, status_word *status,
                            int B, int T, int C, int V, unsigned slice) {
    typedef Packed<floatX, width> vec;
    const unsigned groups = ceil_div((unsigned)B, (unsigned)rows);
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const unsigned column = i % slice;
    i /= slice;
    const unsigned group = (unsigned)i % groups, t = (unsigned)i / groups % T, which = (unsigned)i / groups / T;
    const long long c = ((long long)which * slice + column) * width;
    if (c >= C) return;

    int id[rows];
#pragma unroll
    for (int k = 0; k < rows; k++) {
        const int b = group * rows + k;
        id[k] = b < B ? __ldg(inp + (long long)b * T + t) : -1;
    }
    const vec position = load_packed_nc<vec>(wpe + (long long)t * C + c);
    vec token[rows];
#pragma unroll
    for (int k = 0; k < rows; k++) {
        if (id_in_range(id[k], V)) token[k] = load_packed_nc<vec>(wte + (long long)id[k] * C + c);
    }
#pragma unroll
    for (int k = 0; k < rows; k++) {
        const int b = group * rows + k;
        if (b >= B) break;
        const long long bt = (long long)b * T + t;
        vec sum;
        if (id_in_range(id[k], V)) {
#pragma unroll
            for (int j = 0; j < width; j++) sum[j] = (floatX)((float)token[k][j] + (float)position[j]);
        } else {
            for (int j = 0; j < width; j++) sum[j] = quiet_nan<floatX>();
            if (c == 0) report_bad_id(status, bt);
        }
        store_packed_cs(out + bt * C + c, sum);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// launchers

// Every launcher:  out (B, T, C); inp (B, T) int32; wte (V, C); wpe (T, C); row-major, device memory, aligned to their
// element only. status: one status word that the caller set to STATUS_OK, or null. out must not overlap the inputs.
// A position with an id outside 0..V-1 becomes a row of NaN, and status says which came first; nothing outside the
// tables is read. block_size: a multiple of 32 up to 1024. Nothing is allocated or synchronised. Returns the launch's
// error (cudaErrorInvalidConfiguration for an impossible block size), cudaSuccess without a launch when there is no
// work.

template <typename floatX>
using EncoderForward = cudaError_t (*)(floatX *out, const int *inp, const floatX *wte, const floatX *wpe,
                                       status_word *status, int B, int T, int C, int V, int block_size,
                                       cudaStream_t stream);

template <typename floatX>
cudaError_t encoder_forward1(floatX *out, const int *inp, const floatX *wte, const floatX *wpe, status_word *status,
                             int B, int T, int C, int V, int block_size, cudaStream_t stream) {
    const long long N = (long long)B * T;
    if (N * C == 0) return cudaSuccess;
    const unsigned grid_size = ceil_div(N, (long long)block_size);
    encoder_forward_kernel1<floatX><<<grid_size, block_size, 0, stream>>>(out, inp, wte, wpe, status, N, T, C, V);
    return cudaGetLastError();
}

template <typename floatX>
cudaError_t encoder_forward2(floatX *out, const int *inp, const floatX *wte, const floatX *wpe, status_word *status,
                             int B, int T, int C, int V, int block_size, cudaStream_t stream) {
    const long long N = (long long)B * T;
    if (N * C == 0) return cudaSuccess;
    const unsigned grid_size = ceil_div(N * C, (long long)block_size);
    encoder_forward_kernel2<floatX><<<grid_size, block_size, 0, stream>>>(out, inp, wte, wpe, status, N, T, C, V);
    return cudaGetLastError();
}

// Rows that 16 bytes don't divide, or that start elsewhere, go to version 2.
template <typename floatX>
cudaError_t encoder_forward3(floatX *out, const int *inp, const floatX *wte, const floatX *wpe, status_word *status,
                             int B, int T, int C, int V, int block_size, cudaStream_t stream) {
    const int x128_size = Packed128<floatX>::size;
    if (vector_width(x128_size, C, out, wte, wpe) < x128_size) {
        return encoder_forward2(out, inp, wte, wpe, status, B, T, C, V, block_size, stream);
    }
    const long long N = (long long)B * T;
    if (N * C == 0) return cudaSuccess;
    const unsigned grid_size = ceil_div(N * C / x128_size, (long long)block_size);
    encoder_forward_kernel3<floatX><<<grid_size, block_size, 0, stream>>>(out, inp, wte, wpe, status, N, T, C, V);
    return cudaGetLastError();
}

// Kernel 4 at the widest vector that the alignment of the rows allows, in slices of at most slice_bytes.
template <typename floatX, int width = Packed128<floatX>::size>
cudaError_t encoder_forward_slices(floatX *out, const int *inp, const floatX *wte, const floatX *wpe,
                                   status_word *status, int B, int T, int C, int V, long long slice_bytes,
                                   int block_size, cudaStream_t stream) {
    if constexpr (width > 1) {
        if (vector_width(width, C, out, wte, wpe) < width) {
            return encoder_forward_slices<floatX, width / 2>(out, inp, wte, wpe, status, B, T, C, V, slice_bytes,
                                                             block_size, stream);
        }
    }
    if ((long long)B * T * C == 0) return cudaSuccess;
    const int rows = 4;
    const long long vectors = C / width;
    const long long slices = ceil_div((long long)C * (long long)sizeof(floatX), slice_bytes);
    const long long slice = ceil_div(vectors, slices);  // as even as they go
    const long long threads = slices * T * ceil_div(B, rows) * slice;
    const unsigned grid_size = ceil_div(threads, (long long)block_size);
    encoder_forward_kernel4<floatX, width, rows>
        <<<grid_size, block_size, 0, stream>>>(out, inp, wte, wpe, status, B, T, C, V, (unsigned)slice);
    return cudaGetLastError();
}

template <typename floatX>
cudaError_t encoder_forward4(floatX *out, const int *inp, const floatX *wte, const floatX *wpe, status_word *status,
                             int B, int T, int C, int V, int block_size, cudaStream_t stream) {
    const long long row_bytes = (long long)C * (long long)sizeof(floatX);
    return encoder_forward_slices(out, inp, wte, wpe, status, B, T, C, V, row_bytes, block_size, stream);
}

// Slices of 512 bytes: at B*T = 65536 uniform ids, one slice of every row asked for is 18 to 25 MB, well inside an L2
// of 50 MB or more, where whole rows are 56 to 420 MB. So a row that several positions ask for comes from DRAM once.
template <typename floatX>
cudaError_t encoder_forward5(floatX *out, const int *inp, const floatX *wte, const floatX *wpe, status_word *status,
                             int B, int T, int C, int V, int block_size, cudaStream_t stream) {
    return encoder_forward_slices(out, inp, wte, wpe, status, B, T, C, V, 512, block_size, stream);
}

template <typename floatX>
constexpr Version<EncoderForward<floatX>> encoder_forward_versions[] = {
    {1, "per token", "a thread a position", encoder_forward1<floatX>, 32},
    {2, "parallel", "a thread an element", encoder_forward2<floatX>, 256},
    {3, "x128", "a thread 16 bytes", encoder_forward3<floatX>, 256},
    {4, "rows in flight", "wpe in registers, four rows of the batch at once", encoder_forward4<floatX>, 256},
    {5, "slices", "a slice of the columns at a time, so that repeated ids meet the L2", encoder_forward5<floatX>, 256},
};

// ---------------------------------------------------------------------------------------------------------------------
#ifndef BOOKENDS_NO_MAIN
#include "dev/harness.h"

template <typename floatX>
void encoder_forward_race(Harness &h) {
    const int B = h.dim('b'), T = h.dim('t'), C = h.dim('c'), V = h.dim('v');
    const long long N = (long long)B * T;
    const int *inp = h.tokens(N, V);
    const Values<floatX> wte_values = {1, h.seed}, wpe_values = {2, h.seed};
    const floatX *wte = h.input(wte_values, (long long)V * C), *wpe = h.input(wpe_values, (long long)T * C);
    status_word *status = h.status();
    const int *ids = h.host_tokens.data();
    floatX *out = h.output<floatX>("out", N, C, 1, [=](double *row, long long bt) {
        encoder_forward_cpu(row, ids, wte_values, wpe_values, bt, bt + 1, T, C, V);
    });
    h.bytes = (h.distinct_tokens() + T + N) * C * (long long)sizeof(floatX) + N * (long long)sizeof(int);
    h.flops = (double)N * C;
    h.race(encoder_forward_versions<floatX>, [=](EncoderForward<floatX> launch, int block_size, cudaStream_t stream) {
        return launch(out, inp, wte, wpe, status, B, T, C, V, block_size, stream);
    });
}

int main(int argc, char **argv) {
    Harness h("encoder_forward", "token + position embedding",
              {{'b', "B", 8, 4}, {'t', "T", 1024, 512}, {'c', "C", 768, 768}, {'v', "V", 50257, 50257}});
    return h.main(argc, argv, encoder_forward_versions<float>, encoder_forward_race<float>, encoder_forward_race<half>,
                  encoder_forward_race<__nv_bfloat16>);
}
#endif
