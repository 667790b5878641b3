#include "index/layout.hpp"

namespace kvroute {

void Layout::find_equal_groups() {
    u32 caching = 0;
    for (u32 index = 0; index < groups.size(); ++index) {
        if (groups[index].kind == GroupKind::not_cached) continue;
        ++caching;
        auto same = std::find_if(together.begin(), together.end(), [&](const auto& members) {
            return groups[members[0]] == groups[index];
        });
        if (same != together.end()) {
            same->push_back(index);
            continue;
        }
        together.push_back({index});
        (groups[index].kind == GroupKind::full ? full : others).push_back(index);
    }
    has_several = caching > 1;
}

}  // namespace kvroute
