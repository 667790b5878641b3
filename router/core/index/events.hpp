// A batch of events, in the forms that vLLM writes today: maps (>= 0.24) and positional arrays.
//
// `kvevents/codec.py` reads the same in the same way. Anything unusual - another order, a field of
// another type, a value out of range, a rare kind of event - makes the batch *odd*, and Python reads
// it: such cases are decided in one place.
#pragma once

#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "index/msgpack.hpp"

namespace kvroute {

enum class EventType : u8 { stored, removed, cleared };

struct Event {
    EventType type = EventType::cleared;
    bool is_on_gpu = true;
    bool has_locality = false;         // it has where it is stored:
    bool is_remote = false;            // elsewhere,
    bool is_local = false;             // or here
    bool has_root_sample = false;      // starts at the root and may show the hash function
    std::string_view tier;             // as on the wire; empty for the GPU's
    std::optional<std::string_view> ownership;
    u32 group = 0;
    u32 first_hash = 0, hashes = 0;    // in Batch::hashes
    std::optional<u64> parent;
    u32 first_token = 0, tokens = 0;   // in Batch::tokens
    u32 first_count = 0;               // in Batch::counts
    bool has_counts = false;
    u32 block_size = 0;                // as stated; 0 where it is not
    std::optional<std::string_view> lora;
    std::optional<u64> lora_id;        // of an adapter that has no name
    std::optional<std::string_view> salt;
    std::string_view kind;             // empty where it is not stated
    u32 window = 0;                    // 0 where it is not stated
    std::span<const u8> extra_keys;    // the array; empty where there is none
    bool has_marks = false;            // some entry of the array is not nil
    bool has_lookahead = false;
    u32 lookahead = 0;                 // the longest list
    u32 first_tail = 0, tail = 0;      // the last list, in Batch::tails

    bool has_adapter() const { return lora_id || !lora.value_or("").empty(); }

    // The block size, stated or implied, where every hash has its tokens; else 0.
    u32 tokens_per_block() const {
        if (!hashes || !tokens || tokens % hashes) return 0;
        if (block_size && static_cast<u64>(block_size) * hashes != tokens) return 0;
        return tokens / hashes;
    }
};

// A decoded batch; its memory is reused for the next.
struct Batch {
    std::vector<Event> events;
    std::vector<u64> hashes;
    std::vector<u8> is_int;  // by hash
    std::vector<u32> tokens;
    std::vector<u32> tails;
    std::vector<u32> counts;

    void clear();
    // Gives back the memory of a very large batch.
    void shrink();
};

// A hash as a number: a 64-bit integer as it is, anything else by a secret digest.
u64 hash_number(const KeySpace& space, const msgpack::Head& head, const u8* bytes);

// Reads a batch; false where it is odd, or no msgpack. Views in `out` point into `payload`.
// `is_canonical`: Python has read the batch and written it anew; tiers are in upper case, and names
// and extra keys need no check.
bool read_batch(const KeySpace& space, std::span<const u8> payload, bool is_canonical, Batch& out);

}  // namespace kvroute
