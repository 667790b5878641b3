"""The payloads of one cache's stream: engine steps as batches, heartbeats, layout, snapshots.

It runs on the stream's thread and keeps the cache's state along with the steps, so that a snapshot
can be written at any time.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvevents.cache_state import CacheState, Snapshot
from kvevents.codec import decode, encode, with_block_size
from kvevents.errors import MalformedBatch
from kvevents.events import GPU, BlockStored, CacheLayout, Event, EventBatch
from kvevents.sealing import HashKey, sealed

logger = logging.getLogger(__name__)

_ENCODING_ERRORS = (TypeError, ValueError, OverflowError, RecursionError, AttributeError)
"""Errors for a value that msgpack cannot encode."""


class EngineStep(NamedTuple):
    """Holds what one engine step published."""

    ts: float
    """Seconds since the epoch."""
    events: tuple[Event, ...]
    state: tuple[Event, ...] | None
    """Everything in the cache after it, where the state kept here has to start over; else None."""
    losses: int = 0
    """The losses known when *state* was taken."""


@dataclass(eq=False, repr=False)
class CacheSource:
    """Writes steps as payloads and keeps the cache's state: see `kvevents.stream.StreamSource`."""

    announcement: CacheLayout
    data_parallel_rank: int
    with_block_size: bool = False
    hash_key: HashKey | None = None
    """Blocks are announced under it; other hashes neither leave this object nor are kept in it."""

    def __post_init__(self) -> None:
        self.state = CacheState(self.announcement)
        self.rejected_events = 0
        """See `kvevents.publisher.PublisherStatistics`."""
        self.losses = 0
        """Times that the state became incomplete."""
        self._last_snapshot: weakref.ref[Snapshot] | None = None
        self._last_snapshot_seq = -1

    def opening(self) -> bytes:
        return self._encode(time.time(), (self.state.layout,))

    def heartbeat(self) -> bytes:
        return self._encode(time.time(), ())

    def payload(self, item: EngineStep) -> bytes:
        item = self._shown(item)
        payload, events = self._encode_valid(item.ts, item.events)
        state = None if item.state is None else self._encode_valid(item.ts, item.state)[1]
        self._note(EngineStep(item.ts, events, state, item.losses))
        return payload

    def note(self, item: EngineStep) -> None:
        self._note(self._shown(item))

    def _shown(self, item: EngineStep) -> EngineStep:
        """Return a step as others may see it."""
        if self.hash_key is None:
            return item
        state = None if item.state is None else self._sealed(item.state, self.hash_key)
        return EngineStep(item.ts, self._sealed(item.events, self.hash_key), state, item.losses)

    def _sealed(self, events: Sequence[Event], key: HashKey) -> tuple[Event, ...]:
        shown = [self._sealed_one(event, key) for event in events]
        return tuple(event for event in shown if event is not None)

    def _sealed_one(self, event: Event, key: HashKey) -> Event | None:
        try:
            return sealed(event, key)
        except TypeError as error:
            if not self.rejected_events:
                logger.error("publisher: an event was left out: %s", error)
            self.rejected_events += 1
            self.note_loss()
            return None

    def _note(self, item: EngineStep) -> None:
        try:
            self._follow(item)
        except Exception:
            # A field is not of its declared type, for example a hash that is a list, or an event of
            # no known type: an engine's mistake must not end its publisher. The events before it
            # are applied already.
            if not self.rejected_events:
                logger.exception("publisher: an event could not be applied to the cache state")
            self.rejected_events += 1
            self.note_loss()

    def _follow(self, item: EngineStep) -> None:
        if item.state is None:
            self.state.apply(item.events)
        else:
            self.state.reset(item.state)
            # One more may be of an item behind this step: a loss is known before what is queued.
            self.state.is_complete = self.losses == item.losses

    def note_loss(self) -> None:
        """Refuse snapshots from now on, until a step brings the whole state."""
        if self.state.is_complete:
            logger.error(
                "publisher: events were lost before the cache state was updated; "
                "snapshots are refused until it is complete again"
            )
        self.losses += 1
        self.state.is_complete = False

    def snapshot(self, seq: int) -> Iterator[bytes] | None:
        if not self.state.is_complete:
            return None
        ts = time.time()
        return (self._encode(ts, batch) for batch in self._snapshot_at(seq).batches())

    def _snapshot_at(self, seq: int) -> Snapshot:
        """Requests share one snapshot while nothing changes and one of them reads it."""
        known = self._last_snapshot() if self._last_snapshot else None
        if known is not None and self._last_snapshot_seq == seq:
            return known
        snapshot = self.state.snapshot()
        self._last_snapshot, self._last_snapshot_seq = weakref.ref(snapshot), seq
        return snapshot

    def _encode(self, ts: float, events: Sequence[Event]) -> bytes:
        return self._encode_valid(ts, tuple(events))[0]

    def _encode_valid(
        self, ts: float, events: tuple[Event, ...]
    ) -> tuple[bytes, tuple[Event, ...]]:
        """Return a payload and its events: all that can be encoded."""
        try:
            return self._encode_all(ts, events), events
        except _ENCODING_ERRORS:
            valid = tuple(event for event in events if self._is_valid(event))
        if not self.rejected_events:
            logger.error(
                "publisher: an event that cannot be encoded was left out; "
                "further ones are only counted"
            )
        self.rejected_events += len(events) - len(valid)
        return self._encode_all(ts, valid), valid

    def _is_valid(self, event: Event) -> bool:
        try:
            return not decode(self._encode_all(0.0, (event,))).unreadable
        except (*_ENCODING_ERRORS, MalformedBatch):
            return False

    def _encode_all(self, ts: float, events: Sequence[Event]) -> bytes:
        if self.with_block_size:
            events = [
                with_block_size(event, self._block_size(event))
                if isinstance(event, BlockStored)
                else event
                for event in events
            ]
        return encode(EventBatch(ts, events, self.data_parallel_rank))

    def _block_size(self, event: BlockStored) -> int:
        """Return the size of the event's blocks; 0 for a lower tier's that show no tokens."""
        shown = event.block_size or event.tokens_per_block
        groups, index = self.state.layout.groups, event.group_idx or 0
        if event.tier != GPU or index >= len(groups):
            return shown
        # Holes make a run look as if its blocks were larger; entries inside blocks are smaller.
        return min(shown or groups[index].block_size, groups[index].block_size)
