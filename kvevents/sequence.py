"""Classifies a sequence number: the next batch, a duplicate, a gap or a restart; no sockets.

A number does not identify its sender: a restarted engine counts from 0 again and may have passed
the old number by the time we look. So the payloads of the last few thousand batches are remembered
as fingerprints: the same number with another payload comes from another process, and a replay that
returns the batch applied last proves that it is still the same one. It does not prove that all
batches before it came from there: a relay may have passed on another engine's for a moment, in
numbers that fit. So a replay begins some batches earlier, as far as none has shown them yet:

    applied   96 97 98 99 100         up to 97 a replay showed all
    asked from   97
    replay       97 98 99' 100        99 was another engine's
"""

from __future__ import annotations

import secrets
from array import array
from functools import partial
from typing import NamedTuple

from kvevents.stream_state import Input

try:
    import xxhash
except ImportError:  # slower without
    xxhash = None  # type: ignore[assignment, unused-ignore]

_SEED = secrets.randbits(64)


class StreamPosition(NamedTuple):
    """The position up to which a stream was applied, to go on from in another process."""

    seq: int
    """The batch applied last."""
    fingerprint: int
    """The fingerprint of that batch, by the seed of `fingerprint_seed`."""
    publisher_id: str | None
    has_ring: bool
    """True once a replay has shown a batch."""


def fingerprint_seed() -> int | None:
    """Return the seed that a `StreamPosition` depends on; None where a position is of no use
    elsewhere."""
    return None if xxhash is None else int(fingerprint.keywords["seed"])


def use_fingerprint_seed(seed: int) -> None:
    """Take over another process's seed, before the first stream is followed."""
    if xxhash is not None:
        fingerprint.keywords["seed"] = seed


def _hash(payload: bytes) -> int:
    return hash(payload) & 2**64 - 1


# 64 bits that identify a payload to this process: of a batch of 33 KB in half a microsecond, where
# Python's own hash takes 20 and a digest 50. They leave the process only with their seed.
fingerprint: partial[int] = (
    partial(xxhash.xxh3_64_intdigest, seed=_SEED) if xxhash is not None else partial(_hash)
)


class SequenceTracker:
    """Tracks how far one stream was applied, and its last batches.

    Fingerprints are kept in a ring of *remembered* slots; a batch's slot is `seq % remembered`:

        remembered = 4, last = 9, first = 7 (batch 6 was lost)
        slot      0     1     2     3
        holds     8     9     -     7

    Args:
        remembered: Batches whose fingerprints are kept, 8 bytes each; at least 1.
    """

    def __init__(self, remembered: int = 4096) -> None:
        self.last: int | None = None
        """The number applied last; None before the first."""
        self.expected = 0
        """The number of the next batch."""
        self.publisher_id: str | None = None
        """The identity of the publisher, where it names itself."""
        self.proven: int | None = None
        """The last batch that a replay or a snapshot has confirmed; None: none yet."""
        self.ring_answers = 0
        """Replays that showed a batch. Once there was one, an empty ring is another process's."""
        self._remembered = remembered
        self._fingerprints = array("Q", bytes(8 * remembered))
        self._first = 0
        """The first batch from which none up to `last` is missing; as many as fit are
        remembered."""

    def classify(self, seq: int, digest: int) -> Input:
        """Return the fate of a batch by its number, after everything up to `last`.

        `NEXT`, `DUPLICATE`, `GAP` or `BACKWARDS`. Nothing is changed.
        """
        if seq == self.expected:
            return Input.NEXT
        if seq > self.expected:
            return Input.GAP
        return Input.DUPLICATE if self.recall(seq) == digest else Input.BACKWARDS

    def recall(self, seq: int) -> int | None:
        """Return the fingerprint of an applied batch; None if it is not remembered."""
        if self.last is None or not self._first <= seq <= self.last < seq + self._remembered:
            return None
        return self._fingerprints[seq % self._remembered]

    def advance(self, seq: int, digest: int) -> None:
        """Note that a batch was applied; any between it and the one before are lost."""
        if seq != self.expected or self.last is None:
            self._first = seq
        self._keep(seq, digest)

    def unproven_since(self, most: int) -> int | None:
        """Return where a replay has to begin to confirm the applied batches; `last` at the latest,
        None before the first batch.

        Args:
            most: The most batches before `last`.
        """
        if self.last is None:
            return None
        earliest = self._first if self.proven is None else max(self._first, self.proven)
        remembered = min(most, self._remembered - 1)
        return min(self.last, max(earliest, self.last - remembered))

    def prove(self) -> None:
        """Note that a replay has confirmed everything up to `last`."""
        self.proven = self.last

    def jump(self, seq: int) -> None:
        """Note that everything up to *seq* is known from elsewhere, without payloads."""
        self.last = self.proven = seq
        self.expected = self._first = seq + 1

    def learn(self, digest: int) -> None:
        """Note the fingerprint of batch `last`, after a `jump`."""
        if self.last is not None:
            self._first = min(self._first, self.last)
            self._keep(self.last, digest)

    def position(self) -> StreamPosition | None:
        """Return the position of the stream; None where nothing proves it to another process."""
        known = None if self.last is None else self.recall(self.last)
        if self.last is None or known is None:
            return None
        return StreamPosition(self.last, known, self.publisher_id, self.ring_answers > 0)

    def resume(self, position: StreamPosition) -> None:
        """Go on from where another process was."""
        self.jump(position.seq)
        self.learn(position.fingerprint)
        self.publisher_id = position.publisher_id
        self.ring_answers = int(position.has_ring)

    def forget(self) -> None:
        """Start over, with an unknown process."""
        self.last = self.publisher_id = self.proven = None
        self.expected = self._first = 0

    def _keep(self, seq: int, digest: int) -> None:
        self._fingerprints[seq % self._remembered] = digest
        self.last = seq
        self.expected = seq + 1
