// A matrix product (GEMM) by cuBLASLt: the choice of an algorithm for given sizes and types, and runs. For lm_head.cu.
#pragma once
#include "../common.h"

#include <cublasLt.h>

#include <cmath>
#include <vector>

namespace bookends {

// d = a b (+ bias) + beta d, with d (m, n), a (m, k) and b (k, n). All are column-major, as cuBLASLt requires: a
// row-major (R, S) matrix is a column-major (S, R) one. Sums are float.
struct GemmShape {
    int m, n, k;
    bool transpose_a, transpose_b;  // a is stored as (k, m), b as (n, k)
    int lda, ldb, ldd;              // stride of the stored columns, in elements
    // Sizes at least as large as m, n and k, for whose matrices there is enough memory: see gemm_create().
    int padded_m, padded_n, padded_k;
};

struct GemmTypes {
    cudaDataType_t type, result;  // of a and b; of d and bias
    bool tf32;                    // fp32: inputs are rounded to TF32
    bool bias;                    // (m), added to each column of d
    uint32_t align_a, align_b, align_d, align_bias;  // the addresses are multiples of this many bytes
};

struct GemmLayouts {
    cublasLtMatrixLayout_t a = nullptr, b = nullptr, d = nullptr;
};

// A GEMM with its candidate algorithms, best first by cuBLASLt's estimate. Only one thread at a time may run it.
struct Gemm {
    cublasLtMatmulDesc_t desc = nullptr;
    GemmLayouts layouts = {};
    std::vector<cublasLtMatmulHeuristicResult_t> candidates = {};
    size_t chosen = 0;
};

// The matrices of a run. bias: null if the GEMM has none.
struct GemmOperands {
    void *d;
    const void *a, *b, *bias;
    float beta;  // 0: d is not read
};

// cuBLASLt's handle and its scratch memory.
struct GemmContext {
    cublasLtHandle_t handle;
    void *workspace;
    size_t workspace_bytes;
    cudaStream_t stream;
};

constexpr int kGemmCandidates = 16;

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

// ---------------------------------------------------------------------------------------------------------------------
// algorithms

// The number of parts into which an algorithm splits a sum, and how it adds them up. False if cuBLASLt does not tell.
inline bool splitting_of(const cublasLtMatmulAlgo_t &algo, int32_t *parts, uint32_t *scheme) {
    size_t written = 0;
    auto get = [&](cublasLtMatmulAlgoConfigAttributes_t attribute, auto *value) {
        return cublasLtMatmulAlgoConfigGetAttribute(&algo, attribute, value, sizeof(*value), &written) ==
               CUBLAS_STATUS_SUCCESS;
    };
    return get(CUBLASLT_ALGO_CONFIG_SPLITK_NUM, parts) && get(CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, scheme);
}

// Whether it adds the parts up in float and in a fixed order, without atomics. (gemm_preference() requests that too.)
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

inline void gemm_destroy_layouts(GemmLayouts &layouts) {
    for (cublasLtMatrixLayout_t *layout : {&layouts.a, &layouts.b, &layouts.d}) {
        if (*layout) cublasLtMatrixLayoutDestroy(*layout);
        *layout = nullptr;
    }
}

inline void gemm_destroy(Gemm &gemm) {
    gemm_destroy_layouts(gemm.layouts);
    if (gemm.desc) cublasLtMatmulDescDestroy(gemm.desc);
    gemm.desc = nullptr;
}

// Layouts for sizes m, n, k, with the strides of the shape.
inline cublasStatus_t gemm_layouts(GemmLayouts *layouts, const GemmShape &s, const GemmTypes &types, int m, int n,
                                   int k) {
    auto create = [](cublasLtMatrixLayout_t *layout, cudaDataType_t type, bool transposed, int rows, int columns,
                     int stride) {
        if (transposed) std::swap(rows, columns);
        return cublasLtMatrixLayoutCreate(layout, type, rows, columns, stride);
    };
    if (const auto error = create(&layouts->a, types.type, s.transpose_a, m, k, s.lda)) return error;
    if (const auto error = create(&layouts->b, types.type, s.transpose_b, k, n, s.ldb)) return error;
    return create(&layouts->d, types.result, false, m, n, s.ldd);
}

inline cublasStatus_t gemm_describe(Gemm *gemm, const GemmShape &shape, const GemmTypes &types) {
    const auto compute = types.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    auto set = [&](cublasLtMatmulDescAttributes_t attribute, auto value) {
        return cublasLtMatmulDescSetAttribute(gemm->desc, attribute, &value, sizeof(value));
    };
    const int32_t transpose_a = shape.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    const int32_t transpose_b = shape.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    if (const auto error = cublasLtMatmulDescCreate(&gemm->desc, compute, CUDA_R_32F)) return error;
    if (const auto error = set(CUBLASLT_MATMUL_DESC_TRANSA, transpose_a)) return error;
    if (const auto error = set(CUBLASLT_MATMUL_DESC_TRANSB, transpose_b)) return error;
    if (types.bias) {
        // A placeholder with the same alignment, until a run sets the address.
        const void *const address = (const void *)(uintptr_t)types.align_bias;
        if (const auto error = set(CUBLASLT_MATMUL_DESC_EPILOGUE, (uint32_t)CUBLASLT_EPILOGUE_BIAS)) return error;
        if (const auto error = set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, address)) return error;
    }
    return gemm_layouts(&gemm->layouts, shape, types, shape.m, shape.n, shape.k);
}

