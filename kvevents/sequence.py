"""What a sequence number means: the next batch, a duplicate, a gap or a restart; no sockets.

A number alone does not say who sent it: a restarted engine counts from 0 again and may have passed
the old number by the time we look. So the payloads of the last few thousand batches are remembered
as fingerprints: the same number with another payload comes from another process, and a replay that
begins with the batch applied last proves that it is still the same one.
"""

from __future__ import annotations

import hashlib
from enum import Enum

_FINGERPRINT_BYTES = 8


class Verdict(Enum):
    """What a batch is to one who has applied everything up to `last`."""

    NEXT = "next"
    DUPLICATE = "duplicate"
    """Applied before; relays repeat and delay messages."""
    GAP = "gap"
    """Ahead of the next one."""
    RESTART = "restart"
    """Behind, and not known as a duplicate: another process, or too old to tell. Verify before
    anything is thrown away."""


def fingerprint(payload: bytes) -> bytes:
    """8 bytes that stand for a payload."""
    return hashlib.blake2b(payload, digest_size=_FINGERPRINT_BYTES).digest()


class SequenceTracker:
    """How far one stream was applied, and what its last batches were.

    Args:
        remembered: Batches whose fingerprints are kept, 8 bytes each.
    """

    def __init__(self, remembered: int = 4096) -> None:
        if remembered < 1:
            raise ValueError(
                f"remembered is {remembered}: the batch applied last must be remembered"
            )
        self.last: int | None = None
        """The number applied last; None before the first."""
        self.publisher_id: str | None = None
        """The process behind the stream, where it names itself."""
        self._remembered = remembered
        self._fingerprints = bytearray(remembered * _FINGERPRINT_BYTES)
        self._first = 0
        """Oldest number remembered; the newest is `last`, and none between is missing."""

    def classify(self, seq: int, mark: bytes) -> Verdict:
        """What the batch *seq* with the fingerprint *mark* is. Changes nothing."""
        expected = 0 if self.last is None else self.last + 1
        if seq == expected:
            return Verdict.NEXT
        if seq > expected:
            return Verdict.GAP
        return Verdict.DUPLICATE if self.recall(seq) == mark else Verdict.RESTART

    def recall(self, seq: int) -> bytes | None:
        """The fingerprint of an applied batch; None if it is not remembered."""
        if self.last is None or not self._first <= seq <= self.last:
            return None
        slot = seq % self._remembered * _FINGERPRINT_BYTES
        return bytes(self._fingerprints[slot : slot + _FINGERPRINT_BYTES])

    def advance(self, seq: int, mark: bytes) -> None:
        """The batch *seq* was applied; what lies between it and the one before is lost."""
        follows = self.last is not None and seq == self.last + 1
        self._first = max(self._first, seq - self._remembered + 1) if follows else seq
        self._keep(seq, mark)

    def jump(self, seq: int) -> None:
        """Everything up to *seq* is known from elsewhere, no batch of it by its payload."""
        self.last = seq
        self._first = seq + 1

    def learn(self, mark: bytes) -> None:
        """The batch *last* turns out to have this fingerprint."""
        if self.last is not None:
            self._first = min(self._first, self.last)
            self._keep(self.last, mark)

    def forget(self) -> None:
        """Begin anew, with a process of which nothing is known."""
        self.last = self.publisher_id = None
        self._first = 0

    def _keep(self, seq: int, mark: bytes) -> None:
        slot = seq % self._remembered * _FINGERPRINT_BYTES
        self._fingerprints[slot : slot + _FINGERPRINT_BYTES] = mark
        self.last = seq
