// Times of launches: cold, hot, and alternating with a baseline; and the device's copy rate.
#pragma once
#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <vector>

#include "inputs.h"
#include "progress.h"

namespace bookends {

// Milliseconds. Before each cold run the L2 is overwritten; hot runs follow each other in a graph.
struct Times {
    double min = 0, median = 0, p90 = 0;  // of the cold runs
    double hot = 0;
    double baseline = 0;  // median of the baseline's cold runs
    int runs = 0;         // number of cold runs
};

// Work with which every version is compared, such as the bare GEMMs of an LM head. It alternates with the runs of each
// version, since the clocks drift. The reports show the ratio to it instead of the bandwidth.
struct Baseline {
    const char *name = nullptr;  // null: none
    std::function<cudaError_t(cudaStream_t)> launch;
};

// The q-quantile of the values: a share q of them lies below it.
inline double quantile(std::vector<double> values, double q) {
    std::sort(values.begin(), values.end());
    return values[(size_t)(q * (values.size() - 1) + 0.5)];
}

inline double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class Timer {
  public:
    // Cold runs per measurement; 0: until the median settles.
    int repeat = 0;
    // Restores the inputs that a run overwrites. Called before each cold run, outside the measured time.
    std::function<void()> refill;
    const Baseline *baseline = nullptr;  // never null during a measurement

    // Memory to overwrite the L2, and for both sides of the copy.
    void allocate_scratch(DeviceMemory &memory, const cudaDeviceProp &device) {
        flush_bytes = 4 * (size_t)device.l2CacheSize;
        scratch_bytes = std::max(2 * std::min((size_t)1 << 30, device.totalGlobalMem / 32), flush_bytes);
        scratch = memory.allocate<char>((double)scratch_bytes);
    }

    void begin(cudaStream_t launches) { stream = launches; }

    // The rate of the driver's copy within device memory: bytes read plus bytes written, in GB/s.
    double measure_copy() {
        const size_t half = scratch_bytes / 2;
        auto copy = [&] { return cudaMemcpyAsync(scratch + half, scratch, half, cudaMemcpyDeviceToDevice, stream); };
        time_runs(10, true, copy);
        return 2.0 * half / quantile(time_runs(20, true, copy), 0.5) * 1e-6;
    }

    // Measures launches of one kernel at one setting; enqueue() makes a launch. Cold runs continue in batches until the
    // median settles (within 0.5% of the previous batch, at least 20 runs) or the time is up. A warm-up precedes them:
    // the clocks rise and, if a GEMM draws the chip's maximum power, fall again. A kernel that takes over 20 ms runs
    // only a few times.
    template <typename Enqueue>
    Times measure(Enqueue enqueue) {
        const double budget_seconds = ON_CPU ? 0.05 : 0.4;
        double start = seconds_now();
        const double once = time_runs(1, true, enqueue)[0];
        const double warm_seconds = ON_CPU ? 0.0 : baseline->name && once > 1 ? 0.5 : 0.05;
        while (seconds_now() - start < warm_seconds) time_runs(once > 5 ? 1 : 10, true, enqueue);
        const bool slow = once > 20;
        const int batch = repeat > 0 ? repeat : ON_CPU ? kCpuBatch : slow ? 3 : 10;
        const size_t least_runs = slow ? 6 : 20;
        std::vector<double> cold, baseline_times;
        start = seconds_now();
        for (double median_before = -1;;) {
            const std::vector<double> some = time_in_turns(batch, baseline_times, enqueue);
            cold.insert(cold.end(), some.begin(), some.end());
            const double median = quantile(cold, 0.5);
            if (repeat > 0 || (cold.size() >= 5 && seconds_now() - start > budget_seconds)) break;
            if (cold.size() >= least_runs && fabs(median - median_before) <= 0.005 * median) break;
            median_before = median;
        }
        Times times;
        times.runs = (int)cold.size();
        times.min = quantile(cold, 0.0);
        times.median = quantile(cold, 0.5);
        times.p90 = quantile(cold, 0.9);
        times.hot = time_hot(enqueue, times.median);
        if (!baseline_times.empty()) times.baseline = quantile(baseline_times, 0.5);
        return times;
    }

    // The number of launches that measure() makes for a kernel that takes over 20 ms: the first one, one batch that
    // alternates with the baseline, and two graphs.
    long long fewest_runs() const {
        const int batch = repeat > 0 ? repeat : ON_CPU ? kCpuBatch : 6;
        return 1 + batch * (baseline->name ? 2LL : 1LL) + (ON_CPU ? 2 * kCpuHot : 3);
    }

  private:
    static constexpr int kCpuBatch = 5, kCpuHot = 3;

    cudaStream_t stream = nullptr;
    char *scratch = nullptr;
    size_t scratch_bytes = 0, flush_bytes = 0;

    // Overwrites the L2 by writes, and so leaves dirty lines, as a previous kernel would. The measured time includes
    // the write-back of these lines to DRAM. It does not include the write-back of the kernel's own last lines. A
    // flush by reads would leave no dirty lines, and kernels that write would seem faster. Lines that a kernel has
    // marked evict_last are reset first, so that they are overwritten too.
    void flush() {
        if (!scratch) return;
        cuda_check(cudaStreamSynchronize(stream));
        if (cudaCtxResetPersistingL2Cache() != cudaSuccess) cudaGetLastError();  // the device has no such lines
        cuda_check(cudaMemsetAsync(scratch, 0, flush_bytes, stream));
    }

    // Milliseconds of `runs` launches, each between two events. The flush, or the previous launch in hot runs, hides
    // the time to issue a launch.
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

    // Cold runs, each followed by a run of the baseline. The baseline's times are appended to baseline_times.
    template <typename Enqueue>
    std::vector<double> time_in_turns(int runs, std::vector<double> &baseline_times, Enqueue enqueue) {
        if (!baseline->name) return time_runs(runs, true, enqueue);
        std::vector<double> milliseconds;
        for (int i = 0; i < runs; i++) {
            milliseconds.push_back(time_runs(1, true, enqueue)[0]);
            baseline_times.push_back(time_runs(1, true, [&] { return baseline->launch(stream); })[0]);
        }
        return milliseconds;
    }

    // Milliseconds per launch in a graph of launches, which is replayed. Nothing is restored between them. estimate:
    // milliseconds of a cold launch.
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
            progress.done(launches - 1);  // time_runs() counts one launch
            return cudaGraphLaunch(executable, stream);
        };
        time_runs(1, false, replay);
        const double median = quantile(time_runs(ON_CPU ? 1 : estimate > 20 ? 2 : 5, false, replay), 0.5);
        cuda_check(cudaGraphExecDestroy(executable));
        cuda_check(cudaGraphDestroy(graph));
        return median / launches;
    }
};

}  // namespace bookends
