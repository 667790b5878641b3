"""Keeps one group's block tables of every request: for full attention, and as a base of all kinds.

A request's *block table* in a group lists its blocks in the order of its tokens, with the null
block wherever none is needed any more, or none ever was. A manager decides how many blocks a
request must be given, which it no longer needs, and which may be found again. Agreement between
groups is the coordinator's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvevents.events import GroupIdx
from offload.block import Block
from offload.block_pool import BlockPool
from offload.config import CacheConfig
from offload.request import CacheRequest


@dataclass(frozen=True, slots=True)
class Retention:
    """The places where later requests can resume; only the ends of such prefixes are worth keeping.

    It concerns groups that need only the end of a prefix: sliding windows and states.
    """

    interval: int | None
    """The group's `CacheConfig.retention_interval`."""
    boundaries: Sequence[int] = ()
    """Token positions at which a hit may end at any interval: the ends of the prompt, the end of a
    shared prefix, and those that the request names."""
    kept_behind: int | None = None
    """Behind this position a hit may end anywhere: the response, where the session goes on."""


@dataclass(frozen=True, slots=True)
class RequestNeed:
    """A request's needs of all groups for its next tokens."""

    num_tokens: int
    """Computed and new ones together."""
    num_slots: int
    """The same with room for drafts behind them."""
    num_computed_tokens: int
    """Tokens whose KV the cache holds or is about to be given."""
    computed_blocks: tuple[Sequence[Block], ...]
    """Per group a hit's blocks, for a request that holds none yet."""
    num_external_tokens: int = 0
    """Tokens of `num_computed_tokens` that a lower tier will bring."""
    num_encoder_tokens: int = 0
    """Tokens of the encoder's output, for cross attention."""


@dataclass(slots=True)
class BlockTable:
    """One request's blocks in one group."""

    blocks: list[Block]
    num_cached: int = 0
    """Leading blocks that are findable or were not worth it."""
    num_given_back: int = 0
    """Leading blocks that the request was past already; a table of states has null blocks behind
    them too."""


