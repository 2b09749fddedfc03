// The check of a kernel's outputs. It finds differences from the reference, elements that are not written, writes
// outside an output, and bits that differ from launch to launch.
#pragma once
#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "../../common.h"
#include "inputs.h"
#include "parallel.h"

namespace bookends {

// ---------------------------------------------------------------------------------------------------------------------
// element types

template <typename T>
struct FloatFormat;
template <>
struct FloatFormat<float> {
    static constexpr const char *name = "fp32";
    static constexpr int mantissa = 23, min_exponent = -126;
};
template <>
struct FloatFormat<half> {
    static constexpr const char *name = "fp16";
    static constexpr int mantissa = 10, min_exponent = -14;
};
template <>
struct FloatFormat<__nv_bfloat16> {
    static constexpr const char *name = "bf16";
    static constexpr int mantissa = 7, min_exponent = -126;
};
template <>
struct FloatFormat<int> {  // for an output of zeros and ones
    static constexpr const char *name = "int";
    static constexpr int mantissa = 0, min_exponent = 0;
};

// The distance between x and its neighbours in type T; at 0, the smallest positive number.
template <typename T>
double ulp(double x) {
    int exponent;
    frexp(x, &exponent);  // |x| is in [2^(exponent-1), 2^exponent)
    const int least = FloatFormat<T>::min_exponent;
    return ldexp(1.0, (x == 0 ? least : std::max(exponent - 1, least)) - FloatFormat<T>::mantissa);
}

// x rounded to the nearest number of type T through float, as kernels round.
template <typename T>
double nearest(double x) {
    return (double)(float)(T)(float)x;
}

// x rounded up or down to a number of type T.
template <typename T>
double rounded_towards(double x, bool up) {
    if (!std::isfinite(x)) return x;
    const double largest = ldexp(2 - ldexp(1.0, -FloatFormat<T>::mantissa), 1 - FloatFormat<T>::min_exponent);
    const double rounded = (up ? ceil(x / ulp<T>(x)) : floor(x / ulp<T>(x))) * ulp<T>(x);
    if (fabs(rounded) <= largest) return rounded;
    return copysign(up == (x > 0) ? (double)INFINITY : largest, x);
}

// The distance of a result from the interval of allowed results (value - slack to value + slack, both rounded), in
// units in the last place of its type. Two NaNs, or two equal infinities, have distance 0. Any other NaN or infinity
// has an infinite distance.
template <typename T>
double ulp_error(T result, double value, double slack, bool either_neighbour) {
    const double got = (double)(float)result;
    if (std::isnan(got) || std::isnan(value)) return std::isnan(got) && std::isnan(value) ? 0.0 : INFINITY;
    if (std::isinf(value)) return got == value ? 0.0 : INFINITY;
    const double low = either_neighbour ? rounded_towards<T>(value - slack, false) : nearest<T>(value - slack);
    const double high = either_neighbour ? rounded_towards<T>(value + slack, true) : nearest<T>(value + slack);
    if (low <= got && got <= high) return 0.0;
    const double end = got < low ? low : high, distance = fabs(got - end);
    return std::isfinite(distance) ? distance / ulp<T>(end) : INFINITY;
}

// ---------------------------------------------------------------------------------------------------------------------
// comparison with the reference

// The reference's results for one row of an output, in double, and for each result an absolute bound on the error of
// float arithmetic before the single rounding to the output's type. Both have `cols` elements. slack is 0 and the flags
// are false unless the reference sets them.
struct Expected {
    std::vector<double> value, slack;
    bool either_neighbour = false;  // both neighbours of the value are correct, not only the nearest
    bool unknown = false;           // the row is not compared, since its reference would take too long
};

// Writes row r of the expected output to `row`.
typedef std::function<void(Expected &row, long long r)> Reference;

inline void expect_row(Expected &row, long long cols, const Reference &reference, long long r) {
    row.value.resize(cols);
    row.slack.assign(cols, 0.0);
    row.either_neighbour = row.unknown = false;
    reference(row, r);
}

struct CheckResult {
    bool ok = true;
    double max_error = 0;  // in ulps
    long long elements = 0;
    bool sampled = false;    // only a sample of the rows was compared
    bool has_slack = false;  // some elements have a slack
    std::string message;     // the first fault: its kind, its place and its size

