// A set of node numbers that are looked up by something that the nodes hold: open addressing, grown
// and shrunk a small piece at a time.
//
// The table is a directory of segments of at most 4,096 places. The upper bits of a node's mixed
// hash choose the segment, the middle bits a place in it, the lower 8 are kept beside the place as
// a tag, so that a look-up reads a node only where the tag agrees. A segment that is full splits in
// two, and two neighbours that are nearly empty become one: no growth ever touches more than one
// segment (some 100 microseconds), and memory follows the number of entries both ways.
#pragma once

#include <bit>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include "index/keys.hpp"
#include "index/memory.hpp"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace kvroute {

constexpr u32 kNone = 0xFFFFFFFF;

// 16 tags at a time, as sets of places: bit i is the tag at `from + i`.
struct TagGroup {
    static constexpr u32 kSize = 16;

#if defined(__SSE2__)
    explicit TagGroup(const u8* from)
        : tags_(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))) {}

    u32 equal(u8 tag) const {
        const __m128i wanted = _mm_set1_epi8(static_cast<char>(tag));
        return static_cast<u32>(_mm_movemask_epi8(_mm_cmpeq_epi8(tags_, wanted)));
    }

private:
    __m128i tags_;
#else
    explicit TagGroup(const u8* from) : from_(from) {}

    u32 equal(u8 tag) const {
        u32 found = 0;
        for (u32 i = 0; i < kSize; ++i) found |= u32{from_[i] == tag} << i;
        return found;
    }

private:
    const u8* from_;
#endif
};

// `HashOf` has `u64 hash_of(u32 id) const`, the mixed hash of an entry, and `prefetch(id)`, which
// fetches what that reads.
template <class HashOf>
class IdTable {
public:
    explicit IdTable(const HashOf& hashes) : hashes_(hashes) {
        directory_.push_back(new_segment(kSmallest, 0));
    }
    ~IdTable() {
        for_each_segment([](Segment* segment) { std::free(segment); });
    }
    IdTable(const IdTable&) = delete;
    IdTable& operator=(const IdTable&) = delete;

    std::size_t size() const { return size_; }

    // Returns the entry with this mixed hash for which `is_it(id)`; kNone if there is none.
    template <class IsIt>
    u32 find(u64 hash, IsIt&& is_it) const {
        const Segment* segment = segment_of(hash);
        const u32 mask = segment->capacity - 1;
        const u8 tag = tag_of(hash);
        for (u32 at = place_of(hash) & mask;; at = (at + TagGroup::kSize) & mask) {
            const TagGroup group(segment->tags() + at);
            const u32 empty = group.equal(kEmpty);
            // Entries behind an empty place have other hashes.
            u32 equal = group.equal(tag) & (empty ? (empty & -empty) - 1 : ~u32{0});
            for (; equal; equal &= equal - 1) {
                const u32 place = (at + static_cast<u32>(std::countr_zero(equal))) & mask;
                if (is_it(segment->ids()[place])) return segment->ids()[place];
            }
            if (empty) return kNone;
        }
    }

    // Returns the first entry whose tag agrees: a guess, to fetch its node ahead of the look-up.
    u32 guess(u64 hash) const {
        return find(hash, [](u32) { return true; });
    }

    void prefetch(u64 hash) const {
        const Segment* segment = segment_of(hash);
        const u32 at = place_of(hash) & (segment->capacity - 1);
        __builtin_prefetch(segment->tags() + at);
        __builtin_prefetch(segment->ids() + at);
    }

    // Adds an entry that is not there yet.
    void insert(u64 hash, u32 id) {
        Segment* segment = roomy_segment_of(hash);
        put(segment, hash, id);
        ++size_;
    }

    // Puts another entry of the same hash in the place of one that is there.
    void replace(u64 hash, u32 id, u32 with) {
        Segment* segment = segment_of(hash);
        segment->ids()[place_holding(segment, hash, id)] = with;
    }

