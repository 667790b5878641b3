// Binds the load: the books, and one request's part of them.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>

#include "binding/decide.hpp"
#include "binding/module.hpp"
#include "binding/support.hpp"

namespace nb = nanobind;
using namespace kvroute;
using namespace kvroute::binding;
using namespace kvroute::decide;

namespace {

using Rank = std::optional<int>;

// The fields of `router.fleet.load.ReplicaLoad`.
using LoadTuple = std::tuple<i64, i64, i64, i64, i64>;

LoadTuple tuple_of(const Load& load) {
    return {load.prefilling, load.prefill_tokens, load.decoding, load.context_tokens,
            load.tokenizing};
}

Load load_of(const LoadTuple& fields) {
    const auto& [prefilling, prefill_tokens, decoding, context_tokens, tokenizing] = fields;
    return {prefilling, prefill_tokens, decoding, context_tokens, tokenizing};
}

// An `InFlight` that takes the mutex for each step.
class Flight {
public:
    Flight(BooksPointer books, const std::string& replica, i64 uncached_tokens, i64 prompt_tokens,
           Rank dp_rank)
        : books_(std::move(books)) {
        Guarded guarded(books_->mutex);
        flight_.emplace(books_->load, books_->load.of(replica), uncached_tokens, prompt_tokens,
                        dp_rank);
    }
    ~Flight() {
        Guarded guarded(books_->mutex);
        flight_.reset();
    }
    Flight(const Flight&) = delete;
    Flight& operator=(const Flight&) = delete;

    bool first_token() { return Guarded(books_->mutex), flight_->first_token(); }
    bool generated(i64 tokens) { return Guarded(books_->mutex), flight_->generated(tokens); }
    bool ended() { return Guarded(books_->mutex), flight_->ended(); }
    bool retried(const std::string& replica, i64 uncached_tokens, Rank dp_rank) {
        Guarded guarded(books_->mutex);
        return flight_->retried(books_->load.of(replica), uncached_tokens, dp_rank);
    }

private:
    BooksPointer books_;
    std::optional<InFlight> flight_;
};

// The same of a request for token ids.
class TokenIdsRequest {
public:
    TokenIdsRequest(BooksPointer books, const std::string& replica) : books_(std::move(books)) {
        Guarded guarded(books_->mutex);
        request_.emplace(books_->load.of(replica));
    }
    ~TokenIdsRequest() { ended(); }
    TokenIdsRequest(const TokenIdsRequest&) = delete;
    TokenIdsRequest& operator=(const TokenIdsRequest&) = delete;

    void ended() {
        Guarded guarded(books_->mutex);
        request_.reset();
    }

private:
    BooksPointer books_;
    std::optional<Tokenizing> request_;
};

template <class Read>
LoadTuple read_load(Books& books, const std::string& replica, Read&& read) {
    Guarded guarded(books.mutex);
    const std::shared_ptr<ReplicaLoad> load = books.load.find(replica);
    return tuple_of(load == nullptr ? Load() : read(*load));
}

std::vector<LoadTuple> loads_of_ranks(Books& books, const std::string& replica,
                                      const std::vector<int>& dp_ranks) {
    std::vector<Load> loads(dp_ranks.size());
    {
        Guarded guarded(books.mutex);
        const std::shared_ptr<ReplicaLoad> load = books.load.find(replica);
        if (load != nullptr) load->of_ranks(dp_ranks, loads);
    }
    std::vector<LoadTuple> found;
    found.reserve(loads.size());
    for (const Load& each : loads) found.push_back(tuple_of(each));
    return found;
}

using PlaceTuple = std::tuple<std::string, Rank, LoadTuple>;

std::vector<PlaceTuple> places(Books& books) {
    std::vector<PlaceTuple> found;
    Guarded guarded(books.mutex);
    books.load.each([&](const ReplicaLoad& load) {
        found.emplace_back(load.id(), Rank(), tuple_of(load.own()));
        for (const ReplicaLoad::OfRank& rank : load.ranks()) {
            if (!rank.own.is_empty()) {
                found.emplace_back(load.id(), rank.dp_rank, tuple_of(rank.own));
            }
        }
    });
    return found;
}

void take_others(Books& books, const std::vector<PlaceTuple>& loads) {
    std::vector<OthersLoad> others;
    others.reserve(loads.size());
    for (const auto& [replica, dp_rank, load] : loads) {
        others.push_back({replica, dp_rank, load_of(load)});
    }
    Guarded guarded(books.mutex);
    books.load.take_others(others);
}

nb::tuple counts(Books& books) {
    std::array<i64, 3> found;
    {
        Guarded guarded(books.mutex);
        found = {books.load.in_flight(), books.load.started(), books.load.retried()};
    }
    return nb::make_tuple(found[0], found[1], found[2]);
}

}  // namespace

void kvroute::binding::bind_load(nb::module_& module) {
    nb::class_<Books>(module, "Books")
        .def(nb::new_([] { return std::make_shared<Books>(); }))
        .def("cache_id",
             [](Books& books, const std::string& replica, int dp_rank) {
                 Guarded guarded(books.mutex);
                 return books.cache_ids.of(replica, dp_rank);
             })
        .def("cache_ids_of",
             [](Books& books, const std::string& replica) {
                 Guarded guarded(books.mutex);
                 return books.cache_ids.of(replica);
             })
        .def("cache_of",
             [](Books& books, CacheId id) {
                 Guarded guarded(books.mutex);
                 return CacheIds::Name(books.cache_ids.name_of(id));
             })
        .def("load_of",
             [](Books& books, const std::string& replica) {
                 return read_load(books, replica, [](ReplicaLoad& load) { return load.own(); });
             })
        .def("look_at",
             [](Books& books, const std::string& replica) {
                 return read_load(books, replica, [](ReplicaLoad& load) { return load.all(); });
             })
        .def("others_at",
             [](Books& books, const std::string& replica) {
                 return read_load(books, replica, [](ReplicaLoad& load) { return load.others(); });
             })
        .def("loads_of_ranks", &loads_of_ranks)
        .def("places", &places)
        .def("take_others", &take_others)
        .def("counts", &counts);
    nb::class_<Flight>(module, "Flight")
        .def(nb::init<BooksPointer, const std::string&, i64, i64, Rank>(), nb::arg(), nb::arg(),
             nb::arg(), nb::arg(), nb::arg().none())
        .def("first_token", &Flight::first_token)
        .def("generated", &Flight::generated)
        .def("retried", &Flight::retried, nb::arg(), nb::arg(), nb::arg().none())
        .def("ended", &Flight::ended);
    nb::class_<TokenIdsRequest>(module, "TokenIdsRequest")
        .def(nb::init<BooksPointer, const std::string&>())
        .def("ended", &TokenIdsRequest::ended);
}
