// Batches as they lie one behind the other in what came from a publisher's socket. See
// `kvevents/zmtp.py` for the form of a message.
#pragma once

#include <optional>

#include "digests.hpp"

namespace kvroute {

class WireRun {
public:
    // `head`: what a message begins with, up to its number. `most`: bytes of a payload.
    WireRun(std::span<const u8> data, std::size_t at, std::span<const u8> head, u64 most)
        : data_(data), at_(std::min(at, data.size())), head_(head), most_(most) {}

    std::size_t end() const { return at_; }

    // The payload of batch `seq`, if that is what comes next, as a whole and in the usual form: two
    // frames before it, which `head_` and the number fill, and none behind it.
    std::optional<std::span<const u8>> next(u64 seq) {
        const u8* from = data_.data() + at_;
        const std::size_t left = data_.size() - at_;
        if (head_.empty() || left < head_.size() + kTail) return std::nullopt;
        if (std::memcmp(from, head_.data(), head_.size()) != 0) return std::nullopt;
        const u8* tail = from + head_.size();
        if (detail::read_big<u64>(tail) != seq || (tail[8] & ~kLong)) return std::nullopt;
        const bool is_long = tail[8] == kLong;
        std::size_t start = head_.size() + kTail;
        u64 size = tail[9];
        if (is_long) {
            start = head_.size() + kLongTail;
            if (left < start) return std::nullopt;
            size = detail::read_big<u64>(tail + 9);
        }
        if (size > most_ || size > left - start) return std::nullopt;
        at_ += start + size;
        return std::span(from + start, size);
    }

    // Whether a payload ends with the name of its process: four elements, the last of 16 bytes.
    static bool may_name_publisher(std::span<const u8> payload) {
        const std::size_t size = payload.size();
        return size >= 18 && payload[0] == 0x94 && payload[size - 18] == 0xC4 &&
               payload[size - 17] == 16;
    }

    void back_to(std::size_t at) { at_ = at; }

private:
    static constexpr u8 kLong = 2;
    static constexpr std::size_t kTail = 10, kLongTail = 17;  // number, flags, size in 1 or 8 bytes

    std::span<const u8> data_;
    std::size_t at_;
    std::span<const u8> head_;
    u64 most_;
};

}  // namespace kvroute
