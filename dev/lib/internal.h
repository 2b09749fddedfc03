// For the library's objects, one for each kernel family. Not part of the API.
#pragma once
#include "../../common.h"
#include "bookends.h"

#include <initializer_list>

namespace bookends {

// The library function that is being called. Members that return an error also store its message for bk_last_message();
// members that check something return BK_OK if it holds.
struct Call {
    const char *function;

    struct Size {
        const char *name;
        long long value;
    };
    struct Pointer {
        const char *name;
        const void *value;
    };

    __attribute__((format(printf, 3, 4))) int fail(int error, const char *format, ...) const;
    int from_cuda(cudaError_t error) const;
    int not_negative(std::initializer_list<Size> sizes) const;
    int not_null(std::initializer_list<Pointer> pointers) const;
    int aligned(const void *workspace) const;
    int no_version(int number) const { return fail(BK_ERROR_VERSION, "there is no version %d", number); }

    // Calls run() with a value of the bk_dtype's type. The value only names the type.
    template <typename Run>
    int with_type(bk_dtype dtype, Run run) const {
        switch (dtype) {
            case BK_FP32:
                return run(float());
            case BK_FP16:
                return run(half());
            case BK_BF16:
                return run(__nv_bfloat16());
        }
        return fail(BK_ERROR_DTYPE, "there is no dtype %d", dtype);
    }
};

}  // namespace bookends
