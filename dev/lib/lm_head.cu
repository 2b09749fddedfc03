// bk_lm_head_...: argument checks, and the choice of a plan and its launcher by bk_dtypes and version number.
#define BOOKENDS_NO_MAIN
#include "../../lm_head.cu"

#include "classifier.h"

using namespace bookends;

BOOKENDS_CLASSIFIER(extern template, float);
BOOKENDS_CLASSIFIER(extern template, half);
BOOKENDS_CLASSIFIER(extern template, __nv_bfloat16);

struct bk_lm_head {
    LmHead head;
    int version;
    bk_dtype dtype, grad_dtype;
};

extern "C" void bk_lm_head_destroy(bk_lm_head *plan) {
    if (plan) lm_head_destroy(plan->head);
    delete plan;
}

// Makes a plan of at most `memory` bytes; 0: of a share of the logits, or of the least amount for a practical plan.
// least: null, or receives the bytes that suffice if these do not.
static int make_plan(const Call &call, LmHead &head, LmHeadProblem problem, const ClassifierOptions &options,
                     size_t memory, double share, size_t *least) {
    const double of_logits = (share > 0 ? share : 0.25) * lm_head_logits_bytes(problem);
    problem.may_exceed_memory = memory == 0;
    problem.memory = memory == 0 ? (size_t)std::min(of_logits, 0x1p62) : memory;
    const cudaError_t error = lm_head_create(head, problem, options);
    const bool too_few = error == cudaErrorMemoryAllocation && head.plan.rows == 0;
    const bool too_many = error == cudaSuccess && memory > 0 && head.plan.bytes > memory;  // all logits are held
    if (least && (too_few || too_many)) *least = too_few ? head.least : head.plan.bytes;
    if (too_few) return call.fail(BK_ERROR_MEMORY, "%s", head.what);
    if (error != cudaSuccess) return call.fail(BK_ERROR_CUDA + (int)error, "%s", head.what);
    if (!too_many) return BK_OK;
    return call.fail(BK_ERROR_MEMORY, "%zu bytes of scratch are too few: %zu are enough", memory, head.plan.bytes);
}

extern "C" int bk_lm_head_create(bk_lm_head **plan, int N, int C, int V, int flags,
                                 const bk_classifier_options *options, size_t memory, double share, bk_dtype dtype,
                                 bk_dtype grad_dtype, int version, size_t *least) {
    static constexpr Call call = {"bk_lm_head_create"};
    if (least) *least = 0;
    if (!plan) return call.not_null({{"plan", plan}});
    *plan = nullptr;
    if (const int error = call.not_negative({{"N", N}, {"C", C}, {"V", V}})) return error;
    if (lm_head_pad(V) > INT32_MAX) return call.fail(BK_ERROR_SHAPE, "V is %d, which is too large", V);
    if (flags & ~63) return call.fail(BK_ERROR_FLAGS, "flags is %d", flags);
    if (dtype < BK_FP32 || dtype > BK_BF16) return call.fail(BK_ERROR_DTYPE, "there is no dtype %d", dtype);
    if (grad_dtype != dtype && grad_dtype != BK_FP32) {
        return call.fail(BK_ERROR_DTYPE, "grad_dtype is %d: neither dtype, %d, nor BK_FP32", grad_dtype, dtype);
    }
    const auto *const row = find_version(lm_head_versions<float, float>, version);
    if (!row) return call.no_version(version);
    if (const int error = check_options(call, options)) return error;
    if (!(share >= 0) || std::isinf(share)) return call.fail(BK_ERROR_OPTIONS, "share is %g", share);
    if (memory > 0 && share > 0) {
        return call.fail(BK_ERROR_OPTIONS, "memory is %zu and share %g: one of them must be 0", memory, share);
    }
    const LmHeadType types[] = {kFp32, kFp16, kBf16};
    LmHeadProblem problem;
    problem.N = N;
    problem.C = C;
    problem.V = V;
    problem.type = types[dtype];
    problem.gradient_type = types[grad_dtype];
    problem.dX = (flags & BK_LM_HEAD_DX) && C > 0;  // arrays without elements are in no plan
    problem.dW = (flags & BK_LM_HEAD_DW) && C > 0 && V > 0;
    problem.dbias = (flags & BK_LM_HEAD_DBIAS) && V > 0;
    problem.bias = (flags & BK_LM_HEAD_BIAS) && V > 0;
    problem.tf32 = (flags & BK_LM_HEAD_TF32) && dtype == BK_FP32;
    problem.finite = (flags & BK_LM_HEAD_FINITE) != 0;
    problem.way = row->properties.way;
    const KeepPendingError keep;
    bk_lm_head *const made = new (std::nothrow) bk_lm_head{{}, row->number, dtype, grad_dtype};
    if (!made) return call.from_cuda(cudaErrorMemoryAllocation);
    int error;
    try {
        error = make_plan(call, made->head, problem, options_of(options), memory, share, least);
    } catch (const std::bad_alloc &) {
        error = call.from_cuda(cudaErrorMemoryAllocation);
    }
    if (error == BK_OK) {
        *plan = made;
    } else {
        bk_lm_head_destroy(made);
    }
    return error;
}

