// How the other parts of the binding find an index and a prompt in what Python hands them.
#pragma once

#include <memory>

#include "index/shared.hpp"

namespace kvroute::binding {

// A prompt as Python holds it; the core may keep it for longer.
struct PromptHandle {
    std::shared_ptr<Prompt> prompt;
};

}  // namespace kvroute::binding
