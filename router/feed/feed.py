"""Carries every source's event stream into the index of its model."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import PurePath
from typing import Annotated, Any

import msgspec
import zmq

from kvevents.curve import CurveClient, CurveKeys
from kvevents.delivery import Effect
from kvevents.endpoints import ZmqEndpoint
from kvevents.errors import EndpointError, KVEventsError, MalformedBatch, NoAnswer
from kvevents.field_docs import counter
from kvevents.listener import (
    LISTENED_TO,
    ChannelConnection,
    Listener,
    ListenerStatistics,
    UnknownTopic,
)
from kvevents.live import Connection
from kvevents.messages import Batch
from kvevents.pacing import Pacer
from kvevents.sequence import StreamPosition
from kvevents.stream_state import SourceState
from kvevents.subscriber import Subscriber, SubscriberOptions, SubscriberStatistics
from router.config.origin import Header
from router.config.values import POLLED
from router.errors import NotRecordable
from router.feed.polled import Pollers, PollerStatistics
from router.feed.taps import Tap, Taps
from router.fleet.client import UpstreamClient
from router.index import (
    ApplyResult,
    LayoutHints,
    PrefixIndex,
    SourceId,
)

_log = logging.getLogger(__name__)

_MAX_SOCKETS = 16_384
"""Five for a source that is being repaired; libzmq's own bound of 1023 would end at 200 sources."""


_CATCHING_UP = (SourceState.CONNECTING, SourceState.RECOVERING)


@dataclass(slots=True)
class AppliedEvents:
    """Counts what a source's batches did to the index so far, in blocks unless it says
    otherwise."""

    stored: Annotated[int, counter("kvroute_blocks_stored")] = 0
    """Blocks stored, copies included."""
    removed: Annotated[int, counter("kvroute_blocks_removed")] = 0
    """Blocks removed, copies included."""
    skipped: Annotated[int, counter("kvroute_events_skipped")] = 0
    """Events of unknown type, removals of unknown blocks, blocks over the limit."""
    overflow: int = 0
    """Part of *skipped*: blocks over a bound."""
    unreadable: Annotated[int, counter("kvroute_events_unreadable")] = 0
    """Events that break the format, left out of their batch; the rest of it was applied."""
    cleared: int = 0
    """Times the source was emptied, to be rebuilt."""

    def add(self, result: ApplyResult) -> None:
        """Count one batch."""
        self.stored += result.stored
        self.removed += result.removed
        self.skipped += result.skipped
        self.overflow += result.overflow
        self.unreadable += result.unreadable


@dataclass(slots=True, kw_only=True)
class SourceFeedStatistics(AppliedEvents):
    """One source: the state of its stream, and what its events did."""

    model: str
    """Whose index it feeds."""
    state: SourceState
    """How far the hits of this source can be trusted."""
    stream: SubscriberStatistics


class SavedSource(msgspec.Struct, frozen=True):
    """One source as it was saved, beside its blocks."""

    model: str
    source: SourceId
    stream: str
    """Its addresses, and what the configuration says of its cache: with others the blocks are of
    no use."""
    position: StreamPosition
    has_had_lower_tiers: bool


