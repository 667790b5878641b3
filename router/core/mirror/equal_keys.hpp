// How much two prompts share, by their keys.
#pragma once

#include <span>

#include "index/prompt.hpp"
#include "mirror/names.hpp"

namespace kvroute::mirror {

// Returns how many leading keys of two prompts are the same: at least `low` are, at most `high` can be.
inline std::size_t equal_keys(std::span<const u64> keys, std::span<const u64> theirs,
                              std::size_t low, std::size_t high) {
    if (low < high && keys[high - 1] == theirs[high - 1]) return high;
    while (low < high) {
        const std::size_t middle = (low + high) / 2;
        if (keys[middle] == theirs[middle]) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

}  // namespace kvroute::mirror
