#include "index/index.hpp"

#include "index/units.hpp"

namespace kvroute {

namespace {

Limits bounded(Limits limits) {
    limits.tiers = std::min<u64>(limits.tiers, kMaxTiers);
    return limits;
}

}  // namespace

Index::Index(std::array<u64, 2> secrets, Limits limits)
    : space_(secrets), limits_(bounded(limits)), nodes_(space_.table_secret()),
      left_(nodes_, limits_) {}

std::size_t Index::memory() {
    std::size_t kept = 0;
    for (const auto& of : sources_) kept += of ? of->memory() : 0;
    return nodes_.memory() + kept;
}

u32 Index::add_source() {
    const u32 slot = free_slot();
    sources_[slot] = std::make_unique<Source>(slot, space_.table_secret());
    ++version_;
    return slot;
}

void Index::drop_source(u32 slot) {
    const std::unique_ptr<Source> gone = std::move(sources_[slot]);
    forget_cleared(*gone);
    if (gone->entries) left_.take_over(*gone, nullptr);
    while (!sources_.empty() && !sources_.back()) sources_.pop_back();
    ++version_;
}

u32 Index::free_slot() {
    u32 slot = 0;
    while ((slot < sources_.size() && sources_[slot]) || left_.has(slot)) ++slot;
    if (slot >= sources_.size()) sources_.resize(slot + 1);
    return slot;
}

void Index::set_layout(u32 slot, Layout layout, bool is_announced, u32 lookahead) {
    unset_layout(slot, is_announced, lookahead);
    borrow_layout(slot, std::move(layout), lookahead);
    source(slot).has_own_layout = true;
}

void Index::unset_layout(u32 slot, bool is_announced, u32 lookahead) {
    Source& of = source(slot);
    of.has_layout = of.has_own_layout = false;
    of.is_announced = is_announced;
    of.lookahead = lookahead;
    of.layout_number = ++layouts_;
    ++version_;
}

void Index::borrow_layout(u32 slot, Layout layout, u32 read_lookahead) {
    layout.find_equal_groups();
    Source& of = source(slot);
    of.layout = std::move(layout);
    of.has_layout = true;
    of.read_lookahead = read_lookahead;
    ++version_;
}

void Index::share(u32 slot, std::vector<StoreHint> hints) {
    Source& of = source(slot);
    for (const StoreHint& hint : hints) {
        if (std::find(of.stores.begin(), of.stores.end(), hint.slot) == of.stores.end()) {
            of.stores.push_back(hint.slot);
        }
    }
    of.store_hints = std::move(hints);
    ++version_;
}

bool Index::has_unplaced(const Source& of) const {
    return of.unplaced || any_store(of, [](const Source& store) { return store.unplaced > 0; });
}

bool Index::has_anything_below(const Source& of) const {
    return of.has_lower_tiers() ||
           any_store(of, [](const Source& store) { return store.has_lower_tiers(); });
}

bool Index::has_own_blocks_below(const Source& of) const {
    return has_own_blocks_in(of, of) || any_store(of, [&](const Source& store) {
               return has_own_blocks_in(of, store);
           });
}

bool Index::key_of(const Source& of, u64 hash, Key& out) const {
    return own_key_of(of, hash, out) || any_store(of, [&](const Source& store) {
               return own_key_of(store, hash, out);
           });
}

bool Index::own_key_of(const Source& of, u64 hash, Key& out) const {
    const u32 id = entry_of(of, hash);
    if (id != kNone && nodes_[id].is_placed()) {
        out = nodes_[id].key();
        return true;
    }
    return remembers(of, hash, out);
}

bool Index::remembers(const Source& of, u64 hash, Key& out) const {
    if (const Key* known = of.forgotten.find(hash)) {
        out = *known;
        return true;
    }
    const ClearedKey* cleared = of.cleared.find(hash);
    if (cleared != nullptr) out = cleared->key;
    // Blocks that `work_off` has not come to yet. Of several clears that took one, the last counts.
    if (const auto left = left_.key_of(of, hash, cleared != nullptr ? cleared->number : 0)) {
        out = *left;
        return true;
    }
    return cleared != nullptr;
}

u64 Index::unplaced_of(const Source& of, std::span<const u64> hashes) const {
    u64 found = 0;
    for (std::size_t i = 0; of.unplaced && i < hashes.size(); ++i) {
        const u32 id = entry_of(of, hashes[i]);
        found += id != kNone && !nodes_[id].is_placed();
    }
    return found;
}

}  // namespace kvroute
