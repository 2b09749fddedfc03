// Tests the launchers of embedding_update.cu without the library or the harness: every version, valid and invalid block
// sizes, no work, no status word, an empty table. Prints ok, or one line for each failure; the exit status is 0 or 1.
#define BOOKENDS_NO_MAIN
#include "../../embedding_update.cu"
#include "check.h"

using namespace bookends;

static status_word first_bad(long long count, long long rows) {
    return rows == 0 ? 0 : count > 10 ? 10 : kStatusOk;
}

template <typename T>
static std::vector<double> wide(const std::vector<T> &values) {
    std::vector<double> result;
    for (const T &value : values) result.push_back((double)(float)value);
    return result;
}

// The number of elements that are further from `want` than rounding explains; 0 for exact results.
template <typename T>
static size_t count_wrong(const std::vector<T> &got, const std::vector<double> &want, double error) {
    size_t wrong = 0;
    for (size_t i = 0; i < got.size(); i++) {
        const double slack = error * (1 + fabs(want[i]));
        const float low = (float)(T)(float)(want[i] - slack), high = (float)(T)(float)(want[i] + slack);
        wrong += !(low <= (float)got[i] && (float)got[i] <= high);
    }
    return wrong;
}

struct Shape {
    long long count, rows;
    int C, stride;
};
constexpr Shape kShapes[] = {{1, 1, 1, 1}, {13, 20, 8, 9}, {40, 64, 24, 24}, {65, 70, 33, 40}, {6, 8, 520, 520},
                             {8, 0, 64, 64}};

// Overwrite and accumulate. table: of versions; reference(row, positions, count): changes one row of the table.
template <typename floatX, typename valueX, typename Index, typename Row, size_t versions, typename Reference>
static void test_update(const Row (&table)[versions], size_t workspace_bytes, const Reference &reference) {
    for (const Shape &s : kShapes) {
        for (const bool distinct : {false, true}) {
            for (const size_t offset : {0, 1}) {
                const std::vector<Index> ids = table_indices<Index>(s.count, s.rows, distinct);
                const std::vector<floatX> before = integers<floatX>((size_t)(s.rows * s.stride), 1, -4, 4);
                const std::vector<valueX> values = integers<valueX>((size_t)(s.count * s.C), 2, -4, 4);
                std::vector<double> want = wide(before);
                for (long long row = 0; row < s.rows; row++) {
                    std::vector<int> positions;
                    for (int i = 0; i < s.count; i++) {
                        if (ids[i] == row) positions.push_back(i);
                    }
                    reference(&want[row * s.stride], values.data(), positions, s.C);
                }
                const Device<Index> idx(ids, offset);
                const Device<valueX> device_values(values, offset);
                Device<floatX> device_table(before, offset);
                const Device<char> workspace(Device<char>::filled(workspace_bytes));
                Device<status_word> status(std::vector<status_word>{kStatusOk});
                UpdateArguments<floatX, valueX> args = {};
                args.table = {device_table.pointer, s.rows, s.stride};
                args.idx = {idx.pointer, sizeof(Index) == 8};
                args.values = device_values.pointer;
                args.count = s.count;
                args.C = s.C;
                args.distinct = distinct;
                args.scale = 2;
                args.workspace = workspace.pointer;
                for (const auto &version : table) {
                    for (const int block_size : kGoodBlockSizes) {
                        args.status = block_size != 96 ? status.pointer : nullptr;
                        const cudaError_t error = version.launch(args, block_size, 0);
                        const size_t wrong = count_wrong(device_table.get(), want, 0);
                        const bool around = device_table.guards_intact() && workspace.guards_intact();
                        expect(error == cudaSuccess && wrong == 0 && around,
                               "version %d %s C=%d distinct=%d block size %d: error %d, %zu wrong, guards %d",
                               version.number, type_name<floatX>(), s.C, distinct, block_size, (int)error, wrong,
                               around);
                        const status_word bad = args.status ? first_bad(s.count, s.rows) : kStatusOk;
                        expect(status.get()[0] == bad, "version %d: status %lld", version.number,
                               (long long)status.get()[0]);
                        device_table.put(before);
                        status.put({kStatusOk});
                    }
                    for (const int block_size : kBadBlockSizes) {
                        expect_refused(version.launch(args, block_size, 0), cudaErrorInvalidValue, "block size",
                                       version.number, block_size);
                        expect(device_table.holds(before), "version %d wrote with block size %d", version.number,
                               block_size);
                    }
                    args.count = 1ll << 31;
                    expect_refused(version.launch(args, 128, 0), cudaErrorInvalidValue, "2^31 indices", version.number,
                                   128);
                    args.count = s.count;
                }
            }
        }
    }
}

template <typename floatX, typename valueX, typename Index>
static void test_updates() {
    size_t overwrite_bytes = 0, accumulate_bytes = 0;
    for (const Shape &s : kShapes) {
        overwrite_bytes = std::max(overwrite_bytes, embedding_overwrite_workspace_bytes(s.count));
        accumulate_bytes = std::max(accumulate_bytes, embedding_accumulate_workspace_bytes(s.count, s.rows, s.C));
    }
    test_update<floatX, valueX, Index>(
        embedding_overwrite_versions<floatX, valueX>, overwrite_bytes,
        [](double *row, const valueX *values, const std::vector<int> &positions, int C) {
            embedding_overwrite_cpu(row, values, positions.data(), (long long)positions.size(), C);
        });
    test_update<floatX, valueX, Index>(
        embedding_accumulate_versions<floatX, valueX>, accumulate_bytes,
        [](double *row, const valueX *values, const std::vector<int> &positions, int C) {
            embedding_accumulate_cpu(row, nullptr, 2.0, values, positions.data(), (long long)positions.size(), C);
        });
}

