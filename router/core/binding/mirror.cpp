// Binds the mirror and the estimates: caches and models by number, and the time with every call.
// `router/index/` gives names to the numbers.
//
// The mutex of the books guards both; see `Guarded`: nothing of Python is touched under it.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "binding/decide.hpp"
#include "binding/index.hpp"
#include "binding/module.hpp"
#include "binding/support.hpp"

namespace nb = nanobind;
using namespace kvroute;
using namespace kvroute::binding;
using mirror::ApproximateCache;
using mirror::ApproximateCaches;
using mirror::ApproximateVisit;
using mirror::ByTier;
using mirror::CacheId;
using mirror::Coming;
using mirror::OtherNumber;
using mirror::ModelId;
using mirror::Outlook;
using mirror::Tokens;

namespace {

// In seconds.
double time_of(const nb::object& clock) { return nb::cast<double>(clock()); }

nb::list list_of(std::span<const u64> keys) {
    nb::list found;
    for (u64 key : keys) found.append(key);
    return found;
}

class Visit {
public:
    Visit(BooksPointer books, nb::object clock, std::shared_ptr<mirror::Visit> visit)
        : books_(std::move(books)), clock_(std::move(clock)), visit_(std::move(visit)) {}

    u64 number() const { return visit_->number; }
    Tokens expected_tokens() const { return visit_->expected_tokens(); }

    void first_token(bool is_timed) {
        const double now = time_of(clock_);
        Guarded guarded(books_->mutex);
        books_->mirror->first_token(visit_, is_timed, now);
    }

    void ended(bool was_served) {
        const double now = time_of(clock_);
        Guarded guarded(books_->mutex);
        books_->mirror->ended(visit_, was_served, now);
    }

private:
    BooksPointer books_;
    nb::object clock_;
    std::shared_ptr<mirror::Visit> visit_;
};

class LoadPrices {
public:
    LoadPrices(BooksPointer books, std::shared_ptr<const mirror::LoadPrices> prices)
        : books_(std::move(books)), prices_(std::move(prices)) {}

    double of(const std::string& tier) const {
        Guarded guarded(books_->mutex);
        return prices_->of(tier);
    }

    double mean(const ByTier& by_tier) const {
        Guarded guarded(books_->mutex);
        return prices_->mean(by_tier);
    }

private:
    BooksPointer books_;
    std::shared_ptr<const mirror::LoadPrices> prices_;
};

class Mirror {
public:
    // `prices`: of tokens from tiers, by name in upper case, and of those from others.
    Mirror(BooksPointer books, u64 max_keys, nb::object clock,
           const std::vector<std::pair<std::string, double>>& prices, double other_price,
           u64 first_number)
        : books_(std::move(books)), clock_(std::move(clock)) {
        mirror::FirstPrices first_prices{{prices.begin(), prices.end()}, other_price};
        auto made = std::make_unique<mirror::Mirror>(max_keys, std::move(first_prices), first_number);
        Guarded guarded(books_->mutex);
        books_->mirror.swap(made);
    }

    const BooksPointer& books() const { return books_; }

    Visit begin(ModelId model, std::shared_ptr<SharedIndex> index, u32 source, CacheId cache,
                const std::vector<const PromptHandle*>& prompts,
                const std::vector<std::vector<ComputedTuple>>& computed, Tokens prompt_tokens,
                Tokens uncached_tokens, Tokens hit_tokens, double speed, ByTier loads,
                Tokens junction_tokens, const std::vector<Tokens>& keep) {
        std::vector<mirror::LookUp> look_ups;
        for (std::size_t at = 0; at < prompts.size(); ++at) {
            look_ups.push_back({prompts[at]->prompt, nullptr});
            if (at >= computed.size() || computed[at].empty()) continue;
            std::vector<Computed> hashes = computed_of(index->index.space(), computed[at]);
            look_ups.back().computed = std::make_shared<Computed>(std::move(hashes[0]));
        }
        const mirror::Sent sent{model, std::move(index), source, cache, look_ups, prompt_tokens,
                                uncached_tokens, hit_tokens, speed, std::move(loads),
                                junction_tokens, keep};
        const double now = time_of(clock_);
        std::shared_ptr<mirror::Visit> visit;
        {
            Guarded guarded(books_->mutex);
            visit = books_->mirror->begin(sent, now);
        }
        return {books_, clock_, std::move(visit)};
    }

