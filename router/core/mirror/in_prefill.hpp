// Prompts that are being computed, and how much of them a new one shares at each cache.
//
// Every request looks here, and a busy router has hundreds of such prompts, most of which begin
// alike. So they hang in a tree of prefixes; those that are as long as the new one and equal to it are
// found by their last key. Only where caches keep windows or states sparsely, at the boundaries of a
// prompt and nowhere else, is each of them looked at, block by block.
#pragma once

#include <functional>

#include "mirror/layout.hpp"
#include "mirror/prefix_tree.hpp"
#include "index/prompt.hpp"

namespace kvroute::mirror {

// The part of a prompt that each cache will have. Its memory is reused: keep one for each thread.
class ComingTable {
public:
    void clear() {
        for (CacheId cache : caches_) slots_[cache] = {};
        caches_.clear();
    }

    // Returns the entry of a cache, or 0 and 0.
    Coming of(CacheId cache) const {
        return cache < slots_.size() ? slots_[cache].coming : Coming();
    }
    // Returns the caches that have an entry, each once.
    const std::vector<CacheId>& caches() const { return caches_; }

    // Raises a cache's entry to this, if it is less.
    void raise(CacheId cache, Coming coming) {
        if (cache >= slots_.size()) slots_.resize(cache + 1);
        Slot& slot = slots_[cache];
        if (!slot.is_there) caches_.push_back(cache);
        slot.is_there = true;
        slot.coming.tokens = std::max(slot.coming.tokens, coming.tokens);
        slot.coming.run = std::max(slot.coming.run, coming.run);
    }

private:
    struct Slot {
        Coming coming;
        bool is_there = false;
    };

    std::vector<Slot> slots_;  // by cache
    std::vector<CacheId> caches_;
};

// A prompt with the keys that its model's index gives it.
struct Asked {
    Prompt& prompt;
    const KeySpace& space;

    std::span<const u64> keys(Tokens step) const {
        return prompt.prefix_keys(space, static_cast<u64>(step));
    }
};

// A prompt that is being computed.
struct Computing {
    CacheId cache = kNone;  // where
    Keys keys;              // every `kStep` tokens
    Tokens tokens = 0;      // its length
    Prompt* prompt = nullptr;  // for keys of other steps; null for other routers' prompts
    const KeySpace* space = nullptr;
    // Boundaries besides those of the layout, ascending: its hit, the run of full attention beyond
    // that, the hints to the engine.
    std::vector<Tokens> kept;

    std::size_t place = 0;     // in `InPrefill`: among those with the same first key
    bool is_counted = false;   // there: it counts as being computed
};

class InPrefill {
public:
    // `layout_of`: of a cache, as far as it is known.
    explicit InPrefill(std::function<const Layout&(CacheId)> layout_of)
        : layout_of_(std::move(layout_of)) {}

    bool is_empty() const { return by_root_.size() == 0; }

    // It is computed from now on. It has a key at least, and stays where it is until it is removed.
    void add(Computing& prompt);
    // One that was added counts no more.
    void remove(Computing& prompt);
    // One that was added will never be a hit, though it is still being computed: it stays among those
    // that `for_each` visits.
    void hide(Computing& prompt);

    template <class Visit>
    void for_each(Visit&& visit) const {
        for (const Same& same : pool_) {
            for (Computing* prompt : same) visit(*prompt);
        }
    }

    // Finds how much of a prompt each cache is computing. The prompt has a key at least. `tokens`: its
    // length; 0 if it is unknown, so that tokens behind the last key never count. `is_sparse`: some
    // cache may keep sparsely.
    void shared(const Asked& asked, Tokens tokens, bool is_sparse, ComingTable& found);

private:
    using Same = std::vector<Computing*>;

    void find_shared_runs(std::span<const u64> keys, Tokens tokens, ComingTable& found) const;
    void compare_with_each(const Asked& asked, Tokens tokens, ComingTable& found);
    static u64 equals_key(std::span<const u64> keys, Tokens tokens) {
        return pair_key(keys.back(), static_cast<u64>(tokens));
    }

    std::function<const Layout&(CacheId)> layout_of_;
    FlatMap by_root_;  // by first key: the number of those that begin with it
    std::vector<Same> pool_;
    std::vector<u32> free_;  // of the pool
    PrefixTree prefixes_;
    FlatMap by_end_;  // by last key and tokens: the number of the holders of these
    std::vector<Holders> equals_;
    std::vector<u32> free_equals_;
    std::vector<Tokens> boundaries_;  // of a comparison
};

// Returns the part of a prompt that will be there when another has been computed at a cache of this
// layout. The prompt has a key; its length is `tokens`, 0 if it is unknown. `boundaries`: scratch.
Coming coming_of(const Asked& asked, Tokens tokens, const Computing& other, const Layout& layout,
                 std::vector<Tokens>& boundaries);

}  // namespace kvroute::mirror
