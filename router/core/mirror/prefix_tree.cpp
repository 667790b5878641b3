#include "mirror/prefix_tree.hpp"

namespace kvroute::mirror {

void PrefixTree::add(const Keys& keys, CacheId holder) {
    const std::size_t count = keys.span.size();
    u32 above = kRoot;
    for (std::size_t at = 0; at < count;) {
        u32 number = by_first_.find(pair_key(keys.span[at], above));
        if (number == kNone) {
            number = new_stretch({keys, at, count, above, {}});
            at = count;
        } else {
            const Stretch& stretch = pool_[number];
            const std::size_t end = stretch.end, most = std::min(end, count);
            at = equal_keys(keys.span, stretch.keys.span, at + 1, most);
            if (at < end) number = split(number, at);
        }
        pool_[number].holders.add(holder);
        above = number;
    }
}

void PrefixTree::remove(std::span<const u64> keys, CacheId holder) {
    u32 above = kRoot;
    for (std::size_t at = 0; at < keys.size();) {
        const u32 number = by_first_.find(pair_key(keys[at], above));
        if (number == kNone) return;  // keys from elsewhere that contradict one another
        Stretch& stretch = pool_[number];
        at = stretch.end;
        above = number;
        stretch.holders.remove(holder);
        if (stretch.holders.is_empty()) remove_stretch(number);
    }
}

// Lets a stretch begin later: the keys that it loses become a stretch above it, which is returned.
// Stretches below stay where they are.
u32 PrefixTree::split(u32 number, std::size_t at) {
    Stretch upper = pool_[number];
    upper.end = at;
    const u32 above = new_stretch(std::move(upper));
    Stretch& lower = pool_[number];
    lower.start = at;
    lower.above = above;
    by_first_.put(first_key(lower), number);
    return above;
}

u32 PrefixTree::new_stretch(Stretch stretch) {
    u32 number = static_cast<u32>(pool_.size());
    const u64 key = first_key(stretch);
    if (free_.empty()) {
        pool_.push_back(std::move(stretch));
    } else {
        number = free_.back();
        free_.pop_back();
        pool_[number] = std::move(stretch);
    }
    by_first_.put(key, number);
    return number;
}

void PrefixTree::remove_stretch(u32 number) {
    by_first_.erase(first_key(pool_[number]));
    pool_[number] = {};
    free_.push_back(number);
}

}  // namespace kvroute::mirror
