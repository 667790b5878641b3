#include "tls/session.hpp"

#include <algorithm>
#include <cstring>
#include <new>

namespace kvroute::tls {
namespace {

// Values from OpenSSL's headers.
constexpr int kRetryRead = 1 | 8, kRetries = 15;
constexpr int kFlush = 11, kSourceSink = 0x0400;
constexpr int kWantsRead = 2, kWantsWrite = 3, kEndOfData = 6;
constexpr int kSetServerName = 55;
constexpr unsigned kNoPartialWildcards = 4;
constexpr long kVerified = 0;
constexpr int kMostAtOnce = 16 * 1024;

bool is_address(const std::string& host) {
    return host.find(':') != std::string::npos ||
           host.find_first_not_of("0123456789.") == std::string::npos;
}

// Every record of TLS 1.0 and later begins with its type and the version's 3.
bool looks_like_tls(std::string_view came) {
    return static_cast<unsigned char>(came[0]) >= 20 && static_cast<unsigned char>(came[0]) <= 23 &&
           (came.size() < 2 || came[1] == 3);
}

}  // namespace

std::string last_error() {
    const Library& openssl = library();
    const unsigned long code = openssl.ERR_get_error();
    openssl.ERR_clear_error();
    if (code == 0) return "unknown";
    // The system's own errors are numbers with one bit set.
    if (code & 0x80000000UL) return std::strerror(static_cast<int>(code & 0x7FFFFFFF));
    const char* const reason = openssl.ERR_reason_error_string(code);
    return reason ? reason : "unknown";
}

Session::Session(std::shared_ptr<const Context> context, const std::string& server)
    : context_(std::move(context)), made_(library().SSL_new(context_->get())) {
    const Library& openssl = library();
    BIO* const pipe = made_ ? openssl.BIO_new(openssl.pipe) : nullptr;
    if (pipe == nullptr) {
        openssl.SSL_free(made_);
        throw std::bad_alloc();
    }
    openssl.BIO_set_data(pipe, this);
    openssl.BIO_set_init(pipe, 1);
    openssl.SSL_set_bio(made_, pipe, pipe);
    if (context_->is_of_server()) {
        openssl.SSL_set_accept_state(made_);
        return;
    }
    std::string name = server;
    if (!name.empty() && name.back() == '.') name.pop_back();
    openssl.SSL_set_connect_state(made_);
    openssl.SSL_set_hostflags(made_, kNoPartialWildcards);
    const bool is_named =
        !name.empty() && openssl.SSL_set1_host(made_, name.c_str()) == 1 &&
        (is_address(name) || openssl.SSL_ctrl(made_, kSetServerName, 0, name.data()) == 1);
    if (!is_named) {
        openssl.SSL_free(made_);
        throw Problem("no certificate can have the name " + server);
    }
}

Session::~Session() {
    library().SSL_free(made_);
    library().ERR_clear_error();
}

void Session::begin(std::string& to_send) {
    if (context_->is_of_server()) return;
    to_send_ = &to_send;
    shake_hands();
    to_send_ = nullptr;
}

// Goes on with the handshake; true once it is over.
bool Session::shake_hands() {
    const Library& openssl = library();
    openssl.ERR_clear_error();
    const int done = openssl.SSL_do_handshake(made_);
    if (done == 1) {
        is_established_ = true;
        return true;
    }
    const int error = openssl.SSL_get_error(made_, done);
    if (error != kWantsRead && error != kWantsWrite) broken();
    return false;
}

Session::Read Session::receive(std::string_view came, char* out, std::size_t size,
                               std::string& to_send) {
    if (is_broken_) return {0, State::broken};
    if (!has_spoken_ && !came.empty()) {
        has_spoken_ = true;
        is_foreign_ = !looks_like_tls(came);
    }
    came_ = came;
    to_send_ = &to_send;
    Read found;
    if (is_established_ || shake_hands()) {
        const Library& openssl = library();
        for (;;) {
            if (found.bytes == size) {  // not one byte may be left: it would never be read
                problem_ = "more than one record was left";
                found.state = State::broken;
                is_broken_ = true;
                break;
            }
            openssl.ERR_clear_error();
            const auto room = static_cast<int>(std::min<std::size_t>(size - found.bytes, 1 << 20));
            const int count = openssl.SSL_read(made_, out + found.bytes, room);
            if (count > 0) {
                found.bytes += static_cast<std::size_t>(count);
                continue;
            }
            const int error = openssl.SSL_get_error(made_, count);
            if (error == kEndOfData) {
                found.state = State::ended;
            } else if (error != kWantsRead && error != kWantsWrite) {
                found.state = broken();
            }
            break;
        }
    } else if (is_broken_) {
        found.state = State::broken;
    }
    came_ = {};
    to_send_ = nullptr;
    return found;
}

bool Session::send(std::string_view bytes, std::string& to_send) {
    if (is_broken_) return false;
    const Library& openssl = library();
    to_send_ = &to_send;
    while (!bytes.empty()) {
        openssl.ERR_clear_error();
        const auto size = static_cast<int>(std::min<std::size_t>(bytes.size(), kMostAtOnce));
        const int count = openssl.SSL_write(made_, bytes.data(), size);
        if (count <= 0) {
            broken();
            break;
        }
        bytes.remove_prefix(static_cast<std::size_t>(count));
    }
    to_send_ = nullptr;
    return !is_broken_;
}

void Session::end(std::string& to_send) {
    if (is_broken_ || !is_established_) return;
    to_send_ = &to_send;
    library().ERR_clear_error();
    library().SSL_shutdown(made_);
    to_send_ = nullptr;
}

Session::State Session::broken() {
    is_broken_ = true;
    const Library& openssl = library();
    const long verified = openssl.SSL_get_verify_result(made_);
    problem_ = last_error();
    if (!is_established_ && verified != kVerified) {
        problem_ += std::string(": ") + openssl.X509_verify_cert_error_string(verified);
    }
    return State::broken;
}

// --- in place of a socket -------------------------------------------------------------------------

int Session::pull(BIO* pipe, char* into, int size) {
    const Library& openssl = library();
    auto& self = *static_cast<Session*>(openssl.BIO_get_data(pipe));
    openssl.BIO_clear_flags(pipe, kRetries);
    if (self.came_.empty()) {
        openssl.BIO_set_flags(pipe, kRetryRead);
        return -1;
    }
    const auto count = std::min<std::size_t>(static_cast<std::size_t>(size), self.came_.size());
    std::memcpy(into, self.came_.data(), count);
    self.came_.remove_prefix(count);
    return static_cast<int>(count);
}

int Session::push(BIO* pipe, const char* bytes, int size) {
    const Library& openssl = library();
    auto& self = *static_cast<Session*>(openssl.BIO_get_data(pipe));
    openssl.BIO_clear_flags(pipe, kRetries);
    if (self.to_send_ == nullptr) return -1;
    try {
        self.to_send_->append(bytes, static_cast<std::size_t>(size));
    } catch (const std::bad_alloc&) {  // no C++ exception may pass through C
        return -1;
    }
    return size;
}

long Session::control(BIO*, int what, long, void*) { return what == kFlush ? 1 : 0; }

BIO_METHOD* make_pipe(Library& openssl) {
    BIO_METHOD* const made = openssl.BIO_meth_new(127 | kSourceSink, "kvroute");
    if (made == nullptr) throw std::bad_alloc();
    openssl.BIO_meth_set_read(made, &Session::pull);
    openssl.BIO_meth_set_write(made, &Session::push);
    openssl.BIO_meth_set_ctrl(made, &Session::control);
    return made;
}

}  // namespace kvroute::tls
