// Binds the sums of requests: their events, and the class that sums them up.
#include "binding/sums.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "binding/module.hpp"

namespace nb = nanobind;
using namespace kvroute::plane;

namespace {

nb::tuple tuple_of(const Distribution& found) {
    return nb::make_tuple(nb::cast(found.counts()), found.total());
}

nb::tuple tuple_of(const Comparisons::Verdicts& found) {
    return nb::make_tuple(found.predicted_tokens, found.exact, found.over, found.under);
}

nb::tuple tuple_of(const Comparisons& found) {
    return nb::make_tuple(found.requests, found.prompt_tokens, found.actual_tokens,
                          tuple_of(found.at_decision), tuple_of(found.at_admission),
                          tuple_of(found.error_tokens));
}

Ended ended_with(bool is_json, nb::bytes last, nb::bytes first) {
    Ended ended;
    ended.is_json = is_json;
    ended.usage.assign(last.c_str(), last.size());
    ended.first_usage.assign(first.c_str(), first.size());
    return ended;
}

using Counts = std::pair<std::optional<u64>, std::optional<u64>>;

std::optional<Counts> usage_of(bool is_json, nb::bytes last, nb::bytes first) {
    const std::optional<Usage> usage = plain_usage(ended_with(is_json, last, first));
    if (!usage) return std::nullopt;
    return Counts(usage->prompt_tokens, usage->cached_tokens);
}

void add(Sums& sums, const std::string& model, const std::string& replica,
         std::tuple<u64, u64, u64> tokens, std::tuple<double, double, double> seconds,
         std::optional<Counts> usage) {
    std::optional<Usage> reported;
    if (usage) reported = Usage{usage->first, usage->second};
    const auto& [prompt, cached, expected] = tokens;
    const auto& [routing, first_byte, whole] = seconds;
    sums.add({model, replica, prompt, cached, expected, routing, first_byte, whole, reported});
}

}  // namespace

void kvroute::binding::append_sums(const Sums::Found& sums, nb::list& events) {
    for (const auto& [place, sum] : sums) {
        events.append(nb::make_tuple(
            "summed", 0, place.first, place.second, sum.requests, sum.prompt_tokens,
            sum.promised_tokens, tuple_of(sum.routing_s), tuple_of(sum.first_byte_s),
            tuple_of(sum.seconds), tuple_of(sum.reported), tuple_of(sum.silent)));
    }
}

void kvroute::binding::sum_up(Plane& plane, std::vector<double> routing_s,
                              std::vector<double> first_byte_s, std::vector<double> seconds,
                              std::vector<double> error_tokens) {
    plane.sum_up(std::make_unique<Sums>(SumBounds{std::move(routing_s), std::move(first_byte_s),
                                                  std::move(seconds), std::move(error_tokens)}));
}

void kvroute::binding::bind_sums(nb::module_& module) {
    module.def("plain_usage", &usage_of);
    nb::class_<Sums>(module, "RequestSums")
        .def("__init__",
             [](Sums* self, std::vector<double> routing, std::vector<double> first_byte,
                std::vector<double> seconds, std::vector<double> errors) {
                 new (self) Sums(SumBounds{std::move(routing), std::move(first_byte),
                                           std::move(seconds), std::move(errors)});
             })
        .def("add", &add, nb::arg("model"), nb::arg("replica"), nb::arg("tokens"),
             nb::arg("seconds"), nb::arg("usage").none())
        .def("take", [](Sums& self) {
            nb::list events;
            append_sums(self.take(), events);
            return events;
        });
}
