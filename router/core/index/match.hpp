// How much of a prompt every source would reuse, in one pass over its keys.
//
// The pass collects the rows of 64 hash blocks at a time: a word for each 64 sources and plane. Most
// sources are followed on these words, all together (`cohort.hpp`). Of the others - with lower
// tiers, drafting, odd blocks - the words are turned over, into one of 64 blocks a source: what a
// source holds of the prompt in one plane is then a bitmap, on which the hit rule finds runs 64
// blocks at a time. The pass ends where no source is left whose full attention holds everything.
//
// What is unusual about a source - a known hash function, hashes of its own in a lower tier, very
// many planes - is looked up for that source alone, into bitmaps of the same form.
#pragma once

#include "cohort.hpp"
#include "prompt.hpp"
#include "units.hpp"

namespace kvroute {

// What each lower tier adds to a hit, the fastest first: by the tier's number, or that of a store that
// the source shares, + `kFirstStore`.
constexpr u32 kFirstStore = kMaxTiers;
using Shares = std::vector<std::pair<u32, u64>>;

struct TieredHit {
    Hit hit;
    Shares by_tier;

    bool operator==(const TieredHit&) const = default;
};

// The hit of every source, by slot, and the shares of those that have any.
struct Hits {
    std::vector<Hit> by_slot;
    std::vector<std::pair<u32, Shares>> shares;

    void set(u32 slot, TieredHit&& found) {
        by_slot[slot] = found.hit;
        if (!found.by_tier.empty()) shares.emplace_back(slot, std::move(found.by_tier));
    }
};

// A source's hashes of a prompt, as its engine computes them: one list for each way in which it may
// spell extra keys.
struct Computed {
    u32 slot = 0;
    bool is_alone = false;  // places learned from events do not count
    std::vector<std::vector<u64>> hashes;
};

// What a source would reuse of a prompt that is known by its engine's hashes alone.
struct FoundByHashes {
    TieredHit hit;
    std::vector<u64> by_group;  // the longest prefix that each would accept, by group index
    u64 held = 0;               // of the hashes, by the source or a store that it shares
    bool is_whole = true;       // nothing is there that only other hashes lead to
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

    void match(Prompt& prompt, const std::vector<Computed>& computed, Hits& hits) {
        hits.by_slot.assign(index_.sources().size(), Hit());
        hits.shares.clear();
        if (prompt.tokens().size() < 2) return;
        if (version_ != index_.version()) find_lanes();
        for (Lane& lane : lanes_) match_lane(lane, prompt, computed, hits);
        for (u32 slot : alone_) {
            if (of_slot(computed, slot) == nullptr) {
                hits.set(slot, match_alone(slot, prompt, nullptr));
            }
        }
        for (const Computed& each : computed) {
            if (index_.has_source(each.slot) && index_.source(each.slot).has_layout) {
                hits.set(each.slot, match_alone(each.slot, prompt, &each));
            }
        }
    }

    // The hit of one source. `computed`: its hashes of the prompt, if they are known.
    TieredHit match_source(u32 slot, Prompt& prompt, const Computed* computed) {
        if (prompt.tokens().size() < 2 || !index_.source(slot).has_layout) return {};
        return match_alone(slot, prompt, computed);
    }

    // What a cache that holds nothing of a prompt could load from one lower tier of a source.
    u64 match_tier(u32 slot, Prompt& prompt, const std::string& name, const Computed* computed) {
        const u64 length = prompt.tokens().size();
        Source& of = index_.source(slot);
        if (length < 2 || !of.has_layout) return 0;
        const std::vector<Lower> tiers = lower_tiers(of);
        auto named = std::find_if(tiers.begin(), tiers.end(), [&](const Lower& each) {
            return !each.is_shared() && of.tiers[each.tier].name == name;
        });
        if (named == tiers.end()) return 0;
        Alone alone;
        look_up(of, prompt, computed, alone);
        combined_.clear();
        auto bitmap_of = [&](u32 plane, u32 where) { return alone.bitmap(plane, where); };
        see_ends(of, *named, length, bitmap_of);
        const std::vector<u64> units = units_of(of, of, named->tier);
        const Presence below = below_of(of, {&*named, 1}, alone.count, bitmap_of);
        const u64 total =
            rule::UnitSearch(of.layout, below, 0, length, units, !of.is_announced).longest();
        return of.layout.worth(total) ? total : 0;
    }

