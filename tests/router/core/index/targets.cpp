// What the fuzzer feeds. The first byte of an input chooses one of six targets: a payload as it
// comes from a socket, the text of a JSON array of token ids, a source's state from a dump, a
// program of events, look-ups and drops, after each of which the whole index is audited, the same
// for a table by itself, or a run of messages.

#include "audit.hpp"
#include "index/apply.hpp"
#include "index/json_tokens.hpp"
#include "index/state.hpp"

using namespace kvroute;

namespace {

// As usual, but that a clear of three blocks is a large one.
Limits roomy() {
    Limits limits;
    limits.cleared_at_once = 2;
    return limits;
}

constexpr std::array<u64, 2> kSecrets = {0x0123456789ABCDEF, 0x0FEDCBA987654321};

// Bytes that steer; zeros once they are used up.
class Input {
public:
    Input(const u8* data, std::size_t size) : left_(data, size) {}

    bool is_empty() const { return left_.empty(); }
    u8 byte() {
        if (left_.empty()) return 0;
        const u8 value = left_.front();
        left_ = left_.subspan(1);
        return value;
    }
    u32 below(u32 bound) { return byte() % bound; }
    std::span<const u8> take(std::size_t count) {
        const auto taken = left_.first(std::min(count, left_.size()));
        left_ = left_.subspan(taken.size());
        return taken;
    }
    std::span<const u8> rest() { return take(left_.size()); }

private:
    std::span<const u8> left_;
};

// Exactly as long as what it holds, so that AddressSanitizer sees every byte read behind its end.
class Exact {
public:
    explicit Exact(std::span<const u8> bytes) : size_(bytes.size()), bytes_(new u8[bytes.size()]) {
        std::copy(bytes.begin(), bytes.end(), bytes_.get());
    }
    std::span<const u8> span() const { return {bytes_.get(), size_}; }

private:
    std::size_t size_;
    std::unique_ptr<u8[]> bytes_;
};

// --- msgpack, of what the programs publish ---

class Packer {
public:
    std::vector<u8> bytes;

