// The groups of a cache, and the hit rule over them: a port of `kvevents/hit_rule.py`, where the
// rule is explained and drawn. Here a presence is a bitmap over the prompt's hash blocks, so that
// runs are found 64 blocks at a time.
#pragma once

#include <algorithm>
#include <bit>
#include <bitset>
#include <numeric>
#include <optional>
#include <vector>

#include "keys.hpp"

namespace kvroute {

enum class GroupKind : u8 { full, window, chunked, mamba, not_cached };

struct Group {
    GroupKind kind = GroupKind::full;
    u64 block_size = 1;
    std::optional<u64> window;
    std::optional<u64> chunk;
    bool eagle = false;  // holds layers of a drafter: the last block of a hit is computed again

    bool operator==(const Group&) const = default;

    u64 window_blocks(u64 extra) const {
        return std::max<u64>(1, (*window - 1 + block_size - 1) / block_size + extra);
    }
};

struct Layout {
    std::vector<Group> groups;
    u64 hash_block_size = 1;
    u64 scheduler_block_size = 1;
    bool eagle_sees_last_token = true;
    u64 prefix_replay_tokens = 0;  // a hit that is no longer is worth nothing
    std::vector<std::vector<u32>> together;  // equal groups: they are looked up as one
    std::vector<u32> full;                   // the first of each of those, of full attention
    std::vector<u32> others;                 // and of any other kind
    bool has_several = false;                // more than one group caches

    bool operator==(const Layout&) const = default;

    bool has_drafter() const {
        return std::any_of(groups.begin(), groups.end(), [](const Group& each) { return each.eagle; });
    }
    // What is left of a hit.
    u64 worth(u64 hit) const { return hit > prefix_replay_tokens ? hit : 0; }

    void find_equal_groups() {
        u32 caching = 0;
        for (u32 index = 0; index < groups.size(); ++index) {
            if (groups[index].kind == GroupKind::not_cached) continue;
            ++caching;
            auto same = std::find_if(together.begin(), together.end(), [&](const auto& members) {
                return groups[members[0]] == groups[index];
            });
            if (same != together.end()) {
                same->push_back(index);
                continue;
            }
            together.push_back({index});
            (groups[index].kind == GroupKind::full ? full : others).push_back(index);
        }
        has_several = caching > 1;
    }
};

// Bits over the hash blocks of a prompt: bit i is in word i / 64, `stride` words apart.
struct Bitmap {
    const u64* words = nullptr;  // null: nothing is present
    std::size_t stride = 1;
    u64 count = 0;  // blocks; beyond them nothing is present

    u64 word(u64 number) const { return words[number * stride]; }
    bool test(u64 index) const {
        return words != nullptr && index < count && word(index / 64) >> (index % 64) & 1;
    }
    // The first block of [from, to) that is missing; `to` if there is none.
    u64 first_missing(u64 from, u64 to) const {
        if (words == nullptr) return from;
        const u64 end = std::min(to, count);
        while (from < end) {
            const u64 missing = ~word(from / 64) >> (from % 64);
            if (missing) return std::min(from + std::countr_zero(missing), end);
            from = (from / 64 + 1) * 64;
        }
        return std::max(end, std::min(from, to));
    }
    // The last block of [down_to, from] with the given presence, + 1; 0 if there is none.
    u64 last(bool present, u64 from, u64 down_to) const {
        for (u64 end = from + 1; end > down_to;) {
            const u64 number = (end - 1) / 64;
            u64 found = words != nullptr && number * 64 < count ? word(number) : 0;
            if (!present) found = ~found;
            found &= ~u64{0} >> (63 - (end - 1) % 64);
            if (found) {
                const u64 at = number * 64 + 64 - std::countl_zero(found);
                return at > down_to ? at : 0;
            }
            end = number * 64;
        }
        return 0;
    }
};

// "Is the block of this group that ends at token `end` present?"
struct Presence {
    u64 step = 1;  // tokens per bit
    std::vector<Bitmap> groups;

