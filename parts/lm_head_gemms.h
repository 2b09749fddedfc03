// The common part of the versions of lm_head.cu: the arguments of a run; the resources of a plan; and the logits, dX,
// dW and dbias of a block of rows and a tile of columns.
#pragma once
#include "../common.h"
#include "classifier.h"
#include "gemm.h"
#include "hopper.h"
#include "launch.h"
#include "lm_head_plan.h"

#include <cstdarg>
#include <cstdio>

namespace bookends {

// ---------------------------------------------------------------------------------------------------------------------
// kernels other than the GEMMs

// Writes the first bad target to the status word. Other kernels see one block of rows, whose numbers begin at 0.
static __global__ void lm_head_targets_kernel(status_word *status, const int *targets, int N, int V, int ignore_index) {
    const long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row < N && targets[row] != ignore_index && !id_in_range(targets[row], V)) report_bad_id(status, row);
}

// The logits if C = 0.
template <typename floatX>
__global__ void lm_head_no_channels_kernel(floatX *logits, const floatX *bias, unsigned V, unsigned P) {
    floatX *const row = logits + (long long)blockIdx.x * P;
    for (unsigned j = threadIdx.x; j < V; j += blockDim.x) row[j] = bias ? bias[j] : (floatX)0.0f;
}

// out = X with ignored rows set to 0, since 0 * NaN is NaN. One thread block per row.
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

// The last V % 8 columns of the logits, which begin at `logits`. cuBLASLt's fast algorithms write rows whose length is
// a multiple of 8 columns (gemm_create()); its other algorithms take 6 times as long. This kernel takes 3.5 us more (V
// = 50257, H200). One warp per row; each lane loads `width` channels at a time. The latency of the loads is the limit,
// so the loads of four iterations are issued together.
constexpr unsigned kMostTail = 7;
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

// The sum of each column of dlogits over a slice of the rows, in float: sums (slices, columns). A thread block sums the
// columns that a warp's lanes load with 16 bytes each, over one slice; each warp adds every warps-th row. The order of
// the additions is fixed.
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
    } else {  // the padding behind the last column is not initialised
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

// out (+)= the sum of all slices, rounded once. One thread per column.
template <typename T>
__global__ void lm_head_slices_kernel(T *out, const float *sums, unsigned columns, unsigned slices, bool add) {
    const unsigned j = blockIdx.x * blockDim.x + threadIdx.x;
    if (j >= columns) return;
    float total = 0;
    for (unsigned i = 0; i < slices; i++) total += sums[(size_t)i * columns + j];
    out[j] = (T)(add ? (float)out[j] + total : total);
}

// out (+)= sums, rounded once.
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
// a plan and its resources

enum GemmKind { kGemmLogits, kGemmDX, kGemmDW };

struct LmHeadGemm {
    GemmKind kind;
    int rows, columns;  // of the logits that it computes or reads
    bool aligned;       // all matrices begin at multiples of 16 bytes
    Gemm gemm = {};
};

// A plan, with cuBLASLt's handle and GEMMs. lm_head_create() makes one. It can be run any number of times, by one
// thread at a time.
struct LmHead {
    LmHeadPlan plan;
    ClassifierOptions options;  // for runs without options of their own
    cublasLtHandle_t handle = nullptr;
    std::vector<LmHeadGemm> gemms;
    cudaError_t error = cudaSuccess;  // the error of lm_head_create(), and its description
    char what[240] = "";
    size_t least = 0;  // if the budget is too small: the bytes that suffice
};

inline void lm_head_destroy(LmHead &head) {
    for (LmHeadGemm &gemm : head.gemms) gemm_destroy(gemm.gemm);
    head.gemms.clear();
    if (head.handle) cublasLtDestroy(head.handle);
    head.handle = nullptr;
}

// An empty kernel. Its launch bound shows at run time whether this code is compiled for sm_90a.
static __global__ void __launch_bounds__(kHasWgmma ? 1024 : kWarpSize) lm_head_probe_kernel() {}

inline cudaError_t lm_head_device(LmHeadDevice *about) {
    int device = 0, l2 = 0, major = 0;
    cudaFuncAttributes probe = {};
    if (const auto error = cudaGetDevice(&device)) return error;
    if (const auto error = cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, device)) return error;
    int *const SMs = &about->multiprocessors;
    if (const auto error = cudaDeviceGetAttribute(SMs, cudaDevAttrMultiProcessorCount, device)) return error;
    if (const auto error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device)) return error;
    if (const auto error = cudaFuncGetAttributes(&probe, lm_head_probe_kernel)) return error;
    about->l2_bytes = l2;
    about->emulated = major == 0;
    about->has_epilogue = probe.binaryVersion == 90 && probe.maxThreadsPerBlock >= 1024;
    return cudaSuccess;
}

