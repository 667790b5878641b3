#include "plane/reservations.hpp"

#include <algorithm>

#include "plane/decider.hpp"
#include "plane/report.hpp"

namespace kvroute::plane {

Reservations::~Reservations() = default;

std::shared_ptr<Reservations::Place> Reservations::take(const std::string& id) {
    auto place = std::make_shared<Place>(nullptr, id);  // not in force yet, should the next lines throw
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

void Reservations::keep(std::unique_ptr<Reserved> record) {
    Reserved& kept = *record;
    Kept made;
    made.push_back(std::move(record));
    std::lock_guard locked(mutex_);
    const auto found = by_id_.find(kept.id);
    if (found == by_id_.end()) return;
    found->second = {kept.booking, made.begin(), false};
    kept.place->of_ = nullptr;  // else each would hold the other
    kept_.splice(kept_.end(), made);
}

// With the mutex held: takes the record out of those kept, with its place.
std::unique_ptr<Reserved> Reservations::release(Entry& entry) {
    std::unique_ptr<Reserved> found = std::move(*entry.kept);
    kept_.erase(entry.kept);
    entry.is_handed_over = true;
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
    Noted noted{entry.booking, nullptr, entry.is_handed_over};
    if (noted.booking == nullptr) return noted;
    if (is_over) {
        entry.booking.reset();
        if (!entry.is_handed_over) noted.record = release(entry);
    } else if (!entry.is_handed_over) {
        plane::note(**entry.kept, report, now);
        kept_.splice(kept_.end(), kept_, entry.kept);
    }
    return noted;
}

Reservations::Records Reservations::hand_over(const std::string& id) {
    Records found;
    found.reserve(1);
    std::lock_guard locked(mutex_);
    const auto entry = by_id_.find(id);
    if (entry != by_id_.end() && !entry->second.is_handed_over) found.push_back(release(entry->second));
    return found;
}

Reservations::Records Reservations::hand_over_at(std::string_view replica) {
    Records found;
    std::lock_guard locked(mutex_);
    for (auto at = kept_.begin(); at != kept_.end();) {
        const Reserved& each = **at++;
        if (each.so_far.replica != replica) continue;
        found.emplace_back();  // before anything is taken that would be lost
        found.back() = release(by_id_.at(each.id));
    }
    return found;
}

Reservations::Records Reservations::hand_over_silent(double since, std::size_t most) {
    Records found;
    std::lock_guard locked(mutex_);
    found.reserve(std::min(most, kept_.size()));
    while (found.size() < most && !kept_.empty() && kept_.front()->touched_at <= since) {
        found.push_back(release(by_id_.at(kept_.front()->id)));
    }
    return found;
}

void Reservations::forget(const std::string& id) {
    std::shared_ptr<Booking> last;  // freed after the lock, as it takes other mutexes
    std::lock_guard locked(mutex_);
    auto node = by_id_.extract(id);
    if (!node.empty()) last = std::move(node.mapped().booking);
}

}  // namespace kvroute::plane
