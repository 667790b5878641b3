#include "plane/errors.hpp"

#include "http/write.hpp"
#include "plane/json_walk.hpp"

namespace kvroute::plane {
namespace {

std::string plain(std::string_view text) {
    std::string made(text);
    for (char& each : made) {
        if (static_cast<u8>(each) < 0x20 || static_cast<u8>(each) > 0x7E) each = '?';
    }
    return made;
}

}  // namespace

Respond error_response(int status, std::string_view code, std::string_view message) {
    Respond made;
    made.status = status;
    made.body.append("{\"error\": {\"message\": \"").append(json_escaped(plain(message)));
    made.body.append("\", \"type\": \"");
    made.body += status < 500 ? "invalid_request_error" : "server_error";
    made.body.append("\", \"code\": \"").append(code).append("\"}}");
    if (status == 503) made.fields.emplace_back("retry-after", "1");
    made.fields.emplace_back("content-type", "application/json");
    made.fields.emplace_back("content-length", std::to_string(made.body.size()));
    return made;
}

std::string whole_error_response(int status, std::string_view code, std::string_view message,
                                 bool closes) {
    const Respond error = error_response(status, code, message);
    std::string text;
    http::append_status(text, status);
    for (const auto& [name, value] : error.fields) http::append_field(text, name, value);
    if (closes) http::append_field(text, "connection", "close");
    text += http::kLineEnd;
    text += error.body;
    return text;
}

const Respond kShuttingDownError = [] {
    Respond made =
        error_response(503, "shutting_down", "the router is shutting down; try again");
    made.fields.emplace_back("connection", "close");
    return made;
}();
const Respond kNoFilesError =
    error_response(503, "overloaded", "the router is out of file descriptors; try again");
const std::string kOutOfMemoryResponse = whole_error_response(503, "overloaded", kOutOfMemory);
const std::string kOutOfMemoryAnswer = whole_error_response(503, "overloaded", kOutOfMemory, false);

}  // namespace kvroute::plane
