// What a main() needs: the command line, inputs, checking, timing and reports, the same for every kernel file.
//
// A file describes its problem once and hands it over with its table of versions:
//
//     Harness h("encoder_forward", "token + position embedding", {{'b', "B", 8, 2}, ...});
//     return h.main(argc, argv, versions<float>, race<float>, race<half>, race<__nv_bfloat16>);
//
// where race<floatX>(h) asks h for the shape, the ids, the inputs, the outputs and the workspace, says how few bytes
// must move, and calls h.race(table, launch). Everything that can be refused is refused before anything runs.
#pragma once
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdarg>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "../common.h"
#include "harness/progress.h"

namespace bookends {

// The commit that the binary was built from: the Makefile links a strong definition over this one.
extern "C" __attribute__((weak)) const char bookends_commit[] = "unknown";

#ifdef BOOKENDS_CPU_DEVICE
constexpr bool ON_CPU = true;
#else
constexpr bool ON_CPU = false;
#endif

// An amount of memory in the largest unit that leaves a number of at least 1, with three digits.
inline std::string memory_text(double bytes) {
    const char *const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    size_t unit = 0;
    for (; bytes >= 1024 && unit + 1 < sizeof(units) / sizeof(units[0]); unit++) bytes /= 1024;
    char text[40];
    if (bytes >= 1024) {  // no memory is as large: the digits would say nothing
        snprintf(text, sizeof(text), "more than 1024 EiB");
    } else {
        snprintf(text, sizeof(text), "%.*f %s",
                 unit == 0 || bytes >= 100 ? 0
                 : bytes >= 10             ? 1
                                           : 2,
                 bytes, units[unit]);
    }
    return text;
}

enum ExitStatus { EXIT_OK = 0, EXIT_WRONG = 1, EXIT_BAD_INPUT = 2, EXIT_NO_DEVICE = 3 };

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
struct FloatFormat<int> {  // of whole numbers as an output: 0 and 1
    static constexpr const char *name = "int";
    static constexpr int mantissa = 0, min_exponent = 0;
};

// What the reference says of one row of an output: the exact results, and how far float arithmetic may be off each
// (absolute) before the one rounding to the output's type. Both are cols long; slack is 0 and either_neighbour false
// unless the reference says otherwise.
struct Expected {
    std::vector<double> value, slack;
    bool either_neighbour = false;  // rounding may go down or up, not only to the nearest: both are 0 ulps off
    bool unknown = false;           // the reference would take too long for this row: it is not compared
};

// The distance between x and its neighbours in type T; at 0, that of the smallest numbers.
template <typename T>
double ulp(double x) {
    int exponent;
    frexp(x, &exponent);  // |x| is in [2^(exponent-1), 2^exponent)
    const int least = FloatFormat<T>::min_exponent;
    return ldexp(1.0, (x == 0 ? least : std::max(exponent - 1, least)) - FloatFormat<T>::mantissa);
}

// x rounded to type T: to the nearest, by way of float, as kernels do it; or to the next number below or above.
template <typename T>
double nearest(double x) {
    return (double)(float)(T)(float)x;
}
template <typename T>
double next_number(double x, bool up) {
    if (!std::isfinite(x)) return x;
    const double largest = ldexp(2 - ldexp(1.0, -FloatFormat<T>::mantissa), 1 - FloatFormat<T>::min_exponent);
    const double rounded = (up ? ceil(x / ulp<T>(x)) : floor(x / ulp<T>(x))) * ulp<T>(x);
    if (fabs(rounded) <= largest) return rounded;
    return copysign(up == (x > 0) ? (double)INFINITY : largest, x);
}

// How far a result is, in units in the last place of its type, from all that it may be: from value - slack to
// value + slack, both rounded. Two NaNs, or the same infinity, are 0 apart; a NaN or an infinity where there should be
// none is infinitely far.
template <typename T>
double ulps_off(T result, double value, double slack, bool either_neighbour) {
    const double got = (double)(float)result;
    if (std::isnan(got) || std::isnan(value)) return std::isnan(got) && std::isnan(value) ? 0.0 : INFINITY;
    if (std::isinf(value)) return got == value ? 0.0 : INFINITY;
    const double low = either_neighbour ? next_number<T>(value - slack, false) : nearest<T>(value - slack);
    const double high = either_neighbour ? next_number<T>(value + slack, true) : nearest<T>(value + slack);
    if (low <= got && got <= high) return 0.0;
    const double end = got < low ? low : high, distance = fabs(got - end);
    return std::isfinite(distance) ? distance / ulp<T>(end) : INFINITY;
}

// ---------------------------------------------------------------------------------------------------------------------
// inputs: seeded, by counter, so that the i-th value is the same wherever and in whatever order it is made

struct Random {
    uint64_t key;
    Random(int stream, uint64_t seed) : key(mix64(seed * 0x9e3779b97f4a7c15ull + (uint64_t)stream)) {}
    __host__ __device__ uint64_t bits(long long i) const { return mix64(key + (uint64_t)i * 0x9e3779b97f4a7c15ull); }
    double uniform(long long i) const { return (double)(bits(i) >> 11) * 0x1p-53; }  // [0, 1)
};

// An array that is never stored: uniform in [-1, 1), in steps of 2^-23, then rounded to floatX.
template <typename floatX>
struct Values {
    Random random;
    Values(int stream, uint64_t seed) : random(stream, seed) {}
    __host__ __device__ floatX operator[](long long i) const {
        return (floatX)((float)(random.bits(i) >> 40) * 0x1p-23f - 1.0f);
    }
};

template <typename floatX, typename Generator>
__global__ void fill_values_kernel(floatX *out, Generator values, long long count) {
    const long long stride = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) out[i] = values[i];
}

// Counts the elements of `size` bytes that still hold nothing but 0xff, or (expect_poison) that no longer do.
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

// Adds up a number for each 8 bytes, of what they hold and where they stand: integers, so the order is all the same.
static __global__ void fingerprint_kernel(unsigned long long *sum, const unsigned long long *data, long long count) {
    const long long stride = (long long)gridDim.x * blockDim.x;
    unsigned long long mine = 0;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
        mine += mix64(data[i] + mix64((uint64_t)i));
    }
    if (mine > 0) atomicAdd(sum, mine);
}

// ---------------------------------------------------------------------------------------------------------------------
// the harness

struct Dim {
    char flag;
    const char *name;
    int cuda_default, cpu_default;
    const char *otherwise = nullptr;  // what it is if not given, where that hangs on other options; the defaults are 0
    int value = 0;
};

// An option that only some binaries have. It takes one of the values, the first if it is not given; or, without values,
// it is a flag, given or not.
struct Choice {
    const char *option;
    std::vector<const char *> values;
    const char *help;
    size_t chosen = 0;  // which value; of a flag, whether it is given
};

// The same, with a number.
struct Number {
    const char *option;
    double normally, least, most;  // the default, and what is allowed
    const char *help;
    bool whole = false;
    double value = 0;
};

// The same, with any text, which the race looks at.
struct Text {
    const char *option, *normally, *help;
    std::string value = "";
};

// Milliseconds: cold is with the L2 flushed before each run, hot is back to back inside a graph; baseline is the
// median of what was run in turns with it, cold too.
struct Times {
    double min = 0, median = 0, p90 = 0, hot = 0, baseline = 0;
    int runs = 0;
};

// What others need for the heart of the job, timed in turns with each version: the clocks drift. The name is for the
// reports, where the ratio to it stands in place of the bandwidth.
struct Baseline {
    const char *name = nullptr;  // none
    std::function<cudaError_t(cudaStream_t)> launch;
};

// A number to report beside the times: its key in JSON, the words for it in a line and the heading of its column in the
// table of all versions (empty: none). All versions have the same figures.
struct Figure {
    std::string key;
    double value;
    std::string words, column = "";
};

struct CheckResult {
    bool ok = true;
    double max_error = 0;
    long long elements = 0;
    bool sampled = false;  // not every row was compared
    bool slack = false;    // some results may be off by more than the last rounding
    std::string message;   // what is wrong, where and by how much

    void add(const CheckResult &other) {
        elements += other.elements;
        max_error = std::max(max_error, other.max_error);
        sampled = sampled || other.sampled;
        slack = slack || other.slack;
        if (!other.ok && ok) fail(other.message);
    }
    void fail(const std::string &what) {
        ok = false;
        message = what;
    }
};

// What a run of one version at one block size gave.
struct Record {
    int version;
    const char *name;
    int block_size;
    Times times;
    bool best = false;
    std::string skipped = "";  // why it did not run
};

struct Harness {
    const char *name, *title;
    std::vector<Dim> dims;
    std::vector<Choice> choices;
    std::vector<Number> numbers;
    std::vector<Text> texts;
    bool block_sizes = true;  // whether versions are run at several; else the race names the points

    // the command line
    int version = -1;  // -1: all
    std::string dtype = "bf16", token_source = "uniform", json_path;
    int block_size = 0, repeat = 0;
    bool do_check = true, do_bench = true, list = false;
    uint64_t seed = 42;

