"""The terminal's view: what it says, what fits, and what it filters out."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import msgspec
import pytest
from rich.console import Console

from router.cli.running_router import plain
from router.cli.top_command import Glance, render
from router.doors.http.overview import (
    GroupSummary,
    Headline,
    LastMinute,
    Overview,
    ReplicaSummary,
    StoreSummary,
)
from router.doors.http.request_views import RequestsView, RequestView
from router.doors.http.route_views import HitView
from router.doors.http.view_examples import EXAMPLES
from router.fleet.engine_load import EngineLoad
from router.telemetry.labels import KIND_LABELS
from router.telemetry.problems import Level, ReplicaProblem, SourceSummary

MINUTE: dict[str, Any] = {
    "requests": 120,
    "compared": 100,
    "over": 2,
    "seconds": 60.0,
    "cached_share": "50.0 %",
    "predicted_share": "52.0 %",
    "promised_share": "52.0 %",
    "mispredicted_share": "2.0 %",
}
FULL = GroupSummary(number=0, label="full", kind="full_attention", reach=None, blocks={"GPU": 1200})
WINDOW = GroupSummary(
    number=1, label="window 64", kind="sliding_window", reach=64, blocks={"GPU": 4, "CPU": 8}
)


def source(dp_rank: int = 0, state: str | None = "live") -> SourceSummary:
    return SourceSummary(dp_rank=dp_rank, state=state, unplaced=0, incomplete=False, unreadable=0)


def replica(number: int, **changes: Any) -> ReplicaSummary:
    problems = changes.get("problems", [])
    values: dict[str, Any] = {
        "id": f"replica-{number}",
        "url": "http://127.0.0.1:8000",
        "level": problems[0].level if problems else Level.GOOD,
        "state": "healthy",
        "health": "healthy",
        "seconds_in_health": 200.0,
        "health_duration": "3 min",
        "serves": 1,
        "requests": 3,
        "prefill_tokens": 0,
        "engine_load": EngineLoad(2, 1, 0.5),
        "sources_configured": True,
        "sources": [source()],
        "groups": [FULL, WINDOW],
        "problems": problems,
    }
    return ReplicaSummary(**{**values, **changes})


def request() -> RequestView:
    example = EXAMPLES[RequestsView]
    assert isinstance(example, RequestsView)
    changes: dict[str, Any] = {
        "replica": "replica-1",
        "reason": "960 of 1000 tokens cached",
        "prompt_tokens": 1000,
        "attempts": 2,
        "predicted": HitView(gpu_cached_tokens=960, cached_tokens=960, suspect=False),
        "actual": 900,
        "verdict": "over",
        "first_byte_ms": 12.3,
    }
    return msgspec.structs.replace(example.requests[0], **changes)


def glance(
    *replicas: ReplicaSummary,
    requests: int = 0,
    silence: str | None = None,
    headline: Headline | None = None,
    **minute: Any,
) -> Glance:
    overview = Overview(
        started_at=0.0,
        now=0.0,
        uptime="3 min",
        policy="prefix",
        tokenizers={},
        under_way=7,
        headline=headline or Headline(level=Level.GOOD, text="All replicas are well."),
        minute=LastMinute(**{**MINUTE, **minute}),
        models=["m"],
        tiers=[
            "GPU",
            *(
                ["CPU"]
                if any("CPU" in group.blocks for each in replicas for group in each.groups)
                else []
            ),
        ],
        kinds=KIND_LABELS,
        replicas=list(replicas),
    )
    return Glance(overview, [request()] * requests, silence)


def shown(seen: Glance, width: int = 120, height: int | None = None) -> list[str]:
    console = Console(width=width, height=height or 1000, color_system=None)
    with console.capture() as capture:
        console.print(render(seen, width, height))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_what_replicas_share_has_a_line() -> None:
    """It is in nobody's row."""
    seen = glance(replica(1))
    store = StoreSummary(name="bucket", model="m", blocks=1200, replicas=2)
    overview = msgspec.structs.replace(seen.overview, stores=[store])
    lines = shown(dataclasses.replace(seen, overview=overview))
    assert "store bucket: 1,200 blocks of m, shared by 2 replicas" in lines


def test_everything_is_there_in_words() -> None:
    """The first line matters most; reported hits come before predicted ones."""
    lines = shown(glance(replica(1), requests=1, seconds=60.0))
    assert lines[:3] == [
        "All replicas are well.",
        "2.0 requests/s, 7 under way, 0 failed · policy prefix",
        "50.0 % of tokens cached, predicted 52.0 % · 2.0 % mispredicted (2 over, 0 under)",
    ]
    rows = [line.split() for line in lines]
    assert ["replica-1", "healthy", "3", "2", "1", "50%", "live", "full", "1,200", "0"] in rows
    assert ["window", "64", "4", "8"] in rows
    (request,) = [line for line in lines if "960/1,000" in line]
    assert request.endswith(
        " replica-1 960/1,000 over 60 12 ms 200 (2 tries) 960 of 1000 tokens cached"
    )


BAD, WARN = ReplicaProblem(Level.BAD, "unhealthy"), ReplicaProblem(Level.WARN, "draining")


