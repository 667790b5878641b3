"""A tier that takes only blocks which several requests used: most prompts' tails are never seen
again.

A request *uses* a block when it touches it or offers it for storing. A lookup is no use, as base.py
says, and a request counts once for a block however often it comes back to it: one that waits is
looked up again and again, and one that is refused offers again and again. The names of blocks used
lately are kept in bounded number; the least recently used one is forgotten first and has to be used
anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class ReuseFilterStatistics:
    """Totals since the start, but for `tracked_keys`."""

    tracked_keys: int
    let_through: int
    """Keys offered and passed on to the tier."""
    held_back: int
    """Keys offered and left out."""
    forgotten: int
    """Keys pushed out by others."""


class ReuseFilter:
    """An `OffloadingManager` round another one, whose `prepare_store` leaves out what too few
    requests used.

    What is left out is not in `keys_to_store`, as a block that the tier holds already. A refusal by
    the tier (None) leaves the uses counted: they took place.

    Args:
        manager: The tier behind; reach its own statistics here.
        min_uses: How many requests must have used a block, the one that offers it included. 1 lets
            everything through.
        max_tracked: How many blocks are remembered. Fewer than the tier holds makes little sense.
            Memory is bounded by `max_tracked` keys with `min_uses` request ids each.

    Raises:
        CacheConfigError: A number below 1.
    """

    def __init__(self, manager: OffloadingManager, min_uses: int, max_tracked: int) -> None:
        if min_uses < 1:
            raise CacheConfigError(f"reuse filter: min_uses {min_uses} must be at least 1")
        if max_tracked < 1:
            raise CacheConfigError(f"reuse filter: max_tracked {max_tracked} must be at least 1")
        self.manager = manager
        self.min_uses = min_uses
        self.max_tracked = max_tracked
        self._users: OrderedDict[OffloadKey, tuple[str, ...]] = OrderedDict()
        """Up to `min_uses` different requests per block, the least recently used block first."""
        self._let_through = 0
        self._held_back = 0
        self._forgotten = 0

    @property
    def medium(self) -> str:
        return self.manager.medium

    def lookup(self, key: OffloadKey, context: RequestContext) -> LookupResult:
        return self.manager.lookup(key, context)

    def touch(self, keys: Iterable[OffloadKey], context: RequestContext) -> None:
        """Blocks that the tier does not hold count too: that they were wanted is what the filter
        waits for."""
        used = list(keys)
        for key in used:
            self._count_use(key, context.request_id)
        self.manager.touch(used, context)

    def prepare_load(self, keys: Sequence[OffloadKey], context: RequestContext) -> LowerTierSpec:
        return self.manager.prepare_load(keys, context)

    def complete_load(
        self, keys: Sequence[OffloadKey], context: RequestContext, success: bool = True
    ) -> None:
        self.manager.complete_load(keys, context, success)

    def prepare_store(
        self, keys: Sequence[OffloadKey], context: RequestContext
    ) -> PrepareStoreOutput | None:
        # The last key first, so that a prompt's tail is forgotten before its head, without which it
        # is of no use.
        uses = {key: self._count_use(key, context.request_id) for key in reversed(keys)}
        passing = [key for key in dict.fromkeys(keys) if uses[key] >= self.min_uses]
        self._let_through += len(passing)
        self._held_back += len(uses) - len(passing)
        return self.manager.prepare_store(passing, context)

    def complete_store(
        self, keys: Sequence[OffloadKey], context: RequestContext, success: bool = True
    ) -> None:
        self.manager.complete_store(keys, context, success)

    def reset(self) -> None:
        """Forgets the uses too."""
        self._users.clear()
        self.manager.reset()

    def take_events(self) -> list[OffloadingEvent]:
        return self.manager.take_events()

    def statistics(self) -> ReuseFilterStatistics:
        return ReuseFilterStatistics(
            len(self._users), self._let_through, self._held_back, self._forgotten
        )

    def _count_use(self, key: OffloadKey, request_id: str) -> int:
        """How many requests used the block, this one included; stops counting at `min_uses`."""
        users = self._users.pop(key, ())
        if len(users) < self.min_uses and request_id not in users:
            users = (*users, request_id)
        self._users[key] = users
        if len(self._users) > self.max_tracked:
            self._users.popitem(last=False)
            self._forgotten += 1
        return len(users)
