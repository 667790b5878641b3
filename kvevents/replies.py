"""The replay endpoint: who asked for what, and how much of it has been sent.

A request is `[b"", start]`: a sequence number as u64 big endian, or `b"snapshot"`. A reply is
`[b"", topic, seq, payload]` as often as needed, then `[b"", b"", 0xff * 8, b""]`. Requests come
from anywhere, so nothing here waits for a client: replies are sent a little at a time between other
work, a client that does not read loses the rest of its reply, and a client that asks again gives up
what it asked before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

import zmq

from kvevents.endpoints import Socket
from kvevents.messages import END_MARKER, Batch
from kvevents.publisher_config import ReplyLimits

_START_BYTES = 8
_MAX_FRAME_BYTES = 1024
_TURN_S = 0.002
"""How long one reply may hold up live batches."""


class Answer(NamedTuple):
    """What a request is answered with."""

    is_snapshot: bool
    batches: Iterator[Batch]
    """Made as they are sent."""


class _Delivery(Enum):
    ACCEPTED = auto()
    BLOCKED = auto()
    GONE = auto()


@dataclass(frozen=True, slots=True)
class ReplyStatistics:
    replays_served: int
    snapshots_served: int
    replies_aborted: int
    """Clients that left, stopped reading or asked for something else in the middle."""
    malformed_requests: int


class _Budget:
    """So many per second, and as many at once after a rest."""

    def __init__(self, per_second: int, now: float) -> None:
        self._per_second = per_second
        self._left = float(per_second)
        self._counted_at = now

    def has_one(self, now: float) -> bool:
        self._left = min(self._per_second, self._left + (now - self._counted_at) * self._per_second)
        self._counted_at = now
        return self._left >= 1

    def spend(self) -> None:
        self._left -= 1


class _Reply:
    """One reply under way."""

    def __init__(self, client: bytes, topic: bytes, answer: Answer, now: float) -> None:
        self.client = client
        self.is_snapshot = answer.is_snapshot
        self.is_blocked = False
        self.moved_at = now
        self._frames = self._all_frames(topic, answer.batches)
        self.next_frames = next(self._frames)

    def _all_frames(self, topic: bytes, batches: Iterator[Batch]) -> Iterator[list[bytes]]:
        for seq, payload in batches:
            yield [self.client, b"", topic, seq.to_bytes(8, "big"), payload]
        yield [self.client, b"", b"", END_MARKER, b""]

    def advance(self, now: float) -> bool:
        """The client's queue took the frames; False if they were the last ones."""
        self.is_blocked = False
        self.moved_at = now
        following = next(self._frames, None)
        self.next_frames = following or self.next_frames
        return following is not None


class ReplyDesk:
    """Answers on one ROUTER socket. Used by one thread, which calls `serve` in every turn of its
    loop."""

    def __init__(
        self, router: Socket, topic: bytes, limits: ReplyLimits, answer: Callable[[bytes], Answer]
    ) -> None:
        self._router = router
        self._topic = topic
        self._limits = limits
        self._answer = answer
        self._budget = _Budget(limits.requests_per_s, time.monotonic())
        self._replies: dict[bytes, _Reply] = {}
        self._served = {False: 0, True: 0}
        self._aborted = 0
        self._malformed = 0

    def statistics(self) -> ReplyStatistics:
        return ReplyStatistics(
            self._served[False], self._served[True], self._aborted, self._malformed
        )

    def serve(self, now: float) -> bool:
        """Read what was asked and send a little of every reply; True if there is more to send at
        once."""
        while self._may_accept(now) and self._accept(now):
            pass
        for reply in list(self._replies.values()):
            self._continue(reply)
        return any(not reply.is_blocked for reply in self._replies.values())

    # --- asking -----------------------------------------------------------------------------------

    def _may_accept(self, now: float) -> bool:
        """Is there a place for one more request? Until then it waits in the socket, and then in its
        sender's."""
        return len(self._replies) < self._limits.concurrent and self._budget.has_one(now)

    def _accept(self, now: float) -> bool:
        """Take one request; False if there is none."""
        frames = self._receive()
        if frames is None:
            return False
        self._budget.spend()
        if len(frames) == 3 and not frames[1] and len(frames[2]) == _START_BYTES:
            self._begin(frames[0], frames[2], now)
        else:
            self._malformed += 1
        return True

    def _receive(self) -> list[bytes] | None:
        try:
            frames = [self._router.recv(zmq.NOBLOCK)]
        except zmq.Again:
            return None
        while self._router.getsockopt(zmq.RCVMORE):
            frame = self._router.recv()
            # Enough to see that it is no request; a sender may put any number of frames into one
            # message.
            if len(frames) <= 3:
                frames.append(frame)
        return frames

    def _begin(self, client: bytes, request: bytes, now: float) -> None:
        self._aborted += client in self._replies
        self._replies[client] = _Reply(client, self._topic, self._answer(request), now)

    # --- answering --------------------------------------------------------------------------------

    def _continue(self, reply: _Reply) -> None:
        """Send until everything is sent, the client's queue is full or the turn is over."""
        now = time.monotonic()
        turn_ends = now + _TURN_S
        while now < turn_ends:
            delivery = self._send(reply.next_frames)
            if delivery is not _Delivery.ACCEPTED:
                self._hold(reply, delivery, now)
                return
            if not reply.advance(now):
                self._served[reply.is_snapshot] += 1
                del self._replies[reply.client]
                return
            now = time.monotonic()

    def _send(self, frames: list[bytes]) -> _Delivery:
        try:
            self._router.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return _Delivery.BLOCKED
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return _Delivery.GONE
        return _Delivery.ACCEPTED

    def _hold(self, reply: _Reply, delivery: _Delivery, now: float) -> None:
        """Wait for the client to read, or give it up."""
        reply.is_blocked = True
        if delivery is _Delivery.GONE or now - reply.moved_at > self._limits.stall_s:
            self._aborted += 1
            del self._replies[reply.client]


def prepare_router(router: Socket, limits: ReplyLimits) -> None:
    """Set a ROUTER up for strangers, before it is bound."""
    # Mandatory: a full queue and a client that left are errors to see, not messages to lose.
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.SNDHWM, limits.queued_messages)
    router.setsockopt(zmq.RCVHWM, 16)
    router.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
    # A client that neither reads nor leaves is cut off, and what waits for it is given back.
    router.setsockopt(zmq.HEARTBEAT_IVL, 10_000)
    router.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30_000)
