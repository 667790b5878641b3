#include "http/fields.hpp"

#include <algorithm>

#include "http/text.hpp"

namespace kvroute::http {

bool same_name(std::string_view any_case, std::string_view lower_name) {
    if (any_case.size() != lower_name.size()) return false;
    for (std::size_t at = 0; at < any_case.size(); ++at) {
        if (lower(any_case[at]) != lower_name[at]) return false;
    }
    return true;
}

std::string lower_name(std::string_view name) {
    std::string made(name);
    for (char& each : made) each = lower(each);
    return made;
}

bool begins_with(std::string_view any_case, std::string_view lower_prefix) {
    return any_case.size() >= lower_prefix.size() &&
           same_name(any_case.substr(0, lower_prefix.size()), lower_prefix);
}

std::string_view value_of(const std::vector<Field>& fields, std::string_view lower_name) {
    for (const Field& field : fields) {
        if (same_name(field.name, lower_name)) return field.value;
    }
    return {};
}

// RFC 9110 7.6.1 names the first five; the others apply to one hop by their own definitions: 11.7
// proxy authentication, 6.6.2 trailer (trailers are not passed on), RFC 7540 3.2.1.
bool is_hop_by_hop(std::string_view name) {
    switch (name.size()) {
    case 2: return same_name(name, "te");
    case 7: return same_name(name, "upgrade") || same_name(name, "trailer");
    case 10: return same_name(name, "connection") || same_name(name, "keep-alive");
    case 14: return same_name(name, "http2-settings");
    case 16: return same_name(name, "proxy-connection");
    case 17: return same_name(name, "transfer-encoding");
    case 18: return same_name(name, "proxy-authenticate");
    case 19: return same_name(name, "proxy-authorization");
    default: return false;
    }
}

std::string_view list_of(const std::vector<Field>& fields, std::string_view lower_name,
                         std::string& joined) {
    std::string_view found;
    for (const Field& field : fields) {
        if (field.value.empty() || !same_name(field.name, lower_name)) continue;
        if (found.empty()) {
            found = field.value;
            continue;
        }
        if (joined.empty()) joined = found;
        joined.append(",").append(field.value);
    }
    return joined.empty() ? found : std::string_view(joined);
}

std::string_view take_element(std::string_view& list) {
    const std::size_t comma = list.find(',');
    std::string_view element = list.substr(0, comma);
    list = comma == list.npos ? std::string_view() : list.substr(comma + 1);
    while (!element.empty() && (element.front() == ' ' || element.front() == '\t')) {
        element.remove_prefix(1);
    }
    while (!element.empty() && (element.back() == ' ' || element.back() == '\t')) {
        element.remove_suffix(1);
    }
    return element;
}

bool lists(std::string_view elements, std::string_view name) {
    const std::string sought = lower_name(name);
    while (!elements.empty()) {
        if (same_name(take_element(elements), sought)) return true;
    }
    return false;
}

bool Names::contain(std::string_view any_case) const {
    return std::any_of(names_.begin(), names_.end(),
                       [&](const std::string& each) { return same_name(any_case, each); });
}

}  // namespace kvroute::http
