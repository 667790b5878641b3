#include "plane/placing.hpp"

#include <sys/random.h>

#include <array>
#include <chrono>
#include <cmath>
#include <random>

#include "index/memory.hpp"
#include "plane/loop.hpp"

namespace kvroute::plane {

using decide::i64;

class Booked final : public Booking {
public:
    // With the mutex of the books held.
    Booked(std::shared_ptr<decide::Books> books, std::shared_ptr<std::atomic<u64>> under_way,
           std::shared_ptr<QuietMoments> quiet, const decide::Replica& replica,
           i64 uncached_tokens, i64 prompt_tokens, std::optional<int> dp_rank, const mirror::Sent& sent,
           std::shared_ptr<mirror::ApproximateVisit> estimated, double now)
        : books_(std::move(books)), under_way_(std::move(under_way)), quiet_(std::move(quiet)),
          flight_(books_->load, replica.load, uncached_tokens, prompt_tokens, dp_rank),
          visit_(books_->mirror->begin(sent, now)), estimated_(std::move(estimated)),
          moment_(quiet_->began(replica.id, now)) {
        if (under_way_) ++*under_way_;
    }
    ~Booked() override {
        try {
            if (!is_over_) end(false, clock_now());
            if (estimated_) report(std::nullopt, clock_now());
        } catch (const std::bad_alloc&) {  // the mirror takes it for one in prefill
        }
    }

    u64 expected_tokens() const { return static_cast<u64>(visit_->expected_tokens()); }

    void first_byte(bool is_timed, double now) override {
        const Unfailing unfailing;
        std::lock_guard locked(books_->mutex);
        if (!flight_.first_token()) return;
        books_->mirror->first_token(visit_, is_timed, now);
        if (estimated_) estimated_->first_token();
    }
    void generated(u64 events, double) override {
        const Unfailing unfailing;
        std::lock_guard locked(books_->mutex);
        flight_.generated(static_cast<i64>(events));
    }
    bool ended(bool was_served, double now) override { return end(was_served, now); }
    void reported(std::optional<i64> cached_tokens, double now) override {
        report(cached_tokens, now);
    }

private:
    bool end(bool was_served, double now) {
        const Unfailing unfailing;
        std::lock_guard locked(books_->mutex);
        if (!flight_.ended()) return was_alone_;
        is_over_ = true;
        if (under_way_) --*under_way_;
        books_->mirror->ended(visit_, was_served, now);
        return was_alone_ = quiet_->ended(moment_, now);
    }
    void report(std::optional<i64> cached_tokens, double now) {
        const Unfailing unfailing;
        std::lock_guard locked(books_->mutex);
        if (estimated_) estimated_->ended(cached_tokens, now);
        estimated_.reset();
    }

