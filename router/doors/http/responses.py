"""The parts of the router whose state responses show, and the bodies made from it."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from kvevents.listener import ListenerStatistics
from router.config import RouterConfig
from router.doors.desk import Desk
from router.doors.http.access import Guard
from router.doors.http.proxied_paths import ProxiedPaths
from router.doors.http.views import (
    ApproximateView,
    BlockCount,
    CacheView,
    ExcludedReplica,
    FeedView,
    GroupSummary,
    Headline,
    HistoryView,
    HitView,
    HourView,
    LastMinute,
    ListenerView,
    ModelEntry,
    OverlapView,
    Overview,
    PromptView,
    RankedReplica,
    ReplicaDetails,
    ReplicaSummary,
    RequestsView,
    RequestView,
    RouteView,
    SelectionView,
    SourceView,
    StoreSummary,
    TrustView,
    UnknownTopicView,
)
from router.doors.names import address_of, worker_number
from router.feed.feed import Feed, SourceFeedStatistics
from router.feed.snapshot_transfer import Sender
from router.fleet.registry import ReplicaRegistry
from router.fleet.replica import Replica
from router.fleet.types import ReplicaView
from router.index import GroupHit, SourceId, SourceStatistics
from router.index.approximate import ApproximateCaches
from router.index.mirror_types import ApproximateStatistics
from router.plane.attempts import Attempt
from router.policies import Candidate, Ranked
from router.routing.admission import Admission
from router.routing.decision import Decision
from router.routing.dispatcher import Dispatcher
from router.routing.models import ModelSet
from router.routing.replica_tokenizers import TokenizerCheck
from router.telemetry.history import STEP_S, History, Hour
from router.telemetry.labels import (
    KIND_LABELS,
    duration,
    group_label,
    natural_order,
    share,
    tier_order,
)
from router.telemetry.metrics import RouterMetrics
from router.telemetry.problems import Level, problems_of, summarize_source
from router.telemetry.readiness import Readiness
from router.telemetry.request_log import RequestLog, RoutedRequest, Totals
from router.telemetry.self_repair import SelfRepair, TrustStatistics
from router.telemetry.shortages import Shortages

MAX_MODELS = 100
MAX_UNKNOWN_TOPICS = 20
"""In an overview; as many stores."""


@dataclasses.dataclass(frozen=True, slots=True)
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
    trusts: Mapping[SourceId, TrustStatistics] = dataclasses.field(default_factory=dict)
    """How far the predictions for a source are believed, once one was compared."""
    approximate: Mapping[SourceId, ApproximateStatistics] | None = None
    """Of the caches whose hits are estimates; None where nothing is estimated."""


@dataclasses.dataclass(frozen=True, slots=True)
class ApiParts:
    """The parts of a router that the endpoints read or change."""

    config: RouterConfig
    """As the router was started."""
    current_config: Callable[[], RouterConfig]
    """As it is now."""
    guard: Guard
    proxied_paths: ProxiedPaths
    admission: Admission
    readiness: Readiness
    dispatcher: Dispatcher
    desk: Desk
    models: ModelSet
    registry: ReplicaRegistry
    feed: Feed
    tokenizer_check: TokenizerCheck
    repair: SelfRepair
    approximate: ApproximateCaches | None
    sender: Sender | None
    """Of snapshots to other routers; None where there are none."""
    request_log: RequestLog
    metrics: RouterMetrics
    history: History
    shortages: Shortages
    render_metrics: Callable[[], Awaitable[bytes]]
    render_exemplars: Callable[[], Awaitable[bytes]] | None
    """The same in OpenMetrics' format; None where no exemplars are kept."""

    def fleet(self) -> Fleet:
        """All replicas and their caches, now."""
        return self._fleet_of(self.registry.snapshot())

    def details(self, replica_id: str) -> ReplicaDetails:
        """One replica, now."""
        only = [view for view in self.registry.snapshot() if view.id == replica_id]
        return replica_details(self._fleet_of(only))[0]

    def overview(self) -> Overview:
        """The router at a glance, now."""
        return overview(
            self.fleet(),
            self.request_log,
            self.config.policy.name,
            self.admission.under_way,
            self.shortages.present(),
            self.models.tokenizers(),
            sum(model.steering.statistics().hit_tokens for model in self.models),
            self.feed.listeners(),
        )

    def healthy(self) -> list[Replica]:
        """The healthy replicas."""
        return [replica for replica in self.registry.replicas() if replica.is_healthy]

    def _fleet_of(self, replicas: Sequence[ReplicaView]) -> Fleet:
        return Fleet(
            replicas,
            self.models.index_statistics(),
            self.feed.statistics(),
            self.tokenizer_check.disagreements,
            self.repair.statistics(),
            None if self.approximate is None else self.approximate.statistics(),
        )


