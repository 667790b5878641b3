"""Reacts to changes of replicas: follows their streams, knows their models, and forgets those
removed."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from kvevents.errors import KVEventsError
from kvevents.tasks import begin_lasting
from router.config.origin import Header, Origin
from router.config.values import POLLED
from router.feed.feed import Feed, SourceOptions
from router.feed.snapshot_file import SnapshotRestorer
from router.fleet.entrance import Entrance
from router.fleet.registry import ReplicaListener, ReplicaRegistry
from router.fleet.replica import Replica
from router.fleet.types import EventSource, ReplicaState, ServedModels
from router.index.base import SourceId
from router.routing.model import Model
from router.routing.models import ModelSet
from router.routing.planner import RoutePlanner
from router.routing.replica_tokenizers import TokenizerCheck
from router.telemetry.request_observer import RequestObservers

logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class ReplicaFollower(ReplicaListener):
    """Acts on a change of the replicas: their streams are followed, their tokenizers compared, and
    the state of removed ones forgotten."""

    registry: ReplicaRegistry
    models: ModelSet
    entrance: Entrance | None
    tokenizer_check: TokenizerCheck
    feed: Feed
    planner: RoutePlanner
    observers: RequestObservers
    beginning: SnapshotRestorer

    def __post_init__(self) -> None:
        self.give_up: Callable[[str, float], object] = lambda _origin, _for_s: None
        """Ends the data plane's requests at an origin that were silent for at least so many
        seconds."""
        self.on_gone: Callable[[str], object] = lambda _: None
        """Ends the gateways' reservations at a replica."""
        self._feed_changes: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()
        self._feed_keeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        consequence = "no event stream is followed or left any more"
        self._feed_keeper = begin_lasting(self._keep_feed(), "feed keeper", consequence)

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
            self.planner.visits.forget(replica.id)
        self._compare_tokenizers(replica)

    def on_unresponsive(self, replica: Replica, for_s: float) -> None:
        """Send requests that wait there for a first byte elsewhere, and end silent streams. One
        that still flows is left alone: then only the checks are late."""
        self.give_up(replica.origin.key, for_s)

    def on_models_changed(self, replica: Replica, before: ServedModels) -> None:
        """Make its models known, and feed its streams into the index of its model."""
        self.planner.fleets.note_streams(replica)
        for name in replica.served.models:
            self.models.discover(name)
        for adapter, parent in replica.served.adapters:
            self.models.discover(adapter, parent)
        if before.models != replica.served.models:
            self._compare_tokenizers(replica)  # it may be healthy before its models are known
        if before.models and before.models != replica.served.models:
            self._follow(replica, replica.sources, ())
            self._follow(replica, (), replica.sources)
        self._forget_unserved_models()

    def on_sources_changed(self, replica: Replica, before: tuple[EventSource, ...]) -> None:
        self.planner.fleets.note_streams(replica)
        self._follow(replica, before, replica.sources)

    def on_reconfigured(self, replica: Replica) -> None:
        """Nothing follows: decisions and polls read the current options."""

    def on_removed(self, replica: Replica) -> None:
        self.planner.fleets.note_streams(replica)
        self.planner.visits.forget(replica.id)
        self.tokenizer_check.forget(replica.id)
        self.on_gone(replica.id)
        self.observers.forget_replica(replica.id)
        self._forget_unserved_models()

    # --- steps ------------------------------------------------------------------------------------

    def _forget_unserved_models(self) -> None:
        for model in self.models.forget_all_but(self.registry.models()):
            if self.entrance is not None:
                self.entrance.room.forget(model)
            self.planner.visits.forget_model(model)
            self.observers.forget_model(model)

    def _follow(
        self, replica: Replica, before: tuple[EventSource, ...], now: tuple[EventSource, ...]
    ) -> None:
        """Queue the changes: leaving a stream takes a moment, and a stream must be left before it
        is followed again."""
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
        if replica.state is not ReplicaState.HEALTHY or model is None:
            return
        tokenization = self.models.tokenization_of(model)
        if tokenization.local is not None:
            tokenization.asks_harmony = functools.partial(
                self.tokenizer_check.all_write_harmony, model.name
            )
            self.tokenizer_check.start(replica, model.name, tokenization.local)

    def _model_of(self, replica: Replica) -> Model | None:
        return self.models.discover(replica.served.models[0]) if replica.served.models else None

    async def _add_source(self, replica: Replica, source: EventSource, model: Model) -> None:
        await self.beginning.fill(model.name, model.index)
        if self.models.get(model.name) is not model:
            return  # it was removed again before its turn came
        names = replica.id, replica.origin.host, replica.address
        options = SourceOptions(replica.origin.allows, names, _headers_for(source, replica))
        self.feed.add(replica.id, source, model.name, model.hints_of(replica.id), options)

    async def _keep_feed(self) -> None:
        await self.beginning.find()
        while True:
            change = await self._feed_changes.get()
            try:
                await change()
            except KVEventsError as error:
                logger.error("event streams: %s", error)


def _headers_for(source: EventSource, replica: Replica) -> Callable[[], Sequence[Header]]:
    """Return what asks for the headers for a source that is polled for its events: a replica's key
    goes to it alone."""
    is_polled = source.endpoint.startswith(POLLED)
    if is_polled and Origin.parse(source.endpoint).key == replica.origin.key:
        return lambda: replica.headers
    return lambda: ()
