// How much of a prompt every source would reuse, in one pass over its keys.
//
// For 64 hash blocks at a time the rows of their nodes are collected as they are, one word of 64
// sources a block, and then turned over, into one word of 64 blocks a source. What a source holds of
// the prompt in one plane is then a bitmap, on which the hit rule finds runs 64 blocks at a time.
// The pass ends where no source is left whose groups of full attention hold everything so far.
//
// What is unusual about a source - a known hash function, hashes of its own in a lower tier, very
// many planes - is looked up for that source alone, into bitmaps of the same form.
#pragma once

#include "index.hpp"
#include "prompt.hpp"

namespace kvroute {

struct Hit {
    u64 gpu = 0;
    u64 total = 0;
    std::vector<std::pair<u32, u64>> by_tier;  // what each lower tier adds, the fastest first

    bool operator==(const Hit&) const = default;
};

// A source's hashes of a prompt, as its engine computes them: one list for each way in which it may
// spell extra keys.
struct Computed {
    u32 slot = 0;
    bool is_alone = false;  // places learned from events do not count
    std::vector<std::vector<u64>> hashes;
};

// Turns 64 words of 64 bits over: bit j of word i becomes bit i of word j.
inline void transpose(u64* words) {
    u64 mask = 0x00000000FFFFFFFFu;
    for (u32 width = 32; width; width >>= 1, mask ^= mask << width) {
        for (u32 i = 0; i < 64; i = ((i | width) + 1) & ~width) {
            const u64 swapped = ((words[i] >> width) ^ words[i | width]) & mask;
            words[i] ^= swapped << width;
            words[i | width] ^= swapped;
        }
    }
}

class Matcher {
public:
    explicit Matcher(Index& index) : index_(index) {}

    // The hit of every source, by slot.
    void match(Prompt& prompt, const std::vector<Computed>& computed, std::vector<Hit>& hits) {
        hits.assign(index_.sources().size(), Hit());
        if (prompt.tokens().size() < 2) return;
        if (version_ != index_.version()) find_lanes();
        for (const Lane& lane : lanes_) match_lane(lane, prompt, computed, hits);
        for (u32 slot : alone_) {
            if (of_slot(computed, slot) == nullptr) hits[slot] = match_alone(slot, prompt, nullptr);
        }
        for (const Computed& each : computed) {
            if (index_.has_source(each.slot) && index_.source(each.slot).has_layout) {
                hits[each.slot] = match_alone(each.slot, prompt, &each);
            }
        }
    }

    // The hit of one source. `computed`: its hashes of the prompt, if they are known.
    Hit match_source(u32 slot, Prompt& prompt, const Computed* computed) {
        if (prompt.tokens().size() < 2 || !index_.source(slot).has_layout) return {};
        return match_alone(slot, prompt, computed);
    }

    // The longest prefix that each group of a source would accept, by group index.
    std::vector<u64> group_hits(Prompt& prompt, u32 slot, const Computed* computed) {
        const u64 length = prompt.tokens().size();
        Source& of = index_.source(slot);
        std::vector<u64> accepted;
        if (length < 2 || !of.has_layout) return accepted;
        Alone alone;
        look_up(of, prompt, computed, alone);
        Presence present{of.layout.hash_block_size, {}};
        for (u32 group = 0; group < of.layout.groups.size(); ++group) {
            present.groups.push_back(alone.bitmap(plane_of(group, 0), false));
        }
        for (u32 group = 0; group < of.layout.groups.size(); ++group) {
            accepted.push_back(
                rule::longest_accepted(of.layout, group, present, length - 1, length));
        }
        return accepted;
    }

    std::vector<Prompt::Step> steps() {
        if (version_ != index_.version()) find_lanes();
        std::vector<Prompt::Step> found;
        for (const Lane& lane : lanes_) found.push_back(lane.step);
        for (u32 slot : alone_) found.push_back(step_of(index_.source(slot)));
        return found;
    }

private:
    friend class IndexAudit;  // of the tests

    static constexpr u32 kMostPlanes = 64;  // of a source that is matched together with others

    // Sources whose hashes end at the same tokens.
    struct Lane {
        Prompt::Step step;
        std::vector<u32> slots;
        u32 words = 0;
        std::vector<u32> dense;      // plane -> its number among those in use; kNone
        std::vector<u32> pairs;      // number * words + word -> place of its bits; kNone
        u32 pair_count = 0;
        bool may_end_early = true;   // all of its sources may
        struct Needed {              // what full attention needs to go on
            u32 word, pair;
            u64 stride;              // in hash blocks
            u64 sources;
        };
        std::vector<Needed> needed;
        std::vector<u64> all;        // by word: its sources

