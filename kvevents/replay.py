"""Asking a publisher's replay endpoint: one connection, several questions, every answer bounded and
checked."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic

import zmq

from kvevents.endpoints import Context
from kvevents.errors import MalformedReply, NoAnswer
from kvevents.messages import Batch, encode_start, read_reply
from kvevents.sockets import SocketConnection, SocketLimits


@dataclass(frozen=True, slots=True)
class ReplayLimits:
    """How much one answer may bring, and how long it may take."""

    silence_s: float = 5.0
    """Between two replies. vLLM looks for requests ten times a second."""
    total_s: float = 300.0
    batches: int = 1_000_000
    payload_bytes: int = 2 * 2**30


@dataclass(frozen=True, slots=True)
class ReplayEndpoint:
    """Where a publisher answers, and how it is asked."""

    context: Context
    """Where the sockets live."""
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


class ReplayClient:
    """One connection to a replay endpoint, so that all its answers come from one process.

    Read an answer to its end before you ask the next question; to stop earlier, close the client.

    Args:
        connection: An open DEALER socket.
        topic: The only topic that replies may carry; None allows any.
        limits: Bounds of each answer.
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
        """The next batch of the answer, None at its end.

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
