// Sources that a match follows together: what 64 of them hold of a block is one word.
//
// Block by block, the words say which sources hold everything so far, and which hold what each of
// the other groups would need for a hit that ends there. A source costs a step of its own only where
// that changes for it, and most of them leave but once. For four sources and a window of 2 blocks:
//
//     block                          0     1     2     3
//     full attention holds it     1111  1111  1101  0101
//     ... and all before it       1111  1111  1101  0101   `alive`
//     the window holds it         1111  1111  0101  0101
//     ... and the one before      1111  1111  0101  0101   `held`
//     a hit may end there         1111  1111  0101  0101   `good`
//
// Behind block 1 two sources stop being good, so their hit is 2 blocks; the others' is 4.
#pragma once

#include "index.hpp"

namespace kvroute {

// What a source would reuse of a prompt, in tokens.
struct Hit {
    u32 gpu = 0;
    u32 total = 0;  // with what lower tiers bring back
    u32 run = 0;    // what full attention by itself would accept on the GPU; without such: `gpu`

    bool operator==(const Hit&) const = default;
};

// Sources of one layout, in which each group decides by itself whether a hit may end at a length:
// nothing below the GPU, no drafting, and no block that ends between two lengths.
class Cohort {
public:
    static bool takes(const Source& of) {
        const Layout& layout = of.layout;
        const u64 step = layout.hash_block_size, lengths = layout.scheduler_block_size;
        if (layout.has_drafter() || of.has_lower_tiers() || layout.together.empty() || lengths % step) {
            return false;
        }
        return std::all_of(layout.groups.begin(), layout.groups.end(), [&](const Group& group) {
            return group.kind == GroupKind::not_cached ||
                   (group.kind != GroupKind::chunked && group.block_size % step == 0 &&
                    lengths % group.block_size == 0);
        });
    }

    // `words`: of 64 sources each.
    Cohort(const Layout& layout, u32 words)
        : layout_(layout), step_(layout.hash_block_size),
          stride_(layout.scheduler_block_size / layout.hash_block_size), words_(words),
          has_full_(!layout.full.empty()), members_(words), alive_(words), good_(words),
          fell_(words), running_(words) {}

    const Layout& layout() const { return layout_; }
    void add(const Source& of) { members_[of.word] |= of.bit; }

    // Says where a block's words lie: `place_of(plane)` is the place of the first of a plane, or
    // kNone where no source holds anything there.
    template <class PlaceOf>
    void settle(PlaceOf&& place_of) {
        for (const auto& members : layout_.together) {
            const Group& group = layout_.groups[members[0]];
            Need need;
            for (u32 each : members) {
                need.places.push_back(place_of(plane_of(each, 0)));
                need.is_missing |= need.places.back() == kNone;
            }
            // Without its windows full attention still has a run of its own.
            is_hopeless_ |= need.is_missing && (group.kind == GroupKind::full || !has_full_);
            // Of a state, only one where a hit may end is of use.
            need.stride = group.kind == GroupKind::mamba ? stride_ : group.block_size / step_;
            need.blocks = group.kind == GroupKind::full     ? 0
                          : group.kind == GroupKind::window ? group.window_blocks(0)
                                                            : 1;
            needs_.push_back(std::move(need));
        }
    }

    // Starts on a prompt of `length` tokens, of which `blocks` can be looked up.
    void start(u64 length, u64 blocks) {
        is_over_ = is_hopeless_;
        limit_ = length - 1;
        last_ = 0;
        alive_ = members_;
        running_ = members_;
        std::fill(good_.begin(), good_.end(), 0);
        for (Need& need : needs_) {
            need.seen = 0;
            if (!need.blocks || is_hopeless_) continue;
            need.held.assign(words_, 0);
            need.back.assign(words_, 0);
            need.ring.resize(std::min(need.blocks, blocks / need.stride) * words_);
        }
    }

    bool is_over() const { return is_over_; }

    // Goes on over the blocks [first, end) of one chunk of 64. `rows`: the chunk's words, `width`
    // for each block.
    void follow(u64 first, u64 end, const u64* rows, u64 width, std::vector<Hit>& hits) {
        if (words_ == 1) {
            follow_words<1>(first, end, rows, width, hits);
        } else {
            follow_words<0>(first, end, rows, width, hits);
        }
    }

