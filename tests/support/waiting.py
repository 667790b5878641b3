"""Waiting for a condition: how long a test waits says nothing about the code, so the ceiling is far
above what the busiest machine needs, and one for all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

DEADLINE_S = 120.0
"""What takes milliseconds on a quiet machine has come by then on one with forty times the work."""
START_S = 5 * DEADLINE_S
"""For a process and its workers, which compute for seconds before they listen."""


async def eventually(
    condition: Callable[[], object],
    what: str,
    within_s: float = DEADLINE_S,
    show: Callable[[], object] = str,
) -> None:
    """Poll *condition* until it holds; fail with *what*, and what *show* returns, after
    *within_s*."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what} {show()}"
        await asyncio.sleep(0.005)
