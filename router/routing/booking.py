"""A request where it is sent: booked there, followed from its sending to its end, and ended once.

Its share of the load, its prompts in the cache there, and whether it had the replica to itself go
together. The core books its own decisions by itself (`router._core.Booking`, with the same steps).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from router._core import EstimatedVisit, Visit
from router.fleet.load import LoadTracker
from router.fleet.quiet_moments import QuietMoments, QuietSample
from router.routing.known import CacheVisits
from router.routing.question import Placement


@dataclass(frozen=True, slots=True)
class Bookings:
    """Books requests where they are sent."""

    load: LoadTracker
    """Counts what is in flight at each replica."""
    visits: CacheVisits
    """Follow prompts in the caches, and remember which were just sent where."""
    quiet: QuietMoments
    """Know which requests had a replica to themselves."""
    clock: Callable[[], float] = time.monotonic

    def book(self, at: Placement) -> Booking:
        """A request is about to be sent; its booking is to be ended."""
        return Booking(self, at)

    def book_prefill(self, at: Placement) -> Booking:
        """A replica is about to compute a prompt for another one. It does not count as a request
        that had the replica to itself."""
        return Booking(self, at, is_response=False)


class Booking:
    """One request where it is sent. Every step may be left out, and the first and the end be
    repeated."""

    __slots__ = ("_bookings", "_estimated", "_in_flight", "_moment", "_visit", "placement")

    def __init__(self, bookings: Bookings, at: Placement, is_response: bool = True) -> None:
        self._bookings = bookings
        self._moment: QuietSample | None = None
        self._follow(at)
        started = bookings.load.started
        try:
            self._in_flight = started(*_share(at), dp_rank=at.dp_rank, visit=self._visit)
            if is_response:
                self._moment = bookings.quiet.began(at.candidate.replica_id, bookings.clock())
        except BaseException:  # the load goes by itself; the visit would wait for its end for ever
            if self._visit is not None:
                self._visit.ended(was_served=False)
            raise

    def retried(self, at: Placement) -> None:
        """The replica failed; the request is sent to another one, from the start."""
        self._follow(at)
        replica_id, uncached, _ = _share(at)
        self._in_flight.retried(replica_id, uncached, at.dp_rank, self._visit)
        self._end_moment()
        self._moment = self._bookings.quiet.began(replica_id, self._bookings.clock())

    def _follow(self, at: Placement) -> None:
        self.placement = at
        """Where it was sent last."""
        visits = self._bookings.visits
        # This one first: it changes nothing before its first token, so nothing is left behind where
        # the other finds no memory.
        self._estimated: EstimatedVisit | None = visits.estimated_visit(at)
        self._visit: Visit | None = visits.visit(at)

    @property
    def expected_tokens(self) -> int | None:
        """Prompt tokens that will be cached when the engine admits it; None without a
        mirror."""
        return None if self._visit is None else self._visit.expected_tokens

    def first_token(self) -> None:
        """The response has begun."""
        self._in_flight.first_token()
        if self._estimated is not None:
            self._estimated.first_token()

    def generated(self, tokens: int) -> None:
        """The response grew by about so many tokens."""
        self._in_flight.generated(tokens)

    def ended(self) -> bool:
        """It is over, whatever became of it; return whether it had the replica it was sent to last
        to itself."""
        self._in_flight.ended()
        return self._end_moment()

    def reported(self, cached_tokens: int | None) -> None:
        """The engine has reported how much of the prompt was cached, after the end; None: it did
        not. Where the hit was an estimate, that learns from it."""
        estimated, self._estimated = self._estimated, None
        if estimated is not None:
            estimated.ended(cached_tokens)

    def _end_moment(self) -> bool:
        moment, self._moment = self._moment, None
        return moment is not None and self._bookings.quiet.ended(moment, self._bookings.clock())


def _share(at: Placement) -> tuple[str, int, int]:
    return at.candidate.replica_id, at.uncached_tokens, at.question.prompt_tokens
