"""Reservations whose gateways are silent end by themselves."""

from __future__ import annotations

import asyncio

import pytest

from router.config.origin import Origin
from router.doors import reservations as module
from router.doors.asks import Question
from router.doors.reservations import Claim, Reservation, ReservationObserver, Reservations
from router.plane.attempts import Attempt
from router.plane.proxy_types import End
from router.routing.admission import Admission
from tests.support.waiting import eventually

IDLE_S = 60.0


class Ending(ReservationObserver):
    """Counts ends; the first one fails where it is to."""

    def __init__(self, *, fails: bool = False) -> None:
        self.ends: list[End] = []
        self._fails = fails

    def on_end(self, end: End, status: int | None, seconds: float) -> None:
        self.ends.append(end)
        if self._fails:
            raise RuntimeError

    def response_tokens(self) -> int | None:
        return None


async def test_an_error_at_one_end_is_not_the_end_of_all_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the timer, what silent gateways have reserved stays booked for ever."""
    monkeypatch.setattr(module, "_SWEEP_S", 0.01)
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, what: told.append(what))
    now = 0.0
    made = Reservations(10, IDLE_S, clock=lambda: now)
    admission = Admission(10, 1 << 20)

    def reserve(name: str, observer: Ending) -> None:
        claim = Claim(Question(endpoint=None, body=b"", path="/", request_id=name), admission, None)
        claim.place = made.take_place(name)
        attempt = Attempt("a", Origin.parse("http://a:1"))
        made.add(Reservation(name, claim, attempt, observer, made.clock, now))

    broken, other = Ending(fails=True), Ending()
    reserve("broken", broken)
    now = 1.0
    reserve("other", other)
    now = IDLE_S + 0.5
    await eventually(lambda: bool(told), "the timer has met the error")
    now = IDLE_S + 2
    await eventually(lambda: bool(other.ends), "the next one has ended")
    assert (broken.ends, other.ends) == ([End.ABANDONED], [End.ABANDONED])
    assert made.statistics().held == 0
