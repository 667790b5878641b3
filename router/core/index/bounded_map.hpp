// Maps by an engine's hashes.
#pragma once

#include <deque>
#include <unordered_map>
#include <vector>

#include "index/id_table.hpp"

namespace kvroute {

// A secret hash for tables of the standard library: an engine chooses its hashes, and if it chose some
// that share one place, every look-up would walk over all of them.
struct SecretHash {
    u64 secret;
    std::size_t operator()(u64 hash) const { return mixed(hash, secret); }
};

template <class Value>
using MapByHash = std::unordered_map<u64, Value, SecretHash>;

// A map from (group, hash) that forgets its oldest entries beyond a bound. To set an entry anew
// does not make it younger.
template <class Value>
class BoundedMap {
public:
    struct Entry {
        u64 hash;
        u32 group;
        bool is_live;
        Value value;
    };

    explicit BoundedMap(u64 secret) : secret_(secret) {}

    std::size_t size() const { return live_; }
    std::size_t memory() const {
        return entries_.size() * sizeof(Entry) + slots_.capacity() * sizeof(u32);
    }

    const Value* find(u64 hash, u32 group = 0) const {
        const u32 at = place_of(hash, group);
        return at == kNone ? nullptr : &entry(slots_[at]).value;
    }

    void put(u64 hash, const Value& value, u64 bound, u32 group = 0) {
        const u32 at = place_of(hash, group);
        if (at != kNone) {
            entry(slots_[at]).value = value;
            return;
        }
        if ((live_ + 1) * 3 > slots_.size() * 2 || first_ > kMaxLength) resize(live_ + 1);
        entries_.push_back({hash, group, true, value});
        insert(first_ + static_cast<u32>(entries_.size()) - 1);
        ++live_;
        while (live_ > bound) pop_oldest();
    }

    bool take(u64 hash, Value& out, u32 group = 0) {
        if (!live_) return false;
        const u32 at = place_of(hash, group);
        if (at == kNone) return false;
        Entry& found = entry(slots_[at]);
        out = found.value;
        found.is_live = false;
        remove_at(at);
        --live_;
        if (entries_.size() > 2 * live_ + 64) resize(live_);
        return true;
    }

    void clear() {
        entries_ = {};
        slots_ = {};
        live_ = 0;
    }

    // Calls `visit(entry)`, the oldest first.
    template <class Visit>
    void for_each(Visit&& visit) const {
        for (const Entry& each : entries_) {
            if (each.is_live) visit(each);
        }
    }

private:
    Entry& entry(u32 number) { return entries_[number - first_]; }
    const Entry& entry(u32 number) const { return entries_[number - first_]; }

    u32 home_of(u64 hash, u32 group) const {
        return static_cast<u32>(mixed(hash, secret_ + group)) & static_cast<u32>(slots_.size() - 1);
    }

    u32 place_of(u64 hash, u32 group) const {
        if (slots_.empty()) return kNone;
        const u32 mask = static_cast<u32>(slots_.size() - 1);
        for (u32 at = home_of(hash, group); slots_[at] != kNone; at = (at + 1) & mask) {
            const Entry& found = entry(slots_[at]);
            if (found.hash == hash && found.group == group) return at;
        }
        return kNone;
    }

    void insert(u32 number) {
        const u32 mask = static_cast<u32>(slots_.size() - 1);
        u32 at = home_of(entry(number).hash, entry(number).group);
        while (slots_[at] != kNone) at = (at + 1) & mask;
        slots_[at] = number;
    }

    // Closes the gap, so that look-ups need no marker of an erased entry.
    void remove_at(u32 gap) {
        const u32 mask = static_cast<u32>(slots_.size() - 1);
        for (u32 at = (gap + 1) & mask; slots_[at] != kNone; at = (at + 1) & mask) {
            const Entry& found = entry(slots_[at]);
            const u32 home = home_of(found.hash, found.group);
            if (((at - home) & mask) >= ((at - gap) & mask)) {
                slots_[gap] = slots_[at];
                gap = at;
            }
        }
        slots_[gap] = kNone;
    }

    void pop_oldest() {
        while (!entries_.front().is_live) drop_front();
        remove_at(place_of(entries_.front().hash, entries_.front().group));
        drop_front();
        --live_;
    }

    void drop_front() {
        entries_.pop_front();
        ++first_;
    }

    void resize(std::size_t wanted) {
        std::deque<Entry> kept;
        for (const Entry& each : entries_) {
            if (each.is_live) kept.push_back(each);
        }
        entries_.swap(kept);
        first_ = 0;
        std::size_t size = 16;
        while (size * 2 < wanted * 4) size *= 2;
        slots_.assign(size, kNone);
        slots_.shrink_to_fit();
        for (u32 i = 0; i < entries_.size(); ++i) insert(i);
    }

    u64 secret_;
    std::deque<Entry> entries_;
    u32 first_ = 0;            // number of the first entry
    std::vector<u32> slots_;   // numbers of entries, by hash
    std::size_t live_ = 0;
};

}  // namespace kvroute
