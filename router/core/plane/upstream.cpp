#include "plane/upstream.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>

namespace kvroute::plane {
namespace {

using sv = std::string_view;

constexpr double kNever = std::numeric_limits<double>::infinity();

bool is_interim(int status) { return status >= 100 && status < 200 && status != 101; }

}  // namespace

// --- one connection -------------------------------------------------------------------------------

void Upstream::begin(Recipient& recipient, sv head, sv body, const Timeouts& timeouts, double now) {
    recipient_ = &recipient;
    head_to_send_ = head;
    body_to_send_ = body;
    timeouts_ = timeouts;
    has_received_ = was_begun_ = is_paused_ = is_shut_ = false;
    received_.clear();
    parsed_ = interim_bytes_ = 0;
    heard_at_ = now;
    ++pool_.counts_.active;
    if (phase_ == Phase::connecting) {
        deadline_ = now + timeouts.connect_s;
        return;
    }
    phase_ = Phase::sending;
    deadline_ = now + timeouts.first_byte_s;
    write();
}

u32 Upstream::interest() const {
    if (phase_ == Phase::connecting) return EPOLLOUT;
    u32 events = is_paused_ ? 0u : EPOLLIN | EPOLLRDHUP;
    if (!head_to_send_.empty() || !body_to_send_.empty()) events |= EPOLLOUT;
    return events;
}

void Upstream::write() {
    while (!head_to_send_.empty() || !body_to_send_.empty()) {
        const ssize_t sent = head_to_send_.empty()
                                 ? send_some(descriptor_, body_to_send_)
                                 : send_some(descriptor_, head_to_send_, body_to_send_);
        if (sent < 0) {
            // What the replica said before it closed may still be read.
            head_to_send_ = body_to_send_ = {};
            is_shut_ = true;
            break;
        }
        if (sent == 0) break;
        const auto of_head = std::min<std::size_t>(sent, head_to_send_.size());
        head_to_send_.remove_prefix(of_head);
        body_to_send_.remove_prefix(static_cast<std::size_t>(sent) - of_head);
    }
    if (phase_ == Phase::sending && head_to_send_.empty() && body_to_send_.empty()) {
        phase_ = Phase::awaiting_head;
    }
    pool_.loop_.change(*this, interest());
}

void Upstream::pause() {
    is_paused_ = true;
    deadline_ = kNever;
    pool_.loop_.change(*this, interest());
}

void Upstream::resume(double now) {
    is_paused_ = false;
    heard_at_ = now;
    deadline_ = now + (was_begun_ ? timeouts_.idle_s : timeouts_.first_byte_s);
    pool_.loop_.change(*this, interest());
}

void Upstream::abandon() {
    if (recipient_ != nullptr) {
        ++pool_.counts_.aborted;
        end(false);
    }
}

void Upstream::on_ready(u32 events) {
    if (phase_ == Phase::connecting) {
        int error = 0;
        socklen_t size = sizeof error;
        getsockopt(descriptor_, SOL_SOCKET, SO_ERROR, &error, &size);
        if (error || (events & EPOLLERR)) {
            fail(Failure::connect, std::strerror(error));
            return;
        }
        phase_ = Phase::sending;
        deadline_ = clock_now() + timeouts_.first_byte_s;
        write();
        return;
    }
    if (events & EPOLLOUT) write();
    if (is_open() && (events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR))) read();
}

void Upstream::on_no_memory() {
    received_ = std::string();
    if (recipient_ != nullptr) fail(Failure::malformed, "no memory for its response");
}

void Upstream::read() {
    if (recipient_ != nullptr && is_paused_) {
        // Only an error or a hang-up wakes who is paused; what has come is read when that is over.
        pool_.loop_.change(*this, 0);
        return;
    }
    std::string& buffer = pool_.buffer_;
    const ssize_t count = ::recv(descriptor_, buffer.data(), buffer.size(), 0);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (recipient_ == nullptr) {  // kept, and closed by the server, or it says what nobody asked
        pool_.remove(*this);
        return;
    }
    heard_at_ = clock_now();
    if (count > 0) {
        has_received_ = true;
        take(sv(buffer.data(), static_cast<std::size_t>(count)));
        return;
    }
    if (count == 0 && phase_ == Phase::in_body && head_.framing == http::Framing::until_close) {
        if (!was_begun_) {
            was_begun_ = true;
            recipient_->on_response(head_, {}, true);
        } else {
            recipient_->on_piece({}, true);
        }
        if (recipient_ != nullptr) end(false);
        return;
    }
    if (was_begun_) {
        fail(Failure::died, "closed in mid-body");
    } else if (has_received_) {
        fail(Failure::malformed, "closed in mid-response");
    } else {
        fail(was_kept_ ? Failure::kept_closed : Failure::closed, "closed before its response");
    }
}

void Upstream::take(sv bytes) {
    if (phase_ == Phase::sending) phase_ = Phase::awaiting_head;  // it responds to half a request
    if (phase_ == Phase::awaiting_head) {
        if (!received_.empty()) {
            received_ += bytes;
            bytes = received_;
            const std::size_t before = std::exchange(parsed_, bytes.size());
            if (!http::is_worth_parsing(bytes, before, http::Bounds())) return;
        }
        if (!take_head(bytes)) return;
    }
    take_body(bytes);
}

