// What cublasLt.h declares. Blocks of the result spread over the cores, as the blocks of a kernel do. A block's sums
// are made by a BLAS, if there is one: libopenblas.so.0 or libblas.so.3, found at run time, or what BOOKENDS_BLAS
// names; BOOKENDS_BLAS=none is for none. Else, by loops; where the one that is named will not do, a line says so.

#include "cublasLt.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <string>
#include <vector>

struct cublasLtContext {};

struct cublasLtMatmulDescOpaque {
    int32_t transposed[2] = {CUBLAS_OP_N, CUBLAS_OP_N};
    uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    const void *bias = nullptr;
};

struct cublasLtMatrixLayoutOpaque {
    cudaDataType_t type;
    long long rows, cols, ld;
};

struct cublasLtMatmulPreferenceOpaque {
    uint64_t workspace = 0;
    uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_MASK, alignment[4] = {256, 256, 256, 256};
};

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// elements and a BLAS

size_t size_of(cudaDataType_t type) { return type == CUDA_R_32F ? 4 : 2; }

// `count` elements, `stride` apart, to float and back.
template <class T> void read(float *out, const void *from, long long first, long long stride, long long count) {
    const T *p = (const T *)from + first;
    for (long long i = 0; i < count; i++) out[i] = (float)p[i * stride];
}
void read(float *out, cudaDataType_t type, const void *from, long long first, long long stride, long long count) {
    if (type == CUDA_R_32F) read<float>(out, from, first, stride, count);
    else if (type == CUDA_R_16F) read<half>(out, from, first, stride, count);
    else read<__nv_bfloat16>(out, from, first, stride, count);
}
template <class T> void write(void *to, long long first, const float *values, long long count) {
    T *p = (T *)to + first;
    for (long long i = 0; i < count; i++) p[i] = (T)values[i];
}
void write(cudaDataType_t type, void *to, long long first, const float *values, long long count) {
    if (type == CUDA_R_32F) write<float>(to, first, values, count);
    else if (type == CUDA_R_16F) write<half>(to, first, values, count);
    else write<__nv_bfloat16>(to, first, values, count);
}

using sgemm_function = void (*)(const char *, const char *, const int *, const int *, const int *, const float *,
                                const float *, const int *, const float *, const int *, const float *, float *,
                                const int *);

// A library's, or null; its own threads would only be in the way of ours.
sgemm_function sgemm_of(const char *name) {
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!library) return nullptr;
    auto threads = (void (*)(int))dlsym(library, "openblas_set_num_threads");
    auto found = (sgemm_function)dlsym(library, "sgemm_");
    if (threads) threads(1);
    return found;
}

// The BLAS's, or null. One that is named and will not do is worth a line, not an error: loops do it too, more slowly.
// No other BLAS takes its place, since whoever names one wants to see that one at work.
sgemm_function find_sgemm() {
    const char *wanted = getenv("BOOKENDS_BLAS");
    if (!wanted || !*wanted) {
        const sgemm_function found = sgemm_of("libopenblas.so.0");
        return found ? found : sgemm_of("libblas.so.3");
    }
    if (std::string(wanted) == "none") return nullptr;
    const sgemm_function found = sgemm_of(wanted);
    const char *why = found ? nullptr : dlerror();
    if (!found) fprintf(stderr, "BOOKENDS_BLAS: %s; products are made by loops\n", why ? why : wanted);
    return found;
}

// ---------------------------------------------------------------------------------------------------------------------
// a product

struct Product {
    cublasLtMatmulDescOpaque desc;
    cublasLtMatrixLayoutOpaque a, b, d;
    const void *A, *B, *C;
    void *D;
    float alpha, beta;
    int depth_step; // so many terms of a sum are added up before they are added to the others
    long long m, n, k;
};

constexpr long long block_rows = 128, block_cols = 64;

// sum (cols, rows) += A (rows, depth) * B (cols, depth): columns of A and B lie behind each other.
void multiply(float *sum, const float *A, const float *B, long long rows, long long cols, long long depth) {
    for (long long j = 0; j < cols; j++) {
        for (long long l = 0; l < depth; l++) {
            const float factor = B[l * cols + j];
            for (long long i = 0; i < rows; i++) sum[j * rows + i] += A[l * rows + i] * factor;
        }
    }
}

