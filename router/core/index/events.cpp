#include "index/events.hpp"

#include <algorithm>

namespace kvroute {

void Batch::clear() {
    events.clear();
    hashes.clear();
    is_int.clear();
    tokens.clear();
    tails.clear();
    counts.clear();
}

void Batch::shrink() {
    constexpr std::size_t kKept = std::size_t{1} << 18;
    if (tokens.capacity() > kKept) tokens = {};
    if (hashes.capacity() > kKept) hashes = {};
    if (is_int.capacity() > kKept) is_int = {};
    if (events.capacity() > kKept / 16) events = {};
    if (tails.capacity() > kKept) tails = {};
    if (counts.capacity() > kKept) counts = {};
}

u64 hash_number(const KeySpace& space, const msgpack::Head& head, const u8* bytes) {
    constexpr u64 kDigestBytes = 32;
    if (head.kind == msgpack::Kind::unsigned_int) return head.value;
    const u8 kind = static_cast<u8>(head.kind);
    if (head.kind == msgpack::Kind::binary) {
        // Up to vLLM 0.23 a block of several hash blocks is named by all their digests, one after
        // the other; the last is the hash that everything else has for the same end.
        const u64 cut = head.value > kDigestBytes ? head.value - kDigestBytes : 0;
        return space.digest(kind, bytes + cut, head.value - cut);
    }
    return space.folded(space.folded(3, kind), head.value);
}

namespace {

class BatchReader {
public:
    BatchReader(const KeySpace& space, std::span<const u8> payload, bool is_canonical, Batch& out)
        : space_(space), reader_(payload.data(), payload.size()), is_canonical_(is_canonical),
          batch_(out) {}

    bool read() {
        batch_.clear();
        u32 parts, events;
        if (!reader_.array(parts) || parts < 2 || !skip_number() || !reader_.array(events)) {
            return false;
        }
        bool is_first_map = false;
        for (u32 i = 0; i < events; ++i) {
            msgpack::Head head;
            if (!reader_.head(head)) return false;
            const bool is_map = head.kind == msgpack::Kind::map;
            if (!is_map && head.kind != msgpack::Kind::array) return false;
            if (i == 0) is_first_map = is_map;
            if (is_map != is_first_map || head.value == 0) return false;
            if (!(is_map ? read_map(head.value) : read_array(head.value))) return false;
        }
        if (parts > 2 && !reader_.skip_nil() && !skip_integer()) return false;
        for (u32 i = 3; i < parts; ++i) {
            if (!reader_.skip()) return false;
        }
        return reader_.is_at_end();
    }

private:
    static constexpr u64 kMaxName = 256;
    static constexpr u64 kMaxSize = u64{1} << 31;
    static constexpr u64 kMaxGroup = 255;

    enum class Field : u8 {
        hashes, parent, tokens, medium, group, lora, extra_keys, kind, window, block_size, lora_id,
        lookahead, salt, counts, locality, ownership, unknown
    };

    bool skip_number() {
        msgpack::Head head;
        return reader_.head(head) && (head.kind == msgpack::Kind::real || is_integer(head));
    }
    bool skip_integer() {
        msgpack::Head head;
        return reader_.head(head) && is_integer(head);
    }
    static bool is_integer(const msgpack::Head& head) {
        return head.kind == msgpack::Kind::unsigned_int || head.kind == msgpack::Kind::negative_int;
    }

    // --- one event ---

    bool read_map(u64 pairs) {
        std::string_view name, type;
        if (!reader_.text(name) || name != "type" || !reader_.text(type)) return false;
        Event& event = batch_.events.emplace_back();
        bool is_tier_clear;
        if (!type_named(type, event, is_tier_clear)) return false;
        u32 seen = 0;
        for (u64 i = 1; i < pairs; ++i) {
            // Mooncake's events name vLLM's types as well; Python reads them.
            if (!reader_.text(name) || name == "type" || name == "event_type") return false;
            const Field field = field_named(name, event.type);
            if (field == Field::unknown) {
                if (!reader_.skip()) return false;
                continue;
            }
            const u32 flag = 1u << static_cast<u32>(field);
            if (seen & flag || !read_field(field, event)) return false;
            seen |= flag;
        }
        return (seen & required_of(event.type, is_tier_clear)) ==
                   required_of(event.type, is_tier_clear) &&
               finish(event, is_tier_clear);
    }

