// A cache's layout as far as the mirror needs it: where hits can end, and how many blocks prompts take.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "mirror/names.hpp"
#include "index/prompt.hpp"
#include "index/source.hpp"

namespace kvroute::mirror {

// The share of the tokens stored in full attention from which on windows are kept densely.
constexpr double kDense = 0.97;

// The tokens that one group keeps before a boundary.
struct Tail {
    Tokens tokens = 0;  // of a window; 0: a state
    Tokens block_size = 1;

    // Returns how many blocks, if no more than so many tokens before the boundary count.
    Tokens blocks(Tokens most_tokens) const {
        return tokens ? std::min(tokens, most_tokens) / block_size : 1;
    }
};

// The groups of a cache, summed up.
struct Layout {
    bool is_known = false;
    Prompt::Step looked_up_by;   // keys at this step find its blocks in the index
    Tokens hit_tokens = 1;       // hits are multiples of it
    bool has_gaps = false;       // a prompt may be reusable as a whole and not in part: windows move on
    bool is_sparse = false;      // of a prompt, windows or states are kept only at its boundaries
    std::vector<Tail> tails;     // of the groups with windows or states
    Tokens least_tail = 0;       // the tokens of the shortest of these
    Tokens longest_tail = 0;     // of the longest
    bool eagle = false;          // some group must have a block more of a hit than is reused
    bool windows_first = false;  // a request gives back windows and states before its full attention
    u32 groups = 0;
    u32 states = 0;  // groups with states: each takes a block for a prompt's tokens of one step
    double full_blocks_per_key = 0.0;    // that `kStep` tokens take in full attention, until the end
    double window_blocks_per_key = 0.0;  // that they take in windows when they are computed

    // Returns those of a computed prompt that can be hit until they are evicted.
    double held_blocks_per_key() const {
        return is_sparse ? full_blocks_per_key : full_blocks_per_key + window_blocks_per_key;
    }

    // Adds the lengths at which an engine keeps windows and states of any prompt, with any hit.
    void add_boundaries(Tokens prompt_tokens, std::vector<Tokens>& boundaries) const;

    // Calls `visit(boundary, blocks)` with the blocks that are kept before each boundary and not
    // before another one. `boundaries` ascend; those up to `before` are left out: the first of these
    // blocks begins there at the earliest.
    template <class Visit>
    void for_each_tail(std::span<const Tokens> boundaries, Tokens before, Visit&& visit) const {
        for (Tokens boundary : boundaries) {
            if (boundary <= before) continue;
            Tokens blocks = 0;
            for (const Tail& tail : tails) blocks += tail.blocks(boundary - before);
            visit(boundary, blocks);
            before = boundary;
        }
    }

    // Returns how much can be reused of a prompt computed with some boundaries, which ascend, if
    // `most_tokens` are shared with it, a multiple of `hit_tokens`.
    //
    // Where the tails of two boundaries meet, a hit may end anywhere between them, and where one
    // reaches the start, anywhere before it. With tails of 64 and the boundaries 48, 208 and 256:
    //
    //     0     48                           208    256
    //     |xxxxxx|.............|xxxxxxxxxxxxxxx|xxxxxx|      hits end at 0 to 48 and 208 to 256
    Tokens longest_hit(std::span<const Tokens> boundaries, Tokens most_tokens) const;
};

// Sorts them, ascending and each once.
void sort_boundaries(std::vector<Tokens>& boundaries);

// Returns the layout that an index has learned of a cache.
Layout layout_of(const Source& source);

}  // namespace kvroute::mirror