template <typename floatX, typename gradX, typename Index>
static void test_optimizer(OptimizerKind kind) {
    for (const Shape &s : kShapes) {
        for (const size_t offset : {0, 1}) {
            const std::vector<Index> ids = table_indices<Index>(s.count, s.rows, true);
            const std::vector<floatX> before = integers<floatX>((size_t)(s.rows * s.stride), 1, -4, 4);
            const std::vector<gradX> gradients = integers<gradX>((size_t)(s.count * s.C), 2, -4, 4);
            const std::vector<float> m = integers<float>((size_t)(s.rows * s.C), 3, -4, 4);
            std::vector<float> v((size_t)(kind == kAdam ? s.rows * s.C : s.rows));
            for (size_t i = 0; i < v.size(); i++) v[i] = 1.0f + (float)(i % 7);
            std::vector<double> want = wide(before), want_m = wide(m), want_v = wide(v);
            SparseOptimizer optimizer = {kind, 0.5f, 1e-8f, 0.25f, DecayRate(0.9), DecayRate(0.99), 3, nullptr, nullptr,
                                         nullptr};
            for (int i = 0; i < s.count; i++) {
                const long long row = ids[i];
                if (!row_in_table(row, s.rows)) continue;
                embedding_optimizer_cpu(&want[row * s.stride], &want_m[row * s.C],
                                        &want_v[kind == kAdam ? row * s.C : row], optimizer, gradients.data(),
                                        (long long)i * s.C, s.C);
            }
            const Device<Index> idx(ids, offset);
            const Device<gradX> device_gradients(gradients, offset);
            Device<floatX> table(before, offset);
            Device<float> first(m, offset), second(v, offset);
            Device<status_word> status(std::vector<status_word>{kStatusOk});
            OptimizerArguments<floatX, gradX> args = {};
            args.optimizer = optimizer;
            args.optimizer.first = first.pointer;
            args.optimizer.second = second.pointer;
            args.table = {table.pointer, s.rows, s.stride};
            args.idx = {idx.pointer, sizeof(Index) == 8};
            args.gradients = device_gradients.pointer;
            args.count = s.count;
            args.C = s.C;
            for (const auto &version : embedding_optimizer_versions<floatX, gradX>) {
                for (const int block_size : kGoodBlockSizes) {
                    args.status = block_size != 96 ? status.pointer : nullptr;
                    const cudaError_t error = version.launch(args, block_size, 0);
                    const size_t wrong = count_wrong(table.get(), want, 1e-6) +
                                         (is_adam(kind) ? count_wrong(first.get(), want_m, 1e-6)
                                                        : !first.holds(m)) +
                                         (kind != kSgd ? count_wrong(second.get(), want_v, 1e-6) : !second.holds(v));
                    const bool around = table.guards_intact() && first.guards_intact() && second.guards_intact();
                    expect(error == cudaSuccess && wrong == 0 && around,
                           "optimizer %d version %d %s C=%d block size %d: error %d, %zu wrong, guards %d", kind,
                           version.number, type_name<floatX>(), s.C, block_size, (int)error, wrong, around);
                    const status_word bad = args.status ? first_bad(s.count, s.rows) : kStatusOk;
                    expect(status.get()[0] == bad, "optimizer %d version %d: status", kind, version.number);
                    table.put(before), first.put(m), second.put(v);
                    status.put({kStatusOk});
                }
                for (const int block_size : kBadBlockSizes) {
                    expect_refused(version.launch(args, block_size, 0), cudaErrorInvalidValue, "block size",
                                   version.number, block_size);
                    expect(table.holds(before), "version %d wrote with block size %d", version.number, block_size);
                }
            }
        }
    }
}

static void test_no_work() {
    const int sizes[][2] = {{0, 4}, {3, 0}, {0, 0}};
    for (const auto &s : sizes) {
        UpdateArguments<half, half> update = {};
        update.count = s[0], update.C = s[1];
        OptimizerArguments<half, half> step = {};
        step.count = s[0], step.C = s[1];
        for (const int block_size : kGoodBlockSizes) {
            for (const auto &version : embedding_overwrite_versions<half, half>) {
                expect(version.launch(update, block_size, 0) == cudaSuccess, "overwrite %d, no work", version.number);
            }
            for (const auto &version : embedding_accumulate_versions<half, half>) {
                expect(version.launch(update, block_size, 0) == cudaSuccess, "accumulate %d, no work", version.number);
            }
            for (const auto &version : embedding_optimizer_versions<half, half>) {
                expect(version.launch(step, block_size, 0) == cudaSuccess, "optimizer %d, no work", version.number);
            }
        }
    }
}

int main() {
    test_updates<float, float, int>();
    test_updates<__nv_bfloat16, __nv_bfloat16, long long>();
    test_updates<half, float, int>();
    for (const OptimizerKind kind : {kSgd, kRowwiseAdagrad, kAdam, kRowwiseAdam}) {
        test_optimizer<float, float, int>(kind);
        test_optimizer<__nv_bfloat16, float, long long>(kind);
        test_optimizer<float, half, int>(kind);
    }
    test_no_work();
    return report_failures();
}
