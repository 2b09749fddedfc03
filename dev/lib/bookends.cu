// The C library over the kernel files: argument checks, and from a bk_dtype and a version number to a launcher.
#define BOOKENDS_NO_MAIN
#include "../../encoder_backward.cu"
#include "../../encoder_forward.cu"
#include "../../lm_head.cu"  // and classifier_fused.cu with it

#include "bookends.h"

using namespace bookends;

static int from_cuda(cudaError_t error) { return error == cudaSuccess ? BK_OK : BK_ERROR_CUDA + (int)error; }

extern "C" const char *bk_error_string(int error) {
    switch (error) {
        case BK_OK:
            return "no error";
        case BK_ERROR_NULL:
            return "a pointer is null";
        case BK_ERROR_SHAPE:
            return "a size is negative or too large, or P is less than V";
        case BK_ERROR_DTYPE:
            return "no such dtype, or two that don't go together";
        case BK_ERROR_VERSION:
            return "no such version";
        case BK_ERROR_UNSUPPORTED:
            return "this version cannot do that";
        case BK_ERROR_FLAGS:
            return "no such flag";
        case BK_ERROR_OPTIONS:
            return "an option is not finite or outside its range";
        case BK_ERROR_MEMORY:
            return "the budget for scratch memory is too small";
        default:
            return error > BK_ERROR_CUDA ? cudaGetErrorString((cudaError_t)(error - BK_ERROR_CUDA)) : "no such error";
    }
}

// run() with a value of that type, which only names it.
template <typename Run>
static int with_type(bk_dtype dtype, Run run) {
    switch (dtype) {
        case BK_FP32:
            return run(float());
        case BK_FP16:
            return run(half());
        case BK_BF16:
            return run(__nv_bfloat16());
    }
    return BK_ERROR_DTYPE;
}

template <typename floatX>
static int encoder_forward(void *out, const int32_t *inp, const void *wte, const void *wpe, int64_t *status, int B,
                           int T, int C, int V, int number, cudaStream_t stream) {
    const auto *version = find_version(encoder_forward_versions<floatX>, number);
    if (version == nullptr) return BK_ERROR_VERSION;
    if (B == 0 || T == 0 || C == 0) return BK_OK;
    if (!out || !inp || (!wte && V > 0) || !wpe) return BK_ERROR_NULL;
    cudaGetLastError();  // an error that an earlier call left behind is not this launch's
    return from_cuda(version->launch((floatX *)out, inp, (const floatX *)wte, (const floatX *)wpe,
                                     (status_word *)status, B, T, C, V, version->block_size, stream));
}

extern "C" int bk_encoder_forward(void *out, const int32_t *inp, const void *wte, const void *wpe, int64_t *status,
                                  int B, int T, int C, int V, bk_dtype dtype, int version, bk_stream stream) {
    if (B < 0 || T < 0 || C < 0 || V < 0) return BK_ERROR_SHAPE;
    return with_type(dtype, [=](auto type) {
        return encoder_forward<decltype(type)>(out, inp, wte, wpe, status, B, T, C, V, version, stream);
    });
}

template <typename floatX, typename gradX>
static int encoder_backward(void *dwte, void *dwpe, const void *dout, const int32_t *inp, int64_t *status,
                            void *workspace, int B, int T, int C, int V, int flags, uint64_t seed, int number,
                            cudaStream_t stream) {
    const auto *version = find_version(encoder_backward_versions<floatX, gradX>, number);
    if (version == nullptr) return BK_ERROR_VERSION;
    const GradientStore store = {(flags & BK_OVERWRITE) != 0, (flags & BK_STOCHASTIC) != 0, seed};
    if (!dwte && !dwpe) return BK_OK;
    if (B > 0 && T > 0 && C > 0) {
        if (!dout || !inp) return BK_ERROR_NULL;
        if (!workspace && bk_encoder_backward_workspace_bytes(B, T, C, V, number) > 0) return BK_ERROR_NULL;
    }
    cudaGetLastError();  // an error that an earlier call left behind is not this launch's
    const cudaError_t error =
        version->launch((gradX *)dwte, (gradX *)dwpe, (const floatX *)dout, inp, (status_word *)status, workspace, B, T,
                        C, V, store, version->block_size, stream);
    return error == cudaErrorNotSupported ? BK_ERROR_UNSUPPORTED : from_cuda(error);
}

