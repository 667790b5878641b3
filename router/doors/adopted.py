"""Reservations that the compiled core makes by itself. Most are only counted; those that it
reports, or that are looked up, are like all others from here on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from router.doors.asks import Question
from router.doors.reservations import RESERVE_PATH, Claim, Reservation, Reservations
from router.plane.attempts import Attempt, Failure
from router.plane.proxy_types import End, is_error
from router.telemetry.parts import RouterParts
from router.telemetry.request_observer import RequestObservers
from router.telemetry.settled import BY_CORE, Settled

if TYPE_CHECKING:
    from router._core import Booking, Place


class CoreReservation(NamedTuple):
    """Holds a reservation that the core has made."""

    reservation_id: str
    booking: Booking
    """Follows the request in the core's books."""
    place: Place
    """Its place among all reservations."""
    reason: str
    by_tier: tuple[tuple[str, int], ...]
    """Tokens of its prompt in lower tiers."""
    record: Sequence[Any]
    """`Plane`'s record of a request that it served, with what its gateway has reported by now."""
    touched_at: float
    """The time of its last report, by the clock."""


@dataclass(eq=False, repr=False)
class Adopted:
    """Takes over the core's reservations, and observes them to their ends.

    Belongs to one event loop.
    """

    router: RouterParts
    reservations: Reservations

    def __post_init__(self) -> None:
        self._policy = self.router.config.policy.name

    def made(self, number: int, *what: Any) -> None:
        """A gateway got a replica for its request, which is booked there.

        Args:
            what: The fields of a `CoreReservation`.
        """
        made = CoreReservation(*what)
        settled = Settled.of_core(made.record)
        seconds = self.reservations.clock() - settled.began_at
        settled = settled._replace(
            reason=f"{made.reason}{BY_CORE}", by_tier=made.by_tier, seconds=max(seconds, 0.0)
        )
        observers = self.router.observers
        observer = _CoreObserver(observers, number, settled, made.booking, self._policy)
        replicas, has_begun = observers.replicas, settled.first_byte_s > 0
        if settled.replica not in replicas:  # it was removed meanwhile
            self.reservations.count_gone()
            end = End.REPLICA_DIED if has_begun else End.NO_REPLICA
            observer.on_end(end, None, settled.seconds)
            made.place.give_back()
            return
        replicas.report_sent(settled.replica)
        claim = self._claim(settled)
        claim.place = made.place
        reservation = Reservation(
            made.reservation_id,
            claim,
            Attempt(settled.replica, replicas.get(settled.replica).origin),
            observer,
            self.reservations.clock,
            settled.began_at,
        )
        reservation.has_begun, reservation.touched_at = has_begun, made.touched_at
        self.reservations.add(reservation)

    def adopt(self, events: Iterable[tuple[Any, ...]]) -> None:
        """Take over reservations that were made a while ago.

        Args:
            events: `Plane`'s, one for each.
        """
        for _, number, *what in events:
            self.made(number, *what)

    def _claim(self, settled: Settled) -> Claim:
        """Return its claim on the limits; it did not have to wait."""
        ask = Question(endpoint=None, body=b"", path=RESERVE_PATH, request_id=settled.request_id)
        entrance = self.router.entrance
        claim = Claim(ask, self.router.admission, entrance)
        if entrance is not None:
            claim.waiter = entrance.passed(settled.model, settled.uncached_tokens)
            entrance.room.count_passed(claim.waiter)
        return claim


@dataclass(eq=False, repr=False)
class _CoreObserver:
    """Observes a reservation, like `RequestObserver` one that was decided here."""

    observers: RequestObservers
    number: int
    settled: Settled
    booking: Booking
    policy: str

    def __post_init__(self) -> None:
        show = self.observers.show
        self.request = show(self.number, self.settled, RESERVE_PATH, self.policy)

    def on_first_byte(
        self,
        attempt: Attempt,  # noqa: ARG002
        seconds: float,
        status: int,
        is_whole: bool | None = None,
    ) -> None:
        if not is_error(status):
            self.booking.first_byte(not is_whole)
        self.settled = self.settled._replace(first_byte_s=seconds)
        self.request.first_byte_s = seconds
        self.observers.log.update(self.request)

    def on_events(self, count: int) -> None:
        self.booking.generated(count)
        self.settled = self.settled._replace(events=self.settled.events + count)

    def on_usage(self, is_json: bool, last: bytes, first: bytes) -> None:
        self.settled = self.settled._replace(is_json=is_json, usage=last, first_usage=first)

    def on_failure(self, attempt: Attempt, failure: Failure) -> bool:
        self.request.last_failure = failure.value
        return self.observers.failed(attempt.replica_id, failure)

    def on_end(self, end: End, status: int | None, seconds: float) -> None:
        self.settled = self.settled._replace(
            was_alone=self.booking.ended(not is_error(status)),
            end=end.value,
            status=status or 0,
            seconds=seconds,
        )
        settle = self.observers.settle
        routed = settle(self.number, self.settled, RESERVE_PATH, self.policy)
        if routed.candidate.is_approximate:
            self.booking.reported(routed.actual_tokens)

    def response_tokens(self) -> int | None:
        """The tokens of its response, known at its end."""
        return self.settled.response_tokens if self.settled.first_byte_s else None
