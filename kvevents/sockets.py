"""One connection of one ZMQ socket on an asyncio loop.

A `SocketConnection` connects once and never again, so everything it brings comes from one process:
libzmq's own reconnecting would hide a restart, and it gives up silently on a peer that sent too
large a message. To go on, make a new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvevents.curve import CurveClient
from kvevents.endpoints import Context, Socket, ZmqEndpoint
from kvevents.errors import EndpointError, ForeignAddress, HandshakeFailed, NoConnection
from kvevents.lookups import addresses
from kvevents.messages import MAX_FRAMES

# Plain numbers, which pyzmq takes faster than members of its enums.
_NOBLOCK, _RCVMORE, _EVENTS, _POLLIN = map(int, (zmq.NOBLOCK, zmq.RCVMORE, zmq.EVENTS, zmq.POLLIN))
_UP = zmq.EVENT_HANDSHAKE_SUCCEEDED
_DOWN = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
_BROKEN_OFF = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)

_NEVER_MS = 10**9
_KEEPALIVE_IDLE_S, _KEEPALIVE_INTERVAL_S, _KEEPALIVE_PROBES = 15, 5, 3
"""A peer behind a cut cable sends nothing; so the kernel finds out in half a minute."""


@dataclass(frozen=True, slots=True)
class SocketLimits:
    """Bounds on one connection and on the time to open it."""

    message_bytes: int = 64 * 2**20
    """The longest frame; a peer that sends more loses its connection. libzmq keeps the frames of a
    message until it is whole and has no bound for how many; so a replay of one message without an
    end costs memory until `ReplayLimits.silence_s` ends the connection.
    """
    queue_messages: int = 10_000
    """Messages libzmq holds before the publisher sees back pressure, and drops."""
    connect_timeout_s: float = 5.0
    allows: Callable[[str], bool] | None = None
    """Returns whether a numeric address may be connected to; called for each connection, as a name
    may lead elsewhere by then. This machine is 127.0.0.1. None: every address."""
    curve: CurveClient | None = None
    """The keys of both ends; None: plain text."""


def bound(socket: Socket, limits: SocketLimits) -> None:
    """Limit a socket's messages, and have it notice a peer that has vanished.

    Args:
        socket: Not connected or bound yet.
    """
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.MAXMSGSIZE, limits.message_bytes),
        (zmq.RCVHWM, limits.queue_messages),
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_IDLE_S),
        (zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_INTERVAL_S),
        (zmq.TCP_KEEPALIVE_CNT, _KEEPALIVE_PROBES),
    ):
        socket.setsockopt(option, value)


class WakeUp:
    """Ends one wait: the one that is under way, or else the next."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.set = self._event.set

    async def wait(self, timeout_s: float) -> None:
        """Wait for `set`, for *timeout_s* at most."""
        timer = asyncio.get_running_loop().call_later(max(timeout_s, 0), self.set)
        try:
            await self._event.wait()
        finally:
            timer.cancel()
        self._event.clear()


