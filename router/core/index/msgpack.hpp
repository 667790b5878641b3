// Reads msgpack from unchecked bytes: every length is compared with what is left before it is
// believed, nesting is bounded, nothing is copied.
#pragma once

#include <string_view>

#include "index/keys.hpp"

namespace kvroute::msgpack {

enum class Kind : u8 { nil, boolean, unsigned_int, negative_int, real, text, binary, array, map,
                       extension };

// The head of a value. The bytes of text, binary and extension follow it, the items of array and map.
struct Head {
    Kind kind = Kind::nil;
    u64 value = 0;  // an integer's bits, a boolean, a real's bits, or a length
};

class Reader {
public:
    static constexpr int kDeepest = 1024;

    Reader(const u8* data, std::size_t size) : at_(data), end_(data + size) {}

    const u8* position() const { return at_; }
    std::size_t left() const { return static_cast<std::size_t>(end_ - at_); }
    bool is_at_end() const { return at_ == end_; }

    // Reads a head; false where the bytes end, or where the length cannot be true.
    bool head(Head& out) {
        if (at_ == end_) return false;
        const u8 byte = *at_++;
        if (byte < 0x80) return given(out, Kind::unsigned_int, byte);
        if (byte >= 0xE0) return given(out, Kind::negative_int, negative(static_cast<i8>(byte)));
        if (byte < 0x90) return counted(out, Kind::map, byte & 0x0F);
        if (byte < 0xA0) return counted(out, Kind::array, byte & 0x0F);
        if (byte < 0xC0) return counted(out, Kind::text, byte & 0x1F);
        return long_head(byte, out);
    }

    bool skip_nil() {
        if (at_ == end_ || *at_ != 0xC0) return false;
        ++at_;
        return true;
    }

    // The readers of one kind know its short form; anything else goes through `head`.
    bool array(u32& count) {
        if (at_ != end_ && *at_ >> 4 == 0x9 && (*at_ & 0x0F) < end_ - at_) {
            count = *at_++ & 0x0F;
            return true;
        }
        Head found;
        if (!head(found) || found.kind != Kind::array) return false;
        count = static_cast<u32>(found.value);
        return true;
    }

    bool text(std::string_view& out) {
        if (at_ != end_ && *at_ >> 5 == 0x5 && (*at_ & 0x1F) < end_ - at_) {
            const std::size_t size = *at_++ & 0x1F;
            out = {reinterpret_cast<const char*>(at_), size};
            at_ += size;
            return true;
        }
        Head found;
        if (!head(found) || found.kind != Kind::text) return false;
        out = {reinterpret_cast<const char*>(at_), found.value};
        at_ += found.value;
        return true;
    }

    // Reads an integer of at most `most`, not negative.
    bool number(u64& out, u64 most) {
        if (at_ != end_ && *at_ < 0x80 && *at_ <= most) {
            out = *at_++;
            return true;
        }
        Head found;
        if (!head(found) || found.kind != Kind::unsigned_int || found.value > most) return false;
        out = found.value;
        return true;
    }

    // Reads an integer of eight bytes without a sign, as hashes are; else false, with nothing read.
    bool long_number(u64& out) {
        if (end_ - at_ < 9 || *at_ != 0xCF) return false;
        out = big_endian<u64>(at_ + 1);
        at_ += 9;
        return true;
    }

    // Appends an array of numbers below 2^32 to `out`. The usual forms are read without a call.
    template <class Numbers>
    bool numbers(Numbers& out, u32& count) {
        if (!array(count)) return false;
        const std::size_t before = out.size();
        out.resize(before + count);
        u32* next = out.data() + before;
        for (u32 i = 0; i < count; ++i) {
            if (end_ - at_ >= 5) {
                const u8 byte = *at_;
                if (byte < 0x80) {
                    *next++ = byte;
                    at_ += 1;
                    continue;
                }
                if (byte == 0xCD) {
                    *next++ = static_cast<u32>(at_[1]) << 8 | at_[2];
                    at_ += 3;
                    continue;
                }
                if (byte == 0xCE) {
                    *next++ = static_cast<u32>(big_endian<u32>(at_ + 1));
                    at_ += 5;
                    continue;
                }
            }
            u64 value;
            if (!number(value, 0xFFFFFFFF)) return false;
            *next++ = static_cast<u32>(value);
        }
        return true;
    }

    // Steps over one value of any kind.
    bool skip(int depth = 0) {
        Head found;
        if (depth > kDeepest || !head(found)) return false;
        switch (found.kind) {
        case Kind::text:
        case Kind::binary:
        case Kind::extension:
            at_ += found.value;
            return true;
        case Kind::map:
            found.value *= 2;
            [[fallthrough]];
        case Kind::array:
            for (u64 i = 0; i < found.value; ++i) {
                if (!skip(depth + 1)) return false;
            }
            return true;
        default:
            return true;
        }
    }

