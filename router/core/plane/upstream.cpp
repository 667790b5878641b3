#include "plane/upstream.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <new>

#include "index/memory.hpp"

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
    received_at_ = now;
    ++counts_.active;
    const bool is_new = phase_ != Phase::idle;
    if (!is_connecting()) {
        phase_ = Phase::sending;
        deadline_ = now + timeouts.first_byte_s;
    }
    if (!is_new) {
        write();
        return;
    }
    if (phase_ == Phase::sending) send_rest();
    if (phase_ == Phase::connecting && secure_host_.empty()) send_early();
    if (phase_ != Phase::queued) pool_.loop_.add(*this, descriptor_, interest());
}

// --- the connection -------------------------------------------------------------------------------

// Connects to the next address that can be tried. False: none is left, and `failure` and `why` have
// the last reason, if there is one.
bool Upstream::connect(double now, Failure& failure, std::string& why) {
    while (!addresses_.empty()) {
        const Address address = addresses_.front();
        addresses_.erase(addresses_.begin());
        const int below = is_control_ ? std::numeric_limits<int>::max() : pool_.options_.reserved_from;
        const int descriptor = new_socket(address.storage.ss_family, below);
        if (descriptor < 0 && is_shortage(errno)) {
            failure = Failure::no_files;
            why = "no file descriptor is left";
            return false;
        }
        const auto* to = reinterpret_cast<const sockaddr*>(&address.storage);
        const int done = descriptor < 0 ? -1 : ::connect(descriptor, to, address.length);
        // The application behind is this process: it is only busy, and is asked again; see `look_at`.
        const bool is_full = done < 0 && errno == EAGAIN && is_control_ && now < connect_until_;
        if (done < 0 && errno != EINPROGRESS && !is_full) {
            const int error = errno;  // also where this machine has no such addresses
            if (descriptor >= 0) ::close(descriptor);
            lacked_port_ |= lacks_port(error, address);
            failure = lacked_port_ ? Failure::no_ports : Failure::connect;
            why = std::strerror(error);
            continue;
        }
        const bool is_ready = done == 0 && secure_host_.empty();
        phase_ = is_full ? Phase::queued : is_ready ? Phase::sending : Phase::connecting;
        descriptor_ = descriptor;  // the caller watches it, once it knows for what
        connect_error_ = 0;
        if (is_full) {
            addresses_.insert(addresses_.begin(), address);
            deadline_ = now;
            return true;
        }
        // Each address that is left gets the same share of the time.
        deadline_ = now + (connect_until_ - now) / static_cast<double>(addresses_.size() + 1);
        return true;
    }
    return false;
}

void Upstream::not_connected(Failure failure, std::string why) {
    pool_.loop_.close(*this);
    channel_ = Channel();
    if (!connect(clock_now(), failure, why)) {
        fail(lacked_port_ ? Failure::no_ports : failure, why);
        return;
    }
    if (phase_ == Phase::queued) return;
    pool_.loop_.add(*this, descriptor_, interest());
    if (phase_ == Phase::sending) begin_sending();
}

void Upstream::on_connected() {
    if (secure_host_.empty()) {
        begin_sending();
        return;
    }
    phase_ = Phase::securing;
    std::shared_ptr<const tls::Context> context = pool_.contexts_.towards_replicas();
    try {
        if (context == nullptr) throw tls::Problem("TLS is not set up");
        channel_.secure(descriptor_, std::move(context), secure_host_);
    } catch (const tls::Problem& problem) {
        not_connected(Failure::connect, problem.what());
        return;
    }
    pool_.loop_.change(*this, interest());
}

void Upstream::begin_sending() {
    phase_ = Phase::sending;
    deadline_ = clock_now() + timeouts_.first_byte_s;
    write();
}

// To a server on this machine the connection is up by now, though `connect` returned EINPROGRESS:
// sending at once saves a round of the loop and two system calls of a new connection's first request.
void Upstream::send_early() {
    const ssize_t sent = channel_.send(descriptor_, head_to_send_, body_to_send_);
    if (sent < 0) connect_error_ = errno;  // the kernel reports it only once
    if (sent <= 0) return;
    note_sent(static_cast<std::size_t>(sent));
    phase_ = Phase::sending;
    deadline_ = clock_now() + timeouts_.first_byte_s;
    send_rest();
}

// --- the exchange ---------------------------------------------------------------------------------

u32 Upstream::interest() const {
    if (phase_ == Phase::connecting) return EPOLLOUT;
    u32 events = is_paused_ || channel_.is_clogged() ? 0u : EPOLLIN | EPOLLRDHUP;
    const bool has_more = !head_to_send_.empty() || !body_to_send_.empty();
    const bool is_sending = has_more && phase_ != Phase::securing;
    if (is_sending || (channel_.has_unsent() && !is_shut_)) events |= EPOLLOUT;
    return events;
}

void Upstream::write() {
    send_rest();
    pool_.loop_.change(*this, interest());
}

