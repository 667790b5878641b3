// JSON that is plain: read one value after the other, and text as it is written. No I/O.
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace kvroute::plane {

template <std::size_t size>
bool is_among(const std::array<std::string_view, size>& texts, std::string_view text) {
    return std::find(texts.begin(), texts.end(), text) != texts.end();
}

// A text as JSON has it between quotation marks. Bytes above ASCII are left as they are.
inline std::string json_escaped(std::string_view text) {
    constexpr std::string_view kHexDigits = "0123456789abcdef";
    std::string made;
    for (const char each : text) {
        const auto byte = static_cast<unsigned char>(each);
        if (byte < 0x20) {
            made.append("\\u00").push_back(kHexDigits[byte >> 4]);
            made.push_back(kHexDigits[byte & 15]);
            continue;
        }
        if (each == '"' || each == '\\') made.push_back('\\');
        made.push_back(each);
    }
    return made;
}

// Walks over JSON of plain ASCII; false wherever it is not well-formed (RFC 8259).
class Walk {
public:
    explicit Walk(std::string_view text) : at_(text.data()), end_(text.data() + text.size()) {}

    bool is_at_end() {
        skip_space();
        return at_ == end_;
    }
    bool take(char what) {
        skip_space();
        if (at_ == end_ || *at_ != what) return false;
        ++at_;
        return true;
    }
    // Takes a string; `found` is the text between the quotation marks, as it is written.
    bool text(std::string_view& found) {
        skip_space();
        if (at_ == end_ || *at_ != '"') return false;
        const char* const start = ++at_;
        while (at_ < end_ && *at_ != '"') {
            const auto each = static_cast<unsigned char>(*at_);
            if (each < 0x20 || each > 0x7E) return false;
            if (each == '\\' && !escape()) return false;
            ++at_;
        }
        if (at_ == end_) return false;
        found = std::string_view(start, static_cast<std::size_t>(at_ - start));
        ++at_;
        return true;
    }
    bool value(int depth = 0) {
        skip_space();
        if (at_ == end_ || depth > kMostNested) return false;
        std::string_view ignored;
        switch (*at_) {
            case '"': return text(ignored);
            case '{': return object([&](std::string_view) { return value(depth + 1); });
            case '[': return list(depth);
            case 't': return word("true");
            case 'f': return word("false");
            case 'n': return word("null");
            default: return number();
        }
    }
    // Takes the fields of an object. `take_value(name)`: that of one; false ends it all.
    template <class Take>
    bool object(Take&& take_value) {
        if (!take('{')) return false;
        if (take('}')) return true;
        for (;;) {
            std::string_view name;
            if (!text(name) || !take(':') || !take_value(name)) return false;
            if (take('}')) return true;
            if (!take(',')) return false;
        }
    }
    // The same, of names that are written as they are.
    template <class Take>
    bool plain_object(Take&& take_value) {
        return object([&](std::string_view name) {
            return name.find('\\') == std::string_view::npos && take_value(name);
        });
    }
    // A number without sign, fraction or exponent, of twelve digits at most.
    bool count(std::uint64_t& found) {
        const std::string_view text = plain_value();
        if (text.empty() || text.size() > 12) return false;
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), found);
        return error == std::errc() && end == text.data() + text.size();
    }
    // A number or a word, as it is written; empty where none is there.
    std::string_view plain_value() {
        skip_space();
        const char* const start = at_;
        if (at_ == end_ || *at_ == '"' || *at_ == '{' || *at_ == '[' || !value()) return {};
        return std::string_view(start, static_cast<std::size_t>(at_ - start));
    }
    // Up to the bracket that closes a list without lists, objects or text in it.
    bool plain_list(std::string_view& found) {
        skip_space();
        if (at_ == end_ || *at_ != '[') return false;
        const auto* close =
            static_cast<const char*>(std::memchr(at_, ']', static_cast<std::size_t>(end_ - at_)));
        if (close == nullptr) return false;
        found = std::string_view(at_, static_cast<std::size_t>(close + 1 - at_));
        at_ = close + 1;
        return true;
    }

private:
    static constexpr int kMostNested = 64;

    void skip_space() {
        while (at_ < end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\t' || *at_ == '\r')) ++at_;
    }
    // At a backslash; moves to the last character of the escape.
    bool escape() {
        if (++at_ == end_) return false;
        // `\u` is left to Python: half of a surrogate pair is no character.
        return std::string_view("\"\\/bfnrt").find(*at_) != std::string_view::npos;
    }
    bool word(std::string_view expected) {
        if (static_cast<std::size_t>(end_ - at_) < expected.size()) return false;
        if (std::string_view(at_, expected.size()) != expected) return false;
        at_ += expected.size();
        return true;
    }
    bool digits() {
        const char* const start = at_;
        while (at_ < end_ && *at_ >= '0' && *at_ <= '9') ++at_;
        return at_ > start;
    }
    bool number() {
        if (at_ < end_ && *at_ == '-') ++at_;
        const char* const whole = at_;
        if (!digits() || (at_ - whole > 1 && *whole == '0')) return false;
        if (at_ < end_ && *at_ == '.') {
            ++at_;
            if (!digits()) return false;
        }
        if (at_ < end_ && (*at_ == 'e' || *at_ == 'E')) {
            ++at_;
            if (at_ < end_ && (*at_ == '+' || *at_ == '-')) ++at_;
            return digits();
        }
        return true;
    }
    bool list(int depth) {
        ++at_;
        if (take(']')) return true;
        for (;;) {
            if (!value(depth + 1)) return false;
            if (take(']')) return true;
            if (!take(',')) return false;
        }
    }

    const char* at_;
    const char* end_;
};

}  // namespace kvroute::plane
