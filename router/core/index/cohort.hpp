// Sources that a match follows together: one word has for 64 of them whether they hold a block. Block
// by block, the words show which sources hold everything so far, and which hold what each of the other
// groups would need for a hit that ends there. A source costs a step of its own only where that
// changes for it, and most of them leave but once. For four sources and a window of 2 blocks:
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

#include <functional>

#include "index/hit.hpp"
#include "index/source.hpp"

namespace kvroute {

// Sources of one layout, in which each group decides by itself whether a hit may end at a length:
// nothing below the GPU, no drafting, and no block that ends between two lengths.
class Cohort {
public:
    static bool takes(const Source& of);

    // `words`: of 64 sources each.
    Cohort(const Layout& layout, u32 words)
        : layout_(layout), step_(layout.hash_block_size),
          stride_(layout.scheduler_block_size / layout.hash_block_size), words_(words),
          has_full_(!layout.full.empty()), members_(words), alive_(words), good_(words),
          fell_(words), running_(words) {}

    const Layout& layout() const { return layout_; }
    void add(const Source& of) { members_[of.word] |= of.bit; }

    // Sets where a block's words lie: `place_of(plane)` is the place of the first of a plane, or
    // kNone where no source holds anything there.
    void settle(const std::function<u32(u32 plane)>& place_of);

    // Starts on a prompt of `length` tokens, of which `blocks` can be looked up.
    void start(u64 length, u64 blocks);

    bool is_over() const { return is_over_; }

    // Goes on over the blocks [first, end) of one chunk of 64. `rows`: the chunk's words, `width`
    // for each block.
    void follow(u64 first, u64 end, const u64* rows, u64 width, std::vector<Hit>& hits);

    // The prompt has ended.
    void finish(std::vector<Hit>& hits);

private:
    // The blocks that one group, or several equal ones, must hold.
    struct Need {
        std::vector<u32> places;
        bool is_missing = false;  // no source holds anything of one of them
        u64 stride = 1;           // hash blocks in a block
        u64 blocks = 0;           // before the end of a hit; 0: all
        u64 seen = 0;             // blocks so far
        // For a window, by word: the sources that hold it now, and since its last multiple.
        std::vector<u64> held, back;
        std::vector<u64> ring;  // its last blocks; those not yet overwritten, with all behind them
    };

    template <u32 kWords>
    void follow_words(u64 first, u64 end, const u64* rows, u64 width, std::vector<Hit>& hits);

    template <u32 kWords>
    void slide(Need& need, const u64* now);

    template <u32 kWords>
    void judge(u64 length, std::vector<Hit>& hits);

    void note(u32 word, u64 sources, std::vector<Hit>& hits) const;

    void note_run(u32 word, u64 sources, std::vector<Hit>& hits) const;

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
