"""Copies between a cache on a CUDA device and a lower tier, while the model computes.

A chunk is gathered into a contiguous buffer on the device, copied to pinned host memory in one
transfer, and handed to the tier; loads go the other way. All of it runs on a stream of its own,
which first waits for the work that the engine's stream had queued when the job was submitted. There
are two lanes of buffers, so that the tier works on one chunk while the next one is on the bus:

    lane     |        0         |        1         |        0         |
    stream   | gather 0 | bus 0 | gather 1 | bus 1 | gather 2 | bus 2 | ...
    tier                        | write 0          | write 1          | ...
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor
from typing_extensions import override

from offload.base import Direction
from offload.transfer.plan import Chunk, TransferGeometry, TransferPlan
from offload.transfer.staging import LowerSide, Pace, Stager, at_once, chunk_view, staging_size

_WORD = torch.int64
_WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Lane:
    """A buffer on each side of the bus, and the event behind the last copy between them."""

    device: Tensor
    host: Tensor
    copied: torch.cuda.Event


@dataclass(frozen=True, slots=True)
class _Arriving:
    """A chunk on its way to the host."""

    chunk: Chunk
    buffer: Tensor
    is_staged: bool
    copied: torch.cuda.Event

    def hand_over(self, side: LowerSide) -> None:
        """Wait for its bytes and give them to the tier."""
        self.copied.synchronize()
        if self.is_staged:
            side.write(self.chunk, self.buffer)


class CudaStager(Stager):
    """Copies to and from a cache on a CUDA device. Only the transfer thread calls `run`."""

    def __init__(
        self, geometry: TransferGeometry, staging_bytes: int, pace: Pace = at_once
    ) -> None:
        """
        Args:
            staging_bytes: How large a chunk may be; four buffers of it are allocated, two of them
                in pinned host memory.
            pace: Called before each chunk.
        """
        self.staging_bytes = staging_size(geometry, staging_bytes)
        self._geometry = geometry
        self._pace = pace
        self._device = geometry.cache.device
        self._stream = torch.cuda.Stream(device=self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._lanes = [self._new_lane() for _ in range(2)]

    def _new_lane(self) -> _Lane:
        return _Lane(
            device=torch.empty(self.staging_bytes, dtype=torch.int8, device=self._device),
            host=torch.empty(self.staging_bytes, dtype=torch.int8, pin_memory=True),
            copied=_new_event(),
        )

    @override
    def record_event(self) -> torch.cuda.Event | None:
        """An event behind all work that the caller's current stream has queued.

        So a store reads finished blocks, and a load does not overwrite blocks that are still being
        read.
        """
        event = _new_event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    @override
    def run(self, plan: TransferPlan, side: LowerSide, after: torch.cuda.Event | None) -> int:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            # The only copy from pageable memory. It waits for the stream, so it comes before
            # anything else is queued there.
            block_ids = torch.from_numpy(plan.block_ids).to(self._device)
            if after is not None:
                self._stream.wait_event(after)
            try:
                if plan.direction is Direction.STORE:
                    self._store(plan, side, block_ids)
                else:
                    self._load(plan, side, block_ids)
            finally:
                # The next job must find the buffers unused, also after a fault; and a load is over
                # for every stream of the device once the host has seen it end.
                self._stream.synchronize()
        return plan.gpu_bytes

    def _store(self, plan: TransferPlan, side: LowerSide, block_ids: Tensor) -> None:
        ahead: _Arriving | None = None
        for chunk, lane in zip(plan.chunks, cycle(self._lanes)):
            self._pace(chunk.gpu_bytes)
            arriving = self._fetch(chunk, lane, side, block_ids[chunk.ids])
            if ahead is not None:
                ahead.hand_over(side)
            ahead = arriving
        if ahead is not None:
            ahead.hand_over(side)

    def _fetch(self, chunk: Chunk, lane: _Lane, side: LowerSide, ids: Tensor) -> _Arriving:
        """Queue a chunk's copy to the host; the lane's last chunk was handed over already."""
        on_device = chunk_view(self._geometry, chunk, lane.device)
        direct = side.direct_buffer(chunk)
        buffer = chunk_view(self._geometry, chunk, lane.host) if direct is None else direct
        for rows, staged in self._pairs(chunk, on_device):
            torch.index_select(rows, 0, ids, out=staged)
        buffer.copy_(on_device, non_blocking=True)
        lane.copied.record(self._stream)
        return _Arriving(chunk, buffer, direct is None, lane.copied)

    def _load(self, plan: TransferPlan, side: LowerSide, block_ids: Tensor) -> None:
        for chunk, lane in zip(plan.chunks, cycle(self._lanes)):
            self._pace(chunk.gpu_bytes)
            lane.copied.synchronize()  # its host buffer may still be on the bus from two chunks ago
            buffer = side.direct_buffer(chunk)
            if buffer is None:
                buffer = chunk_view(self._geometry, chunk, lane.host)
                side.read(chunk, buffer)
            on_device = chunk_view(self._geometry, chunk, lane.device)
            on_device.copy_(buffer, non_blocking=True)
            lane.copied.record(self._stream)
            for rows, staged in self._pairs(chunk, on_device):
                rows.index_copy_(0, block_ids[chunk.ids], staged)

    def _pairs(self, chunk: Chunk, buffer: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Per ref, the cache's rows and the staged ones, as machine words where aligned."""
        cache = self._geometry.cache
        refs = cache.group_refs[chunk.group]
        pages = buffer.view(-1, cache.page_bytes[chunk.group])[chunk.pages]
        offsets = cache.page_offsets(chunk.group)
        pairs = [
            (
                cache.tensors[ref.tensor_idx][:, : ref.page_bytes],
                pages[:, first : first + ref.page_bytes],
            )
            for ref, first in zip(refs, offsets, strict=True)
        ]
        return [_as_words(rows, staged) for rows, staged in pairs]


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _as_words(rows: Tensor, staged: Tensor) -> tuple[Tensor, Tensor]:
    if all(_has_whole_words(tensor) for tensor in (rows, staged)):
        return rows.view(_WORD), staged.view(_WORD)
    return rows, staged


def _has_whole_words(tensor: Tensor) -> bool:
    numbers = (tensor.size(1), tensor.stride(0), tensor.storage_offset(), tensor.data_ptr())
    return all(number % _WORD_BYTES == 0 for number in numbers)
