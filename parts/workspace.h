// Arrays in a workspace. For parts/group_positions.h and parts/sorted_groups.h.
#pragma once
#include "../common.h"

namespace bookends {

// Takes `count` elements of the workspace, at the next multiple of 16 bytes.
template <typename T>
void take_array(T **array, char **workspace, size_t count) {
    *workspace = (char *)(((uintptr_t)*workspace + 15) / 16 * 16);
    *array = (T *)*workspace;
    *workspace += count * sizeof(T);
}

}  // namespace bookends
