#include "plane/report.hpp"

#include "plane/ask.hpp"
#include "plane/json_walk.hpp"

namespace kvroute::plane {
namespace {

using sv = std::string_view;

constexpr sv kPrefix = "/reservations/";
constexpr std::size_t kMostBytes = 65'536;  // as `MAX_REPORT_BYTES` of router/doors/http/selection.py

bool is_space(sv text) { return text.find_first_not_of(" \t\r\n") == sv::npos; }

// An engine's: counts, and what some of them are made of.
bool usage(Walk& walk) {
    u64 ignored = 0;
    return walk.plain_object([&](sv name) {
        if (!name.ends_with("_details")) return walk.count(ignored);
        return walk.plain_object([&](sv) { return walk.count(ignored); });
    });
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

std::optional<bool> has_begun(ReportKind kind, sv body) {
    if (body.size() > kMostBytes) return std::nullopt;
    if (kind == ReportKind::first_token) return true;  // whatever else it says
    u64 tokens = 0, status = 200, ignored = 0;
    bool is_completed = true;
    Walk walk(body);
    const bool is_end = kind == ReportKind::end;
    const auto take = [&](sv name) {
        sv text;
        if (name == "tokens") return walk.count(tokens);
        if (name == "cached_tokens") return walk.count(ignored);
        if (name == "usage") return usage(walk);
        if (is_end && name == "status") {
            return walk.count(status) && status >= 100 && status <= 599;
        }
        if (is_end && name == "failure") return walk.text(text) && is_among(kReportedFailures, text);
        if (!is_end || name != "outcome" || !walk.text(text)) return false;
        is_completed = text == "completed";
        return is_among(kOutcomes, text);
    };
    if (!is_space(body) && (!walk.plain_object(take) || !walk.is_at_end())) return std::nullopt;
    return !is_end || is_completed || tokens > 0;
}

}  // namespace kvroute::plane
