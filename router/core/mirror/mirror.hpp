// Simulates every cache that this router drives: requests in prefill, ended ones in the order in which
// their blocks will be evicted, and what a policy learns from that.
//
// An engine evicts what was least recently used, by the end of the request that used it last. So the
// order is known here. How far the eviction has come is not: it is read from the index, by asking
// whether the oldest request's own part of its prompt could still be reused. That is done when a
// request begins to respond or ends, and for the cache that was chosen, never for a decision; and only
// if the cache has removed something since.
//
// No lock is in here. The owner guards a mirror, with the visits, by one mutex (the "books"), which is
// taken before that of an index: methods take that for a moment where they read one. A thread that must
// not wait with something in hand, as the GIL, sets `before_waiting` (`index/shared.hpp`).
//
// Nor is a clock: `now` is in seconds, on one monotonic clock. Two threads that read it before they
// took the mutex may come in the other order; that does no harm.
//
// The keys of a prompt every `kStep` tokens, and those of the hits' step, are best computed before
// (`Prompt::prefix_keys`): else they are computed under the mutex.
#pragma once

#include <deque>

#include "mirror/cache.hpp"

namespace kvroute::mirror {

// Uncached tokens from which a prompt is published to others at once.
constexpr Tokens kWorthPublishing = 256;

// A request's use of one of its prompts.
struct InUse {
    std::shared_ptr<Use> at_cache, of_model;
};

// One request at one cache, from its sending to its end. Every step may be repeated, or left out; a
// mirror keeps what it needs of it. Its `Computing` is its prompt, where it has just one.
struct Visit : Computing {
    u64 number = 0;  // among those of its mirror
    ModelId model = 0;
    std::shared_ptr<ModelTraffic> traffic;  // of the model
    std::shared_ptr<Cache> at;
    double started_at = 0.0;
    Tokens uncached_tokens = 0;
    ByTier loads;                // tokens loaded for it from below the GPU
    double most_progress = 0.0;  // tokens assumed computed, at most, while it is the first in prefill
    LookUp look_up;              // of its prompt
    Coming found;                // the part that will be cached when the engine admits it
    bool is_in_prefill = false;
    bool is_decoding = false;
    bool is_over = false;
    bool is_published = false;     // to other routers
    double known_until = 0.0;  // when its prompt no longer counts as being computed
    std::vector<InUse> uses;     // of its prompts
    double evicted_before = 0.0;  // blocks that will be evicted until it is computed, as last foreseen
    std::size_t number_live = 0;  // its place among those that the mirror keeps

    bool has_prompt() const { return look_up.prompt != nullptr; }
    // Returns the prompt's tokens that will be cached when the engine admits it.
    Tokens expected_tokens() const { return found.tokens; }
};

// A request that is sent to a cache.
struct Sent {
    ModelId model = 0;
    std::shared_ptr<SharedIndex> index;  // the model's
    SourceNumber source = 0;             // the cache there
    CacheId cache = 0;
    std::span<const LookUp> prompts;  // as far as they are known; each with its prompt
    Tokens prompt_tokens = 0;         // of all of them
    Tokens uncached_tokens = 0;       // of these, those that have to be computed there
    Tokens hit_tokens = 0;            // of these, those that are cached there now
    double speed = 1.0;               // of the replica, relative to others
    ByTier loads;                     // the hit's tokens from below the GPU
    Tokens junction_tokens = 0;  // behind the hit, those that only full attention has there
    std::span<const Tokens> keep;  // lengths at which to keep windows and states, as hinted
};

// A prompt that is being computed for a request, or has just been, as published to others.
struct Published {
    const Visit& visit;
    Tokens queued_tokens;  // the last ones of the prompt, which have still to be computed
    bool is_new;           // not published so far
};

// The number of a prompt that is being computed for another router.
using OtherNumber = u32;

struct MirrorStatistics {
    std::size_t caches = 0;
    std::size_t keys = 0;      // over all caches
    std::size_t requests = 0;  // ended ones that still own something
    std::size_t kept = 0;      // their memory, in keys; this is bounded
};

// Follows the requests that this router sends.
class Mirror {
public:
    static constexpr double kMaxProgress = 0.95;  // of the first prompt in prefill, computed at most
    static constexpr double kOutlookS = 0.05;  // how long an outlook holds while nothing happens there
    static constexpr double kSoonS = 0.02;  // a short prompt computed within it is not published
    static constexpr double kEventsS = 0.25;  // after a first token, until events surely show it

    // `max_keys`: bound on the memory for all caches together, in keys (`Ownership::size`); the oldest
    // requests of the cache that grows are forgotten first. `first_number`: of its visits, random:
    // other routers must not take a prompt of this process for one of an earlier process of its name.
    Mirror(std::size_t max_keys, FirstPrices first_prices, u64 first_number);
    Mirror(const Mirror&) = delete;
    Mirror& operator=(const Mirror&) = delete;

    // --- what is sent ---

    std::shared_ptr<Visit> begin(const Sent& sent, double now);
    // A visit's first token came. `is_timed`: just now, and not all tokens with it.
    void first_token(const std::shared_ptr<Visit>& visit, bool is_timed, double now);
    // A visit is over. `was_served`: its prompt may be cached there now.
    void ended(const std::shared_ptr<Visit>& visit, bool was_served, double now);