@dataclass(eq=False, repr=False)
class SocketConnection:
    """A SUB or DEALER socket with at most one peer."""

    context: Context
    kind: int
    """`zmq.SUB` or `zmq.DEALER`."""
    endpoint: str
    """`tcp://host:port`, `ipc://path` or `inproc://name`."""
    limits: SocketLimits
    """Bounds."""
    topic: bytes = b""

    def __post_init__(self) -> None:
        self._socket: Socket | None = None
        self._monitor: Socket | None = None
        self._is_odd = False
        """True once the peer has sent a message that is not three frames."""
        self.wake_up = WakeUp()
        """Set when there may be something to receive, and when the peer is gone. libzmq signals
        changes, not states: wait for it only after `receive` returned None."""
        self._is_up = False
        self._failed = 0
        """The sum of the events that reported a lost connection."""
        self.is_down = False
        """True once the peer is gone; its earlier messages can still be received."""
        self.on_readable: Callable[[], None] | None = None
        """Called, instead of ending a wait, when there may be something to receive. It receives
        until nothing is left, or schedules itself for the rest."""

    async def open(self) -> None:
        """Connect and wait for the handshake.

        Raises:
            NoConnection: None of the host's addresses answered in time.
            HandshakeFailed: The peer's keys are wrong or missing, or it requires keys.
            ForeignAddress: No address of the host may be connected to.
            EndpointError: A socket cannot connect to the endpoint.
        """
        for address in await connectable_addresses(self.endpoint, self.limits):
            if await self._connect(address):
                return
        raise self._why_not_up()

    def send(self, frames: Sequence[bytes]) -> None:
        """Queue a message for the peer.

        Raises:
            NoConnection: The peer is gone.
        """
        try:
            self._open_socket().send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            raise NoConnection(f"{self.endpoint}: the peer is gone") from None

    def receive(self) -> list[bytes] | None:
        """Return the next message, or None if none has come. One of too many frames is cut to
        `MAX_FRAMES + 1`."""
        socket = self._open_socket()
        recv, has_more = socket.recv, socket.getsockopt
        try:
            frames = [recv(_NOBLOCK)]
            while has_more(_RCVMORE):
                frame = recv(_NOBLOCK)
                if len(frames) <= MAX_FRAMES:
                    frames.append(frame)
        except zmq.Again:
            # Nothing there; or the peer left in the middle of a message, which libzmq then takes
            # back.
            return None
        return frames

    def receive_frame(self) -> tuple[bytes, bool] | None:
        """Return the next frame, and whether its message has more; None if none has come.

        A message arrives as a whole, however long; this way it need not be taken at once.
        """
        socket = self._open_socket()
        try:
            frame = socket.recv(_NOBLOCK)
        except zmq.Again:
            return None
        return frame, bool(socket.getsockopt(_RCVMORE))

    def receive_three(self) -> list[bytes] | None:
        """Receive like `receive`, for a peer whose messages have three frames, the second of 8
        bytes: it is asked only once whether a message has more, which takes longer than a small
        frame.

        A peer that sends a message of fewer frames may lose the one behind it, and every frame is
        asked about from then on.
        """
        if self._is_odd:
            return self.receive()
        socket = self._open_socket()
        recv, frames = socket.recv, []
        try:
            frames.append(recv(_NOBLOCK))
            frames.append(recv(_NOBLOCK))
            frames.append(recv(_NOBLOCK))
            has_more = socket.getsockopt(_RCVMORE)
            if not has_more and len(frames[1]) == 8:
                return frames
            self._is_odd = True
            while has_more:
                frames[MAX_FRAMES:] = [recv(_NOBLOCK)]
                has_more = socket.getsockopt(_RCVMORE)
        except zmq.Again:
            if not frames:
                return None
            self._is_odd = True
        return frames

    def has_more(self) -> bool:
        """Return whether there is a message to receive."""
        return bool(int(self._open_socket().getsockopt(_EVENTS)) & _POLLIN)

    def close(self) -> None:
        """Close at once; safe to call again."""
        loop = asyncio.get_running_loop()
        if self._monitor is not None:
            loop.remove_reader(self._monitor.fileno())
        if self._socket is not None:
            loop.remove_reader(self._socket.fileno())
            self._socket.disable_monitor()
        for each in (self._monitor, self._socket):
            if each is not None:
                each.close(linger=0)
        self._monitor = self._socket = None
        self.is_down = True

    # --- inside -----------------------------------------------------------------------------------

    def _open_socket(self) -> Socket:
        if self._socket is None:
            raise NoConnection(f"{self.endpoint}: not connected")
        return self._socket

    async def _connect(self, address: str) -> bool:
        try:
            self._make_sockets(watched=not address.startswith("inproc:"))
        except zmq.ZMQError as error:
            self.close()
            raise NoConnection(f"{self.endpoint}: no socket available ({error.strerror})") from None
        try:
            self._open_socket().setsockopt(zmq.IPV6, int("[" in address))
            self._open_socket().connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise EndpointError(f"{self.endpoint}: {error.strerror}") from None
        if await self._comes_up():
            return True
        self.close()
        return False

    def _why_not_up(self) -> NoConnection:
        """Return why no connection came up."""
        where, limits = self.endpoint, self.limits
        if self._failed & zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return HandshakeFailed(f"{where}: the peer does not know our public key")
        if self._failed & _BROKEN_OFF:
            other = "has another key, or none" if limits.curve else "wants CURVE keys"
            return HandshakeFailed(f"{where}: the handshake failed: the peer {other}, or is no ZMQ")
        return NoConnection(f"{where}: no ZMQ peer answered within {limits.connect_timeout_s:g} s")

    def _make_sockets(self, watched: bool) -> None:
        loop = asyncio.get_running_loop()
        self._socket = self._new_socket()
        loop.add_reader(self._socket.fileno(), self._on_signal)
        # Within a process there is no connection to watch.
        self._is_up, self.is_down = not watched, False
        if watched:
            self._monitor = self._socket.get_monitor_socket(_UP | _DOWN)
            loop.add_reader(self._monitor.fileno(), self._on_monitor)
            # libzmq signals only after its state was read once: changes during the setup are not
            # signalled.
            self._on_monitor()

    async def _comes_up(self) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.limits.connect_timeout_s
        while not self._is_up and not self.is_down and loop.time() < deadline:
            await self.wake_up.wait(deadline - loop.time())
        return self._is_up

    def _new_socket(self) -> Socket:
        socket: Socket = self.context.socket(self.kind)
        bound(socket, self.limits)
        # Not -1, with which libzmq throws away what it has received when the peer leaves.
        socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        if self.limits.curve is not None:
            self.limits.curve.protect(socket)
        if self.kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, self.topic)
        return socket

    def _on_signal(self) -> None:
        if self._socket is None:
            return
        if self.on_readable is not None:
            # Receiving until there is nothing left takes the signal back.
            self.on_readable()
        else:
            # So does reading EVENTS. The wake-up stays until `wait` has seen it.
            self._socket.getsockopt(zmq.EVENTS)
            self.wake_up.set()

    def _on_monitor(self) -> None:
        monitor = self._monitor
        while monitor is not None:
            try:
                event = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return
            self._is_up |= bool(event & _UP)
            self._failed |= event & _DOWN
            self.is_down |= bool(event & _DOWN)
            self.wake_up.set()