# --- a route --------------------------------------------------------------------------------------


def route_view(decision: Decision, explains: bool = False) -> RouteView:
    """Where a request would go. Some replica must be able to serve it.

    Args:
        decision: On the request.
        explains: Whether to say who else would serve it, and how much of it is cached where.
    """
    best = decision.ranking[0]
    view = RouteView(
        replica=best.candidate.replica_id,
        dp_rank=best.candidate.dp_rank,
        model=decision.model_name,
        policy=decision.policy,
        prompt_tokens=decision.prompt_tokens,
        cost=round(best.cost, 3),
        hit=_hit(best.candidate),
        expected_tokens=decision.expected_tokens(best.candidate),
        reason=best.reason,
        routing_seconds=round(decision.routing_s, 6),
    )
    return _explained(view, decision) if explains else view


def _explained(view: RouteView, decision: Decision) -> RouteView:
    return msgspec.structs.replace(
        view,
        prompts=[
            PromptView(
                tokens=len(prompt.token_ids),
                coverage=prompt.coverage.value,
                reason=prompt.reason,
                lora_name=prompt.lora_name,
            )
            for prompt in decision.tokenized
        ],
        ranking=[_ranked(decision, ranked) for ranked in decision.ranking],
        excluded=[
            ExcludedReplica(replica=candidate.replica_id, reason=candidate.obstacle or "")
            for candidate in decision.excluded
        ],
    )


def _ranked(decision: Decision, ranked: Ranked) -> RankedReplica:
    assert decision.model is not None
    index, candidate = decision.model.index, ranked.candidate
    source = decision.source_of(candidate)
    prompts = decision.prompts if index.holds(source) else ()
    return RankedReplica(
        replica=candidate.replica_id,
        dp_rank=candidate.dp_rank,
        cost=round(ranked.cost, 3),
        reason=ranked.reason,
        hit=_hit(candidate),
        recent_tokens=candidate.recent_tokens,
        groups=[index.explain(prompt, source) for prompt in prompts],
    )


def _hit(candidate: Candidate) -> HitView:
    return HitView(
        gpu_cached_tokens=candidate.gpu_cached_tokens,
        cached_tokens=candidate.cached_tokens,
        by_tier=dict(candidate.by_tier),
        pull_from=candidate.pull_from,
        suspect=candidate.suspect,
        approximate=candidate.is_approximate,
    )


_BLOCK_SIZE = 16
_CPU_TIERS = ("CPU", "cpu")


def selection_view(
    decision: Decision,
    attempt: Attempt | None = None,
    selection_id: str = "",
    fields: Mapping[str, Any] = MappingProxyType({}),
) -> SelectionView:
    """Where a gateway should send a request. Some replica must be able to serve it.

    Args:
        decision: On the request.
        attempt: How it is sent there, where that is booked.
        selection_id: Of the reservation, or of what may be reserved later.
        fields: To be set in the body.
    """
    best = decision.ranking[0] if attempt is None else decision.ranked(attempt.replica_id)
    candidate = best.candidate
    replica = decision.replicas[candidate.replica_id]
    source, model = decision.source_of(candidate), decision.model
    layout = None if model is None else model.index.announced(source)
    return SelectionView(
        selection_id=selection_id,
        model_name=decision.model_name,
        replica=replica.id,
        worker_id=worker_number(replica.id),
        dp_rank=candidate.dp_rank,
        endpoint=str(replica.origin),
        address=address_of(replica),
        headers={} if attempt is None else _headers_of(replica, attempt),
        body_fields=dict(fields),
        block_size=_BLOCK_SIZE if layout is None else layout.hash_block_size or _BLOCK_SIZE,
        overlap=_overlap(candidate),
        isl_tokens=decision.prompt_tokens,
        effective_prefill_tokens=max(decision.prompt_tokens - candidate.cached_tokens, 0),
        expected_tokens=decision.expected_tokens(candidate),
        groups=_group_hits(decision, source) if attempt is None else [],
        hit=_hit(candidate),
        reason=best.reason,
        policy=decision.policy,
        cost=round(best.cost, 3) if math.isfinite(best.cost) else 0.0,
    )


def _group_hits(decision: Decision, source: SourceId) -> list[Sequence[GroupHit]]:
    model = decision.model
    if model is None or not model.index.holds(source):
        return []
    return [model.index.explain(prompt, source) for prompt in decision.prompts]


def _headers_of(replica: Replica, attempt: Attempt) -> dict[str, str]:
    """What the engine is told; not the replica's key, which the gateway has or has not."""
    names = {name for name, _ in replica.headers}
    return {
        name.decode(): value.decode("latin-1")
        for name, value in attempt.request_headers
        if value is not None and name not in names
    }


