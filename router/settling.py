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
        self._observers.show(number, *_of_core(what), self._policy)

    def settled(self, number: int, *what: Any) -> None:
        """One is over.

        Args:
            number: Of the request.
            what: As `Plane` tells it.
        """
        settled, path = _of_core(what)
        self._preparation.settled(number, settled)
        routed = self._observers.settle(number, settled, path, self._policy)
        if self._logs_access:
            _write_line(settled, path, routed)

    def handed_over(self, number: int, failed: FailedFirst) -> None:
        """A replica did not serve one.

        Args:
            number: Of the request.
            failed: The replica, and how.
        """
        self._observers.handed_over(number, failed.replica, failed.failure, failed.retry_after_s)


def _of_core(what: Sequence[Any]) -> tuple[Settled, str]:
    """A record of the core, and the path that was asked."""
    settled = Settled(*what)
    asked = AskedInCore(*settled.asked)
    return settled._replace(asked=asked), PREPARED[asked.path].value


def _write_line(settled: Settled, path: str, routed: RoutedRequest) -> None:
    line = AccessLine({"client": settled.client, "method": "POST", "path": path})
    line.routed = routed
    seconds = (settled.asked.tokenization_s or 0.0) + settled.routing_s + settled.seconds
    request_id = settled.request_id.encode("latin-1")
    line.write(routed.status, settled.body_bytes, request_id, seconds)
