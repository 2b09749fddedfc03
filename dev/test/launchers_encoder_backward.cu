// Tests the launchers of encoder_backward.cu without the library or the harness: every version, valid and invalid block
// sizes, gradients that are not wanted, no work. Prints ok, or one line for each failure; the exit status is 0 or 1.
#define BOOKENDS_NO_MAIN
#include "../../encoder_backward.cu"
#include "check.h"

using namespace bookends;

template <typename floatX, typename gradX>
struct Problem {
    int B, T, C, V;
    std::vector<gradX> dwte_before, dwpe_before;
    Device<gradX> dwte, dwpe;
    Device<floatX> dout;
    Device<int> inp;
    Device<status_word> status;
    Device<char> workspace;
    std::vector<float> dwte_sums, dwpe_sums;
    status_word first_bad = kStatusOk;

    // Every 11th id is bad, every third one 0.
    Problem(int own_B, int own_T, int own_C, int own_V, size_t offset)
        : B(own_B),
          T(own_T),
          C(own_C),
          V(own_V),
          dwte_before(integers<gradX>((size_t)V * C, 1, -1, 1)),
          dwpe_before(integers<gradX>((size_t)T * C, 2, -1, 1)),
          dwte(dwte_before, offset),
          dwpe(dwpe_before, offset),
          dout(integers<floatX>((size_t)B * T * C, 3, -1, 1), offset),
          inp(ids(B * T, V)),
          status(std::vector<status_word>{kStatusOk}),
          workspace(Device<char>::filled(std::max(encoder_backward4_workspace_bytes(B, T, C, V),
                                                  encoder_backward_workspace_bytes(B, T, C, V))),
                    offset),
          dwte_sums((size_t)V * C),
          dwpe_sums((size_t)T * C) {
        const std::vector<floatX> d = dout.get();
        const std::vector<int> id = inp.get();
        for (int bt = 0; bt < B * T; bt++) {
            if (id[bt] < 0 || id[bt] >= V) {
                if (first_bad == kStatusOk) first_bad = bt;
                continue;
            }
            for (int c = 0; c < C; c++) {
                dwte_sums[id[bt] * C + c] += (float)d[bt * C + c];
                dwpe_sums[bt % T * C + c] += (float)d[bt * C + c];
            }
        }
    }
    static std::vector<int> ids(int count, int V) {
        Random random = {4};
        std::vector<int> values(count);
        for (int i = 0; i < count; i++) {
            values[i] = V == 0 || i % 11 == 10 ? -1 - i : i % 3 == 0 ? 0 : (int)random.below(V);
        }
        return values;
    }
    cudaError_t launch(EncoderBackward<floatX, gradX> launcher, int block_size, GradientStore store,
                       bool want_dwte = true, bool want_dwpe = true) {
        return launcher(want_dwte ? dwte.pointer : nullptr, want_dwpe ? dwpe.pointer : nullptr, dout.pointer,
                        inp.pointer, block_size == 96 ? nullptr : status.pointer, workspace.pointer, B, T, C, V, store,
                        block_size, 0);
    }
    static size_t count_wrong(const Device<gradX> &gradient, const std::vector<gradX> &before,
                              const std::vector<float> &sums, bool wanted, bool overwrite) {
        const std::vector<gradX> got = gradient.get();
        size_t wrong = 0;
        for (size_t i = 0; i < got.size(); i++) {
            const float want = !wanted ? (float)before[i] : sums[i] + (overwrite ? 0.0f : (float)before[i]);
            if ((float)got[i] != want) wrong++;
        }
        return wrong;
    }
    void check(int version, int block_size, GradientStore store, bool want_dwte, bool want_dwpe) {
        const size_t wrong = count_wrong(dwte, dwte_before, dwte_sums, want_dwte, store.overwrite) +
                             count_wrong(dwpe, dwpe_before, dwpe_sums, want_dwpe, store.overwrite);
        const bool around =
            dwte.guards_intact() && dwpe.guards_intact() && status.guards_intact() && workspace.guards_intact();
        expect(wrong == 0 && around,
               "version %d %s/%s B=%d T=%d C=%d V=%d block size %d overwrite %d: %zu wrong, guards %d", version,
               type_name<floatX>(), type_name<gradX>(), B, T, C, V, block_size, store.overwrite, wrong, around);
        const bool looked = (want_dwte || want_dwpe) && block_size != 96;
        expect(status.get()[0] == (looked ? first_bad : kStatusOk), "version %d: status %lld", version,
               (long long)status.get()[0]);
        reset();
    }
    void reset() {
        dwte.put(dwte_before);
        dwpe.put(dwpe_before);
        status.put({kStatusOk});
    }
    bool untouched() { return dwte.holds(dwte_before) && dwpe.holds(dwpe_before) && workspace.untouched(); }
};