        u32 pair_of(u32 word, u32 plane) const {
            if (plane >= dense.size() || word >= words || dense[plane] == kNone) return kNone;
            return pairs[dense[plane] * words + word];
        }
    };

    // The bitmaps of one source that was looked up alone.
    struct Alone {
        u64 count = 0;
        std::unordered_map<u32, std::vector<u64>> found, tier_found;

        Bitmap bitmap(u32 plane, bool of_tier) const {
            const auto& planes = of_tier ? tier_found : found;
            auto known = planes.find(plane);
            if (known == planes.end()) return {};
            return {known->second.data(), 1, count};
        }
        void set(std::unordered_map<u32, std::vector<u64>>& planes, u32 plane, u64 index) {
            std::vector<u64>& words = planes[plane];
            if (words.empty()) words.resize((count + 63) / 64);
            words[index / 64] |= u64{1} << (index % 64);
        }
    };

    static Prompt::Step step_of(const Source& of) {
        return {of.layout.hash_block_size, of.lookahead};
    }

    static const Computed* of_slot(const std::vector<Computed>& computed, u32 slot) {
        for (const Computed& each : computed) {
            if (each.slot == slot) return &each;
        }
        return nullptr;
    }

    // --- lanes ---

    void find_lanes() {
        version_ = index_.version();
        lanes_.clear();
        alone_.clear();
        for (const auto& of : index_.sources()) {
            if (!of || !of->has_layout) continue;
            if (of->tier_found || planes_in_use(*of) > kMostPlanes) {
                alone_.push_back(of->slot);
            } else {
                lane_of(step_of(*of)).slots.push_back(of->slot);
            }
        }
        for (Lane& lane : lanes_) fill(lane);
    }

    Lane& lane_of(Prompt::Step step) {
        for (Lane& lane : lanes_) {
            if (lane.step == step) return lane;
        }
        lanes_.emplace_back();
        lanes_.back().step = step;
        return lanes_.back();
    }

    static u32 planes_in_use(const Source& of) {
        return static_cast<u32>(
            std::count_if(of.counts.begin(), of.counts.end(), [](u32 n) { return n > 0; }));
    }

    void fill(Lane& lane) {
        for (u32 slot : lane.slots) lane.words = std::max(lane.words, slot / 64 + 1);
        lane.all.assign(lane.words, 0);
        for (u32 slot : lane.slots) {
            const Source& of = index_.source(slot);
            lane.all[of.word] |= of.bit;
            for (u32 plane = 0; plane < of.counts.size(); ++plane) {
                if (of.counts[plane] && group_of_plane(plane) < of.layout.groups.size()) {
                    add_pair(lane, of.word, plane);
                }
            }
        }
        for (u32 slot : lane.slots) add_needed(lane, index_.source(slot));
    }

    static void add_pair(Lane& lane, u32 word, u32 plane) {
        if (plane >= lane.dense.size()) lane.dense.resize(plane + 1, kNone);
        if (lane.dense[plane] == kNone) {
            lane.dense[plane] = static_cast<u32>(lane.pairs.size()) / lane.words;
            lane.pairs.resize(lane.pairs.size() + lane.words, kNone);
        }
        u32& place = lane.pairs[lane.dense[plane] * lane.words + word];
        if (place == kNone) place = lane.pair_count++;
    }

    // A source may end early that has a group of full attention whose end nothing can pass: no lower
    // tier, no entries inside blocks, and an extra block of EAGLE that is the same in all groups.
    static bool may_end_early(const Source& of) {
        const Layout& layout = of.layout;
        bool may_end = !layout.full.empty() && !of.has_lower_tiers();
        for (const Group& group : layout.groups) {
            if (group.kind == GroupKind::not_cached) continue;
            may_end &= layout.scheduler_block_size % group.block_size == 0;
            may_end &= !layout.eagle || group.block_size == layout.hash_block_size;
        }
        return may_end;
    }

    void add_needed(Lane& lane, const Source& of) {
        const Layout& layout = of.layout;
        if (!may_end_early(of)) {
            lane.may_end_early = false;
            return;
        }
        for (u32 group : layout.full) {
            const u32 pair = lane.pair_of(of.word, plane_of(group, 0));
            const u64 stride = layout.groups[group].block_size / lane.step.tokens;
            add_needed(lane, of, pair, stride);
        }
    }

