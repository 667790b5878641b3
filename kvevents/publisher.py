"""An engine's way to tell the world what its KV cache holds.

`publish` costs the engine's thread microseconds and never waits: everything else happens on the
publisher's own thread (`kvevents/stream.py`). When that thread falls behind, batches are left off
the wire, counted, and missing from the sequence, so that consumers notice and recover; what the
cache holds is kept along all the same (`kvevents/snapshot.py`).
"""

from __future__ import annotations

import logging
import time
import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, TypeAlias, TypeVar

from kvevents.codec import decode, encode
from kvevents.endpoints import Context
from kvevents.errors import MalformedBatch, PublisherClosed
from kvevents.events import CacheLayout, Event, EventBatch, GroupSpec
from kvevents.hashing import HashChain
from kvevents.layout import KVCacheLayout
from kvevents.plugins import PlugIns
from kvevents.publisher_config import PublisherConfig, ReplyLimits
from kvevents.snapshot import Capture, Mirror
from kvevents.stream import Stream, StreamStatistics, Taking

logger = logging.getLogger(__name__)

Self = TypeVar("Self", bound="EventPublisher")
PresentState: TypeAlias = Callable[[], Sequence[Event]]
"""Everything an engine's cache holds, as `BlockStored` events. Called from `publish`, on the
engine's thread: it must include the batch that is being published, and nothing later."""

_UNTELLABLE = (TypeError, ValueError, OverflowError, RecursionError)
"""What encoding raises for a value that msgpack has no form for."""


@dataclass(frozen=True, slots=True)
class PublisherStatistics:
    """Counts since the start, and the state now."""

    published: int = 0
    """Batches on the wire; the layout and heartbeats are batches too."""
    dropped: int = 0
    """Batches that a full queue kept off the wire; each left a gap in the sequence."""
    rejected_events: int = 0
    """Events left out of their batch because they cannot be encoded, and such that the mirror could
    not follow."""
    queue_depth: int = 0
    last_seq: int = -1
    ring_batches: int = 0
    ring_bytes: int = 0
    replays_served: int = 0
    snapshots_served: int = 0
    replies_aborted: int = 0
    malformed_requests: int = 0
    mirror_blocks: int = 0
    """Distinct (group, tier, hash) that a snapshot would announce."""
    mirror_is_complete: bool = True
    """False: snapshots are refused, see `ZmqEventPublisher`."""


class EventPublisher(ABC):
    """Takes an engine's events, one batch per step. Also a context manager that shuts down at its
    end."""

    @abstractmethod
    def publish(self, events: Sequence[Event]) -> bool:
        """Take one step's events, in order; neither they nor their lists may change afterwards.

        Returns:
            False if the batch will not reach the wire.

        Raises:
            PublisherClosed: After `shutdown`.
        """

    @abstractmethod
    def shutdown(self, timeout_s: float = 5.0) -> None:
        """Send what was taken, for at most *timeout_s*, and end. Again: nothing happens."""

    @abstractmethod
    def statistics(self) -> PublisherStatistics:
        """May be called from any thread, also after `shutdown`."""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.shutdown()


class NullEventPublisher(EventPublisher):
    """Takes everything, tells nobody."""

    def __init__(self) -> None:
        self._is_closed = False

    def publish(self, events: Sequence[Event]) -> bool:  # noqa: ARG002 (the interface's)
        if self._is_closed:
            raise PublisherClosed("publish: the publisher was shut down")
        return True

    def shutdown(self, timeout_s: float = 5.0) -> None:  # noqa: ARG002 (the interface's)
        self._is_closed = True

    def statistics(self) -> PublisherStatistics:
        return PublisherStatistics()


# --- over ZMQ -------------------------------------------------------------------------------------


