// Plans of lm_head.cu: the division of the logits into blocks of rows and tiles of columns, and the layout of the
// workspace. Host arithmetic in plain C++, without CUDA headers.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace bookends {

// ---------------------------------------------------------------------------------------------------------------------
// the input and the result of planning

// The division of the logits.
enum LmHeadWay {
    kLmHeadTextbook,    // none; probabilities in float too
    kLmHeadFused,       // none
    kLmHeadRows,        // blocks of rows
    kLmHeadVocabulary,  // tiles of the vocabulary; also blocks of rows if a float dX of all rows does not fit
    kLmHeadEpilogue,    // the same; the first pass stores no logits. kLmHeadVocabulary if that GEMM cannot run
    kLmHeadPlanned      // of a problem only: one of the last three, by the rule at rows_cost_less()
};

enum LmHeadType { kFp32, kFp16, kBf16 };

inline size_t bytes_of(LmHeadType type) { return type == kFp32 ? 4 : 2; }

struct LmHeadProblem {
    int N = 0, C = 0, V = 0;
    LmHeadType type = kBf16;           // of X, W, bias, logits and dX
    LmHeadType gradient_type = kFp32;  // of dW and dbias: `type` or kFp32
    bool dX = true, dW = true, dbias = false;  // gradients to compute
    bool bias = false;                         // the logits have a bias
    bool tf32 = false;                         // fp32 GEMMs round their inputs to TF32
    bool finite = false;                       // ignored rows of X hold finite numbers: dW's GEMM reads X, not a copy
    bool bare = false;                         // to time the GEMMs alone: dW is written, not added to
    bool positive_scale = true;                // options.logit_scale > 0; set by lm_head_create()
    LmHeadWay way = kLmHeadPlanned;
    size_t memory = 0;               // most bytes of workspace; ignored if the logits are not divided
    bool may_exceed_memory = false;  // if `memory` is too small for lm_head_comfortable()

    size_t type_bytes() const { return bytes_of(type); }
    size_t gradient_bytes() const { return bytes_of(gradient_type); }
};

struct LmHeadDevice {
    size_t l2_bytes = 0;
    int multiprocessors = 1;
    bool has_epilogue = false;  // can run version 5's GEMM
    bool emulated = false;      // the CPU device
};

constexpr size_t kWorkspaceAlignment = 256;  // of the workspace and of each of its parts

// The tile of version 5's GEMM, and the sizes of the structs in the workspace. lm_head.cu asserts that they are right.
constexpr int kLmHeadTileRows = 128, kLmHeadTileColumns = 256;
constexpr size_t kTiledRowBytes = 20, kOnlineSoftmaxBytes = 20, kClassifierGradientBytes = 24;

// The number of pieces of size `piece` that are needed for `count`.
inline long long pieces_of(long long count, long long piece) { return count / piece + (count % piece != 0); }

inline long long round_up(long long count, long long unit) { return pieces_of(count, unit) * unit; }

struct LmHeadPlan {
    LmHeadProblem problem;
    LmHeadDevice device;
    LmHeadWay way = kLmHeadRows;
    int rows = 0, columns = 0;  // of a block and of a tile
    int P = 0;                  // stride of the rows of a block or tile, in elements
    int buffers = 1;            // blocks or tiles of logits that the workspace holds
    int runs = 1;               // kLmHeadEpilogue: parts of the vocabulary with separate statistics

    // The offset of each part of the workspace.
    size_t logits = 0, probs = 0, statistics = 0, gradients = 0, X = 0, dX = 0, dW = 0, dbias = 0, slices = 0, gemm = 0;
    size_t statistics_bytes = 0, gemm_bytes = 0, bytes = 0;  // statistics and gradients; cuBLASLt's scratch; all

