// For tests, by LD_PRELOAD: `operator new` that fails now and then in all threads but the first one,
// where Python runs, for as long as whoever runs the test wants it to. The file that FAILING_NEW names
// holds one number: of so many calls one fails; 0: none.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace {

const std::atomic<std::uint32_t>* one_of() {
    static const std::atomic<std::uint32_t>* const found = [] {
        const char* const path = std::getenv("FAILING_NEW");
        const int file = path == nullptr ? -1 : ::open(path, O_RDONLY | O_CLOEXEC);
        void* const mapped = mmap(nullptr, 4, PROT_READ, MAP_SHARED, file, 0);
        ::close(file);
        return mapped == MAP_FAILED ? nullptr : static_cast<std::atomic<std::uint32_t>*>(mapped);
    }();
    return found;
}

bool fails() {
    static const std::atomic<std::uint32_t>* const number = one_of();
    const std::uint32_t of = number == nullptr ? 0 : number->load(std::memory_order_relaxed);
    if (of == 0 || gettid() == getpid()) return false;
    thread_local std::uint32_t state = static_cast<std::uint32_t>(gettid()) | 1;
    state ^= state << 13;  // xorshift (Marsaglia 2003)
    state ^= state >> 17;
    state ^= state << 5;
    return state % of == 0;
}

void* taken_or_thrown(std::size_t size) {
    bool is_refused = fails();
    for (;;) {
        void* const memory = is_refused ? nullptr : std::malloc(size != 0 ? size : 1);
        if (memory != nullptr) return memory;
        const std::new_handler handler = std::get_new_handler();
        if (handler == nullptr) throw std::bad_alloc();
        handler();
        is_refused = false;
    }
}

void* taken(std::size_t size) noexcept {
    try {
        return taken_or_thrown(size);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

}  // namespace

void* operator new(std::size_t size) { return taken_or_thrown(size); }
void* operator new[](std::size_t size) { return taken_or_thrown(size); }
void* operator new(std::size_t size, const std::nothrow_t&) noexcept { return taken(size); }
void* operator new[](std::size_t size, const std::nothrow_t&) noexcept { return taken(size); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
