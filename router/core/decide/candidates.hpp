// The candidates of one decision as columns: item i of each is about candidate i.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "decide/outlook.hpp"

namespace kvroute::decide {

constexpr int kAnyRank = -1;  // the engine chooses

// A candidate's part that does not depend on the prompt.
struct State {
    u32 replica = 0;  // its number in the fleet
    int dp_rank = kAnyRank;
    double speed = 1.0;  // relative to other replicas
    bool is_suspect = false;  // events were lost, so its hit is doubtful
    double estimate_trust = 0.0;  // where an estimate stands in for events, the share that counts
    i64 queued_tokens = 0;  // uncached ones of requests in prefill
    i64 prefilling = 0, decoding = 0;  // requests
    i64 context_tokens = 0;  // of those in decode
    i64 foreign = 0, waiting = 0;  // requests of others, and those in the engine's own queue

    i64 requests() const { return prefilling + decoding + foreign; }
    bool is_doubtful() const { return is_suspect || estimate_trust != 0.0; }
    // The share of a doubtful hit that is counted.
    double share_that_counts(double suspect_trust) const {
        return estimate_trust != 0.0 ? estimate_trust : suspect_trust;
    }
};

// A candidate's part of the prompt, in tokens.
struct CachedTokens {
    i64 gpu = 0;
    i64 all = 0;  // with what lower tiers would load
    i64 junction = 0;  // behind the GPU's hit, those that only full attention has there
    i64 recent = 0;  // sent there so recently that events may not show them yet
};

// The tokens that a lower tier or shared store would load. Nearly all names fit into the string itself.
struct TierShare {
    std::string tier;
    i64 tokens = 0;
};

// A candidate's hit below its GPU.
struct Lower {
    u32 first_share = 0, shares = 0;  // in `Candidates::shares`
    std::optional<double> price;  // of a token, in tokens to compute, as it was measured there
    u32 pull_from = kNone;  // the replica from whose memory a part is pulled
};

struct Candidates {
    std::vector<State> states;
    std::vector<CachedTokens> cached;
    std::vector<Outlook> outlooks;
    std::vector<Lower> lower;
    std::vector<TierShare> shares;  // of all candidates, one after the other

    std::size_t size() const { return states.size(); }

    // `cached` and `outlooks` stay: each decision overwrites them, as many as there are states.
    void clear() {
        states.clear();
        lower.clear();
        shares.clear();
    }

    std::span<const TierShare> shares_of(const Lower& of) const {
        return std::span(shares).subspan(of.first_share, of.shares);
    }
};

}  // namespace kvroute::decide
