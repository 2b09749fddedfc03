// Work on all cores of the host.
#pragma once
#include <algorithm>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include "progress.h"

namespace bookends {

// Divides 0..count-1 into one piece per core, calls work(from, to) for each piece, and returns the results in order.
// Rethrows an exception of a call.
template <typename Work>
auto in_parallel(size_t count, Work work) {
    const size_t pieces = std::max<size_t>(1, std::min<size_t>(count, std::thread::hardware_concurrency()));
    std::vector<decltype(work(count, count))> results(pieces);
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

// Divides 0..count-1 into pieces, calls work(from, to) for each piece on all cores, and shows the progress as `what`.
template <typename Work>
void in_pieces(const char *what, size_t count, Work work) {
    const Progress::Stage stage(what, (long long)count);
    in_parallel(count, [&](size_t from, size_t to) {
        const size_t step = std::max<size_t>(1, (to - from) / 100);
        for (size_t i = from; i < to; i += step) {
            work(i, std::min(to, i + step));
            progress.done((long long)std::min(step, to - i));
        }
        return 0;
    });
}

}  // namespace bookends