    void add(const CheckResult &other) {
        elements += other.elements;
        max_error = std::max(max_error, other.max_error);
        sampled = sampled || other.sampled;
        has_slack = has_slack || other.has_slack;
        if (!other.ok && ok) fail(other.message);
    }
    void fail(const std::string &fault) {
        ok = false;
        message = fault;
    }
};

// Compares `count` rows; row k is at got + k * cols, and is row rows[k] of the output.
template <typename floatX>
CheckResult compare_rows(const char *what, const floatX *got, const long long *rows, size_t count, long long cols,
                         double allowed_ulps, const Reference &reference) {
    CheckResult result;
    Expected row;
    for (size_t k = 0; k < count; k++) {
        expect_row(row, cols, reference, rows[k]);
        progress.done();
        result.sampled = result.sampled || row.unknown;
        if (row.unknown) continue;
        result.elements += cols;
        for (long long c = 0; c < cols; c++) {
            const floatX element = got[k * cols + c];
            const double error = ulp_error(element, row.value[c], row.slack[c], row.either_neighbour);
            result.max_error = std::max(result.max_error, error);
            result.has_slack = result.has_slack || row.slack[c] > 0;
            if (error > allowed_ulps && result.ok) {
                result.fail(format("%s[%lld,%lld] is %.9g, should be %.9g", what, rows[k], c, (double)(float)element,
                                   row.value[c]));
                if (row.slack[c] > 0 && std::isfinite(row.value[c])) {
                    result.message += format(" to within %.3g", row.slack[c]);
                }
            }
        }
    }
    return result;
}

// The rows to compare, in ascending order: all rows; or, for an output of more than 2e9 elements, the first 16, the
// last 16 and a random sample of the others.
inline std::vector<long long> rows_to_check(long long rows, long long cols, uint64_t seed) {
    std::vector<long long> sample;
    if ((double)rows * cols <= 2e9) {
        for (long long r = 0; r < rows; r++) sample.push_back(r);
        return sample;
    }
    const Random random(1002, seed);
    const long long count = std::min(rows, std::max(256LL, (long long)(2e8 / cols)));
    for (long long i = 0; i < count; i++) {
        sample.push_back(i < 16   ? i % rows
                         : i < 32 ? rows - 1 - i % 16 % rows
                                  : (long long)(random.uniform(i) * rows));
    }
    std::sort(sample.begin(), sample.end());
    sample.erase(std::unique(sample.begin(), sample.end()), sample.end());
    return sample;
}

// Compares rows of an output in device memory, in parts of 64 MiB.
template <typename floatX>
CheckResult compare_output(const char *what, const floatX *data, long long rows, long long cols, double allowed_ulps,
                           const Reference &reference, uint64_t seed) {
    const std::vector<long long> sample = rows_to_check(rows, cols, seed);
    const Progress::Stage stage(what, (long long)sample.size());
    CheckResult result;
    result.sampled = (long long)sample.size() < rows;
    const long long part = std::max(1LL, (long long)(1 << 26) / std::max(cols * (long long)sizeof(floatX), 1LL));
    std::vector<floatX> host;
    for (size_t first = 0; first < sample.size(); first += part) {
        const size_t last = std::min(sample.size(), first + (size_t)part);
        host.resize((last - first) * cols);
        for (size_t i = first; i < last;) {  // one copy for each run of neighbouring rows
            size_t end = i + 1;
            while (end < last && sample[end] == sample[end - 1] + 1) end++;
            cuda_check(cudaMemcpy(&host[(i - first) * cols], data + sample[i] * cols,
                                  (end - i) * cols * sizeof(floatX), cudaMemcpyDeviceToHost));
            i = end;
        }
        const std::vector<CheckResult> results = in_parallel(last - first, [&](size_t from, size_t to) {
            return compare_rows(what, &host[from * cols], &sample[first + from], to - from, cols, allowed_ulps,
                                reference);
        });
        for (const CheckResult &some : results) result.add(some);
    }
    return result;
}

// ---------------------------------------------------------------------------------------------------------------------
// poison and fingerprints

// Poison is memory in which every byte is 0xff, a NaN in each element type. This counts the elements of `size` bytes
// that are poison; or, with expect_poison, those that are not.
static __global__ void count_poison_kernel(unsigned long long *found, const unsigned char *data, long long count,
                                           int size, bool expect_poison) {
    const long long stride = (long long)gridDim.x * blockDim.x;
    unsigned long long mine = 0;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
        bool poison = true;
        for (int k = 0; k < size; k++) poison = poison && data[i * size + k] == 0xff;
        mine += poison != expect_poison;
    }
    if (mine > 0) atomicAdd(found, mine);
}

