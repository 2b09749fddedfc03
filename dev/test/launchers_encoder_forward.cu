// Tests the launchers of encoder_forward.cu without the library or the harness: every version, valid and invalid block
// sizes, no work, no status word, no vocabulary. Prints ok, or one line for each failure; the exit status is 0 or 1.
#define BOOKENDS_NO_MAIN
#include "../../encoder_forward.cu"
#include "check.h"

using namespace bookends;

template <typename T>
struct Problem {
    int B, T_, C, V;
    Device<T> out, wte, wpe;
    Device<int> inp;
    Device<status_word> status;
    std::vector<T> want;
    status_word first_bad = kStatusOk;

    // Small numbers, whose sums are exact in each type. Every 11th id is bad.
    Problem(int own_B, int own_T, int own_C, int own_V, size_t offset)
        : B(own_B),
          T_(own_T),
          C(own_C),
          V(own_V),
          out(Device<T>::filled((size_t)B * T_ * C), offset),
          wte(small((size_t)V * C, 1), offset),
          wpe(small((size_t)T_ * C, 2), offset),
          inp(ids(B * T_, V)),
          status(std::vector<status_word>{kStatusOk}) {
        const std::vector<T> table = wte.get(), positions = wpe.get();
        const std::vector<int> id = inp.get();
        for (int bt = 0; bt < B * T_; bt++) {
            const bool good = id[bt] >= 0 && id[bt] < V;
            if (!good && first_bad == kStatusOk) first_bad = bt;
            for (int c = 0; c < C; c++) {
                want.push_back(good ? (T)((float)table[id[bt] * C + c] + (float)positions[bt % T_ * C + c]) : (T)NAN);
            }
        }
    }
    static std::vector<T> small(size_t count, uint64_t seed) {
        Random random = {seed};
        std::vector<T> values(count);
        for (T &value : values) value = (T)((float)random.below(33) - 16.0f);
        return values;
    }
    static std::vector<int> ids(int count, int V) {
        Random random = {3};
        std::vector<int> values(count);
        for (int i = 0; i < count; i++) values[i] = V == 0 || i % 11 == 10 ? V + i : (int)random.below(V);
        return values;
    }
    cudaError_t launch(EncoderForward<T> launcher, int block_size, bool with_status = true) {
        return launcher(out.pointer, inp.pointer, wte.pointer, wpe.pointer, with_status ? status.pointer : nullptr, B,
                        T_, C, V, block_size, 0);
    }
    void check(int version, int block_size, bool with_status) {
        const std::vector<T> got = out.get();
        size_t wrong = 0;
        for (size_t i = 0; i < got.size(); i++) {
            const bool both_nan = std::isnan((float)got[i]) && std::isnan((float)want[i]);
            if (!both_nan && (float)got[i] != (float)want[i]) wrong++;
        }
        const bool around = out.guards_intact() && status.guards_intact();
        expect(wrong == 0 && around, "version %d %s B=%d T=%d C=%d V=%d block size %d: %zu wrong, guards %d", version,
               type_name<T>(), B, T_, C, V, block_size, wrong, around);
        expect(status.get()[0] == (with_status ? first_bad : kStatusOk), "version %d: status %lld", version,
               (long long)status.get()[0]);
        out.put(out.filled(out.count));
        status.put({kStatusOk});
    }
};

template <typename T>
static void test_results() {
    const int shapes[][4] = {{1, 1, 1, 1}, {2, 3, 8, 10}, {4, 5, 24, 7}, {5, 7, 33, 4}, {3, 2, 520, 4}, {8, 1, 64, 0}};
    for (const auto &s : shapes) {
        for (size_t offset : {0, 1}) {
            Problem<T> problem(s[0], s[1], s[2], s[3], offset);
            for (const auto &version : encoder_forward_versions<T>) {
                for (int block_size : kGoodBlockSizes) {
                    const bool with_status = block_size != 96;
                    const cudaError_t error = problem.launch(version.launch, block_size, with_status);
                    expect(error == cudaSuccess, "version %d block size %d: error %d", version.number, block_size,
                           (int)error);
                    problem.check(version.number, block_size, with_status);
                }
                for (int block_size : kBadBlockSizes) {
                    expect_refused(problem.launch(version.launch, block_size), cudaErrorInvalidValue, "block size",
                                   version.number, block_size);
                    expect(problem.out.untouched(), "version %d wrote with block size %d", version.number, block_size);
                }
            }
        }
    }
}

// Grids with one block more than their side along y or z can have: 65536 of 32 threads, or of 16, for versions 4 and 5.
static void test_edges_of_the_grid() {
    const int shapes[][4] = {{2097151, 1, 1, 5}, {1, 1, 4194304, 1}, {1, 1, 8388608, 1}};
    for (const auto &s : shapes) {
        Problem<float> problem(s[0], s[1], s[2], s[3], 0);
        for (const auto &version : encoder_forward_versions<float>) {
            const cudaError_t error = problem.launch(version.launch, 32);
            expect(error == cudaSuccess, "version %d B=%d C=%d: error %d", version.number, s[0], s[2], (int)error);
            problem.check(version.number, 32, true);
        }
    }
}

template <typename T>
static void test_no_work() {
    for (const auto &version : encoder_forward_versions<T>) {
        const int sizes[][3] = {{0, 3, 4}, {3, 0, 4}, {3, 4, 0}, {0, 0, 0}, {INT32_MAX, INT32_MAX, 0}};
        for (const auto &s : sizes) {
            for (int block_size : kGoodBlockSizes) {
                Device<T> out(Device<T>::filled(64));
                for (T *pointer : {(T *)nullptr, out.pointer}) {
                    const cudaError_t error =
                        version.launch(pointer, nullptr, nullptr, nullptr, nullptr, s[0], s[1], s[2], 5, block_size, 0);
                    expect(error == cudaSuccess && out.untouched(), "version %d, no work: error %d", version.number,
                           (int)error);
                }
            }
        }
    }
}

int main() {
    test_results<float>();
    test_results<__nv_bfloat16>();
    test_edges_of_the_grid();
    test_no_work<float>();
    test_no_work<__nv_bfloat16>();
    return report_failures();
}
