// What whoever follows the caches tells a decision, as plain values.
#pragma once

#include "decide/load.hpp"
#include "mirror/cache.hpp"

namespace kvroute::decide {

using mirror::CacheId;
using mirror::Coming;

// What a new request would find at a cache, besides its hit. Where nobody follows it, it is idle.
struct Outlook : mirror::Outlook {
    double progress_tokens = 0.0;  // of the uncached tokens in prefill there, those computed by now
};

struct ComingAt {
    CacheId cache = 0;
    Coming coming;
};

}  // namespace kvroute::decide