    void number(u64 value) {
        if (value < 128) {
            bytes.push_back(static_cast<u8>(value));
            return;
        }
        bytes.push_back(0xCF);
        for (int shift = 56; shift >= 0; shift -= 8) bytes.push_back(static_cast<u8>(value >> shift));
    }
    void nil() { bytes.push_back(0xC0); }
    void text(std::string_view value) {
        bytes.push_back(static_cast<u8>(0xA0 | value.size()));
        bytes.insert(bytes.end(), value.begin(), value.end());
    }
    void array(std::size_t count) { head(0xDC, count); }
    void map(std::size_t count) { head(0xDE, count); }

private:
    void head(u8 byte, std::size_t count) {
        bytes.push_back(byte);
        bytes.push_back(static_cast<u8>(count >> 8));
        bytes.push_back(static_cast<u8>(count));
    }
};

constexpr const char* kTiers[] = {"GPU", "CPU", "DISK", "cpu", "T4",  "T5",  "T6",  "T7", "T8", "T9",
                                  "T10", "T11", "T12",  "T13", "T14", "T15", "T16", "T17"};

// Mostly one of the first.
const char* tier_of(u8 choice) { return kTiers[choice % 8 ? choice % 3 : choice / 8 % 18]; }
constexpr const char* kAdapters[] = {"", "a", "b"};
constexpr u32 kHashes = 12;

// The tokens of a block: two hashes in three stand for tokens that another one has as well.
void append_block(std::vector<u32>& tokens, u32 hash, u32 variant, u32 size) {
    for (u32 i = 0; i < size; ++i) tokens.push_back((hash % 8) * 16 + variant * 4 + i % 3);
}

void pack_stored(Packer& out, Input& in) {
    const u32 shape = in.byte(), count = in.below(5), size = 1 + in.below(4);
    const bool has_extra_keys = (shape & 0x30) == 0x30;
    out.map(9 + has_extra_keys + (shape >> 6 & 1) + (shape >> 7 & 1));
    out.text("type");
    out.text("BlockStored");
    out.text("block_hashes");
    out.array(count);
    std::vector<u32> tokens;
    for (u32 i = 0; i < count; ++i) {
        const u32 choice = in.byte(), hash = choice % kHashes;
        out.number(hash + 1);
        append_block(tokens, hash, choice / kHashes % 2, size);
    }
    if (shape & 32 && !tokens.empty()) tokens.resize(tokens.size() - in.below(4) % tokens.size());
    out.text("parent_block_hash");
    const u32 parent = in.below(kHashes + 1);
    parent ? out.number(parent) : out.nil();
    out.text("token_ids");
    out.array(tokens.size());
    for (u32 token : tokens) out.number(token);
    out.text("block_size");
    out.number(size);
    out.text("medium");
    out.text(tier_of(in.byte()));
    out.text("group_idx");
    out.number(in.below(3));
    out.text("lora_name");
    const char* adapter = kAdapters[(shape >> 3) % 3];
    *adapter ? out.text(adapter) : out.nil();
    out.text("kv_cache_spec_kind");
    out.text(shape & 16 ? "sliding_window" : "full_attention");
    if (has_extra_keys) {
        out.text("extra_keys");
        out.array(count);
        for (u32 i = 0; i < count; ++i) {
            out.array(1);
            out.array(2);
            out.text("image");
            out.number(in.below(6));
        }
    }
    if (shape & 64) {
        out.text("cache_salt");
        out.text("s");
    }
    if (shape & 128) {
        out.text("lookahead_token_ids");
        out.array(count);
        for (u32 i = 0; i < count; ++i) {
            out.array(1);
            out.number(7);
        }
    }
}

void pack_removed(Packer& out, Input& in) {
    const u32 shape = in.byte(), count = in.below(5);
    out.map(4 + (shape >> 7));
    out.text("type");
    out.text("BlockRemoved");
    out.text("block_hashes");
    out.array(count);
    for (u32 i = 0; i < count; ++i) out.number(in.below(kHashes) + 1);
    out.text("medium");
    out.text(tier_of(in.byte()));
    out.text("group_idx");
    out.number(in.below(3));
    if (shape & 128) {
        out.text("remaining_copy_counts");
        out.array(count);
        for (u32 i = 0; i < count; ++i) out.number(in.below(3));
    }
}

std::vector<u8> pack_batch(Input& in) {
    Packer out;
    const u32 count = 1 + in.below(3);
    out.array(3);
    out.number(0);
    out.array(count);
    for (u32 i = 0; i < count; ++i) {
        const u32 type = in.below(8);
        if (type < 5) {
            pack_stored(out, in);
        } else if (type < 7) {
            pack_removed(out, in);
        } else {
            const bool of_tier = in.byte() & 1;
            out.map(1 + of_tier);
            out.text("type");
            out.text(of_tier ? "TierBlocksCleared" : "AllBlocksCleared");
            if (of_tier) {
                out.text("medium");
                out.text(tier_of(in.byte()));
            }
        }
    }
    out.nil();
    return std::move(out.bytes);
}

// --- programs ---

class Program {
public:
    explicit Program(Input& in)
        : in_(in), limits_(limits_of(in.byte())), index_(kSecrets, limits_), applier_(index_),
          matcher_(index_), audit_(index_, matcher_) {
        const u32 sources = in.byte() & 1 ? 3 : 67;
        for (u32 i = 0; i < sources; ++i) add_source();
    }

    void run() {
        for (int step = 0; step < 200 && !in_.is_empty(); ++step) {
            run_step(in_.below(20));
            audit_.expect_sound();
        }
    }

private:
    static Limits limits_of(u8 choice) {
        return choice & 1 ? roomy() : Limits{6, 3, 3, 24, 4, 3, 2};
    }

    void run_step(u32 choice) {
        const u32 slot = slot_of(in_.byte());
        if (choice < 9) {
            apply(slot, pack_batch(in_));
        } else if (choice < 12) {
            look_up();
        } else if (choice == 12) {
            index_.drop_source(slot);
            index_.work_off(in_.byte() / 8);  // the rest goes with the next, or stays for long
            add_source();
        } else if (choice == 13) {
            set_layout(slot, in_.byte());
        } else if (choice == 14) {
            keep(slot);
        } else if (choice == 15) {
            index_.source(slot).has_chain = in_.byte() & 1;
        } else if (choice == 16) {
            apply_many(slot);
        } else if (choice == 17) {
            store_twice_remove_once(slot);
        } else {
            const auto bytes = in_.take(in_.byte());
            apply(slot, {bytes.begin(), bytes.end()});
        }
    }

    u32 slot_of(u8 choice) const {
        static constexpr u32 kSlots[] = {0, 1, 2, 63, 64, 66};
        u32 slot = kSlots[choice % 6];
        // The slot of one that was dropped stays empty for a while.
        while (!index_.has_source(slot)) slot = (slot + 1) % 80;
        return slot;
    }

    void add_source() {
        const u32 slot = index_.add_source();
        set_layout(slot, static_cast<u8>(slot));
        index_.source(slot).tier_units.push_back({"CPU", 2, 0});
    }

