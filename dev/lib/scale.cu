// bk_scale: multiplies an array by a number in device memory.
#include "internal.h"

#include <algorithm>

using namespace bookends;

// x[i] *= *factor. Each thread loads and stores `width` elements at a time; the last count % width elements are handled
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
