// Finds the prefixes of an event's blocks: now, or once its parent is known.
#include "index/apply.hpp"
#include "index/marks.hpp"

namespace kvroute {

// Returns the key of the empty prefix. Under an adapter of which only the engine's number is known, it
// is no prompt's: which name has the number is not.
Key Applier::root_of(const Event& event) const {
    if (!event.lora_id) return root_key(space_, event.lora.value_or(""));
    return space_.root(space_.folded(space_.folded(4, 0), *event.lora_id));
}

// Writes the keys of a dense event's blocks into `keys_`; false where the parent's is not known.
bool Applier::find_keys(Source& of, const Event& event, u32 block_size) {
    Key parent;
    if (!event.parent) {
        parent = root_of(event);
    } else if (!index_.key_of(of, *event.parent, parent)) {
        return false;
    }
    if (event.hashes == 0) return true;
    if (event.has_marks || event.salt || event.tail || of.lookahead) {
        const WaitingRun run = run_of(of, event, block_size, false);
        keys_of_run(run, parent);
        return true;
    }
    keys_.resize(event.hashes);
    const u32* tokens = batch_.tokens.data() + event.first_token;
    u64 residue = parent.residue;
    for (u32 i = 0; i < event.hashes; ++i) {
        residue = space_.extended(residue, {tokens + std::size_t{i} * block_size, block_size},
                                  block_size);
        keys_[i] = {residue, (parent.length + (i + 1) * block_size) & kMaxLength};
        if (i < kAhead) nodes_.prefetch_key(NodeTables::hash_of_key(keys_[i]));
    }
    return true;
}

void Applier::keys_of_run(const WaitingRun& run, Key parent) {
    KeyChain chain(space_, parent, run.tokens, run.marks);
    keys_.resize(run.hashes.size());
    u64 end = u64{run.block_size} + run.lookahead;
    for (Key& key : keys_) {
        key = chain.until(end);
        end += run.block_size;
    }
}

WaitingRun Applier::run_of(Source& of, const Event& event, u32 block_size, bool is_below) {
    WaitingRun run;
    // The tokens of this run that the parent's key covers already.
    const u32 covered = event.parent ? of.lookahead : 0;
    const std::span<const u64> hashes = hashes_of(event);
    const u32* tokens = batch_.tokens.data() + event.first_token;
    run.hashes.assign(hashes.begin(), hashes.end());
    run.tokens.assign(tokens + std::min(covered, event.tokens), tokens + event.tokens);
    const u32* tail = batch_.tails.data() + event.first_tail;
    run.tokens.insert(run.tokens.end(), tail, tail + event.tail);
    run.block_size = block_size;
    run.lookahead = of.lookahead - covered;
    run.batch = of.batches;
    run.is_below = is_below;
    MarkRules rules{block_size, event.lora, std::nullopt, of.lookahead};
    // The salt counts once, where the prompt begins; SGLang repeats it in every run.
    if (!event.parent) rules.salt = event.salt;
    read_marks(event.has_marks ? event.extra_keys : std::span<const u8>(), space_, rules,
               run.marks);
    if (covered) {
        std::erase_if(run.marks, [&](const Mark& mark) { return mark.position < covered; });
        for (Mark& mark : run.marks) mark.position -= covered;
    }
    return run;
}

// True where one of the blocks in `keys_` is remembered for another prefix: then which of two hashes
// is found for that one is decided when all are counted.
bool Applier::contradicts_remembered(const Source& of, const Event& event, u32 taken) const {
    Key known;
    for (u32 i = 0; i < taken; ++i) {
        const u64 hash = batch_.hashes[event.first_hash + i];
        if (index_.remembers(of, hash, known) && !(known == keys_[i])) return true;
    }
    return false;
}

// Learns the keys in `keys_` of an event's blocks, and those of the runs that waited for one of them.
void Applier::place_all(Source& of, const Event& event, bool is_below) {
    std::vector<std::pair<Key, WaitingRun>> ready;
    for (u32 i = 0; i < event.hashes; ++i) {
        place_and_release(of, batch_.hashes[event.first_hash + i], keys_[i], is_below, ready);
    }
    while (!ready.empty()) {
        auto [parent, run] = std::move(ready.back());
        ready.pop_back();
        keys_of_run(run, parent);
        for (std::size_t i = 0; i < run.hashes.size(); ++i) {
            place_and_release(of, run.hashes[i], keys_[i], run.is_below, ready);
        }
    }
}

void Applier::place_and_release(Source& of, u64 hash, Key key, bool is_below,
                                std::vector<std::pair<Key, WaitingRun>>& ready) {
    index_.place_everywhere(of, hash, key, is_below);
    if (!of.waiting.waits_for(hash)) return;
    for (WaitingRun& run : of.waiting.take(hash)) ready.emplace_back(key, std::move(run));
}

void Applier::wait_for_parent(Source& of, const Event& event, u32 block_size, bool is_below) {
    // A known hash function shows at every look-up where a run belongs, unless a tier has hashes
    // of its own.
    if (of.has_chain && !is_below && !event.has_adapter()) return;
    if (!is_unplaced(of, hashes_of(event))) return;
    of.waiting.add(*event.parent, run_of(of, event, block_size, is_below));
}

// True where the source, or a store that it shares, holds one of the blocks without a place.
bool Applier::is_unplaced(const Source& of, std::span<const u64> hashes) const {
    return index_.unplaced_of(of, hashes) || index_.any_store(of, [&](const Source& store) {
               return index_.unplaced_of(store, hashes) > 0;
           });
}

}  // namespace kvroute