def test_every_problem_has_a_line_and_the_worst_come_first() -> None:
    """Of hundreds of replicas these are the ones that a person came for."""
    sick, drained = replica(2, problems=[BAD, WARN]), replica(1, problems=[WARN])
    headline = Headline(level=Level.BAD, text="2 replicas have problems")
    lines = shown(glance(sick, drained, replica(0), headline=headline))
    assert lines[:4] == [
        "2 replicas have problems:",
        "  replica-2 unhealthy",
        "  replica-2 draining",
        "  replica-1 draining",
    ]
    assert [line.split()[0] for line in lines if " healthy" in line] == [
        "replica-2",
        "replica-1",
        "replica-0",
    ]


def test_silence_is_reported_with_the_time_of_the_state_shown() -> None:
    """A stale view that looks current would mislead."""
    first = shown(glance(replica(1), silence="no connection"))[0]
    assert re.fullmatch(r"showing the state of \d\d:\d\d:\d\d; no connection", first.strip())


@pytest.mark.parametrize(
    "minute",
    [
        {"cached_share": None, "promised_share": "99.0 %"},
        {"cached_share": None, "promised_share": None},
    ],
)
def test_hits_that_no_engine_reports_are_shown_as_predicted(minute: dict[str, str | None]) -> None:
    """Unknown hits must not look like none."""
    expected = (
        "99.0 % of tokens predicted to be cached; no engine reports it"
        if minute["promised_share"]
        else "no prompt in the last minute"
    )
    assert shown(glance(replica(1), **minute))[2] == expected


def test_a_router_without_replicas_says_so() -> None:
    """An empty table would leave one guessing."""
    headline = Headline(level=Level.WARN, text="The router has no replicas.")
    assert shown(glance(headline=headline))[0] == "The router has no replicas."


@pytest.mark.parametrize("height", [16, 24, 50])
@pytest.mark.parametrize("count", [1, 4, 300])
@pytest.mark.parametrize("wrong", [0, 1, 300])
@pytest.mark.parametrize("windows", [1, 5])
def test_it_fits_the_terminal(height: int, count: int, wrong: int, windows: int) -> None:
    """What does not fit would push the first line out."""
    groups = [FULL, *[WINDOW] * windows]
    text = "events were lost for good: its hits are discounted " * 3
    problems = [ReplicaProblem(Level.BAD, text)]
    replicas = [
        replica(number, groups=groups, problems=problems if number < wrong else [])
        for number in range(count)
    ]
    lines = shown(glance(*replicas, requests=60), 80, height)
    assert len(lines) <= height
    assert any(line.startswith("replica-") and "healthy" in line for line in lines)
    assert count < 300 or any("more replicas" in line for line in lines)


def test_a_long_name_is_cut_but_no_number() -> None:
    """A pod's name is longer than everything else."""
    name = "vllm-gemma-3-12b-it-7d9f8b6c5d-x2k4q.models.svc.cluster.local:8000"
    for height in (None, 24):
        lines = [
            line.split() for line in shown(glance(replica(1, id=name), requests=3), 80, height)
        ]
        (row,) = [line for line in lines if "healthy" in line]
        assert (row[0][:8], row[0][-5:], "…" in row[0]) == ("vllm-gem", ":8000", True)
        assert row[1:] == ["healthy", "3", "2", "1", "50%", "live", "full", "1,200", "0"]


def test_no_problem_is_cut_when_printed_once() -> None:
    """A script looks for the reason."""
    reason = (
        "unhealthy for 3 min: GET /health: no connection: Connect call failed ('10.244.12.7', 8000)"
    )
    headline = Headline(level=Level.BAD, text="1 replica has problems")
    wrong = glance(replica(1, problems=[ReplicaProblem(Level.BAD, reason)]), headline=headline)
    assert f"  replica-1 {reason}" in shown(wrong, 200)
    assert " ".join(" ".join(shown(wrong, 80)).split()).startswith(
        f"1 replica has problems: replica-1 {reason}"
    )


def test_layouts_that_are_not_known_and_several_ranks_have_a_line() -> None:
    """Blocks may come before the layout; a source may not be followed yet."""
    sources = [source(rank, state) for rank, state in enumerate(["live", "live", None])]
    unknown = GroupSummary(number=0, label="group 0", kind=None, reach=None, blocks={"GPU": 1200})
    lines = shown(glance(replica(1, groups=[unknown, WINDOW], sources=sources, engine_load=None)))
    (row,) = [line.split() for line in lines if "healthy" in line]
    assert row == [
        "replica-1",
        "healthy",
        "3",
        "-",
        "-",
        "-",
        "2",
        "live,",
        "1",
        "-",
        "group",
        "0",
        "1,200",
        "0",
    ]
    nothing = [
        line.split()
        for line in shown(glance(replica(1, groups=[], sources=[])))
        if "healthy" in line
    ]
    assert nothing == [["replica-1", "healthy", "3", "2", "1", "50%", "none", "-", "0"]]


def test_names_cannot_command_the_terminal() -> None:
    """Names of models and replicas, and errors, come from outside."""
    assert plain("a\x1b[31m\x07\u202e[bold]b").plain == "a?[31m??[bold]b"
    problem = ReplicaProblem(Level.BAD, "unhealthy: \x1b]0;pwned\x07[red]")
    assert "  replica-1 unhealthy: ?]0;pwned?[red]" in shown(glance(replica(1, problems=[problem])))
