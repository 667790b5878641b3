#include "index/digests.hpp"

#include <array>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace kvroute {

namespace {

using detail::read_big;
using detail::read_little;
using detail::write_big;

// --- SHA-256 -------------------------------------------------------------------------------------

alignas(16) constexpr u32 kShaRounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

constexpr std::array<u32, 8> kShaStart = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

using ShaState = std::array<u32, 8>;

void sha256_portable(ShaState& state, const u8* block, std::size_t blocks) {
    for (; blocks; --blocks, block += 64) {
        u32 w[64];
        for (int i = 0; i < 16; ++i) w[i] = read_big<u32>(block + 4 * i);
        for (int i = 16; i < 64; ++i) {
            const u32 early = w[i - 15], late = w[i - 2];
            w[i] = w[i - 16] + w[i - 7] +
                   (std::rotr(early, 7) ^ std::rotr(early, 18) ^ (early >> 3)) +
                   (std::rotr(late, 17) ^ std::rotr(late, 19) ^ (late >> 10));
        }
        auto [a, b, c, d, e, f, g, h] = state;
        for (int i = 0; i < 64; ++i) {
            const u32 first = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                              ((e & f) ^ (~e & g)) + kShaRounds[i] + w[i];
            const u32 second = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) +
                               ((a & b) ^ (a & c) ^ (b & c));
            h = g, g = f, f = e, e = d + first, d = c, c = b, b = a, a = first + second;
        }
        const u32 after[8] = {a, b, c, d, e, f, g, h};
        for (int i = 0; i < 8; ++i) state[i] += after[i];
    }
}

#if defined(__x86_64__)
// The processor's own instructions; the state lies in two registers as it wants it: ABEF, CDGH.
__attribute__((target("sha,sse4.1,ssse3"))) void sha256_x86(ShaState& state, const u8* block,
                                                                   std::size_t blocks) {
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(&state[0]));   // DCBA
    __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(&state[4]));  // HGFE
    low = _mm_shuffle_epi32(low, 0xB1);
    high = _mm_shuffle_epi32(high, 0x1B);
    __m128i abef = _mm_alignr_epi8(low, high, 8);
    __m128i cdgh = _mm_blend_epi16(high, low, 0xF0);
    for (; blocks; --blocks, block += 64) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i w[4];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
            __m128i& now = w[i & 3];
            if (i < 4) {
                now = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block) + i);
                now = _mm_shuffle_epi8(now, big_endian);
            } else {
                const __m128i last = w[(i + 3) & 3];
                now = _mm_sha256msg1_epu32(now, w[(i + 1) & 3]);
                now = _mm_add_epi32(now, _mm_alignr_epi8(last, w[(i + 2) & 3], 4));
                now = _mm_sha256msg2_epu32(now, last);
            }
            const __m128i rounds =
                _mm_add_epi32(now, reinterpret_cast<const __m128i*>(kShaRounds)[i]);
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, rounds);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(rounds, 0x0E));
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    low = _mm_shuffle_epi32(abef, 0x1B);   // FEBA
    high = _mm_shuffle_epi32(cdgh, 0xB1);  // DCHG
    _mm_storeu_si128(reinterpret_cast<__m128i*>(&state[0]), _mm_blend_epi16(low, high, 0xF0));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(&state[4]), _mm_alignr_epi8(high, low, 8));
}

bool has_sha_instructions() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_SSE4_1)) return false;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & (1u << 29));
}
#endif

using ShaBlocks = void (*)(ShaState&, const u8*, std::size_t);

ShaBlocks fastest_sha256() {
#if defined(__x86_64__)
    if (has_sha_instructions()) return sha256_x86;
#endif
    return sha256_portable;
}

void sha256(std::span<const u8> message, u8* out, ShaBlocks digest_blocks) {
    ShaState state = kShaStart;
    const std::size_t whole = message.size() / 64, left = message.size() % 64;
    digest_blocks(state, message.data(), whole);
    u8 end[128] = {};
    if (left) std::memcpy(end, message.data() + whole * 64, left);
    end[left] = 0x80;
    const std::size_t blocks = left < 56 ? 1 : 2;
    write_big<u64>(end + blocks * 64 - 8, static_cast<u64>(message.size()) * 8);
    digest_blocks(state, end, blocks);
    for (int i = 0; i < 8; ++i) write_big(out + 4 * i, state[i]);
}

// --- XXH3, 128 bits ------------------------------------------------------------------------------

// The default secret of the specification.
constexpr u8 kSecret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

constexpr u64 kPrime32_1 = 0x9E3779B1, kPrime32_2 = 0x85EBCA77, kPrime32_3 = 0xC2B2AE3D;
constexpr u64 kPrime64_1 = 0x9E3779B185EBCA87, kPrime64_2 = 0xC2B2AE3D27D4EB4F,
                     kPrime64_3 = 0x165667B19E3779F9, kPrime64_4 = 0x85EBCA77C2B2AE63,
                     kPrime64_5 = 0x27D4EB2F165667C5;

