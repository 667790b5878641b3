"""Asks replicas about themselves: small GETs over plain HTTP, for as long as the router runs.

aiohttp takes 175 microseconds of CPU time for one over a kept connection, and some 450 over a new
one; this takes 18 and 55. With 64 replicas that is most of an idle router's cost, and with 1,024 a
third of a core. Where a probe needs more than a connection to one address, the router's usual
client makes it. Could that be had within twice these figures, this file would go.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

from async_timeout import timeout
from typing_extensions import override

from kvevents.lookups import addresses
from router._core import BodyReader, read_response_head
from router.config.origin import KEPT_S, Allows, Header, Origin, Timeouts
from router.fleet.client import TARGET, UpstreamClient
from router.fleet.client_errors import (
    ClosedBeforeResponse,
    KeptConnectionClosed,
    ResponseBroken,
    ResponseTooLarge,
    UpstreamError,
)

_SWEEPS = 4
"""Looks at unused connections in the time that one is kept."""
_CLOSED = "closed the connection before its response"
_LINE = re.compile(rb"[^\x00-\x08\x0a-\x1f\x7f]*")
_Answer: TypeAlias = "asyncio.Future[tuple[int, bytes]]"
_Place: TypeAlias = tuple[str, "Allows | None"]
"""The key of shared connections: their origin, and the rule on addresses."""


class ProbeFetch:
    """`Fetch` of a watcher. Belongs to one event loop.

    Args:
        client: Makes the others' connections, and explains failed ones.
    """

    def __init__(self, client: UpstreamClient) -> None:
        self._client = client
        self._kept: dict[_Place, list[_Connection]] = {}
        self._sweeping: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def __call__(
        self, origin: Origin, path: str, headers: Sequence[Header], timeout_s: float, max_bytes: int
    ) -> tuple[int, bytes]:
        async with timeout(timeout_s):
            only = None if origin.tls else await self._only_address(origin)
            if only is None:
                return await self._by_client(origin, path, headers, timeout_s, max_bytes)
            asked = _request(origin, path, headers)
            kept = self._kept.get((origin.key, origin.allows))
            if kept:
                try:
                    return await self._ask(kept.pop(), origin, asked, max_bytes)
                except KeptConnectionClosed:
                    pass  # the server may have closed it for its age
            return await self._ask(await self._connect(origin, only), origin, asked, max_bytes)

    def close(self) -> None:
        self._is_closed = True
        self._close_kept(until=math.inf)

    def _sweep(self) -> None:
        """Close what is kept too long by the next time: one timer, and few wakes, for all."""
        self._sweeping = None
        self._close_kept(until=asyncio.get_running_loop().time() + KEPT_S / _SWEEPS)
        self._sweep_later()

    def _sweep_later(self) -> None:
        if self._kept and self._sweeping is None:
            loop = asyncio.get_running_loop()
            self._sweeping = loop.call_later(KEPT_S / _SWEEPS, self._sweep)

    def _close_kept(self, until: float) -> None:
        for connection in [each for kept in self._kept.values() for each in kept]:
            if connection.kept_until <= until:
                connection.close()

    async def _only_address(self, origin: Origin) -> str | None:
        """Return the address to connect to; None for several, or without an allowed one."""
        try:
            found = origin.allowed(await addresses(origin.host))
        except OSError:
            return None
        return found[0] if len(found) == 1 else None

    async def _by_client(
        self, origin: Origin, path: str, headers: Sequence[Header], timeout_s: float, max_bytes: int
    ) -> tuple[int, bytes]:
        phases = Timeouts(timeout_s, timeout_s, timeout_s)
        return await self._client.fetch(origin, path.encode("ascii"), phases, max_bytes, headers)

    async def _connect(self, origin: Origin, address: str) -> _Connection:
        create = asyncio.get_running_loop().create_connection
        try:
            _, connection = await create(_Connection, address, origin.port)
        except (OSError, MemoryError) as error:
            raise self._client.no_connection(error, origin) from None
        self._client.reached(origin)
        return connection

    async def _ask(
        self, connection: _Connection, origin: Origin, asked: bytes, max_bytes: int
    ) -> tuple[int, bytes]:
        try:
            found = await connection.ask(origin, asked, max_bytes)
        except BaseException:
            connection.close()
            raise
        if self._is_closed or not connection.is_reusable:
            connection.close()
        else:
            self._keep((origin.key, origin.allows), connection)
        return found

    def _keep(self, place: _Place, connection: _Connection) -> None:
        kept = self._kept.setdefault(place, [])
        kept.append(connection)

        def forget() -> None:
            if connection in kept:
                kept.remove(connection)
            if not kept and self._kept.get(place) is kept:
                del self._kept[place]

        connection.keep(forget)
        self._sweep_later()


class _Connection(asyncio.Protocol):
    """One connection, for one request after the other."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._answer: _Answer | None = None
        self._origin: Origin | None = None
        self.kept_until = math.inf
        self._on_unkept: Any = None
        self._was_used = self.is_reusable = False
        self._begin(0)

    def _begin(self, max_bytes: int) -> None:
        self._max_bytes, self._unread = max_bytes, b""
        self._status, self._until_close = 0, False
        self._body: BodyReader | None = None
        self._content: list[bytes] = []

    async def ask(self, origin: Origin, asked: bytes, max_bytes: int) -> tuple[int, bytes]:
        """Return status and body of the response.

        Raises:
            UpstreamError: No response.
        """
        self._no_longer_kept()
        if self._transport.is_closing():
            raise KeptConnectionClosed(f"{origin}: {_CLOSED}")
        self._begin(max_bytes)
        self._origin, self.is_reusable = origin, False
        answer: _Answer = asyncio.get_running_loop().create_future()
        self._answer = answer
        self._transport.write(asked)
        try:
            return await answer
        finally:
            self._answer, self._was_used = None, True

    def keep(self, forget: Any) -> None:
        """Keep it for a while; *forget* is called when it is no longer kept."""
        self._on_unkept = forget
        self.kept_until = asyncio.get_running_loop().time() + KEPT_S

    def close(self) -> None:
        self._no_longer_kept()
        self._transport.abort()

    def _no_longer_kept(self) -> None:
        forget, self._on_unkept = self._on_unkept, None
        if forget is not None:
            forget()

    # --- what comes -------------------------------------------------------------------------------

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    @override
    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.close()  # unsolicited
            return
        if self._body is None:
            data = self._take_head(self._unread + data)
        if self._body is not None:
            self._take_body(self._body, data)

    @override
    def connection_lost(self, error: Exception | None) -> None:
        self._no_longer_kept()
        self.is_reusable = False
        if self._body is not None and self._until_close and error is None:
            self._succeed()
        elif self._body is not None or self._unread:
            self._fail(ResponseBroken, "the connection was closed before the end of the response")
        else:
            self._fail(KeptConnectionClosed if self._was_used else ClosedBeforeResponse, _CLOSED)

    def _take_head(self, data: bytes) -> bytes:
        """Read the head, without interim responses before it; return what is behind it."""
        while self._body is None:
            head = read_response_head(data)
            if head is None:
                self._unread = data
                return b""
            if not isinstance(head, dict):
                self._fail(ResponseBroken, "the response is not HTTP")
                return b""
            data = data[head["used"] :]
            if head["status"] >= 200:
                self._status, self.is_reusable = head["status"], head["keeps_alive"]
                self._until_close = head["framing"] == "until_close"
                self._body = BodyReader(head["framing"], head["length"])
        return data

    def _take_body(self, body: BodyReader, data: bytes) -> None:
        while not body.has_ended:
            used, payload, _, is_bad = body.next(data)
            self._content.append(payload)
            if is_bad:
                self._fail(ResponseBroken, "the response is not HTTP")
                return
            if body.payload_bytes > self._max_bytes:
                self._fail(ResponseTooLarge, f"response longer than max_bytes {self._max_bytes}")
                return
            data = data[used:]
            if not data:
                break
        if body.has_ended:
            self.is_reusable = self.is_reusable and not data
            self._succeed()

    def _succeed(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((self._status, b"".join(self._content)))

    def _fail(self, kind: type[UpstreamError], rule: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(kind(f"{self._origin}: {rule}"))


def _request(origin: Origin, path: str, headers: Sequence[Header]) -> bytes:
    """Encode a request.

    Raises:
        ValueError: A path or a header would break its framing.
    """
    if not TARGET.fullmatch(path.encode("ascii")):
        raise ValueError("request: the target must begin with / and hold visible ASCII without #")
    target = origin.target_prefix + path.encode("ascii")
    lines = [b"GET %b HTTP/1.1" % target, b"Host: " + origin.host_header]
    lines += [b"%b: %b" % header for header in headers]
    if not all(map(_LINE.fullmatch, lines)):
        raise ValueError("request: a header must hold no control characters")
    return b"\r\n".join((*lines, b"", b""))
