"""Metrics collected at a scrape from the statistics that the parts keep themselves.

Most are fields of statistics, and are named and described there (`kvevents.field_docs`). Here are
those that are made of several.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import TypeAlias, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from kvevents.delivery import StreamCounters
from kvevents.field_docs import MetricKind, metrics_of
from kvevents.listener import ListenerStatistics
from kvevents.stream_state import SourceState
from router.errors import UnknownModel
from router.feed.polled import PollerStatistics
from router.feed.source_feed import SourceFeedStatistics
from router.fleet.discovery.keeper import ProviderStatistics
from router.fleet.engine_load import EngineLoad
from router.fleet.gate import Breaker
from router.fleet.limits import KeyLimits, KeyUsage
from router.fleet.load import ReplicaLoad
from router.fleet.room import Waiting
from router.fleet.types import ReplicaState, ReplicaView
from router.index.base import SourceId, SourceStatistics, WaitingStatistics
from router.index.mirror import Mirror
from router.index.mirror_types import ApproximateStatistics, MirrorStatistics
from router.prompt.local.cache import SegmentCacheStatistics
from router.prompt.tokenization import TokenizationStatistics
from router.routing.models import ModelSet
from router.routing.recent_prefixes import RecentStatistics
from router.routing.steering import SteeringStatistics
from router.routing.stored_responses import StoredResponsesStatistics
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
_Samples: TypeAlias = Iterable[tuple[tuple[str, ...], float]]
"""Label values, value."""


def collect(parts: RouterParts) -> Iterator[Metric]:
    """Take the numbers now, on the event loop; make metrics of them as the iterator is consumed, in
    any thread."""
    feeds = parts.feed.statistics()
    approximate = {} if parts.approximate is None else parts.approximate.statistics()
    return itertools.chain(
        _index_metrics(parts.models.index_statistics(), feeds),
        _feed_metrics(feeds, parts.repair.statistics()),
        _connector_metrics(parts.feed.listeners(), parts.feed.pollers()),
        _approximate_metrics(approximate),
        _replica_metrics(
            parts.registry.snapshot(),
            parts.config.health.engine_load_stale_after_s,
            parts.keeper.statistics(),
        ),
        tuple(_scaling_metrics(parts, feeds)),
        _tokenization_metrics(
            {model.name: parts.models.tokenization_of(model).statistics() for model in parts.models}
        ),
        _steering_metrics([((each.name,), each.steering.statistics()) for each in parts.models]),
        tuple(_work_metrics(parts)),
        tuple(_remembered_metrics(parts)),
        tuple(_queue_metrics(parts)),
        tuple(_key_metrics(parts.key_limits)),
        tuple(_board_metrics(parts)),
        tuple(_snapshot_metrics(parts)),
    )


# --- families -------------------------------------------------------------------------------------


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


def _gauge(name: str, text: str, labels: Sequence[str], samples: _Samples) -> Metric:
    gauge = GaugeMetricFamily(name, text, labels=labels)
    for values, value in samples:
        gauge.add_metric(values, value)
    return gauge


def _counter(name: str, text: str, labels: Sequence[str], samples: _Samples) -> Metric:
    counter = CounterMetricFamily(name, text, labels=labels)
    for values, value in samples:
        counter.add_metric(values, value)
    return counter


def _single(name: str, text: str, value: float) -> Metric:
    """A gauge without labels."""
    return GaugeMetricFamily(name, text, value=value)


def _states(
    name: str, text: str, labels: Sequence[str], states: type[Enum], found: _Labelled[str]
) -> Metric:
    """A gauge that is 1 for the state that each thing is in, and 0 for all others."""
    samples = [
        ((*values, state.value), state.value == present)
        for values, present in found
        for state in states
    ]
    return _gauge(name, text, (*labels, "state"), samples)


# --- index and feed -------------------------------------------------------------------------------


def _source_labels(
    source: SourceId, feeds: Mapping[SourceId, SourceFeedStatistics]
) -> tuple[str, str, str]:
    model = feeds[source].model if source in feeds else ""
    return model, source.replica, str(source.dp_rank)


def _index_metrics(
    sources: Mapping[SourceId, SourceStatistics], feeds: Mapping[SourceId, SourceFeedStatistics]
) -> Iterator[Metric]:
    labelled = [(_source_labels(source, feeds), found) for source, found in sources.items()]
    yield from fields_as_metrics(SourceStatistics, _SOURCE, labelled)
    waiting = [(labels, found.waiting) for labels, found in labelled]
    yield from fields_as_metrics(WaitingStatistics, _SOURCE, waiting)
    # Each store once, though several sources share it.
    stores = {
        (labels[0], store, str(group), tier): count
        for labels, found in labelled
        for store, blocks in found.stores.items()
        for (group, tier), count in blocks.items()
    }
    yield _gauge(
        "kvroute_index_store_blocks",
        "Distinct blocks in a store that replicas share (`models[].stores`).",
        ("model", "store", "group", "tier"),
        stores.items(),
    )


def _feed_metrics(
    feeds: Mapping[SourceId, SourceFeedStatistics], trusts: Mapping[SourceId, TrustStatistics]
) -> Iterator[Metric]:
    labelled = [(_source_labels(source, feeds), found) for source, found in feeds.items()]
    streams = [(labels, found.stream) for labels, found in labelled]
    yield from fields_as_metrics(StreamCounters, _SOURCE, streams)
    yield from fields_as_metrics(SourceFeedStatistics, _SOURCE, labelled)
    yield _states(
        "kvroute_source_state",
        "1 for the state an event stream is in.",
        _SOURCE,
        SourceState,
        [(labels, found.state.value) for labels, found in labelled],
    )
    yield _single(
        "kvroute_suspect_sources",
        "Event streams in the state `suspect`: a loss could not be repaired, or the publisher does "
        "not respond.",
        sum(found.state is SourceState.SUSPECT for found in feeds.values()),
    )
    now = time.monotonic()
    yield _gauge(
        "kvroute_source_silence_seconds",
        "Time since an event stream's last live message.",
        _SOURCE,
        (
            (labels, now - found.last_message_at)
            for labels, found in streams
            if found.last_message_at is not None
        ),
    )
    # Of every stream, also one that nothing was compared of yet: a series that begins at 1 has not
    # increased, and no alert sees it.
    trusted = [
        (_source_labels(source, feeds), trusts.get(source, _NOT_COMPARED)) for source in feeds
    ]
    yield from fields_as_metrics(TrustStatistics, _SOURCE, trusted)


def _connector_metrics(
    listeners: Sequence[ListenerStatistics], pollers: Sequence[PollerStatistics]
) -> Iterator[Metric]:
    listening = [((found.endpoint,), found) for found in listeners]
    yield from fields_as_metrics(ListenerStatistics, ("endpoint",), listening)
    polling = [((found.endpoint,), found) for found in pollers]
    yield from fields_as_metrics(PollerStatistics, ("endpoint",), polling)


def _approximate_metrics(caches: Mapping[SourceId, ApproximateStatistics]) -> Iterator[Metric]:
    labelled = [((source.replica, str(source.dp_rank)), found) for source, found in caches.items()]
    yield from fields_as_metrics(ApproximateStatistics, ("replica", "dp_rank"), labelled)
    yield _single(
        "kvroute_approximate_sources",
        "Caches without events, whose hits are estimates.",
        len(caches),
    )


# --- replicas -------------------------------------------------------------------------------------


def _replica_metrics(
    replicas: Sequence[ReplicaView],
    stale_after_s: float,
    providers: Mapping[str, ProviderStatistics],
) -> Iterator[Metric]:
    yield _states(
        "kvroute_replica_state",
        "1 for the state a replica is in: `starting`, `healthy`, `unhealthy`, `draining`.",
        _REPLICA,
        ReplicaState,
        [((view.id,), view.state) for view in replicas],
    )
    yield _states(
        "kvroute_replica_breaker_state",
        "1 for the state of a replica's circuit breaker: `closed`, `open`, `half_open`.",
        _REPLICA,
        Breaker,
        [((view.id,), view.breaker) for view in replicas],
    )
    yield _gauge(
        "kvroute_replica_healthy",
        "1 while a replica passes its checks, also while it drains.",
        _REPLICA,
        (((view.id,), view.health == "healthy") for view in replicas),
    )
    yield _gauge(
        "kvroute_in_flight_requests",
        "This router's requests at a replica.",
        _REPLICA,
        (((view.id,), view.load.requests) for view in replicas),
    )
    views = [((view.id,), view) for view in replicas]
    yield from fields_as_metrics(ReplicaView, _REPLICA, views)
    loads = [((view.id,), view.load) for view in replicas]
    yield from fields_as_metrics(ReplicaLoad, _REPLICA, loads)
    engine_loads = [((view.id,), _engine_load(view, stale_after_s)) for view in replicas]
    yield from fields_as_metrics(EngineLoad, _REPLICA, engine_loads)
    provided = [((name,), found) for name, found in providers.items()]
    yield from fields_as_metrics(ProviderStatistics, ("provider",), provided)


def _engine_load(view: ReplicaView, stale_after_s: float) -> EngineLoad:
    """Return what the engine last reported, where that may still be so."""
    load, age_s = view.engine_load, view.engine_load_age_s
    if load is None or age_s is None or age_s > stale_after_s:
        return _NO_ENGINE_LOAD
    return load


def _scaling_metrics(
    parts: RouterParts, feeds: Mapping[SourceId, SourceFeedStatistics]
) -> Iterator[Metric]:
    """Yield the metrics for autoscalers of the engines: how long waiting requests will take, and
    whether the caches are too small."""
    replicas = {view.id: view for view in parts.registry.snapshot()}
    served = [(name, view) for view in replicas.values() if (name := _model_of(parts.models, view))]
    speeds = {name: parts.mirror.prefill_tokens_per_s(name) for name, _ in served}
    yield _gauge(
        "kvroute_prefill_tokens_per_second",
        "Prompt tokens that a replica of `speed` 1 computes in a second, "
        "as observed; 10,000 before anything was.",
        _MODEL,
        (((name,), speed) for name, speed in speeds.items()),
    )
    yield _gauge(
        "kvroute_prefill_backlog_seconds",
        "How long a replica needs for the uncached prompt tokens that wait for a first token.",
        ("model", "replica"),
        (
            ((name, view.id), view.load.prefill_tokens / (speeds[name] * view.speed))
            for name, view in served
        ),
    )
    yield _gauge(
        "kvroute_cache_pressure",
        "How probable it is that what the cache evicts next will be used "
        "again; 0 while it evicts nothing.",
        _SOURCE,
        [
            (_source_labels(source, feeds), _pressure(parts.mirror, feed.model, source, replicas))
            for source, feed in feeds.items()
        ],
    )


def _model_of(models: ModelSet, view: ReplicaView) -> str | None:
    """The base model that a replica serves."""
    for name in view.models:
        with contextlib.suppress(UnknownModel):
            return models.resolve(name)[0].name
    return None


def _pressure(
    mirror: Mirror, model: str, source: SourceId, replicas: Mapping[str, ReplicaView]
) -> float:
    view = replicas.get(source.replica)
    engine = None if view is None else view.engine_load
    capacity = None if engine is None else engine.cache_blocks
    return mirror.eviction_cost(model, source, capacity)


# --- prompts and requests -------------------------------------------------------------------------


def _steering_metrics(models: _Labelled[SteeringStatistics]) -> Iterator[Metric]:
    yield _counter(
        "kvroute_boundaries",
        "Ends of prefixes that replicas were asked to keep, by why they are worth it: prompts were "
        "seen to part there (`branch_point`), a message ends there or the client names it "
        "(`message_end`), earlier prompts that end alike parted there (`guess`), the session goes "
        "on (`response_end`).",
        ("model", "reason"),
        (
            ((*model, reason), count)
            for model, found in models
            for reason, count in (
                ("branch_point", found.branch_points),
                ("message_end", found.message_ends),
                ("guess", found.guesses),
                ("response_end", found.kept_ends),
            )
        ),
    )
    yield _counter(
        "kvroute_boundary_prompts",
        "Prompts that begin with what a replica was asked to keep, by what they find where they "
        "are sent: all of it (`kept`), of these a hit that ends just there (`hit`), or less "
        "(`lost`).",
        ("model", "found"),
        (
            ((*model, outcome), getattr(found, outcome))
            for model, found in models
            for outcome in ("kept", "hit", "lost")
        ),
    )
    yield from fields_as_metrics(SteeringStatistics, _MODEL, models)


def _tokenization_metrics(models: Mapping[str, TokenizationStatistics]) -> Iterator[Metric]:
    labelled = [((name,), found) for name, found in models.items()]
    yield from fields_as_metrics(TokenizationStatistics, _MODEL, labelled)
    local = [(name, found.local) for name, found in models.items() if found.local]
    yield _gauge(
        "kvroute_tokenizer_info",
        "Always 1, for models with `models[].tokenizer`; `library` is "
        "`fastokens` or `tokenizers`, `reason` why it is the latter.",
        ("model", "library", "reason"),
        (((name, found.backend.name, found.backend.reason or ""), 1) for name, found in local),
    )
    caches = [((name,), found.cache) for name, found in local if found.cache]
    yield from fields_as_metrics(SegmentCacheStatistics, _MODEL, caches)


def _work_metrics(parts: RouterParts) -> Iterator[Metric]:
    """Yield the router's present work, and its shortages."""
    yield _single(
        "kvroute_requests_under_way",
        "Requests admitted and not ended.",
        parts.admission.under_way,
    )
    yield _single(
        "kvroute_event_loop_tasks",
        "Tasks of the event loop: what it does at once. Idle, a router "
        "has as many as before it was busy.",
        len(asyncio.all_tasks()),
    )
    yield _single(
        "kvroute_buffered_bytes",
        "Bodies of the requests under way, in bytes; bounded by `server.max_buffered_bytes`.",
        parts.admission.buffered_bytes,
    )
    yield _gauge(
        "kvroute_tokenizer_disagreements",
        "Probes that the replica tokenises differently from the router: "
        "model files, chat template or library version differ. Above 0, "
        "its hits are mispredicted.",
        ("model", "replica"),
        parts.tokenizer_check.disagreements.items(),
    )
    yield _counter(
        "kvroute_shortages",
        "Times the system refused the router something: `open_files`, "
        "`ports`, `buffers`, `memory`; once per connection that had to be "
        "served from the reserve or could not be opened.",
        ("resource",),
        [((resource,), count) for resource, count in parts.shortages.counts.items()],
    )


