// A client's connection: its beginning and end, its time, and what is written to it.
#include "plane/client.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <array>

#include "http/write.hpp"
#include "index/memory.hpp"
#include "plane/errors.hpp"
#include "plane/thread.hpp"

namespace kvroute::plane {
namespace {

using sv = std::string_view;

constexpr std::size_t kSlow = 64 * 1024;        // of a response that waits for its client
constexpr std::size_t kReadsAgain = 16 * 1024;
constexpr std::size_t kMostWaiting = 64 * 1024;  // behind the request being served
constexpr double kSlack_s = 5.0;
constexpr double kAwaited_s = 1.0;
constexpr double kReserved_s = 2.0;
// Times after a client's FIN: the reset that one probe causes must have come by the next.
constexpr std::array<double, 3> kProbeAfter_s = {0.0, 0.05, 0.25};

}  // namespace

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
    if (!is_open() || !(events & (EPOLLIN | EPOLLRDHUP))) return;
    if (interest_ & EPOLLIN) {
        read();
    } else if (events & interest_ & EPOLLRDHUP) {
        on_end_ahead();
    }
}

void Client::on_no_memory() {
    if (stage_ == Stage::refused) return;
    const Unfailing unfailing;
    stop_sending();  // it reads `body_`
    body_ = std::string();
    const bool was_deciding = stage_ == Stage::deciding;
    const bool may_respond =
        stage_ == Stage::idle ||
        (!has_begun_ && (was_deciding || stage_ == Stage::trying || stage_ == Stage::not_now));
    thread_.post(0, Refused{"overloaded"});
    if (!may_respond) {
        cut(End::abandoned);
        return;
    }
    // Where Python has the request, it gets an event that ends it.
    if (was_forwarded_) {
        report(End::abandoned);
    } else if (was_deciding) {  // or it was prepared
        thread_.post(exchange_, Left{});
    }
    if (stage_ != Stage::idle && is_body_whole_ && keeps_alive_ && !is_head_request_) {
        stage_ = Stage::answered;
        has_begun_ = true;
        send(kOutOfMemoryAnswer);
        end_exchange();
        return;
    }
    exchange_ = 0;
    in_ = std::string();
    turn_away(kOutOfMemoryResponse);
}

void Client::close() {
    if (!is_open()) return;
    channel_.end(descriptor_);
    drop();
}

void Client::stop() {
    if (is_unsent() || (is_serving() && stage_ != Stage::answered)) {
        cut(End::abandoned);
    } else {
        close();  // the kernel delivers what it has
    }
}

void Client::stop_sending() {
    if (upstream_ != nullptr) std::exchange(upstream_, nullptr)->abandon();
    stop_waiting();
}

void Client::drop() {
    show(Shown::not_yet);
    if (is_unread_) thread_.count_unread(false);
    stop_sending();
    thread_.loop().close(*this);
    thread_.closed(place_);
}

// The client is gone: ends what is under way.
void Client::leave() {
    if (!is_open()) return;
    if (was_forwarded_) {
        report(End::client_left);
    } else if (stage_ == Stage::deciding) {
        if (is_awaited_) post_opened();  // Python counts and logs it, as any other
        if (is_opened_) thread_.post(exchange_, Left{});
    }
    close();
}

