#include "http/head.hpp"

#include <algorithm>
#include <array>

#include "http/text.hpp"

namespace kvroute::http {

namespace {

// The problems that heads of requests and of responses share; each side words them differently.
struct Wording {
    Problem malformed, too_large, too_many_fields, unknown_coding;
};

constexpr Wording kOfRequests = {
    {400, "malformed_http", "request: not a well-formed HTTP/1.1 request"},
    {431, "headers_too_large", "headers: longer than the limit of % bytes"},
    {431, "headers_too_large", "headers: more than the limit of %"},
    {501, "unknown_transfer_coding",
     "transfer-encoding: only chunked is decoded here; send the body without others"},
};
constexpr Problem kBadHost = {400, "bad_host",
                              "host: missing, or there twice; an HTTP/1.1 request has one"};
constexpr Problem kInvalidHost = {400, "bad_host", "host: not a host name with or without a port"};
constexpr Problem kOtherVersion = {505, "http_version_not_supported",
                                   "request: only HTTP/1.0 and HTTP/1.1 are spoken here"};

constexpr Wording kOfResponses = {
    {502, "response_broken", "not a well-formed HTTP/1.1 response"},
    {502, "response_broken", "more than % bytes of headers or framing in a row"},
    {502, "response_broken", "more than % headers"},
    {502, "response_broken", "a transfer coding other than chunked"},
};
constexpr Problem kUpgraded = {502, "response_broken", "an upgrade that was not requested"};
constexpr Problem kOddStatus = {502, "response_broken", "status % is not from 200 to 599"};

// The methods that llhttp knows, with the most frequent in front. RFC 9110 9.1: a method that is not
// recognised is an error of the client's. CONNECT is left out, as there are no tunnels.
constexpr std::array<std::string_view, 34> kMethods = {
    "POST",      "GET",    "HEAD",   "OPTIONS", "PUT",    "DELETE",      "PATCH",      "TRACE",
    "COPY",      "LOCK",   "MKCOL",  "MOVE",    "PROPFIND", "PROPPATCH", "SEARCH",     "UNLOCK",
    "BIND",      "REBIND", "UNBIND", "ACL",     "REPORT", "MKACTIVITY",  "CHECKOUT",   "MERGE",
    "M-SEARCH",  "NOTIFY", "SUBSCRIBE", "UNSUBSCRIBE", "PURGE", "MKCALENDAR", "LINK",  "UNLINK",
    "SOURCE",    "QUERY"};

// Reads the parts of a head one behind the other. Where the bytes end in the middle of a part, what
// is there has been checked: a client that speaks another protocol is refused with its first byte.
class Scanner {
public:
    Scanner(std::string_view bytes, const Bounds& bounds, const Wording& wording, Problem& problem)
        : begin_(bytes.data()),
          at_(begin_),
          end_(begin_ + std::min(bytes.size(), bounds.head_bytes)),
          is_over_bound_(bytes.size() > bounds.head_bytes),
          bounds_(bounds),
          wording_(wording),
          problem_(problem) {}

    std::size_t used() const { return static_cast<std::size_t>(at_ - begin_); }

    Parsed refuse(const Problem& problem, std::uint64_t value = 0) {
        problem_ = problem;
        problem_.value = value;
        return Parsed::bad;
    }
    Parsed malformed() { return refuse(wording_.malformed); }

    // RFC 9112 2.2: "a server ... SHOULD ignore at least one empty line (CRLF) received prior to
    // the request-line."
    Parsed empty_lines() {
        while (at_ != end_ && *at_ == '\r') {
            if (const Parsed found = line_end(); found != Parsed::whole) return found;
        }
        return at_ == end_ ? cut() : Parsed::whole;
    }

    Parsed literal(std::string_view expected) {
        for (const char byte : expected) {
            if (at_ == end_) return cut();
            if (*at_ != byte) return malformed();
            ++at_;
        }
        return Parsed::whole;
    }

    // RFC 9112 2.2 lets a recipient take a bare LF for a line's end; two that choose differently
    // read different messages.
    Parsed line_end() { return literal("\r\n"); }

    // Reads one or more bytes of that kind, and `behind`. Where it is cut short, finds what there is.
    Parsed word(Kind kind, char behind, std::string_view& found) {
        const char* const from = at_;
        at_ = skip(at_, end_, kind);
        found = {from, static_cast<std::size_t>(at_ - from)};
        if (at_ == end_) return cut();
        if (*at_ != behind || found.empty()) return malformed();
        ++at_;
        return Parsed::whole;
    }

