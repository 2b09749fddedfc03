// The classifier's options, the statistics of a row of logits, its loss and its gradient: what classifier_fused.cu and
// lm_head.cu share.
#pragma once
#include "../common.h"

#include <cfloat>
#include <cmath>

namespace bookends {

struct ClassifierOptions {
    float dloss = 1;  // the gradient of each row's loss: 1/N for that of the mean
    float logit_scale = 1;
    float softcap = 0;  // 0: none
    float label_smoothing = 0;
    float z_loss = 0;
    int ignore_index = -100;  // rows with this target have loss 0 and gradient 0
    // One float in device memory that the gradients are divided by, beside dloss: the number of rows that count, for a
    // mean over them (see classifier_totals()). 0 makes the gradients 0. Null: no divisor.
    const float *divisor = nullptr;
    bool add_losses = false;  // losses are added to what is there, and not written over it
};

// Finite, in their ranges, and none so large or small that a constant formed of them is no longer finite.
inline bool valid_options(const ClassifierOptions &o) {
    const bool finite = std::isfinite(o.dloss) && std::isfinite(2 * o.logit_scale) && std::isfinite(2 * o.softcap) &&
                        std::isfinite(o.label_smoothing) && std::isfinite(2 * o.z_loss) &&
                        std::isfinite(2 * o.dloss * o.logit_scale);
    return finite && o.softcap >= 0 && (o.softcap == 0 || std::isfinite(4 * (o.logit_scale / o.softcap))) &&
           o.label_smoothing >= 0 && o.label_smoothing <= 1;
}

// ---------------------------------------------------------------------------------------------------------------------
// what the kernels share

// Exponentials are powers of two here, as in the hardware: exp(z) = 2^(z * log2(e)).
constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f;

// The launcher's arguments, and the constants that the options come to: z = value * size, where value is the logit, its
// sign turned if logit_scale is negative (with kAllExtras), or tanh of it. So the largest value is that of the
// largest z, and a scale costs nothing: exp(z) is the power of two of value * (size * log2(e)).
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
    float size = 0, power = 0;  // the latter is size * log2(e)
    float sign = 0;             // of logit_scale: 1, -1 or 0
    float inner = 0;            // with a softcap: exp(2u) = 2^(inner * x), where tanh(u) is wanted
    float smoothing = 0;        // label_smoothing / V
    // The sum of (max - z_j) over the vocabulary, which label smoothing adds to the loss with the factor smoothing, is
    // formed of values times `gap_scale`, a power of two: the largest that is not above smoothing * size, but 1 at most
    // and 2^-126 at least. So no partial sum is beyond the loss; and since terms are products and differences in one
    // rounding (fmaf), what is scaled loses no digits, save below 2^-149. The loss has loss_of_gaps times the sum.
    float gap_scale = 1;
    double loss_of_gaps = 0;
};

// exp(z - max) as 2^(value * factor - point), which is a multiply-add. The point is max * power, rounded. What it is
// off by does no harm, since all that is formed of a row counts from the same point; until it is too much. But from
// 2^30 on the float next to max is 2^-64 times as likely already: whether a value is the largest is all that counts,
// and for that any factor does which makes max * factor exact.
struct Exponent {
    float factor, point;

    __device__ Exponent(float max, float power) {
        factor = power;
        point = max * power;
        if (!(fabsf(point) < 0x1p30f)) {
            // A power of two, near 2^31/max: so large that smaller values come to 0.
            factor = __uint_as_float(min(285u - (__float_as_uint(max) >> 23 & 0xffu), 254u) << 23);
            point = max * factor;
        }
    }
    __device__ float exp(float value) const { return fast_exp2(fmaf(value, factor, -point)); }
    __device__ float off(float max) const { return fmaf(max, factor, -point); }  // in powers of two
};

// What a sum that counts from one maximum is multiplied with, to count from another one. Halves, since the difference
// itself may overflow where its product with the power doesn't.
__device__ inline float rescale(float from, const Exponent &of_from, float to, const Exponent &of_to, float power) {
    const float half_way = (0.5f * from - 0.5f * to) * power;
    return fast_exp2(fmaf(2.0f, half_way, of_to.off(to) - of_from.off(from)));
}
__device__ inline float rescale(float from, float to, float power) {
    return rescale(from, Exponent(from, power), to, Exponent(to, power), power);
}

