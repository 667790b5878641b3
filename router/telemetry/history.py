"""The last hour in steps of half a minute, of the router and of each replica.

Nothing is counted for it: every step is the difference of the metrics' own counters between two
looks, so requests cost nothing more. Memory is bounded by steps and replicas.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import msgspec

from router.index.base import SourceId
from router.telemetry.metrics import RouterMetrics

STEPS = 120
STEP_S = 30.0
_LEAST_STEP_S = 1.0
MAX_REPLICAS = 1024
"""The most replicas with a history; later ones have none."""
QUANTILE = 0.9
_COUNTS = 5
_REQUESTS, _PROMPT, _CACHED, _COMPARED, _WRONG = range(_COUNTS)
# The buckets of the time to first byte follow.


class HourView(msgspec.Struct, frozen=True, kw_only=True):
    """The last hour, a value for each step, the oldest first; the last step still runs. Null where
    there was nothing to measure."""

    requests_per_s: list[float | None]
    reused_share: list[float | None]
    """The share of prompt tokens that engines reported as cached."""
    first_byte_s: list[float | None]
    """The time to first byte that nine of ten responses kept."""
    mispredicted_share: list[float | None]
    """The share of the predictions that could be compared."""
    gpu_blocks: list[float | None]
    """Blocks held at the end of the step, over all groups."""
    removed_blocks: list[int]
    """Blocks that left the GPUs in this time, by KV cache group: evicted, or slid out of a
    window."""


class HistoryView(msgspec.Struct, frozen=True, kw_only=True):
    """The last hour of the router, and of the replicas that were asked for."""

    now: float
    """Unix time."""
    step_s: float
    router: HourView
    replicas: dict[str, HourView]


class _HourStep(NamedTuple):
    """One step of a replica, or of all together."""

    counts: array[float]
    """By the indices above; the requests are a rate, per second."""
    gpu_blocks: float
    removed: array[float]
    """Blocks that left the GPUs, by KV cache group."""


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Counts the blocks that a replica's caches hold, and those removed from their GPUs since the
    start."""

    gpu_blocks: int
    removed: Mapping[int, int]
    """Removed blocks, by KV cache group."""


class Removals:
    """Counts the blocks that sources have removed since this process follows them. One that came
    from a snapshot counts from before that."""

    def __init__(self) -> None:
        self._before: dict[SourceId, Mapping[int, int]] = {}

    def since_followed(
        self, removed: Mapping[SourceId, Mapping[int, int]], applied: Mapping[SourceId, int]
    ) -> dict[SourceId, Mapping[int, int]]:
        """Return the removed blocks, by KV cache group.

        Args:
            applied: How many of its blocks this process has seen removed, from any tier.
        """
        self._before = {
            source: self._before[source] for source in removed if source in self._before
        }
        found: dict[SourceId, Mapping[int, int]] = {}
        for source, counts in removed.items():
            is_restored = sum(counts.values()) > applied.get(source, 0)
            before = self._before.setdefault(source, counts if is_restored else {})
            if any(counts.get(group, 0) < count for group, count in before.items()):
                before = self._before[source] = {}  # cleared meanwhile: it counts from 0 again
            found[source] = {group: count - before.get(group, 0) for group, count in counts.items()}
        return found


