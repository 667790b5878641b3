// Applies batches of events to an index.
#pragma once

#include "index/events.hpp"
#include "index/index.hpp"

namespace kvroute {

// The effect of one batch; see `ApplyResult` in Python.
struct Applied {
    u64 stored = 0, removed = 0, waiting = 0, skipped = 0, overflow = 0, given_up = 0;
    bool cleared = false;
    bool is_incomplete = false;
    bool has_root_sample = false;  // some event may show the engine's hash function
    std::vector<u32> stores_to_report;  // slots: their readers have to learn the layout anew
};

// Facts that the layout learner does not know yet.
struct News {
    std::optional<u32> lookahead;
    std::optional<u32> group;
    bool is_on_gpu = true;
    std::string kind;  // empty where the event does not state it
    u32 window = 0;
    u32 block_size = 0;
};

class Applier {
public:
    enum class Outcome : u8 { applied, odd, news };

    explicit Applier(Index& index)
        : index_(index), nodes_(index.nodes()), space_(index.space()), limits_(index.limits()) {}

    // Applies one batch, unless it is odd or holds news: then nothing has happened, except that the
    // news count as reported. Where `result.cleared`, the source may have another slot than before.
    Outcome apply(u32 slot, std::span<const u8> payload, Applied& result, std::vector<News>& news);

    // Applies a batch whose news have been reported. `is_canonical`: see `read_batch`. `opaque`:
    // numbers of events that hide something which goes into their hashes, ascending. False where it
    // is odd.
    bool apply_reported(u32 slot, std::span<const u8> payload, bool is_canonical,
                        const std::vector<u32>& opaque, Applied& result);

private:
    static constexpr u32 kAhead = 8;  // look-ups that are fetched ahead

    // apply.cpp: each kind of event.
    bool read(std::span<const u8> payload, bool is_canonical);
    void apply_all(Source& of, const std::vector<u32>& opaque, Applied& result);
    void prefetch(const Event& event) const;
    std::span<const u64> hashes_of(const Event& event) const {
        return {batch_.hashes.data() + event.first_hash, event.hashes};
    }
    void store(Source& of, const Event& event, bool is_opaque, Applied& result);
    void drop_ghosts(Source& of, const Event& event);
    void see_unit(const Source& of, Source& in, u32 plane, const Event& event);
    void remove(Source& of, const Event& event, Applied& result);
    u64 discount_each(Source& of, u32 plane, std::span<const u64> hashes);
    bool leaves_none(Source& of, const Event& event, u32 plane, Applied& result);
    u64 leave(Source& of, u32 plane, std::span<const u64> hashes, const u32* left);
    bool is_int_hash(const u64* hash) const;
    void clear_tier(Source& of, const Event& event, Applied& result);

    // apply_shared.cpp: the same in stores.
    Source* meant_by(const Source& of, const Event& event);
    void store_shared(Source& of, Source& store, const Event& event, Applied& result);
    u64 take_in(const Source& of, Source& store, const Event& event, u32 tier);
    u64 remove_shared(Source& store, const Event& event);
    u64 clear_shared(const Source& of, std::string_view tier);

    // apply_places.cpp: the prefixes of its blocks.
    Key root_of(const Event& event) const;
    bool find_keys(Source& of, const Event& event, u32 block_size);
    void keys_of_run(const WaitingRun& run, Key parent);
    WaitingRun run_of(Source& of, const Event& event, u32 block_size, bool is_below);
    bool contradicts_remembered(const Source& of, const Event& event, u32 taken) const;
    void place_all(Source& of, const Event& event, bool is_below);
    void place_and_release(Source& of, u64 hash, Key key, bool is_below,
                           std::vector<std::pair<Key, WaitingRun>>& ready);
    void wait_for_parent(Source& of, const Event& event, u32 block_size, bool is_below);
    bool is_unplaced(const Source& of, std::span<const u64> hashes) const;

    Index& index_;
    NodeTables& nodes_;
    const KeySpace& space_;
    const Limits& limits_;
    Batch batch_;            // its memory is reused
    std::vector<Key> keys_;  // of the current event, or of a run that waited
};

}  // namespace kvroute
