"""The parts of one router, wired; and what follows when replicas change."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from pydantic import BaseModel

from kvevents.curve import CurveKeys, read_keys
from kvevents.errors import CurveError, HashKeyError, KVEventsError
from kvevents.events import GPU
from kvevents.live import BacklogLimits
from kvevents.replay import ReplayLimits
from kvevents.sealing import hold_key, read_hash_key
from kvevents.sockets import SocketLimits
from kvevents.stream_state import SourceState
from kvevents.subscriber import SubscriberOptions
from router.config import RouterConfig
from router.config.certificates import PEERS, replica_certificate
from router.config.origin import Header, Origin, Timeouts
from router.config.values import POLLED
from router.doors import Reservations, ReservationStatistics, address_of
from router.errors import ConfigError, ConfigProblem
from router.feed.beginning import Beginning
from router.feed.feed import Feed
from router.feed.snapshot_file import SnapshotKeeper, read_file
from router.feed.snapshot_peers import PeerLimits, Peers, peer_key
from router.feed.snapshot_records import IndexSnapshot
from router.feed.snapshot_transfer import Sender
from router.fleet.client import UpstreamClient
from router.fleet.client_errors import ResponseTooLarge, UpstreamError
from router.fleet.discovery import CONFIGURATION, ReplicaKeeper, make_providers
from router.fleet.entrance import Entrance, line_limits
from router.fleet.gate import GateOptions
from router.fleet.limits import KeyLimits
from router.fleet.load import LoadTracker
from router.fleet.registry import ReplicaListener, ReplicaRegistry
from router.fleet.replica import Replica
from router.fleet.room import RoomListener, WaitingRoom
from router.fleet.types import EventSource, ReplicaState, ServedModels
from router.fleet.watcher import UpstreamFetch
from router.index import PrefixIndex, SourceId
from router.index.approximate import ApproximateCaches
from router.index.mirror import Mirror
from router.plane import PlaneProxy
from router.plane.attempts import RetryLimits
from router.plane.proxy_types import ProxySettings
from router.policies import LEAST_DELAY, PolicySettings, make_policy
from router.prompt import LargeWork
from router.routing.admission import Admission
from router.routing.dispatcher import Dispatcher
from router.routing.models import Model, ModelSet
from router.routing.planner import RoutePlanner
from router.routing.recent_prefixes import RecentPrefixes
from router.routing.replica_tokenizers import ReplicaTokenizers, TokenizerCheck
from router.routing.stored_responses import StoredResponses
from router.routing.versions import Versions
from router.sharing.board import Board, BoardExchange
from router.sharing.exchange import Sharing, valkey_board
from router.telemetry.collector import collect, fields_as_metrics
from router.telemetry.history import BlockCounts, History, Removals
from router.telemetry.metrics import RouterMetrics
from router.telemetry.parts import RouterParts
from router.telemetry.readiness import Readiness
from router.telemetry.request_log import RequestLog
from router.telemetry.request_observer import RequestObservers
from router.telemetry.self_repair import CacheFacts, RepairTimes, SelfRepair
from router.telemetry.shortages import Shortages

if TYPE_CHECKING:
    from router.routing.ranker import Ranker
    from router.telemetry.otel import OtelTracing

logger = logging.getLogger(__name__)

_RESPONSE_BYTES = 16 * 1024 * 1024
_RESPONSE_S = 2.0


FORGET_RESTORED_AFTER_S = 300.0
"""What a snapshot says of replicas that nobody has named by then is forgotten."""


class RouterService(RouterParts):
    """One router. Make it anywhere; everything runs between `start` and `stop`, on one event
    loop."""

    def __init__(
        self,
        config: RouterConfig,
        registry: CollectorRegistry | None = None,
        new_index: Callable[..., PrefixIndex] = PrefixIndex,
    ) -> None:
        """Load tokenizers and make the parts, each from parts that exist already.

        Args:
            config: The whole configuration.
            registry: Where the metrics are registered; None: a registry of their own.
            new_index: Makes the index of a model; see `ModelSet`.
        Raises:
            ConfigError: A tokenizer, chat template or certificate cannot be used.
            PolicyError: The policy cannot be made.
        """
        self.config = config
        server = config.server
        self._secret = _secret(config)
        self.board = valkey_board(config.board, self._secret)
        self.sharing = None
        self.admission = Admission(server.max_concurrent_requests, server.max_buffered_bytes)
        self.shortages = Shortages()
        self.metrics = RouterMetrics(registry or CollectorRegistry())
        self.tracing = _make_tracing(config, self.metrics)
        self.request_log = RequestLog()
        self.mirror = _mirror(config)
        self._load = LoadTracker()
        policy = config.policy
        self.recent = RecentPrefixes(
            self._load.books, policy.recent_ttl_s, policy.recent_max_entries
        )
        self._large_work = LargeWork()
        self.replica_certificate = replica_certificate(server.replica_tls)
        self.peer_certificate = replica_certificate(config.state.peer_tls, PEERS)
        trusted = self.replica_certificate and self.replica_certificate.context
        self._upstream = UpstreamClient(trusted, self.shortages.note)
        self.count_connections = dict
        self._make_overload()
        self._make_caches(new_index)
        planner = self._planner = self._make_routing()
        self.registry.decisions = planner.ranker.decider.decisions
        self._make_observation(planner)
        self.registry.subscribe(self._follower)
        self.exchange = None if self.board is None else self._make_exchange(self.board, planner)
        self._exchanging: asyncio.Task[None] | None = None

    def _make_overload(self) -> None:
        """The replicas, each with what it may be given; what the holders of keys may use; and where
        requests wait for room, if they do."""
        config, overload, metrics = self.config, self.config.overload, self.metrics
        self.registry = ReplicaRegistry(
            UpstreamFetch(self._upstream), config.health, self._load, gates=_gate_options(config)
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
        """Make what is known of models and caches, and how it is kept true."""
        config = self.config
        tokenizers = ReplicaTokenizers(
            self._upstream,
            self.registry,
            self._load,
            config.server.timeouts.tokenize_s,
            _patient_timeouts(config),
        )
        self.tokenizer_check = TokenizerCheck(tokenizers.ask)
        _hold_hash_key(config)
        self.feed = Feed(
            lambda model: self.models.index_of(model),
            _subscriber_options(config),
            _curve_keys(config),
            config.events.curve_server_key,
            self._upstream,
        )
        self.approximate = _approximate(config, self.feed, self.mirror)
        self.models = ModelSet(
            config.models,
            tokenizers.ask_one_of,
            new_index,
            self._large_work,
            self._secret,
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
            _repair_times(config),
            config.events.self_repair,
        )

    def _make_routing(self) -> RoutePlanner:
        """Make what decides, and what sends."""
        config = self.config
        planner = RoutePlanner(
            make_policy(config.policy.name, PolicySettings(config.weights, config.policy.options)),
            self._load,
            None if config.policy.name == LEAST_DELAY else self.recent,
            self.feed.suspects,
            config.health.engine_load_stale_after_s,
            weights=config.weights,
            mirror=self.mirror,
            approximate=self.approximate,
        )
        self.responses = StoredResponses(_ReplicaResponses(self._upstream, config).has)
        self.dispatcher = Dispatcher(
            self.models,
            self.registry,
            planner,
            config.policy.name,
            self.responses,
            self._large_work,
            owns_priority=config.owns_priority,
        )
        self.proxy = PlaneProxy(_proxy_settings(config), self.shortages.note)
        return planner

    @property
    def parts_in_core(self) -> tuple[Ranker, Mirror, LoadTracker]:
        """Return what decides in the core."""
        return self._planner.ranker, self.mirror, self._load

    def on_give_up(self, call: Callable[[str, float], None]) -> None:
        """Have *call* end what is under way at a replica that does not respond: by the key of its
        origin, and the least silence of a stream in seconds."""
        self._follower.give_up = call

    def _cache_counts(self) -> dict[str, BlockCounts]:
        """Return what the caches of each replica hold and have lost."""
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

    def _make_observation(self, planner: RoutePlanner) -> None:
        """Make what follows requests and replicas."""
        self._removals = Removals()
        self.history = History(self.metrics, self._cache_counts)
        self.observers = RequestObservers(
            self._load,
            self.metrics,
            planner,
            self.registry,
            self.request_log,
            self.responses,
            self.repair,
            self.shortages,
            self.feed.taps,
        )
        self._follower = _ReplicaFollower(
            self.registry,
            self.models,
            self.feed,
            planner,
            self.tokenizer_check,
            self.observers,
            self.entrance,
            self._beginning,
        )
        doors = self.config.doors
        self.reservations = Reservations(doors.max_reservations, doors.reservation_idle_s)
        self._follower.on_gone = self.reservations.replica_gone

    def _make_snapshots(self) -> None:
        """Make what was known of caches before the start, and what keeps it over the next one."""
        state, secret = self.config.state, self._secret
        self.snapshots = self.peers = self.sender = None
        self.peer_key: str | None = None
        self._saving: asyncio.Task[None] | None = None
        if secret is not None and state.peers:
            self.sender = Sender(self.feed, secret, state.peer_max_bytes, state.peer_timeout_s)
            self.peer_key = peer_key(secret)
            limits = PeerLimits(state.peer_timeout_s, state.peer_max_bytes, state.max_age_s)
            trusted = self.peer_certificate and self.peer_certificate.context
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
        self._beginning = Beginning(places, self.feed, self.config.board.secret is not None)

    def _make_exchange(self, board: Board, planner: RoutePlanner) -> BoardExchange:
        """Make what publishes to the others, and receives what they publish."""
        sharing = self.sharing = Sharing(
            self._load,
            self.mirror,
            self.recent,
            self.registry,
            self.repair.quiet,
            self.models,
            self.key_limits,
        )
        exchange = BoardExchange(board, sharing.collect, sharing.take)
        # Only where chance decides between equals, not where it decides everything.
        has_lots = self.config.policy.name in ("prefix", LEAST_DELAY)
        planner.share(exchange.catch_up, exchange.soon, has_lots)
        return exchange

    def tell_others_soon(self) -> None:
        """Something has begun that routers which share their load should know of."""
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
        self._follower.start()
        self.history.start()
        if self.exchange is not None:
            self._exchanging = asyncio.create_task(self.exchange.run(), name="board")
            self._exchanging.add_done_callback(_report_end)
        if self.snapshots is not None:
            self._saving = asyncio.create_task(self.snapshots.run(), name="snapshots")
        self._forgetting = asyncio.get_running_loop().call_later(
            FORGET_RESTORED_AFTER_S, self._beginning.forget
        )
        self.keeper.take(CONFIGURATION, self.config.replicas)
        self.keeper.follow_only(make_providers(self.config.discovery, os.environ))

    def reconfigure(self, config: RouterConfig) -> list[str]:
        """Take over a configuration while requests run: replicas that it no longer names are
        drained first, and no request is cut.

        Args:
            config: The whole configuration, valid.
        Returns:
            Paths of the options that differ and need a restart, as `server.port`.
        """
        before, self.config = self.config, _with_live_options(self.config, config)
        self.keeper.linger_s = config.discovery.linger_s
        self.keeper.take(CONFIGURATION, config.replicas)
        if config.discovery != before.discovery:
            self.keeper.follow_only(make_providers(config.discovery, os.environ))
        logging.getLogger().setLevel(config.observability.log_level.upper())
        return sorted(_differences(self.config, config))

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
        await self._follower.close()
        await self.feed.close()
        await self._upstream.close()
        self.models.close()
        self._large_work.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.stop)

    @contextlib.asynccontextmanager
    async def lifespan(self, _app: object) -> AsyncIterator[None]:
        """Run from the start to the end of an ASGI application."""
        await self.start()
        try:
            yield
        finally:
            await self.stop()

    async def render_metrics(self, has_exemplars: bool = False) -> bytes:
        """Return all metrics in Prometheus' text format, or with exemplars in OpenMetrics'."""
        reservations = [((), self.reservations.statistics())]
        made = itertools.chain(
            collect(self), fields_as_metrics(ReservationStatistics, (), reservations)
        )
        return await self.metrics.render(made, has_exemplars)


def _report_end(task: asyncio.Task[None]) -> None:
    """The exchange ends only by cancellation; without it this process is less informed."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        logger.critical("%s ended; others are no longer heard", task.get_name(), exc_info=error)


