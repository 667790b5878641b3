#include "decide/recent_prefixes.hpp"

#include <algorithm>

namespace kvroute::decide {

void RecentPrefixes::Generation::remember(CacheId cache, std::span<const u64> keys, double until) {
    Expiries& held = by_cache[cache];
    entries -= held.size();
    for (const u64 key : keys) held[key] = until;
    entries += held.size();
    std::vector<CacheId>& known = by_root[keys[0]];
    if (std::find(known.begin(), known.end(), cache) == known.end()) known.push_back(cache);
}

void RecentPrefixes::Generation::forget(CacheId cache) {
    const auto found = by_cache.find(cache);
    if (found == by_cache.end()) return;
    entries -= found->second.size();
    by_cache.erase(found);
}

const RecentPrefixes::Expiries* RecentPrefixes::Generation::of(CacheId cache) const {
    const auto found = by_cache.find(cache);
    return found == by_cache.end() ? nullptr : &found->second;
}

void RecentPrefixes::remember(CacheId cache, std::span<const u64> keys, double now) {
    rotate(now);
    keys = fitting(keys);
    if (!keys.empty()) young_.remember(cache, keys, now + ttl_s_);
}

void RecentPrefixes::match(std::span<const u64> keys, i64 step, double now,
                           std::vector<ComingAt>& out) {
    rotate(now);
    if (keys.empty()) return;
    const std::size_t first = out.size();
    for (const Generation* generation : {&young_, &old_}) {
        const auto root = generation->by_root.find(keys[0]);
        if (root == generation->by_root.end()) continue;
        for (const CacheId cache : root->second) {
            const auto is_same = [&](const ComingAt& each) { return each.cache == cache; };
            if (std::any_of(out.begin() + static_cast<std::ptrdiff_t>(first), out.end(), is_same)) {
                continue;
            }
            const i64 tokens = static_cast<i64>(live_keys(cache, keys, now)) * step;
            if (tokens) out.push_back({cache, {tokens, tokens}});
        }
    }
}

void RecentPrefixes::forget(CacheId cache) {
    young_.forget(cache);
    old_.forget(cache);
}

// Returns how many leading keys are live there.
std::size_t RecentPrefixes::live_keys(CacheId cache, std::span<const u64> keys, double now) const {
    const Expiries *young = young_.of(cache), *old = old_.of(cache);
    const auto is_live_in = [&](const Expiries* held, u64 key) {
        if (held == nullptr) return false;
        const auto found = held->find(key);
        return found != held->end() && found->second > now;
    };
    const auto is_live = [&](std::size_t index) {
        return is_live_in(young, keys[index]) || is_live_in(old, keys[index]);
    };
    if (!is_live(0)) return 0;
    std::size_t low = 1, high = keys.size();
    while (low < high) {
        // The last key first, since equal prompts are the usual case; then half-way.
        const std::size_t middle = high == keys.size() ? high - 1 : (low + high) / 2;
        if (is_live(middle)) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

// Drops the generation that has expired.
void RecentPrefixes::rotate(double now) {
    if (!rotate_at_) rotate_at_ = now + ttl_s_;
    if (now < *rotate_at_) return;
    // After two times to live without a call, the young generation has expired as well.
    old_ = now < *rotate_at_ + ttl_s_ ? std::move(young_) : Generation();
    young_ = Generation();
    rotate_at_ = now + ttl_s_;
}

// Returns the leading keys that there is room for; drops the old generation to make some.
std::span<const u64> RecentPrefixes::fitting(std::span<const u64> keys) {
    const std::size_t held = entries();
    const std::size_t room = held < max_entries_ ? max_entries_ - held : 0;
    if (keys.size() <= room) return keys;
    const std::size_t evicted = old_.entries;
    old_ = Generation();
    evicted_ += evicted;
    if (keys.size() <= room + evicted) return keys;
    truncated_ += 1;
    return keys.first(room + evicted);
}

}  // namespace kvroute::decide
