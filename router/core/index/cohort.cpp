#include "index/cohort.hpp"

namespace kvroute {

bool Cohort::takes(const Source& of) {
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

void Cohort::settle(const std::function<u32(u32 plane)>& place_of) {
    for (const auto& members : layout_.together) {
        const Group& group = layout_.groups[members[0]];
        Need need;
        for (u32 each : members) {
            need.places.push_back(place_of(plane_of(each, 0)));
            need.is_missing |= need.places.back() == kNone;
        }
        // Full attention still has a run of its own without its windows.
        is_hopeless_ |= need.is_missing && (group.kind == GroupKind::full || !has_full_);
        // Only a state where a hit may end is of use.
        need.stride = group.kind == GroupKind::mamba ? stride_ : group.block_size / step_;
        need.blocks = group.kind == GroupKind::full     ? 0
                      : group.kind == GroupKind::window ? group.window_blocks(0)
                                                        : 1;
        needs_.push_back(std::move(need));
    }
}

void Cohort::start(u64 length, u64 blocks) {
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

void Cohort::follow(u64 first, u64 end, const u64* rows, u64 width, std::vector<Hit>& hits) {
    if (words_ == 1) {
        follow_words<1>(first, end, rows, width, hits);
    } else {
        follow_words<0>(first, end, rows, width, hits);
    }
}

void Cohort::finish(std::vector<Hit>& hits) {
    for (u32 word = 0; word < words_; ++word) {
        note(word, good_[word], hits);
        if (has_full_) note_run(word, running_[word], hits);
    }
}

template <u32 kWords>
void Cohort::follow_words(u64 first, u64 end, const u64* rows, u64 width, std::vector<Hit>& hits) {
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
void Cohort::slide(Need& need, const u64* now) {
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

// Notes the sources whose hits cannot end at `length` tokens, but could before.
template <u32 kWords>
void Cohort::judge(u64 length, std::vector<Hit>& hits) {
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

void Cohort::note(u32 word, u64 sources, std::vector<Hit>& hits) const {
    const u32 worth = static_cast<u32>(layout_.worth(last_));
    for (; sources; sources &= sources - 1) {
        Hit& hit = hits[word * 64 + static_cast<u32>(std::countr_zero(sources))];
        hit.gpu = hit.total = worth;
        if (!has_full_) hit.run = worth;
    }
}

void Cohort::note_run(u32 word, u64 sources, std::vector<Hit>& hits) const {
    const u32 worth = static_cast<u32>(layout_.worth(last_));
    for (; sources; sources &= sources - 1) {
        hits[word * 64 + static_cast<u32>(std::countr_zero(sources))].run = worth;
    }
}

}  // namespace kvroute
