// What is kept of one source besides the rows of the nodes.
#pragma once

#include <deque>
#include <string>
#include <unordered_map>

#include "events.hpp"
#include "layout.hpp"
#include "nodes.hpp"

namespace kvroute {

struct Limits {
    u64 blocks = 4'194'304;
    u64 tiers = 8;
    u64 waiting_runs = 4096;
    u64 waiting_tokens = 4'194'304;
    u64 waiting_batches = 10'000;
    u64 forgotten = 8192;
    u64 cleared_at_once = 4096;
};

// For the tables of the standard library: an engine chooses its hashes, and with equal places for
// all of them every look-up would walk over all.
struct SecretHash {
    u64 secret;
    std::size_t operator()(u64 hash) const { return mixed(hash, secret); }
};

template <class Value>
using MapByHash = std::unordered_map<u64, Value, SecretHash>;

// A map from (group, hash) that forgets its oldest entries beyond a bound. To set an entry anew does
// not make it younger.
template <class Value>
class BoundedMap {
public:
    struct Entry {
        u64 hash;
        u32 group;
        bool is_live;
        Value value;
    };

    explicit BoundedMap(u64 secret) : secret_(secret) {}

    std::size_t size() const { return live_; }
    std::size_t memory() const {
        return entries_.size() * sizeof(Entry) + slots_.capacity() * sizeof(u32);
    }

    const Value* find(u64 hash, u32 group = 0) const {
        const u32 at = place_of(hash, group);
        return at == kNone ? nullptr : &entry(slots_[at]).value;
    }

    void put(u64 hash, const Value& value, u64 bound, u32 group = 0) {
        const u32 at = place_of(hash, group);
        if (at != kNone) {
            entry(slots_[at]).value = value;
            return;
        }
        if ((live_ + 1) * 3 > slots_.size() * 2 || first_ > kMaxLength) resize(live_ + 1);
        entries_.push_back({hash, group, true, value});
        insert(first_ + static_cast<u32>(entries_.size()) - 1);
        ++live_;
        while (live_ > bound) pop_oldest();
    }

    bool take(u64 hash, Value& out, u32 group = 0) {
        if (!live_) return false;
        const u32 at = place_of(hash, group);
        if (at == kNone) return false;
        Entry& found = entry(slots_[at]);
        out = found.value;
        found.is_live = false;
        remove_at(at);
        --live_;
        if (entries_.size() > 2 * live_ + 64) resize(live_);
        return true;
    }

    void clear() {
        entries_ = {};
        slots_ = {};
        live_ = 0;
    }

    // Calls `visit(entry)`, the oldest first.
    template <class Visit>
    void for_each(Visit&& visit) const {
        for (const Entry& each : entries_) {
            if (each.is_live) visit(each);
        }
    }

private:
    Entry& entry(u32 number) { return entries_[number - first_]; }
    const Entry& entry(u32 number) const { return entries_[number - first_]; }

    u32 home_of(u64 hash, u32 group) const {
        return static_cast<u32>(mixed(hash, secret_ + group)) & static_cast<u32>(slots_.size() - 1);
    }

    u32 place_of(u64 hash, u32 group) const {
        if (slots_.empty()) return kNone;
        const u32 mask = static_cast<u32>(slots_.size() - 1);
        for (u32 at = home_of(hash, group); slots_[at] != kNone; at = (at + 1) & mask) {
            const Entry& found = entry(slots_[at]);
            if (found.hash == hash && found.group == group) return at;
        }
        return kNone;
    }

    void insert(u32 number) {
        const u32 mask = static_cast<u32>(slots_.size() - 1);
        u32 at = home_of(entry(number).hash, entry(number).group);
        while (slots_[at] != kNone) at = (at + 1) & mask;
        slots_[at] = number;
    }

    // Closes the gap, so that look-ups need no marker of what was there.
    void remove_at(u32 gap) {
        const u32 mask = static_cast<u32>(slots_.size() - 1);
        for (u32 at = (gap + 1) & mask; slots_[at] != kNone; at = (at + 1) & mask) {
            const Entry& found = entry(slots_[at]);
            const u32 home = home_of(found.hash, found.group);
            if (((at - home) & mask) >= ((at - gap) & mask)) {
                slots_[gap] = slots_[at];
                gap = at;
            }
        }
        slots_[gap] = kNone;
    }

    void pop_oldest() {
        while (!entries_.front().is_live) drop_front();
        remove_at(place_of(entries_.front().hash, entries_.front().group));
        drop_front();
        --live_;
    }

    void drop_front() {
        entries_.pop_front();
        ++first_;
    }