    // what race<floatX>() fills in
    std::vector<int> host_tokens;
    double bytes = 0, flops = 0;                   // the fewest that the job must move and do
    std::function<std::string(int version)> skip;  // may say why a version can't run; empty: it can
    std::function<void()> prepare_references;      // makes what they share, once all that can be refused has been
    std::function<void(int version, cudaStream_t)> before;  // is called before a version's first launch
    std::vector<std::string> points;  // without block sizes: a version is run at each; launches get which
    const char *swept = nullptr;      // the option whose values the points are; null: they are names of their own
    std::function<std::vector<Figure>(int version, int point)> figures;
    Baseline baseline;

    // for the references, which may depend on it: the version that is being checked; 0 where the reference runs alone
    int running = 0;
    bool checking = false;  // for the launch: this one will be checked, not timed

    Harness(const char *program, const char *does, std::vector<Dim> sizes, std::vector<Choice> own_choices = {},
            std::vector<Number> own_numbers = {}, std::vector<Text> own_texts = {})
        : name(program),
          title(does),
          dims(std::move(sizes)),
          choices(std::move(own_choices)),
          numbers(std::move(own_numbers)),
          texts(std::move(own_texts)) {
        for (Dim &d : dims) d.value = default_of(d);
        for (Number &n : numbers) n.value = n.normally;
        for (Text &t : texts) t.value = t.normally;
    }
    Harness(const Harness &) = delete;
    ~Harness() { release(); }

    // Parses the command line, finds the device and runs the race of the chosen type. Returns the exit status.
    template <typename Table, typename Race>
    int main(int argc, char **argv, const Table &versions, Race fp32, Race fp16, Race bf16) {
        for (const auto &v : versions) catalogue.push_back({v.number, v.name, v.idea});
        version = catalogue.back().number;
        parse(argc, argv);
        if (list) return finish(print_list());
        report = json_path == "-" ? stderr : stdout;
        progress.program = name;
        preparing.reset(new Progress::Stage("preparing"));
        find_device();
        try {
            (dtype == "fp32" ? fp32 : dtype == "fp16" ? fp16 : bf16)(*this);
        } catch (const std::bad_alloc &) {
            refuse(EXIT_NO_DEVICE, "out of memory on the host: the inputs and the check need more than there is");
        }
        return finish(exit_status);
    }

    int dim(char flag) const {
        for (const Dim &d : dims) {
            if (d.flag == flag) return d.value;
        }
        return 0;
    }

    // What was given; or else that, and the reports then say so.
    int dim_or(char flag, int otherwise) {
        for (Dim &d : dims) {
            if (d.flag == flag && d.value == 0) d.value = otherwise;
        }
        return dim(flag);
    }

    // Options by their full names: choice("--rounding"), flag("--overwrite"), number("--softcap").
    std::string choice(const char *option) const {
        const Choice &c = find(choices, option);
        return c.values[c.chosen];
    }
    bool flag(const char *option) const { return find(choices, option).chosen != 0; }
    double number(const char *option) const { return find(numbers, option).value; }
    std::string text(const char *option) const { return find(texts, option).value; }

    // ---- what the race asks for ----

    // N ids in 0..V-1 from the chosen source, on the device; the host's copy is host_tokens.
    const int *tokens(long long N, int V) {
        return upload_tokens(N, [=] { return make_tokens(N, V, 0); });
    }

    // The same as targets: of a token file the id after each of the first N; and every so manyth is one to ignore.
    const int *targets(long long N, int V, int ignore_every, int ignore_index) {
        return upload_tokens(N, [=] {
            std::vector<int> ids = make_tokens(N, V, 1);
            for (long long i = ignore_every - 1LL; ignore_every > 0 && i < N; i += ignore_every) ids[i] = ignore_index;
            return ids;
        });
    }

    long long distinct_tokens() const {
        std::vector<bool> seen(host_tokens.empty() ? 0 : *std::max_element(host_tokens.begin(), host_tokens.end()) + 1);
        for (int id : host_tokens) seen[id] = true;
        return std::count(seen.begin(), seen.end(), true);
    }

    // A device array filled with values[0..count-1]; values are Values, or anything like them.
    template <typename Generator>
    auto input(const Generator &values, long long count) {
        auto *made = allocate<std::decay_t<decltype(values[0])>>((double)count);
        const Progress::Stage stage("inputs");
        if (made) fill(made, values, count);
        return made;
    }

    status_word *status() {
        status_device = allocate<status_word>(1);
        if (status_device) cuda_check(cudaMemset(status_device, 0xff, sizeof(status_word)));
        return status_device;
    }

    typedef std::function<void(Expected &row, long long r)> Reference;

    // A device array (rows, cols) that the kernel writes whole or, given initial values, adds to or writes in part.
    // Before a check it holds poison or those values, with a guard zone on either side; the check wants no poison left
    // in it, the guards untouched, and every row (or a sample, where that would take over 2e9 operations) within
    // allowed_ulps of what reference(row, r) expects. used_up: the kernel reads the values and leaves others in their
    // place, so they are put there again before each cold run, outside the time that is measured.
    template <typename floatX, typename Generator = Values<floatX>>
    floatX *output(const char *what, long long rows, long long cols, double allowed_ulps, Reference reference,
                   const Generator *initial = nullptr, bool used_up = false) {
        Written w = allocate_written(what, (double)rows * cols * sizeof(floatX));
        floatX *data = (floatX *)w.data;
        if (initial) w.fill = [=, values = *initial] { fill(data, values, rows * cols); };
        w.used_up = used_up;
        const bool whole = !initial;
        w.compare = [=] { return compare_output(what, data, rows, cols, whole, allowed_ulps, reference); };
        w.reference = [=] {
            const Progress::Stage stage(what, rows);
            Expected row;
            for (long long r = 0; r < rows; r++) {
                expect(row, cols, reference, r);
                progress.done();
            }
        };
        if (!std::is_integral_v<floatX>) w.tolerance = format("%g %s ulp", allowed_ulps, FloatFormat<floatX>::name);
        written.push_back(w);
        allowed_error = std::max(allowed_error, allowed_ulps);
        return data;
    }

    // Scratch memory of the kernel's. It holds poison before a check, which wants its guard zones untouched; only the
    // first launch finds it as it was allocated, so that initcheck sees a read of what nobody wrote.
    void *workspace(size_t size) {
        written.push_back(allocate_written("workspace", (double)size));
        written.back().fresh = true;
        return written.back().data;
    }

    // work(from, to) over pieces of 0..count-1, on all cores: for references. what: a name for it, for the progress.
    template <typename Work>
    static void in_pieces(const char *what, size_t count, Work work) {
        const Progress::Stage stage(what, (long long)count);
        in_parallel(count, [&](size_t from, size_t to) {
            const size_t step = std::max<size_t>(1, (to - from) / 100);
            for (size_t i = from; i < to; i += step) {
                work(i, std::min(to, i + step));
                progress.done((long long)std::min(step, to - i));
            }
            return CheckResult();
        });
    }

    // Checks and times the chosen versions. launch(launcher, block_size, stream) makes one call.
    template <typename Launcher, size_t count, typename Launch>
    void race(const Version<Launcher> (&table)[count], Launch launch) {
        const std::string reason = version > 0 && skip ? skip(version) : "";
        if (!reason.empty()) refuse(EXIT_BAD_INPUT, "version %d: %s", version, reason.c_str());
        if (version != 0) allocate_scratch();
        counter = allocate<unsigned long long>(1);
        if (out_of_memory) {
            size_t free_bytes = 0, total_bytes = 0;
            release();
            cudaMemGetInfo(&free_bytes, &total_bytes);
            refuse(EXIT_NO_DEVICE, "out of memory: needs %s on the device, %s are free",
                   memory_text(needed_bytes).c_str(), memory_text((double)free_bytes).c_str());
        }
        if (prepare_references && (do_check || version == 0)) prepare_references();
        if (version == 0) return race_reference();
        preparing.reset();
        cuda_check(cudaStreamCreate(&stream));
        cuda_check(cudaDeviceSynchronize());
        if (do_bench && !ON_CPU) measure_copy();
        print_device();
        for (const Version<Launcher> &row : table) {
            if (version != -1 && row.number != version) continue;
            race_version(row, [&](int block, cudaStream_t s) { return launch(row.launch, block, s); });
        }
        if (version == -1 && do_bench) print_summary();
    }

    // ---- refusing ----

    [[noreturn]] __attribute__((format(printf, 3, 4))) void refuse(ExitStatus status, const char *format, ...) {
        va_list arguments;
        va_start(arguments, format);
        std::string line = format_list(format, arguments);
        va_end(arguments);
        for (char &c : line) {
            if ((unsigned char)c < 0x20) c = '?';  // one line, whatever the value held
        }
        progress.stop();
        fprintf(stderr, "%s: %s\n", name, line.c_str());
        release();
        exit(status);
    }

