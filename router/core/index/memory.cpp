#include "index/memory.hpp"

#include <array>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <new>

namespace kvroute {
namespace {

// Beyond what malloc takes from its heaps, so that a piece which is freed is free for all of them. They
// are never written to: they cost address space, and no memory.
constexpr std::size_t kPiece = 1 << 20;
constexpr int kPieces = 16;

thread_local int depth = 0;

class KeptBack {
public:
    // False: nothing is left.
    bool give_up_one() {
        std::lock_guard locked(mutex_);
        if (count_ == 0) return false;
        std::free(pieces_[--count_]);
        is_whole_ = false;
        return true;
    }

    // True where at least half is there.
    bool is_enough() {
        if (is_whole_) return true;
        std::lock_guard locked(mutex_);
        while (count_ < kPieces) {
            void* const piece = std::malloc(kPiece);
            if (piece == nullptr) break;
            pieces_[count_++] = piece;
        }
        is_whole_ = count_ == kPieces;
        return count_ >= kPieces / 2;
    }

private:
    std::mutex mutex_;
    std::array<void*, kPieces> pieces_{};
    int count_ = 0;
    std::atomic<bool> is_whole_ = false;
};

KeptBack kept_back;
std::new_handler handler_before = nullptr;

void on_failure() {
    if (depth > 0 && kept_back.give_up_one()) return;
    if (handler_before == nullptr) throw std::bad_alloc();
    handler_before();
}

}  // namespace

void keep_back_memory() {
    kept_back.is_enough();
    handler_before = std::set_new_handler(on_failure);
}

void require_memory() {
    if (!kept_back.is_enough()) throw std::bad_alloc();
}

Unfailing::Unfailing() { ++depth; }
Unfailing::~Unfailing() { --depth; }

void* memory_of(std::size_t bytes) {
    for (;;) {
        void* const memory = std::malloc(bytes);
        if (memory != nullptr) return memory;
        const std::new_handler handler = std::get_new_handler();
        if (handler == nullptr) throw std::bad_alloc();
        handler();
    }
}

}  // namespace kvroute
