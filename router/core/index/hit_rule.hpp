// The hit rule: a port of `kvevents/hit_rule.py`, where it is explained and drawn.
#pragma once

#include "index/layout.hpp"
#include "index/presence.hpp"

namespace kvroute::rule {

// Returns `left - right`, or 0.
inline u64 minus(u64 left, u64 right) { return left > right ? left - right : 0; }

// Returns the longest prefix that the group of this index accepts, of at most `limit` tokens. `reach`:
// how many tokens of the prompt a drafter may see. `without_extra`: the group has given its extra
// block.
u64 longest_accepted(const Layout& layout, u32 index, const Presence& present, u64 limit, u64 reach,
                     bool without_extra = false);

struct HitAndRun {
    u64 hit;  // the longest prefix that every group accepts
    u64 run;  // the longest that full attention accepts; without such groups, the hit
};

// Returns the hit on the GPU. Of equal groups the presence of the first stands for all of them.
HitAndRun hit_and_run(const Layout& layout, const Presence& present, u64 limit, u64 tokens);

// Returns the hit with the blocks that a lower tier can load; see `longest_extended_hit` in Python.
//
// `units`: by group, in tokens; see `units_of`. `as_vllm`: as vLLM's connectors look windows up.
u64 extended_hit(const Layout& layout, const Presence& below, u64 gpu_hit, u64 tokens,
                 const std::vector<u64>& units, bool as_vllm);

}  // namespace kvroute::rule
