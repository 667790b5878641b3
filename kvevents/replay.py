"""Clients of a publisher's replay endpoint (one connection, several questions, every answer bounded
and checked) and of its snapshot endpoint (one connection for one question)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from time import monotonic

import zmq

from kvevents.endpoints import Context
from kvevents.errors import MalformedReply, NoAnswer
from kvevents.messages import Batch, SnapshotHead, encode_start, read_reply, read_snapshot_head
from kvevents.sockets import SocketConnection, SocketLimits

_SNAPSHOTS_AT_ONCE = 3
_SNAPSHOTS_WITHIN_S = 30.0
_HEAD_FRAMES = 3
"""Frames of a snapshot endpoint's reply before its payloads."""


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
class ReplayEndpoint:
    """The replay endpoint of a publisher, and the options of asking it."""

    context: Context
    """The context of the sockets."""
    endpoint: str
    topic: bytes | None
    """The only topic that replies may carry; None allows any."""
    sockets: SocketLimits
    limits: ReplayLimits

    async def connect(self) -> ReplayClient:
        """Open a new connection; close it after use.

        Raises:
            NoConnection: No peer, for now.
            EndpointError: The endpoint cannot be connected to.
        """
        connection = SocketConnection(self.context, zmq.DEALER, self.endpoint, self.sockets)
        try:
            await connection.open()
        except BaseException:
            connection.close()
            raise
        return ReplayClient(connection, self.topic, self.limits)


def no_answer_from(replay: str | None, snapshots: str | None) -> str:
    """Return the text for an endpoint that does not answer, to follow the publisher's name.

    Args:
        replay: The replay endpoint, which is named if there is one.
    """
    which = f"replay endpoint {replay}" if replay else f"snapshot endpoint {snapshots}"
    return f"its {which} does not answer"


class ReplayClient:
    """One connection to a replay endpoint, so that all its answers come from one process.

    Read an answer to its end before you ask the next question; to stop earlier, close the client.

    Args:
        topic: The only topic that replies may carry; None allows any.
    """

    def __init__(
        self, connection: SocketConnection, topic: bytes | None, limits: ReplayLimits
    ) -> None:
        self._connection = connection
        self._topic = topic
        self._limits = limits
        self._start: int | None = None
        self._previous = -1
        self._batches = self._bytes = 0
        self._deadline = 0.0

    def close(self) -> None:
        """Close at once; safe to call again."""
        self._connection.close()

    def ask(self, start: int | None) -> None:
        """Ask for the batches from *start* on, or with None for a snapshot.

        Raises:
            NoConnection: The peer is gone.
        """
        self._start = start
        self._previous = -1 if start is None else start - 1
        self._batches = self._bytes = 0
        self._deadline = monotonic() + self._limits.total_s
        # A DEALER shows the empty frame that a REQ would add; without it a request is ignored.
        self._connection.send([b"", encode_start(start)])

    async def reply(self) -> Batch | None:
        """Return the next batch of the answer, None at its end.

        Raises:
            NoAnswer: Silence, a peer that left, or more than the limits allow.
            MalformedReply: Not the protocol, or numbers out of order.
        """
        frames = self._connection.receive()
        if frames is None:
            frames = await self._wait_for_frames()
        batch = read_reply(frames, self._topic)
        if batch is not None:
            self._check_order(batch)
            self._check_limits(batch)
        return batch

    async def _wait_for_frames(self) -> list[bytes]:
        silent_until = monotonic() + self._limits.silence_s
        while True:
            left_s = min(silent_until, self._deadline) - monotonic()
            is_down = self._connection.is_down
            frames = self._connection.receive()
            if frames is not None:
                return frames
            if is_down:
                raise NoAnswer("the replay endpoint hung up before the end marker")
            if left_s <= 0:
                raise NoAnswer(
                    f"the replay endpoint was silent for {self._limits.silence_s:g} s "
                    "before the end marker"
                )
            await self._connection.wait(left_s)

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

    def _check_limits(self, batch: Batch) -> None:
        self._batches += 1
        self._bytes += len(batch.payload)
        limits = self._limits
        if (
            self._batches > limits.batches
            or self._bytes > limits.payload_bytes
            or monotonic() > self._deadline
        ):
            raise NoAnswer(
                f"an answer of {self._batches} batches and {self._bytes} bytes: it must end within "
                f"{limits.batches} batches, {limits.payload_bytes} bytes and {limits.total_s:g} s"
            )


