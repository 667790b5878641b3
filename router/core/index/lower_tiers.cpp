#include "index/lower_tiers.hpp"

#include <functional>
#include <numeric>

#include "index/hit_rule.hpp"
#include "index/units.hpp"

namespace kvroute {

namespace {

// A store may have several tiers: it has one share.
void add_share(Shares& shares, u32 share, u64 tokens) {
    for (auto& [each, known] : shares) {
        if (each != share) continue;
        known += tokens;
        return;
    }
    shares.emplace_back(share, tokens);
}

bool is_faster(const std::string& one, const std::string& other) {
    const bool is_later = !one.starts_with("CPU"), is_other_later = !other.starts_with("CPU");
    return is_later != is_other_later ? is_other_later : one < other;
}

// Returns the tiers of a source, or of a store, that hold something.
template <class Lower, class IsBefore>
void add_tiers(const Source& in, u32 store, std::vector<Lower>& out, IsBefore&& is_before) {
    const std::size_t first = out.size();
    for (u32 tier = 1; tier < in.tiers.size(); ++tier) {
        if (in.tiers[tier].blocks) out.push_back({tier, store});
    }
    std::sort(out.begin() + static_cast<std::ptrdiff_t>(first), out.end(),
              [&](const Lower& left, const Lower& right) {
                  return is_before(in.tiers[left.tier].name, in.tiers[right.tier].name);
              });
}

}  // namespace

// Groups tiers with equal units: a hit may take from each of them. Other units mean another connector,
// and an engine loads from one.
void LowerTiers::extend(Source& of, u64 length, const Found& found, TieredHit& hit) {
    std::vector<std::pair<std::vector<u64>, std::vector<Lower>>> by_units;
    for (const Lower& tier : tiers_of(of)) {
        learn_units(of, tier, length, found);
        std::vector<u64> units = units_of(of, holder(of, tier), tier.tier);
        auto equal = std::find_if(by_units.begin(), by_units.end(),
                                  [&](const auto& each) { return each.first == units; });
        if (equal == by_units.end()) {
            by_units.emplace_back(std::move(units), std::vector<Lower>());
            equal = by_units.end() - 1;
        }
        equal->second.push_back(tier);
    }
    const u64 gpu = hit.hit.gpu;
    for (const auto& [units, tiers] : by_units) {
        // The hit with the first so many of these tiers.
        auto reach = [&, &units = units, &tiers = tiers](std::size_t count) {
            const Presence below = presence(of, {tiers.data(), count}, found);
            return rule::extended_hit(of.layout, below, gpu, length, units, !of.is_announced);
        };
        const u64 total = reach(tiers.size());
        if (total <= hit.hit.total) continue;
        hit.hit.total = static_cast<u32>(total);
        hit.by_tier.clear();
        // A block counts for the first tier that has it.
        u64 so_far = gpu;
        for (std::size_t i = 1; i <= tiers.size() && so_far != total; ++i) {
            const u64 reached =
                i == tiers.size() ? total : std::min(total, std::max(so_far, reach(i)));
            if (reached > so_far) add_share(hit.by_tier, tiers[i - 1].share(), reached - so_far);
            so_far = reached;
        }
    }
}

u64 LowerTiers::loadable(Source& of, const std::string& name, u64 length, const Found& found) {
    const std::vector<Lower> tiers = tiers_of(of);
    auto named = std::find_if(tiers.begin(), tiers.end(), [&](const Lower& each) {
        return !each.is_shared() && of.tiers[each.tier].name == name;
    });
    if (named == tiers.end()) return 0;
    learn_units(of, *named, length, found);
    const std::vector<u64> units = units_of(of, of, named->tier);
    const Presence below = presence(of, {&*named, 1}, found);
    return rule::extended_hit(of.layout, below, 0, length, units, !of.is_announced);
}

// Sorts the fastest first, by their names; a source's own before those it shares.
std::vector<LowerTiers::Lower> LowerTiers::tiers_of(const Source& of) const {
    std::vector<Lower> tiers;
    add_tiers(of, kNone, tiers, is_faster);
    for (u32 number = 0; number < of.stores.size(); ++number) {
        add_tiers(index_.store_of(of, number), number, tiers, std::less<std::string>());
    }
    return tiers;
}

Presence LowerTiers::presence(const Source& of, std::span<const Lower> tiers, const Found& found) {
    Presence below{of.layout.hash_block_size, {}};
    for (u32 group = 0; group < of.layout.groups.size(); ++group) {
        Bitmap any;
        for (const Lower& tier : tiers) {
            for (u32 where : tier.wheres()) {
                const Bitmap here = found.at(plane_of(group, tier.tier), where);
                any = combined_.either(any, here, found.blocks());
            }
        }
        below.groups.push_back(any);
    }
    return below;
}

// Learns the unit from a tier's blocks of the prompt, where its events do not show it.
void LowerTiers::learn_units(Source& of, const Lower& tier, u64 length, const Found& found) {
    const u64 step = of.layout.hash_block_size;
    Source& in = holder(of, tier);
    for (u32 group : in.tiers[tier.tier].groups) {
        const u32 plane = plane_of(group, tier.tier);
        if (!wants_ends(of, in, plane)) continue;
        u64 divisor = 0;
        for (u32 where : tier.wheres()) {
            const Bitmap bitmap = found.at(plane, where);
            for (u64 i = 0; bitmap.words != nullptr && i < length / step; ++i) {
                if (bitmap.test(i)) divisor = std::gcd(divisor, (i + 1) * step);
            }
        }
        see_ends(in, plane, divisor);
    }
}

}  // namespace kvroute
