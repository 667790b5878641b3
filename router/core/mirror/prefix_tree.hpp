// Finds how much of a prompt others share, by their holders, in one walk for any number of prompts.
//
// A key stands for the whole prefix up to it, so prompts that begin alike have the same keys as far
// as they are the same. They hang in a tree: a stretch is a run of keys that all prompts below it
// have, and it counts them by their holders. Four prompts, of the holders A and B:
//
//     A  1 2 3 4 5         1 2  (A: 2, B: 2) --+-- 3  (A: 2) --+-- 4 5  (A: 1)
//     A  1 2 3 6 7                             |               +-- 6 7  (A: 1)
//     B  1 2 8                                 +-- 8  (B: 1)
//     B  1 2
//
// A look-up walks down once: `1 2 3 9` shares three keys with A and two with B.
#pragma once

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "mirror/flat_map.hpp"
#include "mirror/equal_keys.hpp"

namespace kvroute::mirror {

// Counts of each holder; those with none are left out. Mostly one, which needs no memory of its own.
class Holders {
public:
    using Count = std::pair<CacheId, u32>;

    bool is_empty() const { return size_ == 0; }
    const Count* begin() const { return more_.empty() ? &one_ : more_.data(); }
    const Count* end() const { return begin() + size_; }

    void add(CacheId holder) {
        Count* const at = place_of(holder);
        if (at != end() && at->first == holder) {
            ++at->second;
        } else if (is_empty()) {
            one_ = {holder, 1};
            size_ = 1;
        } else {
            const std::ptrdiff_t place = at - begin();
            if (more_.empty()) more_.push_back(one_);
            more_.insert(more_.begin() + place, {holder, 1});
            ++size_;
        }
    }
    void remove(CacheId holder) {
        Count* const at = place_of(holder);
        if (at == end() || at->first != holder || --at->second) return;
        if (!more_.empty()) more_.erase(more_.begin() + (at - begin()));
        --size_;
    }

private:
    Count* place_of(CacheId holder) {
        Count* const first = more_.empty() ? &one_ : more_.data();
        return std::lower_bound(first, first + size_, Count{holder, 0});
    }

    Count one_{};              // the only one, while there are no `more_`
    std::vector<Count> more_;  // else all of them, ascending
    u32 size_ = 0;
};

// The prompts that are compared with. Every one added must be removed again.
class PrefixTree {
public:
    // The number of stretches.
    std::size_t size() const { return by_first_.size(); }

    // Any number of prompts may be the same.
    void add(const Keys& keys, CacheId holder);
    // One that was added.
    void remove(std::span<const u64> keys, CacheId holder);

    // Calls `visit(holder, count)` for how many leading keys of a prompt a holder has in one of its
    // own: for each holder with any, the last call counts.
    template <class Visit>
    void shared(std::span<const u64> keys, Visit&& visit) const {
        std::size_t at = 0;
        u32 above = kRoot;
        while (at < keys.size()) {
            const u32 number = by_first_.find(pair_key(keys[at], above));
            if (number == kNone) return;
            const Stretch& stretch = pool_[number];
            const std::size_t most = std::min(stretch.end, keys.size());
            at = equal_keys(keys, stretch.keys.span, at + 1, most);
            for (const auto& [holder, prompts] : stretch.holders) visit(holder, at);
            if (at < stretch.end) return;
            above = number;
        }
    }

private:
    static constexpr u32 kRoot = kNone;

    // Keys that all prompts below it have.
    struct Stretch {
        Keys keys;  // of one of its prompts; those before its own are the same in all of them
        std::size_t start = 0, end = 0;  // where its own lie among these
        u32 above = kRoot;               // the stretch that it follows
        Holders holders;                 // how many of its prompts each has
    };

    u32 split(u32 number, std::size_t at);
    u32 new_stretch(Stretch stretch);
    void remove_stretch(u32 number);
    static u64 first_key(const Stretch& stretch) {
        return pair_key(stretch.keys.span[stretch.start], stretch.above);
    }

    FlatMap by_first_;  // by first key and what is above
    std::vector<Stretch> pool_;
    std::vector<u32> free_;  // of the pool
};

}  // namespace kvroute::mirror
