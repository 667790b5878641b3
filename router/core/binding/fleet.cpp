// Binds fleets: the replicas of a model, and the conditions of each.

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
using namespace kvroute::decide;

namespace {

// A `Conditions` that takes the mutex for each change.
class ConditionsHandle {
public:
    explicit ConditionsHandle(BooksPointer books) : books_(std::move(books)) {}

    const std::shared_ptr<Conditions>& get() const { return conditions_; }

    void set(bool is_healthy, bool is_draining, bool is_removed) {
        Guarded guarded(books_->mutex);
        conditions_->is_healthy = is_healthy;
        conditions_->is_draining = is_draining;
        conditions_->is_removed = is_removed;
    }

    void set_gate(std::optional<i64> most_requests, std::optional<i64> most_prefill_tokens,
                  std::optional<double> open_until, double probe_until, double backs_off_until,
                  const std::vector<std::pair<std::string, double>>& tenants,
                  std::optional<double> started_at, double slow_start_s) {
        Gate gate{most_requests,   most_prefill_tokens, open_until, probe_until,
                  backs_off_until, {tenants.begin(), tenants.end()}, started_at, slow_start_s};
        Guarded guarded(books_->mutex);
        conditions_->set_gate(std::move(gate));
    }

    void set_engine(double at, i64 foreign, i64 waiting,
                    const std::vector<std::tuple<int, i64, i64>>& ranks,
                    std::optional<i64> cache_blocks, std::optional<i64> cache_tokens) {
        EngineLoad engine{at, foreign, waiting, {}, cache_blocks, cache_tokens};
        for (const auto& [dp_rank, of_others, waits] : ranks) {
            engine.ranks.push_back({dp_rank, of_others, waits});
        }
        Guarded guarded(books_->mutex);
        conditions_->set_engine(std::move(engine));
    }

    void set_lost(std::vector<int> suspects, std::vector<std::pair<int, double>> since) {
        Guarded guarded(books_->mutex);
        conditions_->set_lost(std::move(suspects), std::move(since));
    }

private:
    BooksPointer books_;
    std::shared_ptr<Conditions> conditions_ = std::make_shared<Conditions>();
};

using Limit = std::optional<i64>;
using Names = std::vector<std::string>;
using Peer = std::optional<std::pair<std::string, int>>;
using CacheTuple = std::tuple<int, CacheId, std::optional<SourceNumber>>;
using Adapters = std::vector<std::pair<std::string, std::string>>;
// Id, speed, limit of requests, peer, models, adapters, caches, conditions.
using ReplicaTuple = std::tuple<std::string, double, Limit, Peer, Names, Adapters,
                                std::vector<CacheTuple>, nb::object>;

// `index`: numbers the sources of caches.
Replica replica_of(Books& books, const std::shared_ptr<SharedIndex>& index, ReplicaTuple fields) {
    auto& [id, speed, limit, peer, models, adapters, caches, conditions] = fields;
    Replica replica;
    replica.speed = speed;
    replica.max_concurrent_requests = limit;
    replica.peer = std::move(peer);
    replica.models = std::move(models);
    replica.adapters = std::move(adapters);
    for (const auto& [dp_rank, cache, source] : caches) {
        replica.caches.push_back({dp_rank, cache, {}});
        if (source) replica.caches.back().sources.push_back({index, *source});
    }
    replica.conditions = nb::cast<const ConditionsHandle&>(conditions).get();
    {
        Guarded guarded(books.mutex);
        replica.load = books.load.of(id);
    }
    replica.id = std::move(id);
    return replica;
}

FleetHandle make_fleet(Books& books, u64 version, std::shared_ptr<SharedIndex> index,
                       std::vector<ReplicaTuple> fields) {
    std::vector<Replica> replicas;
    replicas.reserve(fields.size());
    for (ReplicaTuple& each : fields) {
        replicas.push_back(replica_of(books, index, std::move(each)));
    }
    return {std::make_shared<const Fleet>(version, std::move(replicas))};
}

}  // namespace

std::shared_ptr<const Fleet> kvroute::binding::fleet_of(nb::handle fleet) {
    return nb::cast<const FleetHandle&>(fleet).fleet;
}

void kvroute::binding::bind_fleet(nb::module_& module) {
    nb::class_<ConditionsHandle>(module, "Conditions")
        .def(nb::init<BooksPointer>())
        .def("set", &ConditionsHandle::set)
        .def("set_gate", &ConditionsHandle::set_gate, nb::arg().none(), nb::arg().none(),
             nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg())
        .def("set_engine", &ConditionsHandle::set_engine, nb::arg(), nb::arg(), nb::arg(),
             nb::arg(), nb::arg().none(), nb::arg().none())
        .def("set_lost", &ConditionsHandle::set_lost);
    nb::class_<FleetHandle>(module, "Fleet")
        .def("__init__",
             [](FleetHandle* self, Books& books, u64 version, std::shared_ptr<SharedIndex> index,
                std::vector<ReplicaTuple> replicas) {
                 new (self) FleetHandle(
                     make_fleet(books, version, std::move(index), std::move(replicas)));
             },
             nb::arg(), nb::arg(), nb::arg().none(), nb::arg());
}
