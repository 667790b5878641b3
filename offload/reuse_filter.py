"""A tier that takes only blocks which several requests used: most prompts' tails never recur.

A request *uses* a block when it touches it or offers it for storing. A lookup does not count (see
`OffloadingManager`), and a request counts once per block however often it returns: one that waits
is looked up again and again, and one that is refused offers again and again. A bounded number of
recently used keys is remembered; the least recently used one is forgotten first, and its uses are
counted from zero again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from typing_extensions import override

from offload.base import (
    LookupResult,
    LowerTierSpec,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    RequestContext,
)
from offload.errors import CacheConfigError


@dataclass(slots=True)
class ReuseFilterStatistics:
    """Keys remembered now, and counts since the start."""

    tracked_keys: int = 0
    let_through: int = 0
    """Keys offered and passed on to the tier."""
    held_back: int = 0
    """Keys offered and left out."""
    forgotten: int = 0
    """Keys displaced by others."""


class ReuseFilter(OffloadingManager):
    """Wraps an `OffloadingManager`; its `prepare_store` leaves out blocks with too few users.

    Blocks left out are missing from `keys_to_store`, like a block that the tier holds already. If
    the tier refuses (None), the uses still count.
    """

    def __init__(self, manager: OffloadingManager, min_uses: int, max_tracked: int) -> None:
        """
        Args:
            manager: The tier behind; its own statistics are reached through it.
            min_uses: How many requests must have used a block, the one that offers it included. 1
                lets everything through.
            max_tracked: How many blocks are remembered; should be at least as many as the tier
                holds. Memory is bounded by `max_tracked` keys with `min_uses` request ids each.

        Raises:
            CacheConfigError: A number is below 1.
        """
        if min_uses < 1:
            raise CacheConfigError(f"reuse filter: min_uses {min_uses} must be at least 1")
        if max_tracked < 1:
            raise CacheConfigError(f"reuse filter: max_tracked {max_tracked} must be at least 1")
        self.manager = manager
        self.enable_events = manager.enable_events
        self.min_uses = min_uses
        self.max_tracked = max_tracked
        self._users: OrderedDict[OffloadKey, tuple[str, ...]] = OrderedDict()
        """Up to `min_uses` different requests per block, the least recently used block first."""
        self._counts = ReuseFilterStatistics()

    @property
    @override
    def medium(self) -> str:
        return self.manager.medium

    @override
    def on_new_request(self, context: RequestContext) -> None:
        self.manager.on_new_request(context)

    @override
    def on_request_finished(self, context: RequestContext) -> None:
        self.manager.on_request_finished(context)

    @override
    def lookup(self, key: OffloadKey, context: RequestContext) -> LookupResult:
        return self.manager.lookup(key, context)

    @override
    def touch(self, keys: Iterable[OffloadKey], context: RequestContext) -> None:
        """Count a use of each block, also of blocks that the tier does not hold yet."""
        used = list(keys)
        for key in used:
            self._count_use(key, context.request_id)
        self.manager.touch(used, context)

    @override
    def prepare_load(self, keys: Sequence[OffloadKey], context: RequestContext) -> LowerTierSpec:
        return self.manager.prepare_load(keys, context)

    @override
    def complete_load(
        self, keys: Sequence[OffloadKey], context: RequestContext, success: bool = True
    ) -> None:
        self.manager.complete_load(keys, context, success)

    @override
    def prepare_store(
        self, keys: Sequence[OffloadKey], context: RequestContext
    ) -> PrepareStoreOutput | None:
        # The last key first, so that a prompt's tail is forgotten before its head, which the tail
        # needs.
        uses = {key: self._count_use(key, context.request_id) for key in reversed(keys)}
        passing = [key for key in dict.fromkeys(keys) if uses[key] >= self.min_uses]
        self._counts.let_through += len(passing)
        self._counts.held_back += len(uses) - len(passing)
        return self.manager.prepare_store(passing, context)

    @override
    def complete_store(
        self, keys: Sequence[OffloadKey], context: RequestContext, success: bool = True
    ) -> None:
        self.manager.complete_store(keys, context, success)

    @override
    def restored_block_hashes(self) -> Mapping[OffloadKey, Sequence[bytes]]:
        return self.manager.restored_block_hashes()

    @override
    def reset(self) -> None:
        """Reset the tier and forget the uses."""
        self._users.clear()
        self.manager.reset()

    @override
    def take_events(self) -> list[OffloadingEvent]:
        return self.manager.take_events()

    def statistics(self) -> ReuseFilterStatistics:
        """Return the keys remembered now, and counts since the start."""
        return replace(self._counts, tracked_keys=len(self._users))

    def _count_use(self, key: OffloadKey, request_id: str) -> int:
        """Return how many requests used the block, this one included; it stops counting at
        `min_uses`."""
        users = self._users.pop(key, ())
        if len(users) < self.min_uses and request_id not in users:
            users = (*users, request_id)
        self._users[key] = users
        if len(self._users) > self.max_tracked:
            self._users.popitem(last=False)
            self._counts.forgotten += 1
        return len(users)
