#include "plane/channel.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "plane/loop.hpp"

namespace kvroute::plane {
namespace {

using sv = std::string_view;

constexpr std::size_t kCipherAtOnce = 64 * 1024;
constexpr std::size_t kKept = 4 * 1024;  // of the memory for what is to be sent

}  // namespace

void Channel::secure(int descriptor, std::shared_ptr<const tls::Context> context,
                     const std::string& server) {
    session_ = std::make_unique<tls::Session>(std::move(context), server);
    session_->begin(wire_);
    flush(descriptor);  // where that fails, so does the next read
}

Channel::Read Channel::receive(int descriptor, std::string& buffer) {
    thread_local std::string cipher;
    if (session_ != nullptr && cipher.empty()) cipher.resize(kCipherAtOnce);
    std::string& into = session_ == nullptr ? buffer : cipher;
    // What is decrypted fits into the buffer, with a record that was not whole before.
    const std::size_t most =
        session_ == nullptr ? buffer.size()
                            : std::min(cipher.size(), buffer.size() - tls::Session::kRecord);
    const ssize_t count = ::recv(descriptor, into.data(), most, 0);
    if (count < 0) {
        const bool is_only_early = errno == EAGAIN || errno == EINTR;
        return {{}, is_only_early ? State::open : State::broken};
    }
    if (count == 0) return {{}, session_ == nullptr ? State::ended : State::cut};
    const sv came(into.data(), static_cast<std::size_t>(count));
    return session_ == nullptr ? Read{came, State::open} : decrypt(descriptor, came, buffer);
}

Channel::Read Channel::decrypt(int descriptor, sv came, std::string& buffer) {
    const tls::Session::Read found = session_->receive(came, buffer.data(), buffer.size(), wire_);
    Read read{sv(buffer.data(), found.bytes), State::open};
    if (found.state == tls::Session::State::ended) read.state = State::ended;
    // An alert is sent with the rest.
    const bool is_sent = flush(descriptor);
    if (!is_sent) read.state = State::broken;
    if (found.state == tls::Session::State::broken) read.state = State::refused;
    return read;
}

ssize_t Channel::send(int descriptor, sv first, sv second) {
    if (session_ == nullptr) return send_some(descriptor, first, second);
    if (!flush(descriptor)) return -1;
    if (has_unsent()) return 0;
    first = first.substr(0, kMostUnsent);
    second = second.substr(0, kMostUnsent - first.size());
    const std::size_t size = first.size() + second.size();
    bool is_taken;
    if (size <= tls::Session::kRecord && !first.empty() && !second.empty()) {
        std::string joined;  // one record in place of two
        joined.reserve(size);
        joined.append(first).append(second);
        is_taken = session_->send(joined, wire_);
    } else {
        is_taken = session_->send(first, wire_) && session_->send(second, wire_);
    }
    return is_taken && flush(descriptor) ? static_cast<ssize_t>(size) : -1;
}

bool Channel::flush(int descriptor) {
    if (!has_unsent()) return true;
    const ssize_t sent = send_some(descriptor, sv(wire_).substr(sent_));
    if (sent < 0) return false;
    sent_ += static_cast<std::size_t>(sent);
    if (!has_unsent()) {
        wire_.clear();
        sent_ = 0;
        if (wire_.capacity() > kKept) wire_ = std::string();
    }
    return true;
}

void Channel::end(int descriptor) {
    if (session_ == nullptr) return;
    session_->end(wire_);
    flush(descriptor);
}

}  // namespace kvroute::plane