  private:
    static constexpr long long GUARD = 1 << 16;  // bytes; more than a row of most shapes, and keeps the alignment

    struct Entry {
        int number;
        const char *name, *idea;
    };

    // Device memory that kernels write: an output or a workspace, with a guard zone on either side.
    struct Written {
        const char *what;
        unsigned char *data;
        size_t size;                           // bytes
        std::function<void()> fill;            // what it holds before a launch, if not poison
        std::function<CheckResult()> compare;  // a workspace has none
        std::function<void()> reference;
        bool used_up = false;  // what it held has to be there again for each cold run
        std::string tolerance = "";
        bool fresh = false;                  // to be left as it was allocated, once
        unsigned long long fingerprint = 0;  // of what the first launch of a version left there
        CheckResult result = {};             // and what was to be said about that
    };

    std::vector<Entry> catalogue;
    std::unique_ptr<Progress::Stage> preparing;  // until the first version runs
    std::vector<void *> allocations;
    double needed_bytes = 0;
    bool out_of_memory = false;
    cudaDeviceProp device = {};
    cudaStream_t stream = nullptr;
    status_word *status_device = nullptr;
    unsigned long long *counter = nullptr;
    double copy_gbps = 0, allowed_error = 0, max_error = 0;
    char *scratch = nullptr;
    size_t scratch_bytes = 0, flush_bytes = 0;
    std::vector<Written> written;
    std::vector<Record> summary;
    FILE *report = stdout;
    int exit_status = EXIT_OK;
    bool right = true;  // what the version that is being raced has shown itself to be

    // ---- the command line ----

    static int default_of(const Dim &d) { return ON_CPU ? d.cpu_default : d.cuda_default; }

    template <typename Option>
    const Option &find(const std::vector<Option> &options, const std::string &option) const {
        for (const Option &o : options) {
            if (option == o.option) return o;
        }
        fprintf(stderr, "%s: the harness was not told of %s\n", name, option.c_str());
        abort();
    }

    // --grad-dtype is grad_dtype in the heading and in JSON.
    static std::string key_of(const char *option) {
        std::string key = option + 2;
        std::replace(key.begin(), key.end(), '-', '_');
        return key;
    }

    static std::string joined(const std::vector<std::string> &parts) {
        std::string all;
        for (const std::string &part : parts) all += (all.empty() ? "" : ", ") + part;
        return all;
    }
    static std::string values_of(const Choice &c) { return joined({c.values.begin(), c.values.end()}); }

    void choose(Choice &c, const std::string &text) {
        auto value = std::find(c.values.begin(), c.values.end(), text);
        if (value == c.values.end()) {
            refuse(EXIT_BAD_INPUT, "%s: '%s' is not one of %s", c.option, text.c_str(), values_of(c).c_str());
        }
        c.chosen = value - c.values.begin();
    }

    long long parse_integer(const char *option, const char *text, long long least, long long most) {
        char *end = nullptr;
        errno = 0;
        const long long value = strtoll(text, &end, 10);
        if (isspace((unsigned char)*text) || end == text || *end != '\0' || errno != 0 || value < least ||
            value > most) {
            refuse(EXIT_BAD_INPUT, "%s: '%s' is not an integer from %lld to %lld", option, text, least, most);
        }
        return value;
    }

    double parse_number(const Number &n, const char *text) {
        if (n.whole) return (double)parse_integer(n.option, text, (long long)n.least, (long long)n.most);
        char *end = nullptr;
        const double value = strtod(text, &end);
        const bool plain = text[strspn(text, "+-.0123456789eE")] == '\0';  // not 0x10, nan or a blank
        if (!plain || end == text || *end != '\0' || !(n.least <= value && value <= n.most)) {
            refuse(EXIT_BAD_INPUT, "%s: '%s' is not a number from %g to %g", n.option, text, n.least, n.most);
        }
        if (value != 0 && (float)value == 0) refuse(EXIT_BAD_INPUT, "%s: '%s' is 0 as a float", n.option, text);
        return value;
    }

    // An argument of the command line, taken apart: --dtype=fp32 is --dtype and fp32, -c64 or -c=64 is -c and 64.
    struct Argument {
        std::string option;
        const char *value;  // null where there is none, or where it is the next argument
    };
    Argument take_apart(const char *text) const {
        const char *const equals = strchr(text, '=');
        if (strncmp(text, "--", 2) == 0) {
            return equals ? Argument{std::string(text, equals), equals + 1} : Argument{text, nullptr};
        }
        const bool has_dim =
            text[0] == '-' && std::any_of(dims.begin(), dims.end(), [&](const Dim &d) { return d.flag == text[1]; });
        if (has_dim && (equals == text + 2 || (text[2] != '\0' && strchr("+-0123456789", text[2])))) {
            return {std::string(text, 2), equals == text + 2 ? equals + 1 : text + 2};
        }
        return {text, nullptr};
    }

    void parse(int argc, char **argv) {
        bool version_given = false;
        for (int i = 1; i < argc; i++) {
            const Argument given = take_apart(argv[i]);
            const std::string &option = given.option;
            auto argument = [&]() -> const char * {
                if (given.value) return given.value;
                if (i + 1 >= argc) refuse(EXIT_BAD_INPUT, "%s needs a value (see --help)", option.c_str());
                return argv[++i];
            };
            auto takes_none = [&] {
                if (given.value) refuse(EXIT_BAD_INPUT, "'%s': %s takes no value", argv[i], option.c_str());
                return true;
            };
            auto dim = std::find_if(dims.begin(), dims.end(),
                                    [&](const Dim &d) { return option == std::string("-") + d.flag; });
            auto is_it = [&](const auto &o) { return option == o.option; };
            auto own = std::find_if(choices.begin(), choices.end(), is_it);
            auto number = std::find_if(numbers.begin(), numbers.end(), is_it);
            auto text = std::find_if(texts.begin(), texts.end(), is_it);
            if (dim != dims.end()) {
                dim->value = (int)parse_integer(option.c_str(), argument(), 1, INT32_MAX);
            } else if (own != choices.end()) {
                if (own->values.empty()) {
                    own->chosen = takes_none();
                } else {
                    choose(*own, argument());
                }
            } else if (number != numbers.end()) {
                number->value = parse_number(*number, argument());
            } else if (text != texts.end()) {
                text->value = argument();
            } else if (option == "--dtype") {
                dtype = argument();
                if (dtype != "fp32" && dtype != "fp16" && dtype != "bf16") {
                    refuse(EXIT_BAD_INPUT, "--dtype: '%s' is not one of fp32, fp16, bf16", dtype.c_str());
                }
            } else if (option == "--tokens") {
                token_source = argument();
            } else if (option == "--block-size" && block_sizes) {
                block_size = (int)parse_integer("--block-size", argument(), 32, 1024);
                if (block_size % kWarpSize != 0) {
                    refuse(EXIT_BAD_INPUT, "--block-size: '%d' is not a multiple of 32 from 32 to 1024", block_size);
                }
            } else if (option == "--repeat") {
                repeat = (int)parse_integer("--repeat", argument(), 1, 1000000);
            } else if (option == "--seed") {
                seed = (uint64_t)parse_integer("--seed", argument(), 0, INT64_MAX);
            } else if (option == "--json") {
                json_path = argument();
                if (json_path.empty()) refuse(EXIT_BAD_INPUT, "--json: '' is not the name of a file");
                if (json_path.compare(0, 2, "--") == 0) {
                    refuse(EXIT_BAD_INPUT, "--json: '%s' is an option, not the name of a file (./%s would be)",
                           json_path.c_str(), json_path.c_str());
                }
            } else if (option == "--check" && takes_none()) {
                do_bench = false;
            } else if (option == "--bench" && takes_none()) {
                do_check = false;
            } else if (option == "--list" && takes_none()) {
                list = true;
            } else if ((option == "--help" || option == "-h") && takes_none()) {
                print_help();
                exit(finish(EXIT_OK));
            } else if (option[0] == '-') {
                refuse(EXIT_BAD_INPUT, "unknown option '%s' (see --help)", option.c_str());
            } else if (version_given) {
                refuse(EXIT_BAD_INPUT, "a second version, '%s': give one, or all", option.c_str());
            } else {
                version_given = true;
                version = parse_version(option);
            }
        }
        if (!do_check && !do_bench)
            refuse(EXIT_BAD_INPUT, "--check and --bench exclude each other: give one, or neither");
        if (list && !json_path.empty() && json_path != "-") {
            refuse(EXIT_BAD_INPUT, "--json: '%s' with --list: it takes - there, for standard output",
                   json_path.c_str());
        }
        if (!json_path.empty() && json_path != "-") require_writable(json_path);
    }

    int parse_version(const std::string &text) {
        if (text == "all") return -1;
        for (const Entry &e : catalogue) {
            if (text == std::to_string(e.number)) return e.number;
        }
        if (text == "0") return 0;
        std::string allowed = "0";
        for (const Entry &e : catalogue) allowed += ", " + std::to_string(e.number);
        refuse(EXIT_BAD_INPUT, "version '%s' is not one of %s, all (see --list)", text.c_str(), allowed.c_str());
    }

