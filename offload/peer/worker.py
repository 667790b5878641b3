"""Copies from other engines' memories to GPU blocks."""

from __future__ import annotations

import time

from torch import Tensor
from typing_extensions import override

from offload.base import Direction, PeerLoadSpec, TransferJob
from offload.errors import TransferError
from offload.peer.client import PeerClient
from offload.transfer.canonical import CanonicalKVCache
from offload.transfer.plan import Chunk, TransferGeometry
from offload.transfer.runner import REMOTE_STAGING_BYTES, TransferOptions, TransferWorker
from offload.transfer.staging import LowerSide


class PeerTransferWorker(TransferWorker):
    """Brings blocks from peers; a job fails where its peer has one of them no longer."""

    def __init__(
        self, cache: CanonicalKVCache, peers: PeerClient, options: TransferOptions | None = None
    ) -> None:
        """
        Args:
            options: How to copy; a chunk is 16 MiB if left out.
        """
        super().__init__("kv-peer-tier", TransferGeometry(cache), options, REMOTE_STAGING_BYTES)
        self._peers = peers

    @override
    def submit(self, job: TransferJob) -> None:
        if not isinstance(job.lower, PeerLoadSpec) or job.direction is not Direction.LOAD:
            raise TransferError(
                f"job {job.job_id}: {job.direction.value} with {type(job.lower).__name__} must be "
                "a load with a PeerLoadSpec"
            )
        plan = self._plan(job, len(job.lower.keys))
        self._submit(job, plan, _PeerSide(self._peers, job.lower))


class _PeerSide(LowerSide):
    """The blocks of one job."""

    def __init__(self, peers: PeerClient, blocks: PeerLoadSpec) -> None:
        self._peers = peers
        self._blocks = blocks
        self._by_s: float | None = None
        """When the pull must be over; it begins with its first chunk."""

    @override
    def write(self, chunk: Chunk, buffer: Tensor) -> None:
        raise TransferError("peer tier: nothing is stored there")

    @override
    def read(self, chunk: Chunk, buffer: Tensor) -> None:
        if self._by_s is None:
            self._by_s = time.monotonic() + self._peers.PULL_S
        keys = self._blocks.keys[chunk.lower]
        found = self._peers.fetch(self._blocks.source, keys, self._by_s)
        for row, block in zip(buffer.numpy(), found, strict=True):
            if len(block) != len(row):
                raise TransferError(f"peer tier: a block of {len(block)} bytes is not {len(row)}")
            memoryview(row).cast("B")[:] = block