def _with_live_options(old: RouterConfig, new: RouterConfig) -> RouterConfig:
    """*old* with what a running router takes over of *new*."""
    level = {"log_level": new.observability.log_level}
    return old.model_copy(
        update={
            "replicas": new.replicas,
            "discovery": new.discovery,
            "observability": old.observability.model_copy(update=level),
        }
    )


def _differences(one: BaseModel, other: BaseModel) -> Iterator[str]:
    """Paths of the options in which two sections of one kind differ."""
    for name in type(one).model_fields:
        left, right = getattr(one, name), getattr(other, name)
        if isinstance(left, BaseModel) and isinstance(right, BaseModel):
            yield from (f"{name}.{path}" for path in _differences(left, right))
        elif left != right:
            yield name


class _ReplicaFollower(ReplicaListener):
    """Holds what follows from a change of the replicas: their streams are followed, their
    tokenizers compared, and what was known of them is forgotten."""

    def __init__(
        self,
        registry: ReplicaRegistry,
        models: ModelSet,
        feed: Feed,
        planner: RoutePlanner,
        tokenizer_check: TokenizerCheck,
        observers: RequestObservers,
        entrance: Entrance | None,
        beginning: Beginning,
    ) -> None:
        self._registry = registry
        self._beginning = beginning
        self._entrance = entrance
        self._models = models
        self._feed = feed
        self._planner = planner
        self._tokenizer_check = tokenizer_check
        self._observers = observers
        self.give_up: Callable[[str, float], object] = lambda _origin, _for_s: None
        """Ends what the data plane has under way at an origin."""
        self.on_gone: Callable[[str], object] = lambda _: None
        """Ends what gateways have reserved at a replica."""
        self._feed_changes: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()
        self._feed_keeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to follow the streams of the replicas."""
        self._feed_keeper = asyncio.create_task(self._keep_feed(), name="feed keeper")

    async def close(self) -> None:
        """Change no stream any more."""
        if self._feed_keeper is not None:
            self._feed_keeper.cancel()
            await asyncio.wait([self._feed_keeper])

    # --- what the registry reports ----------------------------------------------------------------

    def on_state_changed(self, replica: Replica, before: ReplicaState) -> None:  # noqa: ARG002
        """A replica that failed may have lost what was sent to it; one that is healthy again may be
        another process."""
        if replica.state is ReplicaState.UNHEALTHY:
            self._planner.forget(replica.id)
        self._compare_tokenizers(replica)

    def on_unresponsive(self, replica: Replica, for_s: float) -> None:
        """Send elsewhere what waits there for a first byte, and end the streams that are silent.
        One that still flows is left alone: then it is only the checks that come too late."""
        self.give_up(replica.origin.key, for_s)

    def on_models_changed(self, replica: Replica, before: ServedModels) -> None:
        """Make its models known, and feed its streams into the index of its model."""
        self._planner.note_streams(replica)
        for name in replica.served.models:
            self._models.discover(name)
        for adapter, parent in replica.served.adapters:
            self._models.discover(adapter, parent)
        if before.models != replica.served.models:
            self._compare_tokenizers(replica)  # it may be healthy before its models are known
        if before.models and before.models != replica.served.models:
            self._follow(replica, replica.sources, ())
            self._follow(replica, (), replica.sources)
        self._forget_unserved_models()

    def on_sources_changed(self, replica: Replica, before: tuple[EventSource, ...]) -> None:
        """Follow the streams it has now."""
        self._planner.note_streams(replica)
        self._follow(replica, before, replica.sources)

    def on_removed(self, replica: Replica) -> None:
        """Forget it."""
        self._planner.note_streams(replica)
        self._planner.forget(replica.id)
        self._tokenizer_check.forget(replica.id)
        self.on_gone(replica.id)
        self._observers.forget_replica(replica.id)
        self._forget_unserved_models()

    # --- steps ------------------------------------------------------------------------------------

    def _forget_unserved_models(self) -> None:
        for model in self._models.forget_all_but(self._registry.models()):
            if self._entrance is not None:
                self._entrance.room.forget(model)
            self._planner.forget_model(model)
            self._observers.forget_model(model)

    def _follow(
        self, replica: Replica, before: tuple[EventSource, ...], now: tuple[EventSource, ...]
    ) -> None:
        """Queue the changes: leaving a stream takes a moment, and a stream must be left before it
        is followed again."""
        for gone in set(before) - set(now):
            self._feed_changes.put_nowait(
                functools.partial(self._feed.remove, SourceId(replica.id, gone.dp_rank))
            )
        model = self._model_of(replica)
        if model is None:
            return
        for new in set(now) - set(before):
            self._feed_changes.put_nowait(functools.partial(self._add_source, replica, new, model))

    def _compare_tokenizers(self, replica: Replica) -> None:
        model = self._model_of(replica)
        if replica.state is ReplicaState.HEALTHY and model is not None:
            self._tokenizer_check.start(replica, model)

    def _model_of(self, replica: Replica) -> Model | None:
        return self._models.discover(replica.served.models[0]) if replica.served.models else None

    async def _add_source(self, replica: Replica, source: EventSource, model: Model) -> None:
        await self._beginning.fill(model.name, model.index)
        if self._models.get(model.name) is not model:
            return  # it was removed again before its turn came
        self._feed.add(
            SourceId(replica.id, source.dp_rank),
            source.endpoint,
            source.replay_endpoint,
            source.topic or None,  # an empty topic subscribes to all of them
            model.name,
            model.hints_of(replica.id),
            source.snapshot_endpoint,
            replica.origin.allows,
            source.server_key,
            (replica.id, replica.origin.host, address_of(replica)),
            _headers_for(source, replica),
        )

    async def _keep_feed(self) -> None:
        await self._beginning.find()
        while True:
            change = await self._feed_changes.get()
            try:
                await change()
            except KVEventsError as error:
                logger.error("event streams: %s", error)


def _headers_for(source: EventSource, replica: Replica) -> Sequence[Header]:
    """What is sent to a source that is asked for its events: a replica's key goes to it alone."""
    if not source.endpoint.startswith(POLLED):
        return ()
    return replica.headers if Origin.parse(source.endpoint).key == replica.origin.key else ()


