// Reads requests whose prompt needs no tokenizer: completions of token ids. No I/O.
#pragma once

#include <optional>
#include <string_view>

#include "plane/types.hpp"

namespace kvroute::plane {

// True for a reservation's name; as `ReservationId` of router/doors/http/request_bodies.py.
bool is_reservation_id(std::string_view text);

enum class Form : u8 {
    completion,
    question,     // prompt and model may have the names that gateways give them
    reservation,  // likewise, and where it may go can be restricted
};

// Reads the body of `/v1/completions`. Nothing where Python has to read it: text, several prompts, a
// salt, a session, any field that changes what is cached, and JSON that is not plain ASCII or not
// well-formed. Python then reports what is wrong, if anything is.
std::optional<Ask> read_ask(std::string_view body, Form form = Form::completion);

}  // namespace kvroute::plane
