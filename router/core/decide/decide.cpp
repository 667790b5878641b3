#include "decide/decide.hpp"

#include <algorithm>

#include "index/memory.hpp"

namespace kvroute::decide {

namespace {

// Rounded up.
i64 share_of(i64 whole, std::size_t count) {
    const auto parts = static_cast<i64>(count);
    return (whole + parts - 1) / parts;
}

// Returns the hit in a replica's memory. With the index locked.
i64 tokens_in_memory(const Question& question, const Replica& replica) {
    SharedIndex& index = *question.index;
    const u32 slot = index.slot_of(replica.caches.front().source_in(&index));
    if (slot == kNone) return 0;
    const Computed* computed = nullptr;
    if (!question.computed.empty()) {
        for (const Computed& each : question.computed.front()) {
            if (each.slot == slot) computed = &each;
        }
    }
    Prompt& prompt = *question.prompts.front();
    return static_cast<i64>(index.matcher.match_tier(slot, prompt, "CPU", computed));
}

}  // namespace

const std::vector<u32>& Ranking::numbers() {
    if (numbers_.size() != able.size()) order.numbers(able, *fleet, numbers_);
    return numbers_;
}

Decider::Decider(Books& books, Settings settings)
    : ties(settings.seed), lots(settings.seed + 1), shares_lots(settings.shares_lots),
      books_(books), settings_(std::move(settings)),
      policy_(settings_.policy == Policy::Kind::plug_in
                  ? Policy(settings_.plug_in_needs_outlook, settings_.weights)
                  : Policy(settings_.policy, settings_.weights)) {}

void Decider::match(const Question& question, Scratch& scratch) const {
    scratch.hits.begin(*question.fleet);
    scratch.peer_prefix.reset();
    static const std::vector<Computed> none;
    for (std::size_t number = 0; number < question.prompts.size(); ++number) {
        const auto& computed = question.computed.empty() ? none : question.computed[number];
        scratch.hits.match(*question.fleet, question.replicas, *question.index,
                           *question.prompts[number], computed, question.prompts.size() == 1);
    }
}

const Ranking& Decider::rank(const Question& question, Scratch& scratch) {
    ++decisions_;
    Ranking& ranking = scratch.ranking;
    ranking.fleet = question.fleet;
    ranking.first = kNone;
    ranking.numbers_.clear();
    find(question, scratch);
    Wanted asked{.model = question.model,
                .session = question.session,
                .prompt_tokens = question.prompt_tokens,
                .keys = {}};
    if (books_.mirror != nullptr && needs_outlook()) {
        asked.prefill_tokens_per_s = books_.mirror->prefill_tokens_per_s(question.in_mirror);
        if (scratch.keys_.size() == 1) asked.keys = scratch.keys_[0];
    }
    ranking.prefill_tokens_per_s = asked.prefill_tokens_per_s;
    if (question.choice.may_pull && question.prompts.size() == 1 && !scratch.peer_prefix) {
        find_peer_prefix(question, scratch);
    }
    sort_out(question, scratch);
    fill(asked, question, scratch, true);
    if (scratch.peer_prefix) put_pulls(question, scratch);
    if (ranking.able.size() && !policy_.is_plug_in()) {
        policy_.order(asked, ranking.able, *question.fleet, ties.next(), ranking.order);
        ranking.first = ranking.order.first(ranking.able, *question.fleet);
    }
    if (ranking.unable.size()) fill(asked, question, scratch, false);
    return ranking;
}

// Finds keys, prompts in prefill and recent ones: all but hits.
void Decider::find(const Question& question, Scratch& scratch) {
    scratch.keys_.clear();
    scratch.is_remembered_ = false;
    scratch.coming_.assign(question.fleet->caches(), Coming());
    for (Prompt* prompt : question.prompts) {
        const std::span<const u64> keys =
            prompt->prefix_keys(question.index->index.space(), kKeyStep);
        scratch.keys_.push_back(keys);
        scratch.is_remembered_ |= !keys.empty();
        if (shares_lots && !keys.empty()) ties.begin(keys[0]);
        find_coming(question, *prompt, keys, scratch);
        for (const ComingAt& each : scratch.found_) {
            const u32 cache = question.fleet->cache_number(each.cache);
            if (cache == kNone) continue;
            scratch.coming_[cache].tokens += each.coming.tokens;
            scratch.coming_[cache].run += each.coming.run;
        }
    }
}

// Finds what each cache will have of a prompt before events report it.
void Decider::find_coming(const Question& question, Prompt& prompt, std::span<const u64> keys,
                          Scratch& scratch) const {
    scratch.found_.clear();
    if (recent != nullptr) {
        recent->match(keys, static_cast<i64>(kKeyStep), question.now, scratch.found_);
    } else if (books_.mirror != nullptr) {
        const i64 tokens = question.prompts.size() == 1 ? question.prompt_tokens : 0;
        mirror::ComingTable& table = scratch.in_prefill_;
        books_.mirror->in_prefill({prompt, question.index->index.space()}, tokens, question.now,
                                  table);
        for (const CacheId cache : table.caches()) scratch.found_.push_back({cache, table.of(cache)});
    }
}

// Parts the replicas that can take the request now from those that cannot.
void Decider::sort_out(const Question& question, Scratch& scratch) {
    Ranking& ranking = scratch.ranking;
    ranking.able.clear();
    ranking.unable.clear();
    ranking.obstacles.clear();
    for (const u32 number : question.replicas) {
        const Replica& replica = (*question.fleet)[number];
        const Load load = replica.load->all();
        const Obstacle obstacle = replica.obstacle(question.now, question.tenant, load);
        Candidates& known = obstacle == Obstacle::none ? ranking.able : ranking.unable;
        if (obstacle != Obstacle::none) ranking.obstacles.push_back(obstacle);
        known.states.push_back(state_of(replica, number, load, question));
    }
}

// An engine's own load counts only while it is young.
bool Decider::knows_load(const Replica& replica, const Question& question) const {
    const EngineLoad* engine = replica.conditions->engine();
    return engine != nullptr && question.now - engine->at <= settings_.engine_load_stale_after_s;
}

State Decider::state_of(const Replica& replica, u32 number, const Load& load,
                        const Question& question) const {
    State state{.replica = number,
                .speed = replica.speed_at(question.now),
                .is_suspect = replica.is_suspect(),
                .queued_tokens = load.prefill_tokens,
                .prefilling = load.prefilling,
                .decoding = load.decoding,
                .context_tokens = load.context_tokens};
    if (knows_load(replica, question)) {
        state.foreign = replica.conditions->engine()->foreign;
        state.waiting = replica.conditions->engine()->waiting;
    }
    return state;
}

// Returns the state of one rank. An engine's load without ranks is shared out equally.
State Decider::state_of_rank(const Replica& replica, u32 number, int dp_rank, const Load& load,
                             const Question& question) const {
    State state{.replica = number,
                .dp_rank = dp_rank,
                .speed = replica.speed_at(question.now),
                .is_suspect = replica.is_suspect(dp_rank),
                .queued_tokens = load.prefill_tokens,
                .prefilling = load.prefilling,
                .decoding = load.decoding,
                .context_tokens = load.context_tokens};
    if (!knows_load(replica, question)) return state;
    const EngineLoad& engine = *replica.conditions->engine();
    const auto of_rank =
        std::find_if(engine.ranks.begin(), engine.ranks.end(),
                     [&](const EngineLoad::OfRank& each) { return each.dp_rank == dp_rank; });
    if (of_rank != engine.ranks.end()) {
        state.foreign = of_rank->foreign;
        state.waiting = of_rank->waiting;
    } else {
        state.foreign = share_of(engine.foreign, replica.caches.size());
        state.waiting = share_of(engine.waiting, replica.caches.size());
    }
    return state;
}

// Finds the replicas whose memory others may read, the one with the most of the prompt first.
void Decider::find_holders(const Question& question, Scratch& scratch) {
    std::vector<Scratch::Holder>& holders = scratch.holders_;
    holders.clear();
    const Draws draws = lots.next();
    for (const u32 number : question.replicas) {
        const Replica& replica = (*question.fleet)[number];
        if (!replica.peer || !replica.conditions->is_healthy ||
            replica.is_suspect()) {
            continue;
        }
        holders.push_back({scratch.hits.at(question.fleet->first_cache(number)).all,
                           draws.of(static_cast<u32>(holders.size())), number});
    }
    std::stable_sort(holders.begin(), holders.end(), [](const auto& left, const auto& right) {
        return left.cached != right.cached ? left.cached > right.cached : left.draw > right.draw;
    });
}

// Finds the longest prefix that a replica's memory holds for others, by its events; of equally long
// ones any.
void Decider::find_peer_prefix(const Question& question, Scratch& scratch) {
    find_holders(question, scratch);
    if (scratch.holders_.size() < 2) return;
    i64 most = scratch.holders_.back().cached + kLeastPull - 1;
    const std::lock_guard locked(question.index->mutex);
    for (const Scratch::Holder& each : scratch.holders_) {
        if (each.cached <= most) break;  // its memory holds no more than it has in all
        const i64 tokens = tokens_in_memory(question, (*question.fleet)[each.replica]);
        if (tokens > most) {
            scratch.peer_prefix = PeerPrefix{tokens, each.replica};
            most = tokens;
        }
    }
}

}  // namespace kvroute::decide
