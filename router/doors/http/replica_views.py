"""Replicas in full: their state, their event streams, and the index's view of their caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from kvevents.layout import KVCacheGroup
from kvevents.listener import ListenerStatistics
from router.doors.http.views import View
from router.feed.source_feed import SourceFeedStatistics
from router.fleet.types import EventSource, ReplicaView
from router.index.base import SourceId, SourceStatistics
from router.index.mirror_types import ApproximateStatistics
from router.telemetry.self_repair import TrustStatistics


@dataclass(frozen=True, slots=True)
class Fleet:
    """All replicas and their caches, as of one moment.

    Taken once for a whole response: taken again for each of 256 replicas, it would hold up every
    stream for a second.
    """

    replicas: Sequence[ReplicaView]
    caches: Mapping[SourceId, SourceStatistics]
    feeds: Mapping[SourceId, SourceFeedStatistics]
    tokenizer_disagreements: Mapping[tuple[str, str], int]
    """By model and replica: probes that it tokenises differently from the router."""
    trusts: Mapping[SourceId, TrustStatistics] = field(default_factory=dict)
    """The trust in the predictions for a source, once one was compared."""
    approximate: Mapping[SourceId, ApproximateStatistics] | None = None
    """The caches whose hits are estimates; None where nothing is estimated."""
    listeners: Sequence[ListenerStatistics] = ()
    """The addresses that publishers connect to."""
    tokenizers: Mapping[str, str] = field(default_factory=dict)
    """The tokeniser, by model."""
    shortages: Sequence[str] = ()
    """Resources that the system refuses the router, in sentences."""
    hint_tokens: int = 0
    """Prompt tokens of hits that end where a replica was asked to keep a boundary."""


class BlockCount(View, frozen=True, kw_only=True):
    """Blocks that one KV cache group holds in one tier."""

    group: int
    tier: str
    blocks: int
    unit_tokens: int | None
    """Tokens that a lower tier stores and loads together; null for the GPU."""


class CacheView(View, frozen=True, kw_only=True):
    """The index's knowledge of one cache, and its assumptions. Sizes in tokens."""

    blocks: list[BlockCount]
    stores: dict[str, list[BlockCount]] = msgspec.field(default_factory=dict)
    """Blocks in the stores that it shares, by store and by any writer."""
    unplaced_blocks: int
    """Their prefix is not known; without a known hash function no prompt can find them."""
    waiting_runs: int
    """Events that wait for their parent block."""
    given_up_runs: int
    is_incomplete: bool
    """Blocks were refused or given up, or an event that took blocks away could not be read."""
    hash_algorithm: str | None
    """The engine's hash function, where it is known."""
    groups: Sequence[KVCacheGroup]
    hash_block_size: int | None
    scheduler_block_size: int | None
    """Hits are multiples of this."""
    eagle: Sequence[int] | None
    """Groups that drop a block of each hit, since they hold a drafter's layers."""
    prefix_replay_tokens: int | None
    """Hits up to this length are worth nothing."""
    assumptions: Sequence[str]
    """Facts that are assumed rather than known, in sentences."""


class ApproximateView(View, frozen=True, kw_only=True):
    """The estimate that stands in for the events of a cache."""

    dp_rank: int
    tokens: int
    """Tokens that the cache may hold."""
    capacity_tokens: int
    """The size up to which reuse was seen to last."""
    trust: float
    """The share of the tokens promised lately that was cached."""


class SourceView(EventSource, frozen=True, kw_only=True):
    """One event stream and the cache it describes."""

    feed: SourceFeedStatistics | None
    """Null before it is followed."""
    cache: CacheView | None
    predictions: TrustStatistics | None
    """Null before one was compared."""


class ReplicaDetails(ReplicaView, frozen=True, kw_only=True):
    """Everything known of a replica, as of now. Ages in seconds; secrets are left out."""

    sources: tuple[SourceView, ...]
    approximate: tuple[ApproximateView, ...] = ()
    """Caches whose hits are estimates."""


class ReplicaList(View, frozen=True, kw_only=True):
    """Every replica."""

    replicas: list[ReplicaDetails]


def replica_details(fleet: Fleet) -> list[ReplicaDetails]:
    """Every replica: its state, its load, and each of its event streams with the state of its
    cache."""
    return [_details(replica, fleet) for replica in fleet.replicas]


def _details(replica: ReplicaView, fleet: Fleet) -> ReplicaDetails:
    sources = []
    for source in replica.sources:
        place = SourceId(replica.id, source.dp_rank)
        cache = fleet.caches.get(place)
        sources.append(
            SourceView(
                **msgspec.structs.asdict(source),
                feed=fleet.feeds.get(place),
                cache=None if cache is None else _cache(cache),
                predictions=fleet.trusts.get(place),
            )
        )
    return ReplicaDetails(
        **{**msgspec.structs.asdict(replica), "sources": tuple(sources)},
        approximate=approximate_views(replica.id, fleet),
    )


def approximate_views(replica_id: str, fleet: Fleet) -> tuple[ApproximateView, ...]:
    """The caches of a replica whose hits are estimates."""
    return tuple(
        ApproximateView(
            dp_rank=source.dp_rank,
            tokens=found.tokens,
            capacity_tokens=found.capacity_tokens,
            trust=round(found.trust, 4),
        )
        for source, found in (fleet.approximate or {}).items()
        if source.replica == replica_id
    )


def _cache(cache: SourceStatistics) -> CacheView:
    layout = cache.layout
    return CacheView(
        blocks=[
            BlockCount(
                group=group, tier=tier, blocks=count, unit_tokens=cache.units.get((group, tier))
            )
            for (group, tier), count in sorted(cache.blocks.items())
        ],
        stores={
            name: [
                BlockCount(group=group, tier=tier, blocks=count, unit_tokens=None)
                for (group, tier), count in sorted(blocks.items())
            ]
            for name, blocks in cache.stores.items()
        },
        unplaced_blocks=cache.unplaced,
        waiting_runs=cache.waiting.runs,
        given_up_runs=cache.waiting.given_up,
        is_incomplete=cache.is_incomplete,
        hash_algorithm=cache.hash_algorithm,
        groups=() if layout is None else layout.groups,
        hash_block_size=None if layout is None else layout.hash_block_size,
        scheduler_block_size=None if layout is None else layout.scheduler_block_size,
        eagle=None if layout is None else sorted(layout.eagle),
        prefix_replay_tokens=None if layout is None else layout.prefix_replay_tokens,
        assumptions=cache.assumptions,
    )
