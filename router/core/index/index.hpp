// All sources of one model: what a batch of events does to them.
//
// Invariants, of every source and at any time outside a call:
//   1. It holds a hash in at most one node: the entry of that hash. Another source may hold the same
//      hash in another node, since a hash stands for whatever its own source says: no source can
//      move another's blocks.
//   2. A node without rows is gone, from the store and from both tables.
//   3. `by_hash` leads to the first node of a hash, and `next_hash` to the others.
//   4. `by_key` leads to the first node of a key, and `next_key` to the others, but only to nodes
//      that some source *finds*: of two hashes that claim one key a source finds the newer, and has
//      kNotFound in the other's row. So the nodes of a key are at most two a source.
//   5. kTierFound: a lower tier has hashes of its own for the same prefix, and finds this one.
//   6. Nodes hold bits of sources that are there, or are leaving: no other has their slot until all
//      of these are gone, and none of them finds anything.
//   7. `counts`, `blocks`, `copies`, `places`, `entries` and `unplaced` are what a walk over all
//      nodes would count.
// Engines that hash alike share nodes; engines with other seeds have other nodes under one key.
#pragma once

#include <deque>
#include <limits>
#include <memory>
#include <unordered_set>

#include "source.hpp"

namespace kvroute {

// What one batch did; see `ApplyResult` in Python.
struct Applied {
    u64 stored = 0, removed = 0, waiting = 0, skipped = 0, overflow = 0, given_up = 0;
    bool cleared = false;
    bool is_incomplete = false;
    bool has_root_sample = false;  // some event may show the engine's hash function
    std::vector<u32> stores_to_tell;  // slots: what their readers are to know of the layout is new
};

// What the layout learner has not heard yet.
struct News {
    std::optional<u32> lookahead;
    std::optional<u32> group;
    bool is_on_gpu = true;
    std::string kind;  // empty where the event does not state it
    u32 window = 0;
    u32 block_size = 0;
};

class Index {
public:
    enum class Outcome : u8 { applied, odd, news };

    Index(std::array<u64, 2> secrets, Limits limits)
        : space_(secrets), limits_(limits), hash_hashes_{&nodes_, space_.table_secret()},
          key_hashes_{&nodes_}, by_hash_(hash_hashes_), by_key_(key_hashes_) {
        limits_.tiers = std::min<u64>(limits_.tiers, kMaxTiers);
    }

    const KeySpace& space() const { return space_; }
    const Limits& limits() const { return limits_; }
    const NodeStore& nodes() const { return nodes_; }

    // --- sources ---

    u32 add_source() {
        const u32 slot = free_slot();
        sources_[slot] = std::make_unique<Source>(slot, space_.table_secret());
        ++version_;
        return slot;
    }

    // Nobody finds the source any more, and its slot is taken until `work_off` is done with it.
    void drop_source(u32 slot) {
        const std::unique_ptr<Source> gone = std::move(sources_[slot]);
        forget_cleared(*gone);
        if (gone->entries) leave_behind(*gone, nullptr);
        while (!sources_.empty() && !sources_.back()) sources_.pop_back();
        ++version_;
    }

    // Takes away what was left behind, of all slots in one walk over the nodes. A node that is looked
    // at costs 1 of the budget, each source that it is taken from 16: some 10 nanoseconds each.
    void work_off(std::int64_t budget = std::numeric_limits<std::int64_t>::max()) {
        while (!leaving_.empty() && budget > 0) {
            std::vector<Leaving*> by_slot;
            std::vector<u64> bits_of_word;
            for (Leaving& each : leaving_) {
                if (each.slot >= by_slot.size()) by_slot.resize(each.slot + 1);
                if (each.word >= bits_of_word.size()) bits_of_word.resize(each.word + 1);
                by_slot[each.slot] = &each;
                bits_of_word[each.word] |= each.bit;
            }
            std::size_t unfinished = leaving_.size();
            next_ = nodes_.visit_from(next_, budget, [&](u32 id, const Node& node) {
                slots_of(node, bits_of_word, scratch_slots_);
                for (u32 slot : scratch_slots_) unfinished -= !take_away(*by_slot[slot], id);
                const std::int64_t cost = 1 + 16 * static_cast<std::int64_t>(scratch_slots_.size());
                return unfinished ? cost : budget;
            });
            const bool is_at_end = next_ >= nodes_.end();
            if (is_at_end) next_ = 0;
            for (Leaving& each : leaving_) each.laps += is_at_end;
            std::erase_if(leaving_, [](const Leaving& each) { return !each.left || each.laps > 1; });
        }
    }
    bool has_work_left() const { return !leaving_.empty(); }
    bool is_leaving(u32 slot) const {
        return std::any_of(leaving_.begin(), leaving_.end(),
                           [&](const Leaving& each) { return each.slot == slot; });
    }

    bool has_source(u32 slot) const { return slot < sources_.size() && sources_[slot]; }
    Source& source(u32 slot) { return *sources_[slot]; }
    const std::vector<std::unique_ptr<Source>>& sources() const { return sources_; }
    // Changes whenever a source comes or goes, or holds something in a plane it did not.
    u64 version() const { return version_; }

    void set_layout(u32 slot, Layout layout, bool is_announced, u32 lookahead) {
        unset_layout(slot, is_announced, lookahead);
        borrow_layout(slot, std::move(layout), lookahead);
        source(slot).has_own_layout = true;
    }

    void unset_layout(u32 slot, bool is_announced, u32 lookahead) {
        Source& of = source(slot);
        of.has_layout = of.has_own_layout = false;
        of.is_announced = is_announced;
        of.lookahead = lookahead;
        of.layout_number = ++layouts_;
        ++version_;
    }

    // To a source that has told none: that of the others that share its store.
    void borrow_layout(u32 slot, Layout layout, u32 read_lookahead) {
        layout.find_equal_groups();
        Source& of = source(slot);
        of.layout = std::move(layout);
        of.has_layout = true;
        of.read_lookahead = read_lookahead;
        ++version_;
    }

    // --- events ---

    // Applies one batch, unless it is odd or holds news: then nothing has happened, but that the
    // news count as told. Where `result.cleared`, the source may have another slot than before.
    Outcome apply(u32 slot, std::span<const u8> payload, Applied& result, std::vector<News>& news) {
        Source& of = source(slot);
        if (!read(payload, false)) return Outcome::odd;
        for (const Event& event : batch_.events) {
            if (event.type == EventType::stored && may_be_opaque(of, event)) return Outcome::odd;
        }
        for (const Event& event : batch_.events) {
            if (event.type == EventType::stored) collect_news(of, event, news);
        }
        if (!news.empty()) return Outcome::news;
        apply_all(of, {}, result);
        return Outcome::applied;
    }

    // Applies a batch whose news have been told. `is_canonical`: see `BatchReader`. `opaque`: numbers
    // of events that hide something which goes into their hashes, ascending. False where it is odd.
    bool apply_told(u32 slot, std::span<const u8> payload, bool is_canonical,
                    const std::vector<u32>& opaque, Applied& result) {
        if (!read(payload, is_canonical)) return false;
        std::vector<News> told;
        for (const Event& event : batch_.events) {
            if (event.type == EventType::stored) collect_news(source(slot), event, told);
        }
        apply_all(source(slot), opaque, result);
        return true;
    }

    // --- stores ---

