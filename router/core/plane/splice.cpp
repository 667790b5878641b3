#include "plane/splice.hpp"

#include <algorithm>

#include "plane/json_walk.hpp"

namespace kvroute::plane {
namespace {

using sv = std::string_view;

constexpr sv kSpace = " \t\r\n";

std::size_t skip_space(sv text, std::size_t at) {
    return std::min(text.find_first_not_of(kSpace, at), text.size());
}

// Returns the place behind the string that begins at `at`.
std::size_t string_end(sv text, std::size_t at) {
    for (++at; at < text.size() && text[at] != '"'; ++at) {
        if (text[at] == '\\') ++at;
    }
    return std::min(at + 1, text.size());
}

// Returns the place behind the value that begins at `at`.
std::size_t value_end(sv text, std::size_t at) {
    std::size_t depth = 0;
    while (at < text.size()) {
        const char each = text[at];
        if (each == '"') {
            at = string_end(text, at);
            if (depth == 0) return at;
            continue;
        }
        if (each == '[' || each == '{') ++depth;
        if (depth == 0 && (each == ',' || each == '}')) return at;
        ++at;
        if ((each == ']' || each == '}') && --depth == 0) return at;
        if (depth > 0) at = std::min(text.find_first_of("\"[]{}", at), text.size());
    }
    return at;
}

std::string quoted(sv name) { return std::string("\"").append(json_escaped(name)).append("\""); }

// `replaced`: counts the values replaced.
std::optional<std::string> with_value(sv body, sv name, sv value, std::size_t& replaced) {
    std::string made;
    std::size_t copied = 0, at = body.find('{');
    while (at < body.size()) {
        at = skip_space(body, at + 1);
        if (at >= body.size() || body[at] != '"') break;
        const std::size_t key_end = string_end(body, at);
        const sv key = body.substr(at + 1, key_end - at - 2);
        if (key.find('\\') != sv::npos) return std::nullopt;
        const std::size_t start = skip_space(body, skip_space(body, key_end) + 1);
        at = value_end(body, start);
        if (key == name) {
            // What stands before the comma stays: a number's value has no end of its own.
            std::size_t end = at;
            while (end > start && kSpace.find(body[end - 1]) != sv::npos) --end;
            made += body.substr(copied, start - copied);
            made += value;
            copied = end;
            ++replaced;
        }
        at = skip_space(body, at);
        if (at >= body.size() || body[at] != ',') break;
    }
    made += body.substr(copied);
    return made;
}

}  // namespace

std::optional<std::string> with_model(sv body, sv name) {
    std::size_t replaced = 0;
    return with_value(body, "model", quoted(name), replaced);
}

std::optional<std::string> with_field(sv body, sv name, sv value) {
    std::size_t replaced = 0;
    std::optional<std::string> made = with_value(body, name, value, replaced);
    if (!made || replaced) return made;
    const std::string first = quoted(name).append(":").append(value).append(",");
    return made->insert(made->find('{') + 1, first);
}

}  // namespace kvroute::plane
