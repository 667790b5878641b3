"""The model against its formulas, written down token by token without pages, chunks or batches."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kvroute_engine.core.batch import SequenceChunk
from kvroute_engine.core.model_config import LayerKind, TransformerConfig
from kvroute_engine.core.presets import preset, preset_names
from kvroute_engine.core.requests import SamplingParams
from kvroute_engine.model.model import Attention, StateMixer, Transformer, rotary, rotate
from kvroute_engine.model.torch_runner import TorchRunner
from offload.block import Block
from offload.errors import CacheConfigError

SMALL = {"sliding_window": 24, "attention_chunk_size": 32, "max_model_len": 256}


def plain_logits(model: Transformer, token_ids: list[int]) -> Tensor:
    """Logits after every token, `(tokens, vocab_size)`."""
    hidden = model.embedding(torch.tensor(token_ids))
    rotation = rotary(torch.arange(len(token_ids)), model.config)
    for layer in model.layers:
        mixed = layer.mixer_norm(hidden)
        mixer = layer.mixer
        hidden = hidden + (
            plain_attention(mixer, mixed, rotation)
            if isinstance(mixer, Attention)
            else plain_states(mixer, mixed)
        )
        inner = layer.mlp_norm(hidden)
        hidden = hidden + layer.down(functional.silu(layer.gate(inner)) * layer.up(inner))
    logits: Tensor = model.head(model.norm(hidden))
    return logits


def plain_attention(
    attention: Attention, hidden: Tensor, rotation: tuple[Tensor, Tensor]
) -> Tensor:
    config = attention._config
    queries = rotate(attention.query(hidden).unflatten(-1, (-1, config.head_dim)), rotation)
    keys = rotate(attention.key(hidden).unflatten(-1, (-1, config.head_dim)), rotation)
    values = attention.value(hidden).unflatten(-1, (-1, config.head_dim))
    shared = config.num_heads // config.num_kv_heads
    rows = []
    for position in range(len(hidden)):
        seen = [
            other for other in range(position + 1) if sees(config, attention._kind, position, other)
        ]
        heads = []
        for head in range(config.num_heads):
            scores = keys[seen, head // shared] @ queries[position, head] / config.head_dim**0.5
            heads.append(torch.softmax(scores, 0) @ values[seen, head // shared])
        rows.append(torch.cat(heads))
    out: Tensor = attention.out(torch.stack(rows))
    return out


def sees(config: TransformerConfig, kind: LayerKind, position: int, other: int) -> bool:
    """Whether the token at *position* attends to the one at *other*."""
    if kind is LayerKind.SLIDING_WINDOW:
        return position - other < config.sliding_window
    if kind is LayerKind.CHUNKED_LOCAL:
        return position // config.attention_chunk_size == other // config.attention_chunk_size
    return True


def plain_states(mixer: StateMixer, hidden: Tensor) -> Tensor:
    config = mixer._config
    queries, keys, values = (
        layer(hidden).unflatten(-1, (-1, config.head_dim))
        for layer in (mixer.query, mixer.key, mixer.value)
    )
    rows = []
    states = torch.zeros(config.num_kv_heads, config.head_dim, config.head_dim)
    for position in range(len(hidden)):
        heads = []
        for head in range(config.num_kv_heads):
            decay = 1 - 2.0 ** -(3 + head)
            states[head] = decay * states[head] + torch.outer(
                keys[position, head] * config.head_dim**-0.5, values[position, head]
            )
            heads.append(mixer.output_norm(queries[position, head] @ states[head]))
        rows.append(torch.cat(heads))
    out: Tensor = mixer.out(torch.stack(rows))
    return out


def chunk(token_ids: list[int], start: int, stop: int, tables: list[list[Block]]) -> SequenceChunk:
    return SequenceChunk("a", token_ids[start:stop], start, tables, True, SamplingParams(), 0)


@pytest.mark.parametrize("name", ["full", "gemma", "gptoss", "llama4", "mamba-hybrid"])
def test_pages_and_chunks_compute_what_the_formulas_define(name: str) -> None:
    """Every other test compares the engine with itself."""
    config = preset(name, **SMALL)
    runner = TorchRunner(config, num_blocks=60, device="cpu")
    rng = random.Random(1)
    token_ids = [rng.randrange(256) for _ in range(75)]
    with torch.inference_mode():
        expected = plain_logits(runner.model, token_ids)
    free = list(range(1, 60))
    rng.shuffle(free)
    tables = [[Block(free.pop()) for _ in range(5)] for _ in config.layer_groups()]
    # Windows and states end inside and at the ends of blocks, attention chunks and prefill chunks.
    for start, stop in ((0, 16), (16, 33), (33, 48), (48, 49), (49, 64), (64, 75)):
        runner.run([chunk(token_ids, start, stop, tables)])
        assert runner.last_logits is not None
        assert float((runner.last_logits[0] - expected[stop - 1]).abs().max()) < 2e-4


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_has_whole_groups_of_pages_of_one_size(name: str) -> None:
    """All groups share one pool."""
    config = preset(name)
    groups = config.layer_groups()
    assert sorted(layer for group in groups for layer in group.layers) == list(
        range(len(config.layers))
    )
    assert {len(group.layers) for group in groups} == {config.layers_per_group}
    assert len(config.cache_groups()) == len(groups)
    assert config.page_bytes >= max(config.group_page_bytes(group.kind) for group in groups)
    assert config.page_bytes % 8 == 0


def test_a_pattern_that_does_not_fill_groups_is_refused() -> None:
    """Three layers of one kind and two of another would need pages of two sizes."""
    kinds = (LayerKind.FULL, LayerKind.FULL, *[LayerKind.SLIDING_WINDOW] * 3)
    with pytest.raises(CacheConfigError, match="3 sliding_window layers must be a multiple of 2"):
        preset("full", layers=kinds).layer_groups()


@pytest.mark.parametrize("name", ["", "gemma-huge", "llama", "tiny"])
def test_an_unknown_preset_is_refused_with_the_known_names(name: str) -> None:
    """A preset is the option that is mistyped first."""
    with pytest.raises(CacheConfigError, match=r"one of full, gemma, gptoss, llama4, mamba-hybrid"):
        preset(name)
