// Adds the tiers below the GPU to a hit: a source's own, and those of the stores that it shares.
#pragma once

#include "index/found.hpp"
#include "index/hit.hpp"
#include "index/index.hpp"

namespace kvroute {

class LowerTiers {
public:
    // `combined`: where its bitmaps go.
    LowerTiers(Index& index, CombinedBitmaps& combined) : index_(index), combined_(combined) {}

    // Adds the tokens that they can load to a source's hit of a prompt of `length` tokens.
    void extend(Source& of, u64 length, const Found& found, TieredHit& hit);

    // Returns how much a cache without any of the prompt could load from the source's tier of a name.
    u64 loadable(Source& of, const std::string& name, u64 length, const Found& found);

private:
    struct Lower {
        u32 tier;
        u32 store = kNone;  // number among the source's; kNone: a tier of its own

        bool is_shared() const { return store != kNone; }
        u32 share() const { return is_shared() ? kFirstStore + store : tier; }
        // Where its blocks were found; see `Where`.
        std::vector<u32> wheres() const {
            return is_shared() ? std::vector<u32>{kInStore + store}
                               : std::vector<u32>{kUsual, kOfTier};
        }
    };

    std::vector<Lower> tiers_of(const Source& of) const;
    Source& holder(Source& of, const Lower& lower) {
        return lower.is_shared() ? index_.store_of(of, lower.store) : of;
    }
    Presence presence(const Source& of, std::span<const Lower> tiers, const Found& found);
    void learn_units(Source& of, const Lower& tier, u64 length, const Found& found);

    Index& index_;
    CombinedBitmaps& combined_;
};

}  // namespace kvroute
