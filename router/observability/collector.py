"""The gauges, and the counters that parts keep themselves: read from their statistics at a
scrape."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from kvevents.delivery import SourceState
from router.feed import Feed, SourceFeedStatistics
from router.index.reference.index import SourceId, SourceStatistics
from router.observability.metrics import Family, counter, gauge
from router.replicas import ReplicaRegistry, ReplicaState, ReplicaView
from router.routing.models import ModelSet
from router.routing.recent_prefixes import RecentPrefixes
from router.routing.tokenizer_check import TokenizerCheck
from router.tokenize import TokenizationStatistics
from router.upstream import UpstreamClient

_SOURCE = ("model", "replica", "dp_rank")
_REPLICA = ("replica",)


class Parts(Protocol):
    """The parts of a router whose statistics are read."""

    feed: Feed
    registry: ReplicaRegistry
    models: ModelSet
    tokenizer_check: TokenizerCheck
    upstream: UpstreamClient
    recent: RecentPrefixes

    @property
    def under_way(self) -> int:
        """Requests admitted and not ended."""

    def index_statistics(self) -> dict[SourceId, SourceStatistics]:
        """Every source's blocks, over all models."""


def families(parts: Parts) -> Iterator[Family]:
    """Everything that is read at a scrape: numbers as of this call, families made when somebody
    goes through them."""
    feeds = parts.feed.statistics()
    return itertools.chain(
        _index_families(parts.index_statistics(), feeds),
        _feed_families(feeds),
        _replica_families(parts.registry.snapshot()),
        _tokenization_families(
            {model.name: model.tokenization.statistics() for model in parts.models}
        ),
        tuple(_own_families(parts)),
    )


# --- index and feed -------------------------------------------------------------------------------


def _labels(
    source: SourceId, feeds: Mapping[SourceId, SourceFeedStatistics]
) -> tuple[str, str, str]:
    model = feeds[source].model if source in feeds else ""
    return model, source.replica, str(source.dp_rank)


def _index_families(
    sources: Mapping[SourceId, SourceStatistics], feeds: Mapping[SourceId, SourceFeedStatistics]
) -> Iterator[Family]:
    blocks = {
        (*_labels(source, feeds), str(group), tier): float(count)
        for source, found in sources.items()
        for (group, tier), count in found.blocks.items()
    }
    yield gauge(
        "kvroute_index_blocks",
        "Distinct blocks held, by KV cache group and tier.",
        (*_SOURCE, "group", "tier"),
        blocks,
    )
    for name, help_text, value in _INDEX_GAUGES:
        yield gauge(
            name,
            help_text,
            _SOURCE,
            {_labels(source, feeds): value(found) for source, found in sources.items()},
        )


_INDEX_GAUGES: tuple[tuple[str, str, Callable[[SourceStatistics], float]], ...] = (
    (
        "kvroute_index_unplaced_blocks",
        "Blocks whose prefix is not known.",
        lambda found: found.unplaced,
    ),
    (
        "kvroute_index_waiting_runs",
        "Events that wait for their parent block.",
        lambda found: found.waiting_runs,
    ),
    (
        "kvroute_index_incomplete",
        "1 where blocks were refused or given up.",
        lambda found: found.is_incomplete,
    ),
)


def _feed_families(feeds: Mapping[SourceId, SourceFeedStatistics]) -> Iterator[Family]:
    for name, help_text, value in _FEED_COUNTERS:
        yield counter(
            name,
            help_text,
            _SOURCE,
            {_labels(source, feeds): value(found) for source, found in feeds.items()},
        )
    states = {
        (*_labels(source, feeds), state.value): float(found.state is state)
        for source, found in feeds.items()
        for state in SourceState
    }
    yield gauge(
        "kvroute_source_state",
        "1 for the state an event stream is in.",
        (*_SOURCE, "state"),
        states,
    )
    suspects = sum(found.state is SourceState.SUSPECT for found in feeds.values())
    yield gauge(
        "kvroute_suspect_sources",
        "Event streams with a loss that could not be repaired.",
        (),
        {(): float(suspects)},
    )
    now = time.monotonic()
    silent = {
        _labels(source, feeds): now - found.stream.last_message_at
        for source, found in feeds.items()
        if found.stream.last_message_at is not None
    }
    yield gauge(
        "kvroute_source_silence_seconds", "Since an event stream's last message.", _SOURCE, silent
    )


_FEED_COUNTERS: tuple[tuple[str, str, Callable[[SourceFeedStatistics], float]], ...] = (
    ("kvroute_event_batches", "Batches applied.", lambda found: found.stream.batches),
    (
        "kvroute_events_malformed",
        "Messages refused: no batch, or over a bound.",
        lambda found: found.stream.malformed,
    ),
    ("kvroute_events_duplicate", "Batches that came again.", lambda found: found.stream.duplicates),
    ("kvroute_events_gaps", "Gaps seen in the sequence numbers.", lambda found: found.stream.gaps),
    ("kvroute_events_replays", "Replays that brought batches.", lambda found: found.stream.replays),
    ("kvroute_events_snapshots", "Snapshots taken.", lambda found: found.stream.snapshots),
    ("kvroute_events_restarts", "Restarts of the publisher.", lambda found: found.stream.restarts),
    (
        "kvroute_events_unanswered",
        "Questions to the replay endpoint without an answer.",
        lambda found: found.stream.unanswered,
    ),
    (
        "kvroute_events_overflow",
        "Batches dropped because too many waited.",
        lambda found: found.stream.overflow,
    ),
    (
        "kvroute_source_connections",
        "Connections made to a publisher.",
        lambda found: found.stream.connections,
    ),
    ("kvroute_blocks_stored", "Blocks stored.", lambda found: found.stored),
    ("kvroute_blocks_removed", "Blocks removed.", lambda found: found.removed),
    (
        "kvroute_events_skipped",
        "Unknown event types, removals of unknown blocks, blocks over a bound.",
        lambda found: found.skipped,
    ),
)


