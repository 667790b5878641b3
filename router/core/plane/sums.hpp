// Sums up requests that were decided here and are over: beyond the first in each batch, Python gets
// these sums in place of a record of each. No I/O.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plane/types.hpp"

namespace kvroute::plane {

// The upper bounds of the buckets of histograms, ascending; one bucket more is above them all.
struct SumBounds {
    std::vector<double> routing_s, first_byte_s, seconds, error_tokens;
};

class Distribution {
public:
    void add(const std::vector<double>& bounds, double value);
    // By bucket, each without those below it; empty where nothing was added.
    const std::vector<u64>& counts() const { return counts_; }
    double total() const { return total_; }

private:
    std::vector<u64> counts_;
    double total_ = 0;
};

// Compares predictions with the cached tokens that engines reported.
struct Comparisons {
    struct Verdicts {
        u64 predicted_tokens = 0, exact = 0, over = 0, under = 0;

        void add(u64 predicted, u64 actual);
    };

    u64 requests = 0, prompt_tokens = 0, actual_tokens = 0;
    Verdicts at_decision, at_admission;
    Distribution error_tokens;
};

// The sum of one replica's requests for one model, all of them served whole, with status 200.
struct Sum {
    u64 requests = 0, prompt_tokens = 0, promised_tokens = 0;
    Distribution routing_s, first_byte_s, seconds;
    Comparisons reported;
    // The engine reported prompt tokens but no cached ones: they were 0 if it ever reports any.
    Comparisons silent;
};

// The usage that an engine reported in a response.
struct Usage {
    std::optional<u64> prompt_tokens, cached_tokens;
};

// Reads usage in OpenAI's form of completions, as `UsageReader` of router/plane/usage.py; nothing where
// it is another form or not quite plain.
std::optional<Usage> plain_usage(const Ended& ended);

class Sums {
public:
    explicit Sums(SumBounds bounds) : bounds_(std::move(bounds)) {}

    struct Finished {
        const std::string& model;
        const std::string& replica;
        u64 prompt_tokens = 0, cached_tokens = 0, expected_tokens = 0;
        double routing_s = 0, first_byte_s = 0, seconds = 0;
        std::optional<Usage> usage;  // only what can be compared
    };
    void add(const Finished& finished);
    // By model and replica.
    struct Less {
        using is_transparent = void;
        template <typename One, typename Other>
        bool operator()(const One& one, const Other& other) const {
            using Pair = std::pair<std::string_view, std::string_view>;
            return Pair(one.first, one.second) < Pair(other.first, other.second);
        }
    };
    using Found = std::map<std::pair<std::string, std::string>, Sum, Less>;
    Found take() { return std::exchange(sums_, {}); }

private:
    Sum& sum_of(const std::string& model, const std::string& replica);
    void compare(const Finished& finished, u64 actual, Comparisons& into) const;

    SumBounds bounds_;
    Found sums_;
};

}  // namespace kvroute::plane
