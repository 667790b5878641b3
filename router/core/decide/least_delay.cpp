#include "decide/least_delay.hpp"

#include <algorithm>
#include <cmath>

namespace kvroute::decide {

namespace {

constexpr double kMostBusy = 0.9;  // the mean queue of a server that is always busy has no bound
constexpr double kWork = 0.2;      // of a token, beside the time that it takes
// Costs that differ by no more are taken for equal where a prompt has a home.
constexpr double kEqual = 64.0;
constexpr i64 kKeyTokens = 64;

// Returns the congestion of an unbounded queue: `arrivals_per_s / (2 * speed * (1 - busy))`.
double congestion(double arrivals_per_s, double uncached_tokens_per_s, double speed) {
    const double busy = uncached_tokens_per_s / speed;
    return arrivals_per_s / (2.0 * speed * (1.0 - (busy < kMostBusy ? busy : kMostBusy)));
}

struct Work {
    double own;     // uncached tokens, those of a junction left out, and loads at their price
    double evicts;  // tokens that come onto the GPU
};

Work work_at(const Candidates& candidates, u32 number, i64 prompt_tokens, const Weights& weights) {
    const State& state = candidates.states[number];
    const CachedTokens& cached = candidates.cached[number];
    const auto tokens = static_cast<double>(prompt_tokens);
    auto gpu = static_cast<double>(cached.gpu + cached.junction);
    auto total = static_cast<double>(cached.all);
    if (state.is_doubtful()) {
        const double trust = state.share_that_counts(weights.suspect_trust);
        gpu *= trust;
        total *= trust;
    }
    gpu = std::max(gpu, static_cast<double>(cached.recent));
    // An engine always computes the last token, whose output is the first response token.
    if (gpu >= tokens) gpu = static_cast<double>(std::max<i64>(prompt_tokens - 1, 0));
    Work work{tokens - gpu, tokens - gpu};
    if (total > gpu) {
        work.own += std::min(total - gpu, work.evicts) * (weights.of_lower(candidates, number) - 1);
    }
    return work;
}

double ahead_at(const State& state, const Outlook& outlook, const Weights& weights) {
    const double left = static_cast<double>(state.queued_tokens) - outlook.progress_tokens;
    double ahead = (left > 0 ? left : 0.0) +
                   static_cast<double>(state.decoding) * weights.decode_request +
                   static_cast<double>(state.context_tokens) * weights.decode_context_token;
    ahead += static_cast<double>(state.foreign) * weights.foreign_request +
             static_cast<double>(state.waiting) * weights.waiting_request;
    return ahead;
}

// Gives the least cost to all that cost nearly as little and have no less in the cache.
void equalize(std::vector<double>& costs, const Candidates& candidates) {
    const auto best = std::min_element(costs.begin(), costs.end());
    const double least = *best, most = least + kEqual;
    const CachedTokens& at_best =
        candidates.cached[static_cast<std::size_t>(best - costs.begin())];
    const i64 held = std::max(at_best.all, at_best.recent);
    for (std::size_t number = 0; number < costs.size(); ++number) {
        const CachedTokens& cached = candidates.cached[number];
        if (costs[number] <= most && (cached.all >= held || cached.recent >= held)) {
            costs[number] = least;
        }
    }
}

// Returns the first key that no candidate has; null where there is none.
const u64* home_key(std::span<const u64> keys, const Candidates& candidates) {
    i64 known = 0;
    for (const CachedTokens& cached : candidates.cached) {
        known = std::max({known, cached.all, cached.recent});
    }
    const auto at = static_cast<std::size_t>(known / kKeyTokens);
    return at < keys.size() ? &keys[at] : nullptr;
}

}  // namespace

double mean_congestion(const Candidates& candidates, double prefill_tokens_per_s) {
    const auto count = static_cast<double>(candidates.size());
    if (count == 0) return 0.0;
    double arrivals = 0, uncached = 0, speeds = 0;
    for (const Outlook& outlook : candidates.outlooks) {
        arrivals += outlook.arrivals_per_s;
        uncached += outlook.uncached_tokens_per_s;
    }
    for (const State& state : candidates.states) speeds += state.speed;
    return congestion(arrivals / count, uncached / count, prefill_tokens_per_s * speeds / count);
}

Delays delays_at(u32 number, const Wanted& asked, const Candidates& candidates,
                 const Weights& weights, double mean) {
    const State& state = candidates.states[number];
    const Outlook& outlook = candidates.outlooks[number];
    const Work work = work_at(candidates, number, asked.prompt_tokens, weights);
    const double ahead = ahead_at(state, outlook, weights) / state.speed;
    const double own = work.own / state.speed;
    double behind = 0.0;
    if (outlook.arrivals_per_s != 0.0) {
        const double k = congestion(outlook.arrivals_per_s, outlook.uncached_tokens_per_s,
                                    asked.prefill_tokens_per_s * state.speed);
        behind = own * (2.0 * k * ahead + std::sqrt(k * mean) * own);
    }
    const double lost = outlook.refill * (work.evicts / state.speed);
    const double evicted = outlook.reuse_probability * (lost + mean * lost * lost);
    return {ahead, own, kWork * own, behind, evicted};
}

void order_by_delay(const Wanted& asked, const Candidates& candidates, const Weights& weights,
                    const Draws& draws, Order& out) {
    out.mean_congestion = mean_congestion(candidates, asked.prefill_tokens_per_s);
    out.costs.resize(candidates.size());
    for (u32 number = 0; number < candidates.size(); ++number) {
        out.costs[number] =
            delays_at(number, asked, candidates, weights, out.mean_congestion).sum();
    }
    const u64* key = home_key(asked.keys, candidates);
    if (key == nullptr) {
        out.tie = {Tie::By::requests, draws, 0};
        return;
    }
    equalize(out.costs, candidates);
    out.tie = {Tie::By::home, {}, *key};
}

}  // namespace kvroute::decide