extern "C" size_t bk_lm_head_workspace_bytes(const bk_lm_head *plan) { return plan ? plan->head.plan.bytes : 0; }

extern "C" int bk_lm_head_describe(const bk_lm_head *plan, bk_lm_head_description *description, size_t size) {
    static constexpr Call call = {"bk_lm_head_describe"};
    if (const int error = call.not_null({{"plan", plan}, {"description", description}})) return error;
    const LmHeadPlan &p = plan->head.plan;
    const char *const ways[] = {"textbook", "rows", "rows", "vocabulary", "epilogue"};  // of an LmHeadWay
    const double all = lm_head_logits_bytes(p.problem);
    bk_lm_head_description d = {};
    d.way = ways[p.way];
    d.version = plan->version;
    d.rows = p.rows;
    d.columns = p.columns;
    d.buffers = p.buffers;
    d.share = all > 0 ? p.bytes / all : 0;
    d.bytes = p.bytes;
    d.statistics_bytes = p.statistics_bytes;
    d.logits_bytes = p.probs - p.logits;  // a part ends at the beginning of the next one
    d.probs_bytes = p.X - p.probs;
    d.X_bytes = p.dX - p.X;
    d.dX_bytes = p.dW - p.dX;
    d.dW_bytes = p.dbias - p.dW;
    d.dbias_bytes = p.gemm - p.dbias;
    d.gemm_bytes = p.gemm_bytes;
    memcpy(description, &d, std::min(size, sizeof(d)));
    return BK_OK;
}

// A blob of tuning results: the device and the plan to which they apply, the algorithm of each product, and a checksum.
struct TuningHeader {
    char magic[8];
    uint64_t cublas, multiprocessors, compute_capability, bytes, gemm_bytes;
    char device[sizeof(cudaDeviceProp::name)];
    int32_t sizes[4], types[2], gradients[2], cut[4], version, products;
};
struct TuningProduct {
    int32_t kind, rows, columns, aligned;
    cublasLtMatmulAlgo_t algorithm;  // the same version of cuBLASLt accepts it again, as its documentation says
};

static uint64_t checksum(const void *bytes, size_t count) {
    uint64_t sum = count;
    for (size_t i = 0; i < count; i++) sum = mix64(sum ^ ((const unsigned char *)bytes)[i]);
    return sum;
}

static cudaError_t describe_tuning(TuningHeader &header, const bk_lm_head &of) {
    const LmHeadPlan &plan = of.head.plan;
    const LmHeadProblem &p = plan.problem;
    int device = 0;
    cudaDeviceProp about;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaGetDeviceProperties(&about, device);
    if (error != cudaSuccess) return error;
    memset(&header, 0, sizeof(header));
    memcpy(header.magic, "bktune2", 8);
    header.cublas = cublasLtGetVersion();
    header.multiprocessors = about.multiProcessorCount;
    header.compute_capability = 10 * about.major + about.minor;
    header.bytes = plan.bytes;
    header.gemm_bytes = plan.gemm_bytes;
    memcpy(header.device, about.name, strnlen(about.name, sizeof(about.name)));
    const int32_t sizes[] = {p.N, p.C, p.V, plan.P}, types[] = {p.type, p.gradient_type};
    const int32_t gradients[] = {p.dX, p.dW | p.bias << 1 | p.dbias << 2 | p.tf32 << 3 | p.finite << 4};
    const int32_t cut[] = {plan.way, plan.rows, plan.columns, plan.buffers};
    memcpy(header.sizes, sizes, sizeof(sizes));
    memcpy(header.types, types, sizeof(types));
    memcpy(header.gradients, gradients, sizeof(gradients));
    memcpy(header.cut, cut, sizeof(cut));
    header.version = of.version;
    header.products = (int32_t)of.head.gemms.size();
    return cudaSuccess;
}

extern "C" size_t bk_lm_head_tuning_bytes(const bk_lm_head *plan) {
    if (!plan) return 0;
    return sizeof(TuningHeader) + plan->head.gemms.size() * sizeof(TuningProduct) + sizeof(uint64_t);
}

