"""Remembers the blocks that can be pulled for a request: its peer's, until a pull has failed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from typing_extensions import override

from offload.base import (
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PeerLoadSpec,
    PrepareStoreOutput,
    RequestContext,
)
from offload.errors import TierStateError
from offload.request import PeerSource

PEER = "PEER"
"""The tier's name. No event carries it: a peer's blocks are in that peer's own events."""
_NO_SOURCE = PeerSource("", 0)


@dataclass(slots=True)
class PeerTierCounts:
    """Counts since the start."""

    pulled: int = 0
    """Blocks pulled."""
    failed_pulls: int = 0
    """Copies that a peer did not serve; each costs its request one start from the beginning."""


class PeerManager(OffloadingManager):
    """The peers' tiers in memory, as one tier that is only read.

    It takes nothing. A peer may have evicted a block since it was asked: then the copy fails, and
    the request, which begins again, finds nothing at its peer any more.
    """

    medium = PEER
    MOST_FAILED = 4096
    """Requests remembered whose pull has failed."""

    def __init__(self) -> None:
        self._failed: OrderedDict[str, None] = OrderedDict()
        self._counts = PeerTierCounts()

    @override
    def lookup(self, key: OffloadKey, context: RequestContext) -> LookupResult:
        held = context.at_peer is not None and key in context.at_peer.keys
        is_there = held and context.request_id not in self._failed
        return LookupResult.HIT if is_there else LookupResult.MISS

    @override
    def touch(self, keys: Iterable[OffloadKey], context: RequestContext) -> None:
        """Do nothing: the peer records its own uses."""

    @override
    def prepare_load(self, keys: Sequence[OffloadKey], context: RequestContext) -> PeerLoadSpec:
        if context.at_peer is None or not context.at_peer.keys.issuperset(keys):
            raise TierStateError("peer tier: prepare_load: a key is not at the request's peer")
        return PeerLoadSpec(context.at_peer.source, tuple(keys))

    @override
    def complete_load(
        self, keys: Sequence[OffloadKey], context: RequestContext, success: bool = True
    ) -> None:
        if success:
            self._counts.pulled += len(keys)
            return
        self._counts.failed_pulls += 1
        self._failed[context.request_id] = None
        if len(self._failed) > self.MOST_FAILED:
            self._failed.popitem(last=False)

    @override
    def prepare_store(
        self, keys: Sequence[OffloadKey], context: RequestContext
    ) -> PrepareStoreOutput:
        """Take nothing."""
        return PrepareStoreOutput((), PeerLoadSpec(_NO_SOURCE, ()), ())

    @override
    def complete_store(
        self, keys: Sequence[OffloadKey], context: RequestContext, success: bool = True
    ) -> None:
        raise TierStateError("peer tier: complete_store: nothing is stored there")

    @override
    def reset(self) -> None:
        """Do nothing: no block is held here."""

    @override
    def take_events(self) -> list[OffloadingEvent]:
        return []

    def statistics(self) -> PeerTierCounts:
        """Return the counts since the start."""
        return replace(self._counts)
