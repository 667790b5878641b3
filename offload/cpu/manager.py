"""What the CPU tier holds, what of it is in flight, and what goes when room is needed. Block ids
only; no memory is touched.

A key has at most one block. Its life: `prepare_store` makes it pending, `complete_store` makes it a
hit, loads protect it, and eviction, a failed copy or a reset ends it. A block that must go while a
copy of it is in flight is *doomed*: no hit from that moment on, in the events too, but its id is
not handed out before the copy is over, and its key is not stored again before.
"""
# ruff: noqa: ARG002 - the protocol names the request for tiers that tell requests apart; this one
# treats all alike

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvevents.events import CPU
from offload.base import (
    CPULoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    PrepareStoreOutput,
    RequestContext,
)
from offload.cpu.policies import create_policy
from offload.errors import CacheConfigError, TierStateError
from offload.tier_entries import TierEntries, TierEntry


@dataclass(frozen=True, slots=True)
class CPUTierStatistics:
    """Blocks as they are now, and totals since the start, in blocks unless said otherwise."""

    num_blocks: int
    free_blocks: int
    idle_blocks: int
    """Hits that no load protects: what can be evicted."""
    loading_blocks: int
    """Hits that a load protects."""
    pending_blocks: int
    """Their store is in flight."""
    doomed_blocks: int
    """No hits any more, free when their copy is over."""
    lookup_hits: int
    lookup_misses: int
    lookup_pending: int
    stored: int
    """Became hits."""
    loads: int
    """Protections given by `prepare_load`."""
    evicted: int
    """Went to make room."""
    failed_stores: int
    failed_loads: int
    """Loads that failed; a block that several loads failed on counts for each."""
    reset_blocks: int
    """Hits that a reset ended."""
    refused_stores: int
    """Calls of `prepare_store` answered with None."""


@dataclass(slots=True, kw_only=True)
class _Block(TierEntry):
    block_id: int


@dataclass(slots=True)
class _Totals:
    stored: int = 0
    loads: int = 0
    evicted: int = 0
    failed_stores: int = 0
    failed_loads: int = 0
    reset_blocks: int = 0
    refused_stores: int = 0


