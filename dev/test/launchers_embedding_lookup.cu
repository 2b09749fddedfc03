// Tests the launchers of embedding_lookup.cu without the library or the harness: every version, valid and invalid block
// sizes, no work, no status word, an empty table. Prints ok, or one line for each failure; the exit status is 0 or 1.
#define BOOKENDS_NO_MAIN
#include "../../embedding_lookup.cu"
#include "check.h"

using namespace bookends;

template <typename T>
static size_t count_wrong(const std::vector<T> &got, const std::vector<float> &want) {
    size_t wrong = 0;
    for (size_t i = 0; i < got.size(); i++) {
        const bool both_nan = std::isnan((float)got[i]) && std::isnan(want[i]);
        wrong += !both_nan && (float)got[i] != (float)(T)want[i];
    }
    return wrong;
}

// Everything but the launch, for gathers and bags.
template <typename floatX, typename outX, typename Index>
struct Problem {
    long long count, rows, stride, out_rows;
    int C;
    std::vector<Index> ids;
    Device<Index> idx;
    Device<floatX> table;
    Device<outX> out;
    Device<status_word> status;
    std::vector<float> want;
    status_word first_bad = kStatusOk;

    Problem(long long indices_, long long rows_, int C_, long long stride_, long long out_rows_, size_t offset)
        : count(indices_),
          rows(rows_),
          stride(stride_),
          out_rows(out_rows_),
          C(C_),
          ids(table_indices<Index>(count, rows)),
          idx(ids, offset),
          table(integers<floatX>((size_t)(rows * stride), 1, -16, 16), offset),
          out(Device<outX>::filled((size_t)(out_rows * C)), offset),
          status(std::vector<status_word>{kStatusOk}) {}

    void run(cudaError_t error, int version, int block_size, bool with_status) {
        expect(error == cudaSuccess, "version %d block size %d: error %d", version, block_size, (int)error);
        const size_t wrong = count_wrong(out.get(), want);
        const bool around = out.guards_intact() && status.guards_intact();
        expect(wrong == 0 && around, "version %d %s C=%d stride=%lld block size %d: %zu wrong, guards %d", version,
               type_name<floatX>(), C, stride, block_size, wrong, around);
        expect(status.get()[0] == (with_status ? first_bad : kStatusOk), "version %d: status %lld", version,
               (long long)status.get()[0]);
        out.put(out.filled(out.count));
        status.put({kStatusOk});
    }
};

template <typename floatX, typename outX, typename Index>
static void test_gather() {
    const int shapes[][4] = {{1, 1, 1, 1},    {13, 8, 10, 9},   {40, 24, 7, 24},
                             {35, 33, 4, 40}, {6, 520, 4, 520}, {8, 64, 0, 64}};
    for (const auto &s : shapes) {
        for (size_t offset : {0, 1}) {
            Problem<floatX, outX, Index> p(s[0], s[2], s[1], s[3], s[0], offset);
            const std::vector<floatX> values = p.table.get();
            for (long long i = 0; i < p.count; i++) {
                const bool good = row_in_table(p.ids[i], p.rows);
                if (!good && p.first_bad == kStatusOk) p.first_bad = (status_word)i;
                for (int c = 0; c < p.C; c++) p.want.push_back(good ? (float)values[p.ids[i] * p.stride + c] : NAN);
            }
            for (const auto &version : embedding_lookup_versions<floatX, outX>) {
                auto launch = [&](int block_size, bool with_status) {
                    return version.launch(p.out.pointer, {p.idx.pointer, sizeof(Index) == 8},
                                          {p.table.pointer, p.rows, p.stride},
                                          with_status ? p.status.pointer : nullptr, p.count, p.C, block_size, 0);
                };
                for (int block_size : kGoodBlockSizes) {
                    p.run(launch(block_size, block_size != 96), version.number, block_size, block_size != 96);
                }
                for (int block_size : kBadBlockSizes) {
                    expect_refused(launch(block_size, true), cudaErrorInvalidValue, "block size", version.number,
                                   block_size);
                    expect(p.out.untouched(), "version %d wrote with block size %d", version.number, block_size);
                }
            }
        }
    }
}

