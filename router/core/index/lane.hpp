// Sources whose hashes end at the same tokens: a prompt is looked up once for all of them.
//
// The rows of 64 hash blocks at a time are collected: a word for each 64 sources and plane in use.
// Most sources are followed on these words, all together (`cohort.hpp`). Of the others - with lower
// tiers, drafting, odd blocks - the words are transposed, into one of 64 blocks for each source: the
// blocks that a source holds in one plane are then a bitmap, on which the hit rule finds runs 64
// blocks at a time. It ends where no source is left whose full attention holds everything.
#pragma once

#include "index/cohort.hpp"
#include "index/found.hpp"
#include "index/index.hpp"
#include "index/prompt.hpp"

namespace kvroute {

// The rows collected of one prompt for one lane; their memory is reused.
struct Collected {
    std::vector<u64> rows;   // by block of a chunk and place
    std::vector<u64> bits;   // by number of turned words, chunk and source: 64 blocks
    std::vector<u64> alive;  // by word: sources that full attention still follows
    u64 chunks = 0;          // of the prompt
    u64 blocks = 0;          // that were looked at
};

class Lane {
public:
    // `words`: of 64 sources each.
    Lane(Prompt::Step step, u32 words) : step_(step), words_(words) {}

    Prompt::Step step() const { return step_; }
    // False where a source has too many planes.
    bool join(const Source& of);
    // Called once all have joined.
    void settle(const Index& index);

    // Looks a prompt of `length` tokens up, and sets the hits of the sources in cohorts.
    void match(const Index& index, std::span<const u64> keys, u64 length, Collected& out,
               std::vector<Hit>& hits);
    // The others, by slot; their blocks are in `Turned` then.
    const std::vector<u32>& turned() const { return slots_; }

    class Turned final : public Found {
    public:
        Turned(const Lane& lane, const Collected& collected, const Source& of)
            : lane_(lane), collected_(collected), of_(of) {}
        Bitmap at(u32 plane, u32 where) const override;
        u64 blocks() const override { return collected_.blocks; }

    private:
        const Lane& lane_;
        const Collected& collected_;
        const Source& of_;
    };

private:
    // A plane that full attention needs to go on.
    struct Needed {
        u32 word, place;
        u64 stride;  // in hash blocks
        u64 sources;
    };

    // Returns a word's place among those of a block; kNone where no source holds anything.
    u32 place_of(u32 word, u32 plane) const {
        if (plane >= dense_.size() || word >= words_ || dense_[plane] == kNone) return kNone;
        return dense_[plane] * words_ + word;
    }
    void add_to_cohort(const Source& of);
    void add_turned(const Source& of);
    void add_needed(u32 place, u64 stride, const Source& of);

    void collect(const Index& index, std::span<const u64> keys, u64 first, u64 end,
                 Collected& out) const;
    void add_rows(const Node& node, u64* out) const;
    bool is_over_at(u64 first, u64 end, Collected& out) const;
    void turn(u64 chunk, u64 end, Collected& out) const;

    Prompt::Step step_;
    u32 words_;
    std::vector<u32> dense_;  // plane -> its number among those in use; kNone
    u32 width_ = 0;           // words for one block: `words_` of each plane in use
    std::vector<Cohort> cohorts_;

    // The sources that no cohort takes:
    std::vector<u32> slots_;
    std::vector<u64> all_;             // by word: their bits
    std::vector<u32> turned_;          // place of a word -> number of its turned words; kNone
    std::vector<u32> turned_places_;   // by that number
    bool may_end_early_ = true;        // all of them may
    std::vector<Needed> needed_;
};

}  // namespace kvroute
