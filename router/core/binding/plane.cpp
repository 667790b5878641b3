// Binds the data plane: events come as tuples, commands go as plain values.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "binding/decide.hpp"
#include "binding/index.hpp"
#include "binding/module.hpp"
#include "binding/plane.hpp"
#include "binding/sums.hpp"
#include "binding/support.hpp"
#include "plane/ask.hpp"
#include "plane/errors.hpp"
#include "plane/placing.hpp"
#include "plane/plane.hpp"
#include "plane/report.hpp"
#include "plane/splice.hpp"
#include "tls/context.hpp"

namespace nb = nanobind;
using namespace kvroute::plane;
using kvroute::binding::bytes_of;

namespace {

std::string text_of(nb::handle from) {
    char* data = nullptr;
    Py_ssize_t size = 0;
    if (PyBytes_AsStringAndSize(from.ptr(), &data, &size) < 0) throw nb::python_error();
    return {data, static_cast<std::size_t>(size)};
}

template <class Value>
Value read(nb::handle object, const char* field) {
    return nb::cast<Value>(object.attr(field));
}

std::optional<std::string> optional_text(nb::handle from) {
    if (from.is_none()) return std::nullopt;
    return text_of(from);
}

Fields fields_of(nb::handle from) {
    Fields found;
    for (nb::handle each : from) found.emplace_back(text_of(each[0]), text_of(each[1]));
    return found;
}

// Reads the options of requests that are decided in the core, or read in Python first.
void take_prepared(nb::dict from, Options& options) {
    options.checks_hosts = nb::cast<bool>(from["checks_hosts"]);
    options.long_prompt_tokens = nb::cast<u64>(from["long_prompt_tokens"]);
    options.prepares_all = nb::cast<bool>(from["prepares_all"]);
    options.route_path = text_of(from["route_path"]);
    options.select_path = text_of(from["select_path"]);
    options.reserve_path = text_of(from["reserve_path"]);
    options.asks_with_key = nb::cast<bool>(from["asks_with_key"]);
    for (nb::handle each : from["prepared_with"]) options.prepared_with.add(text_of(each));
    for (nb::handle each : from["opened_with"]) options.opened_with.add(text_of(each));
    for (nb::handle each : from["trusted_proxies"]) {
        const bool is_one =
            options.trusted_proxies.add(nb::cast<std::string>(each[0]), nb::cast<int>(each[1]));
        if (!is_one) throw nb::value_error("trusted_proxies: no network");
    }
    for (nb::handle each : from["prepared"]) {
        options.prepared.emplace_back(text_of(each[0]), static_cast<u8>(nb::cast<int>(each[1])));
    }
}

Options options_of(nb::dict from) {
    Options options;
    options.head_bytes = nb::cast<u64>(from["head_bytes"]);
    options.max_body_bytes = nb::cast<u64>(from["max_body_bytes"]);
    options.max_held_bytes = nb::cast<u64>(from["max_held_bytes"]);
    options.passes_429 = nb::cast<bool>(from["passes_429"]);
    options.request_s = nb::cast<double>(from["request_s"]);
    options.client_stall_s = nb::cast<double>(from["client_stall_s"]);
    options.keep_alive_s = nb::cast<double>(from["keep_alive_s"]);
    options.idle_s = nb::cast<double>(from["idle_s"]);
    options.max_idle = nb::cast<u32>(from["max_idle"]);
    options.max_connections = nb::cast<u64>(from["max_connections"]);
    options.reserved_from = nb::cast<int>(from["reserved_from"]);
    options.second_share = nb::cast<double>(from["second_share"]);
    for (nb::handle each : from["dropped"]) options.dropped.add(text_of(each));
    take_prepared(from, options);
    for (nb::handle each : from["broken_events"]) options.broken_events.push_back(text_of(each));
    return options;
}

std::vector<Address> addresses_of(nb::handle hosts, int port) {
    std::vector<Address> found;
    for (nb::handle host : hosts) {
        if (const auto each = Address::parse(nb::cast<std::string>(host), port)) found.push_back(*each);
    }
    if (found.empty()) throw nb::value_error("no address");
    return found;
}

// Connects to one of `hosts`, addresses, and `port`; to a Unix socket where it is a path. Uses TLS with
// a server of the name `secure_host`, if that is not empty.
void forward(Plane& plane, ExchangeId id, std::string origin, nb::handle hosts, int port,
             std::string secure_host, nb::handle authority, nb::handle base_path,
             nb::handle replaced, nb::handle added, nb::handle reported, nb::handle body,
             std::tuple<double, double, double> timeouts, int flags, int dialect) {
    Forward made;
    made.to = std::make_shared<Server>(Server{std::move(origin), addresses_of(hosts, port),
                                              std::move(secure_host), text_of(authority),
                                              text_of(base_path), {}});
    for (nb::handle each : replaced) {
        made.replaced.emplace_back(text_of(each[0]), optional_text(each[1]));
    }
    made.added = fields_of(added);
    made.reported = fields_of(reported);
    made.body = optional_text(body);
    std::tie(made.timeouts.connect_s, made.timeouts.first_byte_s, made.timeouts.idle_s) = timeouts;
    made.may_reuse = flags & 1;
    made.is_control = flags & 2;
    made.wants_id = flags & 4;
    made.dialect = static_cast<u8>(dialect);
    plane.send({id, std::move(made)});
}

// A prompt was read. `more`: body, salt, session, tenant, fields that the engine and the response get,
// lengths to keep, whether the model's name is written into the body, the class of the key, and the
// name of a reservation.
void place(Plane& plane, ExchangeId id, std::string model, nb::handle tokens, bool is_stream,
           bool is_comparable, double tokenization_s, nb::handle more) {
    Ask ask;
    ask.model = std::move(model);
    ask.tokens = kvroute::binding::tokens_of(tokens);
    if (ask.tokens->empty()) throw nb::value_error("no tokens");
    ask.is_stream = is_stream;
    ask.is_comparable = is_comparable;
    ask.tokenization_s = tokenization_s;
    if (!more.is_none()) {
        ask.body = optional_text(more[0]);
        ask.salt = nb::cast<std::optional<std::string>>(nb::object(more[1]));
        ask.session = text_of(more[2]);
        ask.tenant = nb::cast<std::string>(nb::object(more[3]));
        ask.added = fields_of(nb::object(more[4]));
        ask.reported = fields_of(nb::object(more[5]));
        ask.keep = nb::cast<std::vector<u64>>(nb::object(more[6]));
        ask.is_renamed = nb::cast<bool>(nb::object(more[7]));
        ask.priority_class = nb::cast<std::optional<u64>>(nb::object(more[8]));
        ask.reservation = nb::cast<std::string>(nb::object(more[9]));
    }
    plane.send({id, std::move(ask)});
}

void respond(Plane& plane, ExchangeId id, int status, nb::handle fields, nb::handle body) {
    plane.send({id, Respond{status, fields_of(fields), text_of(body)}});
}

// Reads an `OrderFacts` of router/fleet/entrance.py.
Ordering ordering_of(nb::handle from) {
    return {read<double>(from, "ageing_tokens_per_s"), read<u64>(from, "usual_class"),
            read<int>(from, "class_bits"), read<u64>(from, "longest_tokens")};
}

// Reads a `Way` of router/serve/seams/fleet.py.
Forward way_of(nb::handle from) {
    Forward made;
    made.to = std::make_shared<Server>(
        Server{read<std::string>(from, "origin"),
               addresses_of(from.attr("hosts"), read<int>(from, "port")),
               read<std::string>(from, "secure_host"), text_of(from.attr("authority")),
               text_of(from.attr("base_path")), fields_of(from.attr("reported"))});
    for (nb::handle each : from.attr("replaced")) {
        made.replaced.emplace_back(text_of(each[0]), optional_text(each[1]));
    }
    std::tie(made.timeouts.connect_s, made.timeouts.first_byte_s, made.timeouts.idle_s) =
        read<std::tuple<double, double, double>>(from, "timeouts");
    made.shows_hit = read<bool>(from, "shows_hit");
    made.ordered_by = static_cast<OrderedBy>(read<int>(from, "ordered_by"));
    return made;
}

// Reads an `AtGateway` of router/serve/seams/fleet.py.
AtGateway at_gateway_of(nb::handle from) {
    return {std::to_string(read<u64>(from, "worker_id")), read<std::string>(from, "endpoint"),
            read<std::string>(from, "address"),
            read<std::vector<std::pair<int, u64>>>(from, "block_tokens")};
}

// Reads a `ServedName` of router/serve/seams/fleet.py.
std::shared_ptr<Served> served_of(nb::handle from) {
    auto made = std::make_shared<Served>();
    made->model = read<std::string>(from, "model");
    made->in_mirror = read<u32>(from, "in_mirror");
    made->fleet = kvroute::binding::fleet_of(from.attr("fleet"));
    made->index = read<std::shared_ptr<kvroute::SharedIndex>>(from, "index");
    for (nb::handle way : from.attr("ways")) {
        made->ways.push_back(way_of(way));
        made->names.push_back(read<std::string>(way, "name"));
        made->at_gateways.push_back(at_gateway_of(way.attr("at_gateway")));
    }
    made->most_tokens = read<u64>(from, "most_tokens");
    made->adapter = read<std::optional<std::string>>(from, "adapter");
    made->stream_first_byte_s = read<double>(from, "stream_first_byte_s");
    made->is_read_first = read<bool>(from, "is_read_first");
    if (made->ways.size() != made->fleet->size()) throw nb::value_error("a way for each replica");
    return made;
}

void serve(Placing& placing, nb::dict models) {
    Placing::Models made;
    for (const auto& [name, each] : models) {
        made.emplace(nb::cast<std::string>(name), served_of(each));
    }
    placing.serve(std::move(made));
}

nb::dict counts_of(const Plane& plane) {
    const PoolCounts counts = plane.counts();
    nb::dict made;
    made["connections"] = counts.connections;
    made["idle"] = counts.idle;
    made["active"] = counts.active;
    made["opened"] = counts.opened;
    made["reused"] = counts.reused;
    made["kept_closed"] = counts.kept_closed;
    made["connect_failures"] = counts.connect_failures;
    made["timeouts"] = counts.timeouts;
    made["broken"] = counts.broken;
    made["closed_early"] = counts.closed_early;
    made["given_up"] = counts.given_up;
    made["aborted"] = counts.aborted;
    return made;
}

using Secured = std::shared_ptr<kvroute::tls::Context>;

// Reads PEM files; empty: none.
template <auto make>
Secured context(std::string certificate, std::string key, std::string authorities) {
    try {
        const auto made = make({std::move(certificate), std::move(key), std::move(authorities)});
        return std::const_pointer_cast<kvroute::tls::Context>(made);  // which Python cannot change
    } catch (const kvroute::tls::Problem& problem) {
        throw nb::value_error(problem.what());
    }
}

// For tests: the steps of a stream by themselves.
nb::bytes released(EventLines& lines, nb::bytes piece, bool is_last) {
    std::string out;
    lines.release({piece.c_str(), piece.size()}, is_last, out);
    return bytes_of(out);
}

nb::object read_ask_of(nb::bytes body) {
    const std::optional<Ask> ask = read_ask({body.c_str(), body.size()});
    if (!ask) return nb::none();
    return nb::make_tuple(ask->model, *ask->tokens, ask->is_stream);
}

nb::object read_report_of(const std::string& method, nb::bytes target, nb::bytes body,
                          u64 prompt_tokens) {
    const std::optional<Report> report = report_of(method, {target.c_str(), target.size()});
    if (!report) return nb::none();
    const std::optional<ReportBody> found = read_report(report->kind, {body.c_str(), body.size()});
    if (!found) return nb::none();
    return nb::make_tuple(found->has_begun, found->is_whole, found->tokens,
                          bytes_of(found->usage_body(prompt_tokens)));
}

nb::object with_model_of(nb::bytes body, const std::string& name) {
    const auto made = with_model({body.c_str(), body.size()}, name);
    return made ? nb::object(bytes_of(*made)) : nb::none();
}

nb::object with_field_of(nb::bytes body, const std::string& name, nb::bytes value) {
    const auto made = with_field({body.c_str(), body.size()}, name, {value.c_str(), value.size()});
    return made ? nb::object(bytes_of(*made)) : nb::none();
}

nb::tuple finished(UsageCapture& usage) {
    Ended ended;
    usage.finish(ended);
    nb::tuple found = nb::make_tuple(ended.events, ended.is_json, bytes_of(ended.usage),
                                     bytes_of(ended.first_usage));
    usage.reuse(std::move(ended));
    return found;
}

}  // namespace

