// Values in the order in which they came, each of which can be taken out by its number: a list in one
// piece of memory, whose places are reused.
#pragma once

#include <utility>
#include <vector>

#include "mirror/names.hpp"

namespace kvroute::mirror {

template <class Value>
class Chain {
public:
    std::size_t size() const { return size_; }
    bool is_empty() const { return !size_; }

    // Numbers; kNone at the ends.
    u32 front() const { return first_; }
    u32 back() const { return last_; }
    u32 next(u32 number) const { return links_[number].next; }
    u32 before(u32 number) const { return links_[number].before; }

    Value& operator[](u32 number) { return links_[number].value; }
    const Value& operator[](u32 number) const { return links_[number].value; }

    u32 push_back(Value value) {
        const u32 number = place();
        Link& link = links_[number];
        link.value = std::move(value);
        link.before = last_;
        link.next = kNone;
        (last_ == kNone ? first_ : links_[last_].next) = number;
        last_ = number;
        ++size_;
        return number;
    }

    Value take(u32 number) {
        Link& link = links_[number];
        (link.before == kNone ? first_ : links_[link.before].next) = link.next;
        (link.next == kNone ? last_ : links_[link.next].before) = link.before;
        Value value = std::exchange(link.value, Value());
        link.next = free_;
        free_ = number;
        --size_;
        return value;
    }

    void clear() {
        links_.clear();
        first_ = last_ = free_ = kNone;
        size_ = 0;
    }

private:
    struct Link {
        Value value{};
        u32 before = kNone, next = kNone;
    };

    u32 place() {
        if (free_ != kNone) return std::exchange(free_, links_[free_].next);
        links_.emplace_back();
        return static_cast<u32>(links_.size() - 1);
    }

    std::vector<Link> links_;
    u32 first_ = kNone, last_ = kNone;
    u32 free_ = kNone;  // the first of the places that are free
    std::size_t size_ = 0;
};

}  // namespace kvroute::mirror
