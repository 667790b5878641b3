// Bounds on the memory of one source.
#pragma once

#include "index/keys.hpp"

namespace kvroute {

struct Limits {
    u64 blocks = 4'194'304;          // in one tier
    u64 tiers = 8;                   // that hold something
    u64 waiting_runs = 4096;
    u64 waiting_tokens = 4'194'304;
    u64 waiting_batches = 10'000;    // how old a run may be
    u64 forgotten = 8192;            // keys of blocks that went; and as many that clears took
    u64 cleared_at_once = 4096;      // blocks of a tier that a clear finds without a walk
};

}  // namespace kvroute