    // Reads the rest of the line, without the white space around it.
    Parsed text(std::string_view& found) {
        const char* from = at_;
        at_ = skip_text(at_, end_);
        if (at_ == end_) return cut();
        const char* until = at_;
        if (const Parsed end = line_end(); end != Parsed::whole) return end;
        while (from != until && is_blank(*from)) ++from;
        while (from != until && is_blank(until[-1])) --until;
        found = {from, static_cast<std::size_t>(until - from)};
        return Parsed::whole;
    }

    Parsed digit(int& found) {
        if (at_ == end_) return cut();
        if (*at_ < '0' || *at_ > '9') return malformed();
        found = *at_++ - '0';
        return Parsed::whole;
    }

    bool is_at(char byte) const { return at_ != end_ && *at_ == byte; }

    // Reads fields up to the empty line. `note` gets each, and returns false if it breaks a rule.
    template <class Note>
    Parsed fields(std::vector<Field>& fields, const Note& note) {
        while (!is_at('\r')) {
            Field field;
            // RFC 9112 5.1: no white space before the colon; 5.2: none at the start of a line,
            // which would continue the one before (obs-fold). A token has none.
            Parsed found = word(kToken, ':', field.name);
            if (found == Parsed::whole) found = text(field.value);
            if (found != Parsed::whole) return found;
            if (!note(field)) return malformed();
            if (fields.size() == bounds_.fields) {
                return refuse(wording_.too_many_fields, bounds_.fields);
            }
            fields.push_back(field);
        }
        return line_end();
    }

private:
    static bool is_blank(char byte) { return byte == ' ' || byte == '\t'; }

    Parsed cut() {
        return is_over_bound_ ? refuse(wording_.too_large, bounds_.head_bytes) : Parsed::partial;
    }

    const char* begin_;
    const char* at_;
    const char* end_;
    bool is_over_bound_;
    const Bounds& bounds_;
    const Wording& wording_;
    Problem& problem_;
};

// RFC 9110 4.2.1 and RFC 3986 3.2.2: a name or an address, an IPv6 one in brackets, with or without
// a port. The text in brackets is only checked for bytes of a host.
bool is_host_and_port(std::string_view value) {
    const bool is_bracketed = value.starts_with('[');
    std::size_t host_end = value.find(is_bracketed ? ']' : ':');
    if (is_bracketed && host_end++ == value.npos) return false;
    const std::string_view host = value.substr(0, host_end), port = value.substr(host.size());
    const char* const end = host.data() + host.size();
    if (skip(host.data(), end, kHost) != end) return false;
    if (!is_bracketed && host.find_first_of("[]") != host.npos) return false;
    return port.empty() || (port[0] == ':' && port.find_first_not_of("0123456789", 1) == port.npos);
}

// The framing of the body and the options of the connection, from the fields of a head.
class Framed {
public:
    bool has_length = false, is_chunked = false, has_unknown_coding = false;
    bool closes = false, keeps_alive = false;
    bool has_upgrade = false, names_upgrade = false;  // the field, the connection option
    bool has_valid_host = true, expects_continue = false;
    int hosts = 0;
    std::uint64_t length = 0;

    // False where the field breaks the message's framing.
    bool note(const Field& field) {
        const std::string_view name = field.name, value = field.value;
        switch (name.size()) {
        case 4:
            if (same_name(name, "host")) note_host(value);
            return true;
        case 6:
            // RFC 9110 10.1.1: the one expectation there is.
            if (same_name(name, "expect")) expects_continue = same_name(value, "100-continue");
            return true;
        case 7: has_upgrade = has_upgrade || same_name(name, "upgrade"); return true;
        case 10:
            if (same_name(name, "connection")) note_connection(value);
            return true;
        case 14: return !same_name(name, "content-length") || take_length(value);
        case 17: return !same_name(name, "transfer-encoding") || take_codings(value);
        default: return true;
        }
    }

private:
    void note_host(std::string_view value) {
        ++hosts;
        has_valid_host = has_valid_host && is_host_and_port(value);
    }

    void note_connection(std::string_view options) {
        while (!options.empty()) {
            const std::string_view option = take_element(options);
            closes = closes || same_name(option, "close");
            keeps_alive = keeps_alive || same_name(option, "keep-alive");
            names_upgrade = names_upgrade || same_name(option, "upgrade");
        }
    }

