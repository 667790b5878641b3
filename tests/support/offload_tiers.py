"""Real tiers for tests: managers and workers over a driver's pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from offload.config import CacheConfig
from offload.connector.tier import Tier
from offload.cpu.manager import CPUOffloadingManager
from offload.cpu.worker import CPUTransferWorker
from offload.fs.manager import FileOffloadingManager
from offload.fs.store import BlockStore
from offload.fs.worker import FileTransferWorker
from offload.transfer.runner import TransferOptions
from tests.support.offload_driver import SLOT_BYTES, TensorPages, TierUnderTest


def cpu_tier(
    pages: TensorPages,
    config: CacheConfig,
    num_blocks: int,
    sizes: Sequence[int],
    policy: str = "lru",
    options: TransferOptions | None = None,
) -> TierUnderTest:
    """Memory for *num_blocks* offloaded blocks."""
    manager = CPUOffloadingManager(num_blocks, policy, enable_events=True)
    worker = CPUTransferWorker(pages.cache, num_blocks, sizes, options)
    return TierUnderTest(Tier(manager, config.layout.groups, sizes), worker)


def disk_tier(
    pages: TensorPages, config: CacheConfig, root: Path, max_bytes: int, sizes: Sequence[int]
) -> tuple[TierUnderTest, BlockStore]:
    """A directory of at most *max_bytes*; the store must be closed before another opens it."""
    payload = [
        group.block_size * SLOT_BYTES * size
        for group, size in zip(config.layout.groups, sizes, strict=True)
    ]
    store = BlockStore(root, payload, blocks_per_offloaded_block=sizes)
    manager = FileOffloadingManager(store, max_bytes, enable_events=True)
    return TierUnderTest(
        Tier(manager, config.layout.groups, sizes), FileTransferWorker(pages.cache, store, sizes)
    ), store
