"""The time of a step on real hardware, for engines without tensors; clocks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvroute_engine.core.batch import SequenceChunk
from offload.errors import CacheConfigError


class Clock(Protocol):
    """An engine's clock."""

    def now_s(self) -> float:
        """Return the time of a monotonic clock, in seconds."""
        ...

    def sleep(self, seconds: float) -> None:
        """Let that time pass."""
        ...


class RealClock:
    """The machine's own clock."""

    def now_s(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class VirtualClock:
    """A clock that only `sleep` moves, without waiting."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds


@dataclass(frozen=True, slots=True)
class TimeModel:
    """Rates of a machine; the defaults are about those of an 8B model on one accelerator."""

    prefill_tokens_per_s: float = 20_000.0
    decode_tokens_per_s: float = 2_500.0
    """The sum over all sequences."""
    step_overhead_s: float = 0.005
    """Fixed cost of a step, such as reading the weights from memory."""
    transfer_bytes_per_s: float = 20e9
    """The rate between the GPU and lower tiers, in each direction."""
    pull_bytes_per_s: float = 5e9
    """The rate from another engine's memory, of one engine at a time."""
    slowdown: float = 1.0
    """Factor on every duration."""

    def __post_init__(self) -> None:
        for name in (
            "prefill_tokens_per_s",
            "decode_tokens_per_s",
            "transfer_bytes_per_s",
            "pull_bytes_per_s",
            "slowdown",
        ):
            if getattr(self, name) <= 0:
                raise CacheConfigError(f"time model: {name} {getattr(self, name)} must be above 0")
        if self.step_overhead_s < 0:
            raise CacheConfigError(
                f"time model: step_overhead_s {self.step_overhead_s} must not be negative"
            )

    def step_s(self, chunks: Sequence[SequenceChunk]) -> float:
        """Return the duration of a step that computes *chunks*, in seconds."""
        decoded = sum(
            1 for chunk in chunks if len(chunk.token_ids) == 1 and chunk.num_output_tokens
        )
        prefilled = sum(len(chunk.token_ids) for chunk in chunks) - decoded
        work_s = prefilled / self.prefill_tokens_per_s + decoded / self.decode_tokens_per_s
        return (self.step_overhead_s + work_s) * self.slowdown

    def transfer_s(self, transferred_bytes: int) -> float:
        """Return the duration of a copy between tiers, in seconds."""
        return transferred_bytes / self.transfer_bytes_per_s * self.slowdown

    def pull_s(self, pulled_bytes: int) -> float:
        """Return the duration of a copy from another engine's memory, in seconds."""
        return pulled_bytes / self.pull_bytes_per_s * self.slowdown
