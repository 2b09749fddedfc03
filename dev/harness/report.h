// The reports of a run: headings, lines, the summary of all versions, and JSON.
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "../../common.h"
#include "check.h"
#include "job.h"

namespace bookends {

// The commit that the binary was built from. The Makefile links a strong definition over this one.
extern "C" __attribute__((weak)) const char bookends_commit[] = "unknown";

// The result of one version: at one setting if it was timed, otherwise at all settings.
struct Record {
    int version;
    const char *name;
    double allowed_error = 0, max_error = 0;  // in ulps
    int setting = 0;
    Times times = {};
    bool best = false, checked = false, right = true;
    std::string skipped = "";  // the reason why it did not run
};

// The unit in which a rate of operations is at least 1, and the number of these units in a TFLOP/s.
struct RateUnit {
    const char *name;
    double per_tflops;
};
inline RateUnit rate_unit(double tflops) {
    if (tflops >= 1) return {"TFLOP/s", 1};
    return tflops >= 1e-3 ? RateUnit{"GFLOP/s", 1e3} : RateUnit{"MFLOP/s", 1e6};
}

class Report {
  public:
    Report(const Options &own_options, const Job &own_job) : options(own_options), job(own_job) {}

    void begin(const cudaDeviceProp &used) {
        device = used;
        out = options.json_path == "-" ? stderr : stdout;
    }

    // Prints to the report: standard output, or stderr if standard output is for JSON.
    __attribute__((format(printf, 2, 3))) void print(const char *pattern, ...) const {
        va_list arguments;
        va_start(arguments, pattern);
        progress.aside([&] { vfprintf(out, pattern, arguments); });
        va_end(arguments);
    }

    // copy: the device's copy rate in GB/s; 0: not measured. With --brief, the device and the options are the heading
    // of the table.
    void print_device(double copy) {
        copy_gbps = copy;
        if (options.brief) {
            print("%s on %s", options.name, device.name);
            if (copy_gbps > 0) print(", copy %.0f GB/s", copy_gbps);
            print(":");
            print_options();
        } else if (ON_CPU) {
            print("device: %s, %d cores: its times say nothing about a GPU\n", device.name, device.multiProcessorCount);
        } else {
            print("device: %s (sm_%d%d, %d SMs)", device.name, device.major, device.minor, device.multiProcessorCount);
            if (copy_gbps > 0) print(", copy %.0f GB/s", copy_gbps);
            print("\n");
        }
    }

    // The version, and the options.
    void print_heading(int number, const char *version_name) const {
        if (options.brief) return;
        print("%s %d \"%s\":", options.name, number, version_name);
        print_options();
    }

    // All dimensions, and the other options that are not at their defaults.
    void print_options() const {
        for (const Dim &d : options.dims) print(" %s=%d", d.name, d.value);
        print(" %s tokens=%s", options.dtype.c_str(), options.token_source.c_str());
        for (const Choice &c : options.choices) {
            if (c.chosen == 0) continue;
            print(" %s", key_of(c.option).c_str());
            if (!c.values.empty()) print("=%s", c.values[c.chosen]);
        }
        for (const Number &n : options.numbers) {
            if (n.value != n.default_value) print(" %s=%s", key_of(n.option).c_str(), n.text().c_str());
        }
        for (const Text &t : options.texts) {
            if (t.value != t.default_value) print(" %s=%s", key_of(t.option).c_str(), t.value.c_str());
        }
        print("\n");
        fflush(out);
    }

    void skipped(const Record &record) {
        if (!options.brief) print("skipped: %s\n", record.skipped.c_str());
        write_json(record);
        add_to_summary(record);
    }

    // A version without times: it was only checked, or its results are wrong.
    void checked(const Record &record) {
        write_json(record);
        add_to_summary(record);
    }

    // A check without a fault.
    void print_check(const CheckResult &result, double max_error, const std::string &tolerances,
                     Reproducible reproducible) const {
        if (options.brief) return;
        const char *promised[] = {", the same bits each time", ", the same bits each time at a block size", ""};
        if (job.sweep.option) promised[kSameAtABlockSize] = promised[kSameBits];
        print("check: max error %.1f%s (allowed %s) over %lld elements%s%s: ok\n", max_error,
              result.has_slack ? " beyond the bounds of float sums" : "", tolerances.c_str(), result.elements,
              result.sampled ? " of sampled rows" : "", promised[reproducible]);
    }

    // The times of a version at each setting.
    void times(const std::vector<Record> &records) {
        for (const Record &r : records) {
            if (!options.brief) print_times(r);
            write_json(r);
            if (r.best) add_to_summary(r);
        }
        fflush(out);
    }

