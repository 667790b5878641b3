#include "mirror/eviction.hpp"

#include <algorithm>

namespace kvroute::mirror {

void EvictionOrder::hold(u64 boundary) {
    const u32 item = boundaries_.find(boundary);
    if (item == kNone) return;
    total_ -= items_[item].blocks;
    erase(item);
}

void EvictionOrder::leave(u64 boundary, double blocks) {
    hold(boundary);
    boundaries_.put(boundary, items_.push_back({nullptr, boundary, blocks}));
    total_ += blocks;
}

void EvictionOrder::end(const std::shared_ptr<Use>& use, double blocks_per_key) {
    if (!holds(*use)) use->place_in_order = items_.push_back({use});
    items_[use->place_in_order].blocks = 0.0;
    weigh(*use, blocks_per_key);
}

void EvictionOrder::take(const std::vector<Taken>& taken, std::size_t hit_keys,
                         double blocks_per_key) {
    std::size_t at = 0;
    for (const Taken& each : taken) {
        at += each.keys;
        if (!holds(*each.use)) continue;
        if (at > hit_keys) {
            const double again = static_cast<double>(std::min(each.keys, at - hit_keys));
            copies_[each.use->number] += again;
            copied_keys_ += again;
        }
        weigh(*each.use, blocks_per_key);
    }
}

void EvictionOrder::weigh(Use& use, double blocks_per_key) {
    if (!holds(use)) return;
    const u32 item = use.place_in_order;
    const double owned = static_cast<double>(use.owned());
    const double keys = use.owned() ? std::max(owned + use.rest, 0.0) : 0.0;
    const double blocks = (keys + copies_of(use)) * blocks_per_key;
    total_ += blocks - items_[item].blocks;
    items_[item].blocks = blocks;
    if (blocks == 0.0) erase(item);
}

void EvictionOrder::gone(const Use& use) {
    while (holds(use)) erase_first();
}

void EvictionOrder::fit(double most_blocks) {
    while (total_ > most_blocks && !items_.is_empty()) erase_first();
}

void EvictionOrder::clear() {
    while (!items_.is_empty()) erase(items_.front());
    copies_.clear();
    total_ = copied_keys_ = 0.0;
}

void EvictionOrder::foresee(double blocks, double blocks_per_key) {
    ++question_;
    for (u32 at = items_.front(); at != kNone && blocks > 0; at = items_.next(at)) {
        Item& item = items_[at];
        if (!item.use || blocks_per_key != 0.0) item.foreseen = question_;
        if (item.use && blocks_per_key != 0.0) {
            item.keys = std::min(item.blocks, blocks) / blocks_per_key;
        }
        blocks -= item.blocks;
    }
}

double EvictionOrder::keys_evicted(const Use& use) const {
    if (!holds(use)) return 0.0;
    const Item& item = items_[use.place_in_order];
    return item.foreseen == question_ ? item.keys : 0.0;
}

bool EvictionOrder::is_evicted(u64 boundary) const {
    const u32 item = boundaries_.find(boundary);
    return item != kNone && items_[item].foreseen == question_;
}

void EvictionOrder::erase_first() {
    const u32 first = items_.front();
    total_ -= items_[first].blocks;
    if (const Use* use = items_[first].use.get()) {
        const auto copies = copies_.find(use->number);
        if (copies != copies_.end()) {
            copied_keys_ -= copies->second;
            copies_.erase(copies);
        }
    }
    erase(first);
}

void EvictionOrder::erase(u32 number) {
    const Item item = items_.take(number);
    if (item.use) {
        item.use->place_in_order = kNone;
    } else {
        boundaries_.erase(item.boundary);
    }
}

double EvictionOrder::copies_of(const Use& use) const {
    const auto known = copies_.find(use.number);
    return known == copies_.end() ? 0.0 : known->second;
}

bool Forecast::may_evict(Tokens tokens, std::size_t prompts) const {
    // A prompt is taken in parts, which steps divide: each takes a block for every state.
    const Tokens whole_steps = tokens / kStepTokens;
    const double parts = static_cast<double>(whole_steps) + 2.0 * static_cast<double>(prompts);
    const double keys = static_cast<double>(tokens) / static_cast<double>(kStep);
    const double most = keys * (layout_.full_blocks_per_key + layout_.window_blocks_per_key) +
                        parts * layout_.states;
    return most + 1.0 > free_;  // one more, since sums are rounded
}

void Forecast::compute(Tokens tokens, double kept_blocks) {
    while (tokens > 0) {
        if (!step_tokens_) {
            step_tokens_ = kStepTokens;
            free_ += std::exchange(free_next_, 0.0);
        }
        const Tokens count = std::min(tokens, step_tokens_);
        tokens -= count;
        step_tokens_ -= count;
        const double keys = static_cast<double>(count) / static_cast<double>(kStep);
        kept_blocks -= take(keys, kept_blocks);
    }
}

// Takes the blocks of a part of a prompt; returns how many of its windows and states stay.
double Forecast::take(double keys, double kept_blocks) {
    const double passing = keys * layout_.window_blocks_per_key + layout_.states;
    const double taken = keys * layout_.full_blocks_per_key + passing;
    evicted_ += std::max(taken - free_, 0.0);
    free_ = std::max(free_ - taken, 0.0);
    if (!layout_.is_sparse) return 0.0;
    const double kept = std::min(kept_blocks, passing);
    free_next_ += passing - kept;
    return kept;
}

}  // namespace kvroute::mirror
