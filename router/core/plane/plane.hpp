// The data plane: threads that own the sockets of clients and of replicas.
#pragma once

#include <memory>
#include <vector>

#include "plane/thread.hpp"

namespace kvroute::plane {

class Plane {
public:
    // Null: without TLS; see `tls::Contexts::use`.
    struct Secured {
        std::shared_ptr<const tls::Context> towards_clients, towards_replicas;
    };

    // `listeners`: one for each thread, non-blocking and listening; they may be copies of one.
    Plane(Options options, Secured secured, const std::vector<int>& listeners);
    ~Plane();

    int descriptor() const { return common_.outbox.descriptor(); }
    std::vector<Event> take() { return common_.outbox.take(); }
    void sum_up(std::unique_ptr<Sums> sums) { common_.outbox.sum_up(std::move(sums)); }
    Sums::Found take_sums() { return common_.outbox.take_sums(); }
    void keep(std::vector<Event> events) { common_.outbox.keep(std::move(events)); }
    void ring() { common_.outbox.ring(); }
    void send(Command command);
    // See `Thread::end_for_memory` and `Outbox::take_lost`.
    void end_for_memory(ExchangeId id);
    void lose(ExchangeId id) { common_.outbox.lose(id); }
    std::optional<ExchangeId> take_lost() { return common_.outbox.take_lost(); }
    // From here to `wake`, threads are woken for a few commands at a time: each is a system call, and
    // some µs of the other core. Only where all commands come from one thread.
    void hold_back() { is_held_back_ = true; }
    void wake();
    void give_up(const std::string& origin, double silent_s);
    void cut_all();
    void stop();
    PoolCounts counts() const;
    std::vector<u64> clients() const;  // of each thread
    u64 unread() const;  // see `Thread::unread`
    u64 held_bytes() const { return common_.bodies.held(); }
    void hold_elsewhere(u64 size) { common_.bodies.hold_elsewhere(size); }
    // Changes the TLS of new connections.
    void secure(Secured secured);
    // From now on. Null: Python decides everything.
    void decide_by(std::shared_ptr<Decider> decider);
    Hosts& hosts() { return common_.hosts; }

private:
    Common common_;
    bool is_held_back_ = false;
    u32 held_back_ = 0;  // commands
    std::vector<std::shared_ptr<Decider>> deciders_;
    std::vector<std::unique_ptr<Thread>> threads_;
};

}  // namespace kvroute::plane
