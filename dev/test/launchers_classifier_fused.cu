// Calls the launchers of classifier_fused.cu directly, as programs do that copy the file: every version, odd block
// sizes and those that are refused, every choice of outputs, no work. Exit status 0 if all is as it should be.
#define BOOKENDS_NO_MAIN
#include "../../classifier_fused.cu"
#include "check.h"

using namespace bookends;

// Rows of one logit for each of four kinds of columns, so that the sums are known without adding up a row.
template <typename T>
struct Problem {
    int N, V, P;
    ClassifierOptions options;
    std::vector<T> before;
    std::vector<int> target;
    Device<T> logits, dlogits, probs;
    Device<float> losses, lse;
    Device<int> correct, targets;
    Device<status_word> status;

    static constexpr float kValues[4] = {0.0f, 1.0f, -2.0f, 0.5f};
    static float logit(int row, int j) { return kValues[(row + j) % 4]; }

    Problem(int own_N, int own_V, int own_P, ClassifierOptions wanted, size_t offset)
        : N(own_N),
          V(own_V),
          P(own_P),
          options(wanted),
          before((size_t)N * P, (T)NAN),
          target(N),
          logits(Device<T>::filled((size_t)N * P), offset),
          dlogits(Device<T>::filled((size_t)N * P), offset),
          probs(Device<T>::filled((size_t)N * P), offset),
          losses(Device<float>::filled(N)),
          lse(Device<float>::filled(N)),
          correct(Device<int>::filled(N)),
          targets(Device<int>::filled(N)),
          status(std::vector<status_word>{kStatusOk}) {
        for (int row = 0; row < N; row++) {
            for (int j = 0; j < V; j++) before[(size_t)row * P + j] = (T)logit(row, j);
            target[row] = row % 5 == 2 ? options.ignore_index : row % 5 == 3 ? V + row : V == 0 ? 0 : (row * 7 + 1) % V;
        }
        targets.put(target);
        reset();
    }
    void reset() {
        logits.put(before);
        for (Device<T> *matrix : {&dlogits, &probs}) matrix->put(matrix->filled(matrix->count));
        for (Device<float> *vector : {&losses, &lse}) vector->put(vector->filled(N));
        correct.put(correct.filled(N));
        status.put({kStatusOk});
    }
    // outputs: a bit for each of dlogits, losses, lse, probs and correct; in_place: dlogits is logits.
    cudaError_t launch(ClassifierFused<T> launcher, int block_size, int outputs, bool in_place, int rows, int columns,
                       int pitch) {
        return launcher(!(outputs & 1) ? nullptr
                        : in_place     ? logits.pointer
                                       : dlogits.pointer,
                        outputs & 2 ? losses.pointer : nullptr, outputs & 4 ? lse.pointer : nullptr,
                        outputs & 8 ? probs.pointer : nullptr, outputs & 16 ? correct.pointer : nullptr, logits.pointer,
                        targets.pointer, nullptr, block_size == 96 ? nullptr : status.pointer, rows, columns, pitch,
                        options, block_size, 0);
    }
    bool untouched() {
        return logits.holds(before) && dlogits.untouched() && probs.untouched() && losses.untouched() &&
               lse.untouched() && correct.untouched();
    }
    static bool near(double got, double want, double relative) {
        if (std::isnan(want)) return std::isnan(got);
        return fabs(got - want) <= relative * fabs(want) + 2e-6 * relative * 1e5;
    }
    size_t count_wrong(int outputs, bool in_place) {
        const double element = sizeof(T) == 4 ? 1e-5 : 1.0 / 128;
        const std::vector<T> d = in_place ? logits.get() : dlogits.get(), p = probs.get();
        const std::vector<float> loss = losses.get(), log_sum = lse.get();
        const std::vector<int> right = correct.get();
        const double eps = options.label_smoothing;
        size_t wrong = 0;
        for (int row = 0; row < N; row++) {
            double total = 0, sum = 0, most = -INFINITY;
            int first = -1;
            for (int kind = 0; kind < 4; kind++) {  // the columns with this logit
                const int begin = (kind - row % 4 + 4) % 4, count = begin < V ? ceil_div(V - begin, 4) : 0;
                total += count * exp(kValues[kind]);
                sum += count * (double)kValues[kind];
                if (count > 0 && kValues[kind] > most) most = kValues[kind], first = begin;
            }
            const bool ignored = target[row] == options.ignore_index, bad = !ignored && target[row] >= V;
            const double known = log(total), at = ignored || bad ? 0 : logit(row, target[row]);
            const double expected = ignored ? 0 : bad ? NAN : known - (1 - eps) * at - (eps ? eps * sum / V : 0);
            if (outputs & 2) wrong += !near(loss[row], expected, 1e-5);
            if (outputs & 4) wrong += !near(log_sum[row], V ? known : NAN, 1e-5);
            if (outputs & 16) wrong += right[row] != (!ignored && !bad && first == target[row]);
            for (int j = 0; j < P; j++) {
                const size_t i = (size_t)row * P + j;
                const double probability = j < V ? exp(logit(row, j)) / total : 0;
                double gradient = probability - (j == target[row] ? 1 - eps : 0) - eps / V;
                gradient = ignored || j >= V ? 0 : bad ? NAN : gradient;
                if (outputs & 1) wrong += !near((float)d[i], gradient, element);
                if (outputs & 8) wrong += !near((float)p[i], probability, element);
            }
        }
        return wrong + !(outputs & 1 ? true : dlogits.untouched()) + !(outputs & 8 ? true : probs.untouched()) +
               !(outputs & 2 ? true : losses.untouched()) + !(outputs & 4 ? true : lse.untouched()) +
               !(outputs & 16 ? true : correct.untouched());
    }
    void check(int version, int block_size, int outputs, bool in_place) {
        const size_t wrong = count_wrong(outputs, in_place && outputs & 1);
        const bool around = logits.guards_intact() && dlogits.guards_intact() && probs.guards_intact() &&
                            losses.guards_intact() && lse.guards_intact() && correct.guards_intact() &&
                            status.guards_intact();
        expect(wrong == 0 && around,
               "version %d %s N=%d V=%d P=%d block size %d outputs %d in place %d: %zu wrong, guards %d", version,
               type_name<T>(), N, V, P, block_size, outputs, in_place, wrong, around);
        status_word first_bad = kStatusOk;
        for (int row = N - 1; row >= 0; row--) {
            if (target[row] != options.ignore_index && target[row] >= V) first_bad = row;
        }
        expect(status.get()[0] == (block_size == 96 ? kStatusOk : first_bad), "version %d: status %lld", version,
               (long long)status.get()[0]);
        reset();
    }
};

