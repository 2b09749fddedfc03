// Checks plans of the LM head on devices that are not here. test_lm_head_plan.py compiles it with g++ alone. Exit
// status 0 if all is right; else it prints the first failures.
#include "../../parts/lm_head_plan.h"

#include <cstdio>
#include <vector>

using namespace bookends;

static int failures = 0;

// Notes a failure, with the plan that it is about.
static void expect(bool right, const char *what, const LmHeadPlan &plan) {
    const LmHeadProblem &p = plan.problem;
    if (right || ++failures > 20) return;
    printf("%s: N %d C %d V %d types %d %d gradients %d%d%d way %d memory %zu: ", what, p.N, p.C, p.V, p.type,
           p.gradient_type, p.dX, p.dW, p.dbias, p.way, p.memory);
    printf("way %d, %d x %d, %d buffers, %zu bytes\n", plan.way, plan.rows, plan.columns, plan.buffers, plan.bytes);
}

static LmHeadDevice device_of(int multiprocessors, bool has_epilogue, bool emulated = false) {
    LmHeadDevice device;
    device.l2_bytes = 50 << 20;
    device.multiprocessors = multiprocessors;
    device.has_epilogue = has_epilogue;
    device.emulated = emulated;
    return device;
}
static const LmHeadDevice kHopper = device_of(132, true), kAmpere = device_of(108, false),
                          kCpu = device_of(8, true, true);

static LmHeadProblem problem_of(int N, int C, int V, LmHeadWay way = kLmHeadPlanned, LmHeadType type = kBf16) {
    LmHeadProblem p;
    p.N = N;
    p.C = C;
    p.V = V;
    p.way = way;
    p.type = type;
    return p;
}

static bool make(LmHeadPlan *plan, LmHeadProblem p, const LmHeadDevice &device, size_t memory) {
    *plan = LmHeadPlan();
    p.memory = memory;
    plan->problem = p;
    plan->device = device;
    return lm_head_plan(*plan, memory);
}

// The parts of a workspace: each begins at a multiple of 256 and is large enough, none overlaps another, all fit.
static void check_layout(const LmHeadPlan &plan) {
    const LmHeadProblem &p = plan.problem;
    const size_t rows = plan.rows, columns = plan.columns, C = p.C, size = p.type_bytes();
    const bool textbook = plan.way == kLmHeadTextbook, copy = plan.copies_X() && !plan.copy_in_dX();
    const std::vector<std::pair<size_t, size_t>> parts = {
        {plan.logits, plan.buffers * rows * plan.P * size},
        {plan.probs, textbook ? rows * p.V * 4 : 0},
        {plan.X, copy ? rows * C * size : 0},
        {plan.dX, plan.float_dX() ? rows * C * 4 : 0},
        {plan.dW, plan.float_dW() ? columns * C * 4 : 0},
        {plan.dbias, plan.float_dbias() ? (size_t)p.V * 4 : 0},
        {plan.slices, p.dbias ? plan.row_slices() * columns * 4 : 0},
        {plan.gemm, plan.gemm_bytes}};
    const bool epilogue = plan.way == kLmHeadEpilogue;
    size_t end = plan.has_tiles() && plan.has_gradients() ? (epilogue ? p.N : rows) * kClassifierGradientBytes : 0;
    if (epilogue) {
        expect(plan.gradients + end <= plan.statistics && plan.statistics <= plan.logits, "gradients", plan);
        expect(plan.statistics + (size_t)plan.runs * p.N * kTiledRowBytes <= plan.bytes, "statistics", plan);
    } else if (textbook || plan.has_tiles()) {
        expect(plan.gradients + end <= plan.statistics, "gradients", plan);
        end = plan.statistics + rows * kTiledRowBytes;
    }
    for (const auto &part : parts) {
        expect(part.first % kWorkspaceAlignment == 0 && part.first >= end, "a part's begin", plan);
        end = part.first + part.second;
    }
    expect(end <= plan.bytes, "all parts", plan);
}

static void check_plan(const LmHeadPlan &plan, size_t memory) {
    const LmHeadProblem &p = plan.problem;
    expect(plan.holds_all_logits() || plan.bytes <= memory, "the budget", plan);
    expect(plan.rows >= 1 && plan.rows <= p.N && plan.columns >= 1 && plan.columns <= p.V, "sizes", plan);
    expect(plan.P >= plan.columns && plan.P % 8 == 0, "P", plan);
    expect((long long)plan.rows * (plan.blocks() - 1) < p.N && plan.block_rows(plan.blocks() - 1) >= 1, "blocks", plan);
    expect((long long)plan.columns * (plan.tiles() - 1) < p.V && plan.tile_columns(plan.tiles() - 1) >= 1, "tiles", plan);
    expect(plan.tiles() == 1 || plan.has_tiles(), "one tile", plan);
    expect(plan.buffers <= plan.tiles() && (plan.buffers == 1 || p.way != kLmHeadVocabulary), "buffers", plan);
    expect(!plan.has_tiles() || !needs_one_block(p) || plan.blocks() == 1, "one block for 16-bit dW", plan);
    expect(plan.way != kLmHeadEpilogue || has_epilogue(p, plan.device), "epilogue", plan);
    if (p.way != kLmHeadPlanned && p.way != kLmHeadEpilogue) expect(plan.way == p.way, "the way asked for", plan);
    check_layout(plan);
}

