"""Sliding-window attention: a token looks at itself and the `sliding_window - 1` tokens before
it."""

from __future__ import annotations

from offload.groups.base import GroupManager, Retention, blocks_for


class SlidingWindowManager(GroupManager):
    """Blocks that slid out are given back while the request runs; a hit needs the window before its
    end alone."""

    @property
    def sliding_window(self) -> int:
        """In tokens, the looking one included."""
        assert self.group.sliding_window is not None
        return self.group.sliding_window

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - self.sliding_window + 1)

    def max_held_blocks(self) -> int:
        tokens = min(self.sliding_window - 1 + self.max_in_flight_tokens, self.max_model_len)
        return blocks_for(tokens, self.block_size) + 1  # the window may start inside a block

    def keep_mask(
        self, request_id: str, start: int, stop: int, retention: Retention
    ) -> list[bool] | None:
        """The blocks before every boundary at which a hit can end: a window's worth, and with EAGLE
        the one behind it."""
        del request_id
        tail = self.group.window_blocks(int(self.eagle))
        interval = self.scheduler_block_size if retention.interval is None else retention.interval
        period = interval // self.block_size
        if period and tail >= period:
            return None
        mask = [
            bool(period) and self._is_in_tail(index, period, tail) for index in range(start, stop)
        ]
        if retention.interval is not None:
            for boundary in retention.boundaries:
                end = (
                    boundary
                    // self.scheduler_block_size
                    * self.scheduler_block_size
                    // self.block_size
                    + self.eagle
                )
                for index in range(max(start, end - tail), min(stop, end)):
                    mask[index - start] = True
        return mask

    def _is_in_tail(self, index: int, period: int, tail: int) -> bool:
        # EAGLE's block is the first of the next period.
        return index >= self.eagle and (index - self.eagle) % period >= period - tail
