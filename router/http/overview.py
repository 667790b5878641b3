"""The router at a glance, as plain data: the last minute, and of each replica what a person looks
for first.

`/replicas` says all of it; asked once a second by every open page, that would be a megabyte for
some hundred replicas.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from router.feed import SourceFeedStatistics
from router.index import SourceId, SourceStatistics
from router.observability.problems import SourceGlance, glance, problems_of
from router.observability.request_log import RequestLog, RollingTotals
from router.replicas import EventSource, ReplicaView

MAX_MODELS = 100


def overview_answer(
    policy: str,
    under_way: int,
    request_log: RequestLog,
    views: Sequence[ReplicaView],
    statistics: Mapping[SourceId, SourceStatistics],
    feeds: Mapping[SourceId, SourceFeedStatistics],
    tokenizer_disagreements: Mapping[tuple[str, str], int],
) -> dict[str, Any]:
    """`GET /overview`.

    Args:
        policy: The routing policy's name.
        under_way: Requests admitted and not ended.
        request_log: The log of routed requests.
        views: Every replica.
        statistics: The blocks of every source.
        feeds: The stream of every source.
        tokenizer_disagreements: Probes that came out differently, by model and replica.
    """
    disagreements = _by_replica(tokenizer_disagreements)
    return {
        "started_at": round(request_log.started_at, 3),
        "now": round(time.time(), 3),
        "policy": policy,
        "under_way": under_way,
        "minute": _minute(request_log.totals),
        "models": sorted({model for view in views for model in view.models})[:MAX_MODELS],
        "replicas": [
            _replica(view, statistics, feeds, disagreements.get(view.id, 0)) for view in views
        ],
    }


def _minute(totals: RollingTotals) -> dict[str, Any]:
    return {**msgspec.to_builtins(totals.total()), "seconds": round(totals.seconds, 1)}


def _by_replica(disagreements: Mapping[tuple[str, str], int]) -> dict[str, int]:
    """Probes that a replica tokenises differently, over all its models."""
    sums: dict[str, int] = {}
    for (_, replica_id), count in disagreements.items():
        sums[replica_id] = sums.get(replica_id, 0) + count
    return sums


def _replica(
    view: ReplicaView,
    statistics: Mapping[SourceId, SourceStatistics],
    feeds: Mapping[SourceId, SourceFeedStatistics],
    disagreements: int,
) -> dict[str, Any]:
    """One replica; blocks are summed over its ranks."""
    sources = [_source(view.id, source, statistics, feeds) for source in view.sources]
    found = [
        known
        for source in view.sources
        if (known := statistics.get(SourceId(view.id, source.dp_rank))) is not None
    ]
    return {
        "id": view.id,
        "url": view.url,
        "state": view.state,
        "health": view.health,
        "seconds_in_health": round(view.seconds_in_health, 1),
        "serves": len(view.models),
        "requests": view.load.requests,
        "prefill_tokens": view.load.prefill_tokens,
        "gauges": None
        if view.engine_load is None
        else [view.engine_load.running, view.engine_load.waiting, view.engine_load.kv_cache_usage],
        "sources_configured": view.sources_configured,
        "sources": msgspec.to_builtins(sources),
        "groups": _groups(found),
        "blocks": _blocks(found),
        "problems": msgspec.to_builtins(problems_of(view, sources, disagreements)),
    }


def _source(
    replica_id: str,
    source: EventSource,
    statistics: Mapping[SourceId, SourceStatistics],
    feeds: Mapping[SourceId, SourceFeedStatistics],
) -> SourceGlance:
    feed, known = (
        feeds.get(SourceId(replica_id, source.dp_rank)),
        statistics.get(SourceId(replica_id, source.dp_rank)),
    )
    return glance(source.dp_rank, feed, known)


def _groups(found: Iterable[SourceStatistics]) -> list[dict[str, Any]]:
    """Of the first rank whose layout is known: they are all the same model's."""
    layout = next((known.layout for known in found if known.layout is not None), None)
    if layout is None:
        return []
    return [
        {"kind": group.kind.value, "reach": group.sliding_window or group.attention_chunk_size}
        for group in layout.groups
    ]


def _blocks(found: Iterable[SourceStatistics]) -> list[tuple[int, str, int]]:
    """(group, tier, blocks)."""
    sums: dict[tuple[int, str], int] = {}
    for known in found:
        for place, count in known.blocks.items():
            sums[place] = sums.get(place, 0) + count
    return [(group, tier, count) for (group, tier), count in sorted(sums.items())]
