"""Manages the CPU tier: its block ids, and which block is evicted next.

It deals in block ids; the memory is the worker's. What happens to a block meanwhile is in
`offload/tier_manager.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from typing_extensions import override

from kvevents.events import CPU
from offload.base import CPULoadStoreSpec, OffloadKey, PrepareStoreOutput, RequestContext
from offload.cpu.policies import create_policy
from offload.errors import CacheConfigError, TierStateError
from offload.tier_manager import TierCounts, TierEntry, TierManager, TierStatistics


@dataclass(frozen=True, slots=True, kw_only=True)
class CPUTierStatistics(TierStatistics):
    """Blocks now, and counts since the start."""

    num_blocks: int
    free_blocks: int


@dataclass(slots=True, kw_only=True)
class _CPUEntry(TierEntry):
    block_id: int


class CPUOffloadingManager(TierManager[_CPUEntry]):
    """The CPU tier as the scheduler sees it; its specs are block ids in `[0, num_blocks)`.

    The order of the keys in a call is that of the prompt: a call's blocks are evicted from the last
    key to the first, since a block is useless without those before it.
    """

    medium = CPU
    name = "CPU"

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
        super().__init__(TierCounts(), enable_events)
        self.num_blocks = num_blocks
        self._policy = create_policy(cache_policy, num_blocks)
        self._free_block_ids = list(range(num_blocks - 1, -1, -1))
        self._idle_blocks = 0

    @override
    def touch(self, keys: Iterable[OffloadKey], context: RequestContext) -> None:
        """Mark blocks as used; policies that count uses take every call for another use."""
        for key in keys:
            block = self._entries.get(key)
            if block is not None and not block.doomed:
                self._policy.touch(key)

    # --- reading from other threads ---------------------------------------------------------------

    def holds(self, key: OffloadKey) -> bool:
        """Return whether a block is a hit; from any thread, and not counted as a lookup."""
        block = self._entries.get(key)
        return block is not None and block.loadable

    def read(self, key: OffloadKey, read_slot: Callable[[int], bytes]) -> bytes | None:
        """Return the bytes of a hit, from any thread; None if it is no hit, or no longer one.

        A slot is written again only after its entry is gone, so bytes whose entry is still there
        when they have been copied are the block's.

        Args:
            read_slot: Copies the bytes of a block id.
        """
        block = self._entries.get(key)
        if block is None or not block.loadable:
            return None
        found = read_slot(block.block_id)
        return found if self._entries.get(key) is block and block.loadable else None

    # --- storing ----------------------------------------------------------------------------------

    @override
    def prepare_store(
        self, keys: Sequence[OffloadKey], context: RequestContext
    ) -> PrepareStoreOutput | None:
        """Make room; neither a key of this call nor a block in flight is evicted for it."""
        asked = dict.fromkeys(keys)
        new = [key for key in asked if key not in self._entries]
        spared = [key for key in asked if self._is_idle(key)]
        if len(new) > len(self._free_block_ids) + self._idle_blocks - len(spared):
            self._counts.refused_stores += 1
            return None
        for key in spared:
            self._policy.hold(key)
        evicted = self._admit(new)
        for key in reversed(spared):
            self._policy.release(key)
        self._record(evicted, removed=True)
        return PrepareStoreOutput(new, self._spec(new), evicted)

    def _is_idle(self, key: OffloadKey) -> bool:
        block = self._entries.get(key)
        return block is not None and not block.in_flight

    def _admit(self, new: list[OffloadKey]) -> list[OffloadKey]:
        evicted = []
        for key in new:
            evict = not self._free_block_ids
            victim = self._policy.admit(key, evict)
            if evict or victim is not None:
                evicted.append(self._evict(victim))
            self._entries[key] = _CPUEntry(block_id=self._free_block_ids.pop())
        return evicted

    def _evict(self, victim: OffloadKey | None) -> OffloadKey:
        if victim is None or not self._is_idle(victim):
            # A plug-in's mistake. The block may be in the middle of a copy: handing it out would
            # serve wrong bytes, so stop here.
            raise TierStateError(
                f"CPU tier: {type(self._policy).__name__}.admit must return a stored key that is "
                "not in flight"
            )
        self._remove(victim)
        self._idle_blocks -= 1
        self._counts.evicted += 1
        return victim

    # --- TierManager ------------------------------------------------------------------------------

    @override
    def _spec(self, keys: Sequence[OffloadKey]) -> CPULoadStoreSpec:
        return CPULoadStoreSpec([self._entries[key].block_id for key in keys])

    @override
    def _hold(self, key: OffloadKey) -> None:
        self._policy.hold(key)
        self._idle_blocks -= 1

    @override
    def _release(self, key: OffloadKey) -> None:
        self._policy.release(key)
        self._idle_blocks += 1

    @override
    def _discard(self, key: OffloadKey) -> None:
        self._policy.discard(key)

    @override
    def _discard_all(self) -> None:
        self._policy.clear()
        self._idle_blocks = 0

    @override
    def _remove(self, key: OffloadKey) -> None:
        self._free_block_ids.append(self._entries.pop(key).block_id)

    def statistics(self) -> CPUTierStatistics:
        """Blocks now, and counts since the start."""
        return self._statistics(
            CPUTierStatistics, num_blocks=self.num_blocks, free_blocks=len(self._free_block_ids)
        )
