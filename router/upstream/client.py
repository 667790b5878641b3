"""The client: connections kept per origin, and one coarse timer for all deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from async_timeout import timeout

from kvevents.lookups import addresses
from router.upstream.connection import HttpConnection
from router.upstream.errors import (
    ClosedBeforeResponse,
    ConnectFailed,
    ConnectionLimitReached,
    ConnectTimeout,
    FirstByteTimeout,
    GivenUp,
    IdleTimeout,
    KeptConnectionClosed,
    OutOfResources,
    ResponseBroken,
    ResponseTooLarge,
    UpstreamError,
)
from router.upstream.origin import Origin, Timeouts
from router.upstream.response import Header, UpstreamResponse
from router.upstream.turns import LoopTurns

logger = logging.getLogger(__name__)

# The parser would have to be told about both: a response to HEAD has no body whatever its headers
# say, and CONNECT makes a tunnel.
_UNSUPPORTED = frozenset((b"HEAD", b"CONNECT"))
# RFC 9110 8.6: methods that define a meaning for content send a length even when it is 0.
_WITH_CONTENT = frozenset((b"POST", b"PUT", b"PATCH"))
_MAX_REACHED = 16_384
_SHORTAGES = {
    errno.EMFILE: "open_files",
    errno.ENFILE: "open_files",
    errno.ENOBUFS: "buffers",
    errno.ENOMEM: "buffers",
}


_COUNTED_AS: dict[type[UpstreamError], str] = {
    ConnectFailed: "connect_failures",
    ConnectTimeout: "connect_failures",
    FirstByteTimeout: "timeouts",
    IdleTimeout: "timeouts",
    ResponseBroken: "broken",
    GivenUp: "given_up",
    ClosedBeforeResponse: "closed_early",
    KeptConnectionClosed: "closed_early",
}


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Bounds on connections."""

    max_idle_per_origin: int = 256
    idle_s: float = 4.0
    """How long an unused connection is kept. Less than common servers do (uvicorn, and with it
    vLLM: 5 s), so that we close first and a request rarely meets a connection being closed."""
    max_connections: int | None = None
    reserved_from: int | None = None
    """File descriptors from this number on are left to others. The system hands out the lowest that
    is free, so such a number says how many are in use."""


@dataclass(slots=True)
class UpstreamStatistics:
    """Connections at this moment, and counts since the client was made."""

    connections: int = 0
    idle: int = 0
    active: int = 0
    """Exchanges under way."""
    opened: int = 0
    reused: int = 0
    kept_closed: int = 0
    """Requests whose kept connection was closed by the server before the first response byte."""
    connect_failures: int = 0
    timeouts: int = 0
    broken: int = 0
    closed_early: int = 0
    """Closed before the first response byte; includes `kept_closed`."""
    given_up: int = 0
    """Ended by `give_up`."""
    aborted: int = 0
    """Ended by this side for any other reason."""


class _Opening:
    """What a response has until its connection is there: the attempt to open it."""

    __slots__ = ("_client", "_response", "_task")

    def __init__(
        self, client: UpstreamClient, response: UpstreamResponse, task: asyncio.Task[None]
    ) -> None:
        self._client = client
        self._response = response
        self._task = task

    def resume(self) -> None:
        """Nothing was paused."""

    def cut(self) -> None:
        """Give the attempt up."""
        self._task.cancel()
        self._client.exchange_ended(self._response)


