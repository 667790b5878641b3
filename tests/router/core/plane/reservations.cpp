// Threads that reserve, report and end under a few names, and ask for what is kept back: a program
// for sanitizers. Prints "done" where every booking has ended once and no name is left.

#include <atomic>
#include <cstdio>
#include <random>
#include <thread>
#include <vector>

#include "plane/decider.hpp"
#include "plane/report.hpp"

using namespace kvroute::plane;

namespace {

constexpr std::uint64_t kMost = 5;
constexpr int kNames = 8, kThreads = 4, kRounds = 20'000;

std::atomic<int> booked = 0, ended = 0, gone = 0, kept = 0, handed_over = 0;
std::atomic<bool> has_failed = false;

class Counted final : public Booking {
public:
    Counted() { ++booked; }
    ~Counted() override { ++gone; }
    void first_byte(bool, double) override {}
    void generated(u64, double) override {}
    bool ended(bool, double) override { return ++::ended > 0; }
    void reported(std::optional<std::int64_t>, double) override {}
};

// Everything that was kept is handed over once: at its end, or on request.
void take(Reservations::Records records) {
    for (const auto& each : records) {
        ++handed_over;
        if (each->booking == nullptr || each->place == nullptr) has_failed = true;
    }
}

void keep(Reservations& all, const std::string& id, std::shared_ptr<Reservations::Place> place,
          std::mt19937& random) {
    auto record = std::make_unique<Reserved>();
    record->id = id;
    record->booking = std::make_shared<Counted>();
    record->place = std::move(place);
    record->so_far.replica = random() % 2 ? "a" : "b";
    record->touched_at = random() % 10;
    all.keep(std::move(record));
    ++kept;
}

void ask(Reservations& all, const std::string& id, std::mt19937& random) {
    switch (random() % 6) {
        case 0: return take(all.hand_over(id));
        case 1: return take(all.hand_over_at("a"));
        case 2: return take(all.hand_over_silent(random() % 10, 2));
        default: return;
    }
}

void reserve_and_report(const std::shared_ptr<Reservations>& all, unsigned seed) {
    std::mt19937 random(seed);
    std::vector<std::shared_ptr<Reservations::Place>> places;
    for (int round = 0; round < kRounds; ++round) {
        const std::string id = "name " + std::to_string(random() % kNames);
        if (auto place = all->take(id)) {
            if (!all->has(id) || all->held() > kMost) has_failed = true;
            if (random() % 2) {
                keep(*all, id, std::move(place), random);
            } else {
                if (random() % 2) all->put(id, std::make_shared<Counted>());  // else it is Python's
                places.push_back(std::move(place));
            }
        }
        const std::string other = "name " + std::to_string(random() % kNames);
        ask(*all, other, random);
        ReportBody report;
        report.tokens = 3;
        report.cached_tokens = 7;
        if (const auto noted = all->note(other, report, false, round); noted.booking) {
            noted.booking->first_byte(true, 0);
            if (noted.record) has_failed = true;
        }
        if (auto noted = all->note(other, report, true, round); noted.booking) {
            noted.booking->ended(true, 0);
            if ((noted.record == nullptr) != noted.is_handed_over) has_failed = true;
            if (noted.record) ++handed_over;
        }
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
    take(all->hand_over_silent(1e9, 1'000));
    const bool is_right = !has_failed && all->held() == 0 && gone == booked && ended <= booked && ended &&
                          kept && handed_over == kept;
    std::puts(is_right ? "done" : "something is left");
}
