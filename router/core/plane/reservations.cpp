#include "plane/reservations.hpp"

#include <algorithm>

#include "plane/decider.hpp"
#include "plane/report.hpp"

namespace kvroute::plane {

Reservations::~Reservations() = default;

std::shared_ptr<Reservations::Place> Reservations::take(const std::string& id) {
    auto place = std::make_shared<Place>(nullptr, id);  // of nothing yet, should memory be short
    std::lock_guard locked(mutex_);
    if (by_id_.size() >= most_ || !by_id_.try_emplace(id).second) return nullptr;
    place->of_ = shared_from_this();
    return place;
}

bool Reservations::has(const std::string& id) const {
    std::lock_guard locked(mutex_);
    return by_id_.contains(id);
}

std::uint64_t Reservations::held() const {
    std::lock_guard locked(mutex_);
    return by_id_.size();
}

void Reservations::put(const std::string& id, std::shared_ptr<Booking> booking) {
    std::lock_guard locked(mutex_);
    const auto found = by_id_.find(id);
    if (found != by_id_.end()) found->second.booking.swap(booking);
}

void Reservations::keep(std::unique_ptr<Reserved> untold) {
    Reserved& kept = *untold;
    Silent made;
    made.push_back(std::move(untold));
    std::lock_guard locked(mutex_);
    const auto found = by_id_.find(kept.id);
    if (found == by_id_.end()) return;
    found->second = {kept.booking, made.begin(), false};
    kept.place->of_ = nullptr;  // it would hold what holds it
    untold_.splice(untold_.end(), made);
}

// With the mutex held: it goes, with its place.
std::unique_ptr<Reserved> Reservations::told(Entry& entry) {
    std::unique_ptr<Reserved> found = std::move(*entry.untold);
    untold_.erase(entry.untold);
    entry.is_told = true;
    found->place->of_ = shared_from_this();
    return found;
}

Reservations::Noted Reservations::note(std::string_view id, const ReportBody& report, bool is_over,
                                       double now) {
    const std::string name(id);
    std::lock_guard locked(mutex_);
    const auto found = by_id_.find(name);
    if (found == by_id_.end()) return {};
    Entry& entry = found->second;
    Noted noted{entry.booking, nullptr, entry.is_told};
    if (noted.booking == nullptr) return noted;
    if (is_over) {
        entry.booking.reset();
        if (!entry.is_told) noted.untold = told(entry);
    } else if (!entry.is_told) {
        plane::note(**entry.untold, report, now);
        untold_.splice(untold_.end(), untold_, entry.untold);
    }
    return noted;
}

Reservations::Untold Reservations::tell(const std::string& id) {
    Untold found;
    found.reserve(1);
    std::lock_guard locked(mutex_);
    const auto entry = by_id_.find(id);
    if (entry != by_id_.end() && !entry->second.is_told) found.push_back(told(entry->second));
    return found;
}

Reservations::Untold Reservations::tell_at(std::string_view replica) {
    Untold found;
    std::lock_guard locked(mutex_);
    for (auto at = untold_.begin(); at != untold_.end();) {
        const Reserved& each = **at++;
        if (each.so_far.replica != replica) continue;
        found.emplace_back();  // before anything is taken that would be lost
        found.back() = told(by_id_.at(each.id));
    }
    return found;
}

Reservations::Untold Reservations::tell_silent(double since, std::size_t most) {
    Untold found;
    std::lock_guard locked(mutex_);
    found.reserve(std::min(most, untold_.size()));
    while (found.size() < most && !untold_.empty() && untold_.front()->touched_at <= since) {
        found.push_back(told(by_id_.at(untold_.front()->id)));
    }
    return found;
}

void Reservations::forget(const std::string& id) {
    std::shared_ptr<Booking> last;  // it takes other mutexes when it goes
    std::lock_guard locked(mutex_);
    auto node = by_id_.extract(id);
    if (!node.empty()) last = std::move(node.mapped().booking);
}

}  // namespace kvroute::plane