def check_connectable(setting: str, text: str) -> ZmqEndpoint:
    """Read an address that a socket can connect to.

    Args:
        setting: Where the address was given; error messages begin with it.

    Raises:
        EndpointError: It is not an address, or names no host and port to connect to.
    """
    endpoint = ZmqEndpoint.parse(setting, text)
    if endpoint.scheme == "tcp" and (endpoint.address == "*" or not endpoint.port):
        raise EndpointError(f"{setting}: {text[:200]!r} must name a host and a port to connect to")
    return endpoint


async def connectable_addresses(endpoint: str, limits: SocketLimits) -> list[str]:
    """Return the endpoint with its host as addresses, IPv4 first: libzmq would look names up on the
    one thread all sockets share.

    Args:
        endpoint: With a name or an address.
        limits: The longest look-up, and the allowed addresses.

    Raises:
        NoConnection: The host has no address.
        ForeignAddress: It has none that is allowed.
        EndpointError: It is not an endpoint to connect to.
    """
    parsed = check_connectable("endpoint", endpoint)
    if parsed.scheme != "tcp":
        _allowed(endpoint, ["127.0.0.1"], limits)
        return [endpoint]
    host = parsed.address.strip("[]")
    timeout_s = limits.connect_timeout_s
    found = await _resolve(endpoint, host, timeout_s)
    hosts = _allowed(endpoint, found, limits)
    return [
        f"tcp://[{each}]:{parsed.port}" if ":" in each else f"tcp://{each}:{parsed.port}"
        for each in hosts
    ]


def _allowed(endpoint: str, hosts: list[str], limits: SocketLimits) -> list[str]:
    if limits.allows is None:
        return hosts
    allowed = [host for host in hosts if limits.allows(host)]
    if not allowed:
        raise ForeignAddress(f"{endpoint}: {hosts[0]} lies where nothing may be connected to")
    return allowed


async def _resolve(endpoint: str, host: str, timeout_s: float) -> list[str]:
    # Not wait_for: before Python 3.12 it can swallow a cancellation that meets the end of what it
    # waits for.
    asking = asyncio.get_running_loop().create_task(addresses(host))
    asking.add_done_callback(
        lambda ended: ended.cancelled() or ended.exception()
    )  # The exception is marked as seen: a cancellation may end the wait below first.
    try:
        await asyncio.wait((asking,), timeout=timeout_s)
        if not asking.done():
            raise NoConnection(f"{endpoint}: the host has no address in {timeout_s:g} s")
        found = asking.result()
    except OSError:
        raise NoConnection(f"{endpoint}: the host has no address") from None
    finally:
        asking.cancel()
    return sorted(found, key=lambda address: ":" in address)
