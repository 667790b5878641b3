"""What is wrong with a replica: every sentence, and the worst first."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvevents.events import EventBatch
from kvevents.hashing import HashChain
from kvevents.layout import KVCacheLayout
from kvevents.publisher import announce
from router.fleet.types import ReplicaLoad, ReplicaView
from router.index.index import PrefixIndex
from router.telemetry.problems import (
    Level,
    ReplicaProblem,
    SourceSummary,
    problems_of,
    summarize_source,
)
from router.telemetry.self_repair import Cause, Trust, TrustStatistics
from tests.support.blocks import FULL, SOURCE, Prefix, window


def replica(**changes: Any) -> ReplicaView:
    """A healthy one that serves a model."""
    values: dict[str, Any] = {
        "id": "r",
        "url": "http://127.0.0.1:8000",
        "state": "healthy",
        "health": "healthy",
        "draining": False,
        "models": ("m",),
        "adapters": {},
        "models_configured": False,
        "sources": (),
        "sources_configured": False,
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


def source(
    state: str | None = "live",
    dp_rank: int = 0,
    unplaced: int = 0,
    incomplete: bool = False,
    unreadable: int = 0,
) -> SourceSummary:
    return SourceSummary(
        dp_rank=dp_rank,
        state=state,
        unplaced=unplaced,
        incomplete=incomplete,
        unreadable=unreadable,
    )


LOST = "bad events were lost for good: its hits are discounted"
SILENT = "its replay endpoint tcp://10.0.0.7:6557 does not answer"


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("suspect", f"bad {SILENT}: its hits are discounted"),
        ("live", f"warn {SILENT}: a lost event cannot be requested again"),
        ("recovering", f"warn {SILENT}: a lost event cannot be requested again"),
    ],
)
def test_what_an_operator_can_mend_takes_the_place_of_what_follows_from_it(
    state: str, expected: str
) -> None:
    """That events were lost for good sends nobody to the port that a policy closed."""
    found = msgspec.structs.replace(source(state), stream_problem=SILENT)
    (problem,) = problems_of(replica(), [found], 0)
    assert f"{problem.level.value} {problem.text}" == expected
    ranks = problems_of(replica(), [found, msgspec.structs.replace(source(), dp_rank=1)], 0)
    assert ranks[0].text == f"{problem.text} (rank 0)"


def test_an_estimate_is_named_where_events_are_missing() -> None:
    """An operator must not take its hits for exact ones, nor the replica for routed by load."""
    (silent,) = problems_of(replica(), [], 0, ())
    assert silent.text == "no event stream: its hits are approximate"
    texts = [each.text for each in problems_of(replica(), [source("suspect", 1), source()], 0, [1])]
    assert texts == [
        "events were lost for good: its hits are discounted (rank 1)",
        "its events have been missing for long: its hits are approximate (rank 1)",
    ]


@pytest.mark.parametrize(
    ("view", "sources", "disagreements", "expected"),
    [
        ({}, [source()], 0, []),
        ({}, [source(None)], 0, []),
        ({"sources_configured": True}, [], 0, []),
        ({"health": "unhealthy", "state": "unhealthy"}, [source()], 0, ["bad unhealthy for 3 min"]),
        (
            {"health": "unhealthy", "last_error": "no connection"},
            [source()],
            0,
            ["bad unhealthy for 3 min: no connection"],
        ),
        ({"health": "starting"}, [], 0, ["warn no health check has passed yet, for 3 min"]),
        ({"state": "draining"}, [source()], 0, ["warn draining: gets no new requests"]),
        (
            {"models": ()},
            [source()],
            0,
            ["bad has not reported what it serves: gets no requests"],
        ),
        (
            {"notes": ("no list", "no scrape")},
            [],
            0,
            ["warn no event stream: it is routed by load; no list; no scrape"],
        ),
        ({}, [source("connecting")], 0, ["warn nothing publishes events at its address yet"]),
        ({}, [source("recovering")], 0, ["warn events were lost and are being requested again"]),
        ({}, [source("dead")], 0, ["bad its events are no longer followed"]),
        ({}, [source(), source("suspect", 1)], 0, [f"{LOST} (rank 1)"]),
        ({}, [source(incomplete=True)], 0, ["warn some of its blocks are not known"]),
        ({}, [source(unreadable=1)], 0, ["warn 1 of its events could not be read"]),
        (
            {},
            [source(unreadable=2), source(unreadable=1_000)],
            0,
            ["warn 1,002 of its events could not be read"],
        ),
        ({}, [source(unplaced=1)], 0, ["warn 1 block that no prompt can find"]),
        (
            {},
            [source(unplaced=700), source(dp_rank=1, unplaced=400)],
            0,
            ["warn 1,100 blocks that no prompt can find"],
        ),
        (
            {},
            [source()],
            3,
            ["bad tokenises 3 probes differently from the router: its hits are mispredicted"],
        ),
        (
            {"state": "draining"},
            [source("suspect")],
            0,
            [LOST, "warn draining: gets no new requests"],
        ),
    ],
)
def test_each_problem_has_its_sentence(
    view: dict[str, Any], sources: list[SourceSummary], disagreements: int, expected: list[str]
) -> None:
    """A person must know what to do next, and what first."""
    found = problems_of(replica(**view), sources, disagreements)
    assert [f"{problem.level.value} {problem.text}" for problem in found] == expected


def test_of_many_ranks_some_are_named() -> None:
    """A line stays a line."""
    (found,) = problems_of(replica(), [source("dead", rank) for rank in range(9)], 0)
    assert found == ReplicaProblem(
        Level.BAD, "its events are no longer followed (rank 0, 1, 2, 3, 4, 5, 6, 7 and more)"
    )


@pytest.mark.parametrize(("seed", "unplaced"), [(None, 3), ("a seed", 0)])
def test_blocks_without_a_place_are_lost_only_where_the_hash_function_is_unknown(
    seed: str | None, unplaced: int
) -> None:
    """After a restart of the router a window's blocks come without those before them; by their
    hashes they are found."""
    layout = KVCacheLayout.build([FULL, window(64)])
    prefix = Prefix(list(range(128)), seed=seed or "a seed nobody knows")
    announcement = announce(layout, HashChain.from_seed("sha256", seed) if seed else None)
    index = PrefixIndex()
    index.apply(SOURCE, EventBatch(0.0, [announcement, prefix.stored(1, window(64), start=80)]))
    known = index.statistics()[SOURCE]
    assert known.unplaced == 3
    assert summarize_source(0, None, known).unplaced == unplaced


def test_hits_that_stay_wrong_are_named_with_their_likely_cause() -> None:
    """Nothing was lost, so nothing else would say what to look at."""
    trust = TrustStatistics(Trust.LASTING, 1, Cause.EAGLE)
    wrong = summarize_source(1, None, None, trust)
    (problem,) = problems_of(replica(), [source(), source(dp_rank=2), wrong], 0)
    assert problem.level is Level.BAD
    assert problem.text == (
        "its hits stay mispredicted after a rebuild: always one block too many: it drafts with"
        " EAGLE or MTP; set layout.eagle (rank 1)"
    )
    healed = TrustStatistics(Trust.TRUSTED, 1, None)
    assert problems_of(replica(), [summarize_source(1, None, None, healed)], 0) == []
