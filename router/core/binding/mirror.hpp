// How the other parts of the binding find the books in the mirror that Python hands them.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "mirror/books.hpp"

namespace kvroute::binding {

// Of a `Mirror` of this module.
std::shared_ptr<mirror::Books> books_of(nanobind::handle mirror);

}  // namespace kvroute::binding
