"""Checks a copy job before it queues, and plans the bytes it touches.

In a lower tier a group's *offloaded block* is `blocks_per_offloaded_block` of its GPU blocks
concatenated, each as the group's page. A plan cuts a job into *chunks*: runs of offloaded blocks of
one group that fit a staging buffer. A load of GPU blocks 3 to 9 of a prompt, four to an offloaded
block, in chunks of two offloaded blocks:

    offloaded block   |     0      |     1      |     2      |
    GPU block         | .  .  .  3 | 4  5  6  7 | 8  9  .  . |
    chunk             |------- first ------- ---|-- second --|
    first_page                   3                0
    id_count          five: 3 to 7                two: 8, 9
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from offload.base import Direction, GPULoadStoreSpec
from offload.errors import CacheConfigError, TransferError
from offload.transfer.canonical import CanonicalKVCache

Ids: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of offloaded blocks of one group, staged at once."""

    group: int
    first_lower: int
    """Index of its first offloaded block in the lower tier's spec."""
    lower_count: int
    first_page: int
    """How many GPU blocks of its first offloaded block are skipped."""
    first_id: int
    """Index of its first GPU block in the plan's block ids."""
    id_count: int
    gpu_bytes: int
    """Bytes copied to or from GPU blocks."""

    @property
    def lower(self) -> slice:
        """Its part of the lower tier's spec."""
        return slice(self.first_lower, self.first_lower + self.lower_count)

    @property
    def ids(self) -> slice:
        """Its part of the plan's block ids."""
        return slice(self.first_id, self.first_id + self.id_count)

    @property
    def pages(self) -> slice:
        """The GPU blocks of the staged ones that it copies."""
        return slice(self.first_page, self.first_page + self.id_count)


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
        first_lower = first_id = 0
        for group, (size, index, count) in enumerate(
            zip(gpu.group_sizes, gpu.block_indices, lower_counts, strict=True)
        ):
            whole = Chunk(
                group=group,
                first_lower=first_lower,
                lower_count=count,
                first_page=index % self.blocks_per_offloaded_block[group],
                first_id=first_id,
                id_count=size,
                gpu_bytes=size * self.cache.page_bytes[group],
            )
            yield from self._cut(whole, staging_bytes)
            first_lower += count
            first_id += size

    def _cut(self, whole: Chunk, staging_bytes: int) -> Iterator[Chunk]:
        """A group's part of a job, cut into chunks of at most *staging_bytes*."""
        k = self.blocks_per_offloaded_block[whole.group]
        per_chunk = max(1, staging_bytes // self.offloaded_bytes[whole.group])
        for first in range(0, whole.lower_count, per_chunk):
            count = min(per_chunk, whole.lower_count - first)
            begin = max(first * k, whole.first_page)
            end = min((first + count) * k, whole.first_page + whole.id_count)
            yield Chunk(
                group=whole.group,
                first_lower=whole.first_lower + first,
                lower_count=count,
                first_page=begin - first * k,
                first_id=whole.first_id + begin - whole.first_page,
                id_count=end - begin,
                gpu_bytes=(end - begin) * self.cache.page_bytes[whole.group],
            )


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
