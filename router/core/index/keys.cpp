#include "index/keys.hpp"

namespace kvroute {

u64 KeySpace::digest(u8 kind, const u8* bytes, std::size_t size) const {
    u64 residue = folded(folded(2, kind), size);
    u32 numbers[kStride];
    while (size) {
        std::size_t count = 0;
        for (; count < kStride && size; ++count) {
            std::size_t taken = size < 4 ? size : 4;
            u32 number = 0;
            std::memcpy(&number, bytes, taken);
            numbers[count] = number;
            bytes += taken;
            size -= taken;
        }
        residue = extended(residue, {numbers, count}, count);
    }
    return residue;
}

u64 KeySpace::power(std::size_t exponent) const {
    u64 result = 1;
    for (u64 square = point_; exponent; exponent >>= 1, square = times(square, square)) {
        if (exponent & 1) result = times(result, square);
    }
    return result;
}

}  // namespace kvroute
