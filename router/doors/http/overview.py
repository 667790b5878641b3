"""The router at a glance: what is wrong, the last minute, and every replica in brief."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from kvevents.layout import KVCacheGroup
from kvevents.listener import ListenerStatistics
from router.doors.http.replica_views import ApproximateView, Fleet, approximate_views
from router.doors.http.views import View
from router.fleet.engine_load import EngineLoad
from router.fleet.types import ReplicaView
from router.index.base import SourceId, SourceStatistics
from router.telemetry.labels import (
    KIND_LABELS,
    duration,
    group_label,
    natural_order,
    share,
    tier_order,
)
from router.telemetry.problems import (
    Level,
    ReplicaProblem,
    SourceSummary,
    problems_of,
    summarize_source,
)
from router.telemetry.request_log import RequestLog, Totals

MAX_MODELS = 100
MAX_UNKNOWN_TOPICS = 20
"""The most unknown topics in an overview, and the most stores."""


class Headline(View, frozen=True, kw_only=True):
    """Summarises in one line whether anything is wrong."""

    level: Level
    text: str


class LastMinute(Totals, kw_only=True):
    """The last minute. The shares are for people; null where there was nothing."""

    seconds: float
    """The time covered: a minute, less after the start."""
    cached_share: str | None
    """The share of the compared prompt tokens that engines reported as cached."""
    predicted_share: str | None
    """The share of the compared prompt tokens that were predicted to be cached."""
    promised_share: str | None
    """The share of all routed prompt tokens that were predicted to be cached."""
    mispredicted_share: str | None
    """The share of the compared requests that were predicted wrongly."""


class GroupSummary(View, frozen=True, kw_only=True):
    """One KV cache group of a replica."""

    number: int
    label: str
    """Kind and reach: `window 64`."""
    kind: str | None
    """Null for a group that holds blocks before the layout is known."""
    reach: int | None
    """Tokens of its sliding window or attention chunk."""
    blocks: dict[str, int]
    """Blocks by tier, over all ranks."""
    block_size: int | None = None
    """Tokens; null before the layout is known."""


class StoreSummary(View, frozen=True, kw_only=True):
    """One store that several replicas share, as the index of one model knows it."""

    name: str
    model: str
    blocks: int
    """Over all KV cache groups, by any writer."""
    replicas: int
    """Replicas that share it and are followed."""


class ReplicaSummary(View, frozen=True, kw_only=True):
    """One replica in brief."""

    id: str
    url: str
    level: Level
    """The level of its worst problem."""
    state: str
    health: str
    seconds_in_health: float
    health_duration: str
    """The same for people: `3 min`."""
    serves: int
    """Models and aliases."""
    requests: int
    """The requests of this router, in flight there."""
    prefill_tokens: int
    """Uncached prompt tokens of these that wait for a first token."""
    engine_load: EngineLoad | None
    """Load by the engine's own count; null where it does not report any."""
    sources_configured: bool
    sources: list[SourceSummary]
    approximate: tuple[ApproximateView, ...] = ()
    """Caches whose hits are estimates, for want of events."""
    groups: list[GroupSummary]
    problems: list[ReplicaProblem]
    """The worst first."""


class Overview(View, frozen=True, kw_only=True):
    """The router at a glance."""

    started_at: float
    """Unix time."""
    now: float
    """Unix time."""
    uptime: str
    """For people: `3 min`."""
    policy: str
    under_way: int
    """Requests admitted and not ended."""
    hint_tokens: int = 0
    """Prompt tokens of hits that end where a replica was asked to keep a boundary, since the
    start."""
    headline: Headline
    shortages: list[str] = msgspec.field(default_factory=list)
    """Resources that the system refuses the router, or did within the last minute."""
    minute: LastMinute
    models: list[str]
    """The first hundred."""
    tokenizers: dict[str, str]
    """The tokeniser of each configured model's prompts: `fastokens`, `tokenizers` with the reason
    why it is not fastokens, or `replica`. The first hundred."""
    tiers: list[str]
    """Tiers that any replica has, the fastest first."""
    stores: list[StoreSummary] = msgspec.field(default_factory=list)
    """Stores that replicas share, by model and name. The first hundred."""
    listeners: list[ListenerStatistics] = msgspec.field(default_factory=list)
    """The addresses that publishers connect to (`events.listen`)."""
    kinds: dict[str, str]
    """Words for the kinds of KV cache groups."""
    replicas: list[ReplicaSummary]
    """Replicas with the worst problems first, then by name."""


def overview(fleet: Fleet, log: RequestLog, policy: str, under_way: int) -> Overview:
    """The router at a glance: what is wrong, the last minute, and of each replica the fields that a
    person looks at first. Every open page asks for it once a second; all of `/replicas` would be a
    megabyte for some hundred replicas."""
    now = time.time()
    disagreements = _by_replica(fleet.tokenizer_disagreements)
    replicas = [_summary(replica, fleet, disagreements[replica.id]) for replica in fleet.replicas]
    replicas.sort(key=lambda replica: (replica.level.severity, natural_order(replica.id)))
    return Overview(
        started_at=round(log.started_at, 3),
        now=round(now, 3),
        uptime=duration(now - log.started_at),
        policy=policy,
        under_way=under_way,
        hint_tokens=fleet.hint_tokens,
        headline=_headline(replicas, fleet.shortages),
        shortages=list(fleet.shortages),
        minute=minute_view(log.totals.total(), log.totals.seconds),
        models=sorted({model for replica in fleet.replicas for model in replica.models})[
            :MAX_MODELS
        ],
        tokenizers=dict(list(fleet.tokenizers.items())[:MAX_MODELS]),
        tiers=_tiers(replicas),
        stores=_stores(fleet)[:MAX_MODELS],
        listeners=[
            dataclasses.replace(each, unknown=each.unknown[:MAX_UNKNOWN_TOPICS])
            for each in fleet.listeners
        ],
        kinds=KIND_LABELS,
        replicas=replicas,
    )