    // At the end of the run: the table of all versions, each at its best setting (with --brief it is already printed),
    // and the fastest version.
    void end() const {
        if (!options.brief && (options.version != -1 || !options.do_bench)) return;
        if (!options.brief) {
            print("\n");
            print_table_head();
            for (const Record &r : summary) print_table_row(r);
        }
        const Record *const fastest = fastest_version();
        if (fastest && summary.size() > 1) {
            print("fastest: %d %s", fastest->version, fastest->name);
            const double gain = gain_over_first(*fastest);
            if (gain > 0 && fastest != &summary[0]) print(", %.*fx as fast as version 1", gain < 10 ? 2 : 0, gain);
            print("\n");
        }
        if (options.brief && options.do_check) {
            const bool right = std::all_of(summary.begin(), summary.end(), [](const Record &r) { return r.right; });
            print("checked: each version against the CPU reference at every %s: %s\n",
                  job.sweep.option ? "setting" : "block size", right ? "ok" : "WRONG");
        }
        if (ON_CPU && !options.brief) print("(times on the CPU device, which say nothing about a GPU)\n");
    }

    // Appends one object, on one line, to the option's file. All objects have the same keys. null: not measured.
    // block_size 0: all settings, or none.
    void write_json(const Record &r) const {
        if (options.json_path.empty()) return;
        const std::string line = "{" + options_json(r) + times_json(r) + check_json(r) + "}\n";
        const char *const path = options.json_path.c_str();
        FILE *const file = options.json_path == "-" ? stdout : fopen(path, "a");
        bool complete = false;
        progress.aside([&] { complete = file && fputs(line.c_str(), file) >= 0 && fflush(file) == 0; });
        if (file && file != stdout) fclose(file);
        if (!complete) refuse(EXIT_BAD_INPUT, "--json: cannot write '%s': %s", path, strerror(errno));
    }

  private:
    const Options &options;
    const Job &job;
    FILE *out = stdout;
    cudaDeviceProp device = {};
    double copy_gbps = 0;
    std::vector<Record> summary;

    // The job's rates for a time in milliseconds; 0 without a time.
    double gbps(double milliseconds) const { return milliseconds > 0 ? job.bytes / milliseconds * 1e-6 : 0; }
    double pct_of_copy(double milliseconds) const { return copy_gbps > 0 ? 100 * gbps(milliseconds) / copy_gbps : 0; }
    double tflops(double milliseconds) const { return milliseconds > 0 ? job.flops / milliseconds * 1e-9 : 0; }
    static double ratio(const Times &times) { return times.baseline > 0 ? times.median / times.baseline : 0; }

    std::vector<Figure> figures_of(const Record &r) const {
        return job.figures ? job.figures(r.version, r.setting) : std::vector<Figure>();
    }

    void add_to_summary(const Record &r) {
        summary.push_back(r);
        if (!options.brief) return;
        if (summary.size() == 1) print_table_head();
        print_table_row(r);
        fflush(out);
    }

    void print_times(const Record &r) const {
        print("%s | time %.4f ms", job.sweep.text(r.setting, true).c_str(), r.times.median);
        if (job.baseline.name) {
            const double rate = tflops(r.times.median);
            const RateUnit unit = rate_unit(rate);
            print(" | %.1f %s | %.3fx the %s", rate * unit.per_tflops, unit.name, ratio(r.times), job.baseline.name);
        } else {
            print(" | bandwidth %.2f GB/s", gbps(r.times.median));
            if (copy_gbps > 0) print(" | %5.1f%% of copy", pct_of_copy(r.times.median));
        }
        for (const Figure &f : figures_of(r)) {
            if (!f.words.empty()) print(" | %s", f.words.c_str());
        }
        print("%s\n", r.best ? "  <- best" : "");
    }

    // The unit of the whole column: that of the first version.
    RateUnit table_unit() const { return rate_unit(tflops(summary[0].times.median)); }
    int setting_width() const { return std::max(10, job.sweep.width()); }

    void print_table_head() const {
        print("%-7s %-15s %*s", "version", "name", setting_width(), job.sweep.option ? "at" : "block_size");
        if (options.do_bench) {
            print(" %11s %9s", "time (ms)", job.baseline.name ? table_unit().name : "GB/s");
            if (job.baseline.name) print("  x the %s", job.baseline.name);
            if (!job.baseline.name && copy_gbps > 0) print(" %9s", "% of copy");
            for (const Figure &f : figures_of(summary[0])) {
                if (!f.column.empty()) print("  %s", f.column.c_str());
            }
            print(" %12s", "x version 1");
        }
        print("\n");
    }

    void print_table_row(const Record &r) const {
        print("%-7d %-15s ", r.version, r.name);
        if (!r.skipped.empty() || !r.right || r.times.runs == 0) {
            print("%*s\n", setting_width(), !r.skipped.empty() ? "skipped" : r.right ? "ok" : "WRONG");
            return;
        }
        const std::string at = job.sweep.option ? job.sweep.text(r.setting) : std::to_string(r.setting);
        const bool bandwidth = !job.baseline.name;
        const double rate = bandwidth ? gbps(r.times.median) : tflops(r.times.median) * table_unit().per_tflops;
        print("%*s %11.4f %9.2f", setting_width(), at.c_str(), r.times.median, rate);
        if (!bandwidth) print(" %*.3f", 7 + (int)strlen(job.baseline.name), ratio(r.times));
        if (bandwidth && copy_gbps > 0) print(" %8.1f%%", pct_of_copy(r.times.median));
        for (const Figure &f : figures_of(r)) {
            if (!f.column.empty()) print("  %*.1f", (int)f.column.size(), f.value);
        }
        const double gain = gain_over_first(r);
        if (gain > 0) print(" %12.*f", gain < 10 ? 2 : 0, gain);
        print("\n");
    }

