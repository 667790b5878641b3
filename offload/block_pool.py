"""The blocks of one KV cache: who holds them, which of them can be found again, and which goes
next.

All groups draw from one pool, since their pages have one size. A block is *held* while requests
reference it, *free* while none does, and *cached* while it can be found by its hash; a free block
stays cached until it is given out again. Blocks freed without a hash are given out first, the
latest before the others, whose memory is cold; cached ones follow, least recently used first, so
that eviction takes the tail of a request before its head: its blocks are freed in reverse. A free
block that `evict_blocks` strips of its hash keeps its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvevents.events import Event, GroupIdx
from kvevents.layout import KVCacheGroup
from offload.block import Block, FreeQueue
from offload.cached_blocks import CachedBlocks
from offload.errors import BlockRangeError
from offload.event_log import EventLog
from offload.request import CacheRequest


@dataclass(frozen=True, slots=True)
class GroupPoolStatistics:
    """Of one group: what is cached now, and what happened since the start."""

    cached: int
    """Distinct hashes."""
    stored: int = 0
    evicted: int = 0
    """Copies that lost their hash because their block was needed, or by `evict_blocks`."""
    evicted_after_sliding: int = 0
    """Of these, blocks that a window or a state had moved past."""


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Blocks now, without the null block."""

    num_blocks: int
    free: int
    groups: tuple[GroupPoolStatistics, ...]


