// Error responses of the plane's own. No I/O.
#pragma once

#include <string>
#include <string_view>

#include "plane/types.hpp"

namespace kvroute::plane {

inline constexpr std::string_view kOutOfMemory = "the router is out of memory; try again";

// In OpenAI's form, as `error_body` of router/plane/proxied_messages.py. What is not plain in `message` is
// shown as `?`.
Respond error_response(int status, std::string_view code, std::string_view message);

// As `ShuttingDown` and `Overloaded` of router/errors.py; the connection closes with the first.
extern const Respond kShuttingDownError, kNoFilesError;

// Returns the same as the bytes that are sent. `closes`: the connection closes with it.
std::string whole_error_response(int status, std::string_view code, std::string_view message,
                                 bool closes = true);

// Sent where there is no memory for a request: made at the start, as there may be none to make them.
// The second leaves the connection open.
extern const std::string kOutOfMemoryResponse, kOutOfMemoryAnswer;

}  // namespace kvroute::plane
