#include "mirror/ownership.hpp"

namespace kvroute::mirror {

std::shared_ptr<Use> Ownership::begin(Keys keys) {
    auto use = std::make_shared<Use>();
    use->number = ++numbers_;
    use->keys = std::move(keys);
    take(use);
    return use;
}

void Ownership::end(const std::shared_ptr<Use>& use, double now) {
    taken_.clear();
    if (use->keys.span.empty()) return;
    if (use->owned_from) take(use);
    use->ended_at = now;
    use->place_ended = ended_.push_back(use);
    size_ += use->keys.span.size() + kUseKeys;
}

void Ownership::drop(std::shared_ptr<Use> use) {
    for (u64 key : use->keys.span.subspan(use->owned_from)) {
        const u32 run = runs_.find(key);
        if (run != kNone && pool_[run].use == use) erase(key);
    }
    unlist(*use);
    use->owned_from = use->keys.span.size();
}

std::span<const u64> Ownership::drop_end(const std::shared_ptr<Use>& use, std::size_t count) {
    const std::span<const u64> keys = use->keys.span;
    if (count >= use->owned()) {
        const std::span<const u64> dropped = keys.subspan(use->owned_from);
        drop(use);
        return dropped;
    }
    size_ -= count;
    use->keys.span = keys.first(keys.size() - count);
    const std::span<const u64> dropped = keys.last(count);
    for (u64 key : dropped) erase(key);
    return dropped;
}

std::shared_ptr<Use> Ownership::oldest() const {
    return ended_.is_empty() ? nullptr : ended_[ended_.front()];
}

std::size_t Ownership::owned_since(double ended_at, std::size_t most) const {
    std::size_t count = 0;
    for (u32 at = ended_.back(); at != kNone; at = ended_.before(at)) {
        if (ended_[at]->ended_or(0.0) <= ended_at || count >= most) break;
        count += ended_[at]->owned();
    }
    return std::min(count, most);
}

void Ownership::clear() {
    while (!ended_.is_empty()) drop(oldest());
}

std::size_t Ownership::leading(std::span<const u64> keys) const {
    std::size_t at = 0;
    while (at < keys.size()) {
        const u32 run = runs_.find(keys[at]);
        if (run == kNone) break;
        at = end_of(run, keys, at);
    }
    return at;
}

// Returns the index in `keys` where a run ends that begins at `start`.
std::size_t Ownership::end_of(u32 run, std::span<const u64> keys, std::size_t start) const {
    std::size_t low = start + 1, high = std::min(end_of(pool_[run]), keys.size());
    if (high && runs_.find(keys[high - 1]) == run) return high;  // the usual case
    while (low < high) {
        const std::size_t middle = (low + high) / 2;
        if (runs_.find(keys[middle]) == run) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

// Makes `use` the owner of all its keys.
void Ownership::take(const std::shared_ptr<Use>& use) {
    taken_.clear();
    const std::span<const u64> keys = use->keys.span;
    for (std::size_t at = 0; at < keys.size();) {
        const u32 run = runs_.find(keys[at]);
        if (run == kNone) {
            at = add(use, at);
            continue;
        }
        const std::size_t start = at;
        at = end_of(run, keys, at);
        const std::shared_ptr<Use> before = pool_[run].use;
        if (before == use) continue;
        hand_over(run, start, at, use);
        note_taken(before, start, at);
    }
    use->owned_from = 0;
}

void Ownership::note_taken(const std::shared_ptr<Use>& before, std::size_t start,
                           std::size_t end) {
    if (!taken_.empty() && taken_.back().use == before) {
        taken_.back().keys += end - start;
    } else {
        taken_.push_back({before, end - start});
    }
    if (end == before->keys.span.size()) unlist(*before);
    before->owned_from = std::max(before->owned_from, end);
}

// Adds the keys from `start` on that have no owner; returns the index behind them.
std::size_t Ownership::add(const std::shared_ptr<Use>& use, std::size_t start) {
    const std::span<const u64> keys = use->keys.span;
    const u32 run = new_run(keys.size(), use);
    const std::size_t before = runs_.size();
    while (start < keys.size() && runs_.find_or_add(keys[start], run) == run) ++start;
    pool_[run].keys = runs_.size() - before;
    pool_[run].end = start;
    return start;
}

// Makes `use` the owner of a run up to `end`. The rest of the run stays with its owner.
void Ownership::hand_over(u32 run, std::size_t start, std::size_t end,
                          const std::shared_ptr<Use>& use) {
    const std::size_t run_end = end_of(pool_[run]);
    if (end == run_end) {
        pool_[run].use = use;
    } else if (end - start <= run_end - end) {
        give(use->keys.span.subspan(start, end - start), new_run(end, use));
    } else {
        const std::shared_ptr<Use> before = pool_[run].use;
        give(before->keys.span.subspan(end, run_end - end), new_run(run_end, before));
        pool_[run].use = use;
        pool_[run].end = end;
    }
}

// Makes keys lead to a run to which no key leads so far.
void Ownership::give(std::span<const u64> keys, u32 run) {
    for (u64 key : keys) {
        const u32 before = runs_.put(key, run);
        ++pool_[run].keys;
        if (before != kNone) release(before);
    }
}

void Ownership::erase(u64 key) {
    const u32 run = runs_.erase(key);
    if (run != kNone) release(run);
}

void Ownership::unlist(Use& use) {
    if (use.place_ended == kNone) return;
    ended_.take(std::exchange(use.place_ended, kNone));
    size_ -= use.keys.span.size() + kUseKeys;
}

u32 Ownership::new_run(std::size_t end, const std::shared_ptr<Use>& use) {
    if (free_.empty()) {
        pool_.push_back({end, 0, use});
        return static_cast<u32>(pool_.size() - 1);
    }
    const u32 run = free_.back();
    free_.pop_back();
    pool_[run] = {end, 0, use};
    return run;
}

// One key less leads to a run.
void Ownership::release(u32 run) {
    if (--pool_[run].keys) return;
    pool_[run].use.reset();
    free_.push_back(run);
}

}  // namespace kvroute::mirror
