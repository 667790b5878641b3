"""What the system refuses the router is counted, logged once a minute, and shown for one."""

from __future__ import annotations

import asyncio
import logging

import pytest

from router.telemetry.shortages import RESOURCES, SHOWN_S, Shortages


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


async def test_memory_that_the_event_loop_did_not_get_is_a_shortage(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It has no one to raise to, and a traceback a connection says less; other failures keep it."""
    shortages = Shortages()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(shortages.note_failure_of_loop)
    for failure in (MemoryError(), MemoryError(), ValueError("another")):
        loop.call_exception_handler({"message": "Fatal error on transport", "exception": failure})
    assert shortages.counts["memory"] == 2
    assert [record.name for record in caplog.records] == [
        "router.telemetry.shortages",
        "asyncio",
    ]
