"""The common part of lower tiers' managers: entries, lookups, counts, refused calls, events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from offload.base import LookupResult, OffloadingEvent, OffloadKey
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


@dataclass(slots=True)
class TierCounts:
    """Counts of a tier since the start, in blocks unless stated otherwise."""

    lookup_hits: int = 0
    lookup_misses: int = 0
    lookup_pending: int = 0
    """Lookups of blocks whose store was in flight."""
    stored: int = 0
    """Blocks that became hits."""
    evicted: int = 0
    """Blocks dropped to make room."""
    failed_stores: int = 0
    failed_loads: int = 0
    """A block that several loads failed on counts for each."""
    refused_stores: int = 0
    """Calls of `prepare_store` that returned None."""


Entry = TypeVar("Entry", bound=TierEntry)


class TierEntries(dict[OffloadKey, Entry], Generic[Entry]):
    """A tier's entries by key."""

    def __init__(self, tier: str, medium: str, counts: TierCounts, enable_events: bool) -> None:
        """
        Args:
            counts: Counts lookups here; the manager counts the rest.
            enable_events: Without it `take_events` is always empty.
        """
        super().__init__()
        self.counts = counts
        self._tier = tier
        self._medium = medium
        self._enable_events = enable_events
        self._events: list[OffloadingEvent] = []

    def lookup(self, key: OffloadKey) -> LookupResult:
        """Look a block up. A doomed one is a miss, not pending: it will never be a hit."""
        entry = self.get(key)
        if entry is None or entry.doomed:
            self.counts.lookup_misses += 1
            return LookupResult.MISS
        if entry.storing:
            self.counts.lookup_pending += 1
            return LookupResult.PENDING
        self.counts.lookup_hits += 1
        return LookupResult.HIT

    def require(
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
            entry = self.get(key)
            if entry is None or not fits(entry):
                raise TierStateError(
                    f"{self._tier} tier: {call}: key {position + 1} of {len(keys)} {complaint}"
                )
            entries.append(entry)
        return entries

    def require_loads(self, loads: Counter[OffloadKey]) -> None:
        """Check that at least as many loads are in flight as have ended.

        Raises:
            TierStateError: A key has fewer loads in flight than *loads* counts.
        """
        for position, (key, count) in enumerate(loads.items()):
            entry = self.get(key)
            in_flight = entry.loads if entry is not None else 0
            if in_flight < count:
                raise TierStateError(
                    f"{self._tier} tier: complete_load: key {position + 1} of {len(loads)} has "
                    f"{in_flight} loads in flight, {count} are reported over"
                )

    def record(self, keys: Sequence[OffloadKey], removed: bool) -> None:
        """Record an event.

        Args:
            keys: Blocks that became hits, or ceased to be.
        """
        if self._enable_events and keys:
            self._events.append(OffloadingEvent(tuple(keys), self._medium, removed))

    def take_events(self) -> list[OffloadingEvent]:
        """Take the events since the last call."""
        events, self._events = self._events, []
        return events
