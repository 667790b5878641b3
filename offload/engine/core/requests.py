"""What an engine is asked and what it answers, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum


class FinishReason(Enum):
    """Why a request ended; the values are OpenAI's."""

    STOP = "stop"
    """The end-of-sequence token, or one of `stop_token_ids`."""
    LENGTH = "length"
    """`max_tokens`, or the model's longest sequence."""
    ABORT = "abort"
    """The client left, or the engine gave up on it."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request's tokens are chosen."""

    max_tokens: int = 16
    temperature: float = 0.0
    """0: greedy, the most likely token."""
    seed: int | None = None
    """Of the request's own random numbers, where the temperature is above 0."""
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A prompt to go on from."""

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    lora_name: str | None = None
    """Parts its blocks from others'; this engine computes nothing different for it."""
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step brought a request."""

    request_id: str
    new_token_ids: Sequence[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    """Of the prompt, tokens that were not computed: on the GPU, or brought by a lower tier. As of
    the first admission."""
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """One KV cache group on the GPU now, and counts since the start."""

    kind: str
    """As on the wire: `full_attention`, `sliding_window` ..."""
    cached_blocks: int
    """Distinct hashes that a request can find."""
    evicted_by_window: int
    """Blocks that lost their hash after a window or a state had moved past them."""
    evicted_by_pressure: int
    """The others that lost it."""
    hit_tokens: int = 0
    """Prompt tokens of admitted requests that this group alone could have served; the hit is what
    all of them can."""


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """An engine now, and counts since its start."""

    num_running: int
    num_waiting: int
    """Also those that wait for a load."""
    kv_cache_usage: float
    """Share of the blocks that requests hold, from 0 to 1."""
    prefix_cache_queries: int
    """Prompt tokens that were looked up."""
    prefix_cache_hits: int
    """Of these, tokens found on the GPU."""
    external_prefix_cache_hits: int
    """Of these, tokens that lower tiers brought."""
    preemptions: int
    prompt_tokens: int
    generation_tokens: int
    steps: int
    copies_in_flight: int = 0
    """Jobs between the GPU and lower tiers."""
    groups: tuple[GroupStatistics, ...] = ()
