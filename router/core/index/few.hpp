// Values of which there are usually few: the first lie in the object itself.
#pragma once

#include <array>
#include <cstddef>
#include <utility>
#include <vector>

namespace kvroute {

template <class Value, std::size_t kUsual>
class Few {
public:
    // The reference is good until the next one is added.
    Value& add(Value value) {
        if (count_ < kUsual) return usual_[count_++] = std::move(value);
        return more_.emplace_back(std::move(value));
    }

    // Visits all in the order in which they were added.
    template <class See>
    void each(See&& see) const {
        for (std::size_t at = 0; at < count_; ++at) see(usual_[at]);
        for (const Value& value : more_) see(value);
    }

private:
    std::array<Value, kUsual> usual_;
    std::size_t count_ = 0;  // of these
    std::vector<Value> more_;
};

}  // namespace kvroute
