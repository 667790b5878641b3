#include "plane/answer.hpp"

#include <array>
#include <charconv>
#include <cmath>

namespace kvroute::plane {
namespace {

using sv = std::string_view;

constexpr sv kHexDigits = "0123456789abcdef";

void append_number(std::string& out, double value, double unit) {
    std::array<char, 32> digits;
    const double rounded = std::round(value / unit) * unit;
    const auto [end, error] = std::to_chars(digits.data(), digits.data() + digits.size(), rounded,
                                            std::chars_format::fixed, unit < 1e-4 ? 6 : 3);
    out.append(digits.data(), error == std::errc() ? end : digits.data());
}

// With a comma before every three digits.
std::string for_people(u64 number) {
    std::string text = std::to_string(number);
    for (std::size_t at = text.size(); at > 3; at -= 3) text.insert(at - 3, 1, ',');
    return text;
}

// See `Candidate.hit_in_words` of router/scoring/types.py.
std::string reason_of(const Answer& answer, bool costs_are_delays) {
    const Prediction& found = answer.prediction;
    std::string text = for_people(found.gpu_cached_tokens);
    text.append(" of ").append(for_people(found.prompt_tokens)).append(" tokens cached");
    const u64 lower = found.cached_tokens - found.gpu_cached_tokens;
    if (lower > 0) text.append(" and ").append(for_people(lower)).append(" offloaded");
    sv before = " (";
    for (const auto& [tier, tokens] : answer.by_tier) {
        text.append(before).append(for_people(tokens)).append(" ").append(tier);
        before = ", ";
    }
    if (!answer.by_tier.empty()) text += ")";
    if (found.is_suspect) text += "; discounted, since events were lost";
    if (costs_are_delays) {
        const double delay = std::round(answer.cost);
        text.append(": a delay of ").append(delay < 0 ? "-" : "");
        text.append(for_people(static_cast<u64>(std::abs(delay)))).append(" prefill tokens");
    }
    return text;
}

void append_text(std::string& out, sv name, sv value) {
    out.append("\"").append(name).append("\":\"").append(json_escaped(value)).append("\",");
}

void append_count(std::string& out, sv name, u64 value) {
    out.append("\"").append(name).append("\":").append(std::to_string(value)).append(",");
}

void append_hit(std::string& out, const Answer& answer) {
    out += "\"hit\":{";
    append_count(out, "gpu_cached_tokens", answer.prediction.gpu_cached_tokens);
    append_count(out, "cached_tokens", answer.prediction.cached_tokens);
    out += "\"by_tier\":{";
    sv before;
    for (const auto& [tier, tokens] : answer.by_tier) {
        out.append(before).append("\"").append(json_escaped(tier)).append("\":");
        out += std::to_string(tokens);
        before = ",";
    }
    out += "},\"pull_from\":null,\"suspect\":";
    out += answer.prediction.is_suspect ? "true" : "false";
    out += ",\"approximate\":false},";
}

}  // namespace

std::string json_escaped(sv text) {
    std::string made;
    for (const char each : text) {
        const auto byte = static_cast<unsigned char>(each);
        if (byte < 0x20) {
            made.append("\\u00").push_back(kHexDigits[byte >> 4]);
            made.push_back(kHexDigits[byte & 15]);
            continue;
        }
        if (each == '"' || each == '\\') made.push_back('\\');
        made.push_back(each);
    }
    return made;
}

std::string answer_body(const Answer& answer, sv policy, bool costs_are_delays, double routing_s) {
    const Prediction& found = answer.prediction;
    std::string out = "{";
    append_text(out, "replica", found.replica);
    out.append("\"dp_rank\":");
    out.append(found.dp_rank < 0 ? "null" : std::to_string(found.dp_rank)).append(",");
    append_text(out, "model", found.model);
    append_text(out, "policy", policy);
    append_count(out, "prompt_tokens", found.prompt_tokens);
    out += "\"cost\":";
    append_number(out, answer.cost, 1e-3);
    out += ",";
    append_hit(out, answer);
    append_count(out, "expected_tokens", found.expected_tokens);
    append_text(out, "reason", reason_of(answer, costs_are_delays));
    out += "\"routing_seconds\":";
    append_number(out, routing_s, 1e-6);
    out += "}";
    return out;
}

}  // namespace kvroute::plane