extern "C" size_t bk_encoder_backward_workspace_bytes(int B, int T, int C, int V, int version) {
    if (B < 0 || T < 0 || C < 0 || V < 0 || (long long)B * T > INT32_MAX) return 0;
    return version >= 1 && version <= 3 ? 0 : encoder_backward_workspace_bytes(B, T, C, V);
}

extern "C" int bk_encoder_backward(void *dwte, void *dwpe, const void *dout, const int32_t *inp, int64_t *status,
                                   void *workspace, int B, int T, int C, int V, bk_dtype dtype, bk_dtype grad_dtype,
                                   int flags, uint64_t seed, int version, bk_stream stream) {
    if (B < 0 || T < 0 || C < 0 || V < 0 || (long long)B * T > INT32_MAX) return BK_ERROR_SHAPE;
    if (flags & ~(BK_OVERWRITE | BK_STOCHASTIC)) return BK_ERROR_FLAGS;
    if (grad_dtype != dtype && grad_dtype != BK_FP32) return BK_ERROR_DTYPE;
    return with_type(dtype, [=](auto type) {
        typedef decltype(type) floatX;
        const auto run = grad_dtype == dtype ? encoder_backward<floatX, floatX> : encoder_backward<floatX, float>;
        return run(dwte, dwpe, dout, inp, status, workspace, B, T, C, V, flags, seed, version, stream);
    });
}

static ClassifierOptions options_of(const bk_classifier_options *options) {
    if (!options) return {};
    return {options->dloss,           options->logit_scale, options->softcap,
            options->label_smoothing, options->z_loss,      options->ignore_index};
}

template <typename floatX>
static int classifier_fused(void *dlogits, float *losses, float *lse, void *probs, int32_t *correct, const void *logits,
                            const int32_t *targets, const float *dlosses, int64_t *status, int N, int V, int P,
                            const ClassifierOptions &options, int number, cudaStream_t stream) {
    const auto *version = find_version(classifier_fused_versions<floatX>, number);
    if (version == nullptr) return BK_ERROR_VERSION;
    if (N == 0) return BK_OK;
    if (!targets || (!logits && V > 0)) return BK_ERROR_NULL;
    cudaGetLastError();  // an error that an earlier call left behind is not this launch's
    return from_cuda(version->launch((floatX *)dlogits, losses, lse, (floatX *)probs, correct, (const floatX *)logits,
                                     targets, dlosses, (status_word *)status, N, V, P, options, version->block_size,
                                     stream));
}

extern "C" int bk_classifier_fused(void *dlogits, float *losses, float *lse, void *probs, int32_t *correct,
                                   const void *logits, const int32_t *targets, const float *dlosses, int64_t *status,
                                   int N, int V, int P, const bk_classifier_options *options, bk_dtype dtype,
                                   int version, bk_stream stream) {
    if (N < 0 || V < 0 || P < V) return BK_ERROR_SHAPE;
    const ClassifierOptions o = options_of(options);
    if (!valid_options(o)) return BK_ERROR_OPTIONS;
    return with_type(dtype, [=](auto type) {
        return classifier_fused<decltype(type)>(dlogits, losses, lse, probs, correct, logits, targets, dlosses, status,
                                                N, V, P, o, version, stream);
    });
}

struct bk_lm_head {
    LmHead plan;
    bk_dtype dtype, grad_dtype;
};

extern "C" void bk_lm_head_destroy(bk_lm_head *plan) {
    if (plan) lm_head_destroy(plan->plan);
    delete plan;
}

static int lm_head_make(bk_lm_head *made, LmHeadProblem problem) {
    const size_t memory = problem.memory;
    problem.enough = memory == 0;
    if (problem.enough) problem.memory = (size_t)(lm_head_logits_bytes(problem) / 4);
    const cudaError_t error = lm_head_create(made->plan, problem);
    if (error == cudaErrorMemoryAllocation && made->plan.rows == 0) return BK_ERROR_MEMORY;
    if (error == cudaSuccess && memory > 0 && made->plan.bytes > memory) return BK_ERROR_MEMORY;
    return from_cuda(error);
}