    // Without touching the file: a run that is refused later must leave nothing behind.
    void require_writable(const std::string &path) {
        struct stat about;
        if (path.back() == '/' || (stat(path.c_str(), &about) == 0 && !S_ISREG(about.st_mode))) {
            refuse(EXIT_BAD_INPUT, "--json: '%s' is not the name of a file", path.c_str());
        }
        const size_t slash = path.rfind('/');
        const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
        const bool exists = access(path.c_str(), F_OK) == 0;
        const int descriptor = exists ? open(path.c_str(), O_WRONLY | O_APPEND) : -1;
        if (descriptor >= 0) close(descriptor);
        if (exists ? descriptor < 0 : access(folder.c_str(), W_OK) != 0) {
            refuse(EXIT_BAD_INPUT, "--json: cannot write '%s': %s", path.c_str(), strerror(errno));
        }
    }

    void print_help() {
        printf("%s: %s\n\nusage: ./%s [VERSION|all] [options]\n", name, title, name);
        printf(
            "  VERSION 0 is the CPU reference alone; none given: %d, the default: deterministic, best over the\n"
            "  measured shapes; --list shows them\n",
            catalogue.back().number);
        printf("  A value may be joined to its option: -b4, --dtype=fp32. Of a repeated option, the last counts.\n\n");
        for (const Dim &d : dims) {
            printf("  -%c INT                    %s, default %s\n", d.flag, d.name,
                   d.otherwise ? d.otherwise : std::to_string(default_of(d)).c_str());
        }
        printf("  --dtype TYPE              fp32, fp16 or bf16; default bf16\n");
        for (const Choice &c : choices) {
            if (c.values.empty()) {
                printf("  %-25s %s\n", c.option, c.help);
            } else {
                printf("  %-25s %s: %s; default %s\n", (c.option + std::string(" VALUE")).c_str(), c.help,
                       values_of(c).c_str(), c.values[0]);
            }
        }
        for (const Number &n : numbers) {
            printf("  %-25s %s; default %g\n", (n.option + std::string(n.whole ? " INT" : " NUMBER")).c_str(), n.help,
                   n.normally);
        }
        for (const Text &t : texts) {
            printf("  %-25s %s; default %s\n", (t.option + std::string(" TEXT")).c_str(), t.help, t.normally);
        }
        printf(
            "  --tokens SOURCE           uniform, zipf (exponent 1.1, shuffled), one (all the same), sorted (uniform, "
            "then\n");
        printf(
            "                            ascending), padded (90%% one id, the others zipf), or a token file of "
            "llm.c's\n");
        printf("                            (its first B*T ids; as targets, the id after each); default uniform\n");
        if (block_sizes) {
            printf(
                "  --block-size INT          threads a block, a multiple of 32 up to 1024; default: 32, 64, 128, 256, "
                "512, 1024\n                            and the one that the library takes\n");
        }
        printf("  --check | --bench         only check, or only time\n");
        printf("  --repeat INT              cold runs a measurement; default: until the median settles, 5 at least\n");
        printf("  --seed INT                of the inputs; default 42\n");
        printf("  --json FILE               append one JSON object a line (- for standard output)\n");
        printf("  --list                    the versions: number, name, idea\n");
        printf(
            "\nexit status: 0 as expected; 1 a result was wrong; 2 bad command line or input file; 3 no device, or too "
            "little memory\n");
    }

    // A report that did not arrive is no success.
    int finish(int status) {
        if (fflush(stdout) != 0 || ferror(stdout))
            refuse(EXIT_BAD_INPUT, "cannot write the report: %s", strerror(errno));
        return status;
    }

    int print_list() {
        for (const Entry &e : catalogue) {
            if (json_path.empty()) {
                printf("%d  %-16s %s\n", e.number, e.name, e.idea);
            } else {
                printf("{\"kernel\": \"%s\", \"version\": %d, \"name\": %s, \"idea\": %s}\n", name, e.number,
                       quoted(e.name).c_str(), quoted(e.idea).c_str());
            }
        }
        return EXIT_OK;
    }

    // ---- the device and its memory ----

    void find_device() {
        int count = 0;
        const cudaError_t error = cudaGetDeviceCount(&count);
        if (error != cudaSuccess || count == 0) {
            refuse(EXIT_NO_DEVICE, "no CUDA device that can be used: %s (make DEVICE=cpu builds for the CPU)",
                   cudaGetErrorString(error));
        }
        cuda_check(cudaSetDevice(0));
        cuda_check(cudaGetDeviceProperties(&device, 0));
        fill_values_kernel<float, Values<float>><<<1, 32>>>((float *)nullptr, Values<float>(0, 0), 0LL);
        const cudaError_t launched = cudaGetLastError();
        if (launched != cudaSuccess) {
            refuse(EXIT_NO_DEVICE, "%s (sm_%d%d) cannot run this build: %s", device.name, device.major, device.minor,
                   cudaGetErrorString(launched));
        }
    }

    // Null once memory has run out; the total goes on counting, so that the refusal can say what was needed. In double,
    // since shapes may ask for more than 64 bits can count.
    template <typename T>
    T *allocate(double count) {
        const double size = std::max(count, 1.0) * sizeof(T);
        needed_bytes += size;
        void *memory = nullptr;
        if (out_of_memory || size > 0x1p62 || cudaMalloc(&memory, (size_t)size) != cudaSuccess) {
            cudaGetLastError();  // the error is dealt with here; it must not surface at the next launch
            out_of_memory = true;
            return nullptr;
        }
        allocations.push_back(memory);
        return (T *)memory;
    }

    Written allocate_written(const char *what, double size) {
        char *base = allocate<char>(size + 2 * GUARD);
        Written w = {what, nullptr, 0, nullptr, nullptr, nullptr};
        if (base) {
            w.data = (unsigned char *)base + GUARD;
            w.size = (size_t)size;
        }
        return w;
    }

    template <typename floatX, typename Generator>
    static void fill(floatX *data, const Generator &values, long long count) {
        fill_values_kernel<floatX, Generator><<<fill_grid(count), 256>>>(data, values, count);
        cuda_check(cudaGetLastError());
    }

    void release() {
        if (stream) cudaStreamDestroy(stream);
        stream = nullptr;
        for (void *memory : allocations) cudaFree(memory);
        allocations.clear();
    }

    static unsigned fill_grid(long long count) {
        return (unsigned)std::min(ceil_div(std::max(count, 1LL), 256LL), 65536LL);
    }

    // One piece for both the flush of the L2 and the two sides of the copy.
    void allocate_scratch() {
        if (!do_bench || ON_CPU) return;
        flush_bytes = 4 * (size_t)device.l2CacheSize;
        scratch_bytes = std::max(2 * std::min((size_t)1 << 30, device.totalGlobalMem / 32), flush_bytes);
        scratch = allocate<char>((double)scratch_bytes);
    }

    // ---- token ids ----

    template <typename Make>
    const int *upload_tokens(long long N, Make make) {
        int *made = allocate<int>((double)N);
        if (!made) return nullptr;
        const Progress::Stage stage("token ids");
        host_tokens = make();
        cuda_check(cudaMemcpy(made, host_tokens.data(), N * sizeof(int), cudaMemcpyHostToDevice));
        return made;
    }

    // skip: so many ids at the beginning of a file are left out.
    std::vector<int> make_tokens(long long N, int V, int begin) {
        const Random random(1000, seed);
        if (token_source == "uniform") return uniform_tokens(N, V, random);
        if (token_source == "zipf") return zipf_tokens(N, V, random);
        if (token_source == "one") return std::vector<int>(N, V / 2);
        if (token_source == "sorted") {
            std::vector<int> ids = uniform_tokens(N, V, random);
            std::sort(ids.begin(), ids.end());
            return ids;
        }
        if (token_source == "padded") {
            std::vector<int> ids = zipf_tokens(N, V, random);
            const Random padding(1003, seed);
            for (long long i = 0; i < N; i++) ids[i] = padding.uniform(i) < 0.9 ? V / 2 : ids[i];
            return ids;
        }
        return read_token_file(token_source.c_str(), N, V, begin);
    }

    static std::vector<int> uniform_tokens(long long N, int V, const Random &random) {
        std::vector<int> ids(N);
        for (long long i = 0; i < N; i++) ids[i] = (int)(random.uniform(i) * V);
        return ids;
    }