extern "C" int bk_lm_head_save_tuning(const bk_lm_head *plan, void *blob, size_t bytes) {
    static constexpr Call call = {"bk_lm_head_save_tuning"};
    if (const int error = call.not_null({{"plan", plan}, {"blob", blob}})) return error;
    const size_t needed = bk_lm_head_tuning_bytes(plan);
    if (bytes < needed) return call.fail(BK_ERROR_SHAPE, "bytes is %zu: the blob takes %zu", bytes, needed);
    const KeepPendingError keep;
    TuningHeader header;
    const cudaError_t error = describe_tuning(header, *plan);
    if (error != cudaSuccess) return call.from_cuda(error);
    char *next = (char *)blob;
    auto put = [&](const auto &part) {
        memcpy(next, &part, sizeof(part));
        next += sizeof(part);
    };
    put(header);
    for (const LmHeadGemm &g : plan->head.gemms) {
        TuningProduct product = {g.kind, g.rows, g.columns, g.aligned, {}};
        if (!g.gemm.candidates.empty()) product.algorithm = g.gemm.candidates[g.gemm.chosen].algo;
        put(product);
    }
    put(checksum(blob, next - (char *)blob));
    return BK_OK;
}

extern "C" int bk_lm_head_restore_tuning(bk_lm_head *plan, const void *blob, size_t bytes) {
    static constexpr Call call = {"bk_lm_head_restore_tuning"};
    if (const int error = call.not_null({{"plan", plan}, {"blob", blob}})) return error;
    const size_t needed = bk_lm_head_tuning_bytes(plan);
    if (bytes != needed) return call.fail(BK_ERROR_TUNING, "bytes is %zu: this plan's blobs take %zu", bytes, needed);
    const char *next = (const char *)blob;
    auto get = [&](auto &part) {
        memcpy(&part, next, sizeof(part));
        next += sizeof(part);
    };
    const KeepPendingError keep;
    TuningHeader wanted, header;
    const cudaError_t error = describe_tuning(wanted, *plan);
    if (error != cudaSuccess) return call.from_cuda(error);
    get(header);
    if (memcmp(&header, &wanted, sizeof(header)) != 0) {
        return call.fail(BK_ERROR_TUNING, "the blob is of another plan, device or version of cuBLASLt, or damaged");
    }
    uint64_t sum;
    memcpy(&sum, (const char *)blob + bytes - sizeof(sum), sizeof(sum));
    if (sum != checksum(blob, bytes - sizeof(sum))) return call.fail(BK_ERROR_TUNING, "the blob is damaged");
    // Only an algorithm that cuBLASLt has proposed for this plan is ever run. All are found before one is chosen.
    std::vector<LmHeadGemm> &gemms = plan->head.gemms;
    std::vector<size_t> chosen;
    for (const LmHeadGemm &g : gemms) {
        TuningProduct product;
        get(product);
        const bool same = product.kind == g.kind && product.rows == g.rows && product.columns == g.columns &&
                          product.aligned == g.aligned;
        const auto &candidates = g.gemm.candidates;
        const auto found = std::find_if(candidates.begin(), candidates.end(), [&](const auto &candidate) {
            return memcmp(&candidate.algo, &product.algorithm, sizeof(product.algorithm)) == 0;
        });
        if (!same || (found == candidates.end() && !candidates.empty())) {
            return call.fail(BK_ERROR_TUNING, "cuBLASLt does not propose an algorithm of the blob");
        }
        chosen.push_back(candidates.empty() ? 0 : found - candidates.begin());
    }
    for (size_t i = 0; i < gemms.size(); i++) gemms[i].gemm.chosen = chosen[i];
    return BK_OK;
}

// BK_OK if the pointer is null, or is not, as the plan requires.
static int as_planned(const Call &call, const char *name, const void *pointer, bool wanted) {
    if ((pointer != nullptr) == wanted) return BK_OK;
    return wanted ? call.fail(BK_ERROR_NULL, "%s is null, and the plan has it", name)
                  : call.fail(BK_ERROR_NOT_NULL, "%s must be null: the plan has none", name);
}

