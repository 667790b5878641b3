#include "index/lane.hpp"

namespace kvroute {

namespace {

constexpr u32 kMostPlanes = 64;   // of a source that is matched together with others
constexpr u32 kMostWords = 2048;  // for one block
constexpr u64 kFirstPiece = 8;    // blocks: an unknown prompt ends after a short piece

// Transposes 64 words of 64 bits: bit j of word i becomes bit i of word j.
void transpose(u64* words) {
    u64 mask = 0x00000000FFFFFFFFu;
    for (u32 width = 32; width; width >>= 1, mask ^= mask << width) {
        for (u32 i = 0; i < 64; i = ((i | width) + 1) & ~width) {
            const u64 swapped = ((words[i] >> width) ^ words[i | width]) & mask;
            words[i] ^= swapped << width;
            words[i | width] ^= swapped;
        }
    }
}

}  // namespace

// --- who is in it ---

bool Lane::join(const Source& of) {
    std::vector<u32> fresh;
    u32 count = 0;
    for (u32 plane = 0; plane < of.counts.size(); ++plane) {
        if (!of.counts[plane] || group_of_plane(plane) >= of.layout.groups.size()) continue;
        ++count;
        if (place_of(0, plane) == kNone) fresh.push_back(plane);
    }
    const std::size_t wanted = width_ + fresh.size() * words_;
    if (count > kMostPlanes || (!fresh.empty() && wanted > kMostWords)) return false;
    for (u32 plane : fresh) {
        if (plane >= dense_.size()) dense_.resize(plane + 1, kNone);
        dense_[plane] = width_ / words_;
        width_ += words_;
    }
    if (Cohort::takes(of)) {
        add_to_cohort(of);
    } else {
        slots_.push_back(of.slot);
    }
    return true;
}

void Lane::add_to_cohort(const Source& of) {
    for (Cohort& cohort : cohorts_) {
        if (cohort.layout() == of.layout) return cohort.add(of);
    }
    cohorts_.emplace_back(of.layout, words_).add(of);
}

void Lane::settle(const Index& index) {
    for (Cohort& cohort : cohorts_) {
        cohort.settle([&](u32 plane) { return place_of(0, plane); });
    }
    turned_.assign(slots_.empty() ? 0 : width_, kNone);
    all_.assign(words_, 0);
    for (u32 slot : slots_) add_turned(*index.sources()[slot]);
}

void Lane::add_turned(const Source& of) {
    all_[of.word] |= of.bit;
    for (u32 plane = 0; plane < of.counts.size(); ++plane) {
        const u32 place = of.counts[plane] ? place_of(of.word, plane) : kNone;
        if (place == kNone || turned_[place] != kNone) continue;
        turned_[place] = static_cast<u32>(turned_places_.size());
        turned_places_.push_back(place);
    }
    if (!may_end_early(of)) {
        may_end_early_ = false;
        return;
    }
    for (u32 group : of.layout.full) {
        const u64 stride = of.layout.groups[group].block_size / step_.tokens;
        add_needed(place_of(of.word, plane_of(group, 0)), stride, of);
    }
}

void Lane::add_needed(u32 place, u64 stride, const Source& of) {
    for (Needed& each : needed_) {
        if (each.word == of.word && each.place == place && each.stride == stride) {
            each.sources |= of.bit;
            return;
        }
    }
    needed_.push_back({of.word, place, stride, of.bit});
}

// --- one prompt ---

void Lane::match(const Index& index, std::span<const u64> keys, u64 length, Collected& out,
                 std::vector<Hit>& hits) {
    out.chunks = (keys.size() + 63) / 64;
    for (Cohort& cohort : cohorts_) cohort.start(length, keys.size());
    out.rows.resize(std::size_t{width_} * 64);
    out.bits.resize(turned_places_.size() * out.chunks * 64);
    out.alive = all_;
    bool is_over = slots_.empty();
    u64 first = 0;
    for (u64 piece = kFirstPiece; first < keys.size(); piece = 64 - first % 64) {
        const u64 end = std::min<u64>(first + piece, keys.size());
        collect(index, keys, first, end, out);
        bool has_any = false;
        for (Cohort& cohort : cohorts_) {
            cohort.follow(first, end, out.rows.data(), width_, hits);
            has_any |= !cohort.is_over();
        }
        is_over = is_over || (may_end_early_ && is_over_at(first, end, out));
        const bool is_last = (!has_any && is_over) || end == keys.size();
        if (end % 64 == 0 || is_last) turn(first / 64, end, out);
        first = end;
        if (is_last) break;
    }
    for (Cohort& cohort : cohorts_) cohort.finish(hits);
    out.blocks = first;
}

// Collects the rows of the blocks [first, end), of one chunk of 64.
void Lane::collect(const Index& index, std::span<const u64> keys, u64 first, u64 end,
                   Collected& out) const {
    const NodeTables& nodes = index.nodes();
    const u64 count = end - first;
    u64 hashes[64];
    u32 ids[64];
    auto key_at = [&](u64 i) { return Prompt::key_at(keys, step_, first + i); };
    for (u64 i = 0; i < count; ++i) {
        hashes[i] = NodeTables::hash_of_key(key_at(i));
        nodes.prefetch_key(hashes[i]);
    }
    for (u64 i = 0; i < count; ++i) ids[i] = nodes.guess_with(hashes[i]);
    u64* row = out.rows.data() + first % 64 * width_;
    std::fill(row, row + count * width_, 0);
    for (u64 i = 0; i < count; ++i) {
        if (ids[i] == kNone) continue;
        if (!nodes[ids[i]].has_key(key_at(i))) ids[i] = nodes.first_with(key_at(i));
        if (ids[i] != kNone) nodes[ids[i]].prefetch_rows();
    }
    for (u64 i = 0; i < count; ++i, row += width_) {
        for (u32 id = ids[i]; id != kNone; id = nodes[id].next_key) add_rows(nodes[id], row);
    }
}

void Lane::add_rows(const Node& node, u64* out) const {
    const u32* rows = node.row_keys();
    const u64* bits = node.row_bits();
    // From the end: the sources that find another node by its key come last in a word.
    u32 word = kNone;
    u64 not_found = 0;
    for (u32 i = node.row_count(); i-- > 0;) {
        if (word_of_row(rows[i]) != word) not_found = 0;
        word = word_of_row(rows[i]);
        if (plane_of_row(rows[i]) == kNotFound) not_found = bits[i];
        const u32 place = place_of(word, plane_of_row(rows[i]));
        if (place != kNone) out[place] |= bits[i] & ~not_found;
    }
}

// True where behind one of the blocks [first, end) no source outside cohorts is left.
bool Lane::is_over_at(u64 first, u64 end, Collected& out) const {
    for (u64 i = first; i < end; ++i) {
        const u64* row = out.rows.data() + i % 64 * width_;
        for (const Needed& needed : needed_) {
            if (needed.stride != 1 && (i + 1) % needed.stride) continue;
            const u64 found = needed.place == kNone ? 0 : row[needed.place];
            out.alive[needed.word] &= found | ~needed.sources;
        }
    }
    u64 any = 0;
    for (u64 word : out.alive) any |= word;
    return !any;
}

// Transposes the words of a chunk, as far as it was collected.
void Lane::turn(u64 chunk, u64 end, Collected& out) const {
    const u64 count = end - chunk * 64;
    for (std::size_t number = 0; number < turned_places_.size(); ++number) {
        u64* turned = out.bits.data() + (number * out.chunks + chunk) * 64;
        for (u64 i = 0; i < 64; ++i) {
            turned[i] = i < count ? out.rows[i * width_ + turned_places_[number]] : 0;
        }
        transpose(turned);
    }
}

Bitmap Lane::Turned::at(u32 plane, u32 where) const {
    const u32 place = where != kUsual ? kNone : lane_.place_of(of_.word, plane);
    if (place == kNone || !of_.count(plane)) return {};
    const std::size_t number = lane_.turned_[place];
    const u64* words = collected_.bits.data() + number * collected_.chunks * 64 + of_.slot % 64;
    return {words, 64, collected_.blocks};
}

}  // namespace kvroute
