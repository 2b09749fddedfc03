// Tests the launchers of embedding_lookup_backward.cu without the library or the harness: every version, valid and
// invalid block sizes, no work, no status word, an empty table. Prints ok, or one line for each failure; the exit
// status is 0 or 1.
#define BOOKENDS_NO_MAIN
#include "../../embedding_lookup_backward.cu"
#include "check.h"

using namespace bookends;

// Bags of 0, 1, 2, ... indices, and one of 300. Index 2 is padding, and -1 and 9 are bad.
template <typename floatX, typename gradX, typename Index>
struct Problem {
    int C;
    long long rows;
    std::vector<Index> offsets = {0}, ids;
    std::vector<long long> argmax;
    std::vector<floatX> dout;
    std::vector<gradX> before;
    std::vector<double> sums;
    std::vector<long long> distinct;
    status_word first_bad = kStatusOk;
    Bags bags = {};

    Problem(int C_, long long rows_, BagMode mode) : C(C_), rows(rows_) {
        for (int g = 0; g < 12; g++) offsets.push_back(offsets.back() + (g == 7 ? 300 : g));
        bags.count = offsets.back();
        bags.bags = (long long)offsets.size() - 1;
        for (float id : integers<float>((size_t)bags.count, 3, -1, 9)) ids.push_back((Index)id);
        dout = integers<floatX>((size_t)(bags.bags * C), 3, -2, 2);
        before = integers<gradX>((size_t)(rows * C), 3, -8, 8);
        for (long long g = 0; g < bags.bags; g++) {
            for (int c = 0; c < C; c++) argmax.push_back(offsets[g] + (offsets[g + 1] - offsets[g]) * c / C);
        }
        bags.idx = {ids.data(), sizeof(Index) == 8};
        bags.offsets = {offsets.data(), sizeof(Index) == 8};
        bags.padding = 2;
        bags.mode = mode;
        sums.assign((size_t)(rows * C), 0.0);
        std::vector<double> magnitudes(C);
        for (long long g = 0; g < bags.bags; g++) {
            for (long long i = offsets[g]; i < offsets[g + 1]; i++) {
                if (bags.is_padding(ids[i])) continue;
                if (!row_in_table(ids[i], rows)) {
                    first_bad = std::min(first_bad, (status_word)i);
                    continue;
                }
                embedding_bag_backward_cpu(&sums[ids[i] * C], magnitudes.data(), bags, g, i, bag_size_cpu(bags, g),
                                           dout.data(), argmax.data(), C);
                distinct.push_back(ids[i]);
            }
        }
        std::sort(distinct.begin(), distinct.end());
        distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
    }
};