extern "C" int bk_lm_head_create(bk_lm_head **plan, int N, int C, int V, int flags,
                                 const bk_classifier_options *options, size_t memory, bk_dtype dtype,
                                 bk_dtype grad_dtype, int version) {
    if (!plan) return BK_ERROR_NULL;
    *plan = nullptr;
    if (N < 0 || C < 0 || V < 0 || lm_head_pad(V) > INT32_MAX) return BK_ERROR_SHAPE;
    if (flags & ~31) return BK_ERROR_FLAGS;
    if (dtype < BK_FP32 || dtype > BK_BF16 || (grad_dtype != dtype && grad_dtype != BK_FP32)) return BK_ERROR_DTYPE;
    if (!find_version(lm_head_versions<float, float>, version)) return BK_ERROR_VERSION;
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
    if (!valid_options(problem.options)) return BK_ERROR_OPTIONS;
    cudaGetLastError();  // an error that an earlier call left behind is not this call's
    bk_lm_head *const made = new (std::nothrow) bk_lm_head{{}, dtype, grad_dtype};
    if (!made) return from_cuda(cudaErrorMemoryAllocation);
    int error;
    try {
        error = lm_head_make(made, problem);
    } catch (const std::bad_alloc &) {
        error = from_cuda(cudaErrorMemoryAllocation);
    }
    if (error == BK_OK) {
        *plan = made;
    } else {
        bk_lm_head_destroy(made);
    }
    return error;
}

extern "C" size_t bk_lm_head_workspace_bytes(const bk_lm_head *plan) { return plan ? plan->plan.bytes : 0; }

// run(plan's pointers in their types), or BK_ERROR_NULL. Arrays that have no elements may be null, as torch's are,
// or not: for the plan they are.
template <typename Run>
static int with_plan(const bk_lm_head *plan, LmHeadArguments<void, void> a, bool tuning, Run run) {
    if (!plan) return BK_ERROR_NULL;
    const LmHeadProblem &p = plan->plan.problem;
    if (p.N == 0) return BK_OK;
    if (p.C == 0) a.dX = nullptr;
    if (p.C == 0 || p.V == 0) a.dW = nullptr;
    if (p.V == 0) a.dbias = nullptr;
    if (p.V == 0) a.bias = nullptr;
    if (!tuning && ((a.dbias != nullptr) != p.dbias || !a.targets)) return BK_ERROR_NULL;
    if ((a.dX != nullptr) != p.dX || (a.dW != nullptr) != p.dW || (a.bias != nullptr) != p.bias) return BK_ERROR_NULL;
    if ((!a.X && p.C > 0) || (!a.W && p.C > 0 && p.V > 0)) return BK_ERROR_NULL;
    if (!a.workspace && plan->plan.bytes > 0) return BK_ERROR_NULL;
    cudaGetLastError();  // an error that an earlier call left behind is not this launch's
    return with_type(plan->dtype, [&](auto type) {
        typedef decltype(type) floatX;
        auto with = [&](auto grad) {
            typedef decltype(grad) gradX;
            const LmHeadArguments<floatX, gradX> args = {
                (floatX *)a.dX,      (gradX *)a.dW,          (gradX *)a.dbias, a.losses,  a.lse,    (const floatX *)a.X,
                (const floatX *)a.W, (const floatX *)a.bias, a.targets,        a.dlosses, a.status, a.workspace};
            return from_cuda(run(args));
        };
        return plan->grad_dtype == plan->dtype ? with(floatX()) : with(float());
    });
}

extern "C" int bk_lm_head_tune(bk_lm_head *plan, void *dX, void *dW, const void *X, const void *W, const void *bias,
                               void *workspace, bk_stream stream) {
    const LmHeadArguments<void, void> given = {dX, dW,   nullptr, nullptr, nullptr, X,
                                               W,  bias, nullptr, nullptr, nullptr, (char *)workspace};
    return with_plan(plan, given, true, [=](const auto &args) { return lm_head_tune(plan->plan, args, stream); });
}

extern "C" int bk_lm_head_run(const bk_lm_head *plan, void *dX, void *dW, void *dbias, float *losses, float *lse,
                              const void *X, const void *W, const void *bias, const int32_t *targets,
                              const float *dlosses, int64_t *status, void *workspace, bk_stream stream) {
    const LmHeadArguments<void, void> given = {
        dX, dW, dbias, losses, lse, X, W, bias, targets, dlosses, (status_word *)status, (char *)workspace};
    return with_plan(plan, given, false, [=](const auto &args) { return lm_head(plan->plan, args, stream); });
}
