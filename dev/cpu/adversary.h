// Adversary mode. With BOOKENDS_ADVERSARY=SEED in the environment the seed chooses among the orders that CUDA allows,
// so that a program without a needed barrier, wait or event fails: the order of threads, warps and blocks; when
// asynchronous operations read their sources and write their results; how late a stream runs; and what a dependent
// kernel sees of its predecessor before it waits. One seed always gives the same order if one host thread launches.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

namespace cpu {

struct adversary {
    const char *const name = getenv("BOOKENDS_ADVERSARY"); // the seed's text
    const bool on = name && *name;
    uint64_t state = 0, grids = 0;

    // The choices within a grid depend on the seed and the grid's number, not on time.
    void next_grid() { state = (on ? strtoull(name, nullptr, 0) : 0) * 0x9e3779b97f4a7c15u + ++grids; }
    // A number from 0 to n-1 (SplitMix64; Steele, Lea, Flood 2014).
    unsigned draw(unsigned n) {
        uint64_t x = state += 0x9e3779b97f4a7c15u;
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
        x = (x ^ x >> 27) * 0x94d049bb133111ebu;
        return (unsigned)((x ^ x >> 31) >> 32) % n;
    }
    bool once_in(unsigned n) { return on && draw(n) == 0; }
};

// The OS threads of a grid run one at a time, in an order chosen by the seed.
struct turns {
    std::mutex lock;
    std::condition_variable passed;
    std::vector<bool> left; // OS threads that have finished
    int holder = 0;

    explicit turns(int workers) : left((size_t)workers) {}
    // Blocks until it is this OS thread's turn.
    void wait(int number) {
        std::unique_lock<std::mutex> guard(lock);
        passed.wait(guard, [&] { return holder == number; });
    }
    // Called by the holder: gives the turn to another OS thread, chosen by the seed.
    void pass(adversary &seed, int number, bool leaves) {
        {
            std::lock_guard<std::mutex> guard(lock);
            if (leaves) left[(size_t)number] = true;
            std::vector<int> others;
            for (int i = 0; i < (int)left.size(); i++)
                if (!left[(size_t)i] && i != number) others.push_back(i);
            if (others.empty()) return;
            holder = others[seed.draw((unsigned)others.size())];
        }
        passed.notify_all();
        if (!leaves) wait(number);
    }
};

// The contents of device memory before a kernel ran. A dependent kernel sees these until it waits for that kernel.
struct old_contents {
    struct range {
        char *at;
        std::vector<char> bytes; // the contents that memory does not hold at present
    };
    std::vector<range> ranges;

    static constexpr size_t most_bytes = 256 << 20; // of device memory; with more, nothing is hidden

    static old_contents of(const std::map<char *, size_t> &allocations) {
        old_contents all;
        size_t sum = 0;
        for (const auto &a : allocations) sum += a.second;
        for (const auto &a : allocations)
            if (sum <= most_bytes) all.ranges.push_back({a.first, {a.first, a.first + a.second}});
        return all;
    }
    // Drops the pieces of 16 bytes that have not changed.
    void keep_changes() {
        std::vector<range> changed;
        for (const range &r : ranges) {
            for (size_t i = 0; i < r.bytes.size(); i += 16) {
                const size_t n = std::min<size_t>(16, r.bytes.size() - i);
                if (!memcmp(r.at + i, &r.bytes[i], n)) continue;
                const bool joins = !changed.empty() && changed.back().at + changed.back().bytes.size() == r.at + i;
                if (!joins) changed.push_back({r.at + i, {}});
                changed.back().bytes.insert(changed.back().bytes.end(), &r.bytes[i], &r.bytes[i] + n);
            }
        }
        ranges = std::move(changed);
    }
    // Exchanges the contents of memory with the stored ones.
    void exchange() {
        for (range &r : ranges) std::swap_ranges(r.bytes.begin(), r.bytes.end(), r.at);
    }
};

} // namespace cpu