template <typename floatX, typename gradX, typename Index>
static void test(BagMode mode) {
    const int shapes[][2] = {{1, 9}, {7, 9}, {264, 4}, {64, 0}, {520, 9}};
    for (const auto &s : shapes) {
        const Problem<floatX, gradX, Index> p(s[0], s[1], mode);
        const int C = p.C;
        for (size_t offset : {0, 1}) {
            const Device<Index> idx(p.ids, offset), offsets(p.offsets, offset);
            const Device<floatX> dout(p.dout, offset);
            const Device<long long> argmax(p.argmax), indices(Device<long long>::filled(p.ids.size()));
            const Device<long long> distinct(std::vector<long long>{-7});
            Device<gradX> dense(p.before, offset), sparse(Device<gradX>::filled(p.ids.size() * C), offset);
            const Device<status_word> status(std::vector<status_word>{kStatusOk});
            BagBackwardArguments<floatX, gradX> args = {};
            args.dout = dout.pointer;
            args.argmax = mode == kBagMax ? argmax.pointer : nullptr;
            args.table = {nullptr, p.rows, C};
            args.bags = p.bags;
            args.bags.idx.data = idx.pointer;
            args.bags.offsets.data = offsets.pointer;
            args.C = C;
            const Device<char> workspace(
                Device<char>::filled(embedding_bag_backward_workspace_bytes(args.bags, p.rows, C)));
            args.workspace = workspace.pointer;
            auto check = [&](int version, int block_size, bool with_status, cudaError_t error, const char *what) {
                expect(error == cudaSuccess, "version %d block size %d: error %d", version, block_size, (int)error);
                const status_word word = status.get()[0];
                expect(word == (with_status ? p.first_bad : kStatusOk), "version %d: status %lld", version,
                       (long long)word);
                const bool around = dense.guards_intact() && sparse.guards_intact() && status.guards_intact() &&
                                    workspace.guards_intact() && indices.guards_intact() && distinct.guards_intact();
                expect(around, "version %d C %d block size %d: wrote outside its arrays (%s)", version, C, block_size,
                       what);
            };
            for (const auto &version : embedding_bag_backward_versions<floatX, gradX>) {
                for (int block_size : kGoodBlockSizes) {
                    const bool with_status = block_size != 96;
                    args.status = with_status ? status.pointer : nullptr;
                    args.dtable = dense.pointer;
                    args.indices = args.distinct = nullptr;
                    for (bool overwrite : {false, true}) {
                        args.overwrite = overwrite;
                        dense.put(p.before);
                        const_cast<Device<status_word> &>(status).put({kStatusOk});
                        check(version.number, block_size, with_status, version.launch(args, block_size, 0), "dense");
                        const std::vector<gradX> got = dense.get();
                        size_t wrong = 0;
                        for (size_t i = 0; i < got.size(); i++) {
                            const double want = p.sums[i] + (overwrite ? 0.0 : (double)(float)p.before[i]);
                            const double slack = mode == kBagMean ? 1e-4 : 0;  // for a division; gradX is float then
                            const double rounded = (double)(float)(gradX)(float)want;
                            wrong += !(fabs((double)(float)got[i] - rounded) <= slack);
                        }
                        expect(wrong == 0, "version %d %s C %d block size %d: %zu wrong", version.number,
                               type_name<gradX>(), C, block_size, wrong);
                    }
                    if (version.number == 1) continue;
                    args.dtable = sparse.pointer;
                    args.indices = indices.pointer;
                    args.distinct = distinct.pointer;
                    const_cast<Device<status_word> &>(status).put({kStatusOk});
                    check(version.number, block_size, with_status, version.launch(args, block_size, 0), "sparse");
                    const long long n = distinct.get()[0];
                    expect(n == (long long)p.distinct.size(), "version %d: %lld distinct rows", version.number, n);
                    const std::vector<long long> rows = indices.get();
                    const bool same = std::equal(p.distinct.begin(), p.distinct.end(), rows.begin());
                    expect(same, "version %d: other rows", version.number);
                }
                args.dtable = dense.pointer;
                args.indices = args.distinct = nullptr;
                dense.put(p.before);
                for (int block_size : kBadBlockSizes) {
                    expect_refused(version.launch(args, block_size, 0), cudaErrorInvalidValue, "block size",
                                   version.number, block_size);
                    expect(dense.holds(p.before), "version %d wrote with block size %d", version.number, block_size);
                }
            }
            args.indices = indices.pointer;
            args.distinct = distinct.pointer;
            expect_refused(embedding_bag_backward1(args, 128, 0), cudaErrorNotSupported, "sparse", 1, 128);
            args.bags.count = 1ll << 31;
            expect_refused(embedding_bag_backward2(args, 128, 0), cudaErrorInvalidValue, "2^31 indices", 2, 128);
        }
    }
}

static void test_no_work() {
    const Device<char> workspace(Device<char>::filled(1 << 16));
    const Device<long long> distinct(std::vector<long long>{-7}), indices(std::vector<long long>{-7});
    for (const auto &version : embedding_bag_backward_versions<float, float>) {
        BagBackwardArguments<float, float> args = {};
        args.workspace = workspace.pointer;
        args.table.rows = 5;
        expect(version.launch(args, 128, 0) == cudaSuccess, "version %d, nothing wanted", version.number);
        float unused = 0;
        args.dtable = &unused;
        expect(version.launch(args, 128, 0) == cudaSuccess, "version %d, C and count of 0", version.number);
        if (version.number == 1) continue;
        args.indices = indices.pointer;
        args.distinct = distinct.pointer;
        expect(version.launch(args, 128, 0) == cudaSuccess, "version %d, sparse, count of 0", version.number);
        expect(distinct.get()[0] == 0, "version %d: distinct of no indices", version.number);
    }
}

int main() {
    for (BagMode mode : {kBagSum, kBagMean, kBagMax}) {
        test<float, float, int>(mode);
        test<half, float, long long>(mode);
    }
    test<__nv_bfloat16, __nv_bfloat16, long long>(kBagMax);
    test_no_work();
    return report_failures();
}
