#include "index/nodes.hpp"

namespace kvroute {

void Node::set_one_of_many(u32 key, u64 bit) {
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

void Node::unset_one_of_many(u32 key, u64 bit) {
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

void Node::resize(u32 capacity) {
    RowBlock* block = RowBlock::make(capacity);
    block->count = rows->count;
    std::memcpy(block->keys(), rows->keys(), rows->count * sizeof(u32));
    std::memcpy(block->bits(), rows->bits(), rows->count * sizeof(u64));
    std::free(rows);
    rows = block;
}

u32 NodeStore::take(u64 hash, Key key) {
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

void NodeStore::release(u32 id) {
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

void NodeStore::forget_gone_pages() {
    roomy_.clear();
    for (u32 number = 0; number < pages_.size(); ++number) {
        if (pages_[number] == nullptr) continue;
        pages_[number]->is_listed = has_room(number);
        if (has_room(number)) roomy_.push_back(number);
    }
}

void NodeStore::add_page() {
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

}  // namespace kvroute
