// Host names that clients may use, once Python has checked them. This stops DNS rebinding: a page of
// another origin whose name resolves to this machine calls the router by that name.
#pragma once

#include <mutex>
#include <set>
#include <string>
#include <string_view>

namespace kvroute::plane {

class Hosts {
public:
    // `checks`: otherwise any name will do.
    explicit Hosts(bool checks) : checks_(checks) {}

    // From any thread, as `accepts`.
    void accept(std::string host) {
        std::lock_guard locked(mutex_);
        if (known_.size() < kMostKnown) known_.insert(std::move(host));
    }
    bool accepts(std::string_view host) const {
        if (!checks_) return true;
        std::lock_guard locked(mutex_);
        return known_.contains(host);
    }

private:
    static constexpr std::size_t kMostKnown = 256;

    bool checks_;
    mutable std::mutex mutex_;
    std::set<std::string, std::less<>> known_;
};

}  // namespace kvroute::plane
