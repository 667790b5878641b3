"""Metrics collected at a scrape from the statistics that the parts keep themselves.

Each is a field of statistics, and is named and described there (`kvevents.field_docs`). Here are
those that are made of several parts, or of one that keeps no statistics.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, TypeAlias, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from kvevents.delivery import StreamCounters
from kvevents.field_docs import MetricKind, counter, gauge, metrics_of
from kvevents.listener import ListenerStatistics
from kvevents.stream_state import SourceState
from router.errors import UnknownModel
from router.feed.polled import PollerStatistics
from router.feed.source_feed import SourceFeedStatistics
from router.fleet.discovery.keeper import ProviderStatistics
from router.fleet.engine_load import EngineLoad
from router.fleet.gate import Breaker
from router.fleet.limits import KeyUsage
from router.fleet.load import ReplicaLoad
from router.fleet.room import Waiting
from router.fleet.types import ReplicaState, ReplicaView
from router.index.base import SourceId, SourceStatistics, WaitingStatistics
from router.index.mirror import Mirror
from router.index.mirror_types import ApproximateStatistics
from router.prompt.local.cache import SegmentCacheStatistics
from router.prompt.tokenization import TokenizationStatistics
from router.routing.models import ModelSet
from router.routing.steering import SteeringStatistics
from router.sharing.board import BoardStatistics
from router.telemetry.parts import RouterParts
from router.telemetry.self_repair import Trust, TrustStatistics

_SOURCE = ("model", "replica", "dp_rank")
_MODEL, _REPLICA = ("model",), ("replica",)
_NO_ENGINE_LOAD = EngineLoad(running=0, waiting=0, kv_cache_usage=None)
_NOT_COMPARED = TrustStatistics(Trust.TRUSTED, rebuilds=0, cause=None)

_Of = TypeVar("_Of")
_Labelled: TypeAlias = Collection[tuple[tuple[str, ...], _Of]]
"""Label values, and the statistics behind them."""
_Numbers: TypeAlias = Mapping[tuple[str, ...], float]
"""Numbers by the values of their labels."""
_Feeds: TypeAlias = Mapping[SourceId, SourceFeedStatistics]


def collect(parts: RouterParts) -> Iterator[Metric]:
    """Take the numbers now, on the event loop; make metrics of them as the iterator is consumed, in
    any thread."""
    feeds, caches = parts.feed.statistics(), parts.models.index_statistics()
    estimates = {} if parts.approximate is None else parts.approximate.statistics()
    replicas = parts.registry.snapshot()
    tokenization = {
        model.name: parts.models.tokenization_of(model).statistics() for model in parts.models
    }
    steering = {model.name: model.steering.statistics() for model in parts.models}
    return itertools.chain(
        _alone(_streams(caches, feeds, len(estimates))),
        *_of_sources(caches, feeds, parts.repair.statistics()),
        *_of_publishers(parts, estimates),
        _alone(_replicas(replicas)),
        *_of_replicas(parts, replicas),
        _alone(_scaling(parts, feeds, replicas)),
        _alone(_prompts(parts, tokenization, steering)),
        *_of_prompts(tokenization, steering),
        _alone(_work(parts)),
        *_of_requests(parts),
        _alone(_snapshots(parts)),
    )


def fields_as_metrics(
    kind: type[_Of], labels: Sequence[str], found: _Labelled[_Of]
) -> Iterator[Metric]:
    """The metrics among the fields of one kind of statistics; a value of None is left out."""
    for field, metric in metrics_of(kind).items():
        is_counter = metric.kind is MetricKind.COUNTER
        family = (CounterMetricFamily if is_counter else GaugeMetricFamily)(
            metric.name, metric.help, labels=(*labels, *metric.labels)
        )
        for values, statistics in found:
            value = getattr(statistics, field)
            if metric.labels:
                for key, number in value.items():
                    family.add_metric((*values, *_label_values(key)), number)
            elif metric.kind is MetricKind.FLAG:
                family.add_metric(values, bool(value))
            elif value is not None:
                family.add_metric(values, value)
        yield family


def _label_values(key: object) -> Iterator[str]:
    for each in key if isinstance(key, tuple) else (key,):
        yield str(each.value if isinstance(each, Enum) else each)


def _alone(statistics: object) -> Iterator[Metric]:
    """The metrics among the fields of statistics that there are once."""
    return fields_as_metrics(type(statistics), (), [((), statistics)])


def _by_name(found: Mapping[str, _Of]) -> _Labelled[_Of]:
    return [((name,), each) for name, each in found.items()]


def _by_source(found: Mapping[SourceId, _Of], feeds: _Feeds) -> _Labelled[_Of]:
    return [(_source_labels(source, feeds), each) for source, each in found.items()]


def _source_labels(source: SourceId, feeds: _Feeds) -> tuple[str, str, str]:
    model = feeds[source].model if source in feeds else ""
    return model, source.replica, str(source.dp_rank)


def _states(states: type[Enum], found: _Labelled[str]) -> _Numbers:
    """1 for the state that each thing is in, and 0 for all others."""
    return {
        (*labels, state.value): state.value == present
        for labels, present in found
        for state in states
    }


# --- statistics that the parts keep ---------------------------------------------------------------


def _of_sources(
    caches: Mapping[SourceId, SourceStatistics],
    feeds: _Feeds,
    compared: Mapping[SourceId, TrustStatistics],
) -> Iterator[Iterator[Metric]]:
    held = _by_source(caches, feeds)
    yield fields_as_metrics(SourceStatistics, _SOURCE, held)
    waiting = [(labels, found.waiting) for labels, found in held]
    yield fields_as_metrics(WaitingStatistics, _SOURCE, waiting)
    followed = _by_source(feeds, feeds)
    streams = [(labels, found.stream) for labels, found in followed]
    yield fields_as_metrics(StreamCounters, _SOURCE, streams)
    yield fields_as_metrics(SourceFeedStatistics, _SOURCE, followed)
    # Of every stream, also one that nothing was compared of yet: a series that begins at 1 has not
    # increased, and no alert sees it.
    trusts = {source: compared.get(source, _NOT_COMPARED) for source in feeds}
    yield fields_as_metrics(TrustStatistics, _SOURCE, _by_source(trusts, feeds))


def _of_publishers(
    parts: RouterParts, estimates: Mapping[SourceId, ApproximateStatistics]
) -> Iterator[Iterator[Metric]]:
    listening = [((found.endpoint,), found) for found in parts.feed.listeners()]
    yield fields_as_metrics(ListenerStatistics, ("endpoint",), listening)
    polling = [((found.endpoint,), found) for found in parts.feed.pollers()]
    yield fields_as_metrics(PollerStatistics, ("endpoint",), polling)
    estimated = [((each.replica, str(each.dp_rank)), found) for each, found in estimates.items()]
    yield fields_as_metrics(ApproximateStatistics, ("replica", "dp_rank"), estimated)


def _of_replicas(parts: RouterParts, replicas: Sequence[ReplicaView]) -> Iterator[Iterator[Metric]]:
    stale_after_s = parts.config.health.engine_load_stale_after_s
    views = [((view.id,), view) for view in replicas]
    yield fields_as_metrics(ReplicaView, _REPLICA, views)
    loads = [(labels, view.load) for labels, view in views]
    yield fields_as_metrics(ReplicaLoad, _REPLICA, loads)
    engine_loads = [(labels, _engine_load(view, stale_after_s)) for labels, view in views]
    yield fields_as_metrics(EngineLoad, _REPLICA, engine_loads)
    providers = _by_name(parts.keeper.statistics())
    yield fields_as_metrics(ProviderStatistics, ("provider",), providers)


def _engine_load(view: ReplicaView, stale_after_s: float) -> EngineLoad:
    """Return what the engine last reported, where that may still be so."""
    load, age_s = view.engine_load, view.engine_load_age_s
    if load is None or age_s is None or age_s > stale_after_s:
        return _NO_ENGINE_LOAD
    return load


def _of_prompts(
    tokenization: Mapping[str, TokenizationStatistics], steering: Mapping[str, SteeringStatistics]
) -> Iterator[Iterator[Metric]]:
    yield fields_as_metrics(TokenizationStatistics, _MODEL, _by_name(tokenization))
    caches = {
        name: found.local.cache
        for name, found in tokenization.items()
        if found.local and found.local.cache
    }
    yield fields_as_metrics(SegmentCacheStatistics, _MODEL, _by_name(caches))
    yield fields_as_metrics(SteeringStatistics, _MODEL, _by_name(steering))


def _of_requests(parts: RouterParts) -> Iterator[Iterator[Metric]]:
    yield _alone(parts.recent.statistics())
    yield _alone(parts.mirror.statistics())
    yield _alone(parts.responses.statistics())
    lines = {} if parts.entrance is None else parts.entrance.room.statistics()
    waiting = [
        ((model, name), each)
        for model, classes in lines.items()
        for name, each in zip(parts.config.overload.priorities, classes, strict=True)
    ]
    yield fields_as_metrics(Waiting, ("model", "priority"), waiting)
    # The names of keys are the operator's.
    yield fields_as_metrics(KeyUsage, ("key",), _by_name(parts.key_limits.usages))
    boards = {} if parts.board is None else {parts.board.kind: parts.board.statistics()}
    yield fields_as_metrics(BoardStatistics, ("board",), _by_name(boards))


# --- statistics that are made of several, or of what keeps none -----------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Streams:
    states: Annotated[_Numbers, gauge("kvroute_source_state", *_SOURCE, "state")]
    """1 for the state an event stream is in."""
    suspect: Annotated[int, gauge("kvroute_suspect_sources")]
    """Event streams in the state `suspect`: a loss could not be repaired, or the publisher does not
    respond."""
    silence_s: Annotated[_Numbers, gauge("kvroute_source_silence_seconds", *_SOURCE)]
    """Time since an event stream's last live message."""
    store_blocks: Annotated[
        _Numbers, gauge("kvroute_index_store_blocks", "model", "store", "group", "tier")
    ]
    """Distinct blocks in a store that replicas share (`models[].stores`)."""
    approximate: Annotated[int, gauge("kvroute_approximate_sources")]
    """Caches without events, whose hits are estimates."""