class Feed:
    """Follows every source with a task of its own. Belongs to one event loop."""

    def __init__(
        self,
        index_of: Callable[[str], PrefixIndex],
        options: SubscriberOptions | None = None,
        keys: CurveKeys | None = None,
        server_key: str | None = None,
        client: UpstreamClient | None = None,
    ) -> None:
        """
        Args:
            keys: Our own, for sources that are encrypted.
            server_key: The public key of the sources that are added without one; None: those are
                plain text.
            client: Asks sources that have to be asked; None: there are none.
        """
        self._keys = keys
        self._server_key = server_key
        self.taps = Taps()
        self._index_of = index_of
        self._options = options or SubscriberOptions()
        self._pacer = Pacer()
        self._context: zmq.Context[Any] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._listeners: list[Listener] = []
        """By data-parallel rank."""
        self._pollers = Pollers(client, self._options.socket.message_bytes)
        self._sources: dict[SourceId, _SourceFeed] = {}
        self._saved: dict[SourceId, SavedSource] = {}
        """What the indexes hold from before the start, until it is followed."""
        self.resumed = 0
        """Sources that went on from there."""
        self.suspects: set[SourceId] = set()
        """Those whose hits should be discounted. One that is not followed has no hits."""
        self._complained: set[str] = set()
        self.on_change: Callable[[], object] = lambda: None
        """Called when the stream of a source is in another state."""

    def listen(self, endpoint: str, ranks: int = 1) -> None:
        """Bind where publishers connect to, from now on.

        Args:
            endpoint: Of rank 0; the others' are at the ports that follow.
        Raises:
            EndpointError: An address cannot be bound.
        """
        first = ZmqEndpoint.parse("events.listen", endpoint)
        for rank in range(ranks):
            listener = Listener(self._context, first.for_rank(rank), self._options.socket)
            listener.on_unknown = self._note_unknown
            listener.open()
            self._listeners.append(listener)
            _log.info("event streams: publishers of rank %d at %s", rank, listener.endpoint)

    def listeners(self) -> list[ListenerStatistics]:
        """Where publishers connect to, by rank."""
        return [listener.statistics() for listener in self._listeners]

    def pollers(self) -> list[PollerStatistics]:
        """Servers that are asked for events."""
        return self._pollers.statistics()

    @staticmethod
    def _note_unknown(unknown: UnknownTopic) -> None:
        _log.warning("event streams: nobody takes topic %s: %s", unknown.topic, unknown.reason)

    def add(
        self,
        source: SourceId,
        endpoint: str,
        replay_endpoint: str | None,
        topic: str | None,
        model: str,
        hints: LayoutHints | None = None,
        snapshot_endpoint: str | None = None,
        allows: Callable[[str], bool] | None = None,
        server_key: str | None = None,
        names: Sequence[str] = (),
        headers: Sequence[Header] = (),
    ) -> None:
        """Follow a source. Until it is live, its hits are not to be trusted.

        Args:
            source: One data-parallel rank of a replica; each has endpoints of its own.
            endpoint: Its PUB address; `LISTENED_TO` where it connects to us; `http://` where it is
                asked.
            replay_endpoint: Its ROUTER address; with None, events that are lost stay lost and leave
                the source suspect, unless it makes snapshots.
            topic: What it publishes under, exactly; None takes every topic.
            hints: What the configuration says of its cache.
            snapshot_endpoint: Where it makes snapshots, if there is an address for these alone.
            allows: Whether an address may be connected to; None: every address.
            server_key: The publisher's public key, where it has one of its own.
            names: What the topic of a publisher that connects to us may call its pod.
            headers: Sent along where it is asked.
        Raises:
            EndpointError: A socket cannot connect to such an endpoint.
            ValueError: The source is followed already.
        """
        if source in self._sources:
            raise ValueError(f"source {source.replica!r} rank {source.dp_rank}: already followed")
        stream = repr((endpoint, replay_endpoint, topic, hints))
        feed = self._feed_of(source, model, stream)
        feed.shares_stores = hints is not None and bool(hints.stores)
        resume = self._resume(source, feed) if replay_endpoint else None
        connect = None
        if endpoint == LISTENED_TO:
            endpoint, connect = self._listen_for(source, feed, names, topic)
        elif endpoint.startswith(POLLED):
            connect = self._ask_for(source, feed, endpoint, headers, allows)
        try:
            subscriber = Subscriber(
                endpoint,
                feed,
                replay_endpoint=replay_endpoint,
                snapshot_endpoint=snapshot_endpoint,
                topic=topic,
                options=self._options_of(allows, server_key),
                context=self._context,
                pacer=self._pacer,
                resume=resume,
                connect=connect,
                has_unique_numbers=endpoint.startswith(POLLED),
            )
        except EndpointError:
            feed.on_left()  # what listens for it would keep its name
            raise
        if resume is None:
            feed.index.add(source, hints)
        feed.start(subscriber)
        self._sources[source] = feed

    def _listen_for(
        self, source: SourceId, feed: _SourceFeed, names: Sequence[str], topic: str | None
    ) -> tuple[str, Callable[[], Connection]]:
        """Where a publisher connects to, and what comes from it."""
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
        self,
        source: SourceId,
        feed: _SourceFeed,
        endpoint: str,
        headers: Sequence[Header],
        allows: Callable[[str], bool] | None,
    ) -> Callable[[], Connection]:
        """Return what brings the events of a server that is asked for them."""
        poller, connect = self._pollers.register(endpoint, source.dp_rank, headers, allows)
        poller.on_problem = partial(self._note_problem, source)
        feed.on_left = partial(self._pollers.unregister, endpoint, source.dp_rank)
        return connect

    @staticmethod
    def _note_problem(source: SourceId, problem: KVEventsError) -> None:
        _log.warning("replica %s: event streams: %s", source.replica, problem)

    def _feed_of(self, source: SourceId, model: str, stream: str) -> _SourceFeed:
        index = self._index_of(model)
        told = self.suspects, lambda: self.on_change()
        return _SourceFeed(
            source, model, index, self._complain, self._tidy, self.taps, *told, stream
        )

    def _options_of(
        self, allows: Callable[[str], bool] | None, server_key: str | None
    ) -> SubscriberOptions:
        """One source's."""
        key = server_key or self._server_key
        curve = CurveClient(self._keys, key.encode()) if key and self._keys else None
        sockets = replace(self._options.socket, allows=allows, curve=curve)
        return replace(self._options, socket=sockets)

    # --- over a restart ---------------------------------------------------------------------------

    def expect(self, saved: SavedSource) -> None:
        """The index of its model holds this source: go on from there when it is followed."""
        self._saved[saved.source] = saved

    def forget_expected(self) -> None:
        """Drop what was restored and has not been named since."""
        for source, saved in self._saved.items():
            with contextlib.suppress(KeyError):  # no replica serves its model
                index = self._index_of(saved.model)
                index.drop(source)
                self._tidy(index)
        self._saved.clear()

    def save(self, source: SourceId) -> tuple[SavedSource, list[bytes]] | None:
        """One source and its blocks, now; None where they are not whole, or nothing could prove
        later that its stream went on from here."""
        feed = self._sources.get(source)
        return None if feed is None else feed.save()

    def _resume(self, source: SourceId, feed: _SourceFeed) -> StreamPosition | None:
        """Where a source was when it was saved, if that is still of use."""
        saved = self._saved.pop(source, None)
        if saved is None or not feed.takes(saved):
            return None
        self.resumed += 1
        return saved.position

    async def remove(self, source: SourceId) -> None:
        """Stop following a source and forget its blocks; one that is not followed is ignored."""
        feed = self._sources.pop(source, None)
        if feed is None:
            return
        feed.cancel()
        self.taps.end(source, "the replica was removed")
        # Before the await: once its task has ended, the source may have been added again.
        feed.index.drop(source)
        self._tidy(feed.index)
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
        """Those that are followed."""
        return list(self._sources)

    def state(self, source: SourceId) -> SourceState:
        """How far a source's hits can be trusted; one that is not followed is dead."""
        feed = self._sources.get(source)
        return feed.state if feed else SourceState.DEAD

    def rebuild(self, source: SourceId) -> None:
        """Get everything of a source anew, if its publisher still has it: its hits were found
        wrong. One that is not followed is ignored."""
        feed = self._sources.get(source)
        if feed is not None:
            feed.rebuild()

    def has_caught_up(self, source: SourceId) -> bool:
        """Return whether all that can be known of a source is known. Of one that is suspect or
        whose feed has died there is no more to come; of one that is not followed yet there is."""
        return source in self._sources and self.state(source) not in _CATCHING_UP

    def is_suspect(self, source: SourceId) -> bool:
        """Return whether a source is one of the `suspects`."""
        return source in self.suspects

    def lost_since(self, source: SourceId) -> float | None:
        """Since when the events of a source have not been whole, on the monotonic clock: from the
        beginning of time where none are followed. None: they are."""
        feed = self._sources.get(source)
        return -math.inf if feed is None else feed.lost_since

    def record(self, source: SourceId) -> Tap:
        """Listen to a source: its state now, and all that happens from now on.

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

    def _tidy(self, index: PrefixIndex) -> None:
        """Take away what was dropped or cleared, a little in each pass of the event loop."""

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


class _SourceFeed:
    """The consumer of one subscriber: applies its batches, and follows its state."""

    def __init__(
        self,
        source: SourceId,
        model: str,
        index: PrefixIndex,
        complain: Callable[[SourceId, KVEventsError], None],
        tidy: Callable[[PrefixIndex], None],
        taps: Taps,
        suspects: set[SourceId],
        on_change: Callable[[], object],
        stream: str = "",
    ) -> None:
        self.index = index
        self._taps = taps
        self._suspects = suspects
        self._on_change = on_change
        self.state = SourceState.CONNECTING
        self.lost_since: float | None = time.monotonic()
        self._source = source
        self._model = model
        self._stream = stream
        self.shares_stores = False
        self._complain = complain
        self._tidy = tidy
        self._applied = AppliedEvents()
        self._has_had_lower_tiers = False
        self._is_known_suspect = False
        self._is_followed = False
        self.on_left: Callable[[], object] = lambda: None
        """Called when the source is not followed any more."""
        self._subscriber: Subscriber | None = None
        self._task: asyncio.Task[None] | None = None

    def takes(self, saved: SavedSource) -> bool:
        """Go on from what was saved; False if it is of another stream, or not there any more."""
        is_same = (saved.model, saved.stream) == (self._model, self._stream)
        if not is_same or not self.index.holds(self._source):
            return False
        self._has_had_lower_tiers = saved.has_had_lower_tiers
        return True

    def save(self) -> tuple[SavedSource, list[bytes]] | None:
        assert self._subscriber is not None
        position = self._subscriber.position()
        if position is None or self.shares_stores:
            return None
        saved = SavedSource(
            self._model, self._source, self._stream, position, self._has_had_lower_tiers
        )
        return saved, list(self.index.export(self._source))

    def start(self, subscriber: Subscriber) -> None:
        self._subscriber = subscriber
        self._is_followed = True
        self._enter(SourceState.CONNECTING)
        self._task = asyncio.get_running_loop().create_task(
            subscriber.run(), name=f"feed {self._source}"
        )
        self._task.add_done_callback(self._on_end)

    def rebuild(self) -> None:
        assert self._subscriber is not None
        _log.warning(
            "replica %s rank %d: its hits were predicted wrongly for long: it is rebuilt",
            self._source.replica,
            self._source.dp_rank,
        )
        self._subscriber.rebuild()

    def cancel(self) -> None:
        """Apply nothing from now on."""
        assert self._task is not None
        self._is_followed = False
        self._suspects.discard(self._source)
        self.on_left()
        self._task.cancel()

    async def ended(self) -> None:
        """Wait until all its sockets are closed."""
        assert self._task is not None
        await asyncio.wait([self._task])

    def statistics(self) -> SourceFeedStatistics:
        assert self._subscriber is not None
        return SourceFeedStatistics(
            **asdict(self._applied),
            model=self._model,
            state=self.state,
            stream=self._subscriber.statistics(),
        )

    # --- what the subscriber calls ----------------------------------------------------------------

    def apply(self, batch: Batch) -> Effect:
        if self._taps:
            for tap in self._taps.of(self._source):
                tap.batch(batch.payload)
        index = self.index
        slots, searched = index.slots, index.searches
        effect = self._note(index.apply(self._source, batch.payload))
        if index.slots is not slots or index.searches != searched:
            self._on_change()
        return effect

    def _note(self, result: ApplyResult) -> Effect:
        """Count what a batch did, and say what that means."""
        self._applied.add(result)
        if result.layout_changed:
            self._look_at_key()
        if result.problem is not None:
            self.report(MalformedBatch(result.problem))
        if result.cleared:
            self._tidy(self.index)
        self._has_had_lower_tiers |= result.has_lower_tiers
        if result.is_incomplete:
            return Effect.INCOMPLETE
        # A clear empties only the GPU: what a lower tier lost or stored meanwhile stays unknown.
        return (
            Effect.KNOWN_AGAIN if result.cleared and not self._has_had_lower_tiers else Effect.KEPT
        )

    def _look_at_key(self) -> None:
        """Say so if nothing of this source will ever be found."""
        found = self.index.statistics().get(self._source)
        if found is not None and found.key_problem is not None:
            source = self._source
            _log.error("replica %s rank %d: %s", *source, found.key_problem)

    def clear(self, reason: str) -> None:
        _log.info(
            "replica %s rank %d: start from nothing (%s)",
            self._source.replica,
            self._source.dp_rank,
            reason,
        )
        self._applied.cleared += 1
        self._taps.end(self._source, f"the stream starts from nothing: {reason}")
        self.index.clear(self._source)
        self._tidy(self.index)

    def change(self, state: SourceState) -> None:
        is_news = state is SourceState.SUSPECT and not self._is_known_suspect
        level = logging.WARNING if is_news else logging.INFO
        problem = self._subscriber and self._subscriber.statistics().problem
        why = f": {problem}" if problem and state is SourceState.SUSPECT else ""
        _log.log(level, "replica %s rank %d: %s%s", *self._source, state.value, why)
        self._enter(state)
        if state in (SourceState.SUSPECT, SourceState.LIVE):
            self._is_known_suspect = state is SourceState.SUSPECT

    def _enter(self, state: SourceState) -> None:
        self.state = state
        if not self._is_followed:
            return  # and the source may have been added again
        if state is SourceState.LIVE:
            self.lost_since = None
            self._suspects.discard(self._source)
        else:
            self.lost_since = self.lost_since or time.monotonic()
            self._suspects.add(self._source)
        self._on_change()

    def report(self, problem: KVEventsError) -> None:
        if isinstance(problem, NoAnswer):
            _log.warning("replica %s rank %d: %s", *self._source, problem)
        else:
            self._complain(self._source, problem)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        """A subscriber ends only when it is cancelled; anything else is our bug, and shows."""
        self._enter(SourceState.DEAD)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            # Only our own errors are known not to quote a prompt.
            what = (
                str(error)
                if isinstance(error, KVEventsError)
                else f"{type(error).__name__} at {_raised_at(error)}"
            )
            _log.error(
                "replica %s rank %d: no longer followed: %s",
                self._source.replica,
                self._source.dp_rank,
                what,
            )


def _raised_at(error: BaseException) -> str:
    """Where an error was raised, outermost first; without its message, which may quote a prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    return " > ".join(f"{PurePath(frame.filename).name}:{frame.lineno}" for frame in frames)
