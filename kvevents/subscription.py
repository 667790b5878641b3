"""One connection to a publisher, on an asyncio loop: over a socket of our own where it is not
encrypted, else over one of libzmq.

libzmq reads on a thread of its own, which then has to wake up the loop for every batch; without it
a batch comes in one system call, and many at a time where many wait.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import Protocol

import zmq

from kvevents.endpoints import Context, ZmqEndpoint
from kvevents.errors import EndpointError, HandshakeFailed, MalformedBatch, NoConnection
from kvevents.messages import Batch, WireRun, read_live
from kvevents.sockets import (
    KEEPALIVE_IDLE_S,
    KEEPALIVE_INTERVAL_S,
    KEEPALIVE_PROBES,
    SocketConnection,
    SocketLimits,
    WakeUp,
    connectable_addresses,
)
from kvevents.zmtp import SubscriberEnd

_READ_BYTES = 64 * 1024
_MAX_WAITING_BYTES = 2**18
"""Received and not taken yet; the rest waits in the kernel, and then at the publisher."""
_KEEPALIVE = (
    ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
    ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
    ("TCP_KEEPCNT", KEEPALIVE_PROBES),
)


class Subscription(Protocol):
    """Batches from one publisher, of one process: it connects once and never again."""

    is_down: bool
    """True once the publisher is gone; what it sent before can still be taken."""
    on_readable: Callable[[], None] | None
    """Called, instead of ending a wait, when there may be a batch. It takes batches until there is
    none left, or comes back on its own for the rest."""

    async def open(self) -> None:
        """Connect, shake hands and subscribe.

        Raises:
            NoConnection: None of the host's addresses answered in time.
            HandshakeFailed: One did, and does not have the keys that it should, or wants some.
            ForeignAddress: None of them may be connected to.
            EndpointError: A socket cannot connect to the endpoint.
        """

    def next_batch(self, topic: bytes | None) -> Batch | None:
        """The next batch, None if there is none.

        Args:
            topic: The only topic that counts; None: every one.

        Raises:
            MalformedBatch: A message that is not a batch; or what comes is not this protocol, which
                ends the connection.
        """

    def run(self) -> WireRun | None:
        """See `SubscriberEnd.run`; None where libzmq receives."""

    def skip_to(self, at: int) -> None:
        """See `SubscriberEnd.skip_to`."""

    def has_more(self) -> bool:
        """Whether there may be another message."""

    async def wait(self, timeout_s: float) -> None:
        """Wait until there may be a batch, the publisher is gone, or *timeout_s* is over; only
        after `next_batch` returned None."""

    def wake(self) -> None:
        """End the wait that is under way, or the next one."""

    def close(self) -> None:
        """Close at once; safe to call again."""


def subscription(
    context: Context, endpoint: str, topic: bytes, limits: SocketLimits
) -> Subscription:
    """The connection that an endpoint calls for.

    Args:
        context: Where sockets of libzmq live.
        endpoint: `tcp://host:port`, `ipc://path` or `inproc://name`.
        topic: What to subscribe to.
        limits: Bounds; their keys decide too.
    """
    if limits.curve is not None or endpoint.startswith("inproc:"):
        return _ZmqSubscription(context, zmq.SUB, endpoint, limits, topic)
    return _PlainSubscription(endpoint, limits, topic)


class _ZmqSubscription(SocketConnection):
    def next_batch(self, topic: bytes | None) -> Batch | None:
        frames = self.receive_three()
        return None if frames is None else read_live(frames, topic)

    def run(self) -> WireRun | None:
        return None

    def skip_to(self, at: int) -> None:
        raise AssertionError(f"no run of libzmq's ends at {at}")


class _PlainSubscription:
    def __init__(self, endpoint: str, limits: SocketLimits, topic: bytes) -> None:
        self.is_down = False
        self.on_readable: Callable[[], None] | None = None
        self._endpoint = endpoint
        self._limits = limits
        self._topic = topic
        self._wire = SubscriberEnd(topic, limits.message_bytes)
        self._socket: socket.socket | None = None
        self._wake = WakeUp()
        self._is_reading = False
        self._failure: NoConnection | None = None

    async def open(self) -> None:
        for address in await connectable_addresses(self._endpoint, self._limits):
            if await self._connect(ZmqEndpoint.parse("endpoint", address)):
                return
        limit_s = self._limits.connect_timeout_s
        raise self._failure or NoConnection(
            f"{self._endpoint}: no ZMQ peer answered within {limit_s:g} s"
        )

    def next_batch(self, topic: bytes | None) -> Batch | None:
        try:
            batch = self._wire.next_batch(topic)
        except HandshakeFailed as problem:
            self._wire.drop()
            self._end()
            raise MalformedBatch(str(problem)) from None
        if batch is None:
            if self._wire.outgoing:
                self._send()
            if not self._is_reading:
                self._read_on()
        return batch

    def run(self) -> WireRun | None:
        return self._wire.run()

    def skip_to(self, at: int) -> None:
        self._wire.skip_to(at)

    def has_more(self) -> bool:
        wire = self._wire
        return wire.waiting_bytes > 0 or not self._is_reading or len(wire.outgoing) > 0

    async def wait(self, timeout_s: float) -> None:
        await self._wake.wait(timeout_s)

    def wake(self) -> None:
        self._wake.set()

    def close(self) -> None:
        self._end()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    # --- inside -----------------------------------------------------------------------------------

    async def _connect(self, endpoint: ZmqEndpoint) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limits.connect_timeout_s
        self._wire = SubscriberEnd(self._topic, self._limits.message_bytes)
        self.is_down = False
        if self._begin(endpoint):
            while not self._wire.is_ready and not self.is_down and loop.time() < deadline:
                await self.wait(deadline - loop.time())
        if not self._wire.is_ready or self.is_down:
            self.close()
        return not self.is_down

    def _begin(self, endpoint: ZmqEndpoint) -> bool:
        """Begin to connect; False where the address says no at once."""
        try:
            self._socket, address = _new_socket(endpoint)
        except OSError as error:
            raise NoConnection(
                f"{self._endpoint}: no socket available ({error.strerror})"
            ) from None
        try:
            self._socket.connect(address)
        except OSError as error:
            if error.errno is None:  # a path that is too long, for one
                raise EndpointError(f"{self._endpoint}: {error}") from None
            if error.errno != errno.EINPROGRESS:
                return False
        asyncio.get_running_loop().add_writer(self._socket, self._on_connected)
        return True

    def _on_connected(self) -> None:
        assert self._socket is not None
        if self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._end()
            return
        self._send()
        self._read_on()

    def _send(self) -> None:
        if self._socket is None:
            return
        outgoing, loop = self._wire.outgoing, asyncio.get_running_loop()
        try:
            del outgoing[: self._socket.send(outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            outgoing.clear()  # the end shows to whoever reads
        if outgoing:
            loop.add_writer(self._socket, self._send)
        else:
            loop.remove_writer(self._socket)

    def _on_signal(self) -> None:
        if self._socket is None:
            return
        wire = self._wire
        try:
            data = self._socket.recv(min(wire.missing_bytes or _READ_BYTES, _READ_BYTES))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or not wire.is_ready:
            self._look_closer(data)
        else:
            wire.give(data)
            if wire.waiting_bytes > _MAX_WAITING_BYTES:
                self._read_no_more()
        if self.on_readable is None or self.is_down:
            self._wake.set()
        if self.on_readable is not None:
            self.on_readable()

    def _look_closer(self, data: bytes) -> None:
        """The end of a connection, or what comes before its first batch."""
        wire = self._wire
        try:
            if not data and not wire.is_ready:
                raise HandshakeFailed("the peer wants CURVE keys, or is no ZMQ")
            wire.give(data)
            if wire.outgoing:
                self._send()
        except HandshakeFailed as problem:
            self._failure = HandshakeFailed(f"{self._endpoint}: the handshake failed: {problem}")
            self._end()
        if not data:
            self._end()

    def _read_on(self) -> None:
        if self._socket is not None and not self.is_down:
            self._is_reading = True
            asyncio.get_running_loop().add_reader(self._socket, self._on_signal)

    def _read_no_more(self) -> None:
        if self._socket is not None and self._is_reading:
            self._is_reading = False
            asyncio.get_running_loop().remove_reader(self._socket)

    def _end(self) -> None:
        self._read_no_more()
        if self._socket is not None:
            asyncio.get_running_loop().remove_writer(self._socket)
        self.is_down = True
        self._wake.set()


def _new_socket(endpoint: ZmqEndpoint) -> tuple[socket.socket, tuple[str, int] | str]:
    """A socket that does not wait, and what it is to be connected to."""
    host = endpoint.address
    if endpoint.scheme == "ipc":
        family, address = socket.AF_UNIX, "\0" + host[1:] if host.startswith("@") else host
    else:
        host = host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setblocking(False)
    if endpoint.scheme == "ipc":
        return made, address
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made, (host, endpoint.port or 0)