def _remembered_metrics(parts: RouterParts) -> Iterator[Metric]:
    """Yield kept connections, and remembered prompts and responses."""
    connections = parts.count_connections()
    yield _single(
        "kvroute_upstream_connections",
        "Connections to replicas.",
        connections.get("connections", 0),
    )
    yield _single(
        "kvroute_upstream_idle_connections",
        "Connections to replicas that are idle.",
        connections.get("idle", 0),
    )
    yield from fields_as_metrics(RecentStatistics, (), [((), parts.recent.statistics())])
    yield from fields_as_metrics(MirrorStatistics, (), [((), parts.mirror.statistics())])
    responses = parts.responses.statistics()
    yield from fields_as_metrics(StoredResponsesStatistics, (), [((), responses)])


def _queue_metrics(parts: RouterParts) -> Iterator[Metric]:
    """Yield the queues for room at replicas; no series where nothing may wait."""
    lines = {} if parts.entrance is None else parts.entrance.room.statistics()
    found = [
        ((model, name), waiting)
        for model, classes in lines.items()
        for name, waiting in zip(parts.config.overload.priorities, classes, strict=True)
    ]
    yield from fields_as_metrics(Waiting, ("model", "priority"), found)


def _key_metrics(limits: KeyLimits) -> Iterator[Metric]:
    """Yield the usage of limited keys. The names of keys are the operator's."""
    found = [((name,), usage) for name, usage in limits.usages.items()]
    yield from fields_as_metrics(KeyUsage, ("key",), found)


