#include "plane/ask.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "index/json_tokens.hpp"

namespace kvroute::plane {
namespace {

using sv = std::string_view;

constexpr int kMostNested = 64;

// Fields that say something of the prompt, of where it goes or of what is cached: see
// router/tokenize/body/requests.py. All others are the engine's.
constexpr std::array kLookedAt = {
    sv("cache_salt"), sv("lora_name"), sv("endpoint"), sv("token_ids"), sv("messages"),
    sv("input"), sv("n"), sv("prompt_logprobs"), sv("logprobs"), sv("echo"), sv("prompt_embeds"),
    sv("truncate_prompt_tokens"), sv("truncation_side"), sv("add_special_tokens"), sv("vllm_xargs"),
    sv("metadata"), sv("session_id"), sv("prompt_cache_key"), sv("conversation"),
    sv("previous_response_id"), sv("user"), sv("chat_template"), sv("chat_template_kwargs"),
    sv("tools"), sv("documents"), sv("reasoning_effort"), sv("add_generation_prompt"),
    sv("continue_final_message"), sv("instructions"), sv("reasoning"), sv("system"),
    sv("thinking"), sv("output_config"), sv("sampling_params"), sv("kv_transfer_params"),
    sv("features"), sv("content_parts"), sv("priority"), sv("prompt_cache_retention"),
    sv("extra_key"), sv("lora_path"),
};

// Walks over JSON of plain ASCII; false wherever it is not well-formed (RFC 8259).
class Walk {
public:
    explicit Walk(sv text) : at_(text.data()), end_(text.data() + text.size()) {}

    const char* at() const { return at_; }
    bool is_at_end() {
        skip_space();
        return at_ == end_;
    }
    bool take(char what) {
        skip_space();
        if (at_ == end_ || *at_ != what) return false;
        ++at_;
        return true;
    }
    // What stands between the quotation marks, as it is written.
    bool text(sv& found) {
        skip_space();
        if (at_ == end_ || *at_ != '"') return false;
        const char* const start = ++at_;
        while (at_ < end_ && *at_ != '"') {
            const auto each = static_cast<unsigned char>(*at_);
            if (each < 0x20 || each > 0x7E) return false;
            if (each == '\\' && !escape()) return false;
            ++at_;
        }
        if (at_ == end_) return false;
        found = sv(start, static_cast<std::size_t>(at_ - start));
        ++at_;
        return true;
    }
    bool value(int depth = 0) {
        skip_space();
        if (at_ == end_ || depth > kMostNested) return false;
        sv ignored;
        switch (*at_) {
            case '"': return text(ignored);
            case '{': return items('}', depth, true);
            case '[': return items(']', depth, false);
            case 't': return word("true");
            case 'f': return word("false");
            case 'n': return word("null");
            default: return number();
        }
    }
    // Up to the bracket that closes a list without lists, objects or text in it.
    bool plain_list(sv& found) {
        skip_space();
        if (at_ == end_ || *at_ != '[') return false;
        const auto* close =
            static_cast<const char*>(std::memchr(at_, ']', static_cast<std::size_t>(end_ - at_)));
        if (close == nullptr) return false;
        found = sv(at_, static_cast<std::size_t>(close + 1 - at_));
        at_ = close + 1;
        return true;
    }

private:
    void skip_space() {
        while (at_ < end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\t' || *at_ == '\r')) ++at_;
    }
    // At a backslash; moves to the last character of the escape.
    bool escape() {
        if (++at_ == end_) return false;
        // Half of a surrogate pair is no character: left to who looks closer.
        return *at_ != 'u' && std::strchr("\"\\/bfnrt", *at_) != nullptr;
    }
    bool word(sv expected) {
        if (static_cast<std::size_t>(end_ - at_) < expected.size()) return false;
        if (sv(at_, expected.size()) != expected) return false;
        at_ += expected.size();
        return true;
    }
    bool digits() {
        const char* const start = at_;
        while (at_ < end_ && *at_ >= '0' && *at_ <= '9') ++at_;
        return at_ > start;
    }
    bool number() {
        if (at_ < end_ && *at_ == '-') ++at_;
        const char* const whole = at_;
        if (!digits() || (at_ - whole > 1 && *whole == '0')) return false;
        if (at_ < end_ && *at_ == '.') {
            ++at_;
            if (!digits()) return false;
        }
        if (at_ < end_ && (*at_ == 'e' || *at_ == 'E')) {
            ++at_;
            if (at_ < end_ && (*at_ == '+' || *at_ == '-')) ++at_;
            return digits();
        }
        return true;
    }
    bool items(char close, int depth, bool have_names) {
        ++at_;
        if (take(close)) return true;
        for (;;) {
            sv name;
            if (have_names && (!text(name) || !take(':'))) return false;
            if (!value(depth + 1)) return false;
            if (take(close)) return true;
            if (!take(',')) return false;
        }
    }

    const char* at_;
    const char* end_;
};

}  // namespace

std::optional<Ask> read_ask(sv body, bool is_question) {
    Walk walk(body);
    if (!walk.take('{')) return std::nullopt;
    Ask ask;
    bool has_model = false, has_prompt = false, has_stream = false;
    for (;;) {
        sv name;
        if (!walk.text(name) || name.find('\\') != sv::npos || !walk.take(':')) return std::nullopt;
        if (name == "model") {
            sv text;
            if (std::exchange(has_model, true) || !walk.text(text)) return std::nullopt;
            if (text.empty() || text.find('\\') != sv::npos) return std::nullopt;
            ask.model.assign(text);
        } else if (name == "prompt" || (is_question && name == "token_ids")) {
            sv list;
            if (std::exchange(has_prompt, true) || !walk.plain_list(list)) return std::nullopt;
            auto ids = token_ids_of_json({reinterpret_cast<const u8*>(list.data()), list.size()});
            if (!ids || ids->empty()) return std::nullopt;
            ask.tokens = std::move(*ids);
        } else if (std::find(kLookedAt.begin(), kLookedAt.end(), name) != kLookedAt.end()) {
            return std::nullopt;
        } else {
            const char* const start = walk.at();
            if (!walk.value()) return std::nullopt;
            if (name == "stream") {
                const sv text(start, static_cast<std::size_t>(walk.at() - start));
                const bool is_true = text.find("true") != sv::npos;
                if (std::exchange(has_stream, true)) return std::nullopt;
                if (!is_true && text.find("false") == sv::npos) return std::nullopt;
                ask.is_stream = is_true;
            }
        }
        if (walk.take('}')) break;
        if (!walk.take(',')) return std::nullopt;
    }
    if (!walk.is_at_end() || !has_model || !has_prompt) return std::nullopt;
    return ask;
}

}  // namespace kvroute::plane
