#include "mirror/cache.hpp"

#include <limits>

namespace kvroute::mirror {

namespace {

// A share of full content from which on a cache is taken for full.
constexpr double kFull = 0.9;
// Below this share of what it once held a cache evicts nothing, though it did.
constexpr double kEmptied = 0.75;

}  // namespace

// --- its state in the index ---

bool IndexedCache::is_followed() const {
    const auto lock = locked(index_->mutex);
    return index_->slot_of(source_) != kNone;
}

u64 IndexedCache::blocks_held() const {
    const auto lock = locked(index_->mutex);
    const u32 slot = index_->slot_of(source_);
    return slot == kNone ? 0 : index_->index.source(slot).tiers[0].blocks;
}

u64 IndexedCache::removals() const {
    const auto lock = locked(index_->mutex);
    const u32 slot = index_->slot_of(source_);
    return slot == kNone ? 0 : index_->index.source(slot).removals;
}

Layout IndexedCache::layout() const {
    const auto lock = locked(index_->mutex);
    const u32 slot = index_->slot_of(source_);
    return slot == kNone ? Layout() : layout_of(index_->index.source(slot));
}

IndexedCache::Hit IndexedCache::hit(const LookUp& prompt) const {
    const auto lock = locked(index_->mutex);
    const u32 slot = index_->slot_of(source_);
    if (slot == kNone) return {};
    const TieredHit found =
        index_->matcher.match_source(slot, *prompt.prompt, prompt.computed.get());
    Hit hit{found.hit.gpu, found.hit.total, {}};
    for (const auto& [share, tokens] : found.by_tier) {
        const std::string& name = index_->matcher.name_of_share(slot, share);
        hit.by_tier.emplace_back(name, static_cast<Tokens>(tokens));
    }
    return hit;
}

Tokens IndexedCache::full_run(const LookUp& prompt, bool is_sparse) const {
    const auto lock = locked(index_->mutex);
    const u32 slot = index_->slot_of(source_);
    if (slot == kNone) return 0;
    const Computed* computed = prompt.computed.get();
    const Tokens hit = index_->matcher.match_source(slot, *prompt.prompt, computed).hit.gpu;
    if (!is_sparse) return hit;
    const std::vector<u64> hits = index_->matcher.group_hits(*prompt.prompt, slot, computed);
    std::optional<Tokens> least;
    for (std::size_t group = 0; group < hits.size(); ++group) {
        if (index_->index.source(slot).layout.groups[group].kind != GroupKind::full) continue;
        const Tokens tokens = static_cast<Tokens>(hits[group]);
        least = std::min(least.value_or(tokens), tokens);
    }
    return least.value_or(hit);
}

// --- what it holds, and how long ---

std::optional<double> Cache::eviction_age_s(double now) const {
    const double held = static_cast<double>(index.blocks_held());
    const bool is_full =
        index.removals()
            ? held >= static_cast<double>(most_blocks) * kEmptied
            : capacity_blocks && held >= static_cast<double>(*capacity_blocks) * kFull;
    if (!is_full) return std::nullopt;
    if (had_content) return now - since;
    const std::shared_ptr<Use> oldest = content.oldest();
    return oldest && oldest->ended_at ? now - *oldest->ended_at : 0.0;
}

Coming Cache::left_of(const Asked& asked, Coming now, double evicted_blocks) {
    if (evicted_blocks <= 0) return now;
    const std::span<const u64> keys = asked.keys(kStep);
    const Tokens unit = layout.hit_tokens;
    Tokens run = now.run;
    order.foresee(evicted_blocks, layout.held_blocks_per_key());
    const std::size_t run_keys = static_cast<std::size_t>((run + kStep - 1) / kStep);
    content.for_each_segment(
        keys.first(std::min(keys.size(), run_keys)),
        [&](std::size_t start_key, std::size_t end_key, const Use& use) {
            const Tokens start = static_cast<Tokens>(start_key) * kStep;
            const Tokens end = static_cast<Tokens>(end_key) * kStep;
            const double gone = order.keys_evicted(use);
            const double kept = static_cast<double>(use.keys.span.size()) + use.rest - gone;
            const Tokens left = static_cast<Tokens>(kept * static_cast<double>(kStep));
            if (gone == 0.0 || left >= std::min(end, run)) return true;
            const bool is_all_lost = layout.has_gaps && !layout.is_sparse;
            run = whole(is_all_lost ? start : std::max(left, start), unit);
            return false;
        });
    Tokens tokens = std::min(now.tokens, run);
    if (layout.is_sparse) tokens = whole_boundary(asked.keys(unit), tokens, now.tokens <= run);
    return {tokens, run};
}

// Returns the longest length of a prompt, up to `most_tokens`, at which windows and states are whole
// after the eviction that was foreseen: a boundary takes along what it shares with later ones. `keys`:
// its own, every `hit_tokens`. `is_one`: a hit ends at `most_tokens` now.
Tokens Cache::whole_boundary(std::span<const u64> keys, Tokens most_tokens, bool is_one) const {
    const Tokens unit = layout.hit_tokens, tail = std::max<Tokens>(layout.longest_tail / unit, 1);
    for (Tokens count = most_tokens / unit; count > 0; --count, is_one = false) {
        const std::size_t end = std::min(static_cast<std::size_t>(count), keys.size());
        is_one = is_one || (end == static_cast<std::size_t>(count) && order.holds(keys[end - 1]));
        if (!is_one) continue;
        bool is_whole = true;
        for (std::size_t at = static_cast<std::size_t>(std::max<Tokens>(count - tail, 0)); at < end;
             ++at) {
            is_whole &= !order.is_evicted(keys[at]);
        }
        if (is_whole) return count * unit;
    }
    return 0;
}

double Cache::free_blocks() const {
    if (!capacity_blocks && !index.removals()) return std::numeric_limits<double>::infinity();
    const double capacity = static_cast<double>(capacity_blocks.value_or(most_blocks));
    const double held = static_cast<double>(index.blocks_held());
    double copies = order.copied_keys() * layout.held_blocks_per_key();
    copies += static_cast<double>(recomputed_tokens) / static_cast<double>(kStep) *
              layout.full_blocks_per_key;
    const double unfilled = static_cast<double>(decoding * static_cast<Tokens>(layout.groups));
    return std::max(capacity - held - copies - unfilled, 0.0);
}

double Cache::evictable() const {
    const double running = static_cast<double>(decoding_tokens) / static_cast<double>(kStep) *
                           layout.full_blocks_per_key;
    return static_cast<double>(blocks()) - running;
}

// --- what it has evicted ---

void Cache::forget_evicted() {
    const u64 removed = index.removals();
    if (removed == removals) return;
    if (removed < removals) {  // it was cleared, and may have been another process's
        content.clear();
        order.clear();
        had_content = false;
    }
    removals = removed;
    for (auto oldest = content.oldest(); oldest && !is_left(*oldest); oldest = content.oldest()) {
        drop_oldest();
        had_content = false;
    }
    order.fit(static_cast<double>(blocks()));
}

void Cache::drop_oldest() {
    const std::shared_ptr<Use> oldest = content.oldest();
    order.gone(*oldest);
    content.drop(oldest);
}

// True where something is left of a request's own keys; else learns the refill price of what is gone.
bool Cache::is_left(Use& oldest) {
    if (!oldest.look_up.prompt) return false;
    const Tokens run = full_run(oldest.look_up);
    // The keys before its first own one are shared.
    if (run < static_cast<Tokens>(oldest.owned_from + 1) * kStep) {
        note_refill(oldest, index.hit(oldest.look_up));
        return false;
    }
    const std::size_t count = oldest.keys.span.size();
    if (run < static_cast<Tokens>(count) * kStep) {
        oldest.rest = static_cast<double>(run) / static_cast<double>(kStep) -
                      static_cast<double>(count);
        order.weigh(oldest, layout.held_blocks_per_key());
    }
    return true;
}

// Learns how much of a request's keys that the GPU has evicted is left below.
void Cache::note_refill(const Use& gone, const IndexedCache::Hit& hit) {
    const Tokens start = static_cast<Tokens>(gone.owned_from) * kStep;
    const Tokens end = static_cast<Tokens>(gone.keys.span.size()) * kStep;
    const Tokens kept = std::max<Tokens>(std::min(hit.cached, end) - start, 0);
    const double all = static_cast<double>(end - start);
    // A token that costs more to load than to compute is as good as lost.
    const double price = std::min(prices.mean(hit.by_tier), 1.0);
    refill.add(all - static_cast<double>(kept) * (1.0 - price), all);
}

}  // namespace kvroute::mirror
