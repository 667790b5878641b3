// Replaces fields of a JSON body: all other bytes stay as they are. No I/O.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace kvroute::plane {

// Returns the body with another `model`, wherever it names one: parsers disagree on which of two
// counts. Nothing where a field's name has escapes, as it may be that one. `body`: a JSON object that
// was parsed before.
std::optional<std::string> with_model(std::string_view body, std::string_view name);

// Returns the body with a field in place of any of that name, or else as its first; likewise. `value`:
// as JSON. The object is not empty.
std::optional<std::string> with_field(std::string_view body, std::string_view name,
                                      std::string_view value);

}  // namespace kvroute::plane
