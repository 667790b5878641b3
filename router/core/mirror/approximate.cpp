#include "mirror/approximate.hpp"

namespace kvroute::mirror {

// --- one cache ---

std::size_t ApproximateCache::capacity_keys() const {
    const double reached = static_cast<double>(limit_keys) * reach_;
    return std::max(static_cast<std::size_t>(reached), kLeastKeys);
}

ApproximateHit ApproximateCache::hit(std::span<const std::span<const u64>> prompts,
                                     Tokens most_tokens) const {
    std::size_t keys = 0;
    for (const std::span<const u64> each : prompts) keys += content_.leading(each);
    const Tokens tokens = std::min(static_cast<Tokens>(keys) * kStep, most_tokens);
    return {std::max<Tokens>(tokens, 0), trust_.value()};
}

std::optional<double> ApproximateCache::eviction_age_s(double now) const {
    const std::shared_ptr<Use> oldest = content_.oldest();
    const double full = kFull * static_cast<double>(capacity_keys());
    if (!oldest || static_cast<double>(content_.keys()) < full) return std::nullopt;
    return now - oldest->ended_or(now);
}

void ApproximateCache::remember(const Keys& keys, double ended_at) {
    content_.end(content_.begin(keys), ended_at);
}

std::shared_ptr<Use> ApproximateCache::begin(const Keys& keys, Met& met) {
    met = {};
    content_.for_each_segment(keys.span, [&](std::size_t, std::size_t end, const Use& use) {
        met.stretches.push_back({end, use.ended_at});
        met.known_keys = end;
        return true;
    });
    while (met.known_keys < keys.span.size() &&
           places_.find(keys.span[met.known_keys]) != kNone) {
        ++met.known_keys;
    }
    if (!forgotten_.is_empty()) {
        for (u64 key : keys.span) recall(key);
    }
    return content_.begin(keys);
}

void ApproximateCache::end(const std::shared_ptr<Use>& use, std::size_t most_keys, double now) {
    content_.end(use, now);
    fit(most_keys);
}

void ApproximateCache::fit(std::size_t most_keys) {
    const std::size_t most = std::min(capacity_keys(), most_keys);
    while (content_.keys() > most && content_.requests()) {
        const std::shared_ptr<Use> oldest = content_.oldest();
        for (u64 key : content_.drop_end(oldest, content_.keys() - most)) remember_forgotten(key);
    }
    const std::size_t most_remembered = std::min(limit_keys, most_keys);
    while (!forgotten_.is_empty() && forgotten_.size() + content_.keys() > most_remembered) {
        recall(forgotten_[forgotten_.front()]);
    }
}

void ApproximateCache::learn(const Met& found, Tokens predicted_tokens, Tokens actual_tokens) {
    const Tokens known_tokens = static_cast<Tokens>(found.known_keys) * kStep;
    if (std::min(actual_tokens, known_tokens) - predicted_tokens >= kStep) grow();
    if (!predicted_tokens) return;
    trust_.add(static_cast<double>(std::min(actual_tokens, predicted_tokens)),
               static_cast<double>(predicted_tokens));
    const bool is_wrong = predicted_tokens - actual_tokens >= kStep;
    const Tokens decisive = (is_wrong ? actual_tokens : predicted_tokens - 1) / kStep;
    const auto stretch =
        std::find_if(found.stretches.begin(), found.stretches.end(),
                     [&](const auto& each) { return decisive < static_cast<Tokens>(each.end); });
    if (stretch == found.stretches.end() || !stretch->used_at) return;
    const std::size_t capacity = capacity_keys();
    const std::size_t used_since = content_.owned_since(*stretch->used_at, capacity);
    const double used = static_cast<double>(used_since);
    if (is_wrong && used_since < capacity) {
        const double share = used / static_cast<double>(limit_keys);
        reach_ = std::min(std::max(share, reach_ * kShrink), reach_);
    } else if (!is_wrong && used >= static_cast<double>(capacity) * kNear) {
        grow();
    }
}

ApproximateStatistics ApproximateCache::statistics() const {
    return {static_cast<Tokens>(content_.keys()) * kStep,
            static_cast<Tokens>(capacity_keys()) * kStep, trust_.value()};
}

void ApproximateCache::remember_forgotten(u64 key) {
    if (places_.find(key) == kNone) places_.put(key, forgotten_.push_back(key));
}

void ApproximateCache::recall(u64 key) {
    const u32 place = places_.erase(key);
    if (place != kNone) forgotten_.take(place);
}

// --- one request ---

void ApproximateVisit::first_token() {
    if (!uses_.empty()) return;
    for (const Keys& keys : prompts_) uses_.push_back(cache_->begin(keys, found_));
}

void ApproximateVisit::ended(std::optional<Tokens> actual_tokens, double now) {
    const std::vector<std::shared_ptr<Use>> uses = std::exchange(uses_, {});
    if (actual_tokens && uses.size() == 1) cache_->learn(found_, hit_tokens_, *actual_tokens);
    for (const std::shared_ptr<Use>& use : uses) cache_->end(use, most_keys_, now);
}

// --- all caches ---

std::shared_ptr<ApproximateCache> ApproximateCaches::stand_in(CacheId cache,
                                                              std::optional<double> lost_since,
                                                              std::optional<Tokens> cache_tokens,
                                                              double now) {
    const std::optional<double> lost = lost_at(lost_since, now);
    if (!lost) return nullptr;
    const Tokens size = cache_tokens.value_or(0) ? *cache_tokens : options_.cache_tokens;
    const std::size_t limit =
        std::max(static_cast<std::size_t>(size / kStep), ApproximateCache::kLeastKeys);
    std::shared_ptr<ApproximateCache> known = find(cache);
    if (!known || known->lost_at() != *lost) {
        known = begin(cache, *lost, limit);
        put(cache, known);
    }
    known->limit_keys = limit;
    return known;
}

std::shared_ptr<ApproximateVisit> ApproximateCaches::visit(CacheId cache,
                                                           std::vector<Keys> prompts,
                                                           Tokens hit_tokens) const {
    std::shared_ptr<ApproximateCache> known = find(cache);
    if (!known) return nullptr;
    return std::make_shared<ApproximateVisit>(std::move(known), std::move(prompts), hit_tokens,
                                              most_keys());
}

void ApproximateCaches::forget(std::span<const CacheId> caches) {
    for (CacheId cache : caches) put(cache, nullptr);
}

std::vector<CacheId> ApproximateCaches::caches() const {
    std::vector<CacheId> found;
    for (CacheId cache = 0; cache < by_id_.size(); ++cache) {
        if (by_id_[cache]) found.push_back(cache);
    }
    return found;
}

std::optional<ApproximateStatistics> ApproximateCaches::statistics(
    CacheId cache, std::optional<double> lost_since, double now) {
    const std::shared_ptr<ApproximateCache> known = find(cache);
    if (!known) return std::nullopt;
    if (lost_at(lost_since, now) == known->lost_at()) return known->statistics();
    put(cache, nullptr);
    return std::nullopt;
}

std::shared_ptr<ApproximateCache> ApproximateCaches::begin(CacheId cache, double lost_at,
                                                           std::size_t limit_keys) const {
    auto made = std::make_shared<ApproximateCache>(lost_at, limit_keys);
    const Ownership::Ended* sent = mirror_ == nullptr ? nullptr : mirror_->ended_at(cache);
    for (u32 at = sent ? sent->front() : kNone; at != kNone; at = sent->next(at)) {
        made->remember((*sent)[at]->keys, (*sent)[at]->ended_or(0.0));
    }
    made->fit(most_keys());
    return made;
}

void ApproximateCaches::put(CacheId cache, std::shared_ptr<ApproximateCache> with) {
    if (cache >= by_id_.size()) {
        if (!with) return;
        by_id_.resize(cache + 1);
    }
    count_ += (with != nullptr) - static_cast<std::size_t>(by_id_[cache] != nullptr);
    by_id_[cache] = std::move(with);
}

}  // namespace kvroute::mirror