    void resize(std::size_t wanted) {
        std::deque<Entry> kept;
        for (const Entry& each : entries_) {
            if (each.is_live) kept.push_back(each);
        }
        entries_.swap(kept);
        first_ = 0;
        std::size_t size = 16;
        while (size * 2 < wanted * 4) size *= 2;
        slots_.assign(size, kNone);
        slots_.shrink_to_fit();
        for (u32 i = 0; i < entries_.size(); ++i) insert(i);
    }

    u64 secret_;
    std::deque<Entry> entries_;
    u32 first_ = 0;            // number of the first entry
    std::vector<u32> slots_;   // numbers of entries, by hash
    std::size_t live_ = 0;
};

// Contiguous blocks with tokens for every hash, behind a parent whose key is not known yet.
struct WaitingRun {
    std::vector<u64> hashes;
    std::vector<u32> tokens;  // behind what the parent's key covers
    std::vector<Mark> marks;
    u32 block_size = 0;
    u32 lookahead = 0;  // tokens that the first hash covers beyond its block's share
    u64 batch = 0;
    bool is_below = false;

    u64 weight() const {
        return std::max<u64>(tokens.size(), hashes.size() + marks.size());
    }
};

// Runs by the parent hash they wait for, oldest first, bounded.
class WaitingRuns {
public:
    u64 runs = 0, tokens = 0, given_up = 0;

    explicit WaitingRuns(u64 secret) : by_parent_(0, SecretHash{secret}) {}

    bool waits_for(u64 parent) const { return runs && by_parent_.count(parent); }
    std::size_t memory() const {
        return order_.size() * sizeof(Place) + by_parent_.size() * sizeof(Family) +
               runs * sizeof(WaitingRun) + tokens * sizeof(u32);
    }

    void add(u64 parent, WaitingRun&& run) {
        Family& family = by_parent_[parent];
        if (family.runs.empty()) {
            family.number = next_number_++;
            order_.push_back({parent, family.number});
        }
        runs += 1;
        tokens += run.weight();
        family.runs.push_back(std::move(run));
    }

    std::vector<WaitingRun> take(u64 parent) {
        auto found = by_parent_.find(parent);
        if (found == by_parent_.end()) return {};
        std::vector<WaitingRun> taken = std::move(found->second.runs);
        by_parent_.erase(found);
        runs -= taken.size();
        for (const WaitingRun& run : taken) tokens -= run.weight();
        if (order_.size() > 2 * by_parent_.size() + 64) forget_gone();
        return taken;
    }

    // Gives up the oldest until all bounds hold; returns how many.
    u64 trim(const Limits& limits, u64 batch) {
        u64 before = given_up;
        while (!by_parent_.empty()) {
            while (!is_current(order_.front())) order_.pop_front();
            const u64 parent = order_.front().parent;
            const bool too_old =
                by_parent_[parent].runs.front().batch + limits.waiting_batches < batch;
            if (!too_old && runs <= limits.waiting_runs && tokens <= limits.waiting_tokens) break;
            given_up += take(parent).size();
        }
        return given_up - before;
    }

    // Calls `visit(parent, run)`, the oldest parent first.
    template <class Visit>
    void for_each(Visit&& visit) const {
        for (const Place& place : order_) {
            if (!is_current(place)) continue;
            for (const WaitingRun& run : by_parent_.at(place.parent).runs) visit(place.parent, run);
        }
    }

private:
    struct Family {
        std::vector<WaitingRun> runs;
        u64 number = 0;
    };
    struct Place {
        u64 parent;
        u64 number;
    };

    bool is_current(const Place& place) const {
        auto found = by_parent_.find(place.parent);
        return found != by_parent_.end() && found->second.number == place.number;
    }

    void forget_gone() {
        std::deque<Place> kept;
        for (const Place& place : order_) {
            if (is_current(place)) kept.push_back(place);
        }
        order_.swap(kept);
    }

    MapByHash<Family> by_parent_;
    std::deque<Place> order_;
    u64 next_number_ = 1;
};

// How a source tells of several copies of one block: every removal, or the last one only. See
// `tests/oracle/index/copy_counting.py`, whose rules these are.
class CopyWatch {
public:
    enum class Counting : u8 { unknown, every_copy, last_copy };

    Counting counting = Counting::unknown;

    explicit CopyWatch(u64 secret) : leftovers_(secret) {}

    bool is_settled() const { return counting == Counting::every_copy; }
    bool has_leftovers() const { return leftovers_.size() > 0; }
    std::size_t memory() const { return leftovers_.memory(); }

    void settle() {
        counting = Counting::every_copy;
        leftovers_.clear();
    }
    void forget() { leftovers_.clear(); }

    void removed(u32 group, u64 hash, u64 copies) {
        if (leftovers_.find(hash, group)) {
            settle();
        } else if (copies > 1 && !is_settled()) {
            leftovers_.put(hash, {}, kRemembered, group);
        }
    }