    // What `of` writes and reads besides its own blocks. The stores are there for as long as it is.
    void share(u32 slot, std::vector<StoreHint> hints) {
        Source& of = source(slot);
        for (const StoreHint& hint : hints) {
            if (std::find(of.stores.begin(), of.stores.end(), hint.slot) == of.stores.end()) {
                of.stores.push_back(hint.slot);
            }
        }
        of.store_hints = std::move(hints);
        ++version_;
    }
    Source& store_of(const Source& of, std::size_t number) { return *sources_[of.stores[number]]; }
    const Source& store_of(const Source& of, std::size_t number) const {
        return *sources_[of.stores[number]];
    }
    // Whether some block that a source could load has no place yet.
    bool has_unplaced(const Source& of) const {
        return of.unplaced || any_store(of, [](const Source& store) { return store.unplaced > 0; });
    }
    bool has_anything_below(const Source& of) const {
        return of.has_lower_tiers() ||
               any_store(of, [](const Source& store) { return store.has_lower_tiers(); });
    }

    // --- looking ---

    // The node that holds a source's hash; kNone if it holds none.
    u32 entry_of(const Source& of, u64 hash) const {
        for (u32 id = first_of(hash); id != kNone; id = nodes_[id].next_hash) {
            if (nodes_[id].is_held_by(of.word, of.bit)) return id;
        }
        return kNone;
    }

    u64 copies_of(const Source& of, u32 id, u32 plane) const {
        if (!(nodes_[id].row(row_key(of.word, plane)) & of.bit)) return 0;
        if (of.further_copies.empty()) return 1;
        auto found = of.further_copies.find(u64{id} << 16 | plane);
        return found == of.further_copies.end() ? 1 : u64{1} + found->second;
    }

    // The first node of a key; the others follow by `next_key`.
    u32 first_with(Key key) const {
        return by_key_.find(hash_of_key(key), [&](u32 id) { return nodes_[id].has_key(key); });
    }
    // By the hash of a key: fetches what the look-up will read; then a node that may have it.
    void prefetch_key(u64 key_hash) const { by_key_.prefetch(key_hash); }
    u32 guess_with(u64 key_hash) const {
        const u32 id = by_key_.guess(key_hash);
        if (id != kNone) __builtin_prefetch(&nodes_[id]);
        return id;
    }
    // Whether a source finds a node by its key.
    static bool finds(const Source& of, const Node& node) {
        return node.is_held_by(of.word, of.bit) &&
               !(node.row(row_key(of.word, kNotFound)) & of.bit);
    }

    // Bytes of nodes, rows and tables, and of what is kept of each source. A walk over all nodes.
    std::size_t memory() {
        std::size_t rest = 0;
        nodes_.for_each([&](u32, Node& node) { rest += node.row_memory(); });
        for (const auto& of : sources_) rest += of ? of->memory() : 0;
        return nodes_.memory() + by_hash_.memory() + by_key_.memory() + rest;
    }

public:
    // A residue hangs on a secret in every bit: spreading it is enough.
    static u64 hash_of_key(Key key) {
        const u128 product = static_cast<u128>(key.residue + (u64{key.length} << 32)) *
                             0x9E3779B97F4A7C15u;
        return static_cast<u64>(product) ^ static_cast<u64>(product >> 64);
    }

private:
    friend class IndexAudit;  // of the tests
    friend class StateWriter;
    friend class StateReader;
    friend class Inspector;

    // So many slots may be left behind at once; a clear that comes then does its work itself. More
    // than a fleet has replicas that are cleared together, and few enough to look through.
    static constexpr std::size_t kMostLeaving = 256;

    // A slot whose bits `work_off` takes away: its source was dropped, or cleared and stands in
    // another slot since.
    struct Leaving {
        u32 slot;
        u32 word;
        u64 bit;
        u64 left;      // nodes that still have the bit
        u32 laps = 0;  // how often the walk has come to the end of the nodes since
        Source* heir;  // the source that was cleared, if it remembers what it held
        u64 number;    // of the clear
        std::unordered_map<u64, u32> further_copies;
    };

    void leave_behind(Source& of, Source* heir) {
        leaving_.push_back({of.slot, of.word, of.bit, of.entries, 0, heir, of.clears, {}});
        leaving_.back().further_copies.swap(of.further_copies);
    }

    // Which slots that are left behind a node is held by; `bits_of_word`: of all such slots.
    static void slots_of(const Node& node, const std::vector<u64>& bits_of_word,
                         std::vector<u32>& out) {
        out.clear();
        for (u32 word = 0; word < bits_of_word.size(); ++word) {
            if (!bits_of_word[word]) continue;
            for (u64 bits = node.holders(word) & bits_of_word[word]; bits; bits &= bits - 1) {
                out.push_back(word * 64 + static_cast<u32>(std::countr_zero(bits)));
            }
        }
    }

    // Frees a node, which may go with it, from a slot; whether others are left to be freed from it.
    bool take_away(Leaving& from, u32 id) {
        Node& node = nodes_[id];
        if (from.heir != nullptr && node.is_placed()) {
            remember_cleared(from.heir->cleared, node, from.number);
        }
        drop_from(from, id, node);
        return --from.left > 0;
    }

    // The key of a block that went, as far as it is remembered.
    bool remembers(const Source& of, u64 hash, Key& out) const {
        if (const Key* known = of.forgotten.find(hash)) {
            out = *known;
            return true;
        }
        const ClearedKey* cleared = of.cleared.find(hash);
        if (cleared != nullptr) out = cleared->key;
        // What `work_off` has not come to yet. Of several clears that took it, the last counts.
        for (auto each = leaving_.rbegin(); each != leaving_.rend(); ++each) {
            if (each->heir != &of || (cleared != nullptr && cleared->number > each->number)) continue;
            for (u32 id = first_of(hash); id != kNone; id = nodes_[id].next_hash) {
                if (!nodes_[id].is_held_by(each->word, each->bit)) continue;
                if (!nodes_[id].is_placed()) continue;
                out = nodes_[id].key();
                return true;
            }
        }
        return cleared != nullptr;
    }

    void remember_cleared(BoundedMap<ClearedKey>& cleared, const Node& node, u64 number) const {
        const ClearedKey* known = cleared.find(node.hash);
        if (known != nullptr && known->number > number) return;
        cleared.put(node.hash, {node.key(), number}, limits_.forgotten);
    }

    // Counts a clear that takes so many placed blocks; whether they are to be remembered. What
    // earlier ones took is forgotten where they are too many together.
    bool may_remember(Source& of, u64 placed) {
        of.clears += 1;
        if (!placed) return false;
        of.all_cleared += placed;
        if (of.all_cleared <= limits_.forgotten) return true;
        forget_cleared(of);
        if (placed > limits_.forgotten) return false;
        of.all_cleared = placed;
        return true;
    }

    void forget_cleared(Source& of) {
        of.all_cleared = 0;
        of.cleared.clear();
        for (Leaving& each : leaving_) {
            if (each.heir == &of) each.heir = nullptr;
        }
    }

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

    template <class Holds>
    bool any_store(const Source& of, Holds&& holds) const {
        return std::any_of(of.stores.begin(), of.stores.end(),
                           [&](u32 slot) { return holds(*sources_[slot]); });
    }

