// Binds decisions: what makes them, and rankings that Python reads one place at a time.

#include "decide/decide.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "binding/decide.hpp"
#include "binding/index.hpp"
#include "binding/module.hpp"
#include "binding/support.hpp"

namespace nb = nanobind;
using namespace kvroute;
using namespace kvroute::binding;
using namespace kvroute::decide;

namespace {

using Rank = std::optional<int>;

nb::object or_none(const std::optional<double>& value) {
    return value ? nb::cast(*value) : nb::none();
}

nb::object rank_or_none(int dp_rank) {
    return dp_rank == kAnyRank ? nb::none() : nb::cast(dp_rank);
}

// Makes a `router.policies.Lower`: the tokens of each tier, the price, and the source of a pull.
nb::tuple lower_tuple(const Candidates& of, std::size_t number, const Fleet& fleet) {
    const Lower& lower = of.lower.at(number);
    nb::list by_tier;
    for (const TierShare& share : of.shares_of(lower)) {
        by_tier.append(nb::make_tuple(text(share.tier), share.tokens));
    }
    return nb::make_tuple(
        nb::tuple(by_tier), or_none(lower.price),
        lower.pull_from == kNone ? nb::none() : text(fleet[lower.pull_from].id));
}

// Makes a `router.policies.State`.
nb::tuple state_tuple(const State& state, const Fleet& fleet) {
    const nb::object doubt =
        state.estimate_trust != 0.0 ? nb::cast(state.estimate_trust) : nb::cast(state.is_suspect);
    return nb::make_tuple(text(fleet[state.replica].id), rank_or_none(state.dp_rank), state.speed,
                          doubt, state.queued_tokens, state.prefilling, state.decoding,
                          state.context_tokens, state.foreign, state.waiting);
}

// Makes the columns of `router.policies.Standings`.
nb::tuple columns_of(const Candidates& of, const Fleet& fleet) {
    nb::list states, gpu, cached, junction, recent, progress, outlooks;
    for (std::size_t number = 0; number < of.size(); ++number) {
        states.append(state_tuple(of.states[number], fleet));
        gpu.append(of.cached[number].gpu);
        cached.append(of.cached[number].all);
        junction.append(of.cached[number].junction);
        recent.append(of.cached[number].recent);
        const Outlook& outlook = of.outlooks[number];
        progress.append(outlook.progress_tokens);
        outlooks.append(nb::make_tuple(or_none(outlook.eviction_age_s), outlook.reuse_probability,
                                       outlook.uncached_tokens_per_s, outlook.arrivals_per_s,
                                       outlook.refill));
    }
    return nb::make_tuple(states, gpu, cached, junction, recent, progress, outlooks);
}

// A plug-in's, in Python. No thread holds the books during its call, as its objects may write to them
// when they are freed. It owns no Python object: it may be freed without the interpreter lock.
class AskedRankCosts : public RankCosts {
public:
    AskedRankCosts(nb::handle ask, std::optional<Guarded>& guarded, std::mutex& mutex)
        : ask_(ask), guarded_(guarded), mutex_(mutex) {}

    void find(const Candidates& ranks, const Fleet& fleet, std::vector<double>& out) override {
        guarded_.reset();
        ask(ranks, fleet, out);  // frees all of its objects: the interpreter lock may be let go below
        if (out.size() != ranks.size()) throw nb::value_error("a cost for each rank");
        guarded_.emplace(mutex_);
    }

private:
    void ask(const Candidates& ranks, const Fleet& fleet, std::vector<double>& out) {
        nb::list lower;
        for (std::size_t number = 0; number < ranks.size(); ++number) {
            lower.append(lower_tuple(ranks, number, fleet));
        }
        out = nb::cast<std::vector<double>>(ask_(columns_of(ranks, fleet), lower));
    }

    nb::handle ask_;
    std::optional<Guarded>& guarded_;
    std::mutex& mutex_;
};

// A `RecentPrefixes` that takes the mutex for each call.
class RecentHandle {
public:
    RecentHandle(BooksPointer books, double ttl_s, std::size_t max_entries)
        : books_(std::move(books)), recent_(std::make_shared<RecentPrefixes>(ttl_s, max_entries)) {}

    const std::shared_ptr<RecentPrefixes>& get() const { return recent_; }