def _overlap(candidate: Candidate) -> OverlapView:
    gpu = candidate.gpu_cached_tokens
    rank = "0" if candidate.dp_rank is None else str(candidate.dp_rank)
    in_memory = sum(tokens for tier, tokens in candidate.by_tier if tier in _CPU_TIERS)
    return OverlapView(
        longest_matched=candidate.cached_tokens,
        gpu=gpu,
        dp={rank: gpu},
        cpu=min(gpu + in_memory, candidate.cached_tokens),
        disk=candidate.cached_tokens,
    )


def model_list(
    names: Mapping[str, str | None], serving_of: Callable[[str], Sequence[Replica]]
) -> dict[str, Any]:
    """The models that clients may ask for: a `ModelList` whose entries keep all that engines say.

    Args:
        names: Every known model and adapter, with the model that an adapter is for.
        serving_of: The healthy replicas that can take requests for a name.
    """
    entries = [
        model_entry(name, parent, serving)
        for name, parent in sorted(names.items())
        if (serving := serving_of(name))
    ]
    return {"object": "list", "data": entries}


def model_entry(name: str, parent: str | None, serving: Sequence[Replica]) -> dict[str, Any]:
    """One model: a `ModelEntry`, and all else that the first replica says of it.

    Args:
        name: Of the model or adapter.
        parent: The model that an adapter is for.
        serving: The healthy replicas that serve it.
    """
    entry = ModelEntry(id=name, created=int(time.time()), root=parent or name, parent=parent)
    said = [_entry_of(name, replica) for replica in serving]
    lengths = [length for one in said if type(length := one.get("max_model_len")) is int]
    found = {**msgspec.to_builtins(entry), **(said[0] if said else {})}
    found |= {"id": name, "parent": parent}
    if lengths:
        # A client must not send more than the replica that its request may go to takes.
        found["max_model_len"] = min(lengths)
    return found


def _entry_of(name: str, replica: Replica) -> dict[str, Any]:
    """What a replica says of a model; where it has another name for it, how much that takes."""
    found = replica.model_entries.get(name)
    if found is not None:
        return found
    lengths = [
        length
        for other in replica.served.models
        if type(length := replica.model_entries.get(other, {}).get("max_model_len")) is int
    ]
    return {"max_model_len": min(lengths)} if lengths else {}


# --- requests -------------------------------------------------------------------------------------


def requests_view(log: RequestLog, after: int, limit: int) -> RequestsView:
    """The requests that changed last.

    Args:
        log: Where requests are recorded.
        after: Only those that changed after this change.
        limit: At most this many.
    """
    return RequestsView(
        started_at=round(log.started_at, 3),
        change=log.last_change,
        requests=[_request(request) for request in log.since(after, limit)],
    )


def _request(request: RoutedRequest) -> RequestView:
    return RequestView(
        number=request.number,
        change=request.change,
        arrived_at=round(request.arrived_at, 3),
        request_id=request.request_id,
        trace_id=request.trace_id,
        path=request.path,
        model=request.model,
        policy=request.policy,
        stream=request.stream,
        prompt_tokens=request.prompt_tokens,
        unknown=request.unknown,
        replica=request.replica,
        dp_rank=request.dp_rank,
        reason=request.reason,
        attempts=request.attempts,
        last_failure=request.last_failure,
        predicted=HitView(
            gpu_cached_tokens=request.gpu_cached_tokens,
            cached_tokens=request.cached_tokens,
            by_tier=dict(request.by_tier),
            pull_from=request.pull_from,
            suspect=request.suspect,
            approximate=request.approximate,
        ),
        expected=request.expected_tokens,
        actual=request.actual_tokens,
        verdict=request.verdict,
        failed=request.has_failed,
        status=request.status,
        end=request.end,
        first_byte_ms=_milliseconds(request.first_byte_s),
        total_ms=_milliseconds(request.seconds),
    )


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)


# --- replicas in full -----------------------------------------------------------------------------


def replica_details(fleet: Fleet) -> list[ReplicaDetails]:
    """Every replica: its state, its load, and each of its event streams with what is known of the
    cache and what is assumed."""
    return [_details(replica, fleet) for replica in fleet.replicas]


def _details(replica: ReplicaView, fleet: Fleet) -> ReplicaDetails:
    sources = []
    for source in replica.sources:
        place = SourceId(replica.id, source.dp_rank)
        feed, cache = fleet.feeds.get(place), fleet.caches.get(place)
        sources.append(
            SourceView(
                **msgspec.structs.asdict(source),
                feed=None if feed is None else _feed(feed),
                cache=None if cache is None else _cache(cache),
                predictions=_trust(fleet.trusts.get(place)),
            )
        )
    return ReplicaDetails(
        **{**msgspec.structs.asdict(replica), "sources": tuple(sources)},
        approximate=_approximate(replica.id, fleet),
    )