    // The store that an event is about; null: the source's own cache.
    Source* meant_by(const Source& of, const Event& event) {
        if (event.is_on_gpu || event.is_local) return nullptr;
        for (const StoreHint& hint : of.store_hints) {
            if (hint.ownership && event.ownership != *hint.ownership) continue;
            const bool is_meant =
                hint.tiers.empty() ? event.has_locality : names(hint.tiers, event.tier);
            if (is_meant) return sources_[hint.slot].get();
        }
        return nullptr;
    }
    static bool names(const std::vector<std::string>& tiers, std::string_view tier) {
        return std::any_of(tiers.begin(), tiers.end(),
                           [&](const std::string& each) { return is_same_tier(each, tier); });
    }

    // Empties a tier that is shared as a whole: an engine that says that such a tier is empty means
    // what is behind it.
    u64 clear_shared(const Source& of, std::string_view tier) {
        std::vector<u32> meant;
        for (const StoreHint& hint : of.store_hints) {
            const bool is_new = std::find(meant.begin(), meant.end(), hint.slot) == meant.end();
            if (is_new && names(hint.tiers, tier)) meant.push_back(hint.slot);
        }
        u64 removed = 0;
        for (u32 slot : meant) {
            const u32 number = tier_named(*sources_[slot], tier);
            if (number != kNone) removed += clear(*sources_[slot], number);
        }
        return removed;
    }

    bool read(std::span<const u8> payload, bool is_canonical) {
        if (payload.size() >= u64{1} << 31) return false;
        batch_.shrink();
        return BatchReader(space_, payload, is_canonical, batch_).read();
    }

    // --- what is new to the layout learner ---

    static bool may_be_opaque(const Source& of, const Event& event) {
        return of.has_chain && event.is_on_gpu && !event.parent && event.extra_keys.empty() &&
               event.lora.value_or("").empty() && event.salt.value_or("").empty() &&
               !event.has_lookahead && event.tokens_per_block();
    }

    static void collect_news(Source& of, const Event& event, std::vector<News>& out) {
        News news;
        if (event.has_lookahead && of.told_lookahead != event.lookahead) {
            of.told_lookahead = news.lookahead = event.lookahead;
        }
        const u32 implied = event.tokens_per_block();
        ToldGroup now{true, std::string(), event.window, implied};
        if (event.is_on_gpu && event.block_size) now.block_size = event.block_size;
        const bool tells = event.is_on_gpu ? now.block_size && event.tokens
                                           : implied || !event.kind.empty();
        if (tells) {
            const u32 place = event.group * 2 + !event.is_on_gpu;
            if (place >= of.told.size()) of.told.resize(place + 1);
            ToldGroup& told = of.told[place];
            if (!told.is_told || told.kind != event.kind || told.window != now.window ||
                told.block_size != now.block_size) {
                now.kind = event.kind;
                told = now;
                news.group = event.group;
                news.is_on_gpu = event.is_on_gpu;
                news.kind = now.kind;
                news.window = now.window;
                news.block_size = now.block_size;
            }
        }
        if (news.group || news.lookahead) out.push_back(std::move(news));
    }

    // --- applying ---

    void apply_all(Source& of, const std::vector<u32>& opaque, Applied& result) {
        of.batches += 1;
        for (u32 i = 0; i < batch_.events.size(); ++i) {
            const Event& event = batch_.events[i];
            if (i + 1 < batch_.events.size()) prefetch(batch_.events[i + 1]);
            if (event.type == EventType::stored) {
                const bool is_opaque = std::binary_search(opaque.begin(), opaque.end(), i);
                store(of, event, is_opaque, result);
            } else if (event.type == EventType::removed) {
                remove(of, event, result);
            } else {
                clear_tier(of, event, result);
            }
        }
        result.given_up = of.waiting.trim(limits_, of.batches);
    }

    // Fetches what the look-ups of an event's first hashes will read.
    void prefetch(const Event& event) const {
        const u64* hashes = batch_.hashes.data() + event.first_hash;
        for (u32 i = 0; i < std::min(event.hashes, kAhead); ++i) by_hash_.prefetch(hash_of(hashes[i]));
    }

    void clear_tier(Source& of, const Event& event, Applied& result) {
        const u32 tier = event.is_on_gpu ? 0 : tier_named(of, event.tier);
        if (tier != kNone) {
            result.removed += may_move_out(of, tier) ? move_out(of) : clear(of, tier);
        }
        if (!event.is_on_gpu) {
            result.removed += clear_shared(of, event.tier);
            return;
        }
        result.cleared = true;
        of.copy_watch.forget();
        of.removals = 0;
        // With nothing left there is nothing that could be wrong.
        of.has_lost_removals &= of.entries > 0;
    }

    void store(Source& of, const Event& event, bool is_opaque, Applied& result) {
        of.shows_extra_keys |= !event.extra_keys.empty() || event.salt.has_value();
        if (Source* store = meant_by(of, event)) {
            store_shared(of, *store, event, result);
            return;
        }
        of.announces_remote |= event.is_remote;
        const u32 tier = event.is_on_gpu ? 0 : tier_for(of, event.tier);
        if (tier == kNone) {
            refuse(of, event.hashes, result);
            return;
        }
        const u32 plane = plane_of(event.group, tier);
        if (tier) make_room(of, event.group, tier, event.hashes);
        const u32 taken = static_cast<u32>(std::min<u64>(event.hashes, room(of, plane)));
        const u32 block_size = event.tokens_per_block();
        result.has_root_sample |= event.has_root_sample;

        const bool is_placed = block_size && !is_opaque && find_keys(of, event, block_size);
        const bool has_ghosts = of.copy_watch.has_leftovers() && event.is_on_gpu;
        const bool is_plain = is_placed && !has_ghosts && !contradicts_remembered(of, event, taken);
        const u64* hashes = batch_.hashes.data() + event.first_hash;
        bool needs_placing =
            taken < event.hashes || has_ghosts || of.waiting.runs || !of.stores.empty();
        for (u32 i = 0; i < taken; ++i) {
            if (i + kAhead < taken) {
                by_hash_.prefetch(hash_of(hashes[i + kAhead]));
                if (is_placed) by_key_.prefetch(hash_of_key(keys_[i + kAhead]));
            }
            const Key* key = is_plain ? &keys_[i] : nullptr;
            needs_placing |= !add(of, plane, hashes[i], batch_.is_int[event.first_hash + i], 1, key);
        }
        if (has_ghosts) drop_ghosts(of, event);
        if (is_placed && needs_placing) {
            place_all(of, event, tier != 0);
        } else if (block_size && !is_opaque && !is_placed && event.parent) {
            wait_for_parent(of, event, block_size, tier != 0);
        }
        if (tier) see_unit(of, of, plane, event);
        refuse(of, event.hashes - taken, result);
        result.stored += taken;
        if (of.unplaced) result.waiting += unplaced_of(of, hashes, taken);
    }

