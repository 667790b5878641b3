// Binds the result of a match.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <utility>
#include <vector>

#include "index/hit.hpp"

namespace kvroute::binding {

// The classes of results.
struct ResultTypes {
    nanobind::object hit;     // the class
    nanobind::object no_hit;  // one for all
    nanobind::object result;  // the class of a batch's effect
    nanobind::object no_tiers = nanobind::make_tuple();
};

// The tokens that each lower tier adds to a hit, by name.
using NamedShares = std::vector<std::pair<std::string, u64>>;

nanobind::object made_hit(const ResultTypes& types, const Hit& hit, const NamedShares& shares);

// `{source: hit}` of one match. A hit becomes an object of Python when it is read: a router with a
// thousand sources reads those of a few.
class HitMap {
public:
    std::vector<Hit> hits;                            // by slot
    std::vector<std::pair<u32, NamedShares>> shares;  // of those that have any

    // `slots`: `{source: slot}`, which does not change any more.
    HitMap(nanobind::dict slots, ResultTypes types)
        : slots_(std::move(slots)), types_(std::move(types)) {}

    // Null where the source is not known, with no exception set, or where something failed.
    PyObject* find(PyObject* source) const;
    std::size_t size() const { return nanobind::len(slots_); }
    nanobind::dict sources() const { return slots_; }
    // Returns tokens on the GPU, in all, and in the junction, of each of `sources`; 0 for unknown ones.
    nanobind::tuple columns(const nanobind::list& sources) const;
    // Returns all of it as a dict.
    nanobind::object all();

private:
    nanobind::object at(std::size_t slot) const;

    nanobind::dict slots_;
    ResultTypes types_;
    nanobind::object all_;
};

void bind_hits(nanobind::module_& module);

}  // namespace kvroute::binding
