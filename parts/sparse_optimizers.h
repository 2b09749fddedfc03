// Formulas of optimizers for rows of a table. For embedding_update.cu.
//
// w: an element of a row of the table; g: its gradient; t: the number of the step, from 1 on; mean(): over the row.
//
// SGD               w -= rate * (g + decay * w)
//   torch.optim.SGD without momentum, with one difference: torch refuses weight decay for sparse gradients. Here the
//   decay applies to rows with a gradient only. FBGEMM's EXACT_SGD without decay.
//
// Row-wise Adagrad  g += decay * w
//                   s += mean(g^2)
//                   w -= rate * g / (sqrt(s) + eps)
//   FBGEMM's EXACT_ROWWISE_ADAGRAD; with decay, its WeightDecayMode.L2. torch.optim.Adagrad has one s per element, and
//   divides the rate by 1 + (t - 1) * lr_decay, which the caller can do. At C = 1 the two are equal.
//
// Adam              m = beta1 * m + (1 - beta1) * g
//                   v = beta2 * v + (1 - beta2) * g^2
//                   w -= rate * (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + decay * w)
//   FBGEMM's ADAM: the decay is decoupled, as in torch.optim.AdamW (but the same w is used in both terms, where AdamW
//   decays first). torch.optim.SparseAdam has no decay and adds eps to sqrt(v) before the bias correction: its eps is
//   eps * sqrt(1 - beta2^t) here. As in both, m and v of rows without a gradient do not change.
//
// Row-wise Adam     Adam with v = beta2 * v + (1 - beta2) * mean(g^2), one v per row
//   FBGEMM's PARTIAL_ROWWISE_ADAM.
#pragma once
#include "../common.h"

#include <cmath>

namespace bookends {

enum OptimizerKind { kSgd, kRowwiseAdagrad, kAdam, kRowwiseAdam };

__host__ __device__ constexpr bool is_adam(OptimizerKind kind) { return kind == kAdam || kind == kRowwiseAdam; }
// Whether `second` is one float per row, which depends on all gradients of the row.
__host__ __device__ constexpr bool is_row_wise(OptimizerKind kind) {
    return kind == kRowwiseAdagrad || kind == kRowwiseAdam;
}

// beta and the floats that follow from it, formed in double. A beta of 0 is allowed.
struct DecayRate {
    double value = 0;
    float beta = 0, rest = 1, log_beta = -INFINITY;
    DecayRate() = default;
    explicit DecayRate(double of_mean)
        : value(of_mean), beta((float)value), rest((float)(1 - value)), log_beta((float)std::log(value)) {}
    // 1 - beta^t, without the cancellation of the subtraction.
    __host__ __device__ float correction(long long t) const { return -expm1f((float)t * log_beta); }
};

struct SparseOptimizer {
    OptimizerKind kind;
    float rate, eps, decay;
    DecayRate beta1, beta2;
    long long step;                // t
    const long long *device_step;  // t in device memory, for replays of CUDA graphs; or null
    float *first;   // Adam, row-wise Adam: m (rows, C)
    float *second;  // Adam: v (rows, C). Row-wise Adam: v (rows). Row-wise Adagrad: s (rows)
};

// The factors of one step, which each thread forms once.
template <OptimizerKind kind>
struct OptimizerStep {
    float rate, eps, decay;
    float beta1, rest1, beta2, rest2;
    float over_correction1, over_correction2;

    __device__ explicit OptimizerStep(const SparseOptimizer &o)
        : rate(o.rate), eps(o.eps), decay(o.decay), beta1(o.beta1.beta), rest1(o.beta1.rest), beta2(o.beta2.beta),
          rest2(o.beta2.rest), over_correction1(1.0f), over_correction2(1.0f) {
        if constexpr (is_adam(kind)) {
            const long long t = o.device_step ? *o.device_step : o.step;
            over_correction1 = 1.0f / o.beta1.correction(t);
            over_correction2 = 1.0f / o.beta2.correction(t);
        }
    }

    // The gradient whose square the row-wise state takes.
    __device__ float squared_gradient(float g, float w) const { return kind == kRowwiseAdagrad ? g + decay * w : g; }
    // The row-wise state from the old one and mean(g^2).
    __device__ float next_row_state(float state, float mean_square) const {
        return kind == kRowwiseAdagrad ? state + mean_square : beta2 * state + rest2 * mean_square;
    }
    // The factor of the gradient that follows from the second state (of the row, or of the element). SGD has none.
    __device__ float scale(float state) const {
        if constexpr (kind == kSgd) return rate;
        if constexpr (kind == kRowwiseAdagrad) return rate / (sqrtf(state) + eps);
        return 1.0f / (sqrtf(state * over_correction2) + eps);
    }
    // The new w. m: updated (Adam). v: updated (Adam), or unused. row_scale: scale() of the row's state.
    __device__ float update(float w, float g, float *m, float *v, float row_scale) const {
        if constexpr (!is_adam(kind)) return w - row_scale * (g + decay * w);
        *m = beta1 * *m + rest1 * g;
        if constexpr (kind == kAdam) {
            *v = beta2 * *v + rest2 * (g * g);
            row_scale = scale(*v);
        }
        return w - rate * (*m * over_correction1 * row_scale + decay * w);
    }
};

}  // namespace bookends
