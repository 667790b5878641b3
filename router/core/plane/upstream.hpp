// Connections to replicas: each carries one exchange at a time, and is kept for the next one.
#pragma once

#include <memory>
#include <new>
#include <string>
#include <unordered_map>
#include <vector>

#include "http/body.hpp"
#include "http/head.hpp"
#include "plane/channel.hpp"
#include "plane/loop.hpp"
#include "plane/types.hpp"

namespace kvroute::plane {

class Pool;

struct PoolCounts {
    u64 connections = 0, idle = 0, active = 0;
    u64 opened = 0, reused = 0, kept_closed = 0, connect_failures = 0, timeouts = 0, broken = 0;
    u64 closed_early = 0, given_up = 0, aborted = 0;
};

// Receives a response. Every call may end the exchange.
class Recipient {
public:
    virtual ~Recipient() = default;
    // The status, the fields and the first byte of the body, or its end, are here: `piece`.
    virtual void on_response(const http::ResponseHead& head, std::string_view piece,
                             bool is_last) = 0;
    virtual void on_piece(std::string_view piece, bool is_last) = 0;
    // `was_begun`: `on_response` was called.
    virtual void on_failure(Failure failure, bool was_begun, std::string_view why) = 0;
    // There was no memory for the response, or for what had to be done with it.
    virtual void on_no_memory() = 0;
};

class Upstream final : public Watched {
public:
    // `is_control`: to the application behind; it is not kept.
    Upstream(Pool& pool, PoolCounts& counts, std::string origin, bool is_control)
        : pool_(pool), counts_(counts), origin_(std::move(origin)), is_control_(is_control) {}

    const std::string& origin() const { return origin_; }
    bool is_idle() const { return recipient_ == nullptr; }

    // Sends a request; `head` and `body` stay where they are until the response has begun.
    void begin(Recipient& recipient, std::string_view head, std::string_view body,
               const Timeouts& timeouts, double now);
    // Reads nothing until `resume`: the client is slow.
    void pause();
    void resume(double now);
    // Gives the rest of the response to another recipient.
    void pass_to(Recipient& recipient) { recipient_ = &recipient; }
    // The recipient wants no more; the connection is closed.
    void abandon();
    void on_ready(u32 events) override;
    void on_no_memory() override;
    // Fails if its deadline has passed; true if it did.
    bool look_at(double now);
    // See `Pool::give_up`.
    void give_up(double now, double silent_s);

    std::unique_ptr<Upstream> buried_before;

private:
    friend class Pool;
    enum class Phase : u8 { queued, connecting, securing, sending, awaiting_head, in_body, idle };

    bool is_connecting() const { return phase_ <= Phase::securing; }
    bool connect(double now, Failure& failure, std::string& why);
    void not_connected(Failure failure, std::string why);
    void on_connected();
    void begin_sending();
    void send_early();

    void write();
    void send_rest();
    void note_sent(std::size_t sent);
    void read();
    void take(std::string_view bytes);
    void on_end_of_input(Channel::State state);
    bool take_head(std::string_view& bytes);
    void take_body(std::string_view bytes);
    void fail(Failure failure, std::string_view why);
    void end(bool may_keep);
    u32 interest() const;
    // Ends the exchange where there is no memory for it.
    template <typename Call>
    void guarded(Call call) {
        try {
            call();
        } catch (const std::bad_alloc&) {
            on_no_memory();
        }
    }

    Pool& pool_;
    PoolCounts& counts_;
    std::string origin_;
    bool is_control_;
    Recipient* recipient_ = nullptr;
    Channel channel_;
    std::string secure_host_;
    std::vector<Address> addresses_;  // not tried yet
    double connect_until_ = 0;        // to any of them
    bool lacked_port_ = false;        // for one of the addresses
    int connect_error_ = 0;           // of the current address, if `send` has returned it
    Phase phase_ = Phase::idle;
    bool was_kept_ = false;    // it had an exchange before this one
    bool has_received_ = false;
    bool was_begun_ = false;
    bool is_paused_ = false;
    bool is_shut_ = false;     // nothing more comes
    std::string_view head_to_send_, body_to_send_;
    std::string received_;     // of a head that is not whole
    std::size_t parsed_ = 0;   // of it, when it was looked at last
    std::size_t interim_bytes_ = 0;  // of responses before the one that counts
    http::ResponseHead head_;
    std::string head_text_;    // what `head_` points into
    http::BodyReader body_;
    Timeouts timeouts_;
    double deadline_ = 0;
    double received_at_ = 0;
    double idle_since_ = 0;
};

// All connections of one thread.
class Pool {
public:
    Pool(Loop& loop, const Options& options, const tls::Contexts& contexts)
        : loop_(loop), options_(options), contexts_(contexts) {}

    // Null: it has failed, and `on_failure` was called.
    Upstream* start(Recipient& recipient, const Forward& forward, std::string_view head,
                    std::string_view body, double now);
    void look_after(double now);
    // Ends the exchanges with a server that is known not to respond: all that wait for their first
    // byte, and those that have been silent in mid-body for `silent_s`.
    void give_up(const std::string& origin, double now, double silent_s);
    void close();
    // Frees connections that were closed in this round.
    void bury() { buried_.clear(); }
    bool is_empty() const { return all_.empty(); }
    const PoolCounts& counts() const { return counts_; }

    Loop& loop() { return loop_; }
    std::string& buffer() { return buffer_; }

private:
    friend class Upstream;
    Upstream* take_idle(const std::string& origin);
    Upstream* connect(const Forward& forward, double now, Failure& failure, std::string& why);
    bool make_room();
    void keep(Upstream& upstream, double now);
    void remove(Upstream& upstream);

    Loop& loop_;
    const Options& options_;
    const tls::Contexts& contexts_;
    std::unordered_map<Upstream*, std::unique_ptr<Upstream>> all_;
    std::unordered_map<std::string, std::vector<Upstream*>> idle_;
    Burial<Upstream> buried_;
    std::string buffer_ = std::string(256 * 1024, '\0');  // what is read at a time
    std::string joined_;                                  // the pieces of one read
    PoolCounts& counts_of(bool is_control) { return is_control ? control_counts_ : counts_; }

    PoolCounts counts_, control_counts_;  // the second: of connections to the application behind
};

}  // namespace kvroute::plane
