// Prefixes that were just sent to each cache: a prediction that stands in until the engines' events
// report them.
//
// A key stands for the whole prefix up to it, and a prompt is always remembered from its start. So
// if a key is live, all keys before it are, and the end of the live ones is found by bisection.
// The prompt's first key gives the caches to look at. Two generations make forgetting cheap:
// entries are written to the young one, and after each time to live the old one is dropped as a
// whole. Each entry carries its own expiry, so look-ups are exact.
#pragma once

#include <span>
#include <unordered_map>
#include <vector>

#include "decide/outlook.hpp"

namespace kvroute::decide {

class RecentPrefixes {
public:
    // `ttl_s`: how long an entry counts. `max_entries`: bound on keys over all caches.
    RecentPrefixes(double ttl_s, std::size_t max_entries)
        : ttl_s_(ttl_s), max_entries_(max_entries) {}

    // A prompt was just sent to a cache. `keys`: at every multiple of one step, from its start.
    void remember(CacheId cache, std::span<const u64> keys, double now);

    // Appends, for each cache that got any, how many leading tokens of a prompt were recently sent
    // there.
    void match(std::span<const u64> keys, i64 step, double now, std::vector<ComingAt>& out);

    // Forgets what was sent to a cache: it restarted, failed, or was removed.
    void forget(CacheId cache);

    std::size_t entries() const { return young_.entries + old_.entries; }
    u64 evicted() const { return evicted_; }      // dropped early, to make room
    u64 truncated() const { return truncated_; }  // prompts of which only the first keys had room

private:
    using Expiries = std::unordered_map<u64, double>;

    struct Generation {
        std::size_t entries = 0;
        std::unordered_map<CacheId, Expiries> by_cache;
        // The first key of a prompt -> where it was sent. Some of it may be forgotten since.
        std::unordered_map<u64, std::vector<CacheId>> by_root;

        void remember(CacheId cache, std::span<const u64> keys, double until);
        void forget(CacheId cache);
        const Expiries* of(CacheId cache) const;
    };

    void rotate(double now);
    std::span<const u64> fitting(std::span<const u64> keys);
    std::size_t live_keys(CacheId cache, std::span<const u64> keys, double now) const;

    double ttl_s_;
    std::size_t max_entries_;
    Generation young_, old_;
    std::optional<double> rotate_at_;
    u64 evicted_ = 0, truncated_ = 0;
};

}  // namespace kvroute::decide
