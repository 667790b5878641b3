// The present blocks of a prompt, as bitmaps over its hash blocks: runs are found 64 at a time.
#pragma once

#include <algorithm>
#include <bit>
#include <vector>

#include "index/keys.hpp"

namespace kvroute {

// Bits over the hash blocks of a prompt: bit i is in word i / 64, `stride` words apart.
struct Bitmap {
    const u64* words = nullptr;  // null: nothing is present
    std::size_t stride = 1;
    u64 count = 0;  // blocks; beyond them nothing is present

    u64 word(u64 number) const { return words[number * stride]; }
    bool test(u64 index) const {
        return words != nullptr && index < count && word(index / 64) >> (index % 64) & 1;
    }
    // Returns the first block of [from, to) that is missing; `to` if there is none.
    u64 first_missing(u64 from, u64 to) const {
        if (words == nullptr) return from;
        const u64 end = std::min(to, count);
        while (from < end) {
            const u64 missing = ~word(from / 64) >> (from % 64);
            if (missing) return std::min(from + std::countr_zero(missing), end);
            from = (from / 64 + 1) * 64;
        }
        return std::max(end, std::min(from, to));
    }
    // Returns the last block of [down_to, from] with the given presence, + 1; 0 if there is none.
    u64 last(bool present, u64 from, u64 down_to) const {
        for (u64 end = from + 1; end > down_to;) {
            const u64 number = (end - 1) / 64;
            u64 found = words != nullptr && number * 64 < count ? word(number) : 0;
            if (!present) found = ~found;
            found &= ~u64{0} >> (63 - (end - 1) % 64);
            if (found) {
                const u64 at = number * 64 + 64 - std::countl_zero(found);
                return at > down_to ? at : 0;
            }
            end = number * 64;
        }
        return 0;
    }
};

// "Is the block of this group that ends at token `end` present?"
struct Presence {
    u64 step = 1;  // tokens per bit
    std::vector<Bitmap> groups;

    bool test(u32 group, u64 end) const {
        return end >= step && groups[group].test(end / step - 1);
    }

    // Returns the first end of from, from + size, ... up to `bound` that is missing; 0 if none is.
    u64 first_missing(u32 group, u64 from, u64 bound, u64 size) const {
        if (from > bound) return 0;
        if (size == step) {
            const u64 blocks = bound / step;
            const u64 index = groups[group].first_missing(from / step - 1, blocks);
            return index < blocks ? (index + 1) * step : 0;
        }
        for (u64 end = from; end <= bound; end += size) {
            if (!test(group, end)) return end;
        }
        return 0;
    }

    // Returns the last end of from, from - size, ... above `floor` with the given presence; 0 if none.
    u64 last(bool present, u32 group, u64 from, u64 floor, u64 size) const {
        if (from <= floor) return 0;
        if (size == step && from % step == 0) {
            return groups[group].last(present, from / step - 1, floor / step) * step;
        }
        for (u64 end = from; end > floor; end -= size) {
            if (test(group, end) == present) return end;
            if (end < size) break;
        }
        return 0;
    }
};

}  // namespace kvroute