    // True if it settles that only last removals are announced.
    bool stored(u32 group, std::span<const u64> hashes, std::optional<u64> parent,
                bool is_full_attention) {
        const bool unknown = counting == Counting::unknown;
        if (unknown && is_full_attention && parent && leftovers_.find(*parent, group)) {
            settle();
            return false;
        }
        u64 again = 0;
        for (u64 hash : hashes) again += leftovers_.find(hash, group) != nullptr;
        Nothing nothing;
        for (u64 hash : hashes) leftovers_.take(hash, nothing, group);
        runs_ += again >= kMinRun;
        if (!unknown || runs_ < kRunsForLast) return false;
        counting = Counting::last_copy;
        return true;
    }

    // Calls `visit(group, hash)` for every block whose last removal seemed to leave copies.
    template <class Visit>
    void for_each_leftover(Visit&& visit) const {
        leftovers_.for_each([&](const auto& entry) { visit(entry.group, entry.hash); });
    }

private:
    struct Nothing {};
    static constexpr u64 kRemembered = 8192;
    static constexpr u64 kRunsForLast = 8;
    static constexpr u64 kMinRun = 2;

    BoundedMap<Nothing> leftovers_;
    u64 runs_ = 0;
};

// What a lower tier has announced, in the order in which it came: what is dropped first when the
// tier is full and never removes.
class ArrivalOrder {
    using Gone = MapByHash<u32>;

public:
    explicit ArrivalOrder(u64 secret) : gone_(0, SecretHash{secret}) {}

    void came(u64 hash) { order_.push_back(hash); }
    std::size_t memory() const {
        return order_.size() * sizeof(u64) + gone_.size() * sizeof(Gone::value_type);
    }

    // Its place in the order is skipped when it is reached.
    void went(u64 hash) {
        ++gone_[hash];
        if (++gone_places_ > order_.size() / 2 + 64) forget_gone();
    }

    bool oldest(u64& out) {
        while (!order_.empty()) {
            out = order_.front();
            order_.pop_front();
            auto found = gone_.find(out);
            if (found == gone_.end()) return true;
            skip(found);
        }
        return false;
    }

    void clear() {
        order_ = {};
        gone_ = Gone(0, gone_.hash_function());
        gone_places_ = 0;
    }

    template <class Visit>
    void for_each(Visit&& visit) const {
        auto gone = gone_;
        for (u64 hash : order_) {
            auto found = gone.find(hash);
            if (found == gone.end() || found->second-- == 0) visit(hash);
        }
    }

private:

    void skip(Gone::iterator found) {
        if (--found->second == 0) gone_.erase(found);
        --gone_places_;
    }

    void forget_gone() {
        std::deque<u64> kept;
        for (u64 hash : order_) {
            auto found = gone_.find(hash);
            if (found == gone_.end()) {
                kept.push_back(hash);
            } else {
                skip(found);
            }
        }
        order_.swap(kept);
    }

    std::deque<u64> order_;
    Gone gone_;  // how many of a hash's places, the first ones, are void
    std::size_t gone_places_ = 0;
};

// What the configuration says of how much a tier keeps together; 0 where it says nothing.
struct TierUnit {
    std::string name;
    u64 blocks = 0;
    u64 tokens = 0;

    bool is_given() const { return blocks || tokens; }
};

// What the configuration says of a store that a source shares with others.
struct StoreHint {
    u32 slot = 0;                    // of the store, which is kept as a source without a layout
    std::vector<std::string> tiers;  // in upper case: blocks in these are there, unless local; none
                                     // named: blocks below the GPU that are announced as elsewhere
    std::optional<std::string> ownership;  // only blocks announced with it
};

// The hashes that came into a tier since it was empty, as long as they are few: a clear finds them
// without a walk over what all sources hold. A walk is paid for by more stores than are kept here.
class FewHashes {
public:
    bool are_all() const { return are_all_; }
    const std::vector<u64>& hashes() const { return hashes_; }

    void came(u64 hash, u64 bound) {
        if (!are_all_) return;
        are_all_ = hashes_.size() < bound;
        if (are_all_) {
            hashes_.push_back(hash);
        } else {
            hashes_ = {};
        }
    }
    void restart() {
        hashes_.clear();
        are_all_ = true;
    }

private:
    std::vector<u64> hashes_;  // one that left and came again is there twice
    bool are_all_ = true;
};

struct Tier {
    std::string name;
    TierUnit hint;
    u64 blocks = 0;              // distinct (group, hash)
    bool removes = false;        // has announced a removal; storage that others share never does
    std::vector<u32> groups;     // that hold something here, in the order in which they came
    FewHashes since_empty;
};

// What one tier has shown of how much it keeps together, of one group; see `TierUnits` in
// `tests/oracle/index/tier_units.py`.
struct SeenUnit {
    u64 ends = 0;     // the greatest common divisor of the ends, in tokens
    u64 largest = 0;  // the largest block that its events describe, in tokens; 0: none does
};

// What the layout learner has been told last of a group, to tell it no more than what is new.
struct ToldGroup {
    bool is_told = false;
    std::string kind;
    u32 window = 0;
    u32 block_size = 0;