class ZmqEventPublisher(EventPublisher):
    """Publishes over ZMQ, with replay, snapshots and heartbeats.

    With *max_queue_size* batches waiting, further ones are dropped: they use up a sequence number
    and still reach the mirror from which snapshots are told, so consumers see the gap and a
    snapshot repairs it. With as many again waiting (a thread that gets no time at all), events pass
    the mirror unseen too. Snapshots are then refused until *present_state* has told the mirror
    everything anew, at the first `publish` that finds room; without *present_state* they stay
    refused.
    """

    def __init__(
        self,
        config: PublisherConfig,
        layout: KVCacheLayout,
        chain: HashChain | None = None,
        data_parallel_rank: int = 0,
        present_state: PresentState | None = None,
        context: Context | None = None,
    ) -> None:
        """Open the sockets and start the thread.

        Args:
            config: Addresses and bounds. Ports move along by *data_parallel_rank*.
            layout: Announced first, under a new publisher id.
            chain: The engine's hash function, announced so that consumers can compute its hashes.
            data_parallel_rank: This engine's rank; it stands in every batch.
            present_state: See above.
            context: Whose sockets to use; None: its own, or `zmq.Context.instance()` for `inproc`.

        Raises:
            EndpointError: An address can be neither bound nor connected to.
        """
        announcement = announce(layout, chain)
        self.publisher_id = announcement.publisher_id
        self._present_state = present_state
        self._must_tell_state = False
        self._content = _CacheContent(announcement, data_parallel_rank)
        self._stream: Stream[_Step] = Stream(config, self._content, data_parallel_rank, context)

    @property
    def endpoint(self) -> str:
        """Where batches are published, with the port the system picked."""
        return self._stream.endpoint

    @property
    def replay_endpoint(self) -> str | None:
        """Where requests are answered."""
        return self._stream.replay_endpoint

    def publish(self, events: Sequence[Event]) -> bool:
        """See `EventPublisher`. A step without events costs no sequence number."""
        if not events:
            self._stream.check_open()
            return True
        if self._must_tell_state and self._stream.has_room:
            return self._publish_with_state(events)
        taking = self._stream.offer(_Step(time.time(), tuple(events), None))
        if taking is Taking.LOST:
            self._must_tell_state = self._present_state is not None
        return taking is Taking.SENT

    def leave_out(self, batches: int) -> None:
        """Lose the next *batches*: they are numbered and not sent. For those who test what happens
        then."""
        self._stream.leave_out(batches)

    def _publish_with_state(self, events: Sequence[Event]) -> bool:
        assert self._present_state is not None
        step = _Step(time.time(), tuple(events), tuple(self._present_state()))
        taking = self._stream.offer(step)
        self._must_tell_state = taking is Taking.LOST
        return taking is Taking.SENT

    def shutdown(self, timeout_s: float = 5.0) -> None:
        self._stream.close(timeout_s)

    def statistics(self) -> PublisherStatistics:
        return _statistics(self._stream.statistics(), self._content)


def announce(layout: KVCacheLayout, chain: HashChain | None = None) -> CacheLayout:
    """A layout as it is told to consumers, under a publisher id that no other process has."""
    groups = [
        GroupSpec(
            group.kind.value, group.block_size, group.sliding_window, group.attention_chunk_size
        )
        for group in layout.groups
    ]
    return CacheLayout(
        publisher_id=uuid.uuid4().hex,
        groups=groups,
        hash_block_size=layout.hash_block_size,
        scheduler_block_size=layout.scheduler_block_size,
        hash_algorithm=chain.algorithm if chain else None,
        none_hash=chain.none_hash if chain else None,
        eagle=layout.eagle,
    )


class _Step(NamedTuple):
    """What one engine step published."""

    ts: float
    events: tuple[Event, ...]
    state: tuple[Event, ...] | None
    """The whole state after it, where the mirror has to start over."""


class _CacheContent:
    """Writes steps down and keeps the mirror along; what a `Stream` asks of its content."""

    def __init__(self, announcement: CacheLayout, data_parallel_rank: int) -> None:
        self.mirror = Mirror(announcement)
        self.rejected_events = 0
        self._rank = data_parallel_rank
        self._last_capture: weakref.ref[Capture] | None = None
        self._captured_seq = -1

    def opening(self) -> bytes:
        return self._encode(time.time(), [self.mirror.layout])

    def heartbeat(self) -> bytes:
        return self._encode(time.time(), [])

    def payload(self, item: _Step) -> bytes:
        payload = self._encode(item.ts, item.events)
        self.note(item)
        return payload

    def note(self, item: _Step) -> None:
        try:
            self._follow(item)
        except TypeError:
            # A field is not of its declared type, a list for a hash perhaps. What comes before it
            # is applied already.
            self.rejected_events += 1
            self.lose()

    def _follow(self, item: _Step) -> None:
        if item.state is None:
            self.mirror.apply(item.events)
        else:
            self.mirror.reset(item.state)

    def lose(self) -> None:
        if self.mirror.is_complete:
            logger.error(
                "publisher: events were lost before the mirror saw them; snapshots are refused for now"
            )
        self.mirror.lose()

    def snapshot(self, seq: int) -> Iterator[bytes] | None:
        if not self.mirror.is_complete:
            return None
        ts = time.time()
        return (self._encode(ts, batch) for batch in self._capture(seq).batches())

    def _capture(self, seq: int) -> Capture:
        """Everybody who asks while nothing happens shares one, as long as one of them reads it."""
        capture = self._last_capture() if self._last_capture and self._captured_seq == seq else None
        if capture is None:
            capture = self.mirror.capture()
            self._last_capture, self._captured_seq = weakref.ref(capture), seq
        return capture

    def _encode(self, ts: float, events: Sequence[Event]) -> bytes:
        try:
            return encode(EventBatch(ts, events, self._rank))
        except _UNTELLABLE:
            tellable = [event for event in events if _is_tellable(event)]
        if not self.rejected_events:
            logger.error(
                "publisher: an event that cannot be encoded was left out; more of them are only counted"
            )
        self.rejected_events += len(events) - len(tellable)
        return encode(EventBatch(ts, tellable, self._rank))