    int blocks() const { return rows > 0 ? (int)pieces_of(problem.N, rows) : 0; }
    int tiles() const { return columns > 0 ? (int)pieces_of(problem.V, columns) : 0; }
    int block_rows(int block) const { return std::min(rows, problem.N - block * rows); }
    int tile_columns(int tile) const { return std::min(columns, problem.V - tile * columns); }
    bool has_tiles() const { return way == kLmHeadVocabulary || way == kLmHeadEpilogue; }
    bool holds_all_logits() const { return way == kLmHeadTextbook || way == kLmHeadFused; }
    bool has_gradients() const { return problem.dX || problem.dW || problem.dbias; }
    bool can_use(const void *workspace) const { return bytes == 0 || (uintptr_t)workspace % kWorkspaceAlignment == 0; }

    // A 16-bit dX that is a sum over several tiles is kept in float until it is complete.
    bool float_dX() const { return problem.dX && problem.type_bytes() == 2 && has_tiles(); }
    // dW's GEMM reads a copy of a block of X in which ignored rows are 0. The copy is stored in the memory of the
    // block's dX, which is written after the last GEMM that reads the copy. If several tiles are added to dX itself, or
    // no dX is wanted, the copy has its own part of the workspace. Its bytes take 111/V of the time of the three GEMMs:
    // 0.2% at V = 50304.
    bool copies_X() const { return problem.dW && problem.C > 0 && problem.V > 0 && !problem.finite && !problem.bare; }
    bool copy_in_dX() const { return problem.dX && (float_dX() || !has_tiles() || tiles() == 1); }
    // A 16-bit dW is the old value plus a float sum: cuBLASLt's own addition may round twice (CUDA 13.0, H200). The
    // float sum is that of all of dW, or of a tile's rows of it.
    bool float_dW() const { return problem.dW && problem.gradient_bytes() == 2 && !problem.bare; }
    // The same for a 16-bit dbias to which several blocks of rows are added.
    bool float_dbias() const { return problem.dbias && problem.gradient_bytes() == 2 && !has_tiles() && blocks() > 1; }
    // Slices of the rows for dbias: about 256 thread blocks, with at least 128 rows each.
    unsigned row_slices() const {
        const long long across = pieces_of(std::max(columns, 1), 32 * 16 / problem.type_bytes());
        return (unsigned)std::min(pieces_of(256, across), pieces_of(rows, 128));
    }
};

// The stride of a row, in elements: a multiple of 8 (16 bytes); from 4096 columns on a multiple of 128, for whole
// memory lines, which costs at most 3% of the memory.
inline long long lm_head_pad(long long columns) { return round_up(columns, columns >= 4096 ? 128 : 8); }

// Bytes of all logits. Budgets are shares of this.
inline double lm_head_logits_bytes(const LmHeadProblem &p) { return (double)p.N * lm_head_pad(p.V) * p.type_bytes(); }

// The largest number from least to most for which fits(number) is true; least - 1 if there is none. Binary search:
// fits() must be monotone.
template <typename Fits>
int largest_that_fits(int least, int most, Fits fits) {
    long long good = least - 1LL, bad = most + 1LL;
    while (bad - good > 1) {
        const long long middle = good + (bad - good) / 2;
        (fits((int)middle) ? good : bad) = middle;
    }
    return (int)good;
}

// The size of about equal pieces of `count`: a multiple of `unit`, at most `most`, which must be a multiple of `unit`.
inline int even_pieces(int count, int most, int unit) {
    return (int)std::min<long long>(count, round_up(pieces_of(count, pieces_of(count, most)), unit));
}

// The number of runs, at most `runs`, into which `tiles` are divided so that none is empty.
inline int full_runs(long long tiles, long long runs) { return (int)pieces_of(tiles, pieces_of(tiles, runs)); }

// The number of runs of tiles that gives the thread blocks of version 5's GEMM about the same number of tiles each.
inline int even_runs(int rows, int columns, int multiprocessors) {
    const long long down = pieces_of(rows, kLmHeadTileRows), across = pieces_of(columns, kLmHeadTileColumns);
    double least = INFINITY;
    int best = 1;
    for (int runs = 1; runs <= std::min<long long>(across, 2LL * multiprocessors); runs++) {
        const double rounds = (double)pieces_of(down * runs, multiprocessors);
        const double cost = rounds * pieces_of(across, runs) * (1 + runs / 1000.0);  // of equal ones the fewest
        if (cost < least) least = cost, best = runs;
    }
    return full_runs(across, best);
}

