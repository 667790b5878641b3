#include "http/write.hpp"

#include <charconv>

#include "http/text.hpp"

namespace kvroute::http {

namespace {

bool is_all(std::string_view bytes, Kind kind) {
    const char* const end = bytes.data() + bytes.size();
    return skip(bytes.data(), end, kind) == end;
}

bool is_text(std::string_view bytes) {
    const char* const end = bytes.data() + bytes.size();
    return skip_text(bytes.data(), end) == end;
}

void append_in(std::string& to, std::uint64_t number, int base) {
    char digits[20];
    const auto end = std::to_chars(digits, digits + sizeof digits, number, base).ptr;
    to.append(digits, end);
}

// RFC 9110 15, and 6585 4 and 5.
std::string_view reason_of(int status) {
    switch (status) {
    case 100: return "Continue";
    case 200: return "OK";
    case 201: return "Created";
    case 202: return "Accepted";
    case 204: return "No Content";
    case 206: return "Partial Content";
    case 301: return "Moved Permanently";
    case 302: return "Found";
    case 303: return "See Other";
    case 304: return "Not Modified";
    case 307: return "Temporary Redirect";
    case 308: return "Permanent Redirect";
    case 400: return "Bad Request";
    case 401: return "Unauthorized";
    case 402: return "Payment Required";
    case 403: return "Forbidden";
    case 404: return "Not Found";
    case 405: return "Method Not Allowed";
    case 406: return "Not Acceptable";
    case 408: return "Request Timeout";
    case 409: return "Conflict";
    case 410: return "Gone";
    case 411: return "Length Required";
    case 413: return "Content Too Large";
    case 414: return "URI Too Long";
    case 415: return "Unsupported Media Type";
    case 417: return "Expectation Failed";
    case 422: return "Unprocessable Content";
    case 424: return "Failed Dependency";
    case 429: return "Too Many Requests";
    case 431: return "Request Header Fields Too Large";
    case 499: return "Client Closed Request";
    case 500: return "Internal Server Error";
    case 501: return "Not Implemented";
    case 502: return "Bad Gateway";
    case 503: return "Service Unavailable";
    case 504: return "Gateway Timeout";
    case 505: return "HTTP Version Not Supported";
    default: return {};
    }
}

}  // namespace

void append_status(std::string& to, int status, std::string_view reason) {
    to.append("HTTP/1.1 ");
    append_in(to, static_cast<std::uint64_t>(status), 10);
    to.push_back(' ');
    if (is_text(reason)) to.append(reason.empty() ? reason_of(status) : reason);
    to.append(kLineEnd);
}

bool append_request_line(std::string& to, std::string_view method, std::string_view target) {
    if (method.empty() || !is_all(method, kToken)) return false;
    if (target.empty() || !is_all(target, kVisible)) return false;
    to.append(method).append(" ").append(target).append(" HTTP/1.1\r\n");
    return true;
}

bool append_field(std::string& to, std::string_view name, std::string_view value) {
    if (name.empty() || !is_all(name, kToken) || !is_text(value)) return false;
    to.append(name).append(": ").append(value).append(kLineEnd);
    return true;
}

bool append_number(std::string& to, std::string_view name, std::uint64_t value) {
    char digits[20];
    const auto end = std::to_chars(digits, digits + sizeof digits, value).ptr;
    return append_field(to, name, {digits, static_cast<std::size_t>(end - digits)});
}

void append_chunk_head(std::string& to, std::size_t payload_bytes) {
    append_in(to, payload_bytes, 16);
    to.append(kLineEnd);
}

}  // namespace kvroute::http
