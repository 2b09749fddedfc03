// Calls the launcher of lm_head.cu directly, as programs do that copy the file: every version's plan, pointers that are
// not as planned, no work, sizes and versions that are refused. Exit status 0 if all is as it should be.
#define BOOKENDS_NO_MAIN
#include "../../lm_head.cu"
#include "check.h"

#include <array>

using namespace bookends;

template <typename floatX, typename gradX>
struct Problem {
    static constexpr LmHeadType type = sizeof(floatX) == 4 ? kFp32 : kBf16;
    int N, C, V;
    LmHead head;
    cudaError_t created;
    LmHeadLauncher<floatX, gradX> launcher;
    Device<floatX> dX, X, W, bias;
    Device<gradX> dW, dbias;
    Device<float> losses, lse;
    Device<int> targets;
    Device<status_word> status;
    Device<char> workspace;

    static std::vector<floatX> small(size_t count, uint64_t seed) {
        Random random = {seed};
        std::vector<floatX> values(count);
        for (floatX &value : values) value = (floatX)(((float)random.below(33) - 16.0f) / 16.0f);
        return values;
    }
    static LmHeadProblem problem(int N, int C, int V, int version) {
        LmHeadProblem p;
        p.N = N, p.C = C, p.V = V;
        p.type = type;
        p.bias = p.dbias = true;
        p.memory = 64 << 20;
        p.way = find_version(lm_head_versions<floatX, gradX>, version)->properties.way;
        return p;
    }
    size_t workspace_bytes(int version) {
        launcher = find_version(lm_head_versions<floatX, gradX>, version)->launch;
        created = lm_head_create(head, problem(N, C, V, version), ClassifierOptions());
        return created == cudaSuccess ? head.plan.bytes + kWorkspaceAlignment : 0;
    }
    template <typename Arguments>
    cudaError_t run(const Arguments &arguments) {
        return launcher(head, arguments, 0);
    }

    Problem(int own_N, int own_C, int own_V, int version)
        : N(own_N),
          C(own_C),
          V(own_V),
          dX(Device<floatX>::filled((size_t)N * C)),
          X(small((size_t)N * C, 1)),
          W(small((size_t)V * C, 2)),
          bias(small(V, 3)),
          dW(std::vector<gradX>((size_t)V * C, (gradX)0.0f)),
          dbias(std::vector<gradX>(V, (gradX)0.0f)),
          losses(Device<float>::filled(N)),
          lse(Device<float>::filled(N)),
          targets(std::vector<int>(N, 0)),
          status(std::vector<status_word>{kStatusOk}),
          workspace(Device<char>::filled(workspace_bytes(version))) {}
    ~Problem() { lm_head_destroy(head); }

    LmHeadArguments<floatX, gradX> arguments() {
        char *const begin = workspace.pointer + (-(uintptr_t)workspace.pointer % kWorkspaceAlignment);
        return {dX.pointer, dW.pointer,   dbias.pointer,   losses.pointer, lse.pointer,    X.pointer,
                W.pointer,  bias.pointer, targets.pointer, nullptr,        status.pointer, begin};
    }
    bool guards_intact() {
        return dX.guards_intact() && dW.guards_intact() && dbias.guards_intact() && losses.guards_intact() &&
               lse.guards_intact() && workspace.guards_intact() && status.guards_intact();
    }
    bool untouched() {
        return dX.untouched() && losses.untouched() && lse.untouched() && workspace.untouched() &&
               dW.holds(std::vector<gradX>((size_t)V * C, (gradX)0.0f)) &&
               dbias.holds(std::vector<gradX>(V, (gradX)0.0f));
    }
    // Losses and the sum of the bias' gradient over a column, from the logits in double.
    void check(int version) {
        const std::vector<floatX> x = X.get(), w = W.get(), b = bias.get();
        const std::vector<float> loss = losses.get();
        const std::vector<gradX> db = dbias.get();
        std::vector<double> want_db(V, 0.0);
        const double allowed = type == kFp32 ? 1e-4 : 0.05;  // logits are rounded to their type
        int wrong = 0;
        for (int n = 0; n < N; n++) {
            std::vector<double> z(V);
            double total = 0;
            for (int v = 0; v < V; v++) {
                z[v] = (float)b[v];
                for (int c = 0; c < C; c++) z[v] += (double)(float)x[n * C + c] * (float)w[v * C + c];
                total += exp(z[v]);
            }
            wrong += !(fabs(loss[n] - (log(total) - z[0])) <= allowed);
            for (int v = 0; v < V; v++) want_db[v] += exp(z[v]) / total - (v == 0);
        }
        for (int v = 0; v < V; v++) wrong += !(fabs((float)db[v] - want_db[v]) <= allowed * (1 + fabs(want_db[v])));
        expect(wrong == 0 && guards_intact(), "version %d N=%d C=%d V=%d: %d wrong", version, N, C, V, wrong);
    }
};

