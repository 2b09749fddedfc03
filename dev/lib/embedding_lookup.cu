// bk_embedding_lookup and bk_embedding_bag: argument checks, and from types and a version number to a launcher.
#define BOOKENDS_NO_MAIN
#include "../../embedding_lookup.cu"

#include "bags.h"
#include "internal.h"

using namespace bookends;

// What both functions check of the table and the types.
static int check_table(const Call &call, int C, int64_t rows, int64_t stride, bk_dtype dtype, bk_dtype out_dtype,
                       bk_index_type index_type) {
    if (const int error = call.not_negative({{"C", C}, {"rows", rows}})) return error;
    if (stride < C) return call.fail(BK_ERROR_SHAPE, "stride is %lld, less than C, %d", (long long)stride, C);
    if (rows > 0 && stride > INT64_MAX / 4 / rows) {
        return call.fail(BK_ERROR_SHAPE, "rows * stride is beyond 2^61 elements");
    }
    if (out_dtype != dtype && out_dtype != BK_FP32) {
        return call.fail(BK_ERROR_DTYPE, "out_dtype is %d: neither dtype, %d, nor BK_FP32", out_dtype, dtype);
    }
    return check_index_type(call, index_type);
}

template <typename floatX, typename outX>
static int lookup(const Call &call, void *out, Indices idx, const void *table, int64_t *status, int64_t N, int C,
                  int64_t rows, int64_t stride, int number, cudaStream_t stream) {
    const auto *version = find_version(embedding_lookup_versions<floatX, outX>, number);
    if (version == nullptr) return call.no_version(number);
    if (N == 0 || C == 0) return BK_OK;
    if (const int error = call.not_null({{"out", out}, {"idx", idx.data}})) return error;
    if (rows > 0 && !table) return call.not_null({{"table", table}});
    const KeepPendingError keep;
    return call.from_cuda(version->launch((outX *)out, idx, {(const floatX *)table, rows, stride},
                                          (status_word *)status, N, C, version->block_size, stream));
}

extern "C" int bk_embedding_lookup(void *out, const void *idx, const void *table, int64_t *status, int64_t N, int C,
                                   int64_t rows, int64_t stride, bk_dtype dtype, bk_dtype out_dtype,
                                   bk_index_type index_type, int version, bk_stream stream) {
    static constexpr Call call = {"bk_embedding_lookup"};
    if (const int error = call.not_negative({{"N", N}})) return error;
    if (const int error = check_table(call, C, rows, stride, dtype, out_dtype, index_type)) return error;
    const Indices indices = {idx, index_type == BK_INT64};
    return call.with_type(dtype, [=](auto type) {
        typedef decltype(type) floatX;
        const auto run = out_dtype == dtype ? lookup<floatX, floatX> : lookup<floatX, float>;
        return run(call, out, indices, table, status, N, C, rows, stride, version, stream);
    });
}

template <typename floatX, typename outX>
static int bag(const Call &call, void *out, int64_t *argmax, const void *table, int64_t *status, const Bags &bags,
               int C, int64_t rows, int64_t stride, int number, cudaStream_t stream) {
    const auto *version = find_version(embedding_bag_versions<floatX, outX>, number);
    if (version == nullptr) return call.no_version(number);
    if (bags.bags == 0 || C == 0) return BK_OK;
    if (const int error = call.not_null({{"out", out}})) return error;
    if (bags.count > 0 && !bags.idx.data) return call.not_null({{"idx", nullptr}});
    if (rows > 0 && !table) return call.not_null({{"table", table}});
    BagArguments<floatX, outX> args = {};
    args.out = (outX *)out;
    args.argmax = (long long *)argmax;
    args.status = (status_word *)status;
    args.table = {(const floatX *)table, rows, stride};
    args.bags = bags;
    args.C = C;
    const KeepPendingError keep;
    return call.from_cuda(version->launch(args, version->block_size, stream));
}

extern "C" int bk_embedding_bag(void *out, int64_t *argmax, const void *idx, const void *table, int64_t *status,
                                int64_t count, int64_t bags, int C, int64_t rows, int64_t stride,
                                const bk_bag_options *options, bk_dtype dtype, bk_dtype out_dtype,
                                bk_index_type index_type, int version, bk_stream stream) {
    static constexpr Call call = {"bk_embedding_bag"};
    static constexpr bk_bag_options defaults = BK_BAG_OPTIONS;
    if (const int error = call.not_negative({{"count", count}, {"bags", bags}})) return error;
    if (const int error = check_table(call, C, rows, stride, dtype, out_dtype, index_type)) return error;
    Bags the_bags = {};
    the_bags.idx = {idx, index_type == BK_INT64};
    the_bags.count = count;
    the_bags.bags = bags;
    if (const int error = read_bag_options(call, &the_bags, options ? *options : defaults)) return error;
    if (argmax && the_bags.mode != kBagMax) {
        return call.fail(BK_ERROR_NOT_NULL, "argmax must be null without BK_BAG_MAX");
    }
    return call.with_type(dtype, [&](auto type) {
        typedef decltype(type) floatX;
        const auto run = out_dtype == dtype ? ::bag<floatX, floatX> : ::bag<floatX, float>;
        return run(call, out, argmax, table, status, the_bags, C, rows, stride, version, stream);
    });
}
