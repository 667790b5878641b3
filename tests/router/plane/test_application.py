"""Requests for the application behind the plane: the compiled data plane on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import pytest

from tests.router.plane.server import plane_server
from tests.support.http_client import connect
from tests.support.waiting import eventually

BURST = 16


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve one request."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
    writer.close()


async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve nobody, as uvicorn once it stops."""
    writer.close()


@pytest.mark.parametrize("ends", ["gone", "closing"])
async def test_while_the_application_ends_first_its_clients_get_a_response(
    tmp_path: Path, ends: str
) -> None:
    """The plane listens until all behind it has ended, and reset whoever asked meanwhile: probes,
    scrapes, and clients that might have asked another router."""
    path = f"{tmp_path}/control"
    with socket.socket(socket.AF_UNIX) as behind:
        behind.bind(path)
        async with contextlib.AsyncExitStack() as stack:
            if ends == "closing":
                behind.listen(1)
                application = await asyncio.start_unix_server(close, sock=behind, backlog=1)
                await stack.enter_async_context(application)
            served = await stack.enter_async_context(plane_server(control_path=path))
            client = await stack.enter_async_context(connect(served.port))
            found = await client.ask("GET", "/application")
            assert (found.status, found.error["code"]) == (503, "shutting_down")
            assert found.headers["connection"] == "close"
            assert await client.is_closed()


async def test_a_burst_waits_until_the_application_takes_its_connections(tmp_path: Path) -> None:
    """Its socket's queue holds 2,048 at most, and 128 where the kernel is older than 5.4: beyond
    that the plane reset its clients, while the application was only busy for a moment."""
    path = f"{tmp_path}/control"
    with socket.socket(socket.AF_UNIX) as behind:
        behind.bind(path)
        behind.listen(1)
        async with plane_server(control_path=path) as served, contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(connect(served.port)) for _ in range(BURST)]
            await eventually(lambda: served.clients() == BURST, "they are accepted")
            for client in clients:
                await client.send("GET", "/application")
            await served.gets_around()
            async with await asyncio.start_unix_server(answer, sock=behind, backlog=1):
                for client in clients:
                    assert (await client.read_answer()).status == 200
