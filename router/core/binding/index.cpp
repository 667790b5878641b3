// Binds the compiled index.
//
// One mutex guards an index, so that a match never sees half a batch. The interpreter lock is let
// go while a large batch applies or a long prompt is hashed or matched; for anything small that
// would cost more than it gives. No thread waits for the mutex with the interpreter lock in hand, nor
// the other way round: nothing of Python is touched under the mutex; see `Guarded`.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "binding/hits.hpp"
#include "binding/module.hpp"
#include "binding/index.hpp"
#include "binding/support.hpp"
#include "index/inspector.hpp"
#include "index/state.hpp"
#include "index/units.hpp"

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace nb = nanobind;
using namespace kvroute;
using namespace kvroute::binding;

namespace {

constexpr u64 kGivenBackAfter = 10'000;  // blocks that went with their sources
constexpr std::int64_t kAtATime = 1 << 15;  // see `Index::work_off`
constexpr std::size_t kLargePayload = 1 << 16;

using GroupTuple = std::tuple<int, u64, std::optional<u64>, std::optional<u64>, bool>;
// Groups, size of a hash block and of a scheduler's, whether EAGLE sees the last token, tokens that
// are replayed.
using LayoutTuple = std::tuple<std::vector<GroupTuple>, u64, u64, bool, u64>;
// By name: blocks and tokens.
using TierUnits = std::vector<std::tuple<std::string, u64, u64>>;
using StoreTuple = std::tuple<u32, std::vector<std::string>, std::optional<std::string>>;

Layout layout_of(const LayoutTuple& fields) {
    Layout layout;
    const auto& [groups, hash_block, scheduler_block, eagle_sees_last, replayed] = fields;
    for (const auto& [kind, block_size, window, chunk, eagle] : groups) {
        layout.groups.push_back({static_cast<GroupKind>(kind), block_size, window, chunk, eagle});
    }
    layout.hash_block_size = hash_block;
    layout.scheduler_block_size = scheduler_block;
    layout.eagle_sees_last_token = eagle_sees_last;
    layout.prefix_replay_tokens = replayed;
    return layout;
}

class Core {
public:
    // `no_hit`: an instance of the class of all hits. `result`: the class of a batch's effect.
    Core(u64 first_secret, u64 second_secret, const std::vector<u64>& limits, nb::object no_hit,
         nb::object result)
        : types_{nb::borrow(no_hit.type()), no_hit, std::move(result)},
          shared_(std::make_shared<SharedIndex>(
              std::array<u64, 2>{first_secret, second_secret},
              Limits{limits.at(0), limits.at(1), limits.at(2), limits.at(3), limits.at(4),
                     limits.at(5), limits.at(6)})) {}

    // For the other readers in the core.
    std::shared_ptr<SharedIndex> shared() const { return shared_; }

    // Names a source that may be added, for as long as the index lives.
    u32 new_number() {
        Guarded guarded(mutex_);
        return shared_->new_number();
    }

    u32 add(u32 number, const TierUnits& tier_units) {
        Guarded guarded(mutex_);
        return added(number, tier_units);
    }

    // Adds a store that sources share: it holds blocks as they do, and has no layout of its own.
    u32 add_store(const std::string& name, const TierUnits& tier_units) {
        Guarded guarded(mutex_);
        const u32 slot = added(shared_->new_number(), tier_units);
        index_.source(slot).name = name;
        return slot;
    }

    // Sets the stores of a source: the slot, tiers and ownership of each; see `StoreHint`. A store is
    // dropped after all sources that share it.
    void share(u32 slot, std::vector<StoreTuple> stores) {
        std::vector<StoreHint> hints;
        hints.reserve(stores.size());
        for (auto& [store, tiers, ownership] : stores) {
            hints.push_back({store, std::move(tiers), std::move(ownership)});
        }
        Guarded guarded(mutex_);
        check(slot);
        for (const StoreHint& hint : hints) check(hint.slot);
        index_.share(slot, std::move(hints));
    }

    // True where some block that the source could load has no place yet.
    bool has_unplaced(u32 slot) {
        Guarded guarded(mutex_);
        check(slot);
        return index_.has_unplaced(index_.source(slot));
    }

    // Takes the source out of look-ups. True where it held so much that `tidy` is to be called.
    bool drop(u32 slot) {
        ReleasedIf released(true);
        Guarded guarded(mutex_, false);
        check(slot);
        dropped_ += index_.source(slot).entries;
        shared_->drop(slot);
        return work_off();
    }

    // Frees some blocks of dropped sources, for about a millisecond; true where more are left.
    bool tidy() {
        ReleasedIf released(true);
        Guarded guarded(mutex_, false);
        return work_off();
    }

