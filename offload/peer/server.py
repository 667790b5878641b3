"""Lets other engines read this one's tier in memory."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Protocol

import zmq

from kvevents.endpoints import Socket
from offload.base import OffloadKey
from offload.errors import CacheConfigError, TransferError
from offload.peer.wire import MAX_REQUEST_BYTES, PeerQuestion, Request, decode, pack_bits

log = logging.getLogger(__name__)


class PeerMemory(Protocol):
    """A tier in memory as another thread than the engine's may read it."""

    def holds(self, key: OffloadKey) -> bool:
        """Return whether the block can be loaded now."""

    def read(self, key: OffloadKey) -> bytes | None:
        """Return the block's bytes; None if it is missing, or went while it was read."""


class PeerServer:
    """Serves one memory, in a thread of its own. Never waits for a client: what it does not take is
    dropped, and so is a client that takes nothing for a while."""

    POLL_MS = 100
    """The longest until closing is noticed."""
    MOST_UNSENT_BYTES = 512 << 20
    """The most that replies to all clients together take until they are sent; beyond it, blocks are
    answered as if they were gone. A block that has begun may exceed it."""
    MOST_QUEUED = 2
    """Requests and replies of one client; ours send the next request behind the reply."""
    UNTAKEN_MS = 10_000
    """After this a client that takes nothing is disconnected, and what it was sent is let go."""
    WARN_EVERY_S = 60.0
    """At most one warning in so long: whoever reaches the port may send what is no request."""

    def __init__(self, host: str, port: int, identity: bytes, memory: PeerMemory) -> None:
        """Bind, and serve until closed.

        Args:
            port: To bind to; 0 for any.
            identity: The identity of weights and pages; others get nothing.

        Raises:
            CacheConfigError: The address cannot be bound.
        """
        self._identity = identity
        self._memory = memory
        self._closing = threading.Event()
        self._socket: Socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, self.MOST_QUEUED)
        self._socket.setsockopt(zmq.RCVHWM, self.MOST_QUEUED)
        self._socket.setsockopt(zmq.TCP_MAXRT, self.UNTAKEN_MS)
        self._unsent: list[tuple[zmq.MessageTracker, int]] = []
        """Parts of replies that ZMQ may hold, and their bytes."""
        self._warn_from = 0.0
        self._unsaid = 0
        """Refused requests of which nothing was logged."""
        try:
            self._socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self._socket.close()
            raise CacheConfigError(f"p2p tier: cannot bind {host}:{port}: {error}") from None
        self.port = int(
            self._socket.getsockopt(zmq.LAST_ENDPOINT).rpartition(b":")[2].rstrip(b"\0")
        )
        """The port it listens on."""
        self._thread = threading.Thread(target=self._run, name="kv-peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving; calling it again is harmless."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        with self._socket as socket:
            while not self._closing.is_set():
                if socket.poll(self.POLL_MS):
                    client, *frames = socket.recv_multipart()
                    self._unsent = [each for each in self._unsent if not each[0].done]
                    self._send(socket, client, self._reply(frames))

    def _send(self, socket: Socket, client: bytes, reply: list[bytes]) -> None:
        last = len(reply) - 1
        socket.send(client, zmq.SNDMORE)
        for index, part in enumerate(reply):
            frame = zmq.Frame(part, track=True, copy=False)
            socket.send(frame, zmq.SNDMORE if index < last else 0, copy=False)
            if part and frame.tracker is not None:
                self._unsent.append((frame.tracker, len(part)))

    def _reply(self, frames: list[bytes]) -> list[bytes]:
        try:
            if len(frames) != 1:
                raise TransferError(f"peer tier: {len(frames)} frames in a request of one")
            return self._answer(decode(frames[0]))
        except TransferError as error:
            self._warn(error)
            return [b""]

    def _warn(self, error: TransferError) -> None:
        now = time.monotonic()
        if now < self._warn_from:
            self._unsaid += 1
            return
        log.warning("%s (%d more since the last such line)", error, self._unsaid)
        self._warn_from, self._unsaid = now + self.WARN_EVERY_S, 0

    def _answer(self, request: Request) -> list[bytes]:
        keys = [OffloadKey(key) for key in request.keys]
        is_ours = request.identity == self._identity
        if isinstance(request, PeerQuestion):
            return [pack_bits([is_ours and self._memory.holds(key) for key in keys])]
        blocks = list(self._blocks(keys)) if is_ours else [b""] * len(keys)
        return blocks or [b""]  # a message has a frame, also in reply to a fetch of nothing

    def _blocks(self, keys: list[OffloadKey]) -> Iterator[bytes]:
        room = self.MOST_UNSENT_BYTES - sum(size for _, size in self._unsent)
        for key in keys:
            block = (room > 0 and self._memory.read(key)) or b""
            room -= len(block)
            yield block
