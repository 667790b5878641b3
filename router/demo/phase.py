"""One run of the workload under one routing mode: tokens reused, times to the first token,
mispredictions."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from router.demo.client import Client, TimedCompletion
from router.demo.workload import Dialogue, Workload


@dataclass(slots=True)
class ReplicaResult:
    """The completions of one replica."""

    requests: int = 0
    predicted_tokens: int = 0
    cached_tokens: int = 0
    ttfts_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class PhaseResult:
    """The completions of one phase."""

    name: str
    replicas: dict[str, ReplicaResult]
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    errors: list[int] = field(default_factory=list)
    """Of each completion, the tokens predicted to be cached minus the tokens reported as cached."""
    ttfts_s: list[float] = field(default_factory=list)

    def add(self, completion: TimedCompletion) -> None:
        """Count one completion."""
        replica = self.replicas[completion.replica]
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
        """Completions whose cached tokens differ from the prediction."""
        return sum(error != 0 for error in self.errors)

    @property
    def hit_share(self) -> float:
        """Share of prompt tokens that were cached."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def ttft_s(self, percent: int) -> float:
        """A percentile of the time to the first token."""
        return percentile(self.ttfts_s, percent)


def percentile(values: Sequence[float], percent: int) -> float:
    """A percentile, interpolated between neighbours; 0 if there are no values.

    Args:
        values: In any order.
        percent: From 1 to 99.
    """
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


async def run_phase(
    result: PhaseResult,
    client: Client,
    model: str,
    workload: Workload,
    at_a_time: int,
    show: Callable[[], None],
) -> None:
    """Send the whole workload.

    Args:
        result: Where completions are counted.
        client: Of the router.
        model: The model's name.
        workload: What to send.
        at_a_time: Requests under way at any time.
        show: Called after every completion.
    """
    under_way: dict[asyncio.Task[TimedCompletion], Dialogue] = {}
    while True:
        while len(under_way) < at_a_time and (dialogue := workload.next()):
            under_way[
                asyncio.create_task(
                    client.complete(model, dialogue.prompt(), workload.answer_tokens)
                )
            ] = dialogue
        if not under_way:
            return
        done, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            workload.answered(under_way.pop(task))
            result.add(task.result())
        show()
