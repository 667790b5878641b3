"""Defines the interface of an eviction policy.

A policy only orders keys: block ids, copies and events are the manager's. A key that the tier has a
block for is *resident*; a resident key that is being stored or loaded is *held* and is never
evicted. The manager keeps the counts, so it asks for a victim only where there is one, and a policy
never has to undo a step.
"""

from __future__ import annotations

from typing import Protocol

from offload.base import OffloadKey


class EvictionPolicy(Protocol):
    """Chooses which resident key is evicted next.

    Every call takes constant time, and its key is in the state that the method's description names.
    """

    def admit(self, key: OffloadKey, evict: bool) -> OffloadKey | None:
        """Make a key resident and held.

        Args:
            key: Not resident so far.
            evict: True if the tier has no free block, so that another key, resident and not held,
                must go. The manager passes True only if there is such a key.

        Returns:
            The evicted key; None without *evict*.
        """

    def touch(self, key: OffloadKey) -> None:
        """A resident key, held or not, was used again."""

    def hold(self, key: OffloadKey) -> None:
        """A resident key that is not held must not be evicted until its release."""

    def release(self, key: OffloadKey) -> None:
        """A held key may be evicted again.

        It was busy until now, so it counts as recent, but not as used once more.
        """

    def discard(self, key: OffloadKey) -> None:
        """A resident key, held or not, is gone without having been evicted: its copy failed."""

    def clear(self) -> None:
        """Forget everything, as if newly created."""