// The block of D from row i0 and column j0 on.
void make_block(const Product &p, long long i0, long long j0, sgemm_function sgemm) {
    const long long rows = std::min(block_rows, p.m - i0), cols = std::min(block_cols, p.n - j0);
    std::vector<float> sum((size_t)(rows * cols)), part(sum.size()), A, B, before((size_t)rows), bias((size_t)rows);
    const bool a_transposed = p.desc.transposed[0] == CUBLAS_OP_T, b_transposed = p.desc.transposed[1] == CUBLAS_OP_T;
    for (long long l0 = 0; l0 < p.k; l0 += p.depth_step) {
        const long long depth = std::min<long long>(p.depth_step, p.k - l0);
        A.resize((size_t)(rows * depth));
        B.resize((size_t)(cols * depth));
        for (long long l = 0; l < depth; l++) {
            const long long a = a_transposed ? i0 * p.a.ld + l0 + l : (l0 + l) * p.a.ld + i0;
            const long long b = b_transposed ? (l0 + l) * p.b.ld + j0 : j0 * p.b.ld + l0 + l;
            read(&A[l * rows], p.a.type, p.A, a, a_transposed ? p.a.ld : 1, rows);
            read(&B[l * cols], p.b.type, p.B, b, b_transposed ? 1 : p.b.ld, cols);
        }
        std::fill(part.begin(), part.end(), 0.0f);
        if (sgemm) {
            const int m = (int)rows, n = (int)cols, k = (int)depth;
            const float one = 1, zero = 0;
            sgemm("N", "T", &m, &n, &k, &one, A.data(), &m, B.data(), &n, &zero, part.data(), &m);
        } else {
            multiply(part.data(), A.data(), B.data(), rows, cols, depth);
        }
        for (size_t i = 0; i < sum.size(); i++) sum[i] += part[i];
    }
    if (p.desc.epilogue == CUBLASLT_EPILOGUE_BIAS) read(bias.data(), p.d.type, p.desc.bias, i0, 1, rows);
    for (long long j = 0; j < cols; j++) {
        const long long first = (j0 + j) * p.d.ld + i0;
        if (p.beta != 0) read(before.data(), p.d.type, p.C, first, 1, rows);
        for (long long i = 0; i < rows; i++) {
            float &value = sum[j * rows + i];
            value = p.alpha * value + bias[i];
            if (p.beta != 0) value += p.beta * before[i];
        }
        write(p.d.type, p.D, first, &sum[j * rows], rows);
    }
}

void cublasLt_matmul() {} // the name that an error would give

bool aligned(const void *p, uint64_t bytes) { return (uintptr_t)p % bytes == 0; }

} // namespace

// ---------------------------------------------------------------------------------------------------------------------
// the functions

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
    if (!handle) return CUBLAS_STATUS_INVALID_VALUE;
    *handle = new cublasLtContext;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    delete handle;
    return CUBLAS_STATUS_SUCCESS;
}

size_t cublasLtGetVersion(void) { return 1; }

