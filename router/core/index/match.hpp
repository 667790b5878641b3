// Finds how much of a prompt every source would reuse, in one pass over its keys (`lane.hpp`); unusual
// sources are looked up one by one (`lone.hpp`).
#pragma once

#include "index/lane.hpp"
#include "index/lone.hpp"
#include "index/lower_tiers.hpp"

namespace kvroute {

class Matcher {
public:
    explicit Matcher(Index& index) : index_(index), below_(index, combined_) {}

    // `computed`: of sources whose engines' hashes of the prompt are known.
    void match(Prompt& prompt, const std::vector<Computed>& computed, Hits& hits);

    // Returns the hit of one source. `computed`: its hashes of the prompt, if they are known.
    TieredHit match_source(u32 slot, Prompt& prompt, const Computed* computed);

    // Returns how much a cache without any of the prompt could load from one lower tier of a source.
    u64 match_tier(u32 slot, Prompt& prompt, const std::string& name, const Computed* computed);

    // Returns the longest prefix that each group of a source would accept, by group index.
    std::vector<u64> group_hits(Prompt& prompt, u32 slot, const Computed* computed);

    // Returns the hit of one source on a prompt of which there are only its engine's hashes, one for
    // each hash block of its layout. The prompt goes on behind the last of them.
    FoundByHashes match_hashes(u32 slot, const std::vector<u64>& hashes);

    // Returns the name of a share: a tier's, or a store's.
    const std::string& name_of_share(u32 slot, u32 share) const;

    // Returns those of all sources, each once.
    const std::vector<Prompt::Step>& steps();

private:
    void find_lanes();
    Lane& lane_of(Prompt::Step step);
    TieredHit match_alone(u32 slot, Prompt& prompt, const Computed* computed);
    TieredHit hit_of(Source& of, u64 length, const Found& found);

    Index& index_;
    u64 version_ = ~u64{0};            // of the index, of which the next three are
    std::vector<Lane> lanes_;
    std::vector<u32> alone_;           // slots that no lane takes
    std::vector<Prompt::Step> steps_;

    Collected collected_;  // of the current lane
    Presence present_;
    CombinedBitmaps combined_;
    LowerTiers below_;
};

}  // namespace kvroute
