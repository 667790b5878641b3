"""The time that a step takes: decoding that is nearly free up to some batch, and attention that
makes late tokens of long prompts dearer than early ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvroute_engine.core.batch import SequenceChunk
from kvroute_engine.core.time_model import TimeModel


@dataclass(frozen=True, slots=True)
class AcceleratorTime(TimeModel):
    """Roughly a 30B model on one accelerator: 8,000 prefill tokens/s and 12.5 ms a token in decode.

    A step reads the weights once, whatever its batch is, so decoding is nearly flat until
    computing takes longer than reading. In prefill a token's attention takes as long as everything
    else at a context of some 80,000 tokens; below 30,000 that is within the rate.
    """

    prefill_tokens_per_s: float = 8000.0
    step_overhead_s: float = 0.0125
    flat_batch: int = 32
    """Sequences in decode up to which each adds *flat_sequence_s*, and then *full_sequence_s*."""
    flat_sequence_s: float = 0.00005
    full_sequence_s: float = 0.0003
    linear_tokens: int = 30_000
    """Context from which on a prefill token takes longer."""
    double_tokens: int = 50_000
    """Context beyond that at which it takes twice as long."""

    def step_s(self, chunks: Sequence[SequenceChunk]) -> float:
        """See `TimeModel`."""
        decoding = 0
        time_s = self.step_overhead_s
        for chunk in chunks:
            if chunk.num_output_tokens and len(chunk.token_ids) == 1:
                decoding += 1
            else:
                time_s += self.prefill_s(chunk.start, chunk.stop)
        return time_s + self._decode_s(decoding)

    def decode_step_s(self, sequences: int) -> float:
        """Return the duration of a step in which so many sequences decode and nothing else
        happens."""
        return self.step_overhead_s + self._decode_s(sequences)

    def prefill_s(self, start: int, stop: int) -> float:
        """Return the time to compute the tokens `[start, stop)` of a prompt, without the step's
        overhead."""
        first, last = max(start - self.linear_tokens, 0), max(stop - self.linear_tokens, 0)
        late = (last * last - first * first) / (2 * self.double_tokens)
        return (stop - start + late) / self.prefill_tokens_per_s

    def alone_s(self, start: int, stop: int, step_tokens: int) -> float:
        """Return the time to the first token of a prompt on an idle replica that holds *start*
        tokens of it.

        Args:
            start: Tokens that need not be computed.
            stop: The prompt's length.
            step_tokens: What one step computes at most.
        """
        steps = max(1, -(-(stop - start) // step_tokens))
        return steps * self.step_overhead_s + self.prefill_s(start, stop)

    def _decode_s(self, sequences: int) -> float:
        flat = min(sequences, self.flat_batch)
        return flat * self.flat_sequence_s + (sequences - flat) * self.full_sequence_s
