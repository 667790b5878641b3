// How the other parts of the binding find what decides in what Python hands them.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "decide/decide.hpp"

namespace kvroute::binding {

using BooksPointer = std::shared_ptr<decide::Books>;

struct FleetHandle {
    std::shared_ptr<const decide::Fleet> fleet;
};

// By its name; of a plug-in: nothing.
decide::Policy::Kind kind_of(const std::string& name);
// From `router.policies.Weights`.
decide::Weights weights_of(nanobind::handle from);

// Of a `Decider` of this module.
std::shared_ptr<decide::Decider> decider_of(nanobind::handle decider);
std::shared_ptr<const decide::Fleet> fleet_of(nanobind::handle fleet);

}  // namespace kvroute::binding
