// Inputs of embedding_update.cu.
#pragma once
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "../../parts/embedding_table.h"
#include "bags.h"
#include "harness.h"

namespace bookends {

// The shape, the indices and the options, which all operations have.
struct UpdateProblem {
    int C, V;
    long long stride, rows_updated;
    std::vector<int> ids;
    Indices idx;
    bool stochastic;
    status_word *status;
    std::shared_ptr<PositionsOfRows> positions;  // set before the references are called

    // distinct: each index once, in the order of its first position, or ascending.
    UpdateProblem(Harness &h, bool distinct, bool ascending) : C(h.options.dim('c')), V(h.options.dim('v')) {
        const long long N = (long long)h.options.dim('b') * h.options.dim('t');
        if (N > INT32_MAX) refuse(EXIT_BAD_INPUT, "B*T: %lld positions are more than %d (-b, -t)", N, INT32_MAX);
        stride = table_stride(h.options);
        stochastic = h.options.choice("--rounding") == "stochastic";
        if (stochastic && h.options.dtype == "fp32") {
            refuse(EXIT_BAD_INPUT, "--rounding: 'stochastic' is for 16-bit tables; this one is fp32");
        }
        const int *const all_ids = h.tokens(N, V);
        rows_updated = h.distinct_tokens();
        std::vector<bool> seen(V);
        for (int id : h.host_tokens) {
            if (distinct && seen[id]) continue;
            seen[id] = true;
            ids.push_back(id);
        }
        if (ascending) std::sort(ids.begin(), ids.end());
        const bool wide = h.options.choice("--index") == "int64";
        if (wide) {
            idx = {h.upload(std::vector<long long>(ids.begin(), ids.end())), true};
        } else {
            idx = {distinct ? h.upload(ids) : all_ids, false};
        }
        status = h.status();
        h.job.prepare_references = [this] { positions = std::make_shared<PositionsOfRows>(ids, V); };
    }
    UpdateProblem(const UpdateProblem &) = delete;
    double count() const { return (double)ids.size(); }
    double index_bytes() const { return count() * (idx.wide ? 8 : 4); }
};

}  // namespace bookends
