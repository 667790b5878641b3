"""Relays that lose things, one for live messages, one for the byte streams of replays; and one that
loses nothing and does not tell the truth."""

from __future__ import annotations

import random
import selectors
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import zmq
from typing_extensions import override

from kvevents.codec import decode, encode
from kvevents.events import EventBatch
from kvevents.messages import END_MARKER, SNAPSHOT_START
from tests.support.resets import close_by_reset


@dataclass(frozen=True)
class Faults:
    """Probabilities, per message."""

    drop: float = 0.03
    duplicate: float = 0.03
    delay: float = 0.03
    """Delayed past up to twenty later messages: late and out of order."""
    cut: float = 0.004
    """The connection to the subscriber ends, and what is in transit is lost."""


class _Relay(ABC):
    """Runs on a thread of its own until it is closed."""

    _is_closing = False

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @abstractmethod
    def _run(self) -> None:
        """Pass messages on while not `_is_closing`."""

    def close(self) -> None:
        self._is_closing = True
        self._thread.join()


class LossyRelay(_Relay):
    """SUB on one side, PUB on the other, a thread between that makes mistakes until `heal` is
    called."""

    def __init__(self, upstream: str, seed: int, faults: Faults) -> None:
        self.faults = faults
        self.forwarded = self.dropped = self.cuts = 0
        self._upstream = upstream
        self._rng = random.Random(seed)
        self._late: list[tuple[int, list[bytes]]] = []
        self._context = zmq.Context()
        self._sub = self._subscribe()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.linger = 0
        self._pub.sndhwm = 0
        self._pub.bind("tcp://127.0.0.1:0")
        self._front = CuttingRelay(self._pub.last_endpoint.decode(), seed, 0.0)
        self.endpoint = self._front.endpoint
        self._must_reconnect = False
        self._start()

    def heal(self) -> None:
        """Make no more mistakes; delayed messages are sent first."""
        self.faults = Faults(0, 0, 0, 0)

    def reconnect(self) -> None:
        """Close and reopen both connections, as a TCP relay does when the engine restarts."""
        self._must_reconnect = True

    @override
    def close(self) -> None:
        super().close()
        self._front.close()

    def _subscribe(self) -> zmq.Socket[bytes]:
        sub = self._context.socket(zmq.SUB)
        sub.linger = 0
        sub.rcvhwm = 0
        sub.subscribe(b"")
        sub.reconnect_ivl = 10
        sub.connect(self._upstream)
        return sub

    @override
    def _run(self) -> None:
        while not self._is_closing:
            if self._must_reconnect:
                self._must_reconnect = False
                self._sub.close()
                self._sub = self._subscribe()
                self._cut()
            if self._sub.poll(2):
                self._pass(self._sub.recv_multipart())
            elif not self.faults.delay:
                self._send_late(to=2**62)
        self._context.destroy(linger=0)

    def _pass(self, message: list[bytes]) -> None:
        self.forwarded += 1
        rng, faults = self._rng, self.faults
        if rng.random() < faults.cut:
            self._cut()
        if rng.random() < faults.drop:
            self.dropped += 1
        elif rng.random() < faults.delay:
            self._late.append((self.forwarded + rng.randrange(1, 20), message))
        else:
            for _ in range(1 + (rng.random() < faults.duplicate)):
                self._pub.send_multipart(message)
        self._send_late(to=self.forwarded)

    def _send_late(self, to: int) -> None:
        for due, message in self._late:
            if due <= to:
                self._pub.send_multipart(message)
        self._late = [entry for entry in self._late if entry[0] > to]

    def _cut(self) -> None:
        self.cuts += 1
        self._front.cut_all()


class CuttingRelay(_Relay):
    """Forwards TCP to a `tcp://` endpoint and ends connections in the middle.

    Args:
        upstream: The endpoint to forward to. seed: Seed of the mistakes. cut: Probability per chunk
        of up to 16 KiB; 0 ends the mistakes. resets: Connections end as those of a dying host do,
        new ones too.
    """

    def __init__(self, upstream: str, seed: int, cut: float, resets: bool = False) -> None:
        self.cut = cut
        self._resets = resets
        self.cuts = 0
        self._port = int(upstream.rpartition(":")[2])
        self._rng = random.Random(seed)
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._other: dict[socket.socket, socket.socket] = {}
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._must_cut_all = False
        self._start()

    def cut_all(self) -> None:
        """Close all connections soon."""
        self._must_cut_all = True

    def lead_to(self, upstream: str) -> None:
        """Lead new connections elsewhere, as an address does that is used again."""
        self._port = int(upstream.rpartition(":")[2])

    @override
    def _run(self) -> None:
        while not self._is_closing:
            if self._must_cut_all:
                self._must_cut_all = False
                self._part_all()
            for key, _ in self._selector.select(0.005):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj in self._other:
                    self._forward(key.fileobj)
        self._part_all()
        self._selector.close()
        self._listener.close()

    def _part_all(self) -> None:
        for end in list(self._other):
            self._part(end)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        if self._resets and self._rng.random() < self.cut:
            self.cuts += 1
            close_by_reset(near)
            return
        try:
            far = socket.create_connection(("127.0.0.1", self._port))
        except OSError:
            near.close()
            return
        self._other.update({near: far, far: near})
        for end in (near, far):
            self._selector.register(end, selectors.EVENT_READ)

    def _forward(self, end: socket.socket) -> None:
        is_cut = self._rng.random() < self.cut
        self.cuts += is_cut
        try:
            chunk = b"" if is_cut else end.recv(16_384)
            self._other[end].sendall(chunk)
        except OSError:
            chunk = b""
        if not chunk:
            self._part(end)

    def _part(self, end: socket.socket) -> None:
        other = self._other.pop(end, None)
        if other is not None:
            del self._other[other]
            for each in (end, other):
                self._selector.unregister(each)
                if self._resets:
                    close_by_reset(each)
                else:
                    each.close()


