// Types that all files of this room share.
#pragma once

#include <cstdint>

#include "index/id_table.hpp"
#include "index/keys.hpp"

namespace kvroute::mirror {

using Tokens = std::int64_t;

// A cache, that is one rank of one replica. The caller gives the number: one for each cache for as long
// as the process lives, counted from 0, since tables are as long as the largest.
using CacheId = u32;
// A model, likewise.
using ModelId = u32;

// Tokens between two keys of a prefix; the same for all prompts of a model.
constexpr Tokens kStep = 64;

// The part of a prompt that a cache will have before events show it. In tokens.
struct Coming {
    Tokens tokens = 0;  // a hit
    Tokens run = 0;     // the prefix in full attention: beyond the hit it is a junction

    bool operator==(const Coming&) const = default;
};

// Rounds down, also below 0, to a multiple of `unit`; `unit` is positive.
inline Tokens whole(Tokens tokens, Tokens unit) {
    const Tokens rest = tokens % unit;
    return tokens - (rest < 0 ? rest + unit : rest);
}

}  // namespace kvroute::mirror
