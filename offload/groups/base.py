"""What one group of layers holds for every request: the part that all kinds share.

A request's *block table* in a group lists its blocks in the order of its tokens; the null block
stands where none is needed any more, or none was ever. A manager knows how many blocks a request
must be given, which it no longer needs, and which may be found again. It decides nothing about
other groups: the coordinator does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvevents.events import GroupIdx
from kvevents.layout import KVCacheGroup
from offload.block import Block
from offload.block_pool import BlockPool
from offload.errors import CacheConfigError
from offload.request import CacheRequest


@dataclass(frozen=True, slots=True)
class Retention:
    """Where a later request can resume, and so what is worth keeping of groups that need only the
    end of a prefix."""

    interval: int | None
    """As in `CacheConfig.retention_interval`."""
    boundaries: Sequence[int] = ()
    """Token positions at which a hit may end whatever the interval: the ends of the prompt, a
    junction with another."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a request needs of a group for its next tokens."""

    num_tokens: int
    """Computed and new ones together."""
    num_slots: int
    """The same with room for drafts behind them."""
    num_computed_tokens: int
    """Tokens whose KV the cache holds or is about to be given."""
    computed_blocks: Sequence[Block] = ()
    """A hit's blocks, for a request that holds none yet."""


class GroupManager:
    """Block tables of one group. This class is full attention's bookkeeping; other kinds override
    what differs."""

    def __init__(
        self,
        group_idx: GroupIdx,
        group: KVCacheGroup,
        pool: BlockPool,
        scheduler_block_size: int,
        max_in_flight_tokens: int,
        max_model_len: int,
        eagle: bool = False,
    ) -> None:
        """
        Args:
            group_idx: Its place in the layout.
            group: Kind and sizes.
            pool: Shared with the other groups.
            scheduler_block_size: Hits end at its multiples; the scheduler's own, a multiple of the
                group's block size.
            max_in_flight_tokens: Most tokens a step computes for one request.
            max_model_len: Longest request in tokens.
            eagle: Whether a hit must have one block more than is reused.

        Raises:
            CacheConfigError: scheduler_block_size is no multiple of the group's block size.
        """
        if scheduler_block_size % group.block_size:
            raise CacheConfigError(
                f"group {group_idx} ({group.kind.value}): scheduler_block_size {scheduler_block_size} must be a multiple of "
                f"block_size {group.block_size}"
            )
        self.group_idx = group_idx
        self.group = group
        self.pool = pool
        self.scheduler_block_size = scheduler_block_size
        self.max_in_flight_tokens = max_in_flight_tokens
        self.max_model_len = max_model_len
        self.eagle = eagle
        self.slid_out = 0
        """Blocks freed while their request ran on."""
        self._tables: dict[str, list[Block]] = {}
        self._cached_counts: dict[str, int] = {}

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.group.block_size

    def holds(self, request_id: str) -> bool:
        """Was the request admitted and not freed since?"""
        return request_id in self._tables

    def block_table(self, request_id: str) -> Sequence[Block]:
        """The request's blocks; empty if it has none."""
        return self._tables.get(request_id, ())

    def num_cached_blocks(self, request_id: str) -> int:
        """How many leading blocks of the request's table were made findable, or found not worth
        it."""
        return self._cached_counts.get(request_id, 0)

    # --- what differs from kind to kind -----------------------------------------------------------

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """How many leading tokens the next one does not look at."""
        del num_computed_tokens
        return 0

    def needed_blocks(self, num_tokens: int) -> range:
        """Which blocks of a hit of *num_tokens* a request reads that goes on behind it, as indices
        of its table."""
        return range(
            self.num_skipped_tokens(num_tokens) // self.block_size, num_tokens // self.block_size
        )

    def max_held_blocks(self) -> int:
        """Most blocks one request can hold at a time, for the admission check."""
        return blocks_for(self.max_model_len, self.block_size)

    def keep_mask(
        self, request_id: str, start: int, stop: int, retention: Retention
    ) -> list[bool] | None:
        """Which of the request's blocks `[start, stop)` can ever serve a hit; None for all."""
        del request_id, start, stop, retention
        return None

    def can_read(self, computed_blocks: Sequence[Block]) -> bool:
        """May a request of this step start from a hit's blocks? Those that the same step writes may
        not be ready."""
        del computed_blocks
        return True

    # --- allocation -------------------------------------------------------------------------------

    def num_blocks_to_allocate(
        self, request_id: str, need: Need, is_admission: bool = False
    ) -> int:
        """Free blocks the request will take: new ones, and a hit's blocks that nobody else
        references.

        With *is_admission*, for the whole request: what slides out on the way is not counted twice.
        """
        required = blocks_for(need.num_slots, self.block_size)
        if is_admission:
            required = min(required, self.max_held_blocks())
        held = len(self.block_table(request_id))
        if self.holds(request_id):
            return max(required - held, 0)
        skipped = self.num_skipped_tokens(need.num_computed_tokens) // self.block_size
        new = max(required - max(skipped, len(need.computed_blocks)), 0)
        return new + sum(
            1
            for block in need.computed_blocks[skipped:]
            if block.ref_count == 0 and not block.is_null
        )

    def adopt_computed_blocks(
        self, request_id: str, blocks: Sequence[Block], num_computed_tokens: int
    ) -> None:
        """Start the request's table with a hit's *blocks*, less those that its
        *num_computed_tokens* do not need."""
        skipped = self.num_skipped_tokens(num_computed_tokens) // self.block_size
        kept = blocks[skipped:]
        self.pool.touch(kept)
        self._tables[request_id] = [self.pool.null_block] * skipped + list(kept)
        self._cached_counts[request_id] = len(self._tables[request_id])

    def allocate_external_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Blocks for tokens that a lower tier will bring, as far as the next token looks at
        them."""
        table = self._tables[request_id]
        missing = blocks_for(num_computed_tokens, self.block_size) - len(table)
        if missing > 0:
            table += self.pool.get_new_blocks(missing)

    def allocate_new_blocks(self, request_id: str, need: Need) -> list[Block]:
        """Blocks for all slots that have none yet; returns them."""
        table = self._tables.setdefault(request_id, [])
        self._cached_counts.setdefault(request_id, 0)
        missing = blocks_for(need.num_slots, self.block_size) - len(table)
        new = self.pool.get_new_blocks(missing) if missing > 0 else []
        table += new
        return new

    # --- caching ----------------------------------------------------------------------------------

    def cache_blocks(self, request: CacheRequest, num_tokens: int, retention: Retention) -> None:
        """Make the full blocks of the request's first *num_tokens* findable, if they can serve a
        hit."""
        start = self._cached_counts[request.request_id]
        stop = num_tokens // self.block_size
        if start >= stop:
            return
        keep = self.keep_mask(request.request_id, start, stop, retention)
        self.pool.cache_full_blocks(
            request, self.group_idx, self._tables[request.request_id], start, stop, keep
        )
        self._cached_counts[request.request_id] = stop

    # --- giving back ------------------------------------------------------------------------------

    def skipped_blocks(self, request_id: str, num_computed_tokens: int) -> list[Block]:
        """Blocks the request holds and no longer needs, its latest first."""
        table = self.block_table(request_id)
        return [table[index] for index in self._skipped_indices(request_id, num_computed_tokens)]

    def free_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Give back what the request no longer needs, while it runs."""
        indices = self._skipped_indices(request_id, num_computed_tokens)
        if indices:
            table = self._tables[request_id]
            freed = [table[index] for index in indices]
            for index in indices:
                table[index] = self.pool.null_block
            self.slid_out += len(freed)
            self.pool.free_blocks(freed, have_slid_out=True)

    def free(self, request_id: str) -> None:
        """Give back all of the request's blocks, its last first; no error if it holds none."""
        table = self._tables.pop(request_id, [])
        self._cached_counts.pop(request_id, None)
        self.pool.free_blocks(reversed(table))

    def start_step(self) -> None:
        """The scheduler begins a step."""

    def _skipped_indices(self, request_id: str, num_computed_tokens: int) -> list[int]:
        """Backwards to the first null block: what lies before it was given back earlier."""
        table = self.block_table(request_id)
        skipped = min(self.num_skipped_tokens(num_computed_tokens) // self.block_size, len(table))
        indices: list[int] = []
        for index in range(skipped - 1, -1, -1):
            if table[index].is_null:
                break
            indices.append(index)
        return indices


def blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks hold that many tokens."""
    return -(-num_tokens // block_size)
