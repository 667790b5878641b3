// Places a source's blocks: the prefix of each, and by which of its nodes a source finds one.
#include "index/index.hpp"

namespace kvroute {

namespace {

bool is_only_holder(const Source& of, const Node& node) {
    for (u32 i = 0; i < node.row_count(); ++i) {
        if (word_of_row(node.row_keys()[i]) != of.word || node.row_bits()[i] != of.bit) {
            return false;
        }
    }
    return true;
}

bool is_on_gpu(const Source& of, const Node& node) {
    for (u32 i = 0; i < node.row_count(); ++i) {
        const u32 row = node.row_keys()[i];
        if (word_of_row(row) == of.word && plane_of_row(row) < kPlanes &&
            tier_of_plane(plane_of_row(row)) == 0 && node.row_bits()[i] & of.bit) {
            return true;
        }
    }
    return false;
}

}  // namespace

void Index::place(Source& of, u64 hash, Key key, bool is_below) {
    const u32 id = entry_of(of, hash);
    if (id == kNone) {
        of.forgotten.put(hash, key, limits_.forgotten);
    } else if (!nodes_[id].is_placed()) {
        of.unplaced -= 1;
        settle(of, move_entry(of, id, key), is_below);
    }
}

void Index::place_everywhere(Source& of, u64 hash, Key key, bool is_below) {
    bool is_shared = false;
    for (u32 slot : of.stores) {
        if (entry_of(*sources_[slot], hash) == kNone) continue;
        place(*sources_[slot], hash, key, /*is_below=*/true);
        is_shared = true;
    }
    if (!is_shared || entry_of(of, hash) != kNone) place(of, hash, key, is_below);
}

// Moves a source's entry to the node of the same hash and of this key; returns its number.
u32 Index::move_entry(Source& of, u32 id, Key key) {
    const u32 target = nodes_.node_with(nodes_.first_of(nodes_[id].hash), key);
    if (target == kNone && is_only_holder(of, nodes_[id])) {
        nodes_[id].residue = key.residue;
        nodes_[id].length = key.length;
        return id;
    }
    const u32 to = nodes_.node_for(nodes_[id].hash, nodes_.first_of(nodes_[id].hash), key);
    move_rows(of, id, to);
    return to;
}

void Index::move_rows(Source& of, u32 id, u32 to) {
    std::vector<u32> rows;
    for (u32 i = 0; i < nodes_[id].row_count(); ++i) {
        const u32 row = nodes_[id].row_keys()[i];
        if (word_of_row(row) == of.word && nodes_[id].row_bits()[i] & of.bit) {
            rows.push_back(row);
        }
    }
    for (u32 row : rows) {
        nodes_[to].set(row, of.bit);
        nodes_[id].unset(row, of.bit);
        auto copies = of.further_copies.extract(u64{id} << 16 | plane_of_row(row));
        if (copies.empty()) continue;
        copies.key() = u64{to} << 16 | plane_of_row(row);
        of.further_copies.insert(std::move(copies));
    }
    nodes_.release_if_bare(id);
}

void Index::doubt(Source& of, u32 plane, u64 hash, Key key) {
    const u32 id = entry_of(of, hash);
    if (id == kNone || !nodes_[id].is_placed() || nodes_[id].key() == key) return;
    if (nodes_[id].row(row_key(of.word, plane)) & of.bit) return;
    const bool is_left = !is_only_holder(of, nodes_[id]);
    unset_special(of, id);
    move_rows(of, id, nodes_.node_for(hash, nodes_.first_of(hash), Key()));
    if (is_left) nodes_.refresh_link(id);
    of.unplaced += 1;
}

// Returns the node of a key, from `first` on, that a source finds, but for one; kNone if none.
u32 Index::found_among(const Source& of, u32 first, u32 but) const {
    while (first != kNone && (first == but || !finds(of, nodes_[first]))) {
        first = nodes_[first].next_key;
    }
    return first;
}

// Decides by which of its nodes a source finds a key, now that one more claims it.
void Index::settle(Source& of, u32 id, bool is_below) {
    const Key key = nodes_[id].key();
    const u32 first = nodes_.first_with(key);
    if (first == id && nodes_[id].next_key == kNone) return;  // the usual case: shared
    const u32 before = found_among(of, first, id);
    if (before == kNone) {
        nodes_.link(id, first);
    } else if (is_below) {
        set_special(of, id, kNotFound);
        set_tier_found(of, key, id);
    } else {
        set_special(of, before, kNotFound);
        nodes_.link(id, first);
        if (is_on_gpu(of, nodes_[before])) {
            of.ambiguous += 1;
        } else {
            set_tier_found(of, key, before);
        }
        nodes_.refresh_link(before);
    }
}

void Index::set_special(Source& of, u32 id, u32 plane) {
    const u32 row = row_key(of.word, plane);
    if (nodes_[id].row(row) & of.bit) return;
    nodes_[id].set(row, of.bit);
    (plane == kNotFound ? of.not_found : of.tier_found) += 1;
    version_ += plane == kTierFound && of.tier_found == 1;
}

void Index::set_tier_found(Source& of, Key key, u32 id) {
    const u32 row = row_key(of.word, kTierFound);
    for (u32 each = nodes_.first_with(key); of.tier_found && each != kNone;) {
        const u32 next = nodes_[each].next_key;
        if (each != id && nodes_[each].row(row) & of.bit) {
            nodes_[each].unset(row, of.bit);
            of.tier_found -= 1;
            nodes_.refresh_link(each);
        }
        each = next;
    }
    set_special(of, id, kTierFound);
    nodes_.link(id, nodes_.first_with(key));
}

void Index::unset_special(Source& of, u32 id) {
    bool has_any = false;
    for (u32 plane : {kNotFound, kTierFound}) {
        const u32 row = row_key(of.word, plane);
        if (nodes_[id].row(row) & of.bit) {
            nodes_[id].unset(row, of.bit);
            (plane == kNotFound ? of.not_found : of.tier_found) -= 1;
        }
    }
    for (u32 i = 0; i < nodes_[id].row_count(); ++i) {
        has_any |= plane_of_row(nodes_[id].row_keys()[i]) >= kPlanes;
    }
    if (has_any) nodes_.refresh_link(id);
}

}  // namespace kvroute
