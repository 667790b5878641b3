// All sources of one model: the blocks that each holds, how often, and for which prefix.
// `Applier` writes events into it, `Matcher` reads how much of a prompt each source has,
// `Inspector` counts everything anew. Engines that hash alike share nodes; engines with other seeds
// have other nodes under one key.
#pragma once

#include <memory>

#include "index/leaving.hpp"

namespace kvroute {

class Index {
public:
    Index(std::array<u64, 2> secrets, Limits limits);

    const KeySpace& space() const { return space_; }
    const Limits& limits() const { return limits_; }
    NodeTables& nodes() { return nodes_; }
    const NodeTables& nodes() const { return nodes_; }
    // Returns the bytes of nodes, rows, tables and sources. A walk over all nodes.
    std::size_t memory();

    // --- sources ---

    u32 add_source();
    // No look-up finds the source any more; its slot stays taken until `work_off` is done with it.
    void drop_source(u32 slot);
    // See `Departures::work_off`.
    void work_off(std::int64_t budget = std::numeric_limits<std::int64_t>::max()) {
        left_.work_off(budget);
    }
    bool has_work_left() const { return !left_.all().empty(); }
    const Departures& left() const { return left_; }

    bool has_source(u32 slot) const { return slot < sources_.size() && sources_[slot]; }
    Source& source(u32 slot) { return *sources_[slot]; }
    const std::vector<std::unique_ptr<Source>>& sources() const { return sources_; }
    // Changes whenever a source comes or goes, or holds something in a plane it did not.
    u64 version() const { return version_; }

    void set_layout(u32 slot, Layout layout, bool is_announced, u32 lookahead);
    void unset_layout(u32 slot, bool is_announced, u32 lookahead);
    // Gives a source without one the layout of the others that share its store.
    void borrow_layout(u32 slot, Layout layout, u32 read_lookahead);

    // --- stores ---

    // Sets the stores that a source writes and reads besides its own blocks. They exist as long as it.
    void share(u32 slot, std::vector<StoreHint> hints);
    Source& store_of(const Source& of, std::size_t number) { return *sources_[of.stores[number]]; }
    const Source& store_of(const Source& of, std::size_t number) const {
        return *sources_[of.stores[number]];
    }
    template <class Holds>
    bool any_store(const Source& of, Holds&& holds) const {
        return std::any_of(of.stores.begin(), of.stores.end(),
                           [&](u32 slot) { return holds(*sources_[slot]); });
    }
    // True where some block that a source could load has no place yet.
    bool has_unplaced(const Source& of) const;
    bool has_anything_below(const Source& of) const;
    // True where some tier has blocks of its own, larger than the GPU's, and so hashes of its own.
    bool has_own_blocks_below(const Source& of) const;

    // --- looking ---

    // Returns the node that holds a source's hash; kNone if it holds none.
    u32 entry_of(const Source& of, u64 hash) const {
        for (u32 id = nodes_.first_of(hash); id != kNone; id = nodes_[id].next_hash) {
            if (nodes_[id].is_held_by(of.word, of.bit)) return id;
        }
        return kNone;
    }
    u64 copies_of(const Source& of, u32 id, u32 plane) const {
        if (!(nodes_[id].row(row_key(of.word, plane)) & of.bit)) return 0;
        if (of.further_copies.empty()) return 1;
        auto found = of.further_copies.find(u64{id} << 16 | plane);
        return found == of.further_copies.end() ? 1 : u64{1} + found->second;
    }
    // True where a source finds a node by its key.
    static bool finds(const Source& of, const Node& node) {
        return node.is_held_by(of.word, of.bit) &&
               !(node.row(row_key(of.word, kNotFound)) & of.bit);
    }
    // Finds the key of a block that a source or one of its stores knows.
    bool key_of(const Source& of, u64 hash, Key& out) const;
    bool own_key_of(const Source& of, u64 hash, Key& out) const;
    // Finds the key of a block that is gone, as far as it is remembered.
    bool remembers(const Source& of, u64 hash, Key& out) const;
    // Returns how many of these a source holds without a key.
    u64 unplaced_of(const Source& of, std::span<const u64> hashes) const;

