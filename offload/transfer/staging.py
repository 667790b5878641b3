"""Copies chunks between GPU blocks and a lower tier through a contiguous buffer in host memory.

A chunk's buffer is `[num_lower, offloaded_bytes]` int8, which is also how every lower tier lays
out its blocks. Where the tier's own memory has that shape for a chunk, it serves as the buffer and
one copy is saved:

    store   pages --gather--> staging buffer --write--> tier       or   pages --gather--> tier
    load    pages <-scatter-- staging buffer <--read--- tier       or   pages <-scatter-- tier
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from offload.base import Direction
from offload.transfer.plan import Chunk, TransferGeometry, TransferPlan
from offload.transfer.rows import Bytes, RowCopier, Rows, rows_of

Pace = Callable[[int], None]
"""Called in the transfer thread before each chunk, with its bytes: it may block to leave room for
other traffic, and any error fails the job."""


def at_once(_: int) -> None:
    """Never wait."""


class LowerSide(Protocol):
    """A lower tier's blocks of one job, by chunk."""

    def direct_buffer(self, chunk: Chunk) -> Tensor | None:  # noqa: ARG002
        """The tier's own memory of a chunk, if it is one contiguous buffer; then use no other.
        None, as here, for a tier that is read and written.

        Returns:
            `[num_lower, offloaded_bytes]` int8 on the CPU, to be read or written in place.
        """
        return None

    def write(self, chunk: Chunk, buffer: Tensor) -> None:
        """Copy a chunk's offloaded blocks into the tier.

        Args:
            buffer: `[num_lower, offloaded_bytes]` int8 on the CPU, to be read.
        """

    def read(self, chunk: Chunk, buffer: Tensor) -> None:
        """Copy a chunk's offloaded blocks out of the tier.

        Args:
            buffer: `[num_lower, offloaded_bytes]` int8 on the CPU, to be written.
        """


class Stager(Protocol):
    """Runs planned copies, in one thread."""

    staging_bytes: int
    """How large a chunk may be; a single offloaded block always fits."""

    def record_event(self) -> torch.cuda.Event | None:
        """An event behind the caller's work, which a copy must wait for; None without a stream.

        Called in the thread that submits the job.
        """

    def run(self, plan: TransferPlan, side: LowerSide, after: torch.cuda.Event | None) -> int:
        """Copy, and return the bytes copied to or from GPU blocks.

        When it returns or raises, no copy is in progress.

        Args:
            after: From `record_event` when the job was submitted.
        """


def staging_size(geometry: TransferGeometry, wanted_bytes: int) -> int:
    """Bytes of a staging buffer: at least the largest offloaded block, and whole machine words."""
    return -(-max(wanted_bytes, *geometry.offloaded_bytes) // 8) * 8


class HostStager(Stager):
    """Copies to and from a cache in host memory, with threads."""

    def __init__(
        self,
        geometry: TransferGeometry,
        staging_bytes: int,
        copier: RowCopier,
        pace: Pace = at_once,
    ) -> None:
        """
        Args:
            staging_bytes: How large a chunk may be; one buffer of it is allocated.
            pace: Called before each chunk.
        """
        self.staging_bytes = staging_size(geometry, staging_bytes)
        self._geometry = geometry
        self._copier = copier
        self._matrices: list[Bytes] = [tensor.numpy() for tensor in geometry.cache.tensors]
        self._pace = pace
        self._staging = torch.empty(self.staging_bytes, dtype=torch.int8)

    @override
    def record_event(self) -> torch.cuda.Event | None:
        return None

    @override
    def run(self, plan: TransferPlan, side: LowerSide, after: torch.cuda.Event | None) -> int:
        for chunk in plan.chunks:
            self._pace(chunk.gpu_bytes)
            direct, ids = side.direct_buffer(chunk), plan.block_ids[chunk.ids]
            buffer = chunk_view(self._geometry, chunk, self._staging) if direct is None else direct
            if plan.direction is Direction.STORE:
                for pages, staged in self._pairs(chunk, buffer):
                    self._copier.gather(pages, ids, staged)
                if direct is None:
                    side.write(chunk, buffer)
            else:
                if direct is None:
                    side.read(chunk, buffer)
                for pages, staged in self._pairs(chunk, buffer):
                    self._copier.scatter(staged, ids, pages)
        return plan.gpu_bytes

    def _pairs(self, chunk: Chunk, buffer: Tensor) -> Iterator[tuple[Rows, Rows]]:
        """Per ref, the cache's rows and the staged ones."""
        cache, group = self._geometry.cache, chunk.group
        pages: Bytes = buffer.numpy().reshape(-1, cache.page_bytes[group])[chunk.pages]
        for ref, first in zip(cache.group_refs[group], cache.page_offsets(group), strict=True):
            rows = rows_of(self._matrices[ref.tensor_idx], 0, ref.page_bytes)
            yield rows, rows_of(pages, first, ref.page_bytes)


def chunk_view(geometry: TransferGeometry, chunk: Chunk, staging: Tensor) -> Tensor:
    """The front of a flat staging buffer as a chunk's offloaded blocks.

    Args:
        staging: `[staging_bytes]` int8.

    Returns:
        `[num_lower, offloaded_bytes]` int8, a view of *staging*.
    """
    block_bytes = geometry.offloaded_bytes[chunk.group]
    count = chunk.lower.stop - chunk.lower.start
    return staging[: count * block_bytes].view(count, block_bytes)
