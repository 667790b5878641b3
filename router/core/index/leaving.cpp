#include "index/leaving.hpp"

namespace kvroute {

namespace {

// Returns the slots left behind that hold a node; `bits_of_word`: of all such slots.
void slots_of(const Node& node, const std::vector<u64>& bits_of_word, std::vector<u32>& out) {
    out.clear();
    for (u32 word = 0; word < bits_of_word.size(); ++word) {
        if (!bits_of_word[word]) continue;
        for (u64 bits = node.holders(word) & bits_of_word[word]; bits; bits &= bits - 1) {
            out.push_back(word * 64 + static_cast<u32>(std::countr_zero(bits)));
        }
    }
}

}  // namespace

bool Departures::has(u32 slot) const {
    return std::any_of(leaving_.begin(), leaving_.end(),
                       [&](const Leaving& each) { return each.slot == slot; });
}

void Departures::take_over(Source& of, Source* heir) {
    leaving_.push_back({of.slot, of.word, of.bit, of.entries, 0, heir, of.clears, {}});
    leaving_.back().further_copies.swap(of.further_copies);
}

void Departures::work_off(std::int64_t budget) {
    while (!leaving_.empty() && budget > 0) {
        std::vector<Leaving*> by_slot;
        std::vector<u64> bits_of_word;
        for (Leaving& each : leaving_) {
            if (each.slot >= by_slot.size()) by_slot.resize(each.slot + 1);
            if (each.word >= bits_of_word.size()) bits_of_word.resize(each.word + 1);
            by_slot[each.slot] = &each;
            bits_of_word[each.word] |= each.bit;
        }
        std::size_t unfinished = leaving_.size();
        next_ = nodes_.store().visit_from(next_, budget, [&](u32 id, const Node& node) {
            slots_of(node, bits_of_word, scratch_slots_);
            for (u32 slot : scratch_slots_) unfinished -= !take_away(*by_slot[slot], id);
            const std::int64_t cost = 1 + 16 * static_cast<std::int64_t>(scratch_slots_.size());
            return unfinished ? cost : budget;
        });
        const bool is_at_end = next_ >= nodes_.store().end();
        if (is_at_end) next_ = 0;
        for (Leaving& each : leaving_) each.laps += is_at_end;
        std::erase_if(leaving_, [](const Leaving& each) { return !each.left || each.laps > 1; });
    }
}

// Frees a node, which may go with it, from a slot; true where the slot has other nodes left.
bool Departures::take_away(Leaving& from, u32 id) {
    Node& node = nodes_[id];
    if (from.heir != nullptr && node.is_placed()) {
        remember(from.heir->cleared, node, from.number);
    }
    drop_from(from, id, node);
    return --from.left > 0;
}

void Departures::remember(BoundedMap<ClearedKey>& cleared, const Node& node, u64 number) const {
    const ClearedKey* known = cleared.find(node.hash);
    if (known != nullptr && known->number > number) return;
    cleared.put(node.hash, {node.key(), number}, limits_.forgotten);
}

// Takes a source out of a node, without a trace.
void Departures::drop_from(Leaving& of, u32 id, Node& node) {
    std::vector<u32>& rows = scratch_rows_;
    rows.clear();
    bool has_special = false;
    for (u32 i = 0; i < node.row_count(); ++i) {
        const u32 row = node.row_keys()[i];
        has_special |= plane_of_row(row) >= kPlanes;
        if (word_of_row(row) == of.word && node.row_bits()[i] & of.bit) rows.push_back(row);
    }
    for (u32 row : rows) {
        node.unset(row, of.bit);
        // One by one, as giving all of them back at the end would take long.
        if (!of.further_copies.empty()) {
            of.further_copies.erase(u64{id} << 16 | plane_of_row(row));
        }
    }
    if (has_special && !node.is_bare() && node.is_placed()) nodes_.refresh_link(id);
    nodes_.release_if_bare(id);
}

std::optional<Key> Departures::key_of(const Source& heir, u64 hash, u64 since) const {
    for (auto each = leaving_.rbegin(); each != leaving_.rend(); ++each) {
        if (each->heir != &heir || since > each->number) continue;
        for (u32 id = nodes_.first_of(hash); id != kNone; id = nodes_[id].next_hash) {
            const Node& node = nodes_[id];
            if (node.is_held_by(each->word, each->bit) && node.is_placed()) return node.key();
        }
    }
    return std::nullopt;
}

void Departures::disinherit(const Source& heir) {
    for (Leaving& each : leaving_) {
        if (each.heir == &heir) each.heir = nullptr;
    }
}

}  // namespace kvroute
