// One encrypted connection, without I/O: received bytes go in, bytes to send come out.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "tls/context.hpp"

namespace kvroute::tls {

class Session {
public:
    // `server`: the name or address that its certificate must have; empty for a session with a client.
    // Throws `Problem`.
    Session(std::shared_ptr<const Context> context, const std::string& server);
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
    ~Session();

    enum class State : unsigned char { open, ended, broken };
    struct Read {
        std::size_t bytes = 0;
        State state = State::open;  // after these
    };

    // Takes all received bytes and writes their plain text into `out`; it fits where there is room
    // for `came` and one record. Bytes for the other side are appended to `to_send`.
    Read receive(std::string_view came, char* out, std::size_t size, std::string& to_send);
    // Encrypts `bytes`; not before the handshake is over. False: the session is broken.
    bool send(std::string_view bytes, std::string& to_send);
    // Begins the handshake, where this side does.
    void begin(std::string& to_send);
    // Sends close_notify.
    void end(std::string& to_send);

    bool is_established() const { return is_established_; }
    // True where the first bytes of the other side were no TLS at all; known once it is broken.
    bool is_foreign() const { return is_foreign_; }
    // Why it is broken.
    const std::string& problem() const { return problem_; }

    static constexpr std::size_t kRecord = 16 * 1024 + 512;

private:
    friend BIO_METHOD* make_pipe(Library&);
    static int pull(BIO*, char* into, int size);
    static int push(BIO*, const char* bytes, int size);
    static long control(BIO*, int what, long, void*);

    bool shake_hands();
    State broken();

    std::shared_ptr<const Context> context_;
    SSL* made_;
    std::string_view came_;           // during a call
    std::string* to_send_ = nullptr;  // as well
    bool is_established_ = false, has_spoken_ = false, is_foreign_ = false, is_broken_ = false;
    std::string problem_;
};

// Returns the methods by which OpenSSL reads and writes in place of a socket.
BIO_METHOD* make_pipe(Library& openssl);

// Returns the first error of the last call, in words, and clears all.
std::string last_error();

}  // namespace kvroute::tls
