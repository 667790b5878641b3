#include "index/tier.hpp"

#include <algorithm>

namespace kvroute {

namespace {

char upper(char c) { return c >= 'a' && c <= 'z' ? static_cast<char>(c - 32) : c; }

}  // namespace

void ArrivalOrder::went(u64 hash) {
    ++gone_[hash];
    if (++gone_places_ > order_.size() / 2 + 64) forget_gone();
}

bool ArrivalOrder::oldest(u64& out) {
    while (!order_.empty()) {
        out = order_.front();
        order_.pop_front();
        auto found = gone_.find(out);
        if (found == gone_.end()) return true;
        skip(found);
    }
    return false;
}

void ArrivalOrder::clear() {
    order_ = {};
    gone_ = Gone(0, gone_.hash_function());
    gone_places_ = 0;
}

void ArrivalOrder::skip(Gone::iterator found) {
    if (--found->second == 0) gone_.erase(found);
    --gone_places_;
}

void ArrivalOrder::forget_gone() {
    std::deque<u64> kept;
    for (u64 hash : order_) {
        auto found = gone_.find(hash);
        if (found == gone_.end()) {
            kept.push_back(hash);
        } else {
            skip(found);
        }
    }
    order_.swap(kept);
}

bool is_same_tier(std::string_view in_upper_case, std::string_view name) {
    return in_upper_case.size() == name.size() &&
           std::equal(in_upper_case.begin(), in_upper_case.end(), name.begin(),
                      [](char left, char right) { return left == upper(right); });
}

std::string in_upper(std::string_view name) {
    std::string made(name);
    std::transform(made.begin(), made.end(), made.begin(), upper);
    return made;
}

}  // namespace kvroute
