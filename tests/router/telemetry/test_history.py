"""The last hour: steps from the counters as they stand, bounded, and forgotten with its replica."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from router.index.base import SourceId
from router.telemetry.history import (
    STEP_S,
    STEPS,
    BlockCounts,
    History,
    HourView,
    Removals,
    quantile,
)
from router.telemetry.metrics import RouterMetrics


class Watched:
    """A history of two replicas, and its clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.metrics = RouterMetrics(CollectorRegistry())
        self.caches = {"a": BlockCounts(100, {}), "b": BlockCounts(50, {})}
        self.history = History(self.metrics, lambda: self.caches, lambda: self.now)

    def serve(self, replica: str, count: int, cached: int = 75, predicted: int = 75) -> None:
        for _ in range(count):
            served = self.metrics.served("m", replica)
            served.began(0.02)
            served.ended("prefix", 200, 1.0)
            served.compare(predicted, cached, prompt_tokens=100)

    def step(self) -> None:
        self.now += STEP_S
        self.history.sample()

    def hour(self, replica: str | None = None) -> HourView:
        view = self.history.view(() if replica is None else (replica,))
        return view.router if replica is None else view.replicas[replica]


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_a_step_is_what_happened_in_it(watched: Watched) -> None:
    """And the one that runs is shown as well: nobody waits half a minute for a first point."""
    watched.serve("a", 60)
    watched.serve("b", 30, cached=0, predicted=50)
    watched.step()
    watched.serve("a", 15, cached=50, predicted=50)
    watched.now += STEP_S / 2
    a, b, both = watched.hour("a"), watched.hour("b"), watched.hour()
    assert a.requests_per_s == [2.0, 1.0]
    assert a.reused_share == [0.75, 0.5]
    assert b.mispredicted_share[0] == 1.0
    assert b.reused_share[1] is None
    assert both.requests_per_s[0] == 3.0
    assert both.reused_share[0] == 0.5
    assert both.mispredicted_share[0] == 0.3333
    assert both.gpu_blocks == [150, 150]
    first_byte_s = a.first_byte_s[0]
    assert first_byte_s is not None
    assert 0.01 < first_byte_s <= 0.025


def test_what_caches_lose_is_summed_over_the_hour(watched: Watched) -> None:
    """For each group. Of a source that starts again from 0, nothing is subtracted."""
    for removed in ({0: 7}, {0: 10, 2: 6}, {}, {0: 4}):
        watched.caches["a"] = BlockCounts(100, removed)
        watched.step()
    watched.caches["a"] = BlockCounts(100, {0: 5, 1: 2})
    assert watched.hour("a").removed_blocks == [7 + 3 + 0 + 4 + 1, 2, 6]
    assert watched.hour("b").removed_blocks == []
    watched.caches["b"] = BlockCounts(50, {0: 1})
    assert watched.hour().removed_blocks == [16, 2, 6]


def test_what_a_cache_lost_before_the_router_started_does_not_count() -> None:
    """An index that came from a snapshot has the counts of the process that wrote it."""
    restored, new = SourceId("a", 0), SourceId("b", 0)
    removals = Removals()

    def found(old: int, young: int, applied: int) -> list[dict[int, int]]:
        counts = {restored: {0: old}, new: {1: young}}
        since = removals.since_followed(counts, {restored: applied, new: young})
        return [dict(each) for each in since.values()]

    assert found(500, 3, 0) == [{0: 0}, {1: 3}]
    assert found(504, 5, 4) == [{0: 4}, {1: 5}]
    assert found(2, 6, 6) == [{0: 2}, {1: 6}], "cleared"


def test_an_hour_is_kept_and_no_more(watched: Watched) -> None:
    """It runs for months."""
    for _ in range(STEPS + 7):
        watched.serve("a", 1)
        watched.step()
    assert len(watched.hour("a").requests_per_s) == STEPS + 1


def test_a_replica_that_is_gone_is_forgotten(watched: Watched) -> None:
    """And what it had served stays in the whole."""
    watched.serve("a", 60)
    watched.step()
    del watched.caches["a"]
    watched.metrics.forget("replica", "a")
    watched.serve("b", 30)
    watched.step()
    assert not watched.history.view(("a",)).replicas
    assert watched.hour().requests_per_s[:2] == [2.0, 1.0]


def test_the_quantile_is_that_of_prometheus() -> None:
    """Evenly within a bucket; the highest bound stands for all above it."""
    assert quantile(0.5, [1, 2, 4], [0, 10, 0, 0]) == 1.5
    assert quantile(0.9, [1, 2, 4], [5, 0, 5, 0]) == pytest.approx(3.6)
    assert quantile(0.9, [1, 2, 4], [0, 0, 0, 3]) == 4
    assert quantile(0.9, [1], [0, 0]) is None
