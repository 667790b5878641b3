// Gateways' reservations, by name: bounds their number, and keeps those that were booked without
// Python until Python needs one, which is then handed over.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace kvroute::plane {

class Booking;
struct Reserved;
struct ReportBody;

// From any thread.
class Reservations : public std::enable_shared_from_this<Reservations> {
public:
    // Holds one reservation's name, for as long as this lives.
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

    // `most`: of all, with those that Python makes.
    explicit Reservations(std::uint64_t most) : most_(most) {}
    ~Reservations();

    // Null: there is one of that name, or there are as many as there may be.
    std::shared_ptr<Place> take(const std::string& id);
    bool has(const std::string& id) const;
    std::uint64_t held() const;

    // Sets the booking of one that Python has; without effect if its place was given back meanwhile.
    void put(const std::string& id, std::shared_ptr<Booking> booking);
    // Keeps one that Python does not have, with its place, until it is handed over.
    void keep(std::unique_ptr<Reserved> record);

    // The reservation that a report is on.
    struct Noted {
        std::shared_ptr<Booking> booking;  // null: there is none that was booked here and goes on
        std::unique_ptr<Reserved> record;  // where this report ends one that was kept
        bool is_handed_over = false;       // Python has it
    };
    // `is_over`: with this report; else it is added to the record where that is kept here.
    Noted note(std::string_view id, const ReportBody& report, bool is_over, double now);

    // Each returns records that were kept, and that Python has from now on.
    using Records = std::vector<std::unique_ptr<Reserved>>;
    Records hand_over(const std::string& id);
    Records hand_over_at(std::string_view replica);
    // Those without a report since then, at most so many; the longest silent first.
    Records hand_over_silent(double since, std::size_t most);

    // One that was never handed over was served whole.
    void count_completed() {
        std::lock_guard locked(mutex_);
        ++completed_;
    }
    std::uint64_t completed() const {
        std::lock_guard locked(mutex_);
        return completed_;
    }

private:
    using Kept = std::list<std::unique_ptr<Reserved>>;  // by the time of the last report
    struct Entry {
        std::shared_ptr<Booking> booking;  // null: Python's
        Kept::iterator kept;
        bool is_handed_over = true;
    };

    void forget(const std::string& id);
    std::unique_ptr<Reserved> release(Entry& entry);

    std::uint64_t most_;
    std::uint64_t completed_ = 0;
    mutable std::mutex mutex_;
    std::unordered_map<std::string, Entry> by_id_;
    Kept kept_;
};

}  // namespace kvroute::plane
