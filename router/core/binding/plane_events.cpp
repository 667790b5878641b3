// Binds the data plane's events, as tuples, and the bookings that Python goes on with.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "binding/plane.hpp"
#include "binding/sums.hpp"
#include "plane/errors.hpp"
#include "plane/loop.hpp"

namespace nb = nanobind;
using namespace kvroute::plane;
using kvroute::binding::bytes_of;

namespace {

nb::list list_of(const Fields& fields) {
    nb::list made;
    for (const auto& [name, value] : fields) {
        made.append(nb::make_tuple(bytes_of(name), bytes_of(value)));
    }
    return made;
}

nb::str latin(const std::string& text) {
    return nb::steal<nb::str>(
        PyUnicode_DecodeLatin1(text.data(), static_cast<Py_ssize_t>(text.size()), nullptr));
}

constexpr const char* kEnds[] = {"completed", "client_left", "client_stalled", "replica_died",
                                 "abandoned"};
constexpr const char* kFailures[] = {
    "connect", "connect_timeout", "closed",   "kept_closed", "first_byte_timeout", "malformed",
    "given_up", "no_files",       "no_ports", "at_limit",    "died",               "idle_timeout",
    "lost",     "late"};

nb::object name_of(const std::optional<Failure>& failure) {
    if (!failure) return nb::none();
    return nb::str(kFailures[static_cast<int>(*failure)]);
}

nb::tuple asked_of(const Asked& asked) {
    return nb::make_tuple(static_cast<int>(asked.path), asked.is_stream, asked.is_comparable,
                          asked.has_salt, asked.has_adapter,
                          asked.tokenization_s ? nb::cast(*asked.tokenization_s) : nb::none());
}

// The last reference may end a booking, which takes mutexes: the interpreter lock is let go meanwhile.
template <typename Held>
void let_go_of(std::shared_ptr<Held>& held) {
    if (held == nullptr) return;
    nb::gil_scoped_release released;
    held.reset();
}

// A booking of the core's. Its steps take mutexes, and let the interpreter lock go.
struct BookingHandle {
    std::shared_ptr<Booking> booking;

    explicit BookingHandle(std::shared_ptr<Booking> held) : booking(std::move(held)) {}
    BookingHandle(BookingHandle&&) = default;
    BookingHandle& operator=(BookingHandle&&) = default;
    ~BookingHandle() { let_go_of(booking); }

    void first_byte(bool is_timed) {
        nb::gil_scoped_release released;
        booking->first_byte(is_timed, clock_now());
    }
    void generated(u64 events) {
        nb::gil_scoped_release released;
        booking->generated(events, clock_now());
    }
    bool ended(bool was_served) {
        nb::gil_scoped_release released;
        return booking->ended(was_served, clock_now());
    }
    void reported(std::optional<std::int64_t> cached_tokens) {
        nb::gil_scoped_release released;
        booking->reported(cached_tokens, clock_now());
    }
};

nb::object handle_of(const std::shared_ptr<Booking>& booking) {
    if (booking == nullptr) return nb::none();
    return nb::cast(BookingHandle{booking});
}

// One of the reservations that there may be.
struct PlaceHandle {
    std::shared_ptr<Reservations::Place> place;

    explicit PlaceHandle(std::shared_ptr<Reservations::Place> held) : place(std::move(held)) {}
    PlaceHandle(PlaceHandle&&) = default;
    PlaceHandle& operator=(PlaceHandle&&) = default;
    ~PlaceHandle() { let_go_of(place); }
};

// Counts a body for as long as nobody else does, and keeps the plane that counts it.
struct ShareHandle {
    nb::object plane;
    Budget::Share share;

    void give_back() { Budget::Share(std::move(share)); }
};

nb::object handle_of(Plane& plane, Budget::Share& share) {
    if (share.is_empty()) return nb::none();
    return nb::cast(ShareHandle{nb::find(plane), std::move(share)});
}

// The kind of an event, its exchange, and its fields; see router/_core.pyi.
struct AsTuple {
    ExchangeId id;
    Plane* plane = nullptr;  // of an `Opened`

