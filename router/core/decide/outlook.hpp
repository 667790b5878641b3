// Predictions of the mirror of the caches for a decision, as plain values.
#pragma once

#include "decide/load.hpp"
#include "mirror/cache.hpp"

namespace kvroute::decide {

using mirror::CacheId;
using mirror::Coming;

// The state of a cache that a new request would meet, besides its hit. Without a mirror, it is idle.
struct Outlook : mirror::Outlook {
    double progress_tokens = 0.0;  // uncached tokens in prefill there that are computed by now
};

struct ComingAt {
    CacheId cache = 0;
    Coming coming;
};

}  // namespace kvroute::decide
