// Decides without Python where a request goes whose token ids are known: looks up what each cache has
// of the prompt and is doing, ranks the replicas, and books the request.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "decide/decide.hpp"
#include "plane/answer.hpp"
#include "plane/decider.hpp"
#include "plane/quiet.hpp"

namespace kvroute::plane {

// A model, or an adapter of one, as served by one name.
struct Served final : Model {
    std::string model;           // the base model's name
    mirror::ModelId in_mirror = 0;
    std::shared_ptr<const decide::Fleet> fleet;
    std::shared_ptr<SharedIndex> index;
    std::optional<std::string> adapter;  // that the name stands for
    std::vector<Forward> ways;   // to each replica, by its number; without a request's own fields
    std::vector<std::string> names;  // what each calls the model; empty: as the client does
    std::vector<AtGateway> at_gateways;  // what gateways call each
    double stream_first_byte_s = 300.0;  // of streamed responses, in place of a way's
    u64 most_tokens = 0;         // of a prompt; longer ones are left to Python
};

// How an engine's queue is ordered: see router/fleet/entrance.py.
struct Ordering {
    double ageing_tokens_per_s = 0;
    u64 usual_class = 0;
    int class_bits = 0;      // of a number, below those of its class
    u64 longest_tokens = 0;  // longer prompts wait no longer than one of these
};

class Booked;

class Placing final : public Decider {
public:
    // `quiet_s`: see `QuietMoments`.
    Placing(std::shared_ptr<decide::Decider> decider, double quiet_s, Ordering ordering,
            std::shared_ptr<Reservations> reservations)
        : decider_(std::move(decider)), books_(decider_->books()),
          quiet_(std::make_shared<QuietMoments>(quiet_s)), ordering_(ordering),
          reservations_(std::move(reservations)) {}

    // Replaces all names that are served.
    using Models = std::unordered_map<std::string, std::shared_ptr<const Served>>;
    void serve(Models models);

    std::shared_ptr<const Model> model(const std::string& name) override;
    std::optional<Placed> place(const Question& question) override;
    std::optional<Answer> look(const Question& question) override;
    std::optional<Selection> select(const Question& question) override;
    std::optional<Reservable> reserve(const Question& question) override;
    Reservations& reservations() override { return *reservations_; }

    // Requests that were placed and have not ended.
    u64 under_way() const { return *under_way_; }
    // From now on no more than so many may be under way; requests beyond that are left to Python.
    void allow(u64 most) { most_ = most; }
    QuietMoments& quiet() { return *quiet_; }

private:
    // The model that a request names, and its prompt, hashed.
    struct Read {
        std::shared_ptr<const Served> served;
        std::shared_ptr<Prompt> prompt;
    };
    // Where it goes, with the mutex of the books held.
    struct Choice {
        std::unique_lock<std::mutex> books;
        const decide::Ranking* ranking = nullptr;  // until this thread makes its next decision
        const decide::Replica* replica = nullptr;
        const decide::Cache* cache = nullptr;
        std::optional<int> dp_rank;

        const decide::State& state() const { return ranking->able.states[ranking->first]; }
        const decide::CachedTokens& cached() const { return ranking->able.cached[ranking->first]; }
        std::span<const decide::TierShare> lower_shares() const {
            return ranking->able.shares_of(ranking->able.lower[ranking->first]);
        }
    };

    static Prediction predicted(const Choice& choice, const Read& read);
    std::shared_ptr<const Served> served(const std::string& name) const;
    std::optional<Read> read(const Question& question) const;
    std::optional<Choice> choose(const Question& question, const Read& read) const;
    // Ends the choice: the mutex is released.
    Answer looked_up(Choice& choice, const Read& read) const;
    // Without the mutex. `prediction`: of the choice.
    Answer answer_of(const Choice& choice, Prediction prediction) const;
    using Count = std::shared_ptr<std::atomic<u64>>;
    // Ends the choice: the mutex is released. `under_way`: its counter, or null.
    std::unique_ptr<Booked> book(const Question& question, const Read& read, Choice& choice,
                                 const Prediction& prediction, Count under_way) const;
    u64 order_number(const Question& question, const Prediction& prediction) const;

    std::shared_ptr<decide::Decider> decider_;
    decide::Books& books_;
    std::shared_ptr<QuietMoments> quiet_;
    Ordering ordering_;
    std::shared_ptr<Reservations> reservations_;
    std::shared_ptr<std::atomic<u64>> under_way_ = std::make_shared<std::atomic<u64>>(0);
    std::atomic<u64> most_ = ~u64{0};
    mutable std::mutex mutex_;  // guards `models_`
    std::shared_ptr<const Models> models_ = std::make_shared<Models>();
};

}  // namespace kvroute::plane
