// What gateways report of their reservations, as far as it is plain. No I/O.
#pragma once

#include <optional>
#include <string_view>

#include "plane/types.hpp"

namespace kvroute::plane {

struct Report {
    ReportKind kind = ReportKind::end;
    std::string_view id;  // of the reservation
};

// What a request reports by its method and target. Nothing: it is no report.
std::optional<Report> report_of(std::string_view method, std::string_view target);

// What its body says.
struct ReportBody {
    bool has_begun = true;  // whether the first token must have been there by then
    bool is_whole = true;   // it was served whole, with status 200; of an end
    u64 tokens = 0;         // more of the response
    std::optional<u64> cached_tokens;
    std::string usage;      // what Python reads of the engine's report, as JSON; empty: there is none

    // That report as a response has it, or else one made of the cached tokens; empty: there is neither.
    std::string usage_body(u64 prompt_tokens) const;
};

// Nothing where it needs a closer look: it may be wrong.
std::optional<ReportBody> read_report(ReportKind kind, std::string_view body);

// Has what is known of a reservation include what a report says, which is not its last one.
void note(Reserved& reserved, const ReportBody& report, double now);

}  // namespace kvroute::plane
