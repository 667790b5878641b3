#include "plane/sums.hpp"

#include <algorithm>

#include "plane/json_walk.hpp"

namespace kvroute::plane {
namespace {

using sv = std::string_view;

bool is_null(Walk& walk) {
    Walk ahead = walk;
    if (ahead.plain_value() != "null") return false;
    walk = ahead;
    return true;
}

// A number of tokens, or null. False: it is neither.
bool read_count(Walk& walk, std::optional<u64>& found) {
    found.reset();
    return is_null(walk) || walk.count(found.emplace());
}

bool read_details(Walk& walk, Usage& usage) {
    usage.cached_tokens.reset();
    if (is_null(walk)) return true;
    return walk.plain_object([&](sv name) {
        return name == "cached_tokens" ? read_count(walk, usage.cached_tokens) : walk.value();
    });
}

bool read_usage(Walk& walk, Usage& usage) {
    usage = {};
    if (is_null(walk)) return true;
    return walk.plain_object([&](sv name) {
        if (name == "prompt_tokens") return read_count(walk, usage.prompt_tokens);
        if (name == "prompt_tokens_details") return read_details(walk, usage);
        std::optional<u64> ignored;
        if (name == "completion_tokens") return read_count(walk, ignored);
        // These are other forms' fields, and mean something else.
        const bool is_others = name.starts_with("input_tokens") || name.starts_with("cache_") ||
                               name == "output_tokens";
        return !is_others && walk.value();
    });
}

}  // namespace

std::optional<Usage> plain_usage(const Ended& ended) {
    if (!ended.first_usage.empty()) return std::nullopt;
    Usage usage;
    if (ended.usage.empty()) return usage;
    Walk walk(ended.usage);
    const bool is_plain = walk.plain_object([&](sv name) {
        if (name == "usage") return read_usage(walk, usage);
        return name != "message" && name != "response" && walk.value();
    });
    if (!is_plain || !walk.is_at_end()) return std::nullopt;
    return usage;
}

void Distribution::add(const std::vector<double>& bounds, double value) {
    if (counts_.empty()) counts_.resize(bounds.size() + 1);
    const auto bucket = std::lower_bound(bounds.begin(), bounds.end(), value) - bounds.begin();
    ++counts_[static_cast<std::size_t>(bucket)];
    total_ += value;
}

void Comparisons::Verdicts::add(u64 predicted, u64 actual) {
    predicted_tokens += predicted;
    ++(predicted == actual ? exact : predicted > actual ? over : under);
}

Sum& Sums::sum_of(const std::string& model, const std::string& replica) {
    const auto found = sums_.find(std::pair(sv(model), sv(replica)));
    if (found != sums_.end()) return found->second;
    return sums_[{model, replica}];
}

void Sums::compare(const Finished& finished, u64 actual, Comparisons& into) const {
    ++into.requests;
    into.prompt_tokens += finished.prompt_tokens;
    into.actual_tokens += actual;
    into.at_decision.add(finished.cached_tokens, actual);
    into.at_admission.add(finished.expected_tokens, actual);
    const u64 predicted = finished.cached_tokens;
    into.error_tokens.add(bounds_.error_tokens,
                          static_cast<double>(predicted > actual ? predicted - actual : actual - predicted));
}

void Sums::add(const Finished& finished) {
    Sum& sum = sum_of(finished.model, finished.replica);
    ++sum.requests;
    sum.prompt_tokens += finished.prompt_tokens;
    sum.promised_tokens += finished.cached_tokens;
    sum.routing_s.add(bounds_.routing_s, finished.routing_s);
    sum.first_byte_s.add(bounds_.first_byte_s, finished.first_byte_s);
    sum.seconds.add(bounds_.seconds, finished.seconds);
    if (!finished.usage) return;
    if (finished.usage->cached_tokens) {
        compare(finished, *finished.usage->cached_tokens, sum.reported);
    } else if (finished.usage->prompt_tokens) {
        compare(finished, 0, sum.silent);
    }
}

}  // namespace kvroute::plane
