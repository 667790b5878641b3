// The policy that delays least: this request, those behind it, and those that would have found in a
// cache what it evicts. router/scoring/delay.py derives the formula; the order of its operations is
// kept, so that both round alike.
#pragma once

#include "decide/policies.hpp"

namespace kvroute::decide {

void order_by_delay(const Wanted& asked, const Candidates& candidates, const Weights& weights,
                    const Draws& draws, Order& out);

// The `m` of the cost: what a token of work adds to the waiting of later requests at a replica that
// gets the mean of what all get.
double mean_congestion(const Candidates& candidates, double prefill_tokens_per_s);

// The sum of the delays at each candidate.
void find_delays(i64 prompt_tokens, const Candidates& candidates, double prefill_tokens_per_s,
                 const Weights& weights, double mean, std::vector<double>& out);

}  // namespace kvroute::decide
