"""A snapshot on its way to another process: bounded, and sealed with the secret that both share, so
that only our own processes' bytes are decoded."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from kvevents.stream_state import SourceState
from router.errors import NoSnapshot, Overloaded
from router.feed.feed import Feed
from router.feed.snapshot_records import IndexSnapshot, SnapshotError, pieces_of, read

MAX_AT_ONCE = 4
"""Snapshots that one process sends at a time."""
_PIECE_BYTES = 256 * 1024
_SEAL_BYTES = 32


@dataclass(eq=False, repr=False)
class Sender:
    """Sends snapshots to others. Belongs to one event loop."""

    feed: Feed
    secret: bytes
    max_bytes: int
    """Bound on a snapshot: a larger one ends without its seal."""
    within_s: float
    """The time for one, after which it is given up."""
    clock: Callable[[], float] = time.monotonic
    """A monotonic clock, in seconds."""

    def __post_init__(self) -> None:
        self._under_way = 0
        self.sent = 0
        """Snapshots sent whole."""

    def open(self) -> AsyncIterator[bytes]:
        """Make a snapshot, to be sent piece by piece, and its seal.

        Raises:
            NoSnapshot: Nothing here is of use to others.
            Overloaded: The most that may be sent at a time are under way.
        """
        sources = self.feed.sources()
        if not any(self.feed.state(source) is SourceState.LIVE for source in sources):
            raise NoSnapshot("this router knows no cache yet")
        if self._under_way >= MAX_AT_ONCE:
            raise Overloaded(f"sends {MAX_AT_ONCE} snapshots already")
        return self._sealed_pieces()

    async def _sealed_pieces(self) -> AsyncIterator[bytes]:
        ends_at, left = self.clock() + self.within_s, self.max_bytes
        seal = _seal(self.secret)
        self._under_way += 1
        try:
            async for piece in pieces_of(self.feed):
                left -= len(piece)
                if left < 0:
                    return
                seal.update(piece)
                for start in range(0, len(piece), _PIECE_BYTES):
                    if self.clock() > ends_at:
                        return
                    yield piece[start : start + _PIECE_BYTES]
            yield seal.digest()
            self.sent += 1
        finally:
            self._under_way -= 1


def read_sealed(data: bytes | bytearray, secret: bytes, max_age_s: float) -> IndexSnapshot:
    """Read a snapshot that another process sent. May take a while.

    Args:
        max_age_s: See `read`; also how far its clock may be ahead.
    Raises:
        SnapshotError: It is not whole, sealed with another secret, or too old.
        DumpError: See `read`.
    """
    view = memoryview(data)
    content, found = view[:-_SEAL_BYTES], bytes(view[-_SEAL_BYTES:])
    seal = _seal(secret)
    seal.update(content)
    if seal.digest() != found:
        raise SnapshotError(f"{len(data)} bytes: cut off, or sealed with another secret")
    return read(content, max_age_s, time.time(), ahead_s=max_age_s)


def _seal(secret: bytes) -> hashlib.blake2b:
    key = hashlib.blake2b(secret, digest_size=_SEAL_BYTES, person=b"snapshot seal").digest()
    return hashlib.blake2b(digest_size=_SEAL_BYTES, key=key)
