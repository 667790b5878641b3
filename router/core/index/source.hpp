// The state of one source besides the rows of the nodes.
#pragma once

#include <optional>
#include <string>

#include "index/copy_watch.hpp"
#include "index/layout.hpp"
#include "index/nodes.hpp"
#include "index/tier.hpp"
#include "index/waiting.hpp"

namespace kvroute {

// The configuration of a store that a source shares with others.
struct StoreHint {
    u32 slot = 0;                    // of the store, which is kept as a source without a layout
    std::vector<std::string> tiers;  // in upper case: blocks in these are there, unless local; none
                                     // named: blocks below the GPU that are announced as elsewhere
    std::optional<std::string> ownership;  // only blocks announced with it
};

// The facts of a group last reported to the layout learner, so that only news are reported.
struct ReportedGroup {
    bool is_reported = false;
    std::string kind;
    u32 window = 0;
    u32 block_size = 0;

    bool operator==(const ReportedGroup&) const = default;
};

// The key of a block that a clear took, and the number of that clear.
struct ClearedKey {
    Key key;
    u64 number = 0;
};

struct Source {
    // `secret`: see `SecretHash`.
    Source(u32 number, u64 secret);

    void stand_at(u32 number);
    // Forgets all counts, as its blocks are gone. The facts that its events have shown stay.
    void hold_nothing();

    // The place of its bits in the rows; `stand_at` sets all three.
    u32 slot;
    u32 word;
    u64 bit;

    std::string name;                    // of a store
    std::vector<StoreHint> store_hints;  // an event belongs to the first that it fits
    std::vector<u32> stores;             // their slots, each once
    bool has_shared = false;             // it has written to one of them
    u64 layout_number = 0;               // of a store: its last writer's

    // Its blocks. For every tier `blocks` is the sum of its `counts`; `places` is that of all, and
    // `copies` that and all of `further_copies`.
    std::vector<Tier> tiers;           // by number; the GPU is 0
    std::vector<TierUnit> tier_units;  // as configured, by name
    std::vector<u32> counts;           // distinct hashes, by plane
    u64 entries = 0;                   // distinct hashes held
    u64 unplaced = 0;                  // of those, without a key
    u64 copies = 0;                    // over all planes
    u64 places = 0;                    // distinct (group, tier, hash)
    u64 tier_found = 0;                // nodes with kTierFound for this source
    u64 not_found = 0;                 // nodes with kNotFound for this source
    std::unordered_map<u64, u32> further_copies;  // (node << 16 | plane) -> copies beyond the first
    std::unordered_map<u32, ArrivalOrder> arrivals;  // by plane, of lower tiers that never removed
    std::unordered_map<u32, SeenUnit> units;         // by plane, of lower tiers

    // Its former blocks. `cleared` has at most `all_cleared` keys: the rest are in nodes that
    // `work_off` has not come to.
    u64 ambiguous = 0;               // times two live hashes claimed one prefix
    u64 removals = 0;                // blocks removed from the GPU since it was empty for certain
    std::vector<u64> removed;        // from the GPU, by group
    BoundedMap<Key> forgotten;       // the keys of blocks whose last copy was removed
    BoundedMap<ClearedKey> cleared;  // of those that clears took, as far as `work_off` came
    u64 all_cleared = 0;             // keys that clears took and that are remembered
    u64 clears = 0;                  // number of the last clear
    WaitingRuns waiting;
    CopyWatch copy_watch;

    Layout layout;
    bool has_layout = false;
    bool is_announced = false;    // the publisher has sent the layout
    bool has_chain = false;       // Python knows the engine's hash function
    bool has_own_layout = false;  // not that of others that share its store
    u32 lookahead = 0;            // tokens behind a block that its hash covers too
    u32 read_lookahead = 0;       // the same, of blocks that prompts look up

    // Facts that its events have shown.
    u64 batches = 0;
    bool uses_int_hashes = false;  // the form of the newest hash
    bool shows_extra_keys = false;
    bool announces_remote = false;
    bool has_overflowed = false;
    bool has_lost_removals = false;

    // Last reported to Python.
    bool reported_chain = false;          // `has_chain`
    bool reported_unplaced = false;       // some block is not placed
    std::vector<ReportedGroup> reported;  // by group * 2, + 1 for lower tiers
    std::optional<u32> reported_lookahead;

    u32 count(u32 plane) const { return plane < counts.size() ? counts[plane] : 0; }
    void count_removed(u32 group, u64 blocks);
    ArrivalOrder& arrivals_in(u32 plane) {
        return arrivals.try_emplace(plane, secret_).first->second;
    }
    // Returns the bytes that grow with its events, besides nodes and rows.
    std::size_t memory() const;
    bool hides_extra_keys() const { return entries && !shows_extra_keys; }

    bool has_lower_tiers() const;
    u32 tiers_in_use() const;
    // Returns the number of a tier; kNone if there is none of that name.
    u32 tier_named(std::string_view tier_name) const;
    // Returns the same, made if it is new: that of one which holds nothing, if there are too many.
    // kNone if all of them hold something.
    u32 tier_for(std::string_view tier_name);

private:
    void forget_tier(u32 number);

    u64 secret_;
};

}  // namespace kvroute
