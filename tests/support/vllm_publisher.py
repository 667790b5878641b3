"""A publisher that behaves like vLLM's on the wire: no identity, no heartbeats, no snapshots, a
bounded ring.

It is an XPUB, which differs from PUB in one respect: it shows when a subscription has arrived. A
subscriber's own handshake is completed a little earlier.
"""

from __future__ import annotations

import random
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Queue
from types import TracebackType

import zmq

END = b"\xff" * 8
Reply = list[bytes]
Answer = Callable[["VllmPublisher", int], list[Reply]]
"""Replies to a request from some number on, for a replay endpoint that misbehaves."""
SnapshotAnswer = Callable[["VllmPublisher"], Reply | None]
"""What an endpoint for snapshots replies; None: nothing."""


_chance = random.SystemRandom()  # hypothesis seeds the common one, alike in every worker
_given: deque[int] = deque(maxlen=2000)


def free_port() -> int:
    """A port that stays free for a while, also between two processes that listen at it: outside the
    range from which the system takes ports, and none that was returned a while ago."""
    while True:
        port = _chance.randrange(12_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            if port not in _given:
                _given.append(port)
                return port


def seq_frame(seq: int) -> bytes:
    return seq.to_bytes(8, "big")


class VllmPublisher:
    """PUB and ROUTER on loopback, served by one thread, as vLLM does it.

    Args:
        topic: First frame of every message. ring: Batches kept for replay. with_topic: Replies
        carry the topic (vLLM >= 0.26). first_seq: The first sequence number. port: Port of the PUB
        socket; 0: a free one. replay_port: Port of the ROUTER socket; 0: a free one. answer:
        Replies instead of the ring. snapshots: What its endpoint for snapshots replies. replay_hwm:
        Replies that may wait for a client; further ones are dropped without a word. 0: any number.
    """

    def __init__(
        self,
        topic: str = "kv-events",
        ring: int = 10_000,
        with_topic: bool = True,
        first_seq: int = 0,
        port: int = 0,
        replay_port: int = 0,
        answer: Answer | None = None,
        snapshots: SnapshotAnswer | None = None,
        replay_hwm: int = 0,
    ) -> None:
        self.topic = topic.encode()
        self.ring: deque[tuple[int, bytes]] = deque(maxlen=ring)
        self.requests: list[bytes] = []
        self.answer = answer
        self.snapshots = snapshots
        self.snapshots_asked = 0
        self._with_topic = with_topic
        self._next_seq = first_seq
        self._queue: Queue[list[bytes]] = Queue()
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.XPUB)
        self._pub.setsockopt(zmq.XPUB_VERBOSER, 1)
        self._router = self._context.socket(zmq.ROUTER)
        self._snapshot_router = self._context.socket(zmq.ROUTER)
        for each, wanted in (
            (self._pub, port),
            (self._router, replay_port),
            (self._snapshot_router, 0),
        ):
            each.linger = 0
            each.sndhwm = replay_hwm if each is self._router else 0
            each.bind(f"tcp://127.0.0.1:{wanted or free_port()}")
        self.endpoint: str = self._pub.last_endpoint.decode()
        self.replay_endpoint: str = self._router.last_endpoint.decode()
        self.snapshot_endpoint: str = self._snapshot_router.last_endpoint.decode()
        self.lock = threading.Lock()
        self.subscribers = 0
        self._is_closing = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    @property
    def replay_port(self) -> int:
        return int(self.replay_endpoint.rpartition(":")[2])

    @property
    def last_seq(self) -> int:
        return self._next_seq - 1

    def publish(self, payload: bytes, on_wire: bool = True, in_ring: bool = True) -> int:
        """Publish one batch; or, to stage a loss, leave it off the wire or out of the ring."""
        with self.lock:
            seq = self._next_seq
            self._next_seq += 1
            if in_ring:
                self.ring.append((seq, payload))
            if on_wire:
                self._queue.put([self.topic, seq_frame(seq), payload])
        return seq

    def send_raw(self, frames: list[bytes]) -> None:
        """Send anything at all to the subscribers."""
        self._queue.put(frames)

    def send_now(self, seq: int) -> None:
        """Send a batch of the ring during a replay, before its replies."""
        self._pub.send_multipart([self.topic, seq_frame(seq), dict(self.ring)[seq]])

    def count_subscribers(self) -> None:
        """Bring `subscribers` up to date; for an `Answer` that takes long."""
        while self._pub.poll(0):
            self.subscribers += 1 if self._pub.recv().startswith(b"\x01") else -1

    def flush(self) -> None:
        """Wait until everything is on the wire, so that later subscribers have missed it."""
        self._queue.join()

    def close(self) -> None:
        """Send what was accepted, and stop."""
        self._is_closing = True
        self._thread.join()

    def __enter__(self) -> VllmPublisher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> None:
        while not self._is_closing:
            self.count_subscribers()
            while not self._queue.empty():
                self._pub.send_multipart(self._queue.get())
                self._queue.task_done()
            if self._router.poll(1):
                self._serve(self._router.recv_multipart())
            if self._snapshot_router.poll(0):
                self._serve_snapshot(self._snapshot_router.recv_multipart())
        self._context.destroy(linger=0)

    def _serve(self, frames: list[bytes]) -> None:
        if len(frames) != 3:
            return
        client, _, start = frames
        self.requests.append(start)
        first = int.from_bytes(start, "big")
        for reply in self.answer(self, first) if self.answer else self.replies(first):
            self._router.send_multipart([client, *reply])

    def _serve_snapshot(self, frames: list[bytes]) -> None:
        client, delimiter, request = frames
        assert (delimiter, request) == (b"", b"snapshot")
        self.snapshots_asked += 1
        reply = None if self.snapshots is None else self.snapshots(self)
        if reply is not None:
            self._snapshot_router.send_multipart([client, *reply])

    def replies(self, first: int) -> list[Reply]:
        """The replies of the ring."""
        with self.lock:
            batches = [(seq, payload) for seq, payload in self.ring if seq >= first]
        return [*(self.reply(seq, payload) for seq, payload in batches), self.end()]

    def reply(self, seq: int, payload: bytes) -> Reply:
        return (
            [b"", self.topic, seq_frame(seq), payload]
            if self._with_topic
            else [b"", seq_frame(seq), payload]
        )

    def end(self) -> Reply:
        return [b"", b"", END, b""] if self._with_topic else [b"", END, b""]
