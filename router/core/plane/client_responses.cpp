// A client's requests as they are sent on, and the responses that it gets.
#include <algorithm>
#include <charconv>

#include "http/write.hpp"
#include "index/memory.hpp"
#include "plane/client.hpp"
#include "plane/errors.hpp"
#include "plane/thread.hpp"

namespace kvroute::plane {
namespace {

using sv = std::string_view;

constexpr std::size_t kMostBeginning = 16 * 1024;
constexpr std::size_t kKeptBytes = 64 * 1024;  // of a body, from which on its memory is freed
constexpr double kProgressEvery_s = 0.25;
constexpr double kShownAfter_s = 0.2;  // a request that was decided here, while it runs
constexpr sv kOurPrefix = "x-kv-";
constexpr sv kControlClient = "x-kvroute-client";

bool has_content(sv method) { return method == "POST" || method == "PUT" || method == "PATCH"; }
bool is_without_body(int status) { return status == 204 || status == 304; }

// `fields`: pairs, each with a name first.
template <class Pairs>
bool is_named(sv name, const Pairs& fields) {
    return std::any_of(fields.begin(), fields.end(),
                       [&](const auto& each) { return http::same_name(name, each.first); });
}

std::optional<u32> retry_after_of(const http::ResponseHead& head) {
    const sv text = head.find("retry-after");
    u32 seconds = 0;
    if (text.empty() || text.size() > 6) return std::nullopt;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
    if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
    return seconds;
}

// True where an event may be appended to this body: an event stream, not encoded, of open length.
bool takes_events(const http::ResponseHead& head) {
    const sv coding = head.find("content-encoding");
    return http::begins_with(head.find("content-type"), "text/event-stream") &&
           head.framing != http::Framing::length &&
           (coding.empty() || http::same_name(coding, "identity"));
}

}  // namespace

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
    bool has_close = false, has_length = false;
    for (const auto& [name, value] : respond.fields) {
        http::append_field(out, name, value);
        has_close |= name == "connection" && http::lists(value, "close");
        if (name != "content-length") continue;
        has_length = true;
        if (value != std::to_string(respond.body.size())) {
            cut(End::abandoned);  // the client could not find where the next response begins
            return;
        }
    }
    // A client that waits for 100 Continue may send its body, or not (RFC 9110 10.1.1).
    if (has_close || (!is_body_whole_ && head_.expects_continue)) keeps_alive_ = false;
    status_ = respond.status;
    append_framing(out, has_length || is_without_body(respond.status), respond.body.size(), has_close);
    if (framing_ == http::Framing::chunked) {
        append_body(respond.body, true, out);
    } else if (!is_head_request_ && !is_without_body(respond.status)) {
        out += respond.body;
    }
    body_bytes_ = respond.body.size();
    // The responder knows that it is over: no `Ended` is posted.
    was_forwarded_ = is_awaited_ = false;
    stage_ = Stage::answered;
    has_begun_ = true;
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
    if (http::same_name(name, "host")) return !forward.to->authority.empty();
    // Whom the application behind serves depends on a proxy's fields: those that `connection` lists
    // stay, as a client may write that, and its proxy pass it on.
    if (forward.is_control) return http::same_name(name, kControlClient);
    if (!connection.empty() && http::lists(connection, name)) return true;
    if (thread_.options().dropped.contain(name)) return true;
    return is_named(name, forward.replaced);
}

