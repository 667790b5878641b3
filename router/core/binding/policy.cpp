// Binds policies: one by itself, with candidates that Python has made.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "binding/decide.hpp"
#include "binding/module.hpp"
#include "decide/least_delay.hpp"

namespace nb = nanobind;
using namespace kvroute;
using namespace kvroute::binding;
using namespace kvroute::decide;

namespace {

using Rank = std::optional<int>;

template <class Value>
Value read(nb::handle object, const char* field) {
    return nb::cast<Value>(object.attr(field));
}

// Reads a `router.policies.Candidate`. `number`: its replica's.
void append_candidate(nb::handle from, u32 number, Candidates& out) {
    const nb::object load = from.attr("load");
    out.states.push_back({number, read<Rank>(from, "dp_rank").value_or(kAnyRank),
                          read<double>(from, "speed"), read<bool>(from, "suspect"),
                          read<std::optional<double>>(from, "approximate_trust").value_or(0.0),
                          read<i64>(load, "queued_prefill_tokens"),
                          read<i64>(load, "prefilling_requests"),
                          read<i64>(load, "decoding_requests"),
                          read<i64>(load, "decode_context_tokens"),
                          read<i64>(load, "foreign_requests"),
                          read<i64>(load, "waiting_requests")});
    out.cached.push_back({read<i64>(from, "gpu_cached_tokens"), read<i64>(from, "cached_tokens"),
                          read<i64>(from, "junction_tokens"), read<i64>(from, "recent_tokens")});
    out.outlooks.push_back({{read<std::optional<double>>(from, "eviction_age_s"),
                             read<double>(from, "reuse_probability"),
                             read<double>(from, "uncached_tokens_per_s"),
                             read<double>(from, "arrivals_per_s"), read<double>(from, "refill")},
                            read<double>(from, "progress_tokens")});
    Lower lower;
    lower.first_share = static_cast<u32>(out.shares.size());
    for (nb::handle each : nb::borrow<nb::tuple>(from.attr("by_tier"))) {
        out.shares.push_back({nb::cast<std::string>(each[0]), nb::cast<i64>(each[1])});
        lower.shares += 1;
    }
    lower.price = read<std::optional<double>>(from, "load_price");
    out.lower.push_back(lower);
}

Fleet fleet_of_candidates(const nb::list& candidates) {
    std::vector<Replica> replicas;
    for (nb::handle each : candidates) {
        replicas.emplace_back().id = read<std::string>(each, "replica_id");
    }
    return Fleet(0, std::move(replicas));
}

// Reads one candidate.
Candidates alone(nb::handle candidate) {
    Candidates found;
    append_candidate(candidate, 0, found);
    return found;
}

// Returns the parts of the delay of a prompt there.
std::tuple<double, double, double, double, double> delays_of(const Policy& policy,
                                                             i64 prompt_tokens,
                                                             nb::handle candidate,
                                                             double prefill_tokens_per_s,
                                                             double mean_congestion) {
    const Wanted asked{{}, {}, prompt_tokens, prefill_tokens_per_s, {}};
    const Delays found = delays_at(0, asked, alone(candidate), policy.weights(), mean_congestion);
    return {found.ahead, found.own, found.work, found.behind, found.evicted};
}

// Runs a policy on candidates from Python: returns their costs, their order, the best, the mean
// congestion.
nb::tuple order_of(Policy& policy, const std::string& model, nb::bytes session, i64 prompt_tokens,
                   double prefill_tokens_per_s, const std::vector<u64>& keys, const nb::list& from,
                   std::vector<double> draws) {
    Candidates candidates;
    const Fleet fleet = fleet_of_candidates(from);
    for (u32 number = 0; number < fleet.size(); ++number) {
        append_candidate(from[number], number, candidates);
    }
    const Wanted asked{model, {session.c_str(), session.size()}, prompt_tokens,
                      prefill_tokens_per_s, keys};
    Lots lots(0);
    lots.give(std::move(draws));
    Order order;
    policy.order(asked, candidates, fleet, lots.next(), order);
    std::vector<u32> numbers;
    order.numbers(candidates, fleet, numbers);
    return nb::make_tuple(order.costs, numbers, order.first(candidates, fleet),
                          order.mean_congestion);
}

}  // namespace

Policy::Kind kvroute::binding::kind_of(const std::string& name) {
    if (name.empty()) return Policy::Kind::plug_in;
    for (const Policy::Named& each : Policy::built_in()) {
        if (each.name == name) return each.kind;
    }
    throw nb::value_error("no such policy");
}

Weights kvroute::binding::weights_of(nb::handle from) {
    Weights weights;
    weights.lower_tier_token = read<double>(from, "lower_tier_token");
    for (const auto& [tier, cost] : nb::dict(from.attr("tier_token"))) {
        weights.tier_token.emplace_back(nb::cast<std::string>(tier), nb::cast<double>(cost));
    }
    weights.queued_prefill_token = read<double>(from, "queued_prefill_token");
    weights.decode_request = read<double>(from, "decode_request");
    weights.decode_context_token = read<double>(from, "decode_context_token");
    weights.waiting_request = read<double>(from, "waiting_request");
    weights.foreign_request = read<double>(from, "foreign_request");
    weights.suspect_trust = read<double>(from, "suspect_trust");
    weights.recent_trust = read<double>(from, "recent_trust");
    return weights;
}

void kvroute::binding::bind_policy(nb::module_& module) {
    std::vector<std::string> names;
    for (const Policy::Named& each : Policy::built_in()) names.emplace_back(each.name);
    module.attr("built_in_policies") = nb::tuple(nb::cast(names));
    nb::class_<Policy>(module, "Policy")
        .def("__init__",
             [](Policy* self, const std::string& name, nb::handle weights) {
                 new (self) Policy(kind_of(name), weights_of(weights));
             })
        .def("order", &order_of)
        .def("delays", &delays_of)
        .def("uncached", [](const Policy& self, i64 prompt_tokens, nb::handle candidate) {
            return uncached_at(prompt_tokens, alone(candidate), 0, self.weights()).tokens;
        });
}
