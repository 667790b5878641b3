// Bounds the bytes of bodies that are held, all together, Python's included. From any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <utility>

namespace kvroute::plane {

class Budget {
public:
    // One holder's share, for as long as this lives.
    class Share {
    public:
        Share() = default;
        Share(Budget& of, std::uint64_t size) : of_(&of), size_(size) {}
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
        bool is_empty() const { return of_ == nullptr || size_ == 0; }
        // False, and nothing is changed: there is no room for so much more.
        bool grow(std::uint64_t size) {
            std::optional<Share> more = of_->take(size);
            if (!more) return false;
            more->of_ = nullptr;  // it counts as a part of this one
            size_ += size;
            return true;
        }

    private:
        Budget* of_ = nullptr;
        std::uint64_t size_ = 0;
    };

    explicit Budget(std::uint64_t most) : most_(most) {}

    // Nothing: there is no room.
    std::optional<Share> take(std::uint64_t size) {
        const std::uint64_t before = held_.fetch_add(size);
        Share share(*this, size);
        if (before + size + elsewhere_.load() > most_) return std::nullopt;
        return share;
    }
    // What Python holds from now on. It counts here first and reads `held` then, as `take` does the
    // other way round: of two that come together for the last room, one at least sees the other.
    void hold_elsewhere(std::uint64_t size) { elsewhere_.store(size); }
    std::uint64_t held() const { return held_.load(); }

private:
    std::uint64_t most_;
    std::atomic<std::uint64_t> held_{0};
    std::atomic<std::uint64_t> elsewhere_{0};
};

}  // namespace kvroute::plane
