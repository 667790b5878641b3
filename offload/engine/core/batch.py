"""What one step computes: some tokens of some sequences, and where their pages are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from offload.block import Block
from offload.engine.core.requests import SamplingParams


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """The tokens `[start, stop)` of one sequence."""

    request_id: str
    token_ids: Sequence[int]
    """These tokens; those before are in the cache."""
    start: int
    """Position of the first."""
    block_tables: Sequence[Sequence[Block]]
    """Per group the sequence's blocks, the null block where none is needed; the cache's own, right
    until the step ends."""
    is_last: bool
    """Whether the sequence's tokens end here, so that the next one is to be chosen."""
    sampling: SamplingParams
    num_output_tokens: int
    """How many it has said already."""

    @property
    def stop(self) -> int:
        """Position behind the last token."""
        return self.start + len(self.token_ids)


class ModelRunner(Protocol):
    """Computes batches: with a model, or as long as one would take."""

    def run(self, chunks: Sequence[SequenceChunk]) -> list[int | None]:
        """Write the chunks' keys and values; per chunk the next token, None where it is not the
        sequence's last."""
        ...
