// Fills in the candidates of a decision: hits, outlooks, estimates, the best rank, what they would
// pull.

#include <algorithm>

#include "decide/decide.hpp"

namespace kvroute::decide {

namespace {

constexpr double kLeastTrust = 0.001;  // in an estimate; 0 stands for none
constexpr std::string_view kPeer = "PEER";

void copy_candidate(const Candidates& from, u32 number, Candidates& to, u32 place) {
    to.states[place] = from.states[number];
    to.cached[place] = from.cached[number];
    to.outlooks[place] = from.outlooks[number];
    Lower lower = from.lower[number];
    const auto shares = from.shares_of(lower);
    lower.first_share = static_cast<u32>(to.shares.size());
    to.shares.insert(to.shares.end(), shares.begin(), shares.end());
    to.lower[place] = lower;
}

// Where the engine ignores the rank that it is asked for, `place` counts what every rank would reuse.
void put_worst(const Candidates& ranks, Candidates& out, u32 place) {
    u32 least = 0;
    CachedTokens& cached = out.cached[place];
    State& state = out.states[place];
    for (u32 number = 0; number < ranks.size(); ++number) {
        const CachedTokens& other = ranks.cached[number];
        if (other.all < ranks.cached[least].all) least = number;
        cached.gpu = std::min(cached.gpu, other.gpu);
        cached.junction = std::min(cached.junction, other.junction);
        cached.recent = std::min(cached.recent, other.recent);
        const double trust = ranks.states[number].estimate_trust;
        const double known = state.estimate_trust;
        if (trust != 0.0) state.estimate_trust = known == 0.0 ? trust : std::min(known, trust);
        state.is_suspect |= ranks.states[number].is_suspect;
    }
    if (state.estimate_trust != 0.0) state.is_suspect = false;
    cached.all = ranks.cached[least].all;
    Lower lower = ranks.lower[least];
    const auto shares = ranks.shares_of(lower);
    lower.first_share = static_cast<u32>(out.shares.size());
    out.shares.insert(out.shares.end(), shares.begin(), shares.end());
    out.lower[place] = lower;
}

}  // namespace

// Fills in all else about the candidates whose states are known.
void Decider::fill(const Wanted& asked, const Question& question, Scratch& scratch, bool is_able) {
    Candidates& out = is_able ? scratch.ranking.able : scratch.ranking.unable;
    scratch.caches_.clear();
    for (const State& state : out.states) {
        scratch.caches_.push_back(question.fleet->first_cache(state.replica));
    }
    add_what_is_known(asked, question, scratch, out);
    if (!question.fleet->has_ranks()) return;
    for (u32 place = 0; place < out.size(); ++place) {
        if ((*question.fleet)[out.states[place].replica].has_ranks()) {
            put_best_rank(asked, question, scratch, place, out);
        }
    }
}

// Fills in all but ranks and pulls. Each candidate stands for one of `scratch.caches_`.
void Decider::add_what_is_known(const Wanted& asked, const Question& question, Scratch& scratch,
                                Candidates& out) {
    const std::size_t count = out.size();
    out.cached.resize(count);
    out.lower.assign(count, Lower());
    out.outlooks.resize(count);
    for (u32 number = 0; number < count; ++number) {
        const u32 cache = scratch.caches_[number];
        const Coming& coming = scratch.coming_[cache];
        CachedTokens& cached = out.cached[number] = scratch.hits.at(cache);
        cached.recent = coming.tokens;
        // Tokens that full attention will have beyond a hit are a junction, too.
        if (coming.run > std::max(coming.tokens, cached.gpu + cached.junction)) {
            cached.junction = coming.run - cached.gpu;
        }
        // Always for a rank: it may have to stand for others that have less on the GPU. The hit rule
        // needs the price also where a hit is longer than what is known of the prompt.
        const bool is_rank = out.states[number].dp_rank != kAnyRank;
        if (cached.all > cached.gpu || cached.all >= asked.prompt_tokens || is_rank) {
            add_lower(question, scratch, cache, number, out);
        }
    }
    if (books_.mirror != nullptr && needs_outlook()) {
        put_outlooks(question, scratch, out);
    } else {
        out.outlooks.assign(count, Outlook());
    }
    if (books_.estimates != nullptr) put_estimates(asked, question, scratch, out);
}

void Decider::put_outlooks(const Question& question, const Scratch& scratch,
                           Candidates& out) const {
    mirror::Mirror& mirror = *books_.mirror;
    for (u32 number = 0; number < out.size(); ++number) {
        const CacheId cache = question.fleet->cache_id(scratch.caches_[number]);
        const EngineLoad* engine =
            (*question.fleet)[out.states[number].replica].conditions->engine();
        const std::optional<u64> blocks =
            engine ? std::optional<u64>(engine->cache_blocks) : std::nullopt;
        out.outlooks[number] = {mirror.outlook(question.in_mirror, cache, blocks, question.now),
                                mirror.progress_tokens(cache, question.now)};
    }
}

// Returns the price of a token below the GPU as measured at a cache; nothing where none was measured.
std::optional<double> Decider::mean_price(CacheId cache, std::span<const TierShare> shares) const {
    const auto prices = books_.mirror == nullptr ? nullptr : books_.mirror->load_prices(cache);
    if (prices == nullptr) return std::nullopt;
    i64 tokens = 0;
    double cost = 0.0;
    for (const TierShare& share : shares) {
        cost += static_cast<double>(share.tokens) * prices->of(share.tier);
        tokens += share.tokens;
    }
    return tokens ? cost / static_cast<double>(tokens) : prices->of("");
}

void Decider::add_lower(const Question& question, const Scratch& scratch, u32 cache, u32 number,
                        Candidates& out) const {
    Lower& lower = out.lower[number];
    lower.first_share = static_cast<u32>(out.shares.size());
    scratch.hits.each_share(cache, [&](const std::string& tier, i64 tokens) {
        out.shares.push_back({tier, tokens});
        lower.shares += 1;
    });
    lower.price = mean_price(question.fleet->cache_id(cache), out.shares_of(lower));
}

// Puts estimates where there are no events, or none for long.
void Decider::put_estimates(const Wanted& asked, const Question& question, const Scratch& scratch,
                            Candidates& out) const {
    // An engine always computes the last token of a prompt.
    const i64 most = asked.prompt_tokens - static_cast<i64>(scratch.keys_.size());
    for (u32 number = 0; number < out.size(); ++number) {
        State& state = out.states[number];
        const Conditions& conditions = *(*question.fleet)[state.replica].conditions;
        if (!conditions.has_lost()) continue;
        const Cache& cache = question.fleet->cache(scratch.caches_[number]);
        const std::optional<double> lost_since = conditions.lost_since(cache.dp_rank);
        if (!lost_since || books_.estimates->waits(*lost_since, question.now)) continue;
        const EngineLoad* engine = conditions.engine();
        const auto known = books_.estimates->stand_in(
            cache.id, lost_since, engine ? engine->cache_tokens : std::nullopt, question.now);
        if (known == nullptr) continue;
        const mirror::ApproximateHit hit = known->hit(scratch.keys_, most);
        state.is_suspect = false;
        state.estimate_trust = std::max(hit.trust, kLeastTrust);
        CachedTokens& cached = out.cached[number];
        cached = {hit.tokens, hit.tokens, 0, cached.recent};
        out.lower[number] = Lower();
        const std::optional<double> age = known->eviction_age_s(question.now);
        if (!age) continue;
        out.outlooks[number].eviction_age_s = age;
        out.outlooks[number].reuse_probability =
            books_.mirror->reuse_probability(question.in_mirror, *age);
    }
}

// Lets the best of its ranks stand for a replica.
void Decider::put_best_rank(const Wanted& asked, const Question& question, Scratch& scratch,
                            u32 place, Candidates& out) {
    const u32 number = out.states[place].replica;
    const Replica& replica = (*question.fleet)[number];
    const std::optional<int> wanted = question.choice.asked;
    scratch.dp_ranks_.clear();
    bool has_wanted = false;
    for (const Cache& cache : replica.caches) {
        scratch.dp_ranks_.push_back(cache.dp_rank);
        has_wanted |= wanted == cache.dp_rank;
    }
    replica.load->of_ranks(scratch.dp_ranks_, scratch.rank_loads_);
    Candidates& ranks = scratch.ranks_;
    ranks.clear();
    scratch.caches_.clear();
    for (u32 at = 0; at < replica.caches.size(); ++at) {
        const int dp_rank = scratch.dp_ranks_[at];
        if (has_wanted && wanted != dp_rank) continue;
        ranks.states.push_back(
            state_of_rank(replica, number, dp_rank, scratch.rank_loads_[at], question));
        scratch.caches_.push_back(question.fleet->first_cache(number) + at);
    }
    add_what_is_known(asked, question, scratch, ranks);
    const u32 best = best_rank(asked, question, scratch);
    copy_candidate(ranks, best, out, place);
    if (!question.choice.is_read && ranks.size() > 1) {
        put_worst(ranks, out, place);
        return;
    }
    const std::vector<double>& costs = scratch.rank_order_.costs;
    const bool are_equal =
        std::all_of(costs.begin(), costs.end(), [&](double cost) { return cost == costs[0]; });
    if (!scratch.is_remembered_ && are_equal && wanted != out.states[place].dp_rank) {
        out.states[place].dp_rank = kAnyRank;
    }
}

// Returns the one that the policy prefers if it reads outlooks; else the one with the least wait, as
// turns, sessions and plug-ins' objects are about replicas.
u32 Decider::best_rank(const Wanted& asked, const Question& question, Scratch& scratch) {
    const Candidates& ranks = scratch.ranks_;
    Order& order = scratch.rank_order_;
    if (question.rank_costs != nullptr) {
        question.rank_costs->find(ranks, *question.fleet, order.costs);
    } else if (needs_outlook() && !policy_.is_plug_in()) {
        policy_.order(asked, ranks, *question.fleet, ties.next(), order);
    } else {
        find_waits(asked.prompt_tokens, ranks, settings_.weights, order.costs);
    }
    order.tie = {Tie::By::requests, lots.next(), 0};
    return order.first(ranks, *question.fleet);
}

// Lets each replica that reads peers' memory pull the longest prefix there, if it has less of it.
void Decider::put_pulls(const Question& question, Scratch& scratch) {
    const PeerPrefix& prefix = *scratch.peer_prefix;
    Candidates& able = scratch.ranking.able;
    for (u32 place = 0; place < able.size(); ++place) {
        const u32 number = able.states[place].replica;
        const Replica& replica = (*question.fleet)[number];
        const i64 pulled = prefix.tokens - able.cached[place].all;
        if (number == prefix.source || !replica.peer || pulled < kLeastPull) continue;
        Lower lower = able.lower[place];
        const u32 first = static_cast<u32>(able.shares.size());
        for (u32 at = 0; at < lower.shares; ++at) {
            able.shares.push_back(TierShare(able.shares[lower.first_share + at]));
        }
        able.shares.push_back({std::string(kPeer), pulled});
        lower = {first, lower.shares + 1, std::nullopt, prefix.source};
        lower.price = mean_price(replica.caches.front().id, able.shares_of(lower));
        able.lower[place] = lower;
        able.cached[place].all = prefix.tokens;
    }
}

}  // namespace kvroute::decide