constexpr cudaDataType_t kCudaTypes[] = {CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF};  // of an LmHeadType

// The columns of a tile that a GEMM computes or reads. If their number is not a multiple of 8, the fast algorithms of
// padded sizes still work in dX's and dW's GEMMs, but not in the logits' GEMM, which writes rows of that length (see
// gemm_create()): it computes a multiple of 8 columns, and lm_head_tail_logits_kernel the rest.
inline int gemm_columns(GemmKind kind, int columns) {
    return kind == kGemmLogits && columns >= 128 ? columns / 8 * 8 : columns;
}

// Row-major, with x = logits or dlogits:  x = X W^T,  dX = x W,  dW (+)= x^T X.  Column-major, this is:
//   x^T (columns, rows) = W (columns, C) X^T (C, rows)      dX^T (C, rows) = W^T (C, columns) x^T (columns, rows)
//   dW^T (C, columns) = X^T (C, rows) x (rows, columns)
inline GemmShape lm_head_shape(const LmHeadPlan &plan, const LmHeadGemm &gemm) {
    const int C = plan.problem.C, P = plan.P, rows = gemm.rows, columns = gemm.columns;
    const bool pads = gemm.aligned && columns >= 128;
    const int padded = pads ? (int)std::min<long long>(P, round_up(columns, 128)) : columns;
    if (gemm.kind == kGemmLogits) return {columns, rows, C, true, false, C, C, P, padded, rows, C};
    if (gemm.kind == kGemmDX) return {C, rows, columns, false, false, C, P, C, C, rows, padded};
    return {C, columns, rows, false, true, C, P, C, C, padded, rows};
}

inline GemmTypes lm_head_types(const LmHeadPlan &plan, const LmHeadGemm &gemm) {
    const LmHeadProblem &p = plan.problem;
    const bool logits = gemm.kind == kGemmLogits;
    const LmHeadType type_of_dX = plan.float_dX() ? kFp32 : p.type;
    const LmHeadType type_of_dW = plan.float_dW() ? kFp32 : p.gradient_type;
    const LmHeadType result = logits ? p.type : gemm.kind == kGemmDX ? type_of_dX : type_of_dW;
    const uint32_t own = 16, given = gemm.aligned ? 16 : p.type_bytes();  // logits are in the workspace
    const uint32_t of_result = gemm.aligned ? 16 : bytes_of(result);
    return {kCudaTypes[p.type], kCudaTypes[result], p.tf32, logits && p.bias, given, logits ? given : own,
            logits ? own : of_result, given};
}

// Stores an error and its description in the head. Returns the error.
__attribute__((format(printf, 3, 4))) inline cudaError_t lm_head_fail(LmHead &head, cudaError_t error,
                                                                      const char *format, ...) {
    va_list words;
    va_start(words, format);
    vsnprintf(head.what, sizeof(head.what), format, words);
    va_end(words);
    return head.error = error;
}

