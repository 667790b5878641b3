"""Finds what a router that starts knows already: from the first place that has a snapshot."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from router.feed.feed import Feed
from router.feed.snapshot_records import IndexSnapshot, restore
from router.index import PrefixIndex


class Beginning:
    """Fills indexes with what was known before the start. Belongs to one event loop.

    Args:
        places: Where a snapshot may be had, the best one first; None from one that has none.
        needs_own_keys: As of `restore`.
    """

    def __init__(
        self,
        places: Sequence[Callable[[], Awaitable[IndexSnapshot | None]]],
        feed: Feed,
        needs_own_keys: bool,
    ) -> None:
        self._places = places
        self._feed = feed
        self._needs_own_keys = needs_own_keys
        self._found: IndexSnapshot | None = None

    async def find(self) -> None:
        """Get a snapshot, if there is one anywhere; no stream may be followed before."""
        for place in self._places:
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
        saved = await asyncio.to_thread(restore, self._found, model, index, self._needs_own_keys)
        for each in saved:
            self._feed.expect(each)

    def forget(self) -> None:
        """Drop what was not asked for."""
        self._found = None
        self._feed.forget_expected()
