// Keys: this index's own names for prefixes of tokens, which do not depend on the engines' hashes.
//
// A prefix is read as a polynomial over its tokens, and its key is the value of that polynomial at
// a secret point modulo the prime 2^61 - 1, together with the number of tokens. So a key can be
// extended by any number of tokens, engines with different block sizes share one key space, and an
// outsider who does not know the point cannot craft two prompts with one key. Anything else that
// decides a block's content - adapter, salt, multimodal items - is folded in at a second secret point,
// so that no sequence of tokens can imitate it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace kvroute {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
__extension__ typedef unsigned __int128 u128;

constexpr u64 kPrime = (u64{1} << 61) - 1;

// Returns any 128-bit number modulo 2^61 - 1.
inline u64 reduced(u128 value) {
    u64 sum = static_cast<u64>(value & kPrime) + static_cast<u64>((value >> 61) & kPrime) +
              static_cast<u64>(value >> 122);
    sum = (sum & kPrime) + (sum >> 61);
    return sum >= kPrime ? sum - kPrime : sum;
}

inline u64 times(u64 left, u64 right) { return reduced(static_cast<u128>(left) * right); }

// Returns 64 bits in which every bit of the input counts, for tables. Secret, so that no one can fill
// one place of a table on purpose.
inline u64 mixed(u64 value, u64 secret) {
    u128 product = static_cast<u128>(value ^ secret) * 0x9E3779B97F4A7C15u;
    u64 folded = static_cast<u64>(product) ^ static_cast<u64>(product >> 64);
    product = static_cast<u128>(folded ^ (secret >> 1)) * 0xD6E8FEB86659FD93u;
    return static_cast<u64>(product) ^ static_cast<u64>(product >> 64);
}

constexpr u32 kMaxLength = 0x7FFFFFFF;

// A prefix; `residue` alone decides nearly always, `length` is where its last block ends.
struct Key {
    u64 residue = ~u64{0};
    u32 length = 0;

    bool is_known() const { return residue != ~u64{0}; }
    bool operator==(const Key& other) const {
        return residue == other.residue && length == other.length;
    }
};

// Something besides tokens that decides a run's content from one token on.
struct Mark {
    u64 position = 0;  // of that token, counted from the start of the run
    u64 digest = 0;

    bool operator==(const Mark& other) const {
        return position == other.position && digest == other.digest;
    }
    bool operator<(const Mark& other) const {
        return position != other.position ? position < other.position : digest < other.digest;
    }
};

// The two secret points, and the keys that follow from them.
class KeySpace {
public:
    static constexpr std::size_t kStride = 16;

    // `secrets` are two random numbers; equal ones give equal keys.
    explicit KeySpace(std::array<u64, 2> secrets)
        : secrets_(secrets), point_(secret_point(secrets[0])), fold_(secret_point(secrets[1])) {
        powers_[0] = 1;
        for (std::size_t i = 1; i <= kStride; ++i) powers_[i] = times(powers_[i - 1], point_);
    }

    std::array<u64, 2> secrets() const { return secrets_; }
    u64 table_secret() const { return times(secrets_[0] >> 3, fold_) << 3 | (secrets_[1] & 7); }

    // Returns `residue` behind `total` more numbers, of which only the last `numbers.size()` are given;
    // those before them are taken as 0.
    u64 extended(u64 residue, std::span<const u32> numbers, std::size_t total) const {
        if (total > numbers.size()) residue = times(residue, power(total - numbers.size()));
        const u32* next = numbers.data();
        std::size_t left = numbers.size();
        for (; left >= kStride; left -= kStride, next += kStride) {
            residue = stride(residue, next, kStride);
        }
        return left ? stride(residue, next, left) : residue;
    }

    // Returns `residue` with 64 bits folded in that are no tokens.
    u64 folded(u64 residue, u64 value) const {
        residue = reduced(static_cast<u128>(residue) * fold_ + (value >> 32) + 1);
        return reduced(static_cast<u128>(residue) * fold_ + (value & 0xFFFFFFFF) + 1);
    }

    // Returns the key of the empty prefix under an adapter's digest.
    Key root(u64 adapter) const { return {folded(1, adapter), 0}; }

    // Returns a digest of bytes of some kind: two kinds never have one in common, but for chance.
    u64 digest(u8 kind, const u8* bytes, std::size_t size) const;

private:
    static u64 secret_point(u64 secret) { return 2 + secret % (kPrime - 3); }

    u64 stride(u64 residue, const u32* numbers, std::size_t count) const {
        u128 sum = static_cast<u128>(residue) * powers_[count];
        for (std::size_t i = 0; i < count; ++i) {
            sum += static_cast<u128>(numbers[i]) * powers_[count - 1 - i];
        }
        return reduced(sum);
    }

    u64 power(std::size_t exponent) const;

    std::array<u64, 2> secrets_;
    u64 point_;
    u64 fold_;
    std::array<u64, kStride + 1> powers_{};
};

// The keys of a run, one end after the other: `chain.until(end)` for ascending ends.
//
// With a mark at 20: until(16) covers tokens 0-15; until(32) covers 16-19, the mark, 20-31.
class KeyChain {
public:
    KeyChain(const KeySpace& space, Key parent, std::span<const u32> tokens,
             std::span<const Mark> marks)
        : space_(space), tokens_(tokens), marks_(marks), residue_(parent.residue),
          before_(parent.length) {}

    Key until(u64 end) {
        while (!marks_.empty() && marks_.front().position < end) {
            if (marks_.front().position > at_) extend(marks_.front().position);
            residue_ = space_.folded(residue_, marks_.front().digest);
            marks_ = marks_.subspan(1);
        }
        extend(end);
        return {residue_, static_cast<u32>((before_ + end) & kMaxLength)};
    }

private:
    void extend(u64 end) {
        std::size_t from = at_ < tokens_.size() ? at_ : tokens_.size();
        std::size_t to = end < tokens_.size() ? end : tokens_.size();
        residue_ = space_.extended(residue_, tokens_.subspan(from, to - from), end - at_);
        at_ = end;
    }

    const KeySpace& space_;
    std::span<const u32> tokens_;
    std::span<const Mark> marks_;
    u64 residue_;
    u64 before_;
    u64 at_ = 0;
};

}  // namespace kvroute
