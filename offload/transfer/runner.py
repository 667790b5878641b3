"""The common parts of all transfer workers: a plan, a stager, a queue."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from typing_extensions import override

from offload.base import OffloadingWorker, TransferJob, TransferResult
from offload.transfer.cuda_staging import CudaStager
from offload.transfer.plan import TransferGeometry, TransferPlan
from offload.transfer.queue import TransferQueue, TransferStatistics
from offload.transfer.rows import RowCopier
from offload.transfer.staging import HostStager, LowerSide, Pace, Stager, at_once

_HOST_STAGING_BYTES = 1 << 20
_CUDA_STAGING_BYTES = 64 << 20
REMOTE_STAGING_BYTES = 16 << 20
"""The default of tiers in files or at a peer, where a chunk is read or written together."""
_MAX_COPY_THREADS = 8


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """Options of a worker's copies."""

    staging_bytes: int | None = None
    """How large a chunk may be. Default: 1 MiB for a cache in host memory, so that a chunk stays in
    the processor's cache, and 64 MiB for one on a GPU."""
    copy_threads: int | None = None
    """Threads that move rows of host memory. Default: 1 for a cache in host memory, which leaves
    the other cores to the model, and half the cores, at most 8, with a GPU, whose bus is faster
    than a core."""
    pace: Pace = at_once
    """Called before each chunk; see `Pace`."""


class TransferWorker(OffloadingWorker):
    """The common part of all tiers' workers: plans a job at its submission and copies it in the
    queue's thread. Each has a `submit` of its own."""

    def __init__(
        self,
        name: str,
        geometry: TransferGeometry,
        options: TransferOptions | None,
        staging_bytes: int | None = None,
    ) -> None:
        """
        Args:
            name: The queue's thread's.
            staging_bytes: The tier's own default of that option.
        """
        options = options or TransferOptions()
        staging_bytes = options.staging_bytes or staging_bytes
        self._geometry = geometry
        if geometry.cache.device.type == "cuda":
            threads = max(1, min(_MAX_COPY_THREADS, (os.cpu_count() or 1) // 2))
            self._copier = RowCopier(options.copy_threads or threads)
            self._stager: Stager = CudaStager(
                geometry, staging_bytes or _CUDA_STAGING_BYTES, options.pace
            )
        else:
            self._copier = RowCopier(options.copy_threads or 1)
            self._stager = HostStager(
                geometry, staging_bytes or _HOST_STAGING_BYTES, self._copier, options.pace
            )
        self._queue = TransferQueue(name)

    def _plan(self, job: TransferJob, lower_count: int) -> TransferPlan:
        """Check a job and cut it into chunks that fit the stager's buffers.

        Args:
            lower_count: How many offloaded blocks its lower side has.

        Raises:
            TransferError: The job does not fit.
        """
        return self._geometry.plan(job.direction, job.gpu, lower_count, self._stager.staging_bytes)

    def _submit(self, job: TransferJob, plan: TransferPlan, side: LowerSide) -> None:
        """Queue a planned job behind the work of the caller's stream.

        Raises:
            TransferError: The queue was shut down, or another job has that id.
        """
        after = self._stager.record_event()
        self._queue.submit(job.job_id, job.direction, lambda: self._stager.run(plan, side, after))

    @override
    def get_finished(self) -> list[TransferResult]:
        return self._queue.get_finished()

    @override
    def wait(self, job_ids: Iterable[int]) -> None:
        self._queue.wait(job_ids)

    @override
    def shutdown(self) -> None:
        self._queue.shutdown()
        self._copier.close()

    def statistics(self) -> TransferStatistics:
        """Jobs and bytes so far."""
        return self._queue.statistics()
