// bk_embedding_update and bk_embedding_optimizer: argument checks, and from types and a version number to a launcher.
#define BOOKENDS_NO_MAIN
#include "../../embedding_update.cu"

#include "bags.h"
#include "internal.h"

using namespace bookends;

static int check_rows(const Call &call, int64_t count, int C, int64_t rows, int64_t stride, bk_index_type index_type) {
    if (const int error = call.not_negative({{"count", count}, {"C", C}, {"rows", rows}})) return error;
    if (count > INT32_MAX) {
        return call.fail(BK_ERROR_SHAPE, "count is %lld, more than 2^31-1", (long long)count);
    }
    if (stride < C) return call.fail(BK_ERROR_SHAPE, "stride is %lld, less than C, %d", (long long)stride, C);
    if (rows > 0 && stride > INT64_MAX / 4 / rows) {
        return call.fail(BK_ERROR_SHAPE, "rows * stride is beyond 2^61 elements");
    }
    return check_index_type(call, index_type);
}

// run(floatX, valueX) with values of the two types, which only name them.
template <typename Run>
static int with_types(const Call &call, bk_dtype dtype, bk_dtype value_dtype, const char *name, Run run) {
    return call.with_type(dtype, [&](auto type) {
        if (value_dtype == dtype) return run(type, type);
        if (value_dtype == BK_FP32) return run(type, float());
        if constexpr (sizeof(type) == 4) {
            if (value_dtype == BK_FP16) return run(type, half());
            if (value_dtype == BK_BF16) return run(type, __nv_bfloat16());
        }
        return call.fail(BK_ERROR_DTYPE, "%s is %d, which does not go with dtype %d", name, value_dtype, dtype);
    });
}

static int check_update(const Call &call, bk_update_op op, int flags) {
    if (op != BK_UPDATE_OVERWRITE && op != BK_UPDATE_ACCUMULATE) {
        return call.fail(BK_ERROR_OPTIONS, "there is no op %d", op);
    }
    const int known = BK_DISTINCT | (op == BK_UPDATE_ACCUMULATE ? BK_STOCHASTIC : 0);
    return flags & ~known ? call.fail(BK_ERROR_FLAGS, "there are no flags %d", flags & ~known) : BK_OK;
}

// Whether the version (a number of the table) uses the workspace.
static bool needs_workspace(bk_update_op op, int flags, int version) {
    return !(flags & BK_DISTINCT) && version >= (op == BK_UPDATE_ACCUMULATE ? 4 : 2);
}

extern "C" size_t bk_embedding_update_workspace_bytes(int64_t count, int C, int64_t rows, bk_update_op op, int flags,
                                                      int version) {
    static constexpr Call call = {"bk_embedding_update_workspace_bytes"};
    if (check_rows(call, count, C, rows, C, BK_INT32) || check_update(call, op, flags) || C == 0) return 0;
    const auto *overwrite = find_version(embedding_overwrite_versions<float, float>, version);
    const auto *accumulate = find_version(embedding_accumulate_versions<float, float>, version);
    if (op == BK_UPDATE_OVERWRITE ? !overwrite : !accumulate) return 0;
    const int number = op == BK_UPDATE_OVERWRITE ? overwrite->number : accumulate->number;
    if (!needs_workspace(op, flags, number)) return 0;
    return op == BK_UPDATE_OVERWRITE ? embedding_overwrite_workspace_bytes(count)
                                     : embedding_accumulate_workspace_bytes(count, rows, C);
}

// The call with a version's row.
template <typename Row, typename floatX, typename valueX>
static int update(const Call &call, const Row *version, int number, const UpdateArguments<floatX, valueX> &args,
                  bk_update_op op, int flags, cudaStream_t stream) {
    if (version == nullptr) return call.no_version(number);
    if (args.count == 0 || args.C == 0) return BK_OK;
    const void *const idx = args.idx.data, *const values = args.values;
    if (const int error = call.not_null({{"idx", idx}, {"values", values}})) return error;
    if (args.table.rows > 0 && !args.table.data) return call.not_null({{"table", nullptr}});
    if (needs_workspace(op, flags, version->number)) {
        if (const int error = call.aligned(args.workspace)) return error;
    }
    const cudaError_t error = version->launch(args, version->block_size, stream);
    if (error == cudaErrorNotSupported) {
        return call.fail(BK_ERROR_UNSUPPORTED, "version %d rounds at each addition, and only to nearest",
                         version->number);
    }
    return call.from_cuda(error);
}

extern "C" int bk_embedding_update(void *table, const void *idx, const void *values, int64_t *status, void *workspace,
                                   int64_t count, int C, int64_t rows, int64_t stride, bk_update_op op, float scale,
                                   bk_dtype dtype, bk_dtype value_dtype, int flags, uint64_t seed,
                                   bk_index_type index_type, int version, bk_stream stream) {
    static constexpr Call call = {"bk_embedding_update"};
    if (const int error = check_rows(call, count, C, rows, stride, index_type)) return error;
    if (const int error = check_update(call, op, flags)) return error;
    if (!std::isfinite(scale)) return call.fail(BK_ERROR_OPTIONS, "scale is %g", scale);
    return with_types(call, dtype, value_dtype, "value_dtype", [&](auto type, auto value_type) {
        typedef decltype(type) floatX;
        typedef decltype(value_type) valueX;
        UpdateArguments<floatX, valueX> args = {};
        args.table = {(floatX *)table, rows, stride};
        args.idx = {idx, index_type == BK_INT64};
        args.values = (const valueX *)values;
        args.count = count;
        args.C = C;
        args.distinct = flags & BK_DISTINCT;
        args.scale = scale;
        args.stochastic = flags & BK_STOCHASTIC;
        args.seed = seed;
        args.status = (status_word *)status;
        args.workspace = (char *)workspace;
        if (op == BK_UPDATE_OVERWRITE) {
            const auto *row = find_version(embedding_overwrite_versions<floatX, valueX>, version);
            return update(call, row, version, args, op, flags, stream);
        }
        const auto *row = find_version(embedding_accumulate_versions<floatX, valueX>, version);
        return update(call, row, version, args, op, flags, stream);
    });
}

