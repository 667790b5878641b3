"""All parts of one router, wired; and what follows from a replica that comes, changes or goes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from random import Random

from prometheus_client import CollectorRegistry

from kvevents.errors import KVEventsError
from kvevents.live import BacklogLimits
from kvevents.replay import ReplayLimits
from kvevents.sockets import SocketLimits
from kvevents.subscriber import SubscriberOptions
from router.config import RouterConfig
from router.errors import NoReplica
from router.feed import Feed
from router.http.gateway import Gateway
from router.index import PrefixIndex, SourceId, SourceStatistics, create_index
from router.observability.collector import collect
from router.observability.metrics import RouterMetrics
from router.observability.request_log import Journal
from router.observability.request_observer import Bookkeeper
from router.proxy import Proxy, ProxySettings
from router.replicas import (
    EventSource,
    Replica,
    ReplicaRegistry,
    ReplicaState,
    ServedModels,
    UpstreamFetch,
)
from router.replicas.load import LoadTracker
from router.routing.dispatcher import Dispatcher
from router.routing.models import Model, ModelSet
from router.routing.planner import RoutePlanner
from router.routing.recent_prefixes import RecentPrefixes
from router.routing.tokenizer_check import TokenizerCheck
from router.scoring import PolicySettings, make_policy
from router.upstream import PoolLimits, Timeouts, UpstreamClient, UpstreamError

logger = logging.getLogger(__name__)

_TOKENIZE_ANSWER_BYTES = 32 * 1024 * 1024
_JSON = ((b"content-type", b"application/json"),)


class RouterService:
    """One router. Make it anywhere; everything runs between `start` and `stop`, on one event
    loop."""

    def __init__(
        self,
        config: RouterConfig,
        registry: CollectorRegistry | None = None,
        make_index: Callable[[], PrefixIndex] = create_index,
    ) -> None:
        """Load tokenizers and make the parts; each model's index comes from *make_index*.

        Raises:
            ConfigError: A tokenizer or chat template cannot be used.
            PolicyError: The policy cannot be made.
        """
        self.config = config
        self.metrics = RouterMetrics(registry or CollectorRegistry())
        self.load = LoadTracker()
        self.recent = RecentPrefixes(config.policy.recent_ttl_s, config.policy.recent_max_entries)
        self.upstream = UpstreamClient(
            PoolLimits(max_connections=config.server.max_upstream_connections)
        )
        self.models = ModelSet(config.models, self._ask_for_tokens, make_index)
        self.feed = Feed(lambda name: self.models.index_of(name), _subscriber_options(config))
        self._feed_changes: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()
        self._feed_keeper: asyncio.Task[None] | None = None
        self.registry = ReplicaRegistry(
            UpstreamFetch(self.upstream), config.health, self.load, listener=self
        )
        self.tokenizer_check = TokenizerCheck(self._ask)
        policy = make_policy(config.policy.name, _policy_settings(config))
        self.planner = RoutePlanner(
            policy,
            config.policy.name,
            self.load,
            self.recent,
            self.feed.is_suspect,
            config.health.gauges_stale_after_s,
        )
        self.dispatcher = Dispatcher(self.models, self.registry, self.planner, self.metrics)
        self.proxy = Proxy(self.upstream, _proxy_settings(config))
        self.journal = Journal()
        self.books = Bookkeeper(self.load, self.metrics, self.planner, self.registry, self.journal)
        self.gateway = Gateway(
            config.server, config.policy.session_header, self.dispatcher, self.proxy, self.books
        )

    # --- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Take up the configured replicas."""
        self._feed_keeper = asyncio.create_task(self._keep_feed(), name="feed keeper")
        for replica in self.config.replicas:
            self.registry.add(replica)

    async def stop(self) -> None:
        """Leave nothing running: no task, thread or socket."""
        await self.registry.close()
        await self.tokenizer_check.close()
        if self._feed_keeper is not None:
            self._feed_keeper.cancel()
            await asyncio.wait([self._feed_keeper])
        await self.feed.close()
        await self.upstream.close()
        self.models.close()

    @contextlib.asynccontextmanager
    async def lifespan(self, _app: object) -> AsyncIterator[None]:
        """For ASGI."""
        await self.start()
        try:
            yield
        finally:
            await self.stop()

    # --- what the API asks ------------------------------------------------------------------------

    def why_not_ready(self) -> str | None:
        """None if some replica can take requests now."""
        if self.gateway.is_shutting_down:
            return "the router is shutting down"
        healthy = [
            replica for replica in self.registry.replicas() if replica.state is ReplicaState.HEALTHY
        ]
        if not healthy:
            return f"none of {len(self.registry.replicas())} replicas is healthy"
        if not any(replica.served.models for replica in healthy):
            return f"none of {len(healthy)} healthy replicas has told yet what it serves"
        return None

    def served_names(self) -> list[str]:
        """Names of models and adapters that some healthy replica serves."""
        healthy = [replica for replica in self.registry.replicas() if replica.is_healthy]
        return [
            name for name in self.models.names() if any(replica.serves(name) for replica in healthy)
        ]

    @property
    def under_way(self) -> int:
        """Requests admitted and not ended."""
        return self.gateway.under_way

    def index_statistics(self) -> dict[SourceId, SourceStatistics]:
        """Every source's blocks, over all models."""
        return {
            source: found
            for model in self.models
            for source, found in model.index.statistics().items()
        }

    async def render_metrics(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return await self.metrics.render(collect(self))

    # --- what the registry tells (`ReplicaListener`) ----------------------------------------------

    def on_state_changed(self, replica: Replica, before: ReplicaState) -> None:  # noqa: ARG002
        """A replica that failed may have lost what was sent to it; one that came may be another
        than before."""
        if replica.state is ReplicaState.UNHEALTHY:
            self.recent.forget(replica.id)
        self._compare_tokenizers(replica)

    def on_models_changed(self, replica: Replica, before: ServedModels) -> None:
        """Make what it serves known, and follow its streams into the index of what it serves
        now."""
        for name in replica.served.models:
            self.models.discover(name)
        for adapter, parent in replica.served.adapters:
            self.models.discover(adapter, parent)
        if before.models != replica.served.models:
            self._compare_tokenizers(replica)  # it may be healthy before it has said what it serves
        if before.models and before.models != replica.served.models:
            self._follow(replica, replica.sources, ())
            self._follow(replica, (), replica.sources)
        self._forget_unserved_models()

    def on_sources_changed(self, replica: Replica, before: tuple[EventSource, ...]) -> None:
        """Follow the streams it has now."""
        self._follow(replica, before, replica.sources)

    def on_removed(self, replica: Replica) -> None:
        """Forget it."""
        self.recent.forget(replica.id)
        self.tokenizer_check.forget(replica.id)
        self.books.tells_cached_tokens.discard(replica.id)
        self.metrics.forget("replica", replica.id)
        self._forget_unserved_models()

    def _forget_unserved_models(self) -> None:
        for model in self.models.forget_all_but(self.registry.models()):
            self.metrics.forget("model", model)

    def _follow(
        self, replica: Replica, before: tuple[EventSource, ...], now: tuple[EventSource, ...]
    ) -> None:
        """Queue the changes: to leave a stream takes a moment, and it must be left before it is
        followed again."""
        for gone in set(before) - set(now):
            self._feed_changes.put_nowait(
                functools.partial(self.feed.remove, SourceId(replica.id, gone.dp_rank))
            )
        model = self._model_of(replica)
        if model is None:
            return
        for new in set(now) - set(before):
            self._feed_changes.put_nowait(functools.partial(self._add_source, replica, new, model))

    def _compare_tokenizers(self, replica: Replica) -> None:
        model = self._model_of(replica)
        if replica.state is ReplicaState.HEALTHY and model is not None:
            self.tokenizer_check.start(replica, model)

    def _model_of(self, replica: Replica) -> Model | None:
        return self.models.discover(replica.served.models[0]) if replica.served.models else None

    async def _add_source(self, replica: Replica, source: EventSource, model: Model) -> None:
        if self.models.get(model.name) is not model:
            return  # it was removed again before its turn came
        source_id = SourceId(replica.id, source.dp_rank)
        topic = source.topic or None  # nobody names the empty topic: it means whatever comes
        self.feed.add(
            source_id, source.endpoint, source.replay_endpoint, topic, model.name, model.hints
        )

    async def _keep_feed(self) -> None:
        while True:
            change = await self._feed_changes.get()
            try:
                await change()
            except KVEventsError as error:
                logger.error("event streams: %s", error)

    # --- asking replicas --------------------------------------------------------------------------

    async def _ask_for_tokens(self, model: str, path: str, body: bytes) -> tuple[int, bytes]:
        """POST to the least loaded healthy replica that serves *model*. Raises ConnectionError if
        none answers."""
        replica = min(
            self._healthy(model),
            key=lambda found: self.load.load_of(found.id).requests,
            default=None,
        )
        if replica is None:
            raise ConnectionError(NoReplica(model, "none is healthy"))
        return await self._ask(replica, path, body)

    async def _ask(self, replica: Replica, path: str, body: bytes) -> tuple[int, bytes]:
        """POST to one replica. Raises ConnectionError if it does not answer."""
        timeouts = self.config.server.timeouts
        limits = Timeouts(
            timeouts.connect_s, self.config.health.timeout_s + 5.0, timeouts.connect_s
        )
        try:
            status, _, answer = await self.upstream.fetch(
                replica.origin,
                b"POST",
                path.encode(),
                body,
                limits,
                _TOKENIZE_ANSWER_BYTES,
                (*_JSON, *replica.headers),
            )
        except UpstreamError as error:
            raise ConnectionError(error) from error
        return status, answer

    def _healthy(self, model: str) -> Iterator[Replica]:
        found = self.models.get(model)
        names = found.names if found else (model,)
        return (
            replica
            for name in names
            for replica in self.registry.serving(name)
            if replica.is_healthy
        )


def _policy_settings(config: RouterConfig) -> PolicySettings:
    return PolicySettings(config.policy.weights, config.policy.options, Random())


def _proxy_settings(config: RouterConfig) -> ProxySettings:
    timeouts = config.server.timeouts
    return ProxySettings(
        Timeouts(timeouts.connect_s, timeouts.first_byte_s, timeouts.idle_s),
        client_stall_s=timeouts.client_stall_s,
    )


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