    void remember(CacheId cache, const std::vector<u64>& keys, double now) {
        Guarded guarded(books_->mutex);
        recent_->remember(cache, keys, now);
    }
    void forget(CacheId cache) {
        Guarded guarded(books_->mutex);
        recent_->forget(cache);
    }
    std::vector<std::pair<CacheId, i64>> match(const std::vector<u64>& keys, i64 step, double now) {
        std::vector<ComingAt> found;
        {
            Guarded guarded(books_->mutex);
            recent_->match(keys, step, now, found);
        }
        std::vector<std::pair<CacheId, i64>> tokens;
        tokens.reserve(found.size());
        for (const ComingAt& each : found) tokens.emplace_back(each.cache, each.coming.tokens);
        return tokens;
    }
    std::tuple<std::size_t, u64, u64> counts() {
        Guarded guarded(books_->mutex);
        return {recent_->entries(), recent_->evicted(), recent_->truncated()};
    }

private:
    BooksPointer books_;
    std::shared_ptr<RecentPrefixes> recent_;
};

struct Deciding;

// One decision's ranking. It keeps the memory that it was found in, which is reused afterwards.
class RankingHandle {
public:
    RankingHandle(std::shared_ptr<Deciding> deciding, std::unique_ptr<Scratch> scratch)
        : deciding_(std::move(deciding)), scratch_(std::move(scratch)) {}
    ~RankingHandle();
    RankingHandle(const RankingHandle&) = delete;
    RankingHandle& operator=(const RankingHandle&) = delete;

    const Ranking& get() const { return scratch_->ranking; }
    const std::vector<u32>& numbers() { return scratch_->ranking.numbers(); }

    double cost(std::size_t number) const { return get().order.costs.at(number); }
    nb::tuple candidate(std::size_t number) const { return tuple_of(get().able, number); }
    nb::tuple columns() const { return columns_of(get().able, *get().fleet); }
    nb::tuple lower(std::size_t number) const {
        return lower_tuple(get().able, number, *get().fleet);
    }
    nb::list excluded() const {
        nb::list found;
        for (std::size_t number = 0; number < get().unable.size(); ++number) {
            const auto obstacle = static_cast<int>(get().obstacles[number]);
            found.append(nb::make_tuple(tuple_of(get().unable, number), obstacle));
        }
        return found;
    }

private:
    // The fields of `router.policies.Candidate` in their order, with those of its load in one tuple.
    nb::tuple tuple_of(const Candidates& of, std::size_t number) const {
        const State& state = of.states.at(number);
        const CachedTokens& cached = of.cached[number];
        const Outlook& outlook = of.outlooks[number];
        const Fleet& fleet = *get().fleet;
        const nb::tuple lower = lower_tuple(of, number, fleet);
        return nb::make_tuple(
            text(fleet[state.replica].id), cached.gpu, cached.all, lower[0], lower[1], lower[2],
            cached.junction, cached.recent, outlook.progress_tokens,
            or_none(outlook.eviction_age_s), outlook.reuse_probability,
            outlook.uncached_tokens_per_s, outlook.arrivals_per_s, outlook.refill, state.is_suspect,
            state.estimate_trust == 0.0 ? nb::none() : nb::cast(state.estimate_trust),
            nb::make_tuple(state.queued_tokens, state.prefilling, state.decoding,
                           state.context_tokens, state.foreign, state.waiting),
            state.speed, rank_or_none(state.dp_rank));
    }

    std::shared_ptr<Deciding> deciding_;
    std::unique_ptr<Scratch> scratch_;
};

struct Deciding {
    BooksPointer books;
    Decider decider;
    std::vector<std::unique_ptr<Scratch>> idle;  // guarded by the interpreter lock
};

RankingHandle::~RankingHandle() {
    constexpr std::size_t kMostIdle = 16;
    if (deciding_->idle.size() < kMostIdle) deciding_->idle.push_back(std::move(scratch_));
}

class DeciderHandle {
public:
    DeciderHandle(const BooksPointer& books, const std::string& policy, nb::handle weights,
                  double engine_load_stale_after_s, u64 seed, bool plug_in_needs_outlook)
        : deciding_(std::make_shared<Deciding>(Deciding{
              books,
              Decider(*books, {kind_of(policy), weights_of(weights), engine_load_stale_after_s, seed,
                               false, plug_in_needs_outlook}),
              {}})) {}

    std::shared_ptr<Decider> decider() const { return {deciding_, &deciding_->decider}; }

    void share_lots() {
        Guarded guarded(deciding_->books->mutex);
        deciding_->decider.shares_lots = true;
    }
    void use_recent(const RecentHandle& recent) {
        Guarded guarded(deciding_->books->mutex);
        deciding_->decider.recent = recent.get();
    }
    u64 decisions() {
        Guarded guarded(deciding_->books->mutex);
        return deciding_->decider.decisions();
    }
    void give_lots(std::vector<double> ties, std::vector<double> lots) {
        Guarded guarded(deciding_->books->mutex);
        deciding_->decider.ties.give(std::move(ties));
        deciding_->decider.lots.give(std::move(lots));
    }

