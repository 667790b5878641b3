"""Holds the state that decisions read."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from router.fleet.load import LoadTracker
from router.index.base import SourceId
from router.index.mirror import ApproximateCaches, Mirror
from router.routing.recent_prefixes import RecentPrefixes

RECENT_STEP = 64
"""Tokens between two keys in the memory of recent prefixes; the same for all prompts of a model."""


@dataclass(frozen=True, slots=True)
class Known:
    """Holds the state that decisions read."""

    load: LoadTracker
    """Counts what this router has in flight at each replica."""
    suspects: Collection[SourceId] = ()
    """The sources of which events were lost, so that their hits are doubtful; it changes with
    them."""
    recent: RecentPrefixes | None = None
    """Which prefixes were just sent where; None: what the mirror has in prefill."""
    mirror: Mirror | None = None
    """Follows every cache: what it is doing, and evicts next; its books are those of the load.
    None: that is not known."""
    approximate: ApproximateCaches | None = None
    """Estimates what caches hold without events, with the mirror; None: that is not estimated."""
    engine_load_stale_after_s: float = 10.0
    """Age from which an engine's own load no longer counts."""
