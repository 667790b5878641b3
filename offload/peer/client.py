"""Asks other engines' memories, and fetches from them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence

import zmq

from kvevents.endpoints import Socket
from offload.base import OffloadKey
from offload.errors import TransferError
from offload.peer.names import PeerNames
from offload.peer.wire import MOST_FETCHED, PeerFetch, PeerQuestion, encode, unpack_bits
from offload.request import PeerBlocks, PeerSource


class PeerClient:
    """Other engines with equal weights. Every call has a socket of its own, so it may be used from
    any thread.

    A peer that did not answer is left alone for a while: requests must not wait for a dead engine
    one by one.
    """

    FETCH_S = 5.0
    """The longest fetch of `MOST_FETCHED` blocks."""
    PULL_S = 30.0
    """The longest pull of one request's blocks: others wait behind it."""
    SILENT_S = 5.0
    """How long a silent peer is neither asked nor fetched from."""
    MOST_SILENT = 1024
    """The most silent peers that are remembered."""

    def __init__(self, identity: bytes, block_bytes: int, answer_s: float) -> None:
        """
        Args:
            block_bytes: The largest block's: no frame of a reply may be longer.
            answer_s: How long to wait for an answer to a question, which holds up a request.
        """
        self._answer_s = answer_s
        self._identity = identity
        self._block_bytes = block_bytes
        self._names = PeerNames()
        self._lock = threading.Lock()
        self._silent_until: dict[PeerSource, float] = {}
        self._unfetched_until: dict[PeerSource, float] = {}
        """Peers whose last fetch failed. One that is only slow to answer a question is not among
        them: what it has promised others may still be fetched."""

    def find(self, source: PeerSource, keys: Sequence[OffloadKey]) -> PeerBlocks:
        """Ask which blocks a peer holds; empty if it does not answer.

        Args:
            keys: At most `MOST_ASKED`.
        """
        if not keys or self.is_silent(source):
            return PeerBlocks(source, frozenset())
        try:
            (bits,) = self._exchange(
                source, PeerQuestion(self._identity, list(keys)), self._answer_s, 1
            )
        except TransferError:
            self._leave_alone(source, self._silent_until)
            return PeerBlocks(source, frozenset())
        held = unpack_bits(bits, len(keys))
        return PeerBlocks(
            source, frozenset(key for key, is_held in zip(keys, held, strict=True) if is_held)
        )

    def fetch(
        self, source: PeerSource, keys: Sequence[OffloadKey], by_s: float = math.inf
    ) -> list[bytes]:
        """Return the bytes of blocks, in their order.

        Args:
            keys: Any number; they are fetched `MOST_FETCHED` at a time.
            by_s: When the last must be there, by `time.monotonic`.

        Raises:
            TransferError: The peer does not answer in time, did not lately, or has one of them no
                longer.
        """
        if self._is_left_alone(source, self._unfetched_until):
            raise TransferError(f"peer tier: {source.host}:{source.port} did not answer lately")
        found: list[bytes] = []
        try:
            for first in range(0, len(keys), MOST_FETCHED):
                some: list[bytes] = [*keys[first : first + MOST_FETCHED]]
                within_s = max(min(self.FETCH_S, by_s - time.monotonic()), 0.0)
                found += self._exchange(
                    source, PeerFetch(self._identity, some), within_s, len(some)
                )
        except TransferError:
            for silent in (self._silent_until, self._unfetched_until):
                self._leave_alone(source, silent)
            raise
        if not all(found):
            raise TransferError("peer tier: a block was evicted since its peer was asked")
        return found

    def _exchange(
        self, source: PeerSource, request: PeerQuestion | PeerFetch, within_s: float, frames: int
    ) -> list[bytes]:
        by = time.monotonic() + within_s
        endpoint = self._names.endpoint(source, within_s)
        socket: Socket
        with zmq.Context.instance().socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IPV6, 1)
            socket.setsockopt(zmq.MAXMSGSIZE, max(self._block_bytes, 1 << 16))
            socket.connect(endpoint)
            socket.send(encode(request))
            if not socket.poll(max(by - time.monotonic(), 0) * 1000):
                raise TransferError(f"peer tier: {source.host}:{source.port} did not answer")
            reply: list[bytes] = socket.recv_multipart()
        if len(reply) != frames:
            raise TransferError(f"peer tier: {len(reply)} frames in a reply of {frames}")
        return reply

    def is_silent(self, source: PeerSource) -> bool:
        """Return whether a peer is left alone, since it did not answer lately."""
        return self._is_left_alone(source, self._silent_until)

    def _is_left_alone(self, source: PeerSource, silent: Mapping[PeerSource, float]) -> bool:
        with self._lock:
            return time.monotonic() < silent.get(source, 0.0)

    def _leave_alone(self, source: PeerSource, silent: dict[PeerSource, float]) -> None:
        with self._lock:
            if len(silent) >= self.MOST_SILENT:
                silent.clear()
            silent[source] = time.monotonic() + self.SILENT_S
