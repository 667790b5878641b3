"""Clients of a publisher's replay endpoint (one connection, several questions, every answer bounded
and checked) and of its snapshot endpoint (one connection for one question)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import TypeVar

import zmq

from kvevents.endpoints import Context
from kvevents.errors import MalformedReply, NoAnswer
from kvevents.messages import Batch, SnapshotHead, encode_start, read_reply, read_snapshot_head
from kvevents.sockets import SocketConnection, SocketLimits

_SNAPSHOTS_AT_ONCE = 3
_SNAPSHOTS_WITHIN_S = 30.0
_HEAD_FRAMES = 3
"""Frames of a snapshot endpoint's reply before its payloads."""

_Received = TypeVar("_Received")


@dataclass(frozen=True, slots=True)
class ReplayLimits:
    """Bounds on the size and the time of one answer."""

    silence_s: float = 5.0
    """The longest between two replies. vLLM looks for requests ten times a second."""
    snapshot_s: float = 30.0
    """The longest until a snapshot endpoint replies. It makes the snapshot first: a million blocks
    take seconds."""
    total_s: float = 300.0
    batches: int = 1_000_000
    payload_bytes: int = 2 * 2**30


@dataclass(frozen=True, slots=True)
class AskedEndpoints:
    """The endpoints of a publisher that are asked, and the bounds on asking."""

    replay: str | None
    """The replay endpoint."""
    snapshots: str | None
    """An endpoint for snapshots alone, which is asked for them first."""
    topic: bytes | None
    """The only topic that replies may carry; None allows any."""
    sockets: SocketLimits
    limits: ReplayLimits
    _snapshots_at: deque[float] = field(
        init=False, default_factory=lambda: deque(maxlen=_SNAPSHOTS_AT_ONCE)
    )

    @property
    def no_answer(self) -> str:
        """The text for endpoints that do not answer, to follow the publisher's name."""
        kind, endpoint = ("replay", self.replay) if self.replay else ("snapshot", self.snapshots)
        return f"its {kind} endpoint {endpoint} does not answer"

    @property
    def may_make_snapshot(self) -> bool:
        """Return False too soon after the last few snapshots: the engine stands still while it
        makes one, and an endpoint of another process than the stream's would be asked again and
        again."""
        times = self._snapshots_at
        return len(times) < _SNAPSHOTS_AT_ONCE or times[0] + _SNAPSHOTS_WITHIN_S < monotonic()

    def note_snapshot(self) -> None:
        """Note that the endpoint for snapshots made one now."""
        self._snapshots_at.append(monotonic())


class EndpointClient(SocketConnection, ABC):
    """One connection that is asked, and its answer, which is bounded in time and size."""

    name: str
    """The endpoint's kind, for errors."""
    answer: str
    """The answer's, for errors."""

    def __init__(self, context: Context, endpoint: str, asked: AskedEndpoints) -> None:
        super().__init__(context, zmq.DEALER, endpoint, asked.sockets)
        self._bounds = asked.limits
        self._batches = self._bytes = 0
        self._deadline = 0.0

    @abstractmethod
    async def reply(self) -> Batch | None:
        """Return the next batch of the answer, None at its end.

        Raises:
            NoAnswer: Silence, a peer that left, or more than the limits allow.
            MalformedReply: Not the protocol, or numbers out of order.
        """

    def _send(self, start: int | None) -> None:
        self._batches = self._bytes = 0
        self._deadline = monotonic() + self._bounds.total_s
        # A DEALER shows the empty frame that a REQ would add; without it a request is ignored.
        self.send([b"", encode_start(start)])

    async def _wait_for(
        self, receive: Callable[[], _Received | None], within_s: float, before: str
    ) -> _Received:
        """Return what *receive* returns once it has come.

        Args:
            before: What has to come first, for the error.
        Raises:
            NoAnswer: Silence, or a peer that left.
        """
        silent_until = min(monotonic() + within_s, self._deadline)
        while True:
            left_s, is_down = silent_until - monotonic(), self.is_down
            found = receive()
            if found is not None:
                return found
            if is_down:
                raise NoAnswer(f"the {self.name} endpoint hung up before {before}")
            if left_s <= 0:
                raise NoAnswer(
                    f"the {self.name} endpoint was silent for {within_s:g} s before {before}"
                )
            await self.wake_up.wait(left_s)

    def _check_limits(self, batch: Batch) -> None:
        self._batches += 1
        self._bytes += len(batch.payload)
        limits = self._bounds
        if (
            self._batches > limits.batches
            or self._bytes > limits.payload_bytes
            or monotonic() > self._deadline
        ):
            raise NoAnswer(
                f"{self.answer} of {self._batches} batches and {self._bytes} bytes: it must end "
                f"within {limits.batches} batches, {limits.payload_bytes} bytes and "
                f"{limits.total_s:g} s"
            )


