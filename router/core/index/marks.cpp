#include "index/marks.hpp"

#include <algorithm>

#include "index/msgpack.hpp"

namespace kvroute {

namespace {

// Computes a digest of one value of any form; false where the bytes are no msgpack.
bool digest_value(msgpack::Reader& reader, const KeySpace& space, u64& out, int depth = 0) {
    msgpack::Head head;
    if (depth > msgpack::Reader::kDeepest || !reader.head(head)) return false;
    const u8 kind = static_cast<u8>(head.kind);
    switch (head.kind) {
    case msgpack::Kind::text:
    case msgpack::Kind::binary:
    case msgpack::Kind::extension:
        out = space.digest(kind, reader.position(), head.value);
        reader.advance(head.value);
        return true;
    case msgpack::Kind::array:
    case msgpack::Kind::map: {
        u64 residue = space.folded(space.folded(3, kind), head.value);
        const u64 items = head.kind == msgpack::Kind::map ? head.value * 2 : head.value;
        for (u64 i = 0; i < items; ++i) {
            u64 item;
            if (!digest_value(reader, space, item, depth + 1)) return false;
            residue = space.folded(residue, item);
        }
        out = residue;
        return true;
    }
    default:
        out = space.folded(space.folded(3, kind), head.value);
        return true;
    }
}

u64 digest_text(const KeySpace& space, std::string_view text) {
    return space.digest(static_cast<u8>(msgpack::Kind::text),
                        reinterpret_cast<const u8*>(text.data()), text.size());
}

// Reads the offset of a multimodal item from the start of the block, and the item's id: from
// `[id, offset]`; of any other list the first item, of anything else the value itself, at 0.
bool read_item(msgpack::Reader& reader, const KeySpace& space, bool& is_inside, u64 reach,
               u64& offset, u64& digest) {
    msgpack::Reader ahead = reader;
    msgpack::Head head;
    offset = 0;
    is_inside = true;
    if (!ahead.head(head)) return false;
    if (head.kind != msgpack::Kind::array || head.value == 0) {
        return digest_value(reader, space, digest);
    }
    const u64 count = head.value;
    reader = ahead;
    if (!digest_value(reader, space, digest)) return false;
    for (u64 i = 1; i < count; ++i) {
        ahead = reader;
        if (!reader.skip() || !ahead.head(head)) return false;
        if (count != 2) continue;
        if (head.kind == msgpack::Kind::unsigned_int || head.kind == msgpack::Kind::boolean) {
            offset = head.value;
            is_inside = offset < reach;
        }
        if (head.kind == msgpack::Kind::negative_int) is_inside = false;
    }
    return true;
}

bool is_text(msgpack::Reader reader, std::string_view wanted) {
    std::string_view found;
    return reader.text(found) && found == wanted;
}

}  // namespace

Key root_key(const KeySpace& space, std::string_view lora_name) {
    return space.root(digest_text(space, lora_name));
}

bool read_marks(std::span<const u8> extra_keys, const KeySpace& space, const MarkRules& rules,
                std::vector<Mark>& out) {
    const std::size_t before = out.size();
    if (rules.salt && !rules.salt->empty()) out.push_back({0, digest_text(space, *rules.salt)});
    if (!extra_keys.empty()) {
        msgpack::Reader reader(extra_keys.data(), extra_keys.size());
        u32 entries;
        if (!reader.array(entries)) return false;
        for (u64 index = 0; index < entries; ++index) {
            msgpack::Reader ahead = reader;
            u32 items;
            if (!ahead.array(items)) {  // anything but a list holds no keys
                if (!reader.skip()) return false;
                continue;
            }
            reader = ahead;
            u32 item = 0;
            if (items && rules.lora && is_text(reader, *rules.lora)) {
                if (!reader.skip()) return false;
                item = 1;
            }
            for (; item < items; ++item) {
                bool is_inside;
                u64 offset, digest;
                const u64 reach = rules.block_size + rules.lookahead;
                if (!read_item(reader, space, is_inside, reach, offset, digest)) return false;
                if (is_inside && offset < reach) {
                    out.push_back({index * rules.block_size + offset, digest});
                }
            }
        }
    }
    std::sort(out.begin() + before, out.end());
    out.erase(std::unique(out.begin() + before, out.end()), out.end());
    return true;
}

}  // namespace kvroute
