// The error bounds of the checks: one model for all kernel files. A bound holds for float arithmetic in any order of
// additions, before the last rounding to the type of the output.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "check.h"

namespace bookends {

// The relative error of one rounding to float.
constexpr double kFloatRounding = 0x1p-24;

// ---------------------------------------------------------------------------------------------------------------------
// encoders

// encoder_forward rounds a sum of two numbers to float, and then to its type: 1 ulp of the latter.
constexpr double kEncoderForwardUlps = 1;

// encoder_backward: the error of a sum of `count` rows, relative to the sum of the magnitudes of its terms. A float sum
// has the error of 8 roundings; a sum that is rounded to gradX at each addition has one rounding for each row.
template <typename gradX>
double sum_tolerance(int count, bool rounds_each_addition) {
    const double float_sum = 8 * kFloatRounding, each = ldexp(1.0, -1 - FloatFormat<gradX>::mantissa);
    return count == 0 ? 0 : rounds_each_addition ? std::max(float_sum, count * each) : float_sum;
}

// ---------------------------------------------------------------------------------------------------------------------
// GEMMs

// The absolute error of a sum of `count` products. norm: the square root of the sum of their squares; total: the sum of
// their magnitudes. A sum in order has one rounding, of either sign, for each term. Tensor cores have two truncations
// for each 16 terms, each as large as a rounding.
inline double product_tolerance(double count, double norm, double total) {
    return kFloatRounding * (count / 8 + 8 * sqrt(count) + 16) * std::min(4 * norm, total);
}

// The same for factors that are rounded to TF32.
inline double tf32_tolerance(double norm) { return 8 * 0x1p-10 * norm; }

// ---------------------------------------------------------------------------------------------------------------------
// softmax and cross-entropy

// The errors of a row's z (its scaled logits) before the softmax, for instance those of a GEMM: the largest error, and
// the errors of lse and of the mean of z that result. By default all are 0.
struct LogitErrors {
    double lse = 0, mean = 0, largest = 0;

    LogitErrors() = default;
    LogitErrors(const std::vector<double> &errors, const std::vector<double> &probs) {
        for (size_t j = 0; j < errors.size(); j++) {
            lse += 1.2 * probs[j] * expm1(std::min(errors[j], 1.0));
            mean += errors[j] / (double)errors.size();
            largest = std::max(largest, errors[j]);
        }
        if (exceed_1()) lse = largest;
    }

    // An error of z above 1 changes a probability by more than a factor of e: then any probability is allowed.
    bool exceed_1() const { return largest > 1; }
};

// Absolute bounds for the results of one row. Row: its max, lse, loss, distance and gap, as in ClassifierRow; Options:
// ClassifierOptions. A difference of two z has the error of three roundings of itself and, under a softcap, that of a
// tanh near 1. A power of two has an error of two ulps, at most 4 roundings. A sum has one rounding for each addition.
template <typename Row, typename Options>
class SoftmaxTolerance {
  public:
    // dloss: the gradient of this row's loss. additions: the longest chain of additions in a sum over the row.
    SoftmaxTolerance(const Row &its_row, const Options &its_options, double dloss, int width, double additions,
                     const LogitErrors &logit_errors = {})
        : row(its_row), options(its_options), errors(logit_errors), V(width) {
        const double capped = 6 * (double)options.softcap;
        exponential = 6 + capped;
        sum = exponential + 3 * row.distance + additions;
        const double log_sum = sum + 3 * fabs(row.lse - row.max);
        lse_bound = kFloatRounding * (log_sum + 4 * fabs(row.max) + fabs(row.lse)) + errors.lse;
        log_sum_roundings = log_sum + capped;
        mean_roundings = (additions + 4) * row.gap;
        unit = fabs(dloss * options.logit_scale);
        factor = fabs(1 + 2 * options.z_loss * row.lse);
        factor_bound = 2 * fabs((double)options.z_loss) * lse_bound + 4 * kFloatRounding * factor;
        // Powers of two below the normal numbers are 0. For large logits they are not relative to the largest one, but
        // to another number (see Exponent in parts/classifier.h).
        underflow = fabs(row.max) < 0x1p23 ? 0x1p-126 : 0x1p-63;
    }

    double lse() const { return lse_bound; }

    // Of the loss; z and z_error are the target's.
    double loss(double z, double z_error = 0) const {
        const double eps = options.label_smoothing, z_loss = fabs((double)options.z_loss * row.lse);
        const double of_target = (1 - eps) * (log_sum_roundings + 8 * fabs(row.max - z));
        const double of_mean = eps * (log_sum_roundings + mean_roundings);
        const double roundings = of_target + of_mean + 4 * fabs(row.loss) + 4 * z_loss * fabs(row.lse);
        return kFloatRounding * roundings + 2 * z_loss * lse_bound + errors.lse + (1 - eps) * z_error +
               eps * errors.mean;
    }

    // Of the probability p of an element.
    double probability(double p, double z, double z_error = 0) const {
        if (errors.exceed_1()) return 1;
        const double roundings = exponential + 3 * (row.max - z) + sum + 4;
        const double by_errors = errors.largest > 0 ? expm1(std::min(z_error, 1.0)) + errors.lse : 0;
        return p * (kFloatRounding * roundings + by_errors) + underflow;
    }

    // Of the gradient with respect to a logit. gradient: its exact value; p: its probability.
    double gradient(double gradient, double p, double z, double logit, bool is_target, double z_error = 0) const {
        const double cap = options.softcap, eps = options.label_smoothing;
        if (errors.exceed_1() || (cap > 0 && 2 * z_error > cap)) return unit * (factor + 1);
        double bound = factor * probability(p, z, z_error) + factor_bound * p;
        bound += 4 * kFloatRounding * (eps / V + is_target);
        double slope_bound = kFloatRounding;  // relative
        if (cap > 0) {  // the slope of the tanh is computed from a power of two, whose error grows with its exponent
            const double by_error = z_error > 0 ? expm1(std::min(2 * z_error / cap, 1.0)) : 0;
            slope_bound *= 17 + 8 * fabs(options.logit_scale * logit / cap);
            slope_bound += by_error;
            bound *= (1 - z / cap * (z / cap)) * (1 + by_error);
        }
        const double smallest = unit * (1 + factor) * 16 * underflow + 0x1p-148;  // slopes underflow too
        return unit * bound + slope_bound * fabs(gradient) + smallest;
    }

  private:
    const Row row;
    const Options options;
    const LogitErrors errors;
    const int V;
    double exponential, sum;  // roundings, relative: of a power of two, and of the sum of all
    double log_sum_roundings, mean_roundings;
    double unit;                  // |dloss * logit_scale|
    double factor, factor_bound;  // of the probabilities in the gradient: 1 + 2 * z_loss * lse
    double lse_bound, underflow;
};

}  // namespace bookends
