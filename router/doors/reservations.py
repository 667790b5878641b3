"""Keeps the reservations of gateways that send requests themselves. One ends when the gateway
reports its end, when its replica is removed, or when the gateway has been silent for too long."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeAlias

from kvevents.field_docs import counter, gauge
from router.doors.asks import Question
from router.errors import Overloaded, ReservationExists, UnknownReservation
from router.fleet.entrance import Entrance
from router.fleet.line import Waiter
from router.plane.attempts import Attempt, Failure
from router.plane.proxy_types import End, ResponseObserver
from router.routing.admission import Admission
from router.telemetry.request_log import RoutedRequest

if TYPE_CHECKING:
    from router._core import Place
    from router._core import Reservations as CoreReservations

RESERVE_PATH = "/select_and_reserve"
_Adopt: TypeAlias = "Callable[[Iterable[tuple[Any, ...]]], object]"
"""Adds reservations that the core reports."""
_SWEEP_S = 0.5
_AT_ONCE = 256
"""The core's reservations that are looked at in one turn."""


class Outcome(Enum):
    """How a reservation ends: the values of a label."""

    COMPLETED = "completed"
    """The replica's response, whatever its status, reached the client whole."""
    CLIENT_LEFT = "client_left"
    FAILED = "failed"
    """The replica gave no response, or not all of it."""
    EXPIRED = "expired"
    """Its gateway has not reported for too long."""
    REPLICA_GONE = "replica_gone"
    """Its replica was removed."""
    ABANDONED = "abandoned"
    """The gateway's connection, or this router, ended before it did."""


_NOT_NOW = (502, 503, 504)
_ENDS = {
    Outcome.COMPLETED: End.COMPLETED,
    Outcome.CLIENT_LEFT: End.CLIENT_LEFT,
    Outcome.EXPIRED: End.ABANDONED,
    Outcome.REPLICA_GONE: End.REPLICA_DIED,
    Outcome.ABANDONED: End.ABANDONED,
}


class Claim:
    """Holds a question's share of its caller's limits and of the memory for bodies, and its places
    in the queue and among the reservations. An error in its block releases it.

    Raises:
        KeyLimitReached: The caller has reached a limit.
        Overloaded: The body does not fit.
    """

    __slots__ = ("_admission", "_ask", "_entrance", "holder", "place", "waiter")

    def __init__(self, ask: Question, admission: Admission, entrance: Entrance | None) -> None:
        self._admission = admission
        self._entrance = entrance
        self.holder = ask.caller.name
        """The key that it came with, by name."""
        self.waiter: Waiter | None = None
        self.place: Place | None = None
        usage = ask.caller.usage
        if usage is not None:
            usage.enter()
        self._ask: Question | None = ask
        try:
            admission.hold(len(ask.body))
        except BaseException:
            if usage is not None:
                usage.leave()
            raise

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.give_back()

    def give_back(self, response_tokens: int | None = None) -> None:
        """Release it; a second call changes nothing."""
        ask, self._ask = self._ask, None
        waiter, self.waiter = self.waiter, None
        place, self.place = self.place, None
        if ask is not None:
            self._admission.hold(-len(ask.body))
            if ask.caller.usage is not None:
                ask.caller.usage.leave(response_tokens or 0)
        if waiter is not None and self._entrance is not None:
            self._entrance.room.over(waiter, response_tokens)
        if place is not None:
            place.give_back()


class ReservationObserver(ResponseObserver, Protocol):
    """Receives the same of a request that its gateway sends."""

    request: RoutedRequest
    """The request in the log."""

    def response_tokens(self) -> int | None:
        """The generated tokens; None without a response."""
        raise NotImplementedError


