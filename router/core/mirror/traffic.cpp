#include "mirror/traffic.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace kvroute::mirror {

void FadingRate::add(double amount, double now) {
    sum_ = sum_ * std::exp((at_ - now) / fade_s_) + amount;
    at_ = now;
}

double FadingRate::per_s(double now) const {
    const double weight = fade_s_ * -std::expm1((start_ - now) / fade_s_);
    if (weight <= 0) return 0.0;
    return sum_ * std::exp((at_ - now) / fade_s_) / std::max(weight, 1.0);
}

FadingRatio::FadingRatio(double first, double weight, int samples)
    : over_(first * weight), under_(weight), keep_(std::exp(-1.0 / samples)) {}

void FadingRatio::add(double over, double under) {
    over_ = over_ * keep_ + over;
    under_ = under_ * keep_ + under;
}

namespace {

struct Scale {
    double step;
    std::array<double, kBins> edges;  // where the bins begin
};

const Scale& scale() {
    static const Scale made = [] {
        Scale scale{std::pow(kLongestS / kShortestS, 1.0 / (kBins - 1)), {}};
        for (std::size_t index = 1; index < kBins; ++index) {
            const double steps = static_cast<double>(index - 1);
            scale.edges[index] = kShortestS * std::pow(scale.step, steps);
        }
        return scale;
    }();
    return made;
}

}  // namespace

std::size_t bin_of(double seconds) {
    const auto& edges = scale().edges;
    const auto behind = std::upper_bound(edges.begin() + 1, edges.end(), seconds);
    return static_cast<std::size_t>(behind - edges.begin()) - 1;
}

ReuseIntervals::ReuseIntervals() { lost_.fill(1.0); }

void ReuseIntervals::halve() {
    for (double& weight : reused_) weight /= 2;
    for (double& weight : given_up_) weight /= 2;
}

void ReuseIntervals::estimate(const Ownership::Ended& idle, double now) {
    ends_.clear();
    sums_.assign(1, 0);
    for (u32 at = idle.front(); at != kNone; at = idle.next(at)) {
        ends_.push_back(idle[at]->ended_or(0.0));
        sums_.push_back(sums_.back() + idle[at]->owned());
    }
    if (!ends_.empty()) horizon_s_ = std::max(horizon_s_, now - ends_.front());
    double left = 0.0;  // those that left a later bin, either way
    double survival = 1.0;
    for (std::size_t index = kBins; index-- > 0;) {
        const double latest = now - scale().edges[index];
        const auto behind = std::upper_bound(ends_.begin(), ends_.end(), latest);
        const double still = static_cast<double>(sums_[static_cast<std::size_t>(behind - ends_.begin())]);
        left += reused_[index] + given_up_[index];
        const double at_risk = left + still;
        within_[index] = 1 - (at_risk != 0.0 ? reused_[index] / at_risk : 0.0);
        survival *= within_[index];
        lost_[index] = survival;
    }
}

double ReuseIntervals::probability(double idle_s) const {
    const std::size_t index = bin_of(idle_s);
    double never = lost_[index];
    if (0 < index && index < kBins - 1 && within_[index] != 0.0) {
        const double passed = std::log(idle_s / scale().edges[index]) / std::log(scale().step);
        never *= std::pow(within_[index], -std::min(std::max(passed, 0.0), 1.0));
    }
    const double tail = idle_s > 0 ? kTail / (1 + horizon_s_ / (4 * idle_s)) : 0.0;
    return std::min(std::max(1 - never * (1 - tail), 0.0), 1.0);
}

std::shared_ptr<Use> ModelTraffic::began(std::span<const u64> keys, double now) {
    ++requests_;
    const auto followed = [keys](std::size_t i) { return keys[(i + 1) * kReuseStep - 1]; };
    std::shared_ptr<Use> use = uses_.begin(Keys::made(keys.size() / kReuseStep, followed));
    for (const Taken& each : uses_.taken()) {
        const std::optional<double> ended_at = each.use->ended_at;
        reuse_.reused(ended_at ? now - *ended_at : 0.0, static_cast<double>(each.keys));
    }
    if (requests_ % kHalveEvery == 0) reuse_.halve();
    return use;
}

void ModelTraffic::ended(const std::shared_ptr<Use>& use, double now) {
    uses_.end(use, now);
    // A key of a prompt takes an eighth of the memory of one that is owned.
    while (uses_.keys() + uses_.size() / 8 > max_keys_ && uses_.requests()) {
        const std::shared_ptr<Use> oldest = uses_.oldest();
        reuse_.given_up(now - oldest->ended_or(now), static_cast<double>(oldest->owned()));
        uses_.drop(oldest);
    }
    if (requests_ - estimated_at_ > std::max<u64>(16, uses_.requests() / 16)) {
        estimated_at_ = requests_;
        reuse_.estimate(uses_.ended(), now);
    }
}

void ModelTraffic::prefilled(Tokens tokens, double seconds, bool is_timed) {
    if (tokens < kLeastPrefill || (has_timed_ && !is_timed)) return;
    if (is_timed && !std::exchange(has_timed_, true)) speed_ = first_guess();
    speed_.add(static_cast<double>(tokens), seconds);
}

}  // namespace kvroute::mirror