    static void add_needed(Lane& lane, const Source& of, u32 pair, u64 stride) {
        for (Lane::Needed& each : lane.needed) {
            if (each.word == of.word && each.pair == pair && each.stride == stride) {
                each.sources |= of.bit;
                return;
            }
        }
        lane.needed.push_back({of.word, pair, stride, of.bit});
    }

    // --- one lane ---

    void match_lane(const Lane& lane, Prompt& prompt, const std::vector<Computed>& computed,
                    std::vector<Hit>& hits) {
        const std::vector<u64>& keys = prompt.keys(index_.space(), lane.step);
        const u64 chunks = (keys.size() + 63) / 64;
        bits_.resize(std::size_t{lane.pair_count} * chunks * 64);
        alive_ = lane.all;
        u64 looked_at = 0;
        for (u64 chunk = 0; chunk < chunks; ++chunk) {
            const u64 first = chunk * 64, count = std::min<u64>(64, keys.size() - first);
            const u64 done = collect(lane, keys, first, count);
            for (u32 pair = 0; pair < lane.pair_count; ++pair) {
                u64* words = collected_.data() + std::size_t{pair} * 64;
                u64* turned = bits_.data() + (pair * chunks + chunk) * 64;
                std::memcpy(turned, words, 64 * sizeof(u64));
                transpose(turned);
            }
            looked_at = first + done;
            if (done < count) break;
        }
        for (u32 slot : lane.slots) {
            if (!computed.empty() && of_slot(computed, slot) != nullptr) continue;
            Source& of = index_.source(slot);
            const u32 bit = slot % 64;
            auto bitmap_of = [&](u32 plane, bool of_tier) -> Bitmap {
                const u32 pair = of_tier ? kNone : lane.pair_of(of.word, plane);
                if (pair == kNone || !of.count(plane)) return {};
                return {bits_.data() + pair * chunks * 64 + bit, 64, looked_at};
            };
            hits[slot] = hit_of(of, prompt.tokens().size(), looked_at, bitmap_of);
        }
    }

    // Collects the rows of up to 64 blocks; returns after how many of them no source is left.
    u64 collect(const Lane& lane, const std::vector<u64>& keys, u64 first, u64 count) {
        collected_.assign(std::size_t{lane.pair_count} * 64, 0);
        auto key_at = [&](u64 i) { return Prompt::key_at(keys, lane.step, first + i); };
        for (u64 i = 0; i < count; ++i) index_.prefetch_key(key_at(i));
        for (u64 i = 0; i < count; ++i) index_.prefetch_node_with(key_at(i));
        for (u64 i = 0; i < count; ++i) {
            for (u32 id = index_.first_with(key_at(i)); id != kNone;) {
                const Node& node = index_.nodes()[id];
                collect_rows(lane, node, i);
                id = node.next_key;
            }
            if (lane.may_end_early && is_over(lane, first + i, i)) return i + 1;
        }
        return count;
    }

    void collect_rows(const Lane& lane, const Node& node, u64 i) {
        const u32 count = node.row_count();
        const u32* rows = node.row_keys();
        const u64* bits = node.row_bits();
        for (u32 row = 0; row < count; ++row) {
            const u32 pair = lane.pair_of(word_of_row(rows[row]), plane_of_row(rows[row]));
            if (pair == kNone) continue;
            u64 found = bits[row];
            if (count > 1) found &= ~not_found(rows, bits, count, row);
            collected_[std::size_t{pair} * 64 + i] |= found;
        }
    }

    // The sources of a row that find another node by its key; their row follows in the same word.
    static u64 not_found(const u32* rows, const u64* bits, u32 count, u32 row) {
        const u32 wanted = row_key(word_of_row(rows[row]), kNotFound);
        while (++row < count && rows[row] <= wanted) {
            if (rows[row] == wanted) return bits[row];
        }
        return 0;
    }

    bool is_over(const Lane& lane, u64 index, u64 i) {
        for (const Lane::Needed& needed : lane.needed) {
            if (needed.stride != 1 && (index + 1) % needed.stride) continue;
            const u64 found =
                needed.pair == kNone ? 0 : collected_[std::size_t{needed.pair} * 64 + i];
            alive_[needed.word] &= found | ~needed.sources;
        }
        u64 any = 0;
        for (u64 word : alive_) any |= word;
        return !any;
    }

