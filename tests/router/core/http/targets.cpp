// What the fuzzer feeds to HTTP without I/O. The first byte of an input chooses requests or
// responses, and how they are cut into pieces. Whatever they are, three things hold: the verdict
// does not depend on the cuts, nothing that was found can break a line, and a head that is written
// again is read the same.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "http/body.hpp"
#include "http/write.hpp"

using namespace kvroute::http;

#define EXPECT(holds)                                                    \
    do {                                                                 \
        if (!(holds)) {                                                  \
            std::fprintf(stderr, "%d: not so: %s\n", __LINE__, #holds);  \
            std::abort();                                                \
        }                                                                \
    } while (false)

namespace {

// Small enough for inputs to reach them.
constexpr Bounds kBounds = {1024, 12, 40, 60};

// Exactly as long as what it holds, so that AddressSanitizer sees every byte read behind its end.
class Exact {
public:
    explicit Exact(std::string_view bytes) : size_(bytes.size()), bytes_(new char[bytes.size()]) {
        std::copy(bytes.begin(), bytes.end(), bytes_.get());
    }
    std::string_view view() const { return {bytes_.get(), size_}; }

private:
    std::size_t size_;
    std::unique_ptr<char[]> bytes_;
};

Parsed parse(std::string_view bytes, RequestHead& head, std::size_t& used, Problem& problem) {
    return parse_request(bytes, kBounds, head, used, problem);
}
Parsed parse(std::string_view bytes, ResponseHead& head, std::size_t& used, Problem& problem) {
    return parse_response(bytes, kBounds, false, head, used, problem);
}

void write_first_line(std::string& to, const RequestHead& head) {
    EXPECT(append_request_line(to, head.method, head.target));
    EXPECT(!head.origin_form.empty() && head.target.find(head.origin_form) != head.target.npos);
    EXPECT(head.origin_form.find('#') == head.origin_form.npos);
}
void write_first_line(std::string& to, const ResponseHead& head) {
    EXPECT(head.status >= 100 && head.status < 600);
    append_status(to, head.status, head.reason);
}

void expect_same(const RequestHead& one, const RequestHead& other) {
    EXPECT(one.method == other.method && one.target == other.target);
}
void expect_same(const ResponseHead& one, const ResponseHead& other) {
    EXPECT(one.status == other.status);
}

// Written again, it must be the same head. HTTP/1.1 is all that is written: there a Host is needed.
template <class Head>
void write_and_read(const Head& head) {
    std::string written;
    write_first_line(written, head);
    for (const Field& each : head.fields) EXPECT(append_field(written, each.name, each.value));
    if (head.find("host").empty()) append_field(written, "host", "a");
    written += kLineEnd;
    Head again;
    Problem problem;
    std::size_t used = 0;
    if (head.fields.size() == kBounds.fields || written.size() > kBounds.head_bytes) return;
    const Parsed parsed = parse(written, again, used, problem);
    if (!head.find("host").empty()) EXPECT(parsed == Parsed::whole);
    if (parsed != Parsed::whole) return;
    EXPECT(used == written.size() && again.framing == head.framing);
    EXPECT(again.length == head.length);
    expect_same(again, head);
    for (std::size_t at = 0; at < head.fields.size(); ++at) {
        EXPECT(again.fields[at].name == head.fields[at].name);
        EXPECT(again.fields[at].value == head.fields[at].value);
    }
}

// Where cuts go: every `stride` bytes.
struct Cuts {
    std::size_t stride;
};

// The head of the whole must be found once its last byte is there, and refused no later.
template <class Head>
void read_head_cut(std::string_view bytes, Cuts cuts, Parsed expected, std::size_t expected_used,
                   const Problem& expected_problem) {
    Head head;
    Problem problem;
    std::size_t used = 0, before = 0;
    for (std::size_t size = cuts.stride;; size += cuts.stride) {
        const Exact piece(bytes.substr(0, size));
        const Parsed parsed = parse(piece.view(), head, used, problem);
        if (parsed == Parsed::whole && size < expected_used + cuts.stride) {
            EXPECT(expected == Parsed::whole && used == expected_used);
            EXPECT(before == 0 || is_worth_parsing(piece.view(), before, kBounds));
        }
        if (parsed == Parsed::bad) {
            EXPECT(expected == Parsed::bad);
            EXPECT(problem.message == expected_problem.message);
        }
        if (parsed != Parsed::partial) return;
        EXPECT(expected == Parsed::partial || size < bytes.size());
        if (size >= bytes.size()) return;
        before = size;
    }
}

struct BodyRead {
    std::string payload;
    std::size_t used = 0;
    bool is_last = false, is_bad = false;
    const char* message = "";
};

BodyRead read_body(std::string_view bytes, Framing framing, std::uint64_t length, Cuts cuts) {
    BodyReader reader;
    BodyRead found;
    reader.begin(framing, length, kBounds);
    for (std::size_t from = 0; from <= bytes.size(); from += cuts.stride) {
        const Exact piece(bytes.substr(from, cuts.stride));
        std::string_view left = piece.view();
        do {
            const BodyReader::Piece next = reader.next(left);
            EXPECT(next.used <= left.size() && next.payload.size() <= next.used);
            EXPECT(next.used > 0 || left.empty() || next.is_last || next.is_bad);
            found.payload.append(next.payload);
            found.used += next.used;
            found.is_last = next.is_last;
            found.is_bad = next.is_bad;
            left.remove_prefix(next.used);
        } while (!left.empty() && !found.is_last && !found.is_bad);
        if (found.is_last || found.is_bad) break;
    }
    EXPECT(reader.payload_bytes() == found.payload.size());
    EXPECT(reader.has_ended() == found.is_last);
    found.message = reader.problem().message;
    return found;
}

BodyRead read_body_both_ways(std::string_view bytes, Framing framing, std::uint64_t length,
                             Cuts cuts) {
    const BodyRead whole = read_body(bytes, framing, length, {bytes.size() + 1});
    const BodyRead cut = read_body(bytes, framing, length, cuts);
    EXPECT(whole.payload == cut.payload && whole.used == cut.used);
    EXPECT(whole.is_last == cut.is_last && whole.is_bad == cut.is_bad);
    EXPECT(whole.message == cut.message);
    return whole;
}

template <class Head>
void read_messages(std::string_view bytes, Cuts cuts) {
    Head head;
    Problem problem;
    for (int count = 0; count < 20 && !bytes.empty(); ++count) {
        std::size_t used = 0;
        const Exact whole(bytes);
        const Parsed parsed = parse(whole.view(), head, used, problem);
        read_head_cut<Head>(bytes, cuts, parsed, used, problem);
        if (parsed != Parsed::whole) return;
        write_and_read(head);
        bytes.remove_prefix(used);
        const BodyRead body = read_body_both_ways(bytes, head.framing, head.length, cuts);
        if (!body.is_last) return;
        bytes.remove_prefix(body.used);
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size == 0) return 0;
    const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
    // Heads that are read again at every cut take the square of their length.
    const Cuts cuts{size > 4096 ? 512 : std::size_t{1} + (data[0] >> 2)};
    switch (data[0] & 3) {
    case 0: read_messages<RequestHead>(bytes, cuts); break;
    case 1: read_messages<ResponseHead>(bytes, cuts); break;
    case 2: read_body_both_ways(bytes, Framing::chunked, 0, cuts); break;
    default: read_body_both_ways(bytes, Framing::length, size / 2, cuts);
    }
    return 0;
}
