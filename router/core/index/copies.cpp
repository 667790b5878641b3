// Counts the copies that a source holds of each block, and where.
#include "index/hit_rule.hpp"
#include "index/index.hpp"

namespace kvroute {

u64 Index::room(const Source& of, u32 plane) const {
    const Tier& tier = of.tiers[tier_of_plane(plane)];
    if (!of.count(plane) && of.tiers_in_use() + (tier.blocks == 0) > limits_.tiers) return 0;
    return rule::minus(limits_.blocks, tier.blocks);
}

void Index::make_room(Source& of, u32 group, u32 tier, u64 wanted) {
    if (of.tiers[tier].removes) return;
    const u64 free = room(of, plane_of(group, tier));
    if (wanted <= free) return;
    u64 missing = wanted - free;
    std::vector<u32> groups{group};
    groups.insert(groups.end(), of.tiers[tier].groups.begin(), of.tiers[tier].groups.end());
    for (u32 each : groups) {
        const u32 plane = plane_of(each, tier);
        u64 hash;
        while (missing && of.count(plane) && of.arrivals_in(plane).oldest(hash)) {
            const u32 id = entry_of(of, hash);
            const u64 copies = id == kNone ? 0 : copies_of(of, id, plane);
            if (!copies) continue;
            discount(of, plane, id, copies, copies, Why::is_oldest);
            --missing;
        }
    }
}

bool Index::add(Source& of, u32 plane, u64 hash, bool is_int, u64 copies, const Key* key) {
    u32 id = kNone, head = nodes_.first_of(hash);
    for (u32 each = head; each != kNone; each = nodes_[each].next_hash) {
        if (nodes_[each].is_held_by(of.word, of.bit)) {
            id = each;
            break;
        }
    }
    if (id == kNone) id = enter(of, hash, head, is_int, tier_of_plane(plane) != 0, key);
    Node& node = nodes_[id];
    const u32 row = row_key(of.word, plane);
    u64 further = copies;
    if (!(node.row(row) & of.bit)) {
        node.set(row, of.bit);
        count_block(of, plane, hash);
        further = copies - 1;
    }
    of.copies += copies;
    if (further) of.further_copies[u64{id} << 16 | plane] += static_cast<u32>(further);
    return nodes_[id].is_placed();
}

void Index::count_block(Source& of, u32 plane, u64 hash) {
    if (plane >= of.counts.size()) of.counts.resize(plane + 1);
    Tier& tier = of.tiers[tier_of_plane(plane)];
    if (of.counts[plane]++ == 0) {
        ++version_;
        if (tier_of_plane(plane)) tier.groups.push_back(group_of_plane(plane));
    }
    tier.blocks += 1;
    tier.since_empty.came(hash, limits_.cleared_at_once);
    of.places += 1;
    if (tier_of_plane(plane) && !tier.removes) of.arrivals_in(plane).came(hash);
}

// Returns a node for a hash that the source does not hold yet.
u32 Index::enter(Source& of, u64 hash, u32 head, bool is_int, bool is_below, const Key* key) {
    of.entries += 1;
    of.uses_int_hashes = is_int;
    Key known;
    if (remembers(of, hash, known)) {
        of.forgotten.take(hash, known);
        const u32 id = nodes_.node_for(hash, head, known);
        settle(of, id, is_below);
        return id;
    }
    if (key != nullptr) {
        const u32 first = nodes_.first_with(*key);
        // Of two hashes that claim one key the newer is found: decided when all are counted.
        if (found_among(of, first) == kNone) {
            const u32 id = nodes_.node_for(hash, head, *key);
            nodes_.link(id, first);
            return id;
        }
    }
    of.unplaced += 1;
    return nodes_.node_for(hash, head, Key());
}

void Index::discount(Source& of, u32 plane, u32 id, u64 copies, u64 gone, Why why) {
    Node& node = nodes_[id];
    of.copies -= gone;
    if (copies > 1) {
        const u64 place = u64{id} << 16 | plane;
        if (copies > gone + 1) {
            of.further_copies[place] = static_cast<u32>(copies - gone - 1);
        } else {
            of.further_copies.erase(place);
        }
    }
    if (copies > gone) return;
    node.unset(row_key(of.word, plane), of.bit);
    Tier& tier = of.tiers[tier_of_plane(plane)];
    tier.blocks -= 1;
    if (!tier.blocks) tier.since_empty.restart();
    of.places -= 1;
    if (tier_of_plane(plane) && !tier.removes && why == Why::is_removed) {
        of.arrivals_in(plane).went(node.hash);
    }
    if (--of.counts[plane] == 0 && tier_of_plane(plane)) {
        std::erase(tier.groups, group_of_plane(plane));
        of.arrivals.erase(plane);
    }
    if (!node.is_held_by(of.word, of.bit)) forget(of, id, why == Why::is_cleared);
}

// The last copy of an entry has gone.
void Index::forget(Source& of, u32 id, bool is_cleared) {
    Node& node = nodes_[id];
    of.entries -= 1;
    if (node.is_placed()) {
        if (!is_cleared) {
            of.forgotten.put(node.hash, node.key(), limits_.forgotten);
        } else if (scratch_cleared_.size() <= limits_.forgotten) {
            scratch_cleared_.emplace_back(node.hash, node.key());
        }
        if (!node.is_bare()) unset_special(of, id);
    } else {
        of.unplaced -= 1;
    }
    nodes_.release_if_bare(id);
}

}  // namespace kvroute
