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
};

// A slot, whether places learned from events do not count there, and the hashes of a prompt as its
// engine computes them: a list for each way in which it may spell extra keys.
using ComputedTuple = std::tuple<u32, bool, nanobind::list>;
std::vector<Computed> computed_of(const KeySpace& space, const std::vector<ComputedTuple>& tuples);

}  // namespace kvroute::binding
