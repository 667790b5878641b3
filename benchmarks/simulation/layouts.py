"""The caches that are compared: layer patterns with the windows and block sizes of widely served
models."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.simulation.time_model import AcceleratorTime
from kvroute_engine.core.build import EngineConfig
from kvroute_engine.core.model_config import TransformerConfig
from offload.tiers import TierConfig


@dataclass(frozen=True)
class ReplicaConfig(EngineConfig):
    """A simulated replica, its window chosen."""

    sliding_window: int = 1024
    """The window in tokens."""
    cache_tokens: int = 0
    """The tokens that its cache holds, with the blocks of every group."""

    def model(self) -> TransformerConfig:
        """See `EngineConfig`."""
        return replace(super().model(), sliding_window=self.sliding_window)


_LAYOUTS = {
    "full": ReplicaConfig(preset="full", block_size=64),
    "gemma": ReplicaConfig(preset="gemma", block_size=64, sliding_window=1024),
    "gptoss": ReplicaConfig(preset="gptoss", block_size=64, sliding_window=128),
    "llama4": ReplicaConfig(preset="llama4", block_size=64),
    "mamba-hybrid": ReplicaConfig(preset="mamba-hybrid", block_size=256),
}
"""Llama and Qwen; Gemma 3: five groups with a window of 1024; gpt-oss: one of 128; Qwen3-Next:
three groups of states, one a block, hence the large blocks."""

LONGEST_TOKENS = 131_072
STEP_TOKENS = 2048
TIME_MODEL = AcceleratorTime()


def layout_names() -> list[str]:
    """Return all layouts that `replica_config` knows."""
    return list(_LAYOUTS)


TRANSFER_TOKENS_PER_S = 200_000.0
"""The rate of loads from a lower tier: 128 KiB per token over PCIe at 25 GB/s."""
PULL_TOKENS_PER_S = 80_000.0
"""The same from another replica's memory, over a network at 10 GB/s."""


def with_memory_tier(config: ReplicaConfig, gpu_shares: float) -> ReplicaConfig:
    """Return the same replica with a tier in memory that holds *gpu_shares* times as many blocks as
    the GPU, and reads those of others."""
    model = config.model()
    token_bytes = model.block_bytes * len(model.layer_groups()) / model.block_size
    time_model = replace(
        config.time_model,
        transfer_bytes_per_s=token_bytes * TRANSFER_TOKENS_PER_S,
        pull_bytes_per_s=token_bytes * PULL_TOKENS_PER_S,
    )
    memory = int(config.num_blocks * gpu_shares)
    return replace(config, cpu_blocks=memory, tiers=(TierConfig("p2p"),), time_model=time_model)


def replica_config(layout: str, cache_tokens: int) -> ReplicaConfig:
    """Return a replica whose cache holds *cache_tokens* tokens with their blocks in every group."""
    config = _LAYOUTS[layout]
    model = replace(config, max_model_len=LONGEST_TOKENS).model()
    groups = len(model.layer_groups())
    return replace(
        config,
        cache_tokens=cache_tokens,
        simulate=True,
        num_blocks=cache_tokens // model.block_size * groups + 2,
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=128,
        max_model_len=LONGEST_TOKENS,
        time_model=TIME_MODEL,
    )


def cold_requests_per_s(prompt_tokens: float, replicas: int) -> float:
    """Return requests of that mean length that *replicas* could serve without any reuse: the unit
    of request rates."""
    return replicas * TIME_MODEL.prefill_tokens_per_s / prompt_tokens
