"""The terminal's view: what it says, what fits, and what it does not let through."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from rich.console import Console

from router.cli.running_router import plain
from router.cli.top_answers import Overview, Request
from router.cli.top_view import Glance, view

MINUTE = {
    "requests": 120,
    "compared": 100,
    "compared_tokens": 1000,
    "predicted_tokens": 520,
    "actual_tokens": 500,
    "over": 2,
}


def replica(number: int, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "id": f"replica-{number}",
        "state": "healthy",
        "requests": 3,
        "gauges": [2.0, 1.0, 0.5],
        "sources": [{"dp_rank": 0, "state": "live", "unplaced": 0, "incomplete": False}],
        "groups": [
            {"kind": "full_attention", "reach": None},
            {"kind": "sliding_window", "reach": 64},
        ],
        "blocks": [[0, "GPU", 1200], [1, "GPU", 4], [1, "CPU", 8]],
        "problems": [],
    }
    return {**values, **changes}


def glance(
    *replicas: dict[str, Any], requests: int = 0, silence: str | None = None, **minute: Any
) -> Glance:
    values = {
        "now": 0.0,
        "policy": "prefix",
        "under_way": 7,
        "minute": {**MINUTE, **minute},
        "replicas": replicas,
    }
    request = {
        "arrived_at": 0.0,
        "prompt_tokens": 1000,
        "replica": "replica-1",
        "reason": "960 of 1000 tokens cached",
        "attempts": 2,
        "predicted": {"cached_tokens": 960},
        "actual": 900,
        "verdict": "over",
        "failed": False,
        "status": 200,
        "end": "completed",
        "first_byte_ms": 12.3,
    }
    return Glance(
        msgspec.convert(values, Overview), [msgspec.convert(request, Request)] * requests, silence
    )


def shown(seen: Glance, width: int = 120, height: int | None = None) -> list[str]:
    console = Console(width=width, height=height or 1000, color_system=None)
    with console.capture() as capture:
        console.print(view(seen, width, height))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_everything_is_there_in_words() -> None:
    """The first line is what matters; the truth of hits before their prediction."""
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


def test_what_is_wrong_comes_first_and_the_worst_before_it() -> None:
    """Of hundreds of replicas these are the ones that a person came for."""
    drained = replica(1, problems=[{"level": "warn", "text": "draining"}])
    sick = replica(
        2, problems=[{"level": "bad", "text": "unhealthy"}, {"level": "warn", "text": "draining"}]
    )
    lines = shown(glance(replica(0), drained, sick))
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


def test_replicas_stand_in_the_order_of_their_numbers() -> None:
    """As one counts."""
    names = [
        line.split()[0] for line in shown(glance(*map(replica, (10, 9, 1)))) if "healthy" in line
    ]
    assert names == ["replica-1", "replica-9", "replica-10"]


def test_silence_is_said_with_the_time_of_what_is_shown() -> None:
    """An old picture that looks new would mislead."""
    first = shown(glance(replica(1), silence="no connection"))[0]
    assert first.startswith("no connection; what follows is of ")


@pytest.mark.parametrize(
    "minute",
    [{"compared_tokens": 0, "routed_tokens": 100, "promised_tokens": 99}, {"compared_tokens": 0}],
)
def test_hits_that_no_engine_reports_are_told_as_predicted(minute: dict[str, int]) -> None:
    """What is not known must not look like nothing."""
    expected = (
        "99.0 % of tokens predicted to be cached; no engine reports it"
        if len(minute) > 1
        else "no prompt in the last minute"
    )
    assert shown(glance(replica(1), **minute))[2] == expected


def test_a_router_without_replicas_says_so() -> None:
    """An empty table would leave one guessing."""
    assert shown(glance())[0] == "The router has no replicas."


@pytest.mark.parametrize("height", [16, 24, 50])
@pytest.mark.parametrize("count", [1, 4, 300])
@pytest.mark.parametrize("wrong", [0, 1, 300])
@pytest.mark.parametrize("windows", [1, 5])
def test_it_fits_the_terminal(height: int, count: int, wrong: int, windows: int) -> None:
    """What does not fit would push the first line out."""
    groups = [
        {"kind": "full_attention", "reach": None},
        *[{"kind": "sliding_window", "reach": 64}] * windows,
    ]
    problems = [{"level": "bad", "text": "events were lost for good: its hits are discounted " * 3}]
    replicas = [
        replica(number, groups=groups, problems=problems if number < wrong else [])
        for number in range(count)
    ]
    lines = shown(glance(*replicas, requests=60), 80, height)
    assert len(lines) <= height
    assert any(line.startswith("replica-") and "healthy" in line for line in lines)
    assert count < 300 or any("more replicas" in line for line in lines)


def test_a_long_name_is_cut_and_no_number() -> None:
    """A pod's name is longer than all the rest."""
    name = "vllm-gemma-3-12b-it-7d9f8b6c5d-x2k4q.models.svc.cluster.local:8000"
    for height in (None, 24):
        lines = [
            line.split() for line in shown(glance(replica(1, id=name), requests=3), 80, height)
        ]
        (row,) = [line for line in lines if "healthy" in line]
        assert (row[0][:12], row[0][-1]) == ("vllm-gemma-3", "…")
        assert row[1:] == ["healthy", "3", "2", "1", "50%", "live", "full", "1,200", "0"]


def test_printed_once_nothing_that_is_wrong_is_cut() -> None:
    """A script looks for the reason."""
    reason = (
        "unhealthy for 3 min: GET /health: no connection: Connect call failed ('10.244.12.7', 8000)"
    )
    wrong = glance(replica(1, problems=[{"level": "bad", "text": reason}]))
    assert f"  replica-1 {reason}" in shown(wrong, 200)
    assert " ".join(" ".join(shown(wrong, 80)).split()).startswith(
        f"1 replica has problems: replica-1 {reason}"
    )


def test_layouts_that_are_not_known_and_several_ranks_have_a_line() -> None:
    """Blocks may come before the layout; a source may not be followed yet."""
    states = ["live", "live", None]
    sources = [
        {"dp_rank": rank, "state": state, "unplaced": 0, "incomplete": False}
        for rank, state in enumerate(states)
    ]
    lines = shown(glance(replica(1, groups=[], sources=sources, gauges=None)))
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
        for line in shown(glance(replica(1, groups=[], blocks=[], sources=[])))
        if "healthy" in line
    ]
    assert nothing == [["replica-1", "healthy", "3", "2", "1", "50%", "none", "-", "0"]]


def test_names_cannot_command_the_terminal() -> None:
    """Models, replicas and errors come from elsewhere."""
    assert plain("a\x1b[31m\x07\u202e[bold]b").plain == "a?[31m??[bold]b"
    problem = {"level": "bad", "text": "unhealthy: \x1b]0;pwned\x07[red]"}
    assert "  replica-1 unhealthy: ?]0;pwned?[red]" in shown(glance(replica(1, problems=[problem])))
