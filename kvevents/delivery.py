"""What has been handed on to the consumer: every batch once, in order, and whether anything is
missing; no sockets."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kvevents.codec import decode
from kvevents.errors import KVEventsError, MalformedBatch
from kvevents.events import CacheLayout
from kvevents.messages import Batch
from kvevents.sequence import SequenceTracker, Verdict, fingerprint


class SourceState(Enum):
    """How far what the consumer holds can be trusted."""

    CONNECTING = "connecting"
    """No connection: not yet, or not any more."""
    RECOVERING = "recovering"
    """Something is missing or unverified, and being asked for."""
    LIVE = "live"
    """Everything that was published has been handed on."""
    SUSPECT = "suspect"
    """Something is missing and cannot be had: until a snapshot, a restart, or a cache that is
    cleared as a whole."""
    DEAD = "dead"
    """Nobody listens any more."""


class Effect(Enum):
    """What a batch did to the consumer's picture."""

    KEPT = "kept"
    INCOMPLETE = "incomplete"
    """Part of it could not be kept: from here on something is missing."""
    KNOWN_AGAIN = "known again"
    """Nothing published before matters any more: whatever was missing no longer is."""


class Consumer(Protocol):
    """Takes what a subscriber hands on. Called on the event loop, never twice at once; must not
    raise but as documented."""

    def apply(self, batch: Batch) -> Effect:
        """Take the next batch; raises `MalformedBatch` if it cannot be read, and then nothing of it
        was taken."""
        ...

    def clear(self, reason: str) -> None:
        """Forget everything: what follows starts from nothing."""
        ...

    def change(self, state: SourceState) -> None:
        """The state is another one now."""
        ...

    def report(self, problem: KVEventsError) -> None:
        """Something that came over the wire was refused; the message is free of its contents."""
        ...


@dataclass(slots=True)
class Counters:
    """What happened so far."""

    batches: int = 0
    duplicates: int = 0
    discarded: int = 0
    """Batches that the publisher, asked for them, turned out never to have sent."""
    malformed: int = 0
    gaps: int = 0
    questions: int = 0
    """To the replay endpoint, most of them to make sure that nothing is missing."""
    unanswered: int = 0
    """Questions without an answer, or with one that was cut short."""
    replays: int = 0
    """Answers that brought batches."""
    snapshots: int = 0
    restarts: int = 0
    overflow: int = 0
    """Batches dropped because too many came during a recovery."""
    connections: int = 0


class Taken(Enum):
    """What became of a batch."""

    APPLIED = "applied"
    DUPLICATE = "duplicate"
    GAP = "gap"
    RESTART = "restart"
    MALFORMED = "malformed"


_REFUSED = {
    Verdict.DUPLICATE: Taken.DUPLICATE,
    Verdict.GAP: Taken.GAP,
    Verdict.RESTART: Taken.RESTART,
}


class Delivery:
    """Hands batches to one consumer and knows how complete its picture is."""

    def __init__(self, consumer: Consumer, counters: Counters) -> None:
        self.tracker = SequenceTracker()
        self.is_complete = False
        """True while the consumer holds everything that was published."""
        self._consumer = consumer
        self._counters = counters
        self._is_empty = True

    def take(self, batch: Batch) -> Taken:
        """Hand *batch* on if it is the next one."""
        mark = fingerprint(batch.payload)
        verdict = self.tracker.classify(batch.seq, mark)
        if verdict is Verdict.NEXT:
            return self._apply(batch, mark)
        self._counters.duplicates += verdict is Verdict.DUPLICATE
        return _REFUSED[verdict]

    def go_on(self, batch: Batch, taken: Taken) -> None:
        """Go on with *batch*, of which `take` said *taken*: what lies before it is lost, or itself
        if it cannot be read."""
        if taken is Taken.RESTART or self._is_foreign(publisher_of(batch.payload)):
            self._counters.restarts += 1
            self.clear("restart")
        mark = fingerprint(batch.payload)
        if taken is not Taken.MALFORMED:
            self.is_complete &= taken is not Taken.GAP
            taken = self._apply(batch, mark)
        if taken is not Taken.APPLIED:
            self.tracker.advance(batch.seq, mark)
            self.is_complete = False

    def clear(self, reason: str) -> None:
        """Start from nothing."""
        if not self._is_empty:
            self._consumer.clear(reason)
        self._is_empty = True
        self.is_complete = False
        self.tracker.forget()

    def report(self, problem: KVEventsError) -> None:
        """Count and pass on what was refused."""
        self._counters.malformed += 1
        self._consumer.report(problem)

    # --- a snapshot -------------------------------------------------------------------------------

    def begin_snapshot(self) -> None:
        """What follows is the whole state."""
        self.clear("snapshot")
        self.is_complete = True

    def take_snapshot(self, batch: Batch) -> None:
        """Hand a part of the state on; raises `MalformedBatch`."""
        self.tracker.publisher_id = publisher_of(batch.payload) or self.tracker.publisher_id
        self._hand_on(batch)

    def end_snapshot(self, seq: int) -> None:
        """The state was that behind batch *seq*."""
        self.tracker.jump(seq)

    # --- inside -----------------------------------------------------------------------------------

    def _is_foreign(self, publisher_id: str | None) -> bool:
        known = self.tracker.publisher_id
        return publisher_id is not None and known is not None and publisher_id != known

    def _apply(self, batch: Batch, mark: bytes) -> Taken:
        publisher_id = publisher_of(batch.payload)
        if self._is_foreign(publisher_id):
            return Taken.RESTART
        if self.tracker.last is None:
            self.is_complete = batch.seq == 0
        try:
            self._hand_on(batch)
        except MalformedBatch as problem:
            self.report(problem)
            return Taken.MALFORMED
        self.tracker.publisher_id = publisher_id or self.tracker.publisher_id
        self.tracker.advance(batch.seq, mark)
        return Taken.APPLIED

    def _hand_on(self, batch: Batch) -> None:
        effect = self._consumer.apply(batch)
        self._counters.batches += 1
        self._is_empty = False
        if effect is not Effect.KEPT:
            self.is_complete = effect is Effect.KNOWN_AGAIN


def publisher_of(payload: bytes) -> str | None:
    """The identity a batch announces; None if it announces none or cannot be read."""
    # Looking for the name costs a tenth of decoding, and layouts are rare.
    if b"CacheLayout" not in payload:
        return None
    try:
        events = decode(payload).events
    except MalformedBatch:
        return None
    return next((event.publisher_id for event in events if isinstance(event, CacheLayout)), None)
