"""The blocks of one KV cache: those held, those that can be found again, and the order of eviction.

All groups draw from one pool, since their pages have one size. A block is *held* while requests
reference it, *free* while none does, and *cached* while it can be found by its hash; a free block
stays cached until it is given out again.

    next to be given out                                                               last
    | without a hash, latest first | never used | unwanted | least recently used first |

The latest block without a hash comes first because its memory is still warm. Unwanted ones are
cached, but no request is expected to ask for them; the latest comes first. A request's blocks are
freed in reverse, so its tail is evicted before its head. A free block that loses its hash in
`evict_blocks` keeps its position.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kvevents.events import GroupIdx
from kvevents.layout import KVCacheGroup
from offload.block import Block, FreeQueue
from offload.cached_blocks import CachedBlocks
from offload.errors import BlockRangeError
from offload.event_log import EventLog
from offload.request import CacheRequest


@dataclass(slots=True)
class GroupPoolStatistics:
    """One group: the blocks cached now, and counts since the start."""

    cached: int = 0
    """Distinct hashes."""
    stored: int = 0
    evicted: int = 0
    """Copies that lost their hash because their block was needed, or by `evict_blocks`."""
    evicted_after_sliding: int = 0
    """Evicted blocks that a window or a state had moved past."""


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """The pool's blocks now, without the null block."""

    num_blocks: int
    free: int
    groups: tuple[GroupPoolStatistics, ...]


