// One thread of the plane: its clients, its connections to replicas, and the commands it is sent.
#pragma once

#include <sys/socket.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "plane/budget.hpp"
#include "plane/client.hpp"
#include "plane/hosts.hpp"
#include "plane/loop.hpp"
#include "plane/sums.hpp"
#include "plane/upstream.hpp"
#include "plane/usual.hpp"

namespace kvroute::plane {

// Numbers of exchanges, in memory taken beforehand for when none is left. Those beyond it are dropped.
class Numbers {
public:
    void add(ExchangeId id) {
        const bool is_again = count_ > 0 && ids_[count_ - 1] == id;
        if (!is_again && count_ < ids_.size()) ids_[count_++] = id;
    }
    std::optional<ExchangeId> take() {
        if (count_ == 0) return std::nullopt;
        return ids_[--count_];
    }

private:
    std::array<ExchangeId, 4096> ids_;
    std::size_t count_ = 0;
};

// Events of all threads, for one reader. The descriptor is readable while any of them is awaited; the
// records of what is over wait for these, or for the next `nudge`.
class Outbox {
public:
    Outbox();
    ~Outbox();
    // `is_awaited`: so are records of what is over. False: there was no memory for the event, and its
    // exchange is lost.
    bool post(Event event, bool is_awaited);
    // An event of this exchange is lost: `take_lost` returns that to Python (0: of no exchange).
    void lose(ExchangeId id);
    std::optional<ExchangeId> take_lost();
    // From now on `sum` counts requests that are over, but for the first of a batch; null: it does not.
    void sum_up(std::unique_ptr<Sums> sums);
    bool sums_up();
    // Counts one; false: it has to be posted.
    bool sum(const Sums::Finished& finished);
    Sums::Found take_sums();
    void nudge();
    // Takes events back that Python had no memory for: the next `take` returns them first.
    void keep(std::vector<Event> events);
    // Makes the descriptor readable once more.
    void ring();
    std::vector<Event> take();
    int descriptor() const { return signal_; }
    // The reader is far behind: nothing is decided here then, as that adds events.
    bool is_long() const { return waiting_.load(std::memory_order_relaxed) > kMostWaiting; }

private:
    static constexpr std::size_t kMostWaiting = 65'536;
    static constexpr std::size_t kPostedOneByOne = 8;  // between two `take`

    std::mutex mutex_;
    std::vector<Event> events_;
    std::vector<Event> kept_;
    std::unique_ptr<Sums> sums_;
    std::size_t settled_ = 0;  // records among `events_`
    std::atomic<std::size_t> waiting_{0};  // the number of `events_`
    bool is_signalled_ = false;
    Numbers lost_;
    int signal_ = -1;
};

class Thread;

// Shared by all threads.
struct Common {
    explicit Common(Options given)
        : options(std::move(given)), bodies(options.max_held_bytes), hosts(options.checks_hosts),
          usual(options.second_share) {}

    const Options options;
    Budget bodies;  // of requests that Python does not have yet
    Outbox outbox;
    Hosts hosts;
    tls::Contexts contexts;
    Usual usual;
    std::vector<Thread*> threads;  // as they are before the first one starts
};

struct GiveUp {
    std::string origin;
    double silent_s = 0;
};

class Thread {
public:
    Thread(u32 number, Common& common, int listener);
    ~Thread();

    void start();
    // From any thread.
    void send(Command command, bool wakes = true);
    void wake_for_mail();
    // Ends an exchange for whose response there is no memory; needs none itself.
    void end_for_memory(ExchangeId id);
    void give_up(GiveUp what);
    void cut_all();
    void stop();  // and waits for it
    PoolCounts counts() const;
    u64 clients() const { return open_clients_.load(std::memory_order_relaxed); }
    // Those whose response is whole, and that have not taken all of it.
    u64 unread() const { return unread_.load(); }

