// Estimates the content of caches without events, by requests and responses.
//
// A prompt sent to a cache was stored there, an engine evicts what was used longest ago, and responses
// report how much of their prompts was cached. From that follows an estimate, over the keys that the
// mirror has of prefixes, one for every `kStep` tokens. It is bounded by the capacity that the engine
// reports, or by less: as far as reuse was seen to last.
//
// An estimate stands in where a replica has no event stream, or where one has not been whole for long.
// It begins with what this router sent there before, and ends when the stream is whole again.
//
// No lock is in here, as in `mirror.hpp`: both are guarded by the same mutex.
#pragma once

#include "mirror/mirror.hpp"

namespace kvroute::mirror {

// The part of a prompt that a cache may hold.
struct ApproximateHit {
    Tokens tokens = 0;
    double trust = 0.0;  // of the tokens predicted there lately, the share that was cached
};

// The estimate of one cache.
struct ApproximateStatistics {
    Tokens tokens = 0;           // that it may hold
    Tokens capacity_tokens = 0;  // as far as reuse was seen to last; at most the reported size
    double trust = 0.0;          // see `ApproximateHit`

    bool operator==(const ApproximateStatistics&) const = default;
};

// One such cache.
class ApproximateCache {
public:
    static constexpr double kFirstTrust = 0.8;
    static constexpr double kFirstTrustTokens = 4096;  // it counts as much as one prompt of this length
    static constexpr int kTrustReports = 64;
    static constexpr std::size_t kLeastKeys = 16;  // no cache is taken to be smaller
    // A prediction that fails within the assumed capacity lowers that by 10 % at most; one that holds
    // at 80 % of it or more raises it by 5 %, and so does a hit on keys that were forgotten.
    static constexpr double kShrink = 0.9, kGrow = 1.05, kNear = 0.8;
    static constexpr double kFull = 0.9;  // from here on it is taken to evict

    // A prompt's hit in an estimate.
    struct Met {
        struct Stretch {
            std::size_t end;                // of its keys
            std::optional<double> used_at;  // when they had been used last; nothing: they were in use
        };
        std::vector<Stretch> stretches;
        std::size_t known_keys = 0;  // leading ones, with those that were forgotten for lack of room
    };

    // `lost_at`: when its events were lost; those of another loss are another estimate. `limit_keys`:
    // that fit into it.
    ApproximateCache(double lost_at, std::size_t limit_keys)
        : limit_keys(limit_keys), lost_at_(lost_at),
          trust_(kFirstTrust, kFirstTrustTokens, kTrustReports) {}

    std::size_t limit_keys;
    double lost_at() const { return lost_at_; }
    // Returns how many keys it is assumed to hold.
    std::size_t capacity_keys() const;

    // Returns what it may hold of a request's prompts. `prompts`: the keys of each. `most_tokens`: of
    // all prompts, those that a hit may cover.
    ApproximateHit hit(std::span<const std::span<const u64>> prompts, Tokens most_tokens) const;
    // Returns how long what it evicts next has been idle; nothing while it evicts nothing.
    std::optional<double> eviction_age_s(double now) const;

    // A prompt was sent there before the events were lost, by a request that ended then. Called in the
    // order of those ends.
    void remember(const Keys& keys, double ended_at);
    // A prompt has been computed. Returns what `end` takes; `met` gets its hit.
    std::shared_ptr<Use> begin(const Keys& keys, Met& met);
    // A request is over: its prompt is the last that was used, and the oldest make room. `most_keys`:
    // that there is memory for.
    void end(const std::shared_ptr<Use>& use, std::size_t most_keys, double now);
    // Forgets the keys used longest ago, down to the capacity or to `most_keys`.
    void fit(std::size_t most_keys);

    // An engine reports how much of a prompt was cached.
    //
    // Blocks that are idle for longest go first. So a prediction shows, by the age of the last block
    // that it counts on, how far the capacity reaches.
    void learn(const Met& found, Tokens predicted_tokens, Tokens actual_tokens);

    ApproximateStatistics statistics() const;

private:
    void grow() { reach_ = std::min(reach_ * kGrow, 1.0); }
    void remember_forgotten(u64 key);
    void recall(u64 key);

