// Counts everything anew, and reports where an index contradicts itself. For tests: it costs a walk
// over all nodes for every source.
#pragma once

#include <string>
#include <tuple>
#include <vector>

#include "index/index.hpp"

namespace kvroute {

class Inspector {
public:
    explicit Inspector(Index& index) : index_(index) {}

    std::vector<std::string> contradictions();
    std::vector<std::tuple<u32, std::string, u64, u64>> copies(const Source& of);

private:
    void expect(bool holds, const std::string& what);
    void inspect_nodes();
    bool is_in_list(u32 first, u32 id, u32 Node::* next);
    void inspect_rows(const std::string& name, const Node& node);
    bool is_found_by_any(const Node& node);
    void inspect(const Source& of);

    Index& index_;
    std::vector<std::string> found_;
};

}  // namespace kvroute