@dataclass(eq=False, repr=False)
class History:
    """Keeps the hour. Belongs to one event loop."""

    metrics: RouterMetrics
    caches: Callable[[], Mapping[str, BlockCounts]]
    """Returns the blocks of every replica's caches now; replicas that are gone are forgotten."""
    clock: Callable[[], float] = time.monotonic
    """A monotonic clock, in seconds."""

    def __post_init__(self) -> None:
        self._bounds = self.metrics.first_byte.buckets
        self._timer: asyncio.TimerHandle | None = None
        self._steps: dict[str | None, deque[_HourStep]] = {None: deque(maxlen=STEPS)}
        """By replica, and under None of all together; the last `STEPS`."""
        caches = self.caches()
        self._begin(self._read(caches), caches)

    def start(self) -> None:
        """Keep a step every half minute from now on."""
        # Routers end their steps together, so that their histories can be laid side by side.
        left_s = STEP_S - self.clock() % STEP_S
        # A timer may be early by a moment: that is no step.
        left_s += STEP_S if left_s < _LEAST_STEP_S else 0
        self._timer = asyncio.get_running_loop().call_later(left_s, self._tick)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        self.start()
        self.sample()

    def sample(self) -> None:
        """Keep the step that is over, and begin the next one."""
        caches = self.caches()
        counts = self._read(caches)
        for name in self._steps.keys() - caches.keys() - {None}:
            del self._steps[name]
        for name, step in self._running(counts, caches).items():
            if name in self._steps or len(self._steps) <= MAX_REPLICAS:
                self._steps.setdefault(name, deque(maxlen=STEPS)).append(step)
        self._begin(counts, caches)

    def view(self, replica_ids: Iterable[str]) -> HistoryView:
        """The steps that are over, and the one that runs as its last.

        Args:
            replica_ids: Those that are not followed are left out.
        """
        caches = self.caches()
        running = self._running(self._read(caches), caches)
        has_room = len(self._steps) <= MAX_REPLICAS
        return HistoryView(
            now=round(time.time(), 3),
            step_s=STEP_S,
            router=self._hour(None, running[None]),
            replicas={
                name: self._hour(name, running[name])
                for name in replica_ids
                if name in running and (has_room or name in self._steps)
            },
        )

    def _hour(self, name: str | None, running: _HourStep) -> HourView:
        steps = [*self._steps.get(name, ()), running]
        counts = [step.counts for step in steps]
        times = [quantile(QUANTILE, self._bounds, each[_COUNTS:]) for each in counts]
        return HourView(
            requests_per_s=[round(each[_REQUESTS], 4) for each in counts],
            reused_share=[_share(each[_CACHED], each[_PROMPT]) for each in counts],
            first_byte_s=[None if each is None else round(each, 4) for each in times],
            mispredicted_share=[_share(each[_WRONG], each[_COMPARED]) for each in counts],
            gpu_blocks=[step.gpu_blocks for step in steps],
            removed_blocks=[int(count) for count in _by_group([step.removed for step in steps])],
        )

    def _begin(self, counts: dict[str, list[float]], caches: Mapping[str, BlockCounts]) -> None:
        self._at, self._counts = self.clock(), counts
        self._removed = {name: found.removed for name, found in caches.items()}

    def _running(
        self, counts: Mapping[str, list[float]], caches: Mapping[str, BlockCounts]
    ) -> dict[str | None, _HourStep]:
        """The step that runs, of every replica, and under None of all together."""
        seconds = max(self.clock() - self._at, 1e-3)
        since = {name: self._since(name, found) for name, found in counts.items()}
        steps: dict[str | None, _HourStep] = {}
        for name, found in caches.items():
            lost, held = self._lost(name, found), float(found.gpu_blocks)
            steps[name] = _HourStep(_rated(since[name], seconds), held, lost)
        whole = [sum(column) for column in zip(self._zeros(), *since.values(), strict=True)]
        held = sum(step.gpu_blocks for step in steps.values())
        lost = _by_group([step.removed for step in steps.values()])
        return {**steps, None: _HourStep(_rated(whole, seconds), held, lost)}

    def _lost(self, name: str, caches: BlockCounts) -> array[float]:
        before = self._removed.get(name, {})
        lost = array("d", [0.0] * (max(caches.removed, default=-1) + 1))
        for group, removed in caches.removed.items():
            # A source that was added again counts from 0.
            lost[group] = max(removed - before.get(group, 0), 0)
        return lost

    def _since(self, name: str, counts: list[float]) -> list[float]:
        before = self._counts.get(name) or self._zeros()
        return [max(new - old, 0.0) for new, old in zip(counts, before, strict=True)]

    def _zeros(self) -> list[float]:
        return [0.0] * (_COUNTS + len(self._bounds) + 1)

    def _read(self, replicas: Iterable[str]) -> dict[str, list[float]]:
        """The counters of *replicas*, of others that served, and of none, by the label
        `replica`."""
        metrics = self.metrics
        found = defaultdict(self._zeros, {name: self._zeros() for name in replicas})
        for (_, replica, _, _), requests in metrics.requests.series():
            found[replica][_REQUESTS] += requests.value
        for counter, place in ((metrics.compared, _PROMPT), (metrics.actual, _CACHED)):
            for (_, replica), tokens in counter.series():
                found[replica][place] += tokens.value
        for (_, replica, outcome), predictions in metrics.predictions.series():
            found[replica][_COMPARED] += predictions.value
            found[replica][_WRONG] += predictions.value if outcome != "exact" else 0
        for (_, replica), times in metrics.first_byte.series():
            row = found[replica]
            for index, count in enumerate(times.counts):
                row[_COUNTS + index] += count
        return found


def _by_group(removed: Iterable[Sequence[float]]) -> array[float]:
    return array("d", map(sum, zip_longest(*removed, fillvalue=0.0)))


def _rated(counts: list[float], seconds: float) -> array[float]:
    """The counts of a step of that length, with the requests as a rate."""
    return array("d", [counts[_REQUESTS] / seconds, *counts[1:]])


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None


def quantile(share: float, bounds: Sequence[float], counts: Sequence[float]) -> float | None:
    """Return a quantile of a histogram, as Prometheus estimates it: evenly within a bucket, and the
    highest bound for what lies above it. None if it is empty.

    Args:
        share: From 0 to 1.
        bounds: Upper bounds of all buckets but the last.
        counts: By bucket, each without those below it.
    """
    wanted, below, low = share * sum(counts), 0.0, 0.0
    if not wanted:
        return None
    for high, count in zip(bounds, counts, strict=False):
        if below + count >= wanted:
            return low + (high - low) * (wanted - below) / count
        below, low = below + count, high
    return bounds[-1]
