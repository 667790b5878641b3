"""Which requests the router lets in: no more at once than a bound, and none while it shuts down."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from router.errors import Overloaded, ShuttingDown
from router.replicas import Replica, ReplicaState


class Admission:
    """Counts the requests under way; a context manager around each of them.

    `with admission:` raises `ShuttingDown` or `Overloaded` where a request may not enter. Belongs
    to one event loop.

    Args:
        max_requests: Bound on requests under way.
    """

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._under_way = 0
        self._is_shutting_down = False

    @property
    def under_way(self) -> int:
        """Requests admitted and not ended."""
        return self._under_way

    @property
    def is_shutting_down(self) -> bool:
        """Whether new requests are refused for good."""
        return self._is_shutting_down

    def shut_down(self) -> None:
        """Refuse every request from now on; those under way go on."""
        self._is_shutting_down = True

    def why_not_ready(self, replicas: Sequence[Replica]) -> str | None:
        """Return what keeps the router from serving requests; None if one of *replicas* can."""
        if self._is_shutting_down:
            return "the router is shutting down"
        healthy = [replica for replica in replicas if replica.state is ReplicaState.HEALTHY]
        if not healthy:
            return f"none of {len(replicas)} replicas is healthy"
        if not any(replica.served.models for replica in healthy):
            return f"none of {len(healthy)} healthy replicas has reported its models yet"
        return None

    def __enter__(self) -> None:
        if self._is_shutting_down:
            raise ShuttingDown
        if self._under_way >= self._max_requests:
            raise Overloaded(self._max_requests)
        self._under_way += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._under_way -= 1
