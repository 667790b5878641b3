// The requests that this router has in flight at each replica, and at each of its data-parallel ranks:
// prompt tokens until the first response token, then decoding requests. Those of other routers and
// workers are kept beside them.
//
// Nothing here locks: the caller holds the mutex of the books (`decide.hpp`).
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "index/keys.hpp"

namespace kvroute::decide {

using i64 = std::int64_t;

struct Load {
    i64 prefilling = 0;      // requests
    i64 prefill_tokens = 0;  // uncached prompt tokens of these, as predicted when they were sent
    i64 decoding = 0;        // requests
    i64 context_tokens = 0;  // prompt and response tokens of these
    i64 tokenizing = 0;      // the router's own requests for token ids: not among `requests`

    i64 requests() const { return prefilling + decoding; }
    bool is_empty() const { return !(prefilling || decoding || tokenizing); }
    Load& operator+=(const Load& other);
    bool operator==(const Load&) const = default;
};

// One replica's load. It lives as long as a fleet, a request or a report of others refers to it.
class alignas(64) ReplicaLoad {
public:
    struct OfRank {
        int dp_rank = 0;
        Load own, others;
    };

    explicit ReplicaLoad(std::string id) : id_(std::move(id)) {}

    const std::string& id() const { return id_; }
    const Load& own() const { return own_; }
    const Load& others() const { return others_; }
    const std::vector<OfRank>& ranks() const { return ranks_; }  // of those with any, in no order

    // Returns its own load and that of others.
    Load all() const;

    // Finds the same at each of `dp_ranks`, all that the replica has. Requests whose rank the engine
    // chose are shared out equally, rounded up.
    void of_ranks(std::span<const int> dp_ranks, std::vector<Load>& out) const;

private:
    friend class LoadTracker;
    friend class InFlight;
    friend class Tokenizing;

    OfRank& at(int dp_rank);
    void drop_if_empty(int dp_rank);

    Load own_, others_;
    std::vector<OfRank> ranks_;
    std::string id_;
};

// A replica, or one of its ranks, and what another router or worker has in flight there.
struct OthersLoad {
    std::string replica;
    std::optional<int> dp_rank;
    Load load;
};

class LoadTracker {
public:
    // Returns a replica's load by its id; made on the first call.
    std::shared_ptr<ReplicaLoad> of(const std::string& id);
    // Null where `of` was not called for it.
    std::shared_ptr<ReplicaLoad> find(const std::string& id) const;

    // Counts what others have in flight in place of what they had.
    void take_others(const std::vector<OthersLoad>& loads);

    // Visits every replica with requests of this router.
    void each(const std::function<void(const ReplicaLoad&)>& see) const;

    i64 in_flight() const { return in_flight_; }
    i64 started() const { return started_; }
    i64 retried() const { return retried_; }

private:
    friend class InFlight;

    void forget_unused();

    std::unordered_map<std::string, std::weak_ptr<ReplicaLoad>> loads_;
    std::size_t forget_at_ = 64;  // entries
    std::vector<std::shared_ptr<ReplicaLoad>> with_others_;
    i64 in_flight_ = 0, started_ = 0, retried_ = 0;
};

// One request's share of the sums, from its sending to its end. Steps may come in any order,
// repeatedly or not at all, and return whether they had an effect; after `ended` none has, and
// everything that was added is taken back. So the sums return to exactly zero in every case.
class InFlight {
public:
    // `uncached_tokens`: of the prompt, those that have to be computed there, as predicted.
    // `dp_rank`: nothing where the engine chooses.
    InFlight(LoadTracker& tracker, std::shared_ptr<ReplicaLoad> at, i64 uncached_tokens,
             i64 prompt_tokens, std::optional<int> dp_rank);
    InFlight(const InFlight&) = delete;
    InFlight& operator=(const InFlight&) = delete;
    ~InFlight() { ended(); }

    const ReplicaLoad& at() const { return *at_; }

    // The first byte of the response has arrived: its prefill is done.
    bool first_token();
    // The response grew by about so many tokens, and so did its context.
    bool generated(i64 tokens);
    // The replica failed; the request is sent to another one, from the start.
    bool retried(std::shared_ptr<ReplicaLoad> at, i64 uncached_tokens, std::optional<int> dp_rank);
    bool ended();

private:
    enum class Phase : u8 { prefill, decode, ended };

    void enter(std::shared_ptr<ReplicaLoad> at, i64 uncached_tokens, std::optional<int> dp_rank);
    void leave();
    template <class Change>
    void change(Change&& change_one);

    LoadTracker& tracker_;
    std::shared_ptr<ReplicaLoad> at_;
    std::optional<int> dp_rank_;
    i64 prompt_tokens_, uncached_tokens_ = 0, context_tokens_ = 0;
    Phase phase_ = Phase::prefill;
};

// One request for token ids, for as long as it lives.
class Tokenizing {
public:
    explicit Tokenizing(std::shared_ptr<ReplicaLoad> at) : at_(std::move(at)) {
        at_->own_.tokenizing += 1;
    }
    Tokenizing(const Tokenizing&) = delete;
    Tokenizing& operator=(const Tokenizing&) = delete;
    ~Tokenizing() { at_->own_.tokenizing -= 1; }

private:
    std::shared_ptr<ReplicaLoad> at_;
};

}  // namespace kvroute::decide
