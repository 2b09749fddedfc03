// What the test programs share: expectations, and arrays on the device between guards.
#pragma once
#include "../../common.h"
#include "../harness/base.h"

#include <cstdarg>
#include <vector>

namespace bookends {

inline int failures = 0;

// Prints a line and counts a failure unless ok.
__attribute__((format(printf, 2, 3))) inline void expect(bool ok, const char *pattern, ...) {
    if (ok) return;
    failures++;
    va_list arguments;
    va_start(arguments, pattern);
    vprintf(pattern, arguments);
    va_end(arguments);
    printf("\n");
}

// What main() returns.
inline int report_failures() {
    if (failures == 0) printf("ok\n");
    return failures > 0;
}

// An array on the device that the host fills and reads, `offset` elements after a multiple of 256 bytes, with a guard
// zone on either side.
template <typename T>
struct Device {
    static constexpr size_t kGuard = 1024;  // bytes
    static constexpr unsigned char kFill = 0xa5;
    char *memory;
    size_t count, before;  // elements; bytes in front of them
    T *pointer;

    explicit Device(const std::vector<T> &values, size_t offset = 0)
        : count(values.size()), before(kGuard + offset * sizeof(T)) {
        cuda_check(cudaMalloc((void **)&memory, before + count * sizeof(T) + kGuard));
        cuda_check(cudaMemset(memory, kFill, before + count * sizeof(T) + kGuard));
        pointer = (T *)(memory + before);
        put(values);
    }
    Device(const Device &) = delete;
    ~Device() { cudaFree(memory); }

    // Elements that hold kFill in every byte.
    static std::vector<T> filled(size_t count) {
        std::vector<T> values(count);
        if (count > 0) memset((void *)values.data(), kFill, count * sizeof(T));
        return values;
    }
    void put(const std::vector<T> &values) {
        if (count > 0) cuda_check(cudaMemcpy(pointer, values.data(), count * sizeof(T), cudaMemcpyHostToDevice));
    }
    std::vector<T> get() const {
        std::vector<T> values(count);
        cuda_check(cudaGetLastError());
        cuda_check(cudaDeviceSynchronize());
        if (count > 0) cuda_check(cudaMemcpy(values.data(), pointer, count * sizeof(T), cudaMemcpyDeviceToHost));
        return values;
    }
    bool guards_intact() const {
        std::vector<unsigned char> all(before + count * sizeof(T) + kGuard);
        cuda_check(cudaDeviceSynchronize());
        cuda_check(cudaMemcpy(all.data(), memory, all.size(), cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < all.size(); i++) {
            if ((i < before || i >= before + count * sizeof(T)) && all[i] != kFill) return false;
        }
        return true;
    }
    bool holds(const std::vector<T> &values) const {
        const std::vector<T> got = get();
        return got.size() == values.size() && memcmp(got.data(), values.data(), got.size() * sizeof(T)) == 0;
    }
    bool untouched() const { return holds(filled(count)); }
};

// A stream of numbers from 0 to below `end`.
struct Random {
    uint64_t state;
    unsigned below(unsigned end) { return (unsigned)(mix64(state += 0x9e3779b97f4a7c15ull) >> 32) % end; }
};

// Integers from least to most: their sums are exact in each type while they are small.
template <typename T>
std::vector<T> integers(size_t count, uint64_t seed, int least, int most) {
    Random random = {seed};
    std::vector<T> values(count);
    for (T &value : values) value = (T)((float)random.below((unsigned)(most - least + 1)) + (float)least);
    return values;
}

// Indices of a table, all different if `distinct`; every 11th is bad, or every one of an empty table.
template <typename Index>
std::vector<Index> table_indices(long long count, long long rows, bool distinct = false) {
    Random random = {3};
    std::vector<Index> values(count);
    for (long long i = 0; i < count; i++) {
        const bool bad = rows == 0 || i % 11 == 10;
        values[i] = bad ? (Index)(i % 2 ? -1 - i : rows + i) : (Index)(distinct ? i : random.below((unsigned)rows));
    }
    return values;
}

template <typename T>
const char *type_name() {
    return sizeof(T) == 4 ? "fp32" : std::is_same_v<T, half> ? "fp16" : "bf16";
}

// Block sizes that every launcher takes, and that it refuses.
constexpr int kGoodBlockSizes[] = {32, 64, 96, 480, 512, 992, 1024};
constexpr int kBadBlockSizes[] = {0, -32, 1, 31, 33, 1000, 1056, 2048, INT32_MIN, INT32_MAX};

// The launcher refused: with that error, which is not left pending.
inline void expect_refused(cudaError_t error, cudaError_t expected, const char *what, int version, int value) {
    const cudaError_t pending = cudaGetLastError();
    expect(error == expected && pending == cudaSuccess, "version %d, %s %d: error %d, pending %d", version, what, value,
           (int)error, (int)pending);
}

}  // namespace bookends
