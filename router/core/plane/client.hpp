// One client's connection, and the exchange that is under way on it.
//
//     stage      what it waits for                                  then
//     idle       the head of a request                              deciding
//     deciding   a command; more of the body, where it is wanted    trying, answered
//     trying     the first byte of a replica's response             relaying; not_now; deciding again
//     not_now    a command, holding a 429, 502, 503 or 504          relaying, trying, answered
//     relaying   the rest of it, and that the client reads          answered
//     answered   that the response has been sent                    idle, or closed; first draining
//     draining   the rest of a body that is discarded               idle
//     refused    that the client reads the error and leaves         closed
#pragma once

#include <string>

#include "http/body.hpp"
#include "http/head.hpp"
#include "plane/budget.hpp"
#include "plane/channel.hpp"
#include "plane/decider.hpp"
#include "plane/loop.hpp"
#include "plane/report.hpp"
#include "plane/stream.hpp"
#include "plane/upstream.hpp"
#include "plane/usual.hpp"

namespace kvroute::plane {

class Thread;

class Client final : public Watched, public Recipient {
public:
    Client(Thread& thread, u32 place) : thread_(thread), place_(place) {}

    void open(int descriptor, std::string host, int port, bool is_of_reserve, double now);
    void on_ready(u32 events) override;
    void on_no_memory() override;
    // Closes it where a time limit has passed.
    void look_after(double now);
    void close();
    // The thread ends: closes it where the client gets all of its response, and else cuts it.
    void stop();

    ExchangeId exchange() const { return exchange_; }
    bool has_asked() const { return has_asked_; }
    // Monotonic: when the current request began to come, or the connection where none has.
    double receiving_since() const { return receiving_since_; }
    double idle_since() const { return idle_since_; }
    // It has been served, and nothing of a next request has come.
    bool is_kept() const { return stage_ == Stage::idle && has_asked_ && in_.empty() && !is_unsent(); }
    bool is_serving() const {
        return stage_ != Stage::idle && stage_ != Stage::draining && stage_ != Stage::refused;
    }

    // Commands. Each is ignored where the stage does not wait for it.
    void forward(Forward forward);
    void place(Ask ask);
    void open_to_others();
    void respond(const Respond& respond);
    void read_body();
    void pass_on();
    // Ends the exchange as `end`, and resets the connection.
    void cut(End end);

    void on_response(const http::ResponseHead& head, std::string_view piece, bool is_last) override;
    void on_piece(std::string_view piece, bool is_last) override;
    void on_failure(Failure failure, bool was_begun, std::string_view why) override;

    std::unique_ptr<Client> buried_before;

private:
    enum class Stage : u8 {
        idle,
        deciding,
        trying,
        not_now,
        relaying,
        answered,
        draining,
        refused,
    };

    enum class Shown : u8 { not_yet, waiting, responding };

    // A second attempt of a request that was decided here, beside one that is late.
    class Second final : public Recipient {
    public:
        Second(Client& client, Placed placed) : client(client), placed(std::move(placed)) {}
        Second(const Second&) = delete;
        Second& operator=(const Second&) = delete;
        ~Second() override {
            if (upstream != nullptr) upstream->abandon();
        }
        // Each call ends the attempt.
        void on_response(const http::ResponseHead& head, std::string_view piece,
                         bool is_last) override {
            client.on_second(head, piece, is_last);
        }
        void on_piece(std::string_view, bool) override {}
        void on_failure(Failure failure, bool, std::string_view) override {
            upstream = nullptr;
            failed = failure;
            if (!is_starting) client.on_second_failed({{}, failed, 0, std::nullopt});
        }
        void on_no_memory() override { on_failure(Failure::malformed, false, {}); }

        Client& client;
        Placed placed;
        std::string request;
        Upstream* upstream = nullptr;
        double started_at = 0;
        bool is_starting = true;
        std::optional<Failure> failed;
    };

