// The nodes of an index, and the two ways to find one: by the engine's hash, and by key.
//
// Many nodes may have one hash, since each source defines its own hashes; and many one key, since
// engines with other seeds hash a prefix in other ways. Either are in a list, of which a table has
// the first.
#pragma once

#include "index/nodes.hpp"

namespace kvroute {

class NodeTables {
public:
    // `secret`: spreads the hashes, which an engine chooses.
    explicit NodeTables(u64 secret)
        : hash_hashes_{&nodes_, secret}, key_hashes_{&nodes_}, by_hash_(hash_hashes_),
          by_key_(key_hashes_) {}

    Node& operator[](u32 id) { return nodes_[id]; }
    const Node& operator[](u32 id) const { return nodes_[id]; }
    NodeStore& store() { return nodes_; }
    std::size_t size() const { return nodes_.size(); }
    // Returns the number of entries of the tables.
    std::size_t hashes() const { return by_hash_.size(); }
    std::size_t keys() const { return by_key_.size(); }
    // Returns the bytes of nodes, rows and tables. A walk over all nodes.
    std::size_t memory();

    // --- by hash ---

    // Returns the first node of a hash; the others follow by `next_hash`.
    u32 first_of(u64 hash) const {
        return by_hash_.find(hash_of(hash), [&](u32 id) { return nodes_[id].hash == hash; });
    }
    // Fetches the memory that `first_of` will read first, and then.
    void prefetch_hash(u64 hash) const { by_hash_.prefetch(hash_of(hash)); }
    void prefetch_node(u64 hash) const {
        const u32 id = by_hash_.guess(hash_of(hash));
        if (id != kNone) __builtin_prefetch(&nodes_[id]);
    }
    // Returns a hash's node, from `head` on, that has this key; kNone if there is none.
    u32 node_with(u32 head, Key key) const {
        while (head != kNone && !nodes_[head].has_key(key)) head = nodes_[head].next_hash;
        return head;
    }
    // Returns the node of a hash and a key, made if there is none. `head`: the first node of the hash.
    u32 node_for(u64 hash, u32 head, Key key);

    // --- by key ---

    // A residue depends on a secret in every bit: spreading it is enough.
    static u64 hash_of_key(Key key) {
        const u128 product = static_cast<u128>(key.residue + (u64{key.length} << 32)) *
                             0x9E3779B97F4A7C15u;
        return static_cast<u64>(product) ^ static_cast<u64>(product >> 64);
    }
    // Returns the first node of a key; the others follow by `next_key`.
    u32 first_with(Key key) const {
        return by_key_.find(hash_of_key(key), [&](u32 id) { return nodes_[id].has_key(key); });
    }
    // Fetches, by the hash of a key, what the look-up will read; then a node that may have it.
    void prefetch_key(u64 key_hash) const { by_key_.prefetch(key_hash); }
    u32 guess_with(u64 key_hash) const {
        const u32 id = by_key_.guess(key_hash);
        if (id != kNone) __builtin_prefetch(&nodes_[id]);
        return id;
    }
    // Puts a node into the list of its key. `head`: the first node of that.
    void link(u32 id, u32 head);
    // Takes a node out of its key's list where no source finds it any more.
    void refresh_link(u32 id);

    // Forgets a node that no source holds.
    void release_if_bare(u32 id);

private:
    struct HashHashes {
        const NodeStore* nodes;
        u64 secret;
        u64 hash_of(u32 id) const { return mixed((*nodes)[id].hash, secret); }
        void prefetch(u32 id) const { __builtin_prefetch(&(*nodes)[id]); }
    };
    struct KeyHashes {
        const NodeStore* nodes;
        u64 hash_of(u32 id) const { return hash_of_key((*nodes)[id].key()); }
        void prefetch(u32 id) const { __builtin_prefetch(&(*nodes)[id]); }
    };

    u64 hash_of(u64 hash) const { return mixed(hash, hash_hashes_.secret); }
    void unlink(u32 id);

    NodeStore nodes_;
    HashHashes hash_hashes_;
    KeyHashes key_hashes_;
    IdTable<HashHashes> by_hash_;  // the first node of every hash
    IdTable<KeyHashes> by_key_;    // of every key that some source finds a node by; see `Index`
};

}  // namespace kvroute
