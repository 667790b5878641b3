"""Carries every source's event stream into the index of its model."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import zmq

from kvevents.curve import CurveClient, CurveKeys
from kvevents.endpoints import ZmqEndpoint
from kvevents.errors import EndpointError, KVEventsError
from kvevents.listener import (
    LISTENED_TO,
    ChannelConnection,
    Listener,
    ListenerStatistics,
    UnknownTopic,
)
from kvevents.live import Connection
from kvevents.pacing import Pacer
from kvevents.sequence import StreamPosition
from kvevents.stream_state import SourceState
from kvevents.subscriber import Subscriber, SubscriberOptions
from router.config.origin import Allows, Header
from router.config.values import POLLED
from router.errors import NotRecordable
from router.feed.polled import Pollers, PollerStatistics
from router.feed.source_feed import SavedSource, SourceFeed, SourceFeedStatistics
from router.feed.taps import Tap, Taps
from router.fleet.client import UpstreamClient
from router.fleet.types import EventSource
from router.index.base import SourceId
from router.index.index import PrefixIndex
from router.index.layout_learner import LayoutHints

_log = logging.getLogger(__name__)

_MAX_SOCKETS = 16_384
"""Five for a source that is being repaired; libzmq's own bound of 1023 would end at 200 sources."""
_CATCHING_UP = (SourceState.CONNECTING, SourceState.RECOVERING)


class SourceOptions(NamedTuple):
    """The options of a source's connection, besides its addresses."""

    allows: Allows | None = None
    names: Sequence[str] = ()
    """Names of pods in the topics of publishers that connect to us."""
    headers: Callable[[], Sequence[Header]] = lambda: ()
    """Returns what is sent along where it is polled."""


DEFAULT_OPTIONS = SourceOptions()