def _approximate(replica_id: str, fleet: Fleet) -> tuple[ApproximateView, ...]:
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


def _trust(trust: TrustStatistics | None) -> TrustView | None:
    if trust is None:
        return None
    cause = None if trust.cause is None else trust.cause.value
    return TrustView(state=trust.state, rebuilds=trust.rebuilds, cause=cause)


def _feed(feed: SourceFeedStatistics) -> FeedView:
    applied = dataclasses.asdict(feed.applied)
    return FeedView(model=feed.model, state=feed.state, stream=feed.stream, **applied)


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


# --- the overview ---------------------------------------------------------------------------------


def _listener(found: ListenerStatistics) -> ListenerView:
    unknown = [
        UnknownTopicView(topic=each.topic, reason=each.reason, messages=each.messages)
        for each in found.unknown[:MAX_UNKNOWN_TOPICS]
    ]
    return ListenerView(
        endpoint=found.endpoint, topics=found.topics, messages=found.messages, unknown=unknown
    )


def overview(
    fleet: Fleet,
    log: RequestLog,
    policy: str,
    under_way: int,
    shortages: Sequence[str] = (),
    tokenizers: Mapping[str, str] | None = None,
    hint_tokens: int = 0,
    listeners: Sequence[ListenerStatistics] = (),
) -> Overview:
    """The router at a glance: what is wrong, the last minute, and of each replica what a person
    looks for first. Every open page asks for it once a second; all of `/replicas` would be a
    megabyte for some hundred replicas.

    Args:
        fleet: All replicas.
        log: Where requests are recorded.
        policy: The name of the routing policy.
        under_way: Requests admitted and not ended.
        shortages: What the system refuses the router, in sentences.
        tokenizers: What tokenises, by model.
        hint_tokens: Of hits that end where a replica was told to keep a boundary.
        listeners: Where publishers connect to.
    """
    now = time.time()
    disagreements = _by_replica(fleet.tokenizer_disagreements)
    replicas = [
        _summary(replica, fleet, disagreements.get(replica.id, 0)) for replica in fleet.replicas
    ]
    replicas.sort(key=lambda replica: (replica.level.severity, natural_order(replica.id)))
    return Overview(
        started_at=round(log.started_at, 3),
        now=round(now, 3),
        uptime=duration(now - log.started_at),
        policy=policy,
        under_way=under_way,
        hint_tokens=hint_tokens,
        headline=_headline(replicas, shortages),
        shortages=list(shortages),
        minute=minute_view(log.totals.total(), log.totals.seconds),
        models=sorted({model for replica in fleet.replicas for model in replica.models})[
            :MAX_MODELS
        ],
        tokenizers=dict(list((tokenizers or {}).items())[:MAX_MODELS]),
        tiers=_tiers(replicas),
        stores=_stores(fleet)[:MAX_MODELS],
        listeners=[_listener(each) for each in listeners],
        kinds=KIND_LABELS,
        replicas=replicas,
    )


def history_view(hours: Mapping[str | None, Hour]) -> HistoryView:
    """The last hour: of the router, under None, and of some replicas."""
    return HistoryView(
        now=round(time.time(), 3),
        step_s=STEP_S,
        router=_hour(hours[None]),
        replicas={name: _hour(hour) for name, hour in hours.items() if name is not None},
    )


def _hour(hour: Hour) -> HourView:
    steps = {
        name: [None if math.isnan(value) else round(value, 4) for value in values]
        for name, values in hour.values.items()
    }
    return HourView(**steps, removed_blocks=hour.removed_blocks)


def _tiers(replicas: Sequence[ReplicaSummary]) -> list[str]:
    held = {tier for replica in replicas for group in replica.groups for tier in group.blocks}
    return sorted(held | {"GPU"}, key=tier_order)


def _stores(fleet: Fleet) -> list[StoreSummary]:
    """Each store once, whichever of the sources that share it is asked."""
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


def _by_replica(disagreements: Mapping[tuple[str, str], int]) -> dict[str, int]:
    """Disagreements of each replica, over all its models."""
    sums: dict[str, int] = {}
    for (_, replica_id), count in disagreements.items():
        sums[replica_id] = sums.get(replica_id, 0) + count
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
    """The last minute.

    Args:
        total: What happened in it.
        seconds: How much time that is.
    """
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
    approximate = _approximate(replica.id, fleet)
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
    summaries = []
    for number, blocks in sorted(held.items()):
        group = known[number] if 0 <= number < len(known) else None
        kind = group.kind.value if group else None
        reach = (group.sliding_window or group.attention_chunk_size) if group else None
        label = group_label(kind, reach) if kind else f"group {number}"
        summaries.append(
            GroupSummary(
                number=number,
                label=label,
                kind=kind,
                reach=reach,
                blocks=blocks,
                block_size=group.block_size if group else None,
            )
        )
    return summaries
