"""The queue of copy jobs: one thread, in order, polled or waited on. What a job copies is not its
business."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import takewhile

from offload.base import Direction, TransferResult
from offload.errors import TransferError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TransferStatistics:
    """What a queue did so far."""

    queued_jobs: int
    """Submitted and not ended."""
    finished_jobs: int
    """Ended, failed ones included."""
    failed_jobs: int
    stored_bytes: int
    loaded_bytes: int
    busy_s: float
    """Time spent in copies."""


@dataclass(slots=True)
class _Job:
    """A job on its way. The queue's thread fills it, the future says when that is over."""

    job_id: int
    direction: Direction
    copy: Callable[[], int]
    time_s: float = 0.0
    future: Future[int] = field(init=False)

    def run(self) -> int:
        start = time.perf_counter()
        try:
            return self.copy()
        finally:
            self.time_s = time.perf_counter() - start

    def result(self) -> TransferResult:
        """What came of it; only once the future is done."""
        error = self.future.exception()
        if error is not None:
            log.warning("%s job %d failed: %s", self.direction.value, self.job_id, _reason(error))
        copied = 0 if error is not None else self.future.result()
        return TransferResult(self.job_id, self.direction, error is None, copied, self.time_s)


class TransferQueue:
    """Runs copies one behind the other in a thread of its own. Every method may be called from any
    thread."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._jobs: dict[int, _Job] = {}  # in the order of submission
        self._stopped = False
        self._failed = self._finished = 0
        self._bytes = {Direction.STORE: 0, Direction.LOAD: 0}
        self._busy_s = 0.0

    def submit(self, job_id: int, direction: Direction, copy: Callable[[], int]) -> None:
        """Queue a copy, which returns the bytes it copied. Whatever it raises fails the job, and
        the next one runs.

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
                    f"job {job_id}: there is a job of that id, not reported by get_finished yet"
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
        """Return when these jobs have ended. An id that is not queued has ended before."""
        wanted = set(job_ids)
        with self._lock:
            futures = [self._jobs[job_id].future for job_id in wanted & self._jobs.keys()]
        wait(futures)

    def shutdown(self) -> None:
        """Finish what was queued and stop. A second call does nothing more."""
        with self._lock:
            self._stopped = True
        self._executor.shutdown(wait=True)

    def statistics(self) -> TransferStatistics:
        """Counts of what was reported by `get_finished`, and what was not yet done."""
        with self._lock:
            queued = sum(not job.future.done() for job in self._jobs.values())
            stored, loaded = self._bytes[Direction.STORE], self._bytes[Direction.LOAD]
            return TransferStatistics(
                queued, self._finished, self._failed, stored, loaded, self._busy_s
            )

    def _count(self, result: TransferResult) -> TransferResult:
        self._finished += 1
        self._failed += not result.success
        self._bytes[result.direction] += result.transferred_bytes
        self._busy_s += result.time_s
        return result


def _reason(error: BaseException) -> str:
    """An error without its text, in which a file's name would be a block's key."""
    if isinstance(error, OSError) and error.errno is not None:
        return f"{type(error).__name__} {errno.errorcode.get(error.errno, error.errno)}"
    return type(error).__name__
