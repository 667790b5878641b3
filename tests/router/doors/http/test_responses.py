"""The overview, made from replicas, caches and the request log."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from kvevents.events import EventBatch
from kvevents.layout import KVCacheLayout
from kvevents.publisher import announce
from router.doors.http.overview import Overview, StoreSummary, overview
from router.doors.http.replica_views import Fleet
from router.fleet.types import EventSource, ReplicaLoad, ReplicaView
from router.index.base import SourceId
from router.index.index import PrefixIndex
from router.index.layout_learner import LayoutHints, StoreHint
from router.policies.types import Candidate
from router.telemetry.problems import Level
from router.telemetry.request_log import RequestLog, RoutedRequest
from tests.support.blocks import FULL, Prefix, window


def replica(name: str, **changes: Any) -> ReplicaView:
    """A healthy one that serves a model and is meant to publish no events."""
    values: dict[str, Any] = {
        "id": name,
        "url": "http://127.0.0.1:8000",
        "state": "healthy",
        "health": "healthy",
        "draining": False,
        "models": ("m",),
        "adapters": {},
        "models_configured": False,
        "sources": (),
        "sources_configured": True,
        "notes": (),
        "speed": 1.0,
        "max_concurrent_requests": None,
        "load": ReplicaLoad(),
        "engine_load": None,
        "engine_load_age_s": None,
        "foreign_requests": 0,
        "last_error": None,
        "seconds_in_health": 200.0,
        "seconds_since_check": None,
        **dict.fromkeys(("checks", "failed_checks", "failed_requests", "times_unhealthy"), 0),
        **dict.fromkeys(("discoveries", "failed_discoveries", "failed_scrapes"), 0),
    }
    return ReplicaView(**{**values, **changes})


def overview_of(*replicas: ReplicaView, log: RequestLog | None = None, **fleet: Any) -> Overview:
    parts: dict[str, Any] = {"caches": {}, "feeds": {}, "tokenizer_disagreements": {}, **fleet}
    return overview(Fleet(replicas, **parts), log or RequestLog(), "prefix", 7)


def test_the_worst_replicas_come_first() -> None:
    """Page and terminal show as many as fit, from the top."""
    sick = replica("r-2", state="unhealthy", health="unhealthy")
    drained = replica("r-1", state="draining")
    found = overview_of(replica("r-0"), drained, sick)
    assert [(each.id, each.level) for each in found.replicas] == [
        ("r-2", Level.BAD),
        ("r-1", Level.WARN),
        ("r-0", Level.GOOD),
    ]
    assert (found.headline.level, found.headline.text) == (Level.BAD, "2 replicas have problems")


def test_replicas_are_in_the_order_of_their_numbers() -> None:
    """As one counts."""
    found = overview_of(*map(replica, ("replica-10", "replica-9", "replica-1")))
    assert [each.id for each in found.replicas] == ["replica-1", "replica-9", "replica-10"]


@pytest.mark.parametrize(
    ("replicas", "level", "text"),
    [
        ([], Level.WARN, "The router has no replicas."),
        ([replica("r")], Level.GOOD, "All replicas are well."),
        ([replica("r", state="draining")], Level.WARN, "1 replica has problems"),
    ],
)
def test_the_headline_says_whether_anything_is_wrong(
    replicas: list[ReplicaView], level: Level, text: str
) -> None:
    """It is read first, and often alone."""
    headline = overview_of(*replicas).headline
    assert (headline.level, headline.text) == (level, text)


def test_disagreements_of_all_models_make_one_problem() -> None:
    """A replica may serve a model and its aliases."""
    found = overview_of(replica("r"), tokenizer_disagreements={("m", "r"): 2, ("n", "r"): 1})
    (problem,) = found.replicas[0].problems
    assert problem.text.startswith("tokenises 3 probes differently")


def test_blocks_are_summed_over_ranks_by_group_and_tier() -> None:
    """These are the bars of the page; the layout is the same for all ranks."""
    index = PrefixIndex()
    prefix, layout = Prefix(list(range(64))), KVCacheLayout.build([FULL, window(64)])
    stored = [prefix.stored(0, FULL), prefix.stored(1, window(64))]
    offloaded = prefix.stored(1, window(64), end=32, medium="CPU")
    for rank in (0, 1):
        events = [announce(layout, None), *stored, *([offloaded] if rank else [])]
        index.apply(SourceId("r", rank), EventBatch(0.0, events))
    sources = tuple(EventSource(rank, "tcp://127.0.0.1:5557") for rank in (0, 1))
    found = overview_of(replica("r", sources=sources), caches=index.statistics())
    assert [(group.label, group.blocks) for group in found.replicas[0].groups] == [
        ("full", {"GPU": 8}),
        ("window 64", {"GPU": 8, "CPU": 2}),
    ]
    assert found.tiers == ["GPU", "CPU"]


def test_a_store_is_listed_once_with_those_who_share_it() -> None:
    """It belongs to none of them; without a line of its own only the reasons named it."""
    index, places = PrefixIndex(), [SourceId(name) for name in ("r-0", "r-1", "r-2")]
    hints = LayoutHints(stores=(StoreHint("bucket", ("STORAGE",)),))
    prefix = Prefix(list(range(64)))
    for place in places:
        index.add(place, None if place.replica == "r-2" else hints)
        stored = [prefix.stored(0, FULL), prefix.stored(0, FULL, end=32, medium="STORAGE")]
        index.apply(place, EventBatch(0.0, stored))
    found = overview_of(
        caches=index.statistics(), feeds={place: SimpleNamespace(model="m") for place in places}
    )
    assert found.stores == [StoreSummary(name="bucket", model="m", blocks=2, replicas=2)]


def test_blocks_of_an_unknown_layout_have_a_line() -> None:
    """They may be stored before anything says what the groups are."""
    index = PrefixIndex()
    place = SourceId("r")
    index.apply(place, EventBatch(0.0, [Prefix(list(range(64))).stored(3, FULL)]))
    sources = (EventSource(0, "tcp://127.0.0.1:5557"),)
    statistics = index.statistics()
    unknown = dataclasses.replace(statistics[place], layout=None)
    found = overview_of(replica("r", sources=sources), caches={place: unknown})
    (group,) = found.replicas[0].groups
    assert (group.number, group.label, group.kind) == (3, "group 3", None)


@pytest.mark.parametrize(
    ("actual", "shares"),
    [
        (48, ("48.0 %", "64.0 %", "64.0 %", "100 %")),
        (64, ("64.0 %", "64.0 %", "64.0 %", "0 %")),
        (None, (None, None, "64.0 %", None)),
    ],
)
def test_the_shares_of_the_last_minute_come_with_it(
    actual: int | None, shares: tuple[str | None, ...]
) -> None:
    """Page and terminal say the same; where no engine reports, the prediction must not look like
    the truth."""
    log = RequestLog()
    request = RoutedRequest(
        request_id="1",
        path="/v1/completions",
        model="m",
        policy="prefix",
        stream=False,
        prompt_tokens=100,
        unknown=None,
        candidate=Candidate(replica_id="a", cached_tokens=64),
        actual_tokens=actual,
    )
    log.add(request)
    log.finish(request)
    minute = overview_of(log=log).minute
    assert (
        minute.cached_share,
        minute.predicted_share,
        minute.promised_share,
        minute.mispredicted_share,
    ) == shares
    assert (minute.requests, minute.promised_tokens) == (1, 64)
