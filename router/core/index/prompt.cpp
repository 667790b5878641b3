#include "index/prompt.hpp"

namespace kvroute {

const std::vector<u64>& Prompt::keys(const KeySpace& space, Step step) {
    std::lock_guard locked(mutex_);
    return keys_at(space, step);
}

const std::vector<u64>& Prompt::prefix_keys(const KeySpace& space, u64 step) {
    std::lock_guard locked(mutex_);
    auto known = prefix_keys_.find(step);
    if (known == prefix_keys_.end()) {
        known = prefix_keys_.emplace(step, &every(space, step)).first;
    }
    return *known->second;
}

const std::vector<u64>& Prompt::keys_at(const KeySpace& space, Step step) {
    auto known = keys_.find(step);
    return known == keys_.end() ? keys_.emplace(step, computed(space, step)).first->second
                                : known->second;
}

const std::vector<u64>& Prompt::every(const KeySpace& space, u64 step) {
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

std::vector<u64> Prompt::computed(const KeySpace& space, Step step) const {
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

std::vector<Mark> Prompt::marks_of(const KeySpace& space, Step step) const {
    std::vector<Mark> marks;
    MarkRules rules{step.tokens, std::nullopt, std::nullopt, step.lookahead};
    if (lora_) rules.lora = *lora_;
    if (salt_) rules.salt = *salt_;
    read_marks(extra_keys_, space, rules, marks);
    return marks;
}

}  // namespace kvroute