    bool read_array(u64 items) {
        static constexpr Field kStored[] = {
            Field::hashes, Field::parent, Field::tokens, Field::block_size, Field::lora_id,
            Field::medium, Field::lora, Field::extra_keys, Field::group, Field::kind, Field::window};
        static constexpr Field kRemoved[] = {Field::hashes, Field::medium, Field::group};
        static constexpr Field kTierCleared[] = {Field::medium};
        std::string_view type;
        Event& event = batch_.events.emplace_back();
        bool is_tier_clear;
        if (!reader_.text(type) || !type_named(type, event, is_tier_clear)) return false;
        std::span<const Field> fields;
        u64 required = 0;
        if (event.type == EventType::stored) {
            fields = kStored;
            required = 3;
        } else if (event.type == EventType::removed) {
            fields = kRemoved;
            required = 1;
        } else if (is_tier_clear) {
            fields = kTierCleared;
            required = 1;
        }
        if (items - 1 < required) return false;
        for (u64 i = 0; i + 1 < items; ++i) {
            if (!(i < fields.size() ? read_field(fields[i], event) : reader_.skip())) return false;
        }
        return finish(event, is_tier_clear);
    }

    // True where a name of the length of `text` is that text.
    template <std::size_t kSize>
    static bool is(std::string_view name, const char (&text)[kSize]) {
        return std::memcmp(name.data(), text, kSize - 1) == 0;
    }

    static bool type_named(std::string_view name, Event& event, bool& is_tier_clear) {
        is_tier_clear = name.size() == 17 && is(name, "TierBlocksCleared");
        if (name.size() == 11 && is(name, "BlockStored")) {
            event.type = EventType::stored;
        } else if (name.size() == 12 && is(name, "BlockRemoved")) {
            event.type = EventType::removed;
        } else if (is_tier_clear || (name.size() == 16 && is(name, "AllBlocksCleared"))) {
            event.type = EventType::cleared;
        } else {
            return false;
        }
        return true;
    }

    static u32 required_of(EventType type, bool is_tier_clear) {
        constexpr u32 kHashes = 1u << static_cast<u32>(Field::hashes);
        constexpr u32 kParent = 1u << static_cast<u32>(Field::parent);
        constexpr u32 kTokens = 1u << static_cast<u32>(Field::tokens);
        constexpr u32 kMedium = 1u << static_cast<u32>(Field::medium);
        if (type == EventType::stored) return kHashes | kParent | kTokens | kMedium;
        if (type == EventType::removed) return kHashes | kMedium;
        return is_tier_clear ? kMedium : 0;
    }

    static constexpr u32 set_of(std::initializer_list<Field> fields) {
        u32 flags = 0;
        for (Field field : fields) flags |= 1u << static_cast<u32>(field);
        return flags;
    }

    static Field field_named(std::string_view name, EventType type) {
        constexpr u32 kOfRemoved = set_of({Field::hashes, Field::medium, Field::group,
                                           Field::locality, Field::ownership, Field::counts});
        constexpr u32 kOfStored = ~set_of({Field::counts});
        const Field field = field_named(name);
        const u32 fields = type == EventType::stored    ? kOfStored
                           : type == EventType::removed ? kOfRemoved
                                                        : set_of({Field::medium});
        return fields >> static_cast<u32>(field) & 1 ? field : Field::unknown;
    }

    static Field field_named(std::string_view name) {
        switch (name.size()) {
        case 6: return is(name, "medium") ? Field::medium : Field::unknown;
        case 7: return is(name, "lora_id") ? Field::lora_id : Field::unknown;
        case 8: return is(name, "locality") ? Field::locality : Field::unknown;
        case 9:
            return is(name, "token_ids")   ? Field::tokens
                   : is(name, "group_idx") ? Field::group
                   : is(name, "lora_name") ? Field::lora
                   : is(name, "ownership") ? Field::ownership
                                           : Field::unknown;
        case 10:
            return is(name, "block_size")   ? Field::block_size
                   : is(name, "extra_keys") ? Field::extra_keys
                   : is(name, "cache_salt") ? Field::salt
                                            : Field::unknown;
        case 12: return is(name, "block_hashes") ? Field::hashes : Field::unknown;
        case 17: return is(name, "parent_block_hash") ? Field::parent : Field::unknown;
        case 18: return is(name, "kv_cache_spec_kind") ? Field::kind : Field::unknown;
        case 19: return is(name, "lookahead_token_ids") ? Field::lookahead : Field::unknown;
        case 21: return is(name, "remaining_copy_counts") ? Field::counts : Field::unknown;
        case 28: return is(name, "kv_cache_spec_sliding_window") ? Field::window : Field::unknown;
        default: return Field::unknown;
        }
    }