class _ReplicaResponses:
    """The stored responses of the replicas."""

    def __init__(self, upstream: UpstreamClient, config: RouterConfig) -> None:
        self._upstream = upstream
        times = config.server.timeouts.connect_s, config.health.timeout_s
        self._timeouts = Timeouts(min(times), min(*times, _RESPONSE_S), min(*times, _RESPONSE_S))

    async def has(self, replica: Replica, response_id: str) -> bool:
        """Return whether a replica has the response of that id, which must fit into a path."""
        target = b"/v1/responses/" + response_id.encode()
        try:
            status, _, _ = await self._upstream.fetch(
                replica.origin,
                b"GET",
                target,
                b"",
                self._timeouts,
                _RESPONSE_BYTES,
                replica.headers,
            )
        except ResponseTooLarge:
            return True
        except UpstreamError:
            return False
        return status == 200


def _secret(config: RouterConfig) -> bytes | None:
    """Return what routers share; None: keys of prefixes are understood by nobody else."""
    secret = config.board.secret
    return None if secret is None else secret.get_secret_value().encode()


def _gate_options(config: RouterConfig) -> GateOptions:
    overload = config.overload
    return GateOptions(
        overload.max_in_flight,
        overload.max_prefill_tokens,
        overload.breaker_failures,
        overload.breaker_open_s,
        overload.breaker_max_open_s,
        overload.max_back_off_s,
        overload.slow_start_s,
    )


