"""What becomes of the requests that the data plane decided and served by itself: shown, counted and
logged as those that are served here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.http.access_log import AccessLine
from router.observability.request_log import RoutedRequest
from router.observability.request_observer import AskedInCore, RequestObservers, Settled
from router.plane import FailedFirst
from router.preparing import PREPARED, Preparation
from router.proxy import Attempt


class Settling:
    """Hears what the core tells of such requests. Belongs to one event loop."""

    def __init__(
        self,
        observers: RequestObservers,
        preparation: Preparation,
        policy: str,
        logs_access: bool,
    ) -> None:
        """
        Args:
            observers: Count and log.
            preparation: Knows what was begun for them.
            policy: The name of the policy that chose.
            logs_access: Whether each gets a line in the log.
        """
        self._observers = observers
        self._preparation = preparation
        self._policy = policy
        self._logs_access = logs_access

    def running(self, number: int, *what: Any) -> None:
        """One has been under way for a while, or has its first byte since.

        Args:
            number: Of the request.
            what: As `Plane` tells it.
        """
        self._observers.show(number, *self._of_core(number, what), self._policy)

    def settled(self, number: int, *what: Any) -> None:
        """One is over.

        Args:
            number: Of the request.
            what: As `Plane` tells it.
        """
        settled, path = self._of_core(number, what)
        begun = self._preparation.begun(number)
        self._preparation.settled(number, settled)
        routed = self._observers.settle(number, settled, path, self._policy)
        if self._logs_access:
            _write_line(settled, path, routed)
        if begun is not None and begun.placed is not None:
            begun.placed.served(self._attempt(settled.replica), settled, routed)

    def handed_over(self, number: int, failed: FailedFirst) -> None:
        """A replica did not serve one.

        Args:
            number: Of the request.
            failed: The replica, and how.
        """
        found = self._observers.handed_over(
            number, failed.replica, failed.failure, failed.retry_after_s
        )
        begun, attempt = self._preparation.begun(number), self._attempt(failed.replica)
        if begun is not None and begun.placed is not None and attempt is not None:
            begun.placed.failed(attempt, found.value)

    def _attempt(self, replica_id: str) -> Attempt | None:
        """At a replica; None where it was removed meanwhile."""
        replicas = self._observers.replicas
        if replica_id not in replicas:
            return None
        return Attempt(replica_id, replicas.get(replica_id).origin)

    def _of_core(self, number: int, what: Sequence[Any]) -> tuple[Settled, str]:
        """A record of the core, and the path that was asked."""
        settled = Settled(*what)
        asked = AskedInCore(*settled.asked)
        settled = settled._replace(asked=asked)
        begun = self._preparation.begun(number)
        if begun is not None:
            is_traced = begun.trace is not None and begun.trace.is_sampled
            settled = settled._replace(trace_id=begun.trace_id, is_traced=is_traced)
        return settled, PREPARED[asked.path].value


def _write_line(settled: Settled, path: str, routed: RoutedRequest) -> None:
    line = AccessLine({"client": settled.client, "method": "POST", "path": path})
    line.routed, line.trace_id = routed, settled.trace_id
    seconds = (settled.asked.tokenization_s or 0.0) + settled.routing_s + settled.seconds
    request_id = settled.request_id.encode("latin-1")
    line.write(routed.status, settled.body_bytes, request_id, seconds)