    // Reading
    void read();
    void proceed();
    bool take_head();
    void open_exchange(std::size_t used);
    void post_opened();
    Fields fields() const;
    void take_body();
    void make_room_for(std::size_t size);
    void drain_body();
    // Without Python
    bool may_decide();
    bool has_room();
    bool decide();
    Asks asked();
    bool is_told(bool is_plain);
    bool is_told(Decider& decider, const Ask& ask, std::shared_ptr<const Model> model);
    bool is_looked_up(Decider& decider, const Question& question);
    bool is_selected(Decider& decider, const Question& question);
    bool is_reserved(Decider& decider, const Question& question);
    bool is_noted();
    enum class Care : u8 { none, prepared, opened };  // who reads it, by its fields
    Care care() const;
    bool is_placed(Ask ask, std::shared_ptr<const Model> model = nullptr);
    Question question(const Ask& ask, std::string_view request_id) const;
    std::string forwarded_for() const;
    std::string_view forwarded_proto() const;
    void prepare(bool by_fields);
    void hand_over(HandedOver why);
    void post_body();
    void on_end_of_input();
    void on_end_ahead();
    void begin_probes();
    void leave_if_unfinished();
    void probe();
    void refuse_handshake();
    void refuse(const http::Problem& problem);
    // To a replica, and to a second one.
    void stop_sending();
    void turn_away(std::string_view response);
    void discard_input();
    void end_output();
    static bool is_not_now(int status) {
        return status == 429 || status == 502 || status == 503 || status == 504;
    }
    // Sending it on
    void compose_request(const Forward& forward, std::string& head) const;
    bool is_kept_back(const Forward& forward, std::string_view name,
                      std::string_view connection) const;
    // A second attempt
    void expect_first_byte(Ask ask);
    bool complete(Placed& placed, const Ask& ask) const;
    void on_late();
    void try_second(const Ask& ask);
    void on_second(const http::ResponseHead& head, std::string_view piece, bool is_last);
    void stop_waiting();
    void on_second_failed(HandedOver how);
    void be_overtaken(HandedOver first);
    // The response
    void begin_response(const http::ResponseHead& head, std::string& out);
    void append_framing(std::string& out, bool has_length, u64 length, bool has_close);
    void relay(std::string_view piece, bool is_last, std::string& out);
    void append_body(std::string_view piece, bool is_last, std::string& out);
    void break_off(Failure failure);
    void hold_if_slow();
    void report(End end);
    Settled record_of(const Prediction& prediction, const Asked& asked) const;
    Settled so_far() const;
    void show_running(double now);
    void show(Shown shown);
    bool is_summed(const Ended& ended, bool was_alone);
    bool is_summed(const Reserved& reserved, const ReportBody& last, bool was_alone, double now);
    void settle(Ended ended);
    void finish(End end);
    void end_exchange();
    // Writing
    void send(std::string_view bytes);
    void flush();
    void update_interest();
    void count_unread();
    void leave();
    void drop();
    bool is_unsent() const { return out_.size() > sent_ || channel_.has_unsent(); }

    Thread& thread_;
    u32 place_;
    Channel channel_;
    std::string host_;
    int port_ = 0;
    bool is_of_reserve_ = false;
    bool is_trusted_ = false;     // it is a proxy whose x-forwarded fields count
    bool has_asked_ = false;      // a head came whole
    bool has_left_half_ = false;  // it sends no more, and may still read
    bool has_end_ahead_ = false;  // so it will, behind what is not read yet
    bool has_ended_output_ = false;  // as far as TLS goes
    u8 probes_ = 0;
    double probe_at_ = 0;

    std::string in_;  // received and not taken
    std::size_t parsed_ = 0;  // its size when the head was last parsed
    std::string out_;
    std::size_t sent_ = 0;  // of `out_`
    bool is_unread_ = false;  // the thread counts it: the response is whole, and not all of it was sent
    double receiving_since_ = 0, idle_since_ = 0, stalled_since_ = 0;
    double refused_at_ = 0, received_at_ = 0;  // input is discarded since; its last bytes

    // The exchange
    Stage stage_ = Stage::idle;
    ExchangeId exchange_ = 0;
    std::string head_text_;  // what `head_` points into
    http::RequestHead head_;
    http::BodyReader body_reader_;
    std::string body_;       // as far as it has come
    std::size_t posted_ = 0;   // bytes of it
    bool is_body_whole_ = false, is_piece_wanted_ = false, is_head_request_ = false;
    bool is_opened_ = false;   // `Opened` was posted
    bool was_prepared_ = false;  // by Python, to which its end is posted
    bool keeps_alive_ = true;
    bool was_forwarded_ = false;
    double started_at_ = 0;
    Forward forward_;
    std::string request_;    // the head as it is sent on
    Upstream* upstream_ = nullptr;
    // Where it is decided without Python
    bool is_awaited_ = false;  // its body, before any event is posted
    bool is_proceeding_ = false;  // `proceed` is running
    Asks asks_ = Asks::to_be_sent;
    Report report_;            // where it is a gateway's report
    u8 path_ = 0;              // index into `Options::prepared`
    Budget::Share share_;      // for the body that is awaited
    std::unique_ptr<Booking> booking_;
    Asked asked_;
    Prediction prediction_;
    std::string request_id_;
    double routing_s_ = 0, first_byte_s_ = 0;
    std::shared_ptr<UsualAt> usual_;  // of the replica whose first byte it waits for
    double attempted_at_ = 0, late_at_ = 0;  // 0: never
    Late late_;
    std::optional<Ask> ask_;  // for a second attempt
    std::unique_ptr<Second> second_;
    std::unique_ptr<HandedOver> beside_;  // how one of the two attempts failed
    Shown shown_ = Shown::not_yet;  // while it runs
    // Its response
    int status_ = 0;
    bool has_begun_ = false;  // something of it was written
    http::Framing framing_ = http::Framing::none;
    u64 left_ = 0;            // of a known length
    u64 body_bytes_ = 0;
    u64 events_ = 0;          // of a stream, that `booking_` has
    bool is_held_ = false;    // the replica is not read: the client is slow
    bool is_event_stream_ = false;
    EventLines lines_;
    UsageCapture usage_;
    std::optional<Failure> broke_;
    std::size_t posted_beginning_ = 0;
    double progress_at_ = 0;
    // A 429, 502, 503 or 504 that waits for a command.
    http::ResponseHead held_head_;
    std::string held_text_, held_piece_;
    bool is_held_last_ = false;
};

}  // namespace kvroute::plane
