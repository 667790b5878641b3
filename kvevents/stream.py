"""One numbered stream on its own thread: what is offered is sent, remembered, and repeated to those
who ask.

`offer` puts an item on a bounded queue, and that is all: the thread looks there every few
milliseconds by itself. Waking it would be a system call, which gives Python's global lock away and
then waits to get it back: on a busy machine one call in ten then takes 250 µs, against 20 µs. The
thread owns both sockets: it turns items into payloads (what they say is up to a `Content`), numbers
and sends them, keeps the last ones for replay, and answers requests in between, a little at a time.

Every item offered uses up one sequence number. While the queue is full, items still reach the
`Content`, which may keep a state along with the stream, but not the wire: the gap in the numbers
tells consumers, and a snapshot stays right. Only when as many again wait do items pass unseen, and
the `Content` is told that it has lost some.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, Protocol, TypeVar

import zmq

from kvevents.endpoints import Context, Endpoint, Opened, Socket, open_socket
from kvevents.errors import EndpointError, PublisherClosed
from kvevents.messages import SNAPSHOT_START, Batch
from kvevents.publisher_config import PublisherConfig
from kvevents.replay_ring import ReplayRing
from kvevents.replies import Answer, ReplyDesk, ReplyStatistics, prepare_router

logger = logging.getLogger(__name__)

_NAP_S = 0.005
"""How long an item, a request or a stalled reply may wait for the thread to look again."""
_REST_S = 0.0005
"""Between two parts of a reply: a long one must not keep Python's global lock from the engine."""
_BURST = 256
"""Batches sent before requests get a turn."""
_RING_CHUNK = 64

Item = TypeVar("Item")
ItemIn = TypeVar("ItemIn", contravariant=True)


class Taking(Enum):
    """What becomes of an offered item."""

    SENT = auto()
    UNSENT = auto()
    """It reaches the content, not the wire."""
    LOST = auto()


class Content(Protocol[ItemIn]):
    """What a stream says. Called by the stream's thread alone."""

    def opening(self) -> bytes | None:
        """The batch that stands first, and before a replay from 0 whose first batches are gone;
        None: none does."""

    def payload(self, item: ItemIn) -> bytes:
        """Take note of an item and write it."""

    def note(self, item: ItemIn) -> None:
        """Take note of an item that is not sent."""

    def lose(self) -> None:
        """Items passed by unseen."""

    def heartbeat(self) -> bytes | None:
        """A batch without events; None: silence stays silent."""

    def snapshot(self, seq: int) -> Iterator[bytes] | None:
        """The whole present state, after the batch *seq*; None: there are no snapshots, or none at
        the moment."""


@dataclass(frozen=True, slots=True)
class StreamStatistics:
    sent: int
    dropped: int
    """Items that did not reach the wire."""
    lost: int
    """Part of *dropped*: those the content did not see either."""
    queue_depth: int
    last_seq: int
    """-1 before the first batch."""
    ring_batches: int
    ring_bytes: int
    replies: ReplyStatistics


