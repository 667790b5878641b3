"""A small pooled HTTP/1.1 client: connections kept per origin, one coarse timer for every
deadline."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass

from async_timeout import timeout

from router.upstream.connection import Connection
from router.upstream.errors import (
    ClosedBeforeResponse,
    ConnectFailed,
    ConnectionLimitReached,
    ConnectTimeout,
    FirstByteTimeout,
    IdleTimeout,
    ResponseBroken,
    ResponseTooLarge,
)
from router.upstream.origin import Origin, Timeouts
from router.upstream.request import request_head
from router.upstream.response import Header, UpstreamResponse


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Bounds on connections.

    ``idle_s`` stays below the keep-alive time of common servers (uvicorn, and with it vLLM: 5 s),
    so that we close first and a request rarely meets a connection that is being closed.
    """

    max_idle_per_origin: int = 256
    idle_s: float = 4.0
    max_connections: int | None = None


@dataclass(frozen=True, slots=True)
class UpstreamStatistics:
    """Counts since the client was made; the first three are of this moment. ``closed_early``
    includes ``stale_retries``."""

    connections: int
    idle: int
    active: int
    opened: int
    reused: int
    stale_retries: int
    connect_failures: int
    timeouts: int
    broken: int
    closed_early: int
    aborted: int


class UpstreamClient:
    """Sends requests over kept connections. Belongs to one event loop.

    Args:
        limits: Bounds on connections.
        ssl_context: For https origins; by default the system's certificate authorities are trusted.
        tick_s: Deadlines are looked at this often, so a timeout comes up to *tick_s* late.
    """

    def __init__(
        self,
        limits: PoolLimits | None = None,
        ssl_context: ssl.SSLContext | None = None,
        tick_s: float = 0.1,
    ) -> None:
        self._limits = limits or PoolLimits()
        self._ssl_context = ssl_context
        self._tick_s = tick_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closing = False
        # The most recently used connection is last: it is taken first, so the others can grow old
        # and be closed.
        self._idle: dict[str, list[Connection]] = {}
        self._active: set[UpstreamResponse] = set()
        self._connections: set[Connection] = set()
        self._connecting = 0
        self._all_closed = asyncio.Event()
        self._opened = self._reused = self._stale_retries = self._connect_failures = 0
        self._timeouts = self._broken = self._closed_early = self._aborted = 0

    async def send(
        self,
        origin: Origin,
        method: bytes,
        target: bytes,
        headers: Sequence[Header],
        body: bytes,
        timeouts: Timeouts,
    ) -> UpstreamResponse:
        """Send one request; return once its answer's status, headers and first body byte (or its
        end) are here.

        A kept connection that turns out to be closed before a byte of the answer came is replaced
        by a fresh one, once. Cancelling the call closes the connection.

        Args:
            target: Path and query as on the wire; the origin's base path is put before it.
            headers: Without host, content-length and hop-by-hop headers, which are this client's
                own business.
        Raises:
            UpstreamError: See `router.upstream.errors`.
            ValueError: A method, target or header that would break the framing of the request.
        """
        head = request_head(origin, method, target, headers, len(body))
        idle = self._take_idle(origin)
        if idle is not None:
            try:
                return await self._exchange(idle, head, body, timeouts)
            except ClosedBeforeResponse:
                self._stale_retries += 1
        connection = await self._open(origin, timeouts)
        return await self._exchange(connection, head, body, timeouts)

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
        """Send one small request and read the whole answer: ``(status, headers, body)``.

        It takes no longer than the three timeouts together, however slowly the body trickles.

        Raises:
            ResponseTooLarge: The body is longer than *max_bytes*; no more than a buffer of it was
                read.
            UpstreamError: As for `send`.
        """
        limit_s = timeouts.connect_s + timeouts.first_byte_s + timeouts.idle_s
        try:
            async with timeout(limit_s):
                return await self._fetch(origin, method, target, body, timeouts, max_bytes, headers)
        except asyncio.TimeoutError:
            self._timeouts += 1
            raise IdleTimeout(
                f"{origin}: answer not complete in {limit_s:g} s", received=True
            ) from None

    async def close(self) -> None:
        """Close every connection, also those at work, and return when the sockets are gone."""
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        for connection in tuple(self._connections):
            connection.abort()
        while self._connections:
            self._all_closed.clear()
            await self._all_closed.wait()

    def close_idle(self, origin: Origin) -> None:
        """Close the kept connections to *origin*, as for a replica that was removed."""
        for connection in self._idle.pop(origin.key, ()):
            connection.abort()

    def statistics(self) -> UpstreamStatistics:
        return UpstreamStatistics(
            connections=len(self._connections),
            idle=sum(map(len, self._idle.values())),
            active=len(self._active),
            opened=self._opened,
            reused=self._reused,
            stale_retries=self._stale_retries,
            connect_failures=self._connect_failures,
            timeouts=self._timeouts,
            broken=self._broken,
            closed_early=self._closed_early,
            aborted=self._aborted,
        )

    # The owner's side of a connection.

    def connection_opened(self, connection: Connection) -> None:
        self._connections.add(connection)
        self._opened += 1
        if self._closing:
            connection.abort()

    def exchange_ended(self, response: UpstreamResponse) -> None:
        self._active.discard(response)
        if response.complete:
            return
        if response.error is None:
            self._aborted += 1
        elif isinstance(response.error, FirstByteTimeout | IdleTimeout):
            self._timeouts += 1
        elif isinstance(response.error, ResponseBroken):
            self._broken += 1
        else:
            self._closed_early += 1

    def recycle(self, connection: Connection) -> None:
        kept = self._idle.setdefault(connection.origin.key, [])
        if self._closing or len(kept) >= self._limits.max_idle_per_origin:
            connection.abort()
            return
        assert self._loop is not None
        connection.idle_since = self._loop.time()
        kept.append(connection)

    def connection_closed(self, connection: Connection) -> None:
        self._connections.discard(connection)
        kept = self._idle.get(connection.origin.key)
        if kept is not None and connection in kept:
            kept.remove(connection)
        if not self._connections:
            self._all_closed.set()

    # Steps

    def _take_idle(self, origin: Origin) -> Connection | None:
        kept = self._idle.get(origin.key)
        while kept:
            connection = kept.pop()
            if not connection.closed:
                self._reused += 1
                return connection
        return None

    async def _exchange(
        self, connection: Connection, head: bytes, body: bytes, timeouts: Timeouts
    ) -> UpstreamResponse:
        assert self._loop is not None
        response = connection.start(head, body, timeouts, self._loop)
        self._active.add(response)
        try:
            await response.wait_for_first_byte()
        except BaseException:
            response.abort()
            raise
        return response

    async def _open(self, origin: Origin, timeouts: Timeouts) -> Connection:
        if self._closing:
            raise RuntimeError("the upstream client is closed")
        self._make_room(origin)
        self._arm()
        self._connecting += 1
        try:
            connection = await self._connect(origin, timeouts.connect_s)
        except ConnectFailed:
            self._connect_failures += 1
            raise
        finally:
            self._connecting -= 1
        return connection

    async def _connect(self, origin: Origin, connect_s: float) -> Connection:
        assert self._loop is not None
        connection = Connection(self, origin)
        context = self._tls() if origin.tls else None
        connect = self._loop.create_connection(
            lambda: connection, origin.host, origin.port, ssl=context
        )
        task = self._loop.create_task(connect)
        task.add_done_callback(_retrieve)
        try:
            await asyncio.wait((task,), timeout=connect_s)
            if not task.done():
                raise ConnectTimeout(f"{origin}: no connection in {connect_s:g} s")
            task.result()
        except OSError as error:
            raise ConnectFailed(
                f"{origin}: no connection: {error.strerror or type(error).__name__}"
            ) from error
        except BaseException:
            task.cancel()
            connection.abort()
            # uvloop closes the socket of a cancelled attempt without a word to the protocol.
            self.connection_closed(connection)
            raise
        return connection

    def _tls(self) -> ssl.SSLContext:
        if self._ssl_context is None:
            self._ssl_context = ssl.create_default_context()
        return self._ssl_context

    def _make_room(self, origin: Origin) -> None:
        """Stay within the bound on connections, at the cost of an idle one if there is any."""
        bound = self._limits.max_connections
        if bound is None or len(self._connections) + self._connecting < bound:
            return
        for kept in self._idle.values():
            if kept:
                oldest = kept.pop(0)
                self._connections.discard(oldest)
                oldest.abort()
                return
        raise ConnectionLimitReached(f"{origin}: all of max_connections {bound} are at work")

    async def _fetch(
        self,
        origin: Origin,
        method: bytes,
        target: bytes,
        body: bytes,
        timeouts: Timeouts,
        max_bytes: int,
        headers: Sequence[Header],
    ) -> tuple[int, list[Header], bytes]:
        response = await self.send(origin, method, target, headers, body, timeouts)
        content = bytearray()
        try:
            while (chunk := await response.read_chunk()) is not None:
                content += chunk
                if len(content) > max_bytes:
                    raise ResponseTooLarge(
                        f"{origin}: answer longer than max_bytes {max_bytes}", received=True
                    )
        finally:
            response.abort()
        return response.status, response.headers, bytes(content)

    def _arm(self) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        if self._timer is None:
            self._timer = self._loop.call_later(self._tick_s, self._tick)

    def _tick(self) -> None:
        """End what is over its deadline, close what was idle for too long."""
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


def _retrieve(task: asyncio.Task[object]) -> None:
    """Look at the result of a connection attempt nobody waits for any more, so that its failure is
    not logged as lost."""
    if not task.cancelled():
        task.exception()
