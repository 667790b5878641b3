"""Words for people: short, in one unit, and never rounded to something that is not so."""

from __future__ import annotations

import pytest

from kvevents.layout import GroupKind
from router.telemetry.labels import (
    KIND_LABELS,
    duration,
    group_label,
    natural_order,
    share,
    tier_order,
)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-1, "0 s"),
        (0.9, "0 s"),
        (89.9, "89 s"),
        (90, "1 min"),
        (5399, "89 min"),
        (5400, "1 h"),
        (172_800, "2 days"),
    ],
)
def test_a_duration_has_one_unit(seconds: float, words: str) -> None:
    """Nobody divides seconds into days at 3 a.m."""
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("part", "whole", "words"),
    [
        (0, 1000, "0 %"),
        (1, 100_000, "0.1 %"),
        (1, 3, "33.3 %"),
        (99_999, 100_000, "99.9 %"),
        (1000, 1000, "100 %"),
        (1100, 1000, "110 %"),
        (0, 0, "0 %"),
    ],
)
def test_a_share_is_never_rounded_to_all_or_nothing(part: int, whole: int, words: str) -> None:
    """ "100 %" of almost all would hide the one that is wrong."""
    assert share(part, whole) == words


@pytest.mark.parametrize(
    ("kind", "reach", "label"),
    [
        ("full_attention", None, "full"),
        ("sliding_window", 64, "window 64"),
        ("chunked_local_attention", 8192, "chunked 8192"),
        ("mamba", None, "Mamba"),
        ("some_future_kind", None, "some future kind"),
    ],
)
def test_a_group_is_named_by_kind_and_reach(kind: str, reach: int | None, label: str) -> None:
    """Two windows of one model differ by their size."""
    assert group_label(kind, reach) == label


def test_every_kind_has_a_label() -> None:
    """A new kind would show as its wire name."""
    assert set(KIND_LABELS) == {kind.value for kind in GroupKind}


def test_tiers_go_from_fast_to_slow() -> None:
    """Those of unknown speed last, by name."""
    assert sorted(["SSD", "CPU", "FS", "GPU"], key=tier_order) == ["GPU", "CPU", "FS", "SSD"]


def test_names_are_ordered_as_people_count() -> None:
    """Replica 9 before replica 10."""
    names = ["r-10", "r-9", "r", "10.0.0.10:8000", "10.0.0.9:8000"]
    assert sorted(names, key=natural_order) == [
        "10.0.0.9:8000",
        "10.0.0.10:8000",
        "r",
        "r-9",
        "r-10",
    ]
