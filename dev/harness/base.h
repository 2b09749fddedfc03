// What all parts of the harness use: the kind of device, the check of CUDA calls, and text.
#pragma once
#include <cuda_runtime.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace bookends {

#ifdef BOOKENDS_CPU_DEVICE
constexpr bool ON_CPU = true;
#else
constexpr bool ON_CPU = false;
#endif

// Ends the program on a CUDA error. For programs only: launchers and the library return the error.
inline void cuda_check(cudaError_t error, const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
    if (error == cudaSuccess) return;
    fprintf(stderr, "%s:%d: CUDA error: %s\n", file, line, cudaGetErrorString(error));
    exit(EXIT_FAILURE);
}

// ---------------------------------------------------------------------------------------------------------------------
// text

// printf into a string.
__attribute__((format(printf, 1, 0))) inline std::string format_list(const char *pattern, va_list arguments) {
    va_list again;
    va_copy(again, arguments);
    std::string text(vsnprintf(nullptr, 0, pattern, again), '\0');
    va_end(again);
    vsnprintf(&text[0], text.size() + 1, pattern, arguments);
    return text;
}
__attribute__((format(printf, 1, 2))) inline std::string format(const char *pattern, ...) {
    va_list arguments;
    va_start(arguments, pattern);
    std::string text = format_list(pattern, arguments);
    va_end(arguments);
    return text;
}

// The parts, separated by commas.
inline std::string joined(const std::vector<std::string> &parts) {
    std::string all;
    for (const std::string &part : parts) all += (all.empty() ? "" : ", ") + part;
    return all;
}

// A JSON string.
inline std::string quoted(const std::string &text) {
    std::string result = "\"";
    for (unsigned char c : text) {
        if (c == '"' || c == '\\') result += '\\';
        result += c < 0x20 ? format("\\u%04x", c) : std::string(1, (char)c);
    }
    return result + "\"";
}

// An amount of memory: three digits, in the largest unit in which it is at least 1.
inline std::string memory_text(double bytes) {
    const char *const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    size_t unit = 0;
    for (; bytes >= 1024 && unit + 1 < sizeof(units) / sizeof(units[0]); unit++) bytes /= 1024;
    if (bytes >= 1024) return "more than 1024 EiB";
    return format("%.*f %s", unit == 0 || bytes >= 100 ? 0 : bytes >= 10 ? 1 : 2, bytes, units[unit]);
}

}  // namespace bookends