    bool test(u32 group, u64 end) const {
        return end >= step && groups[group].test(end / step - 1);
    }

    // The first end of from, from + size, ... up to `bound` that is missing; 0 if none is.
    u64 first_missing(u32 group, u64 from, u64 bound, u64 size) const {
        if (from > bound) return 0;
        if (size == step) {
            const u64 blocks = bound / step;
            const u64 index = groups[group].first_missing(from / step - 1, blocks);
            return index < blocks ? (index + 1) * step : 0;
        }
        for (u64 end = from; end <= bound; end += size) {
            if (!test(group, end)) return end;
        }
        return 0;
    }

    // The last end of from, from - size, ... above `floor` with the given presence; 0 if none.
    u64 last(bool present, u32 group, u64 from, u64 floor, u64 size) const {
        if (from <= floor) return 0;
        if (size == step && from % step == 0) {
            return groups[group].last(present, from / step - 1, floor / step) * step;
        }
        for (u64 end = from; end > floor; end -= size) {
            if (test(group, end) == present) return end;
            if (end < size) break;
        }
        return 0;
    }
};

namespace rule {

inline u64 aligned(u64 length, u64 step) { return length - length % step; }
inline u64 minus(u64 left, u64 right) { return left > right ? left - right : 0; }
inline u64 rounded_up(u64 tokens, u64 unit) { return tokens / unit + (tokens % unit != 0); }

// Tokens that the draft model must see again.
inline u64 eagle_tokens(const Layout& layout, const Group& group) {
    if (!group.eagle) return 0;
    return group.kind == GroupKind::full
               ? std::min(group.block_size, layout.scheduler_block_size)
               : group.block_size;
}

inline u64 longest_run(const Layout& layout, u32 index, const Presence& present, u64 length,
                       u64 extra) {
    const u64 size = layout.groups[index].block_size, step = layout.scheduler_block_size;
    const u64 bound = length + extra;
    const u64 missing = present.first_missing(index, size, bound, size);
    u64 run = missing ? missing - size : aligned(bound, size);
    if (step < size) {
        for (u64 end = std::min(bound, run + size - step); end > run; end -= step) {
            if (present.test(index, end)) {
                run = end;
                break;
            }
            if (end < step) break;
        }
    }
    return aligned(minus(run, extra), step);
}

inline u64 longest_window(const Layout& layout, u32 index, const Presence& present, u64 length,
                          u64 extra) {
    const Group& group = layout.groups[index];
    const u64 size = group.block_size, step = std::lcm(layout.scheduler_block_size, size);
    const u64 needed = group.window_blocks(extra ? 1 : 0);
    length = aligned(length, step);
    u64 run = 0;
    while (length > 0) {
        const u64 end = length + extra;
        const u64 looked_at = std::min(needed, end / size);
        const u64 missing = present.last(false, index, end, end - looked_at * size, size);
        if (!missing) {
            run = looked_at;
            break;
        }
        // Every length from the missing block on would need that block too.
        length = aligned(minus(missing, size + extra), step);
    }
    if (length && extra && run < needed && size != step) return length - step;
    return length;
}

inline u64 longest_chunk(const Layout& layout, u32 index, const Presence& present, u64 limit) {
    const Group& group = layout.groups[index];
    const u64 size = group.block_size;
    const u64 first = limit / *group.chunk * *group.chunk / size * size;
    const u64 missing = present.first_missing(index, first + size, limit, size);
    return aligned(missing ? missing - size : aligned(limit, size), layout.scheduler_block_size);
}

inline u64 longest_chunk_with_extra(const Layout& layout, u32 index, const Presence& present,
                                    u64 length, u64 extra) {
    const Group& group = layout.groups[index];
    const u64 size = group.block_size, step = std::lcm(layout.scheduler_block_size, size);
    length = aligned(length, step);
    while (length > 0) {
        const u64 end = length + extra;
        const u64 first = end / *group.chunk * *group.chunk / size * size;
        const u64 missing = present.last(false, index, end, first, size);
        if (!missing) return length;
        length = aligned(minus(missing, size + extra), step);
    }
    return 0;
}

// The longest prefix that one group accepts, of at most `limit` tokens.
inline u64 longest_accepted(const Layout& layout, u32 index, const Presence& present, u64 limit,
                            u64 reach, bool without_extra = false) {
    const Group& group = layout.groups[index];
    if (group.kind == GroupKind::not_cached) return limit;
    if (group.kind == GroupKind::mamba) {
        const u64 step = layout.scheduler_block_size;
        return present.last(true, index, aligned(limit, step), 0, step);
    }
    const u64 extra = without_extra ? 0 : eagle_tokens(layout, group);
    const u64 length = std::min(limit, minus(reach, extra));
    if (length == 0) return 0;
    if (group.kind == GroupKind::full) {
        return longest_run(layout, index, present,
                           aligned(length, layout.scheduler_block_size), extra);
    }
    if (group.kind == GroupKind::window) {
        return longest_window(layout, index, present, length, extra);
    }
    if (!extra) return longest_chunk(layout, index, present, length);
    return longest_chunk_with_extra(layout, index, present, length, extra);
}

// The longest prefix that all of these groups accept, where one may have to give way to another.
inline u64 agreed(const Layout& layout, const std::vector<u32>& groups, const Presence& present,
                  u64 hit, u64 reach) {
    std::bitset<256> gave_extra;
    while (hit) {
        u64 shorter = hit;
        for (std::size_t i = 0; i < groups.size(); ++i) {
            const u64 before = shorter;
            const bool gives = layout.groups[groups[i]].eagle && !gave_extra[i];
            shorter = longest_accepted(layout, groups[i], present, before, reach, !gives);
            if (gives) {
                gave_extra[i] = true;
            } else if (shorter < before) {
                gave_extra.reset();
            }
        }
        if (shorter == hit || groups.size() == 1) return shorter;
        hit = shorter;
    }
    return 0;
}

struct HitAndRun {
    u64 hit;  // the longest prefix that every group accepts
    u64 run;  // the longest that full attention accepts; without such groups, the hit
};

// Of equal groups the presence of the first stands for all of them.
inline HitAndRun hit_and_run(const Layout& layout, const Presence& present, u64 limit,
                             u64 tokens) {
    const u64 reach = layout.has_several && layout.eagle_sees_last_token ? tokens : limit;
    u64 run = limit;
    for (u32 index : layout.full) run = longest_accepted(layout, index, present, run, reach);
    if (layout.others.empty()) return {run, run};
    const u64 hit = agreed(layout, layout.others, present, run, reach);
    return {hit, layout.full.empty() ? hit : run};
}

// The hit with what a lower tier can load; see `longest_extended_hit` in Python.
class UnitSearch {
public:
    UnitSearch(const Layout& layout, const Presence& below, u64 gpu_hit, u64 tokens,
               const std::vector<u64>& units, bool as_vllm)
        : layout_(layout), below_(below), gpu_hit_(gpu_hit), tokens_(tokens), units_(units),
          as_vllm_(as_vllm) {
        for (u32 index = 0; index < layout.groups.size(); ++index) {
            const GroupKind kind = layout.groups[index].kind;
            if (kind == GroupKind::not_cached) continue;
            (kind == GroupKind::full ? full_ : others_).push_back(index);
        }
        std::stable_sort(others_.begin(), others_.end(), [&](u32 left, u32 right) {
            return units_of_window(left) > units_of_window(right);
        });
    }

