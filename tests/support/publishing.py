"""The other end of a publisher: plain ZMQ sockets, every wait with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import zmq

from kvevents.codec import decode
from kvevents.events import EventBatch
from kvevents.messages import END_MARKER, Batch
from tests.support.waiting import DEADLINE_S

SNAPSHOT = b"snapshot"


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait until *condition* holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s in vain until {what}"
        time.sleep(0.002)


class Peer:
    """One socket of a client."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket

    def message(self) -> list[bytes]:
        """The next message, with all its frames."""
        assert self.socket.poll(int(DEADLINE_S * 1000)), f"no message within {DEADLINE_S} s"
        return self.socket.recv_multipart()

    def batch(self) -> Batch:
        """The next live batch."""
        _topic, seq, payload = self.message()
        return Batch(int.from_bytes(seq, "big"), payload)

    def decoded(self) -> tuple[int, EventBatch]:
        """The next live batch, and decoded."""
        batch = self.batch()
        return batch.seq, decode(batch.payload)

    def ask(self, start: int | bytes) -> None:
        self.socket.send_multipart(
            [b"", start.to_bytes(8, "big") if isinstance(start, int) else start]
        )

    def reply(self) -> list[Batch]:
        """Everything up to the end marker."""
        batches: list[Batch] = []
        while True:
            empty, topic, seq, payload = self.message()
            assert empty == b""
            if seq == END_MARKER:
                assert (topic, payload) == (b"", b"")
                return batches
            batches.append(Batch(int.from_bytes(seq, "big"), payload))

    def answer(self, start: int | bytes) -> list[Batch]:
        """Send a request and read the whole reply."""
        self.ask(start)
        return self.reply()


class Client:
    """A process that watches publishers."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self._context = context
        self._sockets: list[zmq.Socket[bytes]] = []

    def subscribe(self, endpoint: str, topic: bytes = b"", hwm: int = 0) -> Peer:
        """A SUB socket; it misses batches that are published before the publisher knows it."""
        socket = self._open(zmq.SUB)
        _limit(socket, hwm)
        socket.setsockopt(zmq.SUBSCRIBE, topic)
        socket.connect(endpoint)
        return Peer(socket)

    def dealer(self, endpoint: str | None, hwm: int = 0) -> Peer:
        """A DEALER socket, as a recovering subscriber has one."""
        assert endpoint is not None
        socket = self._open(zmq.DEALER)
        _limit(socket, hwm)
        socket.connect(endpoint)
        return Peer(socket)

    def leave(self, peer: Peer) -> None:
        peer.socket.close(linger=0)

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)

    def _open(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        self._sockets.append(socket)
        return socket


def _limit(socket: zmq.Socket[bytes], hwm: int) -> None:
    socket.setsockopt(zmq.RCVHWM, hwm)
    if hwm:
        # Whatever the kernel buffers would count as read.
        socket.setsockopt(zmq.RCVBUF, 4096)


@contextmanager
def new_client() -> Iterator[Client]:
    context: zmq.Context[Any] = zmq.Context()
    client = Client(context)
    try:
        yield client
    finally:
        client.close()
        context.term()