    // Returns for each: its number, how many tokens are queued, and if it was not published before,
    // its model, cache, tokens and keys.
    nb::list prefilling() {
        struct Published {
            u64 number;
            Tokens queued_tokens;
            bool is_new;
            ModelId model;
            CacheId cache;
            Tokens tokens;
            Keys keys;
        };
        const double now = time_of(clock_);
        std::vector<Published> published;
        {
            Guarded guarded(books_->mutex);
            books_->mirror->for_each_published(now, [&](const mirror::Published& each) {
                const mirror::Visit& visit = each.visit;
                published.push_back({visit.number, each.queued_tokens, each.is_new, visit.model,
                                visit.cache, visit.tokens, visit.keys});
            });
        }
        nb::list found;
        for (const Published& each : published) {
            const nb::object news = each.is_new ? nb::make_tuple(each.model, each.cache, each.tokens,
                                                                 list_of(each.keys.span))
                                                : nb::object(nb::none());
            found.append(nb::make_tuple(each.number, each.queued_tokens, news));
        }
        return found;
    }

    OtherNumber add_other(CacheId cache, Tokens tokens, const std::vector<u64>& keys) {
        if (keys.empty()) throw nb::value_error("a prompt that others compute has a key at least");
        Guarded guarded(books_->mutex);
        return books_->mirror->add_other(cache, tokens, Keys::of(keys));
    }

    void remove_other(OtherNumber number) {
        Guarded guarded(books_->mutex);
        books_->mirror->remove_other(number);
    }

    void forget(const std::vector<CacheId>& caches) {
        Guarded guarded(books_->mutex);
        books_->mirror->forget(caches);
    }

    void forget_model(ModelId model) {
        Guarded guarded(books_->mutex);
        books_->mirror->forget_model(model);
    }

    // Returns the keys of each, and the time of its end.
    nb::list ended(CacheId cache) {
        std::vector<std::pair<Keys, double>> ended;
        {
            Guarded guarded(books_->mutex);
            const mirror::Ownership::Ended* uses = books_->mirror->ended_at(cache);
            for (u32 at = uses ? uses->front() : kNone; at != kNone; at = uses->next(at)) {
                ended.emplace_back((*uses)[at]->keys, (*uses)[at]->ended_or(0.0));
            }
        }
        nb::list found;
        for (const auto& [keys, at] : ended) found.append(nb::make_tuple(list_of(keys.span), at));
        return found;
    }

    double prefill_tokens_per_s(ModelId model) {
        Guarded guarded(books_->mutex);
        return books_->mirror->prefill_tokens_per_s(model);
    }

    double reuse_probability(ModelId model, double idle_s) {
        Guarded guarded(books_->mutex);
        return books_->mirror->reuse_probability(model, idle_s);
    }

    std::optional<LoadPrices> load_prices(CacheId cache) {
        std::shared_ptr<const mirror::LoadPrices> prices;
        {
            Guarded guarded(books_->mutex);
            prices = books_->mirror->load_prices(cache);
        }
        if (!prices) return std::nullopt;
        return LoadPrices(books_, std::move(prices));
    }

    // Returns that of each cache; `capacities`: the sizes that their engines report.
    nb::list outlooks(ModelId model, const std::vector<CacheId>& caches,
                      const std::vector<std::optional<u64>>& capacities, double now) {
        std::vector<std::pair<double, Outlook>> found;
        {
            Guarded guarded(books_->mutex);
            for (std::size_t at = 0; at < caches.size(); ++at) {
                found.emplace_back(
                    books_->mirror->progress_tokens(caches[at], now),
                    books_->mirror->outlook(model, caches[at], capacities.at(at), now));
            }
        }
        nb::list made;
        for (const auto& [progress, outlook] : found) {
            made.append(nb::make_tuple(progress, outlook.eviction_age_s, outlook.reuse_probability,
                                       outlook.uncached_tokens_per_s, outlook.arrivals_per_s,
                                       outlook.refill));
        }
        return made;
    }