class CPUOffloadingManager:
    """The CPU tier as the scheduler sees it: an `OffloadingManager` whose places are block ids in
    `[0, num_blocks)`.

    The order of the keys in a call is that of the prompt: what a call stores or has loaded is
    evicted from its last key to its first, since a block is of no use without those before it.

    Args:
        num_blocks: How many blocks the tier has room for.
        cache_policy: `lru`, `arc` or the name of a plug-in.
        enable_events: Without it `take_events` is always empty; with it somebody has to call it,
            for events wait unbounded.

    Raises:
        CacheConfigError: No block, or no such policy.
    """

    medium = CPU

    def __init__(
        self, num_blocks: int, cache_policy: str = "lru", enable_events: bool = True
    ) -> None:
        if num_blocks < 1:
            raise CacheConfigError(f"CPU tier: num_blocks {num_blocks} must be at least 1")
        self.num_blocks = num_blocks
        self.enable_events = enable_events
        self._policy = create_policy(cache_policy, num_blocks)
        self._blocks = TierEntries[_Block]("CPU", self.medium, enable_events)
        self._free_block_ids = list(range(num_blocks - 1, -1, -1))
        self._idle_blocks = 0
        self._pending_blocks = 0
        self._doomed_blocks = 0
        self._totals = _Totals()

    # --- looking ----------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, context: RequestContext) -> LookupResult:
        """A doomed block is a miss, not pending: waiting for it is of no use."""
        return self._blocks.lookup(key)

    def touch(self, keys: Iterable[OffloadKey], context: RequestContext) -> None:
        """Call once a request: policies that count uses take every call for another use."""
        for key in keys:
            block = self._blocks.get(key)
            if block is not None and not block.doomed:
                self._policy.touch(key)

    # --- loading ----------------------------------------------------------------------------------

    def prepare_load(self, keys: Sequence[OffloadKey], context: RequestContext) -> CPULoadStoreSpec:
        """A key named several times is protected as many times."""
        blocks = self._blocks.require(
            keys, lambda block: block.loadable, "prepare_load", "is no hit"
        )
        for key, block in zip(keys, blocks, strict=True):
            if not block.loads:
                self._policy.hold(key)
                self._idle_blocks -= 1
            block.loads += 1
        self._totals.loads += len(blocks)
        return CPULoadStoreSpec([block.block_id for block in blocks])

    def complete_load(
        self, keys: Sequence[OffloadKey], context: RequestContext, success: bool = True
    ) -> None:
        """A block that could not be read is no hit from now on, and gone when no other load of it
        is in flight."""
        loads = Counter(keys)
        self._blocks.require_loads(loads)
        if not success:
            self._doom(loads)
        for key in reversed(loads):
            self._end_loads(key, loads[key])

    def _doom(self, loads: Counter[OffloadKey]) -> None:
        """Blocks whose load failed end here for readers."""
        removed = [key for key in loads if not self._blocks[key].doomed]
        for key in removed:
            self._blocks[key].doomed = True
            self._policy.discard(key)
        self._doomed_blocks += len(removed)
        self._totals.failed_loads += loads.total()
        self._blocks.note(removed, removed=True)

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

    def prepare_store(
        self, keys: Sequence[OffloadKey], context: RequestContext
    ) -> PrepareStoreOutput | None:
        """Keys named several times count once. Neither a key of this call nor a block in flight is
        evicted for it."""
        asked = dict.fromkeys(keys)
        new = [key for key in asked if key not in self._blocks]
        spared = [key for key in asked if self._is_idle(key)]
        if len(new) > len(self._free_block_ids) + self._idle_blocks - len(spared):
            self._totals.refused_stores += 1
            return None
        for key in spared:
            self._policy.hold(key)
        evicted = self._admit(new)
        for key in reversed(spared):
            self._policy.release(key)
        self._blocks.note(evicted, removed=True)
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
            self._blocks[key] = _Block(block_id=self._free_block_ids.pop())
        self._pending_blocks += len(new)
        return evicted

    def _evict(self, victim: OffloadKey | None) -> OffloadKey:
        if victim is None or not self._is_idle(victim):
            # A plug-in's mistake. Its block may be under copy: handing it out would serve wrong
            # bytes, so stop here.
            raise TierStateError(
                f"CPU tier: {type(self._policy).__name__}.admit must return a stored key that is not in flight"
            )
        self._free(victim)
        self._idle_blocks -= 1
        self._totals.evicted += 1
        return victim

    def complete_store(
        self, keys: Sequence[OffloadKey], context: RequestContext, success: bool = True
    ) -> None:
        """Keys named several times count once. What a reset overtook is gone either way."""
        asked = list(dict.fromkeys(keys))
        blocks = self._blocks.require(
            asked, lambda block: block.storing, "complete_store", "has no store in flight"
        )
        if not success:
            self._totals.failed_stores += len(asked)
        stored = [
            key for key, block in zip(asked, blocks, strict=True) if success and not block.doomed
        ]
        for key, block in zip(reversed(asked), reversed(blocks), strict=True):
            self._end_store(key, block, success)
        self._totals.stored += len(stored)
        self._blocks.note(stored, removed=False)

    def _end_store(self, key: OffloadKey, block: _Block, success: bool) -> None:
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

    def reset(self) -> None:
        removed = [key for key, block in self._blocks.items() if block.loadable]
        self._policy.clear()
        for key, block in list(self._blocks.items()):
            block.doomed = True
            if not block.in_flight:
                self._free(key)
        self._idle_blocks = self._pending_blocks = 0
        self._doomed_blocks = len(self._blocks)
        self._totals.reset_blocks += len(removed)
        self._blocks.note(removed, removed=True)

    def take_events(self) -> list[OffloadingEvent]:
        """Replayed in order they give the keys that `lookup` calls hits; a key's events
        alternate."""
        return self._blocks.take_events()

    def statistics(self) -> CPUTierStatistics:
        free = len(self._free_block_ids)
        totals = self._totals
        return CPUTierStatistics(
            num_blocks=self.num_blocks,
            free_blocks=free,
            idle_blocks=self._idle_blocks,
            loading_blocks=self.num_blocks
            - free
            - self._idle_blocks
            - self._pending_blocks
            - self._doomed_blocks,
            pending_blocks=self._pending_blocks,
            doomed_blocks=self._doomed_blocks,
            lookup_hits=self._blocks.lookups.hits,
            lookup_misses=self._blocks.lookups.misses,
            lookup_pending=self._blocks.lookups.pending,
            stored=totals.stored,
            loads=totals.loads,
            evicted=totals.evicted,
            failed_stores=totals.failed_stores,
            failed_loads=totals.failed_loads,
            reset_blocks=totals.reset_blocks,
            refused_stores=totals.refused_stores,
        )
