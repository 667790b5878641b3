#include "binding/index.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "binding/support.hpp"
#include "index/block_hash.hpp"
#include "index/events.hpp"
#include "index/json_tokens.hpp"

namespace kvroute::binding {

namespace {

constexpr std::size_t kLargeText = 1 << 16;  // bytes

// Returns the digests of a prompt's blocks, one after the other; nothing where Python has to make them.
// See `append_block_hashes`.
std::optional<std::vector<u8>> digests_of(const Prompt& prompt, const EngineHashing& hashing) {
    const auto bytes_of = [](const nb::bytes& bytes) {
        return std::span(static_cast<const u8*>(bytes.data()), bytes.size());
    };
    const std::optional<HashFunction> function = HashFunction::named(hashing.algorithm);
    if (!function) return std::nullopt;
    std::vector<std::span<const u8>> extras;
    for (const nb::bytes& each : hashing.extra_keys) extras.push_back(bytes_of(each));
    ReleasedIf released(prompt.length() > kLongPrompt);
    std::vector<u8> digests;
    const HashedBlocks blocks{hashing.block_size, hashing.lookahead};
    const bool is_done = append_block_hashes(*function, bytes_of(hashing.root), prompt.tokens(),
                                             blocks, extras, digests);
    return is_done ? std::optional(std::move(digests)) : std::nullopt;
}

nb::object block_hashes(const PromptHandle& handle, const std::string& algorithm, nb::bytes root,
                        u64 block_size, u64 lookahead, const std::vector<nb::bytes>& extra_keys) {
    const auto digests =
        digests_of(*handle.prompt, {algorithm, std::move(root), block_size, lookahead, extra_keys});
    return digests ? nb::bytes(digests->data(), digests->size()) : nb::object(nb::none());
}

nb::object pack_token_ids(nb::handle text) {
    const Buffer buffer(text);
    std::vector<u32> numbers;
    bool are_numbers;
    {
        ReleasedIf released(buffer.bytes().size() > kLargeText);
        are_numbers = token_ids_of_json(buffer.bytes(), numbers);
    }
    if (!are_numbers) return nb::none();
    return nb::bytes(numbers.data(), numbers.size() * sizeof(u32));
}

}  // namespace

u64 hash_of(const KeySpace& space, nb::handle block_hash) {
    if (PyBytes_Check(block_hash.ptr())) {
        const nb::bytes bytes = nb::borrow<nb::bytes>(block_hash);
        const msgpack::Head head{msgpack::Kind::binary, bytes.size()};
        return hash_number(space, head, static_cast<const u8*>(bytes.data()));
    }
    const unsigned long long value = PyLong_AsUnsignedLongLong(block_hash.ptr());
    if (value != ~0ull || !PyErr_Occurred()) {
        return hash_number(space, {msgpack::Kind::unsigned_int, value}, nullptr);
    }
    PyErr_Clear();
    const long long negative = PyLong_AsLongLong(block_hash.ptr());
    if (negative == -1 && PyErr_Occurred()) throw nb::python_error();
    return hash_number(space, {msgpack::Kind::negative_int, static_cast<u64>(negative)}, nullptr);
}

std::optional<EngineHashes> engine_hashes(const KeySpace& space, const PromptHandle& handle,
                                          const EngineHashing& hashing, bool as_int) {
    const auto digests = digests_of(*handle.prompt, hashing);
    if (!digests) return std::nullopt;
    const std::size_t size = HashFunction::named(hashing.algorithm)->size();
    EngineHashes found;
    found.numbers.reserve(digests->size() / size);
    for (std::size_t at = 0; at < digests->size(); at += size) {
        const u8* digest = digests->data() + at;
        // As an integer, a digest is its last 64 bits.
        found.numbers.push_back(as_int ? detail::read_big<u64>(digest + size - 8)
                                       : hash_number(space, {msgpack::Kind::binary, size}, digest));
    }
    return found;
}

std::vector<Computed> computed_of(const KeySpace& space, const std::vector<ComputedTuple>& tuples) {
    std::vector<Computed> found;
    for (const auto& [slot, is_alone, lists] : tuples) {
        found.push_back({slot, is_alone, {}});
        for (nb::handle list : lists) {
            std::vector<u64>& hashes = found.back().hashes.emplace_back();
            if (nb::isinstance<EngineHashes>(list)) {
                hashes = nb::cast<const EngineHashes&>(list).numbers;
                continue;
            }
            for (nb::handle each : nb::borrow<nb::list>(list)) {
                hashes.push_back(hash_of(space, each));
            }
        }
    }
    return found;
}

void bind_prompt(nb::module_& module) {
    nb::class_<PromptHandle>(module, "Prompt")
        .def(
            "__init__",
            [](PromptHandle* self, nb::handle tokens, std::optional<std::string> lora,
               std::optional<std::string> salt, nb::bytes extra_keys) {
                const auto* bytes = static_cast<const u8*>(extra_keys.data());
                new (self) PromptHandle{std::make_shared<Prompt>(
                    tokens_of(tokens), std::move(lora), std::move(salt),
                    std::vector<u8>(bytes, bytes + extra_keys.size())), nullptr};
            },
            nb::arg("token_ids"), nb::arg("lora_name").none(), nb::arg("cache_salt").none(),
            nb::arg("extra_keys"))
        .def("__len__", [](const PromptHandle& self) { return self.prompt->length(); })
        .def("tokens", [](const PromptHandle& self) {
            const std::span<const u32> tokens = self.prompt->tokens();
            return nb::bytes(tokens.data(), tokens.size() * sizeof(u32));
        });

    nb::class_<EngineHashes>(module, "EngineHashes");  // NOLINT(bugprone-unused-raii): registers it

    module.def("pack_token_ids", &pack_token_ids);
    module.def("block_hashes", &block_hashes);
}

}  // namespace kvroute::binding