template <typename T>
static void test_results() {
    ClassifierOptions smoothed;
    smoothed.label_smoothing = 0.25f;
    const int shapes[][3] = {{1, 1, 1}, {9, 5, 8}, {6, 203, 203}, {5, 1027, 1031}, {2, 20483, 20485}, {4, 0, 3}};
    for (const auto &s : shapes) {
        for (size_t offset : {0, 1}) {
            Problem<T> problem(s[0], s[1], s[2], s[1] % 2 ? smoothed : ClassifierOptions(), offset);
            for (const auto &version : classifier_fused_versions<T>) {
                int number = 0;
                for (int block_size : kGoodBlockSizes) {
                    for (int outputs : {31, 3, 1, 2, 0, 9, 22}) {
                        if (s[1] > 1000 && (outputs + block_size / 32) % 7 != 0) continue;  // it takes a while
                        const bool in_place = number++ % 2 == 0;
                        const cudaError_t error =
                            problem.launch(version.launch, block_size, outputs, in_place, s[0], s[1], s[2]);
                        expect(error == cudaSuccess, "version %d block size %d: error %d", version.number, block_size,
                               (int)error);
                        problem.check(version.number, block_size, outputs, in_place);
                    }
                }
                for (int block_size : kBadBlockSizes) {
                    expect_refused(problem.launch(version.launch, block_size, 31, false, s[0], s[1], s[2]),
                                   cudaErrorInvalidValue, "block size", version.number, block_size);
                    expect(problem.untouched(), "version %d wrote with block size %d", version.number, block_size);
                }
            }
        }
    }
}

