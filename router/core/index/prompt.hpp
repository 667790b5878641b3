// A prompt, and its keys at every step that some source may need. From any thread: keys that were
// computed once stay where they are.
#pragma once

#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "index/few.hpp"
#include "index/marks.hpp"

namespace kvroute {

// Keys of a prompt's prefixes, from the shortest, and the memory that they lie in. Several parts hold
// the same ones at once, without a copy each.
struct Keys {
    std::shared_ptr<const void> owner;
    std::span<const u64> span;

    // Returns `count` keys: `key_of(i)` is called for each, in their order.
    template <class KeyOf>
    static Keys made(std::size_t count, KeyOf&& key_of) {
        if (!count) return {};
        std::shared_ptr<u64[]> keys = std::make_shared<u64[]>(count);
        for (std::size_t i = 0; i < count; ++i) keys[i] = key_of(i);
        const std::span<const u64> span{keys.get(), count};
        return {std::move(keys), span};
    }
    static Keys of(std::span<const u64> keys) {
        return made(keys.size(), [keys](std::size_t i) { return keys[i]; });
    }
};

// Token ids that whoever asks and a prompt hold at once.
using SharedTokens = std::shared_ptr<const std::vector<u32>>;

class Prompt {
    struct WithoutTokens {};

public:
    struct Step {
        u64 tokens = 1;     // from one key to the next
        u32 lookahead = 0;  // tokens behind a block that its hash covers too
        auto operator<=>(const Step&) const = default;
    };

    Prompt(SharedTokens tokens, std::optional<std::string> lora,
           std::optional<std::string> salt, std::vector<u8> extra_keys)
        : length_(tokens->size()), tokens_(std::move(tokens)) {
        if (!lora && !salt && extra_keys.empty()) return;
        besides_ = std::make_unique<Besides>(
            Besides{std::move(lora), std::move(salt), std::move(extra_keys)});
    }

    Prompt(WithoutTokens, const Prompt& whole);

    u64 length() const { return length_; }
    // Returns them, or none where only keys are left.
    std::span<const u32> tokens() const {
        return tokens_ ? std::span<const u32>(*tokens_) : std::span<const u32>();
    }

    // Returns the residues of the keys at step + lookahead, 2 * step + lookahead, ... tokens.
    std::span<const u64> keys(const KeySpace& space, Step step);
    bool has_keys(Step step) const;

    // Returns the key at the end of block `index`.
    static Key key_at(std::span<const u64> keys, Step step, u64 index) {
        return {keys[index],
                static_cast<u32>(((index + 1) * step.tokens + step.lookahead) & kMaxLength)};
    }

    // Returns residues at every multiple of `step` tokens: every n-th of finer ones, if there are any.
    // An entry of extra keys is about one hash block, not about one step of the caller.
    std::span<const u64> prefix_keys(const KeySpace& space, u64 step) {
        return shared_prefix_keys(space, step).span;
    }
    // Likewise, for those that keep them longer than the prompt.
    Keys shared_prefix_keys(const KeySpace& space, u64 step);

    // Returns the same without its tokens, for those that keep it long: it has the keys that were
    // computed so far, and none at other steps.
    std::shared_ptr<Prompt> without_tokens() const {
        return std::make_shared<Prompt>(WithoutTokens(), *this);
    }

private:
    static constexpr std::size_t kUsualSteps = 2;

    struct Besides {
        std::optional<std::string> lora;
        std::optional<std::string> salt;
        std::vector<u8> extra_keys;  // in msgpack; empty where there are none
    };
    struct Made {
        Step step;
        bool is_of_prefixes = false;  // as `prefix_keys` returns them
        Keys keys;
    };

    // The caller holds the mutex.
    const Made* find(Step step, bool is_of_prefixes) const;
    const Keys& keys_at(const KeySpace& space, Step step);
    Keys every(const KeySpace& space, u64 step);
    Keys computed(const KeySpace& space, Step step) const;
    std::vector<Mark> marks_of(const KeySpace& space, Step step) const;

    u64 length_ = 0;  // in tokens
    SharedTokens tokens_;  // null: only keys are left
    std::unique_ptr<const Besides> besides_;  // what keys cover besides tokens; null: nothing
    mutable std::mutex mutex_;  // guards the keys
    Few<Made, kUsualSteps> made_;
};

}  // namespace kvroute