@dataclass(slots=True, eq=False, repr=False)
class Reservation:
    """One booking, from its decision to its end."""

    id: str
    claim: Claim
    """It has a place; no other holder may end it."""
    attempt: Attempt
    """The replica that the gateway sends the request to."""
    observer: ReservationObserver
    _clock: Callable[[], float]
    _started_at: float
    touched_at: float = field(init=False)
    is_over: bool = False
    has_begun: bool = False
    on_over: Callable[[Reservation, Outcome], object] = lambda _reservation, _outcome: None
    """Called at its end."""

    def __post_init__(self) -> None:
        self.touched_at = self._started_at

    def touch(self) -> None:
        """Note a report on it."""
        self.touched_at = self._clock()

    def _seconds(self, at: float | None) -> float:
        """Seconds from its beginning to a moment; None: now."""
        return (self._clock() if at is None else at) - self._started_at

    def prefill_complete(
        self, at: float | None = None, status: int = 200, is_whole: bool | None = False
    ) -> None:
        """Report the first token of the response.

        Args:
            at: When, by the clock; None: now.
            status: The replica's.
            is_whole: See `ResponseObserver.on_first_byte`.
        """
        if not self.has_begun and not self.is_over:
            self.has_begun = True
            self.observer.on_first_byte(self.attempt, self._seconds(at), status, is_whole)

    def output(self, tokens: int, at: float | None = None) -> None:
        """Report more tokens of the response.

        Args:
            at: When, by the clock; None: now.
        """
        if not self.is_over:
            self.prefill_complete(at)
            self.observer.on_events(tokens)

    def report(self, usage: bytes) -> None:
        """Take the engine's report: a JSON object with the `usage` of its response."""
        self.observer.on_usage(True, usage, b"")

    def end(
        self,
        outcome: Outcome,
        status: int | None = None,
        failure: Failure | None = None,
        at: float | None = None,
    ) -> None:
        """End it; a second call changes nothing.

        Args:
            status: The replica's; None: 200 where the response is complete.
            failure: How the replica failed, where that is known.
            at: When, by the clock; None: now.
        """
        if self.is_over:
            return
        self.is_over = True
        if status is None and outcome is Outcome.COMPLETED:
            status = 200
        try:
            self._report_end(outcome, status, failure, self._seconds(at))
        finally:
            self.claim.give_back(self.observer.response_tokens())
            self.on_over(self, outcome)

    def _report_end(
        self, outcome: Outcome, status: int | None, failure: Failure | None, seconds: float
    ) -> None:
        if outcome is Outcome.COMPLETED and not self.has_begun:
            self.has_begun = True  # a response that is not streamed is there at once
            self.observer.on_first_byte(self.attempt, seconds, status or 200, is_whole=True)
        if failure is None and status is not None and status >= 500:
            failure = Failure.UNAVAILABLE if status in _NOT_NOW else Failure.SERVER_ERROR
        if failure is not None:
            self.observer.on_failure(self.attempt, failure)
        end = _ENDS.get(outcome) or (End.REPLICA_DIED if self.has_begun else End.NO_REPLICA)
        self.observer.on_end(end, status, seconds)


@dataclass(frozen=True, slots=True)
class ReservationStatistics:
    """Counts of open reservations, and of ends since the start."""

    held: Annotated[int, gauge("kvroute_reservations")]
    """Requests that gateways send themselves, booked and not ended; bounded by
    `doors.max_reservations`."""
    ends: Annotated[Mapping[str, int], counter("kvroute_reservation_ends", "end")]
    """Reservations that have ended: `completed`, `client_left`, `failed` as their gateway reported;
    `expired`, without a report for `doors.reservation_idle_s`; `replica_gone`, `abandoned` without
    its report."""