    double lost_at_;
    double reach_ = 1.0;  // of the limit, the share that is known to be of use
    Ownership content_;
    Chain<u64> forgotten_;  // keys that had to make room, the earliest first
    FlatMap places_;        // of these
    FadingRatio trust_;
};

// One request at such a cache, from its sending to its end. Nothing is stored before its first token.
class ApproximateVisit {
public:
    // `prompts`: of each the keys. `hit_tokens`: that were predicted to be cached. `most_keys`: that
    // there is memory for.
    ApproximateVisit(std::shared_ptr<ApproximateCache> cache, std::vector<Keys> prompts,
                     Tokens hit_tokens, std::size_t most_keys)
        : cache_(std::move(cache)), prompts_(std::move(prompts)), hit_tokens_(hit_tokens),
          most_keys_(most_keys) {}

    // Its prompts have been computed; a second call does nothing.
    void first_token();
    // It is over; a second call does nothing. `actual_tokens`: of its only prompt, those that the
    // engine reported as cached; nothing: no report.
    void ended(std::optional<Tokens> actual_tokens, double now);

private:
    std::shared_ptr<ApproximateCache> cache_;
    std::vector<Keys> prompts_;
    Tokens hit_tokens_;
    std::size_t most_keys_;
    std::vector<std::shared_ptr<Use>> uses_;
    ApproximateCache::Met found_;
};

// All caches that need an estimate.
class ApproximateCaches {
public:
    struct Options {
        double after_s = 60.0;  // for how long events must have been incomplete
        Tokens cache_tokens = 262'144;     // size of a cache where the engine does not report it
        std::size_t max_keys = 1'048'576;  // bound on the keys of all caches together
    };

    // `mirror`: knows what was sent to each cache before the events were lost; may be null.
    ApproximateCaches(const Mirror* mirror, Options options)
        : mirror_(mirror), options_(options) {}

    // Returns the estimate that stands in for a cache's events; null where they are whole, or have not
    // been missing for long. `lost_since`: since when they have not been whole; nothing: they are.
    // `cache_tokens`: its size as the engine reports it.
    std::shared_ptr<ApproximateCache> stand_in(CacheId cache, std::optional<double> lost_since,
                                               std::optional<Tokens> cache_tokens, double now);

    // Returns true where `stand_in` returns none for events that are not whole: too short a time.
    bool waits(double lost_since, double now) const {
        return now - lost_since < options_.after_s;
    }

    // A request is sent to a cache; null if no estimate stands in for it. `prompts`: the keys of each.
    // `hit_tokens`: that were predicted to be cached.
    std::shared_ptr<ApproximateVisit> visit(CacheId cache, std::vector<Keys> prompts,
                                            Tokens hit_tokens) const;

    // Forgets what is cached at a replica, at all its ranks: it restarted, failed, or was removed.
    void forget(std::span<const CacheId> caches);

    // Returns those that an estimate stands in for, or did until now.
    std::vector<CacheId> caches() const;
    // Returns the estimate of one of these; drops one that stands in no more. See `stand_in`.
    std::optional<ApproximateStatistics> statistics(CacheId cache,
                                                    std::optional<double> lost_since, double now);

private:
    std::size_t most_keys() const {
        return options_.max_keys / std::max<std::size_t>(count_, 1);
    }
    std::optional<double> lost_at(std::optional<double> since, double now) const {
        return since && waits(*since, now) ? std::nullopt : since;
    }
    std::shared_ptr<ApproximateCache> begin(CacheId cache, double lost_at,
                                            std::size_t limit_keys) const;
    const std::shared_ptr<ApproximateCache>& find(CacheId cache) const {
        static const std::shared_ptr<ApproximateCache> unknown;
        return cache < by_id_.size() ? by_id_[cache] : unknown;
    }
    void put(CacheId cache, std::shared_ptr<ApproximateCache> with);

    const Mirror* mirror_;
    Options options_;
    std::vector<std::shared_ptr<ApproximateCache>> by_id_;  // null: none
    std::size_t count_ = 0;
};

}  // namespace kvroute::mirror
