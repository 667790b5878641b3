// Threads that decide, book and end while another one changes the fleet: a program for sanitizers.
// Prints "done" where the books are empty at the end.

#include <atomic>
#include <cstdio>
#include <deque>
#include <thread>

#include "decide/decide.hpp"

using namespace kvroute;
using namespace kvroute::decide;

namespace {

constexpr u32 kReplicas = 6, kRounds = 2000, kDeciders = 3;

struct World {
    Books books;
    std::shared_ptr<SharedIndex> index = std::make_shared<SharedIndex>(
        std::array<u64, 2>{1, 2}, Limits{1 << 20, 8, 4096, 1 << 20, 10'000, 8192, 4096});
    Decider decider{books, {Policy::Kind::least_delay, Weights(), 10.0, 7, false}};
    std::vector<std::shared_ptr<Conditions>> conditions;
    std::shared_ptr<const Fleet> fleet;  // under the books' mutex, like all else

    std::shared_ptr<const Fleet> made(u64 version) {
        std::vector<Replica> replicas;
        for (u32 number = 0; number < kReplicas; ++number) {
            Replica& replica = replicas.emplace_back();
            replica.id = "replica " + std::to_string(number);
            replica.speed = 1.0 + static_cast<double>(version % 3);
            replica.models = {"m"};
            const int ranks = number % 3 == 2 ? 2 : 1;
            for (int rank = 0; rank < ranks; ++rank) {
                replica.caches.push_back({rank, books.cache_ids.of(replica.id, rank), {}});
            }
            replica.conditions = conditions[number];
            replica.load = books.load.of(replica.id);
        }
        return std::make_shared<const Fleet>(version, std::move(replicas));
    }
};

void decide_and_book(World& world, u32 seed) {
    Scratch scratch;
    std::vector<u32> tokens(700, seed);
    Prompt prompt(std::make_shared<std::vector<u32>>(tokens), {}, {}, {});
    Prompt* prompts[] = {&prompt};
    std::deque<std::unique_ptr<InFlight>> flights;
    for (u32 round = 0; round < kRounds; ++round) {
        Question question;
        {
            const std::lock_guard locked(world.books.mutex);
            question.fleet = world.fleet;
        }
        question.replicas = question.fleet->serving("m");
        question.model = "m";
        question.prompt_tokens = 700;
        question.index = world.index.get();
        question.prompts = prompts;
        question.now = round / 100.0;
        world.decider.match(question, scratch);
        const std::lock_guard locked(world.books.mutex);
        const Ranking& ranking = world.decider.rank(question, scratch);
        if (ranking.first != kNone) {
            const State& state = ranking.able.states[ranking.first];
            const std::optional<int> rank =
                state.dp_rank == kAnyRank ? std::nullopt : std::optional(state.dp_rank);
            flights.push_back(std::make_unique<InFlight>(
                world.books.load, (*question.fleet)[state.replica].load, 700, 700, rank));
            if (round % 2) flights.back()->first_token();
        }
        if (flights.size() > 20) flights.pop_front();
    }
    const std::lock_guard locked(world.books.mutex);
    flights.clear();
}

void change_all(World& world, const std::atomic<bool>& is_done) {
    for (u64 version = 1; !is_done; ++version) {
        const std::lock_guard locked(world.books.mutex);
        Conditions& conditions = *world.conditions[version % kReplicas];
        conditions.is_healthy = version % 5 != 0;
        conditions.is_draining = version % 7 == 0;
        conditions.set_engine({static_cast<double>(version % 20), 1, 2, {}, 100, 1600});
        conditions.set_lost(std::vector<int>(version % 2, 0), {version % 2, {0, 0.0}});
        world.fleet = world.made(version);
    }
}

}  // namespace

int main() {
    World world;
    world.books.mirror = std::make_unique<mirror::Mirror>(1 << 16, mirror::FirstPrices{{}, 0.1}, 1);
    world.books.estimates = std::make_unique<mirror::ApproximateCaches>(
        world.books.mirror.get(), mirror::ApproximateCaches::Options{0.0, 2048, 1 << 16});
    for (u32 number = 0; number < kReplicas; ++number) {
        world.conditions.push_back(std::make_shared<Conditions>());
        world.conditions.back()->is_healthy = true;
    }
    world.fleet = world.made(0);
    std::atomic<bool> is_done = false;
    std::thread changing(change_all, std::ref(world), std::cref(is_done));
    std::vector<std::thread> deciding;
    for (u32 number = 0; number < kDeciders; ++number) {
        deciding.emplace_back(decide_and_book, std::ref(world), number);
    }
    for (std::thread& each : deciding) each.join();
    is_done = true;
    changing.join();
    bool is_empty = world.books.load.in_flight() == 0;
    world.books.load.each([&](const ReplicaLoad&) { is_empty = false; });
    std::puts(is_empty ? "done" : "something is left in the books");
}
