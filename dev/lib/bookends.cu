// The C library over the kernel files: argument checks, and from a bk_dtype and a version number to a launcher.
#define BOOKENDS_NO_MAIN
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
            return "a size is negative";
        case BK_ERROR_DTYPE:
            return "no such dtype";
        case BK_ERROR_VERSION:
            return "no such version";
        default:
            return error > BK_ERROR_CUDA ? cudaGetErrorString((cudaError_t)(error - BK_ERROR_CUDA)) : "no such error";
    }
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
    switch (dtype) {
        case BK_FP32:
            return encoder_forward<float>(out, inp, wte, wpe, status, B, T, C, V, version, stream);
        case BK_FP16:
            return encoder_forward<half>(out, inp, wte, wpe, status, B, T, C, V, version, stream);
        case BK_BF16:
            return encoder_forward<__nv_bfloat16>(out, inp, wte, wpe, status, B, T, C, V, version, stream);
    }
    return BK_ERROR_DTYPE;
}
