// The two digests with which vLLM names blocks: SHA-256 (FIPS 180-4) and XXH3 with 128 bits.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "index/keys.hpp"

namespace kvroute {

namespace detail {

template <typename Number>
Number swapped(Number value) {
    if constexpr (sizeof(Number) == 2) {
        return __builtin_bswap16(value);
    } else if constexpr (sizeof(Number) == 4) {
        return __builtin_bswap32(value);
    } else {
        return __builtin_bswap64(value);
    }
}

template <typename Number>
Number read_little(const u8* from) {
    Number value;
    std::memcpy(&value, from, sizeof(value));
    return std::endian::native == std::endian::little ? value : swapped(value);
}

template <typename Number>
Number read_big(const u8* from) {
    Number value;
    std::memcpy(&value, from, sizeof(value));
    return std::endian::native == std::endian::big ? value : swapped(value);
}

template <typename Number>
void write_big(u8* to, Number value) {
    if (std::endian::native == std::endian::little) value = swapped(value);
    std::memcpy(to, &value, sizeof(value));
}

}  // namespace detail

// Writes 32 bytes to `out`, which may lie in `message`.
void sha256(std::span<const u8> message, u8* out);

constexpr std::size_t kXxh3Least = 17;

// Writes 16 bytes to `out`. Messages of fewer than `kXxh3Least` bytes have rules of their own,
// which no block needs: they must not be given.
void xxh3_128(std::span<const u8> message, u8* out);

}  // namespace kvroute