@dataclass(eq=False, repr=False)
class Feed:
    """Follows every source with a task of its own. Belongs to one event loop."""

    index_of: Callable[[str], PrefixIndex]
    options: SubscriberOptions = field(default_factory=SubscriberOptions)
    keys: CurveKeys | None = None
    """Our own, for sources that are encrypted."""
    server_key: str | None = None
    """The public key of the sources that are added without one; None: those are plain text."""
    client: UpstreamClient | None = None
    """Polls sources that have to be polled; None: there are no such sources."""

    def __post_init__(self) -> None:
        self.taps = Taps()
        self._pacer = Pacer()
        self._context: zmq.Context[Any] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._listeners: list[Listener] = []
        """The listeners, by data-parallel rank."""
        self._pollers = Pollers(self.client, self.options.socket.message_bytes)
        self._sources: dict[SourceId, SourceFeed] = {}
        self._saved: dict[SourceId, SavedSource] = {}
        """Sources that the indexes hold from before the start, until each is followed."""
        self.resumed = 0
        """Sources that went on from a snapshot."""
        self.suspects: set[SourceId] = set()
        """Sources whose hits should be discounted. One that is not followed has no hits."""
        self._complained: set[str] = set()
        self.on_change: Callable[[], object] = lambda: None
        """Called when the state of a source's stream changes."""

    def listen(self, endpoint: str, ranks: int = 1) -> None:
        """Bind the addresses that publishers connect to.

        Args:
            endpoint: Rank 0's; the others' are at the ports that follow.
        Raises:
            EndpointError: An address cannot be bound.
        """
        first = ZmqEndpoint.parse("events.listen", endpoint)
        for rank in range(ranks):
            listener = Listener(self._context, first.for_rank(rank), self.options.socket)
            listener.on_unknown = self._note_unknown
            listener.open()
            self._listeners.append(listener)
            _log.info("event streams: publishers of rank %d at %s", rank, listener.endpoint)

    def listeners(self) -> list[ListenerStatistics]:
        """The addresses that publishers connect to, by rank."""
        return [listener.statistics() for listener in self._listeners]

    def pollers(self) -> list[PollerStatistics]:
        return self._pollers.statistics()

    @staticmethod
    def _note_unknown(unknown: UnknownTopic) -> None:
        _log.warning("event streams: no replica takes topic %s: %s", unknown.topic, unknown.reason)

    def add(
        self,
        replica: str,
        published: EventSource,
        model: str,
        hints: LayoutHints | None = None,
        options: SourceOptions = DEFAULT_OPTIONS,
    ) -> None:
        """Follow a source. Until it is live, its hits are not to be trusted.

        Args:
            published: The addresses of one of the replica's ranks. Without a replay endpoint,
                events that are lost stay lost and leave the source suspect, unless it makes
                snapshots.
        Raises:
            EndpointError: A socket cannot connect to such an endpoint.
            ValueError: The source is followed already.
        """
        source = SourceId(replica, published.dp_rank)
        if source in self._sources:
            raise ValueError(f"source {source.replica!r} rank {source.dp_rank}: already followed")
        endpoint, replay_endpoint = published.endpoint, published.replay_endpoint
        topic = published.topic or None
        stream = repr((endpoint, replay_endpoint, topic, hints))
        feed = self._feed_of(source, model, stream)
        feed.shares_stores = hints is not None and bool(hints.stores)
        resume = self._resume(source, feed, may_go_on=replay_endpoint is not None)
        connect = None
        try:
            if endpoint == LISTENED_TO:
                endpoint, connect = self._listen_for(source, feed, options.names, topic)
            elif endpoint.startswith(POLLED):
                connect = self._ask_for(source, feed, endpoint, options)
            subscriber = Subscriber(
                endpoint,
                feed,
                replay_endpoint=replay_endpoint,
                snapshot_endpoint=published.snapshot_endpoint,
                topic=topic,
                options=self._options_of(options.allows, published.server_key),
                context=self._context,
                pacer=self._pacer,
                resume=resume,
                connect=connect,
                has_unique_numbers=endpoint.startswith(POLLED),
            )
        except EndpointError:
            feed.on_left()  # its listener would keep its name
            if resume is not None:
                self._drop(source, feed.index)  # nobody would confirm what was restored
            raise
        self.resumed += resume is not None
        if resume is None:
            feed.index.add(source, hints)
        feed.start(subscriber)
        self._sources[source] = feed

    def _listen_for(
        self, source: SourceId, feed: SourceFeed, names: Sequence[str], topic: str | None
    ) -> tuple[str, Callable[[], Connection]]:
        """Return the connection of a publisher that connects to us."""
        if source.dp_rank >= len(self._listeners):
            raise EndpointError(
                f"replica {source.replica} rank {source.dp_rank}: nothing listens for it; "
                "configure events.listen and events.listen_ranks"
            )
        listener = self._listeners[source.dp_rank]
        channel = listener.register(names, topic)
        feed.on_left = partial(listener.unregister, channel)
        return listener.endpoint, partial(ChannelConnection, channel)

    def _ask_for(
        self, source: SourceId, feed: SourceFeed, endpoint: str, options: SourceOptions
    ) -> Callable[[], Connection]:
        """Return the connection to a polled server."""
        poller, connect = self._pollers.register(
            endpoint, source.dp_rank, options.headers, options.allows
        )
        poller.on_problem = partial(self._note_problem, source)
        feed.on_left = partial(self._pollers.unregister, endpoint, source.dp_rank)
        return connect

    @staticmethod
    def _note_problem(source: SourceId, problem: KVEventsError) -> None:
        _log.warning("replica %s: event streams: %s", source.replica, problem)

    def _feed_of(self, source: SourceId, model: str, stream: str) -> SourceFeed:
        index = self.index_of(model)
        suspects = self.suspects, lambda: self.on_change()
        return SourceFeed(
            source, model, index, self._complain, self._tidy, self.taps, *suspects, stream
        )

    def _options_of(self, allows: Allows | None, server_key: str | None) -> SubscriberOptions:
        key = server_key or self.server_key
        curve = CurveClient(self.keys, key.encode()) if key and self.keys else None
        sockets = replace(self.options.socket, allows=allows, curve=curve)
        return replace(self.options, socket=sockets)

    # --- over a restart ---------------------------------------------------------------------------

    def expect(self, saved: SavedSource) -> None:
        """Note that the index of its model holds this source: go on from there when it is
        followed."""
        self._saved[saved.source] = saved

    def forget_expected(self) -> None:
        """Drop the restored sources that were not named since."""
        for saved in self._saved.values():
            self._drop_restored(saved)
        self._saved.clear()

    def _drop_restored(self, saved: SavedSource) -> None:
        with contextlib.suppress(KeyError):  # no replica serves its model
            self._drop(saved.source, self.index_of(saved.model))

    def save(self, source: SourceId) -> tuple[SavedSource, list[bytes]] | None:
        """Export one source and its blocks; None where they are incomplete, or nothing could prove
        later that its stream went on from here."""
        feed = self._sources.get(source)
        return None if feed is None else feed.save()

    def _resume(self, source: SourceId, feed: SourceFeed, may_go_on: bool) -> StreamPosition | None:
        """Return the position of a source when it was saved, if it is still of use; else what was
        restored of it goes."""
        saved = self._saved.pop(source, None)
        if saved is None:
            return None
        if may_go_on and feed.takes(saved):
            return saved.position
        self._drop_restored(saved)
        return None

    async def remove(self, source: SourceId) -> None:
        """Stop following a source and forget its blocks; one that is not followed is ignored."""
        feed = self._sources.pop(source, None)
        if feed is None:
            return
        feed.cancel()
        self.taps.end(source, "the replica was removed")
        # Before the await: once its task has ended, the source may have been added again.
        self._drop(source, feed.index)
        await feed.ended()
        if not any(other.replica == source.replica for other in self._sources):
            self._complained.discard(source.replica)

    async def close(self) -> None:
        """Stop following all sources; the indexes keep their blocks."""
        feeds = list(self._sources.values())
        self._sources.clear()
        for feed in feeds:
            feed.cancel()
        for feed in feeds:
            await feed.ended()
        for listener in self._listeners:
            listener.close()
        self._context.term()

    def sources(self) -> list[SourceId]:
        return list(self._sources)

    def state(self, source: SourceId) -> SourceState:
        """Return how far a source's hits can be trusted; one that is not followed is dead."""
        feed = self._sources.get(source)
        return feed.state if feed else SourceState.DEAD

    def rebuild(self, source: SourceId) -> None:
        """Get everything of a source anew, if its publisher still has it: its hits were found
        wrong. One that is not followed is ignored."""
        feed = self._sources.get(source)
        if feed is not None:
            feed.rebuild()

    def has_caught_up(self, source: SourceId) -> bool:
        """Return whether nothing more of a source is to come. That holds for one that is suspect or
        whose feed has died, not for one that is not followed yet."""
        return source in self._sources and self.state(source) not in _CATCHING_UP

    def lost_since(self, source: SourceId) -> float | None:
        """Return since when the events of a source have been incomplete, on the monotonic clock:
        minus infinity where none are followed. None: they are complete."""
        feed = self._sources.get(source)
        return -math.inf if feed is None else feed.lost_since

    def record(self, source: SourceId) -> Tap:
        """Record a source: its state now, and all later events.

        Raises:
            NotRecordable: It is not followed, or `Taps.open` refuses.
        """
        feed = self._sources.get(source)
        if feed is None:
            raise NotRecordable(f"{source.replica} has no event stream of rank {source.dp_rank}")
        return self.taps.open(source, feed.index.export(source))

    def statistics(self) -> dict[SourceId, SourceFeedStatistics]:
        """Return the statistics of every source that is followed."""
        return {source: feed.statistics() for source, feed in self._sources.items()}

    def _drop(self, source: SourceId, index: PrefixIndex) -> None:
        index.drop(source)
        self._tidy(index)

    def _tidy(self, index: PrefixIndex) -> None:
        """Remove dropped and cleared blocks, a little in each pass of the event loop."""

        def work(_: float) -> bool:
            self._tidy(index)
            return True

        if index.tidy():
            self._pacer.call_in_turn(work)

    def _complain(self, source: SourceId, problem: KVEventsError) -> None:
        """Log the first problem of a replica; the statistics count all of them."""
        if source.replica not in self._complained:
            self._complained.add(source.replica)
            _log.warning(
                "replica %s rank %d: %s. Further problems of this replica are only counted.",
                source.replica,
                source.dp_rank,
                problem,
            )
