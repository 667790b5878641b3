// What a decision asks of whoever follows the caches: the mirror, and estimates of caches without
// events. `Outlooks` itself is for where nobody does: every cache is idle.
//
// All of it is called with the mutex of the books held (`decide.hpp`), and must not block.
#pragma once

#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "decide/load.hpp"
#include "index/prompt.hpp"

namespace kvroute::decide {

// Names one KV cache, a data-parallel rank of a replica, for as long as the process lives.
using CacheId = u32;

// What a new request would find at a cache, besides its hit.
struct Outlook {
    double progress_tokens = 0.0;  // of the uncached tokens in prefill there, those computed by now
    // For how long what it evicts next has been idle; nothing while it evicts nothing.
    std::optional<double> eviction_age_s;
    double reuse_probability = 0.0;  // of what it evicts next
    double uncached_tokens_per_s = 0.0;
    double arrivals_per_s = 0.0;
    double refill = 1.0;  // what bringing back what it evicts costs, relative to computing it
};

// What a cache will have of a prompt, though no event says so yet. In tokens.
struct Coming {
    i64 tokens = 0;  // a hit
    i64 run = 0;     // what full attention will have, at least as much: beyond the hit a junction
};

struct ComingAt {
    CacheId cache = 0;
    Coming coming;
};

// What a cache without events may hold of a prompt.
struct Estimate {
    i64 tokens = 0;
    double trust = 0.0;  // the share of such promises that was kept
    std::optional<double> eviction_age_s;
    double reuse_probability = 0.0;  // read where there is an age
};

// A prompt that is to be sent.
struct Sought {
    Prompt& prompt;
    const KeySpace& space;      // of the model's index
    std::span<const u64> keys;  // every 64 tokens
    i64 tokens = 0;             // its length; 0 if that is unknown
};

class Outlooks {
public:
    virtual ~Outlooks() = default;

    struct Cache {
        CacheId id = 0;
        std::optional<i64> capacity_blocks;  // as its engine says
    };

    // What a request for a model would find at each of `caches`. `out` is as long, and idle.
    virtual void outlooks(std::string_view /*model*/, std::span<const Cache> /*caches*/,
                          double /*now*/, std::span<Outlook> /*out*/) {}

    // What each cache is computing of a prompt for another one now; appended.
    virtual void in_prefill(const Sought& /*prompt*/, double /*now*/,
                            std::vector<ComingAt>& /*out*/) {}

    // Of a token from a tier or store below the GPU, in tokens to compute, as it was measured at a
    // cache; nothing where nothing was sent to it yet. An empty name: nobody knows from where.
    virtual std::optional<double> load_price(CacheId /*cache*/, std::string_view /*tier*/) {
        return std::nullopt;
    }

    // Of a replica of a model at speed 1; nothing where nobody measures it.
    virtual std::optional<double> prefill_tokens_per_s(std::string_view /*model*/) {
        return std::nullopt;
    }

    // How much of a prompt will be cached when the engine admits it, if it were sent now.
    virtual i64 expected(CacheId /*cache*/, const Sought& /*prompt*/, i64 hit_tokens) {
        return hit_tokens;
    }

    // Whether an estimate may stand in for some cache's events, be they lost or never sent.
    virtual bool estimates_any() { return false; }
    virtual bool is_silent(CacheId /*cache*/) { return false; }  // it publishes none

    struct EstimateOf {
        std::string_view model;
        std::span<const std::span<const u64>> keys;  // of each prompt
        i64 most_tokens = 0;                         // of all prompts, those a hit may cover
        double now = 0.0;
    };

    // What stands in for a cache's events; nothing where they are whole, or have not been missing
    // for long. Asked of caches that are silent or suspect. `capacity_tokens`: as its engine says.
    virtual std::optional<Estimate> estimate(CacheId /*cache*/,
                                             std::optional<i64> /*capacity_tokens*/,
                                             const EstimateOf& /*of*/) {
        return std::nullopt;
    }
};

}  // namespace kvroute::decide
