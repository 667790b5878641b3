"""What a tier asks of an eviction policy.

A policy orders keys and nothing else: block ids, copies and events are the manager's. A key that
the tier has a block for is *resident*; a resident key that is being stored or loaded is *held* and
is never chosen to go. The manager keeps the counts, so it asks for a victim only where there is
one, and a policy never has to take a step back.
"""

from __future__ import annotations

from typing import Protocol

from offload.base import OffloadKey


class EvictionPolicy(Protocol):
    """Chooses which resident key goes next. Every call takes constant time and none sees a key in a
    state it does not name."""

    def admit(self, key: OffloadKey, evict: bool) -> OffloadKey | None:
        """Make *key*, not resident so far, resident and held.

        With *evict* there is no free block: another key, resident and not held, goes for it and is
        returned. The manager asks for that only if there is such a key. Without *evict* nothing
        goes and None is returned.
        """
        ...

    def touch(self, key: OffloadKey) -> None:
        """A resident key, held or not, was used again."""
        ...

    def hold(self, key: OffloadKey) -> None:
        """A resident key that is not held must not go until its release."""
        ...

    def release(self, key: OffloadKey) -> None:
        """A held key may go again. It was busy until now, so it counts as recent, but not as used
        once more."""
        ...

    def discard(self, key: OffloadKey) -> None:
        """A resident key, held or not, is gone without having been chosen: its copy failed."""
        ...

    def clear(self) -> None:
        """Forget everything, as if just made."""
        ...