void Upstream::note_sent(std::size_t sent) {
    const std::size_t of_head = std::min(sent, head_to_send_.size());
    head_to_send_.remove_prefix(of_head);
    body_to_send_.remove_prefix(sent - of_head);
}

void Upstream::send_rest() {
    if (!channel_.flush(descriptor_)) is_shut_ = true;
    while (!head_to_send_.empty() || !body_to_send_.empty()) {
        const ssize_t sent = head_to_send_.empty()
                                 ? channel_.send(descriptor_, body_to_send_)
                                 : channel_.send(descriptor_, head_to_send_, body_to_send_);
        if (sent < 0) {
            // What the replica sent before it closed may still be read.
            head_to_send_ = body_to_send_ = {};
            is_shut_ = true;
            break;
        }
        if (sent == 0) break;
        note_sent(static_cast<std::size_t>(sent));
    }
    if (phase_ == Phase::sending && head_to_send_.empty() && body_to_send_.empty()) {
        phase_ = Phase::awaiting_head;
    }
}

void Upstream::pause() {
    is_paused_ = true;
    deadline_ = kNever;
    pool_.loop_.change(*this, interest());
}

void Upstream::resume(double now) {
    is_paused_ = false;
    received_at_ = now;
    deadline_ = now + (was_begun_ ? timeouts_.idle_s : timeouts_.first_byte_s);
    pool_.loop_.change(*this, interest());
}

void Upstream::abandon() {
    if (recipient_ != nullptr) {
        ++counts_.aborted;
        end(false);
    }
}

void Upstream::on_ready(u32 events) {
    if (phase_ == Phase::connecting) {
        int error = connect_error_;
        socklen_t size = sizeof error;
        if (!error) getsockopt(descriptor_, SOL_SOCKET, SO_ERROR, &error, &size);
        if (error || (events & EPOLLERR)) {
            not_connected(Failure::connect, std::strerror(error));
        } else {
            on_connected();
        }
        return;
    }
    if (phase_ != Phase::securing && events & EPOLLOUT) write();
    if (phase_ == Phase::securing && !channel_.flush(descriptor_)) {
        not_connected(Failure::connect, "closed in the TLS handshake");
        return;
    }
    if (is_open() && (events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR))) read();
}

void Upstream::on_no_memory() {
    if (recipient_ == nullptr) return;
    const Unfailing unfailing;
    Recipient& recipient = *recipient_;
    end(false);
    recipient.on_no_memory();
}

void Upstream::read() {
    if (recipient_ != nullptr && is_paused_) {
        // Only an error or a hang-up wakes a paused connection, and only once: `resume` reads it.
        pool_.loop_.change(*this, EPOLLONESHOT);
        return;
    }
    const Channel::Read came = channel_.receive(descriptor_, pool_.buffer_);
    const bool is_over = came.state != Channel::State::open;
    if (phase_ == Phase::securing) {
        if (is_over) {
            const bool has_why = came.state == Channel::State::refused;
            not_connected(Failure::connect, has_why ? channel_.problem() : "closed in the TLS handshake");
            return;
        }
        if (channel_.is_established()) begin_sending();
    }
    if (came.bytes.empty() && !is_over) {  // or only records of TLS itself
        pool_.loop_.change(*this, interest());
        return;
    }
    if (recipient_ == nullptr) {  // kept, and the server closed it or sent what was not asked for
        pool_.remove(*this);
        return;
    }
    received_at_ = clock_now();
    if (is_over) is_shut_ = true;
    if (!came.bytes.empty()) {
        has_received_ = true;
        take(came.bytes);
    }
    if (is_over && is_open()) on_end_of_input(came.state);
}

void Upstream::on_end_of_input(Channel::State state) {
    const bool is_clean = state == Channel::State::ended;
    if (is_clean && phase_ == Phase::in_body && head_.framing == http::Framing::until_close) {
        if (!was_begun_) {
            was_begun_ = true;
            recipient_->on_response(head_, {}, true);
        } else {
            recipient_->on_piece({}, true);
        }
        if (recipient_ != nullptr) end(false);
        return;
    }
    if (state == Channel::State::refused && !was_begun_ && !has_received_) {
        fail(was_kept_ ? Failure::kept_closed : Failure::closed, channel_.problem());
    } else if (was_begun_) {
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
            // The fields must outlast the buffer: they are passed on with the first byte of the body.
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
        deadline_ = received_at_ + timeouts_.idle_s;
        const bool was_begun = std::exchange(was_begun_, true);
        if (was_begun) {
            recipient_->on_piece(piece, is_last);
        } else {
            recipient_->on_response(head_, piece, is_last);
        }
        if (recipient_ == nullptr) return;
    }
    if (is_last) {
        const bool is_sent =
            head_to_send_.empty() && body_to_send_.empty() && !channel_.has_unsent();
        end(head_.keeps_alive && head_.framing != http::Framing::until_close && is_sent &&
            !has_more && !is_shut_);
    } else if (is_bad) {
        fail(Failure::died, "its body breaks the framing");
    }
    received_.clear();
}

