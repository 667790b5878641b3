// The hits of a request's prompts at each cache of a fleet, by the cache's number in the fleet.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "decide/fleet.hpp"

namespace kvroute::decide {

class FleetHits {
public:
    // Forgets all, and has room for each cache.
    void begin(const Fleet& fleet);
    // Adds what the index knows of one prompt, at the caches of some replicas. `computed`: see
    // `Matcher::match`. Junctions are those of the first prompt: several have none together.
    void match(const Fleet& fleet, std::span<const u32> replicas, SharedIndex& index,
               Prompt& prompt, const std::vector<Computed>& computed, bool is_only_one);

    void add(u32 cache, const CachedTokens& hit);
    // Adds the share of a lower tier or store.
    void add_share(u32 cache, std::string_view tier, i64 tokens);

    const CachedTokens& at(u32 cache) const { return at_[cache]; }

    template <class See>
    void each_share(u32 cache, See&& see) const {
        for (u32 at = first_[cache]; at != kNone; at = shares_[at].next) {
            see(shares_[at].tier, shares_[at].tokens);
        }
    }

private:
    struct Share {
        std::string tier;
        i64 tokens;
        u32 next;  // of the same cache
    };

    void add_shares(SharedIndex& index);

    std::vector<CachedTokens> at_;
    std::vector<u32> first_;  // first share of each cache
    std::vector<Share> shares_;
    std::vector<u32> cache_of_slot_;
};

}  // namespace kvroute::decide
