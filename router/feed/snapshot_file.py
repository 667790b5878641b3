"""Snapshots over a restart: written to disk from time to time, each beside the old one, whose place
it takes when it is whole; and found by a router that starts, in the first place that has one."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from router.errors import RouterError
from router.feed.feed import Feed
from router.feed.snapshot_records import IndexSnapshot, pieces_of, read, restore
from router.index.index import PrefixIndex

logger = logging.getLogger(__name__)

FILE_NAME = "index.snapshot"


@dataclass(eq=False, repr=False)
class SnapshotKeeper:
    """Writes a snapshot from time to time. Belongs to one event loop."""

    _feed: Feed
    _directory: Path
    _interval_s: float
    saved: int = 0
    """Snapshots written."""
    failures: int = 0
    saved_bytes: int = 0
    """The size of the last one."""

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self.save()

    async def save(self) -> None:
        """Write a snapshot now; a failure is logged and counted, and the old one stays."""
        try:
            pieces = [piece async for piece in pieces_of(self._feed.sources(), self._feed.save)]
            self.saved_bytes = await asyncio.to_thread(_write, pieces, self._directory)
            self.saved += 1
        except OSError as error:
            self.failures += 1
            logger.error("the snapshot of the index cannot be written: %s", error)


def _write(pieces: list[bytes], directory: Path) -> int:
    """Replace the old snapshot; return the new one's size."""
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


def read_file(directory: Path, max_age_s: float) -> IndexSnapshot | None:
    """Read the snapshot in a directory; None, with the reason in the log, where it has no usable
    one. May take a while."""
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


@dataclass(eq=False, repr=False)
class SnapshotRestorer:
    """Fills indexes from a snapshot. Belongs to one event loop."""

    places: Sequence[Callable[[], Awaitable[IndexSnapshot | None]]]
    """Sources of snapshots, the best one first; each returns None if it has none."""
    feed: Feed
    needs_own_keys: bool
    """True if an index must keep its own keys, since others share them."""

    def __post_init__(self) -> None:
        self._found: IndexSnapshot | None = None

    async def find(self) -> None:
        """Get a snapshot, if any place has one; no stream may be followed before."""
        for place in self.places:
            self._found = await place()
            if self._found is not None:
                return

    async def fill(self, model: str, index: PrefixIndex) -> None:
        """Fill the new index of a model, before its first stream is followed.

        Args:
            index: Empty.
        """
        if self._found is None or model not in self._found.sources:
            return
        saved = await asyncio.to_thread(restore, self._found, model, index, self.needs_own_keys)
        for each in saved:
            self.feed.expect(each)

    def forget(self) -> None:
        """Drop the parts that were not used."""
        self._found = None
        self.feed.forget_expected()
