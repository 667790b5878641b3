// Threads that reserve, report and end under a few names: a program for sanitizers. Prints "done" where
// every booking has ended once and no name is left.

#include <atomic>
#include <cstdio>
#include <random>
#include <thread>
#include <vector>

#include "plane/decider.hpp"

using namespace kvroute::plane;

namespace {

constexpr std::uint64_t kMost = 5;
constexpr int kNames = 8, kThreads = 4, kRounds = 20'000;

std::atomic<int> booked = 0, ended = 0, gone = 0;
std::atomic<bool> has_failed = false;

class Counted final : public Booking {
public:
    Counted() { ++booked; }
    ~Counted() override { ++gone; }
    void first_byte(double) override {}
    void generated(u64, double) override {}
    bool ended(bool, double) override { return ++::ended > 0; }
    void reported(std::optional<std::int64_t>, double) override {}
};

void reserve_and_report(const std::shared_ptr<Reservations>& all, unsigned seed) {
    std::mt19937 random(seed);
    std::vector<std::shared_ptr<Reservations::Place>> places;
    for (int round = 0; round < kRounds; ++round) {
        const std::string id = "name " + std::to_string(random() % kNames);
        if (auto place = all->take(id)) {
            if (!all->has(id) || all->held() > kMost) has_failed = true;
            if (random() % 2) all->put(id, std::make_shared<Counted>());  // else it is Python's
            places.push_back(std::move(place));
        }
        const std::string other = "name " + std::to_string(random() % kNames);
        if (const auto booking = all->booking(other, false)) booking->first_byte(0);
        if (const auto booking = all->booking(other, true)) booking->ended(true, 0);
        if (places.size() > 1) places.erase(places.begin());
    }
}

}  // namespace

int main() {
    const auto all = std::make_shared<Reservations>(kMost);
    std::vector<std::thread> threads;
    for (unsigned seed = 0; seed < kThreads; ++seed) {
        threads.emplace_back(reserve_and_report, all, seed);
    }
    for (std::thread& each : threads) each.join();
    const bool is_right = !has_failed && all->held() == 0 && gone == booked && ended <= booked && ended;
    std::puts(is_right ? "done" : "something is left");
}
