"""The last hour in steps of half a minute, of the router and of each replica.

Nothing is counted for it: every step is the difference of the metrics' own counters between two
looks, so requests cost nothing more. Memory is bounded by steps and replicas.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import nan

from router.index.base import SourceId
from router.telemetry.metrics import RouterMetrics

STEPS = 120
STEP_S = 30.0
_LEAST_STEP_S = 1.0
MAX_REPLICAS = 1024
"""The most replicas with a history; later ones have none."""
QUANTILE = 0.9
VALUES = ("requests_per_s", "reused_share", "first_byte_s", "mispredicted_share", "gpu_blocks")
"""The values of a step. NaN where there was nothing to measure."""
_COUNTS = 5
_REQUESTS, _PROMPT, _CACHED, _COMPARED, _WRONG = range(_COUNTS)
# The buckets of the time to first byte follow.


@dataclass(frozen=True, slots=True)
class Hour:
    """One replica's hour, or the router's: the oldest step first."""

    values: Mapping[str, array[float]]
    """Values by the names in `VALUES`, each of the same length."""
    removed_blocks: list[int]
    """Blocks that left the GPUs within this time, by KV cache group."""


class _Ring:
    """Holds the steps of one replica, the last `STEPS` of them."""

    def __init__(self) -> None:
        self.steps: deque[array[float]] = deque(maxlen=STEPS)
        self.removed: deque[array[float]] = deque(maxlen=STEPS)

    def add(self, step: array[float], removed: array[float]) -> None:
        self.steps.append(step)
        self.removed.append(removed)


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
        self.bounds = self.metrics.first_byte.buckets
        self._timer: asyncio.TimerHandle | None = None
        self._of_all = _Ring()
        self._replicas: dict[str, _Ring] = {}
        self._at = self.clock()
        self._counts = self._read()
        self._removed = {name: found.removed for name, found in self.caches().items()}

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
        now, counts, caches = self.clock(), self._read(), self.caches()
        seconds = max(now - self._at, 1e-3)
        whole, removed_of_all = [0.0] * self._width, []
        for name in self._replicas.keys() - caches.keys():
            del self._replicas[name]
        for name, difference in self._since(counts).items():
            whole = [one + other for one, other in zip(whole, difference, strict=True)]
            if name in caches and (ring := self._ring(name)) is not None:
                removed = self._lost(name, caches[name])
                removed_of_all.append(removed)
                ring.add(_step(difference, seconds, caches[name].gpu_blocks), removed)
        held = sum(found.gpu_blocks for found in caches.values())
        self._of_all.add(_step(whole, seconds, held), _by_group(sum, removed_of_all))
        self._at, self._counts = now, counts
        self._removed = {name: found.removed for name, found in caches.items()}

    def hours(self, replica_ids: Iterable[str]) -> dict[str | None, Hour]:
        """The steps that are over, and the one that runs as its last: of all together, under None,
        and of those of the replicas that are followed."""
        caches = self.caches()
        differences = self._since(self._read())
        seconds = max(self.clock() - self._at, 1e-3)
        whole = [sum(column) for column in zip(*differences.values(), strict=True)]
        held = sum(found.gpu_blocks for found in caches.values())
        removed = _by_group(sum, [self._lost(name, found) for name, found in caches.items()])
        of_all = self._with(self._of_all, whole or [0.0] * self._width, seconds, held, removed)
        hours: dict[str | None, Hour] = {None: of_all}
        for name in replica_ids:
            found = caches.get(name)
            ring = None if found is None else self._ring(name)
            if found is not None and ring is not None:
                difference = differences.get(name, [0.0] * self._width)
                lost = self._lost(name, found)
                hours[name] = self._with(ring, difference, seconds, found.gpu_blocks, lost)
        return hours

    def _with(
        self,
        ring: _Ring,
        difference: list[float],
        seconds: float,
        held: int,
        removed: array[float],
    ) -> Hour:
        steps = [*ring.steps, _step(difference, seconds, held)]
        removed = _by_group(sum, [*ring.removed, removed])
        return Hour(_readable(steps, self.bounds), [int(count) for count in removed])

    def _ring(self, name: str) -> _Ring | None:
        ring = self._replicas.get(name)
        if ring is None and len(self._replicas) < MAX_REPLICAS:
            ring = self._replicas[name] = _Ring()
        return ring

    def _lost(self, name: str, caches: BlockCounts) -> array[float]:
        before = self._removed.get(name, {})
        lost = array("d", [0.0] * (max(caches.removed, default=-1) + 1))
        for group, removed in caches.removed.items():
            # A source that was added again counts from 0.
            lost[group] = max(removed - before.get(group, 0), 0)
        return lost

    def _since(self, counts: Mapping[str, list[float]]) -> dict[str, list[float]]:
        nothing = [0.0] * self._width
        return {
            name: [max(new - old, 0.0) for new, old in zip(found, before, strict=True)]
            for name, found in counts.items()
            for before in [self._counts.get(name, nothing)]
        }

    @property
    def _width(self) -> int:
        return _COUNTS + len(self.bounds) + 1

    def _read(self) -> dict[str, list[float]]:
        """The counters of every replica, and of none, by the label `replica`."""
        metrics = self.metrics
        found: dict[str, list[float]] = {name: [0.0] * self._width for name in self.caches()}

        def of(name: str) -> list[float]:
            return found.setdefault(name, [0.0] * self._width)

        for (_, replica, _, _), requests in metrics.requests.series():
            of(replica)[_REQUESTS] += requests.value
        for counter, place in ((metrics.compared, _PROMPT), (metrics.actual, _CACHED)):
            for (_, replica), tokens in counter.series():
                of(replica)[place] += tokens.value
        for (_, replica, outcome), predictions in metrics.predictions.series():
            of(replica)[_COMPARED] += predictions.value
            of(replica)[_WRONG] += predictions.value if outcome != "exact" else 0
        for (_, replica), times in metrics.first_byte.series():
            row = of(replica)
            for index, count in enumerate(times.counts):
                row[_COUNTS + index] += count
        return found


def _by_group(
    merge: Callable[[tuple[float, ...]], float], removed: Iterable[Sequence[float]]
) -> array[float]:
    """Sum several counts by group."""
    return array("d", map(merge, zip_longest(*removed, fillvalue=0.0)))


def _step(difference: list[float], seconds: float, held: int) -> array[float]:
    return array("d", [held, difference[_REQUESTS] / seconds, *difference[1:]])


def _readable(steps: Sequence[array[float]], bounds: Sequence[float]) -> dict[str, array[float]]:
    values = {name: array("d") for name in VALUES}
    for held, *counts in steps:
        values["requests_per_s"].append(counts[_REQUESTS])
        values["reused_share"].append(_share(counts[_CACHED], counts[_PROMPT]))
        values["first_byte_s"].append(quantile(QUANTILE, bounds, counts[_COUNTS:]))
        values["mispredicted_share"].append(_share(counts[_WRONG], counts[_COMPARED]))
        values["gpu_blocks"].append(held)
    return values


def _share(part: float, whole: float) -> float:
    return part / whole if whole else nan


def quantile(share: float, bounds: Iterable[float], counts: Iterable[float]) -> float:
    """Return a quantile of a histogram, as Prometheus estimates it: evenly within a bucket, and the
    highest bound for what lies above it. NaN if it is empty.

    Args:
        share: From 0 to 1.
        bounds: Upper bounds of all buckets but the last.
        counts: By bucket, each without those below it.
    """
    limits, values = list(bounds), list(counts)
    wanted, below, low = share * sum(values), 0.0, 0.0
    if not wanted:
        return nan
    for high, count in zip(limits, values, strict=False):
        if below + count >= wanted:
            return low + (high - low) * (wanted - below) / count
        below, low = below + count, high
    return limits[-1]
