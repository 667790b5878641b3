#include "decide/policies.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "decide/fleet.hpp"
#include "decide/least_delay.hpp"

namespace kvroute::decide {

namespace {

// Returns the work ahead of any new request, in prefill tokens at speed 1.
double busyness(const State& state, const Weights& weights) {
    double busy = static_cast<double>(state.queued_tokens) * weights.queued_prefill_token +
                  static_cast<double>(state.decoding) * weights.decode_request +
                  static_cast<double>(state.context_tokens) * weights.decode_context_token;
    if (state.foreign) busy += static_cast<double>(state.foreign) * weights.foreign_request;
    if (state.waiting) busy += static_cast<double>(state.waiting) * weights.waiting_request;
    return busy;
}

}  // namespace

Uncached uncached_at(i64 prompt_tokens, const Candidates& candidates, u32 number,
                     const Weights& weights) {
    const State& state = candidates.states[number];
    const CachedTokens& cached = candidates.cached[number];
    const auto tokens = static_cast<double>(prompt_tokens);
    const double recent = static_cast<double>(cached.recent) * weights.recent_trust;
    if (!state.is_doubtful() && cached.all <= cached.gpu) {
        const double certain = std::max(recent, static_cast<double>(cached.gpu));
        return {certain < tokens ? tokens - certain : 0.0, 0.0};
    }
    const double trust =
        state.is_doubtful() ? state.share_that_counts(weights.suspect_trust) : 1.0;
    const double gpu = std::min(std::max(static_cast<double>(cached.gpu) * trust, recent), tokens);
    const double lower =
        std::min(std::max(static_cast<double>(cached.all) * trust - gpu, 0.0), tokens - gpu);
    const double price = cached.all > cached.gpu ? weights.of_lower(candidates, number) : 0.0;
    return {tokens - gpu - lower, lower * price};
}

namespace {

// Returns a candidate's draw: exponentially distributed, at the rate of its speed. `text`: scratch.
double session_draw(std::string_view session, const std::string& name, double speed,
                    std::string& text) {
    text.assign(std::to_string(name.size())).append(":").append(name).append(session);
    const u64 digest = blake2b_number(text);
    const double uniform = digest == ~u64{0} ? 1.0 : static_cast<double>(digest + 1) * 0x1p-64;
    return -std::log(uniform) / speed;
}

char upper(char letter) { return 'a' <= letter && letter <= 'z' ? letter - 'a' + 'A' : letter; }

}  // namespace

double Weights::of_tier(std::string_view name) const {
    for (const auto& [tier, cost] : tier_token) {
        if (std::equal(name.begin(), name.end(), tier.begin(), tier.end(),
                       [](char left, char right) { return upper(left) == right; })) {
            return cost;
        }
    }
    return lower_tier_token;
}

double Weights::of_lower(const Candidates& candidates, u32 number) const {
    const Lower& lower = candidates.lower[number];
    if (lower.price) return *lower.price;
    i64 tokens = 0;
    double cost = 0;
    for (const TierShare& share : candidates.shares_of(lower)) {
        tokens += share.tokens;
        cost += static_cast<double>(share.tokens) * of_tier(share.tier);
    }
    return tokens ? cost / static_cast<double>(tokens) : lower_tier_token;
}

void find_waits(i64 prompt_tokens, const Candidates& candidates, const Weights& weights,
                std::vector<double>& out) {
    out.resize(candidates.size());
    for (u32 number = 0; number < candidates.size(); ++number) {
        const State& state = candidates.states[number];
        const Uncached uncached = uncached_at(prompt_tokens, candidates, number, weights);
        out[number] = (uncached.tokens + uncached.load + busyness(state, weights)) / state.speed;
    }
}

// --- the order ---

bool Tie::is_less(const Candidates& candidates, const Fleet& fleet, u32 left, u32 right) const {
    const State &one = candidates.states[left], &other = candidates.states[right];
    switch (by) {
        case By::number: break;
        case By::requests: {
            if (one.requests() != other.requests()) return one.requests() < other.requests();
            const double drawn = draws.of(left), others = draws.of(right);
            if (drawn != others) return drawn < others;
            break;
        }
        case By::home: {
            constexpr u64 kOdd = 0x9E3779B97F4A7C15;
            const u64 drawn = (fleet.name_crc(one.replica) ^ key) * kOdd;
            const u64 others = (fleet.name_crc(other.replica) ^ key) * kOdd;
            if (drawn != others) return drawn < others;
            [[fallthrough]];
        }
        case By::name: {
            const int compared = fleet[one.replica].id.compare(fleet[other.replica].id);
            if (compared) return compared < 0;
            break;
        }
    }
    return left < right;
}

bool Order::is_finite() const {
    return std::isfinite(std::accumulate(costs.begin(), costs.end(), 0.0));
}

u32 Order::first(const Candidates& candidates, const Fleet& fleet) const {
    u32 best = 0;
    for (u32 number = 1; number < costs.size(); ++number) {
        if (costs[number] < costs[best] ||
            (costs[number] == costs[best] && tie.is_less(candidates, fleet, number, best))) {
            best = number;
        }
    }
    return best;
}

void Order::numbers(const Candidates& candidates, const Fleet& fleet,
                    std::vector<u32>& out) const {
    out.resize(costs.size());
    std::iota(out.begin(), out.end(), u32{0});
    std::sort(out.begin(), out.end(), [&](u32 left, u32 right) {
        if (costs[left] != costs[right]) return costs[left] < costs[right];
        return tie.is_less(candidates, fleet, left, right);
    });
}

// --- the policies ---

std::span<const Policy::Named> Policy::built_in() {
    static constexpr Named kBuiltIn[] = {
        {"prefix", Kind::prefix},
        {"least_delay", Kind::least_delay},
        {"round_robin", Kind::round_robin},
        {"random", Kind::random},
        {"least_loaded", Kind::least_loaded},
        {"session", Kind::session},
    };
    return kBuiltIn;
}

u64 Turns::next(std::string_view model) {
    const auto found = turns_.find(model);
    if (found != turns_.end()) return found->second++;
    if (turns_.size() >= kMaxModels) turns_.clear();
    turns_.emplace(model, 1);
    return 0;
}

void Policy::order(const Wanted& asked, const Candidates& candidates, const Fleet& fleet,
                   const Draws& draws, Order& out) {
    out.tie = {Tie::By::requests, draws, 0};
    switch (kind_) {
        case Kind::least_delay:
            order_by_delay(asked, candidates, weights_, draws, out);
            return;
        case Kind::prefix:
            find_waits(asked.prompt_tokens, candidates, weights_, out.costs);
            return;
        case Kind::round_robin: in_turn(asked, candidates, fleet, out); return;
        case Kind::random: at_random(candidates, draws, out); return;
        case Kind::plug_in:
        case Kind::session:
        case Kind::least_loaded: break;
    }
    out.costs.resize(candidates.size());
    const bool by_session = kind_ == Kind::session && !asked.session.empty();
    std::string text;
    for (u32 number = 0; number < candidates.size(); ++number) {
        const State& state = candidates.states[number];
        out.costs[number] =
            by_session ? session_draw(asked.session, fleet[state.replica].id, state.speed, text)
                       : busyness(state, weights_) / state.speed;
    }
    if (by_session) out.tie.by = Tie::By::name;
}

// Begins with the candidate whose turn it is, by name.
void Policy::in_turn(const Wanted& asked, const Candidates& candidates, const Fleet& fleet,
                     Order& out) {
    const std::size_t count = candidates.size();
    numbers_.resize(count);
    std::iota(numbers_.begin(), numbers_.end(), u32{0});
    std::sort(numbers_.begin(), numbers_.end(), [&](u32 left, u32 right) {
        return fleet.place_by_name(candidates.states[left].replica) <
               fleet.place_by_name(candidates.states[right].replica);
    });
    const u64 start = turns_.next(asked.model) % count;
    out.costs.resize(count);
    for (std::size_t place = 0; place < count; ++place) {
        out.costs[numbers_[(start + place) % count]] = static_cast<double>(place);
    }
    out.tie = {};
}

void Policy::at_random(const Candidates& candidates, const Draws& draws, Order& out) {
    numbers_.resize(candidates.size());
    std::iota(numbers_.begin(), numbers_.end(), u32{0});
    std::sort(numbers_.begin(), numbers_.end(),
              [&](u32 left, u32 right) { return draws.of(left) < draws.of(right); });
    out.costs.resize(candidates.size());
    for (std::size_t place = 0; place < numbers_.size(); ++place) {
        out.costs[numbers_[place]] = static_cast<double>(place);
    }
    out.tie = {};
}

}  // namespace kvroute::decide