struct Sums {
    u64 low, high;
};

u64 folded_product(u64 left, u64 right) {
    const u128 product = static_cast<u128>(left) * right;
    return static_cast<u64>(product) ^ static_cast<u64>(product >> 64);
}

u64 avalanche(u64 value) {
    value = (value ^ (value >> 37)) * 0x165667919E3779F9;
    return value ^ (value >> 32);
}

u64 word(const u8* from) { return read_little<u64>(from); }

u64 mixed_16(const u8* from, const u8* secret) {
    return folded_product(word(from) ^ word(secret), word(from + 8) ^ word(secret + 8));
}

void mix_32(Sums& sums, const u8* first, const u8* second, const u8* secret) {
    sums.low = (sums.low + mixed_16(first, secret)) ^ (word(second) + word(second + 8));
    sums.high = (sums.high + mixed_16(second, secret + 16)) ^ (word(first) + word(first + 8));
}

Sums finished(Sums sums, u64 size) {
    const u64 high = sums.low * kPrime64_1 + sums.high * kPrime64_4 + size * kPrime64_2;
    return {avalanche(sums.low + sums.high), 0 - avalanche(high)};
}

// 17 to 128 bytes: from both ends to the middle.
Sums of_short(const u8* in, std::size_t size) {
    Sums sums{size * kPrime64_1, 0};
    for (std::size_t pair = (size - 1) / 32 + 1; pair-- > 0;) {
        mix_32(sums, in + 16 * pair, in + size - 16 * (pair + 1), kSecret + 32 * pair);
    }
    return finished(sums, size);
}

// 129 to 240 bytes: 32 at a time.
Sums of_middle(const u8* in, std::size_t size) {
    Sums sums{size * kPrime64_1, 0};
    for (std::size_t i = 0; i < size / 32; ++i) {
        if (i == 4) sums = {avalanche(sums.low), avalanche(sums.high)};
        const u8* secret = i < 4 ? kSecret + 32 * i : kSecret + 3 + 32 * (i - 4);
        mix_32(sums, in + 32 * i, in + 32 * i + 16, secret);
    }
    if (size / 32 == 4) sums = {avalanche(sums.low), avalanche(sums.high)};
    mix_32(sums, in + size - 16, in + size - 32, kSecret + 136 - 17 - 16);
    return finished(sums, size);
}

// Over 240 bytes: stripes of 64, eight sums side by side.
class Stripes {
public:
    // `secret`: of the same size as the default one.
    Stripes(const u8* in, std::size_t size, const u8* secret = kSecret) {
        constexpr std::size_t kStripe = 64, kInBlock = (sizeof(kSecret) - kStripe) / 8;
        std::size_t stripe = 0;
        for (; (stripe + 1) * kStripe < size; ++stripe) {
            add(in + stripe * kStripe, secret + 8 * (stripe % kInBlock));
            if (stripe % kInBlock == kInBlock - 1) scramble(secret + sizeof(kSecret) - kStripe);
        }
        add(in + size - kStripe, secret + sizeof(kSecret) - kStripe - 7);
    }

    u64 merged(const u8* secret, u64 start) const {
        for (int i = 0; i < 4; ++i, secret += 16) {
            start += folded_product(sums_[2 * i] ^ word(secret),
                                    sums_[2 * i + 1] ^ word(secret + 8));
        }
        return avalanche(start);
    }

private:
    void add(const u8* in, const u8* secret) {
        for (int i = 0; i < 8; ++i) {
            const u64 value = word(in + 8 * i), keyed = value ^ word(secret + 8 * i);
            sums_[i ^ 1] += value;
            sums_[i] += (keyed & 0xFFFFFFFF) * (keyed >> 32);
        }
    }
    void scramble(const u8* secret) {
        for (int i = 0; i < 8; ++i) {
            sums_[i] = (sums_[i] ^ (sums_[i] >> 47) ^ word(secret + 8 * i)) * kPrime32_1;
        }
    }

    u64 sums_[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                    kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
};

Sums of_long(const u8* in, std::size_t size) {
    const Stripes stripes(in, size);
    return {stripes.merged(kSecret + 11, size * kPrime64_1),
            stripes.merged(kSecret + sizeof(kSecret) - 64 - 11, ~(size * kPrime64_2))};
}

}  // namespace

void sha256(std::span<const u8> message, u8* out) {
    static const ShaBlocks digest_blocks = fastest_sha256();
    sha256(message, out, digest_blocks);
}

void xxh3_128(std::span<const u8> message, u8* out) {
    const u8* in = message.data();
    const std::size_t size = message.size();
    const Sums sums = size <= 128 ? of_short(in, size)
                      : size <= 240 ? of_middle(in, size)
                                    : of_long(in, size);
    write_big(out, sums.high);
    write_big(out + 8, sums.low);
}

}  // namespace kvroute
