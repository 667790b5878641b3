"""The plain values that go into the proxy and come out of it."""

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
    """Whose clients read the errors: each SDK recognises only its own form."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


class End(Enum):
    """How a proxied request ended. Exactly one of them is reported for every request."""

    # The replica's answer, whatever its status, reached the client whole.
    COMPLETED = "completed"
    # The client closed its connection first.
    CLIENT_LEFT = "client_left"
    # The client read nothing for longer than client_stall_s.
    CLIENT_STALLED = "client_stalled"
    # The replica broke off, or fell silent, after the first byte had been passed on.
    REPLICA_DIED = "replica_died"
    # Every candidate failed before its first byte, or there was none: answered with 502 or 503.
    NO_REPLICA = "no_replica"
    # The router has no connection to spare: answered with 503.
    OVERLOADED = "overloaded"
    # The router itself gave up: its task was cancelled (shutdown) or an error of its own came
    # through.
    ABANDONED = "abandoned"


class Failure(Enum):
    """What a replica did wrong in one attempt. A 4xx answer is the client's doing and is no
    failure."""

    CONNECT = "connect"
    CLOSED = "closed"
    FIRST_BYTE_TIMEOUT = "first_byte_timeout"
    MALFORMED = "malformed"
    # 502, 503, 504: the replica, or a gateway before it, says that it cannot serve now. The next
    # candidate is tried.
    UNAVAILABLE = "unavailable"
    # Any other 5xx: passed on to the client.
    SERVER_ERROR = "server_error"
    # After the first byte.
    DIED = "died"
    IDLE_TIMEOUT = "idle_timeout"


# The failures after which the next candidate is tried; the last two of `Failure` come too late for
# that.
RETRIED = frozenset(
    (
        Failure.CONNECT,
        Failure.CLOSED,
        Failure.FIRST_BYTE_TIMEOUT,
        Failure.MALFORMED,
        Failure.UNAVAILABLE,
    )
)


class Attempt(NamedTuple):
    """One candidate.

    Args:
        replica_id: For the observer; the proxy does not read it.
        origin: Where to send the request.
        request_headers: Each replaces the client's headers of that name, or only removes them if
            its value is None. Names in lower case.
        response_headers: Each replaces the replica's headers of that name, as ``x-kv-replica``.
            Names in lower case.
    """

    replica_id: str
    origin: Origin
    request_headers: tuple[tuple[bytes, bytes | None], ...] = ()
    response_headers: tuple[Header, ...] = ()


class ProxyRequest(NamedTuple):
    """A request whose body was read (and bounded) already.

    Args:
        method: As on the wire.
        target: Path and query as on the wire.
        headers: As ASGI gives them, names in lower case. Hop-by-hop headers, host and
            content-length are replaced.
        body: What to send, possibly not what came.
        response_headers: Added to every answer, also to the router's own errors, as
            ``x-request-id``.
        dialect: The form of errors.
        timeouts: Instead of the proxy's own. An answer that is not streamed has its first byte only
            when all of it was generated.
        abort_client: Closes the client's socket at once, whatever is still buffered; see
            `router.http.uvicorn_protocol`.
    """

    method: bytes
    target: bytes
    headers: list[Header]
    body: bytes
    response_headers: tuple[Header, ...] = ()
    dialect: Dialect = Dialect.OPENAI
    timeouts: Timeouts | None = None
    abort_client: Callable[[], object] | None = None


class Outcome(NamedTuple):
    """What became of a request.

    Args:
        end: See `End`.
        status: The status sent to the client; None if it left before there was one.
        attempt: The candidate whose answer was passed on; None if there was none.
        attempts: How many candidates were tried.
        first_byte_s: From the call of `stream` to the first byte of that answer's body; None if
            none came.
        seconds: From the call of `stream` to its end.
        body_bytes: Bytes of the body received from the replica.
    """

    end: End
    status: int | None
    attempt: Attempt | None
    attempts: int
    first_byte_s: float | None
    seconds: float
    body_bytes: int


class Observer(Protocol):
    """Is told what happens, in this order, on the event loop: it must not block.

    For each attempt ``on_attempt`` and, where the replica failed, ``on_failure``; ``on_first_byte``
    once; ``on_chunk`` for every piece of the body. Whatever happens, ``on_end`` comes exactly once
    and last.
    """

    def on_attempt(self, attempt: Attempt) -> None:
        """The request is about to be sent to this candidate."""

    def on_failure(self, attempt: Attempt, failure: Failure) -> None:
        """The candidate failed. If the failure is in `RETRIED`, the next one is tried."""

    def on_first_byte(self, attempt: Attempt, seconds: float) -> None:
        """The first byte of the body (or the end of an empty one) is here, *seconds* after `stream`
        was called."""

    def on_chunk(self, data: bytes) -> None:
        """A piece of the body, before it is sent on."""

    def on_end(self, outcome: Outcome) -> None:
        """It is over."""


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """Bounds on one proxied request, in seconds.

    ``client_stall_s`` is the longest time one write may wait for a client that does not read.
    ``watch_s`` is how often that, and whether the client is still there, is looked at: a client
    that leaves is noticed within twice that time.
    """

    timeouts: Timeouts
    client_stall_s: float = 60.0
    retry_after_s: int = 1
    watch_s: float = 0.1

    def __post_init__(self) -> None:
        for name in ("client_stall_s", "watch_s"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"proxy: {name} {getattr(self, name)!r} must be a number of seconds above 0"
                )
        if self.retry_after_s < 0:
            raise ValueError(f"proxy: retry_after_s {self.retry_after_s!r} must be 0 or more")
