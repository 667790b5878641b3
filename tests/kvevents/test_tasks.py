"""Tasks that should last."""

from __future__ import annotations

import asyncio

import pytest

from kvevents.tasks import begin_lasting


async def fail() -> None:
    raise ZeroDivisionError


async def test_a_lasting_task_that_ends_by_an_error_says_what_follows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The one that follows event streams could end without a word; its cancellation is no news."""
    failing = begin_lasting(fail(), "the feed", "no stream is followed")
    cancelled = begin_lasting(asyncio.sleep(3600), "another", "nothing follows")
    cancelled.cancel()
    await asyncio.wait([failing, cancelled])
    (record,) = caplog.records
    assert record.levelname == "CRITICAL"
    assert record.getMessage() == "the feed ended, and no stream is followed"
    assert "ZeroDivisionError" in caplog.text