    // RFC 9112 6.3: a list of equal lengths may be taken for one; this refuses it, as it does a
    // length beside a coding, which "might indicate an attempt to perform request smuggling".
    bool take_length(std::string_view value) {
        if (has_length || is_chunked || has_unknown_coding || value.empty()) return false;
        has_length = true;
        for (const char byte : value) {
            if (byte < '0' || byte > '9') return false;
            const auto digit = static_cast<std::uint64_t>(byte - '0');
            if (length > (~std::uint64_t{0} - digit) / 10) return false;
            length = length * 10 + digit;
        }
        return true;
    }

    // RFC 9112 6.1: "a sender MUST NOT apply the chunked transfer coding more than once", and it is
    // the last one. Others are well-formed, and not decoded here.
    bool take_codings(std::string_view value) {
        if (has_length || value.empty()) return false;
        for (bool is_last = false; !is_last;) {
            if (is_chunked) return false;
            is_last = value.find(',') == value.npos;
            is_chunked = same_name(take_element(value), "chunked");
            has_unknown_coding = has_unknown_coding || !is_chunked;
        }
        return true;
    }
};

Parsed read_request_line(Scanner& scanner, RequestHead& head) {
    Parsed found = scanner.empty_lines();
    if (found != Parsed::whole) return found;
    found = scanner.word(kToken, ' ', head.method);
    if (found == Parsed::bad) return found;
    const bool is_known = std::any_of(kMethods.begin(), kMethods.end(), [&](std::string_view each) {
        return found == Parsed::whole ? each == head.method : each.starts_with(head.method);
    });
    if (!is_known) return scanner.malformed();
    if (found == Parsed::partial) return found;
    int major = 0;
    found = scanner.word(kVisible, ' ', head.target);
    if (found == Parsed::whole) found = scanner.literal("HTTP/");
    if (found == Parsed::whole) found = scanner.digit(major);
    if (found == Parsed::whole) found = scanner.literal(".");
    if (found == Parsed::whole) found = scanner.digit(head.minor);
    if (found == Parsed::whole) found = scanner.line_end();
    if (found != Parsed::whole) return found;
    if (major == 1 && head.minor < 2) return Parsed::whole;
    const bool exists = (major == 2 && head.minor == 0) || (major == 0 && head.minor == 9);
    return exists ? scanner.refuse(kOtherVersion) : scanner.malformed();
}

// Returns the origin-form of a target: "/path?query" as it is, and the same behind "http://host" (RFC
// 9112 3.2.2: "a server MUST accept the absolute-form"). Empty where there is none. A user's name
// before the host is an error (RFC 9110 4.2.4), and a fragment is for the client alone.
std::string_view origin_form_of(std::string_view target) {
    if (target == "*") return target;
    if (target.front() != '/') {
        const std::size_t scheme = target.find("://");
        if (scheme == target.npos) return {};
        const std::string_view name = target.substr(0, scheme);
        if (!same_name(name, "http") && !same_name(name, "https")) return {};
        target.remove_prefix(scheme + 3);
        const std::string_view authority = target.substr(0, target.find('/'));
        if (authority.size() == target.size() || !is_host_and_port(authority)) return {};
        if (authority.empty() || authority[0] == ':') return {};  // RFC 9110 4.2.1
        target.remove_prefix(authority.size());
    }
    return target.substr(0, target.find('#'));
}

Parsed conclude(Scanner& scanner, RequestHead& head, const Framed& framed) {
    if (framed.has_unknown_coding) return scanner.refuse(kOfRequests.unknown_coding);
    // RFC 9112 3.2: "A server MUST respond with a 400 ... to any HTTP/1.1 request message that
    // lacks a Host header field and to any request message that contains more than one Host header
    // field line or a Host header field with an invalid field value."
    if (framed.hosts > 1 || (framed.hosts == 0 && head.minor == 1)) return scanner.refuse(kBadHost);
    if (!framed.has_valid_host) return scanner.refuse(kInvalidHost);
    head.framing = framed.is_chunked   ? Framing::chunked
                   : framed.has_length ? Framing::length
                                       : Framing::none;
    head.length = framed.length;
    head.upgrades = framed.has_upgrade && framed.names_upgrade;
    // RFC 9112 6.1: chunks from a client of HTTP/1.0 are faulty framing, and its connection must be
    // closed; every connection of HTTP/1.0 is.
    head.keeps_alive = head.minor == 1 && !framed.closes && !head.upgrades;
    // RFC 9110 10.1.1: in a request of HTTP/1.0 it "MUST" be ignored.
    head.expects_continue = head.minor == 1 && framed.expects_continue;
    return Parsed::whole;
}

Parsed read_status_line(Scanner& scanner, ResponseHead& head) {
    int hundreds = 0, tens = 0, ones = 0;
    Parsed found = scanner.literal("HTTP/1.");
    if (found == Parsed::whole) found = scanner.digit(head.minor);
    if (found == Parsed::whole && head.minor > 1) found = scanner.malformed();
    if (found == Parsed::whole) found = scanner.literal(" ");
    if (found == Parsed::whole) found = scanner.digit(hundreds);
    if (found == Parsed::whole) found = scanner.digit(tens);
    if (found == Parsed::whole) found = scanner.digit(ones);
    if (found != Parsed::whole) return found;
    head.status = 100 * hundreds + 10 * tens + ones;
    // Some servers leave out the reason with the space before it.
    if (!scanner.is_at('\r')) found = scanner.literal(" ");
    return found == Parsed::whole ? scanner.text(head.reason) : found;
}

// RFC 9112 6.3, in its order.
Parsed conclude(Scanner& scanner, ResponseHead& head, const Framed& framed, bool is_of_head_request) {
    if (head.status == 101) return scanner.refuse(kUpgraded);
    const bool is_interim = head.status >= 100 && head.status < 200;
    if (!is_interim && (head.status < 200 || head.status > 599)) {
        return scanner.refuse(kOddStatus, static_cast<std::uint64_t>(head.status));
    }
    if (framed.has_unknown_coding) return scanner.refuse(kOfResponses.unknown_coding);
    // An interim response has no body, and must not announce one (RFC 9112 6.1, RFC 9110 8.6): some
    // readers would take the final response for that body.
    if (is_interim && (framed.is_chunked || framed.length > 0)) return scanner.malformed();
    const bool has_no_body = is_interim || head.status == 204 || head.status == 304;
    head.framing = has_no_body || is_of_head_request ? Framing::none
                   : framed.is_chunked               ? Framing::chunked
                   : framed.has_length               ? Framing::length
                                                     : Framing::until_close;
    head.length = framed.length;
    // RFC 9112 9.3, and 6.1 for chunks from a server of HTTP/1.0.
    const bool is_persistent = head.minor == 1 || (framed.keeps_alive && !framed.is_chunked);
    head.keeps_alive = is_persistent && !framed.closes && head.framing != Framing::until_close;
    return Parsed::whole;
}

}  // namespace

std::string Problem::text() const {
    const std::string_view all(message);
    const std::size_t at = all.find('%');
    if (at == all.npos) return std::string(all);
    return std::string(all.substr(0, at)) + std::to_string(value) + std::string(all.substr(at + 1));
}

Parsed parse_request(std::string_view bytes, const Bounds& bounds, RequestHead& head,
                     std::size_t& used, Problem& problem) {
    Scanner scanner(bytes, bounds, kOfRequests, problem);
    Framed framed;
    head.fields.clear();
    Parsed found = read_request_line(scanner, head);
    if (found != Parsed::whole) return found;
    head.origin_form = origin_form_of(head.target);
    if (head.origin_form.empty()) return scanner.malformed();
    found = scanner.fields(head.fields, [&](const Field& field) { return framed.note(field); });
    if (found == Parsed::whole) found = conclude(scanner, head, framed);
    used = scanner.used();
    return found;
}

Parsed parse_response(std::string_view bytes, const Bounds& bounds, bool is_of_head_request,
                      ResponseHead& head, std::size_t& used, Problem& problem) {
    Scanner scanner(bytes, bounds, kOfResponses, problem);
    Framed framed;
    head.fields.clear();
    Parsed found = read_status_line(scanner, head);
    if (found != Parsed::whole) return found;
    found = scanner.fields(head.fields, [&](const Field& field) { return framed.note(field); });
    if (found == Parsed::whole) found = conclude(scanner, head, framed, is_of_head_request);
    used = scanner.used();
    return found;
}

bool is_worth_parsing(std::string_view bytes, std::size_t before, const Bounds& bounds) {
    return before == 0 || bytes.size() > bounds.head_bytes ||
           bytes.find('\n', before) != bytes.npos;
}

}  // namespace kvroute::http
