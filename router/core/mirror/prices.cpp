#include "mirror/prices.hpp"

#include <algorithm>

namespace kvroute::mirror {

namespace {

Tokens total_of(const ByTier& by_tier) {
    Tokens total = 0;
    for (const auto& [tier, tokens] : by_tier) total += tokens;
    return total;
}

}  // namespace

double FirstPrices::of(std::string_view tier) const {
    std::string name(tier);
    for (char& letter : name) {
        if ('a' <= letter && letter <= 'z') letter = static_cast<char>(letter - 'a' + 'A');
    }
    const auto known = by_tier.find(name);
    return known == by_tier.end() ? otherwise : known->second;
}

double LoadPrices::of(std::string_view tier) const {
    const auto learned = learned_.find(tier);
    return learned == learned_.end() ? first_.of(tier) : learned->second.value();
}

double LoadPrices::mean(const ByTier& by_tier) const {
    const Tokens total = total_of(by_tier);
    return total ? sum(by_tier) / static_cast<double>(total) : of("");
}

void LoadPrices::loaded(const ByTier& by_tier, double cost) {
    const auto& [tier, most] = *std::max_element(
        by_tier.begin(), by_tier.end(),
        [](const auto& one, const auto& other) { return one.second < other.second; });
    const double most_tokens = static_cast<double>(most);
    if (most < kLeastTokens ||
        most_tokens < static_cast<double>(total_of(by_tier)) * kLeastShare) {
        return;
    }
    const double own = cost - (sum(by_tier) - most_tokens * of(tier));
    const auto learned =
        learned_.try_emplace(tier, FadingRatio(first_.of(tier), kFirstTokens, kLoads)).first;
    // A load that takes longer than computing would has waited for something else.
    learned->second.add(std::min(std::max(own, 0.0), most_tokens), most_tokens);
}

double LoadPrices::sum(const ByTier& by_tier) const {
    double found = 0.0;
    for (const auto& [tier, tokens] : by_tier) found += static_cast<double>(tokens) * of(tier);
    return found;
}

}  // namespace kvroute::mirror
