"""Hands every batch on to the consumer once and in order; no sockets.

`Delivery` finds the fate of a batch. `kvevents.stream_repair` decides what follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Protocol

import msgspec

from kvevents.codec import decode
from kvevents.errors import UNREADABLE, KVEventsError, MalformedBatch
from kvevents.events import AllBlocksCleared, CacheLayout, TierBlocksCleared
from kvevents.field_docs import counter
from kvevents.messages import PUBLISHER_BYTES, Batch
from kvevents.sequence import SequenceTracker, StreamPosition, fingerprint
from kvevents.stream_state import Input, SourceState


class Effect(Enum):
    """Names what a batch did to the consumer's picture."""

    KEPT = "kept"
    INCOMPLETE = "incomplete"
    """Part of it could not be kept: something is missing from here on."""
    KNOWN_AGAIN = "known again"
    """Nothing published before matters any more: all gaps are closed."""


_CLEARS = (AllBlocksCleared, TierBlocksCleared)
_NAMES_A_PUBLISHER = b"CacheLayout"
_LOOKED_AT_BYTES = 512
_FOUR_ELEMENTS = b"\x94"
_NAME_FOLLOWS = bytes((0xC4, PUBLISHER_BYTES))
"""In msgpack: a string of 16 bytes."""
_NAME_AT = PUBLISHER_BYTES + len(_NAME_FOLLOWS)
_named_decoder = msgspec.msgpack.Decoder(tuple[msgspec.Raw, msgspec.Raw, msgspec.Raw, bytes])
_FATES = {
    Effect.INCOMPLETE: Input.PARTLY_KEPT,
    Effect.KNOWN_AGAIN: Input.ALL_KNOWN,
}


class Consumer(Protocol):
    """Takes a subscriber's batches. Called on the event loop, one call at a time. Only documented
    errors may be raised.
    """

    def apply(self, batch: Batch) -> Effect:
        """Take the next batch.

        Raises:
            MalformedBatch: It cannot be read; nothing of it was taken.
        """
        ...

    def clear(self, reason: str) -> None:
        """Forget everything: the next batch starts from nothing."""
        ...

    def change(self, state: SourceState) -> None:
        """Note that the stream is in another state now."""
        ...

    def report(self, problem: KVEventsError) -> None:
        """Note that a message was refused, or with a `NoAnswer` that questions are not answered;
        *problem* does not quote any contents."""
        ...


ENOUGH_UNANSWERED = 2
"""Questions in a row without an answer, after which the endpoint is called silent."""


@dataclass(slots=True)
class StreamCounters:
    """Counts the events of a stream so far."""

    batches: Annotated[int, counter("kvroute_event_batches")] = 0
    """Batches applied."""
    duplicates: Annotated[int, counter("kvroute_events_duplicate")] = 0
    """Batches received again, as happens around a replay."""
    discarded: int = 0
    """Batches that the publisher, asked for them, turned out never to have sent."""
    malformed: Annotated[int, counter("kvroute_events_malformed")] = 0
    """Messages refused: not a batch, or over a limit."""
    gaps: Annotated[int, counter("kvroute_events_gaps")] = 0
    """Gaps seen in the sequence numbers."""
    questions: int = 0
    """Questions to the replay endpoint, most of them to make sure that nothing is missing."""
    unanswered: Annotated[int, counter("kvroute_events_unanswered")] = 0
    """Requests to the replay endpoint without a reply, or with one cut short."""
    unanswered_in_a_row: int = 0
    """Unanswered requests since the last answer began."""
    replays: Annotated[int, counter("kvroute_events_replays")] = 0
    """Replays that returned batches."""
    snapshots: Annotated[int, counter("kvroute_events_snapshots")] = 0
    """Snapshots taken."""
    restarts: Annotated[int, counter("kvroute_events_restarts")] = 0
    """Times another process was found at a publisher's address."""
    overflow: Annotated[int, counter("kvroute_events_overflow")] = 0
    """Batches dropped because too many waited during a replay."""
    connections: Annotated[int, counter("kvroute_source_connections")] = 0
    """Connections made to the publisher of an event stream."""


