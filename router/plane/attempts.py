"""The attempts of a request: where it may be sent, how that can fail, and how often it may be tried
again.

Retries are bounded twice: for one request, so that one that kills replicas does not reach them all,
and for all requests together, so that retries do not become a load of their own when much fails.
What goes to a replica that is at ease, or leaves one that is lost, is no such load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from router.config.origin import Header, Origin
from router.policies.types import Candidate

RANK_HEADER = b"x-data-parallel-rank"
SOURCE_HEADER = b"x-kv-cache-source-host-port"
"""The peer from whose cache llm-d's sidecar is to pull."""
PREFILLER_HEADER = b"x-prefiller-host-port"
"""The replica that computes the prompt, for llm-d's sidecar."""


class Attempt(msgspec.Struct, frozen=True):
    """One candidate: where a request may be sent, and the headers that depend on it."""

    replica_id: str
    """Read by the observer, not by the proxy."""
    origin: Origin
    request_headers: tuple[tuple[bytes, bytes | None], ...] = ()
    """Each replaces the client's headers of that name, or removes them if its value is None. Names
    in lower case."""
    response_headers: tuple[Header, ...] = ()
    """Each replaces the replica's headers of that name, as `x-kv-replica`. Names in lower case."""
    body: bytes | None = None
    """Sent there in place of the request's body, where it differs."""
    keep: tuple[int, ...] = ()
    """Lengths of the prompt at which the engine is asked to keep windows and states; for the
    observer."""
    prefiller: Candidate | None = None
    """The replica that computes the prompt, where that is another one; for the observer."""
    prefill: PrefillStep | None = None
    """Comes before it, where the router has the prompt computed there."""


class PrefillStep(msgspec.Struct, frozen=True):
    """Has another replica compute the prompt of an attempt."""

    at: Attempt
    """What that replica gets."""
    hand_over: Callable[[bytes, bytes], bytes]
    """Returns the body for the replica that responds, from the one it would get otherwise and what
    the other one has responded."""


class PrefillFailed(Exception):
    """A prompt was not computed by another replica, so the one that responds computes it.

    Args:
        failure: How that replica failed; None if it did not.
    """

    def __init__(self, failure: Failure | None) -> None:
        super().__init__("" if failure is None else failure.value)
        self.failure = failure


class Failure(Enum):
    """How a replica failed in one attempt. A 4xx response does not count: the client caused it."""

    CONNECT = "connect"
    CLOSED = "closed"
    # A kept connection was closed before the first byte: perhaps only since it was idle, so the
    # same replica is tried once more, and it does not count against it.
    KEPT_CLOSED = "kept_closed"
    FIRST_BYTE_TIMEOUT = "first_byte_timeout"
    MALFORMED = "malformed"
    # 502, 503, 504: the replica, or a gateway in front of it, cannot serve now.
    UNAVAILABLE = "unavailable"
    # 429 or 503, with Retry-After: the replica is well, and full.
    BUSY = "busy"
    # Its health checks failed while its first byte was waited for.
    UNHEALTHY = "unhealthy"
    # It was late, and another one gave its first byte before.
    LATE = "late"
    # Any other 5xx: passed on to the client.
    SERVER_ERROR = "server_error"
    # After the first byte.
    DIED = "died"
    IDLE_TIMEOUT = "idle_timeout"
    # Silent, and its health checks failed.
    LOST = "lost"


# The failures after which another attempt may follow. SERVER_ERROR is a response like any other,
# and the last three of `Failure` happen after its beginning was passed on.
RETRIED = frozenset(
    (
        Failure.CONNECT,
        Failure.CLOSED,
        Failure.KEPT_CLOSED,
        Failure.FIRST_BYTE_TIMEOUT,
        Failure.MALFORMED,
        Failure.UNAVAILABLE,
        Failure.BUSY,
        Failure.UNHEALTHY,
        Failure.LATE,
    )
)