    std::shared_ptr<decide::Books> books_;
    std::shared_ptr<std::atomic<u64>> under_way_;
    std::shared_ptr<QuietMoments> quiet_;
    decide::InFlight flight_;
    std::shared_ptr<mirror::Visit> visit_;
    std::shared_ptr<mirror::ApproximateVisit> estimated_;  // of an estimated hit, until the report
    Moment moment_;
    bool was_alone_ = false;
    std::atomic<bool> is_over_ = false;
};

namespace {

constexpr std::size_t kMostRequestId = 128;

using Bits = std::array<u64, 2>;

// Asks the kernel, which takes no descriptor, as there may be none left. Nothing: it failed.
std::optional<Bits> random_bits() {
    Bits bits;
    if (::getrandom(bits.data(), sizeof bits, 0) != sizeof bits) return std::nullopt;
    return bits;
}

std::string hex_of(Bits bits) {
    static constexpr char kDigits[] = "0123456789abcdef";
    std::string made(32, '0');
    char* to = made.data();
    for (u64 part : bits) {
        for (std::size_t at = 0; at < 16; ++at, part >>= 4) *to++ = kDigits[part & 15];
    }
    return made;
}

std::string new_request_id() {
    thread_local std::mt19937_64 random{
        random_bits().value_or(Bits{static_cast<u64>(clock_now() * 1e9)})[0]};
    return hex_of({random(), random()});
}

std::string given_or_new(std::string_view id) {
    return id.empty() || id.size() > kMostRequestId ? new_request_id() : std::string(id);
}

// Adds the header fields that the engine and the client get with this request.
void add_fields(Forward& forward, const Question& question, const std::string& request_id,
          std::optional<int> dp_rank, const Prediction& prediction) {
    forward.added.reserve(3);
    forward.reported.reserve(forward.reported.size() + (forward.shows_hit ? 3 : 1));
    if (dp_rank) forward.replaced.emplace_back("x-data-parallel-rank", std::to_string(*dp_rank));
    forward.added.emplace_back("x-forwarded-for", question.forwarded_for);
    forward.added.emplace_back("x-forwarded-proto", question.forwarded_proto);
    forward.added.emplace_back("x-request-id", request_id);
    if (forward.shows_hit) {
        forward.reported.emplace_back("x-kv-hit-tokens", std::to_string(prediction.cached_tokens));
        if (prediction.is_estimate()) forward.reported.emplace_back("x-kv-hit-approximate", "true");
    }
    forward.reported.emplace_back("x-request-id", request_id);
}

// Returns a request's place in its engine's queue, by its tokens to compute; as `EngineOrder.numbers`.
u64 order_of(const Ordering& ordering, std::optional<u64> priority_class, u64 tokens) {
    const std::chrono::duration<double> since_1970 =
        std::chrono::system_clock::now().time_since_epoch();
    const double aged = ordering.ageing_tokens_per_s * since_1970.count();
    const double place =
        std::nearbyint(static_cast<double>(std::min(tokens, ordering.longest_tokens)) + aged);
    const u64 most = (u64{1} << ordering.class_bits) - 1;
    const u64 within = place < static_cast<double>(most) ? static_cast<u64>(place) : most;
    return (priority_class.value_or(ordering.usual_class) << ordering.class_bits) + within;
}

// Returns the hit each KV cache group would allow by itself; nothing if the index has no such cache.
std::optional<std::vector<GroupHit>> groups_at(SharedIndex& index, SourceNumber source,
                                               Prompt& prompt) {
    const auto guard = locked(index.mutex);
    const u32 slot = index.slot_of(source);
    if (slot == kNone) return std::nullopt;
    const std::vector<u64> accepted = index.matcher.group_hits(prompt, slot, nullptr);
    std::vector<GroupHit> found;
    for (u32 group = 0; group < accepted.size(); ++group) {
        const GroupKind kind = index.index.source(slot).layout.groups[group].kind;
        found.push_back({group, kind, accepted[group]});
    }
    return found;
}

// Computes the whole prompt's keys at every step that lookups use, with no mutex held.
void hash(Prompt& prompt, SharedIndex& index) {
    thread_local std::vector<Prompt::Step> steps;
    {
        std::lock_guard locked(index.mutex);
        steps = index.matcher.steps();
    }
    const KeySpace& space = index.index.space();
    for (const Prompt::Step step : steps) prompt.keys(space, step);
    prompt.prefix_keys(space, decide::kKeyStep);
}

}  // namespace

void Placing::serve(Models models) {
    auto known = std::make_shared<const Models>(std::move(models));
    std::lock_guard locked(mutex_);
    models_.swap(known);
}

std::shared_ptr<const Served> Placing::served(const std::string& name) const {
    std::shared_ptr<const Models> known;
    {
        std::lock_guard locked(mutex_);
        known = models_;
    }
    const auto found = known->find(name);
    return found == known->end() ? nullptr : found->second;
}

std::shared_ptr<const Model> Placing::model(const std::string& name) { return served(name); }

Prediction Placing::predicted(const Choice& choice, const Read& read) {
    const decide::CachedTokens& cached = choice.cached();
    const auto tokens = static_cast<i64>(read.prompt->length());
    Prediction made;
    made.model = read.served->model;
    made.replica = choice.replica->id;
    made.dp_rank = choice.dp_rank.value_or(-1);
    made.prompt_tokens = static_cast<u64>(tokens);
    made.gpu_cached_tokens = static_cast<u64>(cached.gpu);
    made.cached_tokens = static_cast<u64>(cached.all);
    made.uncached_tokens =
        static_cast<u64>(std::max<i64>(tokens - std::max(cached.all, cached.recent), 0));
    made.is_suspect = choice.state().is_suspect;
    made.estimate_trust = choice.state().estimate_trust;
    made.has_adapter = read.served->adapter.has_value();
    return made;
}

std::optional<Placed> Placing::place(const Question& question) {
    const Unfailing unfailing;
    const std::optional<Read> read = this->read(question);
    std::optional<Choice> choice = read ? choose(question, *read) : std::nullopt;
    if (!choice || *under_way_ >= most_) return std::nullopt;
    // Python sends the one by which a replica is probed: the others wait for how that ends.
    if (choice->replica->conditions->has_breaker_open()) return std::nullopt;
    const Served& served = *read->served;
    const u32 replica = choice->state().replica;
    const i64 ahead = std::max<i64>(choice->state().queued_tokens, 0);
    Placed placed;
    placed.prediction = predicted(*choice, *read);
    auto booking = book(question, *read, *choice, placed.prediction, under_way_);
    placed.prediction.expected_tokens = booking->expected_tokens();
    placed.booking = std::move(booking);
    placed.forward = served.ways[replica];
    placed.order = order_number(question, placed.prediction);
    placed.name = served.names[replica];
    if (placed.name.empty() && question.ask.is_renamed) placed.name = question.ask.model;
    if (!placed.name.empty()) placed.forward.reported.emplace_back("x-kv-model", placed.name);
    if (question.ask.is_stream) placed.forward.timeouts.first_byte_s = served.stream_first_byte_s;
    placed.forward.work_tokens = placed.prediction.uncached_tokens + static_cast<u64>(ahead);
    placed.request_id = given_or_new(question.request_id);
    add_fields(placed.forward, question, placed.request_id, choice->dp_rank, placed.prediction);
    return placed;
}

std::optional<Answer> Placing::look(const Question& question) {
    const Unfailing unfailing;
    const std::optional<Read> read = this->read(question);
    std::optional<Choice> choice = read ? choose(question, *read) : std::nullopt;
    if (!choice) return std::nullopt;
    return looked_up(*choice, *read);
}

std::optional<Selection> Placing::select(const Question& question) {
    const Unfailing unfailing;
    const std::optional<Read> read = this->read(question);
    std::optional<Choice> choice = read ? choose(question, *read) : std::nullopt;
    if (!choice) return std::nullopt;
    const Served& served = *read->served;
    Selection made;
    made.answer = looked_up(*choice, *read);
    made.replica = served.at_gateways[choice->state().replica];
    SharedIndex& index = *served.index;
    made.groups = groups_at(index, choice->cache->source_in(&index), *read->prompt);
    return made;
}

std::optional<Reservable> Placing::reserve(const Question& question) {
    const Unfailing unfailing;
    std::string id = question.ask.reservation;
    if (id.empty()) {
        // It must be hard to guess: who knows it may end the reservation.
        const std::optional<Bits> bits = random_bits();
        if (!bits) return std::nullopt;
        id = hex_of(*bits);
    }
    std::shared_ptr<Reservations::Place> place = reservations_->take(id);
    if (place == nullptr) return std::nullopt;
    const std::optional<Read> read = this->read(question);
    std::optional<Choice> choice = read ? choose(question, *read) : std::nullopt;
    if (!choice) return std::nullopt;
    const Served& served = *read->served;
    const u32 replica = choice->state().replica;
    const OrderedBy by =
        question.ask.is_completion ? served.ways[replica].ordered_by : OrderedBy::nothing;
    const bool is_changed = by == OrderedBy::field || by == OrderedBy::negated_field;
    if (!served.names[replica].empty() || is_changed) return std::nullopt;  // its body would change
    Reservable made;
    made.is_probe = choice->replica->conditions->has_breaker_open();
    Prediction prediction = predicted(*choice, *read);
    auto booking = book(question, *read, *choice, prediction, nullptr);
    prediction.expected_tokens = booking->expected_tokens();
    made.booking = std::move(booking);
    made.answer = answer_of(*choice, std::move(prediction));
    made.place = std::move(place);
    made.id = std::move(id);
    made.request_id = given_or_new(question.request_id);
    made.replica = served.at_gateways[replica];
    if (choice->dp_rank) {
        made.headers.emplace_back("x-data-parallel-rank", std::to_string(*choice->dp_rank));
    }
    if (by == OrderedBy::header) {
        const u64 number = order_number(question, made.answer.prediction);
        made.headers.emplace_back("x-vllm-priority", std::to_string(number));
    }
    return made;
}

Answer Placing::looked_up(Choice& choice, const Read& read) const {
    Prediction prediction = predicted(choice, read);
    const i64 hit = choice.cached().all;
    prediction.expected_tokens = static_cast<u64>(
        books_.mirror->expected(choice.cache->id, *read.prompt,
                                static_cast<i64>(prediction.prompt_tokens), {hit, hit}));
    choice.books.unlock();
    return answer_of(choice, std::move(prediction));
}

Answer Placing::answer_of(const Choice& choice, Prediction prediction) const {
    Answer answer;
    answer.prediction = std::move(prediction);
    const decide::CachedTokens& cached = choice.cached();
    const auto prompt_tokens = static_cast<i64>(answer.prediction.prompt_tokens);
    const decide::Ranking& ranking = *choice.ranking;
    const decide::Wanted wanted{{}, {}, prompt_tokens, ranking.prefill_tokens_per_s, {}};
    answer.delays = decide::delays_at(ranking.first, wanted, ranking.able, decider_->weights(),
                                      ranking.order.mean_congestion);
    answer.junction_tokens = static_cast<u64>(cached.junction);
    if (cached.recent > cached.gpu) answer.coming_tokens = static_cast<u64>(cached.recent);
    for (const decide::TierShare& share : choice.lower_shares()) {
        answer.by_tier.emplace_back(share.tier, static_cast<u64>(share.tokens));
    }
    return answer;
}

u64 Placing::order_number(const Question& question, const Prediction& of) const {
    const u64 to_compute = of.prompt_tokens - std::min(of.prompt_tokens, of.expected_tokens);
    return order_of(ordering_, question.ask.priority_class, to_compute);
}

std::optional<Placing::Read> Placing::read(const Question& question) const {
    require_memory();
    // A question's model is one that `model` returned, so it is a `Served`.
    auto served = std::static_pointer_cast<const Served>(question.model);
    if (served == nullptr) served = this->served(question.ask.model);
    if (served == nullptr || question.ask.tokens->size() > served->most_tokens) return std::nullopt;
    auto prompt = std::make_shared<Prompt>(question.ask.tokens, served->adapter, question.ask.salt,
                                           std::vector<u8>());
    hash(*prompt, *served->index);
    return Read{std::move(served), std::move(prompt)};
}

std::optional<Placing::Choice> Placing::choose(const Question& question, const Read& read) const {
    thread_local decide::Scratch scratch;
    const Served& served = *read.served;
    Prompt* const prompts[] = {read.prompt.get()};
    decide::Question asked;
    asked.fleet = served.fleet;
    thread_local std::vector<u32> others;
    asked.replicas = served.fleet->numbers();
    if (!question.not_at.empty()) {
        others.clear();
        for (const u32 number : asked.replicas) {
            if ((*served.fleet)[number].id != question.not_at) others.push_back(number);
        }
        asked.replicas = others;
        if (others.empty()) return std::nullopt;
    }
    asked.model = served.model;
    asked.in_mirror = served.in_mirror;
    asked.session = question.ask.session;
    asked.tenant = question.ask.tenant;
    asked.prompt_tokens = static_cast<i64>(question.ask.tokens->size());
    asked.index = served.index.get();
    asked.prompts = prompts;
    asked.now = question.now;
    decider_->match(asked, scratch);

    Choice choice;
    choice.books = std::unique_lock(books_.mutex);
    const decide::Ranking& ranking = decider_->rank(asked, scratch);
    if (ranking.first == kNone || ranking.has_failed()) return std::nullopt;

    choice.ranking = &ranking;
    const decide::State& state = choice.state();
    const bool is_pulled = ranking.able.lower[ranking.first].pull_from != kNone;
    if (is_pulled) return std::nullopt;  // Python follows pulls from peers
    choice.replica = &(*served.fleet)[state.replica];
    choice.cache = &choice.replica->caches.front();
    if (choice.replica->has_ranks()) {
        if (state.dp_rank == decide::kAnyRank) return std::nullopt;
        choice.dp_rank = state.dp_rank;
        for (const decide::Cache& each : choice.replica->caches) {
            if (each.dp_rank == state.dp_rank) choice.cache = &each;
        }
    }
    return choice;
}

std::unique_ptr<Booked> Placing::book(const Question& question, const Read& read, Choice& choice,
                                      const Prediction& prediction, Count under_way) const {
    const Served& served = *read.served;
    const auto prompt_tokens = static_cast<i64>(prediction.prompt_tokens);
    const auto uncached = static_cast<i64>(prediction.uncached_tokens);
    const mirror::LookUp look_ups[] = {{read.prompt, nullptr}};
    mirror::Sent sent;
    sent.model = served.in_mirror;
    sent.index = served.index;
    sent.source = choice.cache->source_in(served.index.get());
    sent.cache = choice.cache->id;
    sent.prompts = look_ups;
    sent.prompt_tokens = prompt_tokens;
    sent.uncached_tokens = uncached;
    sent.hit_tokens = choice.cached().all;
    sent.speed = choice.state().speed;
    for (const decide::TierShare& share : choice.lower_shares()) {
        sent.loads.emplace_back(share.tier, share.tokens);
    }
    sent.junction_tokens = choice.cached().junction;
    const std::vector<mirror::Tokens> keep(question.ask.keep.begin(), question.ask.keep.end());
    sent.keep = keep;
    const Keys keys =
        read.prompt->shared_prefix_keys(served.index->index.space(), decide::kKeyStep);
    if (decider_->recent) decider_->recent->remember(choice.cache->id, keys.span, question.now);
    std::shared_ptr<mirror::ApproximateVisit> estimated;
    if (prediction.is_estimate()) {
        estimated = books_.estimates->visit(sent.cache, {keys}, sent.hit_tokens);
    }
    auto booking = std::make_unique<Booked>(books_.shared_from_this(), std::move(under_way), quiet_,
                                            *choice.replica, uncached, prompt_tokens,
                                            choice.dp_rank, sent, std::move(estimated),
                                            question.now);
    // A failure from here on ends the booking, which takes the mutex.
    choice.books.unlock();
    return booking;
}

}  // namespace kvroute::plane