    void set_layout(u32 slot, const LayoutTuple& layout, bool is_announced, u32 lookahead) {
        Layout made = layout_of(layout);
        Guarded guarded(mutex_);
        check(slot);
        index_.set_layout(slot, std::move(made), is_announced, lookahead);
    }

    // See `Index::borrow_layout`.
    void borrow_layout(u32 slot, const LayoutTuple& layout, u32 read_lookahead) {
        Layout made = layout_of(layout);
        Guarded guarded(mutex_);
        check(slot);
        index_.borrow_layout(slot, std::move(made), read_lookahead);
    }

    void unset_layout(u32 slot, bool is_announced, u32 lookahead) {
        Guarded guarded(mutex_);
        check(slot);
        index_.unset_layout(slot, is_announced, lookahead);
    }

    // Returns the batch's effect: an `ApplyResult` where nothing needs Python's attention, else a
    // tuple, which also has the slot of the source now. Returns a list of news for the layout learner,
    // with nothing applied yet; None where the batch is odd.
    nb::object apply(u32 slot, nb::bytes payload) {
        Done done;
        std::vector<News> news;
        Applier::Outcome outcome;
        {
            const bool is_large = payload.size() > kLargePayload;
            const std::span<const u8> bytes(static_cast<const u8*>(payload.data()),
                                            payload.size());
            require_memory();
            ReleasedIf released(is_large);
            Guarded guarded(mutex_, !is_large);
            check(slot);
            Source& of = index_.source(slot);
            outcome = applier_.apply(slot, bytes, done.result, news);
            if (outcome == Applier::Outcome::applied) look_at(of, slot, done);
        }
        if (outcome == Applier::Outcome::odd) return nb::none();
        if (outcome == Applier::Outcome::applied) {
            return done.is_plain() ? plain(done) : as_tuple(done);
        }
        return as_list(news);
    }

    nb::object apply_reported(u32 slot, nb::bytes payload, bool is_canonical,
                              const std::vector<u32>& opaque) {
        Done done;
        bool is_applied;
        {
            const bool is_large = payload.size() > kLargePayload;
            const std::span<const u8> bytes(static_cast<const u8*>(payload.data()),
                                            payload.size());
            require_memory();
            ReleasedIf released(is_large);
            Guarded guarded(mutex_, !is_large);
            check(slot);
            Source& of = index_.source(slot);
            is_applied = applier_.apply_reported(slot, bytes, is_canonical, opaque, done.result);
            if (is_applied) look_at(of, slot, done);
        }
        return is_applied ? as_tuple(done) : nb::none();
    }

    void note(u32 slot, bool has_chain, bool shows_extra_keys, bool has_lost_removals) {
        Guarded guarded(mutex_);
        check(slot);
        Source& of = index_.source(slot);
        of.has_chain = has_chain;
        of.shows_extra_keys |= shows_extra_keys;
        of.has_lost_removals |= has_lost_removals;
    }

    bool holds_hash(u32 slot, nb::handle block_hash) {
        const u64 hash = hash_of(index_.space(), block_hash);
        Guarded guarded(mutex_);
        check(slot);
        return index_.entry_of(index_.source(slot), hash) != kNone;
    }

    bool hides_extra_keys(u32 slot) {
        Guarded guarded(mutex_);
        check(slot);
        return index_.source(slot).hides_extra_keys();
    }

    bool uses_int_hashes(u32 slot) {
        Guarded guarded(mutex_);
        check(slot);
        return index_.source(slot).uses_int_hashes;
    }

    // Returns hashes for `match`; None where Python has to make them.
    nb::object engine_hashes(const PromptHandle& handle, const std::string& algorithm,
                             nb::bytes root, u64 block_size, u64 lookahead, bool as_int,
                             const std::vector<nb::bytes>& extra_keys) {
        const EngineHashing hashing{algorithm, std::move(root), block_size, lookahead, extra_keys};
        auto found = binding::engine_hashes(index_.space(), handle, hashing, as_int);
        return found ? nb::cast(std::move(*found)) : nb::none();
    }

    u64 blocks_held(u32 slot) {
        Guarded guarded(mutex_);
        check(slot);
        return index_.source(slot).tiers[0].blocks;
    }

    u64 removals(u32 slot) {
        Guarded guarded(mutex_);
        check(slot);
        return index_.source(slot).removals;
    }

    u64 unplaced(u32 slot) {
        Guarded guarded(mutex_);
        check(slot);
        Source& of = index_.source(slot);
        of.reported_unplaced = of.unplaced > 0;
        return of.unplaced;
    }

