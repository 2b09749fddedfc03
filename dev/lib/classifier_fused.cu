// bk_classifier_...: argument checks, and the choice of a launcher by bk_dtype and version number.
#define BOOKENDS_NO_MAIN
#include "../../classifier_fused.cu"

#include "classifier.h"

using namespace bookends;

// The launchers that the LM head's object calls.
BOOKENDS_CLASSIFIER(template, float);
BOOKENDS_CLASSIFIER(template, half);
BOOKENDS_CLASSIFIER(template, __nv_bfloat16);

static constexpr Call call = {"bk_classifier_fused"};

template <typename floatX>
static int classifier_fused(void *dlogits, float *losses, float *lse, void *probs, int32_t *correct, const void *logits,
                            const int32_t *targets, const float *dlosses, int64_t *status, int N, int V, int P,
                            const ClassifierOptions &options, int number, cudaStream_t stream) {
    const auto *version = find_version(classifier_fused_versions<floatX>, number);
    if (version == nullptr) return call.no_version(number);
    if (N == 0) return BK_OK;
    if (const int error = call.not_null({{"targets", targets}})) return error;
    if (!logits && V > 0) return call.not_null({{"logits", logits}});
    const KeepPendingError keep;
    return call.from_cuda(version->launch((floatX *)dlogits, losses, lse, (floatX *)probs, correct,
                                          (const floatX *)logits, targets, dlosses, (status_word *)status, N, V, P,
                                          options, version->block_size, stream));
}

extern "C" int bk_classifier_fused(void *dlogits, float *losses, float *lse, void *probs, int32_t *correct,
                                   const void *logits, const int32_t *targets, const float *dlosses, int64_t *status,
                                   int N, int V, int P, const bk_classifier_options *options, bk_dtype dtype,
                                   int version, bk_stream stream) {
    if (const int error = call.not_negative({{"N", N}, {"V", V}})) return error;
    if (P < V) return call.fail(BK_ERROR_SHAPE, "P is %d, less than V, %d", P, V);
    if (const int error = check_options(call, options)) return error;
    const ClassifierOptions o = options_of(options);
    return call.with_type(dtype, [=](auto type) {
        return classifier_fused<decltype(type)>(dlogits, losses, lse, probs, correct, logits, targets, dlosses, status,
                                                N, V, P, o, version, stream);
    });
}

extern "C" int bk_classifier_totals(float *rows, float *total, const int32_t *targets, const float *losses, int N,
                                    int32_t ignore_index, bk_stream stream) {
    static constexpr Call totals = {"bk_classifier_totals"};
    if (const int error = totals.not_negative({{"N", N}})) return error;
    if (N > 0 && rows && !targets) return totals.not_null({{"targets", targets}});
    if (N > 0 && total && !losses) return totals.not_null({{"losses", losses}});
    const KeepPendingError keep;
    return totals.from_cuda(classifier_totals(rows, total, targets, losses, N, ignore_index, stream));
}
