// Nodes: one for each pair of an engine's hash and the key of the prefix it stands for, shared by
// all sources that agree on both; and which sources hold it where.
//
// Who holds a node is kept in rows of 64 sources: one row says for 64 sources whether each holds the
// block in one place, a *plane*: a group and a tier. A node held by 64 replicas on the GPU has one
// row of 8 bytes; nearly every node has one row, which lies in the node itself.
//
//     row key    word << 16 | plane     `word`: source number / 64
//     plane      group << 4 | tier      `tier`: number of the tier within its source, 0 is the GPU
//
// Two planes say something else than where a block is (see `index.hpp`): kNotFound, kTierFound.
#pragma once

#include <cstdlib>
#include <memory>
#include <vector>

#include "id_table.hpp"

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
        void* memory = std::malloc(bytes_of(capacity));
        if (memory == nullptr) throw std::bad_alloc();
        return new (memory) RowBlock{0, capacity};
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

    // Whether a source holds the block anywhere.
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

    // Which of the 64 sources of a word hold the block anywhere.
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
    void set_one_of_many(u32 key, u64 bit) {
        if (first_row != kManyRows) {
            RowBlock* block = RowBlock::make(2);
            block->keys()[0] = first_row;
            block->bits()[0] = bits;
            block->count = 1;
            rows = block;
            first_row = kManyRows;
        }
        u32 at = 0;
        while (at < rows->count && rows->keys()[at] < key) ++at;
        if (at < rows->count && rows->keys()[at] == key) {
            rows->bits()[at] |= bit;
            return;
        }
        if (rows->count == rows->capacity) resize(rows->capacity * 2);
        for (u32 i = rows->count; i > at; --i) {
            rows->keys()[i] = rows->keys()[i - 1];
            rows->bits()[i] = rows->bits()[i - 1];
        }
        rows->keys()[at] = key;
        rows->bits()[at] = bit;
        rows->count += 1;
    }

    void unset_one_of_many(u32 key, u64 bit) {
        u32 at = 0;
        while (at < rows->count && rows->keys()[at] != key) ++at;
        if (at == rows->count) return;
        rows->bits()[at] &= ~bit;
        if (rows->bits()[at]) return;
        rows->count -= 1;
        for (u32 i = at; i < rows->count; ++i) {
            rows->keys()[i] = rows->keys()[i + 1];
            rows->bits()[i] = rows->bits()[i + 1];
        }
        if (rows->count == 1) {
            RowBlock* block = rows;
            first_row = block->keys()[0];
            bits = block->bits()[0];
            std::free(block);
        } else if (rows->count * 4 <= rows->capacity) {
            resize(rows->capacity / 2);
        }
    }

    void resize(u32 capacity) {
        RowBlock* block = RowBlock::make(capacity);
        block->count = rows->count;
        std::memcpy(block->keys(), rows->keys(), rows->count * sizeof(u32));
        std::memcpy(block->bits(), rows->bits(), rows->count * sizeof(u64));
        std::free(rows);
        rows = block;
    }
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

    u32 take(u64 hash, Key key) {
        while (!roomy_.empty() && !has_room(roomy_.back())) {
            if (Page* page = pages_[roomy_.back()].get()) page->is_listed = false;
            roomy_.pop_back();
        }
        if (roomy_.empty()) add_page();
        const u32 number = roomy_.back();
        Page& page = *pages_[number];
        const u32 slot = page.free;
        Node& node = page.nodes[slot];
        page.free = node.next_hash;
        empty_pages_ -= page.used == 0;
        page.used += 1;
        size_ += 1;
        node.hash = hash;
        node.residue = key.residue;
        node.length = key.length;
        node.next_hash = node.next_key = kNone;
        node.first_row = Node::kNoRow;
        return number << kPageBits | slot;
    }

    void release(u32 id) {
        const u32 number = id >> kPageBits;
        Page& page = *pages_[number];
        Node& node = (*this)[id];
        node.release_rows();
        node.first_row = Node::kFree;
        node.next_hash = page.free;
        page.free = id & (kPageNodes - 1);
        page.used -= 1;
        size_ -= 1;
        if (!page.is_listed) {
            page.is_listed = true;
            roomy_.push_back(number);
        }
        if (page.used == 0 && ++empty_pages_ > 1) {
            --empty_pages_;
            pages_[number].reset();
            holes_.push_back(number);
            if (roomy_.size() > 2 * pages_.size()) forget_gone_pages();
        }
    }

    // Calls `visit(id, node)` for every node; it may release the node.
    template <class Visit>
    void for_each(Visit&& visit) {
        for (u32 number = 0; number < pages_.size(); ++number) {
            for (u32 slot = 0; slot < kPageNodes; ++slot) {
                Page* page = pages_[number].get();
                if (page == nullptr) break;
                if (page->nodes[slot].is_used()) visit(number << kPageBits | slot, page->nodes[slot]);
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

    void forget_gone_pages() {
        roomy_.clear();
        for (u32 number = 0; number < pages_.size(); ++number) {
            if (pages_[number] == nullptr) continue;
            pages_[number]->is_listed = has_room(number);
            if (has_room(number)) roomy_.push_back(number);
        }
    }

    void add_page() {
        u32 number = static_cast<u32>(pages_.size());
        if (holes_.empty()) {
            pages_.emplace_back();
        } else {
            number = holes_.back();
            holes_.pop_back();
        }
        pages_[number].reset(new Page);
        empty_pages_ += 1;
        for (u32 slot = 0; slot < kPageNodes; ++slot) {
            pages_[number]->nodes[slot].first_row = Node::kFree;
            pages_[number]->nodes[slot].next_hash = slot + 1;
        }
        roomy_.push_back(number);
    }

    std::vector<std::unique_ptr<Page>> pages_;
    std::vector<u32> roomy_;  // pages with free slots; some may have filled up or gone
    std::vector<u32> holes_;  // page numbers without a page
    u32 empty_pages_ = 0;     // one is kept, so that a block that comes and goes costs no page
    std::size_t size_ = 0;
};

}  // namespace kvroute
