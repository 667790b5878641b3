"""Between GPU blocks and a lower tier: rows are gathered into a contiguous buffer in host memory,
or scattered out of it.

A chunk's buffer is `(offloaded blocks, bytes of an offloaded block)`, which is also how every lower
tier lays a block out. Where the tier's own memory has that shape for a chunk, it serves as the
buffer and one copy is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from offload.base import Direction
from offload.transfer.canonical import CanonicalKVCache
from offload.transfer.plan import Chunk, Ids, TransferGeometry, TransferPlan
from offload.transfer.rows import Bytes, RowCopier, rows_of

Pace = Callable[[int], None]
"""Called in the transfer thread before each chunk, with its bytes: it may block to hold back for
other traffic, and what it raises fails the job."""


def at_once(_: int) -> None:
    """Hold nothing back."""


class LowerSide(Protocol):
    """A lower tier's blocks of one job, by chunk."""

    def place(self, chunk: Chunk) -> Tensor | None:
        """The tier's memory of a chunk, if it lies there as one contiguous buffer."""
        ...

    def write(self, chunk: Chunk, buffer: Tensor) -> None:
        """Take a chunk's offloaded blocks."""
        ...

    def read(self, chunk: Chunk, buffer: Tensor) -> None:
        """Give a chunk's offloaded blocks."""
        ...


class Stager(Protocol):
    """Runs planned copies, in one thread."""

    @property
    def staging_bytes(self) -> int:
        """How large a chunk may be; a single offloaded block always fits."""
        ...

    def mark(self) -> torch.cuda.Event | None:
        """Which work of the caller's stream a copy has to wait for; called where the job is
        submitted."""
        ...

    def run(self, plan: TransferPlan, side: LowerSide, after: torch.cuda.Event | None, /) -> int:
        """Copy, and return the GPU blocks' bytes. When it returns or raises, no copy is under
        way."""
        ...


def staging_size(geometry: TransferGeometry, wished: int) -> int:
    """Bytes of a staging buffer: at least the largest offloaded block, and whole machine words."""
    return -(-max(wished, *geometry.offloaded_bytes) // 8) * 8


class HostStager:
    """A cache in host memory: threads copy."""

    def __init__(
        self,
        geometry: TransferGeometry,
        staging_bytes: int,
        copier: RowCopier,
        pace: Pace = at_once,
    ) -> None:
        self.staging_bytes = staging_size(geometry, staging_bytes)
        self._pages = _HostPages(geometry.cache, copier)
        self._geometry = geometry
        self._pace = pace
        self._staging = torch.empty(self.staging_bytes, dtype=torch.int8)

    def mark(self) -> torch.cuda.Event | None:
        """Nothing runs beside the caller."""
        return None

    def run(self, plan: TransferPlan, side: LowerSide, _after: torch.cuda.Event | None, /) -> int:
        """See `Stager`."""
        for chunk in plan.chunks:
            self._pace(chunk.gpu_bytes)
            place = side.place(chunk)
            buffer = chunk_view(self._geometry, chunk, self._staging) if place is None else place
            if plan.direction is Direction.STORE:
                self._store(plan, chunk, side, buffer, staged=place is None)
            else:
                self._load(plan, chunk, side, buffer, staged=place is None)
        return plan.gpu_bytes

    def _store(
        self, plan: TransferPlan, chunk: Chunk, side: LowerSide, buffer: Tensor, staged: bool
    ) -> None:
        self._pages.gather(chunk, plan.block_ids[chunk.ids], buffer)
        if staged:
            side.write(chunk, buffer)

    def _load(
        self, plan: TransferPlan, chunk: Chunk, side: LowerSide, buffer: Tensor, staged: bool
    ) -> None:
        if staged:
            side.read(chunk, buffer)
        self._pages.scatter(chunk, plan.block_ids[chunk.ids], buffer)


class _HostPages:
    """Pages of a cache in host memory."""

    def __init__(self, cache: CanonicalKVCache, copier: RowCopier) -> None:
        self._cache = cache
        self._copier = copier
        self._matrices: list[Bytes] = [tensor.numpy() for tensor in cache.tensors]

    def gather(self, chunk: Chunk, ids: Ids, buffer: Tensor) -> None:
        pages = self._staged(chunk, buffer)
        for ref, first in zip(
            self._cache.group_refs[chunk.group], self._cache.page_offsets(chunk.group), strict=True
        ):
            source = rows_of(self._matrices[ref.tensor_idx], 0, ref.page_bytes)
            self._copier.gather(source, ids, rows_of(pages, first, ref.page_bytes))

    def scatter(self, chunk: Chunk, ids: Ids, buffer: Tensor) -> None:
        pages = self._staged(chunk, buffer)
        for ref, first in zip(
            self._cache.group_refs[chunk.group], self._cache.page_offsets(chunk.group), strict=True
        ):
            target = rows_of(self._matrices[ref.tensor_idx], 0, ref.page_bytes)
            self._copier.scatter(rows_of(pages, first, ref.page_bytes), ids, target)

    def _staged(self, chunk: Chunk, buffer: Tensor) -> Bytes:
        pages: Bytes = buffer.numpy().reshape(-1, self._cache.page_bytes[chunk.group])
        return pages[chunk.pages]


def chunk_view(geometry: TransferGeometry, chunk: Chunk, staging: Tensor) -> Tensor:
    """The front of a flat staging buffer as a chunk's offloaded blocks."""
    block_bytes = geometry.offloaded_bytes[chunk.group]
    return staging[: chunk.lower_count * block_bytes].view(chunk.lower_count, block_bytes)