def _streams(
    caches: Mapping[SourceId, SourceStatistics], feeds: _Feeds, approximate: int
) -> _Streams:
    now, followed = time.monotonic(), _by_source(feeds, feeds)
    return _Streams(
        states=_states(SourceState, [(labels, found.state.value) for labels, found in followed]),
        suspect=sum(found.state is SourceState.SUSPECT for found in feeds.values()),
        silence_s={
            labels: now - found.stream.last_message_at
            for labels, found in followed
            if found.stream.last_message_at is not None
        },
        # Each store once, though several sources share it.
        store_blocks={
            (labels[0], store, str(group), tier): count
            for labels, found in _by_source(caches, feeds)
            for store, blocks in found.stores.items()
            for (group, tier), count in blocks.items()
        },
        approximate=approximate,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replicas:
    states: Annotated[_Numbers, gauge("kvroute_replica_state", "replica", "state")]
    """1 for the state a replica is in: `starting`, `healthy`, `unhealthy`, `draining`."""
    breakers: Annotated[_Numbers, gauge("kvroute_replica_breaker_state", "replica", "state")]
    """1 for the state of a replica's circuit breaker: `closed`, `open`, `half_open`."""
    healthy: Annotated[Mapping[str, bool], gauge("kvroute_replica_healthy", "replica")]
    """1 while a replica passes its checks, also while it drains."""
    in_flight: Annotated[Mapping[str, int], gauge("kvroute_in_flight_requests", "replica")]
    """This router's requests at a replica."""


def _replicas(replicas: Sequence[ReplicaView]) -> _Replicas:
    return _Replicas(
        states=_states(ReplicaState, [((view.id,), view.state) for view in replicas]),
        breakers=_states(Breaker, [((view.id,), view.breaker) for view in replicas]),
        healthy={view.id: view.health == "healthy" for view in replicas},
        in_flight={view.id: view.load.requests for view in replicas},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scaling:
    """For autoscalers of the engines: how long waiting requests will take, and whether the caches
    are too small."""

    speeds: Annotated[Mapping[str, float], gauge("kvroute_prefill_tokens_per_second", "model")]
    """Prompt tokens that a replica of `speed` 1 computes in a second, as observed: by streams and
    embeddings, whose first tokens are seen, or by whole responses as long as there are no others;
    10,000 before any was."""
    backlogs: Annotated[_Numbers, gauge("kvroute_prefill_backlog_seconds", "model", "replica")]
    """How long a replica needs for the uncached prompt tokens that wait for a first token."""
    pressures: Annotated[_Numbers, gauge("kvroute_cache_pressure", *_SOURCE)]
    """How probable it is that what the cache evicts next will be used again; 0 while it evicts
    nothing."""


def _scaling(parts: RouterParts, feeds: _Feeds, replicas: Sequence[ReplicaView]) -> _Scaling:
    served = [(name, view) for view in replicas if (name := _model_of(parts.models, view))]
    speeds = {name: parts.mirror.prefill_tokens_per_s(name) for name, _ in served}
    engines = {view.id: view.engine_load for view in replicas}
    return _Scaling(
        speeds=speeds,
        backlogs={
            (name, view.id): view.load.prefill_tokens / (speeds[name] * view.speed)
            for name, view in served
        },
        pressures={
            _source_labels(source, feeds): _pressure(
                parts.mirror, feed.model, source, engines.get(source.replica)
            )
            for source, feed in feeds.items()
        },
    )


def _model_of(models: ModelSet, view: ReplicaView) -> str | None:
    """The base model that a replica serves."""
    for name in view.models:
        with contextlib.suppress(UnknownModel):
            return models.resolve(name)[0].name
    return None


def _pressure(mirror: Mirror, model: str, source: SourceId, engine: EngineLoad | None) -> float:
    capacity = None if engine is None else engine.cache_blocks
    return mirror.eviction_cost(model, source, capacity)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompts:
    tokenizers: Annotated[_Numbers, gauge("kvroute_tokenizer_info", "model", "library", "reason")]
    """Always 1, for models with `models[].tokenizer`; `library` is `fastokens` or `tokenizers`,
    `reason` why it is the latter."""
    disagreements: Annotated[
        Mapping[tuple[str, str], int], gauge("kvroute_tokenizer_disagreements", "model", "replica")
    ]
    """Probes that the replica tokenises differently from the router: model files, chat template or
    library version differ. Above 0, its hits are mispredicted."""
    boundaries: Annotated[_Numbers, counter("kvroute_boundaries", "model", "reason")]
    """Ends of prefixes that replicas were asked to keep, by why they are worth it: prompts were
    seen to part there (`branch_point`), a message ends there or the client names it
    (`message_end`), earlier prompts that end alike parted there (`guess`), the session goes on
    (`response_end`)."""
    found: Annotated[_Numbers, counter("kvroute_boundary_prompts", "model", "found")]
    """Prompts that begin with what a replica was asked to keep, by what they find where they are
    sent: all of it (`kept`), of these a hit that ends just there (`hit`), or less (`lost`)."""


_REASONS = {
    "branch_point": "branch_points",
    "message_end": "message_ends",
    "guess": "guesses",
    "response_end": "kept_ends",
}


def _prompts(
    parts: RouterParts,
    tokenization: Mapping[str, TokenizationStatistics],
    steering: Mapping[str, SteeringStatistics],
) -> _Prompts:
    backends = {name: each.local.backend for name, each in tokenization.items() if each.local}
    return _Prompts(
        tokenizers={(name, each.name, each.reason or ""): 1 for name, each in backends.items()},
        disagreements=dict(parts.tokenizer_check.disagreements),
        boundaries={
            (name, reason): getattr(counts, field)
            for name, counts in steering.items()
            for reason, field in _REASONS.items()
        },
        found={
            (name, outcome): getattr(counts, outcome)
            for name, counts in steering.items()
            for outcome in ("kept", "hit", "lost")
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    under_way: Annotated[int, gauge("kvroute_requests_under_way")]
    """Requests admitted and not ended."""
    tasks: Annotated[int, gauge("kvroute_event_loop_tasks")]
    """Tasks of the event loop: what it does at once. Idle, a router has as many as before it was
    busy."""
    buffered_bytes: Annotated[int, gauge("kvroute_buffered_bytes")]
    """Bodies of the requests under way, in bytes; bounded by `server.max_buffered_bytes`."""
    shortages: Annotated[Mapping[str, int], counter("kvroute_shortages", "resource")]
    """Times the system refused the router something: `open_files`, `ports`, `buffers`, `memory`;
    once per connection that had to be served from the reserve or could not be opened."""
    connections: Annotated[int, gauge("kvroute_upstream_connections")]
    """Connections to replicas."""
    idle_connections: Annotated[int, gauge("kvroute_upstream_idle_connections")]
    """Connections to replicas that are idle."""


def _work(parts: RouterParts) -> _Work:
    connections = parts.count_connections()
    return _Work(
        under_way=parts.admission.under_way,
        tasks=len(asyncio.all_tasks()),
        buffered_bytes=parts.admission.buffered_bytes,
        shortages=dict(parts.shortages.counts),
        connections=connections.get("connections", 0),
        idle_connections=connections.get("idle", 0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Snapshots:
    foreign_prefixes: Annotated[int, counter("kvroute_board_foreign_prefixes")]
    """Prompts of others that came under keys of another secret, and are of no use."""
    saved: Annotated[int, counter("kvroute_snapshots_saved")]
    """Snapshots of the index that were written."""
    failed: Annotated[int, counter("kvroute_snapshots_failed")]
    """Snapshots that could not be written; the log has the reason."""
    resumed_sources: Annotated[int, counter("kvroute_snapshots_resumed_sources")]
    """Sources that went on from a snapshot."""
    sent: Annotated[int, counter("kvroute_snapshots_sent")]
    """Snapshots sent to routers that started."""
    taken: Annotated[int, counter("kvroute_snapshots_taken")]
    """Snapshots taken from another router at the start: 1, or 0 where none had one."""
    refused: Annotated[int, counter("kvroute_snapshots_refused")]
    """Answers of other routers that were of no use; the log has the reason."""
    last_bytes: Annotated[int, gauge("kvroute_snapshot_bytes")]
    """Size of the last snapshot written."""


def _snapshots(parts: RouterParts) -> _Snapshots:
    kept, peers, sender = parts.snapshots, parts.peers, parts.sender
    return _Snapshots(
        foreign_prefixes=0 if parts.sharing is None else parts.sharing.foreign_prefixes,
        saved=kept.saved if kept else 0,
        failed=kept.failures if kept else 0,
        resumed_sources=parts.feed.resumed,
        sent=sender.sent if sender else 0,
        taken=peers.taken if peers else 0,
        refused=peers.refused if peers else 0,
        last_bytes=kept.saved_bytes if kept else 0,
    )
