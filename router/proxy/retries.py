"""How often a request may be tried again: so that one that kills replicas does not reach them all,
and so that retries do not become a load of their own when much fails."""

from __future__ import annotations

from router.proxy.types import Failure, RetryLimits, Unretried

MAX_CLOSED_REPLICAS = 2
"""Replicas that may close the connection over one request, as a process that dies does. It is
not sent to another one."""
_CLOSINGS = frozenset((Failure.KEPT_CLOSED, Failure.CLOSED, Failure.MALFORMED))


class RetryBudget:
    """A bucket of tokens, one for each retry: every request adds a share of one, up to a bound."""

    def __init__(self, limits: RetryLimits) -> None:
        self.limits = limits
        self._tokens = float(limits.budget_burst)

    def add_request(self) -> None:
        """Count a new request."""
        self._tokens = min(
            self._tokens + self.limits.budget_share, float(max(self.limits.budget_burst, 1))
        )

    def take(self) -> bool:
        """Take a token for one retry; False if there is none."""
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class RequestRetries:
    """The attempts of one request."""

    __slots__ = ("_attempts", "_budget", "_closed_by", "_is_free", "refused")

    def __init__(self, budget: RetryBudget) -> None:
        self.refused: Unretried | None = None
        """Why the last attempt asked for was not allowed."""
        self._budget = budget
        self._attempts = 0
        self._closed_by: set[str] = set()
        self._is_free = False

    def start(self) -> bool:
        """Whether another attempt may be made now; it counts as made."""
        if self._attempts:
            self.refused = self._obstacle()
            if self.refused is not None:
                return False
        self._attempts += 1
        return True

    def failed(self, replica_id: str, failure: Failure, is_replica_lost: bool) -> None:
        """The attempt failed, in a way that lets another be made.

        Args:
            replica_id: Where.
            failure: How.
            is_replica_lost: The replica is out of rotation by now. All that was sent there has to
                move, and nothing new is, so this takes nothing from the budget.
        """
        self._is_free = is_replica_lost
        if failure in _CLOSINGS:
            self._closed_by.add(replica_id)
        elif failure is Failure.UNAVAILABLE:
            self._closed_by.discard(replica_id)  # it is alive

    def _obstacle(self) -> Unretried | None:
        if len(self._closed_by) >= MAX_CLOSED_REPLICAS:
            return Unretried.CLOSED
        if self._attempts > self._budget.limits.further_attempts:
            return Unretried.LIMIT
        return None if self._is_free or self._budget.take() else Unretried.BUDGET
