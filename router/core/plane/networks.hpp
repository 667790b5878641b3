// Networks that addresses belong to. No I/O.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace kvroute::plane {

class Networks {
public:
    // Adds an IPv4 or IPv6 network of this address and prefix length. False: it is none.
    bool add(const std::string& address, int bits);
    // `host`: an address; an IPv4-mapped IPv6 one counts as IPv4.
    bool contains(const std::string& host) const;

private:
    struct Bytes {
        std::array<std::uint8_t, 16> bytes{};
        int size = 0;  // 0: it is no address
    };
    struct Network {
        Bytes address;
        int bits = 0;
    };

    static Bytes parsed(const std::string& host);
    static Bytes unmapped(Bytes address);

    std::vector<Network> networks_;
};

}  // namespace kvroute::plane
