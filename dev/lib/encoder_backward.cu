// bk_encoder_backward: argument checks, and the choice of a launcher by bk_dtypes and version number.
#define BOOKENDS_NO_MAIN
#include "../../encoder_backward.cu"

#include "internal.h"

using namespace bookends;

static constexpr Call call = {"bk_encoder_backward"};

template <typename floatX, typename gradX>
static int encoder_backward(void *dwte, void *dwpe, const void *dout, const int32_t *inp, int64_t *status,
                            void *workspace, int B, int T, int C, int V, int flags, uint64_t seed, int number,
                            cudaStream_t stream) {
    const auto *version = find_version(encoder_backward_versions<floatX, gradX>, number);
    if (version == nullptr) return call.no_version(number);
    const GradientStore store = {(flags & BK_OVERWRITE) != 0, (flags & BK_STOCHASTIC) != 0, seed};
    if (!dwte && !dwpe) return BK_OK;
    if (B > 0 && T > 0 && C > 0) {
        if (const int error = call.not_null({{"dout", dout}, {"inp", inp}})) return error;
        const bool needs_workspace = bk_encoder_backward_workspace_bytes(B, T, C, V, number) > 0;
        if (needs_workspace && !workspace) return call.not_null({{"workspace", workspace}});
    }
    const KeepPendingError keep;
    const cudaError_t error =
        version->launch((gradX *)dwte, (gradX *)dwpe, (const floatX *)dout, inp, (status_word *)status, workspace, B, T,
                        C, V, store, version->block_size, stream);
    if (error != cudaErrorNotSupported) return call.from_cuda(error);
    return call.fail(BK_ERROR_UNSUPPORTED, "version %d has no stochastic rounding of 16-bit gradients", number);
}

extern "C" size_t bk_encoder_backward_workspace_bytes(int B, int T, int C, int V, int version) {
    if (B < 0 || T < 0 || C < 0 || V < 0 || (long long)B * T > INT32_MAX) return 0;
    if (version >= 1 && version <= 3) return 0;
    return version == 4 ? encoder_backward4_workspace_bytes(B, T, C, V) : encoder_backward_workspace_bytes(B, T, C, V);
}

extern "C" int bk_encoder_backward(void *dwte, void *dwpe, const void *dout, const int32_t *inp, int64_t *status,
                                   void *workspace, int B, int T, int C, int V, bk_dtype dtype, bk_dtype grad_dtype,
                                   int flags, uint64_t seed, int version, bk_stream stream) {
    if (const int error = call.not_negative({{"B", B}, {"T", T}, {"C", C}, {"V", V}})) return error;
    const long long positions = (long long)B * T;
    if (positions > INT32_MAX) {
        return call.fail(BK_ERROR_SHAPE, "B*T is %lld: at most %d positions", positions, INT32_MAX);
    }
    if (flags & ~(BK_OVERWRITE | BK_STOCHASTIC)) return call.fail(BK_ERROR_FLAGS, "flags is %d", flags);
    if (grad_dtype != dtype && grad_dtype != BK_FP32) {
        return call.fail(BK_ERROR_DTYPE, "grad_dtype is %d: neither dtype, %d, nor BK_FP32", grad_dtype, dtype);
    }
    return call.with_type(dtype, [=](auto type) {
        typedef decltype(type) floatX;
        const auto run = grad_dtype == dtype ? encoder_backward<floatX, floatX> : encoder_backward<floatX, float>;
        return run(dwte, dwpe, dout, inp, status, workspace, B, T, C, V, flags, seed, version, stream);
    });
}
