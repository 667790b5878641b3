// A prompt, and its keys at every step that some source may need. From any thread: keys that were
// computed once stay where they are.
#pragma once

#include <list>
#include <map>
#include <mutex>
#include <string>

#include "index/marks.hpp"

namespace kvroute {

class Prompt {
public:
    struct Step {
        u64 tokens = 1;     // from one key to the next
        u32 lookahead = 0;  // tokens behind a block that its hash covers too
        auto operator<=>(const Step&) const = default;
    };

    Prompt(std::vector<u32> tokens, std::optional<std::string> lora,
           std::optional<std::string> salt, std::vector<u8> extra_keys)
        : tokens_(std::move(tokens)), lora_(std::move(lora)), salt_(std::move(salt)),
          extra_keys_(std::move(extra_keys)) {}

    const std::vector<u32>& tokens() const { return tokens_; }

    // Returns the residues of the keys at step + lookahead, 2 * step + lookahead, ... tokens.
    const std::vector<u64>& keys(const KeySpace& space, Step step);

    // Returns the key at the end of block `index`.
    static Key key_at(const std::vector<u64>& keys, Step step, u64 index) {
        return {keys[index],
                static_cast<u32>(((index + 1) * step.tokens + step.lookahead) & kMaxLength)};
    }

    // Returns residues at every multiple of `step` tokens: every n-th of finer ones, if there are any.
    // An entry of extra keys is about one hash block, not about one step of the caller.
    const std::vector<u64>& prefix_keys(const KeySpace& space, u64 step);

private:
    // The caller holds the mutex.
    const std::vector<u64>& keys_at(const KeySpace& space, Step step);

    // Returns the keys at every multiple of `step` tokens, where they stay.
    const std::vector<u64>& every(const KeySpace& space, u64 step);
    std::vector<u64> computed(const KeySpace& space, Step step) const;
    std::vector<Mark> marks_of(const KeySpace& space, Step step) const;

    std::mutex mutex_;  // guards the keys
    std::vector<u32> tokens_;
    std::optional<std::string> lora_;
    std::optional<std::string> salt_;
    std::vector<u8> extra_keys_;  // in msgpack; empty where there are none
    std::map<Step, std::vector<u64>> keys_;
    std::map<u64, const std::vector<u64>*> prefix_keys_;  // by step: some of `keys_` or `picked_`
    std::list<std::vector<u64>> picked_;
};

}  // namespace kvroute