    bool read_field(Field field, Event& event) {
        std::optional<std::string_view> name;
        u64 number = 0;
        switch (field) {
        case Field::hashes: return read_hashes(event);
        case Field::parent: return reader_.skip_nil() || read_parent(event);
        case Field::tokens:
            event.first_token = static_cast<u32>(batch_.tokens.size());
            return reader_.numbers(batch_.tokens, event.tokens);
        case Field::medium:
            if (!read_name(name, /*is_tier=*/true)) return false;
            event.tier = name.value_or(std::string_view());
            return true;
        case Field::group:
            if (!read_number(number, kMaxGroup)) return false;
            event.group = static_cast<u32>(number);
            return true;
        case Field::lora: return read_name(event.lora);
        case Field::extra_keys: return reader_.skip_nil() || read_extra_keys(event);
        case Field::kind:
            if (!read_name(name)) return false;
            event.kind = name.value_or(std::string_view());
            return true;
        case Field::window:
            if (!read_number(number, kMaxSize)) return false;
            event.window = static_cast<u32>(number);
            return true;
        case Field::block_size:
            if (!read_number(number, kMaxSize)) return false;
            event.block_size = static_cast<u32>(number);
            return true;
        case Field::lora_id: return reader_.skip_nil() || read_lora_id(event);
        case Field::lookahead: return reader_.skip_nil() || read_lookahead(event);
        case Field::salt: return read_name(event.salt, false, ~u64{0});
        case Field::counts: return reader_.skip_nil() || read_counts(event);
        case Field::locality:
            if (!read_name(name)) return false;
            event.has_locality = name.has_value();
            event.is_remote = is_same(name.value_or(""), "remote");
            event.is_local = is_same(name.value_or(""), "local");
            return true;
        case Field::ownership: return read_name(event.ownership);
        case Field::unknown: break;
        }
        return false;
    }

    bool finish(Event& event, bool is_tier_clear) {
        if (event.has_counts && batch_.counts.size() - event.first_count != event.hashes) {
            return false;
        }
        if (is_tier_clear && event.tier.data() == nullptr) return false;  // nil names no tier
        if (!event.lora.value_or("").empty()) event.lora_id.reset();
        event.is_on_gpu = event.tier.empty() ? !is_tier_clear : is_same(event.tier, "gpu");
        event.has_root_sample &= event.type == EventType::stored && event.is_on_gpu &&
                                 !event.parent && event.hashes && !event.has_adapter();
        return true;
    }

    // True where a name is `lower`, in any case.
    static bool is_same(std::string_view name, std::string_view lower) {
        return name.size() == lower.size() &&
               std::equal(name.begin(), name.end(), lower.begin(), [](char left, char right) {
                   return (left >= 'A' && left <= 'Z' ? left + 32 : left) == right;
               });
    }

    // --- fields ---

    // Reads nil or a number in range; nil leaves 0.
    bool read_number(u64& out, u64 most) { return reader_.skip_nil() || reader_.number(out, most); }

    bool read_name(std::optional<std::string_view>& out, bool is_tier = false,
                   u64 most = kMaxName) {
        if (reader_.skip_nil()) return true;
        std::string_view text;
        if (!reader_.text(text)) return false;
        if (!is_canonical_ && !(is_tier ? is_ascii(text) : is_utf8(text))) return false;
        // As many bytes are at least as many characters.
        if (!is_canonical_ && text.size() > most) return false;
        out = text;
        return true;
    }

    bool read_lora_id(Event& event) {
        msgpack::Head head;
        if (!reader_.head(head) || !is_integer(head)) return false;
        if (head.kind == msgpack::Kind::unsigned_int && head.value) event.lora_id = head.value;
        return true;
    }

    bool read_hash(u64& out, u8& is_int) {
        is_int = true;
        if (reader_.long_number(out)) return true;
        msgpack::Head head;
        if (!reader_.head(head)) return false;
        if (!is_integer(head) && head.kind != msgpack::Kind::binary) return false;
        out = hash_number(space_, head, reader_.position());
        is_int = head.kind != msgpack::Kind::binary;
        if (!is_int) reader_.advance(head.value);
        return true;
    }