    // For clients.
    const Options& options() const { return common_.options; }
    const tls::Contexts& contexts() const { return common_.contexts; }
    Loop& loop() { return loop_; }
    Pool& pool() { return pool_; }
    Usual& usual() { return common_.usual; }
    Budget& bodies() { return common_.bodies; }
    const Hosts& hosts() const { return common_.hosts; }
    double now() const { return now_; }
    // False: see `Outbox::post`.
    bool post(ExchangeId id, decltype(Event::what) what) {
        // Where Python decides, requests may be waiting for another one to end.
        const bool is_awaited = decider_.load(std::memory_order_relaxed) == nullptr;
        return common_.outbox.post({id, std::move(what)}, is_awaited);
    }
    void lose(ExchangeId id) { common_.outbox.lose(id); }
    // Requests that are shown while they run: no more than the log of requests has room for.
    bool may_show() const { return shown_ < kMostShown; }
    void count_unread(bool is_one_more) { is_one_more ? ++unread_ : --unread_; }
    void count_shown(bool is_one_more) { is_one_more ? ++shown_ : --shown_; }
    bool sums_up() { return common_.outbox.sums_up(); }
    bool sum(const Sums::Finished& finished) { return common_.outbox.sum(finished); }
    ExchangeId next_exchange(u32 place);
    void closed(u32 place);
    // Null: Python decides everything.
    Decider* decider() const {
        return common_.outbox.is_long() ? nullptr : decider_.load(std::memory_order_acquire);
    }
    void decide_by(Decider* decider) { decider_.store(decider, std::memory_order_release); }
    std::string& buffer() { return buffer_; }
    std::string& scratch() { return scratch_; }

private:
    class Listener final : public Watched {
    public:
        explicit Listener(Thread& thread) : thread_(thread) {}
        void on_ready(u32) override { thread_.accept(); }

    private:
        Thread& thread_;
    };
    class Mailbox final : public Watched {
    public:
        explicit Mailbox(Thread& thread) : thread_(thread) {}
        void on_ready(u32) override { thread_.read_mail(); }

    private:
        Thread& thread_;
    };
    static constexpr u32 kMostShown = 256;

    // A client's connection, from its acceptance to the thread that serves it.
    struct Accepted {
        int descriptor = -1;
        sockaddr_storage from{};
        bool is_of_reserve = false;
    };
    struct Mail {
        std::vector<Accepted> accepted;
        std::vector<Command> commands;
        std::vector<GiveUp> give_ups;
        bool cuts_all = false, stops = false;
    };

    void run();
    void accept();
    void cannot_accept(int error);
    Thread& idlest();
    bool hand_over(const Accepted& accepted);
    void welcome(const Accepted& accepted);
    void take_client(const Accepted& accepted);
    void read_mail();
    void end_without_memory();
    Client* client_of(ExchangeId id) const;
    void obey(Command& command, Client* client);
    void look_after();
    bool make_room();
    bool close_first(std::vector<Client*>& clients, std::size_t spared, double (Client::*since)() const);
    void wake();
    u32 free_place();

    u32 number_;
    Common& common_;
    Loop loop_;
    Pool pool_;
    Listener listener_{*this};
    Mailbox mailbox_{*this};
    int listening_ = -1;
    int signal_ = -1;
    double now_ = 0, looked_at_ = 0;
    double accepts_again_at_ = 0;  // 0: it listens
    u32 exchanges_ = 0;
    std::vector<std::unique_ptr<Client>> clients_;  // by place; null: free
    std::vector<u32> free_places_;
    Burial<Client> buried_;
    std::atomic<u64> open_clients_{0};
    std::atomic<u64> unread_{0};
    u32 shown_ = 0;  // of their requests, while they run
    std::string buffer_ = std::string(64 * 1024, '\0');
    std::string scratch_;
    bool is_stopping_ = false;
    std::atomic<Decider*> decider_{nullptr};

    mutable std::mutex mutex_;  // guards the next four
    Mail mail_;
    bool takes_others_ = true;  // the connections that other threads accept
    Numbers without_memory_;
    PoolCounts counts_;
    std::thread thread_;
};

}  // namespace kvroute::plane
