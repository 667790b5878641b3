"""Event streams of many engines, sent as fast as they are read.

The messages are written ahead, and the sockets speak ZMTP themselves, so that this process never
sets the pace.
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

from kvevents.codec import encode
from kvevents.events import BlockRemoved, BlockStored, Event, EventBatch

BLOCK_SIZE = 16
_GREETING = b"\xff" + bytes(7) + b"\x01\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"
_PIECE_BYTES = 256 * 1024


class Publisher:
    """PUB sockets on loopback, one for each source, with one subscriber each; replay is not
    offered."""

    def __init__(self, sources: int) -> None:
        self._listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(sources)]
        self._peers: list[socket.socket | None] = [None] * sources
        self._next_seq = [0] * sources
        self._is_closed = threading.Event()
        self.endpoints = [f"tcp://127.0.0.1:{each.getsockname()[1]}" for each in self._listeners]
        # A subscriber does not wait for long until it is spoken to.
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def wait_for_subscribers(self, timeout_s: float = 60.0) -> None:
        """Wait until every source has one."""
        deadline = time.monotonic() + timeout_s
        while None in self._peers:
            if time.monotonic() > deadline:
                raise TimeoutError("not every source has a subscriber")
            time.sleep(0.01)

    def _accept(self) -> None:
        # `select` would take no descriptor above 1,023.
        with selectors.DefaultSelector() as selector:
            for number, listener in enumerate(self._listeners):
                selector.register(listener, selectors.EVENT_READ, number)
            while not self._is_closed.is_set():
                for key, _ in selector.select(0.1):
                    peer, _ = self._listeners[key.data].accept()
                    with suppress(OSError):
                        _shake_hands(peer)
                        self._peers[key.data] = peer

    def messages(self, source: int, payloads: Iterable[bytes]) -> bytes:
        """Return the next messages of a source, as they go over the wire.

        Args:
            source: By number.
            payloads: Of its next batches.
        """
        parts = []
        for payload in payloads:
            seq = self._next_seq[source]
            self._next_seq[source] += 1
            size = len(payload)
            head = bytes((0, size)) if size < 256 else b"\x02" + struct.pack(">Q", size)
            parts += [b"\x01\x00\x01\x08", struct.pack(">Q", seq), head, payload]
        return b"".join(parts)

    def send(self, data: Sequence[bytes], timeout_s: float = 300.0) -> None:
        """Send something to every source's subscriber, to all of them at the same time.

        Args:
            data: By source; what `messages` returned.
            timeout_s: Give up after this time.
        """
        left = {
            peer: memoryview(each)
            for each, peer in zip(data, self._peers, strict=True)
            if each and peer is not None
        }
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for peer in left:
                peer.setblocking(False)
                selector.register(peer, selectors.EVENT_WRITE, peer)
            while left:
                for key, _ in selector.select(1.0):
                    peer = key.data
                    left[peer] = left[peer][self._send_piece(peer, left[peer]) :]
                    if not left[peer]:
                        selector.unregister(peer)
                        del left[peer]
                if time.monotonic() > deadline:
                    raise TimeoutError("a subscriber does not read its events")

    def _send_piece(self, peer: socket.socket, data: memoryview) -> int:
        try:
            return peer.send(data[:_PIECE_BYTES])
        except ConnectionError:  # it comes back, and gets what is sent from then on
            self._peers[self._peers.index(peer)] = None
            return len(data)

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()
        for each in (*self._listeners, *self._peers):
            if each is not None:
                each.close()


def _shake_hands(peer: socket.socket) -> None:
    """Greet a SUB socket, and read what it subscribes to."""
    peer.settimeout(5)
    peer.sendall(_GREETING + bytes((4, len(_READY))) + _READY)
    _read(peer, 64)
    while _frame(peer)[0] & 4:
        pass  # READY; the frame behind it, which is no command, is the subscription
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _read(peer: socket.socket, size: int) -> bytes:
    data = b""
    if size > _PIECE_BYTES:
        raise ConnectionError(f"the subscriber announces {size} bytes")
    while len(data) < size:
        more = peer.recv(size - len(data))
        if not more:
            raise ConnectionError("the subscriber hung up")
        data += more
    return data


def _frame(peer: socket.socket) -> tuple[int, bytes]:
    flags = _read(peer, 1)[0]
    size = struct.unpack(">Q", _read(peer, 8))[0] if flags & 2 else _read(peer, 1)[0]
    return flags, _read(peer, size)


# --- what engines publish -------------------------------------------------------------------------


def run_tokens(seed: int, count: int) -> list[int]:
    """Return a prompt of *count* tokens that shares no block with another seed's."""
    return [(seed * 1_000_003 + at * 7919) % 127_993 for at in range(count)]


def block_hashes(tokens: Sequence[int], salt: int = 0) -> list[int]:
    """Return one 64-bit hash a block, chained as an engine's are.

    Args:
        tokens: Of the prompt.
        salt: Engines with different ones name the same blocks differently.
    """
    found, parent = [], salt
    for at in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
        parent = hash((parent, *tokens[at : at + BLOCK_SIZE])) & (2**64 - 1)
        found.append(parent)
    return found


def stored(
    tokens: Sequence[int], hashes: Sequence[int], blocks_per_event: int, group: int = 0
) -> list[Event]:
    """Return the events of a prompt that is computed from its start on.

    Args:
        tokens: Of the prompt.
        hashes: Of its blocks.
        blocks_per_event: How many in one event.
        group: 0: full attention; others: a sliding window.
    """
    return [
        BlockStored(
            block_hashes=list(hashes[first : first + blocks_per_event]),
            parent_block_hash=hashes[first - 1] if first else None,
            token_ids=list(tokens[first * BLOCK_SIZE : (first + blocks_per_event) * BLOCK_SIZE]),
            medium="GPU",
            group_idx=group,
            extra_keys=[None] * len(hashes[first : first + blocks_per_event]),
            kv_cache_spec_kind="sliding_window" if group else "full_attention",
            kv_cache_spec_sliding_window=128 if group else None,
            block_size=BLOCK_SIZE,
        )
        for first in range(0, len(hashes), blocks_per_event)
    ]


def removed(hashes: Sequence[int], blocks_per_event: int) -> list[Event]:
    """Return the events of blocks that are evicted.

    Args:
        hashes: Of the blocks.
        blocks_per_event: How many in one event.
    """
    return [
        BlockRemoved(list(hashes[first : first + blocks_per_event]), "GPU", 0)
        for first in range(0, len(hashes), blocks_per_event)
    ]


def batches(events: Sequence[Event], events_per_batch: int = 4) -> list[bytes]:
    """Return payloads of a few events each, as an engine step's.

    Args:
        events: In order.
        events_per_batch: How many in one.
    """
    return [
        encode(EventBatch(1.0, list(events[first : first + events_per_batch]), 0))
        for first in range(0, len(events), events_per_batch)
    ]
