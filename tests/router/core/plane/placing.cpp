// Threads that place, reserve and look where caches publish no events, while another one replaces
// the fleet and reads the estimates: a program for sanitizers. Prints "done" where the books are empty
// at the end, and no estimate takes anything for being in use.

#include <atomic>
#include <cstdio>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "plane/placing.hpp"
#include "plane/report.hpp"

using namespace kvroute;
using namespace kvroute::plane;

namespace {

constexpr u32 kReplicas = 4, kRounds = 1500, kThreads = 3;
constexpr mirror::Tokens kCacheTokens = 2048;
constexpr double kAlways = -std::numeric_limits<double>::infinity();

struct World {
    std::shared_ptr<decide::Books> books = std::make_shared<decide::Books>();
    std::shared_ptr<decide::Decider> decider = std::make_shared<decide::Decider>(
        *books,
        decide::Decider::Settings{decide::Policy::Kind::least_delay, decide::Weights(), 10.0, 7});
    std::shared_ptr<SharedIndex> index =
        std::make_shared<SharedIndex>(std::array<u64, 2>{1, 2}, Limits());
    std::shared_ptr<Reservations> reservations = std::make_shared<Reservations>(64);
    Placing placing{decider, 1.0, {}, reservations};
    std::shared_ptr<const decide::Fleet> fleet;

    World() {
        mirror::ApproximateCaches::Options options{0.0, kCacheTokens, 1 << 16};
        books->mirror =
            std::make_unique<mirror::Mirror>(1 << 16, mirror::FirstPrices{{}, 0.1}, 1);
        books->estimates =
            std::make_unique<mirror::ApproximateCaches>(books->mirror.get(), options);
        std::vector<decide::Replica> replicas;
        for (u32 number = 0; number < kReplicas; ++number) {
            decide::Replica& replica = replicas.emplace_back();
            replica.id = "replica " + std::to_string(number);
            replica.models = {"m"};
            const SourceNumber source = index->new_number();
            replica.caches.push_back(
                {0, books->cache_ids.of(replica.id, 0), {{index, source}}});
            replica.conditions = std::make_shared<decide::Conditions>();
            replica.conditions->is_healthy = true;
            replica.load = books->load.of(replica.id);
        }
        fleet = std::make_shared<const decide::Fleet>(1, std::move(replicas));
    }

    // All of them publish nothing, or one has lost its events a while ago.
    void serve(bool has_lost_one) {
        {
            std::lock_guard locked(books->mutex);
            for (u32 id = 0; id < kReplicas; ++id) {
                (*fleet)[id].conditions->set_lost({}, {{0, has_lost_one && !id ? 1.0 : kAlways}});
            }
        }
        auto served = std::make_shared<Served>();
        served->model = "m";
        served->fleet = fleet;
        served->index = index;
        served->ways.resize(kReplicas);
        served->names.resize(kReplicas);
        served->at_gateways.resize(kReplicas);
        served->most_tokens = 1 << 20;
        Placing::Models models;
        models.emplace("m", std::move(served));
        placing.serve(std::move(models));
    }
};

Ask ask_of(std::mt19937& random) {
    Ask ask;
    ask.model = "m";
    const u32 prefix = random() % 5;
    std::vector<u32> tokens;
    for (u32 at = 0; at < 200 + random() % 700; ++at) tokens.push_back(prefix * 10'000 + at);
    for (u32 at = 0; at < 100; ++at) tokens.push_back(random());
    ask.tokens = std::make_shared<std::vector<u32>>(std::move(tokens));
    return ask;
}

// Takes any way through its calls: some bookings are never touched again.
void live(Booking& booking, std::mt19937& random, double now) {
    if (random() % 4) booking.first_byte(random() % 2, now);
    if (random() % 4) booking.generated(3, now);
    if (random() % 4) booking.ended(random() % 2, now);
    if (random() % 2) booking.reported(random() % 500, now);
}

void ask(World& world, unsigned seed, std::atomic<u32>& estimated) {
    std::mt19937 random(seed);
    for (u32 round = 0; round < kRounds; ++round) {
        const Ask ask = ask_of(random);
        const double now = 100.0 + round;
        const Question question{.ask = ask, .now = now};
        if (const auto placed = world.placing.place(question)) {
            estimated += placed->prediction.is_estimate();
            live(*placed->booking, random, now);
        }
        if (const auto reserved = world.placing.reserve(question)) {
            Reservations& reservations = world.placing.reservations();
            if (random() % 2) {
                reservations.put(reserved->id, reserved->booking);
            } else {
                auto kept = std::make_unique<Reserved>();
                kept->id = reserved->id;
                kept->booking = reserved->booking;
                kept->place = reserved->place;
                reservations.keep(std::move(kept));
            }
            if (const auto noted = reservations.note(reserved->id, {}, random() % 2, now); noted.booking) {
                live(*noted.booking, random, now);
            }
            reservations.hand_over_silent(1e9, 1);  // what was kept is dropped here
        }
        const auto selected = world.placing.select(question);
        if (selected && selected->answer.prediction.is_estimate()) {
            estimated += selection_body(*selected, reason_of(selected->answer)).size() > 0;
        }
    }
}

}  // namespace

int main() {
    World world;
    world.serve(false);
    std::atomic<bool> is_done = false;
    std::atomic<u32> estimated = 0;
    std::thread changing([&] {
        for (u64 round = 0; !is_done; ++round) {
            world.serve(round % 2);
            std::lock_guard locked(world.books->mutex);
            mirror::ApproximateCaches& estimates = *world.books->estimates;
            for (const u32 id : estimates.caches()) estimates.statistics(id, kAlways, 1e3);
            const u32 forgotten[] = {static_cast<u32>(round % kReplicas)};
            if (round % 50 == 0) estimates.forget(forgotten);
        }
    });
    std::vector<std::thread> asking;
    for (unsigned seed = 0; seed < kThreads; ++seed) {
        asking.emplace_back(ask, std::ref(world), seed, std::ref(estimated));
    }
    for (std::thread& each : asking) each.join();
    is_done = true;
    changing.join();
    bool is_right = estimated > 0 && world.placing.under_way() == 0 &&
                    world.books->load.in_flight() == 0 && world.reservations->held() == 0;
    std::lock_guard locked(world.books->mutex);
    for (const u32 id : world.books->estimates->caches()) {
        const auto found = world.books->estimates->statistics(id, kAlways, 1e4);
        is_right &= !found || found->tokens <= kCacheTokens;
    }
    std::puts(is_right ? "done" : "something is left");
}