template <typename T>
static void test_refusals() {
    Problem<T> problem(4, 20, 24, {}, 0);
    for (const auto &version : classifier_fused_versions<T>) {
        auto launch = [&](int N, int V, int P) { return problem.launch(version.launch, 64, 31, false, N, V, P); };
        expect_refused(launch(-1, 20, 24), cudaErrorInvalidValue, "N", version.number, -1);
        expect_refused(launch(4, -1, 24), cudaErrorInvalidValue, "V", version.number, -1);
        expect_refused(launch(4, 20, 19), cudaErrorInvalidValue, "P", version.number, 19);
        expect_refused(launch(0, 20, 19), cudaErrorInvalidValue, "P without rows", version.number, 19);
        problem.options.label_smoothing = 1.5f;
        expect_refused(launch(4, 20, 24), cudaErrorInvalidValue, "label smoothing in tenths", version.number, 15);
        problem.options.label_smoothing = 0;
        expect(problem.untouched(), "version %d wrote although it refused", version.number);
        for (int block_size : kGoodBlockSizes) {
            const cudaError_t error = version.launch(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
                                                     nullptr, nullptr, 0, 20, 24, {}, block_size, 0);
            expect(error == cudaSuccess, "version %d, no rows: error %d", version.number, (int)error);
        }
    }
}

// The number of targets that count, and the sum of losses, of as many rows as a block has threads, less, and more.
static void test_totals() {
    for (int N : {0, 1, 31, 33, 1000, 1024, 1025, 3001}) {
        std::vector<int> targets(N);
        std::vector<float> losses(N);
        float rows = 10, total = 100;
        for (int i = 0; i < N; i++) {
            targets[i] = i % 3 == 0 ? -100 : i;
            losses[i] = (float)(i % 7);
            rows += i % 3 != 0;
            total += losses[i];
        }
        const Device<int> t(targets);
        const Device<float> l(losses);
        for (int wanted = 0; wanted < 4; wanted++) {
            const Device<float> sums(std::vector<float>{10, 100});
            const cudaError_t error =
                classifier_totals(wanted & 1 ? sums.pointer : nullptr, wanted & 2 ? sums.pointer + 1 : nullptr,
                                  t.pointer, l.pointer, N, -100, 0);
            const std::vector<float> got = sums.get();
            expect(error == cudaSuccess && got[0] == (wanted & 1 ? rows : 10) && got[1] == (wanted & 2 ? total : 100) &&
                       sums.guards_intact(),
                   "totals of %d rows, wanted %d: %g and %g, error %d", N, wanted, got[0], got[1], (int)error);
        }
        if (N == 0) continue;
        const Device<float> sums(std::vector<float>{10, 100});
        expect(classifier_totals(sums.pointer, nullptr, nullptr, nullptr, N, -100, 0) == cudaErrorInvalidValue &&
                   classifier_totals(nullptr, sums.pointer, nullptr, nullptr, N, -100, 0) == cudaErrorInvalidValue &&
                   classifier_totals(sums.pointer, sums.pointer, t.pointer, l.pointer, -1, -100, 0) ==
                       cudaErrorInvalidValue &&
                   sums.holds({10, 100}),
               "totals without their inputs");
    }
}

int main() {
    test_results<float>();
    test_results<__nv_bfloat16>();
    test_refusals<float>();
    test_refusals<__nv_bfloat16>();
    test_totals();
    return report_failures();
}
