// What passes between the plane's threads and whoever decides: events up, commands down. Every
// command and every event is about one exchange, a request of a client's connection with its
// response.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "http/fields.hpp"
#include "plane/networks.hpp"
#include "plane/reservations.hpp"

namespace kvroute::plane {

using u8 = std::uint8_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

// Thread, place of the connection and number of the exchange there: never the same twice.
using ExchangeId = u64;

using Fields = std::vector<std::pair<std::string, std::string>>;

struct Timeouts {
    double connect_s = 5.0;
    double first_byte_s = 300.0;  // from the request to the first byte of the body, or its end
    double idle_s = 60.0;         // between two parts of the body, while the client takes them
};

struct Address {
    sockaddr_storage storage{};
    socklen_t length = 0;

    // An IPv4 or IPv6 address, or the path of a Unix socket (which begins with a slash).
    static std::optional<Address> parse(const std::string& host, int port);
};

// --- down: what is to be done ---------------------------------------------------------------------

// Where an engine that orders what waits there reads a request's number.
enum class OrderedBy : u8 {
    nothing,
    header,         // vLLM's; the lowest goes first
    field,          // of the body; likewise
    negated_field,  // the highest goes first
};

// One attempt: where the request goes, and what is changed on its way there and back.
struct Forward {
    std::string origin;  // connections are kept by it
    std::vector<Address> addresses;  // one after the other, until one takes the connection
    std::string secure_host;  // by TLS, to whose certificate has this name; empty: as it is
    std::string authority;    // of the Host header; empty: the client's own goes on
    std::string base_path;    // before the target
    std::optional<std::string> target;  // in place of the client's
    std::vector<std::pair<std::string, std::optional<std::string>>> replaced;  // or left out
    Fields added;             // behind the client's
    Fields reported;          // in the response, in place of the replica's
    std::optional<std::string> body;  // in place of the client's
    Timeouts timeouts;
    bool may_reuse = true;       // a connection that was kept
    bool is_control = false;     // the server behind: sees the client's headers as they came
    bool wants_id = false;       // the beginning of the body is told
    u64 work_tokens = 0;         // to be computed before the first byte, as far as is known
    bool shows_hit = false;      // where it is decided here: the client is told of the hit
    OrderedBy ordered_by = OrderedBy::nothing;  // likewise: how its engine is told when to compute it
    u8 dialect = 0;              // of the event that ends a broken stream: `Options::broken_events`
};
// A response of the router's own.
struct Respond {
    int status = 200;
    Fields fields;
    std::string body;
};
// More of the body is wanted.
struct ReadBody {};
// The response of a replica that says "not now" is the client's after all.
struct PassOn {};
// Close the client's connection, whatever is under way.
struct Cut {};
// Tell all of a request: it will be served by whoever reads it.
struct Open {};

// What a client wants: a prompt of token ids, or one whose ids are known by now.
struct Ask {
    std::string model;  // as the client names it
    std::vector<u32> tokens;  // of its one prompt; not empty
    bool is_stream = false;
    bool is_completion = true;  // in the form of one; else the ids alone are given
    // Of a prompt that was read elsewhere:
    u8 path = 0;                      // of `Options::prepared`
    std::optional<std::string> salt;  // of the first block
    std::string session, tenant;
    std::string reservation;          // what a gateway calls it; empty: nothing
    std::optional<std::string> body;  // to be sent in place of the client's
    Fields added;                     // for the engine, besides what is told of every one
    Fields reported;                  // in the response, likewise
    std::vector<u64> keep;            // lengths at which the engine is told to keep windows and states
    std::optional<double> tokenization_s;
    bool is_comparable = true;  // the engine's report counts what was predicted
    std::optional<u64> priority_class;  // 0 goes first; none: the usual one
    bool is_renamed = false;    // `model` is not how the client names it: the engine has to be told
};
// The same for as long as it is under way.
struct Asked {
    u8 path = 0;
    bool is_stream = false, is_comparable = true;
    bool has_salt = false, has_adapter = false;
    std::optional<double> tokenization_s;
};

using Order = std::variant<Forward, Respond, ReadBody, PassOn, Cut, Open, Ask>;
struct Command {
    ExchangeId id = 0;
    Order order;
};

// --- up: what has happened ------------------------------------------------------------------------

// How an exchange that was forwarded has ended.
enum class End : u8 { completed, client_left, client_stalled, replica_died, abandoned };
// How an attempt failed before its first byte; the last three after it.
enum class Failure : u8 {
    connect,
    connect_timeout,
    closed,
    kept_closed,
    first_byte_timeout,
    malformed,
    given_up,
    no_files,
    at_limit,
    died,
    idle_timeout,
    lost,
    late,  // another one gave its first byte before
};

// A request has come; with as much of its body as there is. Nothing more is read before `ReadBody`.
struct Opened {
    std::string method, target;
    int minor = 1;
    bool keeps_alive = true, is_of_reserve = false;
    Fields fields;  // names in lower case
    std::string client;
    int client_port = 0;
    std::string body;
    bool is_whole = true;
};
struct BodyRead {
    std::string piece;
    bool is_whole = false;
};
// A request whose prompt the core cannot read: `Ask` says what it is, `Open` leaves it to be told.
struct Prepare {
    u8 path = 0;  // of `Options::prepared`
    Fields fields;  // where they matter
    std::string body;
};
// The client left before anything was forwarded, or placed.
struct Left {};
struct Failed {
    Failure failure = Failure::connect;
    std::string why;
};
// The replica responds 429, 502, 503 or 504: `PassOn`, `Forward` or `Respond` says what becomes of it.
struct NotNow {
    int status = 503;
    std::optional<u32> retry_after_s;
};
struct FirstByte {
    int status = 200;
};
struct Progress {
    u64 events = 0;  // of an event stream since the last
};
struct Beginning {
    std::string bytes;
};
struct Ended {
    End end = End::completed;
    int status = 0;  // 0: nothing was sent
    double seconds = 0;
    u64 body_bytes = 0;
    std::optional<Failure> failure;  // after the first byte
    u64 events = 0;                  // since the last `Progress`
    bool is_json = false;
    std::string usage;        // the tail of a JSON body, or the last event that has a usage
    std::string first_usage;  // the first such event, where it is another one
};
// A connection was ended for what came on it, or for what did not.
struct Refused {
    std::string reason;
};

// A request that was decided here did not get its first byte: it is opened anew, for Python.
struct HandedOver {
    std::string replica;
    std::optional<Failure> failure;  // nothing: it responded `status`
    int status = 0;
    std::optional<u32> retry_after_s;
};
// A request that was decided here has ended; see `Prediction` of decider.hpp.
struct Settled {
    std::string model, replica, request_id, client;
    int client_port = 0;
    int dp_rank = -1;
    Asked asked;
    u64 prompt_tokens = 0, gpu_cached_tokens = 0, cached_tokens = 0, expected_tokens = 0;
    bool is_suspect = false;
    double estimate_trust = 0;
    std::shared_ptr<Booking> booking;  // waits for what the engine said, which only Python reads
    bool was_alone = false;  // among those that were decided here; see quiet.hpp
    double began_at = 0;     // by the clock
    double routing_s = 0, first_byte_s = 0;  // 0: there was none
    Ended ended;
};

// A request that was decided here is served by its second replica: the first one was late, or failed
// after all.
struct Overtaken {
    HandedOver first;
};
// What became of second attempts: `begun`, `won`, `failed`, or `not_allowed`.
struct SecondAttempt {
    const char* outcome = "";
};

// A gateway that asked where a request would go was told.
struct Told {
    std::string model;
    double routing_s = 0;
};

// A gateway that sends a request itself was told where. It is booked until that gateway reports its
// end: reports that come to Python are told of behind this event.
struct Reserved {
    ExchangeId number = 0;  // of the gateway's question
    std::string id;
    std::shared_ptr<Booking> booking;
    std::shared_ptr<Reservations::Place> place;
    std::string reason;
    std::vector<std::pair<std::string, u64>> by_tier;
    Settled so_far;  // with what its gateway has reported by now
    double touched_at = 0;  // by the clock: when something was said of it last
};

// What a gateway has reported of one: it was told that this is noted.
enum class ReportKind : u8 { first_token, output, end };
struct Reported {
    std::string id;
    ReportKind kind = ReportKind::end;
    std::string body;
    double at = 0;  // by the clock
};

// Others should hear soon that such a request was sent: see `Options::long_prompt_tokens`.
struct LongPromptSent {};

// Such a request has not ended for a while, or has had its first byte since that was told.
struct Running {
    Settled so_far;
};

struct Event {
    ExchangeId id = 0;
    std::variant<Opened, Prepare, BodyRead, Left, Failed, NotNow, FirstByte, Progress, Beginning, Ended,
                 Refused, HandedOver, Running, Settled, Overtaken, SecondAttempt, LongPromptSent, Told, Reserved, Reported>
        what;
};

// --- what does not change -------------------------------------------------------------------------

struct Options {
    u64 head_bytes = 65'536;
    u64 max_body_bytes = 64 << 20;
    u64 max_held_bytes = 1 << 30;  // of the bodies that Python has not been told of
    double request_s = 60.0;       // for a head to arrive
    double client_stall_s = 60.0;  // for which a client may read nothing of what waits for it
    double keep_alive_s = 75.0;
    double idle_s = 4.0;           // for which a connection to a replica is kept unused
    u32 max_idle = 256;            // of each origin, in each thread
    u64 max_connections = 0;       // to replicas, of a thread; 0: no bound
    int reserved_from = 1 << 30;   // descriptors from here on are for probes and operators
    double second_share = 0;        // of requests, that may be tried beside a late attempt; 0: none
    http::Names dropped;  // a client's fields that are not for replicas
    std::vector<std::string> broken_events;   // by dialect: what ends a broken event stream
    // Targets of requests that may be decided here once somebody has read their prompts, with the
    // dialect of each. The first is that of completions, which are read here where they are token ids.
    std::vector<std::pair<std::string, u8>> prepared;
    bool prepares_all = false;  // also those that could be read here; with their fields
    // A client's fields with which a request is prepared, and those with which it is told at once.
    http::Names prepared_with, told_with;
    // Where gateways ask where a completion of token ids would go; empty: that is not answered here.
    std::string route_path;
    std::string select_path;     // where they ask where to send one; likewise
    std::string reserve_path;    // where they have it booked, and report of that; likewise
    u64 long_prompt_tokens = 0;  // to be computed, from which on it is told at once; 0: never
    bool checks_hosts = false;  // a client has to call the router by one of `Hosts`
    Networks trusted_proxies;   // whose word counts for where a request comes from
};

}  // namespace kvroute::plane
