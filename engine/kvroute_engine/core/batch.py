"""Describes one step: some tokens of some sequences, and their pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvroute_engine.core.requests import SamplingParams
from offload.block import Block


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """The tokens `[start, stop)` of one sequence."""

    request_id: str
    token_ids: Sequence[int]
    """The tokens to compute; those before `start` are in the cache."""
    start: int
    """Position of the first token."""
    block_tables: Sequence[Sequence[Block]]
    """The sequence's blocks per group, the null block where none is needed. The cache's own lists,
    valid until the step ends."""
    is_last: bool
    """True if the sequence ends with this chunk, so that its next token is to be chosen."""
    sampling: SamplingParams
    num_output_tokens: int
    """Tokens generated before this step."""

    @property
    def stop(self) -> int:
        """Return the position behind the last token."""
        return self.start + len(self.token_ids)


class ModelRunner(Protocol):
    """Computes batches: with a model, or by taking as long as one would."""

    def run(self, chunks: Sequence[SequenceChunk]) -> list[int | None]:
        """Write the chunks' keys and values and choose the next tokens.

        Returns:
            One entry per chunk: the next token, None where the chunk is not its sequence's last.
        """
        ...