def _is_tellable(event: Event) -> bool:
    try:
        decode(encode(EventBatch(0.0, [event])))
    except (*_UNTELLABLE, MalformedBatch):
        return False
    return True


def _statistics(stream: StreamStatistics, content: _CacheContent | None) -> PublisherStatistics:
    return PublisherStatistics(
        published=stream.sent,
        dropped=stream.dropped,
        rejected_events=content.rejected_events if content else 0,
        queue_depth=stream.queue_depth,
        last_seq=stream.last_seq,
        ring_batches=stream.ring_batches,
        ring_bytes=stream.ring_bytes,
        replays_served=stream.replies.replays_served,
        snapshots_served=stream.replies.snapshots_served,
        replies_aborted=stream.replies.replies_aborted,
        malformed_requests=stream.replies.malformed_requests,
        mirror_blocks=content.mirror.blocks if content else 0,
        mirror_is_complete=content.mirror.is_complete if content else False,
    )


# --- recordings -----------------------------------------------------------------------------------


class RecordedStreamPublisher:
    """Plays recorded payloads as vLLM would: verbatim, without layout, heartbeats or snapshots,
    with a replay ring."""

    def __init__(
        self, config: PublisherConfig, data_parallel_rank: int = 0, context: Context | None = None
    ) -> None:
        """Open the sockets and start the thread; raises `EndpointError`."""
        self._stream: Stream[bytes] = Stream(
            config, _RecordedContent(), data_parallel_rank, context
        )

    @property
    def endpoint(self) -> str:
        """Where payloads are published, with the port the system picked."""
        return self._stream.endpoint

    @property
    def replay_endpoint(self) -> str | None:
        """Where requests are answered; a request for a snapshot gets only the end marker."""
        return self._stream.replay_endpoint

    def publish_raw(self, payload: bytes) -> bool:
        """Take one payload as the next batch; False if a full queue drops it. Raises
        `PublisherClosed` after `shutdown`."""
        return self._stream.offer(payload) is Taking.SENT

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """Send what was taken, for at most *timeout_s*, and end."""
        self._stream.close(timeout_s)

    def statistics(self) -> PublisherStatistics:
        return _statistics(self._stream.statistics(), None)

    def __enter__(self) -> RecordedStreamPublisher:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.shutdown()


class _RecordedContent:
    """Says what it is given, and nothing of its own."""

    def opening(self) -> None:
        return None

    def heartbeat(self) -> None:
        return None

    def payload(self, item: bytes) -> bytes:
        return item

    def note(self, item: bytes) -> None:
        pass

    def lose(self) -> None:
        pass

    def snapshot(self, seq: int) -> None:  # noqa: ARG002 (the interface's)
        return None


# --- by configuration -----------------------------------------------------------------------------

PublisherBuilder: TypeAlias = Callable[
    [PublisherConfig, KVCacheLayout, HashChain | None, int], EventPublisher
]


def _build_null(
    _config: PublisherConfig, _layout: KVCacheLayout, _chain: HashChain | None, _rank: int
) -> EventPublisher:
    return NullEventPublisher()


_BUILT_IN: dict[str, PublisherBuilder] = {"null": _build_null, "zmq": ZmqEventPublisher}
_METHODS = ("publish", "shutdown", "statistics")
_publishers = PlugIns("kvroute.publishers", "kind", _BUILT_IN, _METHODS)


def register_publisher(kind: str, builder: PublisherBuilder) -> None:
    """Make `PublisherConfig(kind=kind)` build something else, in this process.

    A package that is to be found without being imported offers an entry point in the group
    `kvroute.publishers` instead.

    Args:
        kind: The name.
        builder: Called with configuration, layout, hash chain or None, and data-parallel rank.

    Raises:
        ValueError: The kind is taken.
    """
    _publishers.register(kind, builder)


def create_publisher(
    config: PublisherConfig | None,
    layout: KVCacheLayout,
    chain: HashChain | None = None,
    data_parallel_rank: int = 0,
) -> EventPublisher:
    """The publisher a configuration asks for; without one, a publisher that sends nothing.

    Args:
        config: Its `kind` is a built-in one, a registered one, or a plug-in of the entry-point
            group `kvroute.publishers`.
        layout: Announced to consumers.
        chain: The engine's hash function, if it is one of `kvevents.hashing.hash_algorithms()`.
        data_parallel_rank: This engine's rank. Ports move along by it.

    Raises:
        EndpointError: An address can be neither bound nor connected to.
        PlugInError: The kind is unknown, or its plug-in cannot be used.
    """
    if config is None:
        return NullEventPublisher()
    return _publishers.make(config.kind, config, layout, chain, data_parallel_rank)


__all__ = [
    "EventPublisher",
    "NullEventPublisher",
    "PresentState",
    "PublisherBuilder",
    "PublisherConfig",
    "PublisherStatistics",
    "RecordedStreamPublisher",
    "ReplyLimits",
    "ZmqEventPublisher",
    "announce",
    "create_publisher",
    "register_publisher",
]
