// Nodes: one for each pair of an engine's hash and the key of the prefix it stands for, shared by
// all sources that agree on both; and which sources hold it where. The holders of a node are kept
// in rows of 64 sources: one row has for 64 sources whether each holds the block in one place, a
// *plane*: a group and a tier. A node held by 64 replicas on the GPU has one row of 8 bytes; nearly
// every node has one row, which lies in the node itself.
//
//     row key    word << 16 | plane     `word`: source number / 64
//     plane      group << 4 | tier      `tier`: number of the tier within its source, 0 is the GPU
// Two planes mean something else than the place of a block (see `Index`): kNotFound, kTierFound.
#pragma once

#include <cstdlib>
#include <memory>
#include <vector>

#include "index/id_table.hpp"
#include "index/memory.hpp"

namespace kvroute {

constexpr u32 kTierBits = 4;
constexpr u32 kMaxTiers = 1 << kTierBits;
constexpr u32 kMaxGroups = 256;
constexpr u32 kPlanes = kMaxGroups << kTierBits;
constexpr u32 kNotFound = kPlanes;       // placed, but its key leads to another node of the source
constexpr u32 kTierFound = kPlanes + 1;  // its key leads here in lower tiers

inline u32 plane_of(u32 group, u32 tier) { return group << kTierBits | tier; }
inline u32 tier_of_plane(u32 plane) { return plane & (kMaxTiers - 1); }
inline u32 group_of_plane(u32 plane) { return plane >> kTierBits; }
inline u32 row_key(u32 word, u32 plane) { return word << 16 | plane; }
inline u32 word_of_row(u32 key) { return key >> 16; }
inline u32 plane_of_row(u32 key) { return key & 0xFFFF; }

// Rows beyond the first, ascending by row key.
struct RowBlock {
    u32 count;
    u32 capacity;

    static std::size_t bytes_of(u32 capacity) {
        return sizeof(RowBlock) + capacity * (sizeof(u64) + sizeof(u32));
    }

    u64* bits() { return reinterpret_cast<u64*>(this + 1); }
    u32* keys() { return reinterpret_cast<u32*>(bits() + capacity); }

    static RowBlock* make(u32 capacity) {
        return new (memory_of(bytes_of(capacity))) RowBlock{0, capacity};
    }
};

struct Node {
    static constexpr u32 kNoRow = 0xFFFFFFFF;
    static constexpr u32 kManyRows = 0xFFFFFFFE;
    static constexpr u32 kFree = 0xFFFFFFFD;

    u64 hash;       // the engine's, as a number
    u64 residue;    // of the key; all ones while the block is not placed
    u32 length;     // of the prefix, in tokens; the upper bit: the key leads here
    u32 next_hash;  // another node of the same hash
    u32 next_key;   // another node of the same key
    u32 first_row;  // the key of the only row, or one of the constants above
    union {
        u64 bits;
        RowBlock* rows;
    };

    Key key() const { return {residue, length & kMaxLength}; }
    bool has_key(Key key) const {
        return residue == key.residue && (length & kMaxLength) == key.length;
    }
    bool is_linked() const { return length > kMaxLength; }
    void set_linked(bool linked) { length = (length & kMaxLength) | u32{linked} << 31; }
    bool is_placed() const { return residue != ~u64{0}; }
    bool is_used() const { return first_row != kFree; }
    bool is_bare() const { return first_row == kNoRow; }

    u32 row_count() const {
        return first_row == kManyRows ? rows->count : first_row != kNoRow;
    }
    const u32* row_keys() const { return first_row == kManyRows ? rows->keys() : &first_row; }
    const u64* row_bits() const { return first_row == kManyRows ? rows->bits() : &bits; }

    void prefetch_rows() const {
        if (first_row == kManyRows) __builtin_prefetch(rows);
    }

    u64 row(u32 key) const {
        if (first_row == key) return bits;
        if (first_row != kManyRows) return 0;
        const u32* keys = rows->keys();
        for (u32 i = 0; i < rows->count; ++i) {
            if (keys[i] == key) return rows->bits()[i];
        }
        return 0;
    }

    // True where a source holds the block anywhere.
    bool is_held_by(u32 word, u64 bit) const {
        if (first_row < kFree) {
            return word_of_row(first_row) == word && (bits & bit) &&
                   plane_of_row(first_row) < kPlanes;
        }
        if (first_row != kManyRows) return false;
        const u32* keys = rows->keys();
        for (u32 i = 0; i < rows->count; ++i) {
            if (word_of_row(keys[i]) == word && (rows->bits()[i] & bit) &&
                plane_of_row(keys[i]) < kPlanes) {
                return true;
            }
        }
        return false;
    }

