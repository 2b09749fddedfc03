// The common part of the C library: its version, and errors with their messages.
#include "internal.h"

#include <cstdarg>
#include <cstdio>

namespace bookends {

static thread_local char last_message[512] = "";

int Call::fail(int error, const char *format, ...) const {
    const int length = snprintf(last_message, sizeof(last_message), "%s: ", function);
    va_list words;
    va_start(words, format);
    vsnprintf(last_message + length, sizeof(last_message) - length, format, words);
    va_end(words);
    return error;
}

int Call::from_cuda(cudaError_t error) const {
    if (error == cudaSuccess) return BK_OK;
    return fail(BK_ERROR_CUDA + (int)error, "%s: %s", cudaGetErrorName(error), cudaGetErrorString(error));
}

int Call::not_negative(std::initializer_list<Size> sizes) const {
    for (const Size &size : sizes) {
        if (size.value < 0) return fail(BK_ERROR_SHAPE, "%s is %lld", size.name, size.value);
    }
    return BK_OK;
}

int Call::not_null(std::initializer_list<Pointer> pointers) const {
    for (const Pointer &pointer : pointers) {
        if (!pointer.value) return fail(BK_ERROR_NULL, "%s is null", pointer.name);
    }
    return BK_OK;
}

int Call::aligned(const void *workspace) const {
    if (!workspace) return not_null({{"workspace", workspace}});
    if ((uintptr_t)workspace % 256 == 0) return BK_OK;
    return fail(BK_ERROR_ALIGNMENT, "workspace does not begin at a multiple of 256 bytes");
}

}  // namespace bookends

extern "C" int bk_version(void) { return BK_VERSION; }

extern "C" const char *bk_last_message(void) { return bookends::last_message; }

extern "C" const char *bk_error_string(int error) {
    switch (error) {
        case BK_OK:
            return "no error";
        case BK_ERROR_NULL:
            return "a pointer is null";
        case BK_ERROR_NOT_NULL:
            return "a pointer must be null";
        case BK_ERROR_SHAPE:
            return "a size is negative or too large, or P is less than V";
        case BK_ERROR_DTYPE:
            return "no such dtype, or two that don't go together";
        case BK_ERROR_VERSION:
            return "no such version";
        case BK_ERROR_UNSUPPORTED:
            return "this version cannot do that";
        case BK_ERROR_FLAGS:
            return "no such flag";
        case BK_ERROR_OPTIONS:
            return "an option is not finite or outside its range";
        case BK_ERROR_MEMORY:
            return "the budget for scratch memory is too small";
        case BK_ERROR_ALIGNMENT:
            return "the workspace is not at a multiple of 256 bytes";
        case BK_ERROR_TUNING:
            return "the tuning results are damaged, or of another plan, device or cuBLASLt";
        default:
            return error > BK_ERROR_CUDA ? cudaGetErrorString((cudaError_t)(error - BK_ERROR_CUDA)) : "no such error";
    }
}
