// The data plane: threads that own the sockets of clients and of replicas.
#pragma once

#include <memory>
#include <vector>

#include "plane/thread.hpp"

namespace kvroute::plane {

class Plane {
public:
    // `listeners`: one for each thread, non-blocking and listening; they may be copies of one.
    Plane(Options options, const std::vector<int>& listeners);
    ~Plane();

    int descriptor() const { return outbox_.descriptor(); }
    std::vector<Event> take() { return outbox_.take(); }
    void send(Command command);
    void give_up(const std::string& origin, double silent_s);
    void cut_all();
    void close_idle();
    void stop();
    PoolCounts counts() const;
    u64 clients() const;
    u64 held_bytes() const { return bodies_.held(); }
    // From now on. Null: Python decides everything.
    void decide_by(std::shared_ptr<Decider> decider);

private:
    Options options_;
    std::vector<std::shared_ptr<Decider>> deciders_;
    Outbox outbox_;
    Bodies bodies_;
    std::vector<std::unique_ptr<Thread>> threads_;
};

}  // namespace kvroute::plane
