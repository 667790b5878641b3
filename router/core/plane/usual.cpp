#include "plane/usual.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

namespace kvroute::plane {
namespace {

constexpr u32 kEnough = 16;  // measurements, before anything is late
constexpr double kDeviations = 6.0, kMeans = 2.0, kLeast_s = 0.25;
constexpr double kMostLeft = 10.0;
constexpr std::size_t kMostReplicas = 4096;

std::size_t place_of(u64 work_tokens) {
    return std::min<std::size_t>(std::bit_width(work_tokens), 31);
}

}  // namespace

std::optional<double> UsualAt::late_after(u64 work_tokens) const {
    std::lock_guard locked(mutex_);
    // Measurements with more work will do: with less, a first byte is hardly later.
    for (std::size_t at = place_of(work_tokens); at < taken_.size(); ++at) {
        const Taken& taken = taken_[at];
        if (taken.count < kEnough) continue;
        return std::max({kLeast_s, kMeans * taken.mean_s,
                         taken.mean_s + kDeviations * taken.deviation_s});
    }
    return std::nullopt;
}

void UsualAt::learn(u64 work_tokens, double seconds) {
    std::lock_guard locked(mutex_);
    Taken& taken = taken_[place_of(work_tokens)];
    taken.count = std::min(taken.count + 1, kEnough);
    const double rate = 1.0 / taken.count;
    if (taken.count > 1) {
        taken.deviation_s += (std::abs(seconds - taken.mean_s) - taken.deviation_s) * rate;
    }
    taken.mean_s += (seconds - taken.mean_s) * rate;
}

std::shared_ptr<UsualAt> Usual::at(const std::string& origin) {
    std::lock_guard locked(mutex_);
    if (replicas_.size() >= kMostReplicas && !replicas_.contains(origin)) {
        std::erase_if(replicas_, [](const auto& each) { return each.second.use_count() == 1; });
    }
    std::shared_ptr<UsualAt>& found = replicas_[origin];
    if (found == nullptr) found = std::make_shared<UsualAt>();
    return found;
}

void Usual::add_request() {
    std::lock_guard locked(mutex_);
    left_ = std::min(left_ + share_, kMostLeft);
}

bool Usual::take() {
    std::lock_guard locked(mutex_);
    if (left_ < 1.0) return false;
    left_ -= 1.0;
    return true;
}

}  // namespace kvroute::plane