    // Takes blocks into a store, each once, whoever announced it and how often.
    void store_shared(Source& of, Source& store, const Event& event, Applied& result) {
        if (of.has_own_layout && store.layout_number != of.layout_number) {
            store.layout_number = of.layout_number;
            result.stores_to_tell.push_back(store.slot);
        }
        const std::span<const u64> hashes(batch_.hashes.data() + event.first_hash, event.hashes);
        const u32 tier = tier_for(store, event.tier);
        const u64 refused = tier == kNone ? hashes.size() : take_in(of, store, event, tier);
        const u32 block_size = event.tokens_per_block();
        if (block_size && find_keys(of, event, block_size)) {
            place_all(of, event, /*is_below=*/true);
        } else if (block_size && event.parent) {
            wait_for_parent(of, event, block_size, /*is_below=*/true);
        }
        if (tier != kNone) see_unit(of, store, plane_of(event.group, tier), event);
        result.stored += hashes.size() - refused;
        result.skipped += refused;
        result.waiting += unplaced_of(store, hashes.data(), event.hashes);
        of.has_shared = true;
    }

    // Adds what a store does not hold yet, as far as there is room, at the places that the writer
    // knows; returns how many were refused.
    u64 take_in(const Source& of, Source& store, const Event& event, u32 tier) {
        const u32 plane = plane_of(event.group, tier);
        std::vector<u32> fresh;  // numbers in the batch
        std::unordered_set<u64, SecretHash> seen(0, SecretHash{space_.table_secret()});
        for (u32 i = event.first_hash; i < event.first_hash + event.hashes; ++i) {
            const u32 id = entry_of(store, batch_.hashes[i]);
            const bool is_held = id != kNone && copies_of(store, id, plane);
            if (!is_held && seen.insert(batch_.hashes[i]).second) fresh.push_back(i);
        }
        make_room(store, event.group, tier, fresh.size());
        const u64 refused = rule::minus(fresh.size(), room(store, plane));
        fresh.resize(fresh.size() - refused);
        for (u32 i : fresh) add(store, plane, batch_.hashes[i], batch_.is_int[i], 1, nullptr);
        Key key;
        for (u32 i : fresh) {
            if (own_key_of(of, batch_.hashes[i], key)) {
                place(store, batch_.hashes[i], key, /*is_below=*/true);
            }
        }
        return refused;
    }

    // Whether one of the blocks in `keys_` is remembered for another prefix: then which of two hashes
    // is found for that one is decided when all are counted.
    bool contradicts_remembered(const Source& of, const Event& event, u32 taken) const {
        Key known;
        for (u32 i = 0; i < taken; ++i) {
            const u64 hash = batch_.hashes[event.first_hash + i];
            if (remembers(of, hash, known) && !(known == keys_[i])) return true;
        }
        return false;
    }

    static void refuse(Source& of, u64 blocks, Applied& result) {
        of.has_overflowed |= blocks > 0;
        result.overflow += blocks;
        result.skipped += blocks;
        result.is_incomplete |= blocks > 0;
    }

    // Forgets blocks of a store, whoever stored them.
    u64 remove_shared(Source& store, const Event& event) {
        const u32 tier = tier_named(store, event.tier);
        if (tier == kNone) return 0;
        const std::vector<u32> none(event.hashes);
        const u64* hashes = batch_.hashes.data() + event.first_hash;
        return leave(store, plane_of(event.group, tier), {hashes, event.hashes}, none.data());
    }

    void remove(Source& of, const Event& event, Applied& result) {
        if (Source* store = meant_by(of, event)) {
            const u64 gone = remove_shared(*store, event);
            result.removed += gone;
            result.skipped += event.hashes - gone;
            return;
        }
        const u32 tier = event.is_on_gpu ? 0 : tier_named(of, event.tier);
        const u64* hashes = batch_.hashes.data() + event.first_hash;
        const u32 plane = tier == kNone ? kNone : plane_of(event.group, tier);
        u64 removed = 0;
        if (event.has_counts) {
            of.copy_watch.settle();
            const u32 known = tier == kNone ? tier_for(of, event.tier) : tier;
            if (known != kNone) {
                removed = leave(of, plane_of(event.group, known), {hashes, event.hashes},
                                batch_.counts.data() + event.first_count);
            }
        } else if (event.is_on_gpu &&
                   (of.copy_watch.has_leftovers() || of.copies > of.places) &&
                   leaves_none(of, event, plane, result)) {
            const std::vector<u32> none(event.hashes);
            removed = leave(of, plane, {hashes, event.hashes}, none.data());
        } else if (plane != kNone) {
            removed = discount_each(of, plane, {hashes, event.hashes});
        }
        if (event.is_on_gpu) of.count_removed(event.group, removed);
        result.removed += removed;
        result.skipped += event.hashes - removed;
    }

    u64 discount_each(Source& of, u32 plane, std::span<const u64> hashes) {
        u64 removed = 0;
        if (!of.count(plane)) return 0;
        for (std::size_t i = 0; i < hashes.size(); ++i) {
            if (i + 2 * kAhead < hashes.size()) by_hash_.prefetch(hash_of(hashes[i + 2 * kAhead]));
            if (i + kAhead < hashes.size()) prefetch_node(hashes[i + kAhead]);
            const u32 id = entry_of(of, hashes[i]);
            const u64 copies = id == kNone ? 0 : copies_of(of, id, plane);
            if (!copies) continue;
            discount(of, plane, id, copies, 1);
            ++removed;
        }
        Tier& tier = of.tiers[tier_of_plane(plane)];
        if (removed && !tier.removes) {
            tier.removes = true;
            for (auto& [of_plane, arrivals] : of.arrivals) {
                if (tier_of_plane(of_plane) == tier_of_plane(plane)) arrivals.clear();
            }
        }
        return removed;
    }

    // Whether no copy of any block is left, since the source announces last removals only.
    bool leaves_none(Source& of, const Event& event, u32 plane, Applied& result) {
        CopyWatch& watch = of.copy_watch;
        if (watch.is_settled()) return false;
        const bool told_last = watch.counting == CopyWatch::Counting::last_copy;
        for (u32 i = 0; i < event.hashes; ++i) {
            const u64 hash = batch_.hashes[event.first_hash + i];
            const u32 id = entry_of(of, hash);
            watch.removed(event.group, hash, id == kNone ? 0 : copies_of(of, id, plane));
        }
        if (!told_last) return false;
        if (watch.is_settled()) {
            // It announces every removal after all: copies were taken for gone that are there.
            of.has_lost_removals = result.is_incomplete = true;
            return false;
        }
        return true;
    }

    void drop_ghosts(Source& of, const Event& event) {
        static constexpr std::string_view kNotFull[] = {
            "sliding_window", "sliding_window_mla", "chunked_local_attention", "mamba",
            "linear_attention", "cross_attention", "encoder_only_attention", "not_cached"};
        const bool is_full =
            std::find(std::begin(kNotFull), std::end(kNotFull), event.kind) == std::end(kNotFull);
        const std::span<const u64> hashes(batch_.hashes.data() + event.first_hash, event.hashes);
        if (!of.copy_watch.stored(event.group, hashes, event.parent, is_full)) return;
        of.copy_watch.for_each_leftover([&](u32 group, u64 hash) {
            const u32 none = 0;
            leave(of, plane_of(group, 0), {&hash, 1}, &none);
        });
    }

    // --- tiers ---

    static u32 tier_named(const Source& of, std::string_view name) {
        for (u32 i = 0; i < of.tiers.size(); ++i) {
            if (is_same_tier(of.tiers[i].name, name)) return i;
        }
        return kNone;
    }

    static bool is_same_tier(std::string_view upper, std::string_view name) {
        return upper.size() == name.size() &&
               std::equal(upper.begin(), upper.end(), name.begin(),
                          [](char left, char right) { return left == in_upper(right); });
    }

