// The description of a kernel file's job for the harness, beside the options and the arrays.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "command_line.h"
#include "timer.h"

namespace bookends {

// Each version is run at several settings: block sizes; or, if the kernel file chooses its block sizes itself, the
// values of an option. A setting is an int: the block size, or the index of the value.
struct Sweep {
    const char *option = nullptr;  // a Text; null: the settings are block sizes
    std::vector<std::string> values;

    // The words for a setting, such as block_size 256 or memory 25%. in_column: padded to the width of a column.
    std::string text(int setting, bool in_column = false) const {
        if (!option) return format(in_column ? "block_size %4d" : "block_size %d", setting);
        return format("%-*s", in_column ? width() : 0, (key_of(option) + " " + values[setting]).c_str());
    }

    // The length of the longest text of a value; 0 for block sizes.
    int width() const {
        size_t longest = 0;
        for (const std::string &value : values) longest = std::max(longest, key_of(option).size() + 1 + value.size());
        return (int)longest;
    }
};

// A number to report with the times of a version at a setting.
struct Figure {
    std::string key;  // in JSON
    double value;
    std::string words;        // in the line of the setting; empty: not there
    std::string column = "";  // heading of its column in the summary; empty: no column
};

// Functions may be null, unless their comment says otherwise.
struct Job {
    double bytes = 0, flops = 0;  // the fewest bytes that the job must move, and the operations that it must do

    // The reason why a version cannot run; empty if it can.
    std::function<std::string(int version)> skip;
    // Computes the data that several references use. Called once, after all possible refusals.
    std::function<void()> prepare_references;
    // Tunes a version. Called before its first launch, with one progress step for each value of the sweep.
    std::function<void(int version, cudaStream_t)> tune;
    // Figures of a version at a setting; for version 0, setting 0. All versions have the same keys.
    std::function<std::vector<Figure>(int version, int setting)> figures;

    Sweep sweep;
    Baseline baseline;
};

}  // namespace bookends
