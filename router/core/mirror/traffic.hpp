// Learns from a model's requests: rates, and the probability that content idle for some time will be
// used again.
#pragma once

#include <array>

#include "mirror/ownership.hpp"

namespace kvroute::mirror {

// --- sums that forget ---

// An amount per second: a sum in which the past fades, exponentially.
class FadingRate {
public:
    // `fade_s`: the time after which something counts 1/e. `now`: of the start.
    FadingRate(double fade_s, double now) : fade_s_(fade_s), start_(now), at_(now) {}

    // Adds an amount of it.
    void add(double amount, double now);
    // Returns the rate at a time; of a short past it is the mean.
    double per_s(double now) const;

private:
    double fade_s_, start_, at_;
    double sum_ = 0.0;
};

// One sum over another, the last `samples` or so of them.
class FadingRatio {
public:
    // `first`: the ratio before there is any sample. `weight`: the denominator of that; it counts as
    // much as one sample. `samples`: after so many a sample counts 1/e.
    FadingRatio(double first, double weight, int samples);

    double value() const { return over_ / under_; }
    // Takes a sample; `under` is not negative.
    void add(double over, double under);

private:
    double over_, under_, keep_;
};

// --- reuse ---

constexpr double kShortestS = 0.01, kLongestS = 86'400.0;
constexpr std::size_t kBins = 40;

// Returns the bin of time that an interval falls into. The bins begin at 0 s, 10 ms, 15 ms, ... a day.
std::size_t bin_of(double seconds);

// Intervals from the end of one use of something to its next use: the probability of a next use.
//
// The Kaplan-Meier estimator (1958) over bins of time. Most things have not been used again *yet*
// when one looks: how long they have been idle so far counts as well (they are censored), or else
// no long interval would ever be expected. The probability beyond the longest time that was observed
// is a guess: at most `kTail`, and less for what has been idle for a short part of it.
class ReuseIntervals {
public:
    static constexpr double kTail = 0.3;

    ReuseIntervals();

    // Something of this weight was used again, so long after the end of its last use; 0 if that has
    // not ended.
    void reused(double after_s, double weight) { reused_[bin_of(after_s)] += weight; }
    // Something was idle all that time, and is not followed any more.
    void given_up(double after_s, double weight) { given_up_[bin_of(after_s)] += weight; }
    // Halves the weight of all observations so far.
    void halve();
    // Estimates anew. `idle`: what is idle, by the end of its last use, earliest first.
    void estimate(const Ownership::Ended& idle, double now);
    // Returns the probability that what has been idle for so long will be used again. Interpolated
    // within the bin on a logarithmic scale.
    double probability(double idle_s) const;

private:
    using Bins = std::array<double, kBins>;

    Bins reused_{}, given_up_{};
    Bins lost_, within_{};
    double horizon_s_ = 0.0;
    std::vector<double> ends_;        // scratch of `estimate`, as `sums_`
    std::vector<std::size_t> sums_;
};

// --- one model ---

// Of so many keys of a prompt one is followed: less memory, and coarser weights.
constexpr std::size_t kReuseStep = 4;

// Statistics of one model's requests, over all caches.
class ModelTraffic {
public:
    static constexpr int kPrefills = 32;
    static constexpr Tokens kLeastPrefill = 1024;  // a shorter one measures the cost of a step
    static constexpr double kFirstGuessTokensPerS = 10'000.0;
    static constexpr u64 kHalveEvery = 20'000;

    // `max_keys`: bound on the keys of which the last use is remembered.
    explicit ModelTraffic(std::size_t max_keys)
        : max_keys_(max_keys), speed_(first_guess()) {}

    // Returns the rate of a replica at speed 1.
    double prefill_tokens_per_s() const { return speed_.value(); }

    // A request with these keys of its prefixes is sent. Returns what `ended` takes.
    std::shared_ptr<Use> began(std::span<const u64> keys, double now);
    // A request has ended.
    void ended(const std::shared_ptr<Use>& use, double now);
    // A cache has computed the uncached tokens of a prompt, as they were predicted, and spent that
    // time on it, at speed 1. `is_timed`: no more than on that; what is not is forgotten and counts
    // no more once any is.
    void prefilled(Tokens tokens, double seconds, bool is_timed);
    // Returns the probability that what has been idle for so long will be used again.
    double reuse_probability(double idle_s) const { return reuse_.probability(idle_s); }

private:
    static FadingRatio first_guess() { return {kFirstGuessTokensPerS, 0.1, kPrefills}; }

    std::size_t max_keys_;
    FadingRatio speed_;
    bool has_timed_ = false;
    Ownership uses_;
    ReuseIntervals reuse_;
    u64 requests_ = 0, estimated_at_ = 0;
};

}  // namespace kvroute::mirror
