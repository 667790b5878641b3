#include "tls/context.hpp"

#include <cstring>

#include "tls/session.hpp"

namespace kvroute::tls {
namespace {

// Values from OpenSSL's headers.
constexpr int kSetMode = 33, kSetSessionCacheMode = 44, kSetLeastVersion = 123;
constexpr long kTls12 = 0x0303;
constexpr long kPartialWrite = 1, kMovingWriteBuffer = 2, kReleaseBuffers = 16;
constexpr std::uint64_t kNoCompression = 1ULL << 17, kServerPreference = 1ULL << 22,
                        kNoRenegotiation = 1ULL << 30;
constexpr int kVerifyNobody = 0, kVerify = 1, kFailWithoutCertificate = 2;
constexpr int kPem = 1;
constexpr int kAlpnChosen = 0, kAlpnIgnored = 3;
constexpr unsigned char kHttp11[] = {8, 'h', 't', 't', 'p', '/', '1', '.', '1'};

// Without it, OpenSSL would ask at the terminal.
int no_password(char*, int, int, void*) { return -1; }

// Chooses http/1.1 where the client offers it. One that offers only others is served as one with none.
int choose(SSL*, const unsigned char** out, unsigned char* out_size, const unsigned char* in,
           unsigned in_size, void*) {
    for (unsigned at = 0; at < in_size; at += 1u + in[at]) {
        if (in_size - at < 1u + in[at]) break;
        if (in[at] == kHttp11[0] && std::memcmp(in + at + 1, kHttp11 + 1, kHttp11[0]) == 0) {
            *out = in + at + 1;
            *out_size = in[at];
            return kAlpnChosen;
        }
    }
    return kAlpnIgnored;
}

}  // namespace

Context::Context(bool is_of_server) : is_of_server_(is_of_server) {
    const Library& openssl = library();
    openssl.ERR_clear_error();
    made_ = openssl.SSL_CTX_new(is_of_server ? openssl.TLS_server_method()
                                             : openssl.TLS_client_method());
    if (made_ == nullptr) throw Problem("TLS cannot be set up: " + last_error());
    openssl.SSL_CTX_ctrl(made_, kSetLeastVersion, kTls12, nullptr);
    openssl.SSL_CTX_ctrl(made_, kSetMode, kPartialWrite | kMovingWriteBuffer | kReleaseBuffers,
                         nullptr);
    // Sessions are resumed by tickets, which the clients keep.
    openssl.SSL_CTX_ctrl(made_, kSetSessionCacheMode, 0, nullptr);
    openssl.SSL_CTX_set_options(made_, kNoCompression | kServerPreference | kNoRenegotiation);
    openssl.SSL_CTX_set_default_passwd_cb(made_, &no_password);
}

Context::~Context() { library().SSL_CTX_free(made_); }

std::shared_ptr<const Context> Context::for_clients(const Files& files) {
    std::shared_ptr<Context> made(new Context(true));
    const Library& openssl = library();
    if (!files.authorities.empty()) {
        made->trust(files.authorities);
        openssl.SSL_CTX_set_verify(made->made_, kVerify | kFailWithoutCertificate, nullptr);
    } else {
        openssl.SSL_CTX_set_verify(made->made_, kVerifyNobody, nullptr);
    }
    static constexpr unsigned char kName[] = "kvroute";
    openssl.SSL_CTX_set_session_id_context(made->made_, kName, sizeof kName - 1);
    openssl.SSL_CTX_set_alpn_select_cb(made->made_, &choose, nullptr);
    made->show(files);
    return made;
}

std::shared_ptr<const Context> Context::for_servers(const Files& files) {
    std::shared_ptr<Context> made(new Context(false));
    made->trust(files.authorities);
    library().SSL_CTX_set_verify(made->made_, kVerify, nullptr);
    library().SSL_CTX_set_alpn_protos(made->made_, kHttp11, sizeof kHttp11);
    if (!files.certificate.empty()) made->show(files);
    return made;
}

// Empty: the system's.
void Context::trust(const std::string& authorities) {
    const Library& openssl = library();
    const int done = authorities.empty()
                         ? openssl.SSL_CTX_set_default_verify_paths(made_)
                         : openssl.SSL_CTX_load_verify_locations(made_, authorities.c_str(), nullptr);
    if (done != 1) throw Problem(authorities + ": " + last_error());
    openssl.ERR_clear_error();
}

void Context::show(const Files& files) {
    const Library& openssl = library();
    if (openssl.SSL_CTX_use_certificate_chain_file(made_, files.certificate.c_str()) != 1) {
        throw Problem(files.certificate + ": " + last_error());
    }
    if (openssl.SSL_CTX_use_PrivateKey_file(made_, files.key.c_str(), kPem) != 1 ||
        openssl.SSL_CTX_check_private_key(made_) != 1) {
        throw Problem(files.key + ": " + last_error());
    }
}

}  // namespace kvroute::tls
