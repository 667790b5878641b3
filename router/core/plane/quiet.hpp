// Finds the requests decided here that had a replica to themselves: only these show whether the
// router's picture of it is right. Python keeps the same for those that it decides, and combines the
// two (router/fleet/quiet_moments.py).
#pragma once

#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "plane/types.hpp"

namespace kvroute::plane {

struct OfReplica {
    u64 under_way = 0;
    u64 begun = 0;
    double ended_at = -std::numeric_limits<double>::infinity();  // the last of them
};

// A request at a replica.
struct Moment {
    std::shared_ptr<OfReplica> at;
    u64 number = 0;  // of those there; 0: it was not quiet when this one began
};

// From any thread.
class QuietMoments {
public:
    // `quiet_s`: between the end of one request and the beginning of the next.
    explicit QuietMoments(double quiet_s) : quiet_s_(quiet_s) {}

    Moment began(const std::string& replica, double now) {
        std::lock_guard locked(mutex_);
        std::shared_ptr<OfReplica>& at = replicas_[replica];
        if (at == nullptr) at = std::make_shared<OfReplica>();
        const bool is_quiet = at->under_way == 0 && now - at->ended_at >= quiet_s_;
        at->under_way += 1;
        at->begun += 1;
        return {at, is_quiet ? at->begun : 0};
    }

    // Returns whether it was alone from its beginning to its end.
    bool ended(const Moment& moment, double now) {
        std::lock_guard locked(mutex_);
        moment.at->under_way -= 1;
        moment.at->ended_at = now;
        return moment.number == moment.at->begun;
    }

    OfReplica at(const std::string& replica) const {
        std::lock_guard locked(mutex_);
        const auto found = replicas_.find(replica);
        return found == replicas_.end() ? OfReplica() : *found->second;
    }

    // Requests that began at each replica.
    std::unordered_map<std::string, u64> begun() const {
        std::lock_guard locked(mutex_);
        std::unordered_map<std::string, u64> found;
        for (const auto& [replica, at] : replicas_) found.emplace(replica, at->begun);
        return found;
    }

    void forget(const std::string& replica) {
        std::lock_guard locked(mutex_);
        replicas_.erase(replica);
    }

private:
    double quiet_s_;
    mutable std::mutex mutex_;
    std::unordered_map<std::string, std::shared_ptr<OfReplica>> replicas_;
};

}  // namespace kvroute::plane
