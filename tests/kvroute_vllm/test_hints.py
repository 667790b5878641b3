"""What a request names as worth keeping: read once, bounded, and never an engine's problem."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute_vllm.hints import (
    MAX_BOUNDARIES,
    NO_HINTS,
    HitGrid,
    KeepHints,
    MalformedHints,
    first_stop,
    read_hints,
)

HOSTILE_LENGTHS = [
    "640",
    640,
    None,
    {"640": 640},
    [640.0],
    [float("nan")],
    [float("inf")],
    [True],
    [0],
    [-640],
    [None],
    ["640"],
    [[640]],
    [-(10**5000)],
    list(range(1, MAX_BOUNDARIES + 2)),
]
HOSTILE_FLAGS = ["true", None, [], {}, 2, -1, 0.5, float("nan"), 10**5000]


def test_boundaries_come_ascending_and_once() -> None:
    """Managers walk them once per step."""
    assert read_hints({"kvroute_keep": [640, 16, 640]}, 700) == KeepHints((16, 640))


def test_a_boundary_that_is_no_shorter_than_the_prompt_is_left_out() -> None:
    """vLLM keeps the end of a prompt by itself, and nothing lies behind it."""
    assert read_hints({"kvroute_keep": [699, 700, 10**5000]}, 700) == KeepHints((699,))


@pytest.mark.parametrize(("value", "expected"), [(True, True), (1, True), (1.0, True), (0, False)])
def test_a_flag_may_arrive_as_a_number(value: Any, expected: bool) -> None:
    """The schema of `vllm_xargs` has no booleans and makes a 1 of `true`."""
    assert read_hints({"kvroute_keep_end": value}, 700).keep_end is expected


@pytest.mark.parametrize("extra_args", [None, {}, {"session_id": "a"}, {"kvroute_keep": []}, "a"])
def test_a_request_without_hints_has_none(extra_args: Any) -> None:
    """What most requests of a fleet without a router look like."""
    assert read_hints(extra_args, 700) is NO_HINTS


@pytest.mark.parametrize("value", HOSTILE_LENGTHS, ids=lambda value: str(type(value)))
def test_lengths_of_another_form_are_refused(value: Any) -> None:
    """The message must not show the value: Python refuses to write out a number of 5,000 digits."""
    with pytest.raises(MalformedHints, match=r"^kvroute_keep"):
        read_hints({"kvroute_keep": value}, 700)


@pytest.mark.parametrize("value", HOSTILE_FLAGS, ids=lambda value: str(type(value)))
def test_a_flag_of_another_form_is_refused(value: Any) -> None:
    """As above."""
    with pytest.raises(MalformedHints, match=r"^kvroute_keep_end must be"):
        read_hints({"kvroute_keep": [16], "kvroute_keep_end": value}, 700)


_anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=12) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=20,
)


@given(_anything, _anything, st.integers(1, 10**6))
def test_whatever_comes_is_either_refused_or_bounded(keep: Any, end: Any, length: int) -> None:
    """This runs in the scheduler of an engine that serves others."""
    try:
        hints = read_hints({"kvroute_keep": keep, "kvroute_keep_end": end}, length)
    except MalformedHints:
        return
    assert len(hints.boundaries) <= MAX_BOUNDARIES
    assert all(0 < boundary < length for boundary in hints.boundaries)


@pytest.mark.parametrize(
    ("grid", "boundary", "hit"),
    [
        (HitGrid(16), 645, 640),
        (HitGrid(16), 640, 640),
        (HitGrid(64), 127, 64),
        (HitGrid(16, lookahead=1), 640, 624),
        (HitGrid(16, lookahead=1), 641, 640),
        (HitGrid(16, dropped=16), 645, 624),
        (HitGrid(16, dropped=16), 31, 0),
        (HitGrid(16, lookahead=4), 3, 0),
    ],
)
def test_a_boundary_is_kept_where_a_hit_can_end(grid: HitGrid, boundary: int, hit: int) -> None:
    """A window one block further on would serve nobody."""
    assert grid.hit_of(boundary) == hit


def test_a_chunk_ends_at_the_first_block_within_it() -> None:
    """A state exists nowhere else; boundaries of before and behind are other chunks'."""
    hits = (40, 70, 200)
    assert first_stop(hits, 0, 96, 16) == 32
    assert first_stop(hits, 32, 96, 16) == 64
    assert first_stop(hits, 64, 96, 16) == 96
    assert first_stop((8,), 0, 96, 16) == 96
