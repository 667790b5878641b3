// OpenSSL 3, found when it is first needed: nothing of it is needed to build. Declares only what is
// used here, as its manual pages do; these functions are a stable interface since 3.0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace kvroute::tls {

// OpenSSL's own types, which stay opaque.
struct SSL_METHOD;
struct SSL_CTX;
struct SSL;
struct BIO;
struct BIO_METHOD;

using AlpnSelect = int (*)(SSL*, const unsigned char** out, unsigned char* out_size,
                           const unsigned char* in, unsigned in_size, void*);
using PasswordOf = int (*)(char* buffer, int size, int is_for_writing, void*);

struct Library {
    unsigned long (*OpenSSL_version_num)();
    const char* (*OpenSSL_version)(int);

    unsigned long (*ERR_get_error)();
    void (*ERR_clear_error)();
    const char* (*ERR_reason_error_string)(unsigned long);

    const SSL_METHOD* (*TLS_server_method)();
    const SSL_METHOD* (*TLS_client_method)();
    SSL_CTX* (*SSL_CTX_new)(const SSL_METHOD*);
    void (*SSL_CTX_free)(SSL_CTX*);
    long (*SSL_CTX_ctrl)(SSL_CTX*, int, long, void*);
    std::uint64_t (*SSL_CTX_set_options)(SSL_CTX*, std::uint64_t);
    void (*SSL_CTX_set_verify)(SSL_CTX*, int, void*);
    int (*SSL_CTX_set_session_id_context)(SSL_CTX*, const unsigned char*, unsigned);
    void (*SSL_CTX_set_default_passwd_cb)(SSL_CTX*, PasswordOf);
    int (*SSL_CTX_use_certificate_chain_file)(SSL_CTX*, const char*);
    int (*SSL_CTX_use_PrivateKey_file)(SSL_CTX*, const char*, int);
    int (*SSL_CTX_check_private_key)(const SSL_CTX*);
    int (*SSL_CTX_load_verify_locations)(SSL_CTX*, const char* file, const char* folder);
    int (*SSL_CTX_set_default_verify_paths)(SSL_CTX*);
    void (*SSL_CTX_set_alpn_select_cb)(SSL_CTX*, AlpnSelect, void*);
    int (*SSL_CTX_set_alpn_protos)(SSL_CTX*, const unsigned char*, unsigned);

    SSL* (*SSL_new)(SSL_CTX*);
    void (*SSL_free)(SSL*);
    void (*SSL_set_accept_state)(SSL*);
    void (*SSL_set_connect_state)(SSL*);
    void (*SSL_set_bio)(SSL*, BIO*, BIO*);
    long (*SSL_ctrl)(SSL*, int, long, void*);
    void (*SSL_set_hostflags)(SSL*, unsigned);
    int (*SSL_set1_host)(SSL*, const char*);
    int (*SSL_do_handshake)(SSL*);
    int (*SSL_read)(SSL*, void*, int);
    int (*SSL_write)(SSL*, const void*, int);
    int (*SSL_shutdown)(SSL*);
    int (*SSL_get_error)(const SSL*, int);
    long (*SSL_get_verify_result)(const SSL*);
    const char* (*X509_verify_cert_error_string)(long);

    BIO_METHOD* (*BIO_meth_new)(int, const char*);
    int (*BIO_meth_set_read)(BIO_METHOD*, int (*)(BIO*, char*, int));
    int (*BIO_meth_set_write)(BIO_METHOD*, int (*)(BIO*, const char*, int));
    int (*BIO_meth_set_ctrl)(BIO_METHOD*, long (*)(BIO*, int, long, void*));
    BIO* (*BIO_new)(const BIO_METHOD*);
    void (*BIO_set_data)(BIO*, void*);
    void* (*BIO_get_data)(BIO*);
    void (*BIO_set_init)(BIO*, int);
    void (*BIO_set_flags)(BIO*, int);
    void (*BIO_clear_flags)(BIO*, int);

    BIO_METHOD* pipe = nullptr;  // see session.cpp
};

// Loads it once for the process; the first call decides. `places` are tried in their order: a module
// that is linked with it, or the library itself; nothing is loaded twice. Throws `Problem`.
const Library& load(const std::vector<std::string>& places);

// Returns the library; `load` has been called.
const Library& library();

}  // namespace kvroute::tls