void Client::cut(End end) {
    if (!is_open()) return;
    if (was_forwarded_) {
        report(end);
    } else if (stage_ == Stage::deciding && is_opened_) {
        thread_.post(exchange_, Left{});
    }
    // With a reset: a body that ends with its connection would look whole.
    const linger at_once{1, 0};
    setsockopt(descriptor_, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    drop();
}

void Client::count_unread() {
    const bool is_unread = stage_ == Stage::answered && is_unsent();
    if (is_unread == is_unread_) return;
    is_unread_ = is_unread;
    thread_.count_unread(is_unread);
}

void Client::update_interest() {
    if (!is_open()) return;
    count_unread();
    u32 events = is_unsent() ? EPOLLOUT : 0u;
    const bool takes = stage_ == Stage::idle || stage_ == Stage::draining || stage_ == Stage::refused;
    const bool waits = (!takes && in_.size() >= kMostWaiting) || channel_.is_clogged();
    const bool has_piece =
        stage_ == Stage::deciding && !is_body_whole_ && !is_piece_wanted_ && !is_awaited_;
    if (!has_left_half_ && !waits && !has_piece) events |= EPOLLIN | EPOLLRDHUP;
    if (waits && !has_left_half_ && !has_end_ahead_) events |= EPOLLRDHUP;
    thread_.loop().change(*this, events);
}

void Client::look_after(double now) {
    if (!is_open()) return;
    const Options& options = thread_.options();
    const double request_s = is_of_reserve_ ? std::min(options.request_s, kReserved_s) : options.request_s;
    const double stall_s =
        is_of_reserve_ ? std::min(options.client_stall_s, kReserved_s) : options.client_stall_s;
    if (stage_ == Stage::refused) {
        const double moved_at = is_unsent() ? std::max(received_at_, stalled_since_) : received_at_;
        if (now > std::min(moved_at + kSlack_s, refused_at_ + request_s)) close();
        return;
    }
    if ((has_left_half_ || has_end_ahead_) && probes_ < kProbeAfter_s.size() && now >= probe_at_) probe();
    if (!is_open()) return;
    show_running(now);
    if (is_unsent() && now - stalled_since_ > stall_s) {
        if (!was_forwarded_ || forward_.is_control) thread_.post(0, Refused{"response_not_read"});
        cut(End::client_stalled);
        return;
    }
    if (late_at_ > 0 && now >= late_at_ && stage_ == Stage::trying) on_late();
    if (is_awaited_ && now - receiving_since_ > kAwaited_s) {
        post_opened();  // its body is slow: Python ends it in time
        update_interest();
    }
    // Python ends a body that comes too slowly; where it has not done so by then, it is ended here.
    const bool is_slow = stage_ == Stage::deciding && is_opened_ && !is_body_whole_ &&
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
// The client sends no more. One that only stops sending looks like one that has closed its socket: both
// send FIN. But the kernel of the latter resets the connection when something comes, and the next write
// meets that reset. While the response is silent, probes are written in its place:
//
//     not begun         an interim response, which every client must skip (RFC 9110 15.2)
//     between chunks    a leading zero of the next chunk's length (RFC 9112 7.1)
//     else              nothing can be sent: who has left is noticed by the next byte of the response
void Client::on_end_of_input() {
    leave_if_unfinished();
    if (!is_open()) return;
    has_left_half_ = true;
    begin_probes();
}

// The same, behind requests that are not read yet.
void Client::on_end_ahead() {
    has_end_ahead_ = true;
    begin_probes();
}

void Client::begin_probes() {
    probes_ = 0;
    probe_at_ = thread_.now();
    probe();
    update_interest();
}

// No more input comes: a request that is not whole has lost its client. Whole requests behind the one
// being served get their turn, and an error response is sent to its end.
void Client::leave_if_unfinished() {
    if (!is_open() || (stage_ == Stage::refused && is_unsent())) return;
    if (!is_serving() || !is_body_whole_) leave();
}

void Client::probe() {
    ++probes_;
    if (probes_ < kProbeAfter_s.size()) probe_at_ = thread_.now() + kProbeAfter_s[probes_];
    if (stage_ == Stage::answered || !is_serving()) return;
    if (!has_begun_) {
        if (head_.minor == 1) send(http::kContinue);
    } else if (framing_ == http::Framing::chunked && !is_head_request_ && out_.size() == sent_) {
        send("0");
    }
}

void Client::refuse(const http::Problem& problem) {
    turn_away(whole_error_response(problem.status, problem.code, problem.text()));
    exchange_ = 0;
    thread_.post(0, Refused{problem.code});
}

// Responds with an error, and takes nothing more.
void Client::turn_away(sv response) {
    stage_ = Stage::refused;
    send(response);
    discard_input();
}

// The response is the last one. What else comes is discarded until it ends, within the time of a
// request: if the connection were closed at once, the client would see a reset before it read the
// response.
void Client::discard_input() {
    if (!is_open()) return;
    stage_ = Stage::refused;
    refused_at_ = received_at_ = thread_.now();
    in_.clear();
    end_output();
    update_interest();
}

// Tells the client that nothing follows, once nothing is unsent.
void Client::end_output() {
    if (is_unsent()) return;  // `flush` comes back
    if (!std::exchange(has_ended_output_, true)) channel_.end(descriptor_);
    if (is_unsent()) return;
    ::shutdown(descriptor_, SHUT_WR);
    if (has_left_half_) close();  // it sends no more either
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
    if (stage_ == Stage::refused) end_output();
    update_interest();
}

void Client::hold_if_slow() {
    if (!is_open() || stage_ != Stage::relaying || upstream_ == nullptr) return;
    if (!is_held_ && out_.size() - sent_ > kSlow) {
        is_held_ = true;
        upstream_->pause();
    }
}

}  // namespace kvroute::plane