    bool read_hashes(Event& event) {
        u32 count;
        if (!reader_.array(count)) return false;
        event.first_hash = static_cast<u32>(batch_.hashes.size());
        event.hashes = count;
        event.has_root_sample = true;
        batch_.hashes.resize(event.first_hash + count);
        batch_.is_int.resize(event.first_hash + count);
        for (u32 i = event.first_hash; i < event.first_hash + count; ++i) {
            if (!read_hash(batch_.hashes[i], batch_.is_int[i])) return false;
        }
        return true;
    }

    bool read_parent(Event& event) {
        u64 hash;
        u8 is_int;
        if (!read_hash(hash, is_int)) return false;
        event.parent = hash;
        return true;
    }

    bool read_counts(Event& event) {
        u32 count;
        event.first_count = static_cast<u32>(batch_.counts.size());
        event.has_counts = true;
        if (!reader_.numbers(batch_.counts, count)) return false;
        for (std::size_t i = event.first_count; i < batch_.counts.size(); ++i) {
            if (batch_.counts[i] > kMaxSize) return false;
        }
        return true;
    }

    bool read_lookahead(Event& event) {
        u32 lists;
        if (!reader_.array(lists)) return false;
        event.has_lookahead = lists > 0;
        event.first_tail = static_cast<u32>(batch_.tails.size());
        for (u32 i = 0; i < lists; ++i) {
            batch_.tails.resize(event.first_tail);
            if (!reader_.numbers(batch_.tails, event.tail)) return false;
            event.lookahead = std::max(event.lookahead, event.tail);
        }
        return true;
    }

    bool read_extra_keys(Event& event) {
        const u8* start = reader_.position();
        u32 entries;
        if (!reader_.array(entries)) return false;
        for (u32 i = 0; i < entries; ++i) {
            if (reader_.skip_nil()) continue;
            event.has_marks = true;
            msgpack::Reader ahead = reader_;
            u32 items = 0;
            if (ahead.array(items) && items) event.has_root_sample = false;
            if (!(is_canonical_ ? reader_.skip() : skip_plain(0))) return false;
        }
        event.extra_keys = {start, static_cast<std::size_t>(reader_.position() - start)};
        return true;
    }

    // Steps over a value of the kinds that extra keys are made of.
    bool skip_plain(int depth) {
        msgpack::Head head;
        if (depth > 4 || !reader_.head(head)) return false;
        switch (head.kind) {
        case msgpack::Kind::nil:
        case msgpack::Kind::boolean:
        case msgpack::Kind::unsigned_int:
        case msgpack::Kind::negative_int: return true;
        case msgpack::Kind::binary: reader_.advance(head.value); return true;
        case msgpack::Kind::text: {
            const std::string_view text(reinterpret_cast<const char*>(reader_.position()),
                                        head.value);
            reader_.advance(head.value);
            return is_utf8(text);
        }
        case msgpack::Kind::array:
            for (u64 i = 0; i < head.value; ++i) {
                if (!skip_plain(depth + 1)) return false;
            }
            return true;
        default: return false;
        }
    }

    static bool is_ascii(std::string_view text) {
        u8 all = 0;
        for (char c : text) all |= static_cast<u8>(c);
        return all < 0x80;
    }

    static bool is_utf8(std::string_view text) {
        if (is_ascii(text)) return true;
        for (std::size_t i = 0; i < text.size();) {
            const u8 first = static_cast<u8>(text[i]);
            const std::size_t more = first < 0x80   ? 0
                                     : first < 0xC2 ? 4
                                     : first < 0xE0 ? 1
                                     : first < 0xF0 ? 2
                                     : first < 0xF5 ? 3
                                                    : 4;
            if (more == 4 || i + more >= text.size()) return false;
            u32 code = more ? first & (0x3F >> more) : first;
            for (std::size_t j = 1; j <= more; ++j) {
                const u8 byte = static_cast<u8>(text[i + j]);
                if ((byte & 0xC0) != 0x80) return false;
                code = code << 6 | (byte & 0x3F);
            }
            if (more == 2 && (code < 0x800 || (code >= 0xD800 && code < 0xE000))) return false;
            if (more == 3 && (code < 0x10000 || code > 0x10FFFF)) return false;
            i += more + 1;
        }
        return true;
    }

    const KeySpace& space_;
    msgpack::Reader reader_;
    bool is_canonical_;
    Batch& batch_;
};

}  // namespace

bool read_batch(const KeySpace& space, std::span<const u8> payload, bool is_canonical, Batch& out) {
    return BatchReader(space, payload, is_canonical, out).read();
}

}  // namespace kvroute
