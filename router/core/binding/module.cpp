// The extension module `router._core`. No code outside this directory uses Python.

#include "binding/module.hpp"

#include "index/memory.hpp"

namespace nb = nanobind;

NB_MODULE(_core, module) {
    module.attr("core_version") = 49;  // as CORE_VERSION of router/index/compiled.py
    // An index that lives as long as the interpreter is no leak.
    nb::set_leak_warnings(false);
    kvroute::keep_back_memory();
    kvroute::binding::bind_http(module);
    kvroute::binding::bind_index(module);
    kvroute::binding::bind_plane(module);
    kvroute::binding::bind_sums(module);
    kvroute::binding::bind_mirror(module);
    kvroute::binding::bind_load(module);
    kvroute::binding::bind_policy(module);
    kvroute::binding::bind_fleet(module);
    kvroute::binding::bind_decide(module);
}
