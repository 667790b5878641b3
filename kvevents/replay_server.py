"""Serves the replay endpoint.

A request is `[b"", start]`: a sequence number as u64 big endian, or `b"snapshot"`. A reply is
`[b"", topic, seq, payload]` as often as needed, then `[b"", b"", 0xff * 8, b""]`. Anyone may send
requests, so nothing here waits for a client: replies are sent a little at a time between other
work, a client that does not read loses the rest of its reply, and a client's new request replaces
the one before.
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


class Reply(NamedTuple):
    """The reply to one request."""

    is_snapshot: bool
    batches: Iterator[Batch]
    """The batches, made while they are sent."""


class _SendResult(Enum):
    ACCEPTED = auto()
    BLOCKED = auto()
    GONE = auto()


@dataclass(frozen=True, slots=True)
class ReplyStatistics:
    """Counts since the start."""

    replays_served: int = 0
    snapshots_served: int = 0
    replies_aborted: int = 0
    """The client left, stopped reading, or sent another request in the middle."""
    malformed_requests: int = 0


class _RequestBudget:
    """A number of requests per second; after a pause, as many at once."""

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


class _OngoingReply:
    """One reply that is being sent."""

    def __init__(self, client: bytes, topic: bytes, reply: Reply, now: float) -> None:
        self.client = client
        self.is_snapshot = reply.is_snapshot
        self.is_blocked = False
        self.moved_at = now
        self._frames = self._all_frames(topic, reply.batches)
        self.next_frames = next(self._frames)

    def _all_frames(self, topic: bytes, batches: Iterator[Batch]) -> Iterator[list[bytes]]:
        for seq, payload in batches:
            yield [self.client, b"", topic, seq.to_bytes(8, "big"), payload]
        yield [self.client, b"", b"", END_MARKER, b""]

    def advance(self, now: float) -> bool:
        """Go on to the next frames, once the client's queue has taken these; return False after the
        last ones."""
        self.is_blocked = False
        self.moved_at = now
        following = next(self._frames, None)
        self.next_frames = following or self.next_frames
        return following is not None


@dataclass(eq=False, repr=False)
class ReplayServer:
    """Replies on one ROUTER socket. Used by one thread, which calls `serve` in every turn of its
    loop."""

    router: Socket
    """Read and written here only; closed by its owner."""
    topic: bytes
    """First frame of every batch."""
    limits: ReplyLimits
    """The limits on clients."""
    reply_to: Callable[[bytes], Reply]
    """Returns the reply to a request, from its 8 bytes."""

    def __post_init__(self) -> None:
        self._budget = _RequestBudget(self.limits.requests_per_s, time.monotonic())
        self._replies: dict[bytes, _OngoingReply] = {}
        self._served = {False: 0, True: 0}
        self._aborted = 0
        self._malformed = 0

    def statistics(self) -> ReplyStatistics:
        return ReplyStatistics(
            self._served[False], self._served[True], self._aborted, self._malformed
        )

    def serve(self, now: float) -> bool:
        """Read requests and send a little of every reply; return True if more can be sent at
        once."""
        while self._may_accept(now) and self._accept(now):
            pass
        for reply in list(self._replies.values()):
            self._continue(reply)
        return any(not reply.is_blocked for reply in self._replies.values())

    # --- requests ---------------------------------------------------------------------------------

    def _may_accept(self, now: float) -> bool:
        """Return whether one more request can be read. Until then it waits in this socket, or in
        its sender's."""
        return len(self._replies) < self.limits.concurrent and self._budget.has_one(now)

    def _accept(self, now: float) -> bool:
        """Take one request; return False if none has come."""
        frames = self._receive()
        if frames is None:
            return False
        self._budget.spend()
        if len(frames) == 3 and not frames[1] and len(frames[2]) == _START_BYTES:
            client, _, request = frames
            self._aborted += client in self._replies
            self._replies[client] = _OngoingReply(client, self.topic, self.reply_to(request), now)
        else:
            self._malformed += 1
        return True

    def _receive(self) -> list[bytes] | None:
        try:
            frames = [self.router.recv(zmq.NOBLOCK)]
        except zmq.Again:
            return None
        while self.router.getsockopt(zmq.RCVMORE):
            frame = self.router.recv()
            # Four frames show that it is not a request; a message may have any number of them.
            if len(frames) <= 3:
                frames.append(frame)
        return frames

    # --- replies ----------------------------------------------------------------------------------

    def _continue(self, reply: _OngoingReply) -> None:
        """Send until the reply is complete, the client's queue is full or the turn is over."""
        now = time.monotonic()
        turn_ends = now + _TURN_S
        while now < turn_ends:
            result = self._send(reply.next_frames)
            if result is not _SendResult.ACCEPTED:
                self._hold(reply, result, now)
                return
            if not reply.advance(now):
                self._served[reply.is_snapshot] += 1
                del self._replies[reply.client]
                return
            now = time.monotonic()

    def _send(self, frames: list[bytes]) -> _SendResult:
        try:
            self.router.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return _SendResult.BLOCKED
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return _SendResult.GONE
        return _SendResult.ACCEPTED

    def _hold(self, reply: _OngoingReply, result: _SendResult, now: float) -> None:
        """Wait for the client to read, or abort its reply."""
        reply.is_blocked = True
        if result is _SendResult.GONE or now - reply.moved_at > self.limits.stall_s:
            self._aborted += 1
            del self._replies[reply.client]


def prepare_router(router: Socket, limits: ReplyLimits) -> None:
    """Set options of a ROUTER for untrusted clients, before it is bound."""
    # Mandatory: a full queue and a client that left raise errors instead of losing messages.
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.SNDHWM, limits.queued_messages)
    router.setsockopt(zmq.RCVHWM, 16)
    router.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
    # A client that neither reads nor leaves is disconnected, which frees its queue.
    router.setsockopt(zmq.HEARTBEAT_IVL, 10_000)
    router.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30_000)
