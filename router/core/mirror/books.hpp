// What a decision reads of requests, and the mutex that guards it: taken before that of an index, and
// held for microseconds.
#pragma once

#include <memory>
#include <mutex>

#include "mirror/approximate.hpp"

namespace kvroute::mirror {

struct Books : std::enable_shared_from_this<Books> {
    Books(std::size_t max_keys, FirstPrices first_prices, u64 first_number)
        : mirror(max_keys, std::move(first_prices), first_number) {}

    std::mutex mutex;  // guards all that follows
    Mirror mirror;
    std::unique_ptr<ApproximateCaches> estimates;  // null: caches without events are not estimated
};

}  // namespace kvroute::mirror