class UpstreamClient:
    """Sends requests over kept connections. Belongs to one event loop.

    Args:
        limits: Bounds on connections.
        ssl_context: For https origins; by default the system's certificate authorities are trusted.
        tick_s: How often deadlines are checked; a timeout fires at most this much late.
        on_shortage: Told what the system refused, as in `OutOfResources`.
    """

    def __init__(
        self,
        limits: PoolLimits | None = None,
        ssl_context: ssl.SSLContext | None = None,
        tick_s: float = 0.1,
        on_shortage: Callable[[str], None] | None = None,
    ) -> None:
        self._limits = limits or PoolLimits()
        self._ssl_context = ssl_context
        self._tick_s = tick_s
        self._on_shortage = on_shortage
        self._reached: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closing = False
        # The most recently used connection is last and is taken first, so that the others grow old
        # and are closed.
        self._idle: dict[str, list[HttpConnection]] = {}
        self._active: set[UpstreamResponse] = set()
        self._connections: set[HttpConnection] = set()
        self._connecting = 0
        self._all_closed = asyncio.Event()
        self._counts = UpstreamStatistics()
        self.others: Callable[[], Mapping[str, int]] | None = None
        """What another one that sends to the same replicas counts, by the same names."""
        self.turns = LoopTurns()

    def start(
        self,
        origin: Origin,
        method: bytes,
        target: bytes,
        headers: Sequence[Header],
        body: bytes,
        timeouts: Timeouts,
        *,
        may_reuse: bool = True,
    ) -> UpstreamResponse:
        """Send one request; return its response, still empty, at once.

        Whatever goes wrong from here on, the attempt to connect included, is the response's error.
        Nothing is sent twice: after `KeptConnectionClosed` the caller decides whether to send the
        request again on a new connection.

        Args:
            origin: The server.
            method: Any but HEAD and CONNECT.
            target: Path and query as on the wire; the origin's base path is put before it.
            headers: Without host, content-length and hop-by-hop headers, which the client sets.
            body: Whole; may be empty.
            timeouts: For each phase of the exchange.
            may_reuse: Whether a kept connection may be used.
        Raises:
            ConnectionLimitReached: There is neither a kept connection nor room for a new one.
            ValueError: A method, target or header that would break the framing of the request.
            RuntimeError: The client is closed.
        """
        head = request_head(origin, method, target, headers, len(body))
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        connection = self._take_idle(origin) if may_reuse else None
        if connection is not None:
            response = UpstreamResponse(connection, origin, timeouts, self._loop)
            self._active.add(response)
            self._begin(connection, response, head, body)
            return response
        if self._closing:
            raise RuntimeError("the upstream client is closed")
        self._make_room(origin)
        self._arm()
        response = UpstreamResponse(None, origin, timeouts, self._loop)
        self._active.add(response)
        task = self._loop.create_task(self._open(response, head, body))
        response.source = _Opening(self, response, task)
        return response

    async def send(
        self,
        origin: Origin,
        method: bytes,
        target: bytes,
        headers: Sequence[Header],
        body: bytes,
        timeouts: Timeouts,
        *,
        may_reuse: bool = True,
    ) -> UpstreamResponse:
        """As `start`, but return once the response's status, headers and first body byte (or its
        end) have arrived. Cancelling the call closes the connection.

        Args:
            origin: As for `start`, like all others.
            method: Its method.
            target: Its path and query.
            headers: Its headers.
            body: Its body.
            timeouts: For each phase.
            may_reuse: Whether a kept connection may be used.
        Raises:
            UpstreamError: See `router.upstream.errors`.
            ValueError: As `start`, like RuntimeError.
        """
        response = self.start(origin, method, target, headers, body, timeouts, may_reuse=may_reuse)
        try:
            await response.wait_for_first_byte()
        except BaseException:
            response.abort()
            raise
        return response

    async def fetch(
        self,
        origin: Origin,
        method: bytes,
        target: bytes,
        body: bytes,
        timeouts: Timeouts,
        max_bytes: int,
        headers: Sequence[Header] = (),
    ) -> tuple[int, list[Header], bytes]:
        """Send one small request and read the whole response: `(status, headers, body)`.

        It takes no longer than the three timeouts together, however slowly the body trickles. A
        request whose kept connection turns out to be closed is sent again on a new one, once.

        Args:
            origin: As for `send`, like the next four.
            method: Its method.
            target: Its path and query.
            body: Its body.
            timeouts: For each phase of the exchange.
            max_bytes: Bound on the response's body.
            headers: As for `send`.
        Raises:
            ResponseTooLarge: The body is longer than *max_bytes*; at most one buffer beyond it was
                read.
            UpstreamError: As for `send`.
        """
        limit_s = timeouts.connect_s + timeouts.first_byte_s + timeouts.idle_s
        try:
            async with timeout(limit_s):
                try:
                    response = await self.send(origin, method, target, headers, body, timeouts)
                except KeptConnectionClosed:
                    response = await self.send(
                        origin, method, target, headers, body, timeouts, may_reuse=False
                    )
                content = await _read_whole(response, max_bytes, origin)
        except asyncio.TimeoutError:
            self._counts.timeouts += 1
            raise IdleTimeout(
                f"{origin}: response not complete in {limit_s:g} s", received=True
            ) from None
        return response.status, response.headers, content

    def give_up(self, origin: Origin, why: str, silent_s: float) -> None:
        """End the exchanges with a server that is known not to respond: all that wait for their
        first byte, and those that have been silent in mid-body.

        A body whose reader is slow, or that arrived in the meantime, goes on.

        Args:
            origin: The server.
            why: For the message of `GivenUp`.
            silent_s: The least silence in mid-body.
        """
        if self._loop is None:
            return
        now = self._loop.time()
        for response in [each for each in self._active if each.origin == origin]:
            waited_s = response.waited_s(now)
            if waited_s is not None and (not response.started or waited_s >= silent_s):
                response.give_up(why)

    async def close(self) -> None:
        """Close every connection, those in use too, and return when the sockets are closed."""
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        for connection in tuple(self._connections):
            connection.abort()
        while self._connections:
            self._all_closed.clear()
            await self._all_closed.wait()

    def statistics(self) -> UpstreamStatistics:
        """A copy of the counts, with the connections as of now."""
        own = replace(
            self._counts,
            connections=len(self._connections),
            idle=sum(map(len, self._idle.values())),
            active=len(self._active),
        )
        return own if self.others is None else _sum(own, self.others())

    # ConnectionPool

    def connection_opened(self, connection: HttpConnection) -> None:
        """The socket is open."""
        self._connections.add(connection)
        self._counts.opened += 1
        if self._closing:
            connection.abort()

    def exchange_ended(self, response: UpstreamResponse) -> None:
        """Count how the exchange ended."""
        self._active.discard(response)
        if response.complete:
            return
        name = "aborted" if response.error is None else _COUNTED_AS.get(type(response.error))
        if name is not None:
            setattr(self._counts, name, getattr(self._counts, name) + 1)
        if isinstance(response.error, KeptConnectionClosed):
            self._counts.kept_closed += 1

    def recycle(self, connection: HttpConnection) -> None:
        """Keep the connection for another exchange, within the bounds."""
        kept = self._idle.setdefault(connection.origin.key, [])
        if self._closing or len(kept) >= self._limits.max_idle_per_origin:
            connection.abort()
            return
        assert self._loop is not None
        connection.idle_since = self._loop.time()
        kept.append(connection)

    def connection_closed(self, connection: HttpConnection) -> None:
        """The socket is closed."""
        self._connections.discard(connection)
        kept = self._idle.get(connection.origin.key)
        if kept is not None and connection in kept:
            kept.remove(connection)
        if not self._connections:
            self._all_closed.set()

    # Steps

    def _take_idle(self, origin: Origin) -> HttpConnection | None:
        kept = self._idle.get(origin.key)
        while kept:
            connection = kept.pop()
            if not connection.closed:
                self._counts.reused += 1
                return connection
        return None

    async def _open(self, response: UpstreamResponse, head: bytes, body: bytes) -> None:
        """Connect, and send the request of *response*."""
        origin = response.origin
        self._connecting += 1
        try:
            connection = await self._connect(origin)
        except Exception as error:  # noqa: BLE001 - the reader gets every one
            response.fail(self._no_connection(error, origin))
            self.exchange_ended(response)
            response.wake()
            return
        finally:
            self._connecting -= 1
        if len(self._reached) < _MAX_REACHED:
            self._reached.add(origin.key)
        self._begin(connection, response, head, body)

    def _begin(
        self, connection: HttpConnection, response: UpstreamResponse, head: bytes, body: bytes
    ) -> None:
        connection.start(response, head, body)
        if response.error is not None:
            self.exchange_ended(response)
            response.wake()

    async def _connect(self, origin: Origin) -> HttpConnection:
        assert self._loop is not None
        connection = HttpConnection(self, origin)
        try:
            await self._connect_to(origin, connection)
            self._keep_reserve(connection)
        except OSError:
            raise
        except BaseException:
            connection.abort()
            # uvloop closes the socket of a cancelled attempt without calling the protocol.
            self.connection_closed(connection)
            raise
        return connection

    def _no_connection(self, error: Exception, origin: Origin) -> UpstreamError:
        """What becomes of *error* for the reader of the response."""
        if isinstance(error, UpstreamError):
            return error
        if resource := self._shortage(error, origin):
            if self._on_shortage is not None:
                self._on_shortage(resource)
            message = f"{origin}: no connection: the router is out of {resource}"
            return OutOfResources(message, resource)
        if not isinstance(error, OSError):
            logger.error("%s: an attempt to connect failed", origin, exc_info=error)
        why = getattr(error, "strerror", None) or type(error).__name__
        return ConnectFailed(f"{origin}: no connection: {why}")

    async def _connect_to(self, origin: Origin, connection: HttpConnection) -> None:
        assert self._loop is not None
        connect = functools.partial(
            self._loop.create_connection,
            lambda: connection,
            port=origin.port,
            ssl=self._tls() if origin.tls else None,
            server_hostname=origin.host if origin.tls else None,
        )
        *others, last = await self._addresses(origin)
        for host in others:
            with contextlib.suppress(OSError):
                await connect(host=host)
                return
        await connect(host=last)

    async def _addresses(self, origin: Origin) -> list[str]:
        """Those of a server that may be connected to."""
        hosts = await addresses(origin.host)
        if origin.allows is None:
            return hosts
        allowed = [host for host in hosts if origin.allows(host)]
        if not allowed:
            raise ConnectFailed(
                f"{origin}: no connection: {hosts[0]} lies where nothing may be connected to"
            )
        return allowed

    def _keep_reserve(self, connection: HttpConnection) -> None:
        bound = self._limits.reserved_from
        if bound is not None and connection.file_number >= bound:
            connection.abort()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def _shortage(self, error: Exception, origin: Origin) -> str | None:
        """What the system ran out of; None where it is the server that cannot be reached."""
        if isinstance(error, MemoryError):
            return "memory"
        if not isinstance(error, OSError):
            return None
        if error.errno == errno.EADDRNOTAVAIL:
            # Of an origin never reached yet it rather says that its kind of address is not in use.
            return "ports" if origin.key in self._reached else None
        if error.errno is None or isinstance(error, socket.gaierror):
            # Looking a name up opens files as well, and does not say that it could not.
            return "open_files" if _has_no_free_file() else None
        return _SHORTAGES.get(error.errno)

    def _tls(self) -> ssl.SSLContext:
        if self._ssl_context is None:
            self._ssl_context = ssl.create_default_context()
        return self._ssl_context

    def _make_room(self, origin: Origin) -> None:
        """Stay within the bound on connections, by closing an idle one if there is one."""
        bound = self._limits.max_connections
        if bound is None or len(self._connections) + self._connecting < bound:
            return
        for kept in self._idle.values():
            if kept:
                oldest = kept.pop(0)
                self._connections.discard(oldest)
                oldest.abort()
                return
        raise ConnectionLimitReached(f"{origin}: all of max_connections {bound} are in use")

    def _arm(self) -> None:
        assert self._loop is not None
        if self._timer is None:
            self._timer = self._loop.call_later(self._tick_s, self._tick)

    def _tick(self) -> None:
        """End exchanges past their deadline, close connections idle for too long."""
        assert self._loop is not None
        self._timer = None
        now = self._loop.time()
        for response in [response for response in self._active if response.deadline <= now]:
            response.expire()
        self._drop_aged(now - self._limits.idle_s)
        if self._connections or self._connecting:
            self._arm()

    def _drop_aged(self, before: float) -> None:
        for key, kept in tuple(self._idle.items()):
            while kept and kept[0].idle_since < before:
                kept.pop(0).abort()
            if not kept:
                del self._idle[key]