    // --- one source ---

    Hit match_alone(u32 slot, Prompt& prompt, const Computed* computed) {
        Source& of = index_.source(slot);
        Alone alone;
        look_up(of, prompt, computed, alone, computed == nullptr && may_end_early(of));
        return hit_of(of, prompt.tokens().size(), alone.count, [&](u32 plane, bool of_tier) {
            return alone.bitmap(plane, of_tier);
        });
    }

    // `ends_early`: not behind what one of the groups of full attention lacks.
    void look_up(const Source& of, Prompt& prompt, const Computed* computed, Alone& out,
                 bool ends_early = false) {
        const Prompt::Step step = step_of(of);
        const std::vector<u64>& keys = prompt.keys(index_.space(), step);
        out.count = prompt.tokens().size() / step.tokens;
        const bool is_learned = computed == nullptr || !computed->is_alone;
        const u64 ahead = 8;
        for (u64 i = 0; i < keys.size(); ++i) {
            if (i + ahead < keys.size()) {
                index_.prefetch_key(Prompt::key_at(keys, step, i + ahead));
            }
            if (ends_early && i && lacks_full(of, out, i - 1)) break;
            for (u32 id = index_.first_with(Prompt::key_at(keys, step, i)); id != kNone;) {
                const Node& node = index_.nodes()[id];
                if (is_learned && Index::finds(of, node)) see(of, node, i, out, out.found);
                if (node.row(row_key(of.word, kTierFound)) & of.bit) {
                    see(of, node, i, out, out.tier_found);
                }
                id = node.next_key;
            }
        }
        if (computed == nullptr) return;
        for (const std::vector<u64>& hashes : computed->hashes) {
            for (u64 i = 0; i < hashes.size() && i < out.count; ++i) {
                const u32 id = index_.entry_of(of, hashes[i]);
                if (id != kNone) see(of, index_.nodes()[id], i, out, out.found);
            }
        }
    }

    static bool lacks_full(const Source& of, const Alone& found, u64 index) {
        const u64 end = (index + 1) * of.layout.hash_block_size;
        for (u32 group : of.layout.full) {
            if (end % of.layout.groups[group].block_size) continue;
            if (!found.bitmap(plane_of(group, 0), false).test(index)) return true;
        }
        return false;
    }

    static void see(const Source& of, const Node& node, u64 index, Alone& out,
                    std::unordered_map<u32, std::vector<u64>>& planes) {
        for (u32 i = 0; i < node.row_count(); ++i) {
            const u32 row = node.row_keys()[i];
            if (word_of_row(row) == of.word && plane_of_row(row) < kPlanes &&
                node.row_bits()[i] & of.bit) {
                out.set(planes, plane_of_row(row), index);
            }
        }
    }

    // `bitmap_of(plane, of_tier)`: what the source holds there, found by the usual hashes or by the
    // tier's own.
    template <class BitmapOf>
    Hit hit_of(Source& of, u64 length, u64 count, BitmapOf&& bitmap_of) {
        const Layout& layout = of.layout;
        present_.step = layout.hash_block_size;
        present_.groups.assign(layout.groups.size(), Bitmap());
        combined_.clear();
        for (const auto& members : layout.together) {
            Bitmap& all = present_.groups[members[0]];
            all = bitmap_of(plane_of(members[0], 0), false);
            for (std::size_t i = 1; i < members.size(); ++i) {
                all = both(all, bitmap_of(plane_of(members[i], 0), false), count, true);
            }
        }
        Hit hit;
        hit.gpu = hit.total = rule::longest_hit(layout, present_, length - 1, length);
        if (of.has_lower_tiers()) extend(of, length, count, hit, bitmap_of);
        return hit;
    }

    // Adds what lower tiers can bring back. Tiers with equal units together: a hit may take from each
    // of them. What keeps other units is another connector of the engine, and it loads from one.
    template <class BitmapOf>
    void extend(Source& of, u64 length, u64 count, Hit& hit, BitmapOf&& bitmap_of) {
        std::vector<std::pair<std::vector<u64>, std::vector<u32>>> by_units;
        for (u32 tier : lower_tiers(of)) {
            see_ends(of, tier, length, bitmap_of);
            std::vector<u64> units = index_.units_of(of, tier);
            auto equal = std::find_if(by_units.begin(), by_units.end(),
                                      [&](const auto& each) { return each.first == units; });
            if (equal == by_units.end()) {
                by_units.push_back({std::move(units), {}});
                equal = by_units.end() - 1;
            }
            equal->second.push_back(tier);
        }
        const u64 gpu = hit.gpu;
        for (const auto& [units, tiers] : by_units) {
            auto reach = [&, &units = units, &tiers = tiers](std::size_t tier_count) {
                const Presence below = below_of(of, {tiers.data(), tier_count}, count, bitmap_of);
                return rule::UnitSearch(of.layout, below, gpu, length, units, !of.is_announced)
                    .longest();
            };
            const u64 total = reach(tiers.size());
            if (total <= hit.total) continue;
            hit = {gpu, total, shares_of(tiers, gpu, total, reach)};
        }
    }

