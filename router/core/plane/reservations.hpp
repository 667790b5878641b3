// What gateways have reserved, by name: how much there may be, and what was booked for it without Python,
// which is told of one where it needs to know it.
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
    ~Reservations();

    // Null: there is one of that name, or there are as many as there may be.
    std::shared_ptr<Place> take(const std::string& id);
    bool has(const std::string& id) const;
    std::uint64_t held() const;

    // What one has that Python is told of; nothing if its place was given back meanwhile.
    void put(const std::string& id, std::shared_ptr<Booking> booking);
    // The same of one that Python is not told of. Its place is its own until it is.
    void keep(std::unique_ptr<Reserved> untold);

    // What a report is about.
    struct Noted {
        std::shared_ptr<Booking> booking;  // null: there is none that was booked here and goes on
        std::unique_ptr<Reserved> untold;  // that is over with this report, and what was noted before it
        bool is_told = false;              // Python knows it
    };
    // `is_over`: from now on; else what it says is noted where Python does not know it.
    Noted note(std::string_view id, const ReportBody& report, bool is_over, double now);

    // Those of which Python has to know from now on, and does not.
    using Untold = std::vector<std::unique_ptr<Reserved>>;
    Untold tell(const std::string& id);
    Untold tell_at(std::string_view replica);
    // That nothing was said of since, and at most so many; those of which it is longest ago.
    Untold tell_silent(double since, std::size_t most);

    // One that Python is not told of was served whole.
    void count_completed() {
        std::lock_guard locked(mutex_);
        ++completed_;
    }
    std::uint64_t completed() const {
        std::lock_guard locked(mutex_);
        return completed_;
    }

private:
    using Silent = std::list<std::unique_ptr<Reserved>>;  // that of which most was said last stands last
    struct Entry {
        std::shared_ptr<Booking> booking;  // null: Python's
        Silent::iterator untold;
        bool is_told = true;
    };

    void forget(const std::string& id);
    std::unique_ptr<Reserved> told(Entry& entry);

    std::uint64_t most_;
    std::uint64_t completed_ = 0;
    mutable std::mutex mutex_;
    std::unordered_map<std::string, Entry> by_id_;
    Silent untold_;
};

}  // namespace kvroute::plane
