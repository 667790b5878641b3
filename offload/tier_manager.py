"""Follows the blocks of a lower tier, in memory or on disk, from their store to their end.

A key has at most one block. Its life: `prepare_store` makes it pending, `complete_store` makes it a
hit, loads protect it, and eviction, a failed copy or a reset ends it. A block that must go while a
copy of it is in flight is *doomed*: no longer a hit from that moment on, in the events too, but its
place is not given to others, and its key not stored again, before the copy is over.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from typing_extensions import override

from offload.base import (
    LookupResult,
    LowerTierSpec,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    RequestContext,
)
from offload.errors import TierStateError


@dataclass(slots=True)
class TierEntry:
    """One offloaded block: its copies in flight, and whether it may be read."""

    storing: bool = True
    loads: int = 0
    """Loads in flight."""
    doomed: bool = False
    """No longer a hit; kept until its copies are over."""

    @property
    def loadable(self) -> bool:
        """Return whether it is a hit."""
        return not (self.storing or self.doomed)

    @property
    def in_flight(self) -> bool:
        """Return whether a copy reads or writes it."""
        return self.storing or self.loads > 0

    @property
    def state(self) -> str:
        """Return which of the blocks in `TierStatistics` it is one of."""
        if self.doomed:
            return "doomed"
        if self.storing:
            return "pending"
        return "loading" if self.loads else "idle"


@dataclass(slots=True)
class TierCounts:
    """Counts of a tier since the start, in blocks unless stated otherwise."""

    lookup_hits: int = 0
    lookup_misses: int = 0
    lookup_pending: int = 0
    """Lookups of blocks whose store was in flight."""
    stored: int = 0
    """Blocks that became hits."""
    loads: int = 0
    """Protections given by `prepare_load`."""
    evicted: int = 0
    """Blocks dropped to make room."""
    failed_stores: int = 0
    failed_loads: int = 0
    """A block that several loads failed on counts for each."""
    refused_stores: int = 0
    """Calls of `prepare_store` that returned None."""
    reset_blocks: int = 0
    """Hits that a reset ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStatistics:
    """Blocks now, and counts since the start."""

    idle_blocks: int
    """Hits that no load protects, which can be evicted."""
    loading_blocks: int
    """Hits that a load protects."""
    pending_blocks: int
    """Their store is in flight."""
    doomed_blocks: int
    """No longer hits; gone when their copy is over, or their file can be deleted."""
    counts: TierCounts


Entry = TypeVar("Entry", bound=TierEntry)
Statistics = TypeVar("Statistics", bound=TierStatistics)


