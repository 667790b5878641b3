// One model's index as every thread of the process shares it: one mutex, so that a match never sees
// half a batch. A thread holds the mutex for microseconds; large work is done in slices.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "index/apply.hpp"
#include "index/match.hpp"

namespace kvroute {

// Names a source for as long as its index lives, also before it is added and after it was dropped:
// one that comes again is the same. Its slot changes when a large clear leaves its blocks behind.
using SourceNumber = u32;

// Called by a thread before it waits for a mutex; null: nothing. Set by a thread that holds
// something that the owner of the mutex may need to go on.
inline thread_local void (*before_waiting)() = nullptr;

// Locks a mutex for as long as the result lives.
inline std::unique_lock<std::mutex> locked(std::mutex& mutex) {
    std::unique_lock lock(mutex, std::try_to_lock);
    if (!lock.owns_lock()) {
        if (before_waiting != nullptr) before_waiting();
        lock.lock();
    }
    return lock;
}

class SharedIndex : public std::enable_shared_from_this<SharedIndex> {
public:
    SharedIndex(std::array<u64, 2> secrets, const Limits& limits)
        : index(secrets, limits), applier(index), matcher(index) {}

    std::mutex mutex;  // guards all that follows
    Index index;
    Applier applier;
    Matcher matcher;
    Hits hits;  // of the current match; its memory is reused

    SourceNumber number_of(u32 slot) const { return numbers_[slot]; }
    // Returns `kNone` where it is not there.
    u32 slot_of(SourceNumber number) const {
        return number < slots_.size() ? slots_[number] : kNone;
    }

    // Returns the number of a source that may be added later.
    SourceNumber new_number() {
        slots_.push_back(kNone);
        return static_cast<SourceNumber>(slots_.size() - 1);
    }

    // `number`: from `new_number`, of a source that is not there now.
    u32 add(SourceNumber number) {
        const u32 slot = index.add_source();
        slots_[number] = slot;
        put(slot, number);
        return slot;
    }
    void drop(u32 slot) {
        slots_[numbers_[slot]] = kNone;
        index.drop_source(slot);
    }
    void moved(u32 from, u32 to) {
        const SourceNumber number = numbers_[from];
        slots_[number] = to;
        put(to, number);
    }

private:
    void put(u32 slot, SourceNumber number) {
        if (slot >= numbers_.size()) numbers_.resize(slot + 1, kNone);
        numbers_[slot] = number;
    }

    std::vector<u32> slots_;              // by number
    std::vector<SourceNumber> numbers_;  // by slot
};

}  // namespace kvroute