// ---------------------------------------------------------------------------------------------------------------------
// the workspace

// Lays out the workspace of a plan whose sizes are set. Returns whether it is possible and needs at most `memory`
// bytes.
inline bool lm_head_layout(LmHeadPlan &plan, size_t memory) {
    const LmHeadProblem &p = plan.problem;
    const long long pad = lm_head_pad(plan.columns);
    if (pad > INT32_MAX) return false;
    plan.P = (int)pad;
    size_t next = 0;
    bool possible = true;
    auto part = [&](bool wanted, double bytes) {
        const size_t begin = next;
        possible = possible && (!wanted || next + bytes < 0x1p62);
        if (wanted && possible) next += round_up((long long)bytes, kWorkspaceAlignment);
        return begin;
    };
    const double rows = plan.rows, V = p.V, C = p.C;
    const bool epilogue = plan.way == kLmHeadEpilogue;
    const double statistics = epilogue ? (double)plan.runs * p.N : rows;
    const bool has_statistics = plan.way == kLmHeadTextbook || plan.has_tiles();
    plan.gradients = part(plan.has_tiles() && plan.has_gradients(),
                          std::min(statistics, (double)p.N) * kClassifierGradientBytes);
    plan.statistics = part(has_statistics, statistics * std::max(kTiledRowBytes, kOnlineSoftmaxBytes));
    plan.statistics_bytes = next;
    // In version 5 all following parts are written after lm_head_finish_kernel, the last kernel that reads statistics.
    if (epilogue) next = plan.statistics;
    plan.logits = part(true, plan.buffers * rows * plan.P * p.type_bytes());
    plan.probs = part(plan.way == kLmHeadTextbook, rows * V * sizeof(float));
    plan.X = part(plan.copies_X() && !plan.copy_in_dX(), rows * C * p.type_bytes());
    plan.dX = part(plan.float_dX(), rows * C * sizeof(float));
    plan.dW = part(plan.float_dW(), plan.columns * C * sizeof(float));
    plan.dbias = part(plan.float_dbias(), V * sizeof(float));
    plan.slices = part(p.dbias, plan.row_slices() * (double)plan.columns * sizeof(float));
    plan.gemm = part(true, (double)plan.gemm_bytes);
    plan.bytes = std::max(next, plan.statistics_bytes);
    return possible && plan.bytes <= memory;
}

// ---------------------------------------------------------------------------------------------------------------------
// a plan for each way

// Tiles that are added to a 16-bit dW or dbias round it at each addition, so only one block of rows may add to it.
inline bool needs_one_block(const LmHeadProblem &p) { return (p.dW || p.dbias) && p.gradient_bytes() == 2; }

// Blocks of rows within the budget: all rows, or a multiple of 128 rows, or any number below 128 rows, whichever is the
// largest that fits. Each block adds to all of dW, so blocks are as large as possible: at C 2048, V 128256, blocks of
// 2048 rows in 25% took 5% less time than blocks of 1664 rows in 24.9% (H200).
inline bool plan_rows(LmHeadPlan &plan, size_t memory) {
    const LmHeadProblem &p = plan.problem;
    plan.way = kLmHeadRows;
    plan.columns = p.V;
    auto fits = [&](int rows) {
        plan.rows = rows;
        return lm_head_layout(plan, memory);
    };
    // A single block needs no dbias in float, so it may fit where a slightly smaller block does not.
    const int most = fits(p.N) ? p.N : largest_that_fits(1, p.N - 1, fits);
    if (most < 1) return false;
    const int unit = most >= 128 ? 128 : 1;
    return fits(most == p.N ? most : even_pieces(p.N, most / unit * unit, unit));
}

