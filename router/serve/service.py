"""Makes and wires the parts of one router, and closes them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from prometheus_client import CollectorRegistry

from kvevents.events import GPU
from kvevents.stream_state import SourceState
from kvevents.tasks import begin_lasting
from router.config.certificates import PEERS, context_of, replica_certificate
from router.config.schema import RouterConfig
from router.doors.reservations import Reservations
from router.feed.feed import Feed
from router.feed.snapshot_file import SnapshotKeeper, SnapshotRestorer, read_file
from router.feed.snapshot_peers import PeerLimits, Peers, Sender, peer_key
from router.feed.snapshot_records import IndexSnapshot
from router.fleet.client import UpstreamClient
from router.fleet.discovery.keeper import CONFIGURATION, ReplicaKeeper, make_providers
from router.fleet.entrance import Entrance, line_limits
from router.fleet.limits import KeyLimits
from router.fleet.load import LoadTracker
from router.fleet.probes import ProbeFetch
from router.fleet.registry import ReplicaRegistry
from router.fleet.room import RoomListener, WaitingRoom
from router.fleet.watchers import Watchers
from router.index.base import SourceId
from router.index.index import PrefixIndex
from router.plane.relays import PlaneProxy
from router.policies.policies import LEAST_DELAY, PolicySettings, make_policy
from router.prompt.processes import LargeWork
from router.routing.admission import Admission
from router.routing.booking import Bookings
from router.routing.decision import ANY_MODEL
from router.routing.dispatcher import Dispatcher
from router.routing.models import ModelSet
from router.routing.planner import Known, RoutePlanner
from router.routing.prefill_requests import PrefillRequests
from router.routing.recent_prefixes import RecentPrefixes
from router.routing.replica_tokenizers import ReplicaTokenizers, TokenizerCheck
from router.routing.stored_responses import StoredResponses
from router.routing.versions import Versions
from router.serve.follower import ReplicaFollower
from router.serve.settings import (
    ReplicaResponses,
    approximate_of,
    curve_keys,
    differences,
    gate_options,
    hold_hash_key,
    make_tracing_of,
    mirror_of,
    patient_timeouts,
    proxy_timeouts,
    repair_times,
    retry_limits,
    secret_of,
    subscriber_options,
    with_live_options,
)
from router.sharing.board import Board, BoardExchange
from router.sharing.exchange import Sharing, valkey_board
from router.telemetry.history import BlockCounts, History, Removals
from router.telemetry.metrics import RouterMetrics
from router.telemetry.parts import RouterParts
from router.telemetry.readiness import Readiness
from router.telemetry.request_log import RequestLog
from router.telemetry.request_observer import RequestObservers
from router.telemetry.self_repair import CacheFacts, SelfRepair
from router.telemetry.shortages import Shortages

logger = logging.getLogger(__name__)

FORGET_RESTORED_AFTER_S = 300.0
"""Replicas of a snapshot that no provider has named by then are forgotten."""


class RouterService(RouterParts):
    """One router. Make it anywhere; everything runs between `start` and `stop`, on one event loop.

    It owns every part, and makes each from those above it. `stop` closes what is marked, from the
    bottom up:

        admission, shortages, metrics, request_log      counts, for all others
        tracing           *  the spans that are sent
        load, mirror, recent                            requests in flight, computed, just sent
        upstream          *  connections of the router itself to replicas
        watchers             ask replicas about themselves; the registry closes them
        registry          *  the replicas: health, models, load
        key_limits, entrance                            what clients may use, and where they wait
        tokenizer_check   *  do replicas tokenise as the router does?
        feed              *  the event streams, into the indexes of `models`
        models            *  of each model the index, the tokenizer, the retention hints
        snapshots, peers, sender                        what outlives a restart
        keeper            *  the providers of replicas
        readiness, repair                               sources waited for, and rebuilt
        planner, responses, dispatcher                  where a request goes
        proxy                                           how it gets there
        history, observers, follower  *                 what happened, and what follows from it
        reservations      *  what gateways have booked
        sharing, exchange *  what other routers know
    """

    def __init__(
        self,
        config: RouterConfig,
        registry: CollectorRegistry | None = None,
        new_index: Callable[..., PrefixIndex] = PrefixIndex,
    ) -> None:
        """Load tokenizers and make the parts, each from parts that exist already.

        Args:
            registry: Takes the metrics; None: a registry of their own.
            new_index: Makes the index of a model; takes a `secret` shared with other routers.
        Raises:
            ConfigError: A tokenizer, chat template or certificate cannot be used.
            PolicyError: The policy cannot be made.
        """
        self.config = config
        server = config.server
        self._secret = secret_of(config)
        self.board = valkey_board(config.board, self._secret)
        self.sharing = None
        self.admission = Admission(server.max_concurrent_requests, server.max_buffered_bytes)
        self.shortages = Shortages()
        self.metrics = RouterMetrics(registry or CollectorRegistry())
        self.tracing = make_tracing_of(config, self.metrics)
        self.tracer = None if self.tracing is None else self.tracing.tracer
        self.request_log = RequestLog()
        self.mirror = mirror_of(config)
        self._load = LoadTracker(self.mirror.books)
        policy = config.policy
        self.recent = RecentPrefixes(
            self._load.books, policy.recent_ttl_s, policy.recent_max_entries
        )
        self._large_work = LargeWork()
        self.replica_certificate = replica_certificate(server.replica_tls)
        self.peer_certificate = replica_certificate(config.state.peer_tls, PEERS)
        trusted = functools.partial(context_of, self.replica_certificate)
        self._upstream = UpstreamClient(trusted, self.shortages.note)
        self._probes = ProbeFetch(self._upstream)
        self.count_connections = dict
        self._make_overload()
        self._make_caches(new_index)
        self._make_routing()
        self._watchers.decisions = self.planner.decider.decisions
        self._make_observation()
        self.registry.subscribe(self.follower)
        self.exchange = None if self.board is None else self._make_exchange(self.board)
        self._exchanging: asyncio.Task[None] | None = None

    def _make_overload(self) -> None:
        """Make the replicas with their limits, the limits of keys, and the queue for room, if
        any."""
        config, overload, metrics = self.config, self.config.overload, self.metrics
        self._watchers = Watchers(self._probes, config.health, self._load)
        self.registry = ReplicaRegistry(
            self._watchers, config.health, self._load, gates=gate_options(config)
        )
        self.key_limits = KeyLimits(self.config.server.client_keys)
        self.entrance = None
        if not overload.is_queueing:
            return
        names = overload.priorities
        listener = RoomListener(
            lambda model, number, seconds: metrics.queue_wait.labels(model, names[number]).observe(
                seconds
            ),
            lambda model, number, why: metrics.queue_refusals.labels(
                model, names[number], why
            ).inc(),
        )
        self.entrance = Entrance(overload, WaitingRoom(line_limits(overload), listener))

    def _make_caches(self, new_index: Callable[..., PrefixIndex]) -> None:
        """Make the models, and the parts that follow caches."""
        config = self.config
        tokenizers = ReplicaTokenizers(
            self._upstream,
            self.registry,
            self._load,
            config.server.timeouts.tokenize_s,
            patient_timeouts(config),
        )
        self.tokenizer_check = TokenizerCheck(tokenizers.ask)
        hold_hash_key(config)
        self.feed = Feed(
            lambda model: self.models.index_of(model),
            subscriber_options(config),
            curve_keys(config),
            config.events.curve_server_key,
            self._upstream,
        )
        self.approximate = approximate_of(config, self.feed, self.mirror)
        if self._secret is not None:  # all routers with it have the same keys for prefixes
            new_index = functools.partial(new_index, secret=self._secret)
        self.models = ModelSet(
            config.models,
            tokenizers.ask_one_of,
            new_index,
            self._large_work,
            Versions(config.versioned_models),
        )
        self._make_snapshots()
        self.keeper = ReplicaKeeper(self.registry, config.discovery.linger_s)
        self.readiness = Readiness(
            self.admission,
            self.registry,
            self.feed,
            self.keeper.named,
            config.health.ready_wait_s,
            self.keeper.waits_for,
        )
        self.repair = SelfRepair(
            self.feed.rebuild,
            self._is_judged,
            self._cache_facts,
            repair_times(config),
            config.events.self_repair,
        )

    def _make_routing(self) -> None:
        config = self.config
        self.planner = RoutePlanner(
            make_policy(config.policy.name, PolicySettings(config.weights, config.policy.options)),
            Known(
                self._load,
                self.feed.suspects,
                None if config.policy.name == LEAST_DELAY else self.recent,
                self.mirror,
                self.approximate,
                config.health.engine_load_stale_after_s,
            ),
            weights=config.weights,
        )
        self.responses = StoredResponses(ReplicaResponses(self._upstream, config).has)
        self.dispatcher: Dispatcher = Dispatcher(
            self.models,
            self.registry,
            self.planner,
            config.policy.name,
            self.responses,
            self._large_work,
            owns_priority=config.owns_priority,
            prefill_min_uncached_tokens=config.prefill.min_uncached_tokens,
        )
        self.proxy = PlaneProxy(
            proxy_timeouts(config),
            retry_limits(config),
            self.shortages.note,
            PrefillRequests(self._upstream).send,
        )

    def _cache_counts(self) -> dict[str, BlockCounts]:
        """Return the blocks that the caches of each replica hold and have lost."""
        held = {replica.id: 0 for replica in self.registry.replicas()}
        removed: dict[str, Counter[int]] = {name: Counter() for name in held}
        caches = self.models.index_statistics()
        for source, cache in caches.items():
            if source.replica in held:
                on_gpu = sum(count for (_, tier), count in cache.blocks.items() if tier == GPU)
                held[source.replica] += on_gpu
        lost = self._removals.since_followed(
            {source: cache.removed for source, cache in caches.items()},
            {source: feed.removed for source, feed in self.feed.statistics().items()},
        )
        for source, counts in lost.items():
            if source.replica in held:
                removed[source.replica].update(counts)
        return {name: BlockCounts(held[name], removed[name]) for name in held}

    def _knows_model(self, name: str) -> bool:
        return name == ANY_MODEL or self.models.get(name) is not None

    def _make_observation(self) -> None:
        self.metrics.knows_model = self._knows_model
        self._removals = Removals()
        self.history = History(self.metrics, self._cache_counts)
        self.observers = RequestObservers(
            bookings=Bookings(self._load, self.planner.visits, self.repair.quiet),
            metrics=self.metrics,
            replicas=self.registry,
            log=self.request_log,
            responses=self.responses,
            repair=self.repair,
            shortages=self.shortages,
            taps=self.feed.taps,
        )
        self.follower = ReplicaFollower(
            registry=self.registry,
            models=self.models,
            entrance=self.entrance,
            tokenizer_check=self.tokenizer_check,
            feed=self.feed,
            planner=self.planner,
            observers=self.observers,
            beginning=self._beginning,
        )
        doors = self.config.doors
        self.reservations = Reservations(doors.max_reservations, doors.reservation_idle_s)
        self.follower.on_gone = self.reservations.replica_gone

    def _make_snapshots(self) -> None:
        """Make the parts that restore snapshots of caches and write them."""
        state, secret = self.config.state, self._secret
        self.snapshots = self.peers = self.sender = None
        self.peer_key: str | None = None
        self._saving: asyncio.Task[None] | None = None
        if secret is not None and state.peers:
            self.sender = Sender(self.feed, secret, state.peer_max_bytes, state.peer_timeout_s)
            self.peer_key = peer_key(secret)
            limits = PeerLimits(state.peer_timeout_s, state.peer_max_bytes, state.max_age_s)
            trusted = functools.partial(context_of, self.peer_certificate)
            self.peers = Peers(state.peers, secret, limits, trusted)
        places: list[Callable[[], Awaitable[IndexSnapshot | None]]] = []
        if self.peers is not None:
            places.append(self.peers.fetch)
        if state.directory is not None:
            directory = Path(state.directory)
            self.snapshots = SnapshotKeeper(self.feed, directory, state.interval_s)
            places.append(
                functools.partial(asyncio.to_thread, read_file, directory, state.max_age_s)
            )
        self._beginning = SnapshotRestorer(places, self.feed, self.config.board.secret is not None)

    def _make_exchange(self, board: Board) -> BoardExchange:
        sharing = self.sharing = Sharing(
            self._load,
            self.mirror,
            self.recent,
            self.registry,
            self.repair.quiet,
            self.models.get,
            self.key_limits,
        )
        exchange = BoardExchange(board, sharing.collect, sharing.take)
        # Only where chance decides between equals, not where it decides everything.
        breaks_ties = self.config.policy.name in ("prefix", LEAST_DELAY)
        self.planner.share(exchange.catch_up, exchange.soon, breaks_ties)
        return exchange

    def publish_soon(self) -> None:
        """Publish soon, since other routers should know of a new prompt."""
        if self.exchange is not None:
            self.exchange.soon()

    def _is_judged(self, model: str, source: SourceId) -> bool:
        disagrees = self.tokenizer_check.disagreements.get((model, source.replica), 0)
        return not disagrees and self.feed.state(source) is SourceState.LIVE

    def _cache_facts(self, model: str, source: SourceId) -> CacheFacts:
        cache = self.models.index_of(model).statistics().get(source)
        if cache is None:
            return CacheFacts()
        return CacheFacts(
            None if cache.layout is None else cache.layout.scheduler_block_size,
            cache.unplaced > 0 and cache.hash_algorithm is None,
        )

    async def start(self) -> None:
        """Add the configured replicas, and follow the providers of others."""
        if self.tracing is not None:
            self.tracing.start()
        events = self.config.events
        if events.listen is not None:
            self.feed.listen(events.listen, events.listen_ranks)
        self.follower.start()
        self.history.start()
        if self.exchange is not None:
            consequence = "nothing arrives from other routers any more"
            self._exchanging = begin_lasting(self.exchange.run(), "board", consequence)
        if self.snapshots is not None:
            consequence = "the index is not saved any more"
            self._saving = begin_lasting(self.snapshots.run(), "snapshots", consequence)
        self._forgetting = asyncio.get_running_loop().call_later(
            FORGET_RESTORED_AFTER_S, self._beginning.forget
        )
        self.keeper.take(CONFIGURATION, self.config.replicas)
        self.keeper.follow_only(make_providers(self.config.discovery, os.environ))

    def reconfigure(self, config: RouterConfig) -> list[str]:
        """Take over a configuration while requests run: replicas that it no longer names are
        drained first, and no request is cut.

        Returns:
            Paths of the options that differ and need a restart, as `server.port`.
        """
        before, self.config = self.config, with_live_options(self.config, config)
        self.keeper.linger_s = config.discovery.linger_s
        self.keeper.take(CONFIGURATION, config.replicas)
        if config.discovery != before.discovery:
            self.keeper.follow_only(make_providers(config.discovery, os.environ))
        logging.getLogger().setLevel(config.observability.log_level.upper())
        return sorted(differences(self.config, config))

    async def stop(self) -> None:
        """Leave nothing running: no task, thread or socket."""
        self.reservations.end_all()
        self._forgetting.cancel()
        self.history.stop()
        if self.snapshots is not None and self._saving is not None:
            self._saving.cancel()
            await asyncio.wait([self._saving])
            await self.snapshots.save()
        if self._exchanging is not None:
            self._exchanging.cancel()
            await asyncio.wait([self._exchanging])
        await self.keeper.close()
        await self.registry.close()
        await self.tokenizer_check.close()
        await self.follower.close()
        await self.feed.close()
        self._probes.close()
        await self._upstream.close()
        self.models.close()
        self._large_work.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.stop)

    @contextlib.asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """Run from the start of the parts to their end."""
        await self.start()
        try:
            yield
        finally:
            await self.stop()
