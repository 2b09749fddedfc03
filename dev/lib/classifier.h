// For the objects of the classifier and of the LM head. Must be included after classifier_fused.cu.
#pragma once
#include "internal.h"

// Declares (linkage: extern template) or defines (linkage: template) the launcher that the LM head calls. Only the
// classifier's object compiles it, so that the library contains the classifier's kernels once.
#define BOOKENDS_CLASSIFIER(linkage, floatX)                                                                           \
    linkage cudaError_t bookends::classifier_fused5<floatX>(floatX *, float *, float *, floatX *, int *,               \
                                                            const floatX *, const int *, const float *, status_word *, \
                                                            int, int, int, ClassifierOptions, int, cudaStream_t)

namespace bookends {

inline ClassifierOptions options_of(const bk_classifier_options *options) {
    if (!options) return {};
    return {options->dloss,  options->logit_scale,  options->softcap, options->label_smoothing,
            options->z_loss, options->ignore_index, options->divisor, (options->flags & BK_ADD_LOSSES) != 0};
}

// options may be null.
inline int check_options(const Call &call, const bk_classifier_options *options) {
    if (!options) return BK_OK;
    const bk_classifier_options &o = *options;
    if (o.flags & ~BK_ADD_LOSSES) return call.fail(BK_ERROR_FLAGS, "options.flags is %d", o.flags);
    for (const int32_t word : o.reserved) {
        if (word != 0) return call.fail(BK_ERROR_OPTIONS, "a reserved field of the options is %d, not 0", word);
    }
    if (valid_options(options_of(options))) return BK_OK;
    return call.fail(BK_ERROR_OPTIONS,
                     "one of the options is not finite or outside its range: dloss %g, logit_scale %g, softcap %g, "
                     "label_smoothing %g, z_loss %g",
                     o.dloss, o.logit_scale, o.softcap, o.label_smoothing, o.z_loss);
}

}  // namespace bookends