// A hash: the sum, over each 8 bytes, of a hash of their bits and position. The integer sum does not depend on the
// order.
static __global__ void fingerprint_kernel(unsigned long long *sum, const unsigned long long *data, long long count) {
    const long long stride = (long long)gridDim.x * blockDim.x;
    unsigned long long mine = 0;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
        mine += mix64(data[i] + mix64((uint64_t)i));
    }
    if (mine > 0) atomicAdd(sum, mine);
}

// ---------------------------------------------------------------------------------------------------------------------
// the checker

// Holds the arrays that kernels write, each between two guard zones, and checks the results of a launch.
class Checker {
  public:
    explicit Checker(DeviceMemory &device_memory) : memory(device_memory) {}

    uint64_t seed = 0;  // for the sample of rows that is compared

    // See Harness::output().
    template <typename floatX, typename Generator>
    floatX *output(const char *what, long long rows, long long cols, double allowed_ulps, const Reference &reference,
                   const Generator *initial, bool used_up) {
        Array array = allocate(what, (double)rows * cols * sizeof(floatX));
        floatX *const data = (floatX *)array.data;
        if (initial) array.fill = [=, values = *initial] { bookends::fill(data, values, rows * cols); };
        array.used_up = used_up;
        const bool whole = !initial;
        array.compare = [=] {
            const auto *const bytes = (const unsigned char *)data;
            const long long unwritten = whole ? count_poison(bytes, rows * cols, sizeof(floatX), false) : 0;
            if (unwritten == 0) return compare_output(what, data, rows, cols, allowed_ulps, reference, seed);
            CheckResult result;
            result.fail(format("%s: %lld of %lld elements not written", what, unwritten, rows * cols));
            return result;
        };
        array.compute_reference = [=] {
            const Progress::Stage stage(what, rows);
            Expected row;
            for (long long r = 0; r < rows; r++) {
                expect_row(row, cols, reference, r);
                progress.done();
            }
        };
        if (!std::is_integral_v<floatX>) array.tolerance = format("%g %s ulp", allowed_ulps, FloatFormat<floatX>::name);
        arrays.push_back(array);
        allowed = std::max(allowed, allowed_ulps);
        return data;
    }

    // See Harness::workspace().
    void *workspace(size_t size) {
        arrays.push_back(allocate("workspace", (double)size));
        arrays.back().fresh = true;
        return arrays.back().data;
    }

    status_word *status() {
        status_device = memory.allocate<status_word>(1);
        if (status_device) cuda_check(cudaMemset(status_device, 0xff, sizeof(status_word)));
        return status_device;
    }

    // Allocates the check's own memory.
    void allocate_counter() { counter = memory.allocate<unsigned long long>(1); }

    // Prepares all arrays for a launch: outputs get initial values or poison, guard zones get poison, and the status
    // word becomes kStatusOk. Before the first launch, a workspace keeps the state of its allocation.
    void prepare() {
        for (Array &array : arrays) {
            cuda_check(cudaMemset(array.data - kGuard, 0xff, kGuard));
            cuda_check(cudaMemset(array.data + array.size, 0xff, kGuard));
            if (array.fill) {
                array.fill();
            } else if (!array.fresh) {
                cuda_check(cudaMemset(array.data, 0xff, array.size));
            }
            array.fresh = false;
        }
        if (status_device) cuda_check(cudaMemset(status_device, 0xff, sizeof(status_word)));
        cuda_check(cudaDeviceSynchronize());
    }

    // Restores the initial values of outputs that a launch overwrites. Runs in the default stream, which waits for the
    // stream of the launches; later launches wait for the default stream.
    void refill() {
        for (const Array &array : arrays) {
            if (array.used_up) array.fill();
        }
    }