// What more there is to do for each element of a row, at compile time: nothing; the sum of the values, for label
// smoothing; or that, whether any logit beats the target's, and signs.
enum Extras { kNoExtras, kSum, kAllExtras };

// With a softcap, tanh(u) = 1 - 2r and its slope 1 - tanh(u)^2, from e = exp(2u) and r = 1 / (1+e). tanh is off by two
// roundings of a number near 1 whatever u is. The slope is 4e / (1+e)^2: no difference of numbers that are almost
// equal. Where e is infinite, r is 0 and e*r NaN, of which fminf makes the 1 that e*r goes to.
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

// A row and its target.
template <typename floatX>
struct ClassifierTarget {
    const floatX *logits;
    floatX *dlogits, *probs;  // null: not wanted
    unsigned index;           // of a good target; else none of the columns
    bool ignored, bad;
    bool read;              // whether anything is wanted that the logits decide
    float x, value, slope;  // of the target's logit: read here, before anybody can overwrite it

    __device__ bool second_pass() const { return (dlogits && !ignored) || probs; }
};

// All but the target's logit.
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

// What has been seen of a row, as an online softmax has it: the largest value, and the sum of exp(z - max), as Exponent
// forms it. The maximum starts at the lowest finite number: with -inf, a row that begins with -inf would come to
// -inf - -inf. Extras: the sum of the gaps, max - value, times args.gap_scale, with the number of values in it; and
// whether any logit beats the target's: is larger, or as large and comes before it. (Under a softcap too it is the
// logits that are compared: tanh keeps their order, until rounding makes them equal. A NaN beats everything.)
//
// No gap is negative, so their sum is as exact, relative to itself, as its additions are, whatever the values are and
// whichever of them is an outlier. The only reference point is the maximum so far.
struct OnlineSoftmax {
    float max = -FLT_MAX, sum = 0, gaps = 0;
    unsigned count = 0;
    bool beaten = false;
};

// (a - b) * scale, scale being a power of two: a difference that may overflow if its parts are not scaled before.
__device__ inline float scaled_gap(float a, float b, float scale) { return fmaf(a, scale, -(b * scale)); }

// The sum of gaps, counted from another maximum. Of no values there is none, however far the maxima are apart.
__device__ inline float gaps_from(float largest, const OnlineSoftmax &seen, float scale) {
    return seen.count > 0 ? fmaf((float)seen.count, scaled_gap(largest, seen.max, scale), seen.gaps) : 0.0f;
}

// The same while it grows, with how exponentials are formed at present.
struct RunningSoftmax : OnlineSoftmax {
    Exponent exponent;
    float lost = 0;  // what the additions to `gaps` have rounded off
    __device__ explicit RunningSoftmax(float power) : exponent(max, power) {}

    // The sum of more gaps, and how many they are. The rounding error of each addition is kept (the branch of
    // Neumaier's compensated summation, 1974, in which the sum is the larger one): small gaps behind an outlier are not
    // lost.
    __device__ void add_gaps(float more, unsigned values) {
        const float total = gaps + more;
        lost += gaps - total + more;
        gaps = total;
        count += values;
    }
    // What has been seen. Where a gap is infinite, so is their sum, and `lost` is NaN.
    __device__ OnlineSoftmax result() const {
        OnlineSoftmax all = *this;
        if (isfinite(lost)) all.gaps += lost;
        return all;
    }

