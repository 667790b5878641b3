#include "plane/plane.hpp"

#include <algorithm>

namespace kvroute::plane {
namespace {

constexpr u32 kMostHeldBack = 4;

}  // namespace

Plane::Plane(Options options, Secured secured, const std::vector<int>& listeners)
    : common_(std::move(options)) {
    secure(std::move(secured));
    for (const int listener : listeners) {
        const u32 number = static_cast<u32>(threads_.size());
        threads_.push_back(std::make_unique<Thread>(number, common_, listener));
    }
    for (auto& thread : threads_) common_.threads.push_back(thread.get());
    for (auto& thread : threads_) thread->start();
}

Plane::~Plane() { stop(); }

void Plane::secure(Secured secured) {
    common_.contexts.use(std::move(secured.towards_clients), std::move(secured.towards_replicas));
}

void Plane::send(Command command) {
    const std::size_t number = command.id >> 56;
    if (number >= threads_.size()) return;
    threads_[number]->send(std::move(command), !is_held_back_);
    if (is_held_back_ && ++held_back_ >= kMostHeldBack) {
        wake();
        is_held_back_ = true;
    }
}

void Plane::end_for_memory(ExchangeId id) {
    const std::size_t number = id >> 56;
    if (number < threads_.size()) threads_[number]->end_for_memory(id);
}

void Plane::wake() {
    is_held_back_ = false;
    if (std::exchange(held_back_, 0) == 0) return;
    for (auto& thread : threads_) thread->wake_for_mail();
}

void Plane::give_up(const std::string& origin, double silent_s) {
    for (auto& thread : threads_) thread->give_up({origin, silent_s});
}

void Plane::cut_all() {
    for (auto& thread : threads_) thread->cut_all();
}

void Plane::stop() {
    for (auto& thread : threads_) thread->stop();
}

PoolCounts Plane::counts() const {
    PoolCounts sum;
    for (const auto& thread : threads_) {
        const PoolCounts each = thread->counts();
        sum.connections += each.connections;
        sum.idle += each.idle;
        sum.active += each.active;
        sum.opened += each.opened;
        sum.reused += each.reused;
        sum.kept_closed += each.kept_closed;
        sum.connect_failures += each.connect_failures;
        sum.timeouts += each.timeouts;
        sum.broken += each.broken;
        sum.closed_early += each.closed_early;
        sum.given_up += each.given_up;
        sum.aborted += each.aborted;
    }
    return sum;
}

void Plane::decide_by(std::shared_ptr<Decider> decider) {
    for (auto& thread : threads_) thread->decide_by(decider.get());
    // One that was there before may still be asked: it is kept until the threads have stopped.
    const bool is_kept = std::find(deciders_.begin(), deciders_.end(), decider) != deciders_.end();
    if (decider && !is_kept) deciders_.push_back(std::move(decider));
}

u64 Plane::unread() const {
    u64 sum = 0;
    for (const auto& thread : threads_) sum += thread->unread();
    return sum;
}

std::vector<u64> Plane::clients() const {
    std::vector<u64> found;
    for (const auto& thread : threads_) found.push_back(thread->clients());
    return found;
}

}  // namespace kvroute::plane