    nb::dict statistics(u32 slot) {
        const SourceNumbers of = numbers_of(slot);
        nb::dict found;
        nb::list blocks, units, removed;
        for (const SourceNumbers::OfPlane& each : of.planes) {
            const nb::object name = text(each.tier);
            blocks.append(nb::make_tuple(each.group, name, each.blocks));
            if (each.unit) units.append(nb::make_tuple(each.group, name, *each.unit));
        }
        for (u32 group = 0; group < of.removed.size(); ++group) {
            if (of.removed[group]) removed.append(nb::make_tuple(group, of.removed[group]));
        }
        found["blocks"] = blocks;
        found["units"] = units;
        found["removed"] = removed;
        for (const auto& [name, number] : of.numbers) found[name] = number;
        for (const auto& [name, flag] : of.flags) found[name] = flag;
        return found;
    }

    // Hashes a prompt for every source.
    void hash(PromptHandle& handle) {
        Prompt& prompt = *handle.prompt;
        handle.index = shared_;
        ReleasedIf released(prompt.length() > kLongPrompt);
        std::vector<Prompt::Step> steps;
        {
            Guarded guarded(mutex_, prompt.length() <= kLongPrompt);
            steps = matcher_.steps();
        }
        for (Prompt::Step step : steps) prompt.keys(index_.space(), step);
    }

    std::vector<u64> prefix_keys(const PromptHandle& handle, u64 step) {
        const std::span<const u64> keys = handle.prompt->prefix_keys(index_.space(), step);
        return {keys.begin(), keys.end()};
    }

    // `slots`: see `HitMap`.
    HitMap match(const PromptHandle& handle, nb::dict slots,
                 const std::vector<ComputedTuple>& computed) {
        Prompt& prompt = *handle.prompt;
        HitMap found(std::move(slots), types_);
        const std::vector<Computed> by_hash = computed_of(index_.space(), computed);
        const bool is_long = prompt.length() > kLongPrompt;
        ReleasedIf released(is_long);
        Guarded guarded(mutex_, !is_long);
        matcher_.match(prompt, by_hash, hits_);
        found.hits = hits_.by_slot;
        for (const auto& [slot, shares] : hits_.shares) {
            found.shares.emplace_back(slot, named(slot, shares));
        }
        return found;
    }

    // The hit of one source.
    nb::object match_source(const PromptHandle& handle, u32 slot,
                            const std::vector<ComputedTuple>& computed) {
        Prompt& prompt = *handle.prompt;
        const std::vector<Computed> by_hash = computed_of(index_.space(), computed);
        Hit hit;
        NamedShares shares;
        {
            const bool is_long = prompt.length() > kLongPrompt;
            ReleasedIf released(is_long);
            Guarded guarded(mutex_, !is_long);
            check(slot);
            TieredHit found =
                matcher_.match_source(slot, prompt, by_hash.empty() ? nullptr : &by_hash[0]);
            hit = found.hit;
            shares = named(slot, found.by_tier);
        }
        return hit.total ? made_hit(types_, hit, shares) : types_.no_hit;
    }

    u64 match_tier(const PromptHandle& handle, u32 slot, const std::string& tier,
                   const std::vector<ComputedTuple>& computed) {
        Prompt& prompt = *handle.prompt;
        const std::vector<Computed> by_hash = computed_of(index_.space(), computed);
        const bool is_long = prompt.length() > kLongPrompt;
        ReleasedIf released(is_long);
        Guarded guarded(mutex_, !is_long);
        check(slot);
        return matcher_.match_tier(slot, prompt, tier, by_hash.empty() ? nullptr : &by_hash[0]);
    }

    std::vector<u64> group_hits(const PromptHandle& handle, u32 slot,
                                const std::vector<ComputedTuple>& computed) {
        Prompt& prompt = *handle.prompt;
        const std::vector<Computed> by_hash = computed_of(index_.space(), computed);
        Guarded guarded(mutex_);
        check(slot);
        return matcher_.group_hits(prompt, slot, by_hash.empty() ? nullptr : &by_hash[0]);
    }

    // Returns hashes as the core keeps them, for `match_hashes`.
    EngineHashes hash_numbers(const nb::list& hashes) {
        EngineHashes found;
        for (nb::handle each : hashes) found.numbers.push_back(hash_of(index_.space(), each));
        return found;
    }

