"""Copies between GPU blocks and the disk tier's files: jobs in order, each with several threads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import chain, repeat

from torch import Tensor
from typing_extensions import override

from kvevents.threads import begun_pool
from offload.base import Direction, FileLoadStoreSpec, OffloadKey, TransferJob, unpack_offload_key
from offload.errors import CacheConfigError, TransferError
from offload.fs.store import BlockStore
from offload.transfer.canonical import CanonicalKVCache
from offload.transfer.plan import Chunk, TransferGeometry
from offload.transfer.runner import REMOTE_STAGING_BYTES, TransferOptions, TransferWorker
from offload.transfer.staging import LowerSide


class FileTransferWorker(TransferWorker):
    """Moves the disk tier's blocks.

    A payload is an offloaded block: its GPU blocks concatenated, each as the group's page. A job
    that fails may have written some of its files, all of them whole; `complete_store` without
    success deletes them.
    """

    def __init__(
        self,
        cache: CanonicalKVCache,
        store: BlockStore,
        blocks_per_offloaded_block: Sequence[int] | None = None,
        io_threads: int = 4,
        options: TransferOptions | None = None,
    ) -> None:
        """
        Args:
            store: The directory. The manager has scanned it already.
            blocks_per_offloaded_block: Per group, how many GPU blocks an offloaded block covers;
                one each if left out.
            io_threads: How many files are read or written at a time.
            options: How to copy; a chunk, whose files are read or written together, is 16 MiB if
                left out.

        Raises:
            CacheConfigError: The directory is for blocks of other sizes.
        """
        geometry = TransferGeometry(cache, blocks_per_offloaded_block)
        if geometry.offloaded_bytes != store.payload_bytes:
            raise CacheConfigError(
                f"disk tier {store.root}: payload_bytes {list(store.payload_bytes)} must be the "
                f"cache's offloaded blocks, {list(geometry.offloaded_bytes)}"
            )
        if io_threads < 1:
            raise CacheConfigError(f"disk tier: io_threads {io_threads} must be at least 1")
        super().__init__("kv-disk-tier", geometry, options, REMOTE_STAGING_BYTES)
        self._store = store
        self._io = begun_pool(io_threads, "kv-files")

    @override
    def submit(self, job: TransferJob) -> None:
        if not isinstance(job.lower, FileLoadStoreSpec):
            raise TransferError(
                f"job {job.job_id}: lower spec {type(job.lower).__name__} "
                "must be a FileLoadStoreSpec"
            )
        keys = tuple(job.lower.keys)
        plan = self._plan(job, len(keys))
        self._check_keys(job, keys)
        hashes = tuple(map(tuple, job.lower.block_hashes)) or ((),) * len(keys)
        if len(hashes) != len(keys):
            raise TransferError(
                f"job {job.job_id}: {len(hashes)} block_hashes must be one entry for each of "
                f"{len(keys)} keys"
            )
        if job.direction is Direction.STORE:
            for key, each in zip(keys, hashes, strict=True):
                self._store.kept_hashes(key, each)
        self._submit(job, plan, _FileSide(self._store, keys, hashes, self._io))

    def _check_keys(self, job: TransferJob, keys: tuple[OffloadKey, ...]) -> None:
        for key in keys:
            self._store.file_bytes(key)
        counts = self._geometry.lower_counts(job.gpu)
        expected = list(
            chain.from_iterable(repeat(group, count) for group, count in enumerate(counts))
        )
        if [unpack_offload_key(key)[1] for key in keys] != expected:
            raise TransferError(
                f"job {job.job_id}: keys must be listed group by group, {counts} of each group"
            )
        if job.direction is Direction.STORE and len(set(keys)) != len(keys):
            raise TransferError(
                f"job {job.job_id}: {len(keys)} keys, {len(set(keys))} of them different; "
                "each is written once"
            )

    @override
    def shutdown(self) -> None:
        super().shutdown()
        self._io.shutdown()


@dataclass(eq=False, repr=False)
class _FileSide(LowerSide):
    """The files of one job."""

    store: BlockStore
    keys: tuple[OffloadKey, ...]
    block_hashes: tuple[tuple[bytes, ...], ...]
    io: ThreadPoolExecutor

    @override
    def write(self, chunk: Chunk, buffer: Tensor) -> None:
        self._wait_for(
            self.io.submit(self.store.write, key, payload, hashes)
            for key, payload, hashes in zip(
                self.keys[chunk.lower],
                _payloads(buffer),
                self.block_hashes[chunk.lower],
                strict=True,
            )
        )

    @override
    def read(self, chunk: Chunk, buffer: Tensor) -> None:
        self._wait_for(
            self.io.submit(self.store.read, key, payload)
            for key, payload in zip(self.keys[chunk.lower], _payloads(buffer), strict=True)
        )

    def _wait_for(self, submitted: Iterable[Future[None]]) -> None:
        futures = list(submitted)
        # All of them, also when one failed: once its job is reported, files must be left alone.
        wait(futures)
        for future in futures:
            future.result()


def _payloads(buffer: Tensor) -> list[memoryview]:
    return [memoryview(row).cast("B") for row in buffer.numpy()]
