// One decision: how much of the prompts each cache has, who can take the request now, what each
// candidate would cost, and who comes first.
//
// Two steps, since they need different mutexes and a match may take long:
//
//     match(question, scratch)     takes the index's mutex, prompt by prompt
//     rank(question, scratch)      the caller holds the books' mutex; for a pull from a peer it
//                                  takes the index's as well, which comes behind it
//
// A caller that books what was chosen holds the books' mutex until that is done, so that no other
// decision comes between. `Scratch` belongs to one thread and keeps its memory: on the usual path
// nothing is allocated. It holds the ranking until the next decision.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "decide/fleet.hpp"
#include "decide/hits.hpp"
#include "decide/policies.hpp"
#include "decide/recent_prefixes.hpp"
#include "mirror/approximate.hpp"

namespace kvroute::decide {

constexpr u64 kKeyStep = 64;  // tokens between two keys of a prompt; the same for all prompts
constexpr i64 kLeastPull = 512;  // tokens that a pull must save; fewer are computed in one step

// The state that all decisions of a process read and all requests write.
struct Books : std::enable_shared_from_this<Books> {
    std::mutex mutex;  // guards all of it, every `Conditions`, and what a `Decider` keeps
    LoadTracker load;
    CacheIds cache_ids;
    std::unique_ptr<mirror::Mirror> mirror;  // null: caches are not simulated
    // Null: caches without events are not estimated.
    std::unique_ptr<mirror::ApproximateCaches> estimates;
};

// The ranks and pulls that a request and its engine allow.
struct RankChoice {
    bool is_read = true;  // the engine takes the rank from the request
    std::optional<int> asked;  // the rank that the client asks for
    bool may_pull = true;  // the engine takes the peer to pull from out of the request
};

// The longest prefix that some replica's memory holds for others.
struct PeerPrefix {
    i64 tokens = 0;
    u32 source = kNone;  // the replica
};

// A plug-in that chooses among the data-parallel ranks of a replica.
class RankCosts {
public:
    virtual ~RankCosts() = default;
    // Writes a cost for each of `ranks`. May let go of the mutex of the books meanwhile.
    virtual void find(const Candidates& ranks, const Fleet& fleet, std::vector<double>& out) = 0;
};

struct Question {
    std::shared_ptr<const Fleet> fleet;
    std::span<const u32> replicas;  // those that serve the model, in any state
    std::string_view model, session, tenant;
    mirror::ModelId in_mirror = 0;  // the model's id there
    i64 prompt_tokens = 0;  // of all prompts; 0: unknown
    SharedIndex* index = nullptr;
    std::span<Prompt* const> prompts;  // hashed for the index; none: they are not looked at
    std::span<const std::vector<Computed>> computed;  // of each prompt, where the index needs any
    RankCosts* rank_costs = nullptr;  // null: the policy chooses, or else the least wait
    RankChoice choice;
    double now = 0.0;  // on the monotonic clock of conditions and of the mirror
};

struct Ranking {
    std::shared_ptr<const Fleet> fleet;
    Candidates able;    // those that can take the request, in no order
    Candidates unable;  // those that cannot
    std::vector<Obstacle> obstacles;  // of each of these
    Order order;        // of `able`; not a plug-in's
    u32 first = kNone;  // the best of `able`
    double prefill_tokens_per_s = 0.0;  // at which costs were counted

    // Returns all of `able`, best first: sorted on the first call.
    const std::vector<u32>& numbers();
    bool has_failed() const { return first != kNone && !order.is_finite(); }

private:
    friend class Decider;
    std::vector<u32> numbers_;
};

class Scratch {
public:
    FleetHits hits;
    Ranking ranking;
    // Found by `rank` where there is an index; a caller without one sets it.
    std::optional<PeerPrefix> peer_prefix;

private:
    friend class Decider;

    struct Holder {  // a replica whose memory others may read
        i64 cached = 0;
        double draw = 0.0;
        u32 replica = 0;
    };

    std::vector<std::span<const u64>> keys_;  // of each prompt, every `kKeyStep` tokens
    std::vector<Coming> coming_;              // by cache of the fleet
    std::vector<ComingAt> found_;
    mirror::ComingTable in_prefill_;
    bool is_remembered_ = false;  // the next prompt like it will be found where this one goes
    std::vector<u32> caches_;                 // of the current candidates, by number
    Candidates ranks_;                        // of one replica
    Order rank_order_;
    std::vector<int> dp_ranks_;
    std::vector<Load> rank_loads_;
    std::vector<Holder> holders_;
};

class Decider {
public:
    struct Settings {
        Policy::Kind policy = Policy::Kind::least_delay;
        Weights weights;
        double engine_load_stale_after_s = 10.0;
        u64 seed = 0;
        bool shares_lots = false;  // all who get the same prompt draw the same
        bool plug_in_needs_outlook = false;
    };

    // `books` must outlive it.
    Decider(Books& books, Settings settings);

    // Between equal replicas, and between equal ranks and holders.
    Lots ties, lots;
    bool shares_lots = false;
    // Stand in for the mirror's prompts in prefill; null: those count. Guarded by the books' mutex.
    std::shared_ptr<RecentPrefixes> recent;

    bool needs_outlook() const { return policy_.needs_outlook(); }
    // The number made so far.
    u64 decisions() const { return decisions_; }
    const Weights& weights() const { return policy_.weights(); }
    Books& books() const { return books_; }

    void match(const Question& question, Scratch& scratch) const;
    const Ranking& rank(const Question& question, Scratch& scratch);

private:
    void find(const Question& question, Scratch& scratch);
    void find_coming(const Question& question, Prompt& prompt, std::span<const u64> keys,
                     Scratch& scratch) const;
    void sort_out(const Question& question, Scratch& scratch);
    State state_of(const Replica& replica, u32 number, const Load& load,
                   const Question& question) const;
    State state_of_rank(const Replica& replica, u32 number, int dp_rank, const Load& load,
                        const Question& question) const;
    bool knows_load(const Replica& replica, const Question& question) const;

    void fill(const Wanted& asked, const Question& question, Scratch& scratch, bool is_able);
    void add_what_is_known(const Wanted& asked, const Question& question, Scratch& scratch,
                           Candidates& out);
    void add_lower(const Question& question, const Scratch& scratch, u32 cache, u32 number,
                   Candidates& out) const;
    std::optional<double> mean_price(CacheId cache, std::span<const TierShare> shares) const;
    void put_outlooks(const Question& question, const Scratch& scratch, Candidates& out) const;
    void put_estimates(const Wanted& asked, const Question& question, const Scratch& scratch,
                       Candidates& out) const;
    void put_best_rank(const Wanted& asked, const Question& question, Scratch& scratch, u32 place,
                       Candidates& out);
    u32 best_rank(const Wanted& asked, const Question& question, Scratch& scratch);

    void find_holders(const Question& question, Scratch& scratch);
    void find_peer_prefix(const Question& question, Scratch& scratch);
    void put_pulls(const Question& question, Scratch& scratch);

    Books& books_;
    Settings settings_;
    Policy policy_;
    u64 decisions_ = 0;
};

}  // namespace kvroute::decide
