// Token ids straight from the text of a JSON array.
#pragma once

#include <span>
#include <vector>

#include "index/keys.hpp"

namespace kvroute {

// Reads the numbers of an array such as `[1, 2, 3]`, in place of what `numbers` held. False where it is
// anything but an array of integers in [0, 2^32).
bool token_ids_of_json(std::span<const u8> text, std::vector<u32>& numbers);

}  // namespace kvroute
