"""One run of the workload under one way of routing: what was reused, how long answers took to
begin, what was mispredicted."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from router.demo.client import Client, Completion
from router.demo.workload import Dialogue, Workload


@dataclass(slots=True)
class ReplicaTally:
    """Answers of one replica."""

    requests: int = 0
    predicted_tokens: int = 0
    cached_tokens: int = 0
    ttfts_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Tally:
    """Answers of one phase."""

    name: str
    replicas: dict[str, ReplicaTally]
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    errors: list[int] = field(default_factory=list)
    """Of each answer, tokens that the router announced as cached less those that were."""
    ttfts_s: list[float] = field(default_factory=list)

    def add(self, completion: Completion) -> None:
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
        """Answers whose cached tokens were not those that the router announced."""
        return sum(error != 0 for error in self.errors)

    @property
    def hit_share(self) -> float:
        """Of all prompt tokens, those that were not computed."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def ttft_s(self, percent: int) -> float:
        """A percentile of the time to the first token."""
        return percentile(self.ttfts_s, percent)


def percentile(values: Sequence[float], percent: int) -> float:
    """0 where there is nothing to look at."""
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


async def run_phase(
    tally: Tally,
    client: Client,
    model: str,
    workload: Workload,
    at_a_time: int,
    show: Callable[[], None],
) -> None:
    """Send the whole workload, *at_a_time* requests under way; *tally* grows and *show* is called
    with every answer."""
    under_way: dict[asyncio.Task[Completion], Dialogue] = {}
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
            tally.add(task.result())
        show()
