// The *Fleet* seam: which replicas exist and how they are, from Python to the core.
//
// What exists - replicas, their caches, names, speeds, limits - is a `Fleet`, which never changes:
// a change makes a new version that takes the old one's place as a whole, so a decision that is
// under way, or a ranking that is read later, keeps the one that it began with. What happens all
// the time and changes nothing of that - a health check, a scrape of an engine's load, a breaker
// that opens, a loss of events - is in a replica's `Conditions`, which all versions share: with
// some hundred replicas that are scraped every second, a version for each would be most of the
// work. Conditions and loads are plain values under the books' mutex rather than atomics: a
// decision holds it anyhow, and must not see a health of now beside a load of then.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "decide/candidates.hpp"
#include "index/shared.hpp"

namespace kvroute::decide {

// Why a replica cannot take a request; Python words each.
enum class Obstacle : u8 {
    none,
    not_healthy,
    draining,
    at_limit,
    at_token_limit,
    backing_off,
    tenant_backing_off,
    breaker_open,
    being_probed,
    removed,
};

// The state that router/fleet/gate.py keeps, as plain values; times are seconds on a monotonic clock.
struct Gate {
    static constexpr double kSlowest = 0.1;  // at the beginning of a slow start

    std::optional<i64> most_requests;        // in flight there
    std::optional<i64> most_prefill_tokens;  // of these requests
    std::optional<double> open_until;        // the breaker's, which is half open from then on
    double probe_until = 0.0;
    double backs_off_until = 0.0;
    std::map<std::string, double, std::less<>> tenants_back_off_until;
    std::optional<double> started_at;  // since when it starts slowly
    double slow_start_s = 0.0;

    // False where it is open at full speed, for any load, and stays so.
    bool may_refuse() const;
    // Returns its speed in a slow start, from `kSlowest` up to 1.
    double speed(double now) const;
    // Returns why nothing of a tenant is sent there, even if there is room.
    Obstacle shut(double now, std::string_view tenant) const;
    // Returns why it has no room for a request that can wait.
    Obstacle full(double now, const Load& load) const;
};

// An engine's own metrics.
struct EngineLoad {
    struct OfRank {
        int dp_rank = 0;
        i64 foreign = 0, waiting = 0;
    };

    double at = 0.0;  // when they were read
    i64 foreign = 0;  // requests there that were not this router's
    i64 waiting = 0;
    std::vector<OfRank> ranks;  // empty where metrics do not have them
    std::optional<i64> cache_blocks, cache_tokens;  // of each rank
};

// Every decision reads every replica's: with a thousand of them, from memory that no CPU cache next to
// it holds. So the first cache line says which of the rest matter.
class alignas(64) Conditions {
public:
    bool is_healthy = false;
    bool is_draining = false;
    bool is_removed = false;

    void set_gate(Gate gate);
    void set_engine(EngineLoad engine);
    // `suspects`: ranks of which events were lost. `lost`: ranks without whole events, and since
    // when, or always: an estimate may stand in for them.
    void set_lost(std::vector<int> suspects, std::vector<std::pair<int, double>> lost);

    double speed(double now) const { return may_refuse_ ? gate_.speed(now) : 1.0; }
    // Returns why the gate lets no request through now; see `Gate`.
    Obstacle refusal(double now, std::string_view tenant, const Load& under_way, bool is_new) const;
    bool has_breaker_open() const { return gate_.open_until.has_value(); }
    // Null before its metrics were read.
    const EngineLoad* engine() const { return has_engine_ ? &engine_ : nullptr; }
    bool has_lost() const { return has_lost_; }
    bool is_suspect(int dp_rank) const;
    std::optional<double> lost_since(int dp_rank) const;

private:
    bool may_refuse_ = false;  // `gate_` may
    bool has_engine_ = false;
    bool has_lost_ = false;  // there are suspects, or ranks without whole events
    EngineLoad engine_;
    Gate gate_;
    std::vector<int> suspects_;
    std::vector<std::pair<int, double>> lost_;
};

// One data-parallel rank.
struct Cache {
    struct In {
        std::shared_ptr<SharedIndex> index;
        SourceNumber source = kNone;
    };

    int dp_rank = 0;
    CacheId id = 0;
    std::vector<In> sources;  // one for each model whose index knows it: usually one