// True once the head is whole; `bytes` is then what follows it.
bool Upstream::take_head(sv& bytes) {
    http::Bounds bounds;
    for (;;) {
        std::size_t used = 0;
        http::Problem problem;
        switch (http::parse_response(bytes, bounds, false, head_, used, problem)) {
            case http::Parsed::bad:
                fail(Failure::malformed, problem.text());
                return false;
            case http::Parsed::partial:
                if (bytes.data() != received_.data()) received_ = std::string(bytes);
                parsed_ = received_.size();
                return false;
            case http::Parsed::whole:
                break;
        }
        if (!is_interim(head_.status)) {
            // The fields outlast the buffer: they are told with the first byte of the body.
            const sv text = bytes.substr(0, used);
            bytes.remove_prefix(used);
            head_text_.assign(text);
            const auto rebased = [&](sv view) {
                return sv(head_text_.data() + (view.data() - text.data()), view.size());
            };
            head_.reason = rebased(head_.reason);
            for (http::Field& field : head_.fields) {
                field = {rebased(field.name), rebased(field.value)};
            }
            phase_ = Phase::in_body;
            body_.begin(head_.framing, head_.length, bounds);
            return true;
        }
        bytes.remove_prefix(used);
        interim_bytes_ += used;
        if (interim_bytes_ > bounds.head_bytes) {
            fail(Failure::malformed, "too many interim responses");
            return false;
        }
    }
}

void Upstream::take_body(sv bytes) {
    std::string& joined = pool_.joined_;
    joined.clear();
    sv piece;
    bool is_last = body_.has_ended(), is_bad = false;
    while (!is_last && !is_bad && !bytes.empty()) {
        const http::BodyReader::Piece next = body_.next(bytes);
        bytes.remove_prefix(next.used);
        is_last = next.is_last;
        is_bad = next.is_bad;
        if (!next.payload.empty()) {
            if (piece.empty() && joined.empty()) {
                piece = next.payload;
            } else {
                if (joined.empty()) joined.assign(piece);
                joined += next.payload;
            }
        }
        if (next.used == 0 && !is_last) break;
    }
    if (!joined.empty()) piece = joined;
    const bool has_more = !bytes.empty();  // behind the response
    if (is_bad && !was_begun_) {  // nothing of it has been passed on: another replica may serve
        fail(Failure::malformed, body_.problem().text());
        return;
    }
    if (!piece.empty() || is_last) {
        deadline_ = heard_at_ + timeouts_.idle_s;
        const bool was_begun = std::exchange(was_begun_, true);
        if (was_begun) {
            recipient_->on_piece(piece, is_last);
        } else {
            recipient_->on_response(head_, piece, is_last);
        }
        if (recipient_ == nullptr) return;
    }
    if (is_last) {
        const bool is_sent = head_to_send_.empty() && body_to_send_.empty();
        end(head_.keeps_alive && head_.framing != http::Framing::until_close && is_sent &&
            !has_more && !is_shut_);
    } else if (is_bad) {
        fail(Failure::died, "its body breaks the framing");
    }
    received_.clear();
}

bool Upstream::look_at(double now) {
    if (recipient_ == nullptr || now < deadline_) return false;
    if (phase_ == Phase::connecting) {
        fail(Failure::connect_timeout, "no connection in time");
    } else {
        fail(was_begun_ ? Failure::idle_timeout : Failure::first_byte_timeout, "silent for too long");
    }
    return true;
}

void Upstream::give_up(double now, double silent_s) {
    if (recipient_ == nullptr || is_paused_ || phase_ == Phase::connecting) return;
    if (!was_begun_) {
        fail(Failure::given_up, "its health checks fail");
    } else if (now - heard_at_ >= silent_s) {
        fail(Failure::lost, "silent, and its health checks fail");
    }
}

void Upstream::fail(Failure failure, const std::string& why) {
    PoolCounts& counts = pool_.counts_;
    switch (failure) {
        case Failure::connect:
        case Failure::connect_timeout: ++counts.connect_failures; break;
        case Failure::first_byte_timeout:
        case Failure::idle_timeout: ++counts.timeouts; break;
        case Failure::malformed:
        case Failure::died: ++counts.broken; break;
        case Failure::given_up:
        case Failure::lost: ++counts.given_up; break;
        case Failure::kept_closed: ++counts.kept_closed; [[fallthrough]];
        case Failure::closed: ++counts.closed_early; break;
        default: break;
    }
    Recipient* recipient = recipient_;
    const bool was_begun = was_begun_;
    end(false);
    recipient->on_failure(failure, was_begun, why);
}

// The exchange is over on this side.
void Upstream::end(bool may_keep) {
    recipient_ = nullptr;
    head_to_send_ = body_to_send_ = {};
    --pool_.counts_.active;
    if (may_keep) {
        phase_ = Phase::idle;
        was_kept_ = true;
        pool_.keep(*this, heard_at_);
    } else {
        pool_.remove(*this);
    }
}

