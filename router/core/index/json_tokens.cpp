#include "index/json_tokens.hpp"

namespace kvroute {

bool token_ids_of_json(std::span<const u8> text, std::vector<u32>& numbers) {
    const u8* at = text.data();
    const u8* const end = at + text.size();
    const auto skip_space = [&] {
        while (at < end && (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t')) ++at;
    };
    numbers.clear();
    skip_space();
    if (at == end || *at++ != '[') return false;
    numbers.reserve(text.size() / 4);
    skip_space();
    if (at < end && *at == ']') {
        ++at;
        skip_space();
        return at == end;
    }
    for (;;) {
        skip_space();
        const u8* const first = at;
        u64 value = 0;
        while (at < end && at - first < 11 && static_cast<u8>(*at - '0') < 10) {
            value = value * 10 + (*at++ - '0');
        }
        const bool has_leading_zero = at - first > 1 && *first == '0';
        if (at == first || value > 0xFFFFFFFF || has_leading_zero) return false;
        numbers.push_back(static_cast<u32>(value));
        skip_space();
        if (at == end) return false;
        const u8 next = *at++;
        if (next == ',') continue;
        if (next != ']') return false;
        skip_space();
        return at == end;
    }
}

}  // namespace kvroute