def _make_tracing(config: RouterConfig, metrics: RouterMetrics) -> OtelTracing | None:
    """Make what sends traces; None where nothing does.

    Raises:
        ConfigError: OpenTelemetry is not installed, or a variable of it says what it must not.
    """
    if not config.observability.tracing.enabled:
        return None
    try:
        otel = import_module("router.telemetry.otel")
    except ImportError as error:
        rule = "it needs the extra otel: pip install '.[otel]' in kvroute's checkout"
        problem = ConfigProblem("observability.tracing.enabled", f"true; {rule} ({error})")
        raise ConfigError([problem]) from error
    made: OtelTracing | None = otel.make_tracing(
        config.observability.tracing, os.environ, metrics.traces
    )
    return made


def _mirror(config: RouterConfig) -> Mirror:
    prices = config.weights.tier_token, config.weights.lower_tier_token
    return Mirror(config.policy.mirror_max_keys, *prices)


def _approximate(config: RouterConfig, feed: Feed, mirror: Mirror) -> ApproximateCaches | None:
    options = config.approximate
    if not options.enabled:
        return None
    return ApproximateCaches(
        feed.lost_since, mirror, options.after_s, options.cache_tokens, options.max_keys
    )


def _proxy_settings(config: RouterConfig) -> ProxySettings:
    timeouts, retries = config.server.timeouts, config.server.retries
    return ProxySettings(
        Timeouts(timeouts.connect_s, timeouts.first_byte_s, timeouts.idle_s),
        retries=RetryLimits(retries.further_attempts, retries.budget_share, retries.budget_burst),
    )


