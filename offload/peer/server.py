"""Lets other engines read this one's tier in memory."""

from __future__ import annotations

import logging
import threading
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
    """Serves one memory, in a thread of its own. Never waits for a client: a reply that it does not
    take is dropped."""

    POLL_MS = 100
    """The longest until closing is noticed."""

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
                    socket.send_multipart([client, *self._reply(frames)])

    def _reply(self, frames: list[bytes]) -> list[bytes]:
        try:
            if len(frames) != 1:
                raise TransferError(f"peer tier: {len(frames)} frames in a request of one")
            return self._answer(decode(frames[0]))
        except TransferError as error:
            log.warning("%s", error)
            return [b""]

    def _answer(self, request: Request) -> list[bytes]:
        keys = [OffloadKey(key) for key in request.keys]
        is_ours = request.identity == self._identity
        if isinstance(request, PeerQuestion):
            return [pack_bits([is_ours and self._memory.holds(key) for key in keys])]
        return [(is_ours and self._memory.read(key)) or b"" for key in keys]
