// The answers to gateways that ask where a request would go. No I/O.
//
// Reasons are worded as in router/policies/reasons.py, and fields are those of
// router/doors/http/route_views.py, with which Python answers: here, a question takes 0.02 ms in place
// of 0.2 (`--rows route` of benchmarks/peers). An end-to-end test compares both.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "decide/least_delay.hpp"
#include "index/layout.hpp"
#include "plane/decider.hpp"

namespace kvroute::plane {

// Where a request would go, and why, without its being sent.
struct Answer {
    Prediction prediction;
    decide::Delays delays;  // by the policy least_delay; what it costs is their sum
    u64 junction_tokens = 0;  // behind the hit, worth as much to later prompts
    u64 coming_tokens = 0;    // that are being computed there; 0: no more than are on the GPU
    std::vector<std::pair<std::string, u64>> by_tier;  // what each lower tier adds to the GPU's hit
};

// The longest prefix that one KV cache group would allow by itself.
struct GroupHit {
    u32 group = 0;
    GroupKind kind = GroupKind::full;
    u64 tokens = 0;
};

// A gateway's names for a replica: see router/doors/names.py.
struct AtGateway {
    std::string worker_id, endpoint, address;
    std::vector<std::pair<int, u64>> block_tokens;  // by rank, where that is not the usual

    u64 block_tokens_of(int dp_rank) const;
};

// Where a gateway is to send a request.
struct Selection {
    Answer answer;
    AtGateway replica;
    std::string id;  // of its reservation; empty: there is none
    Fields headers;  // for the engine, where it is booked
    // Given where nothing is booked; nothing: the index does not know that cache.
    std::optional<std::vector<GroupHit>> groups;
};

// One that is booked there.
struct Reservable : Selection {
    std::shared_ptr<Booking> booking;
    std::shared_ptr<Reservations::Place> place;
    std::string request_id;
    bool is_probe = false;  // of a replica that failed too many requests: others wait for how it ends
};

// Returns the reason as router/policies/reasons.py words it for a delay.
std::string reason_of(const Answer& answer);
// Returns a `RouteView` of router/doors/http/route_views.py, as JSON.
std::string answer_body(const Answer& answer, double routing_s);
// Returns its `SelectionView`, likewise. `reason`: of the answer.
std::string selection_body(const Selection& selection, const std::string& reason);

}  // namespace kvroute::plane
