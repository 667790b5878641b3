// Helpers of every part of the binding: locks beside the interpreter's, buffers, text.
#pragma once

#include <nanobind/nanobind.h>

#include <cstring>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "index/memory.hpp"
#include "index/prompt.hpp"
#include "index/shared.hpp"

namespace kvroute::binding {

namespace nb = nanobind;

// Lets the interpreter lock go for as long as it lives, if that is worth it.
class ReleasedIf {
public:
    explicit ReleasedIf(bool is_worth_it) : state_(is_worth_it ? PyEval_SaveThread() : nullptr) {}
    ~ReleasedIf() {
        if (state_ != nullptr) PyEval_RestoreThread(state_);
    }
    ReleasedIf(const ReleasedIf&) = delete;
    ReleasedIf& operator=(const ReleasedIf&) = delete;

private:
    PyThreadState* state_;
};

// While it exists, the interpreter lock is let go wherever the thread has to wait for a mutex, and
// taken back at the end. So Python must not be touched meanwhile, and no mutex be held at the end.
class Patient {
public:
    // `has_interpreter`: false where the lock has been let go already.
    explicit Patient(bool has_interpreter = true)
        : has_interpreter_(has_interpreter), waited_before_(before_waiting) {
        if (has_interpreter_) before_waiting = &let_go;
    }
    ~Patient() {
        if (!has_interpreter_) return;
        before_waiting = waited_before_;
        // Where one lives in another, the outer one takes it back.
        if (waited_before_ != nullptr || let_go_ == nullptr) return;
        PyEval_RestoreThread(std::exchange(let_go_, nullptr));
    }
    Patient(const Patient&) = delete;
    Patient& operator=(const Patient&) = delete;

private:
    static void let_go() {
        if (let_go_ == nullptr) let_go_ = PyEval_SaveThread();
    }

    static inline thread_local PyThreadState* let_go_ = nullptr;
    bool has_interpreter_;
    void (*waited_before_)();
};

// Holds a mutex, for a step that may not stop half-way. No thread waits for the interpreter lock with
// the mutex in hand: the lock is let go where the thread waits, for this mutex or for one that is taken
// after it, and taken back when this one is free again.
class Guarded {
public:
    explicit Guarded(std::mutex& mutex, bool has_interpreter = true)
        : patient_(has_interpreter), lock_(locked(mutex)) {}
    Guarded(const Guarded&) = delete;
    Guarded& operator=(const Guarded&) = delete;

private:
    Patient patient_;  // goes last
    Unfailing unfailing_;
    std::unique_lock<std::mutex> lock_;
};

// A contiguous buffer of any kind, for reading.
class Buffer {
public:
    explicit Buffer(nb::handle from, bool is_optional = false) {
        is_open_ = PyObject_GetBuffer(from.ptr(), &view_, PyBUF_SIMPLE | PyBUF_FORMAT) == 0;
        if (is_open_) return;
        if (!is_optional) throw nb::python_error();
        PyErr_Clear();
    }
    ~Buffer() {
        if (is_open_) PyBuffer_Release(&view_);
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    bool is_open() const { return is_open_; }
    bool holds_numbers() const {
        return is_open_ && view_.itemsize == 4 && view_.format != nullptr &&
               std::string_view(view_.format) == "I";
    }
    std::span<const u8> bytes() const {
        return {static_cast<const u8*>(view_.buf), static_cast<std::size_t>(view_.len)};
    }

private:
    Py_buffer view_{};
    bool is_open_ = false;
};

// Reads a buffer of numbers, or a sequence of integers.
inline SharedTokens tokens_of(nb::handle from) {
    const auto found = std::make_shared<std::vector<u32>>();
    std::vector<u32>& tokens = *found;
    if (!PyList_Check(from.ptr()) && !PyTuple_Check(from.ptr())) {
        const Buffer buffer(from, /*is_optional=*/true);
        if (buffer.holds_numbers()) {
            tokens.resize(buffer.bytes().size() / 4);
            std::memcpy(tokens.data(), buffer.bytes().data(), tokens.size() * 4);
            return found;
        }
    }
    const nb::object items = nb::steal(PySequence_List(from.ptr()));
    if (!items.is_valid()) throw nb::python_error();
    const Py_ssize_t count = PyList_Size(items.ptr());
    tokens.resize(static_cast<std::size_t>(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
        const unsigned long long value =
            PyLong_AsUnsignedLongLong(PyList_GetItem(items.ptr(), i));
        if (value == ~0ull && PyErr_Occurred()) throw nb::python_error();
        if (value > 0xFFFFFFFF) {
            PyErr_SetString(PyExc_OverflowError, "a token id must lie in [0, 2**32)");
            throw nb::python_error();
        }
        tokens[static_cast<std::size_t>(i)] = static_cast<u32>(value);
    }
    return found;
}

inline nb::object text(const std::string& name) {
    return nb::steal(
        PyUnicode_DecodeUTF8(name.data(), static_cast<Py_ssize_t>(name.size()), "replace"));
}

}  // namespace kvroute::binding