void kvroute::binding::bind_plane(nb::module_& module) {
    nb::class_<EventLines>(module, "EventLines")
        .def(nb::init<>())
        .def("release", &released)
        .def("has_finished", &EventLines::has_finished)
        .def("separator", [](const EventLines& self) { return bytes_of(std::string(self.separator())); });
    nb::class_<UsageCapture>(module, "UsageCapture")
        .def(nb::init<>())
        .def("feed", [](UsageCapture& self, nb::bytes piece) { self.feed({piece.c_str(), piece.size()}); })
        .def("finish", &finished);
    nb::class_<Networks>(module, "Networks")
        .def(nb::init<>())
        .def("add", &Networks::add)
        .def("contains", &Networks::contains);
    module.def("read_ask", &read_ask_of);
    module.def("read_report", &read_report_of);
    kvroute::binding::bind_bookings(module);
    nb::class_<kvroute::tls::Context>(module, "TlsContext")
        .def_static("for_clients", &context<&kvroute::tls::Context::for_clients>)
        .def_static("for_servers", &context<&kvroute::tls::Context::for_servers>);
    module.def("load_tls", [](const std::vector<std::string>& places) {
        try {
            return std::string(kvroute::tls::load(places).OpenSSL_version(0));
        } catch (const kvroute::tls::Problem& problem) {
            throw nb::value_error(problem.what());
        }
    });
    module.def("with_model", &with_model_of);
    module.def("with_field", &with_field_of);
    nb::class_<Placing>(module, "Placing")
        .def(nb::new_([](nb::handle decider, double quiet_s, nb::handle order,
                         std::shared_ptr<Reservations> reservations) {
            return std::make_shared<Placing>(kvroute::binding::decider_of(decider), quiet_s,
                                             ordering_of(order), std::move(reservations));
        }))
        .def("serve", &serve)
        .def("under_way", &Placing::under_way)
        .def("allow", &Placing::allow)
        .def("company", [](Placing& self, const std::string& replica) {
            const OfReplica found = self.quiet().at(replica);
            return std::make_tuple(found.under_way, found.begun, found.ended_at);
        })
        .def("begun",
             [](Placing& self) {
                 nb::dict made;
                 for (const auto& [replica, count] : self.quiet().begun()) made[replica.c_str()] = count;
                 return made;
             })
        .def("forget", [](Placing& self, const std::string& replica) { self.quiet().forget(replica); });
    nb::class_<Plane>(module, "Plane")
        .def("__init__",
             [](Plane* self, nb::dict options, const std::vector<int>& listeners, Secured towards_clients,
                Secured towards_replicas) {
                 new (self) Plane(options_of(options), {towards_clients, towards_replicas}, listeners);
             },
             nb::arg("options"), nb::arg("listeners"), nb::arg("towards_clients").none() = nb::none(),
             nb::arg("towards_replicas").none() = nb::none())
        .def("secure",
             [](Plane& self, Secured towards_clients, Secured towards_replicas) {
                 self.secure({towards_clients, towards_replicas});
             },
             nb::arg("towards_clients").none(), nb::arg("towards_replicas").none())
        .def("fileno", &Plane::descriptor)
        .def("take", &events_of)
        .def("sum_up", &kvroute::binding::sum_up)
        .def("forward", &forward, nb::arg("id"), nb::arg("origin"), nb::arg("hosts"),
             nb::arg("port"), nb::arg("secure_host"), nb::arg("authority"), nb::arg("base_path"),
             nb::arg("replaced"), nb::arg("added"), nb::arg("reported"), nb::arg("body").none(),
             nb::arg("timeouts"), nb::arg("flags"), nb::arg("dialect"))
        .def("place", &place, nb::arg("id"), nb::arg("model"), nb::arg("tokens"),
             nb::arg("is_stream"), nb::arg("is_comparable"),
             nb::arg("tokenization_s"), nb::arg("more").none())
        .def("accept_host", [](Plane& self, nb::bytes host) {
            self.hosts().accept({host.c_str(), host.size()});
        })
        .def("open", [](Plane& self, ExchangeId id) { self.send({id, Open{}}); })
        .def("hold_back", &Plane::hold_back)
        .def("ring", &Plane::ring)
        .def("wake", &Plane::wake)
        .def("respond", &respond)
        .def("end_for_memory",
             &Plane::end_for_memory)
        .def("read_body", [](Plane& self, ExchangeId id) { self.send({id, ReadBody{}}); })
        .def("pass_on", [](Plane& self, ExchangeId id) { self.send({id, PassOn{}}); })
        .def("cut", [](Plane& self, ExchangeId id) { self.send({id, Cut{}}); })
        .def("give_up", &Plane::give_up)
        .def("decide_by",
             [](Plane& self, std::shared_ptr<Placing> placing) {
                 self.decide_by(std::move(placing));
             },
             nb::arg().none())
        .def("cut_all", &Plane::cut_all)
        .def("stop", &Plane::stop, nb::call_guard<nb::gil_scoped_release>())
        .def("counts", &counts_of)
        .def("clients", &Plane::clients)
        .def("unread", &Plane::unread)
        .def("held_bytes", &Plane::held_bytes)
        .def("hold_elsewhere", &Plane::hold_elsewhere);
}