// Tiles within the budget. A tile fits into half of the L2 or has 1024 columns, if the budget allows it. If all rows
// fit with their float dX, they are one block, since each block of rows adds to all of dW.
inline bool plan_vocabulary(LmHeadPlan &plan, size_t memory) {
    const LmHeadProblem &p = plan.problem;
    plan.way = kLmHeadVocabulary;
    auto fits = [&](int rows, int columns, int buffers) {
        plan.rows = rows;
        plan.columns = columns;
        plan.buffers = buffers;
        return lm_head_layout(plan, memory);
    };
    const double in_l2 = std::max(1024.0, 0.5 * plan.device.l2_bytes / ((double)p.N * p.type_bytes()));
    for (int columns = (int)std::min((double)p.V, in_l2);; columns = (int)pieces_of(columns, 2)) {
        const int unit_columns = columns >= 128 ? 128 : columns >= 8 ? 8 : 1;
        if (columns < p.V) columns = columns / unit_columns * unit_columns;
        const int most = largest_that_fits(1, p.N, [&](int rows) { return fits(rows, columns, 1); });
        // If not all rows fit, a tile of 1024 columns requires 512 rows, and one of 128 columns requires 32. A narrower
        // tile leaves more memory for dX.
        const int needed = columns <= 8 ? 1 : columns <= 128 ? 32 : columns <= 1024 ? 512 : p.N;
        if (most == p.N || (most >= needed && !needs_one_block(p))) {
            const int unit = most >= 128 ? 128 : 1;
            const int rows = most == p.N ? most : even_pieces(p.N, most / unit * unit, unit);
            const int width = even_pieces(p.V, columns, columns < p.V ? unit_columns : 1);
            // Version 6 keeps as many tiles' logits as fit for the second pass.
            const bool keeps = p.way == kLmHeadPlanned && plan.has_gradients();
            const int most_buffers = keeps ? (int)pieces_of(p.V, width) : 1;
            const int buffers = largest_that_fits(1, most_buffers, [&](int count) { return fits(rows, width, count); });
            if (fits(rows, width, std::max(1, buffers))) return true;  // a narrower tile may have more slices for dbias
        }
        if (columns <= 1) return false;
    }
}

// Floating-point operations of a 16-bit GEMM in the time of one byte of DRAM traffic (H200).
constexpr double kOperationsPerByte = 167;

// The cost of a division beside the operations of the GEMMs, as the number of bytes of DRAM traffic that take the same
// time. Each block of rows adds to all of dW in float (1.7 times the time of a copy of as many bytes) and reads W
// twice. Each tile adds to all of its block's dX, and the start and end of each of its kernels take the time of 20e6
// bytes. In version 5 the multiprocessors process the GEMM's tiles in rounds; in the last round some may be idle.
// (Fitted to times on an H200.)
inline double lm_head_overhead(const LmHeadPlan &plan) {
    const LmHeadProblem &p = plan.problem;
    const double W = (double)p.V * p.C, dW = p.dW ? 1.7 * 8 * W : 0, dX = plan.float_dX() ? 8.0 * plan.rows * p.C : 0;
    double idle = 0;
    if (plan.way == kLmHeadEpilogue && plan.has_gradients()) {
        const double SMs = plan.device.multiprocessors, tile = kLmHeadTileRows * kLmHeadTileColumns;
        const long long tiles = pieces_of(plan.rows, kLmHeadTileRows) * pieces_of(plan.columns, kLmHeadTileColumns);
        const double rounds = (double)pieces_of(tiles, plan.device.multiprocessors);
        idle = (rounds * SMs * tile - (double)plan.rows * plan.columns) * 2 * p.C / kOperationsPerByte;
    }
    return plan.blocks() * (dW + 2 * W * p.type_bytes() + plan.tiles() * (dX + 3 * 20e6 + idle));
}

inline bool has_epilogue(const LmHeadProblem &p, const LmHeadDevice &device) {
    return device.has_epilogue && p.type_bytes() == 2 && p.C > 0 && p.positive_scale;
}

