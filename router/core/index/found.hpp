// The blocks of a prompt that one source holds: a bitmap over its hash blocks for every plane.
#pragma once

#include <memory>
#include <vector>

#include "index/presence.hpp"
#include "index/source.hpp"

namespace kvroute {

// Where a block was found: by the usual hashes, by those that a lower tier has of its own, or in
// the store of that number.
enum Where : u32 { kUsual, kOfTier, kInStore };

class Found {
public:
    virtual Bitmap at(u32 plane, u32 where) const = 0;
    virtual u64 blocks() const = 0;  // that were looked at

protected:
    Found() = default;
    Found(const Found&) = default;
    Found& operator=(const Found&) = default;
    ~Found() = default;
};

// Bitmaps that are made of two others; they live until `clear`.
class CombinedBitmaps {
public:
    void clear() { made_.clear(); }
    // Returns the blocks in both of two, or in either, of so many blocks.
    Bitmap both(Bitmap left, Bitmap right, u64 blocks);
    Bitmap either(Bitmap left, Bitmap right, u64 blocks);

private:
    template <class Combine>
    Bitmap combined(Bitmap left, Bitmap right, u64 blocks, Combine&& combine);

    std::vector<std::unique_ptr<u64[]>> made_;
};

// True where nothing behind the first block that full attention lacks can count: no lower tier, no
// entries inside blocks, and an extra block of EAGLE that is the same in all groups.
bool may_end_early(const Source& of);

}  // namespace kvroute
