// What a gateway that asks where a request would go is told. No I/O.
//
// The words are those of router/policies/reasons.py, and the fields
// those of router/doors/http/route_views.py, which
// Python answers with: told here, a question takes 0.02 ms where it took 0.2 (`--rows route` of
// benchmarks/peers), and an end-to-end test holds both to each other.
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

// What a gateway calls a replica: see router/doors/names.py.
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
    // Told where nothing is booked; nothing: the index does not know that cache.
    std::optional<std::vector<GroupHit>> groups;
};

// One that is booked there.
struct Reservable : Selection {
    std::shared_ptr<Booking> booking;
    std::shared_ptr<Reservations::Place> place;
    std::string request_id;
    bool is_probe = false;  // of a replica that failed too many requests: others wait for how it ends
};

// As router/policies/reasons.py says it of a delay.
std::string reason_of(const Answer& answer);
// As `RouteView` of router/doors/http/route_views.py.
std::string answer_body(const Answer& answer, double routing_s);
// As its `SelectionView`. `reason`: of the answer.
std::string selection_body(const Selection& selection, const std::string& reason);

}  // namespace kvroute::plane
