"""Takes the records of requests that the data plane served by itself: they are shown, counted and
logged like those served in Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol

from router._core import Booking
from router.doors.asks import ANONYMOUS
from router.doors.http.access_log import AccessLine
from router.doors.http.gateway import Begun
from router.doors.proxied_paths import PREPARED
from router.fleet.entrance import Entrance
from router.fleet.line import Waiter
from router.plane.attempts import Attempt
from router.plane.exchanges import FailedFirst
from router.telemetry.request_log import RoutedRequest
from router.telemetry.request_observer import RequestObservers
from router.telemetry.settled import RequestSum, Settled


class Prepared(Protocol):
    """Knows what was made for such requests; see `Preparation`."""

    def begun(self, number: int) -> Begun | None: ...
    def settled(self, number: int, settled: Settled) -> None: ...


@dataclass(eq=False, repr=False)
class Settling:
    """Receives what the core reports of such requests. Belongs to one event loop."""

    observers: RequestObservers
    """Count and log them."""
    preparation: Prepared
    """Has the state made for them."""
    policy: str
    """The name of the policy that chose."""
    logs_access: bool
    """True if each gets a line in the log."""
    entrance: Entrance | None
    """The queue for room; None: requests do not wait."""
    on_served: Callable[[int], object]
    """Called with the number of requests that ended."""

    def __post_init__(self) -> None:
        self._passed: dict[int, Waiter] = {}
        """Requests that the line counts as passed without waiting."""

    def running(self, number: int, record: Sequence[Any]) -> None:
        """One has been under way for a while, or has its first byte since."""
        settled, path = self._of_core(number, record)
        self.observers.show(number, settled, path, self.policy)
        self._pass_by(number, settled)

    def settled(self, number: int, record: Sequence[Any], booking: Booking | None) -> None:
        """A request has ended.

        Args:
            booking: Waits for its engine's report; None: no one does.
        """
        settled, path = self._of_core(number, record)
        begun = self.preparation.begun(number)
        self.on_served(1)
        self._leave_line(number, settled)
        self.preparation.settled(number, settled)
        routed = self.observers.settle(number, settled, path, self.policy)
        if booking is not None:
            booking.reported(routed.actual_tokens)
        if begun is not None and begun.version is not None:
            self.observers.metrics.versions.labels(*begun.version).inc()
        if self.logs_access:
            _write_line(settled, path, routed)
        if begun is not None and begun.trace is not None:
            begun.trace.settled(self._attempt(settled.replica), settled, routed)

    @property
    def sum_bounds(self) -> tuple[Sequence[float], ...] | None:
        """The buckets into which usual requests may be summed up, as `Plane.sum_up` takes them;
        None where each has to be reported."""
        if self.logs_access or self.entrance is not None:
            return None
        metrics = self.observers.metrics
        measured = metrics.routing, metrics.first_byte, metrics.total, metrics.prediction_error
        return tuple(each.buckets for each in measured)

    def summed(self, _number: int, *what: Any) -> None:
        """Requests are over that are reported by their sum only."""
        summed = RequestSum.of_core(what)
        self.on_served(summed.requests)
        self.observers.add(summed, self.policy)

    def left(self, number: int) -> None:
        """There was no memory for the record of its end: nothing is kept of it."""
        self.observers.forget(number)
        self._end_passing(number)

    def handed_over(self, number: int, failed: FailedFirst) -> None:
        begun, attempt = self.preparation.begun(number), self._attempt(failed.replica)
        tenant = "" if begun is None else begun.key.tenant
        found = self.observers.handed_over(
            number, failed, tenant if failed.status == HTTPStatus.TOO_MANY_REQUESTS else ""
        )
        if begun is not None and begun.trace is not None and attempt is not None:
            begun.trace.failed_in_core(attempt, found.value)
        self._end_passing(number)  # it may have to wait for its next attempt

    def _end_passing(self, number: int) -> None:
        passed = self._passed.pop(number, None)
        if passed is not None and self.entrance is not None:
            self.entrance.room.over(passed)

    def _pass_by(self, number: int, settled: Settled) -> None:
        """Let the line know of a request that did not have to wait, once."""
        if self.entrance is None or number in self._passed:
            return
        begun = self.preparation.begun(number)
        key = ANONYMOUS if begun is None else begun.key
        passed = self.entrance.passed(settled.model, settled.uncached_tokens, *key.in_line)
        self._passed[number] = passed

    def _leave_line(self, number: int, settled: Settled) -> None:
        if self.entrance is not None:
            self._pass_by(number, settled)
            passed = self._passed.pop(number)
            # Not before: one that is handed over enters the line, and is counted there.
            self.entrance.room.count_passed(passed)
            tokens = settled.response_tokens if settled.first_byte_s else None
            self.entrance.room.over(passed, tokens)

    def _attempt(self, replica_id: str) -> Attempt | None:
        """Return an attempt at a replica; None where it was removed meanwhile."""
        replicas = self.observers.replicas
        if replica_id not in replicas:
            return None
        return Attempt(replica_id, replicas.get(replica_id).origin)

    def _of_core(self, number: int, record: Sequence[Any]) -> tuple[Settled, str]:
        """Read a record of the core, and the path that was asked."""
        settled = Settled.of_core(record)
        begun = self.preparation.begun(number)
        if begun is not None:
            is_traced = begun.trace is not None and begun.trace.is_sampled
            settled = settled._replace(trace_id=begun.trace_id, is_traced=is_traced)
        return settled, PREPARED[settled.asked.path].value


def _write_line(settled: Settled, path: str, routed: RoutedRequest) -> None:
    line = AccessLine({"client": settled.client, "method": "POST", "path": path})
    line.routed, line.trace_id = routed, settled.trace_id
    seconds = (settled.asked.tokenization_s or 0.0) + settled.routing_s + settled.seconds
    request_id = settled.request_id.encode("latin-1")
    line.write(routed.status, settled.body_bytes, request_id, seconds)
