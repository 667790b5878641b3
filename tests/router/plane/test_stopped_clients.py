"""Clients that have stopped sending, which look like those that have closed: before a replica, on
real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from async_timeout import timeout

from router.plane.attempts import Attempt
from router.plane.proxy_types import End
from tests.router.proxy_server import ProxyServer, proxy_server
from tests.router.raw_http import RawConnection, raw_server
from tests.support.http_client import HttpClient, connect
from tests.support.waiting import DEADLINE_S, eventually

LAST = b"ok"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
PROBES = 3


@dataclass
class Replica:
    """It responds with *first*, and with the rest once *go* is set."""

    first: bytes
    has_length: bool
    go: asyncio.Event = field(default_factory=asyncio.Event)
    is_asked: bool = False

    async def serve(self, connection: RawConnection) -> None:
        """The only request of a connection."""
        await connection.read_request()
        self.is_asked = True
        if self.first:
            await connection.send(self._head())
            await self._send(connection, self.first)
        await self.go.wait()
        if not self.first:
            await connection.send(self._head())
        await self._send(connection, LAST)
        if not self.has_length:
            await connection.send_chunk(b"")

    def _head(self) -> bytes:
        length = len(self.first + LAST)
        framing = f"content-length: {length}" if self.has_length else "transfer-encoding: chunked"
        return f"HTTP/1.1 200 OK\r\n{framing}\r\n\r\n".encode()

    async def _send(self, connection: RawConnection, data: bytes) -> None:
        await (connection.send(data) if self.has_length else connection.send_chunk(data))


@contextlib.asynccontextmanager
async def under_way(
    version: str, first: bytes, has_length: bool
) -> AsyncIterator[tuple[ProxyServer, HttpClient, Replica]]:
    """A request that its replica has, and whose first part, if any, its client has read."""
    replica = Replica(first, has_length)
    async with (
        raw_server(replica.serve) as server,
        proxy_server([Attempt("r0", server.origin)]) as proxy,
        connect(proxy.port) as client,
    ):
        await client.write(f"GET /x HTTP/{version}\r\nhost: x\r\n\r\n".encode())
        await eventually(lambda: replica.is_asked, "the replica has it")
        if first:
            assert await client.read_head() == 200
            is_chunked = version == "1.1" and not has_length
            read = client.read_piece() if is_chunked else client.reader.readexactly(len(first))
            assert await read == first
        yield proxy, client, replica


async def probed(client: HttpClient, version: str, first: bytes, has_length: bool) -> bytes:
    """Whatever the plane sends to learn whether its client has left."""
    if first:
        expected = b"" if has_length or version == "1.0" else b"0" * PROBES
    else:
        expected = CONTINUE * PROBES if version == "1.1" else b""
    async with timeout(DEADLINE_S):
        found = await client.reader.readexactly(len(expected))
    assert found == expected
    return found


@pytest.mark.parametrize("first", [b"", b"begun "])
@pytest.mark.parametrize("has_length", [False, True])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_client_that_stops_sending_loses_nothing_of_its_response(
    version: str, has_length: bool, first: bytes
) -> None:
    """Neither before its first byte nor in the middle, for whatever is sent to find out who has
    left."""
    async with under_way(version, first, has_length) as (proxy, client, replica):
        client.writer.write_eof()
        said = await probed(client, version, first, has_length)
        replica.go.set()
        rest = said + await client.reader.read()
        if first and (has_length or version == "1.0"):
            assert rest == LAST
        elif first:
            assert rest == b"0" * PROBES + b"2\r\nok\r\n0\r\n\r\n"
        else:
            head, _, body = rest.removeprefix(said).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            is_chunked = version == "1.1" and not has_length
            assert body == (b"2\r\nok\r\n0\r\n\r\n" if is_chunked else LAST)
        await proxy.recorder(End.COMPLETED)


@pytest.mark.parametrize("has_length", [False, True])
@pytest.mark.parametrize("first", [b"", b"begun "])
async def test_a_client_that_stops_sending_and_then_breaks_off_is_noticed(
    first: bytes, has_length: bool
) -> None:
    """The reset comes on a connection that has nothing more to be read."""
    async with under_way("1.1", first, has_length) as (proxy, client, _):
        client.writer.write_eof()
        await probed(client, "1.1", first, has_length)
        client.leave(reset=True)
        await proxy.recorder(End.CLIENT_LEFT)
