// bk_lm_head_...: argument checks, and from bk_dtypes and a version number to a plan and its launcher.
#define BOOKENDS_NO_MAIN
#include "../../lm_head.cu"

#include "classifier.h"

using namespace bookends;

BOOKENDS_CLASSIFIER(extern template, float);
BOOKENDS_CLASSIFIER(extern template, half);
BOOKENDS_CLASSIFIER(extern template, __nv_bfloat16);

struct bk_lm_head {
    LmHead plan;
    bk_dtype dtype, grad_dtype;
};

extern "C" void bk_lm_head_destroy(bk_lm_head *plan) {
    if (plan) lm_head_destroy(plan->plan);
    delete plan;
}

// The plan's error; its words go by way of the plan.
static int make_plan(const Call &call, LmHead &plan, LmHeadProblem problem) {
    const size_t memory = problem.memory;
    problem.enough = memory == 0;
    if (problem.enough) problem.memory = (size_t)(lm_head_logits_bytes(problem) / 4);
    const cudaError_t error = lm_head_create(plan, problem);
    if (error == cudaErrorMemoryAllocation && plan.rows == 0) return call.fail(BK_ERROR_MEMORY, "%s", plan.what);
    if (error != cudaSuccess) return call.fail(BK_ERROR_CUDA + (int)error, "%s", plan.what);
    if (memory == 0 || plan.bytes <= memory) return BK_OK;
    return call.fail(BK_ERROR_MEMORY, "%zu bytes of scratch are too few: %zu are enough", memory, plan.bytes);
}

extern "C" int bk_lm_head_create(bk_lm_head **plan, int N, int C, int V, int flags,
                                 const bk_classifier_options *options, size_t memory, bk_dtype dtype,
                                 bk_dtype grad_dtype, int version) {
    static constexpr Call call = {"bk_lm_head_create"};
    if (!plan) return call.not_null({{"plan", plan}});
    *plan = nullptr;
    if (const int error = call.not_negative({{"N", N}, {"C", C}, {"V", V}})) return error;
    if (lm_head_pad(V) > INT32_MAX) return call.fail(BK_ERROR_SHAPE, "V is %d, which is too large", V);
    if (flags & ~31) return call.fail(BK_ERROR_FLAGS, "flags is %d", flags);
    if (dtype < BK_FP32 || dtype > BK_BF16) return call.fail(BK_ERROR_DTYPE, "there is no dtype %d", dtype);
    if (grad_dtype != dtype && grad_dtype != BK_FP32) {
        return call.fail(BK_ERROR_DTYPE, "grad_dtype is %d: neither dtype, %d, nor BK_FP32", grad_dtype, dtype);
    }
    if (!find_version(lm_head_versions<float, float>, version)) return call.no_version(version);
    const cudaDataType_t types[] = {CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF};
    LmHeadProblem problem;
    problem.N = N;
    problem.C = C;
    problem.V = V;
    problem.type = types[dtype];
    problem.gradient_type = types[grad_dtype];
    problem.dX = (flags & BK_LM_HEAD_DX) && C > 0;  // what has no elements is in no plan
    problem.dW = (flags & BK_LM_HEAD_DW) && C > 0 && V > 0;
    problem.dbias = (flags & BK_LM_HEAD_DBIAS) && V > 0;
    problem.bias = (flags & BK_LM_HEAD_BIAS) && V > 0;
    problem.tf32 = (flags & BK_LM_HEAD_TF32) && dtype == BK_FP32;
    problem.options = options_of(options);
    problem.memory = memory;
    problem.version = find_version(lm_head_versions<float, float>, version)->number;
    if (const int error = check_options(call, problem.options)) return error;
    const KeepPendingError keep;
    bk_lm_head *const made = new (std::nothrow) bk_lm_head{{}, dtype, grad_dtype};
    if (!made) return call.from_cuda(cudaErrorMemoryAllocation);
    int error;
    try {
        error = make_plan(call, made->plan, problem);
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

extern "C" size_t bk_lm_head_workspace_bytes(const bk_lm_head *plan) { return plan ? plan->plan.bytes : 0; }

// BK_OK if a pointer is there or not, as the plan says.
static int as_planned(const Call &call, const char *name, const void *pointer, bool wanted) {
    if ((pointer != nullptr) == wanted) return BK_OK;
    return wanted ? call.fail(BK_ERROR_NULL, "%s is null, and the plan has it", name)
                  : call.fail(BK_ERROR_NOT_NULL, "%s must be null: the plan has none", name);
}

// run(the plan's pointers in their types), if they are as the plan says. Arrays that have no elements may be null, as
// torch's are, or not: for the plan they are.
template <typename Run>
static int with_plan(const Call &call, const bk_lm_head *plan, LmHeadArguments<void, void> a, bool tuning, Run run) {
    if (!plan) return call.not_null({{"plan", plan}});
    const LmHeadProblem &p = plan->plan.problem;
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
    if (error == BK_OK && plan->plan.bytes > 0) error = call.not_null({{"workspace", a.workspace}});
    if (error != BK_OK) return error;
    if (!plan->plan.can_use(a.workspace)) {
        return call.fail(BK_ERROR_ALIGNMENT, "workspace is not at a multiple of %zu bytes", kWorkspaceAlignment);
    }
    const KeepPendingError keep;
    return call.with_type(plan->dtype, [&](auto type) {
        typedef decltype(type) floatX;
        auto with = [&](auto grad) {
            typedef decltype(grad) gradX;
            const LmHeadArguments<floatX, gradX> args = {
                (floatX *)a.dX,      (gradX *)a.dW,          (gradX *)a.dbias, a.losses,  a.lse,    (const floatX *)a.X,
                (const floatX *)a.W, (const floatX *)a.bias, a.targets,        a.dlosses, a.status, a.workspace};
            const cudaError_t error = run(args);
            const char *const what = plan->plan.what;  // why a product is missing
            if (error != cudaErrorNotSupported || what[0] == 0) return call.from_cuda(error);
            return call.fail(BK_ERROR_CUDA + (int)error, "%s", what);
        };
        return plan->grad_dtype == plan->dtype ? with(floatX()) : with(float());
    });
}

extern "C" int bk_lm_head_tune(bk_lm_head *plan, void *dX, void *dW, const void *X, const void *W, const void *bias,
                               void *workspace, bk_stream stream) {
    static constexpr Call call = {"bk_lm_head_tune"};
    const LmHeadArguments<void, void> given = {dX, dW,   nullptr, nullptr, nullptr, X,
                                               W,  bias, nullptr, nullptr, nullptr, (char *)workspace};
    return with_plan(call, plan, given, true, [=](const auto &args) { return lm_head_tune(plan->plan, args, stream); });
}

extern "C" int bk_lm_head_run(const bk_lm_head *plan, void *dX, void *dW, void *dbias, float *losses, float *lse,
                              const void *X, const void *W, const void *bias, const int32_t *targets,
                              const float *dlosses, int64_t *status, void *workspace, bk_stream stream) {
    static constexpr Call call = {"bk_lm_head_run"};
    const LmHeadArguments<void, void> given = {
        dX, dW, dbias, losses, lse, X, W, bias, targets, dlosses, (status_word *)status, (char *)workspace};
    return with_plan(call, plan, given, false, [=](const auto &args) { return lm_head(plan->plan, args, stream); });
}