    nb::tuple match_hashes(u32 slot, const EngineHashes& hashes) {
        FoundByHashes found;
        NamedShares shares;
        {
            const bool is_long = hashes.numbers.size() > kLongPrompt / 16;
            ReleasedIf released(is_long);
            Guarded guarded(mutex_, !is_long);
            check(slot);
            found = matcher_.match_hashes(slot, hashes.numbers);
            shares = named(slot, found.hit.by_tier);
        }
        nb::object hit =
            found.hit.hit.total ? made_hit(types_, found.hit.hit, shares) : types_.no_hit;
        return nb::make_tuple(hit, found.by_group, found.held, found.is_whole);
    }

    nb::bytes export_source(u32 slot) {
        std::vector<u8> bytes;
        {
            Guarded guarded(mutex_);
            check(slot);
            index_.work_off();  // a source remembers some of the blocks that it left behind
            bytes = written_state(index_, slot);
        }
        return nb::bytes(bytes.data(), bytes.size());
    }

    void restore_source(u32 slot, nb::bytes state) {
        const std::span<const u8> bytes(static_cast<const u8*>(state.data()), state.size());
        Guarded guarded(mutex_);
        check(slot);
        read_state(index_, slot, bytes);
    }

    std::vector<std::string> contradictions() {
        Guarded guarded(mutex_);
        index_.work_off();
        return Inspector(index_).contradictions();
    }

    // For tests: returns a source's blocks, as group, tier, hash and copies. A hash that is no integer
    // is a digest, the same in every index of one secret.
    std::vector<std::tuple<u32, std::string, u64, u64>> copies(u32 slot) {
        Guarded guarded(mutex_);
        check(slot);
        return Inspector(index_).copies(index_.source(slot));
    }

    std::pair<u64, u64> sizes() {
        Guarded guarded(mutex_);
        index_.work_off();
        return {index_.nodes().size(), index_.memory()};
    }

private:
    bool work_off() {
        index_.work_off(kAtATime);
        const bool has_more = index_.has_work_left();
        // Small sources leave holes as large ones do, but to return the memory of each costs more.
        if (!has_more && dropped_ >= kGivenBackAfter) {
            dropped_ = 0;
#ifdef __GLIBC__
            malloc_trim(0);
#endif
        }
        return has_more;
    }

    // The statistics of a source.
    struct SourceNumbers {
        struct OfPlane {
            u32 group;
            std::string tier;
            u64 blocks;
            std::optional<u64> unit;
        };
        std::vector<OfPlane> planes;
        std::vector<u64> removed;
        std::vector<std::pair<const char*, u64>> numbers;
        std::vector<std::pair<const char*, bool>> flags;
    };

    SourceNumbers numbers_of(u32 slot) {
        Guarded guarded(mutex_);
        check(slot);
        const Source& of = index_.source(slot);
        SourceNumbers found;
        for (u32 plane = 0; plane < of.counts.size(); ++plane) {
            if (!of.counts[plane]) continue;
            const u32 group = group_of_plane(plane), tier = tier_of_plane(plane);
            std::optional<u64> unit;
            if (tier && of.has_layout && group < of.layout.groups.size()) {
                unit = units_of(of, of, tier)[group];
            }
            found.planes.push_back({group, of.tiers[tier].name, of.counts[plane], unit});
        }
        found.removed = of.removed;
        found.numbers = {{"unplaced", of.unplaced},
                         {"ambiguous", of.ambiguous},
                         {"waiting_runs", of.waiting.runs},
                         {"waiting_tokens", of.waiting.tokens},
                         {"given_up", of.waiting.given_up},
                         {"forgotten", of.forgotten.size()},
                         {"entries", of.entries}};
        found.flags = {{"has_overflowed", of.has_overflowed},
                       {"has_lost_removals", of.has_lost_removals},
                       {"announces_remote", of.announces_remote},
                       {"removes_last_only",
                        of.copy_watch.counting == CopyWatch::Counting::last_copy}};
        return found;
    }

    u32 added(u32 number, const TierUnits& tier_units) {
        if (shared_->slot_of(number) != kNone) throw nb::index_error("the source is there already");
        const u32 slot = shared_->add(number);
        for (const auto& [name, blocks, tokens] : tier_units) {
            index_.source(slot).tier_units.push_back({name, blocks, tokens});
        }
        return slot;
    }

    void check(u32 slot) const {
        if (!index_.has_source(slot)) throw nb::index_error("no such source");
    }

    // A batch's effect, and its source's state since.
    struct Done {
        Applied result;
        u32 slot = 0;
        bool has_lower_tiers = false, may_show_function = false, is_news = false;
        u64 unplaced = 0;

        // True where blocks came and went, and that is all.
        bool is_plain() const {
            return !(result.waiting | result.skipped | result.given_up) && !result.cleared &&
                   result.stores_to_report.empty() &&
                   !result.is_incomplete && !may_show_function && !is_news;
        }
    };

