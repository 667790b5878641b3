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

// Whether its first token must have been there by then. Nothing where its body needs a closer look: it
// may be wrong.
std::optional<bool> has_begun(ReportKind kind, std::string_view body);

}  // namespace kvroute::plane
