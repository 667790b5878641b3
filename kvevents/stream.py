"""Runs one numbered stream on its own thread: items are sent, kept for a while, and replayed on
request.

`offer` only puts an item on a bounded queue; the thread polls the queue every few milliseconds.
Waking the thread would be a system call, which releases Python's global lock and then waits to get
it back: on a busy machine one call in ten then takes 250 µs, against 20 µs. The thread owns both
sockets: it turns items into payloads (a `StreamSource` writes them), numbers and sends them, keeps
the last ones for replay, and replies to requests in between, a little at a time.

Every item offered uses up one sequence number. Its fate depends on the queue's length:

    0               max_queue_size            2 * max_queue_size
    |---- SENT ------------|---- UNSENT ---------------|---- LOST ---->

An UNSENT item still reaches the source, which keeps the cache's state, but not the wire: the gap in
the numbers shows consumers the loss, and a snapshot repairs it. A LOST item reaches neither, and
the source is only notified that items are missing.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice
from operator import itemgetter
from typing import Generic, Protocol, TypeVar

import zmq

from kvevents.endpoints import Context, Socket, ZmqEndpoint, open_socket
from kvevents.errors import EndpointError, PublisherClosed
from kvevents.messages import SNAPSHOT_START, Batch
from kvevents.publisher_config import PublisherConfig
from kvevents.replay_server import ReplayServer, Reply, ReplyStatistics, prepare_router

logger = logging.getLogger(__name__)

_NAP_S = 0.005
"""The time between two polls of the queue and the requests when idle."""
_DOZE_S = 0.025
"""The same after `_AWAKE_S` without work; an item ends it at once."""
_AWAKE_S = 0.25
_REST_S = 0.0005
"""The pause between two parts of a reply: a long one must not keep Python's global lock from the
engine."""
_BURST = 256
"""Batches sent before requests get a turn."""
_RING_CHUNK = 64

Item = TypeVar("Item")
ItemIn = TypeVar("ItemIn", contravariant=True)


class OfferResult(Enum):
    """The fate of an offered item; see the picture above."""

    SENT = auto()
    UNSENT = auto()
    LOST = auto()


class StreamSource(Protocol[ItemIn]):
    """Writes a stream's payloads. Called only by the stream's thread."""

    def opening(self) -> bytes | None:
        """The first batch of the stream, also sent before a replay from 0 whose first batches are
        gone; None: no such batch."""

    def payload(self, item: ItemIn) -> bytes:
        """Write an item, and apply it to the state."""

    def note(self, item: ItemIn) -> None:
        """Apply an item to the state without sending it."""

    def note_loss(self) -> None:
        """Note that items are missing from the state."""

    def heartbeat(self) -> bytes | None:
        """Write a batch without events; None: no heartbeats."""

    def snapshot(self, seq: int) -> Iterator[bytes] | None:
        """Write the whole state after the batch *seq*; None: no snapshots, or none at the
        moment."""


@dataclass(frozen=True, slots=True)
class StreamStatistics:
    """Counts since the start, and the state now."""

    sent: int = 0
    """Batches on the wire; the layout and heartbeats are batches too."""
    dropped: int = 0
    """Items that a full queue kept off the wire; each left a gap in the sequence."""
    lost: int = 0
    """Part of *dropped*: items that did not reach the source either."""
    queue_depth: int = 0
    last_seq: int = -1
    """-1 before the first batch."""
    ring_batches: int = 0
    """Batches kept for replay."""
    ring_bytes: int = 0
    replies: ReplyStatistics = field(default_factory=ReplyStatistics)


class Stream(Generic[Item]):
    """Owns the sockets and the thread; `offer` and `statistics` may be called from any thread."""

    def __init__(
        self,
        config: PublisherConfig,
        source: StreamSource[Item],
        rank: int,
        context: Context | None = None,
    ) -> None:
        """Open the sockets and start the thread.

        Args:
            source: Writes payloads, and keeps the state that snapshots are made of.
            rank: Data-parallel rank; ports move along by it.
            context: Whose sockets to use; None: its own, or `zmq.Context.instance()` for `inproc`.

        Raises:
            EndpointError: An address can be neither bound nor connected to.
            ValueError: The rank is out of range.
        """
        if not 0 <= rank < 65536:
            raise ValueError(f"data_parallel_rank: {rank} must lie in [0, 65536)")
        self._config = config
        self._source = source
        self._topic = config.topic.encode()
        self._sockets = _Sockets(config, rank, context)
        self.endpoint = self._sockets.endpoint
        """The address of batches, with the port the system picked."""
        self.replay_endpoint = self._sockets.replay_endpoint
        """The address for replays and snapshots; None: neither."""
        router = self._sockets.router
        self._replay_server = (
            None
            if router is None
            else ReplayServer(router, self._topic, config.reply_limits, self._reply_to)
        )
        self._ring = _ReplayRing(config.buffer_steps, config.buffer_bytes)
        self._lock = threading.Lock()
        self._queue: deque[tuple[Item, bool]] = deque()
        self._closing = False
        self._flush_until = 0.0
        self._unsent = self._lost = self._lost_seen = self._sent = 0
        self._leaving_out = 0
        self._next_seq = 0
        self._sent_at = self._busy_at = time.monotonic()
        self._is_dozing, self._wake = False, threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvevents-publisher", daemon=True)
        self._thread.start()

    # --- any thread -------------------------------------------------------------------------------

    def offer(self, item: Item) -> OfferResult:
        """Hand an item to the thread, or drop it; never waits.

        Raises:
            PublisherClosed: The stream is closed.
        """
        # The lock is never held while something is sent or encoded.
        with self._lock:
            self.check_open()
            result = self._admit(item)
        if self._is_dozing:
            self._wake.set()
        return result

    def check_open(self) -> None:
        """Raise `PublisherClosed` if the stream is closed."""
        if self._closing:
            raise PublisherClosed("publish: the publisher was shut down, or its thread has failed")

    def _admit(self, item: Item) -> OfferResult:
        depth, limit = len(self._queue), self._config.max_queue_size
        if depth >= 2 * limit:
            self._lost += 1
            return OfferResult.LOST
        is_sent = depth < limit and not self._leaving_out
        self._leaving_out -= self._leaving_out > 0
        self._unsent += not is_sent
        self._queue.append((item, is_sent))
        return OfferResult.SENT if is_sent else OfferResult.UNSENT

    def leave_out(self, count: int) -> None:
        """Number the next *count* items without sending them, as if the queue had been full."""
        with self._lock:
            self._leaving_out += count

    @property
    def has_room(self) -> bool:
        """Return whether an item would be sent now."""
        return len(self._queue) < self._config.max_queue_size

    def close(self, timeout_s: float) -> None:
        """Send what is queued, for at most *timeout_s*, and end the thread. A second call does
        nothing."""
        with self._lock:
            if not self._closing:
                self._flush_until = time.monotonic() + timeout_s
                self._closing = True
        self._wake.set()
        self._thread.join(timeout_s + 1.0)
        if self._thread.is_alive():
            logger.warning(
                "publisher %s: still closing after %.1f s",
                self.endpoint,
                timeout_s + 1.0,
            )

    def statistics(self) -> StreamStatistics:
        return StreamStatistics(
            sent=self._sent,
            dropped=self._unsent + self._lost,
            lost=self._lost,
            queue_depth=len(self._queue),
            last_seq=self._next_seq - 1,
            ring_batches=len(self._ring),
            ring_bytes=self._ring.payload_bytes,
            replies=self._replay_server.statistics() if self._replay_server else ReplyStatistics(),
        )

    # --- the stream's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._send(self._source.opening())
            while not self._closing:
                self._turn()
            while self._queue and time.monotonic() < self._flush_until:
                self._send_queued(1)
        finally:
            self._end()

    def _turn(self) -> None:
        now = time.monotonic()
        if self._queue:
            self._busy_at = now
        self._send_queued(_BURST)
        if now - self._sent_at >= self._config.heartbeat_s:
            self._send(self._source.heartbeat())
        has_more_to_reply = self._replay_server is not None and self._replay_server.serve(now)
        if has_more_to_reply:
            self._busy_at = now
        if self._queue:
            return
        if now - self._busy_at > _AWAKE_S:
            self._doze()
        else:
            time.sleep(_REST_S if has_more_to_reply else _NAP_S)

    def _doze(self) -> None:
        """Wait for an item, and for a short while for requests. An idle engine should not use a
        core for that."""
        self._wake.clear()
        self._is_dozing = True
        # Items offered before that did not wake this thread: they are seen here.
        if not self._queue and not self._closing:
            self._wake.wait(_DOZE_S)
        self._is_dozing = False

    def _end(self) -> None:
        with self._lock:
            self._closing = True
            self._unsent += sum(is_sent for _, is_sent in self._queue)
            self._queue.clear()
        self._sockets.close(max(0.0, self._flush_until - time.monotonic()))

    def _send_queued(self, limit: int) -> None:
        for _ in range(limit):
            self._skip_lost()
            if not self._queue:
                return
            item, is_sent = self._queue.popleft()
            if is_sent:
                self._send(self._source.payload(item))
            else:
                self._source.note(item)
                self._next_seq += 1

    def _skip_lost(self) -> None:
        """Leave out the numbers of lost items.

        The gap may lie before items that were queued earlier, never after later ones.
        """
        lost = self._lost - self._lost_seen
        if lost:
            self._lost_seen += lost
            self._next_seq += lost
            self._source.note_loss()

    def _send(self, payload: bytes | None) -> None:
        self._sent_at = time.monotonic()
        if payload is None:
            return
        batch = Batch(self._next_seq, payload)
        self._ring.append(batch)
        self._next_seq += 1
        self._sent += 1
        # PUB never blocks: at the high-water mark it drops the batch for that subscriber, which
        # sees the gap and asks for a replay.
        self._sockets.pub.send_multipart(
            (self._topic, batch.seq.to_bytes(8, "big"), payload), zmq.NOBLOCK
        )

    # --- replies ----------------------------------------------------------------------------------

    def _reply_to(self, request: bytes) -> Reply:
        last_seq = self._next_seq - 1
        payloads = self._source.snapshot(last_seq) if request == SNAPSHOT_START else None
        if payloads is not None:
            return Reply(True, (Batch(last_seq, payload) for payload in payloads))
        return Reply(False, self._replay(int.from_bytes(request, "big"), last_seq))

    def _replay(self, start: int, last_seq: int) -> Iterator[Batch]:
        """Yield the batches of `[start, last_seq]` that the ring still has; later ones are sent
        live.

        A replay from 0 always begins with the opening batch. If the ring has lost it, it gets the
        number before the oldest batch, so that the sequence has no gap:

            ring     57 58 59
            replay   56 57 58 59      56 is the opening batch, written again
        """
        oldest = self._ring.oldest_seq
        opening = self._source.opening() if start == 0 and oldest != 0 else None
        if opening is not None:
            yield Batch((last_seq + 1 if oldest is None else oldest) - 1, opening)
        while chunk := self._ring.since(start, _RING_CHUNK):
            for batch in chunk:
                if batch.seq > last_seq:
                    return
                yield batch
            start = chunk[-1].seq + 1


class _ReplayRing:
    """Keeps the last batches, bounded in batches and in bytes; the oldest are removed first.

    Numbers ascend, with gaps where batches were dropped.
    """

    def __init__(self, max_steps: int, max_bytes: int) -> None:
        self._max_steps = max_steps
        self._max_bytes = max_bytes
        self._batches: deque[Batch] = deque()
        self.payload_bytes = 0

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def oldest_seq(self) -> int | None:
        """Number of the oldest batch; None while the ring is empty."""
        return self._batches[0].seq if self._batches else None

    def append(self, batch: Batch) -> None:
        """Add the newest batch, and remove the oldest ones that are over a bound."""
        self._batches.append(batch)
        self.payload_bytes += len(batch.payload)
        while len(self._batches) > self._max_steps or self.payload_bytes > self._max_bytes:
            self.payload_bytes -= len(self._batches.popleft().payload)

    def since(self, seq: int, limit: int) -> list[Batch]:
        """Return the oldest batches from a number on.

        Args:
            limit: Most batches to return.
        """
        first = bisect_left(self._batches, seq, key=itemgetter(0))
        return list(islice(self._batches, first, first + limit))


class _Sockets:
    """PUB and ROUTER. Opened by the thread that builds the stream, then used only by its own."""

    def __init__(self, config: PublisherConfig, rank: int, context: Context | None) -> None:
        # A context of our own lets `close` wait until everything is sent, but `inproc` names are
        # known only inside a shared one.
        is_own = context is None and not config.uses_inproc
        self._context: Context = context or (zmq.Context() if is_own else zmq.Context.instance())
        self._own_context = self._context if is_own else None
        self.pub: Socket = self._context.socket(zmq.PUB)
        self.router: Socket | None = (
            self._context.socket(zmq.ROUTER) if config.replay_endpoint else None
        )
        curve = config.curve
        self._authenticator = None if curve is None else curve.start_authenticator(self._context)
        try:
            self.endpoint = _open_pub(self.pub, config, rank)
            self.replay_endpoint = _open_router(self.router, config, rank) if self.router else None
        except EndpointError:
            self.close(0.0)
            raise

    def close(self, linger_s: float) -> None:
        """Close everything; wait at most *linger_s* for subscribers in other processes to receive
        what was sent."""
        self.pub.close(linger=int(linger_s * 1000))
        if self.router is not None:
            self.router.close(linger=0)
        if self._authenticator is not None:
            self._authenticator.stop()
        if self._own_context is not None:
            self._own_context.term()


def _open_pub(pub: Socket, config: PublisherConfig, rank: int) -> str:
    pub.setsockopt(zmq.SNDHWM, config.hwm)
    pub.setsockopt(zmq.TCP_KEEPALIVE, 1)
    if config.curve is not None:
        config.curve.protect(pub)
    endpoint = ZmqEndpoint.parse("endpoint", config.endpoint).for_rank(rank)
    opened = open_socket(pub, "endpoint", endpoint, may_connect=True)
    logger.info(
        "publisher: %s %s", "bound to" if opened.is_bound else "connects to", opened.address
    )
    return opened.address


def _open_router(router: Socket, config: PublisherConfig, rank: int) -> str:
    assert config.replay_endpoint is not None
    prepare_router(router, config.reply_limits)
    if config.curve is not None:
        config.curve.protect(router)
    endpoint = ZmqEndpoint.parse("replay_endpoint", config.replay_endpoint).for_rank(rank)
    return open_socket(router, "replay_endpoint", endpoint, may_connect=False).address
