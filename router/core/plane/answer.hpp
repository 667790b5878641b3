// What a gateway that asks where a request would go is told. No I/O.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plane/decider.hpp"

namespace kvroute::plane {

// Where a request would go, and why, without its being sent.
struct Answer {
    Prediction prediction;
    double cost = 0;  // as the policy counts
    std::vector<std::pair<std::string, u64>> by_tier;  // what each lower tier adds to the GPU's hit
};

// A text as JSON has it between quotation marks. Bytes above ASCII are left as they are.
std::string json_escaped(std::string_view text);

// As `RouteView` of router/http/views.py. `costs_are_delays`: in tokens to compute.
std::string answer_body(const Answer& answer, std::string_view policy, bool costs_are_delays,
                        double routing_s);

}  // namespace kvroute::plane
