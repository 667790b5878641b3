"""Checks a copy job before it queues, and plans the bytes it touches.

In a lower tier a group's *offloaded block* is `blocks_per_offloaded_block` of its GPU blocks
concatenated, each as the group's page. A plan cuts a job into *chunks*: runs of offloaded blocks of
one group that fit a staging buffer. A load of GPU blocks 3 to 9 of a prompt, four to an offloaded
block, in chunks of two offloaded blocks:

    offloaded block   |     0      |     1      |     2      |
    GPU block         | .  .  .  3 | 4  5  6  7 | 8  9  .  . |
    chunk             |------- first ------- ---|-- second --|
    lower                     0 to 1              2
    pages                     3 to 7            0 to 1
    ids                       0 to 4            5 to 6
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from offload.base import Direction, GPULoadStoreSpec
from offload.errors import CacheConfigError, TransferError
from offload.transfer.canonical import CanonicalKVCache
from offload.transfer.rows import Ids


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of offloaded blocks of one group, staged at once."""

    group: int
    lower: slice
    """Its part of the lower tier's spec."""
    pages: slice
    """Which GPU blocks of its offloaded blocks it copies."""
    ids: slice
    """Its part of the plan's block ids."""
    gpu_bytes: int
    """Bytes copied to or from GPU blocks."""


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """A job that was checked."""

    direction: Direction
    block_ids: Ids
    chunks: Sequence[Chunk]

    @property
    def gpu_bytes(self) -> int:
        """Bytes the job copies to or from GPU blocks."""
        return sum(chunk.gpu_bytes for chunk in self.chunks)


