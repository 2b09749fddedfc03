// bk_encoder_forward: argument checks, and the choice of a launcher by bk_dtype and version number.
#define BOOKENDS_NO_MAIN
#include "../../encoder_forward.cu"

#include "internal.h"

using namespace bookends;

static constexpr Call call = {"bk_encoder_forward"};

template <typename floatX>
static int encoder_forward(void *out, const int32_t *inp, const void *wte, const void *wpe, int64_t *status, int B,
                           int T, int C, int V, int number, cudaStream_t stream) {
    // Rows of odd length: version 4 gives the same bits as 5, and takes 4% less time (H200, bf16, C 769).
    if (number == 0 && sizeof(floatX) == 2 &&
        vector_width(2, C, (floatX *)out, (const floatX *)wte, (const floatX *)wpe) == 1)
        number = 4;
    const auto *version = find_version(encoder_forward_versions<floatX>, number);
    if (version == nullptr) return call.no_version(number);
    if (B == 0 || T == 0 || C == 0) return BK_OK;
    if (const int error = call.not_null({{"out", out}, {"inp", inp}})) return error;
    if (!wte && V > 0) return call.not_null({{"wte", wte}});
    const KeepPendingError keep;
    return call.from_cuda(version->launch((floatX *)out, inp, (const floatX *)wte, (const floatX *)wpe,
                                          (status_word *)status, B, T, C, V, version->block_size, stream));
}

extern "C" int bk_encoder_forward(void *out, const int32_t *inp, const void *wte, const void *wpe, int64_t *status,
                                  int B, int T, int C, int V, bk_dtype dtype, int version, bk_stream stream) {
    if (const int error = call.not_negative({{"B", B}, {"T", T}, {"C", C}, {"V", V}})) return error;
    return call.with_type(dtype, [=](auto type) {
        return encoder_forward<decltype(type)>(out, inp, wte, wpe, status, B, T, C, V, version, stream);
    });
}