inline const Gemm *find_gemm(const LmHead &head, GemmKind kind, int rows, int columns, bool aligned) {
    for (const LmHeadGemm &g : head.gemms) {
        if (g.kind == kind && g.rows == rows && g.columns == columns && g.aligned == aligned) return &g.gemm;
    }
    return nullptr;
}

// The GEMMs that a plan needs, with their algorithms.
inline cudaError_t lm_head_create_gemms(LmHead &head) {
    const LmHeadPlan &plan = head.plan;
    const LmHeadProblem &p = plan.problem;
    if (const auto error = cublasLtCreate(&head.handle)) {
        return lm_head_fail(head, from_cublas(error), "cublasLtCreate: %s", cublasLtGetStatusName(error));
    }
    // The first piece and the last one, which may be shorter.
    auto sizes = [](int count, int piece) {
        return count <= piece || count % piece == 0 ? std::vector<int>{std::min(count, piece)}
                                                    : std::vector<int>{piece, count % piece};
    };
    auto add = [&](GemmKind kind, int rows, int tile_columns, bool aligned) {
        const int columns = gemm_columns(kind, tile_columns);
        if (find_gemm(head, kind, rows, columns, aligned)) return cudaSuccess;
        head.gemms.push_back({kind, rows, columns, aligned});
        LmHeadGemm &made = head.gemms.back();
        const cublasStatus_t status = gemm_create(&made.gemm, head.handle, lm_head_shape(plan, made),
                                                  lm_head_types(plan, made), plan.gemm_bytes);
        if (status == CUBLAS_STATUS_SUCCESS) return cudaSuccess;
        const char *const names[] = {"logits", "dX", "dW"};
        lm_head_fail(head, from_cublas(status),
                     "cuBLASLt: %s: %d rows, %d columns, C %d, %zu bytes of scratch: %s", names[kind], rows, columns,
                     p.C, plan.gemm_bytes, cublasLtGetStatusName(status));
        if (aligned) return head.error;
        return head.error = cudaSuccess;  // runs that need it are refused
    };
    if (p.C == 0 || p.V == 0) return cudaSuccess;
    for (bool aligned : {true, false}) {
        for (int rows : sizes(p.N, plan.rows)) {
            for (int columns : sizes(p.V, plan.columns)) {
                for (GemmKind kind : {kGemmLogits, kGemmDX, kGemmDW}) {
                    const bool logits = plan.way != kLmHeadEpilogue;
                    const bool wanted = kind == kGemmLogits ? logits : kind == kGemmDX ? p.dX : p.dW;
                    const cudaError_t error = wanted ? add(kind, rows, columns, aligned) : cudaSuccess;
                    if (error != cudaSuccess) return error;
                }
            }
        }
    }
    return cudaSuccess;
}

