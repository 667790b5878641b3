// One side's identity and trust: certificates, keys and authorities, read from files once.
#pragma once

#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>

#include "tls/library.hpp"

namespace kvroute::tls {

// A file that cannot be used, or no library.
class Problem : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

// PEM files; empty: none.
struct Files {
    std::string certificate;  // with the chain up to its authority
    std::string key;
    std::string authorities;
};

// Never changes: certificates that were renewed make another one. From any thread.
class Context {
public:
    // Returns a server's; with authorities, clients have to show a certificate of one of them.
    // Throws `Problem`.
    static std::shared_ptr<const Context> for_clients(const Files& files);
    // Returns a client's; servers have to show a certificate of the authorities, or of the system's.
    static std::shared_ptr<const Context> for_servers(const Files& files);

    Context(const Context&) = delete;
    Context& operator=(const Context&) = delete;
    ~Context();

    bool is_of_server() const { return is_of_server_; }
    SSL_CTX* get() const { return made_; }

private:
    explicit Context(bool is_of_server);
    void trust(const std::string& authorities);
    void show(const Files& files);

    bool is_of_server_;
    SSL_CTX* made_;
};

// The contexts in use: replaced by any thread, read for each new connection.
class Contexts {
public:
    // Null: plain HTTP, or no replica can be reached by https.
    void use(std::shared_ptr<const Context> towards_clients,
             std::shared_ptr<const Context> towards_replicas) {
        std::lock_guard locked(mutex_);
        towards_clients_ = std::move(towards_clients);
        towards_replicas_ = std::move(towards_replicas);
    }
    std::shared_ptr<const Context> towards_clients() const {
        std::lock_guard locked(mutex_);
        return towards_clients_;
    }
    std::shared_ptr<const Context> towards_replicas() const {
        std::lock_guard locked(mutex_);
        return towards_replicas_;
    }

private:
    mutable std::mutex mutex_;
    std::shared_ptr<const Context> towards_clients_, towards_replicas_;
};

}  // namespace kvroute::tls