    void set_layout(u32 slot, u8 choice) {
        if (choice % 7 == 6) {
            index_.unset_layout(slot, false, 0);
            return;
        }
        Layout layout;
        const u64 size = 1 + choice % 3;
        layout.hash_block_size = size;
        layout.groups.push_back({GroupKind::full, size, {}, {}});
        if (choice & 8) layout.groups.push_back({GroupKind::window, size * 2, 3 * size, {}});
        if (choice & 16) layout.groups.push_back({GroupKind::full, size, {}, {}});
        if (choice & 32) layout.groups.push_back({GroupKind::chunked, size, {}, 4 * size});
        if (choice & 64) layout.groups.push_back({GroupKind::mamba, size * 2, {}, {}});
        layout.scheduler_block_size = choice & (8 | 64) ? size * 2 : size;
        for (std::size_t i = 0; choice & 128 && i < layout.groups.size(); ++i) {
            layout.groups[i].eagle = choice % 3 || i % 2;
        }
        if (choice % 4 == 1) layout.prefix_replay_tokens = 2 * size;
        index_.set_layout(slot, std::move(layout), choice % 5 == 4, choice % 11 == 10);
    }

    void apply(u32 slot, std::vector<u8> payload) {
        const Exact exact(payload);
        Applied result;
        std::vector<News> news;
        if (applier_.apply(slot, exact.span(), result, news) == Applier::Outcome::news) {
            applier_.apply_reported(slot, exact.span(), false, {}, result);
        }
        EXPECT(result.overflow <= result.skipped);
    }

    // Enough for a second page of nodes and a second segment of a table.
    void apply_many(u32 slot) {
        const u32 first = 1000 + in_.below(4) * 500, count = 40 + in_.byte() * 20;
        Packer out;
        out.array(2);
        out.number(0);
        out.array(1);
        const bool is_removal = in_.byte() & 1;
        out.map(is_removal ? 3 : 6);
        out.text("type");
        out.text(is_removal ? "BlockRemoved" : "BlockStored");
        out.text("block_hashes");
        out.array(count);
        for (u32 i = 0; i < count; ++i) out.number(first + i);
        out.text("medium");
        out.text("GPU");
        if (!is_removal) {
            out.text("parent_block_hash");
            out.nil();
            out.text("token_ids");
            out.array(count);
            for (u32 i = 0; i < count; ++i) out.number(first + i);
            out.text("block_size");
            out.number(1);
        }
        apply(slot, std::move(out.bytes));
    }

    // What an engine does that announces only the removal of a block's last copy.
    void store_twice_remove_once(u32 slot) {
        const u32 hash = 1 + in_.below(kHashes), times = in_.below(12);
        for (u32 i = 0; i < times * 3; ++i) {
            Packer out;
            out.array(2);
            out.number(0);
            out.array(1);
            const bool is_removal = i % 3 == 2;
            out.array(is_removal ? 3 : 6);
            out.text(is_removal ? "BlockRemoved" : "BlockStored");
            out.array(2);
            out.number(hash);
            out.number(hash + 1);
            if (!is_removal) {
                out.nil();
                out.array(2);
                out.number(hash);
                out.number(hash + 1);
                out.number(1);
                out.nil();
            }
            out.nil();
            apply(slot, std::move(out.bytes));
        }
    }

    void look_up() {
        std::vector<u32> tokens;
        const u32 shape = in_.byte(), size = 1 + shape % 4;
        for (u32 count = in_.below(100); count && !in_.is_empty(); --count) {
            const u32 choice = in_.byte();
            append_block(tokens, choice % kHashes, choice / kHashes % 2, size);
        }
        tokens.push_back(1);
        std::optional<std::string> lora, salt;
        if (shape & 64) lora = kAdapters[shape / 4 % 3];
        if (shape & 128) salt = "s";
        Prompt prompt(std::make_shared<std::vector<u32>>(std::move(tokens)), lora, salt, {});
        for (const Prompt::Step step : matcher_.steps()) prompt.keys(index_.space(), step);
        audit_.expect_same_alone(prompt);
        if (shape & 32) look_up_by_hash(prompt);
    }

    void look_up_by_hash(Prompt& prompt) {
        Computed computed{slot_of(in_.byte()), static_cast<bool>(in_.byte() & 1), {{}, {}}};
        for (u32 count = in_.below(20); count; --count) {
            computed.hashes[count % 2].push_back(1 + in_.below(kHashes));
        }
        Hits hits;
        matcher_.match(prompt, {computed}, hits);
        for (const Hit& hit : hits.by_slot) EXPECT(hit.gpu <= hit.total);
        matcher_.group_hits(prompt, computed.slot, &computed);
    }

