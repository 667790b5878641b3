"""What the managers of lower tiers share: an entry's life, lookups and their counts, refusals of
wrong calls, events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from offload.base import LookupResult, OffloadingEvent, OffloadKey
from offload.errors import TierStateError


@dataclass(slots=True)
class TierEntry:
    """One offloaded block: what is in flight of it, and whether it may be read."""

    storing: bool = True
    loads: int = 0
    """In flight."""
    doomed: bool = False
    """No hit any more; there until its copies are over."""

    @property
    def loadable(self) -> bool:
        return not (self.storing or self.doomed)

    @property
    def in_flight(self) -> bool:
        return self.storing or self.loads > 0


@dataclass(slots=True)
class LookupCounts:
    """How lookups ended, since the start."""

    hits: int = 0
    misses: int = 0
    pending: int = 0


Entry = TypeVar("Entry", bound=TierEntry)


class TierEntries(dict[OffloadKey, Entry], Generic[Entry]):
    """A tier's entries by key.

    Args:
        tier: What errors call it.
        medium: What its events name.
        enable_events: Without it `take_events` is always empty.
    """

    def __init__(self, tier: str, medium: str, enable_events: bool) -> None:
        super().__init__()
        self.lookups = LookupCounts()
        self._tier = tier
        self._medium = medium
        self._enable_events = enable_events
        self._events: list[OffloadingEvent] = []

    def lookup(self, key: OffloadKey) -> LookupResult:
        """A doomed entry is a miss, not pending: waiting for it is of no use."""
        entry = self.get(key)
        if entry is None or entry.doomed:
            self.lookups.misses += 1
            return LookupResult.MISS
        if entry.storing:
            self.lookups.pending += 1
            return LookupResult.PENDING
        self.lookups.hits += 1
        return LookupResult.HIT

    def require(
        self, keys: Sequence[OffloadKey], fits: Callable[[Entry], bool], call: str, complaint: str
    ) -> list[Entry]:
        """The entries of *keys*, if they all fit. Errors name a key by its place: it stands for
        what a user wrote.

        Raises:
            TierStateError: One is not there, or does not fit.
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
        """As many loads as are said to be over are in flight.

        Raises:
            TierStateError: Of one key there are fewer.
        """
        for position, (key, count) in enumerate(loads.items()):
            entry = self.get(key)
            in_flight = entry.loads if entry is not None else 0
            if in_flight < count:
                raise TierStateError(
                    f"{self._tier} tier: complete_load: key {position + 1} of {len(loads)} has {in_flight} loads in flight, "
                    f"{count} are said to be over"
                )

    def note(self, keys: Sequence[OffloadKey], removed: bool) -> None:
        """These keys began to be hits, or ended."""
        if self._enable_events and keys:
            self._events.append(OffloadingEvent(tuple(keys), self._medium, removed))

    def take_events(self) -> list[OffloadingEvent]:
        """What was noted since the last call."""
        events, self._events = self._events, []
        return events
