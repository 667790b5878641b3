// What gateways have reserved: how many there may be, and those that were made without Python.
#pragma once

#include <mutex>
#include <string>
#include <unordered_map>

#include "plane/budget.hpp"
#include "plane/decider.hpp"

namespace kvroute::plane {

// From any thread.
class Reservations {
public:
    // `most`: those that Python makes among them.
    explicit Reservations(u64 most) : places_(most) {}

    // Nothing: there are as many as there may be.
    std::optional<Budget::Share> take() { return places_.take(1); }
    u64 held() const { return places_.held(); }

    void add(const std::string& id, std::shared_ptr<Booking> booking) {
        std::lock_guard locked(mutex_);
        made_.insert_or_assign(id, std::move(booking));
    }
    // Null: there is none, or none that was made here.
    std::shared_ptr<Booking> find(const std::string& id) const {
        std::lock_guard locked(mutex_);
        const auto found = made_.find(id);
        return found == made_.end() ? nullptr : found->second;
    }
    std::shared_ptr<Booking> remove(const std::string& id) {
        std::lock_guard locked(mutex_);
        const auto node = made_.extract(id);
        return node.empty() ? nullptr : node.mapped();
    }

private:
    Budget places_;
    mutable std::mutex mutex_;
    std::unordered_map<std::string, std::shared_ptr<Booking>> made_;
};

}  // namespace kvroute::plane
