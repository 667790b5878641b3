// Predicts what a cache evicts next: the blocks that no request uses any more, in the order in which
// they were given back, and how many of them it takes.
//
// A request gives back its blocks of full attention when it ends, the last first. The windows and
// states before a boundary within its prompt are given back when the prompt has been computed, those
// at its end with the rest. So they have places of their own in the order:
//
//     | A's boundary | A's own keys, from the end | C's boundary | B's own keys | B's boundary |
//       next to be evicted                                                                last
#pragma once

#include <unordered_map>

#include "mirror/layout.hpp"
#include "mirror/ownership.hpp"

namespace kvroute::mirror {

// The tokens that an engine is assumed to compute in a step at most: vLLM's default on most machines.
// It matters to windows only: until the next step a prompt has blocks for all of its tokens.
constexpr Tokens kStepTokens = 2048;

// Ended requests, and boundaries that no request uses; those at the front go first. A boundary is
// named by the key of the prefix up to it. No more of them than the cache has blocks.
class EvictionOrder {
public:
    bool holds(u64 boundary) const { return boundaries_.find(boundary) != kNone; }
    bool holds(const Use& use) const { return use.place_in_order != kNone; }

    // The blocks of all together.
    double blocks() const { return total_; }
    // The number of keys for which two requests left blocks of the same content.
    double copied_keys() const { return copied_keys_; }

    // --- what requests do ---

    // A request uses the blocks kept before a boundary.
    void hold(u64 boundary);
    // A request has moved on from a boundary, before which so many blocks are kept.
    void leave(u64 boundary, double blocks);
    // A request has ended that owns keys now. `blocks_per_key`: of a key, here as below.
    void end(const std::shared_ptr<Use>& use, double blocks_per_key);
    // A request took over keys, from the start of its prompt, and computed those behind its hit
    // again.
    void take(const std::vector<Taken>& taken, std::size_t hit_keys, double blocks_per_key);
    // The keys that a request owns have changed. No effect if it was forgotten, or has not ended.
    void weigh(Use& use, double blocks_per_key);

    // --- what the cache does ---

    // A request's own blocks were evicted, and so was all before it.
    void gone(const Use& use);
    // There are no more blocks than that: the rest was evicted.
    void fit(double most_blocks);
    // Everything was evicted.
    void clear();

    // --- what it will do ---

    // Finds what is evicted when the cache needs so many blocks; `keys_evicted` and `is_evicted` return
    // the result, until this is called again or something else changes.
    void foresee(double blocks, double blocks_per_key);
    // Returns how many keys of a request's full attention, from the end.
    double keys_evicted(const Use& use) const;
    bool is_evicted(u64 boundary) const;

private:
    struct Item {
        std::shared_ptr<Use> use;  // null: a boundary
        u64 boundary = 0;
        double blocks = 0.0;
        u64 foreseen = 0;   // the number of the last `foresee` that found it
        double keys = 0.0;  // evicted, by that
    };

    void erase_first();
    void erase(u32 item);
    double copies_of(const Use& use) const;

    Chain<Item> items_;
    FlatMap boundaries_;  // to their items
    double total_ = 0.0;
    std::unordered_map<u64, double> copies_;  // by number of the use
    double copied_keys_ = 0.0;
    u64 question_ = 0;
};

// Counts the blocks that a cache evicts while it computes prompts, one behind the other, in steps. A
// step's tokens have blocks in every group. Of a window, those that are not kept are free again in the
// next step.
class Forecast {
public:
    // `layout` must live as long. `free_blocks`: that hold nothing.
    Forecast(const Layout& layout, double free_blocks) : layout_(layout), free_(free_blocks) {}

    // True where it may evict anything for so many tokens of so many prompts; false is certain.
    bool may_evict(Tokens tokens, std::size_t prompts) const;
    // A prompt comes next, of which so many tokens have to be computed; of its windows and states so
    // many blocks stay.
    void compute(Tokens tokens, double kept_blocks);

    // The number of blocks so far.
    double evicted() const { return evicted_; }

private:
    double take(double keys, double kept_blocks);

    const Layout& layout_;
    double free_;
    double free_next_ = 0.0;            // more of them in the next step
    Tokens step_tokens_ = kStepTokens;  // that are left of the step
    double evicted_ = 0.0;
};

}  // namespace kvroute::mirror
