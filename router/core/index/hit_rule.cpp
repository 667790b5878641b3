#include "index/hit_rule.hpp"

#include <bitset>
#include <numeric>

namespace kvroute::rule {

namespace {

u64 aligned(u64 length, u64 step) { return length - length % step; }
u64 rounded_up(u64 tokens, u64 unit) { return tokens / unit + (tokens % unit != 0); }

// Returns the tokens that the draft model must see again.
u64 eagle_tokens(const Layout& layout, const Group& group) {
    if (!group.eagle) return 0;
    return group.kind == GroupKind::full
               ? std::min(group.block_size, layout.scheduler_block_size)
               : group.block_size;
}

u64 longest_run(const Layout& layout, u32 index, const Presence& present, u64 length,
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

u64 longest_window(const Layout& layout, u32 index, const Presence& present, u64 length,
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

u64 longest_chunk(const Layout& layout, u32 index, const Presence& present, u64 limit) {
    const Group& group = layout.groups[index];
    const u64 size = group.block_size;
    const u64 first = limit / *group.chunk * *group.chunk / size * size;
    const u64 missing = present.first_missing(index, first + size, limit, size);
    return aligned(missing ? missing - size : aligned(limit, size), layout.scheduler_block_size);
}

u64 longest_chunk_with_extra(const Layout& layout, u32 index, const Presence& present,
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

}  // namespace

u64 longest_accepted(const Layout& layout, u32 index, const Presence& present, u64 limit, u64 reach,
                     bool without_extra) {
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

// Returns the longest prefix that all of these groups accept, where one may have to yield to another.
static u64 agreed(const Layout& layout, const std::vector<u32>& groups, const Presence& present,
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

HitAndRun hit_and_run(const Layout& layout, const Presence& present, u64 limit, u64 tokens) {
    const u64 reach = layout.has_several && layout.eagle_sees_last_token ? tokens : limit;
    u64 run = limit;
    for (u32 index : layout.full) run = longest_accepted(layout, index, present, run, reach);
    if (layout.others.empty()) return {run, run};
    const u64 hit = agreed(layout, layout.others, present, run, reach);
    return {hit, layout.full.empty() ? hit : run};
}

u64 extended_hit(const Layout& layout, const Presence& below, u64 gpu_hit, u64 tokens,
                 const std::vector<u64>& units, bool as_vllm) {
    return UnitSearch(layout, below, gpu_hit, tokens, units, as_vllm).longest();
}

}  // namespace kvroute::rule
