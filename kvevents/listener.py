"""One address that many publishers connect to, separated by topic.

llm-d's and KServe's engines connect out and publish under `kv@<pod>@<model>`. A `Listener` binds a
SUB socket and gives each pod's messages to the `Channel` that is registered under its name. To a
subscriber each connection of a publisher is as if it had connected there itself: its messages come
from one process, and its end is visible. Its topic alone identifies a publisher: a process that
reaches the address can publish as any pod that does not publish now.

Memory is bounded: batches in a channel, and unknown topics that are remembered.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Annotated

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvevents.endpoints import Context, Socket, ZmqEndpoint, open_socket
from kvevents.errors import MalformedBatch
from kvevents.field_docs import counter, gauge
from kvevents.messages import MAX_FRAMES, Batch, read_live
from kvevents.sockets import SocketLimits, WakeUp, bound

LISTENED_TO = "listen"
"""Stands for the address of a publisher that connects to us."""

_READ_AT_ONCE = 64
_MAX_TOPIC_BYTES = 1024
_NOBLOCK, _RCVMORE, _SRCFD = map(int, (zmq.NOBLOCK, zmq.RCVMORE, zmq.SRCFD))
_EVENTS, _POLLIN = map(int, (zmq.EVENTS, zmq.POLLIN))
_GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED


@dataclass(frozen=True, slots=True)
class ListenLimits:
    """Bounds on waiting batches and remembered topics."""

    channel_bytes: int = 256 * 2**20
    """The bound on batches that wait in one channel; more are dropped, and leave a gap."""
    unknown_topics: int = 256
    """Unknown topics that are remembered; the messages of more are only counted."""
    taken_over_after_s: float = 10.0
    """Another publisher takes a pod's place when the connection of the one before has ended, or has
    been silent for so long."""


def named_pod(topic: bytes) -> str | None:
    """Return the pod that `kv@<pod>@<model>` names; None for any other topic.

    A model's name may hold an `@`, a pod's does not.
    """
    try:
        kind, pod, _ = topic.decode().split("@", 2)
    except ValueError:  # too few parts, or no UTF-8
        return None
    return pod if kind == "kv" and pod else None


@dataclass(frozen=True, slots=True)
class UnknownTopic:
    """A topic that belongs to no source, and its number of messages."""

    topic: str
    """The topic without unprintable characters."""
    reason: str
    messages: int


@dataclass(frozen=True, slots=True)
class ListenerStatistics:
    """The counts of one listener."""

    endpoint: str
    topics: Annotated[int, gauge("kvroute_listen_topics")]
    """Topics of publishers that connect to the router and belong to a replica."""
    messages: Annotated[dict[str, int], counter("kvroute_listen_messages", "outcome")]
    """Messages of publishers that connect to the router, by outcome."""
    unknown: tuple[UnknownTopic, ...]
    """The first topics that belong to no source."""


class _Link:
    """One connection of a publisher, and its messages under one topic."""

    def __init__(self, topic: bytes, fd: int) -> None:
        self.topic = topic
        self.fd = fd
        """The file descriptor of the connection; negative within a process, which needs none."""
        self.is_down = False
        self.last_message_at = monotonic()
        self.waiting: deque[Batch | MalformedBatch] = deque()
        self.waiting_bytes = 0
        self.notify: Callable[[], None] = lambda: None
        """Called when there is something to take, or no more to come."""

    def end(self) -> None:
        """End the link: nothing more comes."""
        self.is_down = True
        self.notify()


class Channel:
    """A pod whose publisher is listened to."""

    def __init__(self, names: frozenset[str], topic: bytes | None) -> None:
        self.names = names
        """The names of its pod in topics."""
        self.topic = topic
        """The only topic that is its own; None: any of its pod's, one at a time."""
        self.link: _Link | None = None
        """The newest link."""
        self.fresh: asyncio.Queue[_Link] = asyncio.Queue(1)
        """The newest link, until a connection takes it."""

    def answers_to(self, topic: bytes) -> bool:
        """Return whether a topic is its own, or names its pod."""
        if self.topic is not None:
            return self.topic == topic
        return named_pod(topic) in self.names

    def begin(self, link: _Link) -> None:
        """Take its messages over this link from now on."""
        if self.link is not None:
            self.link.end()
        self.link = link
        if self.fresh.full():
            self.fresh.get_nowait()
        self.fresh.put_nowait(link)


