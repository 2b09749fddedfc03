// The harness of a kernel file's main(): command line, inputs, checks, times and reports.
//
// A kernel file describes its job and passes it on with its table of versions:
//
//     Harness h("encoder_forward", "token + position embedding", {{'b', "B", 8, 2}, ...});
//     return h.main(argc, argv, versions<float>, race<float>, race<half>, race<__nv_bfloat16>);
//
// race<floatX>(h) reads h.options, gets the ids, the inputs, the outputs and the workspace from h, fills in h.job, and
// calls h.race(table, launch). All refusals come before the first launch.
#pragma once
#include <algorithm>
#include <memory>
#include <new>
#include <set>
#include <string>
#include <vector>

#include "../../common.h"
#include "base.h"
#include "check.h"
#include "command_line.h"
#include "inputs.h"
#include "job.h"
#include "parallel.h"
#include "progress.h"
#include "report.h"
#include "timer.h"
#include "tokens.h"
#include "tolerance.h"

namespace bookends {

class Harness {
  public:
    Options options;
    Job job;                       // filled in by race<floatX>()
    std::vector<int> host_tokens;  // the ids or targets of tokens() or targets(), on the host

    // For references and launches that depend on them: the number of the running version (0: the reference alone), and
    // whether the launch is checked (otherwise it is timed).
    int running = 0;
    bool checking = false;

    Harness(const char *program, const char *does, std::vector<Dim> dims, std::vector<Choice> choices = {},
            std::vector<Number> numbers = {}, std::vector<Text> texts = {})
        : options(program, does, std::move(dims), std::move(choices), std::move(numbers), std::move(texts)),
          checker(memory),
          report(options, job) {}
    Harness(const Harness &) = delete;
    ~Harness() {
        if (stream) cudaStreamDestroy(stream);
    }

    // Parses the command line, finds the device, and runs the race of the chosen type. Returns the exit status.
    template <typename Table, typename Race>
    int main(int argc, char **argv, const Table &versions, Race fp32, Race fp16, Race bf16) {
        for (const auto &v : versions) options.versions.push_back({v.number, v.name, v.idea});
        options.version = options.versions.back().number;
        progress.program = options.name;
        Parser(options, argc, argv).parse();
        if (options.list) {
            print_list(options);
            return finish(EXIT_OK);
        }
        preparing.reset(new Progress::Stage("preparing"));
        report.begin(find_device());
        checker.seed = options.seed;
        timer.repeat = options.repeat;
        timer.baseline = &job.baseline;
        timer.refill = [this] { checker.refill(); };
        try {
            (options.dtype == "fp32" ? fp32 : options.dtype == "fp16" ? fp16 : bf16)(*this);
        } catch (const std::bad_alloc &) {
            refuse(EXIT_NO_DEVICE, "out of memory on the host, which holds the inputs and the reference");
        }
        return finish(exit_status);
    }

    // ---- services for race<floatX>() ----

    // N ids in 0..V-1 from the source of --tokens, on the device.
    const int *tokens(long long N, int V) {
        return upload_tokens(N, [=] { return make_tokens(options.token_source, N, V, 0, options.seed); });
    }

    // N targets; every ignore_every-th is ignore_index (none if ignore_every is 0). From a token file: the id after
    // each of the first N ids.
    const int *targets(long long N, int V, int ignore_every, int ignore_index) {
        return upload_tokens(N, [=] {
            return make_targets(options.token_source, N, V, ignore_every, ignore_index, options.seed);
        });
    }

    // The number of different ids in host_tokens.
    long long distinct_tokens() const { return count_distinct(host_tokens); }

    // A device array with values[0..count-1]. values: Values, or another type with the same operator.
    template <typename Generator>
    auto input(const Generator &values, long long count) {
        auto *array = memory.allocate<std::decay_t<decltype(values[0])>>((double)count);
        const Progress::Stage stage("inputs");
        if (array) fill(array, values, count);
        return array;
    }