class ReplayClient(EndpointClient):
    """One connection to a replay endpoint, so that all its answers come from one process.

    Read an answer to its end before you ask the next question; to stop earlier, close the client.
    """

    name, answer = "replay", "an answer"

    def __init__(self, context: Context, endpoint: str, asked: AskedEndpoints) -> None:
        super().__init__(context, endpoint, asked)
        self._topic = asked.topic
        self._start: int | None = None
        self._previous = -1

    def ask(self, start: int | None) -> None:
        """Ask for the batches from *start* on, or with None for a snapshot.

        Raises:
            NoConnection: The peer is gone.
        """
        self._start = start
        self._previous = -1 if start is None else start - 1
        self._send(start)

    async def reply(self) -> Batch | None:
        frames = self.receive()
        if frames is None:
            frames = await self._wait_for(self.receive, self._bounds.silence_s, "the end marker")
        batch = read_reply(frames, self._topic)
        if batch is not None:
            self._check_order(batch)
            self._check_limits(batch)
        return batch

    def _check_order(self, batch: Batch) -> None:
        if self._start is None:
            if self._previous not in (-1, batch.seq):
                raise MalformedReply(
                    f"snapshot reply with seq {batch.seq}: "
                    f"all of one snapshot must have {self._previous}"
                )
        elif batch.seq <= self._previous:
            raise MalformedReply(
                f"replay reply with seq {batch.seq}: it must be above {self._previous}"
            )
        self._previous = batch.seq


class SnapshotClient(EndpointClient):
    """One snapshot of a snapshot endpoint, payload by payload."""

    name, answer = "snapshot", "a snapshot"

    def __init__(self, context: Context, endpoint: str, asked: AskedEndpoints) -> None:
        super().__init__(context, endpoint, asked)
        self._last = -1
        self._has_more = True

    async def ask(self) -> SnapshotHead | None:
        """Ask for the snapshot; return its head, None without a snapshot for now.

        Raises:
            NoConnection: The peer is gone.
            NoAnswer: Silence, or a peer that left.
            MalformedReply: Not the protocol.
        """
        self._send(None)
        first = await self._wait_for(self.receive_frame, self._bounds.snapshot_s, "its reply")
        frames = [self._taken(first)]
        while self._has_more and len(frames) < _HEAD_FRAMES:
            frames.append(self._frame())
        head = read_snapshot_head(frames, self._has_more)
        self._last = self._last if head is None else head.last
        return head

    async def reply(self) -> Batch | None:
        """Return the next payload, under the number of the snapshot; None at the end."""
        if not self._has_more:
            return None
        batch = Batch(self._last, self._frame())
        self._check_limits(batch)
        return batch

    def _frame(self) -> bytes:
        """Return the next frame of the reply, which has arrived as a whole."""
        found = self.receive_frame()
        if found is None:
            raise NoAnswer("the snapshot endpoint hung up in the middle of its reply")
        return self._taken(found)

    def _taken(self, found: tuple[bytes, bool]) -> bytes:
        frame, self._has_more = found
        return frame