    // The longest prefix that each group of a source would accept, by group index.
    std::vector<u64> group_hits(Prompt& prompt, u32 slot, const Computed* computed) {
        const u64 length = prompt.tokens().size();
        Source& of = index_.source(slot);
        if (length < 2 || !of.has_layout) return {};
        Alone alone;
        look_up(of, prompt, computed, alone);
        return accepted_by_groups(of, alone, length);
    }

    // The hit of one source on a prompt of which there are only its engine's hashes, one a hash block
    // of its layout. The prompt goes on behind the last of them.
    FoundByHashes match_hashes(u32 slot, const std::vector<u64>& hashes) {
        Source& of = index_.source(slot);
        FoundByHashes found;
        if (hashes.empty() || !of.has_layout) return found;
        Alone alone;
        alone.count = hashes.size();
        look_up_computed(of, {slot, true, {hashes}}, alone);
        if (!of.stores.empty()) look_up_shared(of, alone);
        const u64 length = hashes.size() * of.layout.hash_block_size + of.read_lookahead + 1;
        found.hit = hit_of(of, length, alone.count,
                           [&](u32 plane, u32 where) { return alone.bitmap(plane, where); });
        found.by_group = accepted_by_groups(of, alone, length);
        for (u64 hash : hashes) found.held += is_held(of, hash);
        found.is_whole = !index_.has_own_blocks_below(of);
        return found;
    }

    // What a share is called: a tier, or a store.
    const std::string& name_of_share(u32 slot, u32 share) const {
        const Source& of = index_.source(slot);
        if (share >= kFirstStore) return index_.store_of(of, share - kFirstStore).name;
        return of.tiers[share].name;
    }

    // Of all sources, each once.
    std::vector<Prompt::Step> steps() {
        if (version_ != index_.version()) find_lanes();
        return steps_;
    }

private:
    friend class IndexAudit;  // of the tests

    static constexpr u32 kMostPlanes = 64;   // of a source that is matched together with others
    static constexpr u32 kMostWords = 2048;  // for one block of a lane

    // Sources whose hashes end at the same tokens.
    struct Lane {
        Prompt::Step step;
        u32 words = 0;                // of 64 sources each
        std::vector<u32> dense;       // plane -> its number among those in use; kNone
        u32 width = 0;                // words for one block: those of each plane in use
        std::vector<Cohort> cohorts;

        // The sources that no cohort takes:
        std::vector<u32> slots;
        std::vector<u32> turned;      // place of a word -> number of its turned words; kNone
        std::vector<u32> places;      // the places of those
        bool may_end_early = true;    // all of them may
        struct Needed {               // what full attention needs to go on
            u32 word, place;
            u64 stride;               // in hash blocks
            u64 sources;
        };
        std::vector<Needed> needed;
        std::vector<u64> all;         // by word: these sources

        // Where a word lies among those of a block; kNone where nobody holds anything.
        u32 place_of(u32 word, u32 plane) const {
            if (plane >= dense.size() || word >= words || dense[plane] == kNone) return kNone;
            return dense[plane] * words + word;
        }
    };

    // Where a block of a prompt was found: by the usual hashes, by those that a lower tier has of its
    // own, or in the store of that number.
    enum Where : u32 { kUsual, kOfTier, kInStore };

    // A tier below the GPU that a source loads from.
    struct Lower {
        u32 tier;
        u32 store = kNone;  // number among the source's; kNone: a tier of its own