void Client::compose_request(const Forward& forward, std::string& out) const {
    const sv method = is_head_request_ ? sv("GET") : head_.method;
    out += method;
    out += ' ';
    out += forward.to->base_path;
    out += head_.origin_form;
    out += " HTTP/1.1\r\n";
    if (!forward.to->authority.empty()) http::append_field(out, "host", forward.to->authority);
    std::string lines;
    const sv connection = http::list_of(head_.fields, "connection", lines);
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
// --- the response ---------------------------------------------------------------------------------

void Client::on_response(const http::ResponseHead& head, sv piece, bool is_last) {
    if (is_last) upstream_ = nullptr;
    const std::optional<u32> retry_after_s = retry_after_of(head);
    const bool is_final =  // no other replica is tried
        head.status == 429 && (!retry_after_s || thread_.options().passes_429);
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
        const double now = clock_now();
        first_byte_s_ = now - started_at_;
        if (!is_error(head.status)) booking_->first_byte(asked_.is_stream, now);
    } else if (!forward_.is_control) {
        thread_.post(exchange_, FirstByte{head.status});
    }
    http::append_status(out, head.status, head.reason);
    std::string lines;
    const sv connection = http::list_of(head.fields, "connection", lines);
    bool has_length = false;
    for (const http::Field& field : head.fields) {
        if (http::is_hop_by_hop(field.name)) continue;
        if (!forward_.is_control && http::begins_with(field.name, kOurPrefix)) continue;
        if (!connection.empty() && http::lists(connection, field.name)) continue;
        const bool is_length = http::same_name(field.name, "content-length");
        // A 304 may carry the length of the body it leaves out.
        if (is_length && is_without_body(head.status)) continue;
        if (is_named(field.name, forward_.to->reported) || is_named(field.name, forward_.reported)) {
            continue;
        }
        has_length |= is_length;
        http::append_field(out, field.name, field.value);
    }
    for (const auto& [name, value] : forward_.to->reported) http::append_field(out, name, value);
    for (const auto& [name, value] : forward_.reported) http::append_field(out, name, value);
    append_framing(out, has_length || is_without_body(head.status), head.length, false);
    is_event_stream_ = takes_events(head);
    if (is_event_stream_) lines_.begin();
    usage_.begin();
    progress_at_ = thread_.now();
}

