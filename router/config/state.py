"""What outlives a restart."""

from __future__ import annotations

from router.config.section import Section
from router.config.values import PlacedPath, Seconds


class StateConfig(Section, frozen=True):
    """A snapshot of the index, so that a start does not read every cache from its engine."""

    directory: PlacedPath | None = None
    """Where it is kept; null: nowhere."""
    interval_s: Seconds = 60.0
    """How often it is written while the router runs; it is written at the end, too."""
    max_age_s: Seconds = 900.0
    """An older one is not used at a start."""
