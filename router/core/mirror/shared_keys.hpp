// Keys that several parts hold at once, without a copy each.
#pragma once

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "mirror/names.hpp"

namespace kvroute::mirror {

// Keys of a prompt's prefixes, from the shortest, and the memory that they lie in.
struct Keys {
    std::shared_ptr<const void> owner;
    std::span<const u64> span;

    static Keys of(std::vector<u64> keys) {
        auto owner = std::make_shared<const std::vector<u64>>(std::move(keys));
        const std::span<const u64> span = *owner;
        return {std::move(owner), span};
    }
};

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