def _sum(own: UpstreamStatistics, others: Mapping[str, int]) -> UpstreamStatistics:
    return UpstreamStatistics(
        **{name: count + others.get(name, 0) for name, count in asdict(own).items()}
    )


def request_head(
    origin: Origin,
    method: bytes,
    target: bytes,
    headers: Sequence[Header],
    body_bytes: int,
) -> bytes:
    """Request line and headers, up to and including the blank line.

    Args:
        origin: The server; its base path is put before the target.
        method: Any but HEAD and CONNECT.
        target: Path and query.
        headers: Without host and content-length, which are added here.
        body_bytes: Length of the body.
    Raises:
        ValueError: A line break or a NUL in a part, a space in the target, or an unsupported
            method.
    """
    lines = [
        b"%b %b%b HTTP/1.1\r\nhost: %b" % (method, origin.target_prefix, target, origin.host_header)
    ]
    lines += [b"%b: %b" % header for header in headers]
    if body_bytes or method in _WITH_CONTENT:
        lines.append(b"content-length: %d" % body_bytes)
    lines.append(b"\r\n")
    head = b"\r\n".join(lines)
    # Every part is one line, so any other number of line breaks means that one was smuggled in.
    breaks = len(lines) + 1
    if head.count(b"\n") != breaks or head.count(b"\r") != breaks or b"\0" in head:
        raise ValueError(
            "request head: method, target and headers must hold no line break and no NUL"
        )
    if b" " in target or method in _UNSUPPORTED:
        raise ValueError(
            f"request head: the target must hold no space, and method {method!r} must not be HEAD"
            " or CONNECT"
        )
    return head


async def _read_whole(response: UpstreamResponse, max_bytes: int, origin: Origin) -> bytes:
    content = bytearray()
    try:
        while (chunk := await response.read_chunk()) is not None:
            content += chunk
            if len(content) > max_bytes:
                raise ResponseTooLarge(
                    f"{origin}: response longer than max_bytes {max_bytes}", received=True
                )
    finally:
        response.abort()
    return bytes(content)


def _has_no_free_file() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return False
