// Learns how a source reports the removal of several copies of one block: each, or the last one only,
// by the rules of `tests/oracle/index/copy_counting.py`.
#pragma once

#include <optional>

#include "index/bounded_map.hpp"

namespace kvroute {

class CopyWatch {
public:
    enum class Counting : u8 { unknown, every_copy, last_copy };

    Counting counting = Counting::unknown;

    explicit CopyWatch(u64 secret) : leftovers_(secret) {}

    bool is_settled() const { return counting == Counting::every_copy; }
    bool has_leftovers() const { return leftovers_.size() > 0; }
    std::size_t memory() const { return leftovers_.memory(); }

    void settle();
    void forget() { leftovers_.clear(); }

    // `copies`: as they were counted before.
    void removed(u32 group, u64 hash, u64 copies);
    // True where this proves that only last removals are announced.
    bool stored(u32 group, std::span<const u64> hashes, std::optional<u64> parent,
                bool is_full_attention);

    // Calls `visit(group, hash)` for every block whose last removal seemed to leave copies.
    template <class Visit>
    void for_each_leftover(Visit&& visit) const {
        leftovers_.for_each([&](const auto& entry) { visit(entry.group, entry.hash); });
    }

private:
    struct Nothing {};

    BoundedMap<Nothing> leftovers_;  // empty once every copy is known to count
    u64 runs_ = 0;                   // that were stored again, though copies seemed to be left
};

}  // namespace kvroute