    // --- what routers publish to each other ---

    // Calls `see(published)` for each prompt that is being computed for requests of this router, as far
    // as others should know of it before its events reach them, in no order.
    //
    // A short prompt that is computed at once is left out: publishing and receiving it costs more than
    // computing it twice.
    template <class See>
    void for_each_published(double now, See&& see) {
        forget_computed(now);
        own_.for_each([&](Computing& computing) {
            Visit& visit = static_cast<Visit&>(computing);
            const bool is_new = !visit.is_published;
            if (is_new && !is_worth_publishing(visit, now)) return;
            visit.is_published = true;
            see(Published{visit, visit.is_in_prefill ? visit.uncached_tokens : 0, is_new});
        });
    }

    // A prompt is being computed for others, until `remove_other`. `keys`: every `kStep` tokens of the
    // prompt, one at least. `tokens`: its length.
    OtherNumber add_other(CacheId cache, Tokens tokens, Keys keys);
    void remove_other(OtherNumber number);

    // Forgets what is cached at a replica, at all its ranks: it restarted, failed, or was removed.
    void forget(std::span<const CacheId> caches);
    // No replica serves this model any more.
    void forget_model(ModelId model);

    // --- what a decision asks ---

    // Returns the rate of a replica of this model at speed 1.
    double prefill_tokens_per_s(ModelId model) { return traffic_of(model)->prefill_tokens_per_s(); }
    // Returns the probability that something unused for so long will be used again.
    double reuse_probability(ModelId model, double idle_s) {
        return traffic_of(model)->reuse_probability(idle_s);
    }
    // Returns the price of loading at a cache; null where nothing was sent to it yet.
    std::shared_ptr<const LoadPrices> load_prices(CacheId cache) const;

    // Returns the state of a cache that a new request of a model would meet; an unknown one is idle and
    // empty. `capacity_blocks`: its size by the engine.
    const Outlook& outlook(ModelId model, CacheId cache, std::optional<u64> capacity_blocks,
                           double now);
    // Returns the uncached tokens in prefill at a cache that are computed by now.
    double progress_tokens(CacheId cache, double now) const;

    // Finds the part of a prompt that each cache is computing for another request. `tokens`: its
    // length; 0 if it is unknown, so that tokens behind the last key never count.
    void in_prefill(const Asked& asked, Tokens tokens, double now, ComingTable& found);

    // Returns how many tokens of a prompt will be cached when the engine admits it, if it were sent
    // now: those in prefill there come first. They store their prompts, and evict others. `now`: hit
    // and run as of now.
    Tokens expected(CacheId cache, Prompt& prompt, Tokens prompt_tokens, Coming now);

    // Returns the requests that were the last to use something of a cache, by the time of their end,
    // earliest first; null: there are none.
    const Ownership::Ended* ended_at(CacheId cache) const;

    MirrorStatistics statistics() const;

private:
    // A prompt that is computed for others.
    using Other = std::unique_ptr<Computing>;

    const std::shared_ptr<ModelTraffic>& traffic_of(ModelId model);
    Cache* find(CacheId cache) const {
        return cache < caches_.size() ? caches_[cache].get() : nullptr;
    }
    const std::shared_ptr<Cache>& cache_of(const Sent& sent, double now);
    void replace(CacheId id, std::shared_ptr<Cache> with);
    const Layout& layout_of(CacheId cache) const;

    std::shared_ptr<Visit> new_visit(const Sent& sent, const std::shared_ptr<Cache>& cache,
                                     Coming found, double now);
    void enter_prefill(std::shared_ptr<Visit> visit, double now);
    void leave_prefill(Visit& visit, bool is_computed, double now);
    void drop(Visit& visit);
    void forget_computed(double now);
    void give_back(const Visit& visit, const std::shared_ptr<Use>& use, double now);
    void leave(const Visit& visit, std::span<const Tokens> boundaries, Tokens before);
    bool is_worth_publishing(const Visit& visit, double now) const;

    // True where `outlook` looks at the cache anew, and reads its size.
    bool wants_look(CacheId cache, double now) const;
    Coming at_admission(Cache& cache, Prompt& prompt, Tokens prompt_tokens, Coming now);
    double foresee_evictions(Cache& cache);

    void look_at_layout(Cache& cache);
    void look_at_oldest(Cache& cache);
    void fit(Cache& cache);

    std::size_t max_keys_;
    FirstPrices first_prices_;
    std::vector<std::shared_ptr<Cache>> caches_;  // by id; null: unknown
    std::size_t cache_count_ = 0;
    std::vector<std::shared_ptr<ModelTraffic>> models_;  // likewise
    InPrefill own_;     // prompts that are computed for this router, or have just been
    InPrefill others_;  // prompts that are computed for others
    std::vector<Other> other_prompts_;  // the latter, by number
    std::vector<OtherNumber> free_;     // numbers of these
    bool is_sparse_ = false;  // some cache keeps windows or states only at boundaries
    std::vector<std::shared_ptr<Visit>> live_;  // those in prefill, and those that have just been
    std::deque<Visit*> computed_;               // the latter
    u64 last_number_;
    std::vector<Tokens> boundaries_;  // scratch; its memory is reused
};

}  // namespace kvroute::mirror