    // A source's state leads to a source that has the same state.
    void keep(u32 slot) {
        const std::vector<u8> before = written_state(index_, slot);
        Index copy(kSecrets, limits_);
        Matcher matcher(copy);
        const u32 into = copy.add_source();
        const Source& of = index_.source(slot);
        if (of.has_layout) copy.set_layout(into, of.layout, of.is_announced, of.lookahead);
        read_state(copy, into, before);
        IndexAudit(copy, matcher).expect_sound();
        EXPECT(written_state(copy, into).size() == before.size());
    }

    Input& in_;
    Limits limits_;
    Index index_;
    Applier applier_;
    Matcher matcher_;
    IndexAudit audit_;
};

// --- targets ---

void read_payload(Input in) {
    Index index(kSecrets, in.byte() & 1 ? roomy() : Limits{6, 3, 3, 24, 4, 3, 2});
    Applier applier(index);
    Matcher matcher(index);
    const u32 slot = index.add_source();
    const bool is_canonical = in.byte() & 1;
    const Exact payload(in.rest());
    Applied result;
    std::vector<News> news;
    if (is_canonical) {
        applier.apply_reported(slot, payload.span(), true, {0}, result);
    } else if (applier.apply(slot, payload.span(), result, news) == Applier::Outcome::news) {
        applier.apply_reported(slot, payload.span(), false, {}, result);
    }
    IndexAudit(index, matcher).expect_sound();
}

void read_json(Input in) {
    const Exact text(in.rest());
    std::vector<u32> numbers, again;
    if (!token_ids_of_json(text.span(), numbers)) return;
    std::string written = "[";
    for (u32 number : numbers) written += std::to_string(number) + ",";
    if (written.size() > 1) written.pop_back();
    written += "]";
    const std::span bytes{reinterpret_cast<const u8*>(written.data()), written.size()};
    EXPECT(token_ids_of_json(bytes, again) && again == numbers);
    EXPECT(written.size() <= text.span().size());
}

void read_state(Input in) {
    Index index(kSecrets, roomy());
    Applier applier(index);
    Matcher matcher(index);
    const u32 other = index.add_source(), slot = index.add_source();
    Applied result;
    const std::vector<u8> batch = pack_batch(in);
    applier.apply_reported(other, batch, false, {}, result);
    const Exact state(in.rest());
    try {
        read_state(index, slot, state.span());
    } catch (const StateError&) {
    }
    index.drop_source(slot);
    IndexAudit(index, matcher).expect_sound();
}

// --- a table by itself ---

struct Numbers {
    std::vector<u64> hashes;
    u64 hash_of(u32 id) const { return hashes[id]; }
    void prefetch(u32) const {}
};

// Numbers with hashes of which many agree where the table looks, beside a set that is surely right.
void use_table(Input in) {
    Numbers numbers;
    const bool is_crowded = in.byte() & 1;
    const u32 most = is_crowded ? 2'000 : 20'000;
    for (u32 id = 0; id < most; ++id) {
        const u64 hash = mixed(id, 42);
        numbers.hashes.push_back(is_crowded && id % 3 ? hash & ~u64{0xFFFF00} : hash);
    }
    IdTable<Numbers> table(numbers);
    std::set<u32> there;
    for (int step = 0; step < 64 && !in.is_empty(); ++step) {
        const u32 first = in.byte() * 79, count = in.byte() * (in.byte() & 1 ? 1 : 64);
        const bool is_insertion = in.byte() % 3;
        for (u32 id = first; id < std::min(first + count, most); ++id) {
            if (there.count(id) == is_insertion) continue;
            if (is_insertion) {
                table.insert(numbers.hashes[id], id);
                there.insert(id);
            } else {
                table.erase(numbers.hashes[id], id);
                there.erase(id);
            }
        }
        EXPECT(table.size() == there.size());
        for (u32 id = 0; id < most; id += 1 + in.byte() % 16) {
            const u32 found = table.find(numbers.hashes[id], [&](u32 each) { return each == id; });
            EXPECT((found == id) == (there.count(id) == 1));
        }
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const u8* data, std::size_t size) {
    Input in(data, size);
    switch (in.byte() % 5) {
    case 0: read_payload(in); break;
    case 1: read_json(in); break;
    case 2: read_state(in); break;
    case 3: Program(in).run(); break;
    default: use_table(in);
    }
    return 0;
}
