"""Virtual time: actions and their times, earliest first."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class TimelineError(RuntimeError):
    """An action was planned in the past."""


class Timeline:
    """Actions by time; those planned for the same moment happen in the order in which they were
    planned."""

    def __init__(self) -> None:
        self._planned: list[tuple[float, int, Callable[[], None]]] = []
        self._turns = count()
        self.now_s = 0.0

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Plan an action.

        Raises:
            TimelineError: *time_s* has passed.
        """
        if time_s < self.now_s:
            raise TimelineError(f"an action for {time_s} s: it is {self.now_s} s already")
        heapq.heappush(self._planned, (time_s, next(self._turns), action))

    def run(self) -> None:
        """Run all actions, including those planned meanwhile."""
        while self._planned:
            self.now_s, _, action = heapq.heappop(self._planned)
            action()

    def now(self) -> float:
        """Return the present time in seconds, as a clock."""
        return self.now_s
