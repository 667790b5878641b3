// Shared by the files that bind the data plane.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "plane/plane.hpp"

namespace kvroute::binding {

inline nanobind::bytes bytes_of(const std::string& text) {
    return nanobind::bytes(text.data(), text.size());
}

// Returns the events since the last call; see `Plane` of router/_core.pyi.
nanobind::list events_of(plane::Plane& plane);

void bind_bookings(nanobind::module_& module);

}  // namespace kvroute::binding
