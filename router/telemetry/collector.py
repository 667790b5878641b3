"""Metrics collected at a scrape from the statistics that the parts keep themselves."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from kvevents.listener import ListenerStatistics
from kvevents.stream_state import SourceState
from router.errors import UnknownModel
from router.feed.feed import Feed, SourceFeedStatistics
from router.feed.polled import PollerStatistics
from router.feed.snapshot_file import SnapshotKeeper
from router.feed.snapshot_peers import Peers
from router.feed.snapshot_transfer import Sender
from router.fleet.discovery import ProviderStatistics, ReplicaKeeper
from router.fleet.gate import Breaker
from router.fleet.limits import KeyLimits
from router.fleet.registry import ReplicaRegistry
from router.fleet.room import WaitingRoom
from router.fleet.types import ReplicaState, ReplicaView
from router.index import SourceId, SourceStatistics
from router.index.approximate import ApproximateCaches
from router.index.mirror import Mirror
from router.index.mirror_types import ApproximateStatistics
from router.prompt import TokenizationStatistics
from router.routing.admission import Admission
from router.routing.models import ModelSet
from router.routing.recent_prefixes import RecentPrefixes
from router.routing.replica_tokenizers import TokenizerCheck
from router.routing.steering import SteeringStatistics
from router.routing.stored_responses import StoredResponses
from router.sharing.board import Board, BoardStatistics
from router.telemetry.self_repair import SelfRepair, TrustStatistics
from router.telemetry.shortages import Shortages

_SOURCE = ("model", "replica", "dp_rank")
_REPLICA = ("replica",)

_Of = TypeVar("_Of")
_Table: TypeAlias = tuple[tuple[str, str, Callable[[_Of], float]], ...]
"""Metrics of one thing: name, help, and how to read the value."""
_Samples: TypeAlias = Iterable[tuple[tuple[str, ...], float]]
"""Label values, value."""


@dataclass(frozen=True, slots=True)
class CollectedParts:
    """The parts of a router whose statistics are read."""

    feed: Feed
    registry: ReplicaRegistry
    keeper: ReplicaKeeper
    models: ModelSet
    tokenizer_check: TokenizerCheck
    connections: Mapping[str, int]
    """Of the data plane to replicas; none before it has begun."""
    recent: RecentPrefixes
    mirror: Mirror
    approximate: ApproximateCaches | None
    responses: StoredResponses
    admission: Admission
    repair: SelfRepair
    shortages: Shortages
    room: WaitingRoom | None = None
    """None: no request waits for room at a replica."""
    priorities: Sequence[str] = ()
    key_limits: KeyLimits = field(default_factory=lambda: KeyLimits(()))
    reservations: int = 0
    """That gateways have made and not ended."""
    reservation_ends: Mapping[str, int] = field(default_factory=dict)
    board: Board | None = None
    foreign_prefixes: int = 0
    """Heard from others, and made with another secret."""
    snapshots: SnapshotKeeper | None = None
    peers: Peers | None = None
    sender: Sender | None = None
    """None: the index is not kept over a restart."""


def collect(parts: CollectedParts) -> Iterator[Metric]:
    """Take the numbers now, on the event loop; make metrics of them as the iterator is consumed,
    in whatever thread does so."""
    feeds = parts.feed.statistics()
    return itertools.chain(
        _index_metrics(parts.models.index_statistics(), feeds),
        _feed_metrics(feeds),
        tuple(_listener_metrics(parts.feed.listeners())),
        tuple(_poll_metrics(parts.feed.pollers())),
        _trust_metrics(parts.repair.statistics(), feeds),
        _approximate_metrics({} if parts.approximate is None else parts.approximate.statistics()),
        _replica_metrics(parts.registry.snapshot()),
        tuple(_scaling_metrics(parts, feeds)),
        _discovery_metrics(parts.keeper.statistics()),
        _tokenization_metrics(
            {model.name: model.tokenization.statistics() for model in parts.models}
        ),
        _steering_metrics({model.name: model.steering.statistics() for model in parts.models}),
        tuple(_work_metrics(parts)),
        tuple(_router_metrics(parts)),
        tuple(_queue_metrics(parts)),
        tuple(_key_metrics(parts.key_limits)),
        tuple(_reservation_metrics(parts)),
        tuple(_board_metrics(parts)),
        tuple(_snapshot_metrics(parts)),
    )


def _gauge(name: str, text: str, labels: tuple[str, ...], samples: _Samples) -> Metric:
    gauge = GaugeMetricFamily(name, text, labels=labels)
    for values, value in samples:
        gauge.add_metric(values, value)
    return gauge


def _counter(name: str, text: str, labels: tuple[str, ...], samples: _Samples) -> Metric:
    counter = CounterMetricFamily(name, text, labels=labels)
    for values, value in samples:
        counter.add_metric(values, value)
    return counter


# --- index and feed -------------------------------------------------------------------------------


def _source_labels(
    source: SourceId, feeds: Mapping[SourceId, SourceFeedStatistics]
) -> tuple[str, str, str]:
    model = feeds[source].model if source in feeds else ""
    return model, source.replica, str(source.dp_rank)


_INDEX_GAUGES: _Table[SourceStatistics] = (
    (
        "kvroute_index_unplaced_blocks",
        "Blocks held whose prefix is not known.",
        lambda found: found.unplaced,
    ),
    (
        "kvroute_index_waiting_runs",
        "Events that wait for their parent block.",
        lambda found: found.waiting.runs,
    ),
    (
        "kvroute_index_foreign_key",
        "1 where blocks are announced under a hash key that the router "
        "does not have: nothing is found there.",
        lambda found: found.key_problem is not None,
    ),
    (
        "kvroute_index_incomplete",
        "1 where blocks were refused or given up.",
        lambda found: found.is_incomplete,
    ),
)


def _index_metrics(
    sources: Mapping[SourceId, SourceStatistics], feeds: Mapping[SourceId, SourceFeedStatistics]
) -> Iterator[Metric]:
    labelled = [(_source_labels(source, feeds), found) for source, found in sources.items()]
    yield _gauge(
        "kvroute_index_blocks",
        "Distinct blocks held.",
        (*_SOURCE, "group", "tier"),
        (
            ((*labels, str(group), tier), count)
            for labels, found in labelled
            for (group, tier), count in found.blocks.items()
        ),
    )
    yield _gauge(
        "kvroute_index_store_blocks",
        "Distinct blocks in a store that replicas share (`models[].stores`).",
        ("model", "store", "group", "tier"),
        _store_samples(labelled),
    )
    for name, text, value in _INDEX_GAUGES:
        yield _gauge(name, text, _SOURCE, ((labels, value(found)) for labels, found in labelled))


def _store_samples(
    labelled: Iterable[tuple[tuple[str, str, str], SourceStatistics]],
) -> _Samples:
    """Each store once, whichever of the sources that share it is asked."""
    found = {
        (model, store, str(group), tier): count
        for (model, _, _), statistics in labelled
        for store, blocks in statistics.stores.items()
        for (group, tier), count in blocks.items()
    }
    return found.items()


_FEED_COUNTERS: _Table[SourceFeedStatistics] = (
    ("kvroute_event_batches", "Batches applied.", lambda found: found.stream.batches),
    (
        "kvroute_events_malformed",
        "Messages refused: not a batch, or over a limit.",
        lambda found: found.stream.malformed,
    ),
    (
        "kvroute_events_duplicate",
        "Batches received again, as happens around a replay.",
        lambda found: found.stream.duplicates,
    ),
    ("kvroute_events_gaps", "Gaps seen in the sequence numbers.", lambda found: found.stream.gaps),
    (
        "kvroute_events_replays",
        "Replays that returned batches.",
        lambda found: found.stream.replays,
    ),
    ("kvroute_events_snapshots", "Snapshots taken.", lambda found: found.stream.snapshots),
    (
        "kvroute_events_restarts",
        "Times another process was found at a publisher's address.",
        lambda found: found.stream.restarts,
    ),
    (
        "kvroute_events_unanswered",
        "Requests to the replay endpoint without a reply, or with one cut short.",
        lambda found: found.stream.unanswered,
    ),
    (
        "kvroute_events_overflow",
        "Batches dropped because too many waited during a replay.",
        lambda found: found.stream.overflow,
    ),
    (
        "kvroute_source_connections",
        "Connections made to the publisher of an event stream.",
        lambda found: found.stream.connections,
    ),
    (
        "kvroute_blocks_stored",
        "Blocks stored, copies included.",
        lambda found: found.applied.stored,
    ),
    (
        "kvroute_blocks_removed",
        "Blocks removed, copies included.",
        lambda found: found.applied.removed,
    ),
    (
        "kvroute_events_skipped",
        "Events of unknown type, removals of unknown blocks, blocks over the limit.",
        lambda found: found.applied.skipped,
    ),
    (
        "kvroute_events_unreadable",
        "Events that break the format, left out of their batch; the rest of it was applied.",
        lambda found: found.applied.unreadable,
    ),
)


def _listener_metrics(listeners: Sequence[ListenerStatistics]) -> Iterator[Metric]:
    yield _counter(
        "kvroute_listen_messages",
        "Messages of publishers that connect to the router, by what became of them.",
        ("endpoint", "outcome"),
        (
            ((each.endpoint, outcome), count)
            for each in listeners
            for outcome, count in each.messages.items()
        ),
    )
    yield _gauge(
        "kvroute_listen_topics",
        "Topics of publishers that connect to the router and belong to a replica.",
        ("endpoint",),
        (((each.endpoint,), each.topics) for each in listeners),
    )


def _poll_metrics(pollers: Sequence[PollerStatistics]) -> Iterator[Metric]:
    yield _counter(
        "kvroute_event_polls",
        "Requests for the events of servers that have to be asked, by what became of them.",
        ("endpoint", "outcome"),
        (
            ((each.endpoint, outcome), count)
            for each in pollers
            for outcome, count in each.polls.items()
        ),
    )


def _feed_metrics(feeds: Mapping[SourceId, SourceFeedStatistics]) -> Iterator[Metric]:
    labelled = [(_source_labels(source, feeds), found) for source, found in feeds.items()]
    for name, text, value in _FEED_COUNTERS:
        yield _counter(name, text, _SOURCE, ((labels, value(found)) for labels, found in labelled))
    yield _gauge(
        "kvroute_source_state",
        "1 for the state an event stream is in.",
        (*_SOURCE, "state"),
        (
            ((*labels, state.value), found.state is state)
            for labels, found in labelled
            for state in SourceState
        ),
    )
    yield _single(
        "kvroute_suspect_sources",
        "Event streams in the state `suspect`: a loss could not be repaired, or nobody answers.",
        sum(found.state is SourceState.SUSPECT for found in feeds.values()),
    )
    now = time.monotonic()
    yield _gauge(
        "kvroute_source_silence_seconds",
        "Time since an event stream's last live message.",
        _SOURCE,
        (
            (labels, now - found.stream.last_message_at)
            for labels, found in labelled
            if found.stream.last_message_at is not None
        ),
    )


def _trust_metrics(
    trusts: Mapping[SourceId, TrustStatistics], feeds: Mapping[SourceId, SourceFeedStatistics]
) -> Iterator[Metric]:
    # Of every stream, also one that nothing was compared of yet: a series that begins at 1 has not
    # increased, and no alert sees it.
    labelled = [(_source_labels(source, feeds), trusts.get(source)) for source in feeds]
    yield _counter(
        "kvroute_source_rebuilds",
        "Rebuilds of a source because its hits were predicted wrongly.",
        _SOURCE,
        ((labels, 0 if found is None else found.rebuilds) for labels, found in labelled),
    )
    yield _gauge(
        "kvroute_source_mispredicted",
        "1 while a source's hits are predicted wrongly and a rebuild did "
        "not help, or has to wait for the cool-down.",
        _SOURCE,
        ((labels, bool(found and found.cause)) for labels, found in labelled),
    )


_APPROXIMATE_GAUGES: _Table[ApproximateStatistics] = (
    (
        "kvroute_approximate_tokens",
        "Tokens that a cache without events is estimated to hold.",
        lambda found: found.tokens,
    ),
    (
        "kvroute_approximate_capacity_tokens",
        "Size of a cache without events, as far as reuse was seen to last.",
        lambda found: found.capacity_tokens,
    ),
    (
        "kvroute_approximate_trust",
        "Of the tokens promised at a cache without events lately, the "
        "share that was cached; so much of its hits counts.",
        lambda found: found.trust,
    ),
)


def _approximate_metrics(caches: Mapping[SourceId, ApproximateStatistics]) -> Iterator[Metric]:
    labelled = [((source.replica, str(source.dp_rank)), found) for source, found in caches.items()]
    for name, text, value in _APPROXIMATE_GAUGES:
        labels = ("replica", "dp_rank")
        yield _gauge(name, text, labels, ((values, value(found)) for values, found in labelled))
    yield _single(
        "kvroute_approximate_sources",
        "Caches without events, whose hits are estimates.",
        len(caches),
    )


# --- replicas -------------------------------------------------------------------------------------

_REPLICA_GAUGES: _Table[ReplicaView] = (
    (
        "kvroute_replica_backing_off",
        "1 while a replica gets nothing because it answered 429 or 503 "
        "with `Retry-After` (`overload.max_back_off_s`).",
        lambda view: view.backs_off_s > 0,
    ),
    (
        "kvroute_replica_slow_start",
        "The share of a replica's speed and limits that count since it joined: 0.1 to 1.",
        lambda view: view.slow_start,
    ),
    (
        "kvroute_replica_healthy",
        "1 while a replica passes its checks, also while it drains.",
        lambda view: view.health == "healthy",
    ),
    (
        "kvroute_in_flight_requests",
        "This router's requests at a replica.",
        lambda view: view.load.requests,
    ),
    (
        "kvroute_in_flight_prefill_tokens",
        "Uncached prompt tokens of this router's requests at a replica, until the first byte.",
        lambda view: view.load.prefill_tokens,
    ),
    (
        "kvroute_in_flight_decodes",
        "This router's requests at a replica whose responses have begun.",
        lambda view: view.load.decoding_requests,
    ),
    (
        "kvroute_in_flight_tokenizations",
        "The router's own requests at a replica for token ids, where "
        "`models[].tokenizer` is `replica`; not among "
        "`kvroute_in_flight_requests`.",
        lambda view: view.load.tokenizing_requests,
    ),
    (
        "kvroute_engine_running_requests",
        "Requests that run at a replica, by the engine's own gauge; 0 if it cannot be read.",
        lambda view: view.engine_load.running if view.engine_load else 0,
    ),
    (
        "kvroute_engine_waiting_requests",
        "Requests that wait at a replica, by the engine's own gauge; 0 if it cannot be read.",
        lambda view: view.engine_load.waiting if view.engine_load else 0,
    ),
)
_REPLICA_COUNTERS: _Table[ReplicaView] = (
    ("kvroute_health_checks", "Health checks of a replica.", lambda view: view.checks),
    (
        "kvroute_health_checks_failed",
        "Health checks of a replica that failed.",
        lambda view: view.failed_checks,
    ),
    (
        "kvroute_replica_failures",
        "Requests that failed through the replica's fault; a 4xx or a plain 500 never counts.",
        lambda view: view.failed_requests,
    ),
    (
        "kvroute_replica_outages",
        "Times a replica became unhealthy.",
        lambda view: view.times_unhealthy,
    ),
    (
        "kvroute_replica_breaker_opened",
        "Times a replica's circuit breaker opened, after failed tries too.",
        lambda view: view.times_opened,
    ),
    (
        "kvroute_replica_busy",
        "Times a replica answered 429 or 503 with `Retry-After`.",
        lambda view: view.times_told_off,
    ),
)


_PROVIDER_GAUGES: _Table[ProviderStatistics] = (
    (
        "kvroute_discovery_replicas",
        "Replicas that a provider names; `configuration` stands for `replicas`.",
        lambda found: found.replicas,
    ),
    (
        "kvroute_discovery_failing",
        "1 while a provider cannot say what all of its replicas are.",
        lambda found: found.error is not None,
    ),
)
_PROVIDER_COUNTERS: _Table[ProviderStatistics] = (
    (
        "kvroute_discovery_reports",
        "Lists of replicas that a provider reported.",
        lambda found: found.reports,
    ),
    (
        "kvroute_discovery_failures",
        "Times a provider could not say what its replicas are.",
        lambda found: found.failures,
    ),
)


def _replica_metrics(replicas: tuple[ReplicaView, ...]) -> Iterator[Metric]:
    yield _gauge(
        "kvroute_replica_state",
        "1 for the state a replica is in: `starting`, `healthy`, `unhealthy`, `draining`.",
        ("replica", "state"),
        (
            ((view.id, state.value), view.state == state.value)
            for view in replicas
            for state in ReplicaState
        ),
    )
    yield _gauge(
        "kvroute_replica_breaker_state",
        "1 for the state of a replica's circuit breaker: `closed`, `open`, `half_open`.",
        ("replica", "state"),
        (
            ((view.id, state.value), view.breaker == state.value)
            for view in replicas
            for state in Breaker
        ),
    )
    for name, text, value in _REPLICA_GAUGES:
        yield _gauge(name, text, _REPLICA, (((view.id,), value(view)) for view in replicas))
    for name, text, value in _REPLICA_COUNTERS:
        yield _counter(name, text, _REPLICA, (((view.id,), value(view)) for view in replicas))


def _scaling_metrics(
    parts: CollectedParts, feeds: Mapping[SourceId, SourceFeedStatistics]
) -> Iterator[Metric]:
    """What an autoscaler of the engines goes by: how long what waits will take, and whether the
    caches are too small."""
    replicas = {view.id: view for view in parts.registry.snapshot()}
    served = [(name, view) for view in replicas.values() if (name := _model_of(parts.models, view))]
    speeds = {name: parts.mirror.prefill_tokens_per_s(name) for name, _ in served}
    yield _gauge(
        "kvroute_prefill_tokens_per_second",
        "Prompt tokens that a replica of `speed` 1 computes in a second, "
        "as observed; 10,000 before anything was.",
        ("model",),
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
    yield _gauge(
        "kvroute_engine_cache_usage",
        "Share of a replica's KV blocks that running requests hold, by "
        "the engine's own gauge; missing where it reports none.",
        _REPLICA,
        (
            ((view.id,), view.engine_load.kv_cache_usage)
            for view in replicas.values()
            if view.engine_load is not None and view.engine_load.kv_cache_usage is not None
        ),
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
    return mirror.outlook(model, source, capacity).reuse_probability


def _discovery_metrics(providers: Mapping[str, ProviderStatistics]) -> Iterator[Metric]:
    labels = ("provider",)
    for name, text, value in _PROVIDER_GAUGES:
        yield _gauge(name, text, labels, (((who,), value(it)) for who, it in providers.items()))
    for name, text, value in _PROVIDER_COUNTERS:
        yield _counter(name, text, labels, (((who,), value(it)) for who, it in providers.items()))


# --- tokenisation and the router itself -----------------------------------------------------------


def _steering_metrics(models: Mapping[str, SteeringStatistics]) -> Iterator[Metric]:
    yield _counter(
        "kvroute_boundaries",
        "Ends of prefixes that replicas were told to keep, by why they are worth it: prompts were "
        "seen to part there (`branch_point`), a message ends there or the client names it "
        "(`message_end`), earlier prompts that end alike parted there (`guess`), the session goes "
        "on (`response_end`).",
        ("model", "reason"),
        (
            ((name, reason), count)
            for name, found in models.items()
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
        "Prompts that begin with what a replica was told to keep, by what they find where they are "
        "sent: all of it (`kept`), of these a hit that ends just there (`hit`), or less (`lost`).",
        ("model", "found"),
        (
            ((name, outcome), count)
            for name, found in models.items()
            for outcome, count in (
                ("kept", found.kept),
                ("hit", found.hit),
                ("lost", found.lost),
            )
        ),
    )
    yield _counter(
        "kvroute_boundary_hit_tokens",
        "Prompt tokens of the hits that end where a replica was told to keep a boundary.",
        ("model",),
        (((name,), found.hit_tokens) for name, found in models.items()),
    )


def _tokenization_metrics(models: Mapping[str, TokenizationStatistics]) -> Iterator[Metric]:
    yield _counter(
        "kvroute_tokenized_prompts",
        "Prompts by how much of them was tokenised: `whole`, `prefix`, `unknown`.",
        ("model", "coverage"),
        (
            ((name, kind.value), count)
            for name, found in models.items()
            for kind, count in found.prompts.items()
        ),
    )
    yield _counter(
        "kvroute_untokenized_prompts",
        "Prompts not tokenised in full, by reason.",
        ("model", "reason"),
        (
            ((name, reason), count)
            for name, found in models.items()
            for reason, count in found.unknown.items()
        ),
    )
    backends = {name: found.local.backend for name, found in models.items() if found.local}
    yield _gauge(
        "kvroute_tokenizer_info",
        "Always 1, for models with `models[].tokenizer`; `library` is "
        "`fastokens` or `tokenizers`, `reason` why it is the latter.",
        ("model", "library", "reason"),
        (((name, found.name, found.reason or ""), 1) for name, found in backends.items()),
    )
    caches = {
        (name,): found.local.cache
        for name, found in models.items()
        if found.local and found.local.cache
    }
    yield _counter(
        "kvroute_token_cache_hits",
        "Pieces of text whose token ids were cached; only where `tokenizers` tokenises.",
        ("model",),
        ((labels, cache.hits) for labels, cache in caches.items()),
    )
    yield _counter(
        "kvroute_token_cache_misses",
        "Pieces of text that were tokenised; only where `tokenizers` tokenises.",
        ("model",),
        ((labels, cache.misses) for labels, cache in caches.items()),
    )


def _work_metrics(parts: CollectedParts) -> Iterator[Metric]:
    """What the router does at this moment."""
    for name, text, value in (
        (
            "kvroute_requests_under_way",
            "Requests admitted and not ended.",
            parts.admission.under_way,
        ),
        (
            "kvroute_event_loop_tasks",
            "Tasks of the event loop: what it does at once. Idle, a router "
            "has as many as before it was busy.",
            len(asyncio.all_tasks()),
        ),
        (
            "kvroute_buffered_bytes",
            "Bodies of the requests under way, in bytes; bounded by `server.max_buffered_bytes`.",
            parts.admission.buffered_bytes,
        ),
    ):
        yield _single(name, text, value)


def _router_metrics(parts: CollectedParts) -> Iterator[Metric]:
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
    yield from _remembered_metrics(parts)


def _remembered_metrics(parts: CollectedParts) -> Iterator[Metric]:
    """Connections that are kept, and what is known of prompts and responses."""
    connections, recent = parts.connections, parts.recent.statistics()
    responses, mirror = parts.responses.statistics(), parts.mirror.statistics()
    for name, text, value in (
        (
            "kvroute_upstream_connections",
            "Connections to replicas.",
            connections.get("connections", 0),
        ),
        (
            "kvroute_upstream_idle_connections",
            "Connections to replicas that are idle.",
            connections.get("idle", 0),
        ),
        (
            "kvroute_recent_prefix_keys",
            "Pieces of 64 prompt tokens remembered as recently sent.",
            recent.entries,
        ),
        (
            "kvroute_mirror_keys",
            "Pieces of 64 prompt tokens of which it is remembered who used "
            "them last, over all caches.",
            mirror.keys,
        ),
        (
            "kvroute_mirror_kept_keys",
            "What `policy.mirror_max_keys` bounds: pieces of 64 tokens of the prompts of which "
            "something is remembered so, and four for each prompt.",
            mirror.kept,
        ),
        (
            "kvroute_stored_responses",
            "Stored responses of `/v1/responses` whose replica is known.",
            responses.known,
        ),
    ):
        yield _single(name, text, value)
    yield CounterMetricFamily(
        "kvroute_response_lookups",
        "Times that the replicas were asked who has a stored response.",
        value=responses.asked,
    )


_BOARD_GAUGES: _Table[BoardStatistics] = (
    (
        "kvroute_board_up",
        "1 while other routers can be heard over this board: `valkey`.",
        lambda found: found.is_up,
    ),
    (
        "kvroute_board_writers",
        "Other routers that are heard over this board.",
        lambda found: found.writers,
    ),
    (
        "kvroute_board_oldest_seconds",
        "Age of the oldest word of those that are heard over this board; half a second is usual.",
        lambda found: found.oldest_s,
    ),
    (
        "kvroute_board_clock_off_seconds",
        "How far the clock here is ahead of another router's (behind: negative), while that is too"
        " much for its words to be believed; else 0.",
        lambda found: found.clock_off_s,
    ),
)
_BOARD_COUNTERS: _Table[BoardStatistics] = (
    (
        "kvroute_board_published",
        "Times that something new was said over this board.",
        lambda it: it.published,
    ),
    (
        "kvroute_board_failures",
        "Times that this board could not be reached, and words that could not be read, were sealed"
        " with another secret, or were old.",
        lambda found: found.failures,
    ),
)


def _board_metrics(parts: CollectedParts) -> Iterator[Metric]:
    board = parts.board
    boards = [] if board is None else [((board.kind,), board.statistics())]
    for name, text, value in _BOARD_GAUGES:
        yield _gauge(name, text, ("board",), [(kind, value(found)) for kind, found in boards])
    for name, text, value in _BOARD_COUNTERS:
        yield _counter(name, text, ("board",), [(kind, value(found)) for kind, found in boards])
    yield CounterMetricFamily(
        "kvroute_board_foreign_prefixes",
        "Prompts of others that were told under keys of another secret, and are of no use.",
        value=parts.foreign_prefixes,
    )


def _snapshot_metrics(parts: CollectedParts) -> Iterator[Metric]:
    kept, peers, sender = parts.snapshots, parts.peers, parts.sender
    for name, text, value in (
        ("saved", "Snapshots of the index that were written.", kept.saved if kept else 0),
        (
            "failed",
            "Snapshots that could not be written; the log says why.",
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
            "Answers of other routers that were of no use; the log says why.",
            peers.refused if peers else 0,
        ),
    ):
        yield CounterMetricFamily(f"kvroute_snapshots_{name}", text, value=value)
    yield _single(
        "kvroute_snapshot_bytes",
        "Size of the last snapshot written.",
        kept.saved_bytes if kept else 0,
    )


def _single(name: str, text: str, value: float) -> Metric:
    """A gauge without labels."""
    return GaugeMetricFamily(name, text, value=value)


# --- what waits -----------------------------------------------------------------------------------


def _queue_metrics(parts: CollectedParts) -> Iterator[Metric]:
    """What waits for room at a replica; no series where nothing may wait."""
    lines = {} if parts.room is None else parts.room.statistics()
    found = [
        ((model, name), waiting)
        for model, classes in lines.items()
        for name, waiting in zip(parts.priorities, classes, strict=True)
    ]
    labels = ("model", "priority")
    yield _gauge(
        "kvroute_queue_requests",
        "Requests that wait for room at a replica.",
        labels,
        [(values, waiting.requests) for values, waiting in found],
    )
    yield _gauge(
        "kvroute_queue_tokens",
        "What the requests that wait for room cost: prompt tokens to "
        "compute, and the usual length of a response.",
        labels,
        [(values, waiting.tokens) for values, waiting in found],
    )


def _reservation_metrics(parts: CollectedParts) -> Iterator[Metric]:
    yield _single(
        "kvroute_reservations",
        "Requests that gateways send themselves, booked and not ended; bounded by "
        "`doors.max_reservations`.",
        parts.reservations,
    )
    yield _counter(
        "kvroute_reservation_ends",
        "Reservations that have ended: `completed`, `client_left`, `failed` as their gateway said; "
        "`expired`, since it said nothing for `doors.reservation_idle_s`; `replica_gone`, "
        "`abandoned` without its word.",
        ("end",),
        [((end,), count) for end, count in parts.reservation_ends.items()],
    )


def _key_metrics(limits: KeyLimits) -> Iterator[Metric]:
    """What the holders of limited keys use. The names of keys are the operator's."""
    usages = limits.usages.items()
    labels = ("key",)
    yield _counter(
        "kvroute_key_requests",
        "Requests with a key that has limits (`server.client_api_keys[]`).",
        labels,
        [((name,), usage.total_requests) for name, usage in usages],
    )
    yield _counter(
        "kvroute_key_tokens",
        "Tokens of prompts and responses with a key that has limits.",
        labels,
        [((name,), usage.total_tokens) for name, usage in usages],
    )
    yield _gauge(
        "kvroute_key_in_flight",
        "Requests under way with a key that has limits.",
        labels,
        [((name,), usage.counts().in_flight) for name, usage in usages],
    )
    yield _counter(
        "kvroute_key_refusals",
        "Requests that a limit of their key refused: `requests`, `tokens`, `in_flight`, `model`.",
        ("key", "limit"),
        [
            ((name, limit), count)
            for name, usage in usages
            for limit, count in usage.refusals.items()
        ],
    )