inline cublasStatus_t gemm_preference(cublasLtMatmulPreference_t *preference, const GemmTypes &types,
                                      uint64_t workspace_bytes) {
    auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
        return cublasLtMatmulPreferenceSetAttribute(*preference, attribute, &value, sizeof(value));
    };
    const uint32_t scheme = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    if (const auto error = cublasLtMatmulPreferenceCreate(preference)) return error;
    if (const auto error = set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes)) return error;
    if (const auto error = set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, scheme)) return error;
    if (const auto error = set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, types.align_a)) return error;
    if (const auto error = set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, types.align_b)) return error;
    if (const auto error = set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, types.align_d)) return error;
    return set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, types.align_d);
}

// Whether cuBLASLt's check accepts the algorithm for these matrices. *bytes: its scratch memory.
inline bool gemm_check(cublasLtHandle_t handle, const Gemm &gemm, const GemmLayouts &l,
                       const cublasLtMatmulAlgo_t &algo, size_t *bytes) {
    cublasLtMatmulHeuristicResult_t checked = {};
    const cublasStatus_t fits = cublasLtMatmulAlgoCheck(handle, gemm.desc, l.a, l.b, l.d, l.d, &algo, &checked);
    *bytes = checked.workspaceSize;
    return fits == CUBLAS_STATUS_SUCCESS;
}

// Adds cuBLASLt's suggested algorithms for these matrices to the candidates. If the matrices are not the GEMM's own, it
// adds only those that the check accepts for the GEMM, and that need no more scratch there than for these matrices.
// (The scratch cannot be compared with the workspace: the check says 4 bytes for an algorithm that uses 4 bytes if it
// has them, even if there are none and the heuristic suggests the algorithm.)
inline void gemm_suggest(Gemm *gemm, cublasLtHandle_t handle, const GemmLayouts &l,
                         cublasLtMatmulPreference_t preference) {
    cublasLtMatmulHeuristicResult_t results[kGemmCandidates];
    int found = 0;
    if (cublasLtMatmulAlgoGetHeuristic(handle, gemm->desc, l.a, l.b, l.d, l.d, preference, kGemmCandidates, results,
                                       &found)) {
        return;
    }
    for (int i = 0; i < found; i++) {
        const cublasLtMatmulAlgo_t &algo = results[i].algo;
        if (results[i].state != CUBLAS_STATUS_SUCCESS || !sums_in_float(algo)) continue;
        auto same = [&](const cublasLtMatmulHeuristicResult_t &known) {
            return memcmp(&known.algo, &algo, sizeof(algo)) == 0;
        };
        if (std::any_of(gemm->candidates.begin(), gemm->candidates.end(), same)) continue;
        size_t theirs = 0, ours = 0;
        const bool fits = l.a == gemm->layouts.a || (gemm_check(handle, *gemm, l, algo, &theirs) &&
                                                     gemm_check(handle, *gemm, gemm->layouts, algo, &ours) &&
                                                     ours <= theirs);
        if (fits) gemm->candidates.push_back(results[i]);
    }
}

// Finds the algorithms of an empty Gemm. gemm_destroy() must be called for it, whatever this returns.
//
// If 8 does not divide a size, cuBLASLt's suggested algorithms load single elements and take 6 times as long (V =
// 50257, H200). For 50256 columns it suggests other algorithms than for 50304, up to 10% slower (CUDA 13.0). So this
// also asks for the padded sizes, and cuBLASLt's check tells which of their algorithms accept the actual sizes:
// padded_n and padded_k may be any, padded_m must be a multiple of 8 (H200). The slow algorithms are candidates only if
// there are no others.
inline cublasStatus_t gemm_create(Gemm *gemm, cublasLtHandle_t handle, const GemmShape &s, const GemmTypes &types,
                                  size_t workspace_bytes) {
    cublasLtMatmulPreference_t preference = nullptr;
    GemmLayouts padded;
    cublasStatus_t status = gemm_describe(gemm, s, types);
    if (!status) status = gemm_preference(&preference, types, workspace_bytes);
    const bool asks_padded = s.padded_m > s.m || s.padded_n > s.n || s.padded_k > s.k;
    if (!status && asks_padded) status = gemm_layouts(&padded, s, types, s.padded_m, s.padded_n, s.padded_k);
    if (!status && asks_padded) gemm_suggest(gemm, handle, padded, preference);
    auto ragged = [](int size, int padded_size) { return padded_size > size && size % 8 != 0; };
    const bool slow = ragged(s.m, s.padded_m) || ragged(s.n, s.padded_n) || ragged(s.k, s.padded_k);
    if (!status && (!slow || gemm->candidates.empty())) gemm_suggest(gemm, handle, gemm->layouts, preference);
    // With a bias, algorithms that split the sum round a 16-bit result twice, before and after they add the bias (CUDA
    // 13.0, H200). They are candidates only if there are no others.
    if (types.bias && types.result != CUDA_R_32F) {
        auto whole = [](const cublasLtMatmulHeuristicResult_t &found) { return !splits_sum(found.algo); };
        const auto split = std::stable_partition(gemm->candidates.begin(), gemm->candidates.end(), whole);
        if (split != gemm->candidates.begin()) gemm->candidates.erase(split, gemm->candidates.end());
    }
    gemm_destroy_layouts(padded);
    if (preference) cublasLtMatmulPreferenceDestroy(preference);
    if (!status && gemm->candidates.empty()) status = CUBLAS_STATUS_NOT_SUPPORTED;
    if (status) gemm->candidates.clear();
    return status;
}

