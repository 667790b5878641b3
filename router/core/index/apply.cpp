#include "index/apply.hpp"

#include <numeric>

#include "index/units.hpp"

namespace kvroute {

namespace {

// True where an event may hide something that goes into its hashes.
bool may_be_opaque(const Source& of, const Event& event) {
    return of.has_chain && event.is_on_gpu && !event.parent && event.extra_keys.empty() &&
           !event.has_adapter() && event.salt.value_or("").empty() && !event.has_lookahead &&
           event.tokens_per_block();
}

void collect_news(Source& of, const Event& event, std::vector<News>& out) {
    News news;
    if (event.has_lookahead && of.reported_lookahead != event.lookahead) {
        of.reported_lookahead = news.lookahead = event.lookahead;
    }
    const u32 implied = event.tokens_per_block();
    ReportedGroup now{true, std::string(), event.window, implied};
    if (event.is_on_gpu && event.block_size) now.block_size = event.block_size;
    const bool has_facts = event.is_on_gpu ? now.block_size && event.tokens
                                           : implied || !event.kind.empty();
    if (has_facts) {
        const u32 place = event.group * 2 + !event.is_on_gpu;
        if (place >= of.reported.size()) of.reported.resize(place + 1);
        ReportedGroup& reported = of.reported[place];
        if (!reported.is_reported || reported.kind != event.kind || reported.window != now.window ||
            reported.block_size != now.block_size) {
            now.kind = event.kind;
            reported = now;
            news.group = event.group;
            news.is_on_gpu = event.is_on_gpu;
            news.kind = now.kind;
            news.window = now.window;
            news.block_size = now.block_size;
        }
    }
    if (news.group || news.lookahead) out.push_back(std::move(news));
}

void refuse(Source& of, u64 blocks, Applied& result) {
    of.has_overflowed |= blocks > 0;
    result.overflow += blocks;
    result.skipped += blocks;
    result.is_incomplete |= blocks > 0;
}

}  // namespace

Applier::Outcome Applier::apply(u32 slot, std::span<const u8> payload, Applied& result,
                                std::vector<News>& news) {
    Source& of = index_.source(slot);
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

bool Applier::apply_reported(u32 slot, std::span<const u8> payload, bool is_canonical,
                             const std::vector<u32>& opaque, Applied& result) {
    if (!read(payload, is_canonical)) return false;
    Source& of = index_.source(slot);
    std::vector<News> reported;
    for (const Event& event : batch_.events) {
        if (event.type == EventType::stored) collect_news(of, event, reported);
    }
    apply_all(of, opaque, result);
    return true;
}

bool Applier::read(std::span<const u8> payload, bool is_canonical) {
    if (payload.size() >= u64{1} << 31) return false;
    batch_.shrink();
    return read_batch(space_, payload, is_canonical, batch_);
}

void Applier::apply_all(Source& of, const std::vector<u32>& opaque, Applied& result) {
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
    result.given_up = of.waiting.trim(limits_, of.batches, [&](const WaitingRun& run) {
        return is_unplaced(of, run.hashes);
    });
}

// Fetches the memory that the look-ups of an event's first hashes will read.
void Applier::prefetch(const Event& event) const {
    const std::span<const u64> hashes = hashes_of(event);
    for (u32 i = 0; i < std::min(event.hashes, kAhead); ++i) nodes_.prefetch_hash(hashes[i]);
}

void Applier::store(Source& of, const Event& event, bool is_opaque, Applied& result) {
    of.shows_extra_keys |= !event.extra_keys.empty() || event.salt.has_value();
    if (Source* store = meant_by(of, event)) {
        store_shared(of, *store, event, result);
        return;
    }
    of.announces_remote |= event.is_remote;
    const u32 tier = event.is_on_gpu ? 0 : of.tier_for(event.tier);
    if (tier == kNone) {
        refuse(of, event.hashes, result);
        return;
    }
    const u32 plane = plane_of(event.group, tier);
    if (tier) index_.make_room(of, event.group, tier, event.hashes);
    const u32 taken = static_cast<u32>(std::min<u64>(event.hashes, index_.room(of, plane)));
    const u32 block_size = event.tokens_per_block();
    result.has_root_sample |= event.has_root_sample;

    const bool is_placed = block_size && !is_opaque && find_keys(of, event, block_size);
    const bool has_ghosts = of.copy_watch.has_leftovers() && event.is_on_gpu;
    const bool is_plain = is_placed && !has_ghosts && !contradicts_remembered(of, event, taken);
    const std::span<const u64> hashes = hashes_of(event).first(taken);
    if (is_placed && !tier && of.has_lower_tiers()) {
        for (u32 i = 0; i < taken; ++i) index_.doubt(of, plane, hashes[i], keys_[i]);
    }
    bool needs_placing =
        taken < event.hashes || has_ghosts || of.waiting.runs || !of.stores.empty();
    for (u32 i = 0; i < taken; ++i) {
        if (i + kAhead < taken) {
            nodes_.prefetch_hash(hashes[i + kAhead]);
            if (is_placed) nodes_.prefetch_key(NodeTables::hash_of_key(keys_[i + kAhead]));
        }
        const Key* key = is_plain ? &keys_[i] : nullptr;
        const bool is_int = batch_.is_int[event.first_hash + i];
        needs_placing |= !index_.add(of, plane, hashes[i], is_int, 1, key);
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
    if (of.unplaced) result.waiting += index_.unplaced_of(of, hashes);
}

// Drops copies that were counted and cannot be there, as only last removals are announced.
void Applier::drop_ghosts(Source& of, const Event& event) {
    static constexpr std::string_view kNotFull[] = {
        "sliding_window", "sliding_window_mla", "chunked_local_attention", "mamba",
        "linear_attention", "cross_attention", "encoder_only_attention", "not_cached"};
    const bool is_full =
        std::find(std::begin(kNotFull), std::end(kNotFull), event.kind) == std::end(kNotFull);
    const std::span<const u64> hashes = hashes_of(event);
    if (!of.copy_watch.stored(event.group, hashes, event.parent, is_full)) return;
    of.copy_watch.for_each_leftover([&](u32 group, u64 hash) {
        const u32 none = 0;
        leave(of, plane_of(group, 0), {&hash, 1}, &none);
    });
}

// Every hash ends a unit, with one exception: a self-describing event of vLLM is about one unit,
// and names the blocks in it. LMCache's names its own blocks, which are larger.
void Applier::see_unit(const Source& of, Source& in, u32 plane, const Event& event) {
    const std::span<const u64> hashes = hashes_of(event);
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
        if (!index_.key_of(of, hashes[i], key)) continue;
        const std::int64_t end = std::int64_t{key.length} - std::int64_t{of.lookahead};
        found = std::gcd(found, static_cast<u64>(end < 0 ? -end : end));
    }
    if (found) {
        SeenUnit& seen = in.units[plane];
        seen.ends = std::gcd(seen.ends, found);
    }
}

void Applier::remove(Source& of, const Event& event, Applied& result) {
    if (Source* store = meant_by(of, event)) {
        const u64 gone = remove_shared(*store, event);
        result.removed += gone;
        result.skipped += event.hashes - gone;
        return;
    }
    const u32 tier = event.is_on_gpu ? 0 : of.tier_named(event.tier);
    const std::span<const u64> hashes = hashes_of(event);
    const u32 plane = tier == kNone ? kNone : plane_of(event.group, tier);
    u64 removed = 0;
    if (event.has_counts) {
        of.copy_watch.settle();
        const u32 known = tier == kNone ? of.tier_for(event.tier) : tier;
        if (known != kNone) {
            removed = leave(of, plane_of(event.group, known), hashes,
                            batch_.counts.data() + event.first_count);
        }
    } else if (event.is_on_gpu && (of.copy_watch.has_leftovers() || of.copies > of.places) &&
               leaves_none(of, event, plane, result)) {
        const std::vector<u32> none(event.hashes);
        removed = leave(of, plane, hashes, none.data());
    } else if (plane != kNone) {
        removed = discount_each(of, plane, hashes);
    }
    if (event.is_on_gpu) of.count_removed(event.group, removed);
    result.removed += removed;
    result.skipped += event.hashes - removed;
}

u64 Applier::discount_each(Source& of, u32 plane, std::span<const u64> hashes) {
    u64 removed = 0;
    if (!of.count(plane)) return 0;
    for (std::size_t i = 0; i < hashes.size(); ++i) {
        if (i + 2 * kAhead < hashes.size()) nodes_.prefetch_hash(hashes[i + 2 * kAhead]);
        if (i + kAhead < hashes.size()) nodes_.prefetch_node(hashes[i + kAhead]);
        const u32 id = index_.entry_of(of, hashes[i]);
        const u64 copies = id == kNone ? 0 : index_.copies_of(of, id, plane);
        if (!copies) continue;
        index_.discount(of, plane, id, copies, 1);
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

// True where no copy of any block is left, since the source announces last removals only.
bool Applier::leaves_none(Source& of, const Event& event, u32 plane, Applied& result) {
    CopyWatch& watch = of.copy_watch;
    if (watch.is_settled()) return false;
    const bool was_last_copy = watch.counting == CopyWatch::Counting::last_copy;
    for (u32 i = 0; i < event.hashes; ++i) {
        const u64 hash = batch_.hashes[event.first_hash + i];
        const u32 id = index_.entry_of(of, hash);
        watch.removed(event.group, hash, id == kNone ? 0 : index_.copies_of(of, id, plane));
    }
    if (!was_last_copy) return false;
    if (watch.is_settled()) {
        // It announces every removal after all: copies were taken as gone that are there.
        of.has_lost_removals = result.is_incomplete = true;
        return false;
    }
    return true;
}

// Sets the copies of each block to `left`; returns how many of the blocks were present.
u64 Applier::leave(Source& of, u32 plane, std::span<const u64> hashes, const u32* left) {
    u64 removed = 0;
    for (std::size_t i = 0; i < hashes.size(); ++i) {
        const u32 id = index_.entry_of(of, hashes[i]);
        const u64 copies = id == kNone ? 0 : index_.copies_of(of, id, plane);
        removed += copies > 0;
        if (copies > left[i]) {
            index_.discount(of, plane, id, copies, copies - left[i]);
        } else if (copies < left[i] && (copies || index_.room(of, plane))) {
            const bool is_int = is_int_hash(hashes.data() + i);
            index_.add(of, plane, hashes[i], is_int, left[i] - copies, nullptr);
        }
    }
    return removed;
}

// True where a hash of the batch came as an integer.
bool Applier::is_int_hash(const u64* hash) const {
    const u64* first = batch_.hashes.data();
    return hash >= first && hash < first + batch_.hashes.size() ? batch_.is_int[hash - first]
                                                                : true;
}

void Applier::clear_tier(Source& of, const Event& event, Applied& result) {
    // SGLang's flush empties its host memory too, and announces both as one. Engines that announce a
    // layout name each tier.
    if (event.tier.empty() && event.is_on_gpu && !of.is_announced) {
        const u32 host = of.tier_named("CPU_PINNED");
        if (host != kNone) result.removed += index_.clear(of, host);
    }
    const u32 tier = event.is_on_gpu ? 0 : of.tier_named(event.tier);
    if (tier != kNone) {
        const bool is_large = index_.may_move_out(of, tier);
        result.removed += is_large ? index_.move_out(of) : index_.clear(of, tier);
    }
    if (!event.is_on_gpu) {
        result.removed += clear_shared(of, event.tier);
        return;
    }
    result.cleared = true;
    of.copy_watch.forget();
    of.removals = 0;
    // With nothing left there is nothing that could be wrong, or missing.
    if (of.entries) return;
    of.has_lost_removals = false;
    if (of.has_shared) return;
    of.has_overflowed = false;
    of.waiting.given_up = 0;
}

}  // namespace kvroute