def _patient_timeouts(config: RouterConfig) -> Timeouts:
    connect_s = config.server.timeouts.connect_s
    return Timeouts(connect_s, config.health.timeout_s + 5.0, connect_s)


def _repair_times(config: RouterConfig) -> RepairTimes:
    events = config.events
    return RepairTimes(
        wrong_for_s=events.self_repair_after_s,
        cool_down_s=events.rebuild_cool_down_s,
        quiet_s=events.self_repair_quiet_s,
    )


def _hold_hash_key(config: RouterConfig) -> None:
    """Have the key of streams without token ids.

    Raises:
        ConfigError: The file cannot be used.
    """
    path = config.events.hash_key
    try:
        if path is not None:
            hold_key(read_hash_key(Path(path)))
    except HashKeyError as error:
        raise ConfigError([ConfigProblem("events.hash_key", str(error))]) from None


def _curve_keys(config: RouterConfig) -> CurveKeys | None:
    """Our own keys for encrypted streams.

    Raises:
        ConfigError: The file cannot be used.
    """
    path = config.events.curve_keys
    try:
        return None if path is None else read_keys(Path(path))
    except CurveError as error:
        raise ConfigError([ConfigProblem("events.curve_keys", str(error))]) from error


def _subscriber_options(config: RouterConfig) -> SubscriberOptions:
    events = config.events
    return SubscriberOptions(
        max_probe_s=events.silent_after_s,
        socket=SocketLimits(message_bytes=events.max_frame_bytes),
        backlog=BacklogLimits(
            batches=events.max_queued_batches, payload_bytes=4 * events.max_frame_bytes
        ),
        replay=ReplayLimits(
            payload_bytes=events.max_replay_bytes, silence_s=events.replay_timeout_s
        ),
    )
