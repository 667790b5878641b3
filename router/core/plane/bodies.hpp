// How much the bodies hold, all together, of requests that Python has not been told of.
#pragma once

#include <atomic>
#include <optional>
#include <utility>

#include "plane/types.hpp"

namespace kvroute::plane {

class Bodies {
public:
    // What one request holds, for as long as this lives.
    class Share {
    public:
        Share() = default;
        Share(Bodies& of, u64 size) : of_(&of), size_(size) {}
        Share(Share&& other) noexcept
            : of_(std::exchange(other.of_, nullptr)), size_(other.size_) {}
        Share& operator=(Share&& other) noexcept {
            std::swap(of_, other.of_);
            std::swap(size_, other.size_);
            return *this;
        }
        ~Share() {
            if (of_ != nullptr) of_->held_.fetch_sub(size_, std::memory_order_relaxed);
        }

    private:
        Bodies* of_ = nullptr;
        u64 size_ = 0;
    };

    // `most`: in bytes.
    explicit Bodies(u64 most) : most_(most) {}

    // Nothing: there is no room. From any thread.
    std::optional<Share> take(u64 size) {
        const u64 before = held_.fetch_add(size, std::memory_order_relaxed);
        Share share(*this, size);
        if (before + size > most_) return std::nullopt;
        return share;
    }
    u64 held() const { return held_.load(std::memory_order_relaxed); }

private:
    u64 most_;
    std::atomic<u64> held_{0};
};

}  // namespace kvroute::plane
