#include "index/match.hpp"

#include "index/hit_rule.hpp"

namespace kvroute {

namespace {

const Computed* of_slot(const std::vector<Computed>& computed, u32 slot) {
    for (const Computed& each : computed) {
        if (each.slot == slot) return &each;
    }
    return nullptr;
}

std::vector<u64> accepted_by_groups(const Source& of, const Found& found, u64 length) {
    std::vector<u64> accepted;
    Presence present{of.layout.hash_block_size, {}};
    for (u32 group = 0; group < of.layout.groups.size(); ++group) {
        present.groups.push_back(found.at(plane_of(group, 0), kUsual));
    }
    for (u32 group = 0; group < of.layout.groups.size(); ++group) {
        accepted.push_back(rule::longest_accepted(of.layout, group, present, length - 1, length));
    }
    return accepted;
}

}  // namespace

void Matcher::match(Prompt& prompt, const std::vector<Computed>& computed, Hits& hits) {
    hits.by_slot.assign(index_.sources().size(), Hit());
    hits.shares.clear();
    const u64 length = prompt.length();
    if (length < 2) return;
    if (version_ != index_.version()) find_lanes();
    for (Lane& lane : lanes_) {
        const std::span<const u64> keys = prompt.keys(index_.space(), lane.step());
        lane.match(index_, keys, length, collected_, hits.by_slot);
        for (u32 slot : lane.turned()) {
            if (of_slot(computed, slot) != nullptr) continue;
            Source& of = index_.source(slot);
            hits.set(slot, hit_of(of, length, Lane::Turned(lane, collected_, of)));
        }
    }
    for (u32 slot : alone_) {
        if (of_slot(computed, slot) == nullptr) hits.set(slot, match_alone(slot, prompt, nullptr));
    }
    for (const Computed& each : computed) {
        if (index_.has_source(each.slot) && index_.source(each.slot).has_layout) {
            hits.set(each.slot, match_alone(each.slot, prompt, &each));
        }
    }
}

TieredHit Matcher::match_source(u32 slot, Prompt& prompt, const Computed* computed) {
    if (prompt.length() < 2 || !index_.source(slot).has_layout) return {};
    return match_alone(slot, prompt, computed);
}

u64 Matcher::match_tier(u32 slot, Prompt& prompt, const std::string& name,
                        const Computed* computed) {
    const u64 length = prompt.length();
    Source& of = index_.source(slot);
    if (length < 2 || !of.has_layout) return 0;
    combined_.clear();
    return of.layout.worth(
        below_.loadable(of, name, length, LoneLookUp(index_, of, prompt, computed)));
}

std::vector<u64> Matcher::group_hits(Prompt& prompt, u32 slot, const Computed* computed) {
    const u64 length = prompt.length();
    const Source& of = index_.source(slot);
    if (length < 2 || !of.has_layout) return {};
    return accepted_by_groups(of, LoneLookUp(index_, of, prompt, computed), length);
}

FoundByHashes Matcher::match_hashes(u32 slot, const std::vector<u64>& hashes) {
    Source& of = index_.source(slot);
    FoundByHashes found;
    if (hashes.empty() || !of.has_layout) return found;
    const LoneLookUp looked_up(index_, of, hashes);
    const u64 length = hashes.size() * of.layout.hash_block_size + of.read_lookahead + 1;
    found.hit = hit_of(of, length, looked_up);
    found.by_group = accepted_by_groups(of, looked_up, length);
    found.held = looked_up.held();
    found.is_whole = !index_.has_own_blocks_below(of);
    return found;
}

const std::string& Matcher::name_of_share(u32 slot, u32 share) const {
    const Source& of = index_.source(slot);
    if (share >= kFirstStore) return index_.store_of(of, share - kFirstStore).name;
    return of.tiers[share].name;
}

const std::vector<Prompt::Step>& Matcher::steps() {
    if (version_ != index_.version()) find_lanes();
    return steps_;
}

void Matcher::find_lanes() {
    version_ = index_.version();
    lanes_.clear();
    alone_.clear();
    steps_.clear();
    for (const auto& of : index_.sources()) {
        if (!of || !of->has_layout) continue;
        const Prompt::Step step{of->layout.hash_block_size, of->read_lookahead};
        if (std::find(steps_.begin(), steps_.end(), step) == steps_.end()) steps_.push_back(step);
        const bool is_unusual = of->tier_found || !of->stores.empty();
        if (is_unusual || !lane_of(step).join(*of)) alone_.push_back(of->slot);
    }
    for (Lane& lane : lanes_) lane.settle(index_);
}

Lane& Matcher::lane_of(Prompt::Step step) {
    for (Lane& lane : lanes_) {
        if (lane.step() == step) return lane;
    }
    return lanes_.emplace_back(step, static_cast<u32>(index_.sources().size() + 63) / 64);
}

TieredHit Matcher::match_alone(u32 slot, Prompt& prompt, const Computed* computed) {
    Source& of = index_.source(slot);
    const bool ends_early = computed == nullptr && may_end_early(of);
    const LoneLookUp found(index_, of, prompt, computed, ends_early);
    return hit_of(of, prompt.length(), found);
}

TieredHit Matcher::hit_of(Source& of, u64 length, const Found& found) {
    const Layout& layout = of.layout;
    present_.step = layout.hash_block_size;
    present_.groups.assign(layout.groups.size(), Bitmap());
    combined_.clear();
    for (const auto& members : layout.together) {
        Bitmap& all = present_.groups[members[0]];
        all = found.at(plane_of(members[0], 0), kUsual);
        for (std::size_t i = 1; i < members.size(); ++i) {
            const Bitmap other = found.at(plane_of(members[i], 0), kUsual);
            all = combined_.both(all, other, found.blocks());
        }
    }
    const auto [gpu, run] = rule::hit_and_run(layout, present_, length - 1, length);
    TieredHit hit{{static_cast<u32>(gpu), static_cast<u32>(gpu), static_cast<u32>(run)}, {}};
    if (index_.has_anything_below(of)) below_.extend(of, length, found, hit);
    if (!layout.worth(hit.hit.total)) return {{0, 0, static_cast<u32>(layout.worth(run))}, {}};
    return hit;
}

}  // namespace kvroute
