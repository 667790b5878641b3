#include "index/lone.hpp"

namespace kvroute {

namespace {

constexpr u64 kAhead = 8;  // look-ups that are fetched ahead

bool is_found_below(const Source& of, const Node& node) {
    return node.row(row_key(of.word, kTierFound)) & of.bit;
}

}  // namespace

LoneLookUp::LoneLookUp(const Index& index, const Source& of, Prompt& prompt,
                       const Computed* computed, bool ends_early)
    : index_(index), of_(of), blocks_(prompt.length() / of.layout.hash_block_size) {
    look_up(prompt, computed, ends_early);
    if (computed != nullptr) {
        for (const std::vector<u64>& hashes : computed->hashes) look_up_hashes(hashes);
    }
    if (!of.stores.empty()) look_up_shared();
}

LoneLookUp::LoneLookUp(const Index& index, const Source& of, const std::vector<u64>& hashes)
    : index_(index), of_(of), blocks_(hashes.size()), held_(hashes.size()) {
    look_up_hashes(hashes);
    if (!of.stores.empty()) look_up_shared();
}

Bitmap LoneLookUp::at(u32 plane, u32 where) const {
    const Planes& planes = where == kUsual    ? found_
                           : where == kOfTier ? tier_found_
                                              : in_store_[where - kInStore];
    auto known = planes.find(plane);
    if (known == planes.end()) return {};
    return {known->second.data(), 1, blocks_};
}

void LoneLookUp::look_up(Prompt& prompt, const Computed* computed, bool ends_early) {
    const Prompt::Step step{of_.layout.hash_block_size, of_.read_lookahead};
    const std::span<const u64> keys = prompt.keys(index_.space(), step);
    const NodeTables& nodes = index_.nodes();
    const bool is_learned = computed == nullptr || !computed->is_alone;
    // Blocks without a hash of the engine's are found by their tokens, only below the GPU.
    const bool is_learned_below = !is_learned && index_.has_own_blocks_below(of_);
    for (u64 i = 0; i < keys.size(); ++i) {
        if (i + kAhead < keys.size()) {
            nodes.prefetch_key(NodeTables::hash_of_key(Prompt::key_at(keys, step, i + kAhead)));
        }
        if (ends_early && i && lacks_full(i - 1)) break;
        u32 id = nodes.first_with(Prompt::key_at(keys, step, i));
        for (; id != kNone; id = nodes[id].next_key) {
            const Node& node = nodes[id];
            const bool is_found = Index::finds(of_, node);
            if (is_learned && is_found) see(of_, node, i, found_);
            if (is_found_below(of_, node) || (is_learned_below && is_found)) {
                see(of_, node, i, tier_found_);
            }
            if (!of_.stores.empty() && is_looked_up(node, is_learned || is_learned_below)) {
                looked_up_.emplace_back(i, node.hash);
            }
        }
    }
}

void LoneLookUp::look_up_hashes(const std::vector<u64>& hashes) {
    for (u64 i = 0; i < hashes.size() && i < blocks_; ++i) {
        const u32 id = index_.entry_of(of_, hashes[i]);
        if (id != kNone) see(of_, index_.nodes()[id], i, found_);
        if (!held_.empty()) held_[i] = id != kNone;
        if (!of_.stores.empty()) looked_up_.emplace_back(i, hashes[i]);
    }
}

// Finds the prompt's blocks in stores, and in the source's own tiers by a hash that only a store knows.
void LoneLookUp::look_up_shared() {
    in_store_.resize(of_.stores.size());
    for (const auto& [i, hash] : looked_up_) {
        const u32 own = index_.entry_of(of_, hash);
        if (own != kNone) see(of_, index_.nodes()[own], i, tier_found_);
        for (u32 number = 0; number < of_.stores.size(); ++number) {
            const Source& store = index_.store_of(of_, number);
            const u32 id = index_.entry_of(store, hash);
            if (id == kNone) continue;
            see(store, index_.nodes()[id], i, in_store_[number]);
            if (!held_.empty()) held_[i] = true;
        }
    }
}

// True where the hash of a node stands for its key: as the source or one of its stores has learned.
bool LoneLookUp::is_looked_up(const Node& node, bool is_learned) const {
    auto is_known_to = [&](const Source& each) {
        return is_found_below(each, node) || Index::finds(each, node);
    };
    if (is_learned ? is_known_to(of_) : is_found_below(of_, node)) return true;
    return index_.any_store(of_, is_known_to);
}

bool LoneLookUp::lacks_full(u64 block) const {
    const u64 end = (block + 1) * of_.layout.hash_block_size;
    for (u32 group : of_.layout.full) {
        if (end % of_.layout.groups[group].block_size) continue;
        if (!at(plane_of(group, 0), kUsual).test(block)) return true;
    }
    return false;
}

void LoneLookUp::see(const Source& in, const Node& node, u64 block, Planes& planes) {
    for (u32 i = 0; i < node.row_count(); ++i) {
        const u32 row = node.row_keys()[i];
        if (word_of_row(row) != in.word || plane_of_row(row) >= kPlanes) continue;
        if (!(node.row_bits()[i] & in.bit)) continue;
        std::vector<u64>& words = planes[plane_of_row(row)];
        if (words.empty()) words.resize((blocks_ + 63) / 64);
        words[block / 64] |= u64{1} << (block % 64);
    }
}

}  // namespace kvroute
