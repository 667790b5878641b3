// Marks: adapter, salt, multimodal items, that decide the content of a block besides its tokens.
//
// Engines send them as *extra keys*, one entry per block, in msgpack. A multimodal item counts where
// it starts: for one at token 20 and blocks of 16, an engine writes the offset 4 in block 1 and, if
// the item is long, -12 in block 2; only the first makes a mark.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "index/keys.hpp"

namespace kvroute {

// Returns the key of the empty prefix, under an adapter or without one.
Key root_key(const KeySpace& space, std::string_view lora_name);

struct MarkRules {
    u64 block_size = 0;                     // tokens per entry
    std::optional<std::string_view> lora;   // first in an entry, it is left out: the root covers it
    std::optional<std::string_view> salt;   // one that entries may or may not carry
    u64 lookahead = 0;                      // tokens behind a block that its entry covers too
};

// Appends the marks of a token run to `out`, ascending and each once.
//
// `extra_keys` is an array of one entry for each block, or empty bytes where there is none. False
// where the bytes are no msgpack.
bool read_marks(std::span<const u8> extra_keys, const KeySpace& space, const MarkRules& rules,
                std::vector<Mark>& out);

}  // namespace kvroute
