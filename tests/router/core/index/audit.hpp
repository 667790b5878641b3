// Walks an index and ends the process where two parts of it contradict each other: the invariants
// of `index.hpp`.
#pragma once

#include <cstdio>
#include <map>
#include <set>

#include "index/match.hpp"

namespace kvroute {

#define EXPECT(condition)                                                                     \
    do {                                                                                      \
        if (!(condition)) {                                                                   \
            std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);    \
            __builtin_trap();                                                                 \
        }                                                                                     \
    } while (false)

class IndexAudit {
public:
    IndexAudit(Index& index, Matcher& matcher) : index_(index), matcher_(matcher) {}

    void expect_sound() {
        found_.assign(index_.sources().size(), {});
        look_at_leaving();
        std::size_t hashes = 0, keys = 0;
        index_.nodes().store().for_each([&](u32 id, Node& node) {
            expect_sound_rows(node);
            hashes += index_.nodes().first_of(node.hash) == id;
            keys += node.is_linked() && index_.nodes().first_with(node.key()) == id;
            expect_in_tables(id, node);
            count(id, node);
        });
        EXPECT(index_.nodes().hashes() == hashes);
        EXPECT(index_.nodes().keys() == keys);
        for (u32 slot = 0; slot < found_.size(); ++slot) {
            if (index_.has_source(slot)) expect_counted(index_.source(slot), found_[slot]);
        }
        for (const auto& each : index_.left().all()) {
            EXPECT(each.left > 0 && found_[each.slot].entries == each.left);
            EXPECT(each.further_copies.size() == found_[each.slot].further);
        }
    }

    // All sources in one pass find what each of them finds alone.
    void expect_same_alone(Prompt& prompt) {
        Hits hits;
        matcher_.match(prompt, {}, hits);
        // What a look-up teaches of a tier's units must not depend on how it was done.
        Hits again;
        matcher_.match(prompt, {}, again);
        if (prompt.length() < 2) return;
        for (u32 slot = 0; slot < hits.by_slot.size(); ++slot) {
            const Hit hit = hits.by_slot[slot];
            if (!index_.has_source(slot) || !index_.source(slot).has_layout) {
                EXPECT(hit == Hit());
                continue;
            }
            EXPECT(matcher_.match_source(slot, prompt, nullptr) == tiered(again, slot));
            EXPECT(hit.gpu <= hit.total);
            EXPECT(hit.total < prompt.length());
            for (u64 each : matcher_.group_hits(prompt, slot, nullptr)) {
                EXPECT(each <= prompt.length());
            }
        }
    }

private:
    static TieredHit tiered(const Hits& hits, u32 slot) {
        TieredHit found{hits.by_slot[slot], {}};
        for (const auto& [each, shares] : hits.shares) {
            if (each == slot) found.by_tier = shares;
        }
        return found;
    }

    struct Found {
        u64 entries = 0, unplaced = 0, copies = 0, places = 0, not_found = 0, tier_found = 0;
        u64 further = 0;
        std::map<u32, u64> planes;
        std::set<u64> hashes;
        std::set<std::pair<u64, u32>> keys, tier_keys;
    };

    // A source as it would be if it still stood in each slot that is left behind.
    void look_at_leaving() {
        leaving_.clear();
        for (const auto& each : index_.left().all()) {
            found_.resize(std::max<std::size_t>(found_.size(), each.slot + 1));
            Source& as_it_was = leaving_.try_emplace(each.slot, each.slot, kSecret).first->second;
            EXPECT(as_it_was.word == each.word && as_it_was.bit == each.bit);
            as_it_was.tiers.resize(kMaxTiers);
            as_it_was.further_copies = each.further_copies;
            const auto has_heir = [&](const auto& of) { return of.get() == each.heir; };
            EXPECT(!each.heir || std::ranges::any_of(index_.sources(), has_heir));
        }
    }

    const Source& holder(u32 slot) {
        const auto found = leaving_.find(slot);
        return found == leaving_.end() ? index_.source(slot) : found->second;
    }

    static void expect_sound_rows(const Node& node) {
        EXPECT(node.row_count() > 0);
        for (u32 i = 0; i < node.row_count(); ++i) {
            EXPECT(node.row_bits()[i] != 0);
            EXPECT(i == 0 || node.row_keys()[i - 1] < node.row_keys()[i]);
            EXPECT(plane_of_row(node.row_keys()[i]) <= kTierFound);
        }
    }

