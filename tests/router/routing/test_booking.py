"""What a request is and takes where it is sent goes together, and ends once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import msgspec
import pytest

from router.fleet.load import InFlight, LoadTracker
from router.fleet.quiet_moments import QuietMoments
from router.index.base import SourceId
from router.index.index import PrefixIndex
from router.index.mirror import Mirror
from router.policies import Candidate, RouteRequest, make_policy
from router.prompt.prompts import TokenizedPrompt
from router.routing.booking import Bookings
from router.routing.planner import Known, RoutePlanner, prepare
from router.routing.question import Placement, RankQuestion
from tests.support.index import AskedCaches, ended
from tests.support.loads import statistics_of

IDS = list(range(1, 1026))
LATER_S = 60.0
"""By then events have shown what was computed."""
R0, R1 = SourceId("r0"), SourceId("r1")


class Booked:
    """Real parts; only the clock stands still."""

    def __init__(self) -> None:
        self.now = 100.0
        self.mirror = Mirror(clock=lambda: self.now)
        self.load = LoadTracker(self.mirror.books)
        self.caches = AskedCaches(lambda _: -math.inf, self.mirror, 0.0, clock=lambda: self.now)
        known = Known(self.load, mirror=self.mirror, approximate=self.caches)
        planner = RoutePlanner(make_policy("least_delay"), known, lambda: self.now)
        self.quiet = QuietMoments(1.0)
        self.bookings = Bookings(self.load, planner.visits, self.quiet, lambda: self.now)
        self.index: PrefixIndex = PrefixIndex()

    def at(self, source: SourceId, trust: float | None = None) -> Placement:
        request = RouteRequest(model="m", prompt_tokens=len(IDS))
        prompts = prepare(self.index, [TokenizedPrompt(IDS)])
        candidate = Candidate(replica_id=source.replica, approximate_trust=trust)
        if trust is not None:
            assert self.caches.stand_in(source, None, self.now) is not None
        return Placement(RankQuestion(request, self.index, prompts), candidate, source, len(IDS))

    @property
    def under_way(self) -> Mapping[str, int]:
        replicas = statistics_of(self.load).replicas
        return {name: load.requests for name, load in replicas.items() if load.requests}


@pytest.fixture
def booked() -> Booked:
    return Booked()


def test_a_booking_holds_load_prompt_and_moment_until_it_ends(booked: Booked) -> None:
    """One that ended in parts would be waited for, or predicted, for ever."""
    booking = booked.bookings.book(booked.at(R0))
    assert booked.under_way == {"r0": 1}
    assert [each.source for each in booked.mirror.prefilling()] == [R0]
    assert booking.expected_tokens == 0
    booking.first_token()
    booked.now += 1.0
    assert booking.ended(), "nothing else was there"
    assert not booking.ended(), "that is said once"
    assert booked.under_way == {}
    assert booked.mirror.prefilling() == []
    assert len(ended(booked.mirror, R0)) == 1
    assert booked.quiet.begun() == {"r0": 1}


def test_what_is_tried_again_is_booked_where_it_went_last_and_nowhere_else(booked: Booked) -> None:
    """The replica that failed has computed nothing, and is not kept from being quiet."""
    booking = booked.bookings.book(booked.at(R0))
    booking.retried(booked.at(R1))
    assert booked.under_way == {"r1": 1}
    assert booking.placement.source == R1
    assert (statistics_of(booked.load).started, statistics_of(booked.load).retried) == (1, 1)
    booking.first_token()
    assert booking.ended()
    assert ended(booked.mirror, R0) == []
    assert len(ended(booked.mirror, R1)) == 1
    booked.now += 2.0
    assert booked.bookings.book(booked.at(R0)).ended()


def test_a_second_attempt_at_the_same_replica_expects_nothing_of_the_first(booked: Booked) -> None:
    """A kept connection that was closed is tried again there. Its own first attempt was taken for
    another request that computes the prompt: all of it was expected to be cached."""
    booking = booked.bookings.book(booked.at(R0))
    booking.retried(booked.at(R0))
    assert booking.expected_tokens == 0


def test_an_estimate_learns_once_from_what_is_reported_behind_the_end(booked: Booked) -> None:
    """A second report would count its prompt twice."""
    booking = booked.bookings.book(booked.at(R0, trust=0.8))
    booking.first_token()
    booking.ended()
    booking.reported(0)
    (known,) = booked.caches.statistics().values()
    booking.reported(1024)
    assert list(booked.caches.statistics().values()) == [known]
    assert known.tokens == 1024


def test_a_prompt_that_is_computed_for_another_replica_is_no_company(booked: Booked) -> None:
    """Nobody says when it is done: it would keep the replica from ever being quiet."""
    prefill = booked.bookings.book_prefill(booked.at(R0))
    response = booked.bookings.book(booked.at(R0))
    assert booked.under_way == {"r0": 2}
    assert response.ended()
    assert not prefill.ended()
    assert booked.under_way == {}


def test_a_booking_that_cannot_be_made_leaves_nothing_behind(booked: Booked) -> None:
    """What was begun already would be waited for, for ever: nobody has the booking to end it."""

    def no_memory() -> float:
        raise MemoryError

    bookings = Bookings(booked.load, booked.bookings.visits, booked.quiet, no_memory)
    with pytest.raises(MemoryError):
        bookings.book(booked.at(R0))
    assert booked.under_way == {}
    booked.now += LATER_S
    assert booked.mirror.prefilling() == []


@pytest.mark.parametrize(("of", "step"), [(InFlight, "retried"), (QuietMoments, "_met")])
def test_an_attempt_that_cannot_be_booked_leaves_nothing_behind(
    booked: Booked, monkeypatch: pytest.MonkeyPatch, of: type, step: str
) -> None:
    """The request ends with what it has booked: a visit, or company, that is not part of it would
    be there for ever."""
    booking, whole = booked.bookings.book(booked.at(R0)), getattr(of, step)

    def no_memory_for_r1(*arguments: object) -> object:
        if "r1" in arguments:
            raise MemoryError
        return whole(*arguments)

    with monkeypatch.context() as short:
        short.setattr(of, step, no_memory_for_r1)
        with pytest.raises(MemoryError):
            booking.retried(booked.at(R1))
    booking.ended(was_served=False)
    assert booked.under_way == {}
    booked.now += LATER_S
    assert booked.mirror.prefilling() == []
    for source in (R0, R1):
        assert booked.bookings.book(booked.at(source)).ended(), "nothing else was there"


def trust_after(first_tokens: int) -> float:
    """Of an estimate whose second hit, which it predicted in full, the engine did not have."""
    booked = Booked()
    for cached_tokens in (0, 1024):
        at = booked.at(R0, trust=0.8)
        hit = msgspec.structs.replace(at.candidate, cached_tokens=cached_tokens)
        booking = booked.bookings.book(replace(at, candidate=hit))
        for _ in range(first_tokens):
            booking.first_token()
        booked.now += 1.0
        booking.ended()
        booking.reported(0)
    (known,) = booked.caches.statistics().values()
    return known.trust


def test_an_estimate_learns_though_a_first_token_is_reported_twice() -> None:
    assert trust_after(1) < trust_after(0)
    assert trust_after(2) == trust_after(1)
