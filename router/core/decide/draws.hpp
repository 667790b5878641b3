// Breaks ties: by random numbers that can be drawn again, and by numbers that every router draws alike
// for a replica by its name.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "index/keys.hpp"

namespace kvroute::decide {

// A number in [0, 1) for each candidate of one decision: each can be drawn alone, and again.
struct Draws {
    u64 seed = 0;
    std::span<const double> given;  // by tests, in place of random ones

    double of(u32 number) const {
        if (!given.empty()) return given[number % given.size()];
        return static_cast<double>(scattered(seed + (u64{number} + 1) * kStep) >> 11) * 0x1p-53;
    }

private:
    friend class Lots;
    static constexpr u64 kStep = 0x9E3779B97F4A7C15;

    // SplitMix64 (Steele, Lea & Flood, 2014).
    static u64 scattered(u64 value) {
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9;
        value = (value ^ value >> 27) * 0x94D049BB133111EB;
        return value ^ value >> 31;
    }
};

// A generator of draws. Routers that begin it with the same key draw the same from then on.
class Lots {
public:
    explicit Lots(u64 seed) : state_(seed) {}

    void begin(u64 key) { state_ = key; }
    void give(std::vector<double> numbers) { given_ = std::move(numbers); }

    // Returns the draws of one decision. The numbers that a test gave must outlast them.
    Draws next() {
        state_ += 0xD1342543DE82EF95;
        return {Draws::scattered(state_), given_};
    }

private:
    u64 state_;
    std::vector<double> given_;
};

// The checksum of zlib and PNG.
u32 crc32(std::string_view bytes);

// BLAKE2b with a digest of 8 bytes, read as a number whose first byte counts most.
u64 blake2b_number(std::string_view bytes);

}  // namespace kvroute::decide
