#include "plane/answer.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include "plane/json_walk.hpp"

namespace kvroute::plane {
namespace {

using sv = std::string_view;

void append_number(std::string& out, double value, int places) {
    std::array<char, 400> digits;  // enough for any number that is finite
    const auto [end, error] = std::to_chars(digits.data(), digits.data() + digits.size(), value,
                                            std::chars_format::fixed, places);
    out.append(digits.data(), end);
}

// Writes a number with a comma before every three digits.
std::string for_people(u64 number) {
    std::string text = std::to_string(number);
    for (std::size_t at = text.size(); at > 3; at -= 3) text.insert(at - 3, 1, ',');
    return text;
}

std::string for_people(double tokens) {
    const double whole = std::nearbyint(tokens);
    std::string text(whole < 0 ? 1 : 0, '-');
    return text.append(for_people(static_cast<u64>(std::abs(whole))));
}

// See `Candidate.hit_in_words` of router/policies/types.py.
std::string hit_in_words(const Answer& answer) {
    const Prediction& found = answer.prediction;
    std::string text = for_people(found.gpu_cached_tokens);
    text.append(" of ").append(for_people(found.prompt_tokens)).append(" tokens ");
    text.append(found.is_estimate() ? "estimated to be cached" : "cached");
    const u64 lower = found.cached_tokens - found.gpu_cached_tokens;
    if (lower > 0) text.append(" and ").append(for_people(lower)).append(" offloaded");
    sv before = " (";
    for (const auto& [tier, tokens] : answer.by_tier) {
        text.append(before).append(for_people(tokens)).append(" ").append(tier);
        before = ", ";
    }
    if (!answer.by_tier.empty()) text += ")";
    if (found.is_estimate()) {
        text.append("; counted by ").append(for_people(found.estimate_trust * 100));
        text.append("%, since there are no events");
    }
    if (found.is_suspect) text += "; discounted, since events were lost";
    return text;
}

void append_text(std::string& out, sv name, sv value) {
    out.append("\"").append(name).append("\":\"").append(json_escaped(value)).append("\",");
}

void append_count(std::string& out, sv name, u64 value) {
    out.append("\"").append(name).append("\":").append(std::to_string(value)).append(",");
}

void append_rank(std::string& out, const Prediction& found) {
    out.append("\"dp_rank\":");
    out.append(found.dp_rank < 0 ? "null" : std::to_string(found.dp_rank)).append(",");
}

void append_headers(std::string& out, const Fields& headers) {
    out += "\"headers\":{";
    for (const auto& [name, value] : headers) append_text(out, name, value);
    out.back() = '}';
    out += ",";
}

// `_overlap` of router/doors/http/route_views.py.
void append_overlap(std::string& out, const Answer& answer) {
    const Prediction& found = answer.prediction;
    u64 in_memory = 0;
    for (const auto& [tier, tokens] : answer.by_tier) {
        if (tier == "CPU" || tier == "cpu") in_memory += tokens;
    }
    out += "\"overlap\":{";
    append_count(out, "longest_matched", found.cached_tokens);
    append_count(out, "gpu", found.gpu_cached_tokens);
    out.append("\"dp\":{\"").append(std::to_string(std::max(found.dp_rank, 0))).append("\":");
    out.append(std::to_string(found.gpu_cached_tokens)).append("},");
    append_count(out, "cpu", std::min(found.gpu_cached_tokens + in_memory, found.cached_tokens));
    append_count(out, "disk", found.cached_tokens);
    out.back() = '}';
    out += ",";
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
    out += ",\"approximate\":";
    out += answer.prediction.is_estimate() ? "true},": "false},";
}

// Appends the hits of the only prompt. Groups that cache nothing are left out.
void append_groups(std::string& out, const std::vector<GroupHit>& groups) {
    // As `GroupKind` of kvevents/layout.py.
    static constexpr std::array kKinds = {sv("full_attention"), sv("sliding_window"),
                                          sv("chunked_local_attention"), sv("mamba")};
    out += "\"groups\":[[";
    sv before;
    for (const GroupHit& each : groups) {
        if (each.kind == GroupKind::not_cached) continue;
        out.append(before).append("{");
        append_count(out, "group", each.group);
        append_text(out, "kind", kKinds[static_cast<std::size_t>(each.kind)]);
        append_count(out, "tokens", each.tokens);
        out.back() = '}';
        before = ",";
    }
    out += "]],";
}

}  // namespace

std::string reason_of(const Answer& answer) {
    std::string text = hit_in_words(answer);
    const auto add = [&text](const std::string& number, sv what) {
        text.append("; ").append(number).append(" ").append(what);
    };
    if (answer.junction_tokens > 0) {
        add(for_people(answer.junction_tokens), "more are worth as much to later prompts");
    }
    if (answer.coming_tokens > 0) add(for_people(answer.coming_tokens), "being computed there");
    const decide::Delays& of = answer.delays;
    const std::pair<double, sv> terms[] = {{of.ahead, "ahead of it"},
                                           {of.own, "to compute"},
                                           {of.work, "for the machine's time"},
                                           {of.behind, "for those behind it"},
                                           {of.evicted, "for what it evicts"}};
    for (const auto& [delay, what] : terms) {
        if (delay >= 0.5) add(for_people(delay), what);
    }
    return text.append(": a delay of ").append(for_people(of.sum())).append(" prefill tokens");
}

std::string answer_body(const Answer& answer, double routing_s) {
    const Prediction& found = answer.prediction;
    std::string out = "{";
    append_text(out, "replica", found.replica);
    append_rank(out, found);
    append_text(out, "model", found.model);
    append_text(out, "policy", "least_delay");
    append_count(out, "prompt_tokens", found.prompt_tokens);
    out += "\"cost\":";
    append_number(out, answer.delays.sum(), 3);
    out += ",";
    append_hit(out, answer);
    append_count(out, "expected_tokens", found.expected_tokens);
    append_text(out, "reason", reason_of(answer));
    out += "\"routing_seconds\":";
    append_number(out, routing_s, 6);
    out += "}";
    return out;
}

u64 AtGateway::block_tokens_of(int dp_rank) const {
    constexpr u64 kUsual = 16;  // as `_BLOCK_SIZE` of router/doors/http/route_views.py
    for (const auto& [rank, tokens] : block_tokens) {
        if (rank == std::max(dp_rank, 0)) return tokens;
    }
    return kUsual;
}

std::string selection_body(const Selection& selection, const std::string& reason) {
    const Answer& answer = selection.answer;
    const Prediction& found = answer.prediction;
    std::string out = "{";
    if (!selection.id.empty()) append_text(out, "selection_id", selection.id);
    append_text(out, "model_name", found.model);
    append_text(out, "replica", found.replica);
    out.append("\"worker_id\":").append(selection.replica.worker_id).append(",");
    append_rank(out, found);
    append_text(out, "endpoint", selection.replica.endpoint);
    append_text(out, "address", selection.replica.address);
    if (!selection.headers.empty()) append_headers(out, selection.headers);
    append_count(out, "block_size", selection.replica.block_tokens_of(found.dp_rank));
    append_overlap(out, answer);
    append_count(out, "isl_tokens", found.prompt_tokens);
    append_count(out, "effective_prefill_tokens",
                 found.prompt_tokens - std::min(found.prompt_tokens, found.cached_tokens));
    append_count(out, "expected_tokens", found.expected_tokens);
    if (selection.groups) append_groups(out, *selection.groups);
    append_hit(out, answer);
    append_text(out, "reason", reason);
    append_text(out, "policy", "least_delay");
    out += "\"cost\":";
    append_number(out, answer.delays.sum(), 3);
    return out += "}";
}

}  // namespace kvroute::plane