const char *cublasLtGetStatusName(cublasStatus_t status) {
    switch (status) {
    case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_ALLOC_FAILED: return "CUBLAS_STATUS_ALLOC_FAILED";
    case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_ARCH_MISMATCH: return "CUBLAS_STATUS_ARCH_MISMATCH";
    case CUBLAS_STATUS_EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_INTERNAL_ERROR: return "CUBLAS_STATUS_INTERNAL_ERROR";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
    }
    return "unknown";
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc, cublasComputeType_t compute, cudaDataType_t scale) {
    if (!desc) return CUBLAS_STATUS_INVALID_VALUE;
    const bool known = compute == CUBLAS_COMPUTE_32F || compute == CUBLAS_COMPUTE_32F_FAST_TF32;
    if (!known || scale != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
    *desc = new cublasLtMatmulDescOpaque;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
    delete desc;
    return CUBLAS_STATUS_SUCCESS;
}

template <class T> static cublasStatus_t set(T *to, const void *value, size_t bytes) {
    if (!value || bytes != sizeof(T)) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(to, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t bytes) {
    int32_t unused;
    if (!desc) return CUBLAS_STATUS_INVALID_VALUE;
    switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA: return set(&desc->transposed[0], value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB: return set(&desc->transposed[1], value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE: return set(&desc->epilogue, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return set(&desc->bias, value, bytes);
    case CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET: return set(&unused, value, bytes);
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType_t type, uint64_t rows,
                                          uint64_t cols, int64_t ld) {
    const bool known = type == CUDA_R_32F || type == CUDA_R_16F || type == CUDA_R_16BF;
    if (!layout || !known || rows == 0 || cols == 0 || ld < (int64_t)rows) return CUBLAS_STATUS_INVALID_VALUE;
    *layout = new cublasLtMatrixLayoutOpaque{type, (long long)rows, (long long)cols, (long long)ld};
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    delete layout;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference) {
    if (!preference) return CUBLAS_STATUS_INVALID_VALUE;
    *preference = new cublasLtMatmulPreferenceOpaque;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    delete preference;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void *value,
                                                    size_t bytes) {
    if (!preference) return CUBLAS_STATUS_INVALID_VALUE;
    switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return set(&preference->workspace, value, bytes);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: return set(&preference->schemes, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES: return set(&preference->alignment[0], value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES: return set(&preference->alignment[1], value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES: return set(&preference->alignment[2], value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: return set(&preference->alignment[3], value, bytes);
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

// Whether the shapes and types fit together.
static cublasStatus_t describe(Product *p, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                               cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d) {
    if (!desc || !a || !b || !c || !d) return CUBLAS_STATUS_INVALID_VALUE;
    p->desc = *desc;
    p->a = *a, p->b = *b, p->d = *d;
    const bool ta = desc->transposed[0] == CUBLAS_OP_T, tb = desc->transposed[1] == CUBLAS_OP_T;
    p->m = ta ? a->cols : a->rows;
    p->k = ta ? a->rows : a->cols;
    p->n = tb ? b->rows : b->cols;
    if ((tb ? b->cols : b->rows) != p->k || d->rows != p->m || d->cols != p->n) return CUBLAS_STATUS_INVALID_VALUE;
    if (c->rows != d->rows || c->cols != d->cols || c->ld != d->ld) return CUBLAS_STATUS_INVALID_VALUE;
    const bool types = a->type == b->type && c->type == d->type && (d->type == a->type || d->type == CUDA_R_32F);
    return types ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t A, cublasLtMatrixLayout_t B,
                                              cublasLtMatrixLayout_t C, cublasLtMatrixLayout_t D,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t *results, int *found) {
    Product p = {};
    if (!handle || !preference || !results || !found || wanted < 1) return CUBLAS_STATUS_INVALID_VALUE;
    if (cublasStatus_t status = describe(&p, desc, A, B, C, D)) return status;
    *found = std::min(wanted, 2);
    for (int i = 0; i < *found; i++) {
        results[i] = {};
        results[i].algo.data[0] = i == 0 ? 256 : 1024; // terms
        for (int j = 0; j < 4; j++) results[i].algo.data[1 + j] = i == 0 ? preference->alignment[j] : 1;
        results[i].workspaceSize = i == 0 ? std::min<uint64_t>(preference->workspace, 1024) : 0;
        results[i].algo.data[5] = results[i].workspaceSize;
        results[i].algo.data[6] = p.n;
        results[i].algo.data[7] = p.k;
    }
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t *algo,
                                                    cublasLtMatmulAlgoConfigAttributes_t attribute, void *value,
                                                    size_t bytes, size_t *written) {
    if (!algo || !value || bytes != sizeof(uint32_t)) return CUBLAS_STATUS_INVALID_VALUE;
    *(uint32_t *)value = attribute == CUBLASLT_ALGO_CONFIG_SPLITK_NUM ? 1 : CUBLASLT_REDUCTION_SCHEME_NONE;
    if (written) *written = bytes;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t A,
                                       cublasLtMatrixLayout_t B, cublasLtMatrixLayout_t C, cublasLtMatrixLayout_t D,
                                       const cublasLtMatmulAlgo_t *algo, cublasLtMatmulHeuristicResult_t *result) {
    Product p = {};
    if (!handle || !algo || !result) return CUBLAS_STATUS_INVALID_VALUE;
    if (cublasStatus_t status = describe(&p, desc, A, B, C, D)) return status;
    const bool same = algo->data[6] == (uint64_t)p.n && algo->data[7] == (uint64_t)p.k;
    if (!same && (A->type != CUDA_R_16BF || p.m % 8)) return CUBLAS_STATUS_NOT_SUPPORTED;
    result->workspaceSize = algo->data[5];
    result->state = CUBLAS_STATUS_SUCCESS;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha, const void *A,
                              cublasLtMatrixLayout_t a, const void *B, cublasLtMatrixLayout_t b, const void *beta,
                              const void *C, cublasLtMatrixLayout_t c, void *D, cublasLtMatrixLayout_t d,
                              const cublasLtMatmulAlgo_t *algo, void *workspace, size_t workspace_bytes,
                              cudaStream_t stream) {
    static const sgemm_function sgemm = find_sgemm();
    Product p = {};
    if (!handle || !alpha || !beta || !algo || !A || !B || !D) return CUBLAS_STATUS_INVALID_VALUE;
    if (cublasStatus_t status = describe(&p, desc, a, b, c, d)) return status;
    p.A = A, p.B = B, p.C = C, p.D = D;
    p.alpha = *(const float *)alpha;
    p.beta = *(const float *)beta;
    p.depth_step = (int)algo->data[0];
    const bool fits = aligned(A, algo->data[1]) && aligned(B, algo->data[2]) && aligned(C, algo->data[3]) &&
                      aligned(D, algo->data[4]) && workspace_bytes >= algo->data[5] && (workspace || !algo->data[5]);
    const bool in_elements =
        aligned(A, size_of(a->type)) && aligned(B, size_of(b->type)) && aligned(D, size_of(d->type));
    if (!fits || !in_elements || p.depth_step < 1 || (p.beta != 0 && !C)) return CUBLAS_STATUS_INVALID_VALUE;
    if (p.desc.epilogue == CUBLASLT_EPILOGUE_BIAS && !p.desc.bias) return CUBLAS_STATUS_INVALID_VALUE;
    if (algo->data[5]) cudaMemsetAsync(workspace, 0x5a, algo->data[5], stream); // whoever keeps something there sees it
    const long long across = (p.m + block_rows - 1) / block_rows;
    const long long blocks = across * ((p.n + block_cols - 1) / block_cols);
    const cudaLaunchConfig_t where = {dim3((unsigned)blocks), dim3(1), 0, stream, nullptr, 0};
    const cudaError_t error = cpu::launch((const void *)cublasLt_matmul, &where, [p, across] {
        make_block(p, blockIdx.x % across * block_rows, blockIdx.x / across * block_cols, sgemm);
    });
    return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}
