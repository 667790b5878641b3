"""When a stream that fell silent is looked at, in a time that the test sets."""

from __future__ import annotations

import pytest

from kvevents import pacing
from kvevents.pacing import SilenceTimer

FIRST_S, CAP_S = 2.0, 60.0


class Clock:
    """What the timer reads."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(pacing, "monotonic", made)
    return made


def waited_s(timer: SilenceTimer, clock: Clock) -> float:
    """How long it takes from now until a look, for a process that always gets its time."""
    began = clock.now
    while not timer.is_over():
        clock.now += max(timer.left_s, 0.001)
    return clock.now - began


def test_a_silence_is_over_a_moment_after_its_time(clock: Clock) -> None:
    """What came meanwhile is read first."""
    timer = SilenceTimer(FIRST_S, CAP_S)
    timer.received()
    assert FIRST_S * 5 / 8 <= waited_s(timer, clock) <= FIRST_S * 9 / 8 + 0.01


def test_a_process_that_stood_still_reads_before_it_looks(clock: Clock) -> None:
    """Its batches are at hand, and a look would call them lost."""
    timer = SilenceTimer(FIRST_S, CAP_S)
    timer.received()
    clock.now += 100.0
    assert not timer.is_over()
    timer.received()
    assert waited_s(timer, clock) >= FIRST_S / 2, "there was no silence"


def test_a_process_that_stands_still_again_and_again_looks_in_the_end(clock: Clock) -> None:
    """A machine that is always short of processors must still find what was lost at the tail."""
    timer = SilenceTimer(FIRST_S, CAP_S)
    timer.received()
    looks = 0
    for _ in range(5):
        clock.now += 100.0
        looks += timer.is_over()
    assert looks >= 1


def test_looks_at_a_stream_that_stays_silent_become_rare(clock: Clock) -> None:
    """A quiet engine is not asked all the time."""
    timer = SilenceTimer(FIRST_S, CAP_S)
    timer.received()
    waits = []
    for _ in range(8):
        waits.append(waited_s(timer, clock))
        timer.looked()
    assert waits[0] < 2.5
    assert CAP_S / 2 <= waits[-1] <= CAP_S + 1.0