    // --- copies ---

    // Returns how many more blocks a plane may hold.
    u64 room(const Source& of, u32 plane) const;
    // Drops the oldest blocks of a tier that is full and never removes: whether they are still
    // there is unknown.
    void make_room(Source& of, u32 group, u32 tier, u64 wanted);
    // Counts copies of a block; false while it is not placed. `key`: of a new entry's prefix, if that
    // is known and nothing else was remembered of it.
    bool add(Source& of, u32 plane, u64 hash, bool is_int, u64 copies, const Key* key);
    // Why a copy goes. The oldest has left the order of arrival; after a clear all have, and they are
    // remembered together.
    enum class Why : u8 { is_removed, is_oldest, is_cleared };
    // Takes `gone` of the `copies` of a block away.
    void discount(Source& of, u32 plane, u32 id, u64 copies, u64 gone, Why why = Why::is_removed);
    // Takes all blocks of a tier away; returns how many copies there were.
    u64 clear(Source& of, u32 tier);
    // True where a clear is large and leaves nothing. Only for one of the GPU: after `Applied::cleared`
    // the caller reads the source's slot anew.
    bool may_move_out(const Source& of, u32 tier) const;
    // Leaves all that a source holds to `work_off`, and lets it go on in another slot; returns how
    // many copies there were.
    u64 move_out(Source& of);

    // --- places ---

    // Learns the key of a block's prefix; the first one learned stays, until it is doubted.
    void place(Source& of, u64 hash, Key key, bool is_below);
    // The same in every store that holds the block.
    void place_everywhere(Source& of, u64 hash, Key key, bool is_below);
    // Takes another key than this from a block that a plane of the GPU is about to hold: what lower
    // tiers say may leave out what goes into its hash.
    void doubt(Source& of, u32 plane, u64 hash, Key key);

private:
    friend class StateReader;  // state.cpp: fills a source as it was

    u32 free_slot();
    bool may_remember(Source& of, u64 placed);
    void forget_cleared(Source& of);
    u64 clear_entry(Source& of, u32 tier, u32 id, u64& left);

    void count_block(Source& of, u32 plane, u64 hash);
    u32 enter(Source& of, u64 hash, u32 head, bool is_int, bool is_below, const Key* key);
    void forget(Source& of, u32 id, bool is_cleared);

    u32 move_entry(Source& of, u32 id, Key key);
    void move_rows(Source& of, u32 id, u32 to);
    u32 found_among(const Source& of, u32 first, u32 but = kNone) const;
    void settle(Source& of, u32 id, bool is_below);
    void set_special(Source& of, u32 id, u32 plane);
    void set_tier_found(Source& of, Key key, u32 id);
    void unset_special(Source& of, u32 id);

    KeySpace space_;
    Limits limits_;

    // At any time outside a call:
    //   1. A source holds a hash in at most one node: the entry of that hash. Another may hold the
    //      same hash in another node, since each source defines its own hashes: no
    //      source can move another's blocks.
    //   2. A node without rows is gone, from the store and from both tables.
    //   3. A node is in the list of its key only where some source *finds* it there: of two hashes
    //      that claim one key a source finds the newer, and has kNotFound in the other's row. So a
    //      key's list has at most two nodes a source.
    //   4. kTierFound: a lower tier has hashes of its own for the same prefix, and finds this one.
    NodeTables nodes_;
    //   5. Nodes hold bits of sources that are there, or in `left_`: no other has their slot until
    //      all of these are gone, and none of them finds anything.
    //   6. `counts`, `blocks`, `copies`, `places`, `entries`, `unplaced`, `not_found` and
    //      `tier_found` of a source are what a walk over all nodes would count.
    std::vector<std::unique_ptr<Source>> sources_;  // by slot; the last is there
    Departures left_;
    u64 version_ = 0;
    u64 layouts_ = 0;  // the number of the last one that was set
    std::vector<u32> scratch_planes_;
    std::vector<std::pair<u64, Key>> scratch_cleared_;  // no more than one too many to remember
};

}  // namespace kvroute
