"""Computes batches with the model: on a GPU where there is one, else on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offload.engine.core.batch import SequenceChunk
from offload.engine.core.model_config import TransformerConfig
from offload.engine.model.kv_pages import KVPages
from offload.engine.model.model import Transformer
from offload.errors import CacheConfigError


class TorchRunner:
    """A model and its pages on one device."""

    def __init__(
        self,
        config: TransformerConfig,
        num_blocks: int,
        device: str | None = None,
        cpu_threads: int = 1,
    ) -> None:
        """
        Args:
            config: The model.
            num_blocks: Pages of the cache.
            device: Where it runs; a GPU where there is one if left out.
            cpu_threads: Of this process's torch, where it runs on the CPU. Threads that wait for
                each other's cores are slower than one, and replicas share a machine.
        """
        if cpu_threads < 1:
            raise CacheConfigError(f"cpu_threads {cpu_threads} must be at least 1")
        torch.set_num_threads(cpu_threads)
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.pages = KVPages(config, num_blocks, self.device)
        self.model = Transformer(config, self.pages).to(self.device)
        self.last_logits: Tensor | None = None
        """Of the last step, `(chunks, vocab)`: what tests compare."""

    def run(self, chunks: Sequence[SequenceChunk]) -> list[int | None]:
        """See `ModelRunner`."""
        self.last_logits = self.model(chunks)
        return [
            choose(logits, chunk) if chunk.is_last else None
            for logits, chunk in zip(self.last_logits, chunks, strict=True)
        ]


def choose(logits: Tensor, chunk: SequenceChunk) -> int:
    """The next token: the most likely one, or one drawn with the request's own random numbers."""
    if chunk.sampling.temperature <= 0:
        return int(logits.argmax())
    # One number per position, whatever else runs: an answer does not depend on its neighbours.
    generator = torch.Generator(logits.device).manual_seed(
        hash((chunk.sampling.seed or 0, chunk.stop)) % 2**63
    )
    shares = torch.softmax(logits / chunk.sampling.temperature, -1)
    return int(torch.multinomial(shares, 1, generator=generator))
