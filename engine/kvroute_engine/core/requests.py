"""Defines the requests to an engine and its output, token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from offload.request import PeerBlocks


class FinishReason(Enum):
    """Why a request ended; the values are OpenAI's."""

    STOP = "stop"
    """The end-of-sequence token, or one of `stop_token_ids`."""
    LENGTH = "length"
    """`max_tokens`, or the model's longest sequence."""
    ABORT = "abort"
    """The client left, or the engine gave up on the request."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The rules by which a request's tokens are chosen."""

    max_tokens: int = 16
    temperature: float = 0.0
    """0 is greedy: always the most likely token."""
    seed: int | None = None
    """Seeds the request's own random numbers; used where the temperature is above 0."""
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A prompt to continue."""

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    lora_name: str | None = None
    """Separates the request's blocks from others'; the engine computes the same with or without."""
    cache_salt: str | None = None
    kv_transfer_params: Mapping[str, Any] | None = None
    """Passed to the lower tiers; the engine itself reads only `kvroute`, see `RetentionHints`."""
    priority: int = 0
    """Lower goes first, where the engine schedules by priority."""
    at_peer: PeerBlocks | None = None
    """The blocks that the peer of `remote_kv_source` holds of it."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The tokens that one step added to one request."""

    request_id: str
    new_token_ids: Sequence[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens that were not computed, because they were on the GPU or loaded from a lower
    tier. As of the first admission."""
    finish_reason: FinishReason | None = None