    static char in_upper(char c) { return c >= 'a' && c <= 'z' ? static_cast<char>(c - 32) : c; }

public:
    // The number of a tier, made if it is new: that of one which holds nothing, if there are too
    // many. kNone if all of them hold something.
    u32 tier_for(Source& of, std::string_view name) {
        const u32 known = tier_named(of, name);
        if (known != kNone) return known;
        u32 number = static_cast<u32>(of.tiers.size());
        if (number < kMaxTiers) {
            of.tiers.emplace_back();
        } else {
            for (number = 1; number < kMaxTiers && of.tiers[number].blocks; ++number) continue;
            if (number == kMaxTiers) return kNone;
            forget_tier(of, number);
        }
        Tier& tier = of.tiers[number];
        tier.name.assign(name);
        std::transform(name.begin(), name.end(), tier.name.begin(), in_upper);
        for (const TierUnit& hint : of.tier_units) {
            if (hint.name == tier.name) tier.hint = hint;
        }
        return number;
    }

private:
    static void forget_tier(Source& of, u32 number) {
        of.tiers[number] = Tier();
        std::erase_if(of.arrivals,
                      [&](const auto& each) { return tier_of_plane(each.first) == number; });
        std::erase_if(of.units,
                      [&](const auto& each) { return tier_of_plane(each.first) == number; });
    }

    u64 room(const Source& of, u32 plane) const {
        const Tier& tier = of.tiers[tier_of_plane(plane)];
        if (!of.count(plane) && of.tiers_in_use() + (tier.blocks == 0) > limits_.tiers) return 0;
        return rule::minus(limits_.blocks, tier.blocks);
    }

    // Drops what was announced first in a tier that is full and never removes: what is still there
    // of it nobody knows.
    void make_room(Source& of, u32 group, u32 tier, u64 wanted) {
        if (of.tiers[tier].removes) return;
        const u64 free = room(of, plane_of(group, tier));
        if (wanted <= free) return;
        u64 missing = wanted - free;
        std::vector<u32> groups{group};
        groups.insert(groups.end(), of.tiers[tier].groups.begin(), of.tiers[tier].groups.end());
        for (u32 each : groups) {
            const u32 plane = plane_of(each, tier);
            u64 hash;
            while (missing && of.count(plane) && of.arrivals_in(plane).oldest(hash)) {
                const u32 id = entry_of(of, hash);
                const u64 copies = id == kNone ? 0 : copies_of(of, id, plane);
                if (!copies) continue;
                discount(of, plane, id, copies, copies, Why::is_oldest);
                --missing;
            }
        }
    }

    u64 clear(Source& of, u32 tier) {
        u64 removed = 0, left = of.tiers[tier].blocks;
        if (!left) return 0;
        scratch_cleared_.clear();
        if (of.tiers[tier].since_empty.are_all()) {
            // A copy: with the last block that goes, the tier's own starts anew.
            const std::vector<u64> hashes = of.tiers[tier].since_empty.hashes();
            for (u64 hash : hashes) {
                const u32 id = entry_of(of, hash);
                if (id != kNone) removed += clear_entry(of, tier, id, left);
            }
        } else {
            nodes_.for_each([&](u32 id, Node& node) {
                if (!left || !node.is_held_by(of.word, of.bit)) return;
                removed += clear_entry(of, tier, id, left);
            });
        }
        std::erase_if(of.arrivals,
                      [&](const auto& each) { return tier_of_plane(each.first) == tier; });
        if (!may_remember(of, scratch_cleared_.size())) return removed;
        for (const auto& [hash, key] : scratch_cleared_) {
            of.cleared.put(hash, {key, of.clears}, limits_.forgotten);
        }
        return removed;
    }

    // Whether a clear is large and leaves nothing. Only one of the GPU: for `Applied::cleared` it is
    // looked at in which slot the source is since.
    bool may_move_out(const Source& of, u32 tier) const {
        return tier == 0 && of.tiers[0].blocks == of.places &&
               !of.tiers[0].since_empty.are_all() && leaving_.size() < kMostLeaving;
    }

    // Leaves all that a source holds to `work_off`, and lets it go on in another slot; returns how
    // many copies there were.
    u64 move_out(Source& of) {
        const u64 copies = of.copies;
        const u32 from = of.slot, to = free_slot();
        leave_behind(of, may_remember(of, of.entries - of.unplaced) ? &of : nullptr);
        sources_[to] = std::move(sources_[from]);  // the pointer: `of` lies where it lay
        while (!sources_.back()) sources_.pop_back();
        of.stand_at(to);
        of.hold_nothing();
        ++version_;
        return copies;
    }

    u32 free_slot() {
        u32 slot = 0;
        while ((slot < sources_.size() && sources_[slot]) || is_leaving(slot)) ++slot;
        if (slot >= sources_.size()) sources_.resize(slot + 1);
        return slot;
    }

    // Takes an entry out of a tier; returns how many copies there were. `left`: blocks of the tier.
    u64 clear_entry(Source& of, u32 tier, u32 id, u64& left) {
        u64 removed = 0;
        std::vector<u32>& planes = scratch_rows_;
        planes.clear();
        const Node& node = nodes_[id];
        for (u32 i = 0; i < node.row_count(); ++i) {
            const u32 key = node.row_keys()[i], plane = plane_of_row(key);
            if (word_of_row(key) == of.word && plane < kPlanes && tier_of_plane(plane) == tier &&
                node.row_bits()[i] & of.bit) {
                planes.push_back(plane);
            }
        }
        left -= planes.size();
        for (u32 plane : planes) {
            const u64 copies = copies_of(of, id, plane);
            removed += copies;
            discount(of, plane, id, copies, copies, Why::is_cleared);
        }
        return removed;
    }

    // --- copies ---

    // Counts copies of a block; false while it is not placed. `key`: what a new entry stands for, if
    // that is known and nothing else was remembered of it.
    bool add(Source& of, u32 plane, u64 hash, bool is_int, u64 copies, const Key* key) {
        u32 id = kNone, head = first_of(hash);
        for (u32 each = head; each != kNone; each = nodes_[each].next_hash) {
            if (nodes_[each].is_held_by(of.word, of.bit)) {
                id = each;
                break;
            }
        }
        if (id == kNone) id = enter(of, hash, head, is_int, tier_of_plane(plane) != 0, key);
        Node& node = nodes_[id];
        const u32 row = row_key(of.word, plane);
        u64 further = copies;
        if (!(node.row(row) & of.bit)) {
            node.set(row, of.bit);
            count_block(of, plane, hash);
            further = copies - 1;
        }
        of.copies += copies;
        if (further) of.further_copies[u64{id} << 16 | plane] += static_cast<u32>(further);
        return nodes_[id].is_placed();
    }

    void count_block(Source& of, u32 plane, u64 hash) {
        if (plane >= of.counts.size()) of.counts.resize(plane + 1);
        Tier& tier = of.tiers[tier_of_plane(plane)];
        if (of.counts[plane]++ == 0) {
            ++version_;
            if (tier_of_plane(plane)) tier.groups.push_back(group_of_plane(plane));
        }
        tier.blocks += 1;
        tier.since_empty.came(hash, limits_.cleared_at_once);
        of.places += 1;
        if (tier_of_plane(plane) && !tier.removes) of.arrivals_in(plane).came(hash);
    }