    u64 longest() const { return std::max(gpu_hit_, found()); }

private:
    u64 found() const {
        u64 hit = limit(), before = 0;
        std::vector<u32> groups = full_;
        groups.insert(groups.end(), others_.begin(), others_.end());
        std::vector<bool> gave_extra(layout_.groups.size());
        while (!groups.empty()) {
            std::vector<u32> agreeing;
            agreeing.swap(groups);
            bool has_window = false;
            for (u32 index : agreeing) {
                hit = cut(index, hit, gave_extra[index]);
                if (hit < gpu_hit_ + units_[index]) return 0;
                const bool eagle = is_eagle(index);
                if (eagle) gave_extra[index] = true;
                if (hit < before) {
                    if (!eagle) std::fill(gave_extra.begin(), gave_extra.end(), false);
                    if (has_window) groups = others_;
                }
                has_window |= layout_.groups[index].kind != GroupKind::full;
                before = hit;
            }
        }
        return before;
    }

    u64 limit() const {
        if (others_.empty()) return tokens_;
        u64 states = 1;
        for (u32 index = 0; index < layout_.groups.size(); ++index) {
            if (layout_.groups[index].kind != GroupKind::mamba) continue;
            const u64 common = std::gcd(states, units_[index]);
            if (units_[index] / common > tokens_ / states + 1) return 0;
            states = states / common * units_[index];
        }
        return aligned(tokens_ - 1, states);
    }

