// How the other parts of the binding find an index and a prompt in what Python hands them.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <tuple>
#include <vector>

#include "index/shared.hpp"

namespace kvroute::binding {

// A prompt as Python holds it; the core may keep it for longer.
struct PromptHandle {
    std::shared_ptr<Prompt> prompt;
    std::shared_ptr<SharedIndex> index;  // that hashed it; null: none did
};

// Slot, whether places learned from events do not count, and the hashes in each spelling.
using ComputedTuple = std::tuple<u32, bool, nanobind::list>;

std::vector<Computed> computed_of(const KeySpace& space, const std::vector<ComputedTuple>& tuples);

}  // namespace kvroute::binding