    // A node for a hash that the source does not hold yet.
    u32 enter(Source& of, u64 hash, u32 head, bool is_int, bool is_below, const Key* key) {
        of.entries += 1;
        of.uses_int_hashes = is_int;
        Key known;
        if (remembers(of, hash, known)) {
            of.forgotten.take(hash, known);
            const u32 id = node_for(hash, head, known);
            settle(of, id, is_below);
            return id;
        }
        if (key != nullptr) {
            const u32 first = first_with(*key);
            // Of two hashes that claim one key the newer is found: decided when all are counted.
            if (found_among(of, first) == kNone) {
                const u32 id = node_for(hash, head, *key);
                link(id, first);
                return id;
            }
        }
        of.unplaced += 1;
        return node_for(hash, head, Key());
    }

    // Why a copy goes. The oldest has left the order of arrival; after a clear all have, and what
    // went is remembered together.
    enum class Why : u8 { is_removed, is_oldest, is_cleared };

    // Takes `gone` of the `copies` of a block away.
    void discount(Source& of, u32 plane, u32 id, u64 copies, u64 gone, Why why = Why::is_removed) {
        Node& node = nodes_[id];
        of.copies -= gone;
        if (copies > 1) {
            const u64 place = u64{id} << 16 | plane;
            if (copies > gone + 1) {
                of.further_copies[place] = static_cast<u32>(copies - gone - 1);
            } else {
                of.further_copies.erase(place);
            }
        }
        if (copies > gone) return;
        node.unset(row_key(of.word, plane), of.bit);
        Tier& tier = of.tiers[tier_of_plane(plane)];
        tier.blocks -= 1;
        if (!tier.blocks) tier.since_empty.restart();
        of.places -= 1;
        if (tier_of_plane(plane) && !tier.removes && why == Why::is_removed) {
            of.arrivals_in(plane).went(node.hash);
        }
        if (--of.counts[plane] == 0 && tier_of_plane(plane)) {
            std::erase(tier.groups, group_of_plane(plane));
            of.arrivals.erase(plane);
        }
        if (!node.is_held_by(of.word, of.bit)) forget(of, id, why == Why::is_cleared);
    }

    // The last copy of an entry has gone.
    void forget(Source& of, u32 id, bool is_cleared) {
        Node& node = nodes_[id];
        of.entries -= 1;
        if (node.is_placed()) {
            if (!is_cleared) {
                of.forgotten.put(node.hash, node.key(), limits_.forgotten);
            } else if (scratch_cleared_.size() <= limits_.forgotten) {
                scratch_cleared_.emplace_back(node.hash, node.key());
            }
            if (!node.is_bare()) unset_special(of, id);
        } else {
            of.unplaced -= 1;
        }
        release_if_bare(id);
    }

    u64 leave(Source& of, u32 plane, std::span<const u64> hashes, const u32* left) {
        u64 removed = 0;
        for (std::size_t i = 0; i < hashes.size(); ++i) {
            const u32 id = entry_of(of, hashes[i]);
            const u64 copies = id == kNone ? 0 : copies_of(of, id, plane);
            removed += copies > 0;
            if (copies > left[i]) {
                discount(of, plane, id, copies, copies - left[i]);
            } else if (copies < left[i] && (copies || room(of, plane))) {
                add(of, plane, hashes[i], is_int_hash(hashes.data() + i), left[i] - copies, nullptr);
            }
        }
        return removed;
    }

    // Whether a hash of the batch came as an integer.
    bool is_int_hash(const u64* hash) const {
        const u64* first = batch_.hashes.data();
        return hash >= first && hash < first + batch_.hashes.size() ? batch_.is_int[hash - first]
                                                                    : true;
    }

    // --- places ---

    // The keys of a dense event's blocks, into `keys_`; false where the parent's is not known.
    bool find_keys(Source& of, const Event& event, u32 block_size) {
        Key parent;
        if (!event.parent) {
            parent = root_key(space_, event.lora.value_or(""));
        } else if (!key_of(of, *event.parent, parent)) {
            return false;
        }
        if (event.hashes == 0) return true;
        if (event.has_marks || event.salt || event.tail || of.lookahead) {
            const WaitingRun run = run_of(of, event, block_size, event.tier.empty());
            keys_of_run(run, parent);
            return true;
        }
        keys_.resize(event.hashes);
        const u32* tokens = batch_.tokens.data() + event.first_token;
        u64 residue = parent.residue;
        for (u32 i = 0; i < event.hashes; ++i) {
            residue = space_.extended(residue, {tokens + std::size_t{i} * block_size, block_size},
                                      block_size);
            keys_[i] = {residue, (parent.length + (i + 1) * block_size) & kMaxLength};
            if (i < kAhead) by_key_.prefetch(hash_of_key(keys_[i]));
        }
        return true;
    }

    void keys_of_run(const WaitingRun& run, Key parent) {
        KeyChain chain(space_, parent, run.tokens, run.marks);
        keys_.resize(run.hashes.size());
        u64 end = u64{run.block_size} + run.lookahead;
        for (Key& key : keys_) {
            key = chain.until(end);
            end += run.block_size;
        }
    }

    WaitingRun run_of(Source& of, const Event& event, u32 block_size, bool is_below) {
        WaitingRun run;
        // What the parent's key covers of this run already.
        const u32 covered = event.parent ? of.lookahead : 0;
        const u64* hashes = batch_.hashes.data() + event.first_hash;
        const u32* tokens = batch_.tokens.data() + event.first_token;
        run.hashes.assign(hashes, hashes + event.hashes);
        run.tokens.assign(tokens + std::min(covered, event.tokens), tokens + event.tokens);
        const u32* tail = batch_.tails.data() + event.first_tail;
        run.tokens.insert(run.tokens.end(), tail, tail + event.tail);
        run.block_size = block_size;
        run.lookahead = of.lookahead - covered;
        run.batch = of.batches;
        run.is_below = is_below;
        MarkRules rules{block_size, event.lora, std::nullopt, of.lookahead};
        // The salt counts once, where the prompt begins; SGLang repeats it in every run.
        if (!event.parent) rules.salt = event.salt;
        read_marks(event.has_marks ? event.extra_keys : std::span<const u8>(), space_, rules,
                   run.marks);
        if (covered) {
            std::erase_if(run.marks, [&](const Mark& mark) { return mark.position < covered; });
            for (Mark& mark : run.marks) mark.position -= covered;
        }
        return run;
    }

    // Learns the keys in `keys_` of an event's blocks, and of whatever waited for one of them.
    void place_all(Source& of, const Event& event, bool is_below) {
        std::vector<std::pair<Key, WaitingRun>> ready;
        for (u32 i = 0; i < event.hashes; ++i) {
            place_and_release(of, batch_.hashes[event.first_hash + i], keys_[i], is_below, ready);
        }
        while (!ready.empty()) {
            auto [parent, run] = std::move(ready.back());
            ready.pop_back();
            keys_of_run(run, parent);
            for (std::size_t i = 0; i < run.hashes.size(); ++i) {
                place_and_release(of, run.hashes[i], keys_[i], run.is_below, ready);
            }
        }
    }

