#include "binding/hits.hpp"

#include "binding/support.hpp"

namespace kvroute::binding {

nb::object made_hit(const ResultTypes& types, const Hit& hit, const NamedShares& shares) {
    // `Hit` is a named tuple: made without its Python constructor, which would cost more than the
    // rest.
    nb::object made =
        nb::steal(PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(types.hit.ptr()), 3));
    if (!made.is_valid()) throw nb::python_error();
    nb::object by_tier = types.no_tiers;
    if (!shares.empty()) {
        nb::list found;
        for (const auto& [tier, tokens] : shares) found.append(nb::make_tuple(text(tier), tokens));
        by_tier = nb::tuple(found);
    }
    PyTuple_SetItem(made.ptr(), 0, PyLong_FromUnsignedLong(hit.gpu));
    PyTuple_SetItem(made.ptr(), 1, PyLong_FromUnsignedLong(hit.total));
    PyTuple_SetItem(made.ptr(), 2, by_tier.release().ptr());
    return made;
}

PyObject* HitMap::find(PyObject* source) const {
    PyObject* slot = PyDict_GetItemWithError(slots_.ptr(), source);
    return slot == nullptr ? nullptr : at(PyLong_AsSize_t(slot)).release().ptr();
}

nb::tuple HitMap::columns(const nb::list& sources) const {
    const std::size_t count = nb::len(sources);
    nb::list gpu, total, junction;
    for (std::size_t number = 0; number < count; ++number) {
        PyObject* slot = PyDict_GetItemWithError(
            slots_.ptr(), PyList_GET_ITEM(sources.ptr(), static_cast<Py_ssize_t>(number)));
        if (slot == nullptr && PyErr_Occurred()) throw nb::python_error();
        const std::size_t at_slot = slot == nullptr ? hits.size() : PyLong_AsSize_t(slot);
        const Hit hit = at_slot < hits.size() ? hits[at_slot] : Hit{};
        gpu.append(hit.gpu);
        total.append(hit.total);
        junction.append(hit.run - hit.gpu);
    }
    return nb::make_tuple(gpu, total, junction);
}

nb::object HitMap::all() {
    if (all_.is_valid()) return all_;
    nb::dict made = nb::steal<nb::dict>(PyDict_Copy(slots_.ptr()));
    if (!made.is_valid()) throw nb::python_error();
    PyObject *source, *slot;
    for (Py_ssize_t at_entry = 0; PyDict_Next(slots_.ptr(), &at_entry, &source, &slot);) {
        const nb::object hit = at(PyLong_AsSize_t(slot));
        if (PyDict_SetItem(made.ptr(), source, hit.ptr()) < 0) throw nb::python_error();
    }
    return all_ = made;
}

nb::object HitMap::at(std::size_t slot) const {
    if (slot >= hits.size() || !hits[slot].total) return types_.no_hit;
    for (const auto& [each, of_slot] : shares) {
        if (each == slot) return made_hit(types_, hits[slot], of_slot);
    }
    return made_hit(types_, hits[slot], {});
}

namespace {

// `hits[source]` and `hits.get(source, otherwise)`.
PyObject* hit_at(PyObject* self, PyObject* source) noexcept {
    try {
        PyObject* found = nb::inst_ptr<HitMap>(self)->find(source);
        if (found == nullptr && !PyErr_Occurred()) PyErr_SetObject(PyExc_KeyError, source);
        return found;
    } catch (nb::python_error& error) {
        error.restore();
        return nullptr;
    }
}

nb::object hit_or(const HitMap& hits, nb::handle source, nb::object otherwise) {
    PyObject* found = hits.find(source.ptr());
    if (found == nullptr && PyErr_Occurred()) throw nb::python_error();
    return found == nullptr ? otherwise : nb::steal(found);
}

nb::object are_equal(HitMap& hits, nb::handle other) {
    if (nb::isinstance<HitMap>(other)) {
        return nb::bool_(hits.all().equal(nb::inst_ptr<HitMap>(other)->all()));
    }
    if (nb::isinstance<nb::dict>(other)) return nb::bool_(hits.all().equal(other));
    return nb::not_implemented();
}

PyType_Slot hit_map_slots[] = {{Py_mp_subscript, reinterpret_cast<void*>(hit_at)}, {0, nullptr}};

}  // namespace

void bind_hits(nb::module_& module) {
    nb::class_<HitMap> hit_map(module, "HitMap", nb::type_slots(hit_map_slots));
    hit_map.def("get", &hit_or, nb::arg("source"), nb::arg("otherwise").none() = nb::none())
        .def("columns", &HitMap::columns, nb::arg("sources"))
        .def("keys", [](HitMap& self) { return self.all().attr("keys")(); })
        .def("values", [](HitMap& self) { return self.all().attr("values")(); })
        .def("items", [](HitMap& self) { return self.all().attr("items")(); })
        .def("__iter__", [](const HitMap& self) { return nb::iter(self.sources()); })
        .def("__len__", &HitMap::size)
        .def("__contains__",
             [](const HitMap& self, nb::handle source) { return self.sources().contains(source); })
        .def("__eq__", &are_equal)
        .def("__repr__", [](HitMap& self) { return nb::repr(self.all()); });
    hit_map.attr("__hash__") = nb::none();
}

}  // namespace kvroute::binding
