"""What the system refuses the router is counted, logged once a minute, and shown for one."""

from __future__ import annotations

import logging

import pytest

from router.observability.shortages import RESOURCES, SHOWN_S, Shortages


def test_a_shortage_is_logged_once_a_minute_and_counted_every_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A line for each refused connection would fill the disk at the worst of times."""
    now = 1000.0
    shortages = Shortages(clock=lambda: now)
    with caplog.at_level(logging.ERROR):
        for _ in range(100):
            shortages.note("open_files")
        assert len(caplog.records) == 1
        now += SHOWN_S
        shortages.note("open_files")
        assert len(caplog.records) == 2
    assert shortages.counts == {**dict.fromkeys(RESOURCES, 0), "open_files": 101}


def test_a_shortage_is_shown_for_a_minute_after_it_was_last_felt() -> None:
    """The page must not stay red for a burst of last week."""
    now = 1000.0
    shortages = Shortages(clock=lambda: now)
    assert shortages.present() == []
    for what in RESOURCES:
        shortages.note(what)
    assert len(shortages.present()) == len(RESOURCES)
    assert all(text.startswith("the router is out of ") for text in shortages.present())
    now += SHOWN_S
    assert shortages.present() == []
