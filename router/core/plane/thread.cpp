#include "plane/thread.hpp"

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>

#include "plane/errors.hpp"

namespace kvroute::plane {
namespace {

constexpr int kAcceptsAtOnce = 64;
constexpr double kLookEvery_s = 0.05;
constexpr double kNoAccept_s = 0.05;  // where there is no descriptor, or no memory, for a connection
constexpr std::size_t kMostRecords = 512;  // before the reader is woken
constexpr std::size_t kNewest = 8;     // connections whose request may be on its way: not closed
constexpr std::size_t kMadeRoom = 64;  // connections that are closed at once where descriptors are short

void signal(int descriptor) {
    const u64 one = 1;
    [[maybe_unused]] const ssize_t written = ::write(descriptor, &one, sizeof one);
}

void take_signal(int descriptor) {
    u64 count = 0;
    [[maybe_unused]] const ssize_t read = ::read(descriptor, &count, sizeof count);
}

std::pair<std::string, int> shown(const sockaddr_storage& from) {
    char text[INET6_ADDRSTRLEN] = "";
    if (from.ss_family == AF_INET) {
        const auto& four = reinterpret_cast<const sockaddr_in&>(from);
        inet_ntop(AF_INET, &four.sin_addr, text, sizeof text);
        return {text, ntohs(four.sin_port)};
    }
    if (from.ss_family == AF_INET6) {
        const auto& six = reinterpret_cast<const sockaddr_in6&>(from);
        inet_ntop(AF_INET6, &six.sin6_addr, text, sizeof text);
        return {text, ntohs(six.sin6_port)};
    }
    return {"", 0};
}

// glibc extends the memory of a thread by a page at a time, each with a system call; what has been there
// once it takes again without.
void extend_memory() {
    constexpr std::size_t kBlock = 64 * 1024, kBlocks = 256;
    std::array<std::unique_ptr<char[]>, kBlocks> blocks;
    for (auto& block : blocks) block.reset(new (std::nothrow) char[kBlock]);
}

// Ends one client's request, and nothing else, where there is no memory for it.
template <typename Call>
void guarded(Client* client, Call call) {
    try {
        call();
    } catch (const std::bad_alloc&) {
        try {
            if (client != nullptr && client->is_open()) client->on_no_memory();
        } catch (const std::bad_alloc&) {  // not even for that: one of its time limits ends it
        }
    }
}

}  // namespace

// --- events ---------------------------------------------------------------------------------------

Outbox::Outbox() : signal_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}
Outbox::~Outbox() { ::close(signal_); }

bool Outbox::post(Event event, bool is_awaited) {
    const bool can_wait = std::holds_alternative<Settled>(event.what) ||
                          std::holds_alternative<LookedUp>(event.what) ||
                          std::holds_alternative<Reserved>(event.what) ||
                          std::holds_alternative<Reported>(event.what);
    is_awaited |= !can_wait;
    {
        std::lock_guard locked(mutex_);
        const bool is_settled = std::holds_alternative<Settled>(event.what) ||
                                std::holds_alternative<Reserved>(event.what);
        const ExchangeId id = event.id;
        try {
            events_.push_back(std::move(event));
        } catch (const std::bad_alloc&) {
            lost_.add(id);
            signal(signal_);
            return false;
        }
        settled_ += is_settled;
        waiting_.store(events_.size(), std::memory_order_relaxed);
        if (is_signalled_ || (!is_awaited && events_.size() < kMostRecords)) return true;
        is_signalled_ = true;
    }
    signal(signal_);
    return true;
}

void Outbox::lose(ExchangeId id) {
    {
        std::lock_guard locked(mutex_);
        lost_.add(id);
    }
    signal(signal_);
}

std::optional<ExchangeId> Outbox::take_lost() {
    std::lock_guard locked(mutex_);
    return lost_.take();
}

void Outbox::sum_up(std::unique_ptr<Sums> sums) {
    std::lock_guard locked(mutex_);
    sums_ = std::move(sums);
}