    void erase(u64 hash, u32 id) {
        Segment* segment = segment_of(hash);
        const u32 mask = segment->capacity - 1;
        const u32 at = place_holding(segment, hash, id);
        const bool ends_chain = segment->tags()[(at + 1) & mask] == kEmpty;
        segment->set_tag(at, ends_chain ? kEmpty : kGone);
        segment->used -= 1;
        segment->gone += !ends_chain;
        size_ -= 1;
        if (segment->used * 8 < segment->capacity) shrink(segment, hash);
    }

    std::size_t memory() const {
        std::size_t bytes = directory_.capacity() * sizeof(void*);
        for_each_segment([&](const Segment* segment) { bytes += bytes_of(segment->capacity); });
        return bytes;
    }

private:
    static constexpr u32 kSmallest = 16;
    static constexpr u32 kLargest = 4096;
    static constexpr u32 kDeepest = 40;
    static constexpr u8 kEmpty = 0;
    static constexpr u8 kGone = 1;  // an entry was here: look-ups go on behind it

    struct Segment {
        u32 capacity;
        u32 used;
        u32 gone;
        u32 depth;  // how many upper bits all entries here have in common

        u32* ids() { return reinterpret_cast<u32*>(this + 1); }
        const u32* ids() const { return reinterpret_cast<const u32*>(this + 1); }
        u8* tags() { return reinterpret_cast<u8*>(ids() + capacity); }
        const u8* tags() const { return reinterpret_cast<const u8*>(ids() + capacity); }
        // The first tags are there again behind the last, so that a group never wraps around.
        void set_tag(u32 at, u8 tag) {
            tags()[at] = tag;
            if (at < TagGroup::kSize) tags()[capacity + at] = tag;
        }
    };

    static std::size_t bytes_of(u32 capacity) {
        return sizeof(Segment) + capacity * 5u + TagGroup::kSize;
    }

    static Segment* new_segment(u32 capacity, u32 depth) {
        auto* segment = new (memory_of(bytes_of(capacity))) Segment{capacity, 0, 0, depth};
        std::memset(segment->tags(), kEmpty, capacity + TagGroup::kSize);
        return segment;
    }

    static u8 tag_of(u64 hash) {
        const u8 tag = static_cast<u8>(hash);
        return tag < 2 ? static_cast<u8>(tag + 2) : tag;
    }
    static u32 place_of(u64 hash) { return static_cast<u32>(hash >> 8); }

    std::size_t index_of(u64 hash) const { return depth_ ? hash >> (64 - depth_) : 0; }
    Segment* segment_of(u64 hash) const { return directory_[index_of(hash)]; }

    u32 place_holding(Segment* segment, u64 hash, u32 id) const {
        const u32 mask = segment->capacity - 1;
        for (u32 at = place_of(hash) & mask;; at = (at + TagGroup::kSize) & mask) {
            u32 equal = TagGroup(segment->tags() + at).equal(tag_of(hash));
            for (; equal; equal &= equal - 1) {
                const u32 place = (at + static_cast<u32>(std::countr_zero(equal))) & mask;
                if (segment->ids()[place] == id) return place;
            }
        }
    }

    static void put(Segment* segment, u64 hash, u32 id) {
        const u32 mask = segment->capacity - 1;
        for (u32 first = place_of(hash) & mask;; first = (first + TagGroup::kSize) & mask) {
            const TagGroup group(segment->tags() + first);
            const u32 free = group.equal(kEmpty) | group.equal(kGone);
            if (!free) continue;
            const u32 at = (first + static_cast<u32>(std::countr_zero(free))) & mask;
            segment->gone -= segment->tags()[at] == kGone;
            segment->set_tag(at, tag_of(hash));
            segment->ids()[at] = id;
            segment->used += 1;
            return;
        }
    }

    Segment* roomy_segment_of(u64 hash) {
        for (;;) {
            Segment* segment = segment_of(hash);
            const u32 most = segment->capacity / 8 * 7;
            if (segment->used + segment->gone < most) return segment;
            if (segment->used < most / 4 * 3) {
                rebuild(segment, segment->capacity, hash);
            } else if (segment->capacity < kLargest || segment->depth >= kDeepest) {
                rebuild(segment, segment->capacity * 2, hash);
            } else {
                split(segment, hash);
            }
        }
    }

