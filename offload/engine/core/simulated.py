"""The engine's hands without tensors: a runner and transfer workers that take the time and touch no
bytes.

Scheduler, cache, tiers and events are the real ones, so what such an engine says of its cache is
what a real one would say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from offload.base import OffloadKey, TransferJob, TransferResult
from offload.engine.core.batch import SequenceChunk
from offload.engine.core.time_model import Clock, TimeModel
from offload.errors import TransferError
from offload.fs.store import StoredFile, file_bytes

_FIRST_PRINTABLE, _PRINTABLE = 32, 95


class SimulatedRunner:
    """Says tokens that follow from the request alone, after as long as a model would take."""

    def __init__(self, time_model: TimeModel, clock: Clock, vocab_size: int) -> None:
        self.time_model = time_model
        self._clock = clock
        self._vocab_size = vocab_size

    def run(self, chunks: Sequence[SequenceChunk]) -> list[int | None]:
        """See `ModelRunner`."""
        self._clock.sleep(self.time_model.step_s(chunks))
        return [self._token(chunk) if chunk.is_last else None for chunk in chunks]

    def _token(self, chunk: SequenceChunk) -> int:
        """Of the last token and its position: the same however the sequence was cut, cached or
        preempted.

        Printable bytes where the vocabulary has them, so that an answer sent back is the same
        tokens again.
        """
        seed = chunk.sampling.seed or 0
        drawn = (chunk.token_ids[-1] * 2_654_435_761 + chunk.stop * 40_503 + seed * 97) % 2**32
        return (
            _FIRST_PRINTABLE + drawn % _PRINTABLE
            if self._vocab_size >= 256
            else drawn % self._vocab_size
        )


class SimulatedTransferWorker:
    """Ends jobs in their order, each after as long as its bytes would take; see
    `OffloadingWorker`."""

    def __init__(self, time_model: TimeModel, clock: Clock, block_bytes: int) -> None:
        self._time_model = time_model
        self._clock = clock
        self._block_bytes = block_bytes
        self._jobs: deque[tuple[TransferJob, float, float]] = deque()
        self._free_at_s = 0.0
        self._is_shut_down = False

    def submit(self, job: TransferJob) -> None:
        """See `OffloadingWorker.submit`."""
        if self._is_shut_down:
            raise TransferError(f"job {job.job_id}: the worker was shut down")
        time_s = self._time_model.transfer_s(len(job.gpu.block_ids) * self._block_bytes)
        self._free_at_s = max(self._free_at_s, self._clock.now_s()) + time_s
        self._jobs.append((job, self._free_at_s, time_s))

    def get_finished(self) -> list[TransferResult]:
        """See `OffloadingWorker.get_finished`."""
        finished: list[TransferResult] = []
        while self._jobs and self._jobs[0][1] <= self._clock.now_s():
            job, _, time_s = self._jobs.popleft()
            copied = len(job.gpu.block_ids) * self._block_bytes
            finished.append(TransferResult(job.job_id, job.direction, True, copied, time_s))
        return finished

    def wait(self, job_ids: Iterable[int]) -> None:
        """See `OffloadingWorker.wait`."""
        wanted = set(job_ids)
        ends = [end_s for job, end_s, _ in self._jobs if job.job_id in wanted]
        self._clock.sleep(max(0.0, max(ends, default=0.0) - self._clock.now_s()))

    def shutdown(self) -> None:
        """See `OffloadingWorker.shutdown`."""
        self._is_shut_down = True


class SimulatedBlockFiles:
    """A directory by the names of its files alone: nothing is written, and a new process finds
    nothing. See `BlockFiles`."""

    def __init__(self, payload_bytes: Sequence[int]) -> None:
        self._payload_bytes = tuple(payload_bytes)

    @property
    def payload_bytes(self) -> Sequence[int]:
        """See `BlockFiles`."""
        return self._payload_bytes

    def file_bytes(self, key: OffloadKey) -> int:
        """See `BlockStore.file_bytes`."""
        return file_bytes(key, self._payload_bytes)

    def scan(self) -> list[StoredFile]:
        """There is nothing."""
        return []

    def remove(self, key: OffloadKey) -> None:
        """There was nothing."""

    def close(self) -> None:
        """Nothing is open."""