    // What each tier adds: a block counts for the first that has it.
    template <class Reach>
    static std::vector<std::pair<u32, u64>> shares_of(const std::vector<u32>& tiers, u64 gpu,
                                                      u64 total, Reach&& reach) {
        std::vector<std::pair<u32, u64>> shares;
        u64 so_far = gpu;
        for (std::size_t i = 1; i <= tiers.size() && so_far != total; ++i) {
            const u64 reached =
                i == tiers.size() ? total : std::min(total, std::max(so_far, reach(i)));
            if (reached > so_far) shares.push_back({tiers[i - 1], reached - so_far});
            so_far = reached;
        }
        return shares;
    }

    // The fastest first, as far as names tell.
    static std::vector<u32> lower_tiers(const Source& of) {
        std::vector<u32> tiers;
        for (u32 tier = 1; tier < of.tiers.size(); ++tier) {
            if (of.tiers[tier].blocks) tiers.push_back(tier);
        }
        std::sort(tiers.begin(), tiers.end(), [&](u32 left, u32 right) {
            const std::string &one = of.tiers[left].name, &other = of.tiers[right].name;
            const bool is_later = !one.starts_with("CPU"), is_other_later = !other.starts_with("CPU");
            return is_later != is_other_later ? is_other_later : one < other;
        });
        return tiers;
    }

    template <class BitmapOf>
    Presence below_of(const Source& of, std::span<const u32> tiers, u64 count,
                      BitmapOf&& bitmap_of) {
        Presence below{of.layout.hash_block_size, {}};
        for (u32 group = 0; group < of.layout.groups.size(); ++group) {
            Bitmap any;
            for (u32 tier : tiers) {
                for (bool of_tier : {false, true}) {
                    any = both(any, bitmap_of(plane_of(group, tier), of_tier), count, false);
                }
            }
            below.groups.push_back(any);
        }
        return below;
    }

    // Learns a tier's units from what it holds of the prompt, if its events did not tell.
    template <class BitmapOf>
    void see_ends(Source& of, u32 tier, u64 length, BitmapOf&& bitmap_of) {
        const u64 step = of.layout.hash_block_size;
        for (u32 group : of.tiers[tier].groups) {
            const u32 plane = plane_of(group, tier);
            if (!index_.wants_ends(of, plane)) continue;
            u64 divisor = 0;
            for (bool of_tier : {false, true}) {
                const Bitmap bitmap = bitmap_of(plane, of_tier);
                for (u64 i = 0; bitmap.words != nullptr && i < length / step; ++i) {
                    if (bitmap.test(i)) divisor = std::gcd(divisor, (i + 1) * step);
                }
            }
            index_.see_ends(of, plane, divisor);
        }
    }

    // What is in both of two bitmaps, or in either.
    Bitmap both(Bitmap left, Bitmap right, u64 count, bool needs_both) {
        if (left.words == nullptr) return needs_both ? left : right;
        if (right.words == nullptr) return needs_both ? right : left;
        const u64 words = (count + 63) / 64;
        combined_.emplace_back(new u64[words]);
        u64* out = combined_.back().get();
        for (u64 i = 0; i < words; ++i) {
            out[i] = needs_both ? left.word(i) & right.word(i) : left.word(i) | right.word(i);
        }
        return {out, 1, count};
    }

    Index& index_;
    u64 version_ = ~u64{0};
    std::vector<Lane> lanes_;
    std::vector<u32> alone_;
    std::vector<u64> bits_;        // by pair, chunk and source: 64 blocks
    std::vector<u64> collected_;   // by pair and block: 64 sources
    std::vector<u64> alive_;       // by word: sources that full attention still follows
    Presence present_;
    std::vector<std::unique_ptr<u64[]>> combined_;
};

}  // namespace kvroute
