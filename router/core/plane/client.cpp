#include "plane/client.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>

#include "http/write.hpp"
#include "plane/answer.hpp"
#include "plane/ask.hpp"
#include "plane/splice.hpp"
#include "plane/thread.hpp"

namespace kvroute::plane {
namespace {

using sv = std::string_view;

constexpr std::size_t kSlow = 64 * 1024;        // of a response that waits for its client
constexpr std::size_t kReadsAgain = 16 * 1024;
constexpr std::size_t kMostWaiting = 64 * 1024;  // behind the request being served
constexpr std::size_t kPiece = 64 * 1024;        // of a body, from which on it is told
constexpr std::size_t kMostBeginning = 16 * 1024;
constexpr u64 kMostAwaited = 4 << 20;  // of a body, before anybody is told of it
constexpr double kProgressEvery_s = 0.25;
constexpr double kSlack_s = 5.0;
constexpr double kAwaited_s = 1.0;
constexpr double kReserved_s = 2.0;
constexpr double kShownAfter_s = 0.2;  // a request that was decided here, while it runs
// After a client's FIN: the reset that one probe brings about must have come by the next.
constexpr std::array<double, 3> kProbeAfter_s = {0.0, 0.05, 0.25};
constexpr sv kContinue = "HTTP/1.1 100 Continue\r\n\r\n";
constexpr sv kOurPrefix = "x-kv-";
constexpr sv kControlClient = "x-kvroute-client";

bool has_content(sv method) { return method == "POST" || method == "PUT" || method == "PATCH"; }

bool is_without_body(int status) { return status == 204 || status == 304; }

std::string lower(sv name) {
    std::string made(name);
    for (char& each : made) {
        if (each >= 'A' && each <= 'Z') each |= 0x20;
    }
    return made;
}

bool begins_with(sv name, sv lower_prefix) {
    return name.size() >= lower_prefix.size() &&
           http::same_name(name.substr(0, lower_prefix.size()), lower_prefix);
}

// Whether a comma-separated list has an item (RFC 9110 7.6.1: what is about the connection alone).
bool lists(sv items, sv lower_name) {
    while (!items.empty()) {
        if (http::same_name(http::take_element(items), lower_name)) return true;
    }
    return false;
}

// Does something whichever way a block is left.
template <typename Call>
class OnExit {
public:
    explicit OnExit(Call call) : call_(std::move(call)) {}
    ~OnExit() { call_(); }
    OnExit(const OnExit&) = delete;
    OnExit& operator=(const OnExit&) = delete;

private:
    Call call_;
};

// What is refused is shown as far as it is plain.
std::string plain(sv text) {
    std::string made(text);
    for (char& each : made) {
        if (static_cast<u8>(each) < 0x20 || static_cast<u8>(each) > 0x7E) each = '?';
    }
    return made;
}

std::optional<u32> retry_after_of(const http::ResponseHead& head) {
    const sv text = head.find("retry-after");
    u32 seconds = 0;
    if (text.empty() || text.size() > 6) return std::nullopt;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
    if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
    return seconds;
}

bool is_not_now(int status) {
    return status == 429 || status == 502 || status == 503 || status == 504;
}

// Whether an event may be appended to this body: an event stream, not encoded and of open length.
bool takes_events(const http::ResponseHead& head) {
    const sv coding = head.find("content-encoding");
    return begins_with(head.find("content-type"), "text/event-stream") &&
           head.framing != http::Framing::length &&
           (coding.empty() || http::same_name(coding, "identity"));
}

template <typename Head>
void rebase(Head& head, std::string& text, sv from) {
    text.assign(from);
    for (http::Field& field : head.fields) {
        field.name = sv(text.data() + (field.name.data() - from.data()), field.name.size());
        field.value = sv(text.data() + (field.value.data() - from.data()), field.value.size());
    }
}

}  // namespace

Respond out_of_memory() {
    Respond made;
    made.status = 503;
    made.body = "{\"error\": {\"message\": \"the router is out of memory; try again\", "
                "\"type\": \"server_error\", \"code\": \"overloaded\"}}";
    made.fields = {{"content-type", "application/json"},
                   {"content-length", std::to_string(made.body.size())},
                   {"retry-after", "1"}};
    return made;
}

// --- the connection -------------------------------------------------------------------------------

void Client::open(int descriptor, std::string host, int port, bool is_of_reserve, double now) {
    host_ = std::move(host);
    port_ = port;
    is_of_reserve_ = is_of_reserve;
    is_trusted_ = thread_.options().trusted_proxies.contains(host_);
    receiving_since_ = now;
    thread_.loop().add(*this, descriptor, EPOLLIN | EPOLLRDHUP);
    std::shared_ptr<const tls::Context> context = thread_.contexts().towards_clients();
    try {
        if (context) channel_.secure(descriptor, std::move(context));
    } catch (const std::bad_alloc&) {
        drop();
    }
}

void Client::on_ready(u32 events) {
    if (events & (EPOLLERR | EPOLLHUP)) {
        leave();
        return;
    }
    if (events & EPOLLOUT) flush();
    if (is_open() && events & (EPOLLIN | EPOLLRDHUP)) read();
}

void Client::on_no_memory() {
    body_ = std::string();
    in_ = std::string();
    const bool may_respond = !has_begun_ && (stage_ == Stage::deciding || stage_ == Stage::trying ||
                                             stage_ == Stage::not_now);
    if (!may_respond) {
        thread_.post(0, Refused{"overloaded"});
        cut(End::abandoned);
        return;
    }
    // Whoever was told of the request learns that it is over.
    if (was_forwarded_) {
        report(End::abandoned);
    } else if (is_told_ || stage_ == Stage::deciding) {  // or it was prepared
        thread_.post(exchange_, Left{});
    }
    refuse(503, "overloaded", "the router is out of memory; try again");
}

void Client::close() {
    if (!is_open()) return;
    channel_.end(descriptor_);
    drop();
}

void Client::drop() {
    second_.reset();
    thread_.loop().close(*this);
    thread_.closed(place_);
}

// The client is gone, whatever was under way.
void Client::leave() {
    if (!is_open()) return;
    if (was_forwarded_) {
        report(End::client_left);
    } else if (stage_ == Stage::deciding) {
        if (is_awaited_) tell_opened();  // it is counted, and its line is written, as any other
        if (is_told_) thread_.post(exchange_, Left{});
    }
    close();
}

void Client::cut(End end) {
    if (!is_open()) return;
    if (was_forwarded_) report(end);
    // With a reset: a body that ends with its connection would look whole.
    const linger at_once{1, 0};
    setsockopt(descriptor_, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    drop();
}

void Client::update_interest() {
    if (!is_open()) return;
    u32 events = is_unsent() ? EPOLLOUT : 0u;
    const bool takes = stage_ == Stage::idle || stage_ == Stage::draining || stage_ == Stage::refused;
    const bool waits = (!takes && in_.size() >= kMostWaiting) || channel_.is_clogged();
    const bool has_piece =
        stage_ == Stage::deciding && !is_body_whole_ && !is_piece_wanted_ && !is_awaited_;
    if (!has_left_half_ && !waits && !has_piece) events |= EPOLLIN | EPOLLRDHUP;
    thread_.loop().change(*this, events);
}

void Client::look_after(double now) {
    if (!is_open()) return;
    const Options& options = thread_.options();
    const double request_s = is_of_reserve_ ? std::min(options.request_s, kReserved_s) : options.request_s;
    const double stall_s =
        is_of_reserve_ ? std::min(options.client_stall_s, kReserved_s) : options.client_stall_s;
    if (stage_ == Stage::refused) {
        if (now - refused_at_ > kSlack_s) close();
        return;
    }
    if (has_left_half_ && probes_ < kProbeAfter_s.size() && now >= probe_at_) probe();
    if (!is_open()) return;
    show_running(now);
    if (is_unsent() && now - stalled_since_ > stall_s) {
        if (!was_forwarded_ || forward_.is_control) thread_.post(0, Refused{"response_not_read"});
        cut(End::client_stalled);
        return;
    }
    if (late_at_ > 0 && now >= late_at_ && stage_ == Stage::trying) on_late();
    if (is_awaited_ && now - receiving_since_ > kAwaited_s) {
        tell_opened();  // it comes slowly: Python watches over it
        update_interest();
    }
    // Whoever decides ends a body that comes too slowly; one that nobody watches is ended here.
    const bool is_slow = stage_ == Stage::deciding && is_told_ && !is_body_whole_ &&
                         now - receiving_since_ > request_s + kSlack_s;
    if (is_slow) {
        thread_.post(0, Refused{"slow_request"});
        leave();
        return;
    }
    if (stage_ == Stage::draining && now - receiving_since_ > request_s) {
        thread_.post(0, Refused{"slow_request"});
        close();
    } else if (stage_ == Stage::idle) {
        const bool is_silent = in_.empty() && has_asked_;
        if (is_silent && now - idle_since_ > options.keep_alive_s) {
            close();
        } else if (!is_silent && now - receiving_since_ > request_s) {
            thread_.post(0, Refused{"slow_request"});
            close();
        }
    }
}

// --- reading --------------------------------------------------------------------------------------

void Client::read() {
    const bool was_unsent = is_unsent();
    const Channel::Read came = channel_.receive(descriptor_, thread_.buffer());
    if (!was_unsent) stalled_since_ = thread_.now();  // TLS may have had something to say
    if (stage_ != Stage::refused) {  // else it is discarded
        if (!came.bytes.empty() && in_.empty() && stage_ == Stage::idle) {
            receiving_since_ = thread_.now();
        }
        in_ += came.bytes;
        proceed();
    }
    if (!is_open()) return;
    switch (came.state) {
        case Channel::State::open: break;
        case Channel::State::ended: on_end_of_input(); break;
        case Channel::State::cut:
        case Channel::State::broken: leave(); break;
        case Channel::State::refused: refuse_handshake(); break;
    }
}

// What it says is not TLS as it must be. It is told so by an alert, which has been sent.
void Client::refuse_handshake() {
    if (stage_ == Stage::refused) return;
    if (channel_.is_established()) {
        leave();
        return;
    }
    thread_.post(0, Refused{channel_.is_foreign() ? "not_tls" : "tls_handshake_failed"});
    stage_ = Stage::refused;
    refused_at_ = thread_.now();
    ::shutdown(descriptor_, SHUT_WR);
    update_interest();
}

// Takes what has come, as far as the stage allows.
void Client::proceed() {
    if (is_proceeding_) return;  // a request that is responded to at once: the loop below goes on
    is_proceeding_ = true;
    const OnExit done([this] { is_proceeding_ = false; });
    while (is_open()) {
        if (stage_ == Stage::idle) {
            if (in_.empty() || !take_head()) break;
        } else if (stage_ == Stage::deciding && !is_body_whole_ &&
                   (is_piece_wanted_ || is_awaited_)) {
            if (in_.empty()) break;
            take_body();
            if (stage_ == Stage::deciding) break;
        } else if (stage_ == Stage::draining) {
            if (in_.empty()) break;
            drain_body();
        } else {
            break;
        }
    }
    update_interest();
}

// True where a whole head has begun an exchange.
bool Client::take_head() {
    http::Bounds bounds;
    bounds.head_bytes = thread_.options().head_bytes;
    if (parsed_ && !http::is_worth_parsing(in_, std::exchange(parsed_, in_.size()), bounds)) {
        return false;
    }
    std::size_t used = 0;
    http::Problem problem;
    switch (http::parse_request(in_, bounds, head_, used, problem)) {
        case http::Parsed::partial: parsed_ = in_.size(); return false;
        case http::Parsed::bad: refuse(problem); return false;
        case http::Parsed::whole: break;
    }
    open_exchange(used);
    return true;
}

void Client::open_exchange(std::size_t used) {
    const sv text = sv(in_).substr(0, used);
    const auto rebased = [&](sv view) {
        return sv(head_text_.data() + (view.data() - text.data()), view.size());
    };
    head_text_.reserve(used);
    rebase(head_, head_text_, text);
    head_.method = rebased(head_.method);
    head_.target = rebased(head_.target);
    if (!head_.origin_form.empty()) head_.origin_form = rebased(head_.origin_form);
    parsed_ = 0;
    in_.erase(0, used);
    has_asked_ = true;
    exchange_ = thread_.next_exchange(place_);
    stage_ = Stage::deciding;
    keeps_alive_ = head_.keeps_alive && head_.minor == 1 && !head_.upgrades && !is_of_reserve_;
    is_head_request_ = head_.method == "HEAD";
    was_forwarded_ = has_begun_ = is_held_ = false;
    booking_.reset();
    usual_.reset();
    ask_.reset();
    late_at_ = 0;
    status_ = 0;
    body_bytes_ = events_ = 0;
    broke_.reset();
    body_.clear();
    told_ = told_beginning_ = 0;
    http::Bounds bounds;
    bounds.head_bytes = thread_.options().head_bytes;
    body_reader_.begin(head_.framing, head_.length, bounds);
    is_body_whole_ = body_reader_.has_ended();
    is_piece_wanted_ = is_told_ = false;
    if (!is_body_whole_ && !in_.empty()) {
        take_body();
        if (!is_open() || stage_ != Stage::deciding) return;
    }
    is_awaited_ = may_decide() && has_room();
    if (is_awaited_ && (!is_body_whole_ || decide())) return;
    tell_opened();
}

void Client::tell_opened() {
    is_awaited_ = false;
    share_ = {};  // it is counted by whoever is told
    Opened opened{.method = std::string(head_.method),
                  .target = std::string(head_.origin_form),
                  .minor = head_.minor,
                  .keeps_alive = keeps_alive_,
                  .is_of_reserve = is_of_reserve_,
                  .fields = {},
                  .client = host_,
                  .client_port = port_,
                  .body = body_,
                  .is_whole = is_body_whole_};
    opened.fields = fields();
    told_ = body_.size();
    is_told_ = true;
    thread_.post(exchange_, std::move(opened));
}

// Names in lower case.
Fields Client::fields() const {
    Fields made;
    made.reserve(head_.fields.size());
    for (const http::Field& field : head_.fields) {
        made.emplace_back(lower(field.name), std::string(field.value));
    }
    return made;
}

// Moves what has come of the body to `body_`, and tells of it once it is much or whole.
void Client::take_body() {
    sv bytes = in_;
    while (!bytes.empty() && !is_body_whole_) {
        const http::BodyReader::Piece piece = body_reader_.next(bytes);
        if (piece.is_bad) {
            if (is_told_) thread_.post(exchange_, Left{});
            refuse(body_reader_.problem());
            return;
        }
        body_ += piece.payload;
        bytes.remove_prefix(piece.used);
        is_body_whole_ = piece.is_last;
        if (piece.used == 0 && !piece.is_last) break;
    }
    in_.erase(0, in_.size() - bytes.size());
    if (is_told_ && (is_body_whole_ || body_.size() - told_ >= kPiece)) tell_body();
    if (is_awaited_ && is_body_whole_ && !decide()) tell_opened();
}

// --- without Python -------------------------------------------------------------------------------

// Whether it could be a request that is decided here, once its body has come.
bool Client::may_decide() {
    const Options& options = thread_.options();
    const u64 most = std::min(kMostAwaited, options.max_body_bytes);
    const bool may = thread_.decider() != nullptr && head_.method == "POST" &&
                     !head_.expects_continue && !is_of_reserve_ &&
                     head_.framing == http::Framing::length && head_.length <= most;
    if (!may) return false;
    asks_where_ = !options.route_path.empty() && options.route_path == head_.origin_form;
    if (asks_where_) return true;
    for (path_ = 0; path_ < options.prepared.size(); ++path_) {
        if (options.prepared[path_].first == head_.origin_form) return true;
    }
    return false;
}

// Whether its body can be held, by what its head says of its length.
bool Client::has_room() {
    std::optional<Bodies::Share> share = thread_.bodies().take(head_.length);
    if (!share) return false;
    share_ = std::move(*share);
    return true;
}

// The body has come. False: all has to be told.
bool Client::decide() {
    is_awaited_ = false;
    const Care care = this->care();
    if (care == Care::told) return false;
    if (asks_where_) return care == Care::none && is_told_where();
    Decider* const decider = thread_.decider();
    if (path_ == 0 && decider != nullptr && care == Care::none) {
        std::optional<Ask> ask = read_ask(body_);
        if (ask && decider->decides_alone(ask->model)) return is_placed(std::move(*ask));
    }
    prepare(care == Care::prepared);
    return true;
}

Client::Care Client::care() const {
    const Options& options = thread_.options();
    if (!thread_.hosts().accepts(head_.find("host"))) return Care::told;
    Care found = options.prepares_all ? Care::prepared : Care::none;
    for (const http::Field& field : head_.fields) {
        const std::string name = lower(field.name);
        if (options.told_with.contains(name)) return Care::told;
        if (options.prepared_with.contains(name)) found = Care::prepared;
    }
    return found;
}

// Whether a gateway got its answer. Those that speak another language than JSON get it in Python.
bool Client::is_told_where() {
    Decider* const decider = thread_.decider();
    const bool is_packed = head_.find("accept").find("msgpack") != sv::npos ||
                           head_.find("content-type").find("msgpack") != sv::npos;
    if (decider == nullptr || is_packed) return false;
    const std::optional<Ask> ask = read_ask(body_, true);
    if (!ask || !decider->decides_alone(ask->model)) return false;
    const double began = clock_now();
    const std::optional<Answer> answer = decider->look({.ask = *ask, .now = began});
    if (!answer) return false;
    const double routing_s = clock_now() - began;
    Respond respond{200, {{"content-type", "application/json"}}, {}};
    respond.body = answer_body(*answer, routing_s);
    respond.fields.emplace_back("content-length", std::to_string(respond.body.size()));
    thread_.post(0, Told{answer->prediction.model, routing_s});
    this->respond(respond);
    return true;
}

void Client::prepare(bool by_fields) {
    Prepare prepare{path_, {}, body_};
    if (by_fields) prepare.fields = fields();
    thread_.post(exchange_, std::move(prepare));
}

Question Client::question(const Ask& ask, sv request_id) const {
    return {ask, forwarded_for(), forwarded_proto(), request_id, clock_now()};
}

// Who asks. Lines of one name are the same as commas in one (RFC 9110, 5.3).
std::string Client::forwarded_for() const {
    std::string chain;
    for (const http::Field& field : head_.fields) {
        if (!is_trusted_) break;
        if (!http::same_name(field.name, "x-forwarded-for") || field.value.empty()) continue;
        chain += field.value;
        chain += ", ";
    }
    return chain + host_;
}

sv Client::forwarded_proto() const {
    sv proto = channel_.is_secure() ? "https" : "http";
    for (const http::Field& field : head_.fields) {
        if (is_trusted_ && http::same_name(field.name, "x-forwarded-proto")) proto = field.value;
    }
    return proto;
}

void Client::place(Ask ask) {
    if (stage_ != Stage::deciding || is_told_) return;
    if (!is_placed(std::move(ask))) tell_opened();
}

void Client::open_to_others() {
    if (stage_ == Stage::deciding && !is_told_) tell_opened();
}

bool Client::is_placed(Ask ask) {
    const double began = clock_now();
    Decider* const decider = thread_.decider();
    if (decider == nullptr) return false;
    std::optional<Placed> placed = decider->place(question(ask, head_.find("x-request-id")));
    if (!placed) return false;
    if (!complete(*placed, ask)) return false;
    asked_ = {path_, ask.is_stream, ask.is_comparable, ask.salt.has_value(),
              placed->prediction.has_adapter, ask.tokenization_s};
    request_id_ = std::move(placed->request_id);
    booking_ = std::move(placed->booking);
    prediction_ = std::move(placed->prediction);
    const u64 long_tokens = thread_.options().long_prompt_tokens;
    if (long_tokens && prediction_.uncached_tokens >= long_tokens) {
        thread_.post(0, LongPromptSent{});
    }
    routing_s_ = clock_now() - began;
    first_byte_s_ = 0;
    thread_.usual().add_request();
    shown_ = Shown::not_yet;
    forward(std::move(placed->forward));
    if (booking_ && stage_ == Stage::trying) expect_first_byte(std::move(ask));
    return true;
}

// What this request is sent with, wherever that is. False: its body cannot be changed as it should be.
bool Client::complete(Placed& placed, const Ask& ask) const {
    std::optional<std::string> body = ask.body;
    if (!placed.name.empty()) {
        body = with_model(body ? sv(*body) : sv(body_), placed.name);
        if (!body) return false;
    }
    placed.forward.body = std::move(body);
    placed.forward.dialect = thread_.options().prepared[path_].second;
    // Engines read it where requests are OpenAI's, and at no other of these paths.
    if (placed.forward.is_ordered && placed.forward.dialect == 0) {
        placed.forward.replaced.emplace_back("x-vllm-priority", std::to_string(placed.order));
    }
    for (const auto& field : ask.added) placed.forward.added.push_back(field);
    for (const auto& field : ask.reported) placed.forward.reported.push_back(field);
    return true;
}

// Python decides after all: the replica did not serve it.
void Client::hand_over(HandedOver why) {
    if (upstream_ != nullptr) std::exchange(upstream_, nullptr)->abandon();
    booking_->ended(false, thread_.now());
    booking_.reset();
    stop_waiting();
    was_forwarded_ = false;
    stage_ = Stage::deciding;
    why.replica = prediction_.replica;
    thread_.post(exchange_, std::move(why));
    tell_opened();
}

void Client::drain_body() {
    sv bytes = in_;
    while (!bytes.empty() && !is_body_whole_) {
        const http::BodyReader::Piece piece = body_reader_.next(bytes);
        bytes.remove_prefix(piece.used);
        is_body_whole_ = piece.is_last;
        if (piece.is_bad) {
            close();
            return;
        }
    }
    in_.erase(0, in_.size() - bytes.size());
    if (is_body_whole_) stage_ = Stage::idle;
}

void Client::tell_body() {
    thread_.post(exchange_, BodyRead{body_.substr(told_), is_body_whole_});
    told_ = body_.size();
    is_piece_wanted_ = false;
}

// The client sends no more. One that only stops sending cannot be told at once from one that has
// closed its socket: both send FIN. But the kernel of the latter resets the connection when something
// comes, and the next write meets that reset. While the response is silent, probes take the place of
// what it would write:
//
//     not begun         an interim response, which every client must skip (RFC 9110 15.2)
//     between chunks    a leading zero of the next chunk's length (RFC 9112 7.1)
//     else              nothing can be sent: who has left is noticed by the next byte of the response
void Client::on_end_of_input() {
    leave_if_unfinished();
    if (!is_open()) return;
    has_left_half_ = true;
    probes_ = 0;
    probe_at_ = thread_.now();
    probe();
    update_interest();
}

// Nothing more comes: what waits for the rest of a request has lost its client. Whole requests behind
// the one being served have their turn, and an error is sent to its end.
void Client::leave_if_unfinished() {
    if (!is_open() || (stage_ == Stage::refused && is_unsent())) return;
    if (!is_serving() || !is_body_whole_) leave();
}

void Client::probe() {
    ++probes_;
    if (probes_ < kProbeAfter_s.size()) probe_at_ = thread_.now() + kProbeAfter_s[probes_];
    if (stage_ == Stage::answered || !is_serving()) return;
    if (!has_begun_) {
        if (head_.minor == 1) send(kContinue);
    } else if (framing_ == http::Framing::chunked && !is_head_request_ && out_.size() == sent_) {
        send("0");
    }
}

void Client::refuse(const http::Problem& problem) {
    refuse(problem.status, problem.code, problem.text());
}

// Responds with an error and takes nothing more; what else comes is discarded for a moment: if the
// connection were closed at once, the client would see a reset before it read the response.
void Client::refuse(int status, const char* code, sv message) {
    thread_.post(0, Refused{code});
    stage_ = Stage::refused;
    exchange_ = 0;
    refused_at_ = thread_.now();
    in_.clear();
    const char* const kind = status < 500 ? "invalid_request_error" : "server_error";
    std::string body = "{\"error\": {\"message\": \"" + json_escaped(plain(message)) + "\", \"type\": \"" + kind +
                       "\", \"code\": \"" + code + "\"}}";
    std::string text;
    http::append_status(text, status);
    if (status == 503) http::append_field(text, "retry-after", "1");
    http::append_field(text, "content-type", "application/json");
    http::append_number(text, "content-length", body.size());
    http::append_field(text, "connection", "close");
    text += http::kLineEnd;
    text += body;
    send(text);
    if (!is_open()) return;
    channel_.end(descriptor_);
    ::shutdown(descriptor_, SHUT_WR);
}

// --- commands -------------------------------------------------------------------------------------

void Client::read_body() {
    if (stage_ != Stage::deciding || is_body_whole_) return;
    if (head_.expects_continue && head_.minor == 1 && !has_begun_) {
        head_.expects_continue = false;  // told once
        send(kContinue);
        if (!is_open()) return;
    }
    is_piece_wanted_ = true;
    proceed();
}

void Client::forward(Forward forward) {
    const bool may = stage_ == Stage::deciding || stage_ == Stage::trying || stage_ == Stage::not_now;
    if (!may || !is_body_whole_) return;
    if (upstream_ != nullptr) std::exchange(upstream_, nullptr)->abandon();
    if (!was_forwarded_) started_at_ = clock_now();
    was_forwarded_ = true;
    stage_ = Stage::trying;
    forward_ = std::move(forward);
    request_.clear();
    late_at_ = 0;
    compose_request(forward_, request_);
    const sv body = forward_.body ? sv(*forward_.body) : sv(body_);
    const u64 number = exchange_;
    Upstream* started = thread_.pool().start(*this, forward_, request_, body, thread_.now());
    // It may have failed by now, and the exchange have ended.
    if (started != nullptr && exchange_ == number && stage_ == Stage::trying) upstream_ = started;
}

void Client::respond(const Respond& respond) {
    const bool may = stage_ == Stage::deciding || stage_ == Stage::trying || stage_ == Stage::not_now;
    if (!may) return;
    if (upstream_ != nullptr) std::exchange(upstream_, nullptr)->abandon();
    std::string& out = thread_.scratch();
    out.clear();
    http::append_status(out, respond.status);
    bool says_close = false, has_length = false;
    for (const auto& [name, value] : respond.fields) {
        http::append_field(out, name, value);
        says_close |= name == "connection" && lists(value, "close");
        if (name != "content-length") continue;
        has_length = true;
        if (value != std::to_string(respond.body.size())) {
            cut(End::abandoned);  // the client could not tell where the next response begins
            return;
        }
    }
    // A client that waits for 100 Continue may send its body, or not (RFC 9110 10.1.1).
    if (says_close || (!is_body_whole_ && head_.expects_continue)) keeps_alive_ = false;
    status_ = respond.status;
    append_framing(out, has_length || is_without_body(respond.status), respond.body.size(), says_close);
    has_begun_ = true;
    if (framing_ == http::Framing::chunked) {
        append_body(respond.body, true, out);
    } else if (!is_head_request_ && !is_without_body(respond.status)) {
        out += respond.body;
    }
    body_bytes_ = respond.body.size();
    // Whoever responds knows that it is over.
    was_forwarded_ = is_awaited_ = false;
    stage_ = Stage::answered;
    send(out);
    end_exchange();
}

void Client::pass_on() {
    if (stage_ != Stage::not_now) return;
    stage_ = Stage::relaying;
    std::string& out = thread_.scratch();
    out.clear();
    begin_response(held_head_, out);
    if (upstream_ != nullptr) upstream_->resume(thread_.now());
    relay(std::exchange(held_piece_, {}), is_held_last_, out);
}

// --- the request as it is sent on -----------------------------------------------------------------

bool Client::is_kept_back(const Forward& forward, sv name, sv connection) const {
    if (http::is_hop_by_hop(name) || http::same_name(name, "content-length") ||
        http::same_name(name, "expect")) {
        return true;
    }
    if (http::same_name(name, "host")) return !forward.authority.empty();
    if (!connection.empty() && lists(connection, lower(name))) return true;
    if (forward.is_control) return http::same_name(name, kControlClient);
    if (thread_.options().dropped.contains(lower(name))) return true;
    return std::any_of(forward.replaced.begin(), forward.replaced.end(),
                       [&](const auto& each) { return http::same_name(name, each.first); });
}

void Client::compose_request(const Forward& forward, std::string& out) const {
    const sv method = is_head_request_ ? sv("GET") : head_.method;
    out += method;
    out += ' ';
    out += forward.base_path;
    out += forward.target ? sv(*forward.target) : head_.origin_form;
    out += " HTTP/1.1\r\n";
    if (!forward.authority.empty()) http::append_field(out, "host", forward.authority);
    const sv connection = head_.find("connection");
    for (const http::Field& field : head_.fields) {
        if (!is_kept_back(forward, field.name, connection)) http::append_field(out, field.name, field.value);
    }
    for (const auto& field : forward.added) {
        const bool is_replaced =
            std::any_of(forward.replaced.begin(), forward.replaced.end(),
                        [&](const auto& each) { return each.first == field.first; });
        if (!is_replaced) http::append_field(out, field.first, field.second);
    }
    for (const auto& [name, value] : forward.replaced) {
        if (value) http::append_field(out, name, *value);
    }
    const std::size_t size = forward.body ? forward.body->size() : body_.size();
    if (size || has_content(head_.method)) {
        http::append_number(out, "content-length", size);
    }
    out += http::kLineEnd;
}

// --- a second attempt -----------------------------------------------------------------------------

// Only a stream's: of any other response the first byte is there when all has been generated, and
// nobody knows how much that is.
void Client::expect_first_byte(Ask ask) {
    if (!thread_.usual().is_on() || !asked_.is_stream) return;
    usual_ = thread_.usual().at(forward_.origin);
    attempted_at_ = clock_now();
    const std::optional<double> late_after_s = usual_->late_after(forward_.work_tokens);
    if (!late_after_s) return;
    late_at_ = attempted_at_ + *late_after_s;
    ask_ = std::move(ask);
}

void Client::on_late() {
    late_at_ = 0;
    late_ = Late(usual_);
    if (booking_ && ask_ && !second_) try_second(*std::exchange(ask_, std::nullopt));
}

// Beside the first attempt, at another replica. Where first bytes are late there too, the whole fleet
// is slow, and more work would make it slower.
void Client::try_second(const Ask& ask) {
    Decider* const decider = thread_.decider();
    if (decider == nullptr) return;
    Question elsewhere = question(ask, request_id_);
    elsewhere.not_at = prediction_.replica;
    std::optional<Placed> placed = decider->place(elsewhere);
    if (!placed || !complete(*placed, ask)) return;
    if (thread_.usual().at(placed->forward.origin)->has_late() || !thread_.usual().take()) {
        thread_.post(0, SecondAttempt{"not_allowed"});
        return;
    }
    thread_.post(0, SecondAttempt{"begun"});
    second_ = std::make_unique<Second>(*this, std::move(*placed));
    Second& second = *second_;
    compose_request(second.placed.forward, second.request);
    second.started_at = clock_now();
    const Forward& forward = second.placed.forward;
    second.upstream = thread_.pool().start(second, forward, second.request,
                                           forward.body ? sv(*forward.body) : sv(body_),
                                           thread_.now());
    second.is_starting = false;
    if (second.has_failed) on_second_failed();
}

// Its first byte is here, or is not waited for any longer.
void Client::stop_waiting() {
    second_.reset();
    late_ = {};
    late_at_ = 0;
}

void Client::on_second_failed() {
    thread_.post(0, SecondAttempt{"failed"});
    second_.reset();
}

void Client::on_second(const http::ResponseHead& head, sv piece, bool is_last) {
    if (is_last) second_->upstream = nullptr;
    if (head.status >= 500 || is_not_now(head.status)) {
        on_second_failed();
        return;
    }
    thread_.post(0, SecondAttempt{"won"});
    // The late one may have been about to respond: it took at least as long.
    usual_->learn(forward_.work_tokens, clock_now() - attempted_at_);
    be_overtaken({{}, Failure::late, 0, std::nullopt});
    on_response(head, piece, is_last);
}

// The second attempt takes the place of the first.
void Client::be_overtaken(HandedOver first) {
    const std::unique_ptr<Second> second = std::move(second_);
    if (upstream_ != nullptr) upstream_->abandon();
    booking_->ended(false, thread_.now());
    first.replica = std::move(prediction_.replica);
    thread_.post(exchange_, Overtaken{std::move(first)});
    late_ = {};
    late_at_ = 0;
    upstream_ = std::exchange(second->upstream, nullptr);
    if (upstream_ != nullptr) upstream_->pass_to(*this);
    booking_ = std::move(second->placed.booking);
    prediction_ = std::move(second->placed.prediction);
    asked_.has_adapter = prediction_.has_adapter;
    forward_ = std::move(second->placed.forward);
    request_.swap(second->request);  // which is being sent, perhaps
    usual_ = thread_.usual().at(forward_.origin);
    attempted_at_ = second->started_at;
}

// --- the response ---------------------------------------------------------------------------------

void Client::on_response(const http::ResponseHead& head, sv piece, bool is_last) {
    if (is_last) upstream_ = nullptr;
    const std::optional<u32> retry_after_s = retry_after_of(head);
    const bool is_final = head.status == 429 && !retry_after_s;  // nobody else is asked
    if (booking_ && is_not_now(head.status) && !is_final) {
        if (second_) {
            be_overtaken({{}, std::nullopt, head.status, retry_after_s});
            return;
        }
        hand_over({{}, std::nullopt, head.status, retry_after_s});
        return;
    }
    if (!booking_ && is_not_now(head.status) && !forward_.is_control) {
        stage_ = Stage::not_now;
        held_head_ = head;
        held_text_.clear();
        // One text for all fields: they point into the connection's.
        std::size_t total = 0;
        for (const http::Field& field : head.fields) total += field.name.size() + field.value.size();
        held_text_.reserve(total + head.reason.size());
        const auto keep = [&](sv view) {
            held_text_ += view;
            return sv(held_text_).substr(held_text_.size() - view.size());
        };
        held_head_.reason = keep(head.reason);
        for (http::Field& field : held_head_.fields) {
            field.name = keep(field.name);
            field.value = keep(field.value);
        }
        held_piece_.assign(piece);
        is_held_last_ = is_last;
        if (upstream_ != nullptr) upstream_->pause();
        thread_.post(exchange_, NotNow{head.status, retry_after_s});
        return;
    }
    stage_ = Stage::relaying;
    std::string& out = thread_.scratch();
    out.clear();
    begin_response(head, out);
    relay(piece, is_last, out);
}

void Client::begin_response(const http::ResponseHead& head, std::string& out) {
    status_ = head.status;
    has_begun_ = true;
    if (booking_) {
        if (usual_ && head.status == 200) {
            usual_->learn(forward_.work_tokens, clock_now() - attempted_at_);
        }
        stop_waiting();
        ask_.reset();
        first_byte_s_ = thread_.now() - started_at_;
        booking_->first_byte(thread_.now());
    } else if (!forward_.is_control) {
        thread_.post(exchange_, FirstByte{head.status});
    }
    http::append_status(out, head.status, head.reason);
    const sv connection = head.find("connection");
    bool has_length = false;
    for (const http::Field& field : head.fields) {
        if (http::is_hop_by_hop(field.name)) continue;
        if (!forward_.is_control && begins_with(field.name, kOurPrefix)) continue;
        if (!connection.empty() && lists(connection, lower(field.name))) continue;
        const bool is_length = http::same_name(field.name, "content-length");
        // A 304 may carry the length of the body it leaves out.
        if (is_length && is_without_body(head.status)) continue;
        const bool is_replaced =
            std::any_of(forward_.reported.begin(), forward_.reported.end(),
                        [&](const auto& each) { return http::same_name(field.name, each.first); });
        if (is_replaced) continue;
        has_length |= is_length;
        http::append_field(out, field.name, field.value);
    }
    for (const auto& [name, value] : forward_.reported) http::append_field(out, name, value);
    append_framing(out, has_length || is_without_body(head.status), head.length, false);
    is_event_stream_ = takes_events(head);
    if (is_event_stream_) lines_.begin();
    usage_.begin();
    progress_at_ = thread_.now();
}

// What ends the head, and how the body will be framed.
void Client::append_framing(std::string& out, bool has_length, u64 length, bool says_close) {
    left_ = length;
    if (has_length || is_head_request_) {
        framing_ = is_head_request_ ? http::Framing::none : http::Framing::length;
    } else if (head_.minor == 1) {
        framing_ = http::Framing::chunked;
        out += "transfer-encoding: chunked\r\n";
    } else {
        // A client of HTTP/1.0 knows no chunks (RFC 9112 6.1): the body ends with the connection.
        framing_ = http::Framing::until_close;
        keeps_alive_ = false;
    }
    if (!keeps_alive_ && !says_close) out += "connection: close\r\n";
    out += "\r\n";
}

void Client::on_piece(sv piece, bool is_last) {
    if (is_last) upstream_ = nullptr;
    std::string& out = thread_.scratch();
    out.clear();
    relay(piece, is_last, out);
}

// Passes on a piece behind what `out` holds already.
void Client::relay(sv piece, bool is_last, std::string& out) {
    if (!forward_.is_control) {
        usage_.feed(piece);
        if (forward_.wants_id && told_beginning_ < kMostBeginning && !piece.empty()) {
            const sv beginning = piece.substr(0, kMostBeginning - told_beginning_);
            told_beginning_ += beginning.size();
            thread_.post(exchange_, Beginning{std::string(beginning)});
        }
        if (thread_.now() - progress_at_ >= kProgressEvery_s) {
            progress_at_ = thread_.now();
            if (const u64 events = usage_.take_events()) {
                if (booking_) {
                    events_ += events;
                    booking_->generated(events, thread_.now());
                } else {
                    thread_.post(exchange_, Progress{events});
                }
            }
        }
    }
    if (is_event_stream_) {
        std::string released;
        lines_.release(piece, is_last, released);
        append_body(released, is_last, out);
    } else {
        append_body(piece, is_last, out);
    }
    if (is_last) {
        // The client gets all of it before the end is known.
        const u64 number = exchange_;
        send(out);
        if (is_open() && exchange_ == number) finish(End::completed);
        return;
    }
    send(out);
    hold_if_slow();
}

void Client::append_body(sv piece, bool is_last, std::string& out) {
    body_bytes_ += piece.size();
    if (is_head_request_) return;
    if (framing_ == http::Framing::chunked) {
        if (!piece.empty()) {
            http::append_chunk_head(out, piece.size());
            out += piece;
            out += http::kChunkEnd;
        }
        if (is_last) out += http::kLastChunk;
        return;
    }
    out += piece;
}

void Client::on_failure(Failure failure, bool was_begun, const std::string& why) {
    upstream_ = nullptr;
    if (was_begun && stage_ == Stage::relaying) {
        break_off(failure);
        return;
    }
    if (forward_.is_control) {  // nobody else has what was asked for
        cut(End::abandoned);
        return;
    }
    if (booking_ && second_) {
        be_overtaken({{}, failure, 0, std::nullopt});
        return;
    }
    if (booking_) {
        hand_over({{}, failure, 0, std::nullopt});
        return;
    }
    stage_ = Stage::trying;
    thread_.post(exchange_, Failed{failure, why});
}

// The replica died in mid-stream: ends an event stream with an error event, and any other body
// visibly too early.
void Client::break_off(Failure failure) {
    if (is_event_stream_ && lines_.has_finished()) {
        // It died between its last event and the end of its body: the client has everything.
        std::string& out = thread_.scratch();
        out.clear();
        append_body({}, true, out);
        send(out);
        finish(End::completed);
        return;
    }
    broke_ = failure;
    if (!is_event_stream_ || forward_.is_control) {
        cut(End::replica_died);
        return;
    }
    std::string& out = thread_.scratch();
    out.clear();
    std::string event(lines_.separator());
    event += thread_.options().broken_events[forward_.dialect];
    append_body(event, true, out);
    send(out);
    finish(End::replica_died);
}

void Client::hold_if_slow() {
    if (!is_open() || stage_ != Stage::relaying || upstream_ == nullptr) return;
    if (!is_held_ && out_.size() - sent_ > kSlow) {
        is_held_ = true;
        upstream_->pause();
    }
}

// Tells how an exchange that was forwarded has ended.
void Client::report(End end) {
    was_forwarded_ = false;
    if (upstream_ != nullptr) std::exchange(upstream_, nullptr)->abandon();
    stop_waiting();
    if (forward_.is_control) return;
    Ended ended{.end = end,
                .status = has_begun_ ? status_ : 0,
                .seconds = clock_now() - started_at_,
                .body_bytes = body_bytes_,
                .failure = broke_,
                .usage = {},
                .first_usage = {}};
    usage_.finish(ended);
    if (booking_) {
        settle(std::move(ended));
    } else {
        thread_.post(exchange_, std::move(ended));
    }
}

Settled Client::so_far() const {
    Settled made;
    made.began_at = started_at_;
    made.model = prediction_.model;
    made.replica = prediction_.replica;
    made.request_id = request_id_;
    made.client = host_;
    made.client_port = port_;
    made.dp_rank = prediction_.dp_rank;
    made.prompt_tokens = prediction_.prompt_tokens;
    made.gpu_cached_tokens = prediction_.gpu_cached_tokens;
    made.cached_tokens = prediction_.cached_tokens;
    made.expected_tokens = prediction_.expected_tokens;
    made.is_suspect = prediction_.is_suspect;
    made.asked = asked_;
    made.routing_s = routing_s_;
    made.first_byte_s = first_byte_s_;
    return made;
}

// Operators look for the request that hangs.
void Client::show_running(double now) {
    const Shown shown = first_byte_s_ > 0 ? Shown::responding : Shown::waiting;
    if (!booking_ || !was_forwarded_ || shown_ == shown || now - started_at_ < kShownAfter_s) return;
    shown_ = shown;
    Running running{so_far()};
    running.so_far.ended.seconds = now - started_at_;
    thread_.post(exchange_, std::move(running));
}

void Client::settle(Ended ended) {
    Settled settled = so_far();
    settled.was_alone = booking_->ended(has_begun_, thread_.now());
    booking_.reset();
    ended.events += events_;
    settled.ended = std::move(ended);
    thread_.post(exchange_, std::move(settled));
}

// All of the response has been written.
void Client::finish(End end) {
    if (!was_forwarded_) return;
    report(end);
    stage_ = Stage::answered;
    end_exchange();
}

// The response has been written, if not sent: on to the next request, or to the end.
void Client::end_exchange() {
    if (!is_open() || stage_ != Stage::answered) return;
    exchange_ = 0;
    share_ = {};
    if (body_.capacity() > kPiece) body_ = std::string();
    forward_.body.reset();
    if (is_unsent()) {
        update_interest();
        return;  // `flush` comes back
    }
    if (!keeps_alive_) {
        close();
        return;
    }
    stage_ = is_body_whole_ ? Stage::idle : Stage::draining;
    is_held_ = false;
    idle_since_ = receiving_since_ = thread_.now();
    if (is_proceeding_) return;
    proceed();
    if (has_left_half_) leave_if_unfinished();
}

// --- writing --------------------------------------------------------------------------------------

void Client::send(sv bytes) {
    if (!is_open() || bytes.empty()) return;
    if (!is_unsent()) stalled_since_ = thread_.now();
    if (out_.size() == sent_) {
        const ssize_t sent = channel_.send(descriptor_, bytes);
        if (sent < 0) {
            leave();
            return;
        }
        bytes.remove_prefix(static_cast<std::size_t>(sent));
        if (bytes.empty() && !channel_.has_unsent()) return;
        out_.clear();
        sent_ = 0;
    }
    out_ += bytes;
    update_interest();
}

void Client::flush() {
    const std::size_t unsent = channel_.unsent();
    ssize_t sent = channel_.flush(descriptor_) ? 0 : -1;
    if (sent == 0 && out_.size() > sent_) sent = channel_.send(descriptor_, sv(out_).substr(sent_));
    if (sent < 0) {
        leave();
        return;
    }
    if (sent > 0 || channel_.unsent() < unsent) stalled_since_ = thread_.now();
    sent_ += static_cast<std::size_t>(sent);
    if (sent_ == out_.size()) {
        out_.clear();
        sent_ = 0;
        if (out_.capacity() > 4 * kSlow) out_ = std::string();
    } else if (sent_ > kSlow) {
        out_.erase(0, sent_);
        sent_ = 0;
    }
    if (is_held_ && out_.size() - sent_ < kReadsAgain) {
        is_held_ = false;
        if (upstream_ != nullptr) upstream_->resume(thread_.now());
    }
    if (stage_ == Stage::answered && !is_unsent()) {
        end_exchange();
        return;
    }
    update_interest();
}

}  // namespace kvroute::plane
