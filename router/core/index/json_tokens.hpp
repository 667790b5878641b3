// Token ids straight from the text of a JSON array.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "index/keys.hpp"

namespace kvroute {

// Returns the numbers of an array such as `[1, 2, 3]`; nothing where it is anything but an array of
// integers in [0, 2^32).
std::optional<std::vector<u32>> token_ids_of_json(std::span<const u8> text);

}  // namespace kvroute
