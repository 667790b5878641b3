#include "plane/report.hpp"

#include <algorithm>
#include <array>
#include <charconv>

#include "plane/ask.hpp"
#include "plane/json_walk.hpp"

namespace kvroute::plane {
namespace {

using sv = std::string_view;

constexpr sv kPrefix = "/reservations/";
constexpr std::size_t kMostDigits = 12;  // of a count of tokens
constexpr std::size_t kMostBytes = 65'536;  // as `MAX_REPORT_BYTES` of router/doors/http/selection.py

bool is_space(sv text) { return text.find_first_not_of(" \t\r\n") == sv::npos; }

// A number without sign, fraction or exponent.
bool count(Walk& walk, u64& found) {
    const sv text = walk.plain_value();
    if (text.empty() || text.size() > kMostDigits) return false;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), found);
    return error == std::errc() && end == text.data() + text.size();
}

// Takes the fields of an object; `take`: one, whose name is known.
template <class Take>
bool fields(Walk& walk, Take&& take) {
    if (!walk.take('{')) return false;
    if (walk.take('}')) return true;
    for (;;) {
        sv name;
        if (!walk.text(name) || !walk.take(':') || !take(name)) return false;
        if (walk.take('}')) return true;
        if (!walk.take(',')) return false;
    }
}

// An engine's: counts, and what some of them are made of.
bool usage(Walk& walk) {
    u64 ignored = 0;
    return fields(walk, [&](sv name) {
        if (!name.ends_with("_details")) return count(walk, ignored);
        return fields(walk, [&](sv) { return count(walk, ignored); });
    });
}

template <std::size_t size>
bool is_one_of(const std::array<sv, size>& texts, sv text) {
    return std::find(texts.begin(), texts.end(), text) != texts.end();
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
        if (name == "tokens") return count(walk, tokens);
        if (name == "cached_tokens") return count(walk, ignored);
        if (name == "usage") return usage(walk);
        if (is_end && name == "status") {
            return count(walk, status) && status >= 100 && status <= 599;
        }
        if (is_end && name == "failure") return walk.text(text) && is_one_of(kReportedFailures, text);
        if (!is_end || name != "outcome" || !walk.text(text)) return false;
        is_completed = text == "completed";
        return is_one_of(kOutcomes, text);
    };
    if (!is_space(body) && (!fields(walk, take) || !walk.is_at_end())) return std::nullopt;
    return !is_end || is_completed || tokens > 0;
}

}  // namespace kvroute::plane
