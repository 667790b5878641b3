"""A request to a replica, and the reports on it."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

import msgspec

from router.config.origin import Header, Timeouts
from router.plane.attempts import Attempt, Failure, Unretried
from router.plane.exchanges import FailedFirst


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
    # The router itself gave up: it shuts down, or an error of its own ended the request.
    ABANDONED = "abandoned"


class ProxyRequest(msgspec.Struct, frozen=True):
    """The changes to a client's request on its way to a replica; the core has the rest of it."""

    body: bytes
    """The bytes to send, which may differ from what the client sent."""
    response_headers: tuple[Header, ...] = ()
    """Added to every response, the router's own errors included, as `x-request-id`."""
    dialect: Dialect = Dialect.OPENAI
    """The form of errors."""
    added: tuple[Header, ...] = ()
    """The router's own headers, behind the client's."""
    timeouts: Timeouts | None = None
    """Replace the proxy's own. A response that is not streamed has its first byte only when all of
    it was generated."""


def is_error(status: int | None) -> bool:
    """Return whether a response is an error, so that its first byte does not show that the prompt
    was computed."""
    return status is not None and status >= 400


class ResponseObserver(Protocol):
    """Receives what becomes of a request that was sent, on the event loop: it must not block.

    `on_first_byte` comes at most once, and what is known of the body as it passes. `on_end` comes
    last, exactly once, in every case.
    """

    __slots__ = ()

    def on_failure(self, attempt: Attempt, failure: Failure) -> bool:
        """The candidate failed. If the failure is in `RETRIED`, another attempt may follow.

        Returns:
            Whether the replica is out of rotation by now, so that all that was sent there has to
            move: such an attempt takes nothing from the budget of retries.
        """
        raise NotImplementedError

    def on_first_byte(self, attempt: Attempt, seconds: float, status: int) -> None:
        """The first byte of the response's body is here, or the end of an empty one.

        Args:
            attempt: The candidate whose response is passed on.
            seconds: Since the call of `PlaneProxy.start`, or since it was reserved.
            status: Of the response.
        """

    def on_events(self, count: int) -> None:
        """So many more events of a stream have passed, each about one token."""

    def on_usage(self, is_json: bool, last: bytes, first: bytes) -> None:
        """Take the body's reports, before `on_end`.

        Args:
            is_json: Whether it is one JSON body; else it is a stream of events.
            last: The tail of the body, or the last event with a usage.
            first: The first such event, where it is another one.
        """

    def on_end(self, end: End, status: int | None, seconds: float) -> None:
        """The request has ended.

        Args:
            status: Sent to the client; None if it left before there was one.
            seconds: As for `on_first_byte`.
        """


class ProxyObserver(ResponseObserver, Protocol):
    """Receives what happens to one request that the router sends: `on_attempt` for each attempt
    and, if the replica fails, `on_failure`."""

    __slots__ = ()

    def on_tried(self, failed: FailedFirst) -> tuple[Failure, bool]:
        """The data plane sent the request to a replica by itself, before all attempts reported
        here, and it failed; return how, and what `on_failure` returns."""
        raise NotImplementedError

    def on_attempt(self, attempt: Attempt) -> None:
        """The request is about to be sent to this candidate."""

    def is_at_ease(self, attempt: Attempt) -> bool:
        """Return whether the candidate serves its requests and has room for this one too: then a
        retry there is no part of a storm, and takes nothing from the budget of retries."""
        raise NotImplementedError

    def on_busy(self, attempt: Attempt, retry_after_s: int, is_429: bool) -> bool:
        """The candidate answered that it can take no request now.

        Args:
            is_429: True if it may mean this client only.
        Returns:
            True if the request should go to another one, if there is one.
        """
        raise NotImplementedError

    def on_unretried(self, reason: Unretried) -> None:
        """There was another candidate, but the request is not tried again."""

    wants_beginning: bool = False
    """True if it wants the beginning of the body."""

    def on_beginning(self, data: bytes) -> None:
        """A part of the beginning of the body has passed."""
