// The interface of deciding without Python: one request at a time, from any of the plane's threads.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "plane/types.hpp"

namespace kvroute::plane {

// A request in the books of its replica, from its sending to its end. From any thread. Every call but
// `ended` may be left out, and `first_byte` and `ended` repeated without effect; without `ended`, the
// request counts as not served. `ended` returns true if no other request that was decided here was at
// the replica meanwhile, or shortly before.
class Booking {
public:
    virtual ~Booking() = default;
    virtual void first_byte(double now) = 0;
    // So many more events of a stream have passed.
    virtual void generated(u64 events, double now) = 0;
    virtual bool ended(bool was_served, double now) = 0;
    // Called after `ended`, with the cached tokens that the engine reported; nothing: it reported none.
    // An estimated hit learns from it.
    virtual void reported(std::optional<std::int64_t> cached_tokens, double now) = 0;
};

// The prediction for a request that was decided here.
struct Prediction {
    std::string model, replica;
    int dp_rank = -1;  // none was asked for
    u64 prompt_tokens = 0;
    u64 gpu_cached_tokens = 0, cached_tokens = 0, expected_tokens = 0, uncached_tokens = 0;
    bool is_suspect = false, has_adapter = false;
    double estimate_trust = 0;  // of a hit that is an estimate, the share that counted; 0: it is none

    bool is_estimate() const { return estimate_trust != 0; }
};

struct Placed {
    std::unique_ptr<Booking> booking;
    Prediction prediction;
    Forward forward;
    u64 order = 0;     // its place in the engine's queue: the lowest goes first
    std::string name;  // of the model there; empty: as the client names it
    std::string request_id;
};

// A name that requests give. Never changes: another one takes its place.
struct Model {
    virtual ~Model() = default;
    bool is_read_first = false;  // engines are sent something that only Python knows
};

// A request that could be decided here.
struct Question {
    const Ask& ask;
    std::shared_ptr<const Model> model = nullptr;  // that it names; null: it is looked up
    std::string forwarded_for = {};    // its client, behind whom trusted proxies name before it
    std::string_view forwarded_proto = {};
    std::string_view request_id = {};  // that the client gives; empty: none
    double now = 0;
    std::string_view not_at = {};  // a replica's name
};

struct Answer;
struct Selection;
struct Reservable;

class Decider {
public:
    virtual ~Decider() = default;
    // Returns what a name stands for; null: it is unknown.
    virtual std::shared_ptr<const Model> model(const std::string& name) = 0;
    // Nothing: it is left to Python.
    virtual std::optional<Placed> place(const Question& question) = 0;
    // Returns where a request would go. Nothing: as before.
    virtual std::optional<Answer> look(const Question& question) = 0;
    // The same for a gateway that sends it itself.
    virtual std::optional<Selection> select(const Question& question) = 0;
    // Books a request that a gateway sends. Nothing: as before.
    virtual std::optional<Reservable> reserve(const Question& question) = 0;
    // Holds what was reserved, by name.
    virtual Reservations& reservations() = 0;
};

}  // namespace kvroute::plane
