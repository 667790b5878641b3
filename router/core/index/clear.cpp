// Clears tiers of an index.
#include "index/index.hpp"

namespace kvroute {

u64 Index::clear(Source& of, u32 tier) {
    u64 removed = 0, left = of.tiers[tier].blocks;
    if (!left) return 0;
    scratch_cleared_.clear();
    if (of.tiers[tier].since_empty.are_all()) {
        // A copy, as the tier's own list starts anew with the last block that goes.
        const std::vector<u64> hashes = of.tiers[tier].since_empty.hashes();
        for (u64 hash : hashes) {
            const u32 id = entry_of(of, hash);
            if (id != kNone) removed += clear_entry(of, tier, id, left);
        }
    } else {
        nodes_.store().for_each([&](u32 id, Node& node) {
            if (!left || !node.is_held_by(of.word, of.bit)) return;
            removed += clear_entry(of, tier, id, left);
        });
    }
    std::erase_if(of.arrivals,
                  [&](const auto& each) { return tier_of_plane(each.first) == tier; });
    if (!may_remember(of, scratch_cleared_.size())) return removed;
    for (const auto& [hash, key] : scratch_cleared_) {
        of.cleared.put(hash, {key, of.clears}, limits_.forgotten);
    }
    return removed;
}

// Takes an entry out of a tier; returns how many copies there were. `left`: blocks of the tier.
u64 Index::clear_entry(Source& of, u32 tier, u32 id, u64& left) {
    u64 removed = 0;
    std::vector<u32>& planes = scratch_planes_;
    planes.clear();
    const Node& node = nodes_[id];
    for (u32 i = 0; i < node.row_count(); ++i) {
        const u32 key = node.row_keys()[i], plane = plane_of_row(key);
        if (word_of_row(key) == of.word && plane < kPlanes && tier_of_plane(plane) == tier &&
            node.row_bits()[i] & of.bit) {
            planes.push_back(plane);
        }
    }
    left -= planes.size();
    for (u32 plane : planes) {
        const u64 copies = copies_of(of, id, plane);
        removed += copies;
        discount(of, plane, id, copies, copies, Why::is_cleared);
    }
    return removed;
}

bool Index::may_move_out(const Source& of, u32 tier) const {
    return tier == 0 && of.tiers[0].blocks == of.places && !of.tiers[0].since_empty.are_all() &&
           !left_.is_full();
}

u64 Index::move_out(Source& of) {
    const u64 copies = of.copies;
    const u32 from = of.slot, to = free_slot();
    left_.take_over(of, may_remember(of, of.entries - of.unplaced) ? &of : nullptr);
    sources_[to] = std::move(sources_[from]);  // the pointer: `of` lies where it lay
    while (!sources_.back()) sources_.pop_back();
    of.stand_at(to);
    of.hold_nothing();
    ++version_;
    return copies;
}

// Counts a clear that takes so many placed blocks; true where they are to be remembered. Those of
// earlier clears are forgotten where they are too many together.
bool Index::may_remember(Source& of, u64 placed) {
    of.clears += 1;
    if (!placed) return false;
    of.all_cleared += placed;
    if (of.all_cleared <= limits_.forgotten) return true;
    forget_cleared(of);
    if (placed > limits_.forgotten) return false;
    of.all_cleared = placed;
    return true;
}

void Index::forget_cleared(Source& of) {
    of.all_cleared = 0;
    of.cleared.clear();
    left_.disinherit(of);
}

}  // namespace kvroute