NO_PORTS = "no_ports"
SHORTAGES = {"no_files": "open_files", NO_PORTS: "ports"}
"""What the system refused the router, by the failure in the compiled data plane."""
OWN_LIMITS = frozenset((*SHORTAGES, "at_limit"))
"""Failures, by their names there, that the router itself causes."""
_IN_CORE = {
    "connect_timeout": Failure.CONNECT,
    "given_up": Failure.UNHEALTHY,
    **dict.fromkeys(OWN_LIMITS, Failure.CONNECT),
}


def failure_of(name: str) -> Failure:
    """Return the failure that the compiled data plane calls *name*."""
    return _IN_CORE.get(name) or Failure(name)


class Unretried(Enum):
    """Why a request that failed was not tried again, though there was a candidate."""

    # It had its further attempts.
    LIMIT = "limit"
    # Too many of all requests were tried again already, and the next replica is not at ease.
    BUDGET = "budget"
    # Two replicas closed the connection over it, as a process that dies does.
    CLOSED = "closed_replicas"


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """Bounds on further attempts, none of them negative."""

    further_attempts: int = 2
    """Attempts of one request after its first."""
    budget_share: float = 0.1
    """The share of all requests that may be tried again in the long run."""
    budget_burst: int = 10
    """Retries beyond that share, at once."""


MAX_CLOSED_REPLICAS = 2
"""Replicas that may close the connection over one request, as a process that dies does. It is
not sent to another one."""
_CLOSINGS = frozenset((Failure.KEPT_CLOSED, Failure.CLOSED, Failure.MALFORMED))


class RetryBudget:
    """A bucket of tokens, one for each retry: every request adds a share of one, up to a bound."""

    def __init__(self, limits: RetryLimits) -> None:
        self.limits = limits
        self._tokens = float(limits.budget_burst)
        self._share, self._most = limits.budget_share, float(max(limits.budget_burst, 1))

    def add_requests(self, count: int = 1) -> None:
        if self._tokens < self._most:
            self._tokens = min(self._tokens + count * self._share, self._most)

    def take(self) -> bool:
        """Take a token for one retry; return False if the budget has none."""
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


@dataclass(slots=True, eq=False)
class RequestRetries:
    """The attempts of one request."""

    _budget: RetryBudget
    refused: Unretried | None = None
    """Why the last attempt asked for was not allowed."""
    _attempts: int = 0
    _closed_by: set[str] = field(default_factory=set)
    _is_free: bool = False

    def start(self, is_at_ease: Callable[[], bool]) -> bool:
        """Return whether another attempt may be made now; it counts as made.

        Args:
            is_at_ease: Whether the replica that would get it serves its requests and has room for
                more. Then nothing is taken from the budget: a storm begins where retries fail too.
        """
        if self._attempts:
            self.refused = self._obstacle(is_at_ease)
            if self.refused is not None:
                return False
        self._attempts += 1
        return True

    def failed(self, replica_id: str, failure: Failure, is_replica_lost: bool) -> None:
        """The attempt failed, in a way that lets another be made.

        Args:
            is_replica_lost: The replica is out of rotation by now. All that was sent there has to
                move, and nothing new is, so this takes nothing from the budget.
        """
        self._is_free = is_replica_lost
        if failure in _CLOSINGS:
            self._closed_by.add(replica_id)
        elif failure in (Failure.UNAVAILABLE, Failure.BUSY):
            self._closed_by.discard(replica_id)  # it is alive

    def _obstacle(self, is_at_ease: Callable[[], bool]) -> Unretried | None:
        if len(self._closed_by) >= MAX_CLOSED_REPLICAS:
            return Unretried.CLOSED
        if self._attempts > self._budget.limits.further_attempts:
            return Unretried.LIMIT
        is_allowed = self._is_free or is_at_ease() or self._budget.take()
        return None if is_allowed else Unretried.BUDGET