class Stream(Generic[Item]):
    """Owns the sockets and the thread; `offer` and `statistics` may be called from any thread."""

    def __init__(
        self,
        config: PublisherConfig,
        content: Content[Item],
        rank: int,
        context: Context | None = None,
    ) -> None:
        if not 0 <= rank < 65536:
            raise ValueError(f"data_parallel_rank: {rank} must lie in [0, 65536)")
        self._config = config
        self._content = content
        self._topic = config.topic.encode()
        self._sockets = _Sockets(config, rank, context)
        self._desk = self._open_desk()
        self._ring = ReplayRing(config.buffer_steps, config.buffer_bytes)
        self._lock = threading.Lock()
        self._queue: deque[tuple[Item, bool]] = deque()
        self._closing = False
        self._flush_until = 0.0
        self._unsent = self._lost = self._lost_seen = self._sent = 0
        self._leaving_out = 0
        self._next_seq = 0
        self._sent_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="kvevents-publisher", daemon=True)
        self._thread.start()

    def _open_desk(self) -> ReplyDesk | None:
        if self._sockets.router is None:
            return None
        return ReplyDesk(self._sockets.router, self._topic, self._config.reply_limits, self._answer)

    @property
    def endpoint(self) -> str:
        return self._sockets.endpoint.address

    @property
    def replay_endpoint(self) -> str | None:
        return self._sockets.replay_endpoint.address if self._sockets.replay_endpoint else None

    # --- any thread -------------------------------------------------------------------------------

    def offer(self, item: Item) -> Taking:
        """Hand an item to the thread, or drop it; never waits.

        Raises:
            PublisherClosed: The stream is closed.
        """
        # The lock is held for these lines only, here and in `close`: never while anybody sends or
        # encodes.
        with self._lock:
            self.check_open()
            return self._admit(item)

    def check_open(self) -> None:
        """Raise `PublisherClosed` if nothing is taken any more."""
        if self._closing:
            raise PublisherClosed("publish: the publisher was shut down, or its thread has failed")

    def _admit(self, item: Item) -> Taking:
        depth, limit = len(self._queue), self._config.max_queue_size
        if depth >= 2 * limit:
            self._lost += 1
            return Taking.LOST
        is_sent = depth < limit and not self._leaving_out
        self._leaving_out -= self._leaving_out > 0
        self._unsent += not is_sent
        self._queue.append((item, is_sent))
        return Taking.SENT if is_sent else Taking.UNSENT

    def leave_out(self, count: int) -> None:
        """Number the next *count* items, and send none of them: as if the queue had been full."""
        with self._lock:
            self._leaving_out += count

    @property
    def has_room(self) -> bool:
        """Would an item be sent now?"""
        return len(self._queue) < self._config.max_queue_size

    def close(self, timeout_s: float) -> None:
        """Send what was taken, close the sockets, end the thread. Again: nothing happens."""
        with self._lock:
            if not self._closing:
                self._flush_until = time.monotonic() + timeout_s
                self._closing = True
        self._thread.join(timeout_s + 1.0)
        if self._thread.is_alive():
            logger.warning(
                "publisher %s: still closing %.1f s after it was told to",
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
            replies=self._desk.statistics() if self._desk else ReplyStatistics(0, 0, 0, 0),
        )

    # --- the stream's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._send(self._content.opening())
            while not self._closing:
                self._turn()
            while self._queue and time.monotonic() < self._flush_until:
                self._send_taken(1)
        finally:
            self._end()

    def _turn(self) -> None:
        self._send_taken(_BURST)
        now = time.monotonic()
        if now - self._sent_at >= self._config.heartbeat_s:
            self._send(self._content.heartbeat())
        has_more_to_reply = self._desk is not None and self._desk.serve(now)
        if not self._queue:
            time.sleep(_REST_S if has_more_to_reply else _NAP_S)

    def _end(self) -> None:
        with self._lock:
            self._closing = True
            self._unsent += sum(is_sent for _, is_sent in self._queue)
            self._queue.clear()
        self._sockets.close(max(0.0, self._flush_until - time.monotonic()))

    def _send_taken(self, limit: int) -> None:
        for _ in range(limit):
            self._skip_lost()
            if not self._queue:
                return
            item, is_sent = self._queue.popleft()
            if is_sent:
                self._send(self._content.payload(item))
            else:
                self._content.note(item)
                self._next_seq += 1

    def _skip_lost(self) -> None:
        """Leave out the numbers of lost items. The gap may come before items taken earlier, never
        after later ones."""
        lost = self._lost - self._lost_seen
        if lost:
            self._lost_seen += lost
            self._next_seq += lost
            self._content.lose()

    def _send(self, payload: bytes | None) -> None:
        self._sent_at = time.monotonic()
        if payload is None:
            return
        batch = Batch(self._next_seq, payload)
        self._ring.append(batch)
        self._next_seq += 1
        self._sent += 1
        # PUB never blocks: at the high-water mark it drops for that subscriber, who sees the gap
        # and asks for a replay.
        self._sockets.pub.send_multipart(
            (self._topic, batch.seq.to_bytes(8, "big"), payload), zmq.NOBLOCK
        )

    # --- replies ----------------------------------------------------------------------------------

    def _answer(self, request: bytes) -> Answer:
        last_seq = self._next_seq - 1
        payloads = self._content.snapshot(last_seq) if request == SNAPSHOT_START else None
        if payloads is not None:
            return Answer(True, (Batch(last_seq, payload) for payload in payloads))
        return Answer(False, self._replay(int.from_bytes(request, "big"), last_seq))

    def _replay(self, start: int, last_seq: int) -> Iterator[Batch]:
        """What the ring still has of `[start, last_seq]`; later batches come live.

        A replay from 0 always begins with the opening batch. Where the ring has lost it, it comes
        under the number before the oldest batch there is, so that what follows it is in sequence.
        """
        oldest = self._ring.oldest_seq
        opening = self._content.opening() if start == 0 and oldest != 0 else None
        if opening is not None:
            yield Batch((last_seq + 1 if oldest is None else oldest) - 1, opening)
        while chunk := self._ring.since(start, _RING_CHUNK):
            for batch in chunk:
                if batch.seq > last_seq:
                    return
                yield batch
            start = chunk[-1].seq + 1


class _Sockets:
    """PUB and ROUTER. Opened by whoever builds the stream, then used by its thread alone."""

    def __init__(self, config: PublisherConfig, rank: int, context: Context | None) -> None:
        # A context of our own lets `close` wait until all is sent; but `inproc` names are known
        # only inside a shared one.
        is_own = context is None and not config.uses_inproc
        self._context: Context = context or (zmq.Context() if is_own else zmq.Context.instance())
        self._own_context = self._context if is_own else None
        self.pub: Socket = self._context.socket(zmq.PUB)
        self.router: Socket | None = (
            self._context.socket(zmq.ROUTER) if config.replay_endpoint else None
        )
        try:
            self.endpoint = _open_pub(self.pub, config, rank)
            self.replay_endpoint = _open_router(self.router, config, rank) if self.router else None
        except EndpointError:
            self.close(0.0)
            raise

    def close(self, linger_s: float) -> None:
        """Close everything; wait at most *linger_s* until subscribers in other processes have got
        what was sent."""
        self.pub.close(linger=int(linger_s * 1000))
        if self.router is not None:
            self.router.close(linger=0)
        if self._own_context is not None:
            self._own_context.term()


def _open_pub(pub: Socket, config: PublisherConfig, rank: int) -> Opened:
    pub.setsockopt(zmq.SNDHWM, config.hwm)
    pub.setsockopt(zmq.TCP_KEEPALIVE, 1)
    endpoint = Endpoint.parse("endpoint", config.endpoint).for_rank(rank)
    opened = open_socket(pub, "endpoint", endpoint, may_connect=True)
    logger.info(
        "publisher: %s %s", "bound to" if opened.is_bound else "connects to", opened.address
    )
    return opened


def _open_router(router: Socket, config: PublisherConfig, rank: int) -> Opened:
    assert config.replay_endpoint is not None
    prepare_router(router, config.reply_limits)
    endpoint = Endpoint.parse("replay_endpoint", config.replay_endpoint).for_rank(rank)
    return open_socket(router, "replay_endpoint", endpoint, may_connect=False)