class Delivery:
    """Hands batches to one consumer."""

    def __init__(self, consumer: Consumer) -> None:
        self.counters = StreamCounters()
        self.tracker = SequenceTracker()
        self.shown = SourceState.CONNECTING
        """The state that the consumer knows of."""
        self.last_message_at: float | None = None
        """When the last live batch came, on the monotonic clock."""
        self._consumer = consumer
        self._is_clear = True
        """True if nothing was handed on since the consumer was last cleared."""
        self.proves_by_number = False
        """True if everything was known when the connection was lost, and no other process can have
        the next number: if that comes first, nothing is missing."""

    def take(self, batch: Batch) -> Input:
        """Return the fate of *batch*, which is handed on if it is the next one."""
        if batch.seq == self.tracker.expected:
            given = self.hand_on(batch)
            return self._proved(given) if self.proves_by_number else given
        self.proves_by_number = False
        fate = self.tracker.classify(batch.seq, fingerprint(batch.payload))
        if fate is not Input.DUPLICATE:
            fate = self._by_name(fate, publisher_of(batch.payload))
        self.counters.duplicates += fate is Input.DUPLICATE
        return fate

    def hand_on(self, batch: Batch) -> Input:
        """Hand *batch* on even behind a gap; return its fate."""
        seq, payload = batch
        tracker = self.tracker
        publisher_id = publisher_of(payload)
        if publisher_id is not None and self._is_foreign(publisher_id):
            return Input.IDENTITY_CHANGED
        begins = seq == 0 and tracker.last is None
        try:
            fate = self._hand_on(batch)
        except MalformedBatch as problem:
            self.report(problem)
            return Input.MALFORMED
        if publisher_id is not None:
            tracker.publisher_id = publisher_id
        tracker.advance(seq, fingerprint(payload))
        return Input.BEGINNING if begins and fate is not Input.PARTLY_KEPT else fate

    def skip(self, batch: Batch) -> None:
        """Count *batch* among those handed on, although it was not."""
        self.tracker.advance(batch.seq, fingerprint(batch.payload))

    def clear(self, reason: str) -> None:
        """Clear the consumer and start from nothing."""
        if not self._is_clear:
            self._consumer.clear(reason)
        self._is_clear = True
        self.tracker.forget()

    def resume(self, position: StreamPosition) -> None:
        """Go on from where another process was: the consumer has its picture."""
        self.tracker.resume(position)
        self._is_clear = False

    def report(self, problem: KVEventsError) -> None:
        """Count a refused message and report it."""
        self.counters.malformed += 1
        self._consumer.report(problem)

    def report_silence(self, problem: KVEventsError) -> None:
        """Report that the publisher does not respond; nothing was refused."""
        self._consumer.report(problem)

    def show(self, state: SourceState) -> None:
        """Let the consumer know of a state that it does not know of yet."""
        if state is not self.shown:
            self.shown = state
            self._consumer.change(state)

    def take_snapshot(self, batch: Batch) -> Input:
        """Hand on a part of a snapshot; return its fate.

        Raises:
            MalformedBatch: It cannot be read.
        """
        self.tracker.publisher_id = publisher_of(batch.payload) or self.tracker.publisher_id
        return self._hand_on(batch)

    # --- inside -----------------------------------------------------------------------------------

    def _by_name(self, fate: Input, publisher_id: str | None) -> Input:
        """Return the fate of a batch ahead or behind, where it names its sender."""
        if self._is_foreign(publisher_id):
            return Input.IDENTITY_CHANGED if fate is Input.GAP else fate
        is_ours = publisher_id is not None and publisher_id == self.tracker.publisher_id
        return Input.DUPLICATE if is_ours and fate is Input.BACKWARDS else fate

    def _is_foreign(self, publisher_id: str | None) -> bool:
        known = self.tracker.publisher_id
        if self.tracker.last is None:
            return False  # nothing was applied that another process could contradict
        return publisher_id is not None and known is not None and publisher_id != known

    def _proved(self, given: Input) -> Input:
        self.proves_by_number = False
        return Input.ALL_KNOWN if given is Input.NEXT else given

    def _hand_on(self, batch: Batch) -> Input:
        effect = self._consumer.apply(batch)
        self.counters.batches += 1
        self._is_clear = False
        return Input.NEXT if effect is Effect.KEPT else _FATES[effect]


def last_in_snapshot(first: Batch) -> int | None:
    """Return the last batch that the snapshot beginning with *first* includes, -1 if it includes
    none; None if this is not a snapshot.

    Ours begins with the layout, and all of it carries the number of that batch. The one proposed
    for vLLM begins by clearing the cache, and carries the number of the next batch.
    """
    if publisher_of(first.payload) is not None:
        return first.seq
    try:
        events = decode(first.payload).events
    except MalformedBatch:
        return None
    return first.seq - 1 if events and isinstance(events[0], _CLEARS) else None


def publisher_of(payload: bytes) -> str | None:
    """Return the identity a batch announces; None if it announces none or cannot be read.

    Ours announces it with the layout, the first event of a batch. The one proposed for vLLM ends
    every batch with it: a fourth element of 16 bytes.
    """
    if payload[:1] == _FOUR_ELEMENTS and payload[-_NAME_AT:-PUBLISHER_BYTES] == _NAME_FOLLOWS:
        return _last_element(payload)
    # Looking through all of a large batch would take longer than to apply a fifth of it.
    if payload.find(_NAMES_A_PUBLISHER, 0, _LOOKED_AT_BYTES) < 0:
        return None
    try:
        events = decode(payload).events
    except MalformedBatch:
        return None
    return next((event.publisher_id for event in events if isinstance(event, CacheLayout)), None)


def _last_element(payload: bytes) -> str | None:
    """Return the name that a batch of four elements ends with; None where its end only looks like
    one."""
    try:
        name = _named_decoder.decode(payload)[3]
    except UNREADABLE:
        return None
    return name.hex() if len(name) == PUBLISHER_BYTES else None