class CrossingRelay(_Relay):
    """Passes on one publisher's live batches, and another's in their place while `is_crossed`; the
    connection to the subscriber stays.

    Args:
        own: The publisher's PUB socket.
        other: The other one's.
    """

    def __init__(self, own: str, other: str) -> None:
        self.is_crossed = False
        self.passed = [0, 0]
        """Batches of each that came in, passed on or not."""
        self._context = zmq.Context()
        self._subs = [self._subscribe(upstream) for upstream in (own, other)]
        self._pub = self._context.socket(zmq.PUB)
        self._pub.sndhwm = 0
        self._pub.bind("tcp://127.0.0.1:0")
        self.endpoint = self._pub.last_endpoint.decode()
        self._start()

    def _subscribe(self, upstream: str) -> zmq.Socket[bytes]:
        sub = self._context.socket(zmq.SUB)
        sub.rcvhwm = 0
        sub.subscribe(b"")
        sub.connect(upstream)
        return sub

    @override
    def _run(self) -> None:
        while not self._is_closing:
            for which, sub in enumerate(self._subs):
                while sub.poll(1):
                    message = sub.recv_multipart()
                    if self.is_crossed == bool(which):
                        self._pub.send_multipart(message)
                    self.passed[which] += 1
        self._context.destroy(linger=0)


class TamperingRelay(_Relay):
    """Between a publisher's two sockets and a router. Every batch passes, under its own number;
    while `change` is set it says something else, and the ring says the same later. A snapshot ends
    that and is the truth, unless `tampers_with_snapshots`.

    Args:
        endpoint: The publisher's PUB socket.
        replay_endpoint: Its ROUTER socket.
    """

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self.change: Callable[[EventBatch], EventBatch] | None = None
        self.tampers_with_snapshots = False
        self._upstream = replay_endpoint
        self._changed: dict[bytes, bytes] = {}
        self._askers: dict[bytes, tuple[zmq.Socket[bytes], bool]] = {}
        self._context = zmq.Context()
        self._context.linger = 0
        self._sub = self._context.socket(zmq.SUB)
        self._sub.subscribe(b"")
        self._sub.connect(endpoint)
        self._pub, self._router = (self._context.socket(kind) for kind in (zmq.PUB, zmq.ROUTER))
        self._pub.bind("tcp://127.0.0.1:0")
        self._router.bind("tcp://127.0.0.1:0")
        self.endpoint = self._pub.last_endpoint.decode()
        self.replay_endpoint = self._router.last_endpoint.decode()
        self._start()

    @override
    def _run(self) -> None:
        while not self._is_closing:
            if self._sub.poll(1):
                topic, seq, payload = self._sub.recv_multipart()
                said = self._said(payload)
                if said != payload:
                    self._changed[seq] = said
                self._pub.send_multipart([topic, seq, said])
            if self._router.poll(1):
                self._ask(self._router.recv_multipart())
            for client, (asker, is_snapshot) in list(self._askers.items()):
                while not asker.closed and asker.poll(0):
                    self._reply(client, asker.recv_multipart(), is_snapshot)
        self._context.destroy(linger=0)

    def _ask(self, frames: list[bytes]) -> None:
        client, empty, start = frames
        asker = self._context.socket(zmq.DEALER)
        asker.connect(self._upstream)
        self._askers[client] = asker, start == SNAPSHOT_START
        if start == SNAPSHOT_START and not self.tampers_with_snapshots:
            self.change = None
        asker.send_multipart([empty, start])

    def _reply(self, client: bytes, frames: list[bytes], is_snapshot: bool) -> None:
        *head, seq, payload = frames
        if is_snapshot and seq != END_MARKER:
            payload = self._said(payload)
        else:
            payload = self._changed.get(seq, payload)
        self._router.send_multipart([client, *head, seq, payload])
        if seq == END_MARKER:
            self._askers.pop(client)[0].close()

    def _said(self, payload: bytes) -> bytes:
        change = self.change
        return payload if change is None else encode(change(decode(payload)))
