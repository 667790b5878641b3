"""The backend with tensors: a model, its pages, and the workers that copy them.

`kvroute_engine.core.build` loads this module by name, and only where a model is wanted; nothing
else in the engine leads to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvroute_engine.core.model_config import TransformerConfig
from kvroute_engine.model.torch_runner import TorchRunner
from offload.base import OffloadingWorker
from offload.cpu.worker import CPUTransferWorker
from offload.fs.store import BlockStore
from offload.fs.worker import FileTransferWorker
from offload.peer.client import PeerClient
from offload.peer.worker import PeerTransferWorker


class TorchBackend:
    """A model, its pages, and the workers that copy them; see `Backend`."""

    def __init__(
        self, model: TransformerConfig, num_blocks: int, device: str | None, cpu_threads: int
    ) -> None:
        """
        Args:
            num_blocks: Blocks of the cache, with the null block.
        """
        self.runner = TorchRunner(model, num_blocks, device, cpu_threads)
        self._pages = self.runner.pages.canonical()

    def cpu_worker(
        self, num_blocks: int, blocks_per_offloaded_block: Sequence[int]
    ) -> OffloadingWorker:
        """See `TransferBackend.cpu_worker`.

        Args:
            num_blocks: Room in offloaded blocks.
            blocks_per_offloaded_block: GPU blocks in each, per group.
        """
        return CPUTransferWorker(self._pages, num_blocks, blocks_per_offloaded_block)

    def worker(self, make: Callable[[Any], OffloadingWorker]) -> OffloadingWorker:
        """Call *make* with the model's pages."""
        return make(self._pages)

    def peer_worker(self, peers: PeerClient) -> OffloadingWorker:
        """See `TransferBackend.peer_worker`."""
        return PeerTransferWorker(self._pages, peers)

    def disk(
        self,
        directory: Path,
        payload_bytes: Sequence[int],
        identity: str,
        blocks_per_offloaded_block: Sequence[int],
    ) -> tuple[BlockStore, OffloadingWorker]:
        """Open a directory for blocks, or create it.

        Args:
            payload_bytes: Bytes of an offloaded block, per group.
            blocks_per_offloaded_block: GPU blocks in an offloaded block, per group.

        Returns:
            The files, and the worker that copies to and from them.

        Raises:
            CacheConfigError: The directory holds blocks of another model.
        """
        store = BlockStore(
            directory,
            payload_bytes,
            identity,
            blocks_per_offloaded_block=blocks_per_offloaded_block,
        )
        return store, FileTransferWorker(self._pages, store, blocks_per_offloaded_block)
