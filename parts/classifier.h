// The classifier's options, the statistics of a row of logits, its loss and its gradient. For classifier_fused.cu and
// lm_head.cu.
#pragma once
#include "../common.h"

#include <cfloat>
#include <cmath>

namespace bookends {

struct ClassifierOptions {
    float dloss = 1;  // the gradient of each row's loss: 1/N for the mean of the losses
    float logit_scale = 1;
    float softcap = 0;  // 0: no softcap
    float label_smoothing = 0;
    float z_loss = 0;
    int ignore_index = -100;  // rows with this target have loss 0 and gradient 0
    // A float in device memory that divides the gradients, or null. For a mean over the rows that are not ignored it is
    // their number, from classifier_totals(). A divisor of 0 makes the gradients 0.
    const float *divisor = nullptr;
    bool add_losses = false;  // losses are added to the output, not written over it
};

// Whether all options are in their ranges, and all constants computed from them are finite.
inline bool valid_options(const ClassifierOptions &o) {
    const bool finite = std::isfinite(o.dloss) && std::isfinite(2 * o.logit_scale) && std::isfinite(2 * o.softcap) &&
                        std::isfinite(o.label_smoothing) && std::isfinite(2 * o.z_loss) &&
                        std::isfinite(2 * o.dloss * o.logit_scale);
    return finite && o.softcap >= 0 && (o.softcap == 0 || std::isfinite(4 * (o.logit_scale / o.softcap))) &&
           o.label_smoothing >= 0 && o.label_smoothing <= 1;
}

// ---------------------------------------------------------------------------------------------------------------------
// arguments and exponentials

// Exponentials are computed as powers of two, the operation that the hardware has: exp(z) = 2^(z * log2(e)).
constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f;

// The launcher's arguments, and constants computed from the options. The kernels compute with values: z = value * size.
// A value is the logit; with kAllExtras, the logit times the sign of logit_scale; with a softcap, the tanh. The largest
// value then belongs to the largest z, and the scale costs no instruction: exp(z) = 2^(value * power).
template <typename floatX>
struct ClassifierArguments {
    floatX *dlogits;
    float *losses, *lse;
    floatX *probs;
    int *correct;
    const floatX *logits;
    const int *targets;
    const float *dlosses;
    status_word *status;
    int N;
    unsigned V = 0, P = 0;
    ClassifierOptions options = {};
    float size = 0, power = 0;  // power = size * log2(e)
    float sign = 0;             // of logit_scale: 1, -1 or 0
    float inner = 0;            // with a softcap, which computes tanh(u): exp(2u) = 2^(inner * x)
    float smoothing = 0;        // label_smoothing / V
    // Label smoothing adds smoothing * sum_j (max - z_j) to the loss. The sum is computed from values times gap_scale:
    // the largest power of two that is at most smoothing * size, limited to 2^-126 .. 1. No partial sum is then larger
    // than the loss. Each term is rounded once (fmaf), so that scaling loses no digits above 2^-149. The loss is
    // increased by loss_of_gaps times the scaled sum.
    float gap_scale = 1;
    double loss_of_gaps = 0;
};

// Computes exp(z - max) as 2^(value * factor - point), one multiply-add and one power. The point is max * power,
// rounded. All sums of a row use the same point, so that its rounding error cancels, as long as the point is below
// 2^30. Beyond that, the next float below max has a probability of at most 2^-64 times the largest one, so that the
// only question is whether a value is the largest. Then the factor is a power of two, which makes max * factor exact.
struct Exponent {
    float factor, point;