// Makes a plan with its resources. `head` must be empty; afterwards lm_head_destroy() must be called, whatever this
// returns. Queries cuBLASLt for algorithms and allocates host memory, but no device memory of its own.
// cudaErrorInvalidValue: a negative size, types that cannot be combined, or an option outside its range.
// cudaErrorMemoryAllocation: the budget is too small (head.plan.rows is then 0). Otherwise an error of cuBLASLt.
// head.what describes the error.
inline cudaError_t lm_head_create(LmHead &head, const LmHeadProblem &problem, const ClassifierOptions &options) {
    const LmHeadProblem &p = head.plan.problem = problem;
    head.options = options;
    head.plan.problem.positive_scale = options.logit_scale > 0;
    if (p.N < 0 || p.C < 0 || p.V < 0) return lm_head_fail(head, cudaErrorInvalidValue, "a size is negative");
    if (p.gradient_type != p.type && p.gradient_type != kFp32) {
        return lm_head_fail(head, cudaErrorInvalidValue, "the gradients' type is neither the inputs' type nor fp32");
    }
    if (!valid_options(options)) {
        return lm_head_fail(head, cudaErrorInvalidValue, "an option is not finite or out of its range");
    }
    if (lm_head_pad(p.V) > INT32_MAX) return lm_head_fail(head, cudaErrorInvalidValue, "V is too large");
    if (p.N == 0) return cudaSuccess;
    if (const auto error = lm_head_device(&head.plan.device)) {
        return lm_head_fail(head, error, "%s", cudaGetErrorString(error));
    }
    const LmHeadPlan begun = head.plan;
    bool planned = lm_head_plan(head.plan, p.memory, p.may_exceed_memory);
    if (!planned && p.may_exceed_memory) {
        const size_t memory = std::max(p.memory, lm_head_least_bytes(p, begun.device, true));
        head.plan = begun;
        head.plan.problem.memory = memory;
        planned = lm_head_plan(head.plan, memory, true) || lm_head_plan(head.plan, memory);
    }
    if (planned) return lm_head_create_gemms(head);
    head.plan.rows = 0;
    if (head.plan.holds_all_logits()) {
        return lm_head_fail(head, cudaErrorMemoryAllocation, "it takes more scratch than there can be");
    }
    head.least = lm_head_least_bytes(p, begun.device);
    return lm_head_fail(head, cudaErrorMemoryAllocation, "%zu bytes of scratch are too few: %zu are enough", p.memory,
                        head.least);
}

// Whether a plan can run with options other than those it was made for: both must have a softcap or none, and the same
// sign of logit_scale.
inline bool lm_head_takes(const LmHead &head, const ClassifierOptions &options) {
    auto sign = [](float scale) { return (scale > 0) - (scale < 0); };
    return (options.softcap > 0) == (head.options.softcap > 0) &&
           sign(options.logit_scale) == sign(head.options.logit_scale);
}

// ---------------------------------------------------------------------------------------------------------------------
// a run

// The arguments of a run:  dX (N, C) floatX, overwritten; dW (V, C) and dbias (V) gradX, added to; losses (N) and lse
// (N) float, overwritten (with options.add_losses, losses are added to); X (N, C), W (V, C) and bias (V) floatX;
// targets (N) int32; dlosses (N) float; status: one status word; workspace: plan.bytes, at a multiple of 256.
// Row-major, in device memory, aligned to their elements, no overlap. dX, dW, dbias and bias: null if the plan does not
// have them, not null otherwise. losses, lse, dlosses (null: 1) and status may be null. The workspace may hold anything
// before and after. W may be the embedding's table: dW is then one part of the table's gradient, and encoder_backward
// adds the other. options: for this run, if lm_head_takes() accepts them; null: the plan's.
//
// Targets, options and rows that are not finite: as in classifier_fused.cu. Ignored rows contribute to no gradient,
// whatever X holds there (with problem.finite, X must be finite there). A bad target makes its row of dX NaN, and all
// of dW and dbias, since the row is a term of their sums. V = 0: dX is 0. N = 0: nothing is done. C = 0: the logits are
// the bias, or 0.
//
// Sums over the vocabulary or the rows are float, in the order of cuBLASLt's algorithm, and are rounded once: a 16-bit
// dW or dbias is the old value plus the sum over all rows. The label smoothing term of a loss is rounded once more for
// each tile of the vocabulary. The same plan gives the same bits each time, since its algorithms use no atomics.
//
// A run only launches kernels in `stream`; it allocates nothing and does not synchronise. A CUDA graph can capture it.
// Errors: cudaErrorInvalidValue for pointers or options that do not fit the plan, or for another version's plan;
// cudaErrorMisalignedAddress for the workspace; or the error of a launch or of cuBLASLt.
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
    const ClassifierOptions *options = nullptr;
};

// A block of rows and a tile of columns of the logits.
struct LmHeadTile {
    size_t row;
    int rows;
    size_t column;
    int columns;
};

