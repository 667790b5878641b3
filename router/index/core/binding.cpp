// What Python sees of the compiled index. Everything else in this directory knows nothing of Python.

#include <nanobind/nanobind.h>

namespace nb = nanobind;

NB_MODULE(_core, module) {
    module.attr("core_version") = 1;
}