// Ends the head, and chooses how the body is framed.
void Client::append_framing(std::string& out, bool has_length, u64 length, bool has_close) {
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
    if (!keeps_alive_ && !has_close) out += "connection: close\r\n";
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
    if (is_head_request_ && !is_last) {  // it gets nothing of the body, which may have no end
        if (upstream_ != nullptr) std::exchange(upstream_, nullptr)->abandon();
        is_last = true;
    }
    if (!forward_.is_control) {
        usage_.feed(piece);
        if (forward_.wants_id && posted_beginning_ < kMostBeginning && !piece.empty()) {
            const sv beginning = piece.substr(0, kMostBeginning - posted_beginning_);
            posted_beginning_ += beginning.size();
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

void Client::on_failure(Failure failure, bool was_begun, sv why) {
    upstream_ = nullptr;
    if (was_begun && stage_ == Stage::relaying) {
        break_off(failure);
        return;
    }
    if (forward_.is_control) {  // there is no other server to try
        // While the router stops, the application behind ends first. One without descriptors closes
        // the connections that come.
        const bool is_short = failure == Failure::no_files || failure == Failure::closed;
        if (failure == Failure::no_files) thread_.post(0, Refused{"reserve"});
        if (failure == Failure::connect) {
            respond(kShuttingDownError);
        } else {
            is_short ? respond(kNoFilesError) : cut(End::abandoned);
        }
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
    thread_.post(exchange_, Failed{failure, std::string(why)});
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
// Posts how an exchange that was forwarded has ended.
void Client::report(End end) {
    const Unfailing unfailing;
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
    try {
        if (booking_) {
            settle(std::move(ended));
        } else {
            thread_.post(exchange_, std::move(ended));
        }
    } catch (const std::bad_alloc&) {
        thread_.lose(exchange_);
    }
    show(Shown::not_yet);
}

// Returns what is known of a request when it is decided.
Settled Client::record_of(const Prediction& prediction, const Asked& asked) const {
    Settled made;
    made.model = prediction.model;
    made.replica = prediction.replica;
    made.client = host_;
    made.client_port = port_;
    made.dp_rank = prediction.dp_rank;
    made.prompt_tokens = prediction.prompt_tokens;
    made.gpu_cached_tokens = prediction.gpu_cached_tokens;
    made.cached_tokens = prediction.cached_tokens;
    made.expected_tokens = prediction.expected_tokens;
    made.is_suspect = prediction.is_suspect;
    made.estimate_trust = prediction.estimate_trust;
    made.asked = asked;
    return made;
}

Settled Client::so_far() const {
    Settled made = record_of(prediction_, asked_);
    made.request_id = request_id_;
    made.began_at = started_at_;
    made.routing_s = routing_s_;
    made.first_byte_s = first_byte_s_;
    return made;
}

void Client::show(Shown shown) {
    const bool was_shown = shown_ != Shown::not_yet, is_shown = shown != Shown::not_yet;
    if (is_shown != was_shown) thread_.count_shown(is_shown);
    shown_ = shown;
}

// Posts requests that run for long, up to a bound: one that hangs is among the first of them.
void Client::show_running(double now) {
    const Shown shown = first_byte_s_ > 0 ? Shown::responding : Shown::waiting;
    if (!booking_ || !was_forwarded_ || shown_ == shown || now - started_at_ < kShownAfter_s) return;
    if (shown_ == Shown::not_yet && !thread_.may_show()) return;
    show(shown);
    Running running{so_far()};
    running.so_far.ended.seconds = now - started_at_;
    thread_.post(exchange_, std::move(running));
}

// Counts it; false where its record has to be posted: it is shown, or its prediction judges a cache.
bool Client::is_summed(const Ended& ended, bool was_alone) {
    const bool is_plain = ended.end == End::completed && ended.status == 200 && !ended.failure &&
                          first_byte_s_ > 0 && !was_prepared_ && shown_ == Shown::not_yet &&
                          !(was_alone && asked_.is_comparable);
    if (!is_plain) return false;
    std::optional<Usage> usage;
    if (asked_.is_comparable && !(usage = plain_usage(ended))) return false;
    return thread_.sum({.model = prediction_.model,
                        .replica = prediction_.replica,
                        .prompt_tokens = prediction_.prompt_tokens,
                        .cached_tokens = prediction_.cached_tokens,
                        .expected_tokens = prediction_.expected_tokens,
                        .routing_s = routing_s_,
                        .first_byte_s = first_byte_s_,
                        .seconds = ended.seconds,
                        .usage = usage});
}

void Client::settle(Ended ended) {
    const bool was_alone = booking_->ended(has_begun_ && !is_error(status_), clock_now());
    std::unique_ptr<Booking> booking = std::move(booking_);
    if (!prediction_.is_estimate()) {
        booking.reset();  // an estimate's waits for the engine's usage
        if (is_summed(ended, was_alone)) {
            usage_.reuse(std::move(ended));
            return;
        }
    }
    Settled settled = so_far();
    settled.booking = std::move(booking);
    settled.was_alone = was_alone;
    ended.events += events_;
    settled.ended = std::move(ended);
    thread_.post(exchange_, std::move(settled));
}

// All of the response has been written.
void Client::finish(End end) {
    if (!was_forwarded_) return;
    stage_ = Stage::answered;
    count_unread();  // before its end is known: the router must not stop in between
    report(end);
    end_exchange();
}

// The response has been written, if not sent: on to the next request, or to the end.
void Client::end_exchange() {
    if (!is_open() || stage_ != Stage::answered) return;
    exchange_ = 0;
    share_ = {};
    if (body_.capacity() > kKeptBytes) body_ = std::string();
    forward_.body.reset();
    if (is_unsent()) {
        update_interest();
        return;  // `flush` comes back
    }
    if (!keeps_alive_) {
        is_body_whole_ ? close() : discard_input();
        return;
    }
    stage_ = is_body_whole_ ? Stage::idle : Stage::draining;
    is_held_ = false;
    idle_since_ = receiving_since_ = thread_.now();
    if (is_proceeding_) return;
    proceed();
    if (has_left_half_) leave_if_unfinished();
}

}  // namespace kvroute::plane
