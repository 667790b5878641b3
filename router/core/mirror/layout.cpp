#include "mirror/layout.hpp"

#include <limits>

#include "index/nodes.hpp"

namespace kvroute::mirror {

namespace {

// Returns a group's tail, without the block that EAGLE needs behind a boundary.
Tail tail_of(const Group& group) {
    const Tokens size = static_cast<Tokens>(group.block_size);
    if (group.kind == GroupKind::mamba) return {0, size};
    return {static_cast<Tokens>(group.window_blocks(0)) * size, size};
}

// Returns how many blocks a group has ever stored on the GPU.
u64 stored_blocks(const Source& source, u32 group) {
    const u64 removed = group < source.removed.size() ? source.removed[group] : 0;
    return removed + source.count(plane_of(group, 0));
}

// True where the engine keeps windows wherever a hit may end, as its blocks so far show: as many of
// each window as of full attention.
bool is_dense(const Source& source) {
    double most_full = -1.0, least_window = std::numeric_limits<double>::infinity();
    bool has_windows = false;
    for (u32 index = 0; index < source.layout.groups.size(); ++index) {
        const Group& group = source.layout.groups[index];
        const double tokens = static_cast<double>(stored_blocks(source, index) * group.block_size);
        if (group.kind == GroupKind::full) {
            most_full = std::max(most_full, tokens);
        } else if (group.kind == GroupKind::window) {
            // Where hits end seldom, no more than a tail before each such place is kept.
            const double share = static_cast<double>(tail_of(group).tokens) /
                                 static_cast<double>(source.layout.scheduler_block_size);
            least_window = std::min(least_window, tokens / std::min(1.0, share));
            has_windows = true;
        }
    }
    return has_windows && most_full > 0 && least_window >= kDense * most_full;
}

void add_group(Layout& layout, const Group& group) {
    const bool is_full = group.kind == GroupKind::full, is_state = group.kind == GroupKind::mamba;
    if (!layout.groups++) layout.windows_first = !is_full;
    layout.has_gaps |= !is_full;
    layout.states += is_state;
    const double blocks = static_cast<double>(kStep) / static_cast<double>(group.block_size);
    if (is_full) {
        layout.full_blocks_per_key += blocks;
    } else if (!is_state) {
        layout.window_blocks_per_key += blocks;
    }
    if (is_state || group.kind == GroupKind::window) layout.tails.push_back(tail_of(group));
}

}  // namespace

void Layout::add_boundaries(Tokens prompt_tokens, std::vector<Tokens>& boundaries) const {
    const Tokens last = whole(prompt_tokens - 1, hit_tokens);
    if (!eagle) {
        boundaries.push_back(last);
        return;
    }
    // Its last block is computed again, so the one before is kept as well.
    for (Tokens end : {last, whole(prompt_tokens, hit_tokens)}) {
        boundaries.push_back(std::max<Tokens>(end - hit_tokens, 0));
    }
}

Tokens Layout::longest_hit(std::span<const Tokens> boundaries, Tokens most_tokens) const {
    if (!is_sparse) return most_tokens;
    Tokens found = 0, first = 0, last = 0;
    for (Tokens boundary : boundaries) {
        if (boundary - least_tail > last) first = boundary;
        last = boundary;
        if (first <= most_tokens) found = std::min(last, most_tokens);
    }
    return found;
}

void sort_boundaries(std::vector<Tokens>& boundaries) {
    std::sort(boundaries.begin(), boundaries.end());
    boundaries.erase(std::unique(boundaries.begin(), boundaries.end()), boundaries.end());
}

Layout layout_of(const Source& source) {
    Layout layout;
    if (!source.has_layout) return layout;
    layout.is_known = true;
    layout.looked_up_by = {source.layout.hash_block_size, source.read_lookahead};
    layout.hit_tokens = static_cast<Tokens>(source.layout.scheduler_block_size);
    layout.eagle = source.layout.has_drafter();
    for (const Group& group : source.layout.groups) {
        if (group.kind != GroupKind::not_cached) add_group(layout, group);
    }
    for (const Tail& tail : layout.tails) {
        const bool is_first = &tail == layout.tails.data();
        layout.least_tail = is_first ? tail.tokens : std::min(layout.least_tail, tail.tokens);
        layout.longest_tail = std::max(layout.longest_tail, tail.tokens);
    }
    layout.is_sparse = layout.states > 0 || (!layout.tails.empty() && !is_dense(source));
    return layout;
}

}  // namespace kvroute::mirror
