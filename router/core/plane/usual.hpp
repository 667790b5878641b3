// Learns how long a first byte usually takes, by replica and by the work before it; and bounds how many
// requests may be tried a second time where it takes longer.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "plane/types.hpp"

namespace kvroute::plane {

// At one replica. From any thread.
class UsualAt {
public:
    // Seconds after which a first byte is late, with so many tokens to be computed before it. Nothing
    // where too few were measured.
    std::optional<double> late_after(u64 work_tokens) const;
    // A first byte took so long, or was not there by then.
    void learn(u64 work_tokens, double seconds);
    bool has_late() const { return late_.load(std::memory_order_relaxed) > 0; }

private:
    friend class Late;
    // As TCP estimates a round trip: the mean, and the mean distance from it (RFC 6298).
    struct Taken {
        u32 count = 0;
        double mean_s = 0, deviation_s = 0;
    };

    mutable std::mutex mutex_;
    std::array<Taken, 32> taken_;  // by the number of bits of the work
    std::atomic<u32> late_{0};     // requests whose first byte is late, at this moment
};

// One request whose first byte is late, for as long as this lives.
class Late {
public:
    Late() = default;
    explicit Late(std::shared_ptr<UsualAt> at) : at_(std::move(at)) { ++at_->late_; }
    Late(Late&& other) noexcept : at_(std::move(other.at_)) {}
    Late& operator=(Late&& other) noexcept {
        std::swap(at_, other.at_);
        return *this;
    }
    ~Late() {
        if (at_ != nullptr) --at_->late_;
    }

private:
    std::shared_ptr<UsualAt> at_;
};

// At all of them. From any thread.
class Usual {
public:
    // `share`: of all requests, how many may be tried a second time in the long run; 0: none.
    explicit Usual(double share) : share_(share) {}

    bool is_on() const { return share_ > 0; }
    // By the origin of a replica.
    std::shared_ptr<UsualAt> at(const std::string& origin);
    void add_request();
    // Takes one second attempt of the share; false: none is left.
    bool take();

private:
    double share_;
    std::mutex mutex_;
    double left_ = 1.0;  // second attempts
    std::unordered_map<std::string, std::shared_ptr<UsualAt>> replicas_;
};

}  // namespace kvroute::plane
