// A prompt, and its keys at every step that some source may ask for. Any thread may ask: keys that
// were computed once stay where they are.
#pragma once

#include <list>
#include <map>
#include <mutex>
#include <string>

#include "marks.hpp"

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

    // The residues of the keys at step + lookahead, 2 * step + lookahead, ... tokens.
    const std::vector<u64>& keys(const KeySpace& space, Step step) {
        std::lock_guard locked(mutex_);
        return keys_at(space, step);
    }

    // The key at the end of block `index`.
    static Key key_at(const std::vector<u64>& keys, Step step, u64 index) {
        return {keys[index],
                static_cast<u32>(((index + 1) * step.tokens + step.lookahead) & kMaxLength)};
    }

    // Residues at every multiple of `step` tokens: every n-th of some finer ones, if there are any.
    // An entry of extra keys is about one hash block, not about one step of the caller.
    const std::vector<u64>& prefix_keys(const KeySpace& space, u64 step) {
        std::lock_guard locked(mutex_);
        auto known = prefix_keys_.find(step);
        if (known == prefix_keys_.end()) {
            known = prefix_keys_.emplace(step, &every(space, step)).first;
        }
        return *known->second;
    }

private:
    const std::vector<u64>& keys_at(const KeySpace& space, Step step) {
        auto known = keys_.find(step);
        return known == keys_.end() ? keys_.emplace(step, computed(space, step)).first->second
                                    : known->second;
    }

    // The keys at every multiple of `step` tokens, where they are to stay.
    const std::vector<u64>& every(const KeySpace& space, u64 step) {
        for (const auto& [finer, keys] : keys_) {
            if (finer.lookahead || step % finer.tokens || tokens_.size() < step) continue;
            if (finer.tokens == step) return keys;
            std::vector<u64>& picked = picked_.emplace_back();
            const u64 nth = step / finer.tokens;
            for (u64 i = nth - 1; i < keys.size(); i += nth) picked.push_back(keys[i]);
            return picked;
        }
        return keys_at(space, {step, 0});
    }

    std::vector<u64> computed(const KeySpace& space, Step step) const {
        const u64 size = tokens_.size();
        if (size < step.tokens + step.lookahead) return {};
        std::vector<u64> found((size - step.lookahead) / step.tokens);
        const Key root = root_key(space, lora_.value_or(""));
        if (!step.lookahead && !salt_ && extra_keys_.empty()) {
            u64 residue = root.residue;
            for (std::size_t i = 0; i < found.size(); ++i) {
                const u32* block = tokens_.data() + i * step.tokens;
                residue = space.extended(residue, {block, step.tokens}, step.tokens);
                found[i] = residue;
            }
            return found;
        }
        const std::vector<Mark> marks = marks_of(space, step);
        KeyChain chain(space, root, tokens_, marks);
        for (std::size_t i = 0; i < found.size(); ++i) {
            found[i] = chain.until((i + 1) * step.tokens + step.lookahead).residue;
        }
        return found;
    }

    std::vector<Mark> marks_of(const KeySpace& space, Step step) const {
        std::vector<Mark> marks;
        MarkRules rules{step.tokens, std::nullopt, std::nullopt, step.lookahead};
        if (lora_) rules.lora = *lora_;
        if (salt_) rules.salt = *salt_;
        read_marks(extra_keys_, space, rules, marks);
        return marks;
    }

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