@dataclass(frozen=True, slots=True)
class SnapshotEndpoint:
    """An endpoint of a publisher for snapshots alone."""

    context: Context
    """The context of the sockets."""
    endpoint: str
    sockets: SocketLimits
    limits: ReplayLimits
    _made_at: deque[float] = field(default_factory=lambda: deque(maxlen=_SNAPSHOTS_AT_ONCE))

    @property
    def may_be_asked(self) -> bool:
        """Return False too soon after the last few snapshots: the engine stands still while it
        makes one, and an endpoint of another process than the stream's would be asked again and
        again."""
        times = self._made_at
        return len(times) < _SNAPSHOTS_AT_ONCE or times[0] + _SNAPSHOTS_WITHIN_S < monotonic()

    async def ask(self) -> tuple[SnapshotClient, SnapshotHead | None]:
        """Ask for a snapshot on a new connection; return the rest of the reply, to be closed after
        use, and its head, None without a snapshot for now.

        Raises:
            NoConnection: No peer, for now.
            EndpointError: The endpoint cannot be connected to.
            NoAnswer: Silence, or a peer that left.
            MalformedReply: Not the protocol.
        """
        connection = SocketConnection(self.context, zmq.DEALER, self.endpoint, self.sockets)
        try:
            await connection.open()
            client = SnapshotClient(connection, self.limits)
            head = await client.ask()
        except BaseException:
            connection.close()
            raise
        if head is not None:
            self._made_at.append(monotonic())
        return client, head


class SnapshotClient:
    """The reply of a snapshot endpoint, payload by payload."""

    def __init__(self, connection: SocketConnection, limits: ReplayLimits) -> None:
        self._connection = connection
        self._limits = limits
        self._last = -1
        self._has_more = True
        self._batches = self._bytes = 0
        self._deadline = monotonic() + limits.total_s

    def close(self) -> None:
        """Close at once; safe to call again."""
        self._connection.close()

    async def ask(self) -> SnapshotHead | None:
        """See `SnapshotEndpoint.ask`."""
        self._connection.send([b"", encode_start(None)])
        frames = [await self._first_frame()]
        while self._has_more and len(frames) < _HEAD_FRAMES:
            frames.append(self._frame())
        head = read_snapshot_head(frames, self._has_more)
        self._last = self._last if head is None else head.last
        return head

    async def reply(self) -> Batch | None:
        """Return the next payload, under the number of the snapshot; None at the end.

        Raises:
            NoAnswer: More than the limits allow.
        """
        if not self._has_more:
            return None
        payload = self._frame()
        self._batches += 1
        self._bytes += len(payload)
        limits = self._limits
        if (
            self._batches > limits.batches
            or self._bytes > limits.payload_bytes
            or monotonic() > self._deadline
        ):
            raise NoAnswer(
                f"a snapshot of {self._batches} payloads and {self._bytes} bytes: it must have at "
                f"most {limits.batches} and {limits.payload_bytes}, and be read within "
                f"{limits.total_s:g} s"
            )
        return Batch(self._last, payload)

    async def _first_frame(self) -> bytes:
        """Wait for the reply."""
        silent_until = monotonic() + self._limits.snapshot_s
        while True:
            left_s, is_down = silent_until - monotonic(), self._connection.is_down
            found = self._connection.receive_frame()
            if found is not None:
                frame, self._has_more = found
                return frame
            if is_down:
                raise NoAnswer("the snapshot endpoint hung up without a reply")
            if left_s <= 0:
                raise NoAnswer(
                    f"the snapshot endpoint was silent for {self._limits.snapshot_s:g} s"
                )
            await self._connection.wait(left_s)

    def _frame(self) -> bytes:
        """Return the next frame of the reply, which has arrived as a whole."""
        found = self._connection.receive_frame()
        if found is None:
            raise NoAnswer("the snapshot endpoint hung up in the middle of its reply")
        frame, self._has_more = found
        return frame