template <typename floatX, typename gradX>
static void test_results() {
    const int shapes[][4] = {{1, 1, 1, 1},  {2, 3, 8, 10},   {40, 3, 24, 7},
                             {5, 7, 33, 4}, {130, 1, 40, 2}, {8, 1, 64, 0}};
    for (const auto &s : shapes) {
        for (size_t offset : {0, 1}) {
            Problem<floatX, gradX> problem(s[0], s[1], s[2], s[3], offset);
            for (const auto &version : encoder_backward_versions<floatX, gradX>) {
                for (int block_size : kBadBlockSizes) {
                    expect_refused(problem.launch(version.launch, block_size, {true, false, 0}), cudaErrorInvalidValue,
                                   "block size", version.number, block_size);
                    problem.workspace.put(problem.workspace.filled(problem.workspace.count));
                    expect(problem.untouched(), "version %d wrote with block size %d", version.number, block_size);
                }
                for (int block_size : kGoodBlockSizes) {
                    for (int wanted = 0; wanted < 4; wanted++) {
                        const GradientStore store = {(wanted + block_size / 32) % 2 == 0, false, 0};
                        const cudaError_t error =
                            problem.launch(version.launch, block_size, store, wanted & 1, wanted & 2);
                        expect(error == cudaSuccess, "version %d block size %d: error %d", version.number, block_size,
                               (int)error);
                        problem.check(version.number, block_size, store, wanted & 1, wanted & 2);
                    }
                }
            }
        }
    }
}

// Rounding of 16 bits at random is refused by the versions that round at every addition; too many positions, by all.
template <typename floatX, typename gradX>
static void test_refusals() {
    Problem<floatX, gradX> problem(2, 3, 8, 10, 0);
    for (const auto &version : encoder_backward_versions<floatX, gradX>) {
        problem.workspace.put(problem.workspace.filled(problem.workspace.count));
        if (version.number <= 3 && sizeof(gradX) == 2) {
            expect_refused(problem.launch(version.launch, 64, {true, true, 1}), cudaErrorNotSupported, "stochastic",
                           version.number, 1);
            expect(problem.untouched(), "version %d wrote although it refused", version.number);
        }
        for (int T : {INT32_MAX, 1 << 30}) {
            const cudaError_t error =
                version.launch(problem.dwte.pointer, problem.dwpe.pointer, problem.dout.pointer, problem.inp.pointer,
                               nullptr, problem.workspace.pointer, 2, T, 8, 10, {true, false, 0}, 64, 0);
            expect_refused(error, cudaErrorInvalidValue, "T", version.number, T);
            expect(problem.untouched(), "version %d wrote although it refused", version.number);
        }
    }
}

template <typename floatX, typename gradX>
static void test_no_work() {
    const int sizes[][3] = {{0, 3, 4}, {3, 0, 4}, {3, 4, 0}, {0, 0, 0}, {0, INT32_MAX, INT32_MAX}};
    for (const auto &version : encoder_backward_versions<floatX, gradX>) {
        for (const auto &s : sizes) {
            for (int block_size : kGoodBlockSizes) {
                auto launch = [&](gradX *dwte, gradX *dwpe, bool overwrite) {
                    return version.launch(dwte, dwpe, nullptr, nullptr, nullptr, nullptr, s[0], s[1], s[2], 5,
                                          {overwrite, false, 0}, block_size, 0);
                };
                Device<gradX> dwte(Device<gradX>::filled(64)), dwpe(Device<gradX>::filled(64));
                expect(launch(nullptr, nullptr, true) == cudaSuccess &&
                           launch(nullptr, nullptr, false) == cudaSuccess &&
                           launch(dwte.pointer, dwpe.pointer, false) == cudaSuccess && dwte.untouched() &&
                           dwpe.untouched(),
                       "version %d, no work", version.number);
                if (s[1] == INT32_MAX) continue;
                // Overwriting zeroes all the same.
                const cudaError_t error = launch(dwte.pointer, dwpe.pointer, true);
                bool right = error == cudaSuccess && dwte.guards_intact() && dwpe.guards_intact();
                for (Device<gradX> *gradient : {&dwte, &dwpe}) {
                    const size_t zeros = (size_t)(gradient == &dwte ? 5 : s[1]) * s[2];
                    std::vector<gradX> want = gradient->filled(64);
                    std::fill(want.begin(), want.begin() + zeros, (gradX)0.0f);
                    right = right && gradient->holds(want);
                }
                expect(right, "version %d, B=%d T=%d C=%d: overwriting with nothing, error %d", version.number, s[0],
                       s[1], s[2], (int)error);
            }
        }
    }
}

template <typename floatX, typename gradX>
static void test_all() {
    test_results<floatX, gradX>();
    test_refusals<floatX, gradX>();
    test_no_work<floatX, gradX>();
}

int main() {
    test_all<float, float>();
    test_all<__nv_bfloat16, float>();
    test_all<__nv_bfloat16, __nv_bfloat16>();
    return report_failures();
}
