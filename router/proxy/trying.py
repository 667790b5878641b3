"""Which candidate a request is sent to next."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from router.proxy.attempts import Attempt, Failure, RequestRetries, Unretried
from router.proxy.types import End, ProxyObserver

logger = logging.getLogger(__name__)

_TOO_MANY = 429
_NOT_SERVED = {
    None: "no replica could serve the request",
    Unretried.LIMIT: "no replica could serve the request in the attempts it may have",
    Unretried.BUDGET: "its replica failed, and too many requests are being tried again already",
    Unretried.CLOSED: "two replicas closed the connection over the request; no other gets it",
}


class Trying(ABC):
    """One request, until a replica has given its first byte or none is left to try."""

    __slots__ = (
        "_attempt",
        "_observer",
        "_plan",
        "_retries",
        "_retry_after_s",
        "_tried",
        "_unavailable",
    )

    def __init__(
        self, retries: RequestRetries, plan: Iterator[Attempt], observer: ProxyObserver
    ) -> None:
        self._retries = retries
        self._plan = plan
        self._observer = observer
        self._attempt: Attempt | None = None
        self._tried = self._unavailable = False
        self._retry_after_s = 0
        """The least that a replica has said; 0: none has."""

    @property
    @abstractmethod
    def _has_begun(self) -> bool:
        """Whether the client has seen something of a response."""

    @abstractmethod
    def _send_to(self, attempt: Attempt, may_reuse: bool = True) -> None:
        """Send the request there."""

    @abstractmethod
    def _let_go(self) -> None:
        """What the replica still sends is not wanted."""

    @abstractmethod
    def _refuse(self, end: End, status: int, message: str, code: str) -> None:
        """End with an error of the router's own."""

    @abstractmethod
    def _abandon(self) -> None:
        """End in mid-response."""

    def _take(self, step: Callable[[], None]) -> None:
        """Take a step. Whatever fails in it is our own fault; it ends this request and no other."""
        try:
            step()
        except Exception as error:  # noqa: BLE001 - logged there
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        is_memory = isinstance(error, MemoryError)
        if not is_memory:
            logger.error("a request could not be passed on", exc_info=error)
        if self._has_begun:
            self._abandon()
        elif is_memory:
            self._refuse(End.OVERLOADED, 503, "the router is out of memory", "overloaded")
        else:
            self._refuse(End.ABANDONED, 500, "the router failed", "internal_error")

    def _try_next(self) -> None:
        """Try the next candidate; without one, refuse the request."""
        attempt = next(self._plan, None)
        if attempt is not None and self._may_try(attempt):
            self._tried = True
            self._send_to(attempt)
            return
        refused = self._retries.refused
        if refused is not None:
            self._observer.on_unretried(refused)
        status = 502 if self._tried and not self._unavailable else 503
        self._refuse(End.NO_REPLICA, status, _NOT_SERVED[refused], "no_replica_available")

    def _may_try(self, attempt: Attempt) -> bool:
        return self._retries.start(lambda: self._observer.is_at_ease(attempt))

    def _go_elsewhere(self, attempt: Attempt, status: int, retry_after_s: int | None) -> bool:
        """The replica says "not now". Its 429 is passed on where it does not say for how long, or
        nobody else may be tried."""
        is_429 = status == _TOO_MANY
        is_busy = retry_after_s is not None and self._observer.on_busy(
            attempt, retry_after_s, is_429
        )
        following: Attempt | None = None
        if is_429:
            following = next(self._plan, None) if is_busy else None
            if following is None or not self._may_try(following):
                return False
        self._let_go()
        if retry_after_s is not None and is_busy:
            self._retry_after_s = min(self._retry_after_s or retry_after_s, retry_after_s)
        self._failed(attempt, Failure.BUSY if is_busy else Failure.UNAVAILABLE)
        if following is not None:
            self._send_to(following)
        else:
            self._unavailable = True
            self._try_next()
        return True

    def _failed(self, attempt: Attempt, failure: Failure) -> None:
        is_replica_lost = self._observer.on_failure(attempt, failure)
        self._retries.failed(attempt.replica_id, failure, is_replica_lost)
