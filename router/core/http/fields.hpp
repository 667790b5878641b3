// Fields of a message (RFC 9110 5): names and values as views of the bytes that were parsed.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace kvroute::http {

struct Field {
    std::string_view name;   // as sent
    std::string_view value;  // without the white space around it
};

// Names are compared without case (RFC 9110 5.1). `lower`: in lower case.
bool same_name(std::string_view any_case, std::string_view lower);

// Returns the value of the first field of that name; empty where there is none.
std::string_view value_of(const std::vector<Field>& fields, std::string_view lower_name);

// True where the field is about one connection, and so is not passed on.
bool is_hop_by_hop(std::string_view any_case_name);

std::string lower_name(std::string_view any_case_name);

// `lower_prefix`: in lower case.
bool begins_with(std::string_view any_case, std::string_view lower_prefix);

// The lines of a list field as one (RFC 9110 5.3): the only one, or `joined`, into which they are written.
std::string_view list_of(const std::vector<Field>& fields, std::string_view lower_name,
                         std::string& joined);

// Takes the first element off a list (RFC 9110 5.6.1): "a , b" gives "a" and leaves "b".
std::string_view take_element(std::string_view& list);

// True where a list has an element, in any case (RFC 9110 7.6.1: the options of a connection).
bool lists(std::string_view elements, std::string_view name);

// A small set of field names.
class Names {
public:
    void add(std::string lower_name) { names_.push_back(std::move(lower_name)); }
    bool contain(std::string_view any_case) const;

private:
    std::vector<std::string> names_;
};

}  // namespace kvroute::http