class ChannelConnection:
    """The next connection of a channel's publisher, for a subscriber; a `live.Connection`."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._link = _Link(b"", -1)
        self.wake_up = WakeUp()
        self.on_readable: Callable[[], None] | None = None

    @property
    def is_down(self) -> bool:
        return self._link.is_down

    async def open(self) -> None:
        """Wait until a publisher has sent its first message, however long."""
        self._link = await self._channel.fresh.get()
        self._link.notify = self._notify

    def close(self) -> None:
        link = self._link
        link.notify = lambda: None
        link.waiting.clear()
        link.waiting_bytes = 0
        if self._channel.link is link:
            self._channel.link = None  # what comes next over it begins another
        link.is_down = True

    def next_batch(self) -> Batch | None:
        link = self._link
        if not link.waiting:
            return None
        found = link.waiting.popleft()
        if isinstance(found, MalformedBatch):
            raise found
        link.waiting_bytes -= len(found.payload)
        return found

    def has_more(self) -> bool:
        return bool(self._link.waiting)

    def _notify(self) -> None:
        if self.on_readable is not None and not self._link.is_down:
            self.on_readable()
        else:
            self.wake_up.set()


@dataclass(eq=False, repr=False)
class Listener:
    """A bound SUB socket."""

    context: Context
    wanted: ZmqEndpoint
    """The address to bind."""
    socket_limits: SocketLimits = field(default_factory=SocketLimits)
    """Bounds on messages and on the queue."""
    limits: ListenLimits = field(default_factory=ListenLimits)

    def __post_init__(self) -> None:
        self._socket: Socket | None = None
        self._monitor: Socket | None = None
        self._fds: set[int] = set()
        """The descriptors of the connections that are up."""
        self.endpoint = str(self.wanted)
        """The address with the port that the system picked, once it is open."""
        self._channels: list[Channel] = []
        self._of_topic: dict[bytes, Channel] = {}
        self._unknown: dict[bytes, UnknownTopic] = {}
        self._counts: Counter[str] = Counter()
        self._next_pass: asyncio.Handle | None = None
        self.on_unknown: Callable[[UnknownTopic], object] = lambda _: None
        """Called for the first message of each topic that belongs to no source and is
        remembered."""

    def open(self) -> None:
        """Bind, and read from now on.

        Raises:
            EndpointError: The address cannot be bound.
        """
        made: Socket = self.context.socket(zmq.SUB)
        try:
            bound(made, self.socket_limits)
            made.setsockopt(zmq.SUBSCRIBE, b"")
            self._monitor = made.get_monitor_socket(zmq.EVENT_ACCEPTED | _GONE)
            self.endpoint = open_socket(made, "events.listen", self.wanted, False).address
        except BaseException:
            self._close(made)
            raise
        self._socket = made
        loop = asyncio.get_running_loop()
        loop.add_reader(made.fileno(), self._on_signal)
        loop.add_reader(self._monitor.fileno(), self._on_monitor)
        self._on_monitor()
        self._on_signal()

    def close(self) -> None:
        """Close the socket; safe to call again. Channels get nothing any more."""
        if self._next_pass is not None:
            self._next_pass.cancel()
        made, self._socket = self._socket, None
        if made is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(made.fileno())
            if self._monitor is not None:
                loop.remove_reader(self._monitor.fileno())
            self._close(made)

    def _close(self, made: Socket) -> None:
        if self._monitor is not None:
            made.disable_monitor()
            self._monitor.close(linger=0)
            self._monitor = None
        made.close(linger=0)

    def register(self, names: Sequence[str], topic: str | None) -> Channel:
        """Give the messages of a pod to a channel from now on.

        Args:
            names: The names of the pod in topics.
            topic: The only topic that is its own; None: any that names it, one at a time.
        """
        channel = Channel(frozenset(names), None if topic is None else topic.encode())
        self._channels.append(channel)
        self._of_topic.clear()
        # Its topics belonged to no source so far.
        self._unknown = {t: each for t, each in self._unknown.items() if not channel.answers_to(t)}
        return channel

    def unregister(self, channel: Channel) -> None:
        """Stop a channel; one that is not registered is ignored."""
        self._channels = [each for each in self._channels if each is not channel]
        self._of_topic.clear()

    def statistics(self) -> ListenerStatistics:
        """Counts since the start."""
        return ListenerStatistics(
            self.endpoint,
            len(self._of_topic),
            dict(self._counts),
            tuple(self._unknown.values()),
        )

    # --- inside -----------------------------------------------------------------------------------

    def _on_signal(self) -> None:
        if self._next_pass is None:
            self._read()

    def _on_monitor(self) -> None:
        monitor = self._monitor
        while monitor is not None and int(monitor.getsockopt(_EVENTS)) & _POLLIN:
            event = parse_monitor_message(monitor.recv_multipart(_NOBLOCK))
            fd = int(event["value"])
            if event["event"] & _GONE:
                self._fds.discard(fd)
                for channel in self._channels:
                    if channel.link is not None and channel.link.fd == fd:
                        channel.link.end()
            else:
                self._fds.add(fd)

    def _read(self) -> None:
        """Read waiting messages, a few in each pass of the event loop."""
        self._next_pass = None
        readable: dict[int, _Link] = {}
        is_over = False
        for _ in range(_READ_AT_ONCE):
            message = self._receive()
            if message is None:
                is_over = True
                break
            link = self._take(*message)
            if link is not None:
                readable[id(link)] = link
        if not is_over:
            self._next_pass = asyncio.get_running_loop().call_soon(self._read)
        for link in readable.values():
            link.notify()

    def _receive(self) -> tuple[list[bytes], int] | None:
        """The next message, one of too many frames cut, and the connection that it came over; None
        if none has come."""
        socket = self._socket
        if socket is None:
            return None
        try:
            head = socket.recv(_NOBLOCK, copy=False)
            frames = [head.bytes]
            while socket.getsockopt(_RCVMORE):
                frame = socket.recv(_NOBLOCK)
                if len(frames) <= MAX_FRAMES:
                    frames.append(frame)
        except zmq.Again:
            return None
        self._on_monitor()  # a connection may have the number of one that ended
        return frames, int(head.get(_SRCFD))

    def _take(self, frames: list[bytes], fd: int) -> _Link | None:
        """Put a message into its link; return that, if it has one."""
        topic = frames[0]
        if len(topic) > _MAX_TOPIC_BYTES:
            self._counts["malformed"] += 1
            return None
        channel = self._of_topic.get(topic) or self._find(topic)
        link = None if channel is None else self._link_of(channel, topic, fd)
        if channel is None or link is None:
            return None
        self._of_topic[topic] = channel
        link.last_message_at = monotonic()
        try:
            message: Batch | MalformedBatch = read_live(frames, None)
        except MalformedBatch as problem:
            message = problem
        return link if self._keep(link, message) else None

    def _keep(self, link: _Link, message: Batch | MalformedBatch) -> bool:
        size = len(message.payload) if isinstance(message, Batch) else 0
        is_full = (
            len(link.waiting) >= self.socket_limits.queue_messages
            or link.waiting_bytes + size > self.limits.channel_bytes
        )
        if is_full:
            self._counts["overflow"] += 1
            return False
        self._counts["taken" if isinstance(message, Batch) else "malformed"] += 1
        link.waiting.append(message)
        link.waiting_bytes += size
        return True

    def _find(self, topic: bytes) -> Channel | None:
        """Return the channel of a topic; count it and return None where it belongs to no source."""
        answering = [each for each in self._channels if each.answers_to(topic)]
        meant = [each for each in answering if each.topic is not None] or answering
        if not meant:
            is_pods = named_pod(topic) is not None
            rule = "no replica of this name listens for it"
            no_form = "not kv@pod@model, and no replica has this topic"
            self._count_unknown(topic, rule if is_pods else no_form)
            return None
        if len(meant) > 1:
            self._count_unknown(topic, f"{len(meant)} replicas have this name")
            return None
        return meant[0]

    def _link_of(self, channel: Channel, topic: bytes, fd: int) -> _Link | None:
        """Return the link of a message; count it and return None where another publisher has its
        place, or it comes late from one that is gone."""
        link = channel.link
        if link is not None and (link.topic, link.fd) == (topic, fd):
            # Messages of a connection may be read after its end.
            if not link.is_down or (fd >= 0 and fd not in self._fds):
                return link
        elif link is not None and not link.is_down:
            silent_s = monotonic() - link.last_message_at
            if silent_s < self.limits.taken_over_after_s:
                self._count_unknown(topic, "another publisher has its replica's place")
                return None
        if fd >= 0 and fd not in self._fds:
            self._counts["late"] += 1
            return None
        # Of the topics that a pod had, the last one stays.
        self._of_topic = {t: each for t, each in self._of_topic.items() if each is not channel}
        self._unknown.pop(topic, None)
        fresh = _Link(topic, fd)
        channel.begin(fresh)
        return fresh

    def _count_unknown(self, topic: bytes, reason: str) -> None:
        self._counts["unknown"] += 1
        known = self._unknown.get(topic)
        if known is not None:
            self._unknown[topic] = UnknownTopic(known.topic, reason, known.messages + 1)
        elif len(self._unknown) < self.limits.unknown_topics:
            self._unknown[topic] = first = UnknownTopic(_printable(topic), reason, 1)
            self.on_unknown(first)


def _printable(topic: bytes) -> str:
    text = topic.decode("ascii", "backslashreplace")
    return "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in text)
