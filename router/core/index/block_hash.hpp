// Block hashes as vLLM makes them, over packed token ids: the fast form of `kvevents/hashing.py`.
//
// A block's hash is H((parent's digest, token ids, extra keys or None)), written as canonical CBOR
// or as pickle's protocol 5. Python writes the extra keys: in CBOR a value has the same bytes
// wherever it stands, and in pickle as long as its memo is equally long before it, for which the
// caller provides.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "index/digests.hpp"

namespace kvroute {

enum class Form : u8 { cbor, pickle };
enum class Digest : u8 { sha256, xxh3 };

struct HashFunction {
    Form form;
    Digest digest;

    std::size_t size() const { return digest == Digest::sha256 ? 32 : 16; }

    // Returns it by the engine's name for it.
    static std::optional<HashFunction> named(std::string_view name);
};

struct HashedBlocks {
    std::size_t block_size = 0;  // tokens between two hashes; at least 1
    std::size_t lookahead = 0;   // tokens behind a block that its hash covers too
};

// Appends the digest of every full block of `tokens` to `out`, one after the other.
//
// `extra_keys` has an entry for each block, written in the function's form; empty and missing ones
// are None. False, with `out` as it was, where the bytes that Python would write are unknown here: a
// root of another length than a digest's, or a message of more than 64 KiB in pickle's form.
bool append_block_hashes(HashFunction function, std::span<const u8> root,
                         std::span<const u32> tokens, HashedBlocks blocks,
                         std::span<const std::span<const u8>> extra_keys, std::vector<u8>& out);

}  // namespace kvroute
