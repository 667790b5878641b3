#include "index/source.hpp"

namespace kvroute {

Source::Source(u32 number, u64 secret)
    : tiers(1), forgotten(secret), cleared(secret), waiting(secret), copy_watch(secret),
      secret_(secret) {
    stand_at(number);
    tiers[0].name = "GPU";
}

void Source::stand_at(u32 number) {
    slot = number;
    word = number / 64;
    bit = u64{1} << (number % 64);
}

void Source::hold_nothing() {
    for (Tier& tier : tiers) {
        tier.blocks = 0;
        tier.groups.clear();
        tier.since_empty.restart();
    }
    counts.assign(counts.size(), 0);
    entries = unplaced = copies = places = tier_found = not_found = 0;
    further_copies.clear();
    arrivals.clear();
}

void Source::count_removed(u32 group, u64 blocks) {
    removals += blocks;
    if (!blocks) return;
    if (group >= removed.size()) removed.resize(group + 1);
    removed[group] += blocks;
}

std::size_t Source::memory() const {
    std::size_t bytes = forgotten.memory() + waiting.memory() + copy_watch.memory() +
                        further_copies.size() * sizeof(*further_copies.begin());
    for (const auto& [plane, order] : arrivals) bytes += order.memory();
    return bytes;
}

bool Source::has_lower_tiers() const {
    for (std::size_t i = 1; i < tiers.size(); ++i) {
        if (tiers[i].blocks) return true;
    }
    return false;
}

u32 Source::tiers_in_use() const {
    u32 used = 0;
    for (const Tier& tier : tiers) used += tier.blocks > 0;
    return used;
}

u32 Source::tier_named(std::string_view tier_name) const {
    for (u32 i = 0; i < tiers.size(); ++i) {
        if (is_same_tier(tiers[i].name, tier_name)) return i;
    }
    return kNone;
}

u32 Source::tier_for(std::string_view tier_name) {
    const u32 known = tier_named(tier_name);
    if (known != kNone) return known;
    u32 number = static_cast<u32>(tiers.size());
    if (number < kMaxTiers) {
        tiers.emplace_back();
    } else {
        for (number = 1; number < kMaxTiers && tiers[number].blocks; ++number) continue;
        if (number == kMaxTiers) return kNone;
        forget_tier(number);
    }
    Tier& tier = tiers[number];
    tier.name = in_upper(tier_name);
    for (const TierUnit& hint : tier_units) {
        if (hint.name == tier.name) tier.hint = hint;
    }
    return number;
}

void Source::forget_tier(u32 number) {
    tiers[number] = Tier();
    std::erase_if(arrivals, [&](const auto& each) { return tier_of_plane(each.first) == number; });
    std::erase_if(units, [&](const auto& each) { return tier_of_plane(each.first) == number; });
}

}  // namespace kvroute
