"""Computes batches with the model, on a GPU if there is one, else on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvroute_engine.core.batch import SequenceChunk
from kvroute_engine.core.model_config import TransformerConfig
from kvroute_engine.model.kv_pages import KVPages
from kvroute_engine.model.model import Transformer
from offload.errors import CacheConfigError

_LOWEST_TEMPERATURE = 0.01
"""Lower ones above 0 count as this, as in vLLM: divided by less, logits become infinite."""


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
            num_blocks: Blocks of the cache, with the null block.
            device: Where it runs, as torch names it; None means a GPU if there is one.
            cpu_threads: Threads of this process's torch on a CPU. Several replicas usually share
                the machine, and then more threads than cores are slower than one each.

        Raises:
            CacheConfigError: *cpu_threads* is below 1.
        """
        if cpu_threads < 1:
            raise CacheConfigError(f"cpu_threads {cpu_threads} must be at least 1")
        torch.set_num_threads(cpu_threads)
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.pages = KVPages(config, num_blocks, self.device)
        self.model = Transformer(config, self.pages).to(self.device)
        self.last_logits: Tensor | None = None
        """Logits of the last step, `(chunks, vocab_size)` float32, for tests to compare."""

    def run(self, chunks: Sequence[SequenceChunk]) -> list[int | None]:
        """See `ModelRunner.run`."""
        self.last_logits = self.model(chunks)
        return [
            choose(logits, chunk) if chunk.is_last else None
            for logits, chunk in zip(self.last_logits, chunks, strict=True)
        ]


def choose(logits: Tensor, chunk: SequenceChunk) -> int:
    """Choose the next token of a chunk: the most likely one, or a random one above temperature 0.

    Args:
        logits: `(vocab_size,)` float32.
        chunk: Its sampling parameters, seed and position.
    """
    if chunk.sampling.temperature <= 0:
        return int(logits.argmax())
    # Seeded per position, so that a response does not depend on what else is in the batch.
    generator = torch.Generator(logits.device).manual_seed(
        hash((chunk.sampling.seed or 0, chunk.stop)) % 2**63
    )
    temperature = max(chunk.sampling.temperature, _LOWEST_TEMPERATURE)
    probabilities = torch.softmax(logits / temperature, -1)
    return int(torch.multinomial(probabilities, 1, generator=generator))
