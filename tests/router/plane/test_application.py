"""Requests for the application behind the plane: the compiled data plane on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

from tests.router.plane.server import plane_server
from tests.router.plane.test_connections import no_descriptor_left
from tests.support.http_client import connect
from tests.support.waiting import eventually

BURST = 16


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve one request."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
    writer.close()


async def answer_without_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send a body until the connection is closed."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n")
    await reader.read()
    writer.close()


async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve nobody."""
    writer.close()


async def test_while_the_application_ends_first_its_clients_get_a_response(tmp_path: Path) -> None:
    """The plane listens until all behind it has ended, and reset whoever asked meanwhile: probes,
    scrapes, and clients that might have asked another router."""
    async with (
        plane_server(control_path=f"{tmp_path}/control") as served,
        connect(served.port) as client,
    ):
        found = await client.ask("GET", "/application")
        assert (found.status, found.error["code"]) == (503, "shutting_down")
        assert found.headers["connection"] == "close"
        assert await client.is_closed()


async def test_an_application_without_descriptors_has_its_clients_told(tmp_path: Path) -> None:
    """The event loop of uvicorn (libuv) then accepts connections and closes them, so that they
    leave the queue; the clients were reset."""
    path = f"{tmp_path}/control"
    async with (
        await asyncio.start_unix_server(close, path),
        plane_server(control_path=path) as served,
        connect(served.port) as client,
    ):
        for _ in range(2):
            found = await client.ask("GET", "/application")
            assert (found.status, found.error["code"]) == (503, "overloaded")


async def test_a_plane_without_descriptors_tells_the_clients_of_the_application(
    tmp_path: Path,
) -> None:
    """It needs one for each; the clients were reset, and no shortage was counted."""
    path = f"{tmp_path}/control"
    async with (
        await asyncio.start_unix_server(answer, path),
        plane_server(control_path=path) as served,
        connect(served.port) as client,
    ):
        await eventually(lambda: served.clients() == 1, "it is accepted")
        with no_descriptor_left():
            found = await client.ask("GET", "/application")
        assert (found.status, found.error["code"]) == (503, "overloaded")
        assert served.refusals == ["reserve"]
        assert (await client.ask("GET", "/application")).status == 200


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


async def test_a_head_request_for_a_body_without_end_gets_its_head(tmp_path: Path) -> None:
    """A recording of a cache has none: the client waited for its head, or the next one, for ever,
    and the recording went on."""
    path, ended = f"{tmp_path}/control", asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answer_without_end(reader, writer)
        ended.set()

    async with (
        await asyncio.start_unix_server(serve, path),
        plane_server(control_path=path) as served,
        connect(served.port) as client,
    ):
        await client.send("HEAD", "/application")
        assert await client.read_head() == 200
        assert (await client.ask("GET", "/served")).status == 200
        await eventually(ended.is_set, "the application need not go on")