# --- other routers, and starts --------------------------------------------------------------------


def _board_metrics(parts: RouterParts) -> Iterator[Metric]:
    board = parts.board
    boards = [] if board is None else [((board.kind,), board.statistics())]
    yield from fields_as_metrics(BoardStatistics, ("board",), boards)
    yield CounterMetricFamily(
        "kvroute_board_foreign_prefixes",
        "Prompts of others that came under keys of another secret, and are of no use.",
        value=0 if parts.sharing is None else parts.sharing.foreign_prefixes,
    )


def _snapshot_metrics(parts: RouterParts) -> Iterator[Metric]:
    kept, peers, sender = parts.snapshots, parts.peers, parts.sender
    for name, text, value in (
        ("saved", "Snapshots of the index that were written.", kept.saved if kept else 0),
        (
            "failed",
            "Snapshots that could not be written; the log has the reason.",
            kept.failures if kept else 0,
        ),
        ("resumed_sources", "Sources that went on from a snapshot.", parts.feed.resumed),
        (
            "sent",
            "Snapshots sent to routers that started.",
            sender.sent if sender else 0,
        ),
        (
            "taken",
            "Snapshots taken from another router at the start: 1, or 0 where none had one.",
            peers.taken if peers else 0,
        ),
        (
            "refused",
            "Answers of other routers that were of no use; the log has the reason.",
            peers.refused if peers else 0,
        ),
    ):
        yield CounterMetricFamily(f"kvroute_snapshots_{name}", text, value=value)
    yield _single(
        "kvroute_snapshot_bytes",
        "Size of the last snapshot written.",
        kept.saved_bytes if kept else 0,
    )