bool Outbox::sums_up() {
    std::lock_guard locked(mutex_);
    return sums_ != nullptr;
}

bool Outbox::sum(const Sums::Finished& finished) {
    std::lock_guard locked(mutex_);
    if (sums_ == nullptr || settled_ < kPostedOneByOne) return false;
    sums_->add(finished);
    return true;
}

Sums::Found Outbox::take_sums() {
    std::lock_guard locked(mutex_);
    return sums_ == nullptr ? Sums::Found() : sums_->take();
}

void Outbox::nudge() {
    {
        std::lock_guard locked(mutex_);
        if (events_.empty() || is_signalled_) return;
        is_signalled_ = true;
    }
    signal(signal_);
}

std::vector<Event> Outbox::take() {
    take_signal(signal_);
    std::lock_guard locked(mutex_);
    if (!kept_.empty()) {
        if (!events_.empty()) ring();
        return std::exchange(kept_, {});
    }
    is_signalled_ = false;
    settled_ = 0;
    waiting_.store(0, std::memory_order_relaxed);
    return std::exchange(events_, {});
}

void Outbox::keep(std::vector<Event> events) {
    {
        std::lock_guard locked(mutex_);
        kept_ = std::move(events);
    }
    ring();
}

void Outbox::ring() { signal(signal_); }

// --- the thread -----------------------------------------------------------------------------------

Thread::Thread(u32 number, Common& common, int listener)
    : number_(number), common_(common), pool_(loop_, common.options, common.contexts),
      listening_(listener), signal_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    const int one = 1;  // for those that it accepts, which inherit it
    setsockopt(listening_, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    loop_.add(listener_, listening_, EPOLLIN | EPOLLEXCLUSIVE);
    loop_.add(mailbox_, signal_, EPOLLIN);
}

Thread::~Thread() {
    stop();
    loop_.close(listener_);  // of a thread that was never started
    loop_.close(mailbox_);
}

void Thread::start() {
    thread_ = std::thread([this] {
        // Signals are for the main thread.
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_BLOCK, &all, nullptr);
        run();
    });
}

void Thread::run() {
    extend_memory();
    now_ = looked_at_ = clock_now();
    while (!is_stopping_) {
        const bool is_idle = open_clients_ == 0 && pool_.is_empty() && accepts_again_at_ == 0;
        loop_.wait(is_idle ? 1000 : static_cast<int>(kLookEvery_s * 1000));
        now_ = clock_now();
        loop_.serve();
        now_ = clock_now();
        if (now_ - looked_at_ >= kLookEvery_s) look_after();
        buried_.clear();
        pool_.bury();
    }
    loop_.close(listener_);
    for (auto& client : clients_) {
        if (client) guarded(client.get(), [&] { client->stop(); });
    }
    pool_.close();
    pool_.bury();
    buried_.clear();
}

void Thread::look_after() {
    looked_at_ = now_;
    if (accepts_again_at_ > 0 && now_ >= accepts_again_at_) {
        accepts_again_at_ = 0;
        loop_.add(listener_, listening_, EPOLLIN | EPOLLEXCLUSIVE);
    }
    common_.outbox.nudge();
    guarded(nullptr, [&] { pool_.look_after(now_); });  // what is left waits for the next look
    for (std::size_t place = 0; place < clients_.size(); ++place) {
        Client* const client = clients_[place].get();
        if (client != nullptr) guarded(client, [&] { client->look_after(now_); });
    }
    std::lock_guard locked(mutex_);
    counts_ = pool_.counts();
}

