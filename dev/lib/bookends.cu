// The part of the C library that all families share: the version, errors and their words, and bk_scale.
#include "internal.h"

#include <algorithm>
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

}  // namespace bookends

using namespace bookends;

// x[i] *= *factor. Each thread loads and stores `width` elements at a time; the last count % width elements are taken
// one by one.
template <typename floatX, int width>
static __global__ void __launch_bounds__(256) scale_kernel(floatX *x, const float *factor, long long count) {
    const float by = *factor;
    if (by == 1.0f) return;
    typedef Packed<floatX, width> packed;
    const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long threads = (long long)gridDim.x * blockDim.x;
    for (long long i = thread; i < count / width; i += threads) {
        float values[width];
        to_floats(values, load_packed<packed>(x + i * width));
        for (int k = 0; k < width; k++) values[k] *= by;
        store_packed(x + i * width, from_floats<floatX>(values));
    }
    for (long long i = count / width * width + thread; i < count; i += threads) x[i] = (floatX)((float)x[i] * by);
}

template <typename floatX>
static cudaError_t scale(floatX *x, const float *factor, long long count, cudaStream_t stream) {
    constexpr int width = Packed128<floatX>::size, block_size = 256, most_blocks = 4096;
    const bool aligned = vector_width(width, width, x) == width;
    const long long of_block = (long long)block_size * (aligned ? width : 1);
    const long long blocks = std::min(ceil_div(count, of_block), (long long)most_blocks);
    if (aligned) {
        return launch_kernel(scale_kernel<floatX, width>, (unsigned)blocks, block_size, 0, stream, x, factor, count);
    }
    return launch_kernel(scale_kernel<floatX, 1>, (unsigned)blocks, block_size, 0, stream, x, factor, count);
}

extern "C" int bk_scale(void *x, const float *factor, int64_t count, bk_dtype dtype, bk_stream stream) {
    static constexpr Call call = {"bk_scale"};
    if (count < 0) return call.fail(BK_ERROR_SHAPE, "count is %lld", (long long)count);
    return call.with_type(dtype, [=](auto type) -> int {
        if (count == 0) return BK_OK;
        if (const int error = call.not_null({{"x", x}, {"factor", factor}})) return error;
        const KeepPendingError keep;
        return call.from_cuda(scale((decltype(type) *)x, factor, (long long)count, stream));
    });
}

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
