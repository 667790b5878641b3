#include "decide/fleet.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

#include "decide/draws.hpp"

namespace kvroute::decide {

bool Gate::may_refuse() const {
    return most_requests || most_prefill_tokens || open_until || backs_off_until > 0 ||
           !tenants_back_off_until.empty() || (started_at && slow_start_s > 0);
}

double Gate::speed(double now) const {
    if (!started_at || slow_start_s <= 0) return 1.0;
    const double grown = (now - *started_at) / slow_start_s;
    return grown >= 1 ? 1.0 : std::max(grown, kSlowest);
}

Obstacle Gate::shut(double now, std::string_view tenant) const {
    if (now < backs_off_until) return Obstacle::backing_off;
    if (!tenant.empty() && !tenants_back_off_until.empty()) {
        const auto found = tenants_back_off_until.find(tenant);
        if (found != tenants_back_off_until.end() && now < found->second) {
            return Obstacle::tenant_backing_off;
        }
    }
    if (!open_until) return Obstacle::none;
    if (now < *open_until) return Obstacle::breaker_open;
    return now < probe_until ? Obstacle::being_probed : Obstacle::none;
}

Obstacle Gate::full(double now, const Load& load) const {
    const auto reaches = [&](i64 count, i64 limit, double least) {
        const double now_allowed = static_cast<double>(limit) * speed(now);
        return static_cast<double>(count) >= std::max(now_allowed, least);
    };
    if (most_requests && reaches(load.requests(), *most_requests, 1.0)) return Obstacle::at_limit;
    if (most_prefill_tokens && reaches(load.prefill_tokens, *most_prefill_tokens, 0.0)) {
        return Obstacle::at_token_limit;
    }
    return Obstacle::none;
}

void Conditions::set_gate(Gate gate) {
    gate_ = std::move(gate);
    may_refuse_ = gate_.may_refuse();
}

void Conditions::set_engine(EngineLoad engine) {
    engine_ = std::move(engine);
    has_engine_ = true;
}

void Conditions::set_lost(std::vector<int> suspects, std::vector<std::pair<int, double>> lost) {
    suspects_ = std::move(suspects);
    lost_ = std::move(lost);
    has_lost_ = !suspects_.empty() || !lost_.empty();
}

Obstacle Conditions::refusal(double now, std::string_view tenant, const Load& under_way,
                             bool is_new) const {
    if (!may_refuse_) return Obstacle::none;
    const Obstacle shut = gate_.shut(now, tenant);
    return shut != Obstacle::none || !is_new ? shut : gate_.full(now, under_way);
}

bool Conditions::is_suspect(int dp_rank) const {
    return std::find(suspects_.begin(), suspects_.end(), dp_rank) != suspects_.end();
}

std::optional<double> Conditions::lost_since(int dp_rank) const {
    for (const auto& [rank, since] : lost_) {
        if (rank == dp_rank) return since;
    }
    return std::nullopt;
}

Obstacle Replica::obstacle(double now, std::string_view tenant, const Load& under_way,
                           bool is_new) const {
    if (conditions->is_removed) return Obstacle::removed;
    if (!conditions->is_healthy) return Obstacle::not_healthy;
    if (conditions->is_draining) return Obstacle::draining;
    if (max_concurrent_requests && under_way.requests() >= *max_concurrent_requests) {
        return Obstacle::at_limit;
    }
    return conditions->refusal(now, tenant, under_way, is_new);
}

Fleet::Fleet(u64 version, std::vector<Replica> replicas)
    : version_(version), replicas_(std::move(replicas)) {
    numbers_.resize(replicas_.size());
    std::iota(numbers_.begin(), numbers_.end(), u32{0});
    for (u32 number = 0; number < replicas_.size(); ++number) {
        const Replica& replica = replicas_[number];
        name_crcs_.push_back(crc32(replica.id));
        by_id_[replica.id] = number;
        const auto add = [&](const std::string& name) {
            std::vector<u32>& serving = serving_[name];
            if (serving.empty() || serving.back() != number) serving.push_back(number);
        };
        for (const std::string& model : replica.models) add(model);
        for (const auto& [adapter, model] : replica.adapters) add(adapter);
    }
    number_caches();
    sort_names();
}

void Fleet::number_caches() {
    for (const Replica& replica : replicas_) {
        first_caches_.push_back(static_cast<u32>(caches_.size()));
        has_ranks_ |= replica.has_ranks();
        for (const Cache& cache : replica.caches) {
            caches_.push_back(&cache);
            cache_ids_.push_back(cache.id);
            FirstSource& first = first_sources_.emplace_back();
            if (cache.sources.empty()) continue;
            first = {cache.sources.front().index.get(), cache.sources.front().source};
        }
    }
    first_caches_.push_back(static_cast<u32>(caches_.size()));
    for (u32 number = 0; number < caches_.size(); ++number) {
        const CacheId id = cache_ids_[number];
        if (id >= cache_numbers_.size()) cache_numbers_.resize(id + 1, kNone);
        cache_numbers_[id] = number;
    }
}

void Fleet::sort_names() {
    std::vector<u32> sorted = numbers_;
    std::sort(sorted.begin(), sorted.end(),
              [&](u32 left, u32 right) { return replicas_[left].id < replicas_[right].id; });
    places_by_name_.resize(sorted.size());
    for (u32 place = 0; place < sorted.size(); ++place) places_by_name_[sorted[place]] = place;
}

std::span<const u32> Fleet::serving(std::string_view name) const {
    const auto found = serving_.find(name);
    return found == serving_.end() ? std::span<const u32>() : found->second;
}

u32 Fleet::number_of(std::string_view id) const {
    const auto found = by_id_.find(id);
    return found == by_id_.end() ? kNone : found->second;
}

CacheId CacheIds::of(const std::string& replica, int dp_rank) {
    const auto [found, is_new] =
        ids_.try_emplace({replica, dp_rank}, static_cast<CacheId>(ids_.size()));
    if (is_new) names_.push_back(&found->first);
    return found->second;
}

std::vector<CacheId> CacheIds::of(const std::string& replica) const {
    std::vector<CacheId> found;
    const auto first = ids_.lower_bound({replica, std::numeric_limits<int>::min()});
    for (auto each = first; each != ids_.end() && each->first.first == replica; ++each) {
        found.push_back(each->second);
    }
    return found;
}

}  // namespace kvroute::decide