    nb::object operator()(Opened& opened) const {
        return nb::make_tuple("opened", id, latin(opened.method), bytes_of(opened.target),
                              opened.is_of_reserve, list_of(opened.fields), opened.client,
                              opened.client_port, bytes_of(opened.body), opened.is_whole,
                              opened.was_prepared, handle_of(*plane, opened.share));
    }
    nb::object operator()(const Prepare& prepare) const {
        return nb::make_tuple("prepare", id, static_cast<int>(prepare.path), list_of(prepare.fields),
                              bytes_of(prepare.body));
    }
    nb::object operator()(const PrepareQuestion& prepare) const {
        return nb::make_tuple("prepare_question", id, static_cast<int>(prepare.asks),
                              list_of(prepare.fields), bytes_of(prepare.body));
    }
    nb::object operator()(const BodyRead& read) const {
        return nb::make_tuple("body", id, bytes_of(read.piece), read.is_whole);
    }
    nb::object operator()(const Left&) const { return nb::make_tuple("left", id); }
    nb::object operator()(const Failed& failed) const {
        return nb::make_tuple("failed", id, name_of(failed.failure), failed.why);
    }
    nb::object operator()(const NotNow& not_now) const {
        return nb::make_tuple("not_now", id, not_now.status,
                              not_now.retry_after_s ? nb::cast(*not_now.retry_after_s) : nb::none());
    }
    nb::object operator()(const FirstByte& first) const {
        return nb::make_tuple("first_byte", id, first.status);
    }
    nb::object operator()(const Progress& progress) const {
        return nb::make_tuple("progress", id, progress.events);
    }
    nb::object operator()(const Beginning& beginning) const {
        return nb::make_tuple("beginning", id, bytes_of(beginning.bytes));
    }
    nb::object operator()(const Ended& ended) const {
        return nb::make_tuple("ended", id, kEnds[static_cast<int>(ended.end)], ended.status,
                              ended.seconds, ended.body_bytes, name_of(ended.failure), ended.events,
                              ended.is_json, bytes_of(ended.usage), bytes_of(ended.first_usage));
    }
    static nb::object not_served(const HandedOver& by) {
        return nb::make_tuple(by.replica, name_of(by.failure), by.status,
                              by.retry_after_s ? nb::cast(*by.retry_after_s) : nb::none(),
                              by.seconds, by.beside ? not_served(*by.beside) : nb::none());
    }
    nb::object operator()(const HandedOver& over) const {
        return nb::make_tuple("handed_over", id, not_served(over));
    }
    nb::object operator()(const Overtaken& overtaken) const {
        return nb::make_tuple("overtaken", id, not_served(overtaken.first));
    }
    nb::object operator()(const Running& running) const {
        return nb::make_tuple("running", id, record(running.so_far));
    }
    nb::object operator()(const Settled& settled) const {
        return nb::make_tuple("settled", id, record(settled), handle_of(settled.booking));
    }