    void look_at(Source& of, u32 slot, Done& done) {
        done.slot = of.slot;
        if (of.slot != slot) shared_->moved(slot, of.slot);
        if (done.result.cleared) dropped_ += done.result.removed;
        done.has_lower_tiers = of.has_lower_tiers() || of.has_shared;
        done.unplaced = of.unplaced;
        done.may_show_function =
            done.result.has_root_sample && (index_.has_unplaced(of) || of.hides_extra_keys());
        done.is_news = of.reported_unplaced != (of.unplaced > 0) || of.reported_chain != of.has_chain;
        of.reported_unplaced = of.unplaced > 0;
        of.reported_chain = of.has_chain;
    }

    nb::object plain(const Done& done) const {
        if (!done.has_lower_tiers) return types_.result(done.result.stored, done.result.removed);
        return types_.result(done.result.stored, done.result.removed,
                             nb::arg("has_lower_tiers") = true);
    }

    static nb::object as_tuple(const Done& done) {
        const Applied& result = done.result;
        return nb::make_tuple(result.stored, result.removed, result.waiting, result.skipped,
                              result.overflow, result.given_up, result.cleared,
                              result.is_incomplete, done.has_lower_tiers, done.may_show_function,
                              done.unplaced, done.slot, result.stores_to_report);
    }

    NamedShares named(u32 slot, const Shares& shares) {
        NamedShares found;
        for (const auto& [share, tokens] : shares) {
            found.emplace_back(matcher_.name_of_share(slot, share), tokens);
        }
        return found;
    }

    static nb::object as_tuple(const News& news) {
        return nb::make_tuple(
            news.lookahead ? nb::cast(*news.lookahead) : nb::none(),
            news.group ? nb::cast(*news.group) : nb::none(), news.is_on_gpu,
            news.kind.empty() ? nb::none() : text(news.kind),
            news.window ? nb::cast(news.window) : nb::none(), news.block_size);
    }

    static nb::list as_list(const std::vector<News>& news) {
        nb::list reported;
        for (const News& each : news) reported.append(as_tuple(each));
        return reported;
    }

    ResultTypes types_;
    std::shared_ptr<SharedIndex> shared_;
    std::mutex& mutex_ = shared_->mutex;
    Index& index_ = shared_->index;
    Applier& applier_ = shared_->applier;
    Matcher& matcher_ = shared_->matcher;
    Hits& hits_ = shared_->hits;
    u64 dropped_ = 0;  // blocks since memory was given back last
};

}  // namespace

void kvroute::binding::bind_index(nb::module_& module) {
    static nb::exception<StateError> state_error(module, "StateError", PyExc_ValueError);

    bind_prompt(module);
    bind_hits(module);
    nb::class_<SharedIndex>(module, "SharedIndex");  // NOLINT(bugprone-unused-raii): registers it

    nb::class_<Core>(module, "Core")
        .def(nb::init<u64, u64, const std::vector<u64>&, nb::object, nb::object>())
        .def("shared", &Core::shared)
        .def("new_number", &Core::new_number)
        .def("add", &Core::add)
        .def("add_store", &Core::add_store)
        .def("share", &Core::share)
        .def("has_unplaced", &Core::has_unplaced)
        .def("drop", &Core::drop)
        .def("tidy", &Core::tidy)
        .def("set_layout", &Core::set_layout)
        .def("borrow_layout", &Core::borrow_layout)
        .def("unset_layout", &Core::unset_layout)
        .def("apply", &Core::apply)
        .def("apply_reported", &Core::apply_reported)
        .def("note", &Core::note)
        .def("holds_hash", &Core::holds_hash)
        .def("hides_extra_keys", &Core::hides_extra_keys)
        .def("uses_int_hashes", &Core::uses_int_hashes)
        .def("engine_hashes", &Core::engine_hashes)
        .def("unplaced", &Core::unplaced)
        .def("blocks_held", &Core::blocks_held)
        .def("removals", &Core::removals)
        .def("statistics", &Core::statistics)
        .def("hash", &Core::hash)
        .def("prefix_keys", &Core::prefix_keys)
        .def("match", &Core::match)
        .def("match_source", &Core::match_source)
        .def("match_tier", &Core::match_tier)
        .def("group_hits", &Core::group_hits)
        .def("hash_numbers", &Core::hash_numbers)
        .def("match_hashes", &Core::match_hashes)
        .def("export_source", &Core::export_source)
        .def("restore_source", &Core::restore_source)
        .def("sizes", &Core::sizes)
        .def("copies", &Core::copies)
        .def("contradictions", &Core::contradictions);

}
