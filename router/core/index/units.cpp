#include "index/units.hpp"

#include <numeric>

namespace kvroute {

namespace {

u64 unit_blocks(const Source& of, const Source& in, u32 group, u32 tier) {
    const Group& spec = of.layout.groups[group];
    if (spec.kind == GroupKind::not_cached) return 0;
    const TierUnit& hint = in.tiers[tier].hint;
    u64 unit = hint.tokens ? hint.tokens : hint.blocks * spec.block_size;
    auto seen = in.units.find(plane_of(group, tier));
    if (!hint.is_given() && seen != in.units.end()) {
        // A tier such as LMCache's has blocks of its own, not the GPU's.
        const bool has_own = seen->second.largest > spec.block_size;
        unit = has_own ? seen->second.largest : seen->second.ends;
    }
    if (!unit) return 0;
    // Ends inside a block are those of a block that is not full.
    return unit % spec.block_size ? 1 : unit / spec.block_size;
}

}  // namespace

std::vector<u64> units_of(const Source& of, const Source& in, u32 tier) {
    const std::vector<Group>& groups = of.layout.groups;
    std::vector<u64> units(groups.size());
    u64 of_full = 0, of_all = 0;
    for (u32 i = 0; i < groups.size(); ++i) {
        units[i] = of.is_announced ? 1 : unit_blocks(of, in, i, tier);
        of_all = std::gcd(of_all, units[i]);
        if (groups[i].kind == GroupKind::full) of_full = std::gcd(of_full, units[i]);
    }
    const u64 common = of_full ? of_full : of_all ? of_all : 1;
    for (u32 i = 0; i < groups.size(); ++i) {
        const bool is_own = groups[i].kind == GroupKind::full && units[i];
        if (!is_own && !of.is_announced) units[i] = std::gcd(units[i], common);
        units[i] *= groups[i].block_size;
    }
    return units;
}

bool may_shrink(const Source& of, const Source& in, u32 plane) {
    const u32 group = group_of_plane(plane), tier = tier_of_plane(plane);
    if (!tier || in.tiers[tier].hint.is_given() || group >= of.layout.groups.size()) return false;
    auto found = in.units.find(plane);
    const u64 ends = found == in.units.end() ? 0 : found->second.ends;
    return !ends || ends > of.layout.groups[group].block_size;
}

void see_ends(Source& in, u32 plane, u64 ends) {
    if (!ends) return;
    SeenUnit& seen = in.units[plane];
    seen.ends = std::gcd(seen.ends, ends);
}

bool wants_ends(const Source& of, const Source& in, u32 plane) {
    auto found = in.units.find(plane);
    const bool is_known =
        found != in.units.end() &&
        (found->second.largest || (found->second.ends && !in.unplaced));
    return !of.is_announced && !is_known && may_shrink(of, in, plane);
}

bool has_own_blocks_in(const Source& of, const Source& in) {
    for (const auto& [plane, seen] : in.units) {
        const u32 group = group_of_plane(plane);
        if (group < of.layout.groups.size() &&
            seen.largest > of.layout.groups[group].block_size) {
            return true;
        }
    }
    return false;
}

}  // namespace kvroute
