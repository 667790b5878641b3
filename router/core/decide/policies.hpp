// The built-in policies: hits and load in, a cost for each candidate out, and who comes first among
// equals. tests/oracle/scoring has them in Python, with the reasons; router/policies words the
// reasons of a choice.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "decide/candidates.hpp"
#include "decide/draws.hpp"

namespace kvroute::decide {

class Fleet;

// Costs, in prefill tokens; router/policies/types.py has the reasons.
struct Weights {
    double lower_tier_token = 0.1;
    std::vector<std::pair<std::string, double>> tier_token;  // by name, in upper case
    double queued_prefill_token = 0.5;
    double decode_request = 16.0;
    double decode_context_token = 0.01;
    double waiting_request = 256.0;
    double foreign_request = 64.0;
    double suspect_trust = 0.5;
    double recent_trust = 0.9;

    double of_tier(std::string_view name) const;
    // Returns the mean cost of a token below the GPU, as measured or else by its tier.
    double of_lower(const Candidates& candidates, u32 number) const;
};

// A request, as far as a policy may know it.
struct Wanted {
    std::string_view model;
    std::string_view session;  // empty: the client names none
    i64 prompt_tokens = 0;     // 0: unknown
    double prefill_tokens_per_s = 10'000.0;  // of a replica at speed 1, as it was learned
    std::span<const u64> keys;  // of its prefixes of 64, 128, ... tokens; none for a batch
};

// Decides between candidates of equal cost: the least value wins.
struct Tie {
    enum class By : u8 { number, requests, home, name };

    By by = By::number;
    Draws draws;  // by requests: where these are equal, too
    u64 key = 0;  // by home: of a prefix that no candidate has; all routers draw alike for it

    bool is_less(const Candidates& candidates, const Fleet& fleet, u32 left, u32 right) const;
};

// A policy's order of candidates: by cost.
struct Order {
    std::vector<double> costs;  // by candidate
    Tie tie;
    double mean_congestion = 0.0;  // found by `least_delay`

    bool is_finite() const;
    u32 first(const Candidates& candidates, const Fleet& fleet) const;
    // Writes all candidates, best first.
    void numbers(const Candidates& candidates, const Fleet& fleet, std::vector<u32>& out) const;
};

// Counts turns, for each model.
class Turns {
public:
    u64 next(std::string_view model);

private:
    static constexpr std::size_t kMaxModels = 1024;

    struct Hash : std::hash<std::string_view> {
        using is_transparent = void;
    };
    std::unordered_map<std::string, u64, Hash, std::equal_to<>> turns_;
};

class Policy {
public:
    // `plug_in`: Python code orders the candidates.
    enum class Kind : u8 { least_delay, prefix, least_loaded, round_robin, random, session, plug_in };

    struct Named {
        std::string_view name;
        Kind kind;
    };
    // The built-in ones by the name that a configuration gives them, as lists show them.
    static std::span<const Named> built_in();

    Policy(Kind kind, Weights weights)
        : kind_(kind), needs_outlook_(kind == Kind::least_delay), weights_(std::move(weights)) {}
    // A plug-in.
    Policy(bool needs_outlook, Weights weights)
        : kind_(Kind::plug_in), needs_outlook_(needs_outlook), weights_(std::move(weights)) {}

    Kind kind() const { return kind_; }
    const Weights& weights() const { return weights_; }
    bool is_plug_in() const { return kind_ == Kind::plug_in; }
    // True if it reads outlooks. If so, and it is no plug-in, it also chooses among the ranks of a
    // replica.
    bool needs_outlook() const { return needs_outlook_; }

    // Orders candidates; there is one at least. With the books locked, for the sake of turns.
    void order(const Wanted& asked, const Candidates& candidates, const Fleet& fleet,
               const Draws& draws, Order& out);

private:
    void in_turn(const Wanted& asked, const Candidates& candidates, const Fleet& fleet, Order& out);
    void at_random(const Candidates& candidates, const Draws& draws, Order& out);

    Kind kind_;
    bool needs_outlook_;
    Weights weights_;
    Turns turns_;
    std::vector<u32> numbers_;  // of the current order; its memory is reused
};

// The tokens that a prompt has to compute at a candidate, and the cost of loading others.
struct Uncached {
    double tokens = 0;
    double load = 0;  // in prefill tokens
};

Uncached uncached_at(i64 prompt_tokens, const Candidates& candidates, u32 number,
                     const Weights& weights);

// Finds the wait of a prompt at each candidate, in prefill tokens: `prefix` orders by it, and ranks are
// chosen by it where the policy does not.
void find_waits(i64 prompt_tokens, const Candidates& candidates, const Weights& weights,
                std::vector<double>& out);

}  // namespace kvroute::decide