    // A value has come by that may be the largest.
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

// The largest of a vector's elements; 16-bit ones go two an instruction. A NaN is none.
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

// Of neighbours first, then of the sums: shorter than one after the other, and closer.
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

// Sees vectors, whose first columns are `stride` apart: first what the largest value is, then the sums.
template <bool softcap, Extras extras, typename floatX, int width, int count>
__device__ void update_max(RunningSoftmax &seen, const Packed<floatX, width> (&x)[count], unsigned column,
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
                if (!(mine < best || (mine == best && behind))) seen.beaten = true;
            }
            most *= args.sign;
        } else {
            most = largest_of(x[u]);
        }
        largest = fmaxf(largest, value_and_slope<softcap, extras>(most, args, &slope));
    }
    seen.raise<extras>(largest, args);
}
template <bool softcap, Extras extras, typename floatX, int width, int count>
__device__ void update_sums(RunningSoftmax &seen, const Packed<floatX, width> (&x)[count],
                            const ClassifierArguments<floatX> &args) {
    const float max_scaled = seen.max * args.gap_scale;
    float sums[count], gap_sums[count], slope;
#pragma unroll
    for (int u = 0; u < count; u++) {
        float value[width];
        to_floats(value, x[u]);
#pragma unroll
        for (int k = 0; k < width; k++) value[k] = value_and_slope<softcap, extras>(value[k], args, &slope);
        if constexpr (extras != kNoExtras) {
            // The digits of a few halves and of their sum fit into a float; of the other types gaps are added up.
            constexpr bool whole = std::is_same_v<floatX, half>;
            float gaps[width];
#pragma unroll
            for (int k = 0; k < width; k++) gaps[k] = whole ? value[k] : fmaf(-args.gap_scale, value[k], max_scaled);
            const float sum = sum_of(gaps);
            gap_sums[u] = whole ? fmaf((float)width, seen.max, -sum) * args.gap_scale : sum;
        }
#pragma unroll
        for (int k = 0; k < width; k++) value[k] = seen.exponent.exp(value[k]);
        sums[u] = sum_of(value);
    }
    seen.sum += sum_of(sums);
    if constexpr (extras != kNoExtras) seen.add_gaps(sum_of(gap_sums), width * count);
}
template <bool softcap, Extras extras, typename floatX, int width, int count>
__device__ void update_statistics(RunningSoftmax &seen, const Packed<floatX, width> (&x)[count], unsigned column,
                                  unsigned stride, const ClassifierTarget<floatX> &target,
                                  const ClassifierArguments<floatX> &args) {
    update_max<softcap, extras>(seen, x, column, stride, target, args);
    update_sums<softcap, extras>(seen, x, args);
}
template <bool softcap, Extras extras, typename floatX, int width>
__device__ void update_statistics(RunningSoftmax &seen, const Packed<floatX, width> &x, unsigned column,
                                  const ClassifierTarget<floatX> &target, const ClassifierArguments<floatX> &args) {
    const Packed<floatX, width> one[1] = {x};
    update_statistics<softcap, extras>(seen, one, column, 0, target, args);
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

// What all lanes of a warp, or all threads of a block, have seen together; each gets the same bits. (In a block, values
// are not counted.)
template <Extras extras, typename floatX>
__device__ OnlineSoftmax warp_merge(const OnlineSoftmax &seen, const ClassifierArguments<floatX> &args) {
    OnlineSoftmax all;
    all.max = warp_reduce_max(seen.max);
    all.sum = warp_reduce_sum(seen.sum * rescale(seen.max, all.max, args.power));
    if (extras != kNoExtras) {
        all.gaps = warp_reduce_sum(gaps_from(all.max, seen, args.gap_scale));
        all.count = __reduce_add_sync(0xffffffffu, seen.count);
    }
    if (extras == kAllExtras) all.beaten = __any_sync(0xffffffffu, seen.beaten);
    return all;
}
template <Extras extras, typename floatX>
__device__ OnlineSoftmax block_merge(const OnlineSoftmax &seen, const ClassifierArguments<floatX> &args) {
    OnlineSoftmax all;
    all.max = block_reduce_max(seen.max);
    all.sum = block_reduce_sum(seen.sum * rescale(seen.max, all.max, args.power));
    if (extras != kNoExtras) all.gaps = block_reduce_sum(gaps_from(all.max, seen, args.gap_scale));
    if (extras == kAllExtras) all.beaten = __syncthreads_or(seen.beaten);
    return all;
}

// What the second pass needs: e = exp(z - max), p = to_p * e, and the gradient slope * (a * e - b), but at the target.
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

// The logarithm of a row's sum of exp(z - max), and of its sum of exp(z). All that is formed of max and another z is
// formed of their difference, so that what the row's logits have in common costs no precision.
struct RowSum {
    float log_sum, lse;
    template <typename floatX>
    __device__ RowSum(const OnlineSoftmax &seen, const ClassifierArguments<floatX> &args) {
        const float sum = seen.sum > 0 ? seen.sum : NAN;  // 0: no logit above -inf
        log_sum = fmaf(-Exponent(seen.max, args.power).off(seen.max), kLn2, logf(sum));
        lse = fmaf(seen.max, args.size, log_sum);
    }
};

template <typename floatX>
__device__ ClassifierGradient gradient_constants(const ClassifierArguments<floatX> &args,
                                                 const ClassifierTarget<floatX> &target, const OnlineSoftmax &seen,
                                                 float dloss) {
    const ClassifierOptions &o = args.options;
    const Exponent exponent(seen.max, args.power);
    const float unit = dloss * o.logit_scale;
    const float to_p = __frcp_rn(seen.sum > 0 ? seen.sum : NAN);
    const float factor = (o.z_loss != 0 ? 1 + 2 * o.z_loss * RowSum(seen, args).lse : 1.0f) * to_p;
    const float wanted = 1 - o.label_smoothing + args.smoothing;
    const float a = target.bad ? NAN : unit * factor;
    const float b = args.smoothing != 0 ? unit * args.smoothing : 0.0f;  // not infinity times 0
    return {exponent, to_p, a, b, target.slope * unit * fmaf(factor, exponent.exp(target.value), -wanted)};
}

// The row's scalars: by one thread.
template <Extras extras, typename floatX>
__device__ void write_scalars(const ClassifierArguments<floatX> &args, long long row,
                              const ClassifierTarget<floatX> &target, const OnlineSoftmax &seen) {
    const ClassifierOptions &o = args.options;
    const RowSum of_row(seen, args);
    if (target.bad) report_bad_id(args.status, row);
    // In double, where no difference or product of floats overflows: the loss may be finite all the same.
    const double size = args.size, to_target = ((double)seen.max - target.value) * size;
    double loss = of_row.log_sum + to_target;
    if (extras != kNoExtras && o.label_smoothing != 0) {
        const double wanted = 1 - (double)o.label_smoothing;
        loss = of_row.log_sum + wanted * to_target + args.loss_of_gaps * seen.gaps;
    }
    if (o.z_loss != 0) {
        const double lse = of_row.log_sum + seen.max * size;
        loss += o.z_loss * lse * lse;
    }
    if (target.ignored || target.bad) loss = target.ignored ? 0 : NAN;
    if (args.losses) args.losses[row] = (float)(o.add_losses ? args.losses[row] + loss : loss);
    if (args.lse) args.lse[row] = of_row.lse;
    if (args.correct) args.correct[row] = target.index < args.V && !seen.beaten;
}

// Of a vector of logits: the gradient, but the target's is as any other's; and the probabilities.
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

// The second pass for a vector. An ignored row's dlogits are left to others.
template <bool softcap, Extras extras, bool streaming, typename floatX, int width>
__device__ void write_columns(const Packed<floatX, width> &x, unsigned column, const ClassifierTarget<floatX> &target,
                              const ClassifierGradient &g, const ClassifierArguments<floatX> &args) {
    auto store = [](floatX *address, const Packed<floatX, width> &values) {
        streaming ? store_packed_cs(address, values) : store_packed(address, values);
    };
    if (target.dlogits && !target.ignored) {
        store(target.dlogits + column, gradient_of<softcap, extras>(x, g, args));
        // A second store to one element of the row, by the same thread: that costs less than a look at each.
        if (target.index - column < width) target.dlogits[target.index] = (floatX)g.at_target;
    }
    if (target.probs) store(target.probs + column, probabilities_of<softcap, extras>(x, g, args));
}

// Columns begin..end-1 of a row, unless that is null. Zeros: padding, and all of an ignored row's gradient.
template <typename floatX>
__device__ void fill_columns(floatX *row, unsigned begin, unsigned end, float value, unsigned thread,
                             unsigned threads) {
    for (unsigned j = begin + thread; row && j < end; j += threads) row[j] = (floatX)value;
}
template <typename floatX>
__device__ void zero_columns(floatX *row, unsigned begin, unsigned end, unsigned thread, unsigned threads) {
    fill_columns(row, begin, end, 0.0f, thread, threads);
}

// How `count` elements from an address on are cut: single ones up to the first multiple of 16 bytes, vectors, and
// single ones.
struct Cut {
    unsigned head, vectors, tail;  // where the vectors begin; how many they are; where they end

    template <typename floatX>
    __device__ Cut(const floatX *address, unsigned count) {
        constexpr unsigned size = Packed128<floatX>::size;
        head = min((unsigned)((-(uintptr_t)address % 16) / sizeof(floatX)), count);
        vectors = (count - head) / size;
        tail = head + vectors * size;
    }
};

// zero_columns by the threads of a block, or others; each thread writes 16 bytes at a time.
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
// from the launchers' arguments to those of the kernels

// What the launchers share: launch(args, softcap, extras), the last two as integral constants, if the
// arguments are right and there is work.
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
