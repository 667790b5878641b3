// A map from 64-bit keys to numbers: open addressing, grown a small piece at a time.
//
// The map is a directory of segments of at most 4,096 places. The upper bits of a key's hash choose
// the segment, others a place in it; keys that collide go to the places behind. A segment that is full
// splits in two, so that no growth ever moves more than one segment (some 20 microseconds), however
// large the map is. An erased entry leaves no mark: those behind it move up.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "mirror/names.hpp"

namespace kvroute::mirror {

// Returns one key for two values: those of two pairs are equal only by a chance of 2^-64.
inline u64 pair_key(u64 one, u64 other) {
    return mixed(one, (other + 1) * 0xA0761D6478BD642Fu);
}

class FlatMap {
public:
    FlatMap() { reset(); }

    std::size_t size() const { return size_; }

    // Returns kNone where the key is not there.
    u32 find(u64 key) const {
        const u64 hash = hash_of(key);
        const Segment& segment = segment_of(hash);
        return segment.numbers[segment.place_of(key, hash)];
    }

    // Returns the number of a key, which is added with `number` where it is not there.
    u32 find_or_add(u64 key, u32 number) {
        const u64 hash = hash_of(key);
        Segment& segment = segment_of(hash);
        const u32 place = segment.place_of(key, hash);
        if (segment.numbers[place] != kNone) return segment.numbers[place];
        add(segment, place, key, hash, number);
        return number;
    }

    // Returns the number that it had before; kNone: none. `number` is not kNone.
    u32 put(u64 key, u32 number) {
        const u64 hash = hash_of(key);
        Segment& segment = segment_of(hash);
        const u32 place = segment.place_of(key, hash);
        const u32 before = segment.numbers[place];
        if (before == kNone) {
            add(segment, place, key, hash, number);
        } else {
            segment.numbers[place] = number;
        }
        return before;
    }

    // Returns the number that it had; kNone: it was not there.
    u32 erase(u64 key) {
        const u64 hash = hash_of(key);
        Segment& segment = segment_of(hash);
        const u32 place = segment.place_of(key, hash);
        const u32 before = segment.numbers[place];
        if (before == kNone) return kNone;
        segment.close_gap(place);
        --segment.used;
        if (!--size_) {
            reset();
        } else if (segment.used * 8 < segment.capacity && segment.capacity > kSmallest) {
            segment.rebuild(segment.capacity / 2);
        }
        return before;
    }

    void clear() { reset(); }

private:
    static constexpr u32 kSmallest = 16;
    static constexpr u32 kLargest = 4096;
    static constexpr u32 kDeepest = 20;  // bits of a hash that choose a segment

    struct Segment {
        Segment(u32 places, u32 bits) : depth(bits) { allocate(places); }

        u32 capacity = 0, used = 0;
        u32 depth;  // how many upper bits all entries here have in common
        std::unique_ptr<u64[]> keys;
        std::unique_ptr<u32[]> numbers;  // kNone: the place is empty

        // Returns the place where the key is, or would be.
        u32 place_of(u64 key, u64 hash) const {
            const u32 mask = capacity - 1;
            u32 place = first_place(hash) & mask;
            while (numbers[place] != kNone && keys[place] != key) place = (place + 1) & mask;
            return place;
        }

        // Entries behind an emptied place move up, if they belong there or before.
        void close_gap(u32 gap) {
            const u32 mask = capacity - 1;
            numbers[gap] = kNone;
            for (u32 at = (gap + 1) & mask; numbers[at] != kNone; at = (at + 1) & mask) {
                const u32 home = first_place(hash_of(keys[at])) & mask;
                if (((at - home) & mask) < ((at - gap) & mask)) continue;
                keys[gap] = keys[at];
                numbers[gap] = numbers[at];
                numbers[at] = kNone;
                gap = at;
            }
        }

        void put_new(u64 key, u64 hash, u32 number) {
            const u32 place = place_of(key, hash);
            keys[place] = key;
            numbers[place] = number;
            ++used;
        }

        void rebuild(u32 places) {
            const std::unique_ptr<u64[]> old_keys = std::move(keys);
            const std::unique_ptr<u32[]> old_numbers = std::move(numbers);
            const u32 old_capacity = capacity;
            allocate(places);
            for (u32 at = 0; at < old_capacity; ++at) {
                if (old_numbers[at] == kNone) continue;
                put_new(old_keys[at], hash_of(old_keys[at]), old_numbers[at]);
            }
        }

    private:
        void allocate(u32 places) {
            capacity = places;
            used = 0;
            keys.reset(new u64[places]);
            numbers.reset(new u32[places]);
            std::fill_n(numbers.get(), places, kNone);
        }
    };

    static u64 hash_of(u64 key) {
        key *= 0x9E3779B97F4A7C15u;
        return (key ^ key >> 32) * 0xD6E8FEB86659FD93u;
    }
    static u32 first_place(u64 hash) { return static_cast<u32>(hash >> 16); }

    std::size_t index_of(u64 hash) const { return depth_ ? hash >> (64 - depth_) : 0; }
    Segment& segment_of(u64 hash) { return *directory_[index_of(hash)]; }
    const Segment& segment_of(u64 hash) const { return *directory_[index_of(hash)]; }

    void add(Segment& segment, u32 place, u64 key, u64 hash, u32 number) {
        ++size_;
        if ((segment.used + 1) * 4 <= segment.capacity * 3) {
            segment.keys[place] = key;
            segment.numbers[place] = number;
            ++segment.used;
            return;
        }
        make_room(segment, hash);
        segment_of(hash).put_new(key, hash, number);
    }

    void make_room(Segment& segment, u64 hash) {
        if (segment.capacity < kLargest || segment.depth >= kDeepest) {
            segment.rebuild(segment.capacity * 2);
            return;
        }
        split(hash);
        Segment& half = segment_of(hash);
        if ((half.used + 1) * 4 > half.capacity * 3) make_room(half, hash);
    }

    void split(u64 hash) {
        const std::shared_ptr<Segment> old = directory_[index_of(hash)];
        if (old->depth == depth_) {
            std::vector<std::shared_ptr<Segment>> doubled(directory_.size() * 2);
            for (std::size_t i = 0; i < doubled.size(); ++i) doubled[i] = directory_[i / 2];
            directory_.swap(doubled);
            ++depth_;
        }
        const std::shared_ptr<Segment> halves[2] = {
            std::make_shared<Segment>(kLargest, old->depth + 1),
            std::make_shared<Segment>(kLargest, old->depth + 1)};
        for (u32 at = 0; at < old->capacity; ++at) {
            if (old->numbers[at] == kNone) continue;
            const u64 of_entry = hash_of(old->keys[at]);
            halves[of_entry >> (63 - old->depth) & 1]->put_new(old->keys[at], of_entry,
                                                               old->numbers[at]);
        }
        const u32 spare = depth_ - old->depth;
        const std::size_t first = index_of(hash) >> spare << spare, half = std::size_t{1} << spare >> 1;
        for (std::size_t i = 0; i < half * 2; ++i) directory_[first + i] = halves[i >= half];
    }

    void reset() {
        directory_.assign(1, std::make_shared<Segment>(kSmallest, 0));
        directory_.shrink_to_fit();
        depth_ = 0;
        size_ = 0;
    }

    std::vector<std::shared_ptr<Segment>> directory_;
    u32 depth_ = 0;  // bits of a hash that choose the directory's place
    std::size_t size_ = 0;
};

}  // namespace kvroute::mirror