    __device__ Exponent(float max, float power) {
        factor = power;
        point = max * power;
        if (!(fabsf(point) < 0x1p30f)) {
            // A power of two near 2^31 / max: large enough for the exponentials of all smaller values to be 0.
            factor = __uint_as_float(min(285u - (__float_as_uint(max) >> 23 & 0xffu), 254u) << 23);
            point = max * factor;
        }
    }
    __device__ float exp(float value) const { return fast_exp2(fmaf(value, factor, -point)); }
    __device__ float point_error(float max) const { return fmaf(max, factor, -point); }
};

// The factor that converts a sum of exp(z - from) to a sum of exp(z - to). The difference is computed from halves,
// since it may overflow although its product with the power does not.
__device__ inline float rescale(float from, const Exponent &of_from, float to, const Exponent &of_to, float power) {
    const float half_way = (0.5f * from - 0.5f * to) * power;
    return fast_exp2(fmaf(2.0f, half_way, of_to.point_error(to) - of_from.point_error(from)));
}
__device__ inline float rescale(float from, float to, float power) {
    return rescale(from, Exponent(from, power), to, Exponent(to, power), power);
}

// Additional work for each element of a row, chosen at compile time.
enum Extras {
    kNoExtras,
    kSum,       // sums the gaps, max - value, for label smoothing
    kAllExtras  // kSum; compares each logit with the target's; allows any sign of logit_scale
};

// The value of a logit, and its slope. With a softcap: tanh(u) = 1 - 2r with e = exp(2u) and r = 1 / (1+e), within two
// roundings of a number near 1 for every u. The slope 1 - tanh(u)^2 is computed as 4e / (1+e)^2, without cancellation.
// For an infinite e, r is 0 and e*r is NaN; fminf() then returns 1, the limit of e*r.
template <bool softcap, Extras extras, typename floatX>
__device__ float value_and_slope(float x, const ClassifierArguments<floatX> &args, float *slope) {
    if constexpr (softcap) {
        const float e = fast_exp2(args.inner * x), r = __fdividef(1.0f, 1.0f + e);
        *slope = 4.0f * fminf(e * r, 1.0f) * r;
        return fmaf(-2.0f, r, 1.0f);
    } else {
        *slope = 1.0f;
        return extras == kAllExtras ? args.sign * x : x;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// the target of a row

// A row and its target.
template <typename floatX>
struct ClassifierTarget {
    const floatX *logits;
    floatX *dlogits, *probs;  // null: not wanted
    unsigned index;           // the target's column; UINT32_MAX if it is ignored or bad
    bool ignored, bad;
    bool read;              // an output that depends on the logits is wanted
    float x, value, slope;  // of the target's logit, which is read before the gradient can overwrite it

    __device__ bool second_pass() const { return (dlogits && !ignored) || probs; }
};

// Describes the target of a row, without its logit.
template <typename floatX>
__device__ ClassifierTarget<floatX> describe_target(const ClassifierArguments<floatX> &args, long long row,
                                                    int target) {
    ClassifierTarget<floatX> t = {};
    t.logits = args.logits + row * args.P;
    t.dlogits = args.dlogits ? args.dlogits + row * args.P : nullptr;
    t.probs = args.probs ? args.probs + row * args.P : nullptr;
    t.ignored = target == args.options.ignore_index;
    t.bad = !t.ignored && (unsigned)target >= args.V;
    const bool good = !t.ignored && !t.bad;
    t.read = args.lse || args.probs || (good && (args.dlogits || args.losses || args.correct));
    t.index = good ? (unsigned)target : UINT32_MAX;
    return t;
}

template <bool softcap, Extras extras, typename floatX>
__device__ void set_logit(ClassifierTarget<floatX> &t, const ClassifierArguments<floatX> &args, float x) {
    t.x = x;
    t.value = value_and_slope<softcap, extras>(x, args, &t.slope);
}

template <bool softcap, Extras extras, typename floatX>
__device__ ClassifierTarget<floatX> find_target(const ClassifierArguments<floatX> &args, long long row) {
    ClassifierTarget<floatX> t = describe_target(args, row, args.targets[row]);
    if (t.index < args.V && t.read) set_logit<softcap, extras>(t, args, (float)t.logits[t.index]);
    return t;
}

// ---------------------------------------------------------------------------------------------------------------------
// the statistics of a row

// The statistics of an online softmax over some values of a row: their maximum, and the sum of exp(z - max) as computed
// by Exponent. The maximum starts at the lowest finite number: from -inf, a row that begins with -inf would compute
// -inf - -inf. With kSum: the sum of the gaps, max - value, times args.gap_scale, and the number of values in it. No
// gap is negative, so that the sum's relative error is that of its additions, also with outliers. With kAllExtras:
// `beaten` says whether a logit is larger than the target's, or equal and before it. (With a softcap too, logits are
// compared, not values: tanh would round some to equal values. A NaN beats every logit.)
struct OnlineSoftmax {
    float max = -FLT_MAX, sum = 0, gaps = 0;
    unsigned count = 0;
    bool beaten = false;
};

// (a - b) * scale for a power of two. Both are scaled before the subtraction, which could overflow otherwise.
__device__ inline float scaled_gap(float a, float b, float scale) { return fmaf(a, scale, -(b * scale)); }

// The sum of gaps relative to another maximum. It is 0 for no values, even if the scaled difference of the maxima is
// infinite.
__device__ inline float gaps_from(float largest, const OnlineSoftmax &row, float scale) {
    return row.count > 0 ? fmaf((float)row.count, scaled_gap(largest, row.max, scale), row.gaps) : 0.0f;
}

// The statistics while values are being added, with the Exponent of the current maximum.
struct RunningSoftmax : OnlineSoftmax {
    Exponent exponent;
    float lost = 0;  // the sum of the rounding errors of the additions to `gaps`
    __device__ explicit RunningSoftmax(float power) : exponent(max, power) {}

    // Adds the sum of some gaps, and their number. The rounding error of the addition is kept (Neumaier's compensated
    // summation, 1974, its branch for a sum larger than the term), so that small gaps after an outlier are not lost.
    __device__ void add_gaps(float more, unsigned values) {
        const float total = gaps + more;
        lost += gaps - total + more;
        gaps = total;
        count += values;
    }
    // The statistics so far. (With an infinite gap, the sum is infinite and `lost` is NaN.)
    __device__ OnlineSoftmax result() const {
        OnlineSoftmax all = *this;
        if (isfinite(lost)) all.gaps += lost;
        return all;
    }

    // Raises the maximum to `largest`, if that is larger.
    template <Extras extras, typename floatX>
    __device__ void raise(float largest, const ClassifierArguments<floatX> &args) {
        if (!(largest > max)) return;
        const Exponent next(largest, args.power);
        if (sum > 0) sum *= rescale(max, exponent, largest, next, args.power);
        if (extras != kNoExtras) gaps = gaps_from(largest, *this, args.gap_scale);
        max = largest;
        exponent = next;
    }
};

// The largest element of a vector. NaNs are skipped. With 16-bit types, one instruction compares two elements.
template <typename T, int width>
__device__ float largest_of(const Packed<T, width> &x) {
    if constexpr (sizeof(T) == 2 && width > 1) {
        decltype(pair_type(T())) most, two;
        memcpy(&most, &x.payload[0], sizeof(most));
#pragma unroll
        for (int k = 2; k < width; k += 2) {
            memcpy(&two, &x.payload[k], sizeof(two));
            most = __hmax2(most, two);
        }
        return fmaxf((float)most.x, (float)most.y);
    } else {
        float most = (float)x[0];
        for (int k = 1; k < width; k++) most = fmaxf(most, (float)x[k]);
        return most;
    }
}

// Pairwise summation: a shorter chain of dependent additions than in order, and smaller rounding errors.
template <int width>
__device__ float sum_of(const float (&values)[width]) {
    float sums[width];
    for (int k = 0; k < width; k++) sums[k] = values[k];
#pragma unroll
    for (int apart = 1; apart < width; apart *= 2) {
#pragma unroll
        for (int k = 0; k + apart < width; k += 2 * apart) sums[k] += sums[k + apart];
    }
    return sums[0];
}

// update_statistics() adds vectors of a row, whose first columns are `stride` apart: it calls update_max(), then
// update_sums().
template <bool softcap, Extras extras, typename floatX, int width, int count>
__device__ void update_max(RunningSoftmax &running, const Packed<floatX, width> (&x)[count], unsigned column,
                           unsigned stride, const ClassifierTarget<floatX> &target,
                           const ClassifierArguments<floatX> &args) {
    float largest = -FLT_MAX, slope;
#pragma unroll
    for (int u = 0; u < count; u++) {
        float most;
        if constexpr (extras == kAllExtras) {
            most = -FLT_MAX;
#pragma unroll
            for (int k = 0; k < width; k++) {
                const float mine = args.sign * (float)x[u][k], best = args.sign * target.x;
                most = fmaxf(most, mine);
                const bool behind = column + u * stride + k >= target.index;
                if (!(mine < best || (mine == best && behind))) running.beaten = true;
            }
            most *= args.sign;
        } else {
            most = largest_of(x[u]);
        }
        largest = fmaxf(largest, value_and_slope<softcap, extras>(most, args, &slope));
    }
    running.raise<extras>(largest, args);
}
template <bool softcap, Extras extras, typename floatX, int width, int count>
__device__ void update_sums(RunningSoftmax &running, const Packed<floatX, width> (&x)[count],
                            const ClassifierArguments<floatX> &args) {
    const float max_scaled = running.max * args.gap_scale;
    float sums[count], gap_sums[count], slope;
#pragma unroll
    for (int u = 0; u < count; u++) {
        float value[width];
        to_floats(value, x[u]);
#pragma unroll
        for (int k = 0; k < width; k++) value[k] = value_and_slope<softcap, extras>(value[k], args, &slope);
        if constexpr (extras != kNoExtras) {
            // A few halves and their sum are exact in float, so that the vector's gaps are computed from the sum of the
            // values. For the other types, gaps are added.
            constexpr bool exact = std::is_same_v<floatX, half>;
            float gaps[width];
#pragma unroll
            for (int k = 0; k < width; k++) gaps[k] = exact ? value[k] : fmaf(-args.gap_scale, value[k], max_scaled);
            const float sum = sum_of(gaps);
            gap_sums[u] = exact ? fmaf((float)width, running.max, -sum) * args.gap_scale : sum;
        }
#pragma unroll
        for (int k = 0; k < width; k++) value[k] = running.exponent.exp(value[k]);
        sums[u] = sum_of(value);
    }
    running.sum += sum_of(sums);
    if constexpr (extras != kNoExtras) running.add_gaps(sum_of(gap_sums), width * count);
}
template <bool softcap, Extras extras, typename floatX, int width, int count>
__device__ void update_statistics(RunningSoftmax &running, const Packed<floatX, width> (&x)[count], unsigned column,
                                  unsigned stride, const ClassifierTarget<floatX> &target,
                                  const ClassifierArguments<floatX> &args) {
    update_max<softcap, extras>(running, x, column, stride, target, args);
    update_sums<softcap, extras>(running, x, args);
}
template <bool softcap, Extras extras, typename floatX, int width>
__device__ void update_statistics(RunningSoftmax &running, const Packed<floatX, width> &x, unsigned column,
                                  const ClassifierTarget<floatX> &target, const ClassifierArguments<floatX> &args) {
    const Packed<floatX, width> one[1] = {x};
    update_statistics<softcap, extras>(running, one, column, 0, target, args);
}

template <Extras extras, typename floatX>
__device__ OnlineSoftmax merge(const OnlineSoftmax &a, const OnlineSoftmax &b,
                               const ClassifierArguments<floatX> &args) {
    OnlineSoftmax all;
    all.max = fmaxf(a.max, b.max);
    all.sum = a.sum * rescale(a.max, all.max, args.power) + b.sum * rescale(b.max, all.max, args.power);
    if (extras != kNoExtras) {
        all.gaps = gaps_from(all.max, a, args.gap_scale) + gaps_from(all.max, b, args.gap_scale);
        all.count = a.count + b.count;
    }
    all.beaten = a.beaten || b.beaten;
    return all;
}

// The statistics of all lanes of a warp, or of all threads of a block, merged; each gets the same bits. block_merge()
// leaves `count` at 0.
template <Extras extras, typename floatX>
__device__ OnlineSoftmax warp_merge(const OnlineSoftmax &own, const ClassifierArguments<floatX> &args) {
    OnlineSoftmax all;
    all.max = warp_reduce_max(own.max);
    all.sum = warp_reduce_sum(own.sum * rescale(own.max, all.max, args.power));
    if (extras != kNoExtras) {
        all.gaps = warp_reduce_sum(gaps_from(all.max, own, args.gap_scale));
        all.count = __reduce_add_sync(0xffffffffu, own.count);
    }
    if (extras == kAllExtras) all.beaten = __any_sync(0xffffffffu, own.beaten);
    return all;
}
template <Extras extras, typename floatX>
__device__ OnlineSoftmax block_merge(const OnlineSoftmax &own, const ClassifierArguments<floatX> &args) {
    OnlineSoftmax all;
    all.max = block_reduce_max(own.max);
    all.sum = block_reduce_sum(own.sum * rescale(own.max, all.max, args.power));
    if (extras != kNoExtras) all.gaps = block_reduce_sum(gaps_from(all.max, own, args.gap_scale));
    if (extras == kAllExtras) all.beaten = __syncthreads_or(own.beaten);
    return all;
}

// ---------------------------------------------------------------------------------------------------------------------
// losses and gradients

// The constants of a row's gradient. With e = exp(z - max): p = to_p * e, and dlogits = slope * (a * e - b), except at
// the target.
struct ClassifierGradient {
    Exponent exponent;
    float to_p, a, b, at_target;
};

// The gradient of a row's loss.
template <typename floatX>
__device__ float dloss_of(const ClassifierArguments<floatX> &args, long long row) {
    const float dloss = args.dlosses ? args.options.dloss * args.dlosses[row] : args.options.dloss;
    if (!args.options.divisor) return dloss;
    const float divisor = *args.options.divisor;
    return divisor != 0 ? dloss / divisor : 0.0f;
}

// The logarithm of a row's sum of exp(z - max), and of its sum of exp(z). Formulas that combine max with another z use
// their difference and log_sum, so that a common offset of the row's logits costs no precision.
struct RowSum {
    float log_sum, lse;
    template <typename floatX>
    __device__ RowSum(const OnlineSoftmax &all, const ClassifierArguments<floatX> &args) {
        const float sum = all.sum > 0 ? all.sum : NAN;  // 0: no logit above -inf
        log_sum = fmaf(-Exponent(all.max, args.power).point_error(all.max), kLn2, logf(sum));
        lse = fmaf(all.max, args.size, log_sum);
    }
};

template <typename floatX>
__device__ ClassifierGradient gradient_constants(const ClassifierArguments<floatX> &args,
                                                 const ClassifierTarget<floatX> &target, const OnlineSoftmax &all,
                                                 float dloss) {
    const ClassifierOptions &o = args.options;
    const Exponent exponent(all.max, args.power);
    const float unit = dloss * o.logit_scale;
    const float to_p = __frcp_rn(all.sum > 0 ? all.sum : NAN);
    const float factor = (o.z_loss != 0 ? 1 + 2 * o.z_loss * RowSum(all, args).lse : 1.0f) * to_p;
    const float wanted = 1 - o.label_smoothing + args.smoothing;
    const float a = target.bad ? NAN : unit * factor;
    const float b = args.smoothing != 0 ? unit * args.smoothing : 0.0f;  // infinity times 0 would be NaN
    return {exponent, to_p, a, b, target.slope * unit * fmaf(factor, exponent.exp(target.value), -wanted)};
}

// Writes the row's loss, lse and correct, and reports a bad target. Called by one thread.
template <Extras extras, typename floatX>
__device__ void write_scalars(const ClassifierArguments<floatX> &args, long long row,
                              const ClassifierTarget<floatX> &target, const OnlineSoftmax &all) {
    const ClassifierOptions &o = args.options;
    const RowSum sum(all, args);
    if (target.bad) report_bad_id(args.status, row);
    // In double, no difference or product of floats overflows: the loss may be finite where they are not.
    const double size = args.size, to_target = ((double)all.max - target.value) * size;
    double loss = sum.log_sum + to_target;
    if (extras != kNoExtras && o.label_smoothing != 0) {
        const double wanted = 1 - (double)o.label_smoothing;
        loss = sum.log_sum + wanted * to_target + args.loss_of_gaps * all.gaps;
    }
    if (o.z_loss != 0) {
        const double lse = sum.log_sum + all.max * size;
        loss += o.z_loss * lse * lse;
    }
    if (target.ignored || target.bad) loss = target.ignored ? 0 : NAN;
    if (args.losses) args.losses[row] = (float)(o.add_losses ? args.losses[row] + loss : loss);
    if (args.lse) args.lse[row] = sum.lse;
    if (args.correct) args.correct[row] = target.index < args.V && !all.beaten;
}

// The gradient of a vector of logits, without the target's own term; the probabilities of a vector of logits.
template <bool softcap, Extras extras, typename floatX, int width>
__device__ Packed<floatX, width> gradient_of(const Packed<floatX, width> &x, const ClassifierGradient &g,
                                             const ClassifierArguments<floatX> &args) {
    float values[width], slope;
    to_floats(values, x);
#pragma unroll
    for (int k = 0; k < width; k++) {
        const float e = g.exponent.exp(value_and_slope<softcap, extras>(values[k], args, &slope));
        values[k] = slope * fmaf(g.a, e, -g.b);
    }
    return from_floats<floatX>(values);
}
template <bool softcap, Extras extras, typename floatX, int width>
__device__ Packed<floatX, width> probabilities_of(const Packed<floatX, width> &x, const ClassifierGradient &g,
                                                  const ClassifierArguments<floatX> &args) {
    float values[width], slope;
    to_floats(values, x);
#pragma unroll
    for (int k = 0; k < width; k++) {
        values[k] = g.to_p * g.exponent.exp(value_and_slope<softcap, extras>(values[k], args, &slope));
    }
    return from_floats<floatX>(values);
}

// Writes the outputs of a vector of logits. The dlogits of an ignored row are not written.
template <bool softcap, Extras extras, bool streaming, typename floatX, int width>
__device__ void write_columns(const Packed<floatX, width> &x, unsigned column, const ClassifierTarget<floatX> &target,
                              const ClassifierGradient &g, const ClassifierArguments<floatX> &args) {
    auto store = [](floatX *address, const Packed<floatX, width> &values) {
        streaming ? store_packed_cs(address, values) : store_packed(address, values);
    };
    if (target.dlogits && !target.ignored) {
        store(target.dlogits + column, gradient_of<softcap, extras>(x, g, args));
        // A second store to the target's element, by the same thread, costs less than a comparison at each element.
        if (target.index - column < width) target.dlogits[target.index] = (floatX)g.at_target;
    }
    if (target.probs) store(target.probs + column, probabilities_of<softcap, extras>(x, g, args));
}

// Writes `value` to columns begin..end-1 of a row; does nothing for null. Zeros are for the padding, and for the
// gradient of an ignored row.
template <typename floatX>
__device__ void fill_columns(floatX *row, unsigned begin, unsigned end, float value, unsigned thread,
                             unsigned threads) {
    for (unsigned j = begin + thread; row && j < end; j += threads) row[j] = (floatX)value;
}
template <typename floatX>
__device__ void zero_columns(floatX *row, unsigned begin, unsigned end, unsigned thread, unsigned threads) {
    fill_columns(row, begin, end, 0.0f, thread, threads);
}

// Divides `count` elements into single elements up to the first multiple of 16 bytes, vectors, and single elements.
struct Cut {
    unsigned head, vectors, tail;  // the vectors' first element, their number, and the element behind them

    template <typename floatX>
    __device__ Cut(const floatX *address, unsigned count) {
        constexpr unsigned size = Packed128<floatX>::size;
        head = min((unsigned)((-(uintptr_t)address % 16) / sizeof(floatX)), count);
        vectors = (count - head) / size;
        tail = head + vectors * size;
    }
};

// zero_columns() with stores of 16 bytes, by the threads of a block or others.
template <typename floatX>
__device__ void zero_columns128(floatX *row, unsigned begin, unsigned end, unsigned thread = threadIdx.x,
                                unsigned threads = blockDim.x) {
    typedef Packed128<floatX> x128;
    if (row == nullptr || begin == end) return;
    const Cut cut(row + begin, end - begin);
    x128 zeros;
    for (int k = 0; k < x128::size; k++) zeros[k] = (floatX)0.0f;
    for (unsigned i = thread; i < cut.vectors; i += threads) {
        store128cs(row + begin + cut.head + (size_t)i * x128::size, zeros);
    }
    zero_columns(row, begin, begin + cut.head, thread, threads);
    zero_columns(row, begin + cut.tail, end, thread, threads);
}

// ---------------------------------------------------------------------------------------------------------------------
// from the launchers' arguments to the kernels' arguments

// The common part of the launchers: checks the arguments, and calls launch(args, softcap, extras) if there are rows.
// softcap and extras are integral constants.
template <typename floatX, typename Launch>
cudaError_t classifier_launch(floatX *dlogits, float *losses, float *lse, floatX *probs, int *correct,
                              const floatX *logits, const int *targets, const float *dlosses, status_word *status,
                              int N, int V, int P, const ClassifierOptions &options, Launch launch) {
    if (N < 0 || V < 0 || P < V || !valid_options(options)) return cudaErrorInvalidValue;
    if (N == 0) return cudaSuccess;
    const float scale = options.logit_scale, cap = options.softcap;
    const bool softcap = cap > 0, all = correct || scale <= 0;
    ClassifierArguments<floatX> args = {dlogits, losses, lse, probs, correct, logits, targets, dlosses, status, N};
    args.V = (unsigned)V;
    args.P = (unsigned)P;
    args.options = options;
    args.size = softcap ? cap : fabsf(scale);
    args.power = args.size * kLog2e;
    args.sign = scale > 0 ? 1.0f : scale < 0 ? -1.0f : 0.0f;
    args.inner = softcap ? 2 * kLog2e * (scale / cap) : 0.0f;
    args.smoothing = options.label_smoothing / V;
    const double of_gap = V > 0 ? (double)options.label_smoothing / V * args.size : 0;
    args.gap_scale = (float)exp2(std::clamp(of_gap > 0 ? floor(log2(of_gap)) : 0, -126.0, 0.0));
    args.loss_of_gaps = of_gap / args.gap_scale;
    auto with = [&](auto capped) {
        if (all) return launch(args, capped, std::integral_constant<Extras, kAllExtras>());
        if (options.label_smoothing > 0) return launch(args, capped, std::integral_constant<Extras, kSum>());
        return launch(args, capped, std::integral_constant<Extras, kNoExtras>());
    };
    return softcap ? with(std::true_type()) : with(std::false_type());
}

}  // namespace bookends
