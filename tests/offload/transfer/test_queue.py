"""The queue of copies: in order, one at a time, whatever happens to each."""

from __future__ import annotations

import threading

import pytest

from offload.base import Direction
from offload.errors import TransferError
from offload.transfer.queue import TransferQueue
from tests.support.waiting import DEADLINE_S


@pytest.fixture
def queue():
    queue = TransferQueue("test")
    yield queue
    queue.shutdown()


def fail() -> int:
    raise OSError(28, "No space left on device", "/secret/0123abcd")


def test_jobs_run_one_by_one_in_the_order_of_their_submission(queue: TransferQueue) -> None:
    """A load that follows a store of the same block reads what was stored."""
    ran: list[int] = []
    for number in range(50):
        queue.submit(number, Direction.STORE, lambda number=number: ran.append(number) or number)
    queue.wait(range(50))
    assert ran == list(range(50))
    assert [(result.job_id, result.transferred_bytes) for result in queue.get_finished()] == [
        (n, n) for n in range(50)
    ]


def test_neither_a_running_job_nor_those_behind_it_are_finished(queue: TransferQueue) -> None:
    """A slow copy's block must not be taken for complete."""
    started, go_on = threading.Event(), threading.Event()

    def slow() -> int:
        started.set()
        go_on.wait()
        return 7

    queue.submit(1, Direction.LOAD, slow)
    queue.submit(2, Direction.LOAD, lambda: 8)
    assert started.wait(DEADLINE_S)
    assert queue.get_finished() == []
    assert queue.statistics().queued_jobs == 2
    go_on.set()
    queue.wait([1, 2])
    first, second = queue.get_finished()
    assert (first.job_id, first.success, first.transferred_bytes, second.job_id) == (1, True, 7, 2)
    assert 0 < first.time_s < DEADLINE_S


def test_a_failed_job_is_reported_and_the_next_one_runs(
    queue: TransferQueue, caplog: pytest.LogCaptureFixture
) -> None:
    """One full disk must not end offloading.

    A file's name, which is a key, must not reach the log.
    """
    queue.submit(1, Direction.STORE, fail)
    queue.submit(2, Direction.STORE, lambda: 1 // 0)
    queue.submit(3, Direction.STORE, lambda: 5)
    queue.wait([1, 2, 3])
    results = queue.get_finished()
    assert [(result.success, result.transferred_bytes) for result in results] == [
        (False, 0),
        (False, 0),
        (True, 5),
    ]
    assert [record.getMessage() for record in caplog.records] == [
        "store job 1 failed: OSError ENOSPC",
        "store job 2 failed: ZeroDivisionError",
    ]
    statistics = queue.statistics()
    assert (statistics.finished_jobs, statistics.failed_jobs, statistics.stored_bytes) == (3, 2, 5)
    assert (statistics.queued_jobs, statistics.loaded_bytes) == (0, 0)
    assert statistics.busy_s > 0


def test_waiting_for_ended_or_unknown_jobs_returns_at_once(queue: TransferQueue) -> None:
    """A scheduler waits for a request's jobs without knowing which were reported."""
    queue.submit(1, Direction.STORE, lambda: 1)
    queue.wait([1])
    assert len(queue.get_finished()) == 1
    queue.wait([1, 99])
    assert queue.get_finished() == []


def test_an_id_can_be_used_again_only_after_it_was_reported(queue: TransferQueue) -> None:
    """Two jobs of one id could not be told apart."""
    queue.submit(1, Direction.STORE, lambda: 1)
    queue.wait([1])
    with pytest.raises(TransferError, match="job 1: another job has that id"):
        queue.submit(1, Direction.STORE, lambda: 2)
    queue.get_finished()
    queue.submit(1, Direction.STORE, lambda: 2)


def test_shutdown_finishes_what_was_queued_and_refuses_the_rest() -> None:
    """A block that the manager considers stored is stored when the engine stops."""
    queue = TransferQueue("test")
    go_on = threading.Event()
    queue.submit(1, Direction.STORE, lambda: int(go_on.wait()))
    queue.submit(2, Direction.STORE, lambda: 2)
    threading.Timer(0.05, go_on.set).start()
    queue.shutdown()
    queue.shutdown()
    assert [result.success for result in queue.get_finished()] == [True, True]
    with pytest.raises(TransferError, match="job 3: the worker was shut down"):
        queue.submit(3, Direction.STORE, lambda: 3)