// A run in progress: the addresses of its arrays, and the operations that several versions use. Each operation returns
// the error of its launches.
template <typename floatX, typename gradX>
struct LmHeadRun {
    const LmHead &head;
    const LmHeadPlan &plan;
    const LmHeadProblem &problem;
    LmHeadArguments<floatX, gradX> args;
    ClassifierOptions options;
    cudaStream_t stream;
    size_t C;
    bool aligned;                     // the matrices of all GEMMs begin at multiples of 16 bytes
    cudaError_t error = cudaSuccess;  // of begin()

    LmHeadRun(const LmHead &own_head, const LmHeadArguments<floatX, gradX> &own_args, cudaStream_t own_stream)
        : head(own_head),
          plan(head.plan),
          problem(plan.problem),
          args(own_args),
          options(args.options ? *args.options : head.options),
          stream(own_stream),
          C(problem.C) {
        uintptr_t all = (uintptr_t)args.X | (uintptr_t)args.W | (uintptr_t)args.bias | (uintptr_t)args.dX;
        all |= (uintptr_t)args.dW;
        if (plan.blocks() > 1) all |= plan.rows * C * sizeof(floatX);
        if (plan.tiles() > 1) all |= plan.columns * C * sizeof(floatX) | plan.columns * sizeof(floatX);
        aligned = all % 16 == 0;
    }

    template <typename T>
    T *part(size_t offset) const {
        return (T *)(args.workspace + offset);
    }
    floatX *logits(int buffer = 0) const {
        return part<floatX>(plan.logits) + (size_t)buffer * plan.rows * plan.P;
    }
    LmHeadTile block_of(int block) const {
        return {(size_t)block * plan.rows, plan.block_rows(block), 0, problem.V};
    }
    LmHeadTile tile_of(int block, int tile) const {
        const LmHeadTile rows = block_of(block);
        return {rows.row, rows.rows, (size_t)tile * plan.columns, plan.tile_columns(tile)};
    }

    // The first step of every version: checks the arguments, writes the status word, and zeroes dX if V = 0. Returns
    // false if the run ends here, with `error`: the arguments are wrong, or there are no rows.
    bool begin(LmHeadWay way) {
        if (problem.N == 0) return false;
        error = check(way);
        if (error == cudaSuccess && args.status) {
            error = launch_kernel(lm_head_targets_kernel, ceil_div((unsigned)problem.N, 256u), 256, 0, stream,
                                  args.status, args.targets, problem.N, problem.V, options.ignore_index);
        }
        if (error == cudaSuccess && args.dX && problem.V == 0 && C > 0) {
            error = cudaMemsetAsync(args.dX, 0, problem.N * C * sizeof(floatX), stream);
        }
        return error == cudaSuccess;
    }
    cudaError_t check(LmHeadWay way) const {
        const bool as_planned = (args.dX != nullptr) == problem.dX && (args.dW != nullptr) == problem.dW &&
                                (args.dbias != nullptr) == problem.dbias && (args.bias != nullptr) == problem.bias;
        const bool has_inputs = (args.X || C == 0) && (args.W || C == 0 || problem.V == 0) && args.targets &&
                                (args.workspace || plan.bytes == 0);
        const bool same_way = plan.way == way || problem.V == 0;
        if (!as_planned || !has_inputs || !same_way || problem.type_bytes() != sizeof(floatX)) {
            return cudaErrorInvalidValue;
        }
        if (!plan.can_use(args.workspace)) return cudaErrorMisalignedAddress;
        if (!valid_options(options) || !lm_head_takes(head, options)) return cudaErrorInvalidValue;
        for (const LmHeadGemm &g : head.gemms) {
            if (g.aligned == aligned && g.gemm.candidates.empty()) return cudaErrorNotSupported;
        }
        return cudaSuccess;
    }

    GemmContext context() const { return {head.handle, part<void>(plan.gemm), plan.gemm_bytes, stream}; }
    cudaError_t multiply(GemmKind kind, const LmHeadTile &tile, const GemmOperands &operands) const {
        return gemm_run(*find_gemm(head, kind, tile.rows, gemm_columns(kind, tile.columns), aligned), operands,
                        context());
    }

