#include "index/prompt.hpp"

namespace kvroute {

std::span<const u64> Prompt::keys(const KeySpace& space, Step step) {
    std::lock_guard locked(mutex_);
    return keys_at(space, step).span;
}

bool Prompt::has_keys(Step step) const {
    std::lock_guard locked(mutex_);
    return find(step, false) != nullptr;
}

Keys Prompt::shared_prefix_keys(const KeySpace& space, u64 step) {
    std::lock_guard locked(mutex_);
    if (const Made* known = find({step, 0}, true)) return known->keys;
    Keys keys = every(space, step);
    made_.add({{step, 0}, true, keys});
    return keys;
}

Prompt::Prompt(WithoutTokens, const Prompt& whole) : length_(whole.length_) {
    std::lock_guard locked(whole.mutex_);
    made_ = whole.made_;
}

const Prompt::Made* Prompt::find(Step step, bool is_of_prefixes) const {
    const Made* found = nullptr;
    made_.each([&](const Made& each) {
        if (each.step == step && each.is_of_prefixes == is_of_prefixes) found = &each;
    });
    return found;
}

const Keys& Prompt::keys_at(const KeySpace& space, Step step) {
    if (const Made* known = find(step, false)) return known->keys;
    return made_.add({step, false, computed(space, step)}).keys;
}

Keys Prompt::every(const KeySpace& space, u64 step) {
    const Made* finest = nullptr;
    made_.each([&](const Made& each) {
        const Step finer = each.step;
        const bool is_fit = !each.is_of_prefixes && !finer.lookahead && step % finer.tokens == 0;
        if (is_fit && (!finest || finer < finest->step)) finest = &each;
    });
    if (!finest || length_ < step) return keys_at(space, {step, 0});
    if (finest->step.tokens == step) return finest->keys;
    const std::span<const u64> keys = finest->keys.span;
    const u64 nth = step / finest->step.tokens;
    return Keys::made(keys.size() / nth, [&](std::size_t i) { return keys[(i + 1) * nth - 1]; });
}

Keys Prompt::computed(const KeySpace& space, Step step) const {
    if (!tokens_ || length_ < step.tokens + step.lookahead) return {};
    const std::size_t count = (length_ - step.lookahead) / step.tokens;
    const Key root = root_key(space, besides_ ? besides_->lora.value_or("") : "");
    if (!step.lookahead && (!besides_ || (!besides_->salt && besides_->extra_keys.empty()))) {
        u64 residue = root.residue;
        const u32* block = tokens_->data();
        return Keys::made(count, [&](std::size_t) {
            residue = space.extended(residue, {block, step.tokens}, step.tokens);
            block += step.tokens;
            return residue;
        });
    }
    const std::vector<Mark> marks = marks_of(space, step);
    KeyChain chain(space, root, *tokens_, marks);
    return Keys::made(count, [&](std::size_t i) {
        return chain.until((i + 1) * step.tokens + step.lookahead).residue;
    });
}

std::vector<Mark> Prompt::marks_of(const KeySpace& space, Step step) const {
    std::vector<Mark> marks;
    MarkRules rules{step.tokens, std::nullopt, std::nullopt, step.lookahead};
    if (!besides_) return marks;
    if (besides_->lora) rules.lora = *besides_->lora;
    if (besides_->salt) rules.salt = *besides_->salt;
    read_marks(besides_->extra_keys, space, rules, marks);
    return marks;
}

}  // namespace kvroute
