// The messages between the plane's threads and Python: events up, commands down. Each is about one
// exchange: a client's request with its response.
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
#include "index/prompt.hpp"
#include "plane/budget.hpp"
#include "plane/networks.hpp"
#include "plane/reservations.hpp"

namespace kvroute::plane {

using u8 = std::uint8_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

// Packs a thread, a connection's place there and a count of exchanges: never the same twice.
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

// Where an engine that schedules by priority reads a request's priority.
enum class OrderedBy : u8 {
    nothing,
    header,         // vLLM's; the lowest goes first
    field,          // of the body; likewise
    negated_field,  // the highest goes first
};

// A server, and how it is called. All attempts there share it.
struct Server {
    std::string origin;  // the key of kept connections
    std::vector<Address> addresses;  // one after the other, until one takes the connection
    std::string secure_host;  // TLS, to a server whose certificate has this name; empty: none
    std::string authority;    // the Host header; empty: the client's own
    std::string base_path;    // prepended to the target
    Fields reported;          // in its responses, in place of its own
};

// One attempt: where the request goes, and what is changed on its way there and back.
struct Forward {
    std::shared_ptr<const Server> to;
    std::vector<std::pair<std::string, std::optional<std::string>>> replaced;  // nothing: removed
    Fields added;             // after the client's
    Fields reported;          // in the response, in place of the replica's, besides the server's
    std::optional<std::string> body;  // in place of the client's
    Timeouts timeouts;
    bool may_reuse = true;       // may use a kept connection
    bool is_control = false;     // to the application behind: the client's headers go as they came
    bool wants_id = false;       // posts the beginning of the body, which has the response's id
    u64 work_tokens = 0;         // to be computed before the first byte, as far as is known
    bool shows_hit = false;      // where it is decided here: the response has headers with the hit
    OrderedBy ordered_by = OrderedBy::nothing;  // likewise: where its engine reads its priority
    u8 dialect = 0;              // index into `Options::broken_events`, for a broken stream
};
// A response of the router's own.
struct Respond {
    int status = 200;
    Fields fields;
    std::string body;
};
// More of the body is wanted.
struct ReadBody {};
// The client gets the replica's 429, 502, 503 or 504 after all.
struct PassOn {};
// Closes the client's connection at any stage.
struct Cut {};
// Python serves the request: `Opened` is posted with all of it.
struct Open {};

// A request whose prompt is known as token ids: the client sent them, or Python tokenised it.
struct Ask {
    std::string model;  // as the client names it
    SharedTokens tokens;  // of its one prompt; not empty
    bool is_stream = false;
    bool is_completion = true;  // has `prompt`, as completions do; else only `token_ids`
    // Only where Python read the prompt:
    u8 path = 0;                      // index into `Options::prepared`
    std::optional<std::string> salt;  // of the first block
    std::string session, tenant;
    std::string reservation;          // the name that a gateway gives it; empty: none
    std::optional<std::string> body;  // to be sent in place of the client's
    Fields added;                     // for the engine, besides those of every request
    Fields reported;                  // in the response, likewise
    std::vector<u64> keep;            // lengths at which the engine is to keep windows and states
    std::optional<double> tokenization_s;
    bool is_comparable = true;  // the cached tokens reported can be compared with the prediction
    std::optional<u64> priority_class;  // 0 goes first; none: the usual one
    bool is_renamed = false;    // the client names it otherwise: `model` is written into its body
};
// The part of `Ask` that is kept until the request ends.
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

// True where the response is an error: its first byte does not show that the prompt was computed.
constexpr bool is_error(int status) { return status >= 400; }

// How an exchange that was forwarded has ended.
enum class End : u8 { completed, client_left, client_stalled, replica_died, abandoned };
// How an attempt failed: before its first byte; `died`, `idle_timeout` and `lost` after it.
enum class Failure : u8 {
    connect,
    connect_timeout,
    closed,
    kept_closed,
    first_byte_timeout,
    malformed,
    given_up,
    no_files,
    no_ports,
    at_limit,
    died,
    idle_timeout,
    lost,
    late,  // another one gave its first byte before
};

// A request has come, with what there is of its body. No more is read before `ReadBody`.
struct Opened {
    std::string method, target;
    bool is_of_reserve = false;
    Fields fields;  // names in lower case
    std::string client;
    int client_port = 0;
    std::string body;
    bool is_whole = true;
    bool was_prepared = false;  // Python has seen it before
    Budget::Share share;  // counts it until Python does
};
struct BodyRead {
    std::string piece;
    bool is_whole = false;
};
// Python has to read this request's prompt: it responds with `Ask`, or with `Open` to serve it itself.
struct Prepare {
    u8 path = 0;  // index into `Options::prepared`
    Fields fields;  // empty where they do not matter
    std::string body;
};
// What a request is about; the first three are gateways' questions.
enum class Asks : u8 { where, for_selection, for_reservation, to_be_sent, to_be_noted };
// Python has to read such a question, and responds likewise.
struct PrepareQuestion {
    Asks asks = Asks::where;
    Fields fields;  // empty where they do not matter
    std::string body;
};
// The client left before anything was forwarded, or placed.
struct Left {};
struct Failed {
    Failure failure = Failure::connect;
    std::string why;
};
// The replica responds 429, 502, 503 or 504: waits for `PassOn`, `Forward` or `Respond`.
struct NotNow {
    int status = 503;
    std::optional<u32> retry_after_s;
};
struct FirstByte {
    int status = 200;
};
struct Progress {
    u64 events = 0;  // of an event stream, since the last `Progress`
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
// A connection was closed for what came on it, or because nothing came in time.
struct Refused {
    std::string reason;
};

// A request that was decided here did not get its first byte: it is opened anew, for Python.
struct HandedOver {
    std::string replica;
    std::optional<Failure> failure;  // nothing: it responded `status`
    int status = 0;
    std::optional<u32> retry_after_s;
    double seconds = 0;  // since it was sent first
    std::unique_ptr<HandedOver> beside = nullptr;  // the attempt beside this one, which failed as well
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
    std::shared_ptr<Booking> booking;  // of an estimated hit: waits for usage, which Python reads
    bool was_alone = false;  // at its replica, among requests decided here; see quiet.hpp
    double began_at = 0;     // monotonic
    double routing_s = 0, first_byte_s = 0;  // 0: there was none
    Ended ended;
};

// A request that was decided here is served by its second replica: the first one was late, or failed
// after all.
struct Overtaken {
    HandedOver first;
};
// The outcome of a second attempt: `begun`, `won`, `failed`, or `not_allowed`.
struct SecondAttempt {
    const char* outcome = "";
};

// A gateway's question where a request would go was answered.
struct LookedUp {
    std::string model;
    double routing_s = 0;
    std::optional<double> tokenization_s;
};

// A gateway got the replica for a request that it sends itself. The request is booked until the gateway
// reports its end; reports that Python gets are posted behind this event.
struct Reserved {
    ExchangeId number = 0;  // of the gateway's question
    std::string id;
    std::shared_ptr<Booking> booking;
    std::shared_ptr<Reservations::Place> place;
    std::string reason;
    std::vector<std::pair<std::string, u64>> by_tier;
    Settled so_far;  // with the gateway's reports by now
    double touched_at = 0;  // monotonic; the last report on it
};

// A gateway's report on a reservation; it has been acknowledged.
enum class ReportKind : u8 { first_token, output, end };
struct Reported {
    std::string id;
    ReportKind kind = ReportKind::end;
    std::string body;
    double at = 0;  // monotonic
};

// Other routers should learn soon that such a request was sent: see `Options::long_prompt_tokens`.
struct LongPromptSent {};

// A request that was decided here runs for a while, or has had its first byte since the last `Running`.
struct Running {
    Settled so_far;
};

struct Event {
    ExchangeId id = 0;
    std::variant<Opened, Prepare, PrepareQuestion, BodyRead, Left, Failed, NotNow, FirstByte,
                 Progress, Beginning, Ended,
                 Refused, HandedOver, Running, Settled, Overtaken, SecondAttempt, LongPromptSent,
                 LookedUp, Reserved, Reported> what;
};

// --- what does not change -------------------------------------------------------------------------

struct Options {
    u64 head_bytes = 65'536;
    u64 max_body_bytes = 64 << 20;
    u64 max_held_bytes = 1 << 30;  // of bodies that Python does not have yet
    double request_s = 60.0;       // for a head to arrive
    double client_stall_s = 60.0;  // for which a client may read nothing while output waits
    double keep_alive_s = 75.0;
    double idle_s = 4.0;           // for which a connection to a replica is kept unused
    u32 max_idle = 256;            // for each origin, in each thread
    u64 max_connections = 0;       // to replicas, in a thread; 0: no bound
    int reserved_from = 1 << 30;   // descriptors from here on are for probes and operators
    bool passes_429 = false;        // every 429 is the client's answer: no replica is left alone for it
    double second_share = 0;        // the share of requests that may get a second attempt; 0: none
    http::Names dropped;  // a client's fields that are not for replicas
    std::vector<std::string> broken_events;   // by dialect: what ends a broken event stream
    // Targets whose requests may be decided here once their prompts are read, with the dialect of each.
    // The first is that of completions, which are read here where they are token ids.
    std::vector<std::pair<std::string, u8>> prepared;
    bool prepares_all = false;  // also those that could be read here; with their fields
    // Fields of a client with which Python prepares its request, and those with which it is opened.
    http::Names prepared_with, opened_with;
    // The path where gateways ask where a completion would go; empty: such are not answered here.
    std::string route_path;
    std::string select_path;     // where they ask for a replica to send one to; likewise
    std::string reserve_path;    // where they have one booked, and report on it; likewise
    bool asks_with_key = false;  // who asks there needs a key
    u64 long_prompt_tokens = 0;  // to be computed, from which on `LongPromptSent` is posted; 0: never
    bool checks_hosts = false;  // the Host header must be one of `Hosts`
    Networks trusted_proxies;   // their x-forwarded-for and -proto are believed
};

}  // namespace kvroute::plane
