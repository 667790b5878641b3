// A client's requests that are decided without Python, and their second attempts.
#include "index/memory.hpp"
#include "plane/answer.hpp"
#include "plane/ask.hpp"
#include "plane/client.hpp"
#include "plane/splice.hpp"
#include "plane/thread.hpp"

namespace kvroute::plane {
namespace {

using sv = std::string_view;

constexpr u64 kMostAwaited = 4 << 20;  // of a body, before any event is posted

Respond json_response(std::string body) {
    Respond made{200, {{"content-type", "application/json"}}, std::move(body)};
    made.fields.emplace_back("content-length", std::to_string(made.body.size()));
    return made;
}

// The model of a request that can be sent from here. Null: it is unknown, or Python reads the request
// first.
std::shared_ptr<const Model> sent_here(Decider& decider, const Ask& ask) {
    auto model = decider.model(ask.model);
    return model != nullptr && model->is_read_first ? nullptr : model;
}

}  // namespace

// --- without Python -------------------------------------------------------------------------------

// Classifies the request by its head, before its body has come.
Asks Client::asked() {
    const Options& options = thread_.options();
    const sv target = head_.origin_form;
    if (target.empty()) return Asks::to_be_sent;
    if (!options.reserve_path.empty()) {
        if (const std::optional<Report> report = report_of(head_.method, target)) {
            report_ = *report;
            return Asks::to_be_noted;
        }
    }
    if (head_.method != "POST") return Asks::to_be_sent;
    if (target == options.route_path) return Asks::where;
    if (target == options.select_path) return Asks::for_selection;
    return target == options.reserve_path ? Asks::for_reservation : Asks::to_be_sent;
}

// True where the request may be decided here once its body has come.
bool Client::may_decide() {
    const Options& options = thread_.options();
    const u64 most = std::min(kMostAwaited, options.max_body_bytes);
    const bool may = thread_.decider() != nullptr && !head_.expects_continue && !is_of_reserve_ &&
                     head_.framing != http::Framing::chunked && head_.length <= most;
    if (!may) return false;
    asks_ = asked();
    if (asks_ != Asks::to_be_sent) return true;
    if (head_.method != "POST" || head_.framing != http::Framing::length) return false;
    for (path_ = 0; path_ < options.prepared.size(); ++path_) {
        if (options.prepared[path_].first == head_.origin_form) return true;
    }
    return false;
}

// Takes room for what has come of the body; false: there is none. The length in the head takes none:
// whoever announced much and sent nothing would keep all others out.
bool Client::has_room() {
    std::optional<Budget::Share> share = thread_.bodies().take(body_.size());
    if (!share) return false;
    share_ = std::move(*share);
    return true;
}

// The body has come. False: Python has to serve the request.
bool Client::decide() {
    is_awaited_ = false;
    const Care care = this->care();
    if (care == Care::opened) return false;
    if (asks_ != Asks::to_be_sent) {
        const bool is_plain = care == Care::none && !thread_.options().asks_with_key;
        return asks_ == Asks::to_be_noted ? is_plain && is_noted() : is_told(is_plain);
    }
    Decider* const decider = thread_.decider();
    if (path_ == 0 && decider != nullptr && care == Care::none) {
        std::optional<Ask> ask = read_ask(body_);
        auto model = ask ? sent_here(*decider, *ask) : nullptr;
        if (model != nullptr) return is_placed(std::move(*ask), std::move(model));
    }
    prepare(care == Care::prepared);
    return true;
}

Client::Care Client::care() const {
    const Options& options = thread_.options();
    if (!thread_.hosts().accepts(head_.find("host"))) return Care::opened;
    Care found = options.prepares_all ? Care::prepared : Care::none;
    for (const http::Field& field : head_.fields) {
        if (options.opened_with.contain(field.name)) return Care::opened;
        if (options.prepared_with.contain(field.name)) found = Care::prepared;
    }
    return found;
}

// Tells a gateway where its request goes, or has Python read the question first: words, and those whose
// fields matter. False: Python tells it, as those that speak msgpack, and those whose reservations are
// a key's.
bool Client::is_told(bool is_plain) {
    Decider* const decider = thread_.decider();
    const bool is_packed = head_.find("accept").find("msgpack") != sv::npos ||
                           head_.find("content-type").find("msgpack") != sv::npos;
    if (decider == nullptr || is_packed) return false;
    if (!is_plain && asks_ == Asks::for_reservation) return false;
    if (is_plain) {
        const Form form = asks_ == Asks::where ? Form::question : Form::reservation;
        if (const std::optional<Ask> ask = read_ask(body_, form)) {
            auto model = asks_ == Asks::for_reservation ? sent_here(*decider, *ask)
                                                        : decider->model(ask->model);
            return model != nullptr && is_told(*decider, *ask, std::move(model));
        }
    }
    was_prepared_ = true;
    thread_.post(exchange_, PrepareQuestion{asks_, is_plain ? Fields() : fields(), body_});
    return true;
}

bool Client::is_told(Decider& decider, const Ask& ask, std::shared_ptr<const Model> model) {
    Question question{.ask = ask,
                      .model = std::move(model),
                      .request_id = head_.find("x-request-id"),
                      .now = clock_now()};
    if (asks_ == Asks::where) return is_looked_up(decider, question);
    if (asks_ == Asks::for_selection) return is_selected(decider, question);
    return is_reserved(decider, question);
}

// Answers where a request would go.
bool Client::is_looked_up(Decider& decider, const Question& question) {
    const std::optional<Answer> answer = decider.look(question);
    if (!answer) return false;
    const double routing_s = clock_now() - question.now;
    const Respond respond = json_response(answer_body(*answer, routing_s));
    thread_.post(0, LookedUp{answer->prediction.model, routing_s, question.ask.tokenization_s});
    this->respond(respond);
    return true;
}

// The same for one that sends the request itself. Those with an id, to be booked later, are Python's.
bool Client::is_selected(Decider& decider, const Question& question) {
    if (!question.ask.reservation.empty()) return false;
    const std::optional<Selection> selection = decider.select(question);
    if (!selection) return false;
    const double routing_s = clock_now() - question.now;
    const Respond respond = json_response(selection_body(*selection, reason_of(selection->answer)));
    const std::string& name = selection->answer.prediction.model;
    thread_.post(0, LookedUp{name, routing_s, question.ask.tokenization_s});
    this->respond(respond);
    return true;
}

// The same, and books the request there.
bool Client::is_reserved(Decider& decider, const Question& question) {
    const Ask& ask = question.ask;
    const double began = question.now;
    std::optional<Reservable> made = decider.reserve(question);
    if (!made) return false;
    auto reserved = std::make_unique<Reserved>();
    Reserved& record = *reserved;
    record.number = exchange_;
    record.reason = reason_of(made->answer);
    const Respond respond = json_response(selection_body(*made, record.reason));
    const Prediction& prediction = made->answer.prediction;
    record.so_far =
        record_of(prediction, {0, ask.is_stream, ask.is_comparable, ask.salt.has_value(),
                               prediction.has_adapter, ask.tokenization_s});
    record.so_far.request_id = std::move(made->request_id);
    record.so_far.began_at = began;
    record.so_far.routing_s = clock_now() - began;
    record.id = std::move(made->id);
    record.by_tier = std::move(made->answer.by_tier);
    const Unfailing unfailing;
    record.booking = std::move(made->booking);
    record.place = std::move(made->place);
    const u64 long_tokens = thread_.options().long_prompt_tokens;
    if (long_tokens && prediction.uncached_tokens >= long_tokens) {
        thread_.post(0, LongPromptSent{});
    }
    record.touched_at = clock_now();
    Reservations& reservations = decider.reservations();
    if (thread_.sums_up() && !made->is_probe) {
        reservations.keep(std::move(reserved));
    } else {
        const std::string id = record.id;
        const std::shared_ptr<Booking> booking = record.booking;
        if (!thread_.post(exchange_, std::move(record))) throw std::bad_alloc();
        reservations.put(id, booking);  // behind it, so that no report on it is posted before it
    }
    this->respond(respond);
    return true;
}

// Notes a gateway's report in the books at once; Python gets it a moment later, if at all.
bool Client::is_noted() {
    Decider* const decider = thread_.decider();
    const std::optional<ReportBody> report = read_report(report_.kind, body_);
    if (decider == nullptr || !report) return false;
    const Unfailing unfailing;
    const bool is_over = report_.kind == ReportKind::end;
    const double now = clock_now();
    Reservations& reservations = decider->reservations();
    Reservations::Noted noted = reservations.note(report_.id, *report, is_over, now);
    if (noted.booking == nullptr) return false;
    if (report->has_begun && !report->is_error) noted.booking->first_byte(!is_over, now);
    const bool was_alone = is_over && noted.booking->ended(!report->is_error, now);
    if (noted.record != nullptr && is_summed(*noted.record, *report, was_alone, now)) {
        reservations.count_completed();
    } else if (noted.record != nullptr) {
        thread_.post(noted.record->number, std::move(*noted.record));
        noted.is_handed_over = true;
    } else if (!noted.is_handed_over) {
        noted.booking->generated(report->tokens, now);
    }
    if (noted.is_handed_over) {
        thread_.post(exchange_, Reported{std::string(report_.id), report_.kind, body_, now});
    }
    respond(json_response("{\"status\":\"ok\"}"));
    return true;
}

// Counts a reservation that is over; false where its record has to be posted: see the other one.
bool Client::is_summed(const Reserved& reserved, const ReportBody& last, bool was_alone, double now) {
    const Settled& of = reserved.so_far;
    Ended ended;
    ended.usage = last.usage_body(of.prompt_tokens);
    if (ended.usage.empty()) ended.usage = of.ended.usage;
    std::optional<Usage> usage;
    if (of.asked.is_comparable && !ended.usage.empty()) {
        usage = plain_usage(ended);
        if (!usage || was_alone || !reserved.by_tier.empty()) return false;
    }
    if (!last.is_whole || of.estimate_trust != 0 || of.asked.tokenization_s) return false;
    const double seconds = now - of.began_at;
    return thread_.sum({.model = of.model,
                        .replica = of.replica,
                        .prompt_tokens = of.prompt_tokens,
                        .cached_tokens = of.cached_tokens,
                        .expected_tokens = of.expected_tokens,
                        .routing_s = of.routing_s,
                        .first_byte_s = of.first_byte_s > 0 ? of.first_byte_s : seconds,
                        .seconds = seconds,
                        .usage = usage});
}

void Client::prepare(bool by_fields) {
    was_prepared_ = true;
    Prepare prepare{path_, {}, body_};
    if (by_fields) prepare.fields = fields();
    thread_.post(exchange_, std::move(prepare));
}

Question Client::question(const Ask& ask, sv request_id) const {
    return {ask, nullptr, forwarded_for(), forwarded_proto(), request_id, clock_now()};
}

// The client, behind those that a proxy names. Repeated lines equal commas in one (RFC 9110 5.3).
std::string Client::forwarded_for() const {
    std::string chain;
    for (const http::Field& field : head_.fields) {
        if (!is_trusted_) break;
        if (!http::same_name(field.name, "x-forwarded-for") || field.value.empty()) continue;
        chain += field.value;
        chain += ", ";
    }
    return chain + host_;
}

sv Client::forwarded_proto() const {
    sv proto = channel_.is_secure() ? "https" : "http";
    for (const http::Field& field : head_.fields) {
        if (is_trusted_ && http::same_name(field.name, "x-forwarded-proto")) proto = field.value;
    }
    return proto;
}

void Client::place(Ask ask) {
    if (stage_ != Stage::deciding || is_opened_) return;
    Decider* const decider = thread_.decider();
    const bool is_question = asks_ != Asks::to_be_sent;
    const bool is_done = is_question ? decider != nullptr && is_told(*decider, ask, nullptr)
                                     : is_placed(std::move(ask));
    if (!is_done) post_opened();
}

void Client::open_to_others() {
    if (stage_ == Stage::deciding && !is_opened_) post_opened();
}

bool Client::is_placed(Ask ask, std::shared_ptr<const Model> model) {
    const double began = clock_now();
    Decider* const decider = thread_.decider();
    if (decider == nullptr) return false;
    Question asked = question(ask, head_.find("x-request-id"));
    asked.model = std::move(model);
    std::optional<Placed> placed = decider->place(asked);
    if (!placed) return false;
    if (!complete(*placed, ask)) return false;
    asked_ = {path_, ask.is_stream, ask.is_comparable, ask.salt.has_value(),
              placed->prediction.has_adapter, ask.tokenization_s};
    request_id_ = std::move(placed->request_id);
    booking_ = std::move(placed->booking);
    prediction_ = std::move(placed->prediction);
    const u64 long_tokens = thread_.options().long_prompt_tokens;
    if (long_tokens && prediction_.uncached_tokens >= long_tokens) {
        thread_.post(0, LongPromptSent{});
    }
    routing_s_ = clock_now() - began;
    first_byte_s_ = 0;
    thread_.usual().add_request();
    show(Shown::not_yet);
    forward(std::move(placed->forward));
    if (booking_ && stage_ == Stage::trying) expect_first_byte(std::move(ask));
    return true;
}

// Adds what the request is sent with to any replica. False: its body cannot be changed as it must be.
bool Client::complete(Placed& placed, const Ask& ask) const {
    std::optional<std::string> body = ask.body;
    if (!placed.name.empty()) {
        body = with_model(body ? sv(*body) : sv(body_), placed.name);
        if (!body) return false;
    }
    placed.forward.dialect = thread_.options().prepared[path_].second;
    // Engines read a priority in OpenAI's requests, and at no other of these paths.
    const OrderedBy by = placed.forward.dialect == 0 ? placed.forward.ordered_by : OrderedBy::nothing;
    if (by == OrderedBy::header) {
        placed.forward.replaced.emplace_back("x-vllm-priority", std::to_string(placed.order));
    } else if (by != OrderedBy::nothing) {
        const std::string number = std::to_string(placed.order);
        body = with_field(body ? sv(*body) : sv(body_), "priority",
                          by == OrderedBy::negated_field ? "-" + number : number);
        if (!body) return false;
    }
    placed.forward.body = std::move(body);
    for (const auto& field : ask.added) placed.forward.added.push_back(field);
    for (const auto& field : ask.reported) placed.forward.reported.push_back(field);
    return true;
}

// Python decides after all: the replica did not serve it.
void Client::hand_over(HandedOver why) {
    if (upstream_ != nullptr) std::exchange(upstream_, nullptr)->abandon();
    booking_->ended(false, clock_now());
    booking_.reset();
    stop_waiting();
    show(Shown::not_yet);
    was_forwarded_ = false;
    stage_ = Stage::deciding;
    why.replica = prediction_.replica;
    why.beside = std::move(beside_);
    why.seconds = clock_now() - started_at_;
    thread_.post(exchange_, std::move(why));
    post_opened();
}
// --- a second attempt -----------------------------------------------------------------------------

// Times only streams: any other response has its first byte once all has been generated, and how much
// that will be is unknown.
void Client::expect_first_byte(Ask ask) {
    if (!thread_.usual().is_on() || !asked_.is_stream) return;
    usual_ = thread_.usual().at(forward_.to->origin);
    attempted_at_ = clock_now();
    const std::optional<double> late_after_s = usual_->late_after(forward_.work_tokens);
    if (!late_after_s) return;
    late_at_ = attempted_at_ + *late_after_s;
    ask_ = std::move(ask);
}

void Client::on_late() {
    late_at_ = 0;
    late_ = Late(usual_);
    if (booking_ && ask_ && !second_) try_second(*std::exchange(ask_, std::nullopt));
}

// Sends the request to another replica as well. Where first bytes are late there too, the whole fleet
// is slow, and more work would make it slower.
void Client::try_second(const Ask& ask) {
    Decider* const decider = thread_.decider();
    if (decider == nullptr) return;
    Question elsewhere = question(ask, request_id_);
    elsewhere.not_at = prediction_.replica;
    std::optional<Placed> placed = decider->place(elsewhere);
    if (!placed || !complete(*placed, ask)) return;
    if (thread_.usual().at(placed->forward.to->origin)->has_late() || !thread_.usual().take()) {
        thread_.post(0, SecondAttempt{"not_allowed"});
        return;
    }
    thread_.post(0, SecondAttempt{"begun"});
    second_ = std::make_unique<Second>(*this, std::move(*placed));
    Second& second = *second_;
    compose_request(second.placed.forward, second.request);
    second.started_at = clock_now();
    const Forward& forward = second.placed.forward;
    second.upstream = thread_.pool().start(second, forward, second.request,
                                           forward.body ? sv(*forward.body) : sv(body_),
                                           thread_.now());
    second.is_starting = false;
    if (second.failed) on_second_failed({{}, second.failed, 0, std::nullopt});
}

// Its first byte is here, or is not waited for any longer.
void Client::stop_waiting() {
    second_.reset();
    late_ = {};
    late_at_ = 0;
}

void Client::on_second_failed(HandedOver how) {
    how.replica = std::move(second_->placed.prediction.replica);
    beside_ = std::make_unique<HandedOver>(std::move(how));
    thread_.post(0, SecondAttempt{"failed"});
    second_.reset();
}

void Client::on_second(const http::ResponseHead& head, sv piece, bool is_last) {
    if (is_last) second_->upstream = nullptr;
    if (head.status >= 500 || is_not_now(head.status)) {
        on_second_failed({{}, std::nullopt, head.status, std::nullopt});
        return;
    }
    thread_.post(0, SecondAttempt{"won"});
    // The late attempt would have taken at least this long.
    usual_->learn(forward_.work_tokens, clock_now() - attempted_at_);
    be_overtaken({{}, Failure::late, 0, std::nullopt});
    on_response(head, piece, is_last);
}

// The second attempt takes the place of the first.
void Client::be_overtaken(HandedOver first) {
    beside_ = std::make_unique<HandedOver>(
        HandedOver{prediction_.replica, first.failure, first.status, first.retry_after_s});
    const std::unique_ptr<Second> second = std::move(second_);
    if (upstream_ != nullptr) upstream_->abandon();
    booking_->ended(false, clock_now());
    show(Shown::not_yet);  // until it is shown where it is now
    first.replica = std::move(prediction_.replica);
    first.seconds = clock_now() - started_at_;
    thread_.post(exchange_, Overtaken{std::move(first)});
    late_ = {};
    late_at_ = 0;
    upstream_ = std::exchange(second->upstream, nullptr);
    if (upstream_ != nullptr) upstream_->pass_to(*this);
    booking_ = std::move(second->placed.booking);
    prediction_ = std::move(second->placed.prediction);
    asked_.has_adapter = prediction_.has_adapter;
    forward_ = std::move(second->placed.forward);
    request_.swap(second->request);  // of which a part may still be unsent
    usual_ = thread_.usual().at(forward_.to->origin);
    attempted_at_ = second->started_at;
}

}  // namespace kvroute::plane