    static nb::object record(const Settled& settled) {
        const Ended& ended = settled.ended;
        const double trust = settled.estimate_trust;
        return nb::make_tuple(
            settled.model, settled.replica, latin(settled.request_id),
            nb::make_tuple(settled.client, settled.client_port),
            settled.dp_rank < 0 ? nb::none() : nb::cast(settled.dp_rank),
            nb::make_tuple(settled.prompt_tokens, settled.gpu_cached_tokens, settled.cached_tokens,
                           settled.expected_tokens),
            settled.is_suspect, trust != 0 ? nb::cast(trust) : nb::none(), asked_of(settled.asked),
            settled.was_alone, settled.began_at, settled.routing_s, settled.first_byte_s,
            kEnds[static_cast<int>(ended.end)], ended.status, ended.seconds, ended.body_bytes,
            name_of(ended.failure), ended.events, ended.is_json, bytes_of(ended.usage),
            bytes_of(ended.first_usage));
    }
    nb::object operator()(const LookedUp& question) const {
        return nb::make_tuple("looked_up", id, question.model, question.routing_s,
                              question.tokenization_s);
    }
    nb::object operator()(const Reserved& reserved) const {
        nb::list by_tier;
        for (const auto& [tier, tokens] : reserved.by_tier) {
            by_tier.append(nb::make_tuple(tier, tokens));
        }
        return nb::make_tuple("reserved", reserved.number, reserved.id,
                              BookingHandle{reserved.booking}, PlaceHandle{reserved.place},
                              reserved.reason, nb::tuple(by_tier), record(reserved.so_far),
                              reserved.touched_at);
    }
    nb::object operator()(const Reported& reported) const {
        static constexpr const char* kKinds[] = {"first_token", "output", "end"};
        return nb::make_tuple("reported", id, reported.id, kKinds[static_cast<int>(reported.kind)],
                              bytes_of(reported.body), reported.at);
    }
    nb::object operator()(const SecondAttempt& second) const {
        return nb::make_tuple("second_attempt", id, second.outcome);
    }
    nb::object operator()(const LongPromptSent&) const { return nb::make_tuple("long_prompt", id); }
    nb::object operator()(const Refused& refused) const {
        return nb::make_tuple("refused", id, refused.reason);
    }
};

nb::list list_of(const Reservations::Records& reserved) {
    nb::list made;
    for (const auto& each : reserved) made.append(AsTuple{each->number}(*each));
    return made;
}

// There was no memory for an event of these.
void append_lost(Plane& plane, nb::list& found) {
    while (const std::optional<ExchangeId> id = plane.take_lost()) {
        try {
            found.append(nb::make_tuple("lost", *id));
        } catch (const std::exception&) {
            plane.lose(*id);
            throw;
        }
    }
}

}  // namespace

nb::list kvroute::binding::events_of(Plane& plane) {
    nb::list found;  // before anything is taken that would be lost
    std::vector<Event> events;
    {
        nb::gil_scoped_release released;
        events = plane.take();
    }
    std::size_t at = 0;
    try {
        for (; at < events.size(); ++at) {
            try {
                found.append(std::visit(AsTuple{events[at].id, &plane}, events[at].what));
            } catch (const std::exception&) {
                plane.lose(events[at].id);
            }
        }
        append_lost(plane, found);
        kvroute::binding::append_sums(plane.take_sums(), found);
    } catch (const std::exception&) {  // not even for that: events come later, sums are lost
        events.erase(events.begin(), events.begin() + static_cast<std::ptrdiff_t>(at));
        plane.keep(std::move(events));
    }
    return found;
}

void kvroute::binding::bind_bookings(nb::module_& module) {
    nb::class_<BookingHandle>(module, "Booking")
        .def("first_byte", &BookingHandle::first_byte)
        .def("generated", &BookingHandle::generated)
        .def("ended", &BookingHandle::ended)
        .def("reported", &BookingHandle::reported, nb::arg().none());
    nb::class_<PlaceHandle>(module, "Place")
        .def("give_back", [](PlaceHandle& self) { let_go_of(self.place); });
    nb::class_<ShareHandle>(module, "BodyShare").def("give_back", &ShareHandle::give_back);
    nb::class_<Reservations>(module, "Reservations")
        .def(nb::new_([](u64 most) { return std::make_shared<Reservations>(most); }))
        .def("take",
             [](Reservations& self, const std::string& id) -> std::optional<PlaceHandle> {
                 auto place = self.take(id);
                 if (place == nullptr) return std::nullopt;
                 return PlaceHandle{std::move(place)};
             })
        .def("has", &Reservations::has)
        .def("held", &Reservations::held)
        .def("completed", &Reservations::completed)
        .def("hand_over",
             [](Reservations& self, const std::string& id) { return list_of(self.hand_over(id)); })
        .def("hand_over_at",
             [](Reservations& self, const std::string& replica) {
                 return list_of(self.hand_over_at(replica));
             })
        .def("hand_over_silent", [](Reservations& self, double since, std::size_t most) {
            return list_of(self.hand_over_silent(since, most));
        });
}