template <typename floatX, typename gradX>
static void test_version(int version) {
    for (const auto &s : {std::array<int, 3>{5, 8, 20}, {33, 24, 300}, {1, 1, 1}}) {
        Problem<floatX, gradX> good(s[0], s[1], s[2], version);
        expect(good.created == cudaSuccess, "version %d: error %d", version, (int)good.created);
        if (good.created != cudaSuccess) return;
        const auto all = good.arguments();
        auto refused = [&](auto change, cudaError_t expected, const char *what) {
            auto arguments = all;
            change(arguments);
            expect_refused(good.run(arguments), expected, what, version, s[0]);
        };
        refused([](auto &a) { a.dX = nullptr; }, cudaErrorInvalidValue, "no dX for N =");
        refused([](auto &a) { a.dW = nullptr; }, cudaErrorInvalidValue, "no dW for N =");
        refused([](auto &a) { a.dbias = nullptr; }, cudaErrorInvalidValue, "no dbias for N =");
        refused([](auto &a) { a.bias = nullptr; }, cudaErrorInvalidValue, "no bias for N =");
        refused([](auto &a) { a.X = nullptr; }, cudaErrorInvalidValue, "no X for N =");
        refused([](auto &a) { a.W = nullptr; }, cudaErrorInvalidValue, "no W for N =");
        refused([](auto &a) { a.targets = nullptr; }, cudaErrorInvalidValue, "no targets for N =");
        refused([](auto &a) { a.workspace = nullptr; }, cudaErrorInvalidValue, "no workspace for N =");
        refused([](auto &a) { a.workspace += 16; }, cudaErrorMisalignedAddress, "workspace off by 16 for N =");
        expect(good.untouched(), "version %d wrote although it refused", version);
        expect(good.run(all) == cudaSuccess, "version %d", version);
        good.check(version);
        Problem<floatX, gradX> alone(s[0], s[1], s[2], version);  // losses, lse and status are not needed
        auto arguments = alone.arguments();
        arguments.losses = arguments.lse = nullptr;
        arguments.status = nullptr;
        expect(alone.run(arguments) == cudaSuccess && alone.losses.untouched() && alone.lse.untouched() &&
                   alone.dW.holds(good.dW.get()) && alone.dX.holds(good.dX.get()) && alone.guards_intact(),
               "version %d: gradients without losses", version);
    }
    for (const auto &s : {std::array<int, 3>{0, 8, 20}, {3, 0, 20}, {3, 8, 0}, {3, 0, 0}, {0, 0, 0}}) {
        Problem<floatX, gradX> empty(s[0], s[1], s[2], version);
        expect(empty.created == cudaSuccess && empty.run(empty.arguments()) == cudaSuccess &&
                   empty.guards_intact(),
               "version %d N=%d C=%d V=%d: error %d", version, s[0], s[1], s[2], (int)empty.created);
    }
    for (const auto &s : {std::array<int, 3>{-1, 8, 20}, {3, -1, 20}, {3, 8, -1}, {3, 8, INT32_MAX}}) {
        LmHead head;
        const LmHeadProblem problem = Problem<floatX, gradX>::problem(s[0], s[1], s[2], version);
        const cudaError_t error = lm_head_create(head, problem, ClassifierOptions());
        lm_head_destroy(head);
        expect(error == cudaErrorInvalidValue && head.what[0] != '\0', "version %d N=%d C=%d V=%d: error %d", version,
               s[0], s[1], s[2], (int)error);
    }
}

// Launchers refuse the plans of versions that cut the logits in another way. (Version 5 falls back on version 4,
// version 6 on versions 3 to 5.)
static void test_other_plans() {
    for (int version = 1; version <= 5; version++) {
        Problem<__nv_bfloat16, float> planned(33, 24, 300, version);
        for (int other = 1; other <= 5; other++) {
            const auto launch = find_version(lm_head_versions<__nv_bfloat16, float>, other)->launch;
            const bool takes = other == version || (other == 5 && version == 4);
            const cudaError_t error = launch(planned.head, planned.arguments(), 0);
            expect(error == (takes ? cudaSuccess : cudaErrorInvalidValue), "version %d with a plan of %d: error %d",
                   other, version, (int)error);
        }
    }
}

int main() {
    for (int version = 1; version <= 6; version++) {
        test_version<float, float>(version);
        test_version<__nv_bfloat16, float>(version);
    }
    test_other_plans();
    return report_failures();
}