    // Returns cache, tokens and run.
    std::vector<std::tuple<CacheId, Tokens, Tokens>> in_prefill(const PromptHandle& prompt,
                                                                Tokens tokens) {
        std::vector<std::tuple<CacheId, Tokens, Tokens>> found;
        if (!prompt.index) return found;
        mirror::ComingTable table;
        const double now = time_of(clock_);
        {
            Guarded guarded(books_->mutex);
            const mirror::Asked asked{*prompt.prompt, prompt.index->index.space()};
            books_->mirror->in_prefill(asked, tokens, now, table);
        }
        for (CacheId cache : table.caches()) {
            const Coming coming = table.of(cache);
            found.emplace_back(cache, coming.tokens, coming.run);
        }
        return found;
    }

    Tokens expected(CacheId cache, const PromptHandle& prompt, Tokens prompt_tokens,
                    Tokens hit_tokens, Tokens junction_tokens) {
        const Coming now{hit_tokens, hit_tokens + junction_tokens};
        Guarded guarded(books_->mutex);
        return books_->mirror->expected(cache, *prompt.prompt, prompt_tokens, now);
    }

    nb::tuple statistics() {
        mirror::MirrorStatistics found;
        {
            Guarded guarded(books_->mutex);
            found = books_->mirror->statistics();
        }
        return nb::make_tuple(found.caches, found.keys, found.requests, found.kept);
    }

private:
    BooksPointer books_;
    nb::object clock_;
};

// --- estimates ---

Keys keys_of(const nb::handle& keys) { return Keys::of(nb::cast<std::vector<u64>>(keys)); }

std::vector<Keys> all_keys_of(const nb::list& prompts) {
    std::vector<Keys> found;
    for (nb::handle keys : prompts) found.push_back(keys_of(keys));
    return found;
}

using AllKeys = std::shared_ptr<const std::vector<Keys>>;

// Keeps the keys of the last call: one request is looked up at many caches.
class LastAsked {
public:
    AllKeys of(const nb::list& prompts) {
        if (!prompts.is(prompts_)) {
            keys_ = std::make_shared<const std::vector<Keys>>(all_keys_of(prompts));
            prompts_ = prompts;
        }
        return keys_;
    }

private:
    nb::object prompts_;
    AllKeys keys_;
};

// One cache's estimate.
class Estimate {
public:
    Estimate(BooksPointer books, std::shared_ptr<ApproximateCache> cache,
             std::shared_ptr<LastAsked> asked)
        : books_(std::move(books)), cache_(std::move(cache)), asked_(std::move(asked)) {}

    std::pair<Tokens, double> hit(const nb::list& prompts, Tokens most_tokens) const {
        const AllKeys keys = asked_->of(prompts);
        std::vector<std::span<const u64>> spans;
        for (const Keys& each : *keys) spans.push_back(each.span);
        Guarded guarded(books_->mutex);
        const mirror::ApproximateHit found = cache_->hit(spans, most_tokens);
        return {found.tokens, found.trust};
    }

    std::optional<double> eviction_age_s(double now) const {
        Guarded guarded(books_->mutex);
        return cache_->eviction_age_s(now);
    }

private:
    BooksPointer books_;
    std::shared_ptr<ApproximateCache> cache_;
    std::shared_ptr<LastAsked> asked_;
};

class EstimatedVisit {
public:
    EstimatedVisit(BooksPointer books, nb::object clock, std::shared_ptr<ApproximateVisit> visit)
        : books_(std::move(books)), clock_(std::move(clock)), visit_(std::move(visit)) {}

    void first_token() {
        Guarded guarded(books_->mutex);
        visit_->first_token();
    }

    void ended(std::optional<Tokens> actual_tokens) {
        const double now = time_of(clock_);
        Guarded guarded(books_->mutex);
        visit_->ended(actual_tokens, now);
    }

private:
    BooksPointer books_;
    nb::object clock_;
    std::shared_ptr<ApproximateVisit> visit_;
};

class Estimates {
public:
    Estimates(const Mirror& mirror, double after_s, Tokens cache_tokens, u64 max_keys,
              nb::object clock)
        : books_(mirror.books()), clock_(std::move(clock)) {
        const ApproximateCaches::Options options{after_s, cache_tokens, max_keys};
        Guarded guarded(books_->mutex);
        books_->estimates = std::make_unique<ApproximateCaches>(books_->mirror.get(), options);
    }

