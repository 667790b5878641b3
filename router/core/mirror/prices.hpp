// The cost of loading tokens into a cache from below its GPU, learned from times to the first token.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "mirror/traffic.hpp"

namespace kvroute::mirror {

// Tokens of each lower tier or store.
using ByTier = std::vector<std::pair<std::string, Tokens>>;

// The prices of tokens from tiers before anything was loaded, in tokens to compute.
struct FirstPrices {
    std::map<std::string, double, std::less<>> by_tier;  // by name, in upper case
    double otherwise = 0.1;

    double of(std::string_view tier) const;
};

// The time to load one token over the time to compute one, by tier.
//
// A hit may come from several tiers. Its time measures the one that most of it came from: the
// others' part is subtracted at their prices.
class LoadPrices {
public:
    static constexpr Tokens kLeastTokens = 1024;  // fewer measure the cost of a step
    static constexpr double kLeastShare = 0.5;    // of a hit's lower tokens that one tier has
    static constexpr double kFirstTokens = 4096.0;  // weight of the price before any load, in tokens
    static constexpr int kLoads = 32;               // after so many a load counts 1/e

    // `first` must live as long.
    explicit LoadPrices(const FirstPrices& first) : first_(first) {}

    // Returns the price of a token from a tier.
    double of(std::string_view tier) const;
    // Returns the mean price of tokens from several tiers; empty: their tiers are unknown.
    double mean(const ByTier& by_tier) const;
    // A response has begun. `by_tier`: the tokens of its prompt that were loaded; not empty. `cost`:
    // the time that this took, in tokens to compute.
    void loaded(const ByTier& by_tier, double cost);

private:
    double sum(const ByTier& by_tier) const;

    const FirstPrices& first_;
    std::map<std::string, FadingRatio, std::less<>> learned_;
};

}  // namespace kvroute::mirror
