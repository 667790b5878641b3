// Integers as they lie in memory, little endian; every count is checked before it is believed.
#include "index/state.hpp"

#include <map>

namespace kvroute {

namespace {

class StateWriter {
public:
    explicit StateWriter(Index& index) : index_(index) {}

    std::vector<u8> write(u32 slot) {
        const Source& of = index_.source(slot);
        for (u64 number : {of.batches, of.ambiguous, of.removals, of.waiting.given_up}) put(number);
        for (bool flag : {of.uses_int_hashes, of.shows_extra_keys, of.announces_remote,
                          of.has_overflowed, of.has_lost_removals, of.has_shared}) {
            put(static_cast<u8>(flag));
        }
        put(static_cast<u8>(of.copy_watch.counting));
        put(static_cast<u32>(of.removed.size()));
        for (u64 blocks : of.removed) put(blocks);
        write_tiers(of);
        write_entries(of);
        write_forgotten(of);
        write_waiting(of);
        return std::move(out_);
    }

private:
    template <class Number>
    void put(Number number) {
        const auto* bytes = reinterpret_cast<const u8*>(&number);
        out_.insert(out_.end(), bytes, bytes + sizeof(number));
    }
    void put(Key key) {
        put(key.residue);
        put(key.length);
    }

    void write_tiers(const Source& of) {
        put(static_cast<u32>(of.tiers.size()));
        for (const Tier& tier : of.tiers) {
            put(static_cast<u32>(tier.name.size()));
            out_.insert(out_.end(), tier.name.begin(), tier.name.end());
            put(static_cast<u8>(tier.removes));
            put(static_cast<u32>(tier.groups.size()));
            for (u32 group : tier.groups) put(group);
        }
        std::map<u32, SeenUnit> units(of.units.begin(), of.units.end());
        put(static_cast<u32>(units.size()));
        for (const auto& [plane, seen] : units) {
            put(plane);
            put(seen.ends);
            put(seen.largest);
        }
    }

    void write_entries(const Source& of) {
        put(of.entries);
        index_.nodes().store().for_each([&](u32 id, Node& node) {
            if (node.is_held_by(of.word, of.bit)) write_entry(of, id, node);
        });
        std::map<u32, std::vector<u64>> arrivals;
        for (const auto& [plane, order] : of.arrivals) {
            std::vector<u64>& hashes = arrivals[plane];
            order.for_each([&](u64 hash) { hashes.push_back(hash); });
        }
        put(static_cast<u32>(arrivals.size()));
        for (const auto& [plane, hashes] : arrivals) {
            put(plane);
            put(static_cast<u64>(hashes.size()));
            for (u64 hash : hashes) put(hash);
        }
    }

    void write_entry(const Source& of, u32 id, const Node& node) {
        put(node.hash);
        put(node.key());
        u8 flags = 0;
        u32 planes = 0;  // up to 256 groups in each tier
        for (u32 pass = 0; pass < 2; ++pass) {
            if (pass == 1) {
                put(flags);
                put(planes);
            }
            for (u32 i = 0; i < node.row_count(); ++i) {
                const u32 row = node.row_keys()[i], plane = plane_of_row(row);
                if (word_of_row(row) != of.word || !(node.row_bits()[i] & of.bit)) continue;
                if (plane == kNotFound) flags |= 1;
                if (plane == kTierFound) flags |= 2;
                if (plane >= kPlanes) continue;
                if (pass == 0) {
                    ++planes;
                } else {
                    put(plane);
                    put(static_cast<u32>(index_.copies_of(of, id, plane)));
                }
            }
        }
    }

