#include "decide/hits.hpp"

namespace kvroute::decide {

void FleetHits::begin(const Fleet& fleet) {
    at_.assign(fleet.caches(), CachedTokens());
    first_.assign(fleet.caches(), kNone);
    shares_.clear();
}

void FleetHits::match(const Fleet& fleet, std::span<const u32> replicas, SharedIndex& index,
                      Prompt& prompt, const std::vector<Computed>& computed, bool is_only_one) {
    const auto guard = locked(index.mutex);
    index.matcher.match(prompt, computed, index.hits);
    const std::vector<Hit>& hits = index.hits.by_slot;
    const bool has_shares = !index.hits.shares.empty();
    if (has_shares) cache_of_slot_.assign(hits.size(), kNone);
    for (const u32 number : replicas) {
        const u32 end = fleet.end_of_caches(number);
        for (u32 cache = fleet.first_cache(number); cache < end; ++cache) {
            const u32 slot = index.slot_of(fleet.source_in(&index, cache));
            if (slot >= hits.size()) continue;
            const Hit& hit = hits[slot];
            add(cache, {hit.gpu, hit.total, is_only_one ? i64{hit.run} - hit.gpu : 0, 0});
            if (has_shares) cache_of_slot_[slot] = cache;
        }
    }
    if (has_shares) add_shares(index);
}

void FleetHits::add_shares(SharedIndex& index) {
    for (const auto& [slot, shares] : index.hits.shares) {
        const u32 cache = slot < cache_of_slot_.size() ? cache_of_slot_[slot] : kNone;
        if (cache == kNone) continue;
        for (const auto& [share, tokens] : shares) {
            const std::string& name = index.matcher.name_of_share(slot, share);
            add_share(cache, name, static_cast<i64>(tokens));
        }
    }
}

void FleetHits::add(u32 cache, const CachedTokens& hit) {
    at_[cache].gpu += hit.gpu;
    at_[cache].all += hit.all;
    at_[cache].junction += hit.junction;
}

void FleetHits::add_share(u32 cache, std::string_view tier, i64 tokens) {
    u32 last = kNone;
    for (u32 at = first_[cache]; at != kNone; at = shares_[at].next) {
        if (shares_[at].tier == tier) {
            shares_[at].tokens += tokens;
            return;
        }
        last = at;
    }
    const auto added = static_cast<u32>(shares_.size());
    (last == kNone ? first_[cache] : shares_[last].next) = added;
    shares_.push_back({std::string(tier), tokens, kNone});
}

}  // namespace kvroute::decide