    SourceNumber source_in(const SharedIndex* index) const {
        for (const In& each : sources) {
            if (each.index.get() == index) return each.source;
        }
        return kNone;
    }
};

// What every decision reads of every replica comes first, in one cache line.
struct alignas(64) Replica {
    std::shared_ptr<ReplicaLoad> load;
    std::shared_ptr<Conditions> conditions;
    double speed = 1.0;  // relative to others, when it has grown
    std::optional<i64> max_concurrent_requests;

    std::vector<Cache> caches;  // one at least; several are ranks
    std::string id;
    std::optional<std::pair<std::string, int>> peer;  // its address for pulls from its memory
    std::vector<std::string> models;
    std::vector<std::pair<std::string, std::string>> adapters;  // and the model of each

    bool has_ranks() const { return caches.size() > 1; }
    bool is_suspect(int dp_rank) const { return conditions->is_suspect(dp_rank); }
    // Its first rank, or the only one.
    bool is_suspect() const {
        return conditions->has_lost() && is_suspect(caches.front().dp_rank);
    }
    double speed_at(double now) const { return speed * conditions->speed(now); }

    // Returns why it cannot take a request. `under_way`: its load. `is_new`: the request can wait for
    // room; one that failed elsewhere has waited.
    Obstacle obstacle(double now, std::string_view tenant, const Load& under_way,
                      bool is_new = true) const;
};

class Fleet {
public:
    Fleet(u64 version, std::vector<Replica> replicas);
    Fleet(const Fleet&) = delete;
    Fleet& operator=(const Fleet&) = delete;

    u64 version() const { return version_; }
    std::size_t size() const { return replicas_.size(); }
    const Replica& operator[](u32 number) const { return replicas_[number]; }
    bool has_ranks() const { return has_ranks_; }  // some replica
    u32 name_crc(u32 number) const { return name_crcs_[number]; }
    u32 place_by_name(u32 number) const { return places_by_name_[number]; }
    // Returns all replicas.
    std::span<const u32> numbers() const { return numbers_; }
    // Returns those that serve a model or an adapter by this name, in any state.
    std::span<const u32> serving(std::string_view name) const;
    // Returns `kNone` where there is none of this id.
    u32 number_of(std::string_view id) const;

    // Caches have numbers, too: those of one replica follow each other.
    std::size_t caches() const { return caches_.size(); }
    u32 first_cache(u32 replica) const { return first_caches_[replica]; }
    u32 end_of_caches(u32 replica) const { return first_caches_[replica + 1]; }
    const Cache& cache(u32 number) const { return *caches_[number]; }
    CacheId cache_id(u32 number) const { return cache_ids_[number]; }
    SourceNumber source_in(const SharedIndex* index, u32 cache) const {
        const FirstSource& first = first_sources_[cache];
        return first.index == index ? first.number : caches_[cache]->source_in(index);
    }
    // Returns a cache's number by its id; `kNone`: it is not of this fleet.
    u32 cache_number(CacheId id) const {
        return id < cache_numbers_.size() ? cache_numbers_[id] : kNone;
    }

private:
    struct Hash : std::hash<std::string_view> {
        using is_transparent = void;
    };
    template <class Value>
    using ByName = std::unordered_map<std::string, Value, Hash, std::equal_to<>>;

    struct FirstSource {
        const SharedIndex* index = nullptr;
        SourceNumber number = kNone;
    };

    void number_caches();
    void sort_names();

    u64 version_;
    bool has_ranks_ = false;
    std::vector<Replica> replicas_;
    // By replica:
    std::vector<u32> numbers_, name_crcs_, places_by_name_;
    std::vector<u32> first_caches_;  // and one more, the end of the last one's
    // By cache:
    std::vector<const Cache*> caches_;
    std::vector<CacheId> cache_ids_;
    std::vector<FirstSource> first_sources_;  // of several, the one that was named first

    std::vector<u32> cache_numbers_;  // by id
    ByName<u32> by_id_;
    ByName<std::vector<u32>> serving_;
};

// Ids of caches. An entry, some 100 bytes, is never freed: a cache that got an old id would inherit
// what is known of the old one.
class CacheIds {
public:
    CacheId of(const std::string& replica, int dp_rank);
    // Returns those of all its ranks that have been asked for.
    std::vector<CacheId> of(const std::string& replica) const;

    using Name = std::pair<std::string, int>;  // the replica and the rank
    // `id`: one that was returned.
    const Name& name_of(CacheId id) const { return *names_.at(id); }

private:
    std::map<Name, CacheId> ids_;
    std::vector<const Name*> names_;  // by id
};

}  // namespace kvroute::decide