// Every way, on every device, at several shapes, types, gradients and budgets.
static void check_plans() {
    const int shapes[][3] = {{1, 1, 1}, {150, 24, 301}, {513, 64, 5003}, {8192, 768, 50257}, {4096, 4096, 128256}};
    const LmHeadWay ways[] = {kLmHeadTextbook,   kLmHeadFused,    kLmHeadRows,
                              kLmHeadVocabulary, kLmHeadEpilogue, kLmHeadPlanned};
    for (const LmHeadDevice &device : {kHopper, kAmpere, kCpu}) {
        for (const auto &s : shapes) {
            for (const LmHeadWay way : ways) {
                for (int variant = 0; variant < 32; variant++) {
                    LmHeadProblem p = problem_of(s[0], s[1], s[2], way, variant & 8 ? kFp32 : kFp16);
                    p.dX = variant & 1;
                    p.dW = variant & 2;
                    p.dbias = p.bias = variant & 4;
                    p.gradient_type = variant & 16 ? p.type : kFp32;
                    const size_t least = lm_head_least_bytes(p, device);
                    LmHeadPlan plan;
                    expect(plan.holds_all_logits() || !make(&plan, p, device, least / 2) || least <= 8192,
                           "half of the least", plan);
                    for (const double share : {0.0, 0.01, 0.1, 0.25, 1.0, 10.0}) {
                        const size_t memory = std::max(least, (size_t)(share * lm_head_logits_bytes(p)));
                        const bool possible = make(&plan, p, device, memory);
                        expect(possible, "possible", plan);
                        if (possible) check_plan(plan, memory);
                    }
                }
            }
        }
    }
}

// The way of version 6 at a share of the logits, for training shapes of the H200 that were measured and for others.
static void check_rule() {
    struct Choice {
        int C, V;
        double share;
        LmHeadWay hopper, ampere;
    };
    const Choice choices[] = {{768, 50304, 0.25, kLmHeadRows, kLmHeadRows},
                              {768, 50304, 0.10, kLmHeadRows, kLmHeadRows},
                              {768, 50304, 0.05, kLmHeadEpilogue, kLmHeadRows},
                              {768, 50304, 0.02, kLmHeadEpilogue, kLmHeadVocabulary},
                              {4096, 128256, 0.25, kLmHeadRows, kLmHeadRows},
                              {4096, 128256, 0.10, kLmHeadRows, kLmHeadRows},
                              {4096, 128256, 0.02, kLmHeadEpilogue, kLmHeadVocabulary}};
    LmHeadPlan plan;
    for (const Choice &c : choices) {
        const LmHeadProblem p = problem_of(8192, c.C, c.V);
        const size_t memory = (size_t)(c.share * lm_head_logits_bytes(p));
        expect(make(&plan, p, kHopper, memory) && plan.way == c.hopper, "the choice on Hopper", plan);
        expect(make(&plan, p, kAmpere, memory) && plan.way == c.ampere, "the choice on Ampere", plan);
        expect(make(&plan, p, kCpu, memory) && plan.way == kLmHeadRows, "the choice on the CPU device", plan);
        LmHeadProblem without_dW = p;
        without_dW.dW = false;
        expect(make(&plan, without_dW, kHopper, memory) && plan.way == kLmHeadRows, "without dW", plan);
        LmHeadProblem forward = without_dW;
        forward.dX = false;
        expect(make(&plan, forward, kHopper, memory) && plan.way == kLmHeadEpilogue, "forward", plan);
        expect(make(&plan, forward, kAmpere, memory) && plan.way == kLmHeadRows, "forward on Ampere", plan);
        forward.positive_scale = false;
        expect(make(&plan, forward, kHopper, memory) && plan.way == kLmHeadRows, "a negative logit_scale", plan);
    }
    const LmHeadProblem p = problem_of(8192, 768, 50257);
    expect(make(&plan, p, kHopper, 2 * (size_t)lm_head_logits_bytes(p)) && plan.blocks() == 1, "one block", plan);
    expect(make(&plan, p, kHopper, (size_t)(0.25 * lm_head_logits_bytes(p))) && plan.rows == 2048, "a quarter", plan);
}

int main() {
    check_plans();
    check_rule();
    if (failures > 0) printf("%d failures\n", failures);
    return failures > 0;
}