bool Upstream::look_at(double now) {
    if (recipient_ == nullptr || now < deadline_) return false;
    guarded([&] {
        if (is_connecting()) {
            not_connected(Failure::connect_timeout, "no connection in time");
        } else {
            fail(was_begun_ ? Failure::idle_timeout : Failure::first_byte_timeout, "silent for too long");
        }
    });
    return true;
}

void Upstream::give_up(double now, double silent_s) {
    if (recipient_ == nullptr || is_paused_ || is_connecting()) return;
    if (!was_begun_) {
        fail(Failure::given_up, "its health checks fail");
    } else if (now - received_at_ >= silent_s) {
        fail(Failure::lost, "silent, and its health checks fail");
    }
}

void Upstream::fail(Failure failure, std::string_view why) {
    switch (failure) {
        case Failure::connect:
        case Failure::connect_timeout: ++counts_.connect_failures; break;
        case Failure::first_byte_timeout:
        case Failure::idle_timeout: ++counts_.timeouts; break;
        case Failure::malformed:
        case Failure::died: ++counts_.broken; break;
        case Failure::given_up:
        case Failure::lost: ++counts_.given_up; break;
        case Failure::kept_closed: ++counts_.kept_closed; [[fallthrough]];
        case Failure::closed: ++counts_.closed_early; break;
        default: break;
    }
    Recipient* recipient = recipient_;
    const bool was_begun = was_begun_;
    end(false);
    try {
        recipient->on_failure(failure, was_begun, why);
    } catch (const std::bad_alloc&) {
        recipient->on_no_memory();
    }
}

// The exchange is over on this side.
void Upstream::end(bool may_keep) {
    recipient_ = nullptr;
    head_to_send_ = body_to_send_ = {};
    --counts_.active;
    if (may_keep && !is_control_) {
        phase_ = Phase::idle;
        was_kept_ = true;
        pool_.keep(*this, received_at_);
    } else {
        pool_.remove(*this);
    }
}

// --- all of them ----------------------------------------------------------------------------------

Upstream* Pool::start(Recipient& recipient, const Forward& forward, sv head, sv body, double now) {
    Upstream* upstream = forward.may_reuse ? take_idle(forward.to->origin) : nullptr;
    if (upstream == nullptr) {
        std::string why = "there is no address";
        Failure failure = Failure::connect;
        upstream = connect(forward, now, failure, why);
        if (upstream == nullptr) {
            ++counts_of(forward.is_control).connect_failures;
            recipient.on_failure(failure, false, why);
            return nullptr;
        }
    }
    try {
        upstream->begin(recipient, head, body, forward.timeouts, now);
    } catch (const std::bad_alloc&) {
        upstream->end(false);
        throw;
    }
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

Upstream* Pool::connect(const Forward& forward, double now, Failure& failure, std::string& why) {
    if (!forward.is_control && !make_room()) {
        why = "all connections are in use";
        failure = Failure::at_limit;
        return nullptr;
    }
    PoolCounts& counts = counts_of(forward.is_control);
    auto made = std::make_unique<Upstream>(*this, counts, forward.to->origin, forward.is_control);
    made->addresses_ = forward.to->addresses;
    made->secure_host_ = forward.to->secure_host;
    made->connect_until_ = now + forward.timeouts.connect_s;
    Upstream* upstream = made.get();
    const auto place = all_.emplace(upstream, std::move(made)).first;
    bool is_connecting = false;
    try {
        is_connecting = upstream->connect(now, failure, why);
    } catch (const std::bad_alloc&) {
        all_.erase(place);
        throw;
    }
    if (!is_connecting) {
        all_.erase(place);
        return nullptr;
    }
    ++counts.opened;
    ++counts.connections;
    return upstream;
}

// Keeps to the bound on connections by closing one that is idle; false: none is.
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
    try {
        auto& kept = idle_[upstream.origin()];
        if (kept.size() >= options_.max_idle) {
            remove(upstream);
            return;
        }
        kept.push_back(&upstream);
    } catch (const std::bad_alloc&) {
        remove(upstream);
        return;
    }
    ++counts_.idle;
    upstream.idle_since_ = now;
    upstream.is_paused_ = false;
    loop_.change(upstream, EPOLLIN | EPOLLRDHUP);
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
    if (upstream.is_open() && upstream.channel_.is_secure()) upstream.channel_.end(upstream.descriptor_);
    loop_.close(upstream);
    const auto found = all_.find(&upstream);
    if (found == all_.end()) return;
    buried_.add(std::move(found->second));
    all_.erase(found);
    --upstream.counts_.connections;
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
        if (upstream->is_open()) upstream->guarded([&] { upstream->give_up(now, silent_s); });
    }
}

void Pool::close() {
    std::vector<Upstream*> all;
    for (auto& [upstream, owner] : all_) all.push_back(upstream);
    for (Upstream* upstream : all) remove(*upstream);
}

}  // namespace kvroute::plane
