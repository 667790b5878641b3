// Blocks whose place is unknown yet, since the block before them is unknown.
#pragma once

#include <algorithm>

#include "index/bounded_map.hpp"
#include "index/limits.hpp"

namespace kvroute {

// Contiguous blocks with tokens for every hash, behind a parent whose key is not known yet.
struct WaitingRun {
    std::vector<u64> hashes;
    std::vector<u32> tokens;  // behind what the parent's key covers
    std::vector<Mark> marks;
    u32 block_size = 0;
    u32 lookahead = 0;  // tokens that the first hash covers beyond its block's share
    u64 batch = 0;      // of its source, in which it came
    bool is_below = false;

    // Returns its weight in tokens, or what takes as much memory.
    u64 weight() const;
};

// Runs by the parent hash they wait for, oldest first, bounded.
class WaitingRuns {
public:
    u64 runs = 0, tokens = 0;  // that wait; the latter by weight
    u64 given_up = 0;          // runs that are missed, so far

    explicit WaitingRuns(u64 secret) : by_parent_(0, SecretHash{secret}) {}

    bool waits_for(u64 parent) const { return runs && by_parent_.count(parent); }
    std::size_t memory() const;

    void add(u64 parent, WaitingRun&& run);
    std::vector<WaitingRun> take(u64 parent);

    // Gives up the oldest until all bounds hold; returns how many of them are missed: `is_missed(run)`
    // of one whose blocks are all gone, or placed by others, is false. `batch`: the present one.
    template <class IsMissed>
    u64 trim(const Limits& limits, u64 batch, IsMissed&& is_missed) {
        const u64 before = given_up;
        while (is_over(limits, batch)) {
            const std::vector<WaitingRun> oldest = take(order_.front().parent);
            given_up += static_cast<u64>(std::count_if(oldest.begin(), oldest.end(), is_missed));
        }
        return given_up - before;
    }

    // Calls `visit(parent, run)`, the oldest parent first.
    template <class Visit>
    void for_each(Visit&& visit) const {
        for (const Place& place : order_) {
            if (!is_current(place)) continue;
            for (const WaitingRun& run : by_parent_.at(place.parent).runs) visit(place.parent, run);
        }
    }

private:
    struct Family {
        std::vector<WaitingRun> runs;
        u64 number = 0;
    };
    struct Place {
        u64 parent;
        u64 number;
    };

    // True where a bound does not hold; the oldest place is current then.
    bool is_over(const Limits& limits, u64 batch);
    bool is_current(const Place& place) const;
    void forget_gone();

    // A place is current where its family is there and has its number: a parent that is waited for
    // anew has a new one. Other places are dropped when they are half of all, or in front.
    MapByHash<Family> by_parent_;
    std::deque<Place> order_;
    u64 next_number_ = 1;
};

}  // namespace kvroute
