// Heads of HTTP/1.1 messages (RFC 9112), without I/O. A head is read from its first byte whenever
// more of it has come; results are views of the bytes that were given.
//
//     bytes ──> parse_request ──┬─> partial   wait for more
//                               ├─> whole     a RequestHead; its body follows, see body.hpp
//                               └─> bad       a Problem: respond with it, and read no more
//
// Two readers of one message that disagree about where it ends are how requests are smuggled (RFC
// 9112 11.2). Where the standard lets a reader choose between guessing and refusing, these refuse.
//
// The verdict does not depend on how the bytes were cut: a head that is bad or whole stays so with any
// bytes behind it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "http/fields.hpp"

namespace kvroute::http {

// Bounds on one message.
struct Bounds {
    std::size_t head_bytes = 65'536;  // with the empty lines in front
    std::size_t fields = 256;
    std::size_t chunk_line_bytes = 4'096;  // extensions included
    std::size_t trailer_bytes = 16'384;
};

// The rule that a message breaks. `status` and `code` are those of the response to a client; of a
// replica's response only the message is used.
struct Problem {
    int status = 0;
    const char* code = "";
    const char* message = "";  // place and rule; `%` stands for `value`
    std::uint64_t value = 0;

    std::string text() const;  // the message, with the value in it
};

enum class Parsed : std::uint8_t { partial, whole, bad };
enum class Framing : std::uint8_t { none, length, chunked, until_close };

struct RequestHead {
    std::string_view method, target;
    std::string_view origin_form;  // path and query of the target (RFC 9112 3.2.1), or "*"
    int minor = 1;                 // of the version, HTTP/1.0 or HTTP/1.1
    std::vector<Field> fields;     // its memory is reused by the next parse
    Framing framing = Framing::none;  // none, length or chunked
    std::uint64_t length = 0;
    bool keeps_alive = true;
    bool expects_continue = false;
    bool upgrades = false;  // offers another protocol; declined, and the connection is not kept

    std::string_view find(std::string_view lower_name) const {
        return value_of(fields, lower_name);
    }
};

struct ResponseHead {
    int status = 0;  // 100 to 599; below 200 it is an interim response, and another one follows
    std::string_view reason;
    int minor = 1;
    std::vector<Field> fields;
    Framing framing = Framing::none;
    std::uint64_t length = 0;
    bool keeps_alive = true;

    std::string_view find(std::string_view lower_name) const {
        return value_of(fields, lower_name);
    }
};

// `used`: bytes of the head, with its empty line and, of a request, empty lines in front.
Parsed parse_request(std::string_view bytes, const Bounds& bounds, RequestHead& head,
                     std::size_t& used, Problem& problem);
Parsed parse_response(std::string_view bytes, const Bounds& bounds, bool is_of_head_request,
                      ResponseHead& head, std::size_t& used, Problem& problem);

// True where a head that was partial with the first `before` bytes may no longer be: a line has ended
// since, or there is more than a head may have. Without it, the head of a client that sends byte by
// byte would be read from the start for each.
bool is_worth_parsing(std::string_view bytes, std::size_t before, const Bounds& bounds);

}  // namespace kvroute::http
