// bk_embedding_bag_backward and bk_embedding_transpose: argument checks, and from types and a version number to a
// launcher.
#define BOOKENDS_NO_MAIN
#include "../../embedding_lookup_backward.cu"

#include "bags.h"
#include "internal.h"

using namespace bookends;

static int check_count(const Call &call, int64_t count, int64_t bags) {
    if (const int error = call.not_negative({{"count", count}, {"bags", bags}})) return error;
    if (count > INT32_MAX || bags > INT32_MAX) {
        return call.fail(BK_ERROR_SHAPE, "%s is %lld, more than 2^31-1", count > INT32_MAX ? "count" : "bags",
                         (long long)(count > INT32_MAX ? count : bags));
    }
    return BK_OK;
}

// Sets the bags from the arguments, or refuses them.
static int read_bags(const Call &call, Bags *bags, const void *idx, int64_t count, int64_t bag_count,
                     const bk_bag_options *options, bk_index_type index_type) {
    static constexpr bk_bag_options defaults = BK_BAG_OPTIONS;
    if (const int error = check_count(call, count, bag_count)) return error;
    if (const int error = check_index_type(call, index_type)) return error;
    *bags = {};
    bags->idx = {idx, index_type == BK_INT64};
    bags->count = count;
    bags->bags = bag_count;
    return read_bag_options(call, bags, options ? *options : defaults);
}

extern "C" size_t bk_embedding_bag_backward_workspace_bytes(int64_t count, int64_t bags, int C, int64_t rows,
                                                            const bk_bag_options *options) {
    static constexpr Call call = {"bk_embedding_bag_backward_workspace_bytes"};
    Bags the_bags;
    if (call.not_negative({{"C", C}, {"rows", rows}})) return 0;
    if (read_bags(call, &the_bags, nullptr, count, bags, options, BK_INT64)) return 0;
    return embedding_bag_backward_workspace_bytes(the_bags, rows, C);
}

template <typename floatX, typename gradX>
static int backward(const Call &call, BagBackwardArguments<floatX, gradX> args, void *workspace, int number,
                    cudaStream_t stream) {
    const auto *version = find_version(embedding_bag_backward_versions<floatX, gradX>, number);
    if (version == nullptr) return call.no_version(number);
    if (!args.dtable && !args.dweights) return BK_OK;
    if (version->number > 1 || args.dweights) {
        if (const int error = call.aligned(workspace)) return error;
    }
    args.workspace = (char *)workspace;
    const cudaError_t error = version->launch(args, version->block_size, stream);
    if (error == cudaErrorNotSupported) {
        return call.fail(BK_ERROR_UNSUPPORTED, "version %d has no sparse gradient", version->number);
    }
    return call.from_cuda(error);
}

extern "C" int bk_embedding_bag_backward(void *dtable, int64_t *indices, int64_t *distinct, float *dweights,
                                         const void *dout, const int64_t *argmax, const void *idx, const void *table,
                                         int64_t *status, void *workspace, int64_t count, int64_t bags, int C,
                                         int64_t rows, int64_t stride, const bk_bag_options *options, bk_dtype dtype,
                                         bk_dtype grad_dtype, int flags, bk_index_type index_type, int version,
                                         bk_stream stream) {
    static constexpr Call call = {"bk_embedding_bag_backward"};
    if (const int error = call.not_negative({{"C", C}, {"rows", rows}})) return error;
    Bags the_bags;
    if (const int error = read_bags(call, &the_bags, idx, count, bags, options, index_type)) return error;
    if (stride < C) return call.fail(BK_ERROR_SHAPE, "stride is %lld, less than C, %d", (long long)stride, C);
    if (grad_dtype != dtype && grad_dtype != BK_FP32) {
        return call.fail(BK_ERROR_DTYPE, "grad_dtype is %d: neither dtype, %d, nor BK_FP32", grad_dtype, dtype);
    }
    if (flags != 0 && flags != BK_OVERWRITE) return call.fail(BK_ERROR_FLAGS, "there are no flags %d", flags);
    if (!indices != !distinct) {
        return call.fail(BK_ERROR_NULL, "%s is null and the other is not", indices ? "distinct" : "indices");
    }
    if (indices && !dtable) return call.not_null({{"dtable", dtable}});
    if (argmax && the_bags.mode != kBagMax) {
        return call.fail(BK_ERROR_NOT_NULL, "argmax must be null without BK_BAG_MAX");
    }
    if (dweights && the_bags.mode == kBagMax) {
        return call.fail(BK_ERROR_NOT_NULL, "dweights must be null with BK_BAG_MAX");
    }
    if ((dtable || dweights) && count > 0 && bags > 0 && C > 0) {
        if (const int error = call.not_null({{"dout", dout}, {"idx", idx}})) return error;
        if (the_bags.mode == kBagMax && !argmax) return call.not_null({{"argmax", argmax}});
        if (dweights && rows > 0 && !table) return call.not_null({{"table", table}});
    }
    return call.with_type(dtype, [&](auto type) {
        typedef decltype(type) floatX;
        auto run = [&](auto grad_type) {
            typedef decltype(grad_type) gradX;
            BagBackwardArguments<floatX, gradX> args = {};
            args.dtable = (gradX *)dtable;
            args.indices = (long long *)indices;
            args.distinct = (long long *)distinct;
            args.dweights = dweights;
            args.dout = (const floatX *)dout;
            args.argmax = (const long long *)argmax;
            args.table = {(const floatX *)table, rows, stride};
            args.bags = the_bags;
            args.C = C;
            args.overwrite = flags == BK_OVERWRITE;
            args.status = (status_word *)status;
            return backward(call, args, workspace, version, stream);
        };
        return grad_dtype == dtype ? run(floatX()) : run(float());
    });
}

extern "C" size_t bk_embedding_transpose_workspace_bytes(int64_t count, int64_t rows) {
    return count < 0 || rows < 0 ? 0 : embedding_transpose_workspace_bytes(count, rows);
}

extern "C" int bk_embedding_transpose(int64_t *indices, int32_t *begin, int32_t *positions, int32_t *group,
                                      int64_t *distinct, const void *idx, int64_t *status, void *workspace,
                                      int64_t count, int64_t rows, bk_index_type index_type, bk_stream stream) {
    static constexpr Call call = {"bk_embedding_transpose"};
    if (const int error = check_count(call, count, 0)) return error;
    if (const int error = call.not_negative({{"rows", rows}})) return error;
    if (const int error = check_index_type(call, index_type)) return error;
    if (const int error = call.not_null({{"begin", begin}, {"distinct", distinct}})) return error;
    if (count > 0) {
        const int error =
            call.not_null({{"indices", indices}, {"positions", positions}, {"group", group}, {"idx", idx}});
        if (error != BK_OK) return error;
    }
    if (const int error = call.aligned(workspace)) return error;
    return call.from_cuda(embedding_transpose((long long *)indices, begin, positions, group, (long long *)distinct,
                                              {idx, index_type == BK_INT64}, count, rows, (status_word *)status,
                                              (char *)workspace, stream));
}
