#include "index/found.hpp"

namespace kvroute {

template <class Combine>
Bitmap CombinedBitmaps::combined(Bitmap left, Bitmap right, u64 blocks, Combine&& combine) {
    const u64 words = (blocks + 63) / 64;
    u64* out = made_.emplace_back(new u64[words]).get();
    for (u64 i = 0; i < words; ++i) out[i] = combine(left.word(i), right.word(i));
    return {out, 1, blocks};
}

Bitmap CombinedBitmaps::both(Bitmap left, Bitmap right, u64 blocks) {
    if (left.words == nullptr) return left;
    if (right.words == nullptr) return right;
    return combined(left, right, blocks, [](u64 one, u64 other) { return one & other; });
}

Bitmap CombinedBitmaps::either(Bitmap left, Bitmap right, u64 blocks) {
    if (left.words == nullptr) return right;
    if (right.words == nullptr) return left;
    return combined(left, right, blocks, [](u64 one, u64 other) { return one | other; });
}

bool may_end_early(const Source& of) {
    const Layout& layout = of.layout;
    const bool drafts = layout.has_drafter();
    bool may_end = !layout.full.empty() && !of.has_lower_tiers() && of.stores.empty();
    for (const Group& group : layout.groups) {
        if (group.kind == GroupKind::not_cached) continue;
        may_end &= layout.scheduler_block_size % group.block_size == 0;
        may_end &= !drafts || group.block_size == layout.hash_block_size;
    }
    return may_end;
}

}  // namespace kvroute
