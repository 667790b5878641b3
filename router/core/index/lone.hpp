// Looks a prompt up for one source: for those with a known hash function, with hashes of their own in a
// lower tier, with stores or very many planes.
#pragma once

#include "index/found.hpp"
#include "index/index.hpp"
#include "index/prompt.hpp"

namespace kvroute {

// A source's hashes of a prompt, as its engine computes them: one list for each form in which it may
// write extra keys.
struct Computed {
    u32 slot = 0;
    bool is_alone = false;  // places learned from events do not count
    std::vector<std::vector<u64>> hashes;
};

class LoneLookUp final : public Found {
public:
    // `computed`: the source's hashes of the prompt, if they are known. `ends_early`: blocks behind one
    // that a group of full attention lacks are not looked up.
    LoneLookUp(const Index& index, const Source& of, Prompt& prompt, const Computed* computed,
               bool ends_early = false);
    // Looks up by hashes of the source's engine alone, one for each hash block.
    LoneLookUp(const Index& index, const Source& of, const std::vector<u64>& hashes);

    Bitmap at(u32 plane, u32 where) const override;
    u64 blocks() const override { return blocks_; }
    // Returns, of hashes that were looked up alone, those that the source or one of its stores has.
    u64 held() const { return static_cast<u64>(std::count(held_.begin(), held_.end(), true)); }

private:
    using Planes = std::unordered_map<u32, std::vector<u64>>;

    void look_up(Prompt& prompt, const Computed* computed, bool ends_early);
    void look_up_hashes(const std::vector<u64>& hashes);
    void look_up_shared();
    bool is_looked_up(const Node& node, bool is_learned) const;
    bool lacks_full(u64 block) const;
    void see(const Source& in, const Node& node, u64 block, Planes& planes);

    const Index& index_;
    const Source& of_;
    u64 blocks_;
    Planes found_, tier_found_;
    std::vector<Planes> in_store_;                // by number of the store
    std::vector<std::pair<u64, u64>> looked_up_;  // (block, hash), where there are stores
    std::vector<bool> held_;                      // by block, where only hashes are looked up
};

}  // namespace kvroute
