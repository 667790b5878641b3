#include "decide/load.hpp"

#include <algorithm>

namespace kvroute::decide {

namespace {

// Rounds up, also below zero: reports of others need not add up.
i64 divided_up(i64 left, i64 right) {
    const i64 down = left / right;
    return down + (left % right != 0 && (left < 0) == (right < 0));
}

}  // namespace

Load& Load::operator+=(const Load& other) {
    prefilling += other.prefilling;
    prefill_tokens += other.prefill_tokens;
    decoding += other.decoding;
    context_tokens += other.context_tokens;
    tokenizing += other.tokenizing;
    return *this;
}

Load ReplicaLoad::all() const {
    Load sum = own_;
    return sum += others_;
}

void ReplicaLoad::of_ranks(std::span<const int> dp_ranks, std::vector<Load>& out) const {
    out.assign(dp_ranks.size(), Load());
    Load known;
    for (std::size_t number = 0; number < dp_ranks.size(); ++number) {
        for (const OfRank& each : ranks_) {
            if (each.dp_rank == dp_ranks[number]) (out[number] += each.own) += each.others;
        }
        known += out[number];
    }
    const Load whole = all();
    const auto count = static_cast<i64>(dp_ranks.size());
    const auto share = [&](i64 Load::*field) {
        return count ? divided_up(whole.*field - known.*field, count) : 0;
    };
    const Load each{share(&Load::prefilling), share(&Load::prefill_tokens), share(&Load::decoding),
                    share(&Load::context_tokens), share(&Load::tokenizing)};
    for (Load& load : out) load += each;
}

ReplicaLoad::OfRank& ReplicaLoad::at(int dp_rank) {
    auto found = std::find_if(ranks_.begin(), ranks_.end(),
                              [&](const OfRank& each) { return each.dp_rank == dp_rank; });
    return found != ranks_.end() ? *found : ranks_.emplace_back(OfRank{dp_rank, {}, {}});
}

void ReplicaLoad::drop_if_empty(int dp_rank) {
    std::erase_if(ranks_, [&](const OfRank& each) {
        return each.dp_rank == dp_rank && each.own.is_empty() && each.others == Load();
    });
}

std::shared_ptr<ReplicaLoad> LoadTracker::of(const std::string& id) {
    std::weak_ptr<ReplicaLoad>& entry = loads_[id];
    std::shared_ptr<ReplicaLoad> found = entry.lock();
    if (found == nullptr) {
        found = std::make_shared<ReplicaLoad>(id);
        entry = found;
        forget_unused();
    }
    return found;
}

std::shared_ptr<ReplicaLoad> LoadTracker::find(const std::string& id) const {
    const auto found = loads_.find(id);
    return found == loads_.end() ? nullptr : found->second.lock();
}

void LoadTracker::take_others(const std::vector<OthersLoad>& loads) {
    for (const auto& each : with_others_) {
        each->others_ = Load();
        for (ReplicaLoad::OfRank& rank : each->ranks_) rank.others = Load();
        std::erase_if(each->ranks_, [](const auto& rank) { return rank.own.is_empty(); });
    }
    std::vector<std::shared_ptr<ReplicaLoad>> now;
    for (const OthersLoad& each : loads) {
        std::shared_ptr<ReplicaLoad> at = of(each.replica);
        (each.dp_rank ? at->at(*each.dp_rank).others : at->others_) = each.load;
        now.push_back(std::move(at));
    }
    with_others_ = std::move(now);
}

void LoadTracker::each(const std::function<void(const ReplicaLoad&)>& see) const {
    for (const auto& [id, entry] : loads_) {
        const std::shared_ptr<ReplicaLoad> load = entry.lock();
        if (load != nullptr && !load->own_.is_empty()) see(*load);
    }
}

// Drops unused entries now and then, so that replicas that come and go for years take no memory.
void LoadTracker::forget_unused() {
    if (loads_.size() < forget_at_) return;
    std::erase_if(loads_, [](const auto& entry) { return entry.second.expired(); });
    forget_at_ = std::max<std::size_t>(2 * loads_.size(), 64);
}

InFlight::InFlight(LoadTracker& tracker, std::shared_ptr<ReplicaLoad> at, i64 uncached_tokens,
                   i64 prompt_tokens, std::optional<int> dp_rank)
    : tracker_(tracker), prompt_tokens_(std::max<i64>(prompt_tokens, 0)) {
    tracker_.started_ += 1;
    tracker_.in_flight_ += 1;
    enter(std::move(at), uncached_tokens, dp_rank);
}

// Changes the sums that the request is in.
template <class Change>
void InFlight::change(Change&& change_one) {
    change_one(at_->own_);
    if (dp_rank_) change_one(at_->at(*dp_rank_).own);
}

void InFlight::enter(std::shared_ptr<ReplicaLoad> at, i64 uncached_tokens,
                     std::optional<int> dp_rank) {
    at_ = std::move(at);
    dp_rank_ = dp_rank;
    uncached_tokens_ = std::max<i64>(uncached_tokens, 0);
    context_tokens_ = 0;
    phase_ = Phase::prefill;
    change([&](Load& load) {
        load.prefilling += 1;
        load.prefill_tokens += uncached_tokens_;
    });
}

void InFlight::leave() {
    change([&](Load& load) {
        const bool is_in_prefill = phase_ == Phase::prefill;
        (is_in_prefill ? load.prefilling : load.decoding) -= 1;
        (is_in_prefill ? load.prefill_tokens : load.context_tokens) -=
            is_in_prefill ? uncached_tokens_ : context_tokens_;
    });
    if (dp_rank_) at_->drop_if_empty(*dp_rank_);
}

bool InFlight::first_token() {
    if (phase_ != Phase::prefill) return false;
    phase_ = Phase::decode;
    context_tokens_ = prompt_tokens_;
    change([&](Load& load) {
        load.prefilling -= 1;
        load.prefill_tokens -= uncached_tokens_;
        load.decoding += 1;
        load.context_tokens += context_tokens_;
    });
    return true;
}

bool InFlight::generated(i64 tokens) {
    if (phase_ != Phase::decode || tokens <= 0) return false;
    context_tokens_ += tokens;
    change([&](Load& load) { load.context_tokens += tokens; });
    return true;
}

bool InFlight::retried(std::shared_ptr<ReplicaLoad> at, i64 uncached_tokens,
                       std::optional<int> dp_rank) {
    if (phase_ == Phase::ended) return false;
    leave();
    tracker_.retried_ += 1;
    enter(std::move(at), uncached_tokens, dp_rank);
    return true;
}

bool InFlight::ended() {
    if (phase_ == Phase::ended) return false;
    leave();
    phase_ = Phase::ended;
    tracker_.in_flight_ -= 1;
    return true;
}

}  // namespace kvroute::decide
