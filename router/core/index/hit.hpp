// The result of a match for a source.
#pragma once

#include <utility>
#include <vector>

#include "index/nodes.hpp"

namespace kvroute {

// The part of a prompt that a source would reuse, in tokens.
struct Hit {
    u32 gpu = 0;
    u32 total = 0;  // with the tokens that lower tiers load
    u32 run = 0;    // as far as full attention by itself would accept on the GPU; without such: `gpu`

    bool operator==(const Hit&) const = default;
};

// The tokens that each lower tier adds to a hit, the fastest first: by the tier's number, or that of a
// store that the source shares, + `kFirstStore`.
constexpr u32 kFirstStore = kMaxTiers;
using Shares = std::vector<std::pair<u32, u64>>;

struct TieredHit {
    Hit hit;
    Shares by_tier;

    bool operator==(const TieredHit&) const = default;
};

// The hit of every source, by slot, and the shares of those that have any.
struct Hits {
    std::vector<Hit> by_slot;
    std::vector<std::pair<u32, Shares>> shares;

    void set(u32 slot, TieredHit&& found) {
        by_slot[slot] = found.hit;
        if (!found.by_tier.empty()) shares.emplace_back(slot, std::move(found.by_tier));
    }
};

// The same of a prompt that is known by its engine's hashes alone.
struct FoundByHashes {
    TieredHit hit;
    std::vector<u64> by_group;  // the longest prefix that each would accept, by group index
    u64 held = 0;               // of the hashes, by the source or a store that it shares
    bool is_whole = true;       // nothing is there that only other hashes lead to
};

}  // namespace kvroute
