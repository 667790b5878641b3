// Memory that is kept back for steps that may not stop half-way.
//
// Where the index, the mirror or the books change, several containers have to agree with each other. One
// that could not grow would leave them apart, for good. So some memory is kept back from the start:
// within such a step, an allocation that fails is tried again with a piece of it. Elsewhere it fails
// with std::bad_alloc, which ends the current request.
#pragma once

#include <cstddef>

namespace kvroute {

// Keeps memory back, for the whole process. Called once.
void keep_back_memory();

// Throws std::bad_alloc where too little is kept back to begin a step; refills it if there is memory
// again.
void require_memory();

// While one exists, its thread's allocations may use the memory that is kept back.
class Unfailing {
public:
    Unfailing();
    ~Unfailing();
    Unfailing(const Unfailing&) = delete;
    Unfailing& operator=(const Unfailing&) = delete;
};

// As `malloc`, but tries a failed allocation again as `operator new` does, and throws in the end.
void* memory_of(std::size_t bytes);

}  // namespace kvroute
