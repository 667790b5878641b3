"""The client: aiohttp's, with the router's bounds, time limits and errors."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TypeVar

import aiohttp
from aiohappyeyeballs import AddrInfoType
from aiohttp.abc import AbstractResolver, ResolveResult
from async_timeout import timeout
from multidict import CIMultiDict
from typing_extensions import override
from yarl import URL

from kvevents.lookups import addresses, is_numeric
from router.config.origin import KEPT_S, Allows, Header, Origin, Timeouts
from router.errors import is_out_of_memory
from router.fleet.client_errors import (
    ClosedBeforeResponse,
    ConnectFailed,
    ConnectTimeout,
    FirstByteTimeout,
    IdleTimeout,
    KeptConnectionClosed,
    OutOfResources,
    ResponseBroken,
    ResponseTooLarge,
    UpstreamError,
)

_NOT_BY_ITSELF = ("accept", "accept-encoding", "content-type", "user-agent")
"""Headers that are sent only where the caller sets them."""
_MAX_REACHED = 16_384
TARGET = re.compile(rb"/[!-\"$-~]*")
"""Path and query of a request."""
_SHORTAGES = {
    errno.EMFILE: "open_files",
    errno.ENFILE: "open_files",
    errno.ENOBUFS: "buffers",
    errno.ENOMEM: "buffers",
}
_T = TypeVar("_T")


@dataclass(eq=False, repr=False)
class UpstreamResponse:
    """A response whose body is read as it comes."""

    response: aiohttp.ClientResponse
    first: bytes | None
    """The first part of its body; empty at its end."""
    origin: Origin
    idle_s: float
    """The longest silence."""

    def __post_init__(self) -> None:
        self.status = self.response.status
        self.headers: list[Header] = [
            (name.lower(), value) for name, value in self.response.raw_headers
        ]
        """The headers as they came, names in lower case."""

    async def read_chunk(self) -> bytes | None:
        """The next piece of the body; None at its end.

        Raises:
            IdleTimeout: It was silent for too long.
            ResponseBroken: It was cut off.
        """
        piece, self.first = self.first, None
        if piece is None:
            piece = await self._next_piece()
        return piece or None

    async def _next_piece(self) -> bytes:
        rule = f"{self.origin}: response silent for more than {self.idle_s:g} s"
        try:
            return await _in_time(self.response.content.readany(), self.idle_s, rule, IdleTimeout)
        except BaseException as error:
            self.abort()
            # RuntimeError is aiohttp's where the client has been closed.
            if isinstance(error, (aiohttp.ClientError, OSError, RuntimeError)):
                raise ResponseBroken(_cut_off(self.origin)) from None
            raise

    def abort(self) -> None:
        """Read no more of it. The connection of a response that was read to its end is kept."""
        self.response.close()


class UpstreamClient:
    """Asks servers over kept connections. Belongs to one event loop.

    Args:
        trusted: Returns the context for https origins; None: the system's certificate authorities
            are trusted. A connection is used only while its context is returned.
        on_shortage: Called with what the system refused, as in `OutOfResources`.
        make_socket: Makes the socket of a connection; None: the library does.
    """

    def __init__(
        self,
        trusted: Callable[[], ssl.SSLContext | None] = lambda: None,
        on_shortage: Callable[[str], object] = lambda _: None,
        make_socket: Callable[[AddrInfoType], socket.socket] | None = None,
    ) -> None:
        self._trusted = trusted
        self._on_shortage = on_shortage
        self._make_socket = make_socket
        self._sessions: dict[Allows | None, aiohttp.ClientSession] = {}
        """Sessions by rule on addresses: no connection is shared between two rules."""
        self._reached: set[str] = set()
        self._is_closed = False

    async def send(
        self,
        origin: Origin,
        method: bytes,
        target: bytes,
        headers: Sequence[Header],
        body: bytes,
        timeouts: Timeouts,
    ) -> UpstreamResponse:
        """Send one request; return once the response's status, headers and first body byte (or its
        end) have arrived. Cancelling the call closes the connection.

        Args:
            target: Path and query as on the wire; the origin's base path is put before it.
            headers: Without host, content-length and hop-by-hop headers.
        Raises:
            UpstreamError: See `router.fleet.client_errors`.
            ValueError: A method, target or header that would break the framing of the request.
            RuntimeError: The client is closed.
        """
        url = _url(origin, target)
        if is_numeric(origin.host) and not origin.allowed([origin.host]):
            raise ConnectFailed(f"{origin}: no connection: {_not_allowed(origin.host)}")
        use = SimpleNamespace(is_kept=False)
        asked = self._session(origin.allows).request(
            method.decode("ascii"),
            url,
            headers=_fields(origin, headers),
            data=body or None,
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=None, connect=timeouts.connect_s),
            ssl=self._trusted() or True,
            trace_request_ctx=use,
        )
        limit_s = timeouts.connect_s + timeouts.first_byte_s
        rule = f"{origin}: no first byte within {limit_s:g} s"
        try:
            found = await _in_time(_with_first_byte(asked), limit_s, rule, FirstByteTimeout)
        except (OSError, aiohttp.ClientError, MemoryError) as error:
            raise self._failure(error, origin, timeouts, use.is_kept) from None
        self.reached(origin)
        return UpstreamResponse(*found, origin, timeouts.idle_s)

    async def fetch(
        self,
        origin: Origin,
        target: bytes,
        timeouts: Timeouts,
        max_bytes: int,
        headers: Sequence[Header] = (),
        method: bytes = b"GET",
        body: bytes = b"",
    ) -> tuple[int, bytes]:
        """Send one small request and read the whole response: `(status, body)`.

        It takes no longer than the three timeouts together, however slowly the body trickles. A
        request whose kept connection turns out to be closed is sent again, once.

        Args:
            headers: Without those that the client sets.
        Raises:
            ResponseTooLarge: The body is longer than *max_bytes*; at most one buffer beyond it was
                read.
            UpstreamError: See `send`.
        """
        limit_s = timeouts.connect_s + timeouts.first_byte_s + timeouts.idle_s
        try:
            async with timeout(limit_s):
                try:
                    response = await self.send(origin, method, target, headers, body, timeouts)
                except KeptConnectionClosed:
                    if method == b"GET":  # aiohttp has sent it twice by itself
                        raise
                    response = await self.send(origin, method, target, headers, body, timeouts)
                content = await _read_whole(response, max_bytes, origin)
        except asyncio.TimeoutError:
            raise IdleTimeout(f"{origin}: response not complete in {limit_s:g} s") from None
        return response.status, content

    def reached(self, origin: Origin) -> None:
        """Note that there was a connection to *origin*."""
        if len(self._reached) < _MAX_REACHED:
            self._reached.add(origin.key)

    def no_connection(self, error: OSError | MemoryError, origin: Origin) -> ConnectFailed:
        """Return the error for a failed connection; report a shortage."""
        if resource := self._shortage(error, origin):
            return self._out_of(resource, origin)
        why = _why(error) if isinstance(error, OSError) else "there is no memory"
        return ConnectFailed(f"{origin}: no connection: {why}")

    async def close(self) -> None:
        self._is_closed = True
        sessions, self._sessions = list(self._sessions.values()), {}
        for session in sessions:
            await session.close()

    # --- steps ------------------------------------------------------------------------------------

    def _session(self, allows: Allows | None) -> aiohttp.ClientSession:
        if self._is_closed:
            raise RuntimeError("the upstream client is closed")
        session = self._sessions.get(allows)
        if session is None:
            session = self._sessions[allows] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0,
                    keepalive_timeout=KEPT_S,
                    use_dns_cache=False,
                    resolver=_Resolver(allows),
                    socket_factory=self._make_socket,
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                trace_configs=[_traced()],
                auto_decompress=False,
                skip_auto_headers=_NOT_BY_ITSELF,
            )
        return session

    def _failure(
        self,
        error: OSError | aiohttp.ClientError | MemoryError,
        origin: Origin,
        times: Timeouts,
        is_kept: bool,
    ) -> UpstreamError:
        """Return the caller's error for *error*.

        Args:
            is_kept: True if the connection was kept from an earlier request; the server may have
                closed it and never seen this one.
        """
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            return ConnectTimeout(f"{origin}: no connection within {times.connect_s:g} s")
        if resource := self._shortage(error, origin):
            return self._out_of(resource, origin)
        if isinstance(error, aiohttp.ClientConnectorError):
            return ConnectFailed(f"{origin}: no connection: {_why(error.os_error)}")
        if isinstance(error, aiohttp.ClientPayloadError):
            return ResponseBroken(_cut_off(origin))
        if isinstance(error, (aiohttp.ClientConnectionError, OSError)):
            kind = KeptConnectionClosed if is_kept else ClosedBeforeResponse
            return kind(f"{origin}: closed the connection before its response")
        return ResponseBroken(f"{origin}: the response is not HTTP, or over a bound")

    def _out_of(self, resource: str, origin: Origin) -> OutOfResources:
        self._on_shortage(resource)
        message = f"{origin}: no connection: the router is out of {resource}"
        return OutOfResources(message, resource)

    def _shortage(self, error: BaseException, origin: Origin) -> str | None:
        """Return the resource that the system ran out of; None where the server cannot be
        reached."""
        if isinstance(error, MemoryError):
            return "memory"
        cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
        if not isinstance(cause, OSError):
            return None
        if cause.errno == errno.EADDRNOTAVAIL:
            # Of an origin never reached yet it rather means that its kind of address is not in use.
            return "ports" if origin.key in self._reached else None
        if cause.errno is None or isinstance(cause, socket.gaierror):
            # Looking a name up opens files as well, and does not report that it could not.
            return "open_files" if _has_no_free_file() else None
        return _SHORTAGES.get(cause.errno)


class _Resolver(AbstractResolver):
    """Looks names up, each time that a connection is made: a name may lead elsewhere by then."""

    def __init__(self, allows: Allows | None) -> None:
        self._allows = allows

    @override
    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        try:
            found = await addresses(host)
        except OSError as error:
            if is_out_of_memory(error):  # where a socket lacks it, it is a buffer
                raise MemoryError from error
            raise
        allowed = [each for each in found if self._allows is None or self._allows(each)]
        if not allowed:
            raise OSError(None, _not_allowed(found[0]))
        return [
            ResolveResult(
                hostname=host,
                host=each,
                port=port,
                family=socket.AF_INET6 if ":" in each else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for each in allowed
        ]

    @override
    async def close(self) -> None:
        """Nothing to close."""


def _traced() -> aiohttp.TraceConfig:
    """Make what notes, for each request, whether its connection is a kept one."""

    async def is_reused(_session: object, context: SimpleNamespace, _params: object) -> None:
        context.trace_request_ctx.is_kept = True

    async def is_made(_session: object, context: SimpleNamespace, _params: object) -> None:
        context.trace_request_ctx.is_kept = False  # the library repeats a GET over a new one

    found = aiohttp.TraceConfig()
    found.on_connection_reuseconn.append(is_reused)
    found.on_connection_create_end.append(is_made)
    return found


def _why(error: OSError) -> str:
    """Return the reason with the system's message, which asyncio leaves out."""
    text = error.strerror or str(error) or type(error).__name__
    if (
        error.errno is None
        or error.errno <= 0
        or isinstance(error, (ssl.SSLError, socket.gaierror))
    ):
        return text
    of_system = os.strerror(error.errno)
    return text if of_system in text else f"{text}: {of_system}"


