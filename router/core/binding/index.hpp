// Converts Python's indexes and prompts for the binding.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "index/shared.hpp"

namespace kvroute::binding {

constexpr std::size_t kLongPrompt = 1 << 14;  // tokens; worked on without the interpreter lock

// A prompt as Python holds it; the core may keep it for longer.
struct PromptHandle {
    std::shared_ptr<Prompt> prompt;
    std::shared_ptr<SharedIndex> index;  // which hashed it; null: none did
};

// A prompt's hashes as its engine computes them, as numbers.
struct EngineHashes {
    std::vector<u64> numbers;
};

// An engine's way of hashing a block.
struct EngineHashing {
    const std::string& algorithm;
    nanobind::bytes root;
    u64 block_size, lookahead;
    const std::vector<nanobind::bytes>& extra_keys;  // by block; see `append_block_hashes`
};

// Returns nothing where Python has to make them. `as_int`: the engine's hashes are integers.
std::optional<EngineHashes> engine_hashes(const KeySpace& space, const PromptHandle& handle,
                                          const EngineHashing& hashing, bool as_int);

// The slot, whether places learned from events do not count, and the hashes in each form.
using ComputedTuple = std::tuple<u32, bool, nanobind::list>;

std::vector<Computed> computed_of(const KeySpace& space, const std::vector<ComputedTuple>& tuples);

// Returns the number of an engine's hash, which is bytes or an integer.
u64 hash_of(const KeySpace& space, nanobind::handle block_hash);

void bind_prompt(nanobind::module_& module);

}  // namespace kvroute::binding
