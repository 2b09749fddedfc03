// The C library over the kernel files: argument checks, and from a bk_dtype and a version number to a launcher.
#define BOOKENDS_NO_MAIN
#include "../../classifier_fused.cu"
#include "../../encoder_backward.cu"
#include "../../encoder_forward.cu"

#include "bookends.h"

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
    ClassifierOptions o;
    if (options) {
        o = {options->dloss,           options->logit_scale, options->softcap,
             options->label_smoothing, options->z_loss,      options->ignore_index};
    }
    if (!valid_options(o)) return BK_ERROR_OPTIONS;
    return with_type(dtype, [=](auto type) {
        return classifier_fused<decltype(type)>(dlogits, losses, lse, probs, correct, logits, targets, dlosses, status,
                                                N, V, P, o, version, stream);
    });
}