    // logits = X W^T (+ bias).
    cudaError_t make_logits(floatX *logits, const LmHeadTile &tile) const {
        const floatX *const X = args.X + tile.row * C, *const W = args.W + tile.column * C;
        const floatX *const bias = args.bias ? args.bias + tile.column : nullptr;
        if (tile.columns == 0) return cudaSuccess;
        if (C == 0) {
            return launch_kernel(lm_head_no_channels_kernel<floatX>, tile.rows, 256, 0, stream, logits, bias,
                                 tile.columns, plan.P);
        }
        if (const auto failed = multiply(kGemmLogits, tile, {logits, W, X, bias, 0})) return failed;
        const int done = gemm_columns(kGemmLogits, tile.columns), tail = tile.columns - done;
        if (tail == 0) return cudaSuccess;
        constexpr int most = Packed128<floatX>::size;
        const auto kernel = aligned && C % most == 0 ? lm_head_tail_logits_kernel<floatX, most>
                                                     : lm_head_tail_logits_kernel<floatX, 1>;
        return launch_kernel(kernel, ceil_div(tile.rows, 8), 8 * kWarpSize, 0, stream, logits + done, X, W + done * C,
                             bias ? bias + done : nullptr, tile.rows, C, plan.P, tail);
    }

    // The rows of X that dW's GEMM reads: X, or a copy in which ignored rows are 0.
    const floatX *counted_X(size_t row) const {
        if (!plan.copies_X()) return args.X + row * C;
        return plan.copy_in_dX() ? args.dX + row * C : part<floatX>(plan.X);
    }
    cudaError_t copy_X(const LmHeadTile &tile) const {
        if (!plan.copies_X()) return cudaSuccess;
        constexpr int most = Packed128<floatX>::size;
        const floatX *const X = args.X + tile.row * C;
        floatX *const out = const_cast<floatX *>(counted_X(tile.row));
        auto copy = [&](auto kernel, unsigned vectors) {
            const unsigned block_size = std::min(ceil_div(vectors, (unsigned)kWarpSize) * kWarpSize, 256u);
            return launch_kernel(kernel, tile.rows, block_size, 0, stream, out, X, args.targets + tile.row, C,
                                 options.ignore_index);
        };
        return vector_width(most, C, X, out) == most ? copy(lm_head_counted_rows_kernel<floatX, most>, C / most)
                                                     : copy(lm_head_counted_rows_kernel<floatX, 1>, C);
    }

    // Adds a tile of dlogits to dbias, dW and dX. dX is last, since it may overwrite the copy of X that dW's GEMM
    // reads. first: this is the first tile of the block's dX. (Running the GEMMs at the same time on two streams was no
    // faster at any shape that was tried, and up to 4% slower: C 4096, V 128256 in 10%; H200.)
    cudaError_t make_gradients(const floatX *dlogits, const LmHeadTile &tile, bool first) const {
        if (tile.columns == 0) return cudaSuccess;
        if (const auto failed = add_dbias(dlogits, tile)) return failed;
        if (const auto failed = add_dW(dlogits, tile)) return failed;
        return add_dX(dlogits, tile, first);
    }

    // A dX in float is rounded by finish_dX() after the last tile.
    cudaError_t add_dX(const floatX *dlogits, const LmHeadTile &tile, bool first) const {
        if (!args.dX || C == 0) return cudaSuccess;
        void *const sums = plan.float_dX() ? part<void>(plan.dX) : args.dX + tile.row * C;
        return multiply(kGemmDX, tile, {sums, args.W + tile.column * C, dlogits, nullptr, first ? 0.0f : 1.0f});
    }
    cudaError_t finish_dX(const LmHeadTile &tile) const {
        if (!args.dX || !plan.float_dX()) return cudaSuccess;
        return round(args.dX + tile.row * C, part<float>(plan.dX), tile.rows * (long long)C, false);
    }

