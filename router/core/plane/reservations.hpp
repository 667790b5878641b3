// What gateways have reserved, by name: how much there may be, and what was booked for it without Python.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

namespace kvroute::plane {

class Booking;

// From any thread.
class Reservations : public std::enable_shared_from_this<Reservations> {
public:
    // Of one reservation, for as long as this lives.
    class Place {
    public:
        Place(std::shared_ptr<Reservations> of, std::string id)
            : of_(std::move(of)), id_(std::move(id)) {}
        Place(const Place&) = delete;
        Place& operator=(const Place&) = delete;
        ~Place() {
            if (of_ != nullptr) of_->forget(id_);
        }

    private:
        friend class Reservations;
        std::shared_ptr<Reservations> of_;
        std::string id_;
    };

    // `most`: those that Python makes among them.
    explicit Reservations(std::uint64_t most) : most_(most) {}

    // Null: there is one of that name, or there are as many as there may be.
    std::shared_ptr<Place> take(const std::string& id) {
        auto place = std::make_shared<Place>(nullptr, id);  // of nothing yet, should memory be short
        std::lock_guard locked(mutex_);
        if (by_id_.size() >= most_ || !by_id_.try_emplace(id).second) return nullptr;
        place->of_ = shared_from_this();
        return place;
    }
    bool has(const std::string& id) const {
        std::lock_guard locked(mutex_);
        return by_id_.contains(id);
    }
    std::uint64_t held() const {
        std::lock_guard locked(mutex_);
        return by_id_.size();
    }

    // What one has; nothing if its place was given back meanwhile.
    void put(const std::string& id, std::shared_ptr<Booking> booking) {
        std::lock_guard locked(mutex_);
        const auto found = by_id_.find(id);
        if (found != by_id_.end()) found->second.swap(booking);
    }
    // Null: there is none that was booked here and goes on. `is_over`: it does not, from now on.
    std::shared_ptr<Booking> booking(const std::string& id, bool is_over) {
        std::lock_guard locked(mutex_);
        const auto found = by_id_.find(id);
        if (found == by_id_.end()) return nullptr;
        return is_over ? std::exchange(found->second, nullptr) : found->second;
    }

private:
    void forget(const std::string& id) {
        std::shared_ptr<Booking> last;  // it takes other mutexes when it goes
        std::lock_guard locked(mutex_);
        auto node = by_id_.extract(id);
        if (!node.empty()) last = std::move(node.mapped());
    }

    std::uint64_t most_;
    mutable std::mutex mutex_;
    std::unordered_map<std::string, std::shared_ptr<Booking>> by_id_;  // null: Python's
};

}  // namespace kvroute::plane