class TierManager(OffloadingManager, Generic[Entry]):
    """The common part of managers that decide what their tier holds.

    Where blocks are, and which one is evicted next, is the subclass's: it makes room in
    `prepare_store`, and follows here which blocks may be evicted. A block whose store is in flight
    may not.
    """

    name: str
    """The tier's, for errors."""

    def __init__(self, counts: TierCounts, enable_events: bool) -> None:
        """
        Args:
            counts: Evictions, refused stores and what else the subclass counts are its own.
            enable_events: Without it `take_events` is always empty.
        """
        self.enable_events = enable_events
        self._entries: dict[OffloadKey, Entry] = {}
        self._counts = counts
        self._events: list[OffloadingEvent] = []

    # --- what differs from tier to tier -----------------------------------------------------------

    @abstractmethod
    def _spec(self, keys: Sequence[OffloadKey]) -> LowerTierSpec:
        """Return the places of blocks."""

    @abstractmethod
    def _hold(self, key: OffloadKey) -> None:
        """Keep an idle block from eviction."""

    @abstractmethod
    def _release(self, key: OffloadKey) -> None:
        """Let a block be evicted, as the most recently used one."""

    @abstractmethod
    def _discard(self, key: OffloadKey) -> None:
        """Forget when a block was used: it is not a hit any more, and goes when it can."""

    @abstractmethod
    def _discard_all(self) -> None:
        """Forget when any block was used."""

    @abstractmethod
    def _remove(self, key: OffloadKey) -> None:
        """Let a discarded block's place be used again."""

    # --- OffloadingManager ------------------------------------------------------------------------

    @override
    def lookup(self, key: OffloadKey, context: RequestContext) -> LookupResult:
        """See `OffloadingManager`. A doomed block is a miss, not pending: it will never be a
        hit."""
        entry = self._entries.get(key)
        if entry is None or entry.doomed:
            self._counts.lookup_misses += 1
            return LookupResult.MISS
        if entry.storing:
            self._counts.lookup_pending += 1
            return LookupResult.PENDING
        self._counts.lookup_hits += 1
        return LookupResult.HIT

    @override
    def prepare_load(self, keys: Sequence[OffloadKey], context: RequestContext) -> LowerTierSpec:
        entries = self._require(keys, lambda entry: entry.loadable, "prepare_load", "is not a hit")
        for key, entry in zip(keys, entries, strict=True):
            if not entry.loads:
                self._hold(key)
            entry.loads += 1
        self._counts.loads += len(entries)
        return self._spec(keys)

    @override
    def complete_load(
        self, keys: Sequence[OffloadKey], context: RequestContext, success: bool = True
    ) -> None:
        """End the protection; a block that could not be read goes with its last load in flight."""
        loads = Counter(keys)
        self._require_loads(loads)
        if not success:
            self._counts.failed_loads += loads.total()
            failed = [key for key in loads if not self._entries[key].doomed]
            for key in failed:
                self._entries[key].doomed = True
                self._discard(key)
            self._record(failed, removed=True)
        for key in reversed(loads):
            self._entries[key].loads -= loads[key]
            self._settle(key)

    @override
    def complete_store(
        self, keys: Sequence[OffloadKey], context: RequestContext, success: bool = True
    ) -> None:
        """Make stored blocks hits; those that a reset doomed meanwhile are gone either way."""
        asked = list(dict.fromkeys(keys))
        entries = self._require(
            asked, lambda entry: entry.storing, "complete_store", "has no store in flight"
        )
        stored = [
            key for key, entry in zip(asked, entries, strict=True) if success and not entry.doomed
        ]
        for key, entry in zip(reversed(asked), reversed(entries), strict=True):
            if not success and not entry.doomed:
                self._discard(key)
                entry.doomed = True
            entry.storing = False
            self._settle(key)
        self._counts.stored += len(stored)
        self._counts.failed_stores += 0 if success else len(asked)
        self._record(stored, removed=False)

    @override
    def reset(self) -> None:
        removed = [key for key, entry in self._entries.items() if entry.loadable]
        self._discard_all()
        for key, entry in list(self._entries.items()):
            entry.doomed = True
            self._settle(key)
        self._counts.reset_blocks += len(removed)
        self._record(removed, removed=True)

    @override
    def take_events(self) -> list[OffloadingEvent]:
        """Events in order; replayed, they give the keys for which `lookup` returns a hit."""
        events, self._events = self._events, []
        return events

    # --- inside -----------------------------------------------------------------------------------

    def _settle(self, key: OffloadKey) -> None:
        """After a copy or a reset: a block that is not in flight becomes idle or goes."""
        entry = self._entries[key]
        if not entry.in_flight:
            (self._remove if entry.doomed else self._release)(key)

    def _require(
        self, keys: Sequence[OffloadKey], fits: Callable[[Entry], bool], call: str, complaint: str
    ) -> list[Entry]:
        """The entries of *keys*, all of which must fit.

        Errors name a key by its position among *keys*: the key itself identifies a prompt.

        Args:
            fits: Returns whether an entry is in the state the call needs.
            complaint: The fault of an entry that does not fit, for the error.

        Raises:
            TierStateError: An entry is missing or does not fit.
        """
        entries = []
        for position, key in enumerate(keys):
            entry = self._entries.get(key)
            if entry is None or not fits(entry):
                raise TierStateError(
                    f"{self.name} tier: {call}: key {position + 1} of {len(keys)} {complaint}"
                )
            entries.append(entry)
        return entries

    def _require_loads(self, loads: Counter[OffloadKey]) -> None:
        """Check that at least as many loads are in flight as have ended.

        Raises:
            TierStateError: A key has fewer loads in flight than *loads* counts.
        """
        for position, (key, count) in enumerate(loads.items()):
            entry = self._entries.get(key)
            in_flight = entry.loads if entry is not None else 0
            if in_flight < count:
                raise TierStateError(
                    f"{self.name} tier: complete_load: key {position + 1} of {len(loads)} has "
                    f"{in_flight} loads in flight, {count} are reported over"
                )

    def _record(self, keys: Sequence[OffloadKey], removed: bool) -> None:
        """Record an event.

        Args:
            keys: Blocks that became hits, or ceased to be.
        """
        if self.enable_events and keys:
            self._events.append(OffloadingEvent(tuple(keys), self.medium, removed))

    def _statistics(self, kind: Callable[..., Statistics], **own: int) -> Statistics:
        """Return statistics of a *kind*, with what only that kind has. Looks at every block."""
        found = Counter(entry.state for entry in self._entries.values())
        return kind(
            **own,
            idle_blocks=found["idle"],
            loading_blocks=found["loading"],
            pending_blocks=found["pending"],
            doomed_blocks=found["doomed"],
            counts=replace(self._counts),
        )
