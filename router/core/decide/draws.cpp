#include "decide/draws.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

namespace kvroute::decide {

namespace {

constexpr std::array<u32, 256> crc_table() {
    std::array<u32, 256> table{};
    for (u32 byte = 0; byte < 256; ++byte) {
        u32 value = byte;
        for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ (value & 1 ? 0xEDB88320u : 0u);
        table[byte] = value;
    }
    return table;
}

constexpr std::array<u32, 256> kCrc = crc_table();

// From RFC 7693.
constexpr std::array<u64, 8> kBlakeStart{
    0x6A09E667F3BCC908, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1,
    0x510E527FADE682D1, 0x9B05688C2B3E6C1F, 0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179};
constexpr u8 kBlakeOrder[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

using BlakeState = std::array<u64, 8>;
using BlakeBlock = std::array<u64, 16>;

void mix(BlakeBlock& v, int a, int b, int c, int d, u64 x, u64 y) {
    v[a] += v[b] + x;
    v[d] = std::rotr(v[d] ^ v[a], 32);
    v[c] += v[d];
    v[b] = std::rotr(v[b] ^ v[c], 24);
    v[a] += v[b] + y;
    v[d] = std::rotr(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = std::rotr(v[b] ^ v[c], 63);
}

// `end`: bytes up to the end of this block.
void compress(BlakeState& state, const BlakeBlock& block, u64 end, bool is_last) {
    BlakeBlock v;
    std::copy(state.begin(), state.end(), v.begin());
    std::copy(kBlakeStart.begin(), kBlakeStart.end(), v.begin() + 8);
    v[12] ^= end;
    if (is_last) v[14] = ~v[14];
    for (int round = 0; round < 12; ++round) {
        const u8* at = kBlakeOrder[round % 10];
        for (int i = 0; i < 4; ++i) {
            mix(v, i, 4 + i, 8 + i, 12 + i, block[at[2 * i]], block[at[2 * i + 1]]);
        }
        for (int i = 0; i < 4; ++i) {
            mix(v, i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4, block[at[8 + 2 * i]],
                block[at[9 + 2 * i]]);
        }
    }
    for (int i = 0; i < 8; ++i) state[i] ^= v[i] ^ v[i + 8];
}

}  // namespace

u32 crc32(std::string_view bytes) {
    u32 value = ~u32{0};
    for (const char each : bytes) {
        value = value >> 8 ^ kCrc[(value ^ static_cast<u8>(each)) & 0xFF];
    }
    return ~value;
}

u64 blake2b_number(std::string_view bytes) {
    constexpr std::size_t kBlock = 128, kDigest = 8;
    BlakeState state = kBlakeStart;
    state[0] ^= 0x01010000 ^ kDigest;
    std::size_t at = 0;
    do {
        const std::size_t taken = std::min(bytes.size() - at, kBlock);
        BlakeBlock block{};
        std::memcpy(block.data(), bytes.data() + at, taken);
        at += taken;
        compress(state, block, at, at == bytes.size());
    } while (at < bytes.size());
    return __builtin_bswap64(state[0]);
}

}  // namespace kvroute::decide
