// Writes one source as bytes, and reads it back: all that Python does not keep of it.
#pragma once

#include <stdexcept>

#include "index/index.hpp"

namespace kvroute {

struct StateError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Returns what a source holds, remembers and waits for. A walk over all nodes.
std::vector<u8> written_state(Index& index, u32 slot);

// Fills a source that holds nothing. Where the bytes are not those of a state it throws
// `StateError`, and the source is to be dropped.
void read_state(Index& index, u32 slot, std::span<const u8> bytes);

}  // namespace kvroute