class Reservations:
    """All reservations. Belongs to one event loop.

    Args:
        idle_s: After so many seconds without a report one ends by itself.
    """

    def __init__(
        self, limit: int, idle_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit = limit
        self.core: CoreReservations = import_module("router._core").Reservations(limit)
        """Has a place for each of them, and knows those that the compiled core has made, most of
        which are not reported."""
        self._adopt: _Adopt | None = None
        self._idle_s = idle_s
        self.clock = clock
        self._held: dict[str, Reservation] = {}
        """Reservations by id, without those that the core has not reported."""
        self._gone: set[str] = set()
        """Replicas that were removed a moment ago: the core may just have chosen one of them."""
        self._ends: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def follow_core(self, adopt: _Adopt) -> None:
        """Let the core keep reservations to itself from now on."""
        self._adopt = adopt
        self._look_later()

    def check_room(self, reservation_id: str) -> None:
        """Check that another one may be made.

        Raises:
            ReservationExists: The id is taken.
            Overloaded: The limit is reached.
        """
        if self.core.has(reservation_id):
            raise ReservationExists
        if self.core.held() >= self._limit:
            raise self._full()

    def take_place(self, reservation_id: str) -> Place:
        """Take a place for another one, which has it until its end.

        Raises:
            ReservationExists: The id is taken.
            Overloaded: The limit is reached.
        """
        place = self.core.take(reservation_id)
        if place is not None:
            return place
        raise ReservationExists if self.core.has(reservation_id) else self._full()

    def _full(self) -> Overloaded:
        return Overloaded(f"holds {self._limit} reservations, its limit")

    def add(self, reservation: Reservation) -> None:
        """Hold one that has a place."""
        self._held[reservation.id] = reservation
        reservation.on_over = self._over
        self._look_later()

    def get(self, reservation_id: str, holder: str) -> Reservation:
        """Return one that is reported of now.

        Raises:
            UnknownReservation: The id is unknown, or *holder* did not make it.
        """
        if reservation_id not in self._held and self._adopt is not None:
            self._adopt(self.core.hand_over(reservation_id))
        found = self._held.get(reservation_id)
        if found is None or found.claim.holder != holder:
            raise UnknownReservation
        found.touch()
        return found

    def show_some(self) -> None:
        """Have the log of requests show some of those that the core has not reported: the ones that
        were silent for longest."""
        if self._adopt is not None and len(self._held) < _AT_ONCE:
            self._adopt(self.core.hand_over_silent(self.clock(), _AT_ONCE - len(self._held)))

    def replica_gone(self, replica_id: str) -> None:
        """A replica was removed."""
        if self._adopt is not None:
            self._gone.add(replica_id)
            self._adopt(self.core.hand_over_at(replica_id))
        for reservation in list(self._held.values()):
            if reservation.attempt.replica_id == replica_id:
                reservation.end(Outcome.REPLICA_GONE)

    def count_gone(self) -> None:
        """Count one that ended before it was held, since its replica was removed."""
        self._ends[Outcome.REPLICA_GONE.value] += 1

    def end_all(self) -> None:
        """The router stops."""
        if self._adopt is not None:
            self._adopt(self.core.hand_over_silent(math.inf, self._limit))
            self._adopt = None
        for reservation in list(self._held.values()):
            reservation.end(Outcome.ABANDONED)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def statistics(self) -> ReservationStatistics:
        ends = {outcome.value: self._ends[outcome.value] for outcome in Outcome}
        ends[Outcome.COMPLETED.value] += self.core.completed()
        return ReservationStatistics(self.core.held(), ends)

    def _over(self, reservation: Reservation, outcome: Outcome) -> None:
        self._ends[outcome.value] += 1
        self._held.pop(reservation.id, None)

    def _look_later(self, after_s: float = _SWEEP_S) -> None:
        if self._timer is None and (self._held or self._adopt is not None):
            self._timer = asyncio.get_running_loop().call_later(after_s, self._sweep)

    def _sweep(self) -> None:
        self._timer = None
        last, has_more = self.clock() - self._idle_s, False
        try:
            has_more = self._adopt is not None and self._adopt_silent(self._adopt, last)
            for reservation in [each for each in self._held.values() if each.touched_at <= last]:
                reservation.end(Outcome.EXPIRED)
        finally:  # an error at one of them must not keep the others booked for ever
            self._look_later(0.0 if has_more else _SWEEP_S)

    def _adopt_silent(self, adopt: _Adopt, last: float) -> bool:
        """Have the core report those that end by themselves; return whether there may be more."""
        while self._gone:
            adopt(self.core.hand_over_at(self._gone.pop()))
        silent = self.core.hand_over_silent(last, _AT_ONCE)
        adopt(silent)
        return len(silent) == _AT_ONCE
