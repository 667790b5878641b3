"""An event loop whose turns, and whose time, the test makes."""

from __future__ import annotations

from collections.abc import Callable


class LateLoop:
    """Gets around to what was scheduled when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0
        self._scheduled: list[Callable[[], object]] = []

    def time(self) -> float:
        return self.now

    def call_soon(self, call: Callable[[], object]) -> None:
        self._scheduled.append(call)

    def get_around(self) -> int:
        """Make one turn; return how many callbacks it had."""
        scheduled, self._scheduled = self._scheduled, []
        for call in scheduled:
            call()
        return len(scheduled)
