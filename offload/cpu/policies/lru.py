"""Least recently used: the key whose last use is longest ago is evicted first."""

from __future__ import annotations

from collections import OrderedDict

from typing_extensions import override

from offload.base import OffloadKey
from offload.cpu.policies.base import EvictionPolicy


class LRUPolicy(EvictionPolicy):
    """Keys in the order of their last touch or release.

    Held keys are outside the order; their release puts them last. One pass over many keys that are
    never used again displaces everything else; `arc` withstands that.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.idle: OrderedDict[OffloadKey, None] = OrderedDict()
        """Resident and not held, the next to be evicted first."""

    @override
    def admit(self, key: OffloadKey, evict: bool) -> OffloadKey | None:
        # The key enters the order at its release.
        return self.idle.popitem(last=False)[0] if evict else None

    @override
    def touch(self, key: OffloadKey) -> None:
        if key in self.idle:
            self.idle.move_to_end(key)

    @override
    def hold(self, key: OffloadKey) -> None:
        del self.idle[key]

    @override
    def release(self, key: OffloadKey) -> None:
        self.idle[key] = None

    @override
    def discard(self, key: OffloadKey) -> None:
        self.idle.pop(key, None)

    @override
    def clear(self) -> None:
        self.idle.clear()
