// Converts Python's deciders, fleets and weights for the other parts of the binding.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "decide/decide.hpp"

namespace kvroute::binding {

using BooksPointer = std::shared_ptr<decide::Books>;

struct FleetHandle {
    std::shared_ptr<const decide::Fleet> fleet;
};

// Returns a policy by its name; not a plug-in.
decide::Policy::Kind kind_of(const std::string& name);
// Reads a `router.policies.Weights`.
decide::Weights weights_of(nanobind::handle from);

// Returns the core's part of a `Decider` of this module.
std::shared_ptr<decide::Decider> decider_of(nanobind::handle decider);
std::shared_ptr<const decide::Fleet> fleet_of(nanobind::handle fleet);

}  // namespace kvroute::binding