    // Rank r has weight r^-1.1; which id has which rank is shuffled, so that hot rows lie anywhere in the table.
    std::vector<int> zipf_tokens(long long N, int V, const Random &random) {
        std::vector<double> cumulative(V);
        std::vector<int> id_of_rank(V), ids(N);
        double sum = 0;
        for (int r = 0; r < V; r++) {
            cumulative[r] = sum += pow(r + 1.0, -1.1);
            id_of_rank[r] = r;
        }
        const Random shuffle(1001, seed);
        for (int r = V - 1; r > 0; r--) std::swap(id_of_rank[r], id_of_rank[(int)(shuffle.uniform(r) * (r + 1))]);
        for (long long i = 0; i < N; i++) {
            const auto rank = std::upper_bound(cumulative.begin(), cumulative.end(), random.uniform(i) * sum);
            ids[i] = id_of_rank[std::min<long long>(rank - cumulative.begin(), V - 1)];
        }
        return ids;
    }

    // llm.c's token files: 256 int32 of header (magic, version, count), then the ids: uint16 after magic 20240520
    // version 1 (GPT-2), uint32 after magic 20240801 version 7 (Llama 3). Reads the header and ids begin..begin+N-1 only;
    // the count in the header must agree with the file's size.
    std::vector<int> read_token_file(const char *path, long long N, int V, int begin) {
        struct stat about = {};
        FILE *const file = stat(path, &about) == 0 && S_ISREG(about.st_mode) ? fopen(path, "rb") : nullptr;
        if (!file && about.st_mode != 0 && !S_ISREG(about.st_mode)) {
            refuse(EXIT_BAD_INPUT, "--tokens: '%s' is a %s, not a token file", path,
                   S_ISDIR(about.st_mode)    ? "directory"
                   : S_ISFIFO(about.st_mode) ? "pipe"
                   : S_ISSOCK(about.st_mode) ? "socket"
                                             : "device");
        }
        if (!file) {
            refuse(EXIT_BAD_INPUT,
                   "--tokens: '%s' is not uniform, zipf, one, sorted or padded, nor a file that opens: %s", path,
                   strerror(errno));
        }
        int32_t header[256] = {};
        if (fread(header, sizeof(int32_t), 256, file) != 256) {
            if (ferror(file)) refuse(EXIT_BAD_INPUT, "--tokens: cannot read '%s': %s", path, strerror(errno));
            refuse(EXIT_BAD_INPUT, "--tokens: '%s' is shorter than a token file's header of 1024 bytes", path);
        }
        const int width = header[0] == 20240520 && header[1] == 1 ? 2 : header[0] == 20240801 && header[1] == 7 ? 4 : 0;
        if (width == 0) {
            refuse(EXIT_BAD_INPUT,
                   "--tokens: '%s' has magic %d version %d; a token file has 20240520 version 1 or 20240801 version 7",
                   path, header[0], header[1]);
        }
        const long long count = header[2], behind = (long long)about.st_size - (long long)sizeof(header);
        if (count < 0 || behind != count * width) {
            refuse(EXIT_BAD_INPUT, "--tokens: '%s' says %lld tokens of %d bytes, but %lld bytes follow its header",
                   path, count, width, behind);
        }
        if (count - begin < N) {
            refuse(EXIT_BAD_INPUT, "--tokens: '%s' has %lld tokens; %s = %lld are needed (-b, -t)", path, count,
                   begin > 0 ? "B*T + 1" : "B*T", N + begin);
        }
        std::vector<int> ids(N);
        std::vector<unsigned char> data((size_t)std::min(N, 1LL << 20) * width);
        bool whole = fseeko(file, (off_t)sizeof(header) + (off_t)begin * width, SEEK_SET) == 0;
        for (long long first = 0; first < N && whole; first += 1 << 20) {
            const size_t some = (size_t)std::min(N - first, 1LL << 20);
            whole = fread(data.data(), width, some, file) == some;
            for (size_t i = 0; i < some && whole; i++) {
                uint32_t id = 0;
                memcpy(&id, &data[i * width], width);  // both little-endian, like every machine with CUDA
                if (id >= (uint32_t)V) {
                    refuse(EXIT_BAD_INPUT, "--tokens: '%s' has id %u at position %lld; -v %d allows 0 to %d", path, id,
                           begin + first + (long long)i, V, V - 1);
                }
                ids[first + i] = (int)id;
            }
        }
        if (!whole) refuse(EXIT_BAD_INPUT, "--tokens: cannot read '%s' to its end", path);
        fclose(file);
        return ids;
    }

    // ---- checking ----

    static void expect(Expected &row, long long cols, const Reference &reference, long long r) {
        row.value.resize(cols);
        row.slack.assign(cols, 0.0);
        row.either_neighbour = row.unknown = false;
        reference(row, r);
    }

    // An output against its reference; `whole` ones must have no poison left.
    template <typename floatX>
    CheckResult compare_output(const char *what, const floatX *data, long long rows, long long cols, bool whole,
                               double allowed, const Reference &reference) {
        CheckResult result;
        const long long unwritten =
            whole ? count_poison((const unsigned char *)data, rows * cols, sizeof(floatX), false) : 0;
        if (unwritten > 0) {
            result.fail(format("%s: %lld of %lld elements not written", what, unwritten, rows * cols));
            return result;
        }
        const std::vector<long long> sample = rows_to_check(rows, cols);
        const Progress::Stage stage(what, (long long)sample.size());
        result.sampled = (long long)sample.size() < rows;
        const long long chunk = std::max(1LL, (long long)(1 << 26) / std::max(cols * (long long)sizeof(floatX), 1LL));
        std::vector<floatX> host;
        for (size_t first = 0; first < sample.size(); first += chunk) {
            const size_t last = std::min(sample.size(), first + (size_t)chunk);
            host.resize((last - first) * cols);
            for (size_t i = first; i < last;) {  // runs of neighbouring rows travel together
                size_t j = i + 1;
                while (j < last && sample[j] == sample[j - 1] + 1) j++;
                cuda_check(cudaMemcpy(&host[(i - first) * cols], data + sample[i] * cols,
                                      (j - i) * cols * sizeof(floatX), cudaMemcpyDeviceToHost));
                i = j;
            }
            std::vector<CheckResult> parts = in_parallel(last - first, [&](size_t from, size_t to) {
                return compare_rows(what, &host[from * cols], &sample[first + from], to - from, cols, allowed,
                                    reference);
            });
            for (const CheckResult &part : parts) result.add(part);
        }
        return result;
    }

    // A row a time against the reference; keeps the first element that is off, and the largest error.
    template <typename floatX>
    static CheckResult compare_rows(const char *what, const floatX *got, const long long *rows, size_t count,
                                    long long cols, double allowed, const Reference &reference) {
        CheckResult result;
        Expected row;
        for (size_t r = 0; r < count; r++) {
            expect(row, cols, reference, rows[r]);
            progress.done();
            result.sampled = result.sampled || row.unknown;
            if (row.unknown) continue;
            result.elements += cols;
            for (long long c = 0; c < cols; c++) {
                const floatX element = got[r * cols + c];
                const double error = ulps_off(element, row.value[c], row.slack[c], row.either_neighbour);
                result.max_error = std::max(result.max_error, error);
                result.slack = result.slack || row.slack[c] > 0;
                if (error > allowed && result.ok) {
                    result.fail(format("%s[%lld,%lld] is %.9g, should be %.9g", what, rows[r], c,
                                       (double)(float)element, row.value[c]));
                    if (row.slack[c] > 0 && std::isfinite(row.value[c]))
                        result.message += format(" to within %.3g", row.slack[c]);
                }
            }
        }
        return result;
    }

