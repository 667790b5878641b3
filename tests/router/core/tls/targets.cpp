// What the fuzzer feeds to sessions of TLS. An input is either what a client says, cut into pieces, or
// says where the bytes between a client and a server are changed on their way. Whatever they are, no byte
// outside its buffer is touched, what is said back is in proportion, and no byte arrives that was not
// sent: one that was changed ends the session.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "tls/session.hpp"

using namespace kvroute::tls;

#define EXPECT(holds)                                                    \
    do {                                                                 \
        if (!(holds)) {                                                  \
            std::fprintf(stderr, "%d: not so: %s\n", __LINE__, #holds);  \
            std::abort();                                                \
        }                                                                \
    } while (false)

namespace {

constexpr std::size_t kPlain = 40'000;

struct Contexts {
    std::shared_ptr<const Context> server, client;
};

const Contexts& contexts() {
    static const Contexts made = [] {
        const std::string folder = std::getenv("KVROUTE_FUZZ_CERTIFICATES");
        load({"libssl.so.3"});
        return Contexts{
            Context::for_clients({folder + "/127.0.0.1.pem", folder + "/127.0.0.1.key", ""}),
            Context::for_servers({"", "", folder + "/ca.pem"})};
    }();
    return made;
}

// One side, with what it has read and what it wants to send.
struct Side {
    Side(std::shared_ptr<const Context> context, const std::string& server)
        : session(std::move(context), server) {}

    bool hear(std::string_view came) {
        // As in the plane: room for what came, and a record that was not whole before.
        std::vector<char> into(came.size() + Session::kRecord);
        const Session::Read found = session.receive(came, into.data(), into.size(), to_send);
        EXPECT(found.bytes < into.size());
        got.append(into.data(), found.bytes);
        return found.state == Session::State::open;
    }

    Session session;
    std::string to_send, got;
};

void feed(std::string_view said, std::size_t stride) {
    Side server(contexts().server, "");
    for (std::size_t at = 0; at < said.size(); at += stride) {
        if (!server.hear(said.substr(at, stride))) break;
    }
    EXPECT(server.got.empty());
    EXPECT(server.to_send.size() <= 16'384 + 2 * said.size());
}

// `changes`: each the distance to the byte that is changed, and how.
void converse(std::string_view changes, std::size_t stride) {
    Side server(contexts().server, ""), client(contexts().client, "127.0.0.1");
    const std::string plain(kPlain, 'x');
    client.session.begin(client.to_send);
    std::size_t next = 0;  // bytes until the next change
    const auto draw = [&] {
        const auto take = [&] {
            const int byte = changes.empty() ? 255 : static_cast<unsigned char>(changes.front());
            if (!changes.empty()) changes.remove_prefix(1);
            return static_cast<std::size_t>(byte);
        };
        next = take() << 8;
        next += take();
    };
    draw();
    const auto pass = [&](Side& from, Side& to) {
        std::string bytes = std::exchange(from.to_send, {});
        for (std::size_t at = 0; at < bytes.size(); at += stride) {
            std::string piece = bytes.substr(at, stride);
            while (next < piece.size() && !changes.empty()) {
                piece[next] = static_cast<char>(piece[next] ^ changes.front());
                const std::size_t before = next;
                changes.remove_prefix(1);
                draw();
                next += before + 1;
            }
            next -= std::min(next, piece.size());
            if (!to.hear(piece)) return false;
        }
        return true;
    };
    bool has_sent = false;
    for (int round = 0; round < 8; ++round) {
        if (client.session.is_established() && !std::exchange(has_sent, true)) {
            EXPECT(client.session.send(plain, client.to_send));
            client.session.end(client.to_send);
        }
        if (!pass(client, server) || !pass(server, client)) break;
    }
    EXPECT(std::string_view(plain).substr(0, server.got.size()) == server.got);
    EXPECT(client.got.empty());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size < 2) return 0;
    const std::size_t stride = data[0] & 0xFE ? data[0] * 64u : 1u;
    const std::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
    if (data[0] & 1) {
        feed(rest, stride);
    } else {
        converse(rest, stride);
    }
    return 0;
}
