"""What one request leaves behind: load, the memory of where it went, and a compared prediction."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from kvevents.events import BlockStored, EventBatch
from kvevents.layout import KVCacheLayout
from kvevents.publisher import announce
from router.config.models import ModelConfig
from router.config.replica import ReplicaConfig
from router.config.watch import HealthConfig
from router.feed.taps import Taps
from router.fleet.load import LoadTracker
from router.fleet.registry import ReplicaRegistry
from router.fleet.types import EventSource
from router.fleet.watchers import Watchers
from router.index.base import SourceId
from router.index.mirror import Mirror
from router.plane.attempts import Failure
from router.plane.proxy_types import End
from router.policies import make_policy
from router.prompt.endpoints import Endpoint
from router.prompt.processes import LargeWork
from router.routing.booking import Bookings
from router.routing.decision import Decision
from router.routing.dispatcher import Dispatcher
from router.routing.models import ModelSet
from router.routing.planner import Known, RoutePlanner
from router.routing.recent_prefixes import RecentPrefixes
from router.routing.stored_responses import StoredResponses
from router.telemetry.metrics import RouterMetrics
from router.telemetry.request_log import RequestLog
from router.telemetry.request_observer import RequestObserver, RequestObservers
from router.telemetry.self_repair import (
    CacheFacts,
    RepairTimes,
    SelfRepair,
    Trust,
)
from router.telemetry.shortages import Shortages
from tests.support.blocks import FULL, window
from tests.support.loads import statistics_of

IDS = list(range(1, 130))
USAGE = b'{"usage": {"prompt_tokens": 129, "prompt_tokens_details": {"cached_tokens": %d}}}'


class Observed:
    """Everything behind an observer, with replicas that are never asked."""

    def __init__(self, policy: str = "prefix") -> None:
        self.mirror = Mirror(clock=lambda: self.now)
        self.load = LoadTracker(self.mirror.books)
        self.metrics = CollectorRegistry()
        health = HealthConfig()
        watchers = Watchers(_no_response, health, self.load)
        self.registry = ReplicaRegistry(watchers, health, self.load)
        self.models = ModelSet([ModelConfig(name="m")], _no_response)
        planner = RoutePlanner(
            make_policy(policy),
            Known(
                self.load,
                recent=RecentPrefixes(self.load.books) if policy == "prefix" else None,
                mirror=self.mirror,
            ),
            lambda: self.now,
        )
        responses = StoredResponses(_has_no_response)
        self.large_work = LargeWork()
        self.dispatcher = Dispatcher(
            self.models, self.registry, planner, "prefix", responses, self.large_work
        )
        self.now = 100.0
        self.rebuilt: list[SourceId] = []
        self.repair = SelfRepair(
            self.rebuilt.append, lambda *_: True, lambda *_: CacheFacts(), RepairTimes()
        )
        self.observers = RequestObservers(
            Bookings(self.load, planner.visits, self.repair.quiet, lambda: self.now),
            RouterMetrics(self.metrics),
            self.registry,
            RequestLog(),
            responses,
            self.repair,
            Shortages(),
            Taps(),
        )

    def add(self, name: str, ranks: int = 1) -> None:
        number = len(self.registry.replicas()) + 1
        replica = self.registry.add(
            ReplicaConfig(url=f"http://127.0.0.1:{number}", id=name, models=("m",))
        )
        replica.record.check_passed()
        replica.sources = tuple(EventSource(rank, "tcp://127.0.0.1:1") for rank in range(ranks))

    async def observe(
        self,
        ids: Sequence[int] = IDS,
        endpoint: Endpoint = Endpoint.COMPLETIONS,
        model: str = "m",
    ) -> tuple[Decision, RequestObserver]:
        field = "input" if endpoint is Endpoint.EMBEDDINGS else "prompt"
        body = json.dumps({"model": model, field: list(ids)}).encode()
        decision = await self.dispatcher.dispatch(endpoint, body)
        return decision, self.observers.observe(decision, endpoint.value, "id")

    async def recent(self, ids: Sequence[int] = IDS) -> dict[str, int]:
        """What a prompt would find as sent just now."""
        decision, _ = await self.observe(ids)
        ranking = decision.ranking
        return {entry.candidate.replica_id: entry.candidate.recent_tokens for entry in ranking}


async def _no_response(*_arguments: object) -> tuple[int, bytes]:
    raise ConnectionError


async def _has_no_response(*_arguments: object) -> bool:
    return False


@pytest.fixture(params=["prefix"])
async def observed(request: pytest.FixtureRequest) -> AsyncIterator[Observed]:
    made = Observed(request.param)
    yield made
    await made.registry.close()
    made.models.close()
    made.large_work.close()
    made.large_work.close()


async def test_the_series_of_a_model_do_not_come_back_by_a_request_that_outlived_it(
    observed: Observed,
) -> None:
    """Long streams outlive the last replica of a model; where each version of a model has a name of
    its own, its series stayed for ever."""
    metrics, models = observed.observers.metrics, observed.models
    metrics.knows_model = lambda name: models.get(name) is not None
    models.discover("retired")
    url = "http://127.0.0.1:1"
    added = observed.registry.add(ReplicaConfig(url=url, id="r0", models=("retired",)))
    added.record.check_passed()
    decision, observer = await observed.observe(model="retired")
    (attempt,) = decision.attempts()
    observer.on_attempt(attempt)
    observer.on_first_byte(attempt, 0.5, 200)
    observed.registry.remove("r0")
    assert models.forget_all_but(()) == ["retired"]
    observed.observers.forget_replica("r0")
    observed.observers.forget_model("retired")
    observer.on_end(End.COMPLETED, 200, 1.0)
    samples = [sample for family in observed.metrics.collect() for sample in family.samples]
    assert not [sample for sample in samples if "retired" in sample.labels.values()]
    counted = [sample for sample in samples if sample.name == "kvroute_requests_total"]
    assert [(one.labels["model"], one.value) for one in counted] == [("removed", 1)]


async def test_a_failed_attempt_voids_what_was_remembered_of_the_replica(
    observed: Observed,
) -> None:
    """What it was computing is gone with it; the next equal prompt must not go there for that."""
    observed.add("r0")
    observed.add("r1")
    decision, observer = await observed.observe()
    first, second = decision.attempts()
    observer.on_attempt(first)
    assert (await observed.recent())[first.replica_id] == 128
    observer.on_failure(first, Failure.CLOSED)
    assert (await observed.recent())[first.replica_id] == 0
    observer.on_attempt(second)
    assert await observed.recent() == {first.replica_id: 0, second.replica_id: 128}


@pytest.mark.parametrize("observed", ["least_delay"], indirect=True)
async def test_what_is_expected_at_admission_is_logged_and_compared(observed: Observed) -> None:
    """An equal prompt behind one that is being computed finds it cached: both predictions show,
    each with its verdict."""
    observed.add("r0")
    decision, first = await observed.observe()
    (attempt,) = decision.attempts()
    first.on_attempt(attempt)
    assert first.request.expected_tokens == 0
    decision, second = await observed.observe()
    (attempt,) = decision.attempts()
    second.on_attempt(attempt)
    assert (second.request.cached_tokens, second.request.expected_tokens) == (0, 128)
    assert decision.expected_tokens(decision.ranking[0].candidate) == 128
    for observer, cached in ((first, 0), (second, 128)):
        observer.on_first_byte(attempt, 0.1, 200)
        observer.on_chunk(USAGE % cached)
        observer.on_end(End.COMPLETED, 200, 0.2)
    labels = {"model": "m", "replica": "r0"}
    for name, outcomes in (
        ("kvroute_predictions_total", {"exact": 1, "under": 1}),
        ("kvroute_admission_predictions_total", {"exact": 2}),
    ):
        for outcome, count in outcomes.items():
            found = observed.metrics.get_sample_value(name, {**labels, "outcome": outcome})
            assert found == count
    assert observed.mirror.statistics().keys == 2
    assert statistics_of(observed.load).in_flight == 0


@pytest.mark.parametrize("observed", ["least_delay"], indirect=True)
async def test_a_prompt_follows_its_like_while_that_is_in_prefill(observed: Observed) -> None:
    """Without a memory of seconds: when the response has begun, events take over."""
    observed.add("r0")
    observed.add("r1")
    decision, observer = await observed.observe()
    attempt = next(iter(decision.attempts()))
    observer.on_attempt(attempt)
    assert (await observed.recent())[attempt.replica_id] == 128
    observer.on_first_byte(attempt, 0.1, 200)
    observed.now += 1.0
    assert set((await observed.recent()).values()) == {0}


@pytest.mark.parametrize("observed", ["least_delay"], indirect=True)
@pytest.mark.parametrize(("keep", "found"), [((64,), 64), ((), 0)])
async def test_what_an_engine_is_told_to_keep_is_counted_on(
    observed: Observed, keep: tuple[int, ...], found: int
) -> None:
    """Of a window it keeps the end of a prompt by itself, not where others will part from it."""
    observed.add("r0")
    decision, observer = await observed.observe()
    assert decision.asked.model is not None
    layout = announce(KVCacheLayout.build([FULL, window(64)]))
    decision.asked.model.index.apply(SourceId("r0"), EventBatch(0.0, (layout,)))
    (attempt,) = decision.attempts()
    observer.on_attempt(replace(attempt, keep=keep))
    assert await observed.recent([*IDS[:70], *range(900, 960)]) == {"r0": found}


async def test_a_request_counts_at_the_rank_that_gets_it(observed: Observed) -> None:
    """The next one must find that rank busy, and an equal one must find it there."""
    observed.add("r0", ranks=2)
    decision, observer = await observed.observe()
    (attempt,) = decision.attempts()
    rank = decision.ranked("r0").candidate.dp_rank
    assert rank is not None
    observer.on_attempt(attempt)
    loads = observed.load.loads_of_ranks("r0", [0, 1])
    assert [load.requests for load in loads] == ([1, 0] if rank == 0 else [0, 1])
    again, _ = await observed.observe()
    candidate = again.ranked("r0").candidate
    assert (candidate.dp_rank, candidate.recent_tokens) == (rank, 128)
    observer.on_end(End.COMPLETED, 200, 1.0)
    assert statistics_of(observed.load).replicas == {}


async def test_where_the_engine_chooses_the_rank_none_is_counted_on(observed: Observed) -> None:
    """The router does not know which of the caches will hold the prompt."""
    observed.add("r0", ranks=2)
    decision, observer = await observed.observe(endpoint=Endpoint.EMBEDDINGS)
    (attempt,) = decision.attempts()
    observer.on_attempt(attempt)
    assert await observed.recent() == {"r0": 0}
    assert [load.requests for load in observed.load.loads_of_ranks("r0", [0, 1])] == [1, 1], (
        "half a request at each, rounded up"
    )


async def test_a_prediction_is_compared_with_what_the_engine_reports(observed: Observed) -> None:
    """The metric that shows a wrong seed, block size or tokenizer."""
    observed.add("r0")
    blocks = BlockStored([1, 2, 3, 4], None, IDS[:64], "GPU", 0)
    observed.models.index_of("m").apply(SourceId("r0"), EventBatch(0.0, [blocks]))
    for reported, outcome in ((64, "exact"), (32, "over"), (96, "under")):
        decision, observer = await observed.observe()
        (attempt,) = decision.attempts()
        observer.on_attempt(attempt)
        observer.on_first_byte(attempt, 0.1, 200)
        observer.on_chunk(USAGE % reported)
        observer.on_end(End.COMPLETED, 200, 1.0)
        labels = {"model": "m", "replica": "r0", "outcome": outcome}
        assert observed.metrics.get_sample_value("kvroute_predictions_total", labels) == 1


async def served(observed: Observed, reported: int, overlaps: bool = False) -> None:
    """One request from its prediction to the engine's report, 20 s after the one before."""
    observed.now += 20.0
    decision, observer = await observed.observe()
    attempt = next(decision.attempts())
    observer.on_attempt(attempt)
    observer.on_first_byte(attempt, 0.1, 200)
    if overlaps:
        _, other = await observed.observe()
        other.on_attempt(attempt)
        other.on_end(End.CLIENT_LEFT, None, 1.0)
    observer.on_chunk(USAGE % reported)
    observer.on_end(End.COMPLETED, 200, 1.0)


async def test_wrong_predictions_in_quiet_moments_rebuild_the_source(observed: Observed) -> None:
    """Nothing else would repair it: no batch is missing."""
    observed.add("r0")
    for _ in range(4):
        await served(observed, 64)
    assert observed.rebuilt == [SourceId("r0")]
    assert observed.repair.statistics()[SourceId("r0")].state is Trust.REBUILT


async def test_wrong_predictions_of_requests_that_overlap_are_no_evidence(
    observed: Observed,
) -> None:
    """Each changes the cache that the other was predicted for."""
    observed.add("r0")
    for _ in range(20):
        await served(observed, 64, overlaps=True)
    assert (observed.rebuilt, observed.repair.statistics()) == ([], {})