// ---------------------------------------------------------------------------------------------------------------------
// runs

inline cudaError_t gemm_run(const Gemm &gemm, const GemmOperands &x, const GemmContext &context) {
    const float one = 1;
    if (gemm.candidates.empty()) return cudaErrorNotSupported;
    if (x.bias) {
        const cublasStatus_t error =
            cublasLtMatmulDescSetAttribute(gemm.desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &x.bias, sizeof(x.bias));
        if (error) return from_cublas(error);
    }
    const GemmLayouts &l = gemm.layouts;
    return from_cublas(cublasLtMatmul(context.handle, gemm.desc, &one, x.a, l.a, x.b, l.b, &x.beta, x.d, l.d, x.d, l.d,
                                      &gemm.candidates[gemm.chosen].algo, context.workspace, context.workspace_bytes,
                                      context.stream));
}

// Two events, to measure the time between them.
struct GemmEvents {
    cudaEvent_t start = nullptr, stop = nullptr;
    cudaError_t error;

    GemmEvents() {
        error = cudaEventCreate(&start);
        if (error == cudaSuccess) error = cudaEventCreate(&stop);
    }
    GemmEvents(const GemmEvents &) = delete;
    ~GemmEvents() {
        if (start) cudaEventDestroy(start);
        if (stop) cudaEventDestroy(stop);
    }
};

// Milliseconds per run of a candidate, from enough runs in a row to take `least` milliseconds. INFINITY if it fails.
inline cudaError_t gemm_time(float *result, Gemm *gemm, size_t candidate, float least, const GemmOperands &operands,
                             const GemmContext &context, const GemmEvents &events) {
    if (events.error != cudaSuccess) return events.error;
    gemm->chosen = candidate;
    *result = INFINITY;
    for (int count = 1;; count *= 2) {
        const KeepPendingError keep;  // a candidate that cannot run may leave an error pending
        bool ran = true;
        float all = 0;
        if (const auto error = cudaEventRecord(events.start, context.stream)) return error;
        for (int i = 0; i < count && ran; i++) ran = gemm_run(*gemm, operands, context) == cudaSuccess;
        if (const auto error = cudaEventRecord(events.stop, context.stream)) return error;
        if (const auto error = cudaEventSynchronize(events.stop)) return error;
        if (const auto error = cudaEventElapsedTime(&all, events.start, events.stop)) return error;
        if (!ran) return cudaSuccess;
        if (all >= least) {
            *result = all / count;
            return cudaSuccess;
        }
    }
}

// Chooses the fastest candidate: times each candidate (one run, then 0.1 ms of runs), then the best three in turns, a
// millisecond of runs at a time. Waits for the stream; overwrites d with arbitrary values.
//
// Tried without gain: cluster shapes other than cuBLASLt's proposals. A single GEMM became up to 8% faster, but no run
// of the LM head did: a memory-bound GEMM runs at a higher clock alone than between compute-bound GEMMs.
inline cudaError_t gemm_tune(Gemm *gemm, const GemmOperands &operands, const GemmContext &context) {
    constexpr size_t finalists = 3;
    std::vector<std::pair<float, size_t>> results;  // a candidate's time and its number
    const GemmEvents events;
    auto time = [&](float *result, size_t candidate, float least) {
        return gemm_time(result, gemm, candidate, least, operands, context, events);
    };
    if (gemm->candidates.size() < 2) return cudaSuccess;
    for (size_t i = 0; i < gemm->candidates.size(); i++) {
        float result;
        if (const auto error = time(&result, i, 0)) return error;  // the first run may have to load the kernel
        if (const auto error = time(&result, i, 0.1f)) return error;
        results.push_back({result, i});
    }
    std::sort(results.begin(), results.end());
    results.resize(std::min(results.size(), finalists));
    for (auto &result : results) result.first = INFINITY;
    for (int round = 0; round < 3; round++) {
        for (auto &[best, candidate] : results) {
            float result;
            if (const auto error = time(&result, candidate, 1)) return error;
            best = std::min(best, result);
        }
    }
    gemm->chosen = std::min_element(results.begin(), results.end())->second;
    return cudaSuccess;
}

}  // namespace bookends