class TransferGeometry:
    """How a cache's GPU blocks make up a tier's offloaded blocks."""

    def __init__(
        self, cache: CanonicalKVCache, blocks_per_offloaded_block: Sequence[int] | None = None
    ) -> None:
        """
        Args:
            blocks_per_offloaded_block: Per group, how many GPU blocks an offloaded block covers;
                one each if left out.

        Raises:
            CacheConfigError: blocks_per_offloaded_block is not one positive number per group.
        """
        factors = tuple(blocks_per_offloaded_block or (1,) * cache.num_groups)
        if len(factors) != cache.num_groups or min(factors) < 1:
            raise CacheConfigError(
                f"blocks_per_offloaded_block {list(factors)} must be one positive number for each "
                f"of {cache.num_groups} groups"
            )
        self.cache = cache
        self.blocks_per_offloaded_block = factors
        self.offloaded_bytes = tuple(
            k * page for k, page in zip(factors, cache.page_bytes, strict=True)
        )
        """Per group, the bytes of an offloaded block."""

    def plan(
        self, direction: Direction, gpu: GPULoadStoreSpec, lower_count: int, staging_bytes: int
    ) -> TransferPlan:
        """Check a job against the cache and cut it into chunks.

        Args:
            lower_count: How many offloaded blocks the lower side has.
            staging_bytes: How large a chunk may be; a single offloaded block always fits.

        Raises:
            TransferError: The job does not fit.
        """
        if len(gpu.group_sizes) != self.cache.num_groups:
            raise TransferError(
                f"GPU spec: {len(gpu.group_sizes)} groups must be the cache's "
                f"{self.cache.num_groups}"
            )
        lower_counts = self.lower_counts(gpu)
        if sum(lower_counts) != lower_count:
            raise TransferError(
                f"lower spec: {lower_count} offloaded blocks must be {sum(lower_counts)}, "
                f"per group {lower_counts}"
            )
        if direction is Direction.STORE:
            self._check_whole(gpu)
        block_ids = self._checked_ids(direction, gpu)
        return TransferPlan(
            direction, block_ids, list(self._chunks(gpu, lower_counts, staging_bytes))
        )

    def lower_counts(self, gpu: GPULoadStoreSpec) -> list[int]:
        """Per group, how many offloaded blocks its GPU blocks touch."""
        triples = zip(
            gpu.group_sizes, gpu.block_indices, self.blocks_per_offloaded_block, strict=True
        )
        return [-(-(index % k + size) // k) if size else 0 for size, index, k in triples]

    def _check_whole(self, gpu: GPULoadStoreSpec) -> None:
        # A part of an offloaded block, stored under the block's key, would be served as the whole.
        for group, (size, index) in enumerate(zip(gpu.group_sizes, gpu.block_indices, strict=True)):
            k = self.blocks_per_offloaded_block[group]
            if size and (index % k or size % k):
                raise TransferError(
                    f"store of group {group}: {size} blocks from index {index} must cover whole "
                    f"offloaded blocks of {k}"
                )

    def _checked_ids(self, direction: Direction, gpu: GPULoadStoreSpec) -> Ids:
        first = 0
        for group, size in enumerate(gpu.group_sizes):
            ids = gpu.block_ids[first : first + size]
            limit = self.cache.num_blocks[group]
            if size and not (min(ids) >= 0 and max(ids) < limit):
                raise TransferError(
                    f"GPU spec: block ids {min(ids)} to {max(ids)} of group {group} must be in 0 "
                    f"to {limit - 1}"
                )
            first += size
        block_ids = np.array(gpu.block_ids, dtype=np.int64)
        if direction is Direction.LOAD:
            self._check_written_once(gpu, block_ids)
        return block_ids

    def _check_written_once(self, gpu: GPULoadStoreSpec, block_ids: Ids) -> None:
        parts = np.split(block_ids, np.cumsum(gpu.group_sizes)[:-1])
        for tensor_idx in range(len(self.cache.tensors)):
            users = [
                g
                for g, refs in enumerate(self.cache.group_refs)
                if any(r.tensor_idx == tensor_idx for r in refs)
            ]
            rows = np.concatenate([parts[group] for group in users]) if users else block_ids[:0]
            if len(np.unique(rows)) != len(rows):
                raise TransferError(
                    f"load of groups {users}: a block id of tensor {tensor_idx} is named twice; "
                    "write it once"
                )

    def _chunks(
        self, gpu: GPULoadStoreSpec, lower_counts: list[int], staging_bytes: int
    ) -> Iterator[Chunk]:
        """Each group's part of a job, cut into chunks of at most *staging_bytes*."""
        first_lower = first_id = 0
        for group, (size, index, count) in enumerate(
            zip(gpu.group_sizes, gpu.block_indices, lower_counts, strict=True)
        ):
            k = self.blocks_per_offloaded_block[group]
            skipped = index % k
            per_chunk = max(1, staging_bytes // self.offloaded_bytes[group])
            for first in range(0, count, per_chunk):
                stop = min(first + per_chunk, count)
                # Its GPU blocks, counted from the group's first offloaded block.
                begin, end = max(first * k, skipped), min(stop * k, skipped + size)
                yield Chunk(
                    group=group,
                    lower=slice(first_lower + first, first_lower + stop),
                    pages=slice(begin - first * k, end - first * k),
                    ids=slice(first_id + begin - skipped, first_id + end - skipped),
                    gpu_bytes=(end - begin) * self.cache.page_bytes[group],
                )
            first_lower += count
            first_id += size


def check_ids(place: str, ids: Sequence[int], limit: int, unique: bool) -> Ids:
    """Block ids as an array, checked.

    Args:
        place: Where they come from, for the error.
        ids: Each must lie in `[0, limit)`.
        unique: True if each may appear only once, because the blocks are written to.

    Raises:
        TransferError: An id is out of range, or appears twice.
    """
    if len(ids) and not (min(ids) >= 0 and max(ids) < limit):
        raise TransferError(
            f"{place}: block ids {min(ids)} to {max(ids)} must be in 0 to {limit - 1}"
        )
    array = np.array(ids, dtype=np.int64)
    if unique and len(np.unique(array)) != len(array):
        raise TransferError(
            f"{place}: {len(array)} block ids, {len(np.unique(array))} of them different; "
            "each is written once"
        )
    return array
