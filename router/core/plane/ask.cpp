#include "plane/ask.hpp"

#include "index/json_tokens.hpp"
#include "plane/json_walk.hpp"

namespace kvroute::plane {
namespace {

using sv = std::string_view;

// Fields on which the prompt, where it goes or what is cached depends: see
// router/prompt/body/requests.py. All others are the engine's.
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

// A gateway's own fields, which restrict where it may go.
constexpr std::array kOfGateways = {
    sv("replicas"), sv("avoid"), sv("allowed_worker_ids"), sv("dp_rank"),
    sv("replica"), sv("worker_id"),
};

constexpr std::size_t kUsualTokens = 1 << 16;  // memory for so many is kept for the next prompt

}  // namespace

bool is_reservation_id(sv text) {
    constexpr std::size_t kLongest = 128;
    constexpr sv kAllowed =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:-";
    return !text.empty() && text.size() <= kLongest && text.find_first_not_of(kAllowed) == sv::npos;
}

std::optional<Ask> read_ask(sv body, Form form) {
    const bool is_question = form != Form::completion;
    Walk walk(body);
    Ask ask;
    bool has_model = false, has_prompt = false, has_stream = false;
    const auto take = [&](sv name) {
        if (name == "model" || (is_question && name == "model_name")) {
            sv text;
            if (std::exchange(has_model, true) || !walk.text(text)) return false;
            ask.model.assign(text);
            return !text.empty() && text.find('\\') == sv::npos;
        }
        if (name == "prompt" || (is_question && name == "token_ids")) {
            sv list;
            if (std::exchange(has_prompt, true) || !walk.plain_list(list)) return false;
            thread_local std::vector<u32> ids;
            const std::span bytes{reinterpret_cast<const u8*>(list.data()), list.size()};
            if (!token_ids_of_json(bytes, ids) || ids.empty()) return false;
            ask.tokens = std::make_shared<std::vector<u32>>(ids);  // no longer than they are
            if (ids.capacity() > kUsualTokens) ids = {};
            ask.is_completion = name == "prompt";
            return true;
        }
        if (form == Form::reservation && name == "selection_id") {
            sv id;
            if (!ask.reservation.empty() || !walk.text(id)) return false;
            ask.reservation.assign(id);
            return is_reservation_id(id);
        }
        if (is_among(kLookedAt, name)) return false;
        if (form == Form::reservation && is_among(kOfGateways, name)) return false;
        if (name != "stream") return walk.value();
        const sv text = walk.plain_value();
        ask.is_stream = text == "true";
        return !std::exchange(has_stream, true) && (ask.is_stream || text == "false");
    };
    if (!walk.plain_object(take) || !walk.is_at_end() || !has_model || !has_prompt) return std::nullopt;
    return ask;
}

}  // namespace kvroute::plane
