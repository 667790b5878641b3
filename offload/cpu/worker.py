"""Copies between GPU blocks and the CPU tier's slots.

The tier's memory is one int8 tensor `[num_cpu_blocks, slot_bytes]`. A slot holds one offloaded
block of any group: its GPU blocks contiguously from the slot's start, each as the group's page,
which is the bytes of its refs in order. `slot_bytes` is the largest group's; a smaller group leaves
the slot's end unused:

    slot of a group with two GPU blocks per offloaded block, each a page of two refs

    | page 0: ref 0, ref 1 | page 1: ref 0, ref 1 | unused |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from offload.base import CPULoadStoreSpec, Direction, TransferJob
from offload.errors import CacheConfigError, TransferError
from offload.transfer.canonical import CanonicalKVCache
from offload.transfer.plan import Chunk, TransferGeometry, check_ids
from offload.transfer.rows import Ids, RowCopier, Rows, rows_of
from offload.transfer.runner import TransferOptions, TransferWorker
from offload.transfer.staging import LowerSide


class CPUTransferWorker(TransferWorker):
    """Moves the CPU tier's blocks.

    A job reads or writes its GPU blocks until it has ended: until then they must not be freed, nor
    overwritten by work queued after the submission.
    """

    def __init__(
        self,
        cache: CanonicalKVCache,
        num_cpu_blocks: int,
        blocks_per_offloaded_block: Sequence[int] | None = None,
        options: TransferOptions | None = None,
    ) -> None:
        """
        Args:
            num_cpu_blocks: How many slots to allocate, pinned if the cache is on a GPU.
            blocks_per_offloaded_block: Per group, how many GPU blocks an offloaded block covers;
                one each if left out.

        Raises:
            CacheConfigError: The numbers contradict each other.
        """
        if num_cpu_blocks < 1:
            raise CacheConfigError(f"CPU tier: num_cpu_blocks {num_cpu_blocks} must be at least 1")
        geometry = TransferGeometry(cache, blocks_per_offloaded_block)
        self.slot_bytes = max(geometry.offloaded_bytes)
        shape = (num_cpu_blocks, self.slot_bytes)
        # Zeroed, so that the system allocates the pages here and not during the first copies.
        self.slots = torch.zeros(shape, dtype=torch.int8, pin_memory=cache.device.type == "cuda")
        """The tier's memory, `[num_cpu_blocks, slot_bytes]` int8."""
        super().__init__("kv-cpu-tier", geometry, options)

    @override
    def submit(self, job: TransferJob) -> None:
        if not isinstance(job.lower, CPULoadStoreSpec):
            raise TransferError(
                f"job {job.job_id}: lower spec {type(job.lower).__name__} "
                "must be a CPULoadStoreSpec"
            )
        stores = job.direction is Direction.STORE
        slot_ids = check_ids("CPU spec", job.lower.block_ids, len(self.slots), unique=stores)
        plan = self._plan(job, len(slot_ids))
        side = _SlotSide(self.slots, slot_ids, self._geometry, self._copier)
        self._submit(job, plan, side)

    def read_block(self, block_id: int, num_bytes: int) -> bytes:
        """Return the first bytes of a slot, from any thread, even while it is written.

        Args:
            num_bytes: At most `slot_bytes`.
        """
        return bytes(self.slots.numpy()[block_id, :num_bytes].tobytes())


@dataclass(eq=False, repr=False)
class _SlotSide(LowerSide):
    """The slots of one job."""

    slots: Tensor
    slot_ids: Ids
    geometry: TransferGeometry
    copier: RowCopier

    @override
    def direct_buffer(self, chunk: Chunk) -> Tensor | None:
        """The slots themselves, if they are adjacent and the group fills them."""
        ids = self.slot_ids[chunk.lower]
        if self.geometry.offloaded_bytes[chunk.group] != self.slots.size(1) or np.any(
            np.diff(ids) != 1
        ):
            return None
        return self.slots[int(ids[0]) : int(ids[0]) + len(ids)]

    @override
    def write(self, chunk: Chunk, buffer: Tensor) -> None:
        staged, slots = self._rows(buffer)
        self.copier.scatter(staged, self.slot_ids[chunk.lower], slots)

    @override
    def read(self, chunk: Chunk, buffer: Tensor) -> None:
        staged, slots = self._rows(buffer)
        self.copier.gather(slots, self.slot_ids[chunk.lower], staged)

    def _rows(self, buffer: Tensor) -> tuple[Rows, Rows]:
        """The buffer's blocks, and the front of every slot that holds one."""
        block_bytes = buffer.size(1)
        return (
            rows_of(buffer.numpy(), 0, block_bytes),
            rows_of(self.slots.numpy(), 0, block_bytes),
        )
