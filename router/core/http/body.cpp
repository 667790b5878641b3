#include "http/body.hpp"

#include <array>

#include "http/text.hpp"

namespace kvroute::http {

namespace {

using State = BodyReader::State;

constexpr Problem kMalformed = {400, "malformed_http",
                                "request: not a well-formed HTTP/1.1 request"};
constexpr Problem kLongChunkLine = {431, "headers_too_large",
                                    "chunk: its first line is longer than the limit of % bytes"};
constexpr Problem kLongTrailers = {431, "headers_too_large",
                                   "trailers: longer than the limit of % bytes"};

// The kinds of bytes in the framing.
enum Class { digit, semicolon, colon, cr, lf, token, text, control };
constexpr std::size_t kClasses = 8;
constexpr std::size_t kFramingStates = static_cast<std::size_t>(State::last_end) + 1;

constexpr std::array<std::uint8_t, 256> make_classes() {
    std::array<std::uint8_t, 256> classes{};
    for (std::size_t byte = 0; byte < 256; ++byte) {
        const std::uint8_t kinds = kKinds[byte];
        classes[byte] = kinds & kHexDigit  ? digit
                        : kinds & kToken   ? token
                        : byte == ';'      ? semicolon
                        : byte == ':'      ? colon
                        : byte == '\r'     ? cr
                        : byte == '\n'     ? lf
                        : kinds & kText    ? text
                                           : control;
    }
    return classes;
}

constexpr std::array<std::uint8_t, 256> kClassOf = make_classes();

// The next state. Rows are in the order of `State`; `chunk_data` takes any bytes, and none of
// these.
using Row = std::array<State, kClasses>;
constexpr std::array<Row, kFramingStates> make_steps() {
    using enum BodyReader::State;
    constexpr State no = bad, name = trailer_name, value = trailer_value;
    return {{
        // digit     semicolon  colon      cr           lf             token      text       control
        {size,      no,        no,        no,          no,            no,        no,        no},
        {size,      extension, no,        size_end,    no,            no,        no,        no},
        {extension, extension, extension, size_end,    no,            extension, extension, no},
        {no,        no,        no,        no,          chunk_data,    no,        no,        no},
        {no,        no,        no,        no,          no,            no,        no,        no},
        {no,        no,        no,        data_end,    no,            no,        no,        no},
        {no,        no,        no,        no,          size_start,    no,        no,        no},
        {name,      no,        no,        last_end,    no,            name,      no,        no},
        {name,      no,        value,     no,          no,            name,      no,        no},
        {value,     value,     value,     trailer_end, no,            value,     value,     no},
        {no,        no,        no,        no,          trailer_start, no,        no,        no},
        {no,        no,        no,        no,          ended,         no,        no,        no},
    }};
}

constexpr std::array<Row, kFramingStates> kSteps = make_steps();

State first_state(Framing framing, std::uint64_t length) {
    switch (framing) {
    case Framing::chunked: return State::size_start;
    case Framing::until_close: return State::until_close;
    case Framing::length: return length > 0 ? State::plain : State::ended;
    case Framing::none: break;
    }
    return State::ended;
}

}  // namespace

void BodyReader::begin(Framing framing, std::uint64_t length, const Bounds& bounds) {
    state_ = first_state(framing, length);
    left_ = framing == Framing::length ? length : 0;
    payload_bytes_ = 0;
    line_bytes_ = trailer_bytes_ = 0;
    bounds_ = bounds;
    problem_ = {};
}

BodyReader::Piece BodyReader::next(std::string_view bytes) {
    std::size_t at = 0;
    while (at < bytes.size() && state_ < State::plain && state_ != State::chunk_data) {
        step(static_cast<unsigned char>(bytes[at++]));
    }
    Piece piece = take(bytes, at);
    piece.is_last = state_ == State::ended;
    piece.is_bad = state_ == State::bad;
    return piece;
}

// Takes the payload at `from`, and the line end behind it where a chunk ends with it.
BodyReader::Piece BodyReader::take(std::string_view bytes, std::size_t from) {
    Piece piece;
    piece.used = from;
    const std::string_view rest = bytes.substr(from);
    const bool is_counted = state_ == State::plain || state_ == State::chunk_data;
    if (rest.empty() || (!is_counted && state_ != State::until_close)) return piece;
    piece.payload = is_counted && left_ < rest.size() ? rest.substr(0, left_) : rest;
    piece.used += piece.payload.size();
    payload_bytes_ += piece.payload.size();
    if (!is_counted || (left_ -= piece.payload.size()) > 0) return piece;
    const bool has_line_end = rest.substr(piece.payload.size(), 2) == "\r\n";
    if (state_ == State::plain) {
        state_ = State::ended;
    } else {
        state_ = has_line_end ? State::size_start : State::data_cr;
        piece.used += has_line_end ? 2 : 0;
        line_bytes_ = 0;
    }
    return piece;
}

void BodyReader::step(unsigned char byte) {
    const State before = state_;
    state_ = kSteps[static_cast<std::size_t>(before)][kClassOf[byte]];
    if (state_ == State::bad) return refuse(kMalformed);
    if (state_ == State::size) return count_digit(byte);
    if (state_ == State::size_start) line_bytes_ = 0;
    // RFC 9112 7.1: the last chunk has a size of zero, and trailers follow.
    if (state_ == State::chunk_data && left_ == 0) state_ = State::trailer_start;
    if (state_ == State::extension || before >= State::trailer_start) count_framing();
}

void BodyReader::count_digit(unsigned char digit) {
    if (left_ >> 60 != 0) return refuse(kMalformed);
    const unsigned value = digit <= '9' ? digit - '0' : (digit | 0x20) - 'a' + 10;
    left_ = left_ << 4 | value;
    count_framing();
}

// Bounds the framing, which is not passed on: without a bound it would be free work for a client.
void BodyReader::count_framing() {
    const Bounds& most = bounds_;
    if (state_ == State::size || state_ == State::extension) {
        if (++line_bytes_ > most.chunk_line_bytes) refuse(kLongChunkLine, most.chunk_line_bytes);
    } else if (++trailer_bytes_ > most.trailer_bytes) {
        refuse(kLongTrailers, most.trailer_bytes);
    }
}

void BodyReader::refuse(const Problem& problem, std::uint64_t value) {
    state_ = State::bad;
    problem_ = problem;
    problem_.value = value;
}

}  // namespace kvroute::http
