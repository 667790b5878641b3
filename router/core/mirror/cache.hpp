// One cache as the mirror follows it: requests in prefill there, the blocks of ended ones, and its
// state in the index.
#pragma once

#include "mirror/eviction.hpp"
#include "mirror/in_prefill.hpp"
#include "mirror/prices.hpp"
#include "index/shared.hpp"

namespace kvroute::mirror {

// One cache in the index of its model. Everything is read under the index's mutex, for a moment.
class IndexedCache {
public:
    IndexedCache(std::shared_ptr<SharedIndex> index, SourceNumber source)
        : index_(std::move(index)), source_(source) {}

    bool is(const std::shared_ptr<SharedIndex>& index, SourceNumber source) const {
        return index_ == index && source_ == source;
    }
    const KeySpace& space() const { return index_->index.space(); }

    // True where its events are followed.
    bool is_followed() const;
    // Returns those on the GPU; 0 where the source is not there.
    u64 blocks_held() const;
    u64 removals() const;
    Layout layout() const;

    struct Hit {
        Tokens gpu = 0;
        Tokens cached = 0;  // with the blocks that lower tiers would load
        ByTier by_tier;
    };
    Hit hit(const LookUp& prompt) const;
    // Returns how much of a prompt full attention has there. `is_sparse`: of the cache; for one that is
    // not, returns the hit.
    Tokens full_run(const LookUp& prompt, bool is_sparse) const;

private:
    std::shared_ptr<SharedIndex> index_;
    SourceNumber source_;
};

// The next evictions of a cache, and the load that it is given.
struct Outlook {
    std::optional<double> eviction_age_s;  // idle time of what it evicts next; nothing: it evicts none
    double reuse_probability = 0.0;        // of what it evicts next
    double uncached_tokens_per_s = 0.0;    // that it was given to compute lately
    double arrivals_per_s = 0.0;           // requests that were sent to it lately
    double refill = 1.0;  // the cost of loading what it evicts, relative to computing it

    bool operator==(const Outlook&) const = default;
};

struct Visit;

// The time after which a request sent to a cache counts 1/e in its rates.
constexpr double kFadeS = 30.0;

struct alignas(64) Cache {
    Cache(CacheId id, IndexedCache in_index, const FirstPrices& first_prices, double now)
        : id(id), index(std::move(in_index)), since(now), work(kFadeS, now), arrivals(kFadeS, now),
          prices(first_prices), removals(index.removals()),
          had_content(index.blocks_held() > 0) {}

    // Every decision reads these of every cache.
    double outlook_until = 0.0;
    std::optional<Outlook> outlook;  // the last one returned; nothing: something has happened since
    std::vector<Visit*> prefilling;  // in the order of their arrival
    double first_since = 0.0;        // since when the first of these has been the first

    CacheId id;
    IndexedCache index;
    double since;
    FadingRate work, arrivals;
    LoadPrices prices;
    FadingRatio refill{1.0, 256.0, 64};  // the cost of loading evicted tokens, over computing them
    double speed = 1.0;
    Ownership content;
    std::optional<u64> capacity_blocks;
    u64 most_blocks = 0;    // that were ever seen there at once
    u64 removals;           // when the oldest request was looked at last
    bool had_content;       // it holds blocks from before the first request
    EvictionOrder order;    // of the blocks that requests have given back
    Tokens decoding = 0;    // requests in decode
    Tokens decoding_tokens = 0;    // of their prompts
    Tokens recomputed_tokens = 0;  // of these, those that full attention had already
    Layout layout;
    u64 looks = 0;

    // --- what it holds, and how long ---

    // Its size in blocks, as reported, or else as seen.
    u64 blocks() const { return capacity_blocks.value_or(0) ? *capacity_blocks : most_blocks; }
    // Returns how long what it evicts next has been idle; nothing while it evicts nothing.
    std::optional<double> eviction_age_s(double now) const;
    // Returns what is left of a prompt's hit and run when so many blocks have been evicted.
    Coming left_of(const Asked& asked, Coming now, double evicted_blocks);
    // Blocks that hold nothing, about: a request's last block in each group is not full.
    double free_blocks() const;
    // Blocks that no running request needs, about: those in full attention are needed.
    double evictable() const;
    Tokens full_run(const LookUp& prompt) const {
        return index.full_run(prompt, layout.is_sparse);
    }

    // --- what it has evicted ---

    // Forgets requests whose blocks were evicted since the last look.
    void forget_evicted();
    // Forgets the request whose blocks were used longest ago.
    void drop_oldest();

private:
    Tokens whole_boundary(std::span<const u64> keys, Tokens most_tokens, bool is_one) const;
    bool is_left(Use& oldest);
    void note_refill(const Use& gone, const IndexedCache::Hit& hit);
};

}  // namespace kvroute::mirror