    void place_and_release(Source& of, u64 hash, Key key, bool is_below,
                           std::vector<std::pair<Key, WaitingRun>>& ready) {
        place_everywhere(of, hash, key, is_below);
        if (!of.waiting.waits_for(hash)) return;
        for (WaitingRun& run : of.waiting.take(hash)) ready.emplace_back(key, std::move(run));
    }

    void wait_for_parent(Source& of, const Event& event, u32 block_size, bool is_below) {
        // A known hash function shows at every look-up where a run belongs, unless a tier has hashes
        // of its own.
        if (of.has_chain && !is_below && event.lora.value_or("").empty()) return;
        const u64* hashes = batch_.hashes.data() + event.first_hash;
        const bool needs_parent =
            unplaced_of(of, hashes, event.hashes) || any_store(of, [&](const Source& store) {
                return unplaced_of(store, hashes, event.hashes) > 0;
            });
        if (!needs_parent) return;
        of.waiting.add(*event.parent, run_of(of, event, block_size, is_below));
    }

    bool key_of(const Source& of, u64 hash, Key& out) const {
        return own_key_of(of, hash, out) || any_store(of, [&](const Source& store) {
                   return own_key_of(store, hash, out);
               });
    }

    bool own_key_of(const Source& of, u64 hash, Key& out) const {
        const u32 id = entry_of(of, hash);
        if (id != kNone && nodes_[id].is_placed()) {
            out = nodes_[id].key();
            return true;
        }
        return remembers(of, hash, out);
    }

    u64 unplaced_of(const Source& of, const u64* hashes, u32 count) const {
        u64 found = 0;
        for (u32 i = 0; of.unplaced && i < count; ++i) {
            const u32 id = entry_of(of, hashes[i]);
            found += id != kNone && !nodes_[id].is_placed();
        }
        return found;
    }

    // The same in every store that holds the block.
    void place_everywhere(Source& of, u64 hash, Key key, bool is_below) {
        bool is_shared = false;
        for (u32 slot : of.stores) {
            if (entry_of(*sources_[slot], hash) == kNone) continue;
            place(*sources_[slot], hash, key, /*is_below=*/true);
            is_shared = true;
        }
        if (!is_shared || entry_of(of, hash) != kNone) place(of, hash, key, is_below);
    }

    // Learns the key of a block's prefix; the first one learned stays.
    void place(Source& of, u64 hash, Key key, bool is_below) {
        const u32 id = entry_of(of, hash);
        if (id == kNone) {
            of.forgotten.put(hash, key, limits_.forgotten);
        } else if (!nodes_[id].is_placed()) {
            of.unplaced -= 1;
            settle(of, move_entry(of, id, key), is_below);
        }
    }

    // Moves a source's entry to the node of the same hash and of this key; returns its number.
    u32 move_entry(Source& of, u32 id, Key key) {
        const u32 target = node_with(first_of(nodes_[id].hash), key);
        if (target == kNone && is_only_holder(of, nodes_[id])) {
            nodes_[id].residue = key.residue;
            nodes_[id].length = key.length;
            return id;
        }
        const u32 to = node_for(nodes_[id].hash, first_of(nodes_[id].hash), key);
        std::vector<u32> rows;
        for (u32 i = 0; i < nodes_[id].row_count(); ++i) {
            const u32 row = nodes_[id].row_keys()[i];
            if (word_of_row(row) == of.word && nodes_[id].row_bits()[i] & of.bit) {
                rows.push_back(row);
            }
        }
        for (u32 row : rows) {
            nodes_[to].set(row, of.bit);
            nodes_[id].unset(row, of.bit);
            auto copies = of.further_copies.extract(u64{id} << 16 | plane_of_row(row));
            if (copies.empty()) continue;
            copies.key() = u64{to} << 16 | plane_of_row(row);
            of.further_copies.insert(std::move(copies));
        }
        release_if_bare(id);
        return to;
    }

    static bool is_only_holder(const Source& of, const Node& node) {
        for (u32 i = 0; i < node.row_count(); ++i) {
            if (word_of_row(node.row_keys()[i]) != of.word || node.row_bits()[i] != of.bit) {
                return false;
            }
        }
        return true;
    }

    // Which of the nodes of a key, from `first` on, a source finds, but for one; kNone if none.
    u32 found_among(const Source& of, u32 first, u32 but = kNone) const {
        while (first != kNone && (first == but || !finds(of, nodes_[first]))) {
            first = nodes_[first].next_key;
        }
        return first;
    }

    // Decides by which of its nodes a source finds a key, now that one more claims it.
    void settle(Source& of, u32 id, bool is_below) {
        const Key key = nodes_[id].key();
        const u32 first = first_with(key);
        if (first == id && nodes_[id].next_key == kNone) return;  // the usual case: shared
        const u32 before = found_among(of, first, id);
        if (before == kNone) {
            link(id, first);
        } else if (is_below) {
            set_special(of, id, kNotFound);
            set_tier_found(of, key, id);
        } else {
            set_special(of, before, kNotFound);
            link(id, first);
            if (is_on_gpu(of, nodes_[before])) {
                of.ambiguous += 1;
            } else {
                set_tier_found(of, key, before);
            }
            refresh_link(before);
        }
    }

    static bool is_on_gpu(const Source& of, const Node& node) {
        for (u32 i = 0; i < node.row_count(); ++i) {
            const u32 row = node.row_keys()[i];
            if (word_of_row(row) == of.word && plane_of_row(row) < kPlanes &&
                tier_of_plane(plane_of_row(row)) == 0 && node.row_bits()[i] & of.bit) {
                return true;
            }
        }
        return false;
    }

    void set_special(Source& of, u32 id, u32 plane) {
        const u32 row = row_key(of.word, plane);
        if (nodes_[id].row(row) & of.bit) return;
        nodes_[id].set(row, of.bit);
        (plane == kNotFound ? of.not_found : of.tier_found) += 1;
        version_ += plane == kTierFound && of.tier_found == 1;
    }

    void set_tier_found(Source& of, Key key, u32 id) {
        const u32 row = row_key(of.word, kTierFound);
        for (u32 each = first_with(key); of.tier_found && each != kNone;) {
            const u32 next = nodes_[each].next_key;
            if (each != id && nodes_[each].row(row) & of.bit) {
                nodes_[each].unset(row, of.bit);
                of.tier_found -= 1;
                refresh_link(each);
            }
            each = next;
        }
        set_special(of, id, kTierFound);
        link(id, first_with(key));
    }

    void unset_special(Source& of, u32 id) {
        bool has_any = false;
        for (u32 plane : {kNotFound, kTierFound}) {
            const u32 row = row_key(of.word, plane);
            if (nodes_[id].row(row) & of.bit) {
                nodes_[id].unset(row, of.bit);
                (plane == kNotFound ? of.not_found : of.tier_found) -= 1;
            }
        }
        for (u32 i = 0; i < nodes_[id].row_count(); ++i) {
            has_any |= plane_of_row(nodes_[id].row_keys()[i]) >= kPlanes;
        }
        if (has_any) refresh_link(id);
    }

    // --- nodes and tables ---

    u32 first_of(u64 hash) const {
        return by_hash_.find(hash_of(hash), [&](u32 id) { return nodes_[id].hash == hash; });
    }

    void prefetch_node(u64 hash) const {
        const u32 id = by_hash_.guess(hash_of(hash));
        if (id != kNone) __builtin_prefetch(&nodes_[id]);
    }

