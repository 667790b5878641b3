// Binds the sums of requests.
#pragma once

#include <nanobind/nanobind.h>

#include "plane/plane.hpp"
#include "plane/sums.hpp"

namespace kvroute::binding {

// Appends each as the event `summed`; see router/_core.pyi.
void append_sums(const plane::Sums::Found& sums, nanobind::list& events);
// Reports usual requests in sums from now on. Takes the bounds of `SumBounds`.
void sum_up(plane::Plane& plane, std::vector<double> routing_s, std::vector<double> first_byte_s,
            std::vector<double> seconds, std::vector<double> error_tokens);

}  // namespace kvroute::binding
