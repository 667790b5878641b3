"""A snapshot as bytes, and back into an index.

The content of its records is that of the implementation of the index; here they are framed, so that
a snapshot that was cut off, damaged or written by another version is refused as a whole:

    magic, version    16 + 2 bytes
    a frame each      length: 8 bytes; CRC-32 of all records so far: 4 bytes; the record
    the end           a frame of length 0
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import NamedTuple

import msgspec

from kvevents.errors import UNREADABLE
from kvevents.sequence import fingerprint_seed, use_fingerprint_seed
from router.errors import RouterError
from router.feed.source_feed import SavedSource
from router.index.base import SourceId
from router.index.index import PrefixIndex
from router.index.sources import DumpError

logger = logging.getLogger(__name__)

VERSION = 2
"""Of version 1, keys of blocks of numbered adapters and of token pairs meant other prompts."""
_MAGIC = b"kvroute snapshot"
_VERSION = struct.Struct(">H")
_FRAME = struct.Struct(">QI")


class SavedHead(msgspec.Struct, frozen=True, tag=True):
    """The first record."""

    saved_at: float
    """Unix time."""
    seed: int
    """The seed of the fingerprints of batches."""


class SnapshotSource(msgspec.Struct, frozen=True, tag=True):
    """One source: the position of its stream, and its blocks as its index exports them."""

    saved: SavedSource
    records: list[bytes]


class SnapshotError(RouterError):
    """A snapshot is of no use."""


class IndexSnapshot(NamedTuple):
    """A snapshot that was read."""

    age_s: float
    sources: dict[str, list[SnapshotSource]]
    """The sources, by model."""


async def pieces_of(
    sources: Iterable[SourceId],
    save: Callable[[SourceId], tuple[SavedSource, list[bytes]] | None],
) -> AsyncIterator[bytes]:
    """A snapshot of all sources that are whole, in pieces to be written one after the other. Other
    work goes on between two sources.

    Args:
        save: Exports a source and its blocks; returns None where it is not whole.
    """
    writer = FrameWriter()
    head = msgspec.msgpack.encode(SavedHead(time.time(), fingerprint_seed() or 0))
    yield writer.head + writer.framed(head) + head
    for source in sources:
        found = save(source)
        if found is not None:
            record = msgspec.msgpack.encode(SnapshotSource(*found))
            yield await asyncio.to_thread(writer.framed, record)
            yield record
    yield writer.framed(b"")


def read(
    data: bytes | memoryview, max_age_s: float, now: float, ahead_s: float = 1.0
) -> IndexSnapshot:
    """Read a snapshot, before any stream is followed.

    Args:
        max_age_s: An older one is not used: its engines have gone on for too long.
        now: Unix time.
        ahead_s: How far the writer's clock may be ahead.
    Raises:
        SnapshotError: It is too old, or from the future.
        DumpError: It is damaged, or of another version.
    """
    records: Iterator[memoryview] = read_frames(memoryview(data))
    try:
        head = msgspec.msgpack.decode(next(records, b""), type=SavedHead)
        found = [msgspec.msgpack.decode(record, type=SnapshotSource) for record in records]
    except UNREADABLE as error:
        raise DumpError(f"snapshot: a record is not of version {VERSION}") from error
    age_s = now - head.saved_at
    if not -ahead_s <= age_s <= max_age_s:
        raise SnapshotError(f"it is {age_s:.0f} s old; state.max_age_s is {max_age_s:g}")
    sources: dict[str, list[SnapshotSource]] = {}
    for each in found:
        sources.setdefault(each.saved.model, []).append(each)
    use_fingerprint_seed(head.seed)
    return IndexSnapshot(age_s, sources)


def restore(
    snapshot: IndexSnapshot, model: str, index: PrefixIndex, needs_own_keys: bool = False
) -> list[SavedSource]:
    """Fill the new index of a model; return the sources that it now holds. The log shows if the
    snapshot's part is of no use. May take a while.

    Args:
        snapshot: Its part for the model is taken out.
        index: Empty; it stays so where another implementation wrote the records.
        needs_own_keys: True if the index must keep its own keys, since others share them.
    """
    sources = snapshot.sources.pop(model, [])
    if not sources:
        return []
    head, key_space, before = sources[0].records[:1], index.key_space, list(index.export())
    try:
        index.restore([*head, *(record for each in sources for record in each.records[1:])])
        if needs_own_keys and index.key_space != key_space:
            index.restore(before)
            raise DumpError("its keys were made with another secret")
    except DumpError as error:
        logger.warning("model %s: its part of the snapshot is not used: %s", model, error)
        return []
    return [each.saved for each in sources]


# --- frames ---------------------------------------------------------------------------------------


class FrameWriter:
    """Frames records, one after the other."""

    head = _MAGIC + _VERSION.pack(VERSION)

    def __init__(self) -> None:
        self._checksum = 0

    def framed(self, record: bytes) -> bytes:
        """Return the frame in front of a record; an empty record is the end."""
        self._checksum = zlib.crc32(record, self._checksum)
        return _FRAME.pack(len(record), self._checksum)


def read_frames(data: memoryview) -> Iterator[memoryview]:
    """Read the records that a `FrameWriter` framed.

    Raises:
        DumpError: It is incomplete, damaged, or of another version.
    """
    position, checksum, length = len(FrameWriter.head), 0, -1
    if bytes(data[: len(_MAGIC)]) != _MAGIC or len(data) < position:
        raise DumpError(f"index dump of {len(data)} bytes: it must start with {_MAGIC.decode()!r}")
    (found,) = _VERSION.unpack_from(data, len(_MAGIC))
    if found != VERSION:
        raise DumpError(f"index dump: version {found} must be {VERSION}")
    while length:
        length, expected, position = _frame(data, position)
        record = data[position : position + length]
        checksum = zlib.crc32(record, checksum)
        if checksum != expected:
            raise DumpError(f"index dump: damaged before byte {position + length}")
        position += length
        if record:
            yield record
    if position != len(data):
        raise DumpError(f"index dump: {len(data) - position} bytes follow its end")


def _frame(data: memoryview, position: int) -> tuple[int, int, int]:
    """Read the frame at *position*: the record's length, the checksum, the record's start."""
    start = position + _FRAME.size
    if start > len(data):
        raise DumpError(f"index dump: cut off at byte {len(data)}, inside a frame")
    length, checksum = _FRAME.unpack_from(data, position)
    if start + length > len(data):
        raise DumpError(
            f"index dump: cut off at byte {len(data)}; the record at byte {start} has {length}"
        )
    return length, checksum, start
