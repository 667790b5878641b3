"""Mamba and linear attention: a state summarises all tokens before it; only the latest is needed.

A block holds the state behind the last token computed into it. It can serve a hit only if that
token is the block's last, so a scheduler ends prefill chunks at block boundaries where it can, as
vLLM's "align" mode does. A step reads the state it starts from and writes the one it ends with: at
most two blocks, whatever the length.
"""

from __future__ import annotations

from typing_extensions import override

from kvevents.events import GroupIdx
from offload.block import Block
from offload.block_pool import BlockPool
from offload.config import CacheConfig
from offload.groups.base import (
    BlockTable,
    GroupManager,
    RequestNeed,
    Retention,
    blocks_for,
    num_free,
)
from offload.request import CacheRequest


class MambaManager(GroupManager):
    """Block tables with a block where a step ended, and null blocks between.

    Attention writes keys and values before it reads them; a state is read before the step that
    writes it has ended. So a state that was cached in this step cannot be read before the next.
    """

    def __init__(self, group_idx: GroupIdx, config: CacheConfig, pool: BlockPool) -> None:
        """See `GroupManager`."""
        super().__init__(group_idx, config, pool)
        self._whole_states: dict[str, set[int]] = {}
        """Per request, indices of blocks whose state is that of their last token, until they are
        cached."""

    @override
    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - 1)

    @override
    def max_held_blocks(self) -> int:
        return 2

    @override
    def keep_mask(
        self, request_id: str, start: int, stop: int, retention: Retention
    ) -> list[bool] | None:
        whole = self._whole_states[request_id]
        return [
            index in whole and self._is_retained(index, retention) for index in range(start, stop)
        ]

    def _is_retained(self, index: int, retention: Retention) -> bool:
        if retention.interval is None:
            return True
        end, step = (index + 1) * self.block_size, self.config.scheduler_block_size
        if retention.kept_behind is not None and end > retention.kept_behind:
            return True
        at_interval = retention.interval > 0 and end % retention.interval == 0
        return at_interval or any(
            boundary // step * step == end for boundary in retention.boundaries
        )

    @override
    def num_blocks_to_allocate(
        self, request_id: str, need: RequestNeed, is_admission: bool = False
    ) -> int:
        end = blocks_for(need.num_tokens, self.block_size)
        if self.holds(request_id):
            return int(end > len(self.block_table(request_id)))
        computed_blocks = need.computed_blocks[self.group_idx]
        start = blocks_for(need.num_computed_tokens, self.block_size)
        brought, new = int(start > len(computed_blocks)), int(end > start)
        skipped = self.num_skipped_tokens(need.num_computed_tokens) // self.block_size
        # One state for a whole request, as vLLM counts: the second is held only while a step goes
        # from the one to the other.
        states = max(brought, new) if is_admission else brought + new
        return states + num_free(computed_blocks[skipped:])

    @override
    def allocate_external_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        super().allocate_external_blocks(request_id, num_computed_tokens)
        self._record_state(request_id, num_computed_tokens)

    @override
    def allocate_new_blocks(self, request_id: str, need: RequestNeed) -> list[Block]:
        table = self._tables.setdefault(request_id, BlockTable([])).blocks
        self._forget_rejected(request_id, need.num_computed_tokens)
        self._record_state(request_id, need.num_tokens)
        missing = blocks_for(need.num_tokens, self.block_size) - len(table)
        if missing <= 0:
            return []
        state = self.pool.get_new_blocks(1)
        table += [self.pool.null_block] * (missing - 1) + state
        return state

    @override
    def cache_blocks(self, request: CacheRequest, num_tokens: int, retention: Retention) -> None:
        request_id = request.request_id
        table = self._tables[request_id]
        start = table.num_cached
        super().cache_blocks(request, num_tokens, retention)
        stop = table.num_cached
        states = table.blocks[start:stop]
        self._unreadable.update(
            state.block_hash for state in states if state.block_hash is not None
        )
        self._whole_states[request_id] = {
            index for index in self._whole_states[request_id] if index >= stop
        }

    def _record_state(self, request_id: str, num_tokens: int) -> None:
        """Remember the state to be written behind *num_tokens*, if it ends a block."""
        whole = self._whole_states.setdefault(request_id, set())
        if num_tokens and num_tokens % self.block_size == 0:
            whole.add(num_tokens // self.block_size - 1)

    def _forget_rejected(self, request_id: str, num_computed_tokens: int) -> None:
        """Drop the states behind drafts that were rejected: other tokens come there."""
        computed = num_computed_tokens // self.block_size
        whole = self._whole_states.get(request_id, set())
        whole.difference_update([index for index in whole if index >= computed])

    @override
    def free(self, request_id: str) -> None:
        super().free(request_id)
        self._whole_states.pop(request_id, None)