    // All rows; or, where that is over 2e9 operations, the first and last few and others at random, in order.
    std::vector<long long> rows_to_check(long long rows, long long cols) const {
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

    long long count_poison(const unsigned char *data, long long count, int size, bool expect_poison) {
        return (long long)counted([&](unsigned long long *found) {
            count_poison_kernel<<<fill_grid(count), 256>>>(found, data, count, size, expect_poison);
        });
    }

    // The last 8 bytes may reach into the guard zone, which is known to be whole by then.
    unsigned long long fingerprint(const Written &w) {
        const long long words = (long long)ceil_div(w.size, sizeof(unsigned long long));
        return counted([&](unsigned long long *sum) {
            fingerprint_kernel<<<fill_grid(words), 256>>>(sum, (const unsigned long long *)w.data, words);
        });
    }

    // What a kernel adds to a zero on the device.
    template <typename Launch>
    unsigned long long counted(Launch launch) {
        unsigned long long result = 0;
        cuda_check(cudaMemset(counter, 0, sizeof(result)));
        launch(counter);
        cuda_check(cudaGetLastError());
        cuda_check(cudaMemcpy(&result, counter, sizeof(result), cudaMemcpyDeviceToHost));
        return result;
    }

    // work(from, to) over pieces of 0..count-1, a piece a core. What one of them throws is thrown here.
    template <typename Work>
    static std::vector<CheckResult> in_parallel(size_t count, Work work) {
        const size_t pieces = std::max<size_t>(1, std::min<size_t>(count, std::thread::hardware_concurrency()));
        std::vector<CheckResult> results(pieces);
        std::vector<std::exception_ptr> thrown(pieces);
        std::vector<std::thread> threads;
        for (size_t p = 0; p < pieces; p++) {
            threads.emplace_back([&, p] {
                try {
                    results[p] = work(count * p / pieces, count * (p + 1) / pieces);
                } catch (...) {
                    thrown[p] = std::current_exception();
                }
            });
        }
        for (std::thread &t : threads) t.join();
        for (const std::exception_ptr &e : thrown) {
            if (e) std::rethrow_exception(e);
        }
        return results;
    }

    // Everything that kernels write as a launch may find it.
    void prepare() {
        for (Written &w : written) {
            cuda_check(cudaMemset(w.data - GUARD, 0xff, GUARD));
            cuda_check(cudaMemset(w.data + w.size, 0xff, GUARD));
            if (w.fill) {
                w.fill();
            } else if (!w.fresh) {
                cuda_check(cudaMemset(w.data, 0xff, w.size));
            }
            w.fresh = false;
        }
        if (status_device) cuda_check(cudaMemset(status_device, 0xff, sizeof(status_word)));
        cuda_check(cudaDeviceSynchronize());
    }

    // Makes one launch and looks at everything. `before` names the version's first launch, which was right and whose
    // bits this one must give again; empty if there is none.
    template <typename LaunchOne>
    CheckResult check_once(LaunchOne launch, int block, const std::string &earlier) {
        const cudaError_t error = launch_and_wait(launch, block);
        CheckResult all;
        if (error != cudaSuccess) {
            all.fail(format("launch failed: %s", cudaGetErrorString(error)));
            return all;
        }
        for (Written &w : written) all.add(check_written(w, earlier));
        if (all.ok && status_device) {
            status_word status = 0;
            cuda_check(cudaMemcpy(&status, status_device, sizeof(status), cudaMemcpyDeviceToHost));
            if (status != kStatusOk) {
                all.fail(format("the status word reports a bad id at position %llu; there is none", status));
            }
        }
        return all;
    }

    CheckResult check_written(Written &w, const std::string &earlier) {
        CheckResult result;
        const long long outside =
            count_poison(w.data - GUARD, GUARD, 1, true) + count_poison(w.data + w.size, GUARD, 1, true);
        if (outside > 0) {
            result.fail(format("%s: %lld byte%s written outside it", w.what, outside, outside == 1 ? "" : "s"));
        }
        if (!result.ok || !w.compare) return result;
        const unsigned long long bits = fingerprint(w);
        if (!earlier.empty() && bits == w.fingerprint) return w.result;  // they were right then, so they are now
        result = w.compare();
        if (!earlier.empty() && result.ok) result.fail(format("%s: not the same bits as %s", w.what, earlier.c_str()));
        w.fingerprint = bits;
        w.result = result;
        return result;
    }

    // ---- timing ----

    // The L2 is flushed by writing, as work before this one would leave it: full of dirty lines, whose way back to DRAM
    // this kernel pays for, and it leaves its own behind. Reading instead would flatter every kernel that writes.
    // Lines that a kernel has marked to be kept (evict_last) become like others first, so that they are flushed too.
    void flush() {
        if (!scratch) return;
        cuda_check(cudaStreamSynchronize(stream));
        if (cudaCtxResetPersistingL2Cache() != cudaSuccess) cudaGetLastError();  // a device that cannot keeps none
        cuda_check(cudaMemsetAsync(scratch, 0, flush_bytes, stream));
    }

    // What the run before used up. The default stream waits for this one, and this one for it.
    void refill() {
        for (const Written &w : written) {
            if (w.used_up) w.fill();
        }
    }

    // Milliseconds of `runs` launches, each between two events of its own. The time to issue a launch hides behind the
    // work before it: the flush where cold, else the launch before. What a launch uses up is there again for each cold
    // one; hot ones, back to back, go on with what the one before has left.
    template <typename Enqueue>
    std::vector<double> time_runs(int runs, bool cold, Enqueue enqueue) {
        std::vector<cudaEvent_t> events(2 * runs);
        for (cudaEvent_t &event : events) cuda_check(cudaEventCreate(&event));
        for (int i = 0; i < runs; i++) {
            if (cold) {
                refill();
                flush();
            }
            cuda_check(cudaEventRecord(events[2 * i], stream));
            cuda_check(enqueue());
            cuda_check(cudaEventRecord(events[2 * i + 1], stream));
            progress.done();
        }
        cuda_check(cudaStreamSynchronize(stream));
        std::vector<double> milliseconds(runs);
        for (int i = 0; i < runs; i++) {
            float elapsed = 0;
            cuda_check(cudaEventElapsedTime(&elapsed, events[2 * i], events[2 * i + 1]));
            milliseconds[i] = elapsed;
        }
        for (cudaEvent_t event : events) cuda_check(cudaEventDestroy(event));
        return milliseconds;
    }

    static double quantile(std::vector<double> values, double q) {
        std::sort(values.begin(), values.end());
        return values[(size_t)(q * (values.size() - 1) + 0.5)];
    }

    static double seconds_now() {
        return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    }

    // The same, cold, a run of the baseline behind each; what that takes is added to `others`.
    template <typename Enqueue>
    std::vector<double> time_in_turns(int runs, std::vector<double> &others, Enqueue enqueue) {
        if (!baseline.name) return time_runs(runs, true, enqueue);
        std::vector<double> milliseconds;
        for (int i = 0; i < runs; i++) {
            milliseconds.push_back(time_runs(1, true, enqueue)[0]);
            others.push_back(time_runs(1, true, [&] { return baseline.launch(stream); })[0]);
        }
        return milliseconds;
    }

    // How many launches measure() makes of a kernel that takes long: once, a batch in turns with the baseline, twice a
    // graph.
    static constexpr int kCpuBatch = 5, kCpuHot = 3;
    long long fewest_runs() const {
        const int batch = repeat > 0 ? repeat : ON_CPU ? kCpuBatch : 6;
        return 1 + batch * (baseline.name ? 2LL : 1LL) + (ON_CPU ? 2 * kCpuHot : 3);
    }

    // Cold: batches until the median stands still (within 0.5% of the batch before, 20 runs at least) or the time is
    // up. Hot: a graph of launches, replayed. Both after a warm-up long enough for the clocks to rise; and for products,
    // which draw all the power that a chip may have, to fall again and settle. A kernel that takes over 20 ms is run a
    // few times only.
    template <typename Enqueue>
    Times measure(Enqueue enqueue) {
        const double budget_seconds = ON_CPU ? 0.05 : 0.4;
        double start = seconds_now();
        const double once = time_runs(1, true, enqueue)[0];
        const double warm_seconds = ON_CPU ? 0.0 : baseline.name && once > 1 ? 0.5 : 0.05;
        while (seconds_now() - start < warm_seconds) time_runs(once > 5 ? 1 : 10, true, enqueue);
        const bool slow = once > 20;
        const int batch = repeat > 0 ? repeat : ON_CPU ? kCpuBatch : slow ? 3 : 10;
        std::vector<double> all, others;
        start = seconds_now();
        for (double settled = -1;;) {
            const std::vector<double> some = time_in_turns(batch, others, enqueue);
            all.insert(all.end(), some.begin(), some.end());
            const double median = quantile(all, 0.5);
            const bool enough = all.size() >= (slow ? 6 : 20);
            if (repeat > 0 || (all.size() >= 5 && seconds_now() - start > budget_seconds)) break;
            if (enough && fabs(median - settled) <= 0.005 * median) break;
            settled = median;
        }
        Times times;
        times.runs = (int)all.size();
        times.min = quantile(all, 0.0);
        times.median = quantile(all, 0.5);
        times.p90 = quantile(all, 0.9);
        times.hot = time_hot(enqueue, times.median);
        if (!others.empty()) times.baseline = quantile(others, 0.5);
        return times;
    }

    template <typename Enqueue>
    double time_hot(Enqueue enqueue, double estimate) {
        const int launches = ON_CPU ? kCpuHot : std::max(1, std::min(200, (int)(5.0 / std::max(estimate, 1e-3))));
        cudaGraph_t graph;
        cudaGraphExec_t executable;
        cuda_check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        for (int i = 0; i < launches; i++) cuda_check(enqueue());
        cuda_check(cudaStreamEndCapture(stream, &graph));
        cuda_check(cudaGraphInstantiate(&executable, graph, 0));
        auto replay = [&] {
            progress.done(launches - 1);  // and the one that a run counts as
            return cudaGraphLaunch(executable, stream);
        };
        time_runs(1, false, replay);
        const double median = quantile(time_runs(ON_CPU ? 1 : estimate > 20 ? 2 : 5, false, replay), 0.5);
        cuda_check(cudaGraphExecDestroy(executable));
        cuda_check(cudaGraphDestroy(graph));
        return median / launches;
    }

    // Bytes read plus bytes written a second by the driver's own copy, from one half of the scratch to the other.
    void measure_copy() {
        const size_t half = scratch_bytes / 2;
        auto copy = [&] { return cudaMemcpyAsync(scratch + half, scratch, half, cudaMemcpyDeviceToDevice, stream); };
        time_runs(10, true, copy);
        copy_gbps = 2.0 * half / quantile(time_runs(20, true, copy), 0.5) * 1e-6;
    }

    // ---- one version ----

    template <typename Row, typename LaunchOne>
    void race_version(const Row &row, LaunchOne launch) {
        print_heading(row.number, row.name);
        running = row.number;
        right = true;
        max_error = 0;
        Record record = {row.number, row.name, 0, {}};
        record.skipped = skip ? skip(row.number) : "";
        if (!record.skipped.empty()) {
            print("skipped: %s\n", record.skipped.c_str());
            summary.push_back(record);
            return write_json(record);
        }
        std::set<int> all_sizes = {32, 64, 128, 256, 512, 1024, row.block_size};
        if (block_size > 0) all_sizes = {block_size};
        std::vector<int> sizes(all_sizes.begin(), all_sizes.end());
        if (!block_sizes) {
            sizes.resize(points.size());
            for (size_t i = 0; i < sizes.size(); i++) sizes[i] = (int)i;
        }
        if (before) {
            const Progress::Stage stage(format("version %d: tuning", running), (long long)points.size());
            before(row.number, stream);
        }
        right = do_check ? check_version(sizes, row.reproducible, launch) : try_launches(sizes, launch);
        if (!right) exit_status = EXIT_WRONG;
        if (!right || !do_bench) return write_json(record);
        std::vector<Record> records;
        {
            const Progress::Stage stage(format("version %d: timing", running), sizes.size() * fewest_runs());
            for (int size : sizes) {
                record.block_size = size;
                record.times = measure([&] { return launch(size, stream); });
                records.push_back(record);
            }
        }
        auto faster = [](const Record &a, const Record &b) { return a.times.median < b.times.median; };
        Record &best = *std::min_element(records.begin(), records.end(), faster);
        best.best = true;
        for (const Record &r : records) {
            print("%s | time %.4f ms", place(r.block_size).c_str(), r.times.median);
            if (baseline.name) {
                const double rate = tflops(r.times.median);
                const RateUnit unit = rate_unit(rate);
                print(" | %.1f %s | %.3fx the %s", rate * unit.per_tflops, unit.name, ratio(r.times), baseline.name);
            } else {
                print(" | bandwidth %.2f GB/s", gbps(r.times.median));
                if (copy_gbps > 0) print(" | %5.1f%% of copy", pct_of_copy(r.times.median));
            }
            for (const Figure &f : figures_of(r)) {
                if (!f.words.empty()) print(" | %s", f.words.c_str());
            }
            print("%s\n", r.best ? "  <- best" : "");
            write_json(r);
        }
        summary.push_back(best);
        fflush(report);
    }

    // Every block size that will be timed; where the same bits are promised, the first of them twice, or each. One
    // line, whether all is well or not.
    template <typename LaunchOne>
    bool check_version(const std::vector<int> &sizes, Reproducible reproducible, LaunchOne launch) {
        CheckResult all;
        auto check = [&](int size, const std::string &earlier) {
            all = check_once(launch, size, earlier);
            progress.done();
            max_error = std::max(max_error, all.max_error);
            if (!all.ok) print("check: %s: %s: WRONG\n", place(size, false).c_str(), all.message.c_str());
            return all.ok;
        };
        const std::string first = "at " + place(sizes[0], false);
        const bool all_twice = reproducible == kSameAtABlockSize;
        const size_t launches = all_twice ? 2 * sizes.size() : sizes.size() + (reproducible == kSameBits);
        const Progress::Stage stage(format("version %d: check", running), (long long)launches);
        for (size_t i = 0; i < sizes.size(); i++) {
            const bool again = reproducible == kSameBits && i > 0;
            const bool twice = all_twice || (reproducible == kSameBits && i == 0);
            if (!check(sizes[i], again ? first : "")) return false;
            if (twice && !check(sizes[i], "the launch before")) return false;
        }
        const char *promised[] = {", the same bits each time", ", the same bits each time at a block size", ""};
        if (!block_sizes) promised[kSameAtABlockSize] = promised[kSameBits];
        print("check: max error %.1f%s (allowed %s) over %lld elements%s%s: ok\n", max_error,
              all.slack ? " beyond what float sums may be off" : "", tolerances().c_str(), all.elements,
              all.sampled ? " of sampled rows" : "", promised[reproducible]);
        return true;
    }

    // Of the outputs, each once.
    std::string tolerances() const {
        std::vector<std::string> each;
        for (const Written &w : written) {
            const bool known = std::find(each.begin(), each.end(), w.tolerance) != each.end();
            if (!known && !w.tolerance.empty()) each.push_back(w.tolerance);
        }
        return joined(each);
    }

    // What --bench has instead of a check.
    template <typename LaunchOne>
    bool try_launches(const std::vector<int> &sizes, LaunchOne launch) {
        const Progress::Stage stage(format("version %d: first launches", running), (long long)sizes.size());
        for (int size : sizes) {
            const cudaError_t error = launch_and_wait(launch, size);
            progress.done();
            if (error == cudaSuccess) continue;
            print("%s: launch failed: %s: WRONG\n", place(size, false).c_str(), cudaGetErrorString(error));
            return false;
        }
        return true;
    }

    template <typename LaunchOne>
    cudaError_t launch_and_wait(LaunchOne launch, int block) {
        prepare();
        checking = do_check;
        const cudaError_t error = launch(block, stream);
        checking = false;
        return error == cudaSuccess ? cudaStreamSynchronize(stream) : error;
    }

    void race_reference() {
        preparing.reset();
        print_heading(0, "CPU reference");
        do_check = false;
        const Progress::Stage stage("CPU reference");
        const double start = seconds_now();
        for (const Written &w : written) {
            if (w.reference) w.reference();
        }
        Record record = {0, "CPU reference", 0, {}};
        record.times.runs = 1;
        record.times.min = record.times.median = record.times.p90 = record.times.hot = (seconds_now() - start) * 1e3;
        print("time %.4f ms (one core, in double)\n", record.times.median);
        write_json(record);
    }

    // ---- reports ----

    // 0 where there is none.
    double gbps(double milliseconds) const { return milliseconds > 0 ? bytes / milliseconds * 1e-6 : 0; }
    double pct_of_copy(double milliseconds) const { return copy_gbps > 0 ? 100 * gbps(milliseconds) / copy_gbps : 0; }
    double tflops(double milliseconds) const { return milliseconds > 0 ? flops / milliseconds * 1e-9 : 0; }

    // The unit for a rate of operations that leaves a number of at least 1, and how many of it are a TFLOP/s.
    struct RateUnit {
        const char *name;
        double per_tflops;
    };
    static RateUnit rate_unit(double tflops) {
        if (tflops >= 1) return {"TFLOP/s", 1};
        return tflops >= 1e-3 ? RateUnit{"GFLOP/s", 1e3} : RateUnit{"MFLOP/s", 1e6};
    }
    static double ratio(const Times &times) { return times.baseline > 0 ? times.median / times.baseline : 0; }

    // What a version is run at: a block size, or one of the points.
    std::string place(int size, bool in_column = true) const {
        if (block_sizes) return format(in_column ? "block_size %4d" : "block_size %d", size);
        return format("%-*s", in_column ? point_width() : 0, point_name(size).c_str());
    }
    int point_width() const {
        size_t width = 0;
        for (size_t i = 0; i < points.size(); i++) width = std::max(width, point_name(i).size());
        return (int)width;
    }
    std::string point_name(size_t i) const { return swept ? key_of(swept) + " " + points[i] : points[i]; }
    std::vector<Figure> figures_of(const Record &r) const {
        return figures ? figures(r.version, r.block_size) : std::vector<Figure>();
    }

    void print_device() {
        if (ON_CPU) {
            print("device: %s, %d cores: its times say nothing about a GPU\n", device.name, device.multiProcessorCount);
            return;
        }
        print("device: %s (sm_%d%d, %d SMs)", device.name, device.major, device.minor, device.multiProcessorCount);
        if (copy_gbps > 0) print(", copy %.0f GB/s", copy_gbps);
        print("\n");
    }

    void print_heading(int number, const char *version_name) {
        print("%s %d \"%s\":", name, number, version_name);
        for (const Dim &d : dims) print(" %s=%d", d.name, d.value);
        print(" %s tokens=%s", dtype.c_str(), token_source.c_str());
        for (const Choice &c : choices) {
            if (c.chosen == 0) continue;
            print(" %s", key_of(c.option).c_str());
            if (!c.values.empty()) print("=%s", c.values[c.chosen]);
        }
        for (const Number &n : numbers) {
            if (n.value != n.normally) print(" %s=%s", key_of(n.option).c_str(), text_of(n).c_str());
        }
        for (const Text &t : texts) {
            if (t.value != t.normally) print(" %s=%s", key_of(t.option).c_str(), t.value.c_str());
        }
        print("\n");
        fflush(report);
    }

    void print_summary() {
        const bool bandwidth = !baseline.name;
        const int width = std::max(10, point_width());
        double most = 0;  // one unit for the column
        for (const Record &r : summary) most = std::max(most, tflops(r.times.median));
        const RateUnit unit = rate_unit(most);
        print("\n%-8s %-16s %*s %12s %14s", "version", "name", width, block_sizes ? "block_size" : "at", "time (ms)",
              bandwidth ? "GB/s" : unit.name);
        if (!bandwidth) print("  x the %s", baseline.name);
        if (bandwidth && copy_gbps > 0) print(" %10s", "% of copy");
        for (const Figure &f : summary.empty() ? std::vector<Figure>() : figures_of(summary[0])) {
            if (!f.column.empty()) print("  %s", f.column.c_str());
        }
        print("\n");
        for (const Record &r : summary) {
            print("%-8d %-16s ", r.version, r.name);
            if (!r.skipped.empty()) {
                print("%*s\n", width, "skipped");
                continue;
            }
            const std::string at = block_sizes ? std::to_string(r.block_size) : place(r.block_size, false);
            const double rate = bandwidth ? gbps(r.times.median) : tflops(r.times.median) * unit.per_tflops;
            print("%*s %12.4f %14.2f", width, at.c_str(), r.times.median, rate);
            if (!bandwidth) print(" %*.3f", 7 + (int)strlen(baseline.name), ratio(r.times));
            if (bandwidth && copy_gbps > 0) print(" %9.1f%%", pct_of_copy(r.times.median));
            for (const Figure &f : figures_of(r)) {
                if (!f.column.empty()) print("  %*.1f", (int)f.column.size(), f.value);
            }
            print("\n");
        }
        if (ON_CPU) print("(times on the CPU device, which say nothing about a GPU)\n");
    }

    // One object a line, always with the same keys. What was not measured is null; block_size 0: all or none.
    void write_json(const Record &r) {
        if (json_path.empty()) return;
        std::string line = format(
            "{\"kernel\": \"%s\", \"version\": %d, \"name\": %s, \"device\": %s, \"device_kind\": \"%s\", "
            "\"dtype\": \"%s\"",
            name, r.version, quoted(r.name).c_str(), quoted(device.name).c_str(), ON_CPU ? "cpu" : "cuda",
            dtype.c_str());
        for (const char *key : {"B", "T", "C", "V", "P"}) {
            auto dim = std::find_if(dims.begin(), dims.end(), [&](const Dim &d) { return std::string(key) == d.name; });
            line += dim == dims.end() ? format(", \"%s\": null", key) : format(", \"%s\": %d", key, dim->value);
        }
        line += format(", \"N\": %lld, \"tokens\": %s, \"seed\": %llu", (long long)dim('b') * dim('t'),
                       quoted(token_source).c_str(), (unsigned long long)seed);
        for (const Choice &c : choices) {
            const std::string value = c.values.empty() ? c.chosen ? "true" : "false" : quoted(c.values[c.chosen]);
            line += format(", \"%s\": %s", key_of(c.option).c_str(), value.c_str());
        }
        for (const Number &n : numbers) line += format(", \"%s\": %s", key_of(n.option).c_str(), text_of(n).c_str());
        const bool one_point = points.size() == 1 || (r.version > 0 && r.times.runs > 0);  // else it is about all
        for (const Text &t : texts) {
            const bool is_swept = swept && t.option == std::string(swept);
            const std::string value = !is_swept ? quoted(t.value) : one_point ? quoted(points[r.block_size]) : "null";
            line += format(", \"%s\": %s", key_of(t.option).c_str(), value.c_str());
        }
        line += format(", \"block_size\": %d", block_sizes ? r.block_size : 0);
        if (!block_sizes)
            line += format(", \"at\": %s", one_point ? quoted(place(r.block_size, false)).c_str() : "null");
        line += format(
            ", \"best\": %s, \"runs\": %d, \"time_ms_min\": %s, \"time_ms_median\": %s, \"time_ms_p90\": %s, "
            "\"time_ms_hot\": %s",
            r.best ? "true" : "false", r.times.runs, positive_or_null(r.times.min).c_str(),
            positive_or_null(r.times.median).c_str(), positive_or_null(r.times.p90).c_str(),
            positive_or_null(r.times.hot).c_str());
        line += format(", \"bytes\": %.0f, \"gbps\": %s, \"copy_gbps\": %s, \"pct_of_copy\": %s", bytes,
                       positive_or_null(gbps(r.times.median)).c_str(), positive_or_null(copy_gbps).c_str(),
                       positive_or_null(pct_of_copy(r.times.median)).c_str());
        line += format(", \"flops\": %.0f, \"tflops\": %s", flops,
                       positive_or_null(r.times.runs > 0 ? tflops(r.times.median) : 0).c_str());
        if (baseline.name) {
            line += format(", \"%s_ms\": %s, \"ratio_to_%s\": %s", baseline.name,
                           positive_or_null(r.times.baseline).c_str(), baseline.name,
                           positive_or_null(ratio(r.times)).c_str());
        }
        for (const Figure &f : figures_of(r)) line += format(", \"%s\": %.9g", f.key.c_str(), f.value);
        const bool ran = r.skipped.empty(), checked = ran && do_check;
        line += format(", \"skipped\": %s, \"checked\": %s, \"ok\": %s", ran ? "null" : quoted(r.skipped).c_str(),
                       checked ? "true" : "false",
                       !right    ? "false"
                       : checked ? "true"
                                 : "null");
        line += format(", \"max_error\": %s, \"allowed_error\": %g, \"commit\": \"%s\"}\n",
                       checked && std::isfinite(max_error) ? format("%g", max_error).c_str() : "null", allowed_error,
                       bookends_commit);
        FILE *file = json_path == "-" ? stdout : fopen(json_path.c_str(), "a");
        bool complete = false;
        progress.aside([&] { complete = file && fputs(line.c_str(), file) >= 0 && fflush(file) == 0; });
        if (file && file != stdout) fclose(file);
        if (!complete) refuse(EXIT_BAD_INPUT, "--json: cannot write '%s': %s", json_path.c_str(), strerror(errno));
    }

    // Prints to the report.
    __attribute__((format(printf, 2, 3))) void print(const char *pattern, ...) const {
        va_list arguments;
        va_start(arguments, pattern);
        progress.aside([&] { vfprintf(report, pattern, arguments); });
        va_end(arguments);
    }

    static std::string text_of(const Number &n) { return format(n.whole ? "%.0f" : "%.9g", n.value); }
    static std::string positive_or_null(double value) { return value > 0 ? format("%.6g", value) : "null"; }

    static std::string quoted(const std::string &text) {
        std::string result = "\"";
        for (unsigned char c : text) {
            if (c == '"' || c == '\\') result += '\\';
            result += c < 0x20 ? format("\\u%04x", c) : std::string(1, (char)c);
        }
        return result + "\"";
    }

    __attribute__((format(printf, 1, 2))) static std::string format(const char *pattern, ...) {
        va_list arguments;
        va_start(arguments, pattern);
        std::string text = format_list(pattern, arguments);
        va_end(arguments);
        return text;
    }

    __attribute__((format(printf, 1, 0))) static std::string format_list(const char *pattern, va_list arguments) {
        va_list again;
        va_copy(again, arguments);
        std::string text(vsnprintf(nullptr, 0, pattern, again), '\0');
        va_end(again);
        vsnprintf(&text[0], text.size() + 1, pattern, arguments);
        return text;
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// what the mains with a classifier have in common

// Its options, and those that a main has beside them.
inline std::vector<Number> classifier_numbers(const std::vector<Number> &others = {}) {
    std::vector<Number> numbers = {
        {"--label-smoothing", 0, 0, 1, "the share of a target that goes to the whole vocabulary"},
        {"--z-loss", 0, 0, 1e6, "the factor of lse^2 in the loss"},
        {"--softcap", 0, 0, 1e6, "logits are squeezed between -NUMBER and NUMBER; 0: as they are"},
        {"--logit-scale", 1, -1e6, 1e6, "a factor of the logits"},
        {"--ignore-every", 0, 0, INT32_MAX, "every INTth target is one to ignore; 0: none", true}};
    numbers.insert(numbers.end(), others.begin(), others.end());
    return numbers;
}

// As given, in the classifier's own type. Each is in its range by now; only two of them together may still be refused.
template <typename Options>
Options classifier_options(Harness &h) {
    Options options;
    options.label_smoothing = (float)h.number("--label-smoothing");
    options.z_loss = (float)h.number("--z-loss");
    options.softcap = (float)h.number("--softcap");
    options.logit_scale = (float)h.number("--logit-scale");
    if (!valid_options(options)) {
        h.refuse(EXIT_BAD_INPUT, "--softcap: '%g' is too small for a --logit-scale of %g", options.softcap,
                 options.logit_scale);
    }
    return options;
}

}  // namespace bookends