def _tiers(replicas: Sequence[ReplicaSummary]) -> list[str]:
    held = {tier for replica in replicas for group in replica.groups for tier in group.blocks}
    return sorted(held | {"GPU"}, key=tier_order)


def _stores(fleet: Fleet) -> list[StoreSummary]:
    """Return each store once, though several sources share it."""
    shared_by: dict[tuple[str, str], set[str]] = {}
    blocks: dict[tuple[str, str], int] = {}
    for source, cache in fleet.caches.items():
        if source not in fleet.feeds:
            continue
        for name, held in cache.stores.items():
            place = fleet.feeds[source].model, name
            shared_by.setdefault(place, set()).add(source.replica)
            blocks[place] = sum(held.values())
    return [
        StoreSummary(name=name, model=model, blocks=blocks[model, name], replicas=len(replicas))
        for (model, name), replicas in sorted(shared_by.items())
    ]


def _by_replica(disagreements: Mapping[tuple[str, str], int]) -> Counter[str]:
    """Disagreements of each replica, over all its models."""
    sums: Counter[str] = Counter()
    for (_, replica_id), count in disagreements.items():
        sums[replica_id] += count
    return sums


def _headline(replicas: Sequence[ReplicaSummary], shortages: Sequence[str]) -> Headline:
    if shortages:
        # First: it may be why replicas seem to have problems.
        text = "; ".join(shortages)
        return Headline(level=Level.BAD, text=text[:1].upper() + text[1:])
    if not replicas:
        return Headline(level=Level.WARN, text="The router has no replicas.")
    wrong = sum(bool(replica.problems) for replica in replicas)
    if not wrong:
        return Headline(level=Level.GOOD, text="All replicas are well.")
    text = "1 replica has problems" if wrong == 1 else f"{wrong:,} replicas have problems"
    return Headline(level=replicas[0].level, text=text)


def minute_view(total: Totals, seconds: float) -> LastMinute:
    wrong, judged = total.over + total.under, total.compared - total.estimated
    compared, routed = total.compared_tokens, total.routed_tokens
    return LastMinute(
        **msgspec.structs.asdict(total),
        seconds=round(seconds, 1),
        cached_share=share(total.actual_tokens, compared) if compared else None,
        predicted_share=share(total.predicted_tokens, compared) if compared else None,
        promised_share=share(total.promised_tokens, routed) if routed else None,
        mispredicted_share=share(wrong, judged) if judged else None,
    )


def _summary(replica: ReplicaView, fleet: Fleet, disagreements: int) -> ReplicaSummary:
    ids = [SourceId(replica.id, source.dp_rank) for source in replica.sources]
    caches = [fleet.caches[source_id] for source_id in ids if source_id in fleet.caches]
    sources = [
        summarize_source(
            source_id.dp_rank,
            fleet.feeds.get(source_id),
            fleet.caches.get(source_id),
            fleet.trusts.get(source_id),
        )
        for source_id in ids
    ]
    approximate = approximate_views(replica.id, fleet)
    ranks = frozenset(found.dp_rank for found in approximate)
    estimated = None if fleet.approximate is None else ranks
    problems = problems_of(replica, sources, disagreements, estimated)
    return ReplicaSummary(
        id=replica.id,
        url=replica.url,
        level=problems[0].level if problems else Level.GOOD,
        state=replica.state,
        health=replica.health,
        seconds_in_health=round(replica.seconds_in_health, 1),
        health_duration=duration(replica.seconds_in_health),
        serves=len(replica.models),
        requests=replica.load.requests,
        prefill_tokens=replica.load.prefill_tokens,
        engine_load=replica.engine_load,
        sources_configured=replica.sources_configured,
        sources=sources,
        approximate=approximate,
        groups=_groups(caches),
        problems=problems,
    )


def _groups(caches: Sequence[SourceStatistics]) -> list[GroupSummary]:
    """The groups of the first rank whose layout is known, since all ranks serve the same model; and
    groups that hold blocks before the layout is known."""
    layout = next((cache.layout for cache in caches if cache.layout is not None), None)
    known = layout.groups if layout else ()
    held: dict[int, dict[str, int]] = {number: {} for number in range(len(known))}
    for cache in caches:
        for (number, tier), count in cache.blocks.items():
            tiers = held.setdefault(number, {})
            tiers[tier] = tiers.get(tier, 0) + count
    return [
        _group(number, known[number] if 0 <= number < len(known) else None, blocks)
        for number, blocks in sorted(held.items())
    ]


def _group(number: int, group: KVCacheGroup | None, blocks: dict[str, int]) -> GroupSummary:
    if group is None:
        label = f"group {number}"
        return GroupSummary(number=number, label=label, kind=None, reach=None, blocks=blocks)
    kind, reach = group.kind.value, group.sliding_window or group.attention_chunk_size
    return GroupSummary(
        number=number,
        label=group_label(kind, reach),
        kind=kind,
        reach=reach,
        blocks=blocks,
        block_size=group.block_size,
    )
