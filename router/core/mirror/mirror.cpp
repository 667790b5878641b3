#include "mirror/mirror.hpp"

namespace kvroute::mirror {

namespace {

// Returns a prompt's boundaries besides its end, if an engine finds that much and is to keep `keep`.
std::vector<Tokens> kept_of(const Layout& layout, Coming found, std::span<const Tokens> keep) {
    if (!layout.is_sparse) return {};
    std::vector<Tokens> kept{found.tokens, found.run};
    for (Tokens length : keep) kept.push_back(whole(length, layout.hit_tokens));
    sort_boundaries(kept);
    return kept;
}

// A request uses the windows and states at the end of its hit.
void hold(const Visit& visit) {
    const Layout& layout = visit.at->layout;
    if (!layout.is_sparse || !visit.has_prompt()) return;
    const Tokens unit = layout.hit_tokens, end = visit.found.tokens;
    const std::span<const u64> keys = Asked{*visit.prompt, *visit.space}.keys(unit);
    const Tokens first = std::max<Tokens>(end - std::max(layout.longest_tail, unit), 0);
    const std::size_t last = std::min(keys.size(), static_cast<std::size_t>(end / unit));
    for (std::size_t at = static_cast<std::size_t>(first / unit); at < last; ++at) {
        visit.at->order.hold(keys[at]);
    }
}

// A request begins to decode, or ends.
void count_decoding(const Visit& visit, Tokens sign) {
    Cache& cache = *visit.at;
    cache.decoding += sign;
    cache.decoding_tokens += sign * visit.tokens;
    cache.recomputed_tokens += sign * (visit.found.run - visit.found.tokens);
}

// One of a visit's prompts took over keys from others, some of which it computes again.
void note_taken(const Visit& visit, const Use& use) {
    const std::size_t hit_keys = visit.has_prompt()
                                     ? static_cast<std::size_t>((visit.found.tokens + kStep - 1) / kStep)
                                     : use.keys.span.size();
    Cache& cache = *visit.at;
    cache.order.take(cache.content.taken(), hit_keys, cache.layout.held_blocks_per_key());
}

// From its end on a prompt is looked up and compared by its keys, if they are those that the cache's
// index needs: its tokens would be most of what is kept of a request.
void drop_tokens(Visit& visit) {
    const Layout& layout = visit.at->layout;
    if (!layout.is_known) return;
    for (const InUse& use : visit.uses) {
        std::shared_ptr<Prompt>& prompt = use.at_cache->look_up.prompt;
        if (!prompt->has_keys(layout.looked_up_by)) continue;
        // Else they are picked from those.
        if (layout.looked_up_by.lookahead) {
            prompt->prefix_keys(*visit.space, static_cast<u64>(layout.hit_tokens));
        }
        std::shared_ptr<Prompt> without = prompt->without_tokens();
        if (visit.look_up.prompt == prompt) {
            visit.prompt = without.get();
            visit.look_up.prompt = without;
        }
        prompt = std::move(without);
    }
}

// Learns how fast a model computes, or a cache loads, from the first prompt in prefill there.
void learn_from_prefill(const Visit& visit, bool is_timed, double now) {
    Cache& cache = *visit.at;
    if (cache.prefilling.front() != &visit) return;
    const double seconds = (now - cache.first_since) * cache.speed;
    if (visit.loads.empty()) {
        visit.traffic->prefilled(visit.uncached_tokens, seconds, is_timed);
    } else if (is_timed && cache.first_since == visit.started_at) {
        // Else part of it passed behind another one.
        const double cost = seconds * visit.traffic->prefill_tokens_per_s() -
                            static_cast<double>(visit.uncached_tokens);
        cache.prices.loaded(visit.loads, cost);
    }
}

const Outlook kIdle;

}  // namespace

Mirror::Mirror(std::size_t max_keys, FirstPrices first_prices, u64 first_number)
    : max_keys_(max_keys), first_prices_(std::move(first_prices)),
      own_([this](CacheId cache) -> const Layout& { return layout_of(cache); }),
      others_([this](CacheId cache) -> const Layout& { return layout_of(cache); }),
      last_number_(first_number) {}

// --- what is sent ---

std::shared_ptr<Visit> Mirror::begin(const Sent& sent, double now) {
    const std::shared_ptr<Cache> cache = cache_of(sent, now);
    Coming found{sent.hit_tokens, sent.hit_tokens + sent.junction_tokens};
    if (sent.prompts.size() == 1) {
        found = at_admission(*cache, *sent.prompts[0].prompt, sent.prompt_tokens, found);
    }
    cache->speed = sent.speed;
    cache->work.add(static_cast<double>(sent.uncached_tokens), now);
    cache->arrivals.add(1.0, now);
    cache->outlook.reset();
    std::shared_ptr<Visit> visit = new_visit(sent, cache, found, now);
    hold(*visit);
    enter_prefill(visit, now);
    return visit;
}

std::shared_ptr<Visit> Mirror::new_visit(const Sent& sent, const std::shared_ptr<Cache>& cache,
                                         Coming found, double now) {
    auto visit = std::make_shared<Visit>();
    visit->number = ++last_number_;
    visit->model = sent.model;
    visit->traffic = traffic_of(sent.model);
    visit->at = cache;
    visit->cache = cache->id;
    visit->started_at = now;
    visit->tokens = sent.prompt_tokens;
    visit->uncached_tokens = sent.uncached_tokens;
    visit->loads = sent.loads;
    visit->most_progress = static_cast<double>(sent.uncached_tokens) * kMaxProgress;
    visit->found = found;
    visit->space = &cache->index.space();
    visit->kept = kept_of(cache->layout, found, sent.keep);
    if (sent.prompts.size() == 1) {
        visit->look_up = sent.prompts[0];
        visit->prompt = visit->look_up.prompt.get();
        visit->keys = visit->prompt->shared_prefix_keys(*visit->space, kStep);
    }
    visit->uses.reserve(sent.prompts.size());
    for (const LookUp& each : sent.prompts) {
        const Keys keys = each.prompt->shared_prefix_keys(*visit->space, kStep);
        InUse& use = visit->uses.emplace_back();
        use.at_cache = cache->content.begin(keys);
        use.at_cache->look_up = each;
        note_taken(*visit, *use.at_cache);
        use.of_model = visit->traffic->began(keys.span, now);
    }
    return visit;
}

void Mirror::first_token(const std::shared_ptr<Visit>& visit, bool is_timed, double now) {
    if (!visit->is_in_prefill) return;
    learn_from_prefill(*visit, is_timed, now);
    leave_prefill(*visit, true, now);
    visit->is_decoding = true;
    count_decoding(*visit, 1);
    leave(*visit, visit->kept, 0);
    look_at_oldest(*visit->at);
}

void Mirror::ended(const std::shared_ptr<Visit>& visit, bool was_served, double now) {
    if (std::exchange(visit->is_over, true)) return;
    Cache& cache = *visit->at;
    leave_prefill(*visit, was_served, now);
    if (visit->is_decoding) count_decoding(*visit, -1);
    for (const InUse& use : visit->uses) {
        if (was_served) {
            give_back(*visit, use.at_cache, now);
        } else {
            cache.content.drop(use.at_cache);
        }
        visit->traffic->ended(use.of_model, now);
    }
    drop_tokens(*visit);
    look_at_oldest(cache);
    fit(cache);
}

// --- what routers publish to each other ---

bool Mirror::is_worth_publishing(const Visit& visit, double now) const {
    if (models_[visit.model] != visit.traffic) return false;  // no replica serves it any more
    const bool is_slow = visit.is_in_prefill && now - visit.started_at >= kSoonS;
    return visit.uncached_tokens >= kWorthPublishing || (is_slow && visit.uncached_tokens >= kStep);
}

OtherNumber Mirror::add_other(CacheId cache, Tokens tokens, Keys keys) {
    auto other = std::make_unique<Computing>();
    other->cache = cache;
    other->tokens = tokens;
    other->keys = std::move(keys);
    others_.add(*other);
    if (free_.empty()) {
        other_prompts_.push_back(std::move(other));
        return static_cast<OtherNumber>(other_prompts_.size() - 1);
    }
    const OtherNumber number = free_.back();
    free_.pop_back();
    other_prompts_[number] = std::move(other);
    return number;
}

void Mirror::remove_other(OtherNumber number) {
    others_.remove(*other_prompts_[number]);
    other_prompts_[number].reset();
    free_.push_back(number);
}

void Mirror::forget(std::span<const CacheId> caches) {
    for (CacheId cache : caches) {
        if (find(cache) != nullptr) replace(cache, nullptr);
    }
}

void Mirror::forget_model(ModelId model) {
    if (model < models_.size()) models_[model].reset();
}

// --- what a decision asks ---

std::shared_ptr<const LoadPrices> Mirror::load_prices(CacheId cache) const {
    if (find(cache) == nullptr) return nullptr;
    return {caches_[cache], &caches_[cache]->prices};
}

bool Mirror::wants_look(CacheId cache, double now) const {
    const Cache* known = find(cache);
    return known != nullptr && (!known->outlook || now > known->outlook_until);
}

const Outlook& Mirror::outlook(ModelId model, CacheId id, std::optional<u64> capacity_blocks,
                               double now) {
    Cache* cache = find(id);
    if (cache == nullptr) return kIdle;
    if (wants_look(id, now)) {
        cache->capacity_blocks = capacity_blocks;
        const std::optional<double> age = cache->eviction_age_s(now);
        const double reuse = age ? reuse_probability(model, *age) : 0.0;
        cache->outlook = {age, reuse, cache->work.per_s(now), cache->arrivals.per_s(now),
                          cache->refill.value()};
        cache->outlook_until = now + kOutlookS;
    }
    return *cache->outlook;
}

double Mirror::progress_tokens(CacheId id, double now) const {
    const Cache* cache = find(id);
    if (cache == nullptr || cache->prefilling.empty()) return 0.0;
    const Visit& first = *cache->prefilling.front();
    const double rate = first.traffic->prefill_tokens_per_s();
    return std::min((now - cache->first_since) * rate * cache->speed, first.most_progress);
}

void Mirror::in_prefill(const Asked& asked, Tokens tokens, double now, ComingTable& found) {
    found.clear();
    forget_computed(now);
    if (asked.keys(kStep).empty()) return;
    own_.shared(asked, tokens, is_sparse_, found);
    if (!others_.is_empty()) others_.shared(asked, tokens, is_sparse_, found);
}

Tokens Mirror::expected(CacheId id, Prompt& prompt, Tokens prompt_tokens, Coming now) {
    Cache* cache = find(id);
    return cache == nullptr ? now.tokens : at_admission(*cache, prompt, prompt_tokens, now).tokens;
}

// Returns the hit that an engine will find, and the run of full attention. `now`: both as of now.
Coming Mirror::at_admission(Cache& cache, Prompt& prompt, Tokens prompt_tokens, Coming now) {
    const Asked asked{prompt, cache.index.space()};
    const std::span<const u64> keys = asked.keys(kStep);
    if (!cache.layout.is_known) look_at_layout(cache);
    if (keys.empty() || cache.prefilling.empty()) return now;
    // Until the first event shows where hits end and of which groups they are, prompts in prefill there
    // promise nothing: with windows or states such a promise was wrong twice as often as right.
    if (!cache.layout.is_known && cache.index.is_followed()) return now;
    cache.forget_evicted();
    const double evicted = foresee_evictions(cache), evictable = cache.evictable();
    Coming coming = now.run ? cache.left_of(asked, now, evicted) : now;
    for (const Visit* visit : cache.prefilling) {
        // A window that has moved on within a prompt is the first to go.
        const bool is_kept =
            !cache.layout.has_gaps || evicted - visit->evicted_before < evictable;
        if (!is_kept || visit->keys.span.empty() || visit->keys.span[0] != keys[0]) continue;
        const Coming found = coming_of(asked, prompt_tokens, *visit, cache.layout, boundaries_);
        coming.tokens = std::max(coming.tokens, found.tokens);
        coming.run = std::max(coming.run, found.run);
    }
    return {coming.tokens, std::max(coming.run, coming.tokens)};
}

// Returns how many blocks will have been evicted when the next request is admitted. Each one in prefill
// gets the number until it has been computed, or where windows are kept densely, until it is begun.
double Mirror::foresee_evictions(Cache& cache) {
    const Layout& layout = cache.layout;
    Forecast forecast(layout, cache.free_blocks());
    Tokens tokens = 0;
    for (Visit* visit : cache.prefilling) {
        tokens += visit->tokens;
        visit->evicted_before = 0.0;
    }
    if (!forecast.may_evict(tokens, cache.prefilling.size())) return 0.0;
    bool may_have_begun = true;
    for (Visit* visit : cache.prefilling) {
        Tokens done = visit->found.tokens;
        if (may_have_begun && visit->has_prompt()) {
            const Tokens run = cache.full_run(visit->look_up);
            may_have_begun = run > visit->found.run;
            if (may_have_begun) done = std::max(run, done);
        }
        boundaries_.assign(visit->kept.begin(), visit->kept.end());
        layout.add_boundaries(visit->tokens, boundaries_);
        sort_boundaries(boundaries_);
        Tokens kept = 0;
        layout.for_each_tail(boundaries_, visit->found.tokens,
                             [&](Tokens, Tokens blocks) { kept += blocks; });
        const double before = forecast.evicted();
        forecast.compute(visit->tokens - done, static_cast<double>(kept));
        visit->evicted_before = layout.is_sparse ? forecast.evicted() : before;
    }
    return forecast.evicted();
}

const Ownership::Ended* Mirror::ended_at(CacheId cache) const {
    const Cache* known = find(cache);
    return known == nullptr ? nullptr : &known->content.ended();
}

MirrorStatistics Mirror::statistics() const {
    MirrorStatistics found;
    for (const std::shared_ptr<Cache>& cache : caches_) {
        if (!cache) continue;
        ++found.caches;
        found.keys += cache->content.keys();
        found.requests += cache->content.requests();
        found.kept += cache->content.size();
    }
    return found;
}

// --- steps ---

const std::shared_ptr<ModelTraffic>& Mirror::traffic_of(ModelId model) {
    if (model >= models_.size()) models_.resize(model + 1);
    std::shared_ptr<ModelTraffic>& traffic = models_[model];
    if (!traffic) traffic = std::make_shared<ModelTraffic>(max_keys_ / 4);
    return traffic;
}

const std::shared_ptr<Cache>& Mirror::cache_of(const Sent& sent, double now) {
    if (sent.cache >= caches_.size()) caches_.resize(sent.cache + 1);
    const std::shared_ptr<Cache>& known = caches_[sent.cache];
    if (!known || !known->index.is(sent.index, sent.source)) {
        IndexedCache in_index(sent.index, sent.source);
        replace(sent.cache,
                std::make_shared<Cache>(sent.cache, std::move(in_index), first_prices_, now));
    }
    return known;
}

// Prompts in prefill at the cache before will never be a hit there.
void Mirror::replace(CacheId id, std::shared_ptr<Cache> with) {
    cache_count_ += (with != nullptr) - static_cast<std::size_t>(caches_[id] != nullptr);
    const std::shared_ptr<Cache> before = std::exchange(caches_[id], std::move(with));
    if (!before) return;
    for (const std::shared_ptr<Visit>& visit : live_) {
        if (visit->at == before) own_.hide(*visit);
    }
}

const Layout& Mirror::layout_of(CacheId cache) const {
    static const Layout unknown;
    const Cache* known = find(cache);
    return known == nullptr ? unknown : known->layout;
}

void Mirror::enter_prefill(std::shared_ptr<Visit> visit, double now) {
    Cache& cache = *visit->at;
    if (cache.prefilling.empty()) cache.first_since = now;
    cache.prefilling.push_back(visit.get());
    visit->is_in_prefill = true;
    forget_computed(now);
    if (!visit->keys.span.empty()) own_.add(*visit);
    visit->number_live = live_.size();
    live_.push_back(std::move(visit));
}

// `is_computed`: its prompt may be, though events do not show it yet.
void Mirror::leave_prefill(Visit& visit, bool is_computed, double now) {
    if (!std::exchange(visit.is_in_prefill, false)) return;
    std::vector<Visit*>& prefilling = visit.at->prefilling;
    if (prefilling.front() == &visit) visit.at->first_since = now;
    prefilling.erase(std::find(prefilling.begin(), prefilling.end(), &visit));
    if (!is_computed && !visit.keys.span.empty()) own_.remove(visit);
    if (!is_computed || visit.keys.span.empty()) {
        drop(visit);
        return;
    }
    visit.known_until = now + kEventsS;
    computed_.push_back(&visit);
}

// Drops a visit; others may still keep it.
void Mirror::drop(Visit& visit) {
    const std::size_t place = visit.number_live;
    live_.back()->number_live = place;
    std::swap(live_[place], live_.back());
    live_.pop_back();
}

void Mirror::forget_computed(double now) {
    while (!computed_.empty() && computed_.front()->known_until <= now) {
        Visit& visit = *computed_.front();
        computed_.pop_front();
        own_.remove(visit);
        drop(visit);
    }
}

// One of a visit's prompts is used no more: its blocks can be evicted.
void Mirror::give_back(const Visit& visit, const std::shared_ptr<Use>& use, double now) {
    Cache& cache = *visit.at;
    const Layout& layout = cache.layout;
    const Tokens before = visit.kept.empty() ? 0 : visit.kept.back();
    boundaries_.clear();
    layout.add_boundaries(visit.tokens, boundaries_);
    sort_boundaries(boundaries_);
    use->rest = visit.has_prompt() ? static_cast<double>(visit.tokens) / static_cast<double>(kStep) -
                                         static_cast<double>(use->keys.span.size())
                                   : 0.0;
    if (layout.windows_first) leave(visit, boundaries_, before);
    cache.content.end(use, now);
    note_taken(visit, *use);
    cache.order.end(use, layout.held_blocks_per_key());
    if (!layout.windows_first) leave(visit, boundaries_, before);
}

// A request has moved on from the blocks kept before `boundaries`, of those behind `before`.
void Mirror::leave(const Visit& visit, std::span<const Tokens> boundaries, Tokens before) {
    Cache& cache = *visit.at;
    const Layout& layout = cache.layout;
    if (!layout.is_sparse || !visit.has_prompt()) return;
    const std::span<const u64> keys =
        Asked{*visit.prompt, *visit.space}.keys(layout.hit_tokens);
    layout.for_each_tail(boundaries, before, [&](Tokens end, Tokens blocks) {
        const Tokens count = end / layout.hit_tokens;
        if (count <= 0 || static_cast<std::size_t>(count) > keys.size()) return;
        cache.order.leave(keys[static_cast<std::size_t>(count) - 1], static_cast<double>(blocks));
    });
}

void Mirror::look_at_layout(Cache& cache) {
    cache.layout = cache.index.layout();
    is_sparse_ |= cache.layout.is_sparse;
}

// Looks whether the oldest request's blocks are still there, and at the size.
void Mirror::look_at_oldest(Cache& cache) {
    cache.outlook.reset();
    ++cache.looks;
    // Soon after the start, and now and then: how it keeps windows shows only in what it has stored.
    if (cache.looks % 256 == 0 || (cache.looks & (cache.looks - 1)) == 0) look_at_layout(cache);
    cache.most_blocks = std::max(cache.most_blocks, cache.index.blocks_held());
    cache.forget_evicted();
}

// Holds this cache to its share of the memory.
void Mirror::fit(Cache& cache) {
    const std::size_t most = cache_count_ ? max_keys_ / cache_count_ : 0;
    while (cache.content.size() > most && cache.content.requests()) cache.drop_oldest();
}

}  // namespace kvroute::mirror
