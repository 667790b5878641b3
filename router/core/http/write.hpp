// Writes heads and framing, each at the end of a string. Names and values come from outside: those that
// would break a line are left out, never written (RFC 9110 5.5).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace kvroute::http {

// Every client must skip it; one that holds its body back waits for it (RFC 9110 15.2.1).
inline constexpr std::string_view kContinue = "HTTP/1.1 100 Continue\r\n\r\n";
inline constexpr std::string_view kLineEnd = "\r\n";  // also behind the fields, and behind a chunk
inline constexpr std::string_view kChunkEnd = kLineEnd;
inline constexpr std::string_view kLastChunk = "0\r\n\r\n";

// A reason that is no text is left out; for an empty one the standard's is written, where it has one.
void append_status(std::string& to, int status, std::string_view reason = {});

// False, with nothing appended, where method or target would break the line.
bool append_request_line(std::string& to, std::string_view method, std::string_view target);

// False, with nothing appended, where name or value would break the line.
bool append_field(std::string& to, std::string_view name, std::string_view value);
bool append_number(std::string& to, std::string_view name, std::uint64_t value);

// The first line of a chunk; one of no bytes would end the body, see `kLastChunk`.
void append_chunk_head(std::string& to, std::size_t payload_bytes);

}  // namespace kvroute::http