    void write_forgotten(const Source& of) {
        put(static_cast<u64>(of.forgotten.size()));
        of.forgotten.for_each([&](const auto& entry) {
            put(entry.hash);
            put(entry.value);
        });
        BoundedMap<ClearedKey> cleared = of.cleared;
        for (const auto& each : index_.left().all()) {
            if (each.heir != &of) continue;
            index_.nodes().store().for_each([&](u32, Node& node) {
                if (!node.is_held_by(each.word, each.bit) || !node.is_placed()) return;
                index_.left().remember(cleared, node, each.number);
            });
        }
        put(static_cast<u64>(cleared.size()));
        cleared.for_each([&](const auto& entry) {
            put(entry.hash);
            put(entry.value.key);
        });
    }

    void write_waiting(const Source& of) {
        put(of.waiting.runs);
        of.waiting.for_each([&](u64 parent, const WaitingRun& run) {
            put(parent);
            put(run.batch);
            put(run.block_size);
            put(run.lookahead);
            put(static_cast<u8>(run.is_below));
            put_all(run.hashes);
            put_all(run.tokens);
            put(static_cast<u64>(run.marks.size()));
            for (const Mark& mark : run.marks) {
                put(mark.position);
                put(mark.digest);
            }
        });
    }

    template <class Number>
    void put_all(const std::vector<Number>& numbers) {
        put(static_cast<u64>(numbers.size()));
        for (Number number : numbers) put(number);
    }

    Index& index_;
    std::vector<u8> out_;
};

}  // namespace

class StateReader {
public:
    StateReader(Index& index, std::span<const u8> bytes)
        : index_(index), nodes_(index.nodes()), left_(bytes) {}

    // Fills a source that holds nothing.
    void read(u32 slot) {
        Source& of = index_.source(slot);
        of.batches = get<u64>();
        of.ambiguous = get<u64>();
        of.removals = get<u64>();
        of.waiting.given_up = get<u64>();
        of.uses_int_hashes = get<u8>();
        of.shows_extra_keys = get<u8>();
        of.announces_remote = get<u8>();
        of.has_overflowed = get<u8>();
        of.has_lost_removals = get<u8>();
        of.has_shared = get<u8>();
        of.copy_watch.counting = static_cast<CopyWatch::Counting>(get<u8>() % 3);
        const u32 groups = get<u32>();
        if (groups > kMaxGroups) throw StateError("too many groups");
        of.removed.resize(groups);
        for (u64& blocks : of.removed) blocks = get<u64>();
        read_tiers(of);
        read_entries(of);
        const u64 forgotten = get_count(20);
        for (u64 i = 0; i < forgotten; ++i) {
            const u64 hash = get<u64>();
            of.forgotten.put(hash, get_key(), index_.limits().forgotten);
        }
        of.all_cleared = get_count(20);
        for (u64 i = 0; i < of.all_cleared; ++i) {
            const u64 hash = get<u64>();
            of.cleared.put(hash, {get_key(), 0}, index_.limits().forgotten);
        }
        read_waiting(of);
        if (!left_.empty()) throw StateError("bytes follow its end");
        ++index_.version_;
    }

private:
    template <class Number>
    Number get() {
        if (left_.size() < sizeof(Number)) throw StateError("it ends too early");
        Number number;
        std::memcpy(&number, left_.data(), sizeof(Number));
        left_ = left_.subspan(sizeof(Number));
        return number;
    }

    // A number of things of at least `size` bytes each.
    u64 get_count(std::size_t size) {
        const u64 count = get<u64>();
        if (count > left_.size() / size) throw StateError("it ends too early");
        return count;
    }

    Key get_key() {
        const u64 residue = get<u64>();
        return {residue, get<u32>() & kMaxLength};
    }

    u32 get_plane(const Source& of) {
        const u32 plane = get<u32>();
        if (plane >= kPlanes || tier_of_plane(plane) >= of.tiers.size()) {
            throw StateError("a block lies in a tier that there is not");
        }
        return plane;
    }

