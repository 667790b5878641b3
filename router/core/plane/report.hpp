// Reads gateways' reports on their reservations, as far as they are plain. No I/O.
#pragma once

#include <optional>
#include <string_view>

#include "plane/types.hpp"

namespace kvroute::plane {

struct Report {
    ReportKind kind = ReportKind::end;
    std::string_view id;  // of the reservation
};

// Returns a report's kind and reservation, by method and target. Nothing: the request is no report.
std::optional<Report> report_of(std::string_view method, std::string_view target);

// The body of a report.
struct ReportBody {
    bool has_begun = true;  // whether the first token must have been there by then
    bool is_whole = true;   // it was served whole, with status 200; of an end
    bool is_error = false;  // the replica's response was one; likewise
    u64 tokens = 0;         // more of the response
    std::optional<u64> cached_tokens;
    std::string usage;      // what Python reads of the engine's report, as JSON; empty: there is none

    // Returns `usage` as a response has it, or else one made of the cached tokens; empty: neither.
    std::string usage_body(u64 prompt_tokens) const;
};

// Nothing where Python has to read it: it may be wrong.
std::optional<ReportBody> read_report(ReportKind kind, std::string_view body);

// Adds a report, which is not the last one, to the record of a reservation.
void note(Reserved& reserved, const ReportBody& report, double now);

}  // namespace kvroute::plane