    void expect_in_tables(u32 id, const Node& node) {
        u32 seen = 0;
        for (u32 each = index_.nodes().first_of(node.hash); each != kNone;
             each = index_.nodes()[each].next_hash) {
            const Node& other = index_.nodes()[each];
            EXPECT(other.is_used() && other.hash == node.hash);
            EXPECT(each == id || !other.has_key(node.key()));
            seen += each == id;
        }
        EXPECT(seen == 1);
        seen = 0;
        for (u32 each = node.is_placed() ? index_.nodes().first_with(node.key()) : kNone; each != kNone;
             each = index_.nodes()[each].next_key) {
            const Node& other = index_.nodes()[each];
            EXPECT(other.is_used() && other.is_linked() && other.has_key(node.key()));
            seen += each == id;
        }
        EXPECT(seen == node.is_linked());
    }

    void count(u32 id, const Node& node) {
        bool is_found_by_any = false;
        std::map<u32, u64> holders;  // by word
        for (u32 i = 0; i < node.row_count(); ++i) {
            holders[word_of_row(node.row_keys()[i])] |= node.row_bits()[i];
        }
        for (auto [word, bits] : holders) {
            for (; bits; bits &= bits - 1) {
                const u32 slot = word * 64 + static_cast<u32>(std::countr_zero(bits));
                EXPECT(index_.has_source(slot) != index_.left().has(slot));
                is_found_by_any |= count(holder(slot), found_[slot], id, node);
            }
        }
        EXPECT(node.is_linked() == (is_found_by_any && node.is_placed()));
    }

    // Counts a node of a source; says whether the source finds it by its key.
    bool count(const Source& of, Found& found, u32 id, const Node& node) {
        EXPECT(node.is_held_by(of.word, of.bit));
        EXPECT(found.hashes.insert(node.hash).second);
        found.entries += 1;
        found.unplaced += !node.is_placed();
        for (u32 i = 0; i < node.row_count(); ++i) {
            const u32 row = node.row_keys()[i], plane = plane_of_row(row);
            if (word_of_row(row) != of.word || !(node.row_bits()[i] & of.bit)) continue;
            if (plane >= kPlanes) {
                EXPECT(node.is_placed());
                (plane == kNotFound ? found.not_found : found.tier_found) += 1;
                continue;
            }
            const u64 copies = index_.copies_of(of, id, plane);
            EXPECT(copies > 0);
            EXPECT(tier_of_plane(plane) < of.tiers.size());
            found.planes[plane] += 1;
            found.places += 1;
            found.copies += copies;
            found.further += copies > 1;
        }
        const std::pair key{node.key().residue, node.key().length};
        const bool is_found = Index::finds(of, node) && node.is_placed();
        const bool is_found_below = node.row(row_key(of.word, kTierFound)) & of.bit;
        if (is_found) EXPECT(found.keys.insert(key).second);
        if (is_found_below) EXPECT(found.tier_keys.insert(key).second);
        return is_found || is_found_below;
    }

    void expect_counted(const Source& of, const Found& found) {
        EXPECT(of.entries == found.entries);
        EXPECT(of.unplaced == found.unplaced);
        EXPECT(of.copies == found.copies);
        EXPECT(of.places == found.places);
        EXPECT(of.not_found == found.not_found);
        EXPECT(of.tier_found == found.tier_found);
        EXPECT(of.further_copies.size() == found.further);
        std::vector<u64> blocks(of.tiers.size());
        for (u32 plane = 0; plane < of.counts.size(); ++plane) {
            const auto counted = found.planes.find(plane);
            EXPECT(of.counts[plane] == (counted == found.planes.end() ? 0 : counted->second));
            if (of.counts[plane]) blocks[tier_of_plane(plane)] += of.counts[plane];
        }
        for (u32 tier = 0; tier < of.tiers.size(); ++tier) {
            EXPECT(of.tiers[tier].blocks == blocks[tier]);
            EXPECT(blocks[tier] <= index_.limits().blocks);
        }
        EXPECT(of.tiers_in_use() <= index_.limits().tiers);
        EXPECT(of.forgotten.size() <= index_.limits().forgotten);
        expect_waiting_counted(of.waiting);
    }

    void expect_waiting_counted(const WaitingRuns& waiting) {
        u64 runs = 0, tokens = 0;
        waiting.for_each([&](u64, const WaitingRun& run) {
            runs += 1;
            tokens += run.weight();
        });
        EXPECT(waiting.runs == runs && runs <= index_.limits().waiting_runs);
        EXPECT(waiting.tokens == tokens && tokens <= index_.limits().waiting_tokens);
    }

    static constexpr u64 kSecret = 1;

    Index& index_;
    Matcher& matcher_;
    std::vector<Found> found_;
    std::map<u32, Source> leaving_;  // by slot
};

}  // namespace kvroute
