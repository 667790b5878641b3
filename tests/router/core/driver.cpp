// Where there is no libFuzzer: feeds mutated inputs, and keeps those that reach code which nothing
// reached before. `driver CORPUS SECONDS [SEED]`; an input that ends the process is in CORPUS/last.
//
// Built without `-fsanitize-coverage`, since it is called by what that makes.

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include <unistd.h>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

using Bytes = std::vector<std::uint8_t>;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kLargest = 1 << 16;

std::array<std::uint8_t, 1 << 18> reached;
std::size_t reached_now;

std::string last_path;
const Bytes* running = nullptr;

void keep_running() {
    if (running == nullptr) return;
    std::FILE* file = std::fopen(last_path.c_str(), "wb");
    if (file == nullptr) return;
    std::fwrite(running->data(), 1, running->size(), file);
    std::fclose(file);
    running = nullptr;
}

void on_signal(int number) {
    keep_running();
    std::signal(number, SIG_DFL);
    std::raise(number);
}

class Mutator {
public:
    explicit Mutator(std::uint64_t seed) : random_(seed) {}

    std::size_t below(std::size_t bound) { return bound ? random_() % bound : 0; }

    Bytes mutated(const std::vector<Bytes>& corpus) {
        Bytes input = corpus[below(corpus.size())];
        for (std::size_t count = 1 + below(5); count; --count) mutate(input, corpus);
        if (input.size() > kLargest) input.resize(kLargest);
        return input;
    }

private:
    template <class Of>
    static auto place(Of& bytes, std::size_t at) {
        return bytes.begin() + static_cast<std::ptrdiff_t>(std::min(at, bytes.size()));
    }

    void mutate(Bytes& input, const std::vector<Bytes>& corpus) {
        static constexpr std::uint8_t kTelling[] = {0x00, 0x7F, 0x80, 0x90, 0xA0, 0xC0, 0xC4, 0xCF,
                                                    0xD3, 0xDD, 0xDF, 0xFF, '[',  ']',  ',',  '9'};
        const std::size_t at = below(input.size()), size = input.size();
        switch (below(8)) {
        case 0:
            if (size) input[at] ^= static_cast<std::uint8_t>(1u << below(8));
            break;
        case 1:
            if (size) input[at] = static_cast<std::uint8_t>(random_());
            break;
        case 2:
            if (size) input[at] = kTelling[below(std::size(kTelling))];
            break;
        case 3:
            input.insert(input.begin() + static_cast<std::ptrdiff_t>(at), 1 + below(8),
                         static_cast<std::uint8_t>(random_()));
            break;
        case 4:
            if (size) input.erase(place(input, at), place(input, at + 1 + below(16)));
            break;
        case 5: {  // a piece of itself once more
            const Bytes piece(place(input, at), place(input, at + below(64)));
            input.insert(place(input, below(size + 1)), piece.begin(), piece.end());
            break;
        }
        case 6: {  // a piece of another one
            const Bytes& other = corpus[below(corpus.size())];
            const std::size_t from = below(other.size());
            const Bytes piece(place(other, from), place(other, from + below(256)));
            input.insert(place(input, below(size + 1)), piece.begin(), piece.end());
            break;
        }
        default:
            if (size) input[at] = static_cast<std::uint8_t>(input[at] + below(7) - 3);
        }
    }

    std::mt19937_64 random_;
};

void run(const Bytes& input) {
    running = &input;
    reached_now = 0;
    LLVMFuzzerTestOneInput(input.data(), input.size());
    running = nullptr;
}

std::vector<Bytes> read_corpus(const std::string& folder) {
    std::vector<Bytes> corpus;
    for (const auto& each : std::filesystem::directory_iterator(folder)) {
        std::ifstream file(each.path(), std::ios::binary);
        corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    }
    return corpus;
}

}  // namespace

// Called at every edge of the code under test.
extern "C" void __sanitizer_cov_trace_pc() {
    const auto from = reinterpret_cast<std::uintptr_t>(__builtin_return_address(0));
    std::uint8_t& known = reached[(from * 0x9E3779B97F4A7C15u) >> 46];
    reached_now += !known;
    known = 1;
}
extern "C" void __asan_on_error() { keep_running(); }

int main(int argc, char** argv) {
    if (argc < 3) {
        std::fprintf(stderr, "usage: %s CORPUS SECONDS [SEED]\n", argv[0]);
        return 2;
    }
    for (int number : {SIGSEGV, SIGABRT, SIGILL, SIGFPE, SIGTRAP, SIGALRM}) {
        std::signal(number, on_signal);
    }
    last_path = std::string(argv[1]) + "/last";
    Mutator mutator(argc > 3 ? std::strtoull(argv[3], nullptr, 0) : 1);
    std::vector<Bytes> corpus = read_corpus(argv[1]);
    corpus.emplace_back(64, std::uint8_t{3});
    std::size_t runs = 0, given = corpus.size();
    for (const Bytes& input : corpus) run(input), ++runs;
    const auto end = Clock::now() + std::chrono::duration<double>(std::atof(argv[2]));
    while (Clock::now() < end) {
        const Bytes input = mutator.mutated(corpus);
        ::alarm(20);
        run(input);
        ++runs;
        if (reached_now) corpus.push_back(input);
    }
    ::alarm(0);
    std::printf("%zu inputs, %zu of them given, %zu found\n", runs, given, corpus.size() - given);
    return 0;
}