    void advance(u64 bytes) { at_ += bytes; }

private:
    using i8 = std::int8_t;

    static u64 negative(std::int64_t value) { return static_cast<u64>(value); }

    static bool given(Head& out, Kind kind, u64 value) {
        out = {kind, value};
        return true;
    }

    // An item takes at least one byte, a pair two.
    bool counted(Head& out, Kind kind, u64 count) {
        out = {kind, count};
        return kind == Kind::map ? count <= left() / 2 : count <= left();
    }

    template <class Number>
    static u64 big_endian(const u8* bytes) {
        u64 value = 0;
        if constexpr (sizeof(Number) == 4) {
            u32 raw;
            std::memcpy(&raw, bytes, 4);
            value = __builtin_bswap32(raw);
        } else if constexpr (sizeof(Number) == 8) {
            std::memcpy(&value, bytes, 8);
            value = __builtin_bswap64(value);
        } else {
            for (std::size_t i = 0; i < sizeof(Number); ++i) value = value << 8 | bytes[i];
        }
        return value;
    }

    template <class Number>
    bool fixed(u64& value) {
        if (left() < sizeof(Number)) return false;
        value = big_endian<Number>(at_);
        at_ += sizeof(Number);
        return true;
    }

    template <class Number>
    bool integer(Head& out) {
        if (!fixed<Number>(out.value)) return false;
        out.kind = Kind::unsigned_int;
        return true;
    }

    template <class Number>
    bool signed_integer(Head& out) {
        if (!fixed<Number>(out.value)) return false;
        constexpr int kUnused = 64 - 8 * static_cast<int>(sizeof(Number));
        const auto value = static_cast<std::int64_t>(out.value << kUnused) >> kUnused;
        out = {value < 0 ? Kind::negative_int : Kind::unsigned_int, negative(value)};
        return true;
    }

    template <class Number>
    bool real(Head& out) {
        if (!fixed<Number>(out.value)) return false;
        out.kind = Kind::real;
        return true;
    }

    template <class Number>
    bool long_counted(Head& out, Kind kind) {
        u64 count;
        return fixed<Number>(count) && counted(out, kind, count);
    }

    // The bytes of an extension: its type, then `size` bytes.
    bool extension(Head& out, u64 size) { return counted(out, Kind::extension, size + 1); }

    template <class Number>
    bool long_extension(Head& out) {
        u64 size;
        return fixed<Number>(size) && extension(out, size);
    }

    bool long_head(u8 byte, Head& out) {
        switch (byte) {
        case 0xC0: return given(out, Kind::nil, 0);
        case 0xC2: return given(out, Kind::boolean, 0);
        case 0xC3: return given(out, Kind::boolean, 1);
        case 0xC4: return long_counted<u8>(out, Kind::binary);
        case 0xC5: return long_counted<u16>(out, Kind::binary);
        case 0xC6: return long_counted<u32>(out, Kind::binary);
        case 0xC7: return long_extension<u8>(out);
        case 0xC8: return long_extension<u16>(out);
        case 0xC9: return long_extension<u32>(out);
        case 0xCA: return real<u32>(out);
        case 0xCB: return real<u64>(out);
        case 0xCC: return integer<u8>(out);
        case 0xCD: return integer<u16>(out);
        case 0xCE: return integer<u32>(out);
        case 0xCF: return integer<u64>(out);
        case 0xD0: return signed_integer<u8>(out);
        case 0xD1: return signed_integer<u16>(out);
        case 0xD2: return signed_integer<u32>(out);
        case 0xD3: return signed_integer<u64>(out);
        case 0xD4: return extension(out, 1);
        case 0xD5: return extension(out, 2);
        case 0xD6: return extension(out, 4);
        case 0xD7: return extension(out, 8);
        case 0xD8: return extension(out, 16);
        case 0xD9: return long_counted<u8>(out, Kind::text);
        case 0xDA: return long_counted<u16>(out, Kind::text);
        case 0xDB: return long_counted<u32>(out, Kind::text);
        case 0xDC: return long_counted<u16>(out, Kind::array);
        case 0xDD: return long_counted<u32>(out, Kind::array);
        case 0xDE: return long_counted<u16>(out, Kind::map);
        case 0xDF: return long_counted<u32>(out, Kind::map);
        default: return false;
        }
    }

    const u8* at_;
    const u8* end_;
};

}  // namespace kvroute::msgpack