    // The prompt has ended.
    void finish(std::vector<Hit>& hits) {
        for (u32 word = 0; word < words_; ++word) {
            note(word, good_[word], hits);
            if (has_full_) note_run(word, running_[word], hits);
        }
    }

private:
    // What one group, or several equal ones, must hold.
    struct Need {
        std::vector<u32> places;
        bool is_missing = false;  // no source holds anything of one of them
        u64 stride = 1;           // hash blocks in a block
        u64 blocks = 0;           // before the end of a hit; 0: all
        u64 seen = 0;             // blocks so far
        // Of a window: by word, what is held of it now, and since its last multiple.
        std::vector<u64> held, back;
        std::vector<u64> ring;    // its last blocks; those not yet overwritten, with all behind them
    };

    template <u32 kWords>
    void follow_words(u64 first, u64 end, const u64* rows, u64 width, std::vector<Hit>& hits) {
        const u32 words = kWords ? kWords : words_;
        for (u64 i = first; i < end && !is_over_; ++i) {
            const u64* now = rows + i % 64 * width;
            for (Need& need : needs_) {
                if (need.stride != 1 && (i + 1) % need.stride) continue;
                if (need.blocks) {
                    if (!need.is_missing) slide<kWords>(need, now);
                    continue;
                }
                for (u32 place : need.places) {
                    for (u32 word = 0; word < words; ++word) alive_[word] &= now[place + word];
                }
            }
            if (stride_ == 1 || (i + 1) % stride_ == 0) judge<kWords>((i + 1) * step_, hits);
        }
    }

    // Takes one more block of a window. Its last blocks are the tail of one run of `need.blocks`,
    // kept as what is held from each block of it to its end, and the head of the next, as one word.
    template <u32 kWords>
    void slide(Need& need, const u64* now) {
        const u32 words = kWords ? kWords : words_;
        const u64 at = need.seen % need.blocks;
        const bool has_tail = need.seen >= need.blocks && at + 1 < need.blocks;
        u64* row = need.ring.data() + at * words;
        for (u32 word = 0; word < words; ++word) {
            u64 all = ~u64{0};
            for (u32 place : need.places) all &= now[place + word];
            row[word] = all;
            need.back[word] = at ? need.back[word] & all : all;
            need.held[word] = has_tail ? need.back[word] & row[words + word] : need.back[word];
        }
        need.seen += 1;
        if (at + 1 < need.blocks) return;
        for (u64 i = (need.blocks - 1) * words; i-- > 0;) need.ring[i] &= need.ring[i + words];
    }

    // Notes whose hits cannot end at `length` tokens, but could before.
    template <u32 kWords>
    void judge(u64 length, std::vector<Hit>& hits) {
        const u32 words = kWords ? kWords : words_;
        if (length > limit_) {
            is_over_ = true;
            return;
        }
        u64 left = 0, fell = 0;
        for (u32 word = 0; has_full_ && word < words; ++word) {
            if (const u64 ended = running_[word] & ~alive_[word]) note_run(word, ended, hits);
            running_[word] = alive_[word];
        }
        for (u32 word = 0; word < words; ++word) fell_[word] = good_[word];
        for (u32 word = 0; word < words; ++word) good_[word] = alive_[word];
        for (const Need& need : needs_) {
            for (u32 word = 0; need.blocks && word < words; ++word) good_[word] &= need.held[word];
        }
        for (u32 word = 0; word < words; ++word) {
            fell_[word] &= ~good_[word];
            fell |= fell_[word];
            left |= alive_[word];
        }
        for (u32 word = 0; fell && word < words; ++word) note(word, fell_[word], hits);
        last_ = static_cast<u32>(length);
        is_over_ = !left;
    }

    void note(u32 word, u64 sources, std::vector<Hit>& hits) const {
        const u32 worth = static_cast<u32>(layout_.worth(last_));
        for (; sources; sources &= sources - 1) {
            Hit& hit = hits[word * 64 + static_cast<u32>(std::countr_zero(sources))];
            hit.gpu = hit.total = worth;
            if (!has_full_) hit.run = worth;
        }
    }

    void note_run(u32 word, u64 sources, std::vector<Hit>& hits) const {
        const u32 worth = static_cast<u32>(layout_.worth(last_));
        for (; sources; sources &= sources - 1) {
            hits[word * 64 + static_cast<u32>(std::countr_zero(sources))].run = worth;
        }
    }

    Layout layout_;
    u64 step_;
    u64 stride_;  // hash blocks from one length to the next
    u32 words_;
    bool has_full_;
    bool is_hopeless_ = false;  // there is a group of which no source holds anything
    std::vector<u64> members_;
    std::vector<Need> needs_;

    bool is_over_ = false;
    u64 limit_ = 0;
    u32 last_ = 0;  // the length that was judged last
    std::vector<u64> alive_, good_, fell_;
    std::vector<u64> running_;  // `alive_` at the length that was judged last
};

}  // namespace kvroute
