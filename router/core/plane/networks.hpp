// Networks that addresses belong to. No I/O.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace kvroute::plane {

class Networks {
public:
    // An IPv4 or IPv6 address, and how many of its first bits all addresses there have. False: it is
    // none.
    bool add(const std::string& address, int bits);
    // An address: IPv4 in IPv6 counts as IPv4.
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
