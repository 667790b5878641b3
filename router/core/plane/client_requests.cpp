// A client's requests as they come: heads, bodies, and the events posted for them.
#include <algorithm>
#include <utility>

#include "http/write.hpp"
#include "plane/client.hpp"
#include "plane/thread.hpp"

namespace kvroute::plane {
namespace {

using sv = std::string_view;

constexpr std::size_t kPiece = 64 * 1024;  // of a body, from which on it is posted

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

// Has what points into `from` point into a copy of it.
void rebase(http::RequestHead& head, std::string& text, sv from) {
    text.assign(from);
    for (http::Field& field : head.fields) {
        field.name = sv(text.data() + (field.name.data() - from.data()), field.name.size());
        field.value = sv(text.data() + (field.value.data() - from.data()), field.value.size());
    }
}

}  // namespace

// --- reading --------------------------------------------------------------------------------------

void Client::read() {
    const bool was_unsent = is_unsent();
    const Channel::Read came = channel_.receive(descriptor_, thread_.buffer());
    if (!was_unsent) stalled_since_ = thread_.now();  // TLS may have sent records of its own
    if (stage_ == Stage::refused) {  // it is discarded
        if (!came.bytes.empty()) received_at_ = thread_.now();
    } else {
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

// What came is no valid TLS. The client gets an alert, which has been sent.
void Client::refuse_handshake() {
    if (stage_ == Stage::refused) return;
    if (channel_.is_established()) {
        leave();
        return;
    }
    thread_.post(0, Refused{channel_.is_foreign() ? "not_tls" : "tls_handshake_failed"});
    stage_ = Stage::refused;
    refused_at_ = received_at_ = thread_.now();
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
    beside_.reset();
    ask_.reset();
    late_at_ = 0;
    status_ = 0;
    body_bytes_ = events_ = 0;
    broke_.reset();
    body_.clear();
    posted_ = posted_beginning_ = 0;
    http::Bounds bounds;
    bounds.head_bytes = thread_.options().head_bytes;
    body_reader_.begin(head_.framing, head_.length, bounds);
    is_body_whole_ = body_reader_.has_ended();
    is_piece_wanted_ = is_opened_ = was_prepared_ = false;
    request_id_.clear();
    show(Shown::not_yet);
    if (!is_body_whole_ && !in_.empty()) {
        take_body();
        if (!is_open() || stage_ != Stage::deciding) return;
    }
    is_awaited_ = may_decide() && has_room();
    if (is_awaited_ && (!is_body_whole_ || decide())) return;
    post_opened();
}

void Client::post_opened() {
    is_awaited_ = false;
    Opened opened{.method = std::string(head_.method),
                  .target = std::string(head_.origin_form),
                  .is_of_reserve = is_of_reserve_,
                  .fields = {},
                  .client = host_,
                  .client_port = port_,
                  .body = body_,
                  .is_whole = is_body_whole_,
                  .was_prepared = was_prepared_,
                  .share = std::move(share_)};
    opened.fields = fields();
    if (!request_id_.empty()) {  // one that a replica has seen stays
        std::erase_if(opened.fields, [](const auto& field) { return field.first == "x-request-id"; });
        opened.fields.emplace_back("x-request-id", request_id_);
    }
    posted_ = body_.size();
    is_opened_ = true;
    thread_.post(exchange_, std::move(opened));
}

// Names in lower case.
Fields Client::fields() const {
    Fields made;
    made.reserve(head_.fields.size());
    for (const http::Field& field : head_.fields) {
        made.emplace_back(http::lower_name(field.name), std::string(field.value));
    }
    return made;
}

// Moves what has come of the body to `body_`, and posts it once it is much or whole.
void Client::take_body() {
    sv bytes = in_;
    const std::size_t before = body_.size();
    while (!bytes.empty() && !is_body_whole_) {
        const http::BodyReader::Piece piece = body_reader_.next(bytes);
        if (piece.is_bad) {
            if (is_opened_) thread_.post(exchange_, Left{});
            refuse(body_reader_.problem());
            return;
        }
        make_room_for(piece.payload.size());
        body_ += piece.payload;
        bytes.remove_prefix(piece.used);
        is_body_whole_ = piece.is_last;
        if (piece.used == 0 && !piece.is_last) break;
    }
    in_.erase(0, in_.size() - bytes.size());
    if (is_opened_ && (is_body_whole_ || body_.size() - posted_ >= kPiece)) post_body();
    if (is_awaited_ && !share_.grow(body_.size() - before)) post_opened();  // Python refuses it
    if (is_awaited_ && is_body_whole_ && !decide()) post_opened();
}

// Twice what has come, as a string does by itself, but no more than is announced.
void Client::make_room_for(std::size_t size) {
    const std::size_t needed = body_.size() + size;
    if (needed <= body_.capacity() || head_.framing != http::Framing::length) return;
    body_.reserve(std::max(needed, std::min<std::size_t>(head_.length, 2 * body_.capacity())));
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

void Client::post_body() {
    thread_.post(exchange_, BodyRead{body_.substr(posted_), is_body_whole_});
    posted_ = body_.size();
    is_piece_wanted_ = false;
}
void Client::read_body() {
    if (stage_ != Stage::deciding || is_body_whole_) return;
    if (head_.expects_continue && head_.minor == 1 && !has_begun_) {
        head_.expects_continue = false;  // sent once
        send(http::kContinue);
        if (!is_open()) return;
    }
    is_piece_wanted_ = true;
    proceed();
}

}  // namespace kvroute::plane
