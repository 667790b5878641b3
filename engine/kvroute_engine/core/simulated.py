"""The engine's backend without tensors: it takes the time that computing and copying would take.

Scheduler, cache, tiers and events are the real ones, so such an engine reports the same about its
cache as one with a model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from kvroute_engine.core.batch import ModelRunner, SequenceChunk
from kvroute_engine.core.time_model import Clock, TimeModel
from offload.base import OffloadingWorker, OffloadKey, TransferJob, TransferResult
from offload.errors import TransferError
from offload.fs.store import BlockFiles, StoredFile
from offload.peer.client import PeerClient

_FIRST_PRINTABLE, _PRINTABLE = 32, 95
_BYTE_TOKENS = 256


class SimulatedRunner:
    """Chooses tokens that depend on the request only, after as long as a model would take."""

    def __init__(self, time_model: TimeModel, clock: Clock, vocab_size: int) -> None:
        """
        Args:
            time_model: How long a step takes.
            vocab_size: Bound on the tokens that are chosen.
        """
        self.time_model = time_model
        self._clock = clock
        self._vocab_size = vocab_size

    def run(self, chunks: Sequence[SequenceChunk]) -> list[int | None]:
        """See `ModelRunner.run`."""
        self._clock.sleep(self.time_model.step_s(chunks))
        return [
            self.next_token(chunk.token_ids[-1], chunk.stop, chunk.sampling.seed or 0)
            if chunk.is_last
            else None
            for chunk in chunks
        ]

    def next_token(self, last_token: int, length: int, seed: int) -> int:
        """Derive a token from the last one before it and its position.

        It is the same however the sequence was cut, cached or preempted. Where the vocabulary has
        bytes it is a printable one, so that the text of a response, sent back in a later prompt,
        becomes the same tokens again.

        Args:
            length: Tokens of the sequence, this one not counted.
        """
        drawn = (last_token * 2_654_435_761 + length * 40_503 + seed * 97) % 2**32
        return (
            _FIRST_PRINTABLE + drawn % _PRINTABLE
            if self._vocab_size >= _BYTE_TOKENS
            else drawn % self._vocab_size
        )


class SimulatedTransferWorker:
    """Finishes jobs in order, each after as long as copying its bytes would take."""

    def __init__(self, copy_s: Callable[[int], float], clock: Clock, block_bytes: int) -> None:
        """
        Args:
            copy_s: How long a copy of so many bytes takes, in seconds.
            clock: Decides when a job is finished.
            block_bytes: Bytes of a GPU block.
        """
        self._copy_s = copy_s
        self._clock = clock
        self._block_bytes = block_bytes
        self._jobs: deque[tuple[TransferJob, float, float]] = deque()
        self._free_at_s = 0.0
        self._is_shut_down = False

    def submit(self, job: TransferJob) -> None:
        """See `OffloadingWorker.submit`."""
        if self._is_shut_down:
            raise TransferError(f"job {job.job_id}: the worker was shut down")
        time_s = self._copy_s(len(job.gpu.block_ids) * self._block_bytes)
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


class SimulatedBlockFiles(BlockFiles):
    """A disk tier's files in name only: nothing is written, so a new process finds nothing."""

    def scan(self) -> list[StoredFile]:
        """Find nothing."""
        return []

    def remove(self, key: OffloadKey) -> None:
        """Do nothing, since there is no file."""

    def close(self) -> None:
        """Do nothing, since nothing is open."""


class SimulatedBackend:
    """A runner and transfer workers that share one time model and clock; see `Backend`."""

    def __init__(
        self, time_model: TimeModel, clock: Clock, vocab_size: int, block_bytes: int
    ) -> None:
        """
        Args:
            time_model: How long steps and copies take.
            vocab_size: The simulated model's.
            block_bytes: Bytes of a GPU block of that model.
        """
        # Bytes only: a special token would end a response or have no text.
        self.runner: ModelRunner = SimulatedRunner(time_model, clock, min(_BYTE_TOKENS, vocab_size))
        self._time_model = time_model
        self._clock = clock
        self._block_bytes = block_bytes

    def cpu_worker(
        self,
        num_blocks: int,  # noqa: ARG002 (the protocol's)
        blocks_per_offloaded_block: Sequence[int],  # noqa: ARG002 (the protocol's)
    ) -> OffloadingWorker:
        """Return a worker that takes the time of copies and copies nothing."""
        return self._worker()

    def disk(
        self,
        directory: Path,  # noqa: ARG002 (the protocol's)
        payload_bytes: Sequence[int],
        identity: str,  # noqa: ARG002 (the protocol's)
        blocks_per_offloaded_block: Sequence[int],  # noqa: ARG002 (the protocol's)
    ) -> tuple[BlockFiles, OffloadingWorker]:
        """Return a disk tier's files and worker; nothing is written.

        Args:
            directory: Not used.
            payload_bytes: Bytes of an offloaded block, per group.
            identity: Not used.
            blocks_per_offloaded_block: Not used.
        """
        return SimulatedBlockFiles(payload_bytes), self._worker()

    def worker(
        self,
        make: Callable[[Any], OffloadingWorker],  # noqa: ARG002 (the protocol's)
    ) -> OffloadingWorker:
        """Return a worker that takes the time of a copy; *make* is not called."""
        return self._worker()

    def peer_worker(
        self,
        peers: PeerClient,  # noqa: ARG002 (the protocol's)
    ) -> OffloadingWorker:
        """Return a worker that takes the time of a pull, and fetches nothing."""
        return SimulatedTransferWorker(self._time_model.pull_s, self._clock, self._block_bytes)

    def _worker(self) -> OffloadingWorker:
        copy_s = self._time_model.transfer_s
        return SimulatedTransferWorker(copy_s, self._clock, self._block_bytes)
