"""A request where it is sent: booked there, followed from its sending to its end, and ended once.

Its share of the load, its prompts in the cache there, and whether it had the replica to itself go
together. The core books its own decisions by itself (`router._core.Booking`, with the same steps).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router._core import EstimatedVisit, Visit
from router.fleet.load import LoadTracker
from router.fleet.quiet_moments import QuietMoments, QuietSample
from router.index.base import SourceId
from router.index.mirror import ApproximateCaches, Mirror
from router.index.mirror_types import WORTH_PUBLISHING
from router.index.prompt import HashedPrompt
from router.routing.question import Placement, RankQuestion
from router.routing.recent_prefixes import RECENT_STEP, RecentPrefixes


@dataclass(slots=True, eq=False)
class CacheVisits:
    """Follows requests in the caches that they are sent to."""

    recent: RecentPrefixes | None
    """Remember which prefixes were just sent where; None: what the mirror has in prefill."""
    mirror: Mirror | None
    approximate: ApproximateCaches | None
    clock: Callable[[], float] = time.monotonic
    publish: Callable[[], None] | None = None
    """Publishes soon to other routers; called when a long prompt is sent."""

    def remember(self, prompts: Sequence[HashedPrompt], source: SourceId) -> None:
        """Count on the prefixes of *prompts* in a cache before its events report them."""
        if self.recent is not None:
            now = self.clock()
            for prompt in prompts:
                self.recent.remember(source, prompt.prefix_keys(RECENT_STEP), now)

    def visit(self, at: Placement) -> Visit | None:
        """A request is about to be sent to a cache: `remember` its prompts, and follow it there.

        Returns:
            The visit, which takes the request's first token and end; None without a mirror or a
            model, or where the engine chooses the cache.
        """
        question, candidate, source = at.question, at.candidate, at.source
        if source is None:
            return None
        self.remember(question.prompts, source)
        if self.mirror is None or question.index is None:
            return None
        if self.publish is not None and at.uncached_tokens >= WORTH_PUBLISHING:
            self.publish()
        return self.mirror.begin(
            question.request.model,
            question.index,
            source,
            question.prompts,
            question.prompt_tokens,
            at.uncached_tokens,
            candidate.cached_tokens,
            candidate.speed,
            candidate.by_tier,
            candidate.junction_tokens,
            at.keep,
        )

    def estimated_visit(self, at: Placement) -> EstimatedVisit | None:
        """The same for a cache without events; None for one with them."""
        approximate, source = self.approximate, at.source
        if approximate is None or source is None or not at.candidate.is_approximate:
            return None
        keys = [prompt.prefix_keys(RECENT_STEP) for prompt in at.question.prompts]
        return approximate.visit(source, keys, at.candidate.cached_tokens)

    def expected(self, question: RankQuestion, source: SourceId, hit: int) -> int:
        """How many tokens will be cached when the engine admits the request."""
        if self.mirror is None or len(question.prompts) != 1:
            return hit
        return self.mirror.expected(source, question.prompts[0], question.prompt_tokens, hit)

    def forget(self, replica_id: str) -> None:
        """Count no longer on what was sent to this replica, at any of its ranks."""
        if self.recent is not None:
            self.recent.forget(replica_id)
        if self.mirror is not None:
            self.mirror.forget(replica_id)
        if self.approximate is not None:
            self.approximate.forget(replica_id)

    def forget_model(self, model: str) -> None:
        """No replica serves this model any more."""
        if self.mirror is not None:
            self.mirror.forget_model(model)


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
            self._end_visit()
            raise

    def retried(self, at: Placement) -> None:
        """The replica failed; the request is sent again, there or elsewhere, from the start."""
        # Before the next visit begins: at the same replica that would expect this one's prompt.
        self._end_visit()
        self._follow(at)
        replica_id, uncached, _ = _share(at)
        try:
            self._in_flight.retried(replica_id, uncached, at.dp_rank, self._visit)
        except BaseException:  # its end is that of the visit before
            self._end_visit()
            raise
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

    def _end_visit(self) -> None:
        if self._visit is not None:
            self._visit.ended(was_served=False)

    @property
    def expected_tokens(self) -> int | None:
        """Prompt tokens that will be cached when the engine admits it; None without a
        mirror."""
        return None if self._visit is None else self._visit.expected_tokens

    def first_token(self, is_timed: bool = True) -> None:
        """The response has begun.

        Args:
            is_timed: True if its first token came just now; if not, all of it was generated by
                then.
        """
        self._in_flight.first_token(is_timed)
        if self._estimated is not None:
            self._estimated.first_token()

    def generated(self, tokens: int) -> None:
        """The response grew by about so many tokens."""
        self._in_flight.generated(tokens)

    def ended(self, was_served: bool = True) -> bool:
        """It is over; return whether it had the replica it was sent to last to itself.

        Args:
            was_served: True if its prompt may have been computed there.
        """
        self._in_flight.ended(was_served)
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