    // A device array with these values.
    template <typename T>
    const T *upload(const std::vector<T> &values) {
        T *const array = memory.allocate<T>((double)values.size());
        if (array) cuda_check(cudaMemcpy(array, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
        return array;
    }

    status_word *status() { return checker.status(); }

    // A device array (rows, cols) that the kernel writes. Without initial values the kernel must write all of it; with
    // initial values it adds to them or writes a part. Before a checked launch the array holds poison or the initial
    // values, with a guard zone on either side. The check requires that no poison remains, that the guard zones are
    // unchanged, and that every row is within allowed_ulps of reference(row, r); of an output of more than 2e9
    // elements, a sample of rows. used_up: the kernel reads the initial values and overwrites them (an in-place
    // kernel), so that they must be restored before each cold run.
    template <typename floatX, typename Generator = Values<floatX>>
    floatX *output(const char *what, long long rows, long long cols, double allowed_ulps, const Reference &reference,
                   const Generator *initial = nullptr, bool used_up = false) {
        return checker.output<floatX>(what, rows, cols, allowed_ulps, reference, initial, used_up);
    }

    // The kernel's scratch memory. Before a checked launch it holds poison, and the check requires that the guard zones
    // are unchanged. Before the first launch it is as allocated, so that initcheck reports reads of it.
    void *workspace(size_t size) { return checker.workspace(size); }

    // Checks and times the chosen versions. launch(launcher, setting, stream) makes one call; the setting is a block
    // size, or the index of a value of job.sweep.
    template <typename Row, size_t count, typename Launch>
    void race(const Row (&table)[count], Launch launch) {
        const int version = options.version;
        const std::string reason = version > 0 && job.skip ? job.skip(version) : "";
        if (!reason.empty()) refuse(EXIT_BAD_INPUT, "version %d: %s", version, reason.c_str());
        const bool measures_copy = version != 0 && options.do_bench && !ON_CPU;
        if (measures_copy) timer.allocate_scratch(memory, device);
        checker.allocate_counter();
        if (memory.exhausted()) refuse_memory();
        if (job.prepare_references && (options.do_check || version == 0)) job.prepare_references();
        preparing.reset();
        if (version == 0) return race_reference();
        cuda_check(cudaStreamCreate(&stream));
        cuda_check(cudaDeviceSynchronize());
        timer.begin(stream);
        report.print_device(measures_copy ? timer.measure_copy() : 0);
        for (const Row &row : table) {
            if (version != -1 && row.number != version) continue;
            race_version(row, [&](int setting) { return launch(row.launch, setting, stream); });
        }
        report.end();
    }

  private:
    std::unique_ptr<Progress::Stage> preparing;  // exists until the first version runs
    cudaDeviceProp device = {};
    DeviceMemory memory;
    Checker checker;
    Timer timer;
    Report report;
    cudaStream_t stream = nullptr;
    int exit_status = EXIT_OK;

    const cudaDeviceProp &find_device() {
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
        return device;
    }

    [[noreturn]] void refuse_memory() {
        size_t free_bytes = 0, total_bytes = 0;
        memory.release();
        cudaMemGetInfo(&free_bytes, &total_bytes);
        refuse(EXIT_NO_DEVICE, "out of memory: needs %s on the device, %s are free",
               memory_text(memory.needed()).c_str(), memory_text((double)free_bytes).c_str());
    }

    // Writes N ids to host_tokens and copies them to the device.
    template <typename Make>
    const int *upload_tokens(long long N, Make make) {
        int *const array = memory.allocate<int>((double)N);
        if (!array) return nullptr;
        const Progress::Stage stage("token ids");
        host_tokens = make();
        cuda_check(cudaMemcpy(array, host_tokens.data(), N * sizeof(int), cudaMemcpyHostToDevice));
        return array;
    }

    // ---- one version ----

    Record new_record(int version, const char *name) const {
        Record record = {version, name};
        record.allowed_error = checker.allowed_error();
        return record;
    }

    template <typename Row, typename LaunchOne>
    void race_version(const Row &row, LaunchOne launch) {
        report.print_heading(row.number, row.name);
        running = row.number;
        Record record = new_record(row.number, row.name);
        record.skipped = job.skip ? job.skip(row.number) : "";
        if (!record.skipped.empty()) return report.skipped(record);
        const std::vector<int> settings = settings_of(row.block_size);
        if (job.tune) {
            const Progress::Stage stage(format("version %d: tuning", running), (long long)job.sweep.values.size());
            job.tune(row.number, stream);
        }
        record.checked = options.do_check;
        record.right = record.checked ? check_version(settings, row.reproducible, launch, &record.max_error)
                                      : try_launches(settings, launch);
        if (!record.right) exit_status = EXIT_WRONG;
        if (!record.right || !options.do_bench) return report.checked(record);
        report.times(time_version(settings, record, launch));
    }

    // The settings of a version: the block size given; or the usual ones and the version's own; or the sweep's values.
    std::vector<int> settings_of(int own_block_size) const {
        std::vector<int> settings;
        for (size_t i = 0; i < job.sweep.values.size(); i++) settings.push_back((int)i);
        if (job.sweep.option) return settings;
        if (options.block_size > 0) return {options.block_size};
        const std::set<int> sizes = {32, 64, 128, 256, 512, 1024, own_block_size};
        return {sizes.begin(), sizes.end()};
    }

    // Checks a version at every setting and prints one line. If the version promises the same bits at one block size,
    // each setting is launched twice; if it promises them at every block size, only the first is. Returns whether all
    // is correct.
    template <typename LaunchOne>
    bool check_version(const std::vector<int> &settings, Reproducible reproducible, LaunchOne launch,
                       double *max_error) {
        CheckResult result;
        auto check = [&](int setting, const std::string &earlier) {
            const cudaError_t error = launch_and_wait(launch, setting);
            result = error == cudaSuccess ? checker.check(earlier) : CheckResult();
            if (error != cudaSuccess) result.fail(format("launch failed: %s", cudaGetErrorString(error)));
            progress.done();
            *max_error = std::max(*max_error, result.max_error);
            if (!result.ok) {
                report.print("check: %s: %s: WRONG\n", job.sweep.text(setting).c_str(), result.message.c_str());
            }
            return result.ok;
        };
        const std::string first = "at " + job.sweep.text(settings[0]);
        const bool all_twice = reproducible == kSameAtABlockSize;
        const size_t launches = all_twice ? 2 * settings.size() : settings.size() + (reproducible == kSameBits);
        const Progress::Stage stage(format("version %d: check", running), (long long)launches);
        for (size_t i = 0; i < settings.size(); i++) {
            const bool like_first = reproducible == kSameBits && i > 0;
            const bool twice = all_twice || (reproducible == kSameBits && i == 0);
            if (!check(settings[i], like_first ? first : "")) return false;
            if (twice && !check(settings[i], "the launch before")) return false;
        }
        report.print_check(result, *max_error, checker.tolerances(), reproducible);
        return true;
    }

    // One launch at every setting, without a check. Returns whether all succeed.
    template <typename LaunchOne>
    bool try_launches(const std::vector<int> &settings, LaunchOne launch) {
        const Progress::Stage stage(format("version %d: first launches", running), (long long)settings.size());
        for (int setting : settings) {
            const cudaError_t error = launch_and_wait(launch, setting);
            progress.done();
            if (error == cudaSuccess) continue;
            report.print("%s: launch failed: %s: WRONG\n", job.sweep.text(setting).c_str(), cudaGetErrorString(error));
            return false;
        }
        return true;
    }

    template <typename LaunchOne>
    cudaError_t launch_and_wait(LaunchOne launch, int setting) {
        checker.prepare();
        checking = options.do_check;
        const cudaError_t error = launch(setting);
        checking = false;
        return error == cudaSuccess ? cudaStreamSynchronize(stream) : error;
    }

    // A record for each setting, with its times; the fastest is marked as the best.
    template <typename LaunchOne>
    std::vector<Record> time_version(const std::vector<int> &settings, Record record, LaunchOne launch) {
        const Progress::Stage stage(format("version %d: timing", running), settings.size() * timer.fewest_runs());
        std::vector<Record> records;
        for (int setting : settings) {
            record.setting = setting;
            record.times = timer.measure([&] { return launch(setting); });
            records.push_back(record);
        }
        auto faster = [](const Record &a, const Record &b) { return a.times.median < b.times.median; };
        std::min_element(records.begin(), records.end(), faster)->best = true;
        return records;
    }

    void race_reference() {
        report.print_heading(0, "CPU reference");
        const Progress::Stage stage("CPU reference");
        const double start = seconds_now();
        checker.compute_references();
        Record record = new_record(0, "CPU reference");
        record.times.runs = 1;
        record.times.min = record.times.median = record.times.p90 = record.times.hot = (seconds_now() - start) * 1e3;
        report.print("time %.4f ms (one core, in double)\n", record.times.median);
        report.write_json(record);
    }
};

}  // namespace bookends
