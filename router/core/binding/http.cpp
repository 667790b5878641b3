// Binds HTTP without I/O, as far as tests need it, which compare it with other parsers, and
// router/fleet/probes.py, which reads responses.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include "binding/module.hpp"
#include "binding/support.hpp"
#include "http/body.hpp"
#include "http/write.hpp"

using namespace kvroute::http;

namespace kvroute::binding {

namespace {

std::string_view view_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

nb::bytes bytes_of(std::string_view view) { return nb::bytes(view.data(), view.size()); }

const char* name_of(Framing framing) {
    switch (framing) {
    case Framing::length: return "length";
    case Framing::chunked: return "chunked";
    case Framing::until_close: return "until_close";
    case Framing::none: break;
    }
    return "none";
}

Framing framing_of(std::string_view name) {
    for (const Framing each : {Framing::length, Framing::chunked, Framing::until_close}) {
        if (name == name_of(each)) return each;
    }
    return Framing::none;
}

nb::tuple tuple_of(const Problem& problem) {
    return nb::make_tuple(problem.status, problem.code, problem.text());
}

nb::list list_of(const std::vector<Field>& fields) {
    nb::list found;
    for (const Field& each : fields) {
        found.append(nb::make_tuple(bytes_of(each.name), bytes_of(each.value)));
    }
    return found;
}

template <class Head>
nb::dict dict_of(const Head& head, std::size_t used) {
    nb::dict found;
    found["minor"] = head.minor;
    found["fields"] = list_of(head.fields);
    found["framing"] = name_of(head.framing);
    found["length"] = head.length;
    found["keeps_alive"] = head.keeps_alive;
    found["used"] = used;
    return found;
}

Bounds bounds_of(std::size_t head_bytes, std::size_t fields) {
    Bounds bounds;
    bounds.head_bytes = head_bytes;
    bounds.fields = fields;
    return bounds;
}

// Returns the head as a dict, None where it is cut short, `(status, code, message)` where it is bad.
nb::object read_request_head(nb::bytes bytes, std::size_t head_bytes, std::size_t fields) {
    RequestHead head;
    Problem problem;
    std::size_t used = 0;
    const Parsed parsed =
        parse_request(view_of(bytes), bounds_of(head_bytes, fields), head, used, problem);
    if (parsed == Parsed::partial) return nb::none();
    if (parsed == Parsed::bad) return tuple_of(problem);
    nb::dict found = dict_of(head, used);
    found["method"] = bytes_of(head.method);
    found["target"] = bytes_of(head.target);
    found["origin_form"] = bytes_of(head.origin_form);
    found["expects_continue"] = head.expects_continue;
    found["upgrades"] = head.upgrades;
    return found;
}

nb::object read_response_head(nb::bytes bytes, bool is_of_head_request, std::size_t head_bytes,
                              std::size_t fields) {
    ResponseHead head;
    Problem problem;
    std::size_t used = 0;
    const Parsed parsed = parse_response(view_of(bytes), bounds_of(head_bytes, fields),
                                         is_of_head_request, head, used, problem);
    if (parsed == Parsed::partial) return nb::none();
    if (parsed == Parsed::bad) return tuple_of(problem);
    nb::dict found = dict_of(head, used);
    found["status"] = head.status;
    found["reason"] = bytes_of(head.reason);
    return found;
}

class PythonBodyReader {
public:
    PythonBodyReader(std::string_view framing, std::uint64_t length, std::size_t chunk_line_bytes,
                     std::size_t trailer_bytes) {
        Bounds bounds;
        bounds.chunk_line_bytes = chunk_line_bytes;
        bounds.trailer_bytes = trailer_bytes;
        reader_.begin(framing_of(framing), length, bounds);
    }

