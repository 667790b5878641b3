// The bytes of a socket, as they are or by TLS.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "plane/types.hpp"
#include "tls/session.hpp"

namespace kvroute::plane {

class Channel {
public:
    enum class State : u8 {
        open,
        ended,   // the peer has ended its side
        cut,     // closed without TLS's close_notify: something may be missing
        refused,  // what came is no valid TLS: `problem`
        broken,
    };
    struct Read {
        std::string_view bytes;  // in the buffer
        State state = State::open;  // after them
    };

    // Uses TLS from now on: as the server, or as a client of `server`. Throws what `tls::Session` does.
    void secure(int descriptor, std::shared_ptr<const tls::Context> context,
                const std::string& server = {});
    // Reads once from the socket, and decrypts all of it.
    Read receive(int descriptor, std::string& buffer);
    // Returns the number of bytes taken, or -1 where the connection is broken. By TLS, what was taken
    // may be unsent: `flush`.
    ssize_t send(int descriptor, std::string_view first, std::string_view second = {});
    // False: the connection is broken.
    bool flush(int descriptor);
    std::size_t unsent() const { return wire_.size() - sent_; }
    bool has_unsent() const { return unsent() > 0; }
    // Sends TLS's close_notify, as far as it can be sent at once.
    void end(int descriptor);

    bool is_secure() const { return session_ != nullptr; }
    // The connection may be used.
    bool is_established() const { return session_ == nullptr || session_->is_established(); }
    bool is_foreign() const { return session_ != nullptr && session_->is_foreign(); }
    const std::string& problem() const { return session_->problem(); }
    // So much is unsent that no more is read from the peer, as that may add to it.
    bool is_clogged() const { return unsent() > kMostUnsent; }

private:
    static constexpr std::size_t kMostUnsent = 64 * 1024;

    Read decrypt(int descriptor, std::string_view came, std::string& buffer);

    std::unique_ptr<tls::Session> session_;
    std::string wire_;      // encrypted, to be sent
    std::size_t sent_ = 0;  // of it
};

}  // namespace kvroute::plane