// Tiles for version 5: the number of blocks of rows with the least overhead, with tiles as wide as the budget allows.
// Without gradients only the statistics are stored.
inline bool plan_epilogue(LmHeadPlan &plan, size_t memory) {
    const LmHeadProblem &p = plan.problem;
    if (!has_epilogue(p, plan.device)) return false;
    plan.way = kLmHeadEpilogue;
    plan.buffers = plan.has_gradients() ? 1 : 0;
    if (!p.dX && !p.dW) plan.gemm_bytes = 0;
    const long long unit = kLmHeadTileColumns, units = pieces_of(p.V, unit), SMs = plan.device.multiprocessors;
    const int most_blocks = needs_one_block(p) ? 1 : (int)pieces_of(p.N, 128);
    auto width_of = [&](long long count) { return (int)std::min<long long>(count * unit, p.V); };
    auto fits = [&](int rows, int columns) {
        plan.rows = rows;
        plan.columns = columns;
        return lm_head_layout(plan, memory);
    };
    auto cut = [&] {
        if (!plan.has_gradients()) return fits(p.N, p.V);
        double least = INFINITY;
        int rows = 0, columns = 0;
        for (int blocks = 1, next; blocks <= most_blocks; blocks = next) {
            next = blocks + (int)pieces_of(blocks, 8);
            if (blocks < most_blocks) next = std::min(next, most_blocks);
            const int height = even_pieces(p.N, (int)pieces_of(p.N, blocks), std::min(p.N, 128));
            const long long down = pieces_of(height, kLmHeadTileRows);
            const int widest = largest_that_fits(1, (int)units, [&](int n) { return fits(height, width_of(n)); });
            if (widest < 1) continue;
            // As wide as possible, or so that each multiprocessor has the same number of the GEMM's tiles.
            const long long even = widest * down / SMs * SMs / down;
            for (const long long count : {(long long)widest, even}) {
                if (count < 1 || !fits(height, even_pieces(p.V, width_of(count), std::min<int>(unit, p.V)))) continue;
                const double cost = lm_head_overhead(plan);
                if (cost < least) least = cost, rows = plan.rows, columns = plan.columns;
            }
        }
        return rows > 0 && fits(rows, columns);
    };
    for (plan.runs = even_runs(p.N, p.V, plan.device.multiprocessors); !cut();
         plan.runs = full_runs(units, plan.runs / 2)) {
        if (plan.runs == 1) return false;  // fewer runs need less memory for statistics
    }
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// the choice

// Whether a plan is practical: blocks of at least 128 rows and tiles of at least 128 columns, or all; for version 5,
// the plan uses version 5's GEMM if it can run.
inline bool lm_head_comfortable(const LmHeadPlan &plan) {
    const LmHeadProblem &p = plan.problem;
    const bool way = p.way != kLmHeadEpilogue || plan.way == kLmHeadEpilogue || !has_epilogue(p, plan.device);
    return way && plan.rows >= std::min(p.N, 128) && plan.columns >= std::min(p.V, 128);
}

// Sets the plan to the one with the least overhead among plans of this kind with different amounts of scratch for
// cuBLASLt: an eighth of the budget, a 32nd, or nothing (so that 25% holds exactly a quarter of the rows). Returns
// false if the budget is too small.
inline bool plan_way(LmHeadPlan &plan, LmHeadWay way, size_t gemm_bytes, size_t memory, bool comfortable) {
    const LmHeadPlan begun = plan;
    double least = INFINITY;
    for (const double share : {1 / 8.0, 1 / 32.0, 0.0}) {
        LmHeadPlan other = begun;
        other.gemm_bytes = std::min(gemm_bytes, (size_t)(share * memory));
        const bool fits = way == kLmHeadRows         ? plan_rows(other, memory)
                          : way == kLmHeadVocabulary ? plan_vocabulary(other, memory)
                                                     : plan_epilogue(other, memory);
        if (!fits || (comfortable && !lm_head_comfortable(other))) continue;
        const double cost = lm_head_overhead(other);
        if (cost < least) least = cost, plan = other;
    }
    return least < INFINITY;
}

// The rule of version 6: whether blocks of rows cost less than tiles. They do if their additional passes over dW cost
// less than the additional work of tiles: one GEMM; or in version 4 the time of two, since its 16-bit GEMMs of tiles
// are slower and its logits are written and read once more. (fp32 GEMMs of few rows are slow, too.) On the CPU device
// blocks of rows always cost less, since operations are slow.
inline bool rows_cost_less(const LmHeadPlan &rows, const LmHeadPlan &tiles) {
    const LmHeadProblem &p = rows.problem;
    const int gemms = tiles.way == kLmHeadVocabulary && p.type_bytes() == 2 ? 2 : 1;
    const double pass = p.dW ? 8.0 * p.V * p.C : 0, gemm = 2.0 * p.N * p.C * p.V / kOperationsPerByte;
    return rows.device.emulated || (rows.blocks() - tiles.blocks()) * pass < gemms * gemm;
}

// Sets the way, the sizes and the workspace of a plan whose problem and device are set. Returns false if the budget is
// too small (comfortable: too small for a practical plan).
inline bool lm_head_plan(LmHeadPlan &plan, size_t memory, bool comfortable = false) {
    const LmHeadProblem p = plan.problem;
    const double of_logits = std::max((double)p.N * p.V * p.type_bytes() / 4, 0x1p20);
    const size_t gemm_bytes = p.V > 0 && p.C > 0 ? (size_t)std::min(of_logits, 0x1p25) : 0;
    if (p.V == 0 || p.way == kLmHeadTextbook || p.way == kLmHeadFused) {
        plan.gemm_bytes = gemm_bytes;
        plan.way = p.V > 0 || p.way == kLmHeadTextbook ? p.way : kLmHeadFused;
        plan.rows = p.N;
        plan.columns = p.V;
        return lm_head_layout(plan, SIZE_MAX);
    }
    auto take = [&](LmHeadWay way) { return plan_way(plan, way, gemm_bytes, memory, comfortable); };
    if (p.way == kLmHeadEpilogue) return take(kLmHeadEpilogue) || take(kLmHeadVocabulary);
    if (p.way != kLmHeadPlanned) return take(p.way);
    const bool epilogue = p.C % 8 == 0;  // otherwise version 5's GEMM loads single elements
    const bool fast_epilogue = epilogue && has_epilogue(p, plan.device) && !plan.device.emulated;
    LmHeadPlan rows = plan, tiles = plan;
    const bool rows_fit = plan_way(rows, kLmHeadRows, gemm_bytes, memory, comfortable);
    const bool tiles_fit = (fast_epilogue && plan_way(tiles, kLmHeadEpilogue, gemm_bytes, memory, comfortable)) ||
                           plan_way(tiles, kLmHeadVocabulary, gemm_bytes, memory, comfortable);
    const bool statistics_alone = tiles.way == kLmHeadEpilogue && !plan.has_gradients();  // no additional GEMM
    const bool choose_rows = rows.blocks() == 1 || (rows_cost_less(rows, tiles) && !statistics_alone);
    if (!rows_fit && !tiles_fit) return epilogue && take(kLmHeadEpilogue);
    plan = rows_fit && (choose_rows || !tiles_fit) ? rows : tiles;
    return true;
}

// The smallest budget for a plan (comfortable: for a practical one). lm_head_plan() must be monotone in the budget.
inline size_t lm_head_least_bytes(const LmHeadProblem &problem, const LmHeadDevice &device, bool comfortable = false) {
    auto possible = [&](size_t memory) {
        LmHeadPlan plan;
        plan.problem = problem;
        plan.device = device;
        return lm_head_plan(plan, memory, comfortable);
    };
    size_t bad = 0, good = 4096;
    for (; good < SIZE_MAX / 4 && !possible(good); good *= 2) bad = good;
    if (comfortable && !possible(good)) return lm_head_least_bytes(problem, device);
    while (good - bad > 256) {
        const size_t middle = bad + (good - bad) / 2;
        (possible(middle) ? good : bad) = middle;
    }
    return good;
}

}  // namespace bookends
