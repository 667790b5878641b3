"""Model directories that vLLM can load: a configuration, a small tokenizer trained here, and no
weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SLIDING_WINDOW = 64
CHUNK = 128
MAX_MODEL_LEN = 1024

VOCABULARY = 2048
_SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
FIRST_PLAIN_TOKEN = len(_SPECIAL)
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message['role'] }}\n"
    "{{ message['content'] }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_MODEL_LEN,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "dtype": "bfloat16",
    "tie_word_embeddings": True,
}
GEMMA: dict[str, Any] = {
    **_COMMON,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": SLIDING_WINDOW,
    "query_pre_attn_scalar": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
"""The hybrid: three groups in vLLM, the full-attention one last."""
QWEN2: dict[str, Any] = {
    **_COMMON,
    # Its heads have hidden_size / num_attention_heads dimensions, and attention on the CPU needs
    # 32.
    "hidden_size": 128,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
}
"""Full attention only."""
MISTRAL: dict[str, Any] = {
    **_COMMON,
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "num_hidden_layers": 2,
    "sliding_window": SLIDING_WINDOW,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
}
"""Sliding windows only: its events do not give the place of any block, so the router must compute
the hashes itself."""
LLAMA4: dict[str, Any] = {
    **_COMMON,
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "num_hidden_layers": 4,
    "no_rope_layers": [1, 1, 1, 0],
    "layer_types": [
        "chunked_attention",
        "chunked_attention",
        "chunked_attention",
        "full_attention",
    ],
    "attention_chunk_size": CHUNK,
    "intermediate_size_mlp": 128,
    "interleave_moe_layer_step": 5,
    "moe_layers": [],
    "num_experts_per_tok": 1,
    "num_local_experts": 2,
    "use_qk_norm": False,
    "attn_temperature_tuning": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
}
"""Full attention and chunked local attention, whose chunk size is not in the events."""
QWEN3_NEXT: dict[str, Any] = {
    **_COMMON,
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_key_value_heads": 4,
    "head_dim": 256,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
"""Linear attention with one state per block, and full attention with heads so large that 64 tokens
fill a block of that size."""


def write_model(directory: Path, config: dict[str, Any]) -> Path:
    """Write everything that a server and the router's own tokenizer read; return *directory*."""
    directory.mkdir(parents=True, exist_ok=True)
    _tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    (directory / "tokenizer_config.json").write_text(json.dumps(_tokenizer_config(), indent=1))
    (directory / "generation_config.json").write_text(
        json.dumps({"eos_token_id": 1, "bos_token_id": 2})
    )
    return directory


def sentence(random: Random, words: int) -> str:
    """Text whose words are one or a few tokens each."""
    return " ".join(random.choice(_WORDS) for _ in range(words))


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[*_SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    return tokenizer


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_MODEL_LEN,
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "bos_token": "<bos>",
        "unk_token": "<unk>",
        "chat_template": _TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }


def _corpus() -> Iterator[str]:
    random = Random("corpus")
    for _ in range(500):
        yield sentence(random, 40)


_SYLLABLES = (
    "ka",
    "ve",
    "ro",
    "ute",
    "blo",
    "ck",
    "win",
    "dow",
    "ten",
    "sor",
    "lay",
    "er",
    "ca",
    "che",
    "hit",
    "miss",
)
_WORDS = tuple(
    first + second + third
    for first in _SYLLABLES
    for second in _SYLLABLES
    for third in _SYLLABLES[:4]
)
