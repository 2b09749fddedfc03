// Progress of long work: a line on a terminal, and a line before work of more than a minute.
//
//     Progress::Stage stage("checking", 14);    // 14 steps; stages nest
//     for (...) progress.done();                // from any thread: a step of the innermost stage
//
// From the third second on, a terminal at stderr shows the stages, the finished share of each, the elapsed time and the
// remaining time. The line is erased when the outermost stage ends. If a stage is estimated to take more than a minute,
// one line on stderr says so, also without a terminal; so does a line after a minute without a finished step. Other
// output goes through aside(), which erases the line first.
#pragma once
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace bookends {

// A duration in words: 34 s, 12 min, 3.4 h.
inline std::string duration_text(double seconds) {
    char text[40];
    snprintf(text, sizeof(text),
             seconds < 100    ? "%.0f s"
             : seconds < 6000 ? "%.0f min"
                              : "%.1f h",
             seconds < 100    ? seconds
             : seconds < 6000 ? seconds / 60
                              : seconds / 3600);
    return text;
}

class Progress {
  public:
    // A part of the work, which lasts from construction to destruction. steps 0: the number of steps is unknown.
    class Stage {
      public:
        explicit Stage(const std::string &what, long long steps = 0);
        ~Stage();
        Stage(const Stage &) = delete;

      private:
        friend class Progress;
        std::string what;
        long long steps;
        std::atomic<long long> finished{0};
        double start;

        double fraction() const { return steps > 0 ? std::min(1.0, (double)finished / (double)steps) : 0; }
    };

    std::string program;  // the first word of each line

    ~Progress() { stop(); }

    void done(long long steps = 1) {
        if (!stages.empty()) stages.back()->finished += steps;
    }

    // Calls print() while no progress line is shown.
    template <typename Print>
    void aside(Print print) {
        std::lock_guard<std::mutex> lock(mutex);
        erase();
        print();
    }

    // Erases the line. No line is drawn afterwards.
    void stop() {
        {
            std::lock_guard<std::mutex> lock(mutex);
            erase();
            stopping = true;
        }
        wake.notify_all();
        if (watcher.joinable()) watcher.join();
    }

  private:
    static constexpr double kQuietSeconds = 2, kSureSeconds = 5, kLongSeconds = 60;

    std::mutex mutex;
    std::condition_variable wake;
    std::thread watcher;
    std::vector<Stage *> stages;  // the innermost is last; changed under the mutex, by one thread
    bool stopping = false, drawn = false;
    enum Announced { kNothing, kMinute, kEstimate } announced = kNothing;  // for the outermost stage
    const bool terminal = isatty(STDERR_FILENO) != 0;

    static double now() {
        return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    }

    void begin(Stage *stage) {
        std::lock_guard<std::mutex> lock(mutex);
        stages.push_back(stage);
        if (!watcher.joinable() && !stopping) watcher = std::thread([this] { watch(); });
    }

    void end() {
        std::lock_guard<std::mutex> lock(mutex);
        stages.pop_back();
        if (!stages.empty()) return;
        announced = kNothing;
        erase();
    }

    void watch() {
        std::unique_lock<std::mutex> lock(mutex);
        while (!stopping) {
            wake.wait_for(lock, std::chrono::milliseconds(250));
            if (stopping || stages.empty()) continue;
            const double time = now();
            if (time - stages[0]->start < kQuietSeconds) continue;
            announce(time);
            draw(time);
        }
    }

    // Prints the estimate of a stage once; or, without an estimate, that a minute has passed.
    void announce(double time) {
        for (const Stage *stage : stages) {
            const double elapsed = time - stage->start, fraction = stage->fraction();
            if (fraction > 0 && elapsed >= kSureSeconds && elapsed / fraction >= kLongSeconds &&
                announced != kEstimate) {
                tell(kEstimate, stage->what + " takes about " + duration_text(elapsed / fraction));
            } else if (fraction == 0 && elapsed >= kLongSeconds && announced == kNothing) {
                tell(kMinute, stage->what + " has taken a minute so far");
            }
        }
    }

    void tell(Announced what, const std::string &text) {
        announced = what;
        erase();
        fprintf(stderr, "%s: %s\n", program.c_str(), text.c_str());
    }

    void draw(double time) {
        if (!terminal) return;
        std::string line = program;
        for (const Stage *stage : stages) {
            line += (stage == stages[0] ? ": " : " | ") + stage->what;
            if (stage->steps > 0) line += " " + std::to_string((int)(100 * stage->fraction())) + "%";
        }
        const double elapsed = time - stages[0]->start, fraction = stages[0]->fraction();
        line += " | " + duration_text(elapsed);
        if (fraction > 0) line += ", about " + duration_text(elapsed / fraction - elapsed) + " left";
        winsize size = {};
        const bool known = ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1;
        line.resize(std::min(line.size(), known ? (size_t)size.ws_col - 1 : 79));  // a second line could not be erased
        fprintf(stderr, "\r\033[K%s", line.c_str());
        fflush(stderr);
        drawn = true;
    }

    void erase() {
        if (!drawn) return;
        fprintf(stderr, "\r\033[K");
        fflush(stderr);
        drawn = false;
    }
};

// One for the process, which has one stderr.
inline Progress progress;

inline Progress::Stage::Stage(const std::string &words, long long count)
    : what(words), steps(count), start(Progress::now()) {
    progress.begin(this);
}
inline Progress::Stage::~Stage() { progress.end(); }

}  // namespace bookends