// Fills in the optimizer from the options, or refuses them.
static int read_options(const Call &call, SparseOptimizer *optimizer, const bk_optimizer_options &options, float *first,
                        float *second) {
    if (options.kind < BK_SGD || options.kind > BK_ROWWISE_ADAM) {
        return call.fail(BK_ERROR_OPTIONS, "there is no kind %d", options.kind);
    }
    const OptimizerKind kind = (OptimizerKind)options.kind;
    if (options.flags & ~BK_STOCHASTIC) {
        return call.fail(BK_ERROR_FLAGS, "there are no flags %d", options.flags & ~BK_STOCHASTIC);
    }
    for (const int32_t reserved : options.reserved) {
        if (reserved != 0) return call.fail(BK_ERROR_OPTIONS, "a reserved field is %d", reserved);
    }
    auto not_below_0 = [](float x) { return std::isfinite(x) && x >= 0; };
    if (!std::isfinite(options.learning_rate) || !not_below_0(options.eps) || !not_below_0(options.weight_decay)) {
        return call.fail(BK_ERROR_OPTIONS, "learning_rate is %g, eps %g, weight_decay %g", options.learning_rate,
                         options.eps, options.weight_decay);
    }
    auto is_beta = [](double x) { return x >= 0 && x < 1; };
    if (is_adam(kind) && (!is_beta(options.beta1) || !is_beta(options.beta2))) {
        return call.fail(BK_ERROR_OPTIONS, "beta1 is %g, beta2 %g: not from 0 to below 1", options.beta1,
                         options.beta2);
    }
    if (is_adam(kind) && !options.device_step && options.step < 1) {
        return call.fail(BK_ERROR_OPTIONS, "step is %lld, not 1 or more", (long long)options.step);
    }
    if (!is_adam(kind) && first) return call.fail(BK_ERROR_NOT_NULL, "first must be null with this kind");
    if (kind == kSgd && second) return call.fail(BK_ERROR_NOT_NULL, "second must be null with this kind");
    *optimizer = {kind, options.learning_rate, options.eps, options.weight_decay, DecayRate(options.beta1),
                  DecayRate(options.beta2), options.step, (const long long *)options.device_step, first, second};
    return BK_OK;
}

template <typename floatX, typename gradX>
static int step(const Call &call, const OptimizerArguments<floatX, gradX> &args, int number, cudaStream_t stream) {
    const auto *version = find_version(embedding_optimizer_versions<floatX, gradX>, number);
    if (version == nullptr) return call.no_version(number);
    if (args.count == 0 || args.C == 0) return BK_OK;
    const void *const idx = args.idx.data, *const gradients = args.gradients, *const table = args.table.data;
    if (const int error = call.not_null({{"idx", idx}, {"gradients", gradients}})) return error;
    if (args.table.rows > 0) {
        const SparseOptimizer &o = args.optimizer;
        const void *const first = o.first, *const second = o.second;
        if (const int error = call.not_null({{"table", table}})) return error;
        if (is_adam(o.kind) && !first) return call.not_null({{"first", first}});
        if (o.kind != kSgd && !second) return call.not_null({{"second", second}});
    }
    return call.from_cuda(version->launch(args, version->block_size, stream));
}

extern "C" int bk_embedding_optimizer(void *table, float *first, float *second, const void *idx, const void *gradients,
                                      const int64_t *device_count, int64_t *status, int64_t count, int C, int64_t rows,
                                      int64_t stride, const bk_optimizer_options *options, bk_dtype dtype,
                                      bk_dtype grad_dtype, bk_index_type index_type, int version, bk_stream stream) {
    static constexpr Call call = {"bk_embedding_optimizer"};
    if (const int error = check_rows(call, count, C, rows, stride, index_type)) return error;
    if (const int error = call.not_null({{"options", options}})) return error;
    SparseOptimizer optimizer;
    if (const int error = read_options(call, &optimizer, *options, first, second)) return error;
    return with_types(call, dtype, grad_dtype, "grad_dtype", [&](auto type, auto grad_type) {
        typedef decltype(type) floatX;
        typedef decltype(grad_type) gradX;
        OptimizerArguments<floatX, gradX> args = {};
        args.optimizer = optimizer;
        args.table = {(floatX *)table, rows, stride};
        args.idx = {idx, index_type == BK_INT64};
        args.gradients = (const gradX *)gradients;
        args.count = count;
        args.device_count = (const long long *)device_count;
        args.C = C;
        args.stochastic = options->flags & BK_STOCHASTIC;
        args.seed = options->seed;
        args.status = (status_word *)status;
        return step(call, args, version, stream);
    });
}