    // Calls `visit(id, hash)` for every entry of a segment. Hashes are read where the entries are,
    // all over the memory: each is fetched well ahead.
    template <class Visit>
    void for_each(const Segment* segment, Visit&& visit) const {
        constexpr u32 kAhead = 16;
        const u32* ids = segment->ids();
        const u8* tags = segment->tags();
        for (u32 at = 0; at < segment->capacity; ++at) {
            if (at + kAhead < segment->capacity && tags[at + kAhead] >= 2) {
                hashes_.prefetch(ids[at + kAhead]);
            }
            if (tags[at] >= 2) visit(ids[at], hashes_.hash_of(ids[at]));
        }
    }

    template <class Visit>
    void for_each_segment(Visit&& visit) const {
        Segment* last = nullptr;
        for (Segment* segment : directory_) {
            if (segment != last) visit(segment);
            last = segment;
        }
    }

    // Returns the run of directory places that lead to a segment.
    std::pair<std::size_t, std::size_t> places_of(const Segment* segment, u64 hash) const {
        const u32 spare = depth_ - segment->depth;
        const std::size_t first = index_of(hash) >> spare << spare;
        return {first, std::size_t{1} << spare};
    }

    void rebuild(Segment* old, u32 capacity, u64 hash) {
        Segment* segment = new_segment(capacity, old->depth);
        for_each(old, [&](u32 id, u64 of_entry) { put(segment, of_entry, id); });
        auto [first, count] = places_of(old, hash);
        std::fill_n(directory_.begin() + first, count, segment);
        std::free(old);
    }

    void split(Segment* old, u64 hash) {
        if (old->depth == depth_) {
            std::vector<Segment*> doubled(directory_.size() * 2);
            for (std::size_t i = 0; i < doubled.size(); ++i) doubled[i] = directory_[i / 2];
            directory_.swap(doubled);
            ++depth_;
        }
        auto [first, count] = places_of(old, hash);
        Segment* halves[2] = {new_segment(kLargest, old->depth + 1),
                              new_segment(kLargest, old->depth + 1)};
        for_each(old, [&](u32 id, u64 of_entry) {
            put(halves[of_entry >> (63 - old->depth) & 1], of_entry, id);
        });
        std::fill_n(directory_.begin() + first, count / 2, halves[0]);
        std::fill_n(directory_.begin() + first + count / 2, count / 2, halves[1]);
        std::free(old);
    }

    void shrink(Segment* segment, u64 hash) {
        if (segment->depth > 0 && merge(segment, hash)) return;
        if (segment->capacity > kSmallest) rebuild(segment, segment->capacity / 2, hash);
    }

    // Merges two neighbours, where that leaves the result half empty.
    bool merge(Segment* segment, u64 hash) {
        Segment* other = segment_of(hash ^ u64{1} << (64 - segment->depth));
        if (other->depth != segment->depth || segment->used + other->used > kLargest / 2) {
            return false;
        }
        u32 capacity = kSmallest;
        while (capacity / 2 < segment->used + other->used) capacity *= 2;
        Segment* both = new_segment(capacity, segment->depth - 1);
        for (Segment* half : {segment, other}) {
            for_each(half, [&](u32 id, u64 of_entry) { put(both, of_entry, id); });
        }
        auto [first, count] = places_of(both, hash);
        std::fill_n(directory_.begin() + first, count, both);
        std::free(segment);
        std::free(other);
        if (both->depth == 0) {
            directory_.assign(1, both);
            directory_.shrink_to_fit();
            depth_ = 0;
        }
        return true;  // NOLINT(clang-analyzer-unix.Malloc): it is in the directory
    }

    const HashOf& hashes_;
    std::vector<Segment*> directory_;
    u32 depth_ = 0;  // bits of a hash that choose the directory's place
    std::size_t size_ = 0;
};

}  // namespace kvroute
