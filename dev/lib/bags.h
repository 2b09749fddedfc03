// Checks and conversions of bags, for bk_embedding_bag and bk_embedding_bag_backward.
#pragma once
#include "../../parts/embedding_table.h"
#include "internal.h"

namespace bookends {

inline int check_index_type(const Call &call, bk_index_type index_type) {
    if (index_type == BK_INT32 || index_type == BK_INT64) return BK_OK;
    return call.fail(BK_ERROR_DTYPE, "there is no index_type %d", index_type);
}

// Sets the members of `bags` from the options, or refuses the options. idx, count and bags must be set before.
inline int read_bag_options(const Call &call, Bags *bags, const bk_bag_options &options) {
    if (options.mode < BK_BAG_SUM || options.mode > BK_BAG_MAX) {
        return call.fail(BK_ERROR_OPTIONS, "there is no mode %d", options.mode);
    }
    if (options.offset_type != BK_INT32 && options.offset_type != BK_INT64) {
        return call.fail(BK_ERROR_OPTIONS, "there is no offset_type %d", options.offset_type);
    }
    for (const int32_t reserved : options.reserved) {
        if (reserved != 0) return call.fail(BK_ERROR_OPTIONS, "a reserved field is %d", reserved);
    }
    if (options.mode == BK_BAG_MAX && options.weights) {
        return call.fail(BK_ERROR_NOT_NULL, "weights must be null with BK_BAG_MAX");
    }
    if (options.tables < 1 || (options.tables > 1 && !options.first_rows)) {
        return call.fail(BK_ERROR_OPTIONS, "tables is %d%s", options.tables,
                         options.tables > 1 ? " and first_rows null" : "");
    }
    if (bags->bags % options.tables != 0) {
        return call.fail(BK_ERROR_SHAPE, "bags is %lld, no multiple of tables, %d", bags->bags, options.tables);
    }
    bags->offsets = {options.offsets, options.offset_type == BK_INT64};
    bags->hotness = options.hotness;
    if (!options.offsets) {
        if (const int error = call.not_negative({{"hotness", options.hotness}})) return error;
        const bool matches = bags->bags == 0 || options.hotness == 0
                                 ? bags->count == 0
                                 : bags->count % bags->bags == 0 && bags->count / bags->bags == options.hotness;
        if (!matches) {
            return call.fail(BK_ERROR_SHAPE, "count is %lld, not bags * hotness, %lld * %lld", bags->count, bags->bags,
                             (long long)options.hotness);
        }
    }
    bags->weights = options.weights;
    bags->padding = options.padding_idx;
    bags->mode = (BagMode)options.mode;
    bags->first_rows = (const long long *)options.first_rows;
    bags->tables = options.tables;
    return BK_OK;
}

}  // namespace bookends