    u32 node_with(u32 head, Key key) const {
        while (head != kNone && !nodes_[head].has_key(key)) head = nodes_[head].next_hash;
        return head;
    }

    // The node of a hash and a key, made if there is none. `head`: the first node of the hash.
    u32 node_for(u64 hash, u32 head, Key key) {
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

    // `head`: the first node of its key.
    void link(u32 id, u32 head) {
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

    void unlink(u32 id) {
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

    // Takes a node out of its key's list where no source finds it any more.
    void refresh_link(u32 id) {
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

    void release_if_bare(u32 id) {
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

    // Takes a source out of a node, without a trace.
    void drop_from(Leaving& of, u32 id, Node& node) {
        std::vector<u32>& rows = scratch_rows_;
        rows.clear();
        bool has_special = false;
        for (u32 i = 0; i < node.row_count(); ++i) {
            const u32 row = node.row_keys()[i];
            has_special |= plane_of_row(row) >= kPlanes;
            if (word_of_row(row) == of.word && node.row_bits()[i] & of.bit) rows.push_back(row);
        }
        for (u32 row : rows) {
            node.unset(row, of.bit);
            // One by one: to give all of them back at the end would take long.
            if (!of.further_copies.empty()) {
                of.further_copies.erase(u64{id} << 16 | plane_of_row(row));
            }
        }
        if (has_special && !node.is_bare() && node.is_placed()) refresh_link(id);
        release_if_bare(id);
    }

    // --- units of lower tiers ---

    // Here and below `in` is what holds the tier: the source itself, or a store that it reads.
    bool may_shrink(const Source& of, const Source& in, u32 plane) const {
        const u32 group = group_of_plane(plane), tier = tier_of_plane(plane);
        if (!tier || in.tiers[tier].hint.is_given() || group >= of.layout.groups.size()) return false;
        auto found = in.units.find(plane);
        const u64 ends = found == in.units.end() ? 0 : found->second.ends;
        return !ends || ends > of.layout.groups[group].block_size;
    }

    // Every hash ends a unit, with one exception: a self-describing event of vLLM is about one unit,
    // and names the blocks in it. LMCache's names its own blocks, which are larger.
    void see_unit(const Source& of, Source& in, u32 plane, const Event& event) {
        const u64* hashes = batch_.hashes.data() + event.first_hash;
        u32 first = 0;
        if (event.tokens) {
            first = event.hashes ? event.hashes - 1 : 0;
            SeenUnit& seen = in.units[plane];
            const u64 size = event.tokens_per_block() ? event.tokens_per_block() : event.block_size;
            seen.largest = std::max({seen.largest, size, u64{1}});
            seen.ends = std::gcd(seen.ends, u64{event.tokens});
        }
        if (!of.has_layout || of.is_announced || !may_shrink(of, in, plane)) return;
        u64 found = 0;
        for (u32 i = first; i < event.hashes; ++i) {
            Key key;
            if (!key_of(of, hashes[i], key)) continue;
            const std::int64_t end = std::int64_t{key.length} - std::int64_t{of.lookahead};
            found = std::gcd(found, static_cast<u64>(end < 0 ? -end : end));
        }
        if (found) {
            SeenUnit& seen = in.units[plane];
            seen.ends = std::gcd(seen.ends, found);
        }
    }

public:
    // The same from what a tier holds of a prompt: `ends` is the divisor of the ends found.
    static void see_ends(Source& in, u32 plane, u64 ends) {
        if (!ends) return;
        SeenUnit& seen = in.units[plane];
        seen.ends = std::gcd(seen.ends, ends);
    }

    // Whether what a tier holds of a prompt may tell more of its units. Not where events describe
    // blocks: one names all blocks in a unit, and only the last of them ends it.
    bool wants_ends(const Source& of, const Source& in, u32 plane) const {
        auto found = in.units.find(plane);
        const bool is_known =
            found != in.units.end() &&
            (found->second.largest || (found->second.ends && !in.unplaced));
        return !of.is_announced && !is_known && may_shrink(of, in, plane);
    }

    // Whether some tier has blocks of its own, larger than the GPU's, and so hashes of its own.
    bool has_own_blocks_below(const Source& of) const {
        return has_own_blocks_in(of, of) || any_store(of, [&](const Source& store) {
                   return has_own_blocks_in(of, store);
               });
    }
    static bool has_own_blocks_in(const Source& of, const Source& in) {
        for (const auto& [plane, seen] : in.units) {
            const u32 group = group_of_plane(plane);
            if (group < of.layout.groups.size() &&
                seen.largest > of.layout.groups[group].block_size) {
                return true;
            }
        }
        return false;
    }

    // The tokens of a unit in each group of a tier; see `TierUnits.of`.
    std::vector<u64> units_of(const Source& of, const Source& in, u32 tier) const {
        const std::vector<Group>& groups = of.layout.groups;
        std::vector<u64> units(groups.size());
        u64 of_full = 0, of_all = 0;
        for (u32 i = 0; i < groups.size(); ++i) {
            units[i] = of.is_announced ? 1 : unit_blocks(of, in, i, tier);
            of_all = std::gcd(of_all, units[i]);
            if (groups[i].kind == GroupKind::full) of_full = std::gcd(of_full, units[i]);
        }
        const u64 common = of_full ? of_full : of_all ? of_all : 1;
        for (u32 i = 0; i < groups.size(); ++i) {
            const bool is_own = groups[i].kind == GroupKind::full && units[i];
            if (!is_own && !of.is_announced) units[i] = std::gcd(units[i], common);
            units[i] *= groups[i].block_size;
        }
        return units;
    }

private:
    u64 unit_blocks(const Source& of, const Source& in, u32 group, u32 tier) const {
        const Group& spec = of.layout.groups[group];
        if (spec.kind == GroupKind::not_cached) return 0;
        const TierUnit& hint = in.tiers[tier].hint;
        u64 unit = hint.tokens ? hint.tokens : hint.blocks * spec.block_size;
        auto seen = in.units.find(plane_of(group, tier));
        if (!hint.is_given() && seen != in.units.end()) {
            // Not the GPU's blocks: the tier, such as LMCache's, has its own.
            const bool has_own = seen->second.largest > spec.block_size;
            unit = has_own ? seen->second.largest : seen->second.ends;
        }
        if (!unit) return 0;
        // Ends inside a block are those of a block that is not full.
        return unit % spec.block_size ? 1 : unit / spec.block_size;
    }

    static constexpr u32 kAhead = 8;  // look-ups that are fetched ahead

    KeySpace space_;
    Limits limits_;
    NodeStore nodes_;
    HashHashes hash_hashes_;
    KeyHashes key_hashes_;
    IdTable<HashHashes> by_hash_;
    IdTable<KeyHashes> by_key_;
    std::vector<std::unique_ptr<Source>> sources_;
    std::deque<Leaving> leaving_;
    u32 next_ = 0;  // where `work_off` goes on
    std::vector<u32> scratch_slots_;
    u64 version_ = 0;
    u64 layouts_ = 0;  // the number of the last one that was set

    Batch batch_;
    std::vector<Key> keys_;
    std::vector<u32> scratch_rows_;
    std::vector<std::pair<u64, Key>> scratch_cleared_;  // no more than one too many to remember
};

}  // namespace kvroute
