"""Remembers the prefixes that were just sent to each cache: a prediction that stands in until the
engines' events report them.

The events about a prompt's blocks arrive only after its prefill. Without this memory, the router
would spread a burst of equal prompts over all replicas, and each would compute the same prefix.
The compiled core keeps it, so that what it decides alone counts as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from kvevents.field_docs import gauge
from router._core import Books
from router._core import RecentPrefixes as CoreRecentPrefixes
from router.index.base import SourceId

RECENT_STEP = 64
"""Tokens between two keys of a prompt, here and in estimates; the same for all prompts of a
model."""


@dataclass(frozen=True, slots=True)
class RecentStatistics:
    """Entries held now, and counts since the start."""

    entries: Annotated[int, gauge("kvroute_recent_prefix_keys")]
    """Pieces of 64 prompt tokens remembered as recently sent."""
    evicted: int
    """Entries dropped early, to make room."""
    truncated: int
    """Prompts of which only the first keys were remembered, for lack of room."""


class RecentPrefixes:
    """Remembers prefix keys by cache. The caller passes the time: *now* is seconds on a monotonic
    clock.

    Args:
        ttl_s: How long an entry counts. A few seconds: prefill, and the event's way here.
        max_entries: Bound on keys over all caches, some 80 bytes each, and 150 for each prompt.
    """

    def __init__(self, books: Books, ttl_s: float = 5.0, max_entries: int = 262_144) -> None:
        if not ttl_s > 0 or max_entries < 1:
            raise ValueError(
                f"recent: ttl_s {ttl_s} must be above 0 and max_entries {max_entries} at least 1"
            )
        self.core = CoreRecentPrefixes(books, ttl_s, max_entries)
        self._books = books

    def remember(self, source: SourceId, keys: Sequence[int], now: float) -> None:
        """Remember that a prompt was just sent to a cache."""
        self.core.remember(self._books.cache_id(*source), keys, now)

    def match(self, source: SourceId, keys: Sequence[int], step: int, now: float) -> int:
        """Return how many leading tokens of a prompt were recently sent to a cache.

        Args:
            keys: The prompt's keys at every multiple of *step* tokens, as given to `remember`. Use
                one step for all prompts of a model: a prompt is found only where its own first key
                was remembered.
            step: Tokens from one key to the next.
            now: Seconds, on the clock of `remember`.
        """
        return dict(self.core.match(keys, step, now)).get(self._books.cache_id(*source), 0)

    def forget(self, replica: str) -> None:
        """Forget what was sent to a replica, at all its ranks: it restarted, failed, or was
        removed."""
        for cache in self._books.cache_ids_of(replica):
            self.core.forget(cache)

    def statistics(self) -> RecentStatistics:
        return RecentStatistics(*self.core.counts())