    // Returns `(used, payload, is_last, is_bad)`.
    nb::tuple next(nb::bytes bytes) {
        const BodyReader::Piece piece = reader_.next(view_of(bytes));
        return nb::make_tuple(piece.used, bytes_of(piece.payload), piece.is_last, piece.is_bad);
    }
    bool has_ended() const { return reader_.has_ended(); }
    std::uint64_t payload_bytes() const { return reader_.payload_bytes(); }
    nb::tuple problem() const { return tuple_of(reader_.problem()); }

private:
    BodyReader reader_;
};

enum class End { partial, whole, bad };

// Takes a body off the bytes.
End take_body(std::string_view& bytes, BodyReader& reader, std::string& body) {
    for (;;) {
        const BodyReader::Piece piece = reader.next(bytes);
        body.append(piece.payload);
        bytes.remove_prefix(piece.used);
        if (piece.is_bad) return End::bad;
        if (piece.is_last) return End::whole;
        if (bytes.empty()) return End::partial;
    }
}

// Reads every message that is whole, as `head_of` makes it with its body behind; then the end:
// "partial", "bad", or "whole" where its connection is not kept.
template <class Head, class Parse, class HeadOf>
nb::tuple read_all(std::string_view bytes, const Parse& parse, const HeadOf& head_of) {
    Head head;
    Problem problem;
    BodyReader reader;
    std::string body;
    nb::list messages;
    const std::size_t size = bytes.size();
    while (!bytes.empty()) {
        std::size_t used = 0;
        const Parsed parsed = parse(bytes, head, used, problem);
        if (parsed == Parsed::bad) return nb::make_tuple(messages, "bad");
        if (parsed == Parsed::partial) return nb::make_tuple(messages, "partial");
        bytes.remove_prefix(used);
        body.clear();
        reader.begin(head.framing, head.length, Bounds{});
        const End end = take_body(bytes, reader, body);
        if (end == End::bad) return nb::make_tuple(messages, "bad");
        if (end == End::partial && head.framing != Framing::until_close) {
            return nb::make_tuple(messages, "partial");
        }
        messages.append(head_of(head, bytes_of(body), size - bytes.size()));
        if (!head.keeps_alive) return nb::make_tuple(messages, "whole");
    }
    return nb::make_tuple(messages, "partial");
}

// Returns `[(method, target, minor, fields, body, where it ends)]`, and the end.
nb::tuple read_requests(nb::bytes bytes) {
    return read_all<RequestHead>(
        view_of(bytes),
        [](std::string_view from, RequestHead& head, std::size_t& used, Problem& problem) {
            return parse_request(from, Bounds{}, head, used, problem);
        },
        [](const RequestHead& head, nb::bytes body, std::size_t end) {
            return nb::make_tuple(bytes_of(head.method), bytes_of(head.target), head.minor,
                                  list_of(head.fields), body, end);
        });
}

// Returns `[(status, minor, fields, body, where it ends)]`, and the end. A body may end with the bytes.
nb::tuple read_responses(nb::bytes bytes) {
    return read_all<ResponseHead>(
        view_of(bytes),
        [](std::string_view from, ResponseHead& head, std::size_t& used, Problem& problem) {
            return parse_response(from, Bounds{}, false, head, used, problem);
        },
        [](const ResponseHead& head, nb::bytes body, std::size_t end) {
            return nb::make_tuple(head.status, head.minor, list_of(head.fields), body, end);
        });
}

nb::bytes write_status(int status, nb::bytes reason) {
    std::string to;
    append_status(to, status, view_of(reason));
    return bytes_of(to);
}

nb::bytes write_request_line(nb::bytes method, nb::bytes target) {
    std::string to;
    append_request_line(to, view_of(method), view_of(target));
    return bytes_of(to);
}

nb::bytes write_field(nb::bytes name, nb::bytes value) {
    std::string to;
    append_field(to, view_of(name), view_of(value));
    return bytes_of(to);
}

nb::bytes write_chunk(nb::bytes payload) {
    std::string to;
    append_chunk_head(to, payload.size());
    to.append(view_of(payload)).append(kChunkEnd);
    return bytes_of(to);
}

}  // namespace

void bind_http(nb::module_& module) {
    constexpr Bounds usual;
    module.def("read_request_head", &read_request_head, nb::arg("data"),
               nb::arg("head_bytes") = usual.head_bytes, nb::arg("fields") = usual.fields);
    module.def("read_response_head", &read_response_head, nb::arg("data"),
               nb::arg("is_of_head_request") = false, nb::arg("head_bytes") = usual.head_bytes,
               nb::arg("fields") = usual.fields);
    nb::class_<PythonBodyReader>(module, "BodyReader")
        .def(nb::init<std::string_view, std::uint64_t, std::size_t, std::size_t>(),
             nb::arg("framing"), nb::arg("length") = 0,
             nb::arg("chunk_line_bytes") = usual.chunk_line_bytes,
             nb::arg("trailer_bytes") = usual.trailer_bytes)
        .def("next", &PythonBodyReader::next)
        .def_prop_ro("has_ended", &PythonBodyReader::has_ended)
        .def_prop_ro("payload_bytes", &PythonBodyReader::payload_bytes)
        .def_prop_ro("problem", &PythonBodyReader::problem);
    module.def("read_requests", &read_requests);
    module.def("read_responses", &read_responses);
    module.def("write_status", &write_status);
    module.def("write_request_line", &write_request_line);
    module.def("write_field", &write_field);
    module.def("write_chunk", &write_chunk);
    module.def("is_hop_by_hop", [](nb::bytes name) { return is_hop_by_hop(view_of(name)); });
}

}  // namespace kvroute::binding
