"""Decides whether a replica is healthy, by outcomes of checks and requests. No clock, no I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from router.fleet.types import ReplicaState

MAX_ERROR_CHARS = 300
_RECENT_REQUESTS = 32
_FEW_FAILED = 3
"""The least failures at a replica that serves what others fail."""


@dataclass(eq=False, repr=False)
class HealthRecord:
    """Counts in a row, for one replica.

    Checks and requests are counted separately: otherwise a server whose /health works while its
    requests fail would never leave the rotation. A passed check brings it back, so such a server
    alternates, and costs a few retries per interval.
    """

    unhealthy_after: int
    """Failures in a row that make it unhealthy."""
    healthy_after: int
    """Passed checks in a row that make it healthy."""

    def __post_init__(self) -> None:
        self.health = ReplicaState.STARTING
        """Never `DRAINING`, which is the operator's."""
        self.on_changed: Callable[[], None] | None = None
        """Called when *health* has changed."""
        self.last_error: str | None = None
        self.times_unhealthy = 0
        self.checks = self.failed_checks = self.failed_requests = 0
        self._passed_in_a_row = self._failed_in_a_row = self._failed_requests_in_a_row = 0
        self._recent = 0
        """The last requests, the latest in the lowest bit: 1 for one that failed."""

    def check_passed(self) -> bool:
        """A check passed; True if that made the replica healthy."""
        self.checks += 1
        self._failed_in_a_row = 0
        self._passed_in_a_row += 1
        if self.health is ReplicaState.HEALTHY or self._passed_in_a_row < self.healthy_after:
            return False
        self._failed_requests_in_a_row = 0
        self.last_error = None
        self._become(ReplicaState.HEALTHY)
        return True

    def check_failed(self, error: str) -> bool:
        """A check failed; True if that made the replica unhealthy."""
        self.checks += 1
        self.failed_checks += 1
        self.last_error = error[:MAX_ERROR_CHARS]
        self._passed_in_a_row = 0
        self._failed_in_a_row += 1
        return self.checks_fail and self._become_unhealthy()

    @property
    def checks_fail(self) -> bool:
        """Return whether enough checks in a row failed, whatever requests show."""
        return self._failed_in_a_row >= self.unhealthy_after

    def request_failed(self, error: str) -> bool:
        """A request failed through the replica's fault, not the client's; True if that made it
        unhealthy."""
        self.failed_requests += 1
        self.last_error = error[:MAX_ERROR_CHARS]
        self._failed_requests_in_a_row += 1
        self._note_request(has_failed=True)
        enough = self._failed_requests_in_a_row >= self.unhealthy_after
        return enough and self.health is ReplicaState.HEALTHY and self._become_unhealthy()

    def mark_suspect(self) -> bool:
        """Another router found it unhealthy; True if the next check is to decide. What another
        cannot reach may well be reached from here."""
        if self.health is not ReplicaState.HEALTHY:
            return False
        self._failed_in_a_row = max(self._failed_in_a_row, self.unhealthy_after - 1)
        return True

    def request_served(self) -> None:
        """A request got a response, with any status below 500."""
        self._failed_requests_in_a_row = 0
        if self._recent:
            self._note_request(has_failed=False)

    @property
    def serves_requests(self) -> bool:
        """Return whether it is healthy, and few of its last requests failed."""
        return self.health is ReplicaState.HEALTHY and self._recent.bit_count() <= _FEW_FAILED

    def _note_request(self, *, has_failed: bool) -> None:
        self._recent = (self._recent << 1 | has_failed) & ((1 << _RECENT_REQUESTS) - 1)

    def _become_unhealthy(self) -> bool:
        if self.health is ReplicaState.UNHEALTHY:
            return False
        self.times_unhealthy += 1
        self._passed_in_a_row = self._failed_requests_in_a_row = 0
        self._become(ReplicaState.UNHEALTHY)
        return True

    def _become(self, health: ReplicaState) -> None:
        self.health = health
        if self.on_changed is not None:
            self.on_changed()
