// The policy that delays least: this request, those behind it, and those that would have found in a
// cache what it evicts. tests/oracle/scoring/delay.py derives the formula; the order of its
// operations is kept, so that both round alike.
#pragma once

#include "decide/policies.hpp"

namespace kvroute::decide {

void order_by_delay(const Wanted& asked, const Candidates& candidates, const Weights& weights,
                    const Draws& draws, Order& out);

// The `m` of the cost: what a token of work adds to the waiting of later requests at a replica that
// gets the mean of what all get.
double mean_congestion(const Candidates& candidates, double prefill_tokens_per_s);

// What one placement costs, in prefill tokens.
struct Delays {
    double ahead = 0;    // what has to be done before this prompt's prefill
    double own = 0;      // its uncached tokens, those of a junction left out
    double work = 0;     // that the machine is busy with them
    double behind = 0;   // what later requests wait longer there
    double evicted = 0;  // what will be computed again since this prompt takes its place

    double sum() const { return ahead + own + work + behind + evicted; }
};

// `mean`: the congestion of the mean replica.
Delays delays_at(u32 number, const Wanted& asked, const Candidates& candidates,
                 const Weights& weights, double mean);

}  // namespace kvroute::decide