    std::optional<Estimate> stand_in(CacheId cache, std::optional<double> lost_since,
                                     std::optional<Tokens> cache_tokens, double now) {
        std::shared_ptr<ApproximateCache> found;
        {
            Guarded guarded(books_->mutex);
            found = books_->estimates->stand_in(cache, lost_since, cache_tokens, now);
        }
        if (!found) return std::nullopt;
        return Estimate(books_, std::move(found), asked_);
    }

    std::optional<EstimatedVisit> visit(CacheId cache, const nb::list& prompts, Tokens hit_tokens) {
        std::vector<Keys> keys = all_keys_of(prompts);
        std::shared_ptr<ApproximateVisit> found;
        {
            Guarded guarded(books_->mutex);
            found = books_->estimates->visit(cache, std::move(keys), hit_tokens);
        }
        if (!found) return std::nullopt;
        return EstimatedVisit(books_, clock_, std::move(found));
    }

    void forget(const std::vector<CacheId>& caches) {
        Guarded guarded(books_->mutex);
        books_->estimates->forget(caches);
    }

    std::vector<CacheId> caches() const {
        Guarded guarded(books_->mutex);
        return books_->estimates->caches();
    }

    // Returns tokens, capacity and trust.
    nb::object statistics(CacheId cache, std::optional<double> lost_since, double now) {
        std::optional<mirror::ApproximateStatistics> found;
        {
            Guarded guarded(books_->mutex);
            found = books_->estimates->statistics(cache, lost_since, now);
        }
        if (!found) return nb::none();
        return nb::make_tuple(found->tokens, found->capacity_tokens, found->trust);
    }

private:
    BooksPointer books_;
    nb::object clock_;
    std::shared_ptr<LastAsked> asked_ = std::make_shared<LastAsked>();
};

void bind_estimates(nb::module_& module) {
    nb::class_<Estimate>(module, "Estimate")
        .def("hit", &Estimate::hit)
        .def("eviction_age_s", &Estimate::eviction_age_s);

    nb::class_<EstimatedVisit>(module, "EstimatedVisit")
        .def("first_token", &EstimatedVisit::first_token)
        .def("ended", &EstimatedVisit::ended, nb::arg("actual_tokens").none() = nb::none());

    nb::class_<Estimates>(module, "Estimates")
        .def(nb::init<const Mirror&, double, Tokens, u64, nb::object>())
        .def("stand_in", &Estimates::stand_in, nb::arg("cache"), nb::arg("lost_since").none(),
             nb::arg("cache_tokens").none(), nb::arg("now"))
        .def("visit", &Estimates::visit)
        .def("forget", &Estimates::forget)
        .def("caches", &Estimates::caches)
        .def("statistics", &Estimates::statistics, nb::arg("cache"), nb::arg("lost_since").none(),
             nb::arg("now"));
}

}  // namespace

void kvroute::binding::bind_mirror(nb::module_& module) {
    nb::class_<Visit>(module, "Visit")
        .def_prop_ro("number", &Visit::number)
        .def_prop_ro("expected_tokens", &Visit::expected_tokens)
        .def("first_token", &Visit::first_token, nb::arg("is_timed") = true)
        .def("ended", &Visit::ended, nb::arg("was_served") = true);

    nb::class_<LoadPrices>(module, "LoadPrices")
        .def("of", &LoadPrices::of)
        .def("mean", &LoadPrices::mean);

    nb::class_<Mirror>(module, "Mirror")
        .def(nb::init<BooksPointer, u64, nb::object,
                      const std::vector<std::pair<std::string, double>>&, double, u64>())
        .def("begin", &Mirror::begin)
        .def("prefilling", &Mirror::prefilling)
        .def("add_other", &Mirror::add_other)
        .def("remove_other", &Mirror::remove_other)
        .def("forget", &Mirror::forget)
        .def("forget_model", &Mirror::forget_model)
        .def("ended", &Mirror::ended)
        .def("prefill_tokens_per_s", &Mirror::prefill_tokens_per_s)
        .def("reuse_probability", &Mirror::reuse_probability)
        .def("load_prices", &Mirror::load_prices)
        .def("outlooks", &Mirror::outlooks)
        .def("in_prefill", &Mirror::in_prefill)
        .def("expected", &Mirror::expected)
        .def("statistics", &Mirror::statistics);
    bind_estimates(module);
}