    std::unique_ptr<RankingHandle> rank(
        const FleetHandle& fleet, const std::string& model, mirror::ModelId in_mirror,
        nb::bytes session, const std::string& tenant, i64 prompt_tokens,
        std::shared_ptr<SharedIndex> index, const nb::list& prompts,
        const std::vector<std::vector<ComputedTuple>>& computed,
        std::tuple<bool, Rank, bool> choice, double now, nb::object costs_of_ranks) {
        Question question;
        question.fleet = fleet.fleet;
        question.replicas = fleet.fleet->numbers();
        question.model = model;
        question.in_mirror = in_mirror;
        question.session = {session.c_str(), session.size()};
        question.tenant = tenant;
        question.prompt_tokens = prompt_tokens;
        question.index = index.get();
        const auto& [is_read, asked, may_pull] = choice;
        question.choice = {is_read, asked, may_pull};
        question.now = now;
        std::vector<Prompt*> hashed;
        for (nb::handle each : prompts) {
            hashed.push_back(nb::cast<const PromptHandle&>(each).prompt.get());
        }
        question.prompts = hashed;
        std::vector<std::vector<Computed>> by_prompt;
        by_prompt.reserve(computed.size());
        for (const auto& each : computed) {
            by_prompt.push_back(computed_of(index->index.space(), each));
        }
        question.computed = by_prompt;
        return rank(std::move(question), costs_of_ranks);
    }

private:
    std::unique_ptr<RankingHandle> rank(Question question, const nb::object& costs_of_ranks) {
        std::unique_ptr<Scratch> scratch = taken();
        const bool is_long = std::any_of(
            question.prompts.begin(), question.prompts.end(),
            [](const Prompt* each) { return each->length() > kLongPrompt; });
        {
            ReleasedIf released(is_long);
            Patient patient(!is_long);
            deciding_->decider.match(question, *scratch);
        }
        {
            std::optional<Guarded> guarded;
            AskedRankCosts asked(costs_of_ranks, guarded, deciding_->books->mutex);
            if (!costs_of_ranks.is_none()) question.rank_costs = &asked;
            guarded.emplace(deciding_->books->mutex);
            deciding_->decider.rank(question, *scratch);
        }
        return std::make_unique<RankingHandle>(deciding_, std::move(scratch));
    }

    std::unique_ptr<Scratch> taken() {
        if (deciding_->idle.empty()) return std::make_unique<Scratch>();
        std::unique_ptr<Scratch> scratch = std::move(deciding_->idle.back());
        deciding_->idle.pop_back();
        return scratch;
    }

    std::shared_ptr<Deciding> deciding_;
};

void bind_recent_prefixes(nb::module_& module) {
    nb::class_<RecentHandle>(module, "RecentPrefixes")
        .def(nb::init<BooksPointer, double, std::size_t>())
        .def("remember", &RecentHandle::remember)
        .def("match", &RecentHandle::match)
        .def("forget", &RecentHandle::forget)
        .def("counts", &RecentHandle::counts);
}

}  // namespace

std::shared_ptr<Decider> kvroute::binding::decider_of(nb::handle decider) {
    return nb::cast<const DeciderHandle&>(decider).decider();
}

void kvroute::binding::bind_decide(nb::module_& module) {
    bind_recent_prefixes(module);
    nb::class_<RankingHandle>(module, "DecidedRanking")
        .def("__len__", [](const RankingHandle& self) { return self.get().able.size(); })
        .def("first", [](const RankingHandle& self) { return self.get().first; })
        .def("has_failed", [](const RankingHandle& self) { return self.get().has_failed(); })
        .def("prefill_tokens_per_s",
             [](const RankingHandle& self) { return self.get().prefill_tokens_per_s; })
        .def("mean_congestion",
             [](const RankingHandle& self) { return self.get().order.mean_congestion; })
        .def("numbers", &RankingHandle::numbers)
        .def("cost", &RankingHandle::cost)
        .def("candidate", &RankingHandle::candidate)
        .def("columns", &RankingHandle::columns)
        .def("lower", &RankingHandle::lower)
        .def("excluded", &RankingHandle::excluded);
    nb::class_<DeciderHandle>(module, "Decider")
        .def(nb::init<BooksPointer, const std::string&, nb::handle, double, u64, bool>(), nb::arg(),
             nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg() = false)
        .def("share_lots", &DeciderHandle::share_lots)
        .def("use_recent", &DeciderHandle::use_recent)
        .def("give_lots", &DeciderHandle::give_lots)
        .def("decisions", &DeciderHandle::decisions)
        .def("rank",
             nb::overload_cast<const FleetHandle&, const std::string&, mirror::ModelId, nb::bytes,
                               const std::string&, i64, std::shared_ptr<SharedIndex>,
                               const nb::list&, const std::vector<std::vector<ComputedTuple>>&,
                               std::tuple<bool, Rank, bool>, double, nb::object>(
                 &DeciderHandle::rank),
             nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(),
             nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none());
}
