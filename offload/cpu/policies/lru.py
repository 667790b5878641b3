"""Least recently used: the key whose last use is longest ago goes first."""

from __future__ import annotations

from collections import OrderedDict

from offload.base import OffloadKey


class LRUPolicy:
    """Keys in the order of their last touch or release. Held keys are in nobody's order: their
    release puts them last.

    One pass over many keys that are never used again pushes out everything else; `arc` withstands
    that.
    """

    def __init__(self, capacity: int) -> None:  # noqa: ARG002 - every policy is made with the capacity; this one needs none
        self.idle: OrderedDict[OffloadKey, None] = OrderedDict()
        """Resident and not held, the next to go first."""

    def admit(self, key: OffloadKey, evict: bool) -> OffloadKey | None:  # noqa: ARG002 - it enters the order at its release
        return self.idle.popitem(last=False)[0] if evict else None

    def touch(self, key: OffloadKey) -> None:
        if key in self.idle:
            self.idle.move_to_end(key)

    def hold(self, key: OffloadKey) -> None:
        del self.idle[key]

    def release(self, key: OffloadKey) -> None:
        self.idle[key] = None

    def discard(self, key: OffloadKey) -> None:
        self.idle.pop(key, None)

    def clear(self) -> None:
        self.idle.clear()
