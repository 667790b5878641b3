// The parts of the module: each file of this directory binds one of them.
#pragma once

#include <nanobind/nanobind.h>

namespace kvroute::binding {

void bind_http(nanobind::module_& module);
void bind_index(nanobind::module_& module);
void bind_plane(nanobind::module_& module);
void bind_sums(nanobind::module_& module);
void bind_mirror(nanobind::module_& module);
void bind_load(nanobind::module_& module);
void bind_policy(nanobind::module_& module);
void bind_fleet(nanobind::module_& module);
void bind_decide(nanobind::module_& module);

}  // namespace kvroute::binding
