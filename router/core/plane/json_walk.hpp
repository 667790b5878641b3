// Reads JSON one value after the other, where it is plain. No I/O.
#pragma once

#include <cstring>
#include <string_view>

namespace kvroute::plane {

// Walks over JSON of plain ASCII; false wherever it is not well-formed (RFC 8259).
class Walk {
public:
    explicit Walk(std::string_view text) : at_(text.data()), end_(text.data() + text.size()) {}

    const char* at() const { return at_; }
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
    // What stands between the quotation marks, as it is written.
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
            case '{': return items('}', depth, true);
            case '[': return items(']', depth, false);
            case 't': return word("true");
            case 'f': return word("false");
            case 'n': return word("null");
            default: return number();
        }
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
        // Half of a surrogate pair is no character: left to who looks closer.
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
    bool items(char close, int depth, bool have_names) {
        ++at_;
        if (take(close)) return true;
        for (;;) {
            std::string_view name;
            if (have_names && (!text(name) || !take(':'))) return false;
            if (!value(depth + 1)) return false;
            if (take(close)) return true;
            if (!take(',')) return false;
        }
    }

    const char* at_;
    const char* end_;
};

}  // namespace kvroute::plane
