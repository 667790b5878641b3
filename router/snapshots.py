"""The index over a restart: a snapshot on disk, from which a router that starts goes on.

A source is saved with the place of its stream, as of one moment, and only while nothing of it is
missing. The router that starts asks the engine for the batch that was applied last and for what
came since: if it is the same process, the source is whole again after a few batches, and otherwise
it is rebuilt as it would have been anyhow. So an old snapshot costs time at worst, and no truth.

A file is written beside the old one and takes its place when it is whole. It holds block hashes,
and tokens of runs that wait for their parents: treat it like a log of prompts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvevents.sequence import fingerprint_seed, use_fingerprint_seed
from router.errors import RouterError
from router.feed import Feed, SavedSource
from router.index import DumpError, PrefixIndex, SourceId
from router.index.dump import FrameWriter, read_frames

logger = logging.getLogger(__name__)

VERSION = 1
FILE_NAME = "index.snapshot"
_MAGIC = b"kvroute snapshot"


class SavedHead(msgspec.Struct, frozen=True, tag=True):
    """The first record."""

    saved_at: float
    """Unix time."""
    seed: int
    """Of the fingerprints of batches."""


class SnapshotSource(msgspec.Struct, frozen=True, tag=True):
    """One source: where its stream was, and its blocks, as its index exports them."""

    saved: SavedSource
    records: list[bytes]


class SnapshotError(RouterError):
    """There is no snapshot that is of use."""


class IndexSnapshot(NamedTuple):
    """One that was read."""

    age_s: float
    sources: dict[str, list[SnapshotSource]]
    """By model."""


class SnapshotKeeper:
    """Writes a snapshot from time to time. Belongs to one event loop.

    Args:
        feed: Has the sources.
        directory: Where it is written.
        interval_s: How often.
    """

    def __init__(self, feed: Feed, directory: Path, interval_s: float) -> None:
        self._feed = feed
        self._directory = directory
        self._interval_s = interval_s
        self.saved = self.failures = 0
        """Snapshots."""
        self.saved_bytes = 0
        """Of the last one."""

    async def run(self) -> None:
        """Save until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.save()

    async def save(self) -> None:
        """Write one now; a failure is logged and counted, and the one before stays."""
        try:
            pieces = await frames_of(self._feed)
            self.saved_bytes = await asyncio.to_thread(write, pieces, self._directory)
            self.saved += 1
        except OSError as error:
            self.failures += 1
            logger.error("the snapshot of the index cannot be written: %s", error)


async def frames_of(feed: Feed) -> list[bytes]:
    """A snapshot of all sources that are whole, in pieces to be written one after the other. Other
    work goes on between two sources."""
    writer = FrameWriter(_MAGIC, VERSION)
    head = msgspec.msgpack.encode(SavedHead(time.time(), fingerprint_seed() or 0))
    pieces = [writer.head, writer.framed(head), head]
    for source in feed.sources():
        record = _record_of(feed, source)
        if record is not None:
            pieces += [await asyncio.to_thread(writer.framed, record), record]
    pieces.append(writer.framed(b""))
    return pieces


def _record_of(feed: Feed, source: SourceId) -> bytes | None:
    found = feed.save(source)
    return None if found is None else msgspec.msgpack.encode(SnapshotSource(*found))


def write(pieces: list[bytes], directory: Path) -> int:
    """Put a snapshot in the place of the one before; return its size. May take a while.

    Args:
        pieces: Of `frames_of`.
        directory: Where; it is made if it is not there.
    Raises:
        OSError: It cannot be written; the one before stays.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / FILE_NAME
    written = path.with_suffix(f".{os.getpid()}")
    descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        written.replace(path)
    except OSError:
        written.unlink(missing_ok=True)
        raise
    return sum(map(len, pieces))


def read(data: bytes, max_age_s: float, now: float) -> IndexSnapshot:
    """The snapshot behind the bytes of one.

    Args:
        data: All of them.
        max_age_s: An older one is not used: its engines have gone on for too long.
        now: Unix time.
    Raises:
        SnapshotError: It is too old, or from the future.
        DumpError: It is damaged, or of another version.
    """
    records: Iterator[memoryview] = read_frames(memoryview(data), _MAGIC, VERSION)
    try:
        head = msgspec.msgpack.decode(next(records, b""), type=SavedHead)
        found = [msgspec.msgpack.decode(record, type=SnapshotSource) for record in records]
    except msgspec.MsgspecError as error:
        raise DumpError(f"snapshot: a record is none of version {VERSION}") from error
    age_s = now - head.saved_at
    if not -1 <= age_s <= max_age_s:
        raise SnapshotError(f"it is {age_s:.0f} s old; state.max_age_s is {max_age_s:g}")
    sources: dict[str, list[SnapshotSource]] = {}
    for each in found:
        sources.setdefault(each.saved.model, []).append(each)
    use_fingerprint_seed(head.seed)
    return IndexSnapshot(age_s, sources)


def read_file(directory: Path, max_age_s: float) -> IndexSnapshot | None:
    """The snapshot in a directory; None, with the reason in the log, where there is none of use.
    To be called before any stream is followed.

    Args:
        directory: Where it was written.
        max_age_s: As of `read`.
    """
    path = directory / FILE_NAME
    try:
        found = read(path.read_bytes(), max_age_s, time.time())
    except FileNotFoundError:
        logger.info(
            "no snapshot of the index in %s: every cache is read from its engine", directory
        )
        return None
    except (OSError, RouterError) as error:
        logger.warning("%s is not used: %s", path, error)
        return None
    count = sum(map(len, found.sources.values()))
    logger.info("index: %d sources as of %.0f s ago, from %s", count, found.age_s, path)
    return found


def restore(snapshot: IndexSnapshot, model: str, index: PrefixIndex, feed: Feed) -> None:
    """Fill the new index of a model; the log says if its part is of no use.

    Args:
        snapshot: Its part for the model is taken out.
        model: Its name.
        index: Empty; it stays so where another implementation wrote the records.
        feed: Goes on with the sources.
    """
    sources = snapshot.sources.pop(model, [])
    if not sources:
        return
    head = sources[0].records[:1]
    try:
        index.restore([*head, *(record for each in sources for record in each.records[1:])])
    except DumpError as error:
        logger.warning("model %s: its part of the snapshot is not used: %s", model, error)
        return
    for each in sources:
        feed.expect(each.saved)
