"""The queue of copy jobs: one thread, in order, polled or waited on."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from itertools import takewhile

from kvevents.threads import begun_pool
from offload.base import Direction, TransferResult
from offload.errors import TransferError

log = logging.getLogger(__name__)


@dataclass(slots=True)
class TransferStatistics:
    """Jobs queued now, and counts of `get_finished` since the start."""

    queued_jobs: int = 0
    """Submitted and not ended."""
    finished_jobs: int = 0
    """Ended, failed ones included."""
    failed_jobs: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    busy_s: float = 0.0
    """Time spent in copies."""


@dataclass(slots=True)
class _Job:
    """A queued job. The queue's thread fills in the time; the future is done after that."""

    job_id: int
    direction: Direction
    copy: Callable[[], int]
    time_s: float = 0.0
    future: Future[int] = field(init=False)

    def run(self) -> int:
        """Copy, in the queue's thread, and return the bytes copied."""
        start = time.perf_counter()
        try:
            return self.copy()
        finally:
            self.time_s = time.perf_counter() - start

    def result(self) -> TransferResult:
        """How the job ended; called once the future is done."""
        error = self.future.exception()
        if error is not None:
            log.warning("%s job %d failed: %s", self.direction.value, self.job_id, _reason(error))
        copied = 0 if error is not None else self.future.result()
        return TransferResult(self.job_id, self.direction, error is None, copied, self.time_s)


class TransferQueue:
    """Runs copies one after another in a thread of its own; any thread may call any method."""

    def __init__(self, name: str) -> None:
        """Start a queue whose thread is called *name*."""
        self._executor = begun_pool(1, name)
        self._lock = threading.Lock()
        self._jobs: dict[int, _Job] = {}  # in the order of submission
        self._stopped = False
        self._counts = TransferStatistics()

    def submit(self, job_id: int, direction: Direction, copy: Callable[[], int]) -> None:
        """Queue a copy.

        Args:
            job_id: Unique among the jobs that `get_finished` has not reported.
            copy: Runs in the queue's thread and returns the bytes it copied. Any error fails the
                job, and the next one runs.

        Raises:
            TransferError: The queue was shut down, or has a job of that id that was not reported
                yet.
        """
        job = _Job(job_id, direction, copy)
        with self._lock:
            if self._stopped:
                raise TransferError(f"job {job_id}: the worker was shut down")
            if job_id in self._jobs:
                raise TransferError(
                    f"job {job_id}: another job has that id and was not reported by get_finished "
                    "yet"
                )
            job.future = self._executor.submit(job.run)
            self._jobs[job_id] = job

    def get_finished(self) -> list[TransferResult]:
        """Jobs that ended since the last call, in the order of their submission."""
        with self._lock:
            ended = list(takewhile(lambda job: job.future.done(), self._jobs.values()))
            for job in ended:
                del self._jobs[job.job_id]
            return [self._count(job.result()) for job in ended]

    def wait(self, job_ids: Iterable[int]) -> None:
        """Return when these jobs have ended; ids that are not queued are taken to have ended."""
        wanted = set(job_ids)
        with self._lock:
            futures = [self._jobs[job_id].future for job_id in wanted & self._jobs.keys()]
        wait(futures)

    def shutdown(self) -> None:
        """Finish the queued jobs and stop; a second call has no effect."""
        with self._lock:
            self._stopped = True
        self._executor.shutdown(wait=True)

    def statistics(self) -> TransferStatistics:
        """Return the jobs queued now, and counts of `get_finished` since the start."""
        with self._lock:
            queued = sum(not job.future.done() for job in self._jobs.values())
            return replace(self._counts, queued_jobs=queued)

    def _count(self, result: TransferResult) -> TransferResult:
        counts = self._counts
        counts.finished_jobs += 1
        counts.failed_jobs += not result.success
        counts.busy_s += result.time_s
        if result.direction is Direction.STORE:
            counts.stored_bytes += result.transferred_bytes
        else:
            counts.loaded_bytes += result.transferred_bytes
        return result


def _reason(error: BaseException) -> str:
    """An error without its text: that may contain a file's name, which is a block's key."""
    if isinstance(error, OSError) and error.errno is not None:
        return f"{type(error).__name__} {errno.errorcode.get(error.errno, error.errno)}"
    return type(error).__name__
