// Sockets that are watched, and the system calls behind them.
#pragma once

#include <sys/epoll.h>

#include <array>
#include <chrono>
#include <memory>
#include <string_view>
#include <utility>

#include "plane/types.hpp"

namespace kvroute::plane {

// Seconds on a monotonic clock.
inline double clock_now() {
    using namespace std::chrono;
    return duration<double>(steady_clock::now().time_since_epoch()).count();
}

// Something with a descriptor that is watched.
class Watched {
public:
    virtual ~Watched() = default;
    // `events`: of epoll. What is closed by this is freed after the round.
    virtual void on_ready(u32 events) = 0;
    // There was no memory for what had to be done: ends it, with as little as possible.
    virtual void on_no_memory() {}

    int descriptor() const { return descriptor_; }
    bool is_open() const { return descriptor_ >= 0; }

protected:
    friend class Loop;
    int descriptor_ = -1;
    u32 interest_ = 0;
};

// Holds what was closed in this round, and is freed after it. Takes no memory, as there may be none:
// each holds the one before it (`buried_before`).
template <typename Dead>
class Burial {
public:
    void add(std::unique_ptr<Dead> dead) {
        dead->buried_before = std::move(last_);
        last_ = std::move(dead);
    }
    void clear() {
        while (last_) last_ = std::move(last_->buried_before);
    }

private:
    std::unique_ptr<Dead> last_;
};

class Loop {
public:
    Loop();
    ~Loop();
    Loop(const Loop&) = delete;
    Loop& operator=(const Loop&) = delete;

    void add(Watched& watched, int descriptor, u32 events);
    void change(Watched& watched, u32 events);
    // Watches it no longer, until it is added again.
    void remove(Watched& watched);
    // Closes the descriptor.
    void close(Watched& watched);
    // Waits at most so long for sockets to be ready.
    void wait(int most_ms);
    // Calls `on_ready` of each that is.
    void serve();

private:
    static constexpr int kAtOnce = 512;

    int epoll_ = -1;
    std::array<epoll_event, kAtOnce> events_;
    int ready_ = 0;
};

// True where the system had not enough for a socket, by `errno`: another one would fail as well.
bool is_shortage(int error);

// True where no local port was left for a connection, by `errno`; it has the same number where this
// machine has no address of that kind.
bool lacks_port(int error, const Address& to);

// Returns a socket to connect with. Negative, with `errno`: EMFILE also where it would not be below
// `below`.
int new_socket(int family, int below);

// Sends what fits. Returns the number of bytes, or -1 where the connection is broken.
ssize_t send_some(int descriptor, std::string_view bytes);
// Sends what fits of two pieces, in one call.
ssize_t send_some(int descriptor, std::string_view first, std::string_view second);

}  // namespace kvroute::plane