// Calls run() with the plan's pointers in their types if they are as the plan requires. Arrays without elements may be
// null, as torch's are, or not null.
template <typename Run>
static int with_plan(const Call &call, const bk_lm_head *plan, LmHeadArguments<void, void> a, bool tuning, Run run) {
    if (!plan) return call.not_null({{"plan", plan}});
    const LmHeadPlan &planned = plan->head.plan;
    const LmHeadProblem &p = planned.problem;
    if (p.N == 0) return BK_OK;
    if (p.C == 0) a.dX = nullptr;
    if (p.C == 0 || p.V == 0) a.dW = nullptr;
    if (p.V == 0) a.dbias = nullptr;
    if (p.V == 0) a.bias = nullptr;
    int error = as_planned(call, "dX", a.dX, p.dX);
    if (error == BK_OK) error = as_planned(call, "dW", a.dW, p.dW);
    if (error == BK_OK && !tuning) error = as_planned(call, "dbias", a.dbias, p.dbias);
    if (error == BK_OK) error = as_planned(call, "bias", a.bias, p.bias);
    if (error == BK_OK && p.C > 0) error = call.not_null({{"X", a.X}});
    if (error == BK_OK && p.C > 0 && p.V > 0) error = call.not_null({{"W", a.W}});
    if (error == BK_OK && !tuning) error = call.not_null({{"targets", a.targets}});
    if (error == BK_OK && planned.bytes > 0) error = call.not_null({{"workspace", a.workspace}});
    if (error != BK_OK) return error;
    if (!planned.can_use(a.workspace)) {
        return call.fail(BK_ERROR_ALIGNMENT, "workspace is not at a multiple of %zu bytes", kWorkspaceAlignment);
    }
    const KeepPendingError keep;
    return call.with_type(plan->dtype, [&](auto type) {
        typedef decltype(type) floatX;
        auto with = [&](auto grad) {
            typedef decltype(grad) gradX;
            const LmHeadArguments<floatX, gradX> args = {(floatX *)a.dX,
                                                         (gradX *)a.dW,
                                                         (gradX *)a.dbias,
                                                         a.losses,
                                                         a.lse,
                                                         (const floatX *)a.X,
                                                         (const floatX *)a.W,
                                                         (const floatX *)a.bias,
                                                         a.targets,
                                                         a.dlosses,
                                                         a.status,
                                                         a.workspace,
                                                         a.options};
            const cudaError_t ran = run(args);
            const char *const what = plan->head.what;  // the reason why a product is missing
            if (ran != cudaErrorNotSupported || what[0] == 0) return call.from_cuda(ran);
            return call.fail(BK_ERROR_CUDA + (int)ran, "%s", what);
        };
        return plan->grad_dtype == plan->dtype ? with(floatX()) : with(float());
    });
}

extern "C" int bk_lm_head_tune(bk_lm_head *plan, void *dX, void *dW, const void *X, const void *W, const void *bias,
                               void *workspace, bk_stream stream) {
    static constexpr Call call = {"bk_lm_head_tune"};
    const LmHeadArguments<void, void> given = {dX,   dW,      nullptr, nullptr, nullptr,           X,      W,
                                               bias, nullptr, nullptr, nullptr, (char *)workspace, nullptr};
    return with_plan(call, plan, given, true, [=](const auto &args) { return lm_head_tune(plan->head, args, stream); });
}

template <typename floatX, typename gradX>
static cudaError_t run_version(const bk_lm_head &plan, const LmHeadArguments<floatX, gradX> &args,
                               cudaStream_t stream) {
    return find_version(lm_head_versions<floatX, gradX>, plan.version)->launch(plan.head, args, stream);
}

extern "C" int bk_lm_head_run(const bk_lm_head *plan, void *dX, void *dW, void *dbias, float *losses, float *lse,
                              const void *X, const void *W, const void *bias, const int32_t *targets,
                              const float *dlosses, int64_t *status, const bk_classifier_options *options,
                              void *workspace, bk_stream stream) {
    static constexpr Call call = {"bk_lm_head_run"};
    if (const int error = check_options(call, options)) return error;
    const ClassifierOptions own = options_of(options);
    if (plan && options && !lm_head_takes(plan->head, own)) {
        const ClassifierOptions &planned = plan->head.options;
        return call.fail(
            BK_ERROR_OPTIONS,
            "logit_scale is %g and softcap %g, the plan was made for %g and %g: the sign of the former, and "
            "whether the latter is 0, must stay",
            own.logit_scale, own.softcap, planned.logit_scale, planned.softcap);
    }
    const ClassifierOptions *const of_run = options ? &own : nullptr;
    const LmHeadArguments<void, void> given = {
        dX, dW, dbias, losses, lse, X, W, bias, targets, dlosses, (status_word *)status, (char *)workspace, of_run};
    return with_plan(call, plan, given, false, [=](const auto &args) { return run_version(*plan, args, stream); });
}
