"""Bounds the requests under way and the bytes of their bodies, and refuses all while the router
shuts down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from router.errors import Overloaded, ShuttingDown
from router.fleet.replica import Replica
from router.fleet.types import ReplicaState


class Elsewhere(NamedTuple):
    """Holds the requests that the compiled data plane admits by itself."""

    under_way: Callable[[], int]
    buffered_bytes: Callable[[], int]
    allow: Callable[[int], object]
    """Called with how many may be under way there from now on."""
    hold: Callable[[int], object]
    """Called with how many bytes of bodies are held here from now on."""


class Admission:
    """Counts the requests under way; a context manager around each of them.

    `with admission:` raises `ShuttingDown` or `Overloaded` where a request may not enter. Belongs
    to one event loop.

    Args:
        max_requests: Bound on requests under way.
        max_buffered_bytes: Bound on their bodies, all together.
    """

    def __init__(self, max_requests: int, max_buffered_bytes: int = 1 << 40) -> None:
        self._max_requests = max_requests
        self._max_buffered_bytes = max_buffered_bytes
        self._under_way = 0
        self._buffered_bytes = 0
        self._elsewhere = Elsewhere(lambda: 0, lambda: 0, lambda _most: None, lambda _size: None)
        self._is_shutting_down = False

    def count_also(self, elsewhere: Elsewhere) -> None:
        """Have *elsewhere* share the bounds from now on."""
        self._elsewhere = elsewhere
        self._allow()
        elsewhere.hold(self._buffered_bytes)

    def _allow(self) -> None:
        self._elsewhere.allow(max(self._max_requests - self._under_way, 0))

    @property
    def is_full(self) -> bool:
        """Return whether a bound has been reached."""
        return (
            self.under_way >= self._max_requests or self.buffered_bytes >= self._max_buffered_bytes
        )

    @property
    def under_way(self) -> int:
        """Requests admitted and not ended."""
        return self._under_way + self._elsewhere.under_way()

    @property
    def buffered_bytes(self) -> int:
        """The size of the bodies that are held now."""
        return self._buffered_bytes + self._elsewhere.buffered_bytes()

    def buffer(self) -> BodyBuffer:
        """Return a request's share of the bodies' memory; a context manager around its whole
        time."""
        return BodyBuffer(self)

    def hold(self, size: int, was_held: bool = False) -> None:
        """Count *size* more bytes, or less where it is negative; raises `Overloaded`.

        Args:
            was_held: The core has held them until now: they are not refused.
        """
        self._buffered_bytes += size
        self._elsewhere.hold(self._buffered_bytes)  # before the sum is read, as in `admit`
        if size > 0 and not was_held and self.buffered_bytes > self._max_buffered_bytes:
            self.hold(-size)
            limit = self._max_buffered_bytes
            raise Overloaded(f"holds bodies of {limit} bytes, its limit, already")

    @property
    def is_shutting_down(self) -> bool:
        """Return whether new requests are refused for good."""
        return self._is_shutting_down

    def shut_down(self) -> None:
        """Refuse every request from now on; those under way go on."""
        self._is_shutting_down = True

    def why_not_ready(self, replicas: Sequence[Replica]) -> str | None:
        """Return why the router cannot serve requests; None if one of *replicas* can."""
        if self._is_shutting_down:
            return "the router is shutting down"
        replicas = [replica for replica in replicas if replica.takes_requests]
        healthy = [replica for replica in replicas if replica.state is ReplicaState.HEALTHY]
        if not healthy:
            return f"none of {len(replicas)} replicas is healthy"
        if not any(replica.served.models for replica in healthy):
            return f"none of {len(healthy)} healthy replicas has reported its models yet"
        return None

    def admit(self, came_before: bool = False) -> None:
        """Let a request in; call `leave` at its end.

        Args:
            came_before: It is known since before the router shut down.
        Raises:
            ShuttingDown: For good.
            Overloaded: As many are under way as may be.
        """
        if self._is_shutting_down and not came_before:
            raise ShuttingDown
        self._under_way += 1
        self._allow()  # before the count is read: no more are let in elsewhere meanwhile
        if self.under_way > self._max_requests:
            self.leave()
            raise Overloaded(f"has its limit of {self._max_requests} requests under way")

    def readmit(self) -> None:
        """Let a request in that the core had let in, and that goes on here: no bound refuses it,
        nor does the router's shutdown. Call `leave` at its end."""
        self._under_way += 1
        self._allow()

    def leave(self) -> None:
        """End a request that was admitted."""
        self._under_way -= 1
        self._allow()

    def __enter__(self) -> None:
        self.admit()

    def __exit__(self, *_: object) -> None:
        self.leave()


class BodyBuffer:
    """The bytes that one request holds."""

    __slots__ = ("_admission", "_held")

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._held = 0

    def add(self, size: int) -> None:
        """Hold *size* more bytes; raises `Overloaded` where there is no room for them."""
        self._admission.hold(size)
        self._held += size

    def __enter__(self) -> BodyBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self._admission.hold(-self._held)