void Thread::accept() {
    now_ = clock_now();
    for (int i = 0; i < kAcceptsAtOnce; ++i) {
        sockaddr_storage from{};
        socklen_t length = sizeof from;
        const int descriptor = ::accept4(listening_, reinterpret_cast<sockaddr*>(&from), &length,
                                         SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (descriptor < 0) {
            cannot_accept(errno);
            return;
        }
        const Accepted accepted{descriptor, from, descriptor >= options().reserved_from};
        if (accepted.is_of_reserve) {
            post(0, Refused{"reserve"});
            make_room();
        }
        Thread& taker = accepted.is_of_reserve ? *this : idlest();
        if (&taker != this && taker.hand_over(accepted)) continue;
        ++open_clients_;
        welcome(accepted);
    }
}

// The connection stays in the queue, and would be reported at once again.
void Thread::cannot_accept(int error) {
    if (!is_shortage(error)) return;
    const bool has_no_files = error == EMFILE || error == ENFILE;
    if (has_no_files && make_room()) return;
    loop_.remove(listener_);
    accepts_again_at_ = now_ + kNoAccept_s;
}

// Who has the fewest clients, this one if it has no more than another. The kernel wakes one thread for a
// burst of connections, which accepts them all: few that are kept open would keep one core busy.
Thread& Thread::idlest() {
    Thread* found = this;
    for (Thread* const each : common_.threads) {
        if (each->clients() < found->clients()) found = each;
    }
    return *found;
}

// From another thread. False: the one that accepted it serves it.
bool Thread::hand_over(const Accepted& accepted) {
    {
        std::lock_guard locked(mutex_);
        if (!takes_others_) return false;
        try {
            mail_.accepted.push_back(accepted);
        } catch (const std::bad_alloc&) {
            return false;
        }
        ++open_clients_;  // before the next one is accepted
    }
    wake();
    return true;
}

// Serves one that counts as a client already.
void Thread::welcome(const Accepted& accepted) {
    try {
        take_client(accepted);
    } catch (const std::bad_alloc&) {
        --open_clients_;
        if (!contexts().towards_clients()) send_some(accepted.descriptor, kOutOfMemoryResponse);
        ::close(accepted.descriptor);
        post(0, Refused{"overloaded"});
    }
}

void Thread::take_client(const Accepted& accepted) {
    auto [host, port] = shown(accepted.from);
    const u32 place = free_place();
    auto client = std::make_unique<Client>(*this, place);
    free_places_.pop_back();
    clients_[place] = std::move(client);
    clients_[place]->open(accepted.descriptor, std::move(host), port, accepted.is_of_reserve, now_);
}

// Returns the last of `free_places_`, which has room for all: a client that leaves needs no memory.
u32 Thread::free_place() {
    if (free_places_.empty()) {
        const std::size_t count = clients_.size() + 1;
        if (free_places_.capacity() < count) free_places_.reserve(2 * count);
        clients_.emplace_back();
        free_places_.push_back(static_cast<u32>(count - 1));
    }
    return free_places_.back();
}

// Closes connections that have brought no request, the oldest first: no client can keep probes out by
// connections without requests. The newest may be probes. Where there are none, closes those that are
// kept for a next request. False: nothing was closed.
bool Thread::make_room() {
    std::vector<Client*> silent, kept;
    for (auto& client : clients_) {
        if (!client || !client->is_open()) continue;
        if (!client->has_asked()) silent.push_back(client.get());
        if (client->is_kept()) kept.push_back(client.get());
    }
    return close_first(silent, kNewest, &Client::receiving_since) ||
           close_first(kept, 0, &Client::idle_since);
}

// Closes some of those that have waited longest. False: none.
bool Thread::close_first(std::vector<Client*>& clients, std::size_t spared,
                         double (Client::*since)() const) {
    const std::size_t closed =
        std::min(clients.size() - std::min(clients.size(), spared), kMadeRoom);
    std::partial_sort(clients.begin(), clients.begin() + static_cast<std::ptrdiff_t>(closed),
                      clients.end(), [&](const Client* one, const Client* other) {
                          return (one->*since)() < (other->*since)();
                      });
    for (std::size_t at = 0; at < closed; ++at) clients[at]->close();
    return closed > 0;
}

void Thread::closed(u32 place) {
    buried_.add(std::move(clients_[place]));
    free_places_.push_back(place);
    --open_clients_;
}

ExchangeId Thread::next_exchange(u32 place) {
    ++exchanges_;
    return u64{number_} << 56 | u64{place & 0xFFFFFF} << 32 | exchanges_;
}

// --- mail -----------------------------------------------------------------------------------------

void Thread::wake() { signal(signal_); }

void Thread::wake_for_mail() {
    {
        std::lock_guard locked(mutex_);
        if (mail_.commands.empty()) return;
    }
    wake();
}

void Thread::send(Command command, bool wakes) {
    bool was_empty;
    {
        std::lock_guard locked(mutex_);
        was_empty = mail_.commands.empty();
        mail_.commands.push_back(std::move(command));
    }
    if (wakes && was_empty) wake();
}

void Thread::end_for_memory(ExchangeId id) {
    {
        std::lock_guard locked(mutex_);
        without_memory_.add(id);
    }
    wake();
}

void Thread::give_up(GiveUp what) {
    {
        std::lock_guard locked(mutex_);
        mail_.give_ups.push_back(std::move(what));
    }
    wake();
}

void Thread::cut_all() {
    {
        std::lock_guard locked(mutex_);
        mail_.cuts_all = true;
    }
    wake();
}

void Thread::stop() {
    {
        std::lock_guard locked(mutex_);
        mail_.stops = true;
        takes_others_ = false;
    }
    wake();
    if (thread_.joinable()) thread_.join();
}

PoolCounts Thread::counts() const {
    std::lock_guard locked(mutex_);
    return counts_;
}

void Thread::read_mail() {
    take_signal(signal_);
    now_ = clock_now();
    Mail mail;
    {
        std::lock_guard locked(mutex_);
        mail = std::exchange(mail_, {});
    }
    is_stopping_ |= mail.stops;
    for (const Accepted& each : mail.accepted) welcome(each);
    end_without_memory();
    for (Command& command : mail.commands) {
        Client* const client = client_of(command.id);
        guarded(client, [&] { obey(command, client); });
    }
    for (const GiveUp& each : mail.give_ups) {
        guarded(nullptr, [&] { pool_.give_up(each.origin, now_, each.silent_s); });
    }
    for (std::size_t place = 0; place < clients_.size(); ++place) {
        Client* client = clients_[place].get();
        if (client == nullptr || !client->is_open()) continue;
        if (!mail.cuts_all || !client->is_serving()) continue;
        guarded(client, [&] { client->cut(End::abandoned); });
    }
}

void Thread::end_without_memory() {
    for (;;) {
        std::optional<ExchangeId> id;
        {
            std::lock_guard locked(mutex_);
            id = without_memory_.take();
        }
        if (!id) return;
        Client* const client = client_of(*id);
        if (client != nullptr) guarded(client, [&] { client->on_no_memory(); });
    }
}

// Null: it has left.
Client* Thread::client_of(ExchangeId id) const {
    const u32 place = id >> 32 & 0xFFFFFF;
    Client* const client = place < clients_.size() ? clients_[place].get() : nullptr;
    return client != nullptr && client->exchange() == id ? client : nullptr;
}

void Thread::obey(Command& command, Client* client) {
    if (client == nullptr) {
        // The client left before the command came; after these commands Python waits for an event.
        if (std::holds_alternative<Forward>(command.order)) {
            Ended ended;
            ended.end = End::client_left;
            post(command.id, std::move(ended));
        } else if (std::holds_alternative<Ask>(command.order) ||
                   std::holds_alternative<Open>(command.order)) {
            post(command.id, Left{});
        }
        return;
    }
    if (auto* forward = std::get_if<Forward>(&command.order)) {
        client->forward(std::move(*forward));
    } else if (auto* respond = std::get_if<Respond>(&command.order)) {
        client->respond(*respond);
    } else if (std::holds_alternative<ReadBody>(command.order)) {
        client->read_body();
    } else if (std::holds_alternative<PassOn>(command.order)) {
        client->pass_on();
    } else if (auto* ask = std::get_if<Ask>(&command.order)) {
        client->place(std::move(*ask));
    } else if (std::holds_alternative<Open>(command.order)) {
        client->open_to_others();
    } else {
        client->cut(End::abandoned);
    }
}

}  // namespace kvroute::plane
