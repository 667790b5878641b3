#include "tls/library.hpp"

#include <dlfcn.h>

#include <mutex>
#include <optional>

#include "tls/context.hpp"
#include "tls/session.hpp"

namespace kvroute::tls {
namespace {

constexpr unsigned long kOldest = 0x30000000UL;

std::optional<Library> loaded;

template <typename Function>
bool find(void* handle, const char* name, Function& into) {
    into = reinterpret_cast<Function>(dlsym(handle, name));
    return into != nullptr;
}

// Returns the name of a function that is missing; null: none is.
const char* missing_in(void* handle, Library& made) {
#define KVROUTE_FIND(name) \
    if (!find(handle, #name, made.name)) return #name
    KVROUTE_FIND(OpenSSL_version_num);
    KVROUTE_FIND(OpenSSL_version);
    if (made.OpenSSL_version_num() < kOldest) return "OpenSSL 3";
    KVROUTE_FIND(ERR_get_error);
    KVROUTE_FIND(ERR_clear_error);
    KVROUTE_FIND(ERR_reason_error_string);
    KVROUTE_FIND(TLS_server_method);
    KVROUTE_FIND(TLS_client_method);
    KVROUTE_FIND(SSL_CTX_new);
    KVROUTE_FIND(SSL_CTX_free);
    KVROUTE_FIND(SSL_CTX_ctrl);
    KVROUTE_FIND(SSL_CTX_set_options);
    KVROUTE_FIND(SSL_CTX_set_verify);
    KVROUTE_FIND(SSL_CTX_set_session_id_context);
    KVROUTE_FIND(SSL_CTX_set_default_passwd_cb);
    KVROUTE_FIND(SSL_CTX_use_certificate_chain_file);
    KVROUTE_FIND(SSL_CTX_use_PrivateKey_file);
    KVROUTE_FIND(SSL_CTX_check_private_key);
    KVROUTE_FIND(SSL_CTX_load_verify_locations);
    KVROUTE_FIND(SSL_CTX_set_default_verify_paths);
    KVROUTE_FIND(SSL_CTX_set_alpn_select_cb);
    KVROUTE_FIND(SSL_CTX_set_alpn_protos);
    KVROUTE_FIND(SSL_new);
    KVROUTE_FIND(SSL_free);
    KVROUTE_FIND(SSL_set_accept_state);
    KVROUTE_FIND(SSL_set_connect_state);
    KVROUTE_FIND(SSL_set_bio);
    KVROUTE_FIND(SSL_ctrl);
    KVROUTE_FIND(SSL_set_hostflags);
    KVROUTE_FIND(SSL_set1_host);
    KVROUTE_FIND(SSL_do_handshake);
    KVROUTE_FIND(SSL_read);
    KVROUTE_FIND(SSL_write);
    KVROUTE_FIND(SSL_shutdown);
    KVROUTE_FIND(SSL_get_error);
    KVROUTE_FIND(SSL_get_verify_result);
    KVROUTE_FIND(X509_verify_cert_error_string);
    KVROUTE_FIND(BIO_meth_new);
    KVROUTE_FIND(BIO_meth_set_read);
    KVROUTE_FIND(BIO_meth_set_write);
    KVROUTE_FIND(BIO_meth_set_ctrl);
    KVROUTE_FIND(BIO_new);
    KVROUTE_FIND(BIO_set_data);
    KVROUTE_FIND(BIO_get_data);
    KVROUTE_FIND(BIO_set_init);
    KVROUTE_FIND(BIO_set_flags);
    KVROUTE_FIND(BIO_clear_flags);
#undef KVROUTE_FIND
    return nullptr;
}

}  // namespace

const Library& load(const std::vector<std::string>& places) {
    static std::mutex mutex;
    std::lock_guard locked(mutex);
    if (loaded) return *loaded;
    std::string tried;
    for (const std::string& place : places) {
        tried += tried.empty() ? "" : "; ";
        tried += place + ": ";
        // Never unloaded: sessions and their methods point into it.
        void* const handle = dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (handle == nullptr) {
            tried += dlerror();
            continue;
        }
        Library made;
        if (const char* const name = missing_in(handle, made)) {
            tried += std::string("has no ") + name;
            continue;
        }
        made.pipe = make_pipe(made);
        loaded = made;
        return *loaded;
    }
    throw Problem("no OpenSSL 3 was found (" + tried + "); install it: libssl3 in Debian");
}

const Library& library() { return *loaded; }

}  // namespace kvroute::tls
