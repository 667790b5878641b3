"""A router that has just started waits until it knows the caches, and says whose it waits for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

import pytest

from router.config.replica import ReplicaConfig
from router.config.watch import HealthConfig
from router.feed.feed import Feed
from router.fleet.load import LoadTracker
from router.fleet.registry import ReplicaRegistry
from router.fleet.replica import Replica
from router.fleet.types import EventSource
from router.fleet.watchers import Watchers
from router.index.base import SourceId
from router.index.index import PrefixIndex
from router.routing.admission import Admission
from router.telemetry.readiness import Readiness
from tests.support.following import QUICK
from tests.support.vllm_publisher import VllmPublisher, free_port
from tests.support.waiting import eventually

WAIT_S = 30.0


class Starting:
    """A router's parts right after its start; no replica is ever really asked."""

    def __init__(self) -> None:
        index = PrefixIndex()
        self.now = 100.0
        self.unknown: list[str] = []
        health, load = HealthConfig(), LoadTracker()
        watchers = Watchers(_no_response, health, load, clock=lambda: self.now)
        self.registry = ReplicaRegistry(watchers, health, load, clock=lambda: self.now)
        self.feed = Feed(lambda _model: index, QUICK)

    def add(
        self,
        name: str,
        sources: Iterable[EventSource] = (),
        models: tuple[str, ...] | None = ("m",),
    ) -> Replica:
        """Add a healthy replica and follow its streams."""
        number = len(self.registry.replicas()) + 1
        replica = self.registry.add(
            ReplicaConfig(url=f"http://127.0.0.1:{number}", id=name, models=("m",), kv_events=())
        )
        replica.record.check_passed()
        replica.sources = tuple(sources)
        for source in replica.sources:
            self.feed.add(name, source, "m")
        return replica

    def readiness(self, *configured: str, wait_s: float = WAIT_S) -> Readiness:
        return Readiness(
            Admission(1),
            self.registry,
            self.feed,
            lambda: configured,
            wait_s,
            lambda: self.unknown,
            clock=lambda: self.now,
        )


async def _no_response(*_arguments: object) -> tuple[int, bytes]:
    raise ConnectionError


@pytest.fixture
async def starting() -> AsyncIterator[Starting]:
    made = Starting()
    yield made
    await made.registry.close()
    await made.feed.close()


def unpublished(rank: int = 0) -> EventSource:
    """A stream at an address where nobody publishes."""
    return EventSource(rank, f"tcp://127.0.0.1:{free_port()}")


async def test_the_router_is_ready_when_the_streams_of_its_replicas_have_caught_up(
    starting: Starting,
) -> None:
    """Requests that arrive before would be sent to replicas whose caches are not known."""
    with VllmPublisher("") as publisher:
        source = EventSource(0, publisher.endpoint, publisher.replay_endpoint)
        starting.add("r0", [source])
        readiness = starting.readiness("r0")
        reason = readiness.why_not_ready()
        assert reason is not None
        assert reason == "waiting at most 30 s for the caches of r0 (connecting)"
        await eventually(lambda: starting.feed.has_caught_up(SourceId("r0", 0)), "caught up")
        assert readiness.why_not_ready() is None


async def test_the_wait_names_ranks_and_ends(starting: Starting) -> None:
    """A stream whose address is wrong never catches up, and must not keep the router away."""
    starting.add("r0", [unpublished(0), unpublished(1)])
    readiness = starting.readiness("r0")
    starting.now += 10
    assert (
        readiness.why_not_ready()
        == "waiting at most 20 s for the caches of r0 (rank 0 connecting), r0 (rank 1 connecting)"
    )
    starting.now += 20
    assert readiness.why_not_ready() is None


async def test_a_router_that_was_ready_waits_for_nobody(starting: Starting) -> None:
    """A replica that returns is no reason to take the whole router out of service."""
    starting.add("r0")
    readiness = starting.readiness("r0", "r1")
    assert readiness.why_not_ready() is None
    starting.add("r1", [unpublished()])
    assert readiness.why_not_ready() is None


async def test_only_configured_replicas_that_may_get_requests_are_waited_for(
    starting: Starting,
) -> None:
    """Others are added in a running system, or do not matter to the first decisions."""
    starting.add("serves")
    starting.add("later", [unpublished()])
    starting.add("draining", [unpublished()]).draining = True
    unhealthy = starting.add("unhealthy", [unpublished()])
    for _ in range(HealthConfig().unhealthy_after):
        unhealthy.record.check_failed("down")
    readiness = starting.readiness("serves", "draining", "unhealthy")
    assert readiness.why_not_ready() is None


async def test_a_replica_is_waited_for_from_its_first_check_on(starting: Starting) -> None:
    """Which of several replicas responds first is chance; the others' caches count as well."""
    starting.add("r0")
    replica = starting.registry.add(ReplicaConfig(url="http://127.0.0.1:99", id="r1"))
    readiness = starting.readiness("r0", "r1")
    assert "r1 (not checked yet)" in (readiness.why_not_ready() or "")
    replica.record.check_passed()
    assert "r1 (its event streams are not known yet)" in (readiness.why_not_ready() or "")
    replica.discoveries += 1
    assert readiness.why_not_ready() is None, "it publishes no events"


async def test_a_replica_whose_check_fails_is_not_waited_for(starting: Starting) -> None:
    """One machine that is down must not delay a restart of the router."""
    starting.add("r0")
    replica = starting.registry.add(ReplicaConfig(url="http://127.0.0.1:99", id="r1"))
    replica.record.check_failed("down")
    assert starting.readiness("r0", "r1").why_not_ready() is None


async def test_without_a_wait_the_router_is_ready_at_once(starting: Starting) -> None:
    """As an option, for those who prefer a blind decision to none."""
    starting.add("r0", [unpublished()])
    assert starting.readiness("r0", wait_s=0).why_not_ready() is None


async def test_a_long_list_of_replicas_is_cut(starting: Starting) -> None:
    """The reason is read by people, and by load balancers that keep a line of it."""
    names = [f"r{number}" for number in range(10)]
    for name in names:
        starting.add(name, [unpublished()])
    reason = starting.readiness(*names).why_not_ready()
    assert reason is not None
    assert reason.endswith("r7 (connecting) and 2 more")


async def test_a_provider_that_has_not_named_its_replicas_is_waited_for(
    starting: Starting,
) -> None:
    """The first replica that is found must not get the requests of all the others."""
    starting.add("r0")
    starting.unknown = ["dns engines 8000"]
    readiness = starting.readiness("r0")
    starting.now += 10
    reason = readiness.why_not_ready()
    assert reason == "waiting at most 20 s for the replicas of dns engines 8000"
    starting.now += 20
    assert readiness.why_not_ready() is None
