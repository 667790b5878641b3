// The parts of the module: each file of this directory adds what Python sees of one of them.
#pragma once

#include <nanobind/nanobind.h>

namespace kvroute::binding {

void bind_index(nanobind::module_& module);
void bind_decide(nanobind::module_& module);

}  // namespace kvroute::binding