// --- all of them ----------------------------------------------------------------------------------

Upstream* Pool::start(Recipient& recipient, const Forward& forward, sv head, sv body, double now) {
    Upstream* upstream = forward.may_reuse ? take_idle(forward.origin) : nullptr;
    if (upstream == nullptr) {
        const char* why = "";
        Failure failure = Failure::connect;
        upstream = connect(forward, why, failure);
        if (upstream == nullptr) {
            ++counts_.connect_failures;
            recipient.on_failure(failure, false, why);
            return nullptr;
        }
    }
    upstream->begin(recipient, head, body, forward.timeouts, now);
    return upstream;
}

Upstream* Pool::take_idle(const std::string& origin) {
    const auto found = idle_.find(origin);
    if (found == idle_.end() || found->second.empty()) return nullptr;
    // The one used last is taken first, so that the others grow old and are closed.
    Upstream* upstream = found->second.back();
    found->second.pop_back();
    --counts_.idle;
    ++counts_.reused;
    return upstream;
}

Upstream* Pool::connect(const Forward& forward, const char*& why, Failure& failure) {
    if (!make_room()) {
        why = "all connections are in use";
        failure = Failure::at_limit;
        return nullptr;
    }
    const int family = forward.address.storage.ss_family;
    const int descriptor = ::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    const bool is_reserved = descriptor >= options_.reserved_from && !forward.is_control;
    if (descriptor < 0 || is_reserved) {
        if (descriptor >= 0) ::close(descriptor);
        failure = Failure::no_files;
        why = "no file descriptor is left";
        return nullptr;
    }
    if (family != AF_UNIX) {
        const int one = 1;
        setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    }
    const auto* to = reinterpret_cast<const sockaddr*>(&forward.address.storage);
    const int done = ::connect(descriptor, to, forward.address.length);
    if (done < 0 && errno != EINPROGRESS) {
        why = std::strerror(errno);
        ::close(descriptor);
        return nullptr;
    }
    auto made = std::make_unique<Upstream>(*this, forward.origin);
    Upstream* upstream = made.get();
    upstream->phase_ = done == 0 ? Upstream::Phase::sending : Upstream::Phase::connecting;
    loop_.add(*upstream, descriptor, done == 0 ? EPOLLIN | EPOLLRDHUP : EPOLLOUT);
    all_.emplace(upstream, std::move(made));
    ++counts_.opened;
    ++counts_.connections;
    return upstream;
}

// Within the bound on connections, by closing one that is idle if there is one.
bool Pool::make_room() {
    if (!options_.max_connections || counts_.connections < options_.max_connections) return true;
    for (auto& [origin, kept] : idle_) {
        if (kept.empty()) continue;
        remove(*kept.front());
        return true;
    }
    return false;
}

void Pool::keep(Upstream& upstream, double now) {
    auto& kept = idle_[upstream.origin()];
    if (kept.size() >= options_.max_idle) {
        remove(upstream);
        return;
    }
    upstream.idle_since_ = now;
    upstream.is_paused_ = false;
    loop_.change(upstream, EPOLLIN | EPOLLRDHUP);
    kept.push_back(&upstream);
    ++counts_.idle;
}

void Pool::remove(Upstream& upstream) {
    const auto of_origin = idle_.find(upstream.origin());
    if (of_origin != idle_.end()) {
        auto& kept = of_origin->second;
        const auto place = std::find(kept.begin(), kept.end(), &upstream);
        if (place != kept.end()) {
            kept.erase(place);
            --counts_.idle;
        }
        if (kept.empty()) idle_.erase(of_origin);
    }
    loop_.close(upstream);
    const auto found = all_.find(&upstream);
    if (found == all_.end()) return;
    buried_.push_back(std::move(found->second));
    all_.erase(found);
    --counts_.connections;
}

void Pool::look_after(double now) {
    std::vector<Upstream*> due;
    for (auto& [upstream, owner] : all_) {
        const bool is_aged =
            upstream->is_idle() && now - upstream->idle_since_ > options_.idle_s;
        if (is_aged || (!upstream->is_idle() && now >= upstream->deadline_)) due.push_back(upstream);
    }
    for (Upstream* upstream : due) {
        if (!upstream->is_open()) continue;
        if (upstream->is_idle()) {
            remove(*upstream);
        } else {
            upstream->look_at(now);
        }
    }
}

void Pool::give_up(const std::string& origin, double now, double silent_s) {
    std::vector<Upstream*> of_origin;
    for (auto& [upstream, owner] : all_) {
        if (upstream->origin() == origin && !upstream->is_idle()) of_origin.push_back(upstream);
    }
    for (Upstream* upstream : of_origin) {
        if (upstream->is_open()) upstream->give_up(now, silent_s);
    }
}

void Pool::close() {
    std::vector<Upstream*> all;
    for (auto& [upstream, owner] : all_) all.push_back(upstream);
    for (Upstream* upstream : all) remove(*upstream);
}

}  // namespace kvroute::plane