class BlockPool:
    """Gives out blocks, takes them back, and finds cached ones."""

    def __init__(
        self, num_blocks: int, groups: Sequence[KVCacheGroup], enable_events: bool = True
    ) -> None:
        """
        Args:
            num_blocks: Pages of the cache, at least two: the first is the null block and is never
                given out.
            groups: Kind and block size of each group, for the events.
            enable_events: Whether `take_events` will be called; if not, nothing is recorded.
        """
        if num_blocks < 2:
            raise BlockRangeError(
                f"num_blocks {num_blocks} must be at least 2: the null block and one to hold"
            )
        self._blocks = [Block(index) for index in range(num_blocks)]
        self.null_block = self._blocks[0]
        self.null_block.is_null = True
        self._free = FreeQueue(self._blocks[1:])
        self._groups = groups
        self._cached = [CachedBlocks() for _ in groups]
        self._log = EventLog(groups) if enable_events else None
        self._stored = [0] * len(groups)
        self._resets = 0
        self._evicted = [0] * len(groups)
        self._evicted_after_sliding = [0] * len(groups)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be given out, cached ones included."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, from 0 to 1."""
        return 1.0 - len(self._free) / (len(self._blocks) - 1)

    @property
    def evictions(self) -> int:
        """How often a block lost its hash, since the start; a reset counts too."""
        return sum(self._evicted) + self._resets

    def cached(self, group_idx: GroupIdx) -> CachedBlocks:
        """What can be found of a group; to be read only."""
        return self._cached[group_idx]

    def free_block_ids(self) -> list[int]:
        """In the order in which they will be given out."""
        return [block.block_id for block in self._free.blocks()]

    # --- giving out and taking back ---------------------------------------------------------------

    def get_new_blocks(self, count: int) -> list[Block]:
        """*count* blocks, each referenced once and no longer cached.

        Raises:
            BlockRangeError: There are not as many free blocks. Nothing was given out.
        """
        if not 0 <= count <= len(self._free):
            raise BlockRangeError(
                f"get_new_blocks: count {count} must lie in [0, {len(self._free)}], the free blocks"
            )
        blocks = self._free.pop(count)
        for block in blocks:
            if block.block_hash is not None:
                self._evict(block)
            block.ref_count = 1
            block.has_slid_out = False
        return blocks

    def touch(self, blocks: Iterable[Block]) -> None:
        """Another reference to each of *blocks*; null blocks are passed over."""
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_count == 0:
                self._free.remove(block)
            block.ref_count += 1
            block.has_slid_out = False

    def free_blocks(self, blocks: Iterable[Block], have_slid_out: bool = False) -> None:
        """One reference less to each of *blocks*, in the order in which they may go; null blocks
        are passed over."""
        unnamed: list[Block] = []
        cached: list[Block] = []
        for block in blocks:
            if block.is_null:
                continue
            assert block.ref_count > 0
            block.ref_count -= 1
            if block.ref_count == 0:
                block.has_slid_out = have_slid_out
                (unnamed if block.block_hash is None else cached).append(block)
        self._free.prepend(unnamed)
        self._free.append(cached)

    # --- finding again ----------------------------------------------------------------------------

    def cache_full_blocks(
        self,
        request: CacheRequest,
        group_idx: GroupIdx,
        blocks: Sequence[Block],
        start: int,
        stop: int,
        keep: Sequence[bool] | None = None,
    ) -> None:
        """Make blocks of a request findable; those that are null or have a hash already are passed
        over.

        Args:
            request: Whose tokens the blocks hold.
            group_idx: The group of the block table.
            blocks: The whole block table of the request in that group.
            start: Index of the first block to cache.
            stop: Index behind the last; its tokens are all in *request*.
            keep: One flag per block of `[start, stop)`; None keeps all.
        """
        for first, run in _runs(blocks, start, stop, keep):
            if self._log:
                self._log.start_run(group_idx, first, request)
            self._cache_run(request, group_idx, first, run)

    def _cache_run(
        self, request: CacheRequest, group_idx: GroupIdx, first: int, run: Sequence[Block]
    ) -> None:
        size, cached, log = self._groups[group_idx].block_size, self._cached[group_idx], self._log
        for index, block in enumerate(run, first):
            block_hash = request.hash_at((index + 1) * size)
            block.block_hash, block.group_idx = block_hash, group_idx
            has_appeared = cached.add(block_hash, block)
            if log:
                log.add_stored(block_hash, has_appeared)
        self._stored[group_idx] += len(run)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Make blocks unfindable, such as those a failed load left wrong; who holds them keeps
        them.

        Raises:
            BlockRangeError: An id is none of the pool's. Nothing was evicted.
        """
        ids = list(block_ids)
        for block_id in ids:
            if not 0 < block_id < len(self._blocks):
                raise BlockRangeError(
                    f"evict_blocks: block id {block_id} must lie in [1, {len(self._blocks) - 1}]"
                )
        for block_id in ids:
            if self._blocks[block_id].block_hash is not None:
                self._evict(self._blocks[block_id])

    def reset_prefix_cache(self) -> bool:
        """Make every block unfindable; False, and nothing changed, while a request holds one."""
        if len(self._free) != len(self._blocks) - 1:
            return False
        self._resets += 1
        for block in self._blocks:
            block.block_hash = None
        for cached in self._cached:
            cached.clear()
        if self._log:
            self._log.add_cleared()
        return True

    def _evict(self, block: Block) -> None:
        block_hash, group_idx = block.block_hash, block.group_idx
        assert block_hash is not None
        block.block_hash = None
        is_gone = self._cached[group_idx].discard(block_hash, block)
        if is_gone and self._log:
            self._log.add_removed(group_idx, block_hash)
        self._evicted[group_idx] += 1
        self._evicted_after_sliding[group_idx] += block.has_slid_out

    # --- telling ----------------------------------------------------------------------------------

    def take_events(self) -> list[Event]:
        """What changed since the last call; empty without events."""
        return self._log.take() if self._log else []

    def statistics(self) -> PoolStatistics:
        """Blocks now, and per group what happened since the start."""
        counts = zip(
            self._cached, self._stored, self._evicted, self._evicted_after_sliding, strict=True
        )
        return PoolStatistics(
            num_blocks=len(self._blocks) - 1,
            free=len(self._free),
            groups=tuple(GroupPoolStatistics(len(cached), *counted) for cached, *counted in counts),
        )


def _runs(
    blocks: Sequence[Block], start: int, stop: int, keep: Sequence[bool] | None
) -> Iterator[tuple[int, Sequence[Block]]]:
    """Contiguous blocks that are to be cached, each run with the index of its first block."""
    first = start
    for index in range(start, stop + 1):
        if index < stop and _is_cacheable(blocks[index]) and (keep is None or keep[index - start]):
            continue
        if index > first:
            yield first, blocks[first:index]
        first = index + 1


def _is_cacheable(block: Block) -> bool:
    return not block.is_null and block.block_hash is None