// Bags of 0, 1, 2, ... indices, and one of 1500.
template <typename floatX, typename outX, typename Index>
static void test_bags(BagMode mode) {
    const int shapes[][3] = {{1, 10, 1}, {8, 7, 9}, {33, 4, 40}, {520, 4, 520}, {64, 0, 64}, {2000, 3, 2000}};
    std::vector<Index> offsets = {0};
    for (int g = 0; g < 12; g++) offsets.push_back(offsets.back() + (g == 7 ? 1500 : g));
    const long long bags = (long long)offsets.size() - 1;
    for (const auto &s : shapes) {
        for (size_t offset : {0, 1}) {
            Problem<floatX, outX, Index> p(offsets.back(), s[1], s[0], s[2], bags, offset);
            const Device<Index> device_offsets(offsets, offset);
            const Device<long long> argmax(Device<long long>::filled((size_t)(bags * p.C)));
            const std::vector<floatX> values = p.table.get();
            BagArguments<floatX, outX> args = {};
            args.bags = {{p.ids.data(), sizeof(Index) == 8}, p.count, bags, {offsets.data(), sizeof(Index) == 8}, 0,
                         nullptr, 2, mode, nullptr, 1};
            std::vector<double> row(p.C);
            std::vector<long long> at(p.C), want_at;
            for (long long g = 0; g < bags; g++) {
                embedding_bag_cpu(row.data(), nullptr, at.data(), args.bags, g, values, p.rows, p.stride, p.C);
                for (int c = 0; c < p.C; c++) p.want.push_back((float)row[c]), want_at.push_back(at[c]);
            }
            for (long long i = p.count; i-- > 0;) {
                if (!row_in_table(p.ids[i], p.rows) && p.ids[i] != 2) p.first_bad = (status_word)i;
            }
            args.out = p.out.pointer;
            args.argmax = mode == kBagMax ? argmax.pointer : nullptr;
            args.table = {p.table.pointer, p.rows, p.stride};
            args.bags.idx.data = p.idx.pointer;
            args.bags.offsets.data = device_offsets.pointer;
            args.C = p.C;
            for (const auto &version : embedding_bag_versions<floatX, outX>) {
                for (int block_size : kGoodBlockSizes) {
                    args.status = block_size != 96 ? p.status.pointer : nullptr;
                    p.run(version.launch(args, block_size, 0), version.number, block_size, block_size != 96);
                    expect(mode != kBagMax || argmax.holds(want_at), "version %d: argmax", version.number);
                }
                for (int block_size : kBadBlockSizes) {
                    expect_refused(version.launch(args, block_size, 0), cudaErrorInvalidValue, "block size",
                                   version.number, block_size);
                    expect(p.out.untouched(), "version %d wrote with block size %d", version.number, block_size);
                }
            }
        }
    }
}

template <typename T>
static void test_no_work() {
    const int sizes[][2] = {{0, 4}, {3, 0}, {0, 0}};
    for (const auto &s : sizes) {
        for (int block_size : kGoodBlockSizes) {
            for (const auto &version : embedding_lookup_versions<T, T>) {
                expect(version.launch(nullptr, {nullptr, false}, {nullptr, 5, s[1]}, nullptr, s[0], s[1], block_size,
                                      0) == cudaSuccess,
                       "gather version %d, no work", version.number);
            }
            for (const auto &version : embedding_bag_versions<T, T>) {
                BagArguments<T, T> args = {};
                args.bags.bags = s[0];
                args.C = s[1];
                expect(version.launch(args, block_size, 0) == cudaSuccess, "bag version %d, no work", version.number);
            }
        }
    }
}

int main() {
    test_gather<float, float, int>();
    test_gather<__nv_bfloat16, __nv_bfloat16, long long>();
    test_gather<half, float, int>();
    for (BagMode mode : {kBagSum, kBagMean, kBagMax}) {
        test_bags<float, float, int>(mode);
        test_bags<__nv_bfloat16, __nv_bfloat16, long long>(mode);
        test_bags<half, float, int>(mode);
    }
    test_no_work<float>();
    test_no_work<__nv_bfloat16>();
    return report_failures();
}
