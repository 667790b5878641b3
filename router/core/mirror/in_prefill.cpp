#include "mirror/in_prefill.hpp"

#include <limits>

namespace kvroute::mirror {

namespace {

// Returns the most that can be reused of a prompt: its last token is always computed. Of one of unknown
// length (0), all that there is.
Tokens most_reusable(Tokens tokens, const Layout& layout) {
    if (!tokens) return std::numeric_limits<Tokens>::max();
    return whole(tokens - 1, layout.hit_tokens);
}

// True where two prompts are taken for the same: as long, and equal up to the last key.
bool are_equal(std::span<const u64> keys, Tokens tokens, const Computing& other) {
    const std::span<const u64> theirs = other.keys.span;
    return tokens == other.tokens && keys.size() == theirs.size() && keys.back() == theirs.back();
}

Tokens equal_tokens(std::span<const u64> keys, std::span<const u64> theirs, Tokens step) {
    const std::size_t most = std::min(keys.size(), theirs.size());
    return static_cast<Tokens>(equal_keys(keys, theirs, 0, most)) * step;
}

// Returns how many leading tokens two prompts share, by the keys of both.
Tokens shared_tokens(const Asked& asked, Tokens tokens, const Computing& other,
                     const Layout& layout) {
    if (other.prompt != nullptr && layout.is_known) {
        const Asked theirs{*other.prompt, *other.space};
        return equal_tokens(asked.keys(layout.hit_tokens), theirs.keys(layout.hit_tokens),
                            layout.hit_tokens);
    }
    const std::span<const u64> keys = asked.keys(kStep);
    return are_equal(keys, tokens, other) ? tokens : equal_tokens(keys, other.keys.span, kStep);
}

// Returns a place in a pool: a free one, or else a new one.
template <class Value>
u32 place_in(std::vector<Value>& pool, std::vector<u32>& free) {
    if (free.empty()) {
        pool.emplace_back();
        return static_cast<u32>(pool.size() - 1);
    }
    const u32 place = free.back();
    free.pop_back();
    return place;
}

}  // namespace

void InPrefill::add(Computing& prompt) {
    const std::span<const u64> keys = prompt.keys.span;
    u32 root = by_root_.find(keys[0]);
    if (root == kNone) by_root_.put(keys[0], root = place_in(pool_, free_));
    prompt.place = pool_[root].size();
    pool_[root].push_back(&prompt);
    prefixes_.add(prompt.keys, prompt.cache);
    const u64 end = equals_key(keys, prompt.tokens);
    u32 equals = by_end_.find(end);
    if (equals == kNone) by_end_.put(end, equals = place_in(equals_, free_equals_));
    equals_[equals].add(prompt.cache);
    prompt.is_counted = true;
}

void InPrefill::hide(Computing& prompt) {
    if (!std::exchange(prompt.is_counted, false)) return;
    const std::span<const u64> keys = prompt.keys.span;
    prefixes_.remove(keys, prompt.cache);
    const u64 end = equals_key(keys, prompt.tokens);
    const u32 equals = by_end_.find(end);
    equals_[equals].remove(prompt.cache);
    if (!equals_[equals].is_empty()) return;
    by_end_.erase(end);
    free_equals_.push_back(equals);
}

void InPrefill::remove(Computing& prompt) {
    hide(prompt);
    const u64 first = prompt.keys.span[0];
    const u32 root = by_root_.find(first);
    Same& same = pool_[root];
    same[prompt.place] = same.back();
    same[prompt.place]->place = prompt.place;
    same.pop_back();
    if (!same.empty()) return;
    by_root_.erase(first);
    free_.push_back(root);
}

void InPrefill::shared(const Asked& asked, Tokens tokens, bool is_sparse, ComingTable& found) {
    if (is_sparse) {
        compare_with_each(asked, tokens, found);
    } else {
        find_shared_runs(asked.keys(kStep), tokens, found);
    }
}

void InPrefill::find_shared_runs(std::span<const u64> keys, Tokens tokens,
                                 ComingTable& found) const {
    const bool may_be_whole = tokens % kStep == 0;  // only then do keys cover the last token
    prefixes_.shared(keys, [&](CacheId cache, std::size_t count) {
        Tokens run = static_cast<Tokens>(count) * kStep;
        if (may_be_whole) run = std::min(run, most_reusable(tokens, layout_of_(cache)));
        found.raise(cache, {run, run});
    });
    const u32 equals = by_end_.find(equals_key(keys, tokens));
    if (equals == kNone) return;
    for (const auto& [cache, count] : equals_[equals]) {
        const Tokens most = most_reusable(tokens, layout_of_(cache));
        found.raise(cache, {most, most});
    }
}

void InPrefill::compare_with_each(const Asked& asked, Tokens tokens, ComingTable& found) {
    const u32 root = by_root_.find(asked.keys(kStep)[0]);
    if (root == kNone) return;
    for (const Computing* other : pool_[root]) {
        if (!other->is_counted) continue;
        const Layout& layout = layout_of_(other->cache);
        found.raise(other->cache, coming_of(asked, tokens, *other, layout, boundaries_));
    }
}

Coming coming_of(const Asked& asked, Tokens tokens, const Computing& other, const Layout& layout,
                 std::vector<Tokens>& boundaries) {
    const Tokens most = most_reusable(tokens, layout);
    const Tokens shared =
        whole(std::min(shared_tokens(asked, tokens, other, layout), most), layout.hit_tokens);
    if (!layout.is_sparse) return {shared, shared};
    boundaries.assign(other.kept.begin(), other.kept.end());
    layout.add_boundaries(other.tokens, boundaries);
    sort_boundaries(boundaries);
    return {layout.longest_hit(boundaries, shared), shared};
}

}  // namespace kvroute::mirror
