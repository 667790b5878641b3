"""What computes and copies with tensors; the only way from the engine to torch, and taken only
where a model is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from offload.base import OffloadingWorker
from offload.cpu.worker import CPUTransferWorker
from offload.engine.core.model_config import TransformerConfig
from offload.engine.model.torch_runner import TorchRunner
from offload.fs.store import BlockStore
from offload.fs.worker import FileTransferWorker


class TorchBackend:
    """A model, its pages, and the workers that copy them."""

    def __init__(
        self, model: TransformerConfig, num_blocks: int, device: str | None, cpu_threads: int
    ) -> None:
        self.runner = TorchRunner(model, num_blocks, device, cpu_threads)
        self._pages = self.runner.pages.canonical()

    def cpu_worker(self, num_blocks: int) -> OffloadingWorker:
        """Copies to and from a tier of *num_blocks* in memory."""
        return CPUTransferWorker(self._pages, num_blocks)

    def disk(
        self, directory: Path, payload_bytes: Sequence[int], identity: str
    ) -> tuple[BlockStore, OffloadingWorker]:
        """A directory, and copies to and from it."""
        store = BlockStore(directory, payload_bytes, identity)
        return store, FileTransferWorker(self._pages, store)