    // Checks the results of the last launch. `earlier`: the name of an earlier, correct launch whose bits this launch
    // must repeat; empty if there is none.
    CheckResult check(const std::string &earlier) {
        CheckResult all;
        for (Array &array : arrays) all.add(check_array(array, earlier));
        if (all.ok && status_device) {
            status_word status = 0;
            cuda_check(cudaMemcpy(&status, status_device, sizeof(status), cudaMemcpyDeviceToHost));
            if (status != kStatusOk) {
                all.fail(format("the status word reports a bad id at position %llu; all ids are good", status));
            }
        }
        return all;
    }

    // Computes the reference of every row, on one core.
    void compute_references() const {
        for (const Array &array : arrays) {
            if (array.compute_reference) array.compute_reference();
        }
    }

    // The largest allowed error of an output, in ulps.
    double allowed_error() const { return allowed; }

    // The allowed errors of all outputs in words, each once.
    std::string tolerances() const {
        std::vector<std::string> different;
        for (const Array &array : arrays) {
            const bool known = std::find(different.begin(), different.end(), array.tolerance) != different.end();
            if (!known && !array.tolerance.empty()) different.push_back(array.tolerance);
        }
        return joined(different);
    }

  private:
    static constexpr long long kGuard = 1 << 16;  // bytes: more than a row of most shapes; keeps arrays aligned

    // An output or a workspace.
    struct Array {
        const char *what;
        unsigned char *data = nullptr;
        size_t size = 0;                          // bytes
        std::function<void()> fill;               // writes the initial values; null: poison
        std::function<CheckResult()> compare;     // null: a workspace
        std::function<void()> compute_reference;  // null: a workspace
        bool used_up = false;                     // initial values must be restored before each cold run
        std::string tolerance;                    // in words
        bool fresh = false;                       // prepare() does not write it before the first launch
        unsigned long long fingerprint = 0;       // of a version's first launch
        CheckResult result;                       // of that launch
    };

    DeviceMemory &memory;
    std::vector<Array> arrays;
    status_word *status_device = nullptr;
    unsigned long long *counter = nullptr;
    double allowed = 0;

    Array allocate(const char *what, double size) {
        Array array;
        array.what = what;
        unsigned char *const base = memory.allocate<unsigned char>(size + 2 * kGuard);
        if (base) {
            array.data = base + kGuard;
            array.size = (size_t)size;
        }
        return array;
    }

    CheckResult check_array(Array &array, const std::string &earlier) {
        CheckResult result;
        const long long outside = count_poison(array.data - kGuard, kGuard, 1, true) +
                                  count_poison(array.data + array.size, kGuard, 1, true);
        if (outside > 0) {
            result.fail(format("%s: %lld byte%s written outside it", array.what, outside, outside == 1 ? "" : "s"));
        }
        if (!result.ok || !array.compare) return result;
        const unsigned long long bits = fingerprint(array);
        if (!earlier.empty() && bits == array.fingerprint) return array.result;  // the same bits: the same result
        result = array.compare();
        if (!earlier.empty() && result.ok) {
            result.fail(format("%s: not the same bits as %s", array.what, earlier.c_str()));
        }
        array.fingerprint = bits;
        array.result = result;
        return result;
    }

    long long count_poison(const unsigned char *data, long long count, int size, bool expect_poison) {
        return (long long)counted([&](unsigned long long *found) {
            count_poison_kernel<<<fill_grid(count), 256>>>(found, data, count, size, expect_poison);
        });
    }

    // The last 8 bytes may extend into the guard zone, which has already been checked to hold poison.
    unsigned long long fingerprint(const Array &array) {
        const long long words = (long long)ceil_div(array.size, sizeof(unsigned long long));
        return counted([&](unsigned long long *sum) {
            fingerprint_kernel<<<fill_grid(words), 256>>>(sum, (const unsigned long long *)array.data, words);
        });
    }

    // The number that a kernel adds to a zero in device memory.
    template <typename Launch>
    unsigned long long counted(Launch launch) {
        unsigned long long result = 0;
        cuda_check(cudaMemset(counter, 0, sizeof(result)));
        launch(counter);
        cuda_check(cudaGetLastError());
        cuda_check(cudaMemcpy(&result, counter, sizeof(result), cudaMemcpyDeviceToHost));
        return result;
    }
};

}  // namespace bookends