        bool is_shared() const { return store != kNone; }
        u32 share() const { return is_shared() ? kFirstStore + store : tier; }
    };

    // The bitmaps of one source that was looked up alone.
    struct Alone {
        using Planes = std::unordered_map<u32, std::vector<u64>>;

        u64 count = 0;
        Planes found, tier_found;
        std::vector<Planes> in_store;                // by number of the store
        std::vector<std::pair<u64, u64>> looked_up;  // (block, hash), where there are stores

        Bitmap bitmap(u32 plane, u32 where) const {
            const Planes& planes = where == kUsual    ? found
                                   : where == kOfTier ? tier_found
                                                      : in_store[where - kInStore];
            auto known = planes.find(plane);
            if (known == planes.end()) return {};
            return {known->second.data(), 1, count};
        }
        void set(Planes& planes, u32 plane, u64 index) {
            std::vector<u64>& words = planes[plane];
            if (words.empty()) words.resize((count + 63) / 64);
            words[index / 64] |= u64{1} << (index % 64);
        }
    };

    // By the source, or by a store that it shares.
    bool is_held(const Source& of, u64 hash) const {
        bool found = index_.entry_of(of, hash) != kNone;
        for (u32 number = 0; !found && number < of.stores.size(); ++number) {
            found = index_.entry_of(index_.store_of(of, number), hash) != kNone;
        }
        return found;
    }

    static std::vector<u64> accepted_by_groups(const Source& of, const Alone& alone, u64 length) {
        std::vector<u64> accepted;
        Presence present{of.layout.hash_block_size, {}};
        for (u32 group = 0; group < of.layout.groups.size(); ++group) {
            present.groups.push_back(alone.bitmap(plane_of(group, 0), kUsual));
        }
        for (u32 group = 0; group < of.layout.groups.size(); ++group) {
            accepted.push_back(
                rule::longest_accepted(of.layout, group, present, length - 1, length));
        }
        return accepted;
    }

    static Prompt::Step step_of(const Source& of) {
        return {of.layout.hash_block_size, of.read_lookahead};
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
        steps_.clear();
        for (const auto& of : index_.sources()) {
            if (!of || !of->has_layout) continue;
            const Prompt::Step step = step_of(*of);
            if (std::find(steps_.begin(), steps_.end(), step) == steps_.end()) {
                steps_.push_back(step);
            }
            const bool is_unusual = of->tier_found || !of->stores.empty();
            if (is_unusual || !join(lane_of(step), *of)) alone_.push_back(of->slot);
        }
        for (Lane& lane : lanes_) {
            for (Cohort& cohort : lane.cohorts) {
                cohort.settle([&](u32 plane) { return lane.place_of(0, plane); });
            }
            fill_turned(lane);
        }
    }

    Lane& lane_of(Prompt::Step step) {
        for (Lane& lane : lanes_) {
            if (lane.step == step) return lane;
        }
        lanes_.emplace_back();
        lanes_.back().step = step;
        lanes_.back().words = static_cast<u32>(index_.sources().size() + 63) / 64;
        return lanes_.back();
    }

    // False where a source has too many planes.
    static bool join(Lane& lane, const Source& of) {
        std::vector<u32> fresh;
        u32 count = 0;
        for (u32 plane = 0; plane < of.counts.size(); ++plane) {
            if (!of.counts[plane] || group_of_plane(plane) >= of.layout.groups.size()) continue;
            ++count;
            if (lane.place_of(0, plane) == kNone) fresh.push_back(plane);
        }
        const std::size_t wanted = lane.width + fresh.size() * lane.words;
        if (count > kMostPlanes || (!fresh.empty() && wanted > kMostWords)) return false;
        for (u32 plane : fresh) {
            if (plane >= lane.dense.size()) lane.dense.resize(plane + 1, kNone);
            lane.dense[plane] = lane.width / lane.words;
            lane.width += lane.words;
        }
        if (Cohort::takes(of)) {
            cohort_of(lane, of.layout).add(of);
        } else {
            lane.slots.push_back(of.slot);
        }
        return true;
    }

