#include "index/waiting.hpp"

namespace kvroute {

u64 WaitingRun::weight() const {
    return std::max<u64>(tokens.size(), hashes.size() + marks.size());
}

std::size_t WaitingRuns::memory() const {
    return order_.size() * sizeof(Place) + by_parent_.size() * sizeof(Family) +
           runs * sizeof(WaitingRun) + tokens * sizeof(u32);
}

void WaitingRuns::add(u64 parent, WaitingRun&& run) {
    Family& family = by_parent_[parent];
    if (family.runs.empty()) {
        family.number = next_number_++;
        order_.push_back({parent, family.number});
    }
    runs += 1;
    tokens += run.weight();
    family.runs.push_back(std::move(run));
}

std::vector<WaitingRun> WaitingRuns::take(u64 parent) {
    auto found = by_parent_.find(parent);
    if (found == by_parent_.end()) return {};
    std::vector<WaitingRun> taken = std::move(found->second.runs);
    by_parent_.erase(found);
    runs -= taken.size();
    for (const WaitingRun& run : taken) tokens -= run.weight();
    if (order_.size() > 2 * by_parent_.size() + 64) forget_gone();
    return taken;
}

bool WaitingRuns::is_over(const Limits& limits, u64 batch) {
    if (by_parent_.empty()) return false;
    while (!is_current(order_.front())) order_.pop_front();
    const u64 oldest = by_parent_[order_.front().parent].runs.front().batch;
    return oldest + limits.waiting_batches < batch || runs > limits.waiting_runs ||
           tokens > limits.waiting_tokens;
}

bool WaitingRuns::is_current(const Place& place) const {
    auto found = by_parent_.find(place.parent);
    return found != by_parent_.end() && found->second.number == place.number;
}

void WaitingRuns::forget_gone() {
    std::deque<Place> kept;
    for (const Place& place : order_) {
        if (is_current(place)) kept.push_back(place);
    }
    order_.swap(kept);
}

}  // namespace kvroute