def _not_allowed(address: str) -> str:
    return f"{address} lies where nothing may be connected to"


def _cut_off(origin: Origin) -> str:
    return f"{origin}: the connection was closed before the end of the response"


def _url(origin: Origin, target: bytes) -> URL:
    if not TARGET.fullmatch(target):
        raise ValueError("request: the target must begin with / and hold visible ASCII without #")
    return URL(f"{origin.key}{origin.base_path}{target.decode('ascii')}", encoded=True)


def _fields(origin: Origin, headers: Sequence[Header]) -> CIMultiDict[str]:
    fields = CIMultiDict({"Host": origin.host_header.decode("ascii")})
    for name, value in headers:
        fields.add(name.decode("ascii"), value.decode("latin-1"))
    return fields


async def _with_first_byte(
    asked: Awaitable[aiohttp.ClientResponse],
) -> tuple[aiohttp.ClientResponse, bytes]:
    """Return a response and the first bytes of its body; empty without one."""
    response = await asked
    try:
        return response, await response.content.readany()
    except BaseException:
        response.close()
        raise


async def _in_time(job: Awaitable[_T], limit_s: float, rule: str, error: type[UpstreamError]) -> _T:
    """Return what *job* returns, or raise *error* with the *rule* after so many seconds."""
    try:
        async with timeout(limit_s):
            return await job
    except aiohttp.ConnectionTimeoutError:
        raise
    except asyncio.TimeoutError:
        raise error(rule) from None


async def _read_whole(response: UpstreamResponse, max_bytes: int, origin: Origin) -> bytes:
    content = bytearray()
    try:
        while (chunk := await response.read_chunk()) is not None:
            content += chunk
            if len(content) > max_bytes:
                raise ResponseTooLarge(f"{origin}: response longer than max_bytes {max_bytes}")
    finally:
        response.abort()
    return bytes(content)


def _has_no_free_file() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return False
