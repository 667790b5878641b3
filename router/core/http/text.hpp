// The kinds of bytes in a message, and skipping many of them at once.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

namespace kvroute::http {

// One bit for each kind that a byte may have.
enum Kind : std::uint8_t {
    kToken = 1,     // RFC 9110 5.6.2: names, methods
    kVisible = 2,   // RFC 5234 VCHAR: targets
    kText = 4,      // RFC 9110 5.5: values; also obs-text and white space, but no other control
    kHost = 8,      // RFC 3986 3.2.2 and 3.2.3, but for the comma, which would join two hosts
    kHexDigit = 16,
};

constexpr std::array<std::uint8_t, 256> make_kinds() {
    std::array<std::uint8_t, 256> kinds{};
    const auto add = [&](const char* bytes, int kind) {
        for (; *bytes; ++bytes) {
            std::uint8_t& known = kinds[static_cast<unsigned char>(*bytes)];
            known = static_cast<std::uint8_t>(known | kind);
        }
    };
    for (std::size_t byte = 0x21; byte < 0x7F; ++byte) kinds[byte] = kVisible | kText;
    for (std::size_t byte = 0x80; byte < 0x100; ++byte) kinds[byte] = kText;
    add(" \t", kText);
    add("0123456789ABCDEFabcdef", kHexDigit);
    add("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789", kToken | kHost);
    add("!#$%&'*+-.^_`|~", kToken);
    add("-._~!$&'()*+;=%:[]", kHost);
    return kinds;
}

inline constexpr std::array<std::uint8_t, 256> kKinds = make_kinds();

inline bool is_of(char byte, Kind kind) { return kKinds[static_cast<unsigned char>(byte)] & kind; }

// Returns the first byte that is not of that kind; `end` where all are.
inline const char* skip(const char* at, const char* end, Kind kind) {
    while (at != end && is_of(*at, kind)) ++at;
    return at;
}

// True where one of eight bytes is a control, a tab among them, or DEL: eight subtractions in one, as
// in Anderson's "Bit Twiddling Hacks". A borrow starts only in a byte for which it is true.
inline bool has_control(const char* at) {
    constexpr std::uint64_t kOnes = 0x0101010101010101, kHighs = 0x8080808080808080;
    std::uint64_t bytes;
    std::memcpy(&bytes, at, sizeof bytes);
    const std::uint64_t below_space = (bytes - kOnes * 0x20) & ~bytes;
    const std::uint64_t deleted = bytes ^ (kOnes * 0x7F);
    return ((below_space | ((deleted - kOnes) & ~deleted)) & kHighs) != 0;
}

// Does `skip` for text, which is most of a head.
inline const char* skip_text(const char* at, const char* end) {
    for (;;) {
        while (end - at >= 8 && !has_control(at)) at += 8;
        const char* const stop = end - at >= 8 ? at + 8 : end;
        at = skip(at, stop, kText);
        if (at != stop || at == end) return at;
    }
}

inline char lower(char byte) {
    return byte >= 'A' && byte <= 'Z' ? static_cast<char>(byte | 0x20) : byte;
}

}  // namespace kvroute::http
