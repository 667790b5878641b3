#include "index/inspector.hpp"

namespace kvroute {

std::vector<std::string> Inspector::contradictions() {
    inspect_nodes();
    for (const auto& of : index_.sources()) {
        if (of) inspect(*of);
    }
    return std::move(found_);
}

std::vector<std::tuple<u32, std::string, u64, u64>> Inspector::copies(const Source& of) {
    std::vector<std::tuple<u32, std::string, u64, u64>> found;
    index_.nodes().store().for_each([&](u32 id, Node& node) {
        for (u32 plane = 0; plane < of.counts.size(); ++plane) {
            const u64 here = of.count(plane) ? index_.copies_of(of, id, plane) : 0;
            if (!here) continue;
            const std::string& tier = of.tiers[tier_of_plane(plane)].name;
            found.emplace_back(group_of_plane(plane), tier, node.hash, here);
        }
    });
    return found;
}

void Inspector::expect(bool holds, const std::string& what) {
    if (!holds) found_.push_back(what);
}

void Inspector::inspect_nodes() {
    NodeTables& nodes = index_.nodes();
    std::size_t count = 0, linked = 0, heads = 0;
    nodes.store().for_each([&](u32 id, Node& node) {
        const std::string name = "node " + std::to_string(id);
        ++count;
        linked += node.is_linked();
        expect(!node.is_bare(), name + " is held by nobody");
        expect(is_in_list(nodes.first_of(node.hash), id, &Node::next_hash),
               name + " is not found by its hash");
        heads += nodes.first_of(node.hash) == id;
        const bool is_listed = node.is_placed() &&
                               is_in_list(nodes.first_with(node.key()), id, &Node::next_key);
        expect(is_listed == node.is_linked(), name + " is not found by its key");
        expect(node.is_linked() == is_found_by_any(node), name + " is linked without need");
        inspect_rows(name, node);
    });
    expect(count == nodes.size(), "the number of nodes is wrong");
    expect(heads == nodes.hashes(), "the table of hashes has another size");
    expect(linked >= nodes.keys(), "the table of keys holds too much");
}

bool Inspector::is_in_list(u32 first, u32 id, u32 Node::* next) {
    while (first != kNone && first != id) first = index_.nodes()[first].*next;
    return first == id;
}

void Inspector::inspect_rows(const std::string& name, const Node& node) {
    for (u32 i = 0; i < node.row_count(); ++i) {
        const u32 row = node.row_keys()[i];
        expect(node.row_bits()[i] != 0, name + " has an empty row");
        expect(!i || node.row_keys()[i - 1] < row, name + " has rows out of order");
        u64 sources = node.row_bits()[i];
        while (sources) {
            const u32 slot = word_of_row(row) * 64 + std::countr_zero(sources);
            sources &= sources - 1;
            expect(index_.has_source(slot), name + " is held by a source that is gone");
        }
    }
}

bool Inspector::is_found_by_any(const Node& node) {
    if (!node.is_placed()) return false;
    for (const auto& of : index_.sources()) {
        if (!of) continue;
        if (Index::finds(*of, node)) return true;
        if (node.row(row_key(of->word, kTierFound)) & of->bit) return true;
    }
    return false;
}

void Inspector::inspect(const Source& of) {
    const std::string name = "source " + std::to_string(of.slot);
    std::vector<u32> counts(kPlanes);
    std::unordered_map<u64, u32> keys;
    u64 entries = 0, unplaced = 0, copies = 0, places = 0, not_found = 0, tier_found = 0;
    index_.nodes().store().for_each([&](u32 id, Node& node) {
        not_found += (node.row(row_key(of.word, kNotFound)) & of.bit) != 0;
        tier_found += (node.row(row_key(of.word, kTierFound)) & of.bit) != 0;
        if (!node.is_held_by(of.word, of.bit)) return;
        ++entries;
        unplaced += !node.is_placed();
        expect(index_.entry_of(of, node.hash) == id, name + " holds a hash twice");
        if (node.is_placed() && Index::finds(of, node)) {
            expect(keys.emplace(NodeTables::hash_of_key(node.key()), id).second,
                   name + " finds two nodes by one key");
        }
        for (u32 plane = 0; plane < kPlanes; ++plane) {
            const u64 here = index_.copies_of(of, id, plane);
            counts[plane] += here > 0;
            places += here > 0;
            copies += here;
        }
    });
    expect(entries == of.entries, name + ": entries");
    expect(unplaced == of.unplaced, name + ": unplaced");
    expect(copies == of.copies, name + ": copies");
    expect(places == of.places, name + ": places");
    expect(not_found == of.not_found, name + ": hashes that their key does not lead to");
    expect(tier_found == of.tier_found, name + ": hashes of tiers");
    expect(of.further_copies.size() <= copies - places, name + ": further copies");
    std::vector<u64> blocks(kMaxTiers);
    for (u32 plane = 0; plane < kPlanes; ++plane) {
        expect(of.count(plane) == counts[plane], name + ": blocks of a plane");
        blocks[tier_of_plane(plane)] += counts[plane];
    }
    for (u32 tier = 0; tier < of.tiers.size(); ++tier) {
        expect(of.tiers[tier].blocks == blocks[tier], name + ": blocks of a tier");
        expect(blocks[tier] <= index_.limits().blocks, name + ": more blocks than allowed");
    }
    expect(of.forgotten.size() <= index_.limits().forgotten, name + ": remembers too much");
    expect(of.waiting.runs <= index_.limits().waiting_runs, name + ": too many runs wait");
}

}  // namespace kvroute
