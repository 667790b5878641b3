// The state of one tier of a source: the GPU, or a cache below it.
#pragma once

#include <string>
#include <string_view>

#include "index/bounded_map.hpp"

namespace kvroute {

// The blocks that a lower tier has announced, in the order in which they came: the oldest are dropped
// when the tier is full and never removes.
class ArrivalOrder {
    using Gone = MapByHash<u32>;

public:
    explicit ArrivalOrder(u64 secret) : gone_(0, SecretHash{secret}) {}

    std::size_t memory() const {
        return order_.size() * sizeof(u64) + gone_.size() * sizeof(Gone::value_type);
    }

    void came(u64 hash) { order_.push_back(hash); }
    // Its place in the order is skipped when it is reached.
    void went(u64 hash);
    // Takes the oldest that has not gone; false where there is none.
    bool oldest(u64& out);
    void clear();

    // Calls `visit(hash)` for those that have not gone, the oldest first.
    template <class Visit>
    void for_each(Visit&& visit) const {
        auto gone = gone_;
        for (u64 hash : order_) {
            auto found = gone.find(hash);
            if (found == gone.end() || found->second-- == 0) visit(hash);
        }
    }

private:
    void skip(Gone::iterator found);
    void forget_gone();

    std::deque<u64> order_;
    Gone gone_;  // how many of a hash's places, the first ones, are void
    std::size_t gone_places_ = 0;
};

// A tier's unit by the configuration; 0 where that is not set.
struct TierUnit {
    std::string name;
    u64 blocks = 0;
    u64 tokens = 0;

    bool is_given() const { return blocks || tokens; }
};

// Evidence on the unit of one tier, in one group; see `units.hpp`.
struct SeenUnit {
    u64 ends = 0;     // the greatest common divisor of the ends, in tokens
    u64 largest = 0;  // the largest block that its events describe, in tokens; 0: none does
};

// The hashes that came into a tier since it was empty, as long as they are few: a clear finds them
// without a walk over what all sources hold. A walk is paid for by more stores than are kept here.
class FewHashes {
public:
    bool are_all() const { return are_all_; }
    const std::vector<u64>& hashes() const { return hashes_; }

    void came(u64 hash, u64 bound) {
        if (!are_all_) return;
        are_all_ = hashes_.size() < bound;
        if (are_all_) {
            hashes_.push_back(hash);
        } else {
            hashes_ = {};
        }
    }
    void restart() {
        hashes_.clear();
        are_all_ = true;
    }

private:
    std::vector<u64> hashes_;  // one that left and came again is there twice
    bool are_all_ = true;
};

struct Tier {
    std::string name;            // in upper case
    TierUnit hint;
    u64 blocks = 0;              // distinct (group, hash)
    bool removes = false;        // has announced a removal; storage that others share never does
    std::vector<u32> groups;     // that hold something here, in the order in which they came
    FewHashes since_empty;
};

// True where a name is that of a tier, in any case.
bool is_same_tier(std::string_view in_upper_case, std::string_view name);
std::string in_upper(std::string_view name);

}  // namespace kvroute
