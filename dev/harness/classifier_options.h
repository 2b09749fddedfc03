// The command-line options of the classifier's arithmetic.
#pragma once
#include "command_line.h"

namespace bookends {

// The declarations of these options, followed by a program's other numbers.
inline std::vector<Number> classifier_numbers(const std::vector<Number> &others = {}) {
    std::vector<Number> numbers = {
        {"--label-smoothing", 0, 0, 1, "share of each target that is spread over the whole vocabulary"},
        {"--z-loss", 0, 0, 1e6, "factor of lse^2 in the loss"},
        {"--softcap", 0, 0, 1e6, "bound of the logits, by NUMBER * tanh(logit / NUMBER); 0: none"},
        {"--logit-scale", 1, -1e6, 1e6, "factor of the logits"},
        {"--ignore-every", 0, 0, INT32_MAX, "every INT-th target is ignore_index; 0: none", true}};
    numbers.insert(numbers.end(), others.begin(), others.end());
    return numbers;
}

// The values of these options, in the classifier's own type. Each is in its range; a combination may still be refused.
template <typename ClassifierOptions>
ClassifierOptions classifier_options(const Options &options) {
    ClassifierOptions result;
    result.label_smoothing = (float)options.number("--label-smoothing");
    result.z_loss = (float)options.number("--z-loss");
    result.softcap = (float)options.number("--softcap");
    result.logit_scale = (float)options.number("--logit-scale");
    if (!valid_options(result)) {
        refuse(EXIT_BAD_INPUT, "--softcap: '%g' is too small for a --logit-scale of %g", result.softcap,
               result.logit_scale);
    }
    return result;
}

}  // namespace bookends