    // Returns the bits of the 64 sources of a word that hold the block anywhere.
    u64 holders(u32 word) const {
        u64 found = 0;
        for (u32 i = 0; i < row_count(); ++i) {
            const u32 key = row_keys()[i];
            if (word_of_row(key) == word && plane_of_row(key) < kPlanes) found |= row_bits()[i];
        }
        return found;
    }

    void set(u32 key, u64 bit) {
        if (first_row == key) {
            bits |= bit;
        } else if (first_row == kNoRow) {
            first_row = key;
            bits = bit;
        } else {
            set_one_of_many(key, bit);
        }
    }

    void unset(u32 key, u64 bit) {
        if (first_row == key) {
            bits &= ~bit;
            if (!bits) first_row = kNoRow;
        } else if (first_row == kManyRows) {
            unset_one_of_many(key, bit);
        }
    }

    std::size_t row_memory() const {
        return first_row == kManyRows ? RowBlock::bytes_of(rows->capacity) : 0;
    }

    void release_rows() {
        if (first_row == kManyRows) std::free(rows);
        first_row = kNoRow;
    }

private:
    void set_one_of_many(u32 key, u64 bit);
    void unset_one_of_many(u32 key, u64 bit);
    void resize(u32 capacity);
};
static_assert(sizeof(Node) == 40);

// All nodes of an index, by number. They lie in pages of 1,024 that are given back when empty.
class NodeStore {
public:
    static constexpr u32 kPageBits = 10;
    static constexpr u32 kPageNodes = 1 << kPageBits;

    NodeStore() = default;
    ~NodeStore() {
        for_each([](u32, Node& node) { node.release_rows(); });
    }
    NodeStore(const NodeStore&) = delete;
    NodeStore& operator=(const NodeStore&) = delete;

    Node& operator[](u32 id) { return pages_[id >> kPageBits]->nodes[id & (kPageNodes - 1)]; }
    const Node& operator[](u32 id) const {
        return pages_[id >> kPageBits]->nodes[id & (kPageNodes - 1)];
    }
    std::size_t size() const { return size_; }

    u32 take(u64 hash, Key key);
    void release(u32 id);

    // Calls `visit(id, node)` for every node; it may release the node.
    template <class Visit>
    void for_each(Visit&& visit) {
        for (u32 number = 0; number < pages_.size(); ++number) {
            for (u32 slot = 0; slot < kPageNodes; ++slot) {
                Page* page = pages_[number].get();
                if (page == nullptr) break;
                Node& node = page->nodes[slot];
                if (node.is_used()) visit(number << kPageBits | slot, node);
            }
        }
    }

    u32 end() const { return static_cast<u32>(pages_.size()) << kPageBits; }

    // Calls `visit(id, node)` for every node from `id` on, and takes what it returns from `budget`,
    // until that is used up; returns where to go on.
    template <class Visit>
    u32 visit_from(u32 id, std::int64_t& budget, Visit&& visit) {
        while (id < end() && budget > 0) {
            Page* page = pages_[id >> kPageBits].get();
            if (page == nullptr) {
                id = ((id >> kPageBits) + 1) << kPageBits;
                continue;
            }
            Node& node = page->nodes[id & (kPageNodes - 1)];
            budget -= node.is_used() ? visit(id, node) : 1;
            ++id;
        }
        return id;
    }

    std::size_t memory() const {
        return (pages_.size() - holes_.size()) * sizeof(Page) +
               pages_.capacity() * sizeof(pages_[0]);
    }

private:
    struct Page {
        u32 used = 0;
        u32 free = 0;  // the first free slot, chained through next_hash
        bool is_listed = true;
        Node nodes[kPageNodes];
    };

    bool has_room(u32 number) const {
        return pages_[number] != nullptr && pages_[number]->free != kPageNodes;
    }

    void forget_gone_pages();
    void add_page();

    std::vector<std::unique_ptr<Page>> pages_;
    std::vector<u32> roomy_;  // pages with free slots; some may have filled up or gone
    std::vector<u32> holes_;  // page numbers without a page
    u32 empty_pages_ = 0;     // one is kept, so that a block that comes and goes costs no page
    std::size_t size_ = 0;
};

}  // namespace kvroute