    u64 cut(u32 index, u64 hit, bool gave_extra) const {
        const u64 unit = units_[index], whole = tokens_ / unit;
        hit = std::min(hit, whole * unit);
        if (layout_.groups[index].kind == GroupKind::mamba) hit = aligned(hit, unit);
        if (hit < gpu_hit_ + unit) return 0;
        const u64 extra = is_eagle(index) && !gave_extra;
        const u64 start = gpu_hit_ / unit;
        u64 stop = std::min(rounded_up(hit, unit) + extra, whole);
        if (layout_.groups[index].kind == GroupKind::full) {
            const u64 missing =
                start < stop ? below_.first_missing(index, (start + 1) * unit, stop * unit, unit)
                             : 0;
            if (missing) stop = missing / unit - 1;
        } else {
            stop = end_of_window(index, start, stop, hit, extra);
        }
        return stop > start ? std::min(hit, (stop - extra) * unit) : 0;
    }

    bool is_eagle(u32 index) const {
        return layout_.groups[index].eagle && layout_.groups[index].kind != GroupKind::mamba;
    }

    u64 end_of_window(u32 index, u64 start, u64 stop, u64 hit, u64 extra) const {
        const u64 unit = units_[index];
        while (stop > start + extra) {
            const u64 last = stop - extra;
            const u64 needed = needed_units(index, std::min(hit, last * unit));
            const u64 first = std::max(start, minus(last, needed));
            const u64 missing = below_.last(false, index, stop * unit, first * unit, unit);
            if (!missing) return stop;
            stop = missing / unit - 1;
        }
        return start;
    }

    u64 needed_units(u32 index, u64 end) const {
        const Group& group = layout_.groups[index];
        const u64 unit = units_[index], padding = (unit - end % unit) % unit;
        u64 tokens = 1;
        if (group.kind == GroupKind::window) {
            tokens = std::max<u64>(1, *group.window - 1 + padding);
        } else if (group.kind == GroupKind::chunked) {
            const u64 in_chunk = end % *group.chunk;
            tokens = in_chunk ? in_chunk + padding : 0;
        }
        const u64 needed = rounded_up(tokens, unit);
        return as_vllm_ ? std::max(needed, units_of_window(index)) : needed;
    }

    u64 units_of_window(u32 index) const {
        const Group& group = layout_.groups[index];
        u64 tokens = 1;
        if (group.kind == GroupKind::window) tokens = *group.window;
        if (group.kind == GroupKind::chunked) tokens = *group.chunk;
        return rounded_up(tokens, units_[index]);
    }

    const Layout& layout_;
    const Presence& below_;
    u64 gpu_hit_;
    u64 tokens_;
    const std::vector<u64>& units_;
    bool as_vllm_;
    std::vector<u32> full_;
    std::vector<u32> others_;
};

}  // namespace rule
}  // namespace kvroute
