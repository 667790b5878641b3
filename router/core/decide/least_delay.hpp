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

// The cost of one placement, in prefill tokens.
struct Delays {
    double ahead = 0;    // work before this prompt's prefill
    double own = 0;      // its uncached tokens, those of a junction left out
    double work = 0;     // the machine's time for them
    double behind = 0;   // by which later requests wait longer there
    double evicted = 0;  // computed again later, since this prompt evicts them

    double sum() const { return ahead + own + work + behind + evicted; }
};

// `mean`: the congestion of the mean replica.
Delays delays_at(u32 number, const Wanted& asked, const Candidates& candidates,
                 const Weights& weights, double mean);

}  // namespace kvroute::decide
