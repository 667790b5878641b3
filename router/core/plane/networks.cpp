#include "plane/networks.hpp"

#include <arpa/inet.h>

#include <algorithm>

namespace kvroute::plane {
namespace {

constexpr std::array<std::uint8_t, 12> kMapped = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF};

}  // namespace

Networks::Bytes Networks::parsed(const std::string& host) {
    Bytes found;
    const std::string address = host.substr(0, host.find('%'));
    if (inet_pton(AF_INET, address.c_str(), found.bytes.data()) == 1) {
        found.size = 4;
    } else if (inet_pton(AF_INET6, address.c_str(), found.bytes.data()) == 1) {
        found.size = 16;
    }
    return found;
}

// Returns the IPv4 address of an IPv4-mapped IPv6 one, and others as they are.
Networks::Bytes Networks::unmapped(Bytes address) {
    auto& bytes = address.bytes;
    if (address.size == 16 && std::equal(kMapped.begin(), kMapped.end(), bytes.begin())) {
        std::copy(bytes.begin() + kMapped.size(), bytes.end(), bytes.begin());
        address.size = 4;
    }
    return address;
}

bool Networks::add(const std::string& address, int bits) {
    const Network network{parsed(address), bits};
    if (network.address.size == 0 || bits < 0 || bits > 8 * network.address.size) return false;
    networks_.push_back(network);
    return true;
}

bool Networks::contains(const std::string& host) const {
    if (networks_.empty()) return false;
    const Bytes address = unmapped(parsed(host));
    return std::any_of(networks_.begin(), networks_.end(), [&](const Network& network) {
        if (network.address.size != address.size) return false;
        const auto whole = network.bits / 8, more = network.bits % 8;
        const auto& ours = network.address.bytes;
        if (!std::equal(ours.begin(), ours.begin() + whole, address.bytes.begin())) return false;
        return more == 0 || (ours[whole] ^ address.bytes[whole]) >> (8 - more) == 0;
    });
}

}  // namespace kvroute::plane