    // Version 1's time divided by this version's; 0 if version 1 has no time.
    double gain_over_first(const Record &r) const {
        const Record &first = summary[0];
        return first.version == 1 && first.times.median > 0 ? first.times.median / r.times.median : 0;
    }

    const Record *fastest_version() const {
        const Record *fastest = nullptr;
        for (const Record &r : summary) {
            if (r.times.runs > 0 && (!fastest || r.times.median < fastest->times.median)) fastest = &r;
        }
        return fastest;
    }

    static std::string positive_or_null(double value) { return value > 0 ? format("%.6g", value) : "null"; }

    // The program, the version, the device, the options and the setting.
    std::string options_json(const Record &r) const {
        std::string text = format(
            "\"kernel\": \"%s\", \"version\": %d, \"name\": %s, \"device\": %s, \"device_kind\": \"%s\", "
            "\"dtype\": \"%s\"",
            options.name, r.version, quoted(r.name).c_str(), quoted(device.name).c_str(), ON_CPU ? "cpu" : "cuda",
            options.dtype.c_str());
        for (const std::string key : {"B", "T", "C", "V", "P"}) {
            const auto dim = std::find_if(options.dims.begin(), options.dims.end(),
                                          [&](const Dim &d) { return key == d.name; });
            const std::string value = dim == options.dims.end() ? "null" : std::to_string(dim->value);
            text += format(", \"%s\": %s", key.c_str(), value.c_str());
        }
        text += format(", \"N\": %lld, \"tokens\": %s, \"seed\": %llu",
                       (long long)options.dim('b') * options.dim('t'), quoted(options.token_source).c_str(),
                       (unsigned long long)options.seed);
        for (const Choice &c : options.choices) {
            const std::string value = c.values.empty() ? c.chosen ? "true" : "false" : quoted(c.values[c.chosen]);
            text += format(", \"%s\": %s", key_of(c.option).c_str(), value.c_str());
        }
        for (const Number &n : options.numbers) {
            text += format(", \"%s\": %s", key_of(n.option).c_str(), n.text().c_str());
        }
        const Sweep &sweep = job.sweep;
        const bool at_one_value = sweep.values.size() == 1 || (r.version > 0 && r.times.runs > 0);
        for (const Text &t : options.texts) {
            const bool swept = sweep.option && t.option == std::string(sweep.option);
            const std::string value = !swept         ? quoted(t.value)
                                      : at_one_value ? quoted(sweep.values[r.setting])
                                                     : "null";
            text += format(", \"%s\": %s", key_of(t.option).c_str(), value.c_str());
        }
        text += format(", \"block_size\": %d", sweep.option ? 0 : r.setting);
        if (sweep.option) text += ", \"at\": " + (at_one_value ? quoted(sweep.text(r.setting)) : "null");
        return text;
    }

    std::string times_json(const Record &r) const {
        const Times &t = r.times;
        std::string text = format(", \"best\": %s, \"runs\": %d", r.best ? "true" : "false", t.runs);
        const auto number = [&](const std::string &key, double value) {
            text += ", \"" + key + "\": " + positive_or_null(value);
        };
        number("time_ms_min", t.min);
        number("time_ms_median", t.median);
        number("time_ms_p90", t.p90);
        number("time_ms_hot", t.hot);
        text += format(", \"bytes\": %.0f", job.bytes);
        number("gbps", gbps(t.median));
        number("copy_gbps", copy_gbps);
        number("pct_of_copy", pct_of_copy(t.median));
        text += format(", \"flops\": %.0f", job.flops);
        number("tflops", t.runs > 0 ? tflops(t.median) : 0);
        if (job.baseline.name) {
            number(std::string(job.baseline.name) + "_ms", t.baseline);
            number(std::string("ratio_to_") + job.baseline.name, ratio(t));
        }
        for (const Figure &f : figures_of(r)) text += format(", \"%s\": %.9g", f.key.c_str(), f.value);
        return text;
    }

    static std::string check_json(const Record &r) {
        const bool ran = r.skipped.empty(), checked = ran && r.checked;
        return format(", \"skipped\": %s, \"checked\": %s, \"ok\": %s, \"max_error\": %s, \"allowed_error\": %g, "
                      "\"commit\": \"%s\"",
                      ran ? "null" : quoted(r.skipped).c_str(), checked ? "true" : "false",
                      !r.right  ? "false"
                      : checked ? "true"
                                : "null",
                      checked && std::isfinite(r.max_error) ? format("%g", r.max_error).c_str() : "null",
                      r.allowed_error, bookends_commit);
    }
};

}  // namespace bookends
