#include "plane/report.hpp"

#include <algorithm>
#include <array>

#include "plane/ask.hpp"
#include "plane/json_walk.hpp"

namespace kvroute::plane {
namespace {

using sv = std::string_view;

constexpr sv kPrefix = "/reservations/";
constexpr std::size_t kMostBytes = 65'536;  // as `MAX_REPORT_BYTES` of router/doors/http/selection.py

bool is_space(sv text) { return text.find_first_not_of(" \t\r\n") == sv::npos; }

void append_member(std::string& out, sv name, u64 value) {
    if (out.back() != '{') out += ',';
    out.append("\"").append(name).append("\":").append(std::to_string(value));
}

void append_details(std::string& out, sv name, std::optional<u64> cached_tokens) {
    if (out.back() != '{') out += ',';
    out.append("\"").append(name).append("\":{");
    if (cached_tokens) append_member(out, "cached_tokens", *cached_tokens);
    out += '}';
}

// Reads an engine's usage: counts and their details. `out`: those of `EngineUsage` of
// router/doors/http/request_bodies.py that are read; of two with one name the last one counts.
bool usage(Walk& walk, std::string& out) {
    constexpr std::array kCounts = {sv("prompt_tokens"), sv("input_tokens"),
                                    sv("cache_read_input_tokens")};
    constexpr std::array kDetails = {sv("prompt_tokens_details"), sv("input_tokens_details")};
    std::array<std::optional<u64>, kCounts.size()> counts;
    std::array<std::optional<std::optional<u64>>, kDetails.size()> details;
    const auto at = [](const auto& names, sv name) {
        return static_cast<std::size_t>(std::find(names.begin(), names.end(), name) - names.begin());
    };
    u64 ignored = 0;
    const bool is_plain = walk.plain_object([&](sv name) {
        if (!name.ends_with("_details")) {
            const std::size_t place = at(kCounts, name);
            return walk.count(place < kCounts.size() ? counts[place].emplace() : ignored);
        }
        std::optional<u64> cached;
        const bool is_known = walk.plain_object([&](sv part) {
            return walk.count(part == "cached_tokens" ? cached.emplace() : ignored);
        });
        const std::size_t place = at(kDetails, name);
        if (place < kDetails.size()) details[place] = cached;
        return is_known;
    });
    out.assign(1, '{');
    for (std::size_t place = 0; place < kCounts.size(); ++place) {
        if (counts[place]) append_member(out, kCounts[place], *counts[place]);
    }
    for (std::size_t place = 0; place < kDetails.size(); ++place) {
        if (details[place]) append_details(out, kDetails[place], *details[place]);
    }
    out += '}';
    return is_plain;
}

// See `OutputReport` and `ReservationEnd` of router/doors/http/request_bodies.py.
constexpr std::array kOutcomes = {sv("completed"), sv("client_left"), sv("failed")};
constexpr std::array kReportedFailures = {sv("connect"), sv("closed"), sv("first_byte_timeout"),
                                          sv("unavailable")};

}  // namespace

std::optional<Report> report_of(sv method, sv target) {
    if (!target.starts_with(kPrefix)) return std::nullopt;
    target.remove_prefix(kPrefix.size());
    const sv id = target.substr(0, target.find('/')), step = target.substr(id.size());
    if (!is_reservation_id(id)) return std::nullopt;
    if (method == "DELETE" && step.empty()) return Report{ReportKind::end, id};
    if (method != "POST") return std::nullopt;
    if (step == "/prefill_complete") return Report{ReportKind::first_token, id};
    if (step == "/output") return Report{ReportKind::output, id};
    return std::nullopt;
}

std::string ReportBody::usage_body(u64 prompt_tokens) const {
    std::string made = "{\"usage\":";
    if (!usage.empty()) return made.append(usage).append("}");
    if (!cached_tokens) return {};
    made += '{';
    append_member(made, "prompt_tokens", prompt_tokens);
    append_details(made, "prompt_tokens_details", cached_tokens);
    return made.append("}}");
}

std::optional<ReportBody> read_report(ReportKind kind, sv body) {
    if (body.size() > kMostBytes) return std::nullopt;
    ReportBody found;
    if (kind == ReportKind::first_token) return found;  // its body does not matter
    u64 status = 200;
    bool is_completed = true, has_failed = false;
    Walk walk(body);
    const bool is_end = kind == ReportKind::end;
    const auto take = [&](sv name) {
        sv text;
        if (name == "tokens") return walk.count(found.tokens);
        if (name == "cached_tokens") return walk.count(found.cached_tokens.emplace());
        if (name == "usage") return usage(walk, found.usage);
        if (is_end && name == "status") {
            return walk.count(status) && status >= 100 && status <= 599;
        }
        if (is_end && name == "failure") {
            has_failed = true;
            return walk.text(text) && is_among(kReportedFailures, text);
        }
        if (!is_end || name != "outcome" || !walk.text(text)) return false;
        is_completed = text == "completed";
        return is_among(kOutcomes, text);
    };
    if (!is_space(body) && (!walk.plain_object(take) || !walk.is_at_end())) return std::nullopt;
    found.has_begun = !is_end || is_completed || found.tokens > 0;
    found.is_whole = is_completed && !has_failed && status == 200;
    found.is_error = is_error(static_cast<int>(status));
    return found;
}

void note(Reserved& reserved, const ReportBody& report, double now) {
    Settled& of = reserved.so_far;
    std::string usage = report.usage_body(of.prompt_tokens);
    if (!usage.empty()) of.ended.usage = std::move(usage);
    of.ended.events += report.tokens;
    of.ended.is_json = true;
    if (of.first_byte_s == 0) of.first_byte_s = std::max(now - of.began_at, 1e-9);
    reserved.touched_at = now;
}

}  // namespace kvroute::plane
