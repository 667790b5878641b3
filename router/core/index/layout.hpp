// The groups of a cache.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "index/keys.hpp"

namespace kvroute {

enum class GroupKind : u8 { full, window, chunked, mamba, not_cached };

struct Group {
    GroupKind kind = GroupKind::full;
    u64 block_size = 1;
    std::optional<u64> window;
    std::optional<u64> chunk;
    bool eagle = false;  // holds layers of a drafter: the last block of a hit is computed again

    bool operator==(const Group&) const = default;

    u64 window_blocks(u64 extra) const {
        return std::max<u64>(1, (*window - 1 + block_size - 1) / block_size + extra);
    }
};

struct Layout {
    std::vector<Group> groups;
    u64 hash_block_size = 1;
    u64 scheduler_block_size = 1;
    bool eagle_sees_last_token = true;
    u64 prefix_replay_tokens = 0;  // a hit that is no longer is worth nothing

    // Derived from the groups by `find_equal_groups`.
    std::vector<std::vector<u32>> together;  // equal groups: they are looked up as one
    std::vector<u32> full;                   // the first of each of those, of full attention
    std::vector<u32> others;                 // and of any other kind
    bool has_several = false;                // more than one group caches

    bool operator==(const Layout&) const = default;

    bool has_drafter() const {
        return std::any_of(groups.begin(), groups.end(),
                           [](const Group& each) { return each.eagle; });
    }
    // Returns what is left of a hit.
    u64 worth(u64 hit) const { return hit > prefix_replay_tokens ? hit : 0; }

    // Fills `together`, `full`, `others` and `has_several` from `groups`.
    void find_equal_groups();
};

}  // namespace kvroute
