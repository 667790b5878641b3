"""The last minute in numbers: what a person who has just come wants to know first."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

SECONDS = 60


class Tally(msgspec.Struct):
    """What happened in some time. Tokens are prompt tokens."""

    requests: int = 0
    """Routed, whatever became of them."""
    failed: int = 0
    """Answered with a 5xx or cut in the middle, the router's own refusals among them."""
    routed_tokens: int = 0
    """Of all that were routed, as far as their prompts are known."""
    promised_tokens: int = 0
    """Of these, predicted to be cached."""
    compared: int = 0
    """Requests whose answers told what was cached."""
    compared_tokens: int = 0
    predicted_tokens: int = 0
    """Of the compared, predicted to be cached."""
    actual_tokens: int = 0
    """Of the compared, really cached."""
    over: int = 0
    """Predictions that promised too much."""
    under: int = 0

    def add(self, other: Tally) -> None:
        """Sum up."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Minute:
    """A tally for each of the last 60 seconds. *clock*: seconds that never go back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._tallies = [Tally() for _ in range(SECONDS)]
        self._second = int(self._started)

    @property
    def now(self) -> Tally:
        """Where what happens now is counted."""
        self._make_way()
        return self._tallies[self._second % SECONDS]

    @property
    def seconds(self) -> float:
        """How much time the sum is about: a minute, less at the start."""
        self._make_way()
        since = max(self._started, self._second - SECONDS + 1)
        return max(self._clock() - since, 1.0)

    def total(self) -> Tally:
        """The sum."""
        self._make_way()
        total = Tally()
        for tally in self._tallies:
            total.add(tally)
        return total

    def _make_way(self) -> None:
        """Forget what is older than a minute."""
        second = int(self._clock())
        for passed in range(max(self._second + 1, second - SECONDS + 1), second + 1):
            self._tallies[passed % SECONDS] = Tally()
        self._second = max(second, self._second)