    void read_tiers(Source& of) {
        const u32 count = get<u32>();
        if (count == 0 || count > kMaxTiers) throw StateError("too many tiers");
        for (u32 i = 0; i < count; ++i) {
            const u32 size = get<u32>();
            if (size > left_.size()) throw StateError("it ends too early");
            const std::string name(reinterpret_cast<const char*>(left_.data()), size);
            left_ = left_.subspan(size);
            if (i && of.tier_for(name) != i) throw StateError("a tier appears twice");
            of.tiers[i].removes = get<u8>();
            const u32 groups = get<u32>();
            if (groups > kMaxGroups) throw StateError("too many groups");
            for (u32 j = 0; j < groups; ++j) group_order_.push_back({i, get<u32>()});
        }
        const u32 units = get<u32>();
        for (u32 i = 0; i < units; ++i) {
            SeenUnit& seen = of.units[get_plane(of)];
            seen.ends = get<u64>();
            seen.largest = get<u64>();
        }
    }

    void read_entries(Source& of) {
        const u64 entries = get_count(25);
        for (u64 i = 0; i < entries; ++i) read_entry(of);
        for (Tier& tier : of.tiers) tier.groups.clear();
        for (const auto& [tier, group] : group_order_) {
            if (group < kMaxGroups && of.count(plane_of(group, tier))) {
                of.tiers[tier].groups.push_back(group);
            }
        }
        of.arrivals.clear();
        const u32 planes = get<u32>();
        for (u32 i = 0; i < planes; ++i) {
            ArrivalOrder& order = of.arrivals_in(get_plane(of));
            const u64 hashes = get_count(8);
            for (u64 j = 0; j < hashes; ++j) order.came(get<u64>());
        }
    }

    void read_entry(Source& of) {
        const u64 hash = get<u64>();
        const Key key = get_key();
        const u8 flags = get<u8>();
        const u32 planes = get<u32>();
        if (planes == 0 || index_.entry_of(of, hash) != kNone) {
            throw StateError("a block appears twice, or nowhere");
        }
        const u32 id = nodes_.node_for(hash, nodes_.first_of(hash), key);
        of.entries += 1;
        of.unplaced += !key.is_known();
        for (u32 i = 0; i < planes; ++i) {
            const u32 plane = get_plane(of);
            const u32 copies = get<u32>();
            if (copies == 0 || index_.copies_of(of, id, plane)) {
                nodes_.release_if_bare(id);
                throw StateError("a block without copies");
            }
            nodes_[id].set(row_key(of.word, plane), of.bit);
            index_.count_block(of, plane, hash);
            of.copies += copies;
            if (copies > 1) of.further_copies[u64{id} << 16 | plane] = copies - 1;
        }
        if (!key.is_known()) return;
        if (flags & 1) index_.set_special(of, id, kNotFound);
        if (flags & 2) index_.set_special(of, id, kTierFound);
        if (flags != 1) nodes_.link(id, nodes_.first_with(key));
    }

    void read_waiting(Source& of) {
        const u64 runs = get_count(33);
        for (u64 i = 0; i < runs; ++i) {
            const u64 parent = get<u64>();
            WaitingRun run;
            run.batch = get<u64>();
            run.block_size = get<u32>();
            run.lookahead = get<u32>();
            run.is_below = get<u8>();
            get_all(run.hashes);
            get_all(run.tokens);
            run.marks.resize(get_count(16));
            for (Mark& mark : run.marks) {
                mark.position = get<u64>();
                mark.digest = get<u64>();
            }
            of.waiting.add(parent, std::move(run));
        }
    }

    template <class Number>
    void get_all(std::vector<Number>& numbers) {
        numbers.resize(get_count(sizeof(Number)));
        for (Number& number : numbers) number = get<Number>();
    }

    Index& index_;
    NodeTables& nodes_;
    std::span<const u8> left_;
    std::vector<std::pair<u32, u32>> group_order_;
};

std::vector<u8> written_state(Index& index, u32 slot) { return StateWriter(index).write(slot); }

void read_state(Index& index, u32 slot, std::span<const u8> bytes) {
    StateReader(index, bytes).read(slot);
}

}  // namespace kvroute
