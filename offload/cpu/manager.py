"""Manages the CPU tier: its blocks, copies in flight, and evictions.

It deals in block ids; the memory is the worker's. A key has at most one block. Its life:
`prepare_store` makes it pending, `complete_store` makes it a hit, loads protect it, and eviction, a
failed copy or a reset ends it. A block that must go while a copy of it is in flight is *doomed*: no
longer a hit from that moment on, in the events too, but its id is not handed out before the copy is
over, and its key is not stored again before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from typing_extensions import override

from kvevents.events import CPU
from offload.base import (
    CPULoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    RequestContext,
)
from offload.cpu.policies import create_policy
from offload.errors import CacheConfigError, TierStateError
from offload.tier_entries import TierCounts, TierEntries, TierEntry


@dataclass(slots=True)
class CPUTierCounts(TierCounts):
    """Counts of the CPU tier since the start."""

    loads: int = 0
    """Protections given by `prepare_load`."""
    reset_blocks: int = 0
    """Hits that a reset ended."""


@dataclass(frozen=True, slots=True)
class CPUTierStatistics:
    """Blocks now, and counts since the start."""

    num_blocks: int
    free_blocks: int
    idle_blocks: int
    """Hits that no load protects, which can be evicted."""
    loading_blocks: int
    """Hits that a load protects."""
    pending_blocks: int
    """Their store is in flight."""
    doomed_blocks: int
    """No longer hits; free when their copy is over."""
    counts: CPUTierCounts


@dataclass(slots=True, kw_only=True)
class _CPUEntry(TierEntry):
    block_id: int


class CPUOffloadingManager(OffloadingManager):
    """The CPU tier as the scheduler sees it; its specs are block ids in `[0, num_blocks)`.

    The order of the keys in a call is that of the prompt: a call's blocks are evicted from the last
    key to the first, since a block is useless without those before it.
    """

    medium = CPU

    def __init__(
        self, num_blocks: int, cache_policy: str = "lru", enable_events: bool = False
    ) -> None:
        """
        Args:
            num_blocks: How many blocks the tier has room for.
            cache_policy: `lru`, `arc` or the name of a plug-in.
            enable_events: Record what is stored and removed; then `take_events` must be called,
                since events are kept until it is.

        Raises:
            CacheConfigError: num_blocks is below 1, or no policy has that name.
        """
        if num_blocks < 1:
            raise CacheConfigError(f"CPU tier: num_blocks {num_blocks} must be at least 1")
        self.num_blocks = num_blocks
        self.enable_events = enable_events
        self._policy = create_policy(cache_policy, num_blocks)
        self._counts = CPUTierCounts()
        self._blocks = TierEntries[_CPUEntry]("CPU", CPU, self._counts, enable_events)
        self._free_block_ids = list(range(num_blocks - 1, -1, -1))
        self._idle_blocks = 0
        self._pending_blocks = 0
        self._doomed_blocks = 0

    # --- looking ----------------------------------------------------------------------------------

    @override
    def lookup(self, key: OffloadKey, context: RequestContext) -> LookupResult:
        return self._blocks.lookup(key)

    @override
    def touch(self, keys: Iterable[OffloadKey], context: RequestContext) -> None:
        """Mark blocks as used; policies that count uses take every call for another use."""
        for key in keys:
            block = self._blocks.get(key)
            if block is not None and not block.doomed:
                self._policy.touch(key)

    # --- reading from other threads ---------------------------------------------------------------

    def holds(self, key: OffloadKey) -> bool:
        """Return whether a block is a hit; from any thread, and not counted as a lookup."""
        block = self._blocks.get(key)
        return block is not None and block.loadable

    def read(self, key: OffloadKey, read_slot: Callable[[int], bytes]) -> bytes | None:
        """Return the bytes of a hit, from any thread; None if it is no hit, or no longer one.

        A slot is written again only after its entry is gone, so bytes whose entry is still there
        when they have been copied are the block's.

        Args:
            read_slot: Copies the bytes of a block id.
        """
        block = self._blocks.get(key)
        if block is None or not block.loadable:
            return None
        found = read_slot(block.block_id)
        return found if self._blocks.get(key) is block and block.loadable else None

    # --- loading ----------------------------------------------------------------------------------

    @override
    def prepare_load(self, keys: Sequence[OffloadKey], context: RequestContext) -> CPULoadStoreSpec:
        blocks = self._blocks.require(
            keys, lambda block: block.loadable, "prepare_load", "is not a hit"
        )
        for key, block in zip(keys, blocks, strict=True):
            if not block.loads:
                self._policy.hold(key)
                self._idle_blocks -= 1
            block.loads += 1
        self._counts.loads += len(blocks)
        return CPULoadStoreSpec([block.block_id for block in blocks])

    @override
    def complete_load(
        self, keys: Sequence[OffloadKey], context: RequestContext, success: bool = True
    ) -> None:
        """End the protection; a block that could not be read goes with its last load in flight."""
        loads = Counter(keys)
        self._blocks.require_loads(loads)
        if not success:
            self._doom(loads)
        for key in reversed(loads):
            self._end_loads(key, loads[key])

    def _doom(self, loads: Counter[OffloadKey]) -> None:
        """End blocks whose load failed: from here on they are not hits."""
        removed = [key for key in loads if not self._blocks[key].doomed]
        for key in removed:
            self._blocks[key].doomed = True
            self._policy.discard(key)
        self._doomed_blocks += len(removed)
        self._counts.failed_loads += loads.total()
        self._blocks.record(removed, removed=True)

    def _end_loads(self, key: OffloadKey, count: int) -> None:
        block = self._blocks[key]
        block.loads -= count
        if block.loads:
            return
        if block.doomed:
            self._doomed_blocks -= 1
            self._free(key)
        else:
            self._policy.release(key)
            self._idle_blocks += 1

    # --- storing ----------------------------------------------------------------------------------

    @override
    def prepare_store(
        self, keys: Sequence[OffloadKey], context: RequestContext
    ) -> PrepareStoreOutput | None:
        """Make room; neither a key of this call nor a block in flight is evicted for it."""
        asked = dict.fromkeys(keys)
        new = [key for key in asked if key not in self._blocks]
        spared = [key for key in asked if self._is_idle(key)]
        if len(new) > len(self._free_block_ids) + self._idle_blocks - len(spared):
            self._counts.refused_stores += 1
            return None
        for key in spared:
            self._policy.hold(key)
        evicted = self._admit(new)
        for key in reversed(spared):
            self._policy.release(key)
        self._blocks.record(evicted, removed=True)
        return PrepareStoreOutput(
            new, CPULoadStoreSpec([self._blocks[key].block_id for key in new]), evicted
        )

    def _is_idle(self, key: OffloadKey) -> bool:
        block = self._blocks.get(key)
        return block is not None and not block.in_flight

    def _admit(self, new: list[OffloadKey]) -> list[OffloadKey]:
        evicted = []
        for key in new:
            evict = not self._free_block_ids
            victim = self._policy.admit(key, evict)
            if evict or victim is not None:
                evicted.append(self._evict(victim))
            self._blocks[key] = _CPUEntry(block_id=self._free_block_ids.pop())
        self._pending_blocks += len(new)
        return evicted

    def _evict(self, victim: OffloadKey | None) -> OffloadKey:
        if victim is None or not self._is_idle(victim):
            # A plug-in's mistake. The block may be in the middle of a copy: handing it out would
            # serve wrong bytes, so stop here.
            raise TierStateError(
                f"CPU tier: {type(self._policy).__name__}.admit must return a stored key that is "
                "not in flight"
            )
        self._free(victim)
        self._idle_blocks -= 1
        self._counts.evicted += 1
        return victim

    @override
    def complete_store(
        self, keys: Sequence[OffloadKey], context: RequestContext, success: bool = True
    ) -> None:
        """Make stored blocks hits; those that a reset doomed meanwhile are gone either way."""
        asked = list(dict.fromkeys(keys))
        blocks = self._blocks.require(
            asked, lambda block: block.storing, "complete_store", "has no store in flight"
        )
        if not success:
            self._counts.failed_stores += len(asked)
        stored = [
            key for key, block in zip(asked, blocks, strict=True) if success and not block.doomed
        ]
        for key, block in zip(reversed(asked), reversed(blocks), strict=True):
            self._end_store(key, block, success)
        self._counts.stored += len(stored)
        self._blocks.record(stored, removed=False)

    def _end_store(self, key: OffloadKey, block: _CPUEntry, success: bool) -> None:
        if block.doomed:
            self._doomed_blocks -= 1
            self._free(key)
            return
        self._pending_blocks -= 1
        if success:
            block.storing = False
            self._policy.release(key)
            self._idle_blocks += 1
        else:
            self._policy.discard(key)
            self._free(key)

    def _free(self, key: OffloadKey) -> None:
        self._free_block_ids.append(self._blocks.pop(key).block_id)

    # --- all at once ------------------------------------------------------------------------------

    @override
    def reset(self) -> None:
        removed = [key for key, block in self._blocks.items() if block.loadable]
        self._policy.clear()
        for key, block in list(self._blocks.items()):
            block.doomed = True
            if not block.in_flight:
                self._free(key)
        self._idle_blocks = self._pending_blocks = 0
        self._doomed_blocks = len(self._blocks)
        self._counts.reset_blocks += len(removed)
        self._blocks.record(removed, removed=True)

    @override
    def take_events(self) -> list[OffloadingEvent]:
        """Events in order; replayed, they give the keys for which `lookup` returns a hit."""
        return self._blocks.take_events()

    def statistics(self) -> CPUTierStatistics:
        """Blocks now, and counts since the start."""
        free = len(self._free_block_ids)
        not_loading = self._idle_blocks + self._pending_blocks + self._doomed_blocks
        return CPUTierStatistics(
            num_blocks=self.num_blocks,
            free_blocks=free,
            idle_blocks=self._idle_blocks,
            loading_blocks=self.num_blocks - free - not_loading,
            pending_blocks=self._pending_blocks,
            doomed_blocks=self._doomed_blocks,
            counts=replace(self._counts),
        )
