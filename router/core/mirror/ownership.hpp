// Finds which of several requests used each part of a prefix last. A request uses a prompt from its
// start, so a user of a key uses all keys before it, too. The keys that a request was the last to
// use are therefore a *suffix* of its keys: the others took a prefix of them. Three requests, the
// earliest first, where `A` stands for a key that A owns:
//
//     A  1 2 3 4 5         owns          4 5
//     B  1 2 3 6 7         owns      3   6 7
//     C  1 2 8             owns  1 2 8
//
// Keys that lie behind one another and have one owner are a *run*, and ownership is one map from key
// to run. A request that uses a prompt again takes its runs over, one by one, at any length; it goes
// key by key only where prompts part for the first time, and for new keys.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "mirror/chain.hpp"
#include "mirror/flat_map.hpp"
#include "mirror/equal_keys.hpp"
#include "index/match.hpp"

namespace kvroute::mirror {

// A request that has ended takes as much memory as so many keys, besides those of its prompt.
constexpr std::size_t kUseKeys = 4;

// A prompt, and its hashes by the engine of one cache where blocks are found there only by these.
struct LookUp {
    std::shared_ptr<Prompt> prompt;  // null: not needed
    std::shared_ptr<const Computed> computed;
};

// One request's use of a prefix.
struct Use {
    u64 number = 0;
    Keys keys;
    std::size_t owned_from = 0;      // the index of the first key that it owns; all of them: nothing
    std::optional<double> ended_at;  // nothing while it runs
    LookUp look_up;                  // in the content of a cache
    double rest = 0.0;  // its tokens behind the last key, in keys; less than 0: so many keys are gone

    u32 place_ended = kNone;  // among those that have ended and own something
    u32 place_in_order = kNone;  // see `EvictionOrder`

    std::size_t owned() const { return keys.span.size() - owned_from; }
    // A time of 0 counts as none.
    double ended_or(double otherwise) const {
        return ended_at && *ended_at != 0.0 ? *ended_at : otherwise;
    }
};

// Keys that a request took over from the one that had used them last.
struct Taken {
    std::shared_ptr<Use> use;
    std::size_t keys = 0;
};

// The owner of each key, and the requests that have ended, by the time of their end.
class Ownership {
public:
    using Ended = Chain<std::shared_ptr<Use>>;

    // The number of keys that have an owner.
    std::size_t keys() const { return runs_.size(); }
    // The number of ended requests that own something.
    std::size_t requests() const { return ended_.size(); }
    // The memory of ended requests, in keys: all of their prompts, however little they own.
    std::size_t size() const { return size_; }

    // A request begins to use a prefix. `taken` has the requests whose keys it took, from the start.
    std::shared_ptr<Use> begin(Keys keys);

    // A request has ended: it is the last that used its keys. Call once. `taken` has the requests from
    // which it took keys back.
    void end(const std::shared_ptr<Use>& use, double now);

    // From `begin` or `end`, whichever was last.
    const std::vector<Taken>& taken() const { return taken_; }

    // Forgets a request and what it owns; its keys have no owner then.
    void drop(std::shared_ptr<Use> use);

    // Forgets the last keys that a request owns, `count` at most, as an engine evicts them, and
    // returns them: they are there for as long as the request is. It has ended.
    std::span<const u64> drop_end(const std::shared_ptr<Use>& use, std::size_t count);

    // Returns the request that ended first of those that still own something; null: there is none.
    std::shared_ptr<Use> oldest() const;
    // Returns all that have ended and own something, earliest first.
    const Ended& ended() const { return ended_; }

    // Returns how many keys were used after a time, by requests that have ended; counts up to `most`.
    // An end at just that time does not count.
    std::size_t owned_since(double ended_at, std::size_t most) const;

    // Forgets all requests that have ended.
    void clear();

    // Returns how many leading keys of a prompt have an owner.
    std::size_t leading(std::span<const u64> keys) const;

    // Calls `visit(start, end, use)` for the stretches of `keys` that one request each owns, until it
    // returns false.
    template <class Visit>
    void for_each_segment(std::span<const u64> keys, Visit&& visit) const {
        std::size_t start = 0, at = 0;
        u32 run = keys.empty() ? kNone : runs_.find(keys[0]);
        while (run != kNone) {
            const Use& use = *pool_[run].use;
            at = end_of(run, keys, at);
            run = at < keys.size() ? runs_.find(keys[at]) : kNone;
            if (run != kNone && pool_[run].use.get() == &use) continue;
            if (!visit(start, at, use)) return;
            start = at;
        }
    }

private:
    // Keys of prompts that are the same so far, up to `end`, and their owner.
    struct Run {
        std::size_t end = 0;
        std::size_t keys = 0;  // that lead here
        std::shared_ptr<Use> use;
    };

    std::size_t end_of(u32 run, std::span<const u64> keys, std::size_t start) const;
    std::size_t end_of(const Run& run) const {
        return std::min(run.end, run.use->keys.span.size());
    }
    void take(const std::shared_ptr<Use>& use);
    std::size_t add(const std::shared_ptr<Use>& use, std::size_t start);
    void hand_over(u32 run, std::size_t start, std::size_t end, const std::shared_ptr<Use>& use);
    void note_taken(const std::shared_ptr<Use>& before, std::size_t start, std::size_t end);
    void give(std::span<const u64> keys, u32 run);
    void erase(u64 key);
    void unlist(Use& use);
    u32 new_run(std::size_t end, const std::shared_ptr<Use>& use);
    void release(u32 run);

    FlatMap runs_;  // by key
    std::vector<Run> pool_;
    std::vector<u32> free_;  // of the pool
    Ended ended_;
    std::size_t size_ = 0;
    u64 numbers_ = 0;
    std::vector<Taken> taken_;
};

}  // namespace kvroute::mirror
