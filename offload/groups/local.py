"""Local attention: a token looks only at those just before it.

With a sliding window it looks at itself and `sliding_window - 1` tokens before it; with chunks
(Llama 4), at those before it in its own chunk.
"""

from __future__ import annotations

from typing_extensions import override

from offload.groups.base import GroupManager, Retention, blocks_for


class SlidingWindowManager(GroupManager):
    """Blocks that slid out are given back while the request runs; a hit needs one window."""

    @property
    def sliding_window(self) -> int:
        """In tokens, the looking one included."""
        assert self.group.sliding_window is not None
        return self.group.sliding_window

    @override
    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - self.sliding_window + 1)

    @override
    def max_held_blocks(self) -> int:
        in_flight = self.sliding_window - 1 + self.config.max_in_flight_tokens
        tokens = min(in_flight, self.config.max_model_len)
        return blocks_for(tokens, self.block_size) + 1  # the window may start inside a block

    @override
    def keep_mask(
        self, request_id: str, start: int, stop: int, retention: Retention
    ) -> list[bool] | None:
        """Keep a window's worth of blocks before every position at which a hit can end.

        Blocks of 4 tokens, a window of 9, so 2 blocks before each end; hits end at multiples of 16
        tokens (`interval` None), which are 4 blocks:

            block           0  1  2  3| 4  5  6  7| 8  9 10 11|
            kept            .  .  x  x| .  .  x  x| .  .  x  x|
            with EAGLE      .  .  x  x| x  .  x  x| x  .  x  x|    and the block behind the end

        With `interval` 32 every second end is kept, with 0 only the boundaries: a prompt of 38
        tokens, whose boundary 37 is rounded down to 32, keeps blocks 6 and 7.
        """
        tail = self.group.window_blocks(int(self.eagle))
        step = self.config.scheduler_block_size
        interval = step if retention.interval is None else retention.interval
        period = interval // self.block_size
        if period and tail >= period:
            return None
        mask = [
            bool(period) and self._is_in_tail(index, period, tail) for index in range(start, stop)
        ]
        if retention.interval is not None:
            for boundary in retention.boundaries:
                end = boundary // step * step // self.block_size + self.eagle
                for index in range(max(start, end - tail), min(stop, end)):
                    mask[index - start] = True
            if retention.kept_behind is not None:
                first = max(start, retention.kept_behind // self.block_size)
                mask[first - start :] = [True] * (stop - first)
        return mask

    def _is_in_tail(self, index: int, period: int, tail: int) -> bool:
        # EAGLE's block is the first of the next period.
        eagle = self.eagle
        return index >= eagle and (index - eagle) % period >= period - tail


class ChunkedLocalManager(GroupManager):
    """A chunk's blocks are given back when the next chunk begins; a hit needs its own chunk's."""

    @property
    def attention_chunk_size(self) -> int:
        """In tokens."""
        assert self.group.attention_chunk_size is not None
        return self.group.attention_chunk_size

    @override
    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return num_computed_tokens // self.attention_chunk_size * self.attention_chunk_size

    @override
    def max_held_blocks(self) -> int:
        in_flight = self.attention_chunk_size + self.config.max_in_flight_tokens
        return blocks_for(min(in_flight, self.config.max_model_len), self.block_size)