class GroupManager:
    """Block tables of one group. By itself it is for full attention, MLA and sinks, where a token
    looks at all before it: every block is held to the end, and every full one can serve a hit.
    """

    def __init__(self, group_idx: GroupIdx, config: CacheConfig, pool: BlockPool) -> None:
        """
        Args:
            group_idx: Index in the configuration's layout.
            pool: Shared by all groups.
        """
        self.group_idx = group_idx
        self.group = config.layout.groups[group_idx]
        self.block_size = self.group.block_size
        self.config = config
        self.eagle = group_idx in config.layout.eagle
        """True if the group must have one block more of a hit than is reused."""
        self.pool = pool
        self.slid_out = 0
        """Blocks freed while their request ran on."""
        self._tables: dict[str, BlockTable] = {}
        self._unreadable: set[bytes] = set()
        """Hashes of blocks that only the next step can read."""

    def holds(self, request_id: str) -> bool:
        """Return whether the request was admitted and not freed since."""
        return request_id in self._tables

    def block_table(self, request_id: str) -> Sequence[Block]:
        """The request's blocks; empty if it has none."""
        table = self._tables.get(request_id)
        return () if table is None else table.blocks

    def num_cached_blocks(self, request_id: str) -> int:
        """Leading blocks of the request's table that are findable or were not worth it."""
        table = self._tables.get(request_id)
        return 0 if table is None else table.num_cached

    def references(self) -> Counter[int]:
        """Per block id, how many tables list the block; null blocks are left out."""
        tables = self._tables.values()
        return Counter(b.block_id for table in tables for b in table.blocks if not b.is_null)

    # --- what differs from kind to kind -----------------------------------------------------------

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:  # noqa: ARG002
        """How many leading tokens the next token does not look at."""
        return 0

    def keep_mask(
        self, request_id: str, start: int, stop: int, retention: Retention
    ) -> list[bool] | None:
        """Return which of the request's blocks `[start, stop)` can ever serve a hit; None for all,
        as here.

        Args:
            start: Index of the first block in the request's table.
            stop: Index behind the last.
        """

    def needed_blocks(self, num_tokens: int) -> range:
        """Return which blocks of a hit of *num_tokens* the token behind it reads, as table
        indices."""
        return range(
            self.num_skipped_tokens(num_tokens) // self.block_size, num_tokens // self.block_size
        )

    def _read_behind(self, ends: Iterable[int]) -> set[int]:
        """Return table indices of the blocks that requests read that resume at one of *ends*, in
        tokens."""
        step, eagle = self.config.scheduler_block_size, int(self.eagle)
        found = set[int]()
        for end in ends:
            needed = self.needed_blocks(end // step * step)
            found.update(range(needed.start - eagle, needed.stop + eagle))
        return found

    def refresh(self, request: CacheRequest, end: int) -> None:
        """Evict last the blocks that a request reads that resumes at *end*, if all are cached.

        Args:
            end: In tokens, a multiple of the scheduler block size.
        """
        cached = self.pool.cached(self.group_idx)
        hashes = [
            request.hash_at((index + 1) * self.block_size) for index in self.needed_blocks(end)
        ]
        blocks = [cached.get(block_hash) for block_hash in hashes]
        found = [block for block in blocks if block is not None]
        if len(found) == len(blocks):
            self.pool.refresh(found)

    def max_held_blocks(self) -> int:
        """Most blocks one request can hold at a time, for the admission check."""
        return blocks_for(self.config.max_model_len, self.block_size)

    def can_read(self, computed_blocks: Sequence[Block]) -> bool:
        """Return whether a request of this step can start from a hit's blocks, or the step writes
        them."""
        return not computed_blocks or computed_blocks[-1].block_hash not in self._unreadable

    # --- allocation -------------------------------------------------------------------------------

    def num_blocks_to_allocate(
        self, request_id: str, need: RequestNeed, is_admission: bool = False
    ) -> int:
        """Free blocks the request will take: new ones, and a hit's blocks that are free now.

        Args:
            is_admission: True if *need* is the whole request: then blocks that will have slid out
                on the way are not counted twice.
        """
        required = blocks_for(need.num_slots, self.block_size)
        if is_admission:
            required = min(required, self.max_held_blocks())
        held = len(self.block_table(request_id))
        if self.holds(request_id):
            return max(required - held, 0)
        computed_blocks = need.computed_blocks[self.group_idx]
        skipped = self.num_skipped_tokens(need.num_computed_tokens) // self.block_size
        new = max(required - max(skipped, len(computed_blocks)), 0)
        return new + num_free(computed_blocks[skipped:])

    def adopt_computed_blocks(
        self, request_id: str, blocks: Sequence[Block], num_computed_tokens: int
    ) -> None:
        """Start the request's table with a hit's blocks.

        Args:
            request_id: A request that holds no blocks.
            num_computed_tokens: Where the request goes on; blocks it will not read are left out.
        """
        skipped = self.num_skipped_tokens(num_computed_tokens) // self.block_size
        kept = blocks[skipped:]
        self.pool.touch(kept)
        table = [self.pool.null_block] * skipped + list(kept)
        self._tables[request_id] = BlockTable(table, len(table), skipped)

    def allocate_external_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Allocate blocks for tokens that a lower tier will bring.

        Args:
            request_id: A request whose table was just started.
            num_computed_tokens: Where it goes on once they are there.
        """
        table = self._tables[request_id].blocks
        missing = blocks_for(num_computed_tokens, self.block_size) - len(table)
        if missing > 0:
            table += self.pool.get_new_blocks(missing)

    def allocate_new_blocks(self, request_id: str, need: RequestNeed) -> list[Block]:
        """Allocate blocks for all slots that have none yet, and return them.

        Args:
            request_id: The request; its table is started if it has none.
        """
        table = self._tables.setdefault(request_id, BlockTable([])).blocks
        missing = blocks_for(need.num_slots, self.block_size) - len(table)
        new = self.pool.get_new_blocks(missing) if missing > 0 else []
        table += new
        return new

    # --- caching ----------------------------------------------------------------------------------

    def cache_blocks(self, request: CacheRequest, num_tokens: int, retention: Retention) -> None:
        """Make full blocks of a request findable if they can serve a hit.

        Args:
            num_tokens: How far its blocks are written, or will be by the end of this step.
        """
        table = self._tables[request.request_id]
        start, stop = table.num_cached, num_tokens // self.block_size
        if start >= stop:
            return
        keep = self.keep_mask(request.request_id, start, stop, retention)
        self.pool.cache_full_blocks(request, self.group_idx, table.blocks, start, stop, keep)
        table.num_cached = stop

    # --- giving back ------------------------------------------------------------------------------

    def skipped_blocks(self, request_id: str, num_computed_tokens: int) -> list[Block]:
        """Blocks the request holds and no longer needs, its latest first."""
        table = self.block_table(request_id)
        indices = self._skipped_indices(request_id, num_computed_tokens)
        return [table[index] for index in indices if not table[index].is_null]

    def free_skipped_blocks(
        self, request_id: str, num_computed_tokens: int, ends: Sequence[int] | None = None
    ) -> None:
        """Give back blocks that the running request no longer needs.

        Args:
            ends: Where later requests will resume, in tokens: blocks they will not read are evicted
                first. None: unknown.
        """
        indices = self._skipped_indices(request_id, num_computed_tokens)
        if not indices:
            return
        table = self._tables[request_id]
        self.slid_out += len(self.skipped_blocks(request_id, num_computed_tokens))
        read = set(indices) if ends is None else self._read_behind(ends)
        superseded = [table.blocks[index] for index in indices if index not in read]
        others = [table.blocks[index] for index in indices if index in read]
        for index in indices:
            table.blocks[index] = self.pool.null_block
        table.num_given_back = indices[0] + 1
        self.pool.free_blocks(others, have_slid_out=True)
        self.pool.free_blocks(superseded, have_slid_out=True, evict_first=True)

    def free(self, request_id: str) -> None:
        """Give back all of the request's blocks, its last first; no error if it holds none."""
        self.pool.free_blocks(reversed(self.block_table(request_id)))
        self._tables.pop(request_id, None)

    def start_step(self) -> None:
        """Begin a step: the last one's blocks can be read now."""
        self._unreadable.clear()

    def _skipped_indices(self, request_id: str, num_computed_tokens: int) -> range:
        """Return which blocks of the table the request is past since the last time, the latest
        first."""
        table = self._tables.get(request_id)
        if table is None:
            return range(0)
        skipped = self.num_skipped_tokens(num_computed_tokens) // self.block_size
        return range(min(skipped, len(table.blocks)) - 1, table.num_given_back - 1, -1)


def blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks are needed for some tokens."""
    return -(-num_tokens // block_size)


def num_free(blocks: Sequence[Block]) -> int:
    """How many of *blocks* no request references; null blocks are left out."""
    return sum(block.ref_count == 0 and not block.is_null for block in blocks)
