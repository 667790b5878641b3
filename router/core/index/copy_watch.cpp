#include "index/copy_watch.hpp"

namespace kvroute {

namespace {

constexpr u64 kRemembered = 8192;  // blocks
constexpr u64 kRunsForLast = 8;    // that prove it
constexpr u64 kMinRun = 2;         // blocks; a single one may be chance

}  // namespace

void CopyWatch::settle() {
    counting = Counting::every_copy;
    leftovers_.clear();
}

void CopyWatch::removed(u32 group, u64 hash, u64 copies) {
    if (leftovers_.find(hash, group)) {
        settle();
    } else if (copies > 1 && !is_settled()) {
        leftovers_.put(hash, {}, kRemembered, group);
    }
}

bool CopyWatch::stored(u32 group, std::span<const u64> hashes, std::optional<u64> parent,
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

}  // namespace kvroute