    bool operator==(const ToldGroup&) const = default;
};

// What a block stood for that a clear took, and the number of that clear.
struct ClearedKey {
    Key key;
    u64 number = 0;
};

struct Source {
    // `secret`: see `SecretHash`.
    Source(u32 number, u64 secret)
        : tiers(1), forgotten(secret), cleared(secret), waiting(secret), copy_watch(secret),
          secret_(secret) {
        stand_at(number);
        tiers[0].name = "GPU";
    }

    void stand_at(u32 number) {
        slot = number;
        word = number / 64;
        bit = u64{1} << (number % 64);
    }

    // As its blocks are gone, so is what counts them. What it has shown of itself stays.
    void hold_nothing() {
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

    u32 slot;
    u32 word;
    u64 bit;

    std::string name;              // of a store
    std::vector<StoreHint> store_hints;  // an event belongs to the first that it fits
    std::vector<u32> stores;       // their slots, each once
    bool has_shared = false;       // it has written to one of them
    u64 layout_number = 0;         // of a store: that of the writer heard last
    std::vector<Tier> tiers;       // by number; the GPU is 0
    std::vector<TierUnit> tier_units;  // as configured, by name
    std::vector<u32> counts;       // distinct hashes, by plane
    u64 entries = 0;               // distinct hashes held
    u64 unplaced = 0;              // of those, without a key
    u64 copies = 0;                // over all planes
    u64 places = 0;                // distinct (group, tier, hash)
    u64 ambiguous = 0;             // times two live hashes claimed one prefix
    u64 removals = 0;              // blocks removed from the GPU since it was empty for certain
    std::vector<u64> removed;      // from the GPU, by group
    u64 tier_found = 0;            // nodes with kTierFound for this source
    u64 not_found = 0;             // nodes with kNotFound for this source
    std::unordered_map<u64, u32> further_copies;  // (node << 16 | plane) -> copies beyond the first
    std::unordered_map<u32, ArrivalOrder> arrivals;  // by plane, of lower tiers that never removed
    std::unordered_map<u32, SeenUnit> units;         // by plane, of lower tiers
    BoundedMap<Key> forgotten;     // the keys of blocks whose last copy was removed
    BoundedMap<ClearedKey> cleared;  // of those that clears took, as far as `work_off` came
    u64 all_cleared = 0;           // how many clears took that are remembered
    u64 clears = 0;                // number of the last clear
    WaitingRuns waiting;
    CopyWatch copy_watch;

    Layout layout;
    bool has_layout = false;
    bool is_announced = false;     // the layout is the publisher's own word
    bool has_chain = false;        // Python knows the engine's hash function
    u32 lookahead = 0;             // tokens behind a block that its hash covers too
    u32 read_lookahead = 0;        // the same, of blocks that prompts look up
    bool has_own_layout = false;   // not that of others that share its store
    bool uses_int_hashes = false;  // the form of the newest hash
    bool shows_extra_keys = false;
    bool announces_remote = false;
    bool has_overflowed = false;
    bool has_lost_removals = false;
    u64 batches = 0;

    bool told_chain = false;       // `has_chain`, and whether any block is not placed, as Python
    bool told_unplaced = false;    // was told last
    std::vector<ToldGroup> told;   // by group * 2, + 1 for lower tiers
    std::optional<u32> told_lookahead;

    u32 count(u32 plane) const { return plane < counts.size() ? counts[plane] : 0; }
    ArrivalOrder& arrivals_in(u32 plane) {
        return arrivals.try_emplace(plane, secret_).first->second;
    }
    void count_removed(u32 group, u64 blocks) {
        removals += blocks;
        if (!blocks) return;
        if (group >= removed.size()) removed.resize(group + 1);
        removed[group] += blocks;
    }
    // Bytes of what grows with its events, besides nodes and rows.
    std::size_t memory() const {
        std::size_t bytes = forgotten.memory() + waiting.memory() + copy_watch.memory() +
                            further_copies.size() * sizeof(*further_copies.begin());
        for (const auto& [plane, order] : arrivals) bytes += order.memory();
        return bytes;
    }
    bool hides_extra_keys() const { return entries && !shows_extra_keys; }
    bool has_lower_tiers() const {
        for (std::size_t i = 1; i < tiers.size(); ++i) {
            if (tiers[i].blocks) return true;
        }
        return false;
    }
    u32 tiers_in_use() const {
        u32 used = 0;
        for (const Tier& tier : tiers) used += tier.blocks > 0;
        return used;
    }

private:
    u64 secret_;
};

}  // namespace kvroute
