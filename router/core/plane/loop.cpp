#include "plane/loop.hpp"

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>

namespace kvroute::plane {
namespace {


ssize_t sent_or_nothing(ssize_t sent) {
    if (sent >= 0) return sent;
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR || errno == ENOTCONN ? 0 : -1;
}

}  // namespace

Loop::Loop() : epoll_(epoll_create1(EPOLL_CLOEXEC)) {
    if (epoll_ < 0) throw std::runtime_error("plane: epoll cannot be had");
}

Loop::~Loop() { ::close(epoll_); }

void Loop::add(Watched& watched, int descriptor, u32 events) {
    watched.descriptor_ = descriptor;
    watched.interest_ = events;
    epoll_event event{};
    event.events = events;
    event.data.ptr = &watched;
    epoll_ctl(epoll_, EPOLL_CTL_ADD, descriptor, &event);
}

void Loop::change(Watched& watched, u32 events) {
    if (watched.interest_ == events || !watched.is_open()) return;
    watched.interest_ = events;
    epoll_event event{};
    event.events = events;
    event.data.ptr = &watched;
    epoll_ctl(epoll_, EPOLL_CTL_MOD, watched.descriptor_, &event);
}

void Loop::remove(Watched& watched) {
    watched.interest_ = 0;
    epoll_ctl(epoll_, EPOLL_CTL_DEL, watched.descriptor_, nullptr);
}

void Loop::close(Watched& watched) {
    if (!watched.is_open()) return;
    // Closing it would take it out of the set as well, but not while a child process that is about to
    // begin has a copy: its events would go to freed memory.
    epoll_ctl(epoll_, EPOLL_CTL_DEL, watched.descriptor_, nullptr);
    ::close(watched.descriptor_);
    watched.descriptor_ = -1;
    watched.interest_ = 0;
}

void Loop::wait(int most_ms) { ready_ = epoll_wait(epoll_, events_.data(), kAtOnce, most_ms); }

void Loop::serve() {
    for (int i = 0; i < ready_; ++i) {
        const epoll_event& event = events_[static_cast<std::size_t>(i)];
        auto& watched = *static_cast<Watched*>(event.data.ptr);
        if (!watched.is_open()) continue;
        try {
            watched.on_ready(event.events);
        } catch (const std::bad_alloc&) {
            try {
                watched.on_no_memory();
            } catch (const std::bad_alloc&) {  // not even for that: one of its time limits ends it
            }
        }
    }
}

bool is_shortage(int error) {
    return error == EMFILE || error == ENFILE || error == ENOMEM || error == ENOBUFS;
}

bool lacks_port(int error, const Address& to) {
    if (error != EADDRNOTAVAIL) return false;
    // Datagrams have ports of their own: they have the same error only for want of an address.
    const int asked = ::socket(to.storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (asked < 0) return false;
    const auto* address = reinterpret_cast<const sockaddr*>(&to.storage);
    const bool has_address = ::connect(asked, address, to.length) == 0 || errno != EADDRNOTAVAIL;
    ::close(asked);
    return has_address;
}

int new_socket(int family, int below) {
    const int descriptor = ::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (descriptor >= below) {
        ::close(descriptor);
        errno = EMFILE;
        return -1;
    }
    if (descriptor >= 0 && family != AF_UNIX) {
        const int one = 1;
        setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    }
    return descriptor;
}

ssize_t send_some(int descriptor, std::string_view bytes) {
    return sent_or_nothing(::send(descriptor, bytes.data(), bytes.size(), MSG_NOSIGNAL));
}

ssize_t send_some(int descriptor, std::string_view first, std::string_view second) {
    if (second.empty()) return send_some(descriptor, first);
    iovec parts[2] = {{const_cast<char*>(first.data()), first.size()},
                      {const_cast<char*>(second.data()), second.size()}};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    return sent_or_nothing(::sendmsg(descriptor, &message, MSG_NOSIGNAL));
}

std::optional<Address> Address::parse(const std::string& host, int port) {
    Address found;
    if (!host.empty() && host.front() == '/') {
        auto& local = reinterpret_cast<sockaddr_un&>(found.storage);
        if (host.size() >= sizeof local.sun_path) return std::nullopt;
        local.sun_family = AF_UNIX;
        std::memcpy(local.sun_path, host.c_str(), host.size() + 1);
        found.length = sizeof local;
        return found;
    }
    auto& four = reinterpret_cast<sockaddr_in&>(found.storage);
    if (inet_pton(AF_INET, host.c_str(), &four.sin_addr) == 1) {
        four.sin_family = AF_INET;
        four.sin_port = htons(static_cast<std::uint16_t>(port));
        found.length = sizeof four;
        return found;
    }
    auto& six = reinterpret_cast<sockaddr_in6&>(found.storage);
    if (inet_pton(AF_INET6, host.c_str(), &six.sin6_addr) == 1) {
        six.sin6_family = AF_INET6;
        six.sin6_port = htons(static_cast<std::uint16_t>(port));
        found.length = sizeof six;
        return found;
    }
    return std::nullopt;
}

}  // namespace kvroute::plane