class BlockPool:
    """Gives out blocks, takes them back, and finds cached ones."""

    def __init__(
        self, num_blocks: int, groups: Sequence[KVCacheGroup], event_log: EventLog | None = None
    ) -> None:
        """
        Args:
            num_blocks: Pages of the cache, at least two: the first is the null block and is never
                given out.
            event_log: Records every change of presence; its owner takes the events.
        """
        self._blocks = [Block(index) for index in range(num_blocks)]
        self.null_block = self._blocks[0]
        self.null_block.is_null = True
        self.free_queue = FreeQueue(self._blocks[1:])
        """Blocks that can be given out, cached ones included; read-only outside the pool."""
        self.evictions = 0
        """How often a block lost its hash since the start; a reset counts once."""
        self._groups = groups
        self._cached = [CachedBlocks() for _ in groups]
        self.event_log = event_log
        self._counts = [GroupPoolStatistics() for _ in groups]

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be given out, cached ones included."""
        return len(self.free_queue)

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, from 0 to 1."""
        return 1.0 - len(self.free_queue) / (len(self._blocks) - 1)

    def cached(self, group_idx: GroupIdx) -> CachedBlocks:
        """The blocks of a group that can be found; read-only outside the pool."""
        return self._cached[group_idx]

    # --- giving out and taking back ---------------------------------------------------------------

    def get_new_blocks(self, count: int) -> list[Block]:
        """Give out *count* blocks, each referenced once and no longer cached.

        Raises:
            BlockRangeError: Fewer blocks are free. None was given out.
        """
        if not 0 <= count <= len(self.free_queue):
            raise BlockRangeError(
                f"get_new_blocks: count {count} must lie in [0, {len(self.free_queue)}], "
                "the free blocks"
            )
        blocks = self.free_queue.pop(count)
        for block in blocks:
            if block.block_hash is not None:
                self._evict(block)
            block.ref_count = 1
            block.has_slid_out = block.is_wrong = False
        return blocks

    def touch(self, blocks: Iterable[Block]) -> None:
        """Add a reference to each of *blocks*; null blocks are skipped."""
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_count == 0:
                self.free_queue.remove(block)
            block.ref_count += 1
            block.has_slid_out = False

    def refresh(self, blocks: Iterable[Block]) -> None:
        """Evict free blocks last, as if they had just been used.

        Args:
            blocks: In the order in which they may be evicted; those that are held are skipped.
        """
        for block in blocks:
            if block.ref_count == 0:
                self.free_queue.remove(block)
                self.free_queue.append([block])

    def free_blocks(
        self, blocks: Iterable[Block], have_slid_out: bool = False, evict_first: bool = False
    ) -> None:
        """Drop a reference to each of *blocks*; null blocks are skipped.

        Args:
            blocks: In the order in which they may be evicted.
            have_slid_out: True if their request goes on without them.
            evict_first: True to evict them before all others that are cached, as no request is
                expected to ask for them.
        """
        unhashed: list[Block] = []
        cached: list[Block] = []
        for block in blocks:
            if block.is_null:
                continue
            assert block.ref_count > 0
            block.ref_count -= 1
            if block.ref_count == 0:
                block.has_slid_out = have_slid_out
                (unhashed if block.block_hash is None else cached).append(block)
        self.free_queue.prepend(unhashed)
        if evict_first:
            self.free_queue.insert(cached)
        else:
            self.free_queue.append(cached)

    # --- caching and eviction ---------------------------------------------------------------------

    def cache_full_blocks(
        self,
        request: CacheRequest,
        group_idx: GroupIdx,
        blocks: Sequence[Block],
        start: int,
        stop: int,
        keep: Sequence[bool] | None = None,
    ) -> None:
        """Make blocks of a request findable; null blocks and hashed ones are skipped.

        Args:
            request: The blocks hold its tokens.
            group_idx: The group of the block table.
            blocks: The whole block table of the request in that group.
            start: Index of the first block to cache.
            stop: Index behind the last; its tokens are all in *request*.
            keep: One flag per block of `[start, stop)`; None keeps all.
        """
        for first, run in _runs(blocks, start, stop, keep):
            if self.event_log:
                self.event_log.start_run(group_idx, first, request)
            self._cache_run(request, group_idx, first, run)

    def _cache_run(
        self, request: CacheRequest, group_idx: GroupIdx, first: int, run: Sequence[Block]
    ) -> None:
        size, cached, log = (
            self._groups[group_idx].block_size,
            self._cached[group_idx],
            self.event_log,
        )
        for index, block in enumerate(run, first):
            block_hash = request.hash_at((index + 1) * size)
            block.block_hash, block.group_idx = block_hash, group_idx
            block.is_wrong = False
            has_appeared = cached.add(block_hash, block)
            if log:
                log.add_stored(block_hash, has_appeared)
        self._counts[group_idx].stored += len(run)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Make blocks unfindable, such as those a failed load left wrong; their holders keep them.

        Raises:
            BlockRangeError: An id is outside the pool. Nothing was evicted.
        """
        ids = list(block_ids)
        for block_id in ids:
            if not 0 < block_id < len(self._blocks):
                raise BlockRangeError(
                    f"evict_blocks: block id {block_id} must lie in [1, {len(self._blocks) - 1}]"
                )
        for block_id in ids:
            block = self._blocks[block_id]
            block.is_wrong = True
            if block.block_hash is not None:
                self._evict(block)

    def reset_prefix_cache(self) -> bool:
        """Make every block unfindable; return False, with nothing changed, while a request holds
        one."""
        if len(self.free_queue) != len(self._blocks) - 1:
            return False
        self.evictions += 1
        for block in self._blocks:
            block.block_hash = None
        for cached in self._cached:
            cached.clear()
        if self.event_log:
            self.event_log.add_cleared()
        return True

    def _evict(self, block: Block) -> None:
        block_hash, group_idx = block.block_hash, block.group_idx
        assert block_hash is not None
        block.block_hash = None
        is_gone = self._cached[group_idx].discard(block_hash, block)
        if is_gone and self.event_log:
            self.event_log.add_removed(group_idx, block_hash)
        self.evictions += 1
        counts = self._counts[group_idx]
        counts.evicted += 1
        counts.evicted_after_sliding += block.has_slid_out

    # --- observing --------------------------------------------------------------------------------

    def statistics(self) -> PoolStatistics:
        """Blocks now, and counts per group since the start."""
        return PoolStatistics(
            num_blocks=len(self._blocks) - 1,
            free=len(self.free_queue),
            groups=tuple(
                replace(counts, cached=len(cached))
                for cached, counts in zip(self._cached, self._counts, strict=True)
            ),
        )

    def check_integrity(self, references: Mapping[int, int]) -> None:
        """Check the pool's invariants; for tests and debugging, linear in the size of the pool.

        Args:
            references: Per block id, how many times block tables and copies reference the block;
                0 where left out.

        Raises:
            AssertionError: References are miscounted, a block is both free and held or neither, or
                hashes and blocks do not match.
        """
        free = Counter(block.block_id for block in self.free_queue.blocks())
        assert len(self.free_queue) == free.total(), "free queue: its length is wrong"
        for block in self._blocks:
            held = references.get(block.block_id, 0)
            assert block.ref_count == held, f"{block}: {held} references exist"
            is_free = held == 0 and not block.is_null
            assert free[block.block_id] == is_free, f"{block}: wrongly free, held or queued twice"
        assert self.null_block.block_hash is None, "the null block has a hash"
        named = {(b.group_idx, b.block_hash, b) for b in self._blocks if b.block_hash is not None}
        found = [
            (group_idx, block_hash, block)
            for group_idx, cached in enumerate(self._cached)
            for block_hash in cached
            for block in cached.copies(block_hash)
        ]
        assert len(found) == len(named), "cached blocks: one is listed twice, missing or stale"
        assert set(found) == named, "cached blocks: one is listed under another hash than its own"


def _runs(
    blocks: Sequence[Block], start: int, stop: int, keep: Sequence[bool] | None
) -> Iterator[tuple[int, Sequence[Block]]]:
    """Contiguous blocks that are to be cached, each run with the index of its first block.

    With *keep* over blocks 0 to 5 as below, and block 4 hashed already:

        index   0  1  2  3  4  5
        keep    x  x  .  x  x  x        yields (0, blocks 0-1), (3, block 3), (5, block 5)
    """
    first = start
    for index in range(start, stop + 1):
        if index < stop and _is_cacheable(blocks[index]) and (keep is None or keep[index - start]):
            continue
        if index > first:
            yield first, blocks[first:index]
        first = index + 1


def _is_cacheable(block: Block) -> bool:
    return not block.is_null and block.block_hash is None
