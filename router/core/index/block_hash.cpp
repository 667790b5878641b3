#include "index/block_hash.hpp"

namespace kvroute {

namespace {

using detail::write_big;

// A buffer of bytes; `ensure` comes before a run of `put`s.
class Message {
public:
    void clear() { size_ = 0; }
    std::span<const u8> bytes() const { return {buffer_.data(), size_}; }
    std::size_t size() const { return size_; }
    u8* at(std::size_t place) { return buffer_.data() + place; }

    void ensure(std::size_t more) {
        if (buffer_.size() < size_ + more) buffer_.resize(2 * (size_ + more));
    }
    void put(u8 byte) { buffer_[size_++] = byte; }
    void put(const u8* from, std::size_t count) {
        if (count) std::memcpy(buffer_.data() + size_, from, count);
        size_ += count;
    }
    template <typename Number>
    void put_big(Number value) {
        write_big(buffer_.data() + size_, value);
        size_ += sizeof(value);
    }
    void put_little(u64 value, int count) {
        for (int i = 0; i < count; ++i) buffer_[size_++] = static_cast<u8>(value >> (8 * i));
    }

private:
    std::vector<u8> buffer_ = std::vector<u8>(1024);
    std::size_t size_ = 0;
};

// RFC 8949, section 4.2: every number in the fewest bytes.
class CborWriter {
public:
    static constexpr std::size_t kMostBytes = 9;

    void start(Message&) {}
    void head(Message& out, u8 major, u64 number) {
        if (number < 24) {
            out.put(static_cast<u8>(major | number));
        } else if (number < 0x100) {
            out.put(major | 24);
            out.put(static_cast<u8>(number));
        } else if (number < 0x10000) {
            out.put(major | 25);
            out.put_big(static_cast<std::uint16_t>(number));
        } else if (number <= 0xFFFFFFFF) {
            out.put(major | 26);
            out.put_big(static_cast<u32>(number));
        } else {
            out.put(major | 27);
            out.put_big(number);
        }
    }
    void open(Message& out, std::size_t items) { head(out, 0x80, items); }
    void close(Message&, std::size_t) {}
    void number(Message& out, u32 value) { head(out, 0x00, value); }
    void none(Message& out) { out.put(0xF6); }
    void raw(Message& out, std::span<const u8> bytes) {
        head(out, 0x40, bytes.size());
        out.put(bytes.data(), bytes.size());
    }
    bool finish(Message&) { return true; }
};

// Pickle, protocol 5: opcodes, in one frame.
class PickleWriter {
public:
    static constexpr std::size_t kMostBytes = 16;
    static constexpr std::size_t kFrameStart = 11, kLargestFrame = 64 * 1024;

    void start(Message& out) {
        out.put(0x80);
        out.put(5);
        out.put(0x95);
        out.put_little(0, 8);  // the frame's length, once it is known
    }
    void open(Message& out, std::size_t items) {
        if (items > 3) out.put('(');
    }
    void close(Message& out, std::size_t items) {
        if (items == 0) {
            out.put(')');
            return;  // the empty tuple is not memoized
        }
        out.put(items > 3 ? 't' : static_cast<u8>(0x84 + items));
        out.put(0x94);
    }
    void number(Message& out, u32 value) {
        if (value < 0x100) {
            out.put('K');
            out.put_little(value, 1);
        } else if (value < 0x10000) {
            out.put('M');
            out.put_little(value, 2);
        } else if (value <= 0x7FFFFFFF) {
            out.put('J');
            out.put_little(value, 4);
        } else {
            out.put(0x8A);
            out.put(5);
            out.put_little(value, 5);
        }
    }
    void none(Message& out) { out.put('N'); }
    void raw(Message& out, std::span<const u8> bytes) {
        out.put('C');
        out.put(static_cast<u8>(bytes.size()));
        out.put(bytes.data(), bytes.size());
        out.put(0x94);
    }
    // False where Python would begin a second frame.
    bool finish(Message& out) {
        out.put('.');
        const std::size_t length = out.size() - kFrameStart;
        if (length >= kLargestFrame) return false;
        for (int i = 0; i < 8; ++i) out.at(3)[i] = static_cast<u8>(u64{length} >> (8 * i));
        return true;
    }
};

template <typename Writer>
bool append_written(Writer writer, HashFunction function, std::span<const u8> root,
                    std::span<const u32> tokens, HashedBlocks blocks,
                    std::span<const std::span<const u8>> extra_keys, std::vector<u8>& out) {
    if (!blocks.block_size || (root.size() != 16 && root.size() != 32)) return false;
    if (tokens.size() < blocks.lookahead) return true;
    const std::size_t count = (tokens.size() - blocks.lookahead) / blocks.block_size;
    const std::size_t before = out.size(), size = function.size();
    out.resize(before + count * size);
    Message message;
    for (std::size_t i = 0; i < count; ++i) {
        const auto block = tokens.subspan(i * blocks.block_size);
        const auto extra = i < extra_keys.size() ? extra_keys[i] : std::span<const u8>();
        const std::size_t numbers = blocks.block_size + blocks.lookahead;
        message.clear();
        message.ensure((numbers + 8) * Writer::kMostBytes + 32 + extra.size());
        writer.start(message);
        writer.open(message, 3);
        writer.raw(message, root);
        writer.open(message, blocks.block_size);
        for (u32 token : block.first(blocks.block_size)) writer.number(message, token);
        writer.close(message, blocks.block_size);
        if (blocks.lookahead) writer.open(message, 1 + blocks.lookahead);
        if (extra.empty()) {
            writer.none(message);
        } else {
            message.put(extra.data(), extra.size());
        }
        if (blocks.lookahead) {
            for (u32 token : block.subspan(blocks.block_size, blocks.lookahead)) {
                writer.number(message, token);
            }
            writer.close(message, 1 + blocks.lookahead);
        }
        writer.close(message, 3);
        if (!writer.finish(message)) {
            out.resize(before);
            return false;
        }
        u8* digest = out.data() + before + i * size;
        if (function.digest == Digest::sha256) {
            sha256(message.bytes(), digest);
        } else {
            xxh3_128(message.bytes(), digest);
        }
        root = {digest, size};
    }
    return true;
}

}  // namespace

std::optional<HashFunction> HashFunction::named(std::string_view name) {
    if (name == "sha256") return HashFunction{Form::pickle, Digest::sha256};
    if (name == "sha256_cbor") return HashFunction{Form::cbor, Digest::sha256};
    if (name == "xxhash") return HashFunction{Form::pickle, Digest::xxh3};
    if (name == "xxhash_cbor") return HashFunction{Form::cbor, Digest::xxh3};
    return std::nullopt;
}

bool append_block_hashes(HashFunction function, std::span<const u8> root,
                         std::span<const u32> tokens, HashedBlocks blocks,
                         std::span<const std::span<const u8>> extra_keys, std::vector<u8>& out) {
    if (function.form == Form::cbor) {
        return append_written(CborWriter(), function, root, tokens, blocks, extra_keys, out);
    }
    return append_written(PickleWriter(), function, root, tokens, blocks, extra_keys, out);
}

}  // namespace kvroute
