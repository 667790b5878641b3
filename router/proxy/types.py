"""The plain values that go into the proxy, and what it reports."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

from router.upstream import Header, Origin, Timeouts

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Dialect(Enum):
    """The form of errors: each client SDK recognises only its own."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


class End(Enum):
    """How a proxied request ended. Exactly one of them is reported for every request."""

    # The replica's response, whatever its status, reached the client whole.
    COMPLETED = "completed"
    # The client closed its connection first.
    CLIENT_LEFT = "client_left"
    # The client read nothing for longer than client_stall_s.
    CLIENT_STALLED = "client_stalled"
    # The replica broke off, or fell silent, after its first byte had been passed on.
    REPLICA_DIED = "replica_died"
    # Every candidate failed before its first byte, or there was none: the client got 502 or 503.
    NO_REPLICA = "no_replica"
    # The router has no connection to spare: the client got 503.
    OVERLOADED = "overloaded"
    # The router itself gave up: the task was cancelled (shutdown), or raised an error of our own.
    ABANDONED = "abandoned"


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
    # Its health checks failed while its first byte was waited for.
    UNHEALTHY = "unhealthy"
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
        Failure.UNHEALTHY,
    )
)


class Unretried(Enum):
    """Why a request that failed was not tried again, though there was a candidate."""

    # It had its further attempts.
    LIMIT = "limit"
    # Too many of all requests were tried again already.
    BUDGET = "budget"
    # Two replicas closed the connection over it, as a process that dies does.
    CLOSED = "closed_replicas"


class Attempt(NamedTuple):
    """One candidate: where a request may be sent, and the headers that depend on it."""

    replica_id: str
    """For the observer; the proxy does not read it."""
    origin: Origin
    request_headers: tuple[tuple[bytes, bytes | None], ...] = ()
    """Each replaces the client's headers of that name, or removes them if its value is None. Names
    in lower case."""
    response_headers: tuple[Header, ...] = ()
    """Each replaces the replica's headers of that name, as `x-kv-replica`. Names in lower case."""


class ProxyRequest(NamedTuple):
    """A client's request whose body was read, and bounded, already."""

    method: bytes
    """As on the wire."""
    target: bytes
    """Path and query as on the wire."""
    headers: list[Header]
    """In ASGI's form, names in lower case. Hop-by-hop headers, host and content-length are
    replaced."""
    body: bytes
    """What to send, which may differ from what the client sent."""
    response_headers: tuple[Header, ...] = ()
    """Added to every response, the router's own errors included, as `x-request-id`."""
    dialect: Dialect = Dialect.OPENAI
    """The form of errors."""
    timeouts: Timeouts | None = None
    """Replace the proxy's own. A response that is not streamed has its first byte only when all of
    it was generated."""
    abort_client: Callable[[], object] | None = None
    """Closes the client's socket at once, whatever is still buffered; see
    `router.http.uvicorn_protocol`."""


class ProxyObserver(Protocol):
    """Hears what happens to one request, on the event loop: it must not block.

    For each attempt `on_attempt` and, if the replica fails, `on_failure`; `on_first_byte` at most
    once, then `on_chunk` for every piece of the body. `on_end` comes last, exactly once, in every
    case.
    """

    __slots__ = ()

    def on_attempt(self, attempt: Attempt) -> None:
        """The request is about to be sent to this candidate."""

    def on_failure(self, attempt: Attempt, failure: Failure) -> bool:
        """The candidate failed. If the failure is in `RETRIED`, another attempt may follow.

        Args:
            attempt: The candidate.
            failure: How it failed.
        Returns:
            Whether the replica is out of rotation by now, so that all that was sent there has to
            move: such an attempt takes nothing from the budget of retries.
        """
        raise NotImplementedError

    def on_unretried(self, reason: Unretried) -> None:
        """There was another candidate, but the request is not tried again."""

    def on_first_byte(self, attempt: Attempt, seconds: float) -> None:
        """The first byte of the response's body is here, or the end of an empty one.

        Args:
            attempt: The candidate whose response is passed on.
            seconds: Since the call of `Proxy.stream`.
        """

    def on_chunk(self, data: bytes) -> None:
        """A piece of the body, before it is sent on."""

    def on_end(self, end: End, status: int | None, seconds: float) -> None:
        """The request has ended.

        Args:
            end: How.
            status: Sent to the client; None if it left before there was one.
            seconds: Since the call of `Proxy.stream`.
        """


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """Bounds on further attempts.

    Raises:
        ValueError: A negative number.
    """

    further_attempts: int = 2
    """Of one request, after its first."""
    budget_share: float = 0.1
    """Of all requests, how many may be tried again in the long run."""
    budget_burst: int = 10
    """How many more than that at once."""

    def __post_init__(self) -> None:
        for name in ("further_attempts", "budget_share", "budget_burst"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"retries: {name} {getattr(self, name)!r} must not be negative")


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """Bounds on one proxied request."""

    timeouts: Timeouts
    client_stall_s: float = 60.0
    """The longest that one write may wait for a client that does not read."""
    retry_after_s: int = 1
    """Sent with the router's own 502 and 503."""
    retries: RetryLimits = RetryLimits()
    watch_s: float = 0.1
    """How often stalls and departures of clients are looked for: a client that leaves is noticed
    within twice that time."""

    def __post_init__(self) -> None:
        for name in ("client_stall_s", "watch_s"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"proxy: {name} {getattr(self, name)!r} must be a number of seconds above 0"
                )
        if self.retry_after_s < 0:
            raise ValueError(f"proxy: retry_after_s {self.retry_after_s!r} must be 0 or more")
