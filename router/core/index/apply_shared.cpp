// Applies events to the stores that sources share.
#include <unordered_set>

#include "index/apply.hpp"
#include "index/hit_rule.hpp"
#include "index/units.hpp"

namespace kvroute {

namespace {

bool names(const std::vector<std::string>& tiers, std::string_view tier) {
    return std::any_of(tiers.begin(), tiers.end(),
                       [&](const std::string& each) { return is_same_tier(each, tier); });
}

}  // namespace

// Returns the store that an event is about; null: the source's own cache.
Source* Applier::meant_by(const Source& of, const Event& event) {
    if (event.is_on_gpu || event.is_local) return nullptr;
    for (const StoreHint& hint : of.store_hints) {
        if (hint.ownership && event.ownership != *hint.ownership) continue;
        const bool is_meant =
            hint.tiers.empty() ? event.has_locality : names(hint.tiers, event.tier);
        if (is_meant) return &index_.source(hint.slot);
    }
    return nullptr;
}

// Takes blocks into a store, each once, by any writer and any number of announcements.
void Applier::store_shared(Source& of, Source& store, const Event& event, Applied& result) {
    if (of.has_own_layout && store.layout_number != of.layout_number) {
        store.layout_number = of.layout_number;
        result.stores_to_report.push_back(store.slot);
    }
    const std::span<const u64> hashes = hashes_of(event);
    const u32 tier = store.tier_for(event.tier);
    const u64 refused = tier == kNone ? hashes.size() : take_in(of, store, event, tier);
    const u32 block_size = event.tokens_per_block();
    if (block_size && find_keys(of, event, block_size)) {
        place_all(of, event, /*is_below=*/true);
    } else if (block_size && event.parent) {
        wait_for_parent(of, event, block_size, /*is_below=*/true);
    }
    if (tier != kNone) see_unit(of, store, plane_of(event.group, tier), event);
    result.stored += hashes.size() - refused;
    result.skipped += refused;
    result.waiting += index_.unplaced_of(store, hashes);
    of.has_shared = true;
}

// Adds the blocks that a store lacks, as far as there is room, at the places that the writer knows;
// returns how many were refused.
u64 Applier::take_in(const Source& of, Source& store, const Event& event, u32 tier) {
    const u32 plane = plane_of(event.group, tier);
    std::vector<u32> fresh;  // numbers in the batch
    std::unordered_set<u64, SecretHash> seen(0, SecretHash{space_.table_secret()});
    for (u32 i = event.first_hash; i < event.first_hash + event.hashes; ++i) {
        const u32 id = index_.entry_of(store, batch_.hashes[i]);
        const bool is_held = id != kNone && index_.copies_of(store, id, plane);
        if (!is_held && seen.insert(batch_.hashes[i]).second) fresh.push_back(i);
    }
    index_.make_room(store, event.group, tier, fresh.size());
    const u64 refused = rule::minus(fresh.size(), index_.room(store, plane));
    fresh.resize(fresh.size() - refused);
    for (u32 i : fresh) index_.add(store, plane, batch_.hashes[i], batch_.is_int[i], 1, nullptr);
    Key key;
    for (u32 i : fresh) {
        if (index_.own_key_of(of, batch_.hashes[i], key)) {
            index_.place(store, batch_.hashes[i], key, /*is_below=*/true);
        }
    }
    return refused;
}

// Forgets blocks of a store, by any writer.
u64 Applier::remove_shared(Source& store, const Event& event) {
    const u32 tier = store.tier_named(event.tier);
    if (tier == kNone) return 0;
    const std::vector<u32> none(event.hashes);
    return leave(store, plane_of(event.group, tier), hashes_of(event), none.data());
}

// Empties a tier that is shared as a whole: an engine that reports such a tier empty means the
// store behind it.
u64 Applier::clear_shared(const Source& of, std::string_view tier) {
    std::vector<u32> meant;
    for (const StoreHint& hint : of.store_hints) {
        const bool is_new = std::find(meant.begin(), meant.end(), hint.slot) == meant.end();
        if (is_new && names(hint.tiers, tier)) meant.push_back(hint.slot);
    }
    u64 removed = 0;
    for (u32 slot : meant) {
        const u32 number = index_.source(slot).tier_named(tier);
        if (number != kNone) removed += index_.clear(index_.source(slot), number);
    }
    return removed;
}

}  // namespace kvroute
