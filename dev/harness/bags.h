// Indices and bags for the programs of embedding_lookup.cu, embedding_lookup_backward.cu and embedding_update.cu.
#pragma once
#include <cctype>
#include <memory>
#include <string>
#include <vector>

#include "../../parts/embedding_table.h"
#include "harness.h"

namespace bookends {

// int32 ids, converted to int64.
struct WideIds {
    const int *ids;
    __host__ __device__ long long operator[](long long i) const { return ids[i]; }
};

// The stride of the table's rows, in elements.
inline long long table_stride(const Options &options) {
    const long long stride = (long long)options.number("--stride"), C = options.dim('c');
    if (stride == 0) return C;
    if (stride < C) refuse(EXIT_BAD_INPUT, "--stride: '%lld' is less than C, %lld", stride, C);
    return stride;
}

// The sizes of a lookup.
struct LookupProblem {
    long long batch;  // rows of out, or bags of one table
    int C, V;
    int least, most;  // indices per bag
    int tables;

    explicit LookupProblem(const Options &options)
        : batch((long long)options.dim('b') * options.dim('t')), C(options.dim('c')), V(options.dim('v')) {
        tables = (int)options.number("--tables");
        const std::string text = options.text("--hotness");
        int length = 0, all = 0;
        if (sscanf(text.c_str(), "%9d%n..%9d%n", &least, &length, &most, &all) < 2) most = least, all = length;
        if (length == 0 || (size_t)all != text.size() || !isdigit((unsigned char)text[0]) || most < least) {
            refuse(EXIT_BAD_INPUT, "--hotness: '%s' is neither a number of indices nor a range such as 0..64",
                   text.c_str());
        }
    }

    long long rows() const { return (long long)tables * V; }  // of all tables
};

inline Indices make_indices(Harness &h, const int *ids, long long count) {
    if (h.options.choice("--index") == "int32") return {ids, false};
    return {h.input(WideIds{ids}, count), true};
}

// The bags of a run: in device memory for the kernels, in host memory for the references.
struct BagInputs {
    Bags device = {}, host = {};
    std::vector<long long> offsets, first_rows;
    std::vector<int> ids;
    std::vector<float> weights;

    long long length(long long bag) const { return offsets[bag + 1] - offsets[bag]; }

    // The bytes of the indices, weights and offsets.
    double bytes() const {
        const double per_index = (device.idx.wide ? 8 : 4) + (device.weights ? 4 : 0);
        return per_index * device.count + (device.offsets.data ? 8.0 * (device.bags + 1) : 0);
    }

// The distinct rows of all tables that the bags use, ascending, without padding.
    std::vector<long long> rows_of_indices(const LookupProblem &p) const {
        std::vector<long long> rows;
        for (int t = 0; t < p.tables; t++) {
            for (long long i = offsets[t * p.batch]; i < offsets[(t + 1) * p.batch]; i++) {
                if (!host.is_padding(ids[i])) rows.push_back((long long)t * p.V + ids[i]);
            }
        }
        std::sort(rows.begin(), rows.end());
        rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
        return rows;
    }
};

// Bags of --hotness indices from --tokens, with the offsets, weights, padding and tables of the other options.
inline std::shared_ptr<BagInputs> make_bags(Harness &h, const LookupProblem &p) {
    const std::string mode = h.options.choice("--bag");
    const bool weighted = h.options.flag("--weights");
    if (weighted && mode == "max") refuse(EXIT_BAD_INPUT, "--weights: requires --bag sum or mean");
    const auto inputs = std::make_shared<BagInputs>();
    Bags &host = inputs->host, &device = inputs->device;
    host.bags = p.batch * p.tables;
    const Random lengths(1010, h.options.seed);
    inputs->offsets.push_back(0);
    for (long long g = 0; g < host.bags; g++) {
        const long long length = p.least + (long long)(lengths.uniform(g) * (p.most - p.least + 1));
        inputs->offsets.push_back(inputs->offsets.back() + length);
    }
    for (int t = 0; t <= p.tables; t++) inputs->first_rows.push_back((long long)t * p.V);
    host.count = inputs->offsets.back();
    host.hotness = p.least;
    host.padding = (long long)h.options.number("--padding-idx");
    host.tables = p.tables;
    host.mode = mode == "sum" ? kBagSum : mode == "mean" ? kBagMean : kBagMax;

    const Values<float> weights = {2, h.options.seed};
    device = host;
    device.idx = make_indices(h, h.tokens(host.count, p.V), host.count);
    if (p.least != p.most) device.offsets = {h.upload(inputs->offsets), true};
    if (weighted) device.weights = h.input(weights, host.count);
    if (p.tables > 1) {
        device.first_rows = h.upload(inputs->first_rows);
        host.first_rows = inputs->first_rows.data();
    }

    inputs->ids = h.host_tokens;
    for (long long i = 0; weighted && i < host.count; i++) inputs->weights.push_back(weights[i]);
    host.idx = {inputs->ids.data(), false};
    host.offsets = {inputs->offsets.data(), true};
    host.weights = weighted ? inputs->weights.data() : nullptr;
    return inputs;
}

}  // namespace bookends
