#include "index/tables.hpp"

namespace kvroute {

std::size_t NodeTables::memory() {
    std::size_t rows = 0;
    nodes_.for_each([&](u32, Node& node) { rows += node.row_memory(); });
    return nodes_.memory() + by_hash_.memory() + by_key_.memory() + rows;
}

u32 NodeTables::node_for(u64 hash, u32 head, Key key) {
    const u32 known = node_with(head, key);
    if (known != kNone) return known;
    const u32 id = nodes_.take(hash, key);
    if (head == kNone) {
        by_hash_.insert(hash_of(hash), id);
    } else {
        nodes_[id].next_hash = nodes_[head].next_hash;
        nodes_[head].next_hash = id;
    }
    return id;
}

void NodeTables::link(u32 id, u32 head) {
    Node& node = nodes_[id];
    if (node.is_linked()) return;
    if (head == kNone) {
        by_key_.insert(hash_of_key(node.key()), id);
    } else {
        node.next_key = nodes_[head].next_key;
        nodes_[head].next_key = id;
    }
    node.set_linked(true);
}

void NodeTables::unlink(u32 id) {
    Node& node = nodes_[id];
    if (!node.is_linked()) return;
    const u64 hash = hash_of_key(node.key());
    const u32 head = first_with(node.key());
    if (head != id) {
        u32 before = head;
        while (nodes_[before].next_key != id) before = nodes_[before].next_key;
        nodes_[before].next_key = node.next_key;
    } else if (node.next_key != kNone) {
        by_key_.replace(hash, id, node.next_key);
    } else {
        by_key_.erase(hash, id);
    }
    node.next_key = kNone;
    node.set_linked(false);
}

void NodeTables::refresh_link(u32 id) {
    const Node& node = nodes_[id];
    for (u32 i = 0; i < node.row_count(); ++i) {
        const u32 row = node.row_keys()[i];
        if (plane_of_row(row) == kTierFound) return;
        if (plane_of_row(row) < kPlanes &&
            node.row_bits()[i] & ~node.row(row_key(word_of_row(row), kNotFound))) {
            return;
        }
    }
    unlink(id);
}

void NodeTables::release_if_bare(u32 id) {
    Node& node = nodes_[id];
    if (!node.is_bare()) return;
    if (node.is_placed()) unlink(id);
    const u32 head = first_of(node.hash);
    if (head != id) {
        u32 before = head;
        while (nodes_[before].next_hash != id) before = nodes_[before].next_hash;
        nodes_[before].next_hash = node.next_hash;
    } else if (node.next_hash != kNone) {
        by_hash_.replace(hash_of(node.hash), id, node.next_hash);
    } else {
        by_hash_.erase(hash_of(node.hash), id);
    }
    nodes_.release(id);
}

}  // namespace kvroute