    static Cohort& cohort_of(Lane& lane, const Layout& layout) {
        for (Cohort& cohort : lane.cohorts) {
            if (cohort.layout() == layout) return cohort;
        }
        return lane.cohorts.emplace_back(layout, lane.words);
    }

    void fill_turned(Lane& lane) {
        lane.turned.assign(lane.slots.empty() ? 0 : lane.width, kNone);
        lane.all.assign(lane.words, 0);
        for (u32 slot : lane.slots) {
            const Source& of = index_.source(slot);
            lane.all[of.word] |= of.bit;
            for (u32 plane = 0; plane < of.counts.size(); ++plane) {
                const u32 place = of.counts[plane] ? lane.place_of(of.word, plane) : kNone;
                if (place == kNone || lane.turned[place] != kNone) continue;
                lane.turned[place] = static_cast<u32>(lane.places.size());
                lane.places.push_back(place);
            }
            add_needed(lane, of);
        }
    }

    // A source may end early that has a group of full attention whose end nothing can pass: no lower
    // tier, no entries inside blocks, and an extra block of EAGLE that is the same in all groups.
    static bool may_end_early(const Source& of) {
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

    void add_needed(Lane& lane, const Source& of) {
        const Layout& layout = of.layout;
        if (!may_end_early(of)) {
            lane.may_end_early = false;
            return;
        }
        for (u32 group : layout.full) {
            const u32 place = lane.place_of(of.word, plane_of(group, 0));
            const u64 stride = layout.groups[group].block_size / lane.step.tokens;
            add_needed(lane, of, place, stride);
        }
    }

    static void add_needed(Lane& lane, const Source& of, u32 place, u64 stride) {
        for (Lane::Needed& each : lane.needed) {
            if (each.word == of.word && each.place == place && each.stride == stride) {
                each.sources |= of.bit;
                return;
            }
        }
        lane.needed.push_back({of.word, place, stride, of.bit});
    }

    // --- one lane ---

    void match_lane(Lane& lane, Prompt& prompt, const std::vector<Computed>& computed,
                    Hits& hits) {
        const u64 length = prompt.tokens().size();
        const std::vector<u64>& keys = prompt.keys(index_.space(), lane.step);
        const u64 chunks = (keys.size() + 63) / 64;
        for (Cohort& cohort : lane.cohorts) cohort.start(length, keys.size());
        rows_.resize(std::size_t{lane.width} * 64);
        bits_.resize(lane.places.size() * chunks * 64);
        alive_ = lane.all;
        bool is_over = lane.slots.empty();
        u64 first = 0;
        // A prompt that nobody knows ends after a short piece.
        for (u64 piece = kFirstPiece; first < keys.size(); piece = 64 - first % 64) {
            const u64 end = std::min<u64>(first + piece, keys.size());
            collect(lane, keys, first, end);
            bool has_any = false;
            for (Cohort& cohort : lane.cohorts) {
                cohort.follow(first, end, rows_.data(), lane.width, hits.by_slot);
                has_any |= !cohort.is_over();
            }
            is_over = is_over || (lane.may_end_early && is_over_at(lane, first, end));
            const bool is_last = (!has_any && is_over) || end == keys.size();
            if (end % 64 == 0 || is_last) turn(lane, first / 64, end, chunks);
            first = end;
            if (is_last) break;
        }
        for (Cohort& cohort : lane.cohorts) cohort.finish(hits.by_slot);
        for (u32 slot : lane.slots) {
            if (!computed.empty() && of_slot(computed, slot) != nullptr) continue;
            hits.set(slot, turned_hit(lane, slot, length, first, chunks));
        }
    }

    // Collects the rows of the blocks [first, end), of one chunk of 64.
    void collect(const Lane& lane, const std::vector<u64>& keys, u64 first, u64 end) {
        const u64 count = end - first;
        u64 hashes[64];
        u32 ids[64];
        auto key_at = [&](u64 i) { return Prompt::key_at(keys, lane.step, first + i); };
        for (u64 i = 0; i < count; ++i) {
            hashes[i] = NodeTables::hash_of_key(key_at(i));
            index_.nodes().prefetch_key(hashes[i]);
        }
        for (u64 i = 0; i < count; ++i) ids[i] = index_.nodes().guess_with(hashes[i]);
        u64* row = rows_.data() + first % 64 * lane.width;
        std::fill(row, row + count * lane.width, 0);
        for (u64 i = 0; i < count; ++i) {
            if (ids[i] == kNone) continue;
            if (!index_.nodes()[ids[i]].has_key(key_at(i))) ids[i] = index_.nodes().first_with(key_at(i));
            if (ids[i] != kNone) index_.nodes()[ids[i]].prefetch_rows();
        }
        for (u64 i = 0; i < count; ++i, row += lane.width) {
            for (u32 id = ids[i]; id != kNone; id = index_.nodes()[id].next_key) {
                add_rows(lane, index_.nodes()[id], row);
            }
        }
    }

    static void add_rows(const Lane& lane, const Node& node, u64* out) {
        const u32* rows = node.row_keys();
        const u64* bits = node.row_bits();
        // From the end: the sources that find another node by its key come last in a word.
        u32 word = kNone;
        u64 not_found = 0;
        for (u32 i = node.row_count(); i-- > 0;) {
            if (word_of_row(rows[i]) != word) not_found = 0;
            word = word_of_row(rows[i]);
            if (plane_of_row(rows[i]) == kNotFound) not_found = bits[i];
            const u32 place = lane.place_of(word, plane_of_row(rows[i]));
            if (place != kNone) out[place] |= bits[i] & ~not_found;
        }
    }

    // Whether no source that is not in a cohort is left behind one of the blocks [first, end).
    bool is_over_at(const Lane& lane, u64 first, u64 end) {
        for (u64 i = first; i < end; ++i) {
            const u64* row = rows_.data() + i % 64 * lane.width;
            for (const Lane::Needed& needed : lane.needed) {
                if (needed.stride != 1 && (i + 1) % needed.stride) continue;
                const u64 found = needed.place == kNone ? 0 : row[needed.place];
                alive_[needed.word] &= found | ~needed.sources;
            }
        }
        u64 any = 0;
        for (u64 word : alive_) any |= word;
        return !any;
    }

    // Turns the words of a chunk over, as far as it was collected.
    void turn(const Lane& lane, u64 chunk, u64 end, u64 chunks) {
        const u64 count = end - chunk * 64;
        for (std::size_t number = 0; number < lane.places.size(); ++number) {
            u64* turned = bits_.data() + (number * chunks + chunk) * 64;
            for (u64 i = 0; i < 64; ++i) {
                turned[i] = i < count ? rows_[i * lane.width + lane.places[number]] : 0;
            }
            transpose(turned);
        }
    }

    TieredHit turned_hit(const Lane& lane, u32 slot, u64 length, u64 looked_at, u64 chunks) {
        Source& of = index_.source(slot);
        auto bitmap_of = [&](u32 plane, u32 where) -> Bitmap {
            const u32 place = where != kUsual ? kNone : lane.place_of(of.word, plane);
            if (place == kNone || !of.count(plane)) return {};
            const std::size_t number = lane.turned[place];
            return {bits_.data() + number * chunks * 64 + slot % 64, 64, looked_at};
        };
        return hit_of(of, length, looked_at, bitmap_of);
    }

    // --- one source ---

    TieredHit match_alone(u32 slot, Prompt& prompt, const Computed* computed) {
        Source& of = index_.source(slot);
        Alone alone;
        look_up(of, prompt, computed, alone, computed == nullptr && may_end_early(of));
        return hit_of(of, prompt.tokens().size(), alone.count,
                      [&](u32 plane, u32 where) { return alone.bitmap(plane, where); });
    }

    // `ends_early`: not behind what one of the groups of full attention lacks.
    void look_up(const Source& of, Prompt& prompt, const Computed* computed, Alone& out,
                 bool ends_early = false) {
        const Prompt::Step step = step_of(of);
        const std::vector<u64>& keys = prompt.keys(index_.space(), step);
        out.count = prompt.tokens().size() / step.tokens;
        const bool is_learned = computed == nullptr || !computed->is_alone;
        // What no hash of the engine's stands for is found by its tokens, below the GPU alone.
        const bool is_learned_below = !is_learned && index_.has_own_blocks_below(of);
        const u64 ahead = 8;
        for (u64 i = 0; i < keys.size(); ++i) {
            if (i + ahead < keys.size()) {
                index_.nodes().prefetch_key(NodeTables::hash_of_key(Prompt::key_at(keys, step, i + ahead)));
            }
            if (ends_early && i && lacks_full(of, out, i - 1)) break;
            for (u32 id = index_.nodes().first_with(Prompt::key_at(keys, step, i)); id != kNone;) {
                const Node& node = index_.nodes()[id];
                if (is_learned && Index::finds(of, node)) see(of, node, i, out, out.found);
                if (node.row(row_key(of.word, kTierFound)) & of.bit ||
                    (is_learned_below && Index::finds(of, node))) {
                    see(of, node, i, out, out.tier_found);
                }
                if (!of.stores.empty() && is_looked_up(of, node, is_learned || is_learned_below)) {
                    out.looked_up.emplace_back(i, node.hash);
                }
                id = node.next_key;
            }
        }
        if (computed != nullptr) look_up_computed(of, *computed, out);
        if (!of.stores.empty()) look_up_shared(of, out);
    }

    void look_up_computed(const Source& of, const Computed& computed, Alone& out) {
        for (const std::vector<u64>& hashes : computed.hashes) {
            for (u64 i = 0; i < hashes.size() && i < out.count; ++i) {
                const u32 id = index_.entry_of(of, hashes[i]);
                if (id != kNone) see(of, index_.nodes()[id], i, out, out.found);
                if (!of.stores.empty()) out.looked_up.emplace_back(i, hashes[i]);
            }
        }
    }

    // Whether the hash of a node stands for its key: as the source has learned, or one of its stores.
    bool is_looked_up(const Source& of, const Node& node, bool is_learned) const {
        auto is_known_to = [&](const Source& each) {
            return node.row(row_key(each.word, kTierFound)) & each.bit || Index::finds(each, node);
        };
        if (is_learned ? is_known_to(of) : node.row(row_key(of.word, kTierFound)) & of.bit) {
            return true;
        }
        for (u32 number = 0; number < of.stores.size(); ++number) {
            if (is_known_to(index_.store_of(of, number))) return true;
        }
        return false;
    }

    // What stores hold of the prompt, and the source's own tiers by a hash that only a store knows.
    void look_up_shared(const Source& of, Alone& out) {
        out.in_store.resize(of.stores.size());
        for (const auto& [i, hash] : out.looked_up) {
            const u32 own = index_.entry_of(of, hash);
            if (own != kNone) see(of, index_.nodes()[own], i, out, out.tier_found);
            for (u32 number = 0; number < of.stores.size(); ++number) {
                const Source& store = index_.store_of(of, number);
                const u32 id = index_.entry_of(store, hash);
                if (id != kNone) see(store, index_.nodes()[id], i, out, out.in_store[number]);
            }
        }
    }

    static bool lacks_full(const Source& of, const Alone& found, u64 index) {
        const u64 end = (index + 1) * of.layout.hash_block_size;
        for (u32 group : of.layout.full) {
            if (end % of.layout.groups[group].block_size) continue;
            if (!found.bitmap(plane_of(group, 0), kUsual).test(index)) return true;
        }
        return false;
    }

    static void see(const Source& of, const Node& node, u64 index, Alone& out,
                    Alone::Planes& planes) {
        for (u32 i = 0; i < node.row_count(); ++i) {
            const u32 row = node.row_keys()[i];
            if (word_of_row(row) == of.word && plane_of_row(row) < kPlanes &&
                node.row_bits()[i] & of.bit) {
                out.set(planes, plane_of_row(row), index);
            }
        }
    }

    // `bitmap_of(plane, where)`: what the source holds there, found as `Where` says.
    template <class BitmapOf>
    TieredHit hit_of(Source& of, u64 length, u64 count, BitmapOf&& bitmap_of) {
        const Layout& layout = of.layout;
        present_.step = layout.hash_block_size;
        present_.groups.assign(layout.groups.size(), Bitmap());
        combined_.clear();
        for (const auto& members : layout.together) {
            Bitmap& all = present_.groups[members[0]];
            all = bitmap_of(plane_of(members[0], 0), kUsual);
            for (std::size_t i = 1; i < members.size(); ++i) {
                all = both(all, bitmap_of(plane_of(members[i], 0), kUsual), count, true);
            }
        }
        const auto [gpu, run] = rule::hit_and_run(layout, present_, length - 1, length);
        TieredHit found{
            {static_cast<u32>(gpu), static_cast<u32>(gpu), static_cast<u32>(run)}, {}};
        if (index_.has_anything_below(of)) extend(of, length, count, found, bitmap_of);
        if (!layout.worth(found.hit.total)) {
            return {{0, 0, static_cast<u32>(layout.worth(run))}, {}};
        }
        return found;
    }

    // Adds what lower tiers can bring back. Tiers with equal units together: a hit may take from each
    // of them. What keeps other units is another connector of the engine, and it loads from one.
    template <class BitmapOf>
    void extend(Source& of, u64 length, u64 count, TieredHit& found, BitmapOf&& bitmap_of) {
        std::vector<std::pair<std::vector<u64>, std::vector<Lower>>> by_units;
        for (const Lower& tier : lower_tiers(of)) {
            see_ends(of, tier, length, bitmap_of);
            std::vector<u64> units = units_of(of, table_of(of, tier), tier.tier);
            auto equal = std::find_if(by_units.begin(), by_units.end(),
                                      [&](const auto& each) { return each.first == units; });
            if (equal == by_units.end()) {
                by_units.push_back({std::move(units), {}});
                equal = by_units.end() - 1;
            }
            equal->second.push_back(tier);
        }
        const u64 gpu = found.hit.gpu;
        for (const auto& [units, tiers] : by_units) {
            auto reach = [&, &units = units, &tiers = tiers](std::size_t tier_count) {
                const Presence below = below_of(of, {tiers.data(), tier_count}, count, bitmap_of);
                return rule::UnitSearch(of.layout, below, gpu, length, units, !of.is_announced)
                    .longest();
            };
            const u64 total = reach(tiers.size());
            if (total <= found.hit.total) continue;
            found.hit.total = static_cast<u32>(total);
            found.by_tier = shares_of(tiers, gpu, total, reach);
        }
    }

    // What each tier adds: a block counts for the first that has it.
    template <class Reach>
    static Shares shares_of(const std::vector<Lower>& tiers, u64 gpu, u64 total, Reach&& reach) {
        Shares shares;
        u64 so_far = gpu;
        for (std::size_t i = 1; i <= tiers.size() && so_far != total; ++i) {
            const u64 reached =
                i == tiers.size() ? total : std::min(total, std::max(so_far, reach(i)));
            if (reached > so_far) add_share(shares, tiers[i - 1].share(), reached - so_far);
            so_far = reached;
        }
        return shares;
    }

    // A store may have several tiers: it has one share.
    static void add_share(Shares& shares, u32 share, u64 tokens) {
        for (auto& [each, known] : shares) {
            if (each != share) continue;
            known += tokens;
            return;
        }
        shares.push_back({share, tokens});
    }

    const Source& table_of(const Source& of, const Lower& lower) const {
        return lower.is_shared() ? index_.store_of(of, lower.store) : of;
    }

    // The fastest first, as far as names tell; a source's own before what it shares.
    std::vector<Lower> lower_tiers(const Source& of) const {
        std::vector<Lower> tiers;
        add_tiers(of, kNone, tiers, [](const std::string& one, const std::string& other) {
            const bool is_later = !one.starts_with("CPU"), is_other_later = !other.starts_with("CPU");
            return is_later != is_other_later ? is_other_later : one < other;
        });
        for (u32 number = 0; number < of.stores.size(); ++number) {
            add_tiers(index_.store_of(of, number), number, tiers, std::less<std::string>());
        }
        return tiers;
    }

    template <class IsBefore>
    static void add_tiers(const Source& in, u32 store, std::vector<Lower>& out, IsBefore&& before) {
        const std::size_t first = out.size();
        for (u32 tier = 1; tier < in.tiers.size(); ++tier) {
            if (in.tiers[tier].blocks) out.push_back({tier, store});
        }
        std::sort(out.begin() + static_cast<std::ptrdiff_t>(first), out.end(),
                  [&](const Lower& left, const Lower& right) {
                      return before(in.tiers[left.tier].name, in.tiers[right.tier].name);
                  });
    }

    template <class BitmapOf>
    Presence below_of(const Source& of, std::span<const Lower> tiers, u64 count,
                      BitmapOf&& bitmap_of) {
        Presence below{of.layout.hash_block_size, {}};
        for (u32 group = 0; group < of.layout.groups.size(); ++group) {
            Bitmap any;
            for (const Lower& tier : tiers) {
                for (u32 where : wheres_of(tier)) {
                    any = both(any, bitmap_of(plane_of(group, tier.tier), where), count, false);
                }
            }
            below.groups.push_back(any);
        }
        return below;
    }

    // Learns a tier's units from what it holds of the prompt, if its events did not tell.
    template <class BitmapOf>
    void see_ends(Source& of, const Lower& tier, u64 length, BitmapOf&& bitmap_of) {
        const u64 step = of.layout.hash_block_size;
        Source& in = tier.is_shared() ? index_.store_of(of, tier.store) : of;
        for (u32 group : in.tiers[tier.tier].groups) {
            const u32 plane = plane_of(group, tier.tier);
            if (!wants_ends(of, in, plane)) continue;
            u64 divisor = 0;
            for (u32 where : wheres_of(tier)) {
                const Bitmap bitmap = bitmap_of(plane, where);
                for (u64 i = 0; bitmap.words != nullptr && i < length / step; ++i) {
                    if (bitmap.test(i)) divisor = std::gcd(divisor, (i + 1) * step);
                }
            }
            kvroute::see_ends(in, plane, divisor);
        }
    }

    static std::vector<u32> wheres_of(const Lower& tier) {
        if (tier.is_shared()) return {kInStore + tier.store};
        return {kUsual, kOfTier};
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

    static constexpr u64 kFirstPiece = 8;  // blocks

    Index& index_;
    u64 version_ = ~u64{0};
    std::vector<Lane> lanes_;
    std::vector<u32> alone_;
    std::vector<Prompt::Step> steps_;
    std::vector<u64> rows_;        // by block of a chunk and place
    std::vector<u64> bits_;        // by number of turned words, chunk and source: 64 blocks
    std::vector<u64> alive_;       // by word: sources that full attention still follows
    Presence present_;
    std::vector<std::unique_ptr<u64[]>> combined_;
};

}  // namespace kvroute
