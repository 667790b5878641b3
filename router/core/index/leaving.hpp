// Blocks left behind by sources: taking a large source out of all its nodes takes long, so it is
// done a little at a time. Until then its slot is taken, and no prompt finds anything there.
#pragma once

#include <deque>
#include <limits>

#include "index/source.hpp"
#include "index/tables.hpp"

namespace kvroute {

// A slot whose bits are taken away: its source was dropped, or cleared and moved to another slot.
struct Leaving {
    u32 slot;
    u32 word;
    u64 bit;
    u64 left;      // nodes that still have the bit
    u32 laps = 0;  // how often the walk has come to the end of the nodes since
    Source* heir;  // the source that was cleared, if it remembers what it held
    u64 number;    // of the clear
    std::unordered_map<u64, u32> further_copies;
};

class Departures {
public:
    // So many slots may be left behind at once; a further clear does its work itself. More than a
    // fleet has replicas that are cleared together, and few enough to look through.
    static constexpr std::size_t kMost = 256;

    Departures(NodeTables& nodes, const Limits& limits) : nodes_(nodes), limits_(limits) {}

    // The oldest first.
    const std::deque<Leaving>& all() const { return leaving_; }
    bool is_full() const { return leaving_.size() >= kMost; }
    bool has(u32 slot) const;

    // Takes over all that a source holds. `heir`: that source, if it is to remember it.
    void take_over(Source& of, Source* heir);

    // Takes bits away, of all slots in one walk over the nodes. A node that is looked at costs 1 of
    // the budget, each source that it is taken from 16: some 10 nanoseconds each.
    void work_off(std::int64_t budget = std::numeric_limits<std::int64_t>::max());

    // Finds the key of a block that a source left behind, in a clear of this number or a later one.
    std::optional<Key> key_of(const Source& heir, u64 hash, u64 since) const;
    // Forgets the blocks that a source has left behind.
    void disinherit(const Source& heir);
    // Puts a block into the memory of clears, of which the last counts.
    void remember(BoundedMap<ClearedKey>& cleared, const Node& node, u64 number) const;

private:
    bool take_away(Leaving& from, u32 id);
    void drop_from(Leaving& of, u32 id, Node& node);

    NodeTables& nodes_;
    const Limits& limits_;
    std::deque<Leaving> leaving_;
    u32 next_ = 0;  // where `work_off` goes on
    std::vector<u32> scratch_slots_, scratch_rows_;
};

}  // namespace kvroute
