"""One part of a play: tokens reused, times to the first token, mispredictions."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from kvroute_engine.demo.client import Client, TimedCompletion
from kvroute_engine.demo.workload import Workload


@dataclass(frozen=True, slots=True)
class PlayPhase:
    """The way in which the requests are sent."""

    name: str
    clients: int
    """Each sends a request when the one before has ended."""
    pause_s: float = 0.0
    """The pause of a client between two requests."""
    is_settled: bool = False
    """True if each request waits until the router has read all events of the one before."""


@dataclass(slots=True)
class ReplicaResult:
    """The completions of one replica."""

    requests: int = 0
    predicted_tokens: int = 0
    cached_tokens: int = 0
    ttfts_s: list[float] = field(default_factory=list)

    @property
    def mean_ttft_s(self) -> float:
        """Return the mean time to the first token; 0 without requests."""
        return statistics.fmean(self.ttfts_s) if self.ttfts_s else 0.0


@dataclass(slots=True)
class PhaseResult:
    """The completions of one phase."""

    name: str
    replicas: dict[str, ReplicaResult]
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    errors: list[int] = field(default_factory=list)
    """For each completion, the tokens predicted to be cached minus those reported as cached."""
    exact_at_admission: int = 0
    """Completions for which the router foresaw what would be cached when the engine admits them, by
    the router's own count."""
    compared_at_admission: int = 0
    ttfts_s: list[float] = field(default_factory=list)

    def add(self, completion: TimedCompletion) -> None:
        """Count one completion."""
        replica = self.replicas.setdefault(completion.replica, ReplicaResult())
        replica.requests += 1
        replica.predicted_tokens += completion.predicted_tokens
        replica.cached_tokens += completion.cached_tokens
        replica.ttfts_s.append(completion.ttft_s)
        self.requests += 1
        self.prompt_tokens += completion.prompt_tokens
        self.cached_tokens += completion.cached_tokens
        self.errors.append(completion.predicted_tokens - completion.cached_tokens)
        self.ttfts_s.append(completion.ttft_s)

    @property
    def mispredicted(self) -> int:
        """Return how many completions had other cached tokens than predicted."""
        return sum(error != 0 for error in self.errors)

    @property
    def hit_share(self) -> float:
        """Return the share of prompt tokens that were cached."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


async def run_phase(
    phase: PlayPhase,
    result: PhaseResult,
    client: Client,
    model: str,
    workload: Workload,
    completed: Callable[[TimedCompletion], Awaitable[None]],
) -> None:
    """Send the whole workload.

    Args:
        completed: Called after every completion; the client waits for it.
    """

    async def ask() -> None:
        while prompt := workload.next():
            completion = await client.complete(model, prompt, workload.answer_tokens)
            result.add(completion)
            await completed(completion)
            await asyncio.sleep(phase.pause_s)

    asking = [asyncio.create_task(ask()) for _ in range(phase.clients)]
    try:
        await asyncio.gather(*asking)
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