    // A dW in float is overwritten by the first block of rows, and added to dW after the last one. (Our own GEMMs for
    // it, like lm_head_product_kernel(), were 12% to 33% slower than cuBLASLt's with 768 and with 2048 rows: with sums
    // added by bulk copies, atomics, or loads and stores, and with groups that share a tile or alternate; H200.)
    cudaError_t add_dW(const floatX *dlogits, const LmHeadTile &tile) const {
        if (!args.dW || C == 0) return cudaSuccess;
        gradX *const dW = args.dW + tile.column * C;
        float *const sums = part<float>(plan.dW);
        const bool in_float = plan.float_dW(), add = !(problem.bare || (in_float && tile.row == 0));
        const GemmOperands operands = {in_float ? (void *)sums : dW, counted_X(tile.row), dlogits, nullptr,
                                       add ? 1.0f : 0.0f};
        if (const auto failed = multiply(kGemmDW, tile, operands)) return failed;
        if (!in_float || tile.row + tile.rows != (size_t)problem.N) return cudaSuccess;
        return round(dW, sums, tile.columns * (long long)C, true);
    }

    cudaError_t add_dbias(const floatX *dlogits, const LmHeadTile &tile) const {
        if (!args.dbias) return cudaSuccess;
        const unsigned columns = tile.columns, slices = plan.row_slices(), grid_size = ceil_div(columns, 256u);
        float *const sums = part<float>(plan.slices), *const total = part<float>(plan.dbias);
        const dim3 grid(ceil_div(columns, kWarpSize * (unsigned)Packed128<floatX>::size), slices);
        if (const auto failed = launch_kernel(lm_head_columns_kernel<floatX>, grid, 1024, 0, stream, sums, dlogits,
                                              tile.rows, columns, plan.P)) {
            return failed;
        }
        if (!plan.float_dbias()) {
            return launch_kernel(lm_head_slices_kernel<gradX>, grid_size, 256, 0, stream, args.dbias + tile.column,
                                 sums, columns, slices, true);
        }
        if (const auto failed = launch_kernel(lm_head_slices_kernel<float>, grid_size, 256, 0, stream, total, sums,
                                              columns, slices, tile.row > 0)) {
            return failed;
        }
        if (tile.row + tile.rows != (size_t)problem.N) return cudaSuccess;
        return round(args.dbias, total, columns, true);
    }

    // out (+)= sums.
    template <typename T>
    cudaError_t round(T *out, const float *sums, long long count, bool add) const {
        if (count == 0) return cudaSuccess;
        const bool wide = vector_width(4, count, out) == 4;
        int block_size = 256;
        const long long vectors = wide ? count / 4 : count;
        const unsigned grid_size = grid_blocks(vectors, &block_size);
        const auto kernel = wide ? lm_head_round_kernel<T, 4> : lm_head_round_kernel<T, 1>;
        return launch_kernel(kernel, grid_size, block_size, 0, stream, out, sums, vectors, add);
    }

    // Calls launch(arguments, softcap, extras) with the classifier's arguments for a block's rows and their logits.
    template <typename Launch>
    cudaError_t classify(floatX *logits, const LmHeadTile &tile, Launch launch) const {
        return classifier_launch<floatX>(
            plan.has_gradients() ? logits : nullptr, args.losses ? args.losses + tile.row : nullptr,
            args.lse ? args.lse + tile.row : nullptr, nullptr, nullptr, logits, args.targets + tile.row,
            args.dlosses ? args.dlosses + tile.row : nullptr, nullptr, tile.rows, problem.V, problem.V, options,
            [&](ClassifierArguments<floatX> arguments, auto softcap, auto extras) {
                arguments.P = plan.P;
                return launch(arguments, softcap, extras);
            });
    }
};

}  // namespace bookends