# --- replicas -------------------------------------------------------------------------------------


def _replica_families(replicas: tuple[ReplicaView, ...]) -> Iterator[Family]:
    states = {
        (view.id, state.value): float(view.state == state.value)
        for view in replicas
        for state in ReplicaState
    }
    yield gauge(
        "kvroute_replica_state", "1 for the state a replica is in.", ("replica", "state"), states
    )
    for name, help_text, value in _REPLICA_GAUGES:
        yield gauge(name, help_text, _REPLICA, {(view.id,): value(view) for view in replicas})
    for name, help_text, value in _REPLICA_COUNTERS:
        yield counter(name, help_text, _REPLICA, {(view.id,): value(view) for view in replicas})


_REPLICA_GAUGES: tuple[tuple[str, str, Callable[[ReplicaView], float]], ...] = (
    (
        "kvroute_replica_healthy",
        "1 while the replica passes its checks.",
        lambda view: view.health == "healthy",
    ),
    (
        "kvroute_in_flight_requests",
        "Requests of this router under way there.",
        lambda view: view.load.requests,
    ),
    (
        "kvroute_in_flight_prefill_tokens",
        "Uncached prompt tokens waiting for a first token.",
        lambda view: view.load.prefill_tokens,
    ),
    ("kvroute_in_flight_decodes", "Answers under way.", lambda view: view.load.decoding_requests),
    (
        "kvroute_engine_running_requests",
        "By the engine's own gauge.",
        lambda view: view.gauges.running if view.gauges else 0,
    ),
    (
        "kvroute_engine_waiting_requests",
        "By the engine's own gauge.",
        lambda view: view.gauges.waiting if view.gauges else 0,
    ),
)
_REPLICA_COUNTERS: tuple[tuple[str, str, Callable[[ReplicaView], float]], ...] = (
    ("kvroute_health_checks", "Health checks.", lambda view: view.checks),
    ("kvroute_health_checks_failed", "Health checks that failed.", lambda view: view.failed_checks),
    (
        "kvroute_replica_failures",
        "Requests that failed by the replica's fault.",
        lambda view: view.failed_requests,
    ),
    (
        "kvroute_replica_outages",
        "Times the replica became unhealthy.",
        lambda view: view.times_unhealthy,
    ),
)


# --- tokenisation and the router itself -----------------------------------------------------------


def _tokenization_families(models: Mapping[str, TokenizationStatistics]) -> Iterator[Family]:
    coverage = {
        (name, kind.value): float(count)
        for name, found in models.items()
        for kind, count in found.prompts.items()
    }
    yield counter(
        "kvroute_tokenized_prompts",
        "Prompts by how much of them is known.",
        ("model", "coverage"),
        coverage,
    )
    reasons = {
        (name, reason): float(count)
        for name, found in models.items()
        for reason, count in found.unknown.items()
    }
    yield counter(
        "kvroute_untokenized_prompts",
        "Prompts not known in full, by reason.",
        ("model", "reason"),
        reasons,
    )
    local = {(name,): found.local.cache for name, found in models.items() if found.local}
    yield counter(
        "kvroute_token_cache_hits",
        "Pieces of text whose ids were kept.",
        ("model",),
        {key: float(kept.hits) for key, kept in local.items()},
    )
    yield counter(
        "kvroute_token_cache_misses",
        "Pieces of text that were tokenised.",
        ("model",),
        {key: float(kept.misses) for key, kept in local.items()},
    )


def _own_families(parts: Parts) -> Iterator[Family]:
    yield gauge(
        "kvroute_tokenizer_disagreements",
        "Probes that a replica tokenises differently from the router; every one means mispredicted hits.",
        ("model", "replica"),
        {key: float(count) for key, count in parts.tokenizer_check.disagreements.items()},
    )
    upstream, recent = parts.upstream.statistics(), parts.recent.statistics()
    yield gauge(
        "kvroute_requests_under_way",
        "Requests admitted and not ended.",
        (),
        {(): float(parts.under_way)},
    )
    yield gauge(
        "kvroute_upstream_connections",
        "Connections to replicas.",
        (),
        {(): float(upstream.connections)},
    )
    yield gauge(
        "kvroute_upstream_idle_connections",
        "Of these, kept for later.",
        (),
        {(): float(upstream.idle)},
    )
    yield gauge(
        "kvroute_recent_prefix_keys",
        "Prefixes remembered as just sent.",
        (),
        {(): float(recent.entries)},
    )
