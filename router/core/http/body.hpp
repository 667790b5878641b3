// Reads a body as it comes (RFC 9112 6 and 7): of a known length, in chunks, or until the
// connection closes. Only the state of the reader is kept; extensions of chunks and trailers are
// dropped.
#pragma once

#include "http/head.hpp"

namespace kvroute::http {

// Give it what is left of the bytes again and again, until they are used up or the body has ended:
//
//     bytes  "5\r\nhello\r\n6\r\n wor"   used 10  payload "hello"
//            "6\r\n wor"                 used 7   payload " wor"
//     then   "ld\r\n0\r\n\r\nGET /"      used 4   payload "ld"
//            "0\r\n\r\nGET /"            used 5   the last one
class BodyReader {
public:
    struct Piece {
        std::size_t used = 0;  // of the bytes given; 0 only where none were, or the body has ended
        std::string_view payload;  // empty where only framing was used
        bool is_last = false;
        bool is_bad = false;  // see `problem`; the payload is not to be used
    };

    void begin(Framing framing, std::uint64_t length, const Bounds& bounds);
    Piece next(std::string_view bytes);

    // Stays false for a body that ends with its connection.
    bool has_ended() const { return state_ == State::ended; }
    // The number so far.
    std::uint64_t payload_bytes() const { return payload_bytes_; }
    // The rule that a request's body breaks.
    const Problem& problem() const { return problem_; }

    // The part that comes next. `chunk_data` and `plain` count the payload that is left.
    enum class State : std::uint8_t {
        size_start,     // at the first digit of a chunk's size
        size,
        extension,
        size_end,       // between CR and LF
        chunk_data,
        data_cr,        // behind the data of a chunk
        data_end,
        trailer_start,  // at the start of a line behind the last chunk
        trailer_name,
        trailer_value,
        trailer_end,
        last_end,       // the LF that ends the body
        plain,          // of a known length
        until_close,
        ended,
        bad,
    };

private:
    void step(unsigned char byte);
    void count_digit(unsigned char digit);
    void count_framing();
    void refuse(const Problem& problem, std::uint64_t value = 0);
    Piece take(std::string_view bytes, std::size_t from);

    State state_ = State::ended;
    std::uint64_t left_ = 0;  // of the payload, or of the chunk
    std::uint64_t payload_bytes_ = 0;
    std::size_t line_bytes_ = 0;     // of the chunk's first line
    std::size_t trailer_bytes_ = 0;
    Bounds bounds_;
    Problem problem_;
};

}  // namespace kvroute::http
