// Finds a lower tier's *unit*, the tokens that it keeps together, by its events, its contents and the
// configuration. `in` holds the tier: the source `of` itself, or a store that it reads.
// `tests/oracle/index/tier_units.py` has the same in Python.
#pragma once

#include "index/source.hpp"

namespace kvroute {

// Returns the tokens of a unit in each group of a tier.
std::vector<u64> units_of(const Source& of, const Source& in, u32 tier);

// True where later blocks may show that a unit is smaller.
bool may_shrink(const Source& of, const Source& in, u32 plane);

// Learns from a tier's blocks of a prompt: `ends` is the divisor of the ends found.
void see_ends(Source& in, u32 plane, u64 ends);
// True where that may show more. Not where events describe blocks: one names all blocks in a unit, and
// only the last of them ends it.
bool wants_ends(const Source& of, const Source& in, u32 plane);

// True where some tier has blocks of its own, larger than the GPU's, and so hashes of its own.
bool has_own_blocks_in(const Source& of, const Source& in);

}  // namespace kvroute
