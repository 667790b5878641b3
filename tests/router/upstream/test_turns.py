"""Work that is spread over turns of the event loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from router.upstream.turns import MAX_TURN_S, PacedJobs
from tests.support.late_loop import LateLoop


@pytest.fixture
def loop() -> LateLoop:
    return LateLoop()


@pytest.fixture
def jobs(loop: LateLoop) -> PacedJobs:
    return PacedJobs(loop)  # type: ignore[arg-type]


def test_a_job_is_done_at_once_while_the_turn_has_time(jobs: PacedJobs) -> None:
    """A router that is not busy must not delay a request by a turn."""
    done: list[int] = []
    for number in range(3):
        jobs.run(lambda number=number: done.append(number))
    assert done == [0, 1, 2]


def test_jobs_beyond_the_time_of_a_turn_wait_for_the_next_ones_in_order(
    jobs: PacedJobs, loop: LateLoop
) -> None:
    """A burst of requests must not keep streams, and the replicas of its own first requests,
    waiting until its last one is decided."""
    done: list[int] = []

    def job(number: int) -> Callable[[], None]:
        def take_time() -> None:
            loop.now += MAX_TURN_S / 2
            done.append(number)

        return take_time

    for number in range(6):
        jobs.run(job(number))
    assert done == [0, 1]
    loop.get_around()
    assert done == [0, 1, 2, 3]
    jobs.run(job(6))
    assert done == [0, 1, 2, 3], "it does not pass those that wait"
    loop.get_around()
    assert done == [0, 1, 2, 3, 4, 5]
    loop.get_around()
    assert done == [0, 1, 2, 3, 4, 5, 6]


def test_nothing_is_scheduled_once_nothing_waits(jobs: PacedJobs, loop: LateLoop) -> None:
    """An idle router sleeps."""
    jobs.run(lambda: None)
    assert loop.get_around() == 1
    assert loop.get_around() == 0


def test_a_new_turn_has_its_whole_time_again(jobs: PacedJobs, loop: LateLoop) -> None:
    """Else only the first burst after the start would be served at once."""
    done: list[str] = []
    jobs.run(lambda: setattr(loop, "now", loop.now + 2 * MAX_TURN_S))
    jobs.run(lambda: done.append("waited"))
    loop.get_around()
    loop.get_around()
    jobs.run(lambda: done.append("at once"))
    assert done == ["waited", "at once"]
