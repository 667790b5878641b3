"""What a provider of replicas is, and what it reports to."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Protocol

from router.config import ReplicaConfig


class ProviderListener(Protocol):
    """Hears of what one provider finds, on the event loop."""

    def on_replicas(self, replicas: Sequence[ReplicaConfig], broken: Sequence[str] = ()) -> None:
        """These are all of its replicas from now on.

        Args:
            replicas: In any order.
            broken: What it named besides and cannot be one, each with the reason.
        """

    def on_failure(self, why: str) -> None:
        """It cannot say what its replicas are now; the last list stays."""


class ReplicaProvider(Protocol):
    """One place that knows of replicas."""

    name: str
    """For logs, metrics and messages: its kind and its place."""

    async def follow(self, listener: ProviderListener) -> None:
        """Report to *listener* until cancelled. Whatever goes wrong on the way is reported and
        tried again."""
        ...


class BackOff:
    """How long to wait after failures in a row: twice as long each time, and never in step with
    others who wait."""

    def __init__(
        self, first_s: float = 0.5, most_s: float = 30.0, random: Random | None = None
    ) -> None:
        """Begin with no failure.

        Args:
            first_s: The longest wait after the first failure.
            most_s: The longest wait at all.
            random: Shortens each wait, to as little as half.
        """
        self._first_s = first_s
        self._most_s = most_s
        self._random = random or Random()
        self._failures = 0

    def succeeded(self) -> None:
        """The next failure is the first again."""
        self._failures = 0

    def wait_s(self) -> float:
        """Count a failure; return how long to wait now, in seconds."""
        longest = min(self._first_s * 2.0 ** min(self._failures, 32), self._most_s)
        self._failures += 1
        return longest * self._random.uniform(0.5, 1.0)
