"""Finds a snapshot for a router that starts: from the first place that has one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from router.feed.feed import Feed
from router.feed.snapshot_records import IndexSnapshot, restore
from router.index.index import PrefixIndex


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
