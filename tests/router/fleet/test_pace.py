"""How often replicas are asked about themselves while nobody asks the router."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from router.config.origin import Header, Origin
from router.config.schema import ReplicaConfig
from router.config.watch import HealthConfig
from router.fleet.load import LoadTracker, ReplicaLoad
from router.fleet.pace import QUIET_AFTER, Pace
from router.fleet.registry import ReplicaRegistry
from router.fleet.watchers import Watchers
from tests.support.loads import in_flight
from tests.support.waiting import eventually

NONE = {"asked": 0, "in_flight": 0}
LOADS = {
    "127.0.0.1": b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n",
    "127.0.0.2": b"vllm:num_requests_running 2\nvllm:num_requests_waiting 0\n",
    "127.0.0.3": b"vllm:num_requests_running 0\nvllm:num_requests_waiting 1\n",
    "127.0.0.4": b"vllm:num_requests_running 2\nvllm:num_requests_waiting 0\n",
}
"""The last one's requests are other routers'."""


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_interval_grows_once_no_request_has_come_for_some() -> None:
    clock = Clock()
    pace = Pace(HealthConfig(interval_s=2, no_traffic_factor=4), clock)
    clock.now += 2 * QUIET_AFTER - 0.1
    assert not pace.look(**NONE)
    assert pace.interval_s == 2
    clock.now += 0.1
    assert pace.interval_s == 8
    assert pace.look(asked=1, in_flight=0), "they come again"
    assert pace.interval_s == 2
    assert not pace.look(asked=2, in_flight=0)


def test_a_request_under_way_is_traffic_however_long_it_runs() -> None:
    """A replica that stalls with work has to be noticed."""
    clock = Clock()
    pace = Pace(HealthConfig(interval_s=2), clock)
    for _ in range(100):
        clock.now += 2
        assert not pace.look(asked=1, in_flight=1)
        assert pace.interval_s == 2
    clock.now += 2 * QUIET_AFTER
    assert pace.interval_s == 8


@pytest.mark.parametrize(
    ("options", "interval_s"),
    [
        ({"interval_s": 2, "engine_load_stale_after_s": 5}, 4),
        ({"interval_s": 2, "engine_load_stale_after_s": 2.1}, 2),
        ({"interval_s": 60, "engine_load_stale_after_s": 90}, 72),
        ({"interval_s": 60, "scrape_metrics": False}, 240),
        ({"interval_s": 2, "no_traffic_factor": 1}, 2),
    ],
)
def test_what_is_known_of_loads_does_not_go_stale(
    options: dict[str, float], interval_s: float
) -> None:
    clock = Clock()
    pace = Pace(HealthConfig.model_validate(options), clock)
    clock.now += 1000
    assert pace.interval_s == pytest.approx(interval_s)


def test_in_a_quiet_time_replicas_are_looked_at_together() -> None:
    """64 of them would wake the router 64 times in an interval."""
    clock = Clock()
    pace = Pace(HealthConfig(interval_s=2, no_traffic_factor=4), clock)
    moments = [clock.now + 6.4 + number / 40 for number in range(64)]
    assert [pace.due(at, 8) for at in moments] == moments, "requests come"
    clock.now += 2 * QUIET_AFTER
    found = [pace.due(at, 8) for at in moments]
    assert all(at - 1 < due <= at for due, at in zip(found, moments, strict=True))
    assert len(set(found)) <= 3


async def test_healthy_replicas_are_asked_less_often_until_a_request_comes() -> None:
    """One that is unhealthy is asked as before: it returns within one interval."""
    asked: Counter[str] = Counter()

    async def fetch(
        origin: Origin, path: str, headers: Sequence[Header], timeout_s: float, max_bytes: int
    ) -> tuple[int, bytes]:
        asked[origin.host] += 1
        return (200 if origin.host == "127.0.0.1" else 500), b'{"data": [{"id": "m"}]}'

    load, decisions = LoadTracker(), 0
    health = HealthConfig(
        interval_s=0.01, no_traffic_factor=1000, scrape_metrics=False, discovery_interval_s=600
    )
    watchers = Watchers(fetch, health, load)
    watchers.decisions = lambda: decisions
    registry = ReplicaRegistry(watchers, health, load)
    registry.add(ReplicaConfig(url="http://127.0.0.1:1", models=("m",), kv_events=()))
    registry.add(ReplicaConfig(url="http://127.0.0.2:1"))
    try:
        await eventually(lambda: watchers.pace.is_quiet, "nobody asks")
        ill = asked["127.0.0.2"]
        await eventually(lambda: asked["127.0.0.2"] >= ill + 2, "what had begun is over")
        well, ill = asked["127.0.0.1"], asked["127.0.0.2"]
        await eventually(lambda: asked["127.0.0.2"] >= ill + 50, "it may have returned")
        assert asked["127.0.0.1"] == well
        decisions += 1
        await eventually(lambda: asked["127.0.0.1"] > well, "a request came")
        await eventually(lambda: watchers.pace.is_quiet, "nobody asks again")
        well = asked["127.0.0.1"]
        with in_flight(load, "127.0.0.1:1", 10, 10):
            await eventually(lambda: asked["127.0.0.1"] >= well + 10, "one is under way")
    finally:
        await registry.close()


async def test_the_load_of_one_that_was_not_idle_is_asked_for_as_often_as_before() -> None:
    """What is over a moment later would count until the next question, against a replica without
    requests."""
    scraped: Counter[str] = Counter()

    async def fetch(
        origin: Origin, path: str, headers: Sequence[Header], timeout_s: float, max_bytes: int
    ) -> tuple[int, bytes]:
        if path != "/metrics":
            return 200, b'{"data": [{"id": "m"}]}'
        scraped[origin.host] += 1
        return 200, LOADS[origin.host]

    health = HealthConfig(
        interval_s=0.01,
        no_traffic_factor=1000,
        engine_load_stale_after_s=600,
        discovery_interval_s=600,
    )
    watchers = Watchers(fetch, health, load := LoadTracker())
    registry = ReplicaRegistry(watchers, health, load)
    load.take_others({"127.0.0.4:1": ReplicaLoad(prefilling_requests=2)})
    for host in LOADS:
        registry.add(ReplicaConfig(url=f"http://{host}:1", models=("m",), kv_events=()))
    try:
        await eventually(lambda: len(scraped) == len(LOADS), "all are known")
        await eventually(lambda: watchers.pace.is_quiet, "nobody asks")
        busy = scraped["127.0.0.2"]
        await eventually(lambda: scraped["127.0.0.2"] >= busy + 4, "what had begun is over")
        before = Counter(scraped)
        for host in ("127.0.0.2", "127.0.0.3"):
            await eventually(lambda host=host: scraped[host] >= before[host] + 10, "was not idle")
        for host in ("127.0.0.1", "127.0.0.4"):
            assert scraped[host] == before[host], "it was idle, or its requests are known"
    finally:
        await registry.close()
